"""The sub-commands train, evaluate, predict, resume, runs and compare; whatever is heavy is imported where it is used."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from raytraced.training.config import TrainConfig
from raytraced.training.run_folder import RunFolder, list_runs, open_run


def train(config: TrainConfig) -> int:
    """Train a model; ends with its accuracy, the experts it uses, and the run folder."""
    check_names(config)
    return _run(config, None)


def resume(
    run: str,
    output: str = "runs",
    device: str | None = None,
    threads: int | None = None,
    quiet: bool = False,
) -> int:
    """Go on with a run that was stopped, exactly where it was.

    Args:
        run: A run folder, or its name in the output folder.
        output: Folder that run folders are in.
        device: Another device than before.
        threads: Another number of CPU threads than before.
        quiet: Print nothing but the run folder.
    """
    folder = open_run(run, output)
    if folder.read_summary() is not None:
        print(f"{folder.path} is complete; raytraced evaluate {folder.path} tells its figures")
        return 0
    config = folder.config
    config = replace(config, quiet=quiet, device=device or config.device, threads=threads or config.threads)
    return _run(config, folder)


def evaluate(
    run: str,
    split: Literal["test", "validation", "train"] = "test",
    data: str | None = None,
    data_root: str | None = None,
    select: Literal["greedy", "sample"] | None = None,
    max_experts: int | None = None,
    seed: int = 0,
    batch_size: int = 1000,
    device: str = "auto",
    output: str = "runs",
    json: bool = False,
) -> None:
    """Tell a trained model's accuracy, loss, calibration error and use of experts.

    Args:
        run: A run folder, its name in the output folder, a model.safetensors file, or a shipped model's name.
        split: Which images.
        data: Data set (default: what it was trained on).
        data_root: Where data sets are kept.
        select: How experts are chosen (default: the most likely; sample: drawn from the seed).
        max_experts: At most so many experts an image.
        seed: Of the draws of --select sample.
        batch_size: Images at a time; changes nothing but memory and speed.
        device: cpu, cuda, …
        output: Folder that run folders are in.
        json: Print JSON in place of tables.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: must be at least 1")
    folder = None if find_model_file(run, output) else open_run(run, output)
    from raytraced.data import load as load_data
    from raytraced.training.reporting import evaluate_saved, print_evaluation

    source = find_model_file(run, output) or str(folder.path if folder else run)
    config = _config_beside(source)
    name = data or (config.data if config else None)
    root = data_root or (config.data_root if config else None)
    size = config.image_size if config else 32

    def get_data(card_data: str) -> Any:
        return load_data(name or card_data, root, size=size)

    options = {"select": select, "max_experts": max_experts}
    chosen = {key: value for key, value in options.items() if value is not None}
    evaluation, class_names = evaluate_saved(source, get_data, split, batch_size, device, seed, chosen)
    if json:
        _print_json(asdict(evaluation))
    else:
        print_evaluation(evaluation, class_names, title=f"{source}, {split} images")


def predict(run: str, images: list[str], device: str = "auto", output: str = "runs", json: bool = False) -> None:
    """Classify image files: the answer, how sure, and the experts it took.

    Args:
        run: A run folder, its name in the output folder, a model.safetensors file, or a shipped model's name.
        images: Image files, of any format that Pillow reads; they are brought to the size the model was trained on.
        device: cpu, cuda, …
        output: Folder that run folders are in.
        json: Print one JSON object a line in place of a table.
    """
    for image in images:
        if not Path(image).is_file():
            raise ValueError(f"{image}: there is no such file")
    source = find_model_file(run, output) or str(open_run(run, output).path)
    from raytraced.training.reporting import predict_files, print_predictions

    predictions = predict_files(source, images, device)
    if json:
        for prediction in predictions:
            _print_json(prediction._asdict(), indent=None)
    else:
        print_predictions(predictions)


def runs(output: str = "runs", json: bool = False) -> None:
    """List past runs: what was trained, how far it came, and how well.

    Args:
        output: Folder that run folders are in.
        json: Print one JSON object a line in place of a table.
    """
    from raytraced.training.tables import print_runs, run_row

    found = list_runs(output)
    if json:
        for run in found:
            _print_json(run_row(run), indent=None)
    elif found:
        print_runs(found)
    else:
        print(f"no runs in {output}; raytraced train makes one")


def compare(runs: list[str], output: str = "runs", picture: str = "compare.png") -> None:
    """Draw the curves of several runs into one picture, and print their figures side by side.

    Args:
        runs: Run folders, or their names in the output folder.
        output: Folder that run folders are in.
        picture: The PNG file to write.
    """
    folders = [open_run(run, output) for run in runs]
    from raytraced.analysis.curves import draw_curves
    from raytraced.training.tables import print_runs, short_names

    histories = dict(zip(short_names(folders), (folder.read_metrics() for folder in folders), strict=True))
    for name, history in histories.items():
        if not history:
            raise ValueError(f"{name}: has not finished an epoch yet, there is nothing to compare")
    if not picture.lower().endswith(".png"):
        raise ValueError(f"picture={picture}: must end in .png")
    draw_curves(histories, Path(picture))
    print_runs(folders)
    print(picture)


def check_names(config: TrainConfig) -> None:
    """Refuse a model or data set that does not exist, before anything slow happens."""
    import difflib

    from raytraced.data.catalog import NAMES
    from raytraced.models import check_model_name

    check_model_name(config.model)
    if config.data not in NAMES and not Path(config.data).expanduser().exists():
        close = difflib.get_close_matches(config.data, NAMES, n=1)
        hint = f"did you mean {close[0]}?" if close else f"must be a path or one of {', '.join(NAMES)}"
        raise ValueError(f"data={config.data}: no such data set; {hint}")


def find_model_file(run: str, output: str) -> str | None:
    """A file, a finished run or a shipped model's name, as what raytraced.load takes; None if it is none of these."""
    shipped = Path(__file__).parent.parent / "pretrained" / f"{run}.safetensors"
    if Path(run).is_file() or (not Path(run).exists() and shipped.is_file()):
        return run
    for folder in (Path(run), Path(output) / run):
        if (folder / "model.safetensors").is_file():
            return str(folder)
    return None


def _config_beside(source: str) -> TrainConfig | None:
    """The configuration of the run that a model belongs to, if it still lies there."""
    path = Path(source)
    for folder in (path, path.parent, path.parent.parent):
        if (folder / "config.yaml").is_file():
            return RunFolder(folder).config
    return None


def _run(config: TrainConfig, folder: RunFolder | None) -> int:
    """Train, and say how it ended; the last line is the run folder."""
    if config.precision == "bfloat16":
        # some CPUs advertise AMX without being able to use it: bf16 products would end the process. Before torch loads.
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    from raytraced.training.interrupt import Interrupted
    from raytraced.training.loop import train as run_training
    from raytraced.training.progress import make_reporter
    from raytraced.training.tables import print_outcome

    leads = os.environ.get("RANK", "0") == "0"
    try:
        run = run_training(config, folder, make_reporter(config.quiet))
    except Interrupted as stop:
        if leads:
            if not config.quiet:
                print(f"{stop}; saved. Go on with: raytraced resume {stop.run}")
            print(stop.run, flush=True)
        return stop.exit_code
    if leads:
        if not config.quiet:
            print_outcome(run)
        print(run.path)
    return 0


def _print_json(value: Any, indent: int | None = 2) -> None:
    print(json.dumps(value, indent=indent))

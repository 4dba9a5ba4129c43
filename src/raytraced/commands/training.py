"""The commands train, resume, evaluate, predict, runs and compare; whatever is heavy is imported where it is used."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from raytraced.training.config import TrainConfig
from raytraced.training.run_folder import RunFolder, list_runs, open_run


def train(config: TrainConfig) -> int:
    """Train a model; ends with its figures, the experts it uses, and the run folder."""
    from raytraced.models.table import find_model
    from raytraced.tasks.table import find_task

    find_model(config.model)  # a name that does not exist is refused before anything slow happens
    find_task(config.data)
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
    """Tell a trained model's figures: how good it is, how sure, and what it uses.

    Args:
        run: A run folder, its name in the output folder, a model.safetensors file, or a shipped model's name.
        split: Which part of the data.
        data: Data set (default: what it was trained on).
        data_root: Where data sets are kept.
        select: How experts are chosen (default: the most likely; sample: drawn from the seed).
        max_experts: At most so many experts a sample.
        seed: Of the draws of --select sample.
        batch_size: Samples at a time; changes nothing but memory and speed.
        device: cpu, cuda, …
        output: Folder that run folders are in.
        json: Print JSON in place of tables.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}: must be at least 1")
    source = find_source(run, output)
    config = _config_beside(source)
    from raytraced.saving import load
    from raytraced.tasks.table import find_task
    from raytraced.training.evaluation import evaluate as evaluate_on
    from raytraced.training.objective import Objective
    from raytraced.training.tables import print_evaluation
    from raytraced.training.world import World, choose_device

    model = load(source)
    assert model.card is not None
    name = data or (config.data if config else model.card.data)
    if name is None:
        raise ValueError(f"{run}: its card names no data; say which with --data")
    task = find_task(name)
    if model.card.task not in (None, task.name):
        raise ValueError(f"data={name}: is for models of the task {task.name}, {run} is of {model.card.task}")
    dataset = task.load_for(model, name, data_root or (config.data_root if config else None))
    asked = {key: value for key, value in (("select", select), ("max_experts", max_experts)) if value is not None}
    if asked and not model.answers_along_the_way:
        raise ValueError(f"{', '.join(asked)}: only for models that answer along the way, {model.name} does not")
    world = World(0, 1, choose_device(device, 0))
    predict = Objective(model.to(world.device), TrainConfig(), task).eval().predict
    result = evaluate_on(task, dataset, split, predict, world, batch_size=batch_size, seed=seed, full=True, **asked)
    if json:
        _print_json(result.as_dict())
    else:
        print_evaluation(result, task, dataset, title=f"{source}, {split} data")


def predict(run: str, files: list[str], device: str = "auto", output: str = "runs", json: bool = False) -> None:
    """Say what a model makes of files of one's own: the answer, how sure, and the experts it took.

    Args:
        run: A run folder, its name in the output folder, a model.safetensors file, or a shipped model's name.
        files: Image files, of any format that Pillow reads; they are brought to the size the model was trained on.
        device: cpu, cuda, …
        output: Folder that run folders are in.
        json: Print one JSON object a line in place of a table.
    """
    for file in files:
        if not Path(file).is_file():
            raise ValueError(f"{file}: there is no such file")
    source = find_source(run, output)
    from rich.console import Console

    from raytraced.saving import load
    from raytraced.tasks.table import named_task
    from raytraced.training.tables import make_table
    from raytraced.training.world import choose_device

    model = load(source)
    if model.card is None or model.card.task is None:
        raise ValueError(f"{source}: its card names no task, so nobody knows how to read files for it")
    rows = named_task(model.card.task).predict(model.to(choose_device(device, 0)), files)
    if json:
        for row in rows:
            _print_json(row, indent=None)
    else:
        Console().print(make_table(rows))


def runs(output: str = "runs", json: bool = False) -> None:
    """List past runs: what was trained, how far it came, and how well.

    Args:
        output: Folder that run folders are in.
        json: Print one JSON object a line in place of a table.
    """
    from raytraced.training.tables import print_runs, run_row

    rows = []
    for run in list_runs(output):
        try:
            rows.append(run_row(run))
        except ValueError as error:  # one bad folder must not hide the others
            print(f"raytraced: {run.path}: left out: {error}", file=sys.stderr)
    if json:
        for row in rows:
            _print_json(row, indent=None)
    elif rows:
        print_runs(rows)
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
    from raytraced.pictures.curves import draw_curves
    from raytraced.training.tables import print_runs, run_row, short_names

    histories = dict(zip(short_names(folders), (folder.read_metrics() for folder in folders), strict=True))
    first = next(iter(histories))
    for name, history in histories.items():
        if not history:
            raise ValueError(f"{name}: has not finished an epoch yet, there is nothing to compare")
        if history[0].keys() != histories[first][0].keys():
            raise ValueError(f"{name}: has other figures than {first}, they cannot be compared")
    if not picture.lower().endswith(".png"):
        raise ValueError(f"picture={picture}: must end in .png")
    draw_curves(histories, Path(picture))
    print_runs([run_row(folder) for folder in folders])
    print(picture)


def find_source(run: str, output: str) -> str:
    """A file, a finished run or a shipped model's name, as what raytraced.load takes."""
    shipped = Path(__file__).parent.parent / "pretrained" / f"{run}.safetensors"
    if Path(run).is_file() or (not Path(run).exists() and shipped.is_file()):
        return run
    for folder in (Path(run), Path(output) / run):
        if (folder / "model.safetensors").is_file():
            return str(folder)
    return str(open_run(run, output).path)


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
    from raytraced.training.reporter import make_reporter
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

"""What is done to runs: train, resume, evaluate, calibrate, predict, runs, compare; heavy imports are where they are used."""

import os
import sys
from dataclasses import replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from raytraced.reproduce.variants import SHIPPED
from raytraced.training.config import TrainConfig
from raytraced.training.run_folder import RunFolder, list_runs, open_run
from raytraced.words import check_seed, require

if TYPE_CHECKING:
    from raytraced.models.output import Model
    from raytraced.tasks.task import Task


def train(config: TrainConfig) -> int:
    """Train a model; ends with its figures, the experts it uses, and the run folder."""
    from raytraced.models.table import find_model
    from raytraced.tasks.table import find_task, whole_path

    find_model(config.model)  # a name that does not exist is refused before anything slow happens
    find_task(config.data).check_model(config.model)
    return _run(replace(config, data=whole_path(config.data)), None)


def resume(
    run: str,
    epochs: int | None = None,
    lr: float | None = None,
    lr_routing: float | None = None,
    lr_experts: float | None = None,
    data: str | None = None,
    output: str = "runs",
    device: str | None = None,
    threads: int | None = None,
    quiet: bool = False,
) -> int:
    """Go on with a run that was stopped, exactly where it was; or, where other options are given, as they say from there.

    Args:
        run: A run folder, or its name in the output folder.
        epochs: Passes over the training data, those done included; a finished run goes on too.
        lr: Another learning rate from here on.
        lr_routing: Another learning rate of the routing.
        lr_experts: Another learning rate of the experts.
        data: Where the data lies now, if it has moved.
        device: Another device than before.
        threads: Another number of CPU threads than before.
        quiet: Print nothing but the run folder.
    """
    folder = open_run(run, output)
    folder.refuse_writer()
    is_complete = folder.read_summary() is not None
    if is_complete and epochs is None:
        return _tell_complete(folder)
    from raytraced.tasks.table import whole_path

    config = _started_config(folder)
    given: dict[str, Any] = {"epochs": epochs, "lr": lr, "lr_routing": lr_routing, "lr_experts": lr_experts}
    given |= {"data": None if data is None else whole_path(data)}
    changes = {name: value for name, value in given.items() if value is not None and value != getattr(config, name)}
    if is_complete and "epochs" not in changes:
        return _tell_complete(folder)
    told = {name: {"from": getattr(config, name), "to": value} for name, value in changes.items()}
    config = replace(config, **changes)
    done = len(folder.read_metrics())
    require(not changes or config.epochs > done, "epochs", config.epochs, f"must be more than the {done} that are done")
    threads = config.threads if threads is None else threads
    config = replace(config, quiet=quiet, device=device or config.device, threads=threads)
    return _run(config, folder, told)


def _tell_complete(run: RunFolder) -> int:
    print(f"{run.path} is complete; raytraced evaluate {run.path} tells its figures, --epochs goes on")
    return 0


def _started_config(run: RunFolder) -> TrainConfig:
    """What a run was started or last continued with; says if config.yaml now tells something else."""
    from raytraced.training.state import newest_checkpoint

    stated = run.read_continuations()
    checkpoint = None if stated else newest_checkpoint(run.last)[0]
    known = stated[-1]["config"] if stated else checkpoint.state.get("config") if checkpoint else None
    if known is None:  # nothing is trained yet
        return run.config
    config, written = TrainConfig(**known), run.config
    if edited := [name for name, value in config.public().items() if value != getattr(written, name)]:
        told = f"config.yaml was edited ({', '.join(edited)}), the run goes on as it was started"
        print(f"raytraced: {told}; give changes as options: --epochs, --lr", file=sys.stderr)
    return config


def evaluate(
    run: str,
    split: Literal["test", "validation", "train"] = "test",
    data: str | None = None,
    data_root: str | None = None,
    select: Literal["greedy", "sample"] | None = None,
    max_experts: int | None = None,
    sure: float | Literal["calibrated"] | None = None,
    look: Literal["layer", "expert"] | None = None,
    seed: int = 0,
    batch_size: int = 1000,
    device: str = "auto",
    weights: Literal["last", "best"] = "last",
    output: str = "runs",
    json: bool = False,
) -> None:
    """Tell a trained model's figures: how good it is, how sure, and what it uses.

    Args:
        split: Which part of the data.
        select: How experts are chosen (default: the most likely; sample: drawn from the seed).
        seed: Of the draws of --select sample.
        batch_size: Samples at a time; changes nothing but memory and speed.
    """
    require(batch_size >= 1, "batch_size", batch_size, "must be at least 1")
    check_seed(seed)
    require(look is None or sure is not None, "look", look, "says where to look for who stops; give --sure too")
    source = find_source(run, output, weights)
    from raytraced.training.evaluation import evaluate as evaluate_on
    from raytraced.training.objective import Objective
    from raytraced.training.tables import print_evaluation
    from raytraced.training.world import World, choose_device

    model, task, dataset = open_model(source, data, data_root)
    given = {"select": select, "max_experts": max_experts, "sure": sure, "look": look}
    asked: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    along = [name for name in ("select", "max_experts") if name in asked]
    if along and not model.answers_along_the_way:
        raise ValueError(f"{', '.join(along)}: only for models that answer along the way, {model.name} does not")
    world = World(0, 1, choose_device(device))
    predict = Objective(model.to(world.device), TrainConfig(), task).eval().predict
    result = evaluate_on(task, dataset, split, predict, world, batch_size=batch_size, seed=seed, full=True, **asked)
    if json:
        print(dumps(result, indent=2))
    else:
        print_evaluation(result, task, dataset, title=f"{source}, {split} data")


def open_model(source: str, data: str | None, data_root: str | None) -> "tuple[Model, Task[Any], Any]":
    """A trained model, its task, and the data set it was trained on or another, as its run was configured."""
    from raytraced.saving import load
    from raytraced.tasks.table import find_task

    near = (Path(source), *Path(source).parents[:2])
    config = next((RunFolder(folder).config for folder in near if (folder / "config.yaml").is_file()), None)
    model = load(source)
    name = data or (config.data if config else model.card.data)
    if name is None:
        raise ValueError(f"{source}: its card names no data; say which with --data")
    task = find_task(name)
    if model.card.task not in (None, task.name):
        raise ValueError(f"data={name}: is for models of the task {task.name}, {source} is of {model.card.task}")
    return model, task, task.load_for(model, name, data_root or (config.data_root if config else None))


def calibrate(
    run: str,
    within: float = 0.1,
    look: Literal["layer", "expert"] = "layer",
    data: str | None = None,
    data_root: str | None = None,
    file: str | None = None,
    output: str = "runs",
    json: bool = False,
) -> None:
    """Find how sure an answer must be for a model to stop there, on validation data, and keep it in the model's file.

    Args:
        within: How many points of accuracy may be lost on validation data.
        file: Where to write the model (default: in place; a shipped model needs a place of its own).
    """
    source = find_source(run, output)
    from rich.console import Console

    from raytraced.saving import PRETRAINED, find_model_file, save
    from raytraced.training.calibration import calibration
    from raytraced.training.tables import make_table

    place = Path(file) if file else find_model_file(source)
    require(place.parent != PRETRAINED, "run", run, "is a shipped model and stays as it is; say where to with --file")
    model, task, dataset = open_model(source, data, data_root)
    found = calibration(model, task, dataset, within, look)
    model.card = replace(model.card, calibration=found)
    save(model, place)
    if json:
        print(dumps(found, indent=2))
        return
    rows = []
    for split in ("validation", "test"):
        for name, how in (("stopped", f"stops at {found['sure']:.4f}"), ("to_the_end", "to the end")):
            one = found[split][name]
            figures = {"accuracy": f"{one['accuracy']:.2%}", "experts": f"{one['experts']:.2f}"}
            rows.append({"data": split, "": how} | figures | {"multiply-adds": f"{one['macs']:,.0f}"})
    Console().print(make_table(rows))
    print(place)


def predict(
    run: str,
    files: list[str],
    top: int = 1,
    max_experts: int | None = None,
    sure: float | Literal["calibrated"] | None = None,
    sequence: str | None = None,
    weights: Literal["last", "best"] = "last",
    device: str = "auto",
    output: str = "runs",
    json: bool = False,
) -> None:
    """Say what a model makes of files of one's own: the answer, how sure, and the experts it took.

    Args:
        files: Image files or folders of them; images are brought to the size the model was trained on.
        top: How many of the likeliest answers to tell.
        sequence: A PNG file to draw the activation sequences of the first files into.
    """
    require(sequence is None or sequence.lower().endswith(".png"), "sequence", sequence, "must end in .png")
    for path in files:
        if not Path(path).exists():
            raise ValueError(f"{path}: there is no such file or folder")
    source = find_source(run, output, weights)
    from rich.console import Console

    from raytraced.saving import load
    from raytraced.tasks.table import named_task
    from raytraced.training.tables import make_table
    from raytraced.training.world import choose_device

    model = load(source)
    if model.card.task is None:
        raise ValueError(f"{source}: its card names no task, so nobody knows how to read files for it")
    picture = None if sequence is None else Path(sequence)
    asked = {"max_experts": max_experts, "sure": sure}
    rows = named_task(model.card.task).predict(model.to(choose_device(device)), files, top, asked, picture)
    if json:
        for row in rows:
            print(dumps(row))
    else:
        Console().print(make_table(rows))
        if sequence is not None:
            print(sequence)


def runs(output: str = "runs", json: bool = False) -> None:
    """List past runs: what was trained, how far it came, and how well."""
    from raytraced.training.tables import print_runs, run_row

    rows = []
    for run in list_runs(output):
        try:
            rows.append(run_row(run))
        except (ValueError, OSError) as error:  # one bad folder must not hide the others
            print(f"raytraced: {run.path}: left out: {error}", file=sys.stderr)
        except (LookupError, TypeError, AttributeError) as error:
            told = f"summary.json or metrics.jsonl is not what training wrote ({type(error).__name__}: {error})"
            print(f"raytraced: {run.path}: left out: {told}", file=sys.stderr)
    if json:
        for row in rows:
            print(dumps(row))
    elif rows:
        print_runs(rows)
    else:
        print(f"no runs in {output}; raytraced train makes one")


def compare(runs: list[str], output: str = "runs", picture: str = "compare.png") -> None:
    """Draw the curves of several runs into one picture, and print their figures side by side.

    Args:
        runs: Run folders, or their names in the output folder.
        picture: The PNG file to write.
    """
    folders = [open_run(run, output) for run in runs]
    from raytraced.training.curves import draw_curves
    from raytraced.training.tables import print_runs, run_row

    names = [folder.path.name for folder in folders]  # the whole path where two share one
    names = [name if names.count(name) == 1 else str(folder.path) for name, folder in zip(names, folders, strict=True)]
    histories = dict(zip(names, (folder.read_metrics() for folder in folders), strict=True))
    first = names[0]
    for name, history in histories.items():
        if not history:
            raise ValueError(f"{name}: has not finished an epoch yet, there is nothing to compare")
        if history[0].keys() != histories[first][0].keys():
            raise ValueError(f"{name}: has other figures than {first}, they cannot be compared")
    require(picture.lower().endswith(".png"), "picture", picture, "must end in .png")
    number, path = 1, Path(picture)
    while path.exists():  # never over a file that is there
        number += 1
        path = Path(picture).with_stem(f"{Path(picture).stem}-{number}")
    draw_curves(histories, path)
    print_runs([run_row(folder) for folder in folders])
    print(path)


def find_source(run: str, output: str, weights: str | None = None) -> str:
    """A file, a run or a shipped model's name, as what raytraced.load takes; weights None: there is no such option."""
    if Path(run).is_file() or (not Path(run).exists() and run in SHIPPED):
        return run
    for path in (Path(run), Path(output) / run):
        if weights != "best" and (path / "model.safetensors").is_file():
            return str(path)
    folder = open_run(run, output, SHIPPED)
    if weights == "best" and not folder.best.is_file():
        raise ValueError(f"{folder.path}: has finished no epoch yet, there are no best weights")
    if weights == "best":
        return str(folder.best)
    process = folder.writer()
    state = "is not over" if process is None else f"is being trained by process {process}"
    remedies = [f"`raytraced resume {folder.path}` goes on" if process is None else "wait for it"]
    remedies += [] if weights is None else ["--weights best takes the best epoch so far"]
    raise ValueError(f"{folder.path}: {state}; {', '.join(remedies)}")


def _run(config: TrainConfig, folder: RunFolder | None, changes: dict[str, Any] | None = None) -> int:
    """Train, or go on with changes, and say how it ended; the last line is the run folder."""
    if config.precision == "bfloat16":
        # some CPUs advertise AMX without being able to use it: bf16 products would end the process. Before torch loads.
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    from raytraced.training.interrupt import Interrupted
    from raytraced.training.loop import train as run_training
    from raytraced.training.reporter import make_reporter
    from raytraced.training.tables import print_outcome

    leads = os.environ.get("RANK", "0") == "0"
    try:
        run = run_training(config, folder, make_reporter(config.quiet), changes=changes)
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

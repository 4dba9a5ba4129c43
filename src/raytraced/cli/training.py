"""Commands on runs: train, resume, evaluate, calibrate, predict, runs, compare; heavy imports are where they are used."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from raytraced.cli.budgets import check_budget_options, check_without_route
from raytraced.errors import DivergedError, check_seed, check_threads, printable, require
from raytraced.io.finding import PRETRAINED, find_model_place, find_weights
from raytraced.models.dial import check_greedy
from raytraced.training.config import TrainConfig, make_config
from raytraced.training.run_folder import RunFolder, list_runs, open_run

if TYPE_CHECKING:
    from raytraced.models.output import Model
    from raytraced.tasks.task import Task


def train(config: TrainConfig) -> int:
    """Train a model; print its results, the experts that it uses, and the run folder."""
    from raytraced.models.registry import find_model
    from raytraced.tasks.registry import find_task, whole_path
    from raytraced.training.trackers.registry import find_trackers

    find_trackers(config.tracker)  # what does not exist is refused before anything slow happens
    find_model(config.model)
    find_task(config.data).check_model(config.model)
    return _run(replace(config, data=whole_path(config.data)), None)


def resume(
    run: str,
    epochs: int | None = None,
    lr: float | None = None,
    lr_routing: float | None = None,
    lr_experts: float | None = None,
    data: str | None = None,
    runs_dir: str = "runs",
    device: str | None = None,
    threads: int | None = None,
    tracker: str | None = None,
    quiet: bool = False,
) -> int:
    """Continue a run exactly where it was stopped, or with other options from there on.

    Args:
        run: A run folder, or its name in the runs folder.
        epochs: Passes over the training data, including those already done; a complete run can be trained further.
        lr: New learning rate.
        lr_routing: New learning rate of the routing.
        lr_experts: New learning rate of the experts.
        data: Path of the data, if it has moved.
        device: New device.
        threads: New number of CPU threads.
        tracker: Other trackers, several with commas (default: those that the run was started with).
        quiet: Print only the run folder.
    """
    from raytraced.training.trackers.registry import find_trackers

    check_threads(threads)
    find_trackers(tracker)
    folder = open_run(run, runs_dir)
    folder.refuse_writer()
    is_complete = folder.read_summary() is not None
    if is_complete and epochs is None:
        return _report_complete(folder)
    from raytraced.tasks.registry import whole_path

    config = _started_config(folder)
    asked: dict[str, Any] = {"epochs": epochs, "lr": lr, "lr_routing": lr_routing, "lr_experts": lr_experts}
    asked |= {"data": None if data is None else whole_path(data)}
    changes = {name: value for name, value in asked.items() if value is not None and value != getattr(config, name)}
    if is_complete and "epochs" not in changes:
        return _report_complete(folder)
    stated = {name: {"from": getattr(config, name), "to": value} for name, value in changes.items()}
    config = replace(config, **changes)
    done = len(folder.read_metrics())
    require(not changes or config.epochs > done, "epochs", config.epochs, f"must be more than the {done} that are done")
    threads = config.threads if threads is None else threads
    trackers = tracker or config.tracker
    config = replace(config, quiet=quiet, device=device or config.device, threads=threads, tracker=trackers)
    return _run(config, folder, stated)


def _report_complete(run: RunFolder) -> int:
    path = printable(run.path)
    print(f"{path} is complete; `raytraced evaluate {path}` prints its results, --epochs trains it further")
    return 0


def _started_config(run: RunFolder) -> TrainConfig:
    """The configuration that a run was started or last continued with; warns if config.yaml was edited since."""
    from raytraced.training.state import newest_checkpoint

    stated = run.read_continuations()
    checkpoint = None if stated else newest_checkpoint(run.last)[0]
    known = stated[-1]["config"] if stated else checkpoint.state.get("config") if checkpoint else None
    if known is None:  # nothing is trained yet
        return run.config
    config, written = make_config(known), run.config
    if edited := [name for name, value in config.public().items() if value != getattr(written, name)]:
        warning = f"config.yaml was edited ({', '.join(edited)}), but the run continues as it was started"
        print(f"raytraced: {warning}; give changes as options: --epochs, --lr", file=sys.stderr)
    return config


def evaluate(
    run: str,
    split: Literal["test", "validation", "train"] = "test",
    data: str | None = None,
    data_root: str | None = None,
    select: Literal["greedy", "sample"] | None = None,
    max_experts: int | None = None,
    stop: float | None = None,
    experts: float | None = None,
    effort: float | None = None,
    confidence: float | Literal["calibrated"] | None = None,
    exit_every: Literal["layer", "expert"] | None = None,
    seed: int = 0,
    batch_size: int = 1000,
    save_routes: str | None = None,
    routes: str | None = None,
    skip_bad: bool = False,
    device: str = "auto",
    memory: str | None = None,
    max_bytes: str | None = None,
    weights: Literal["last", "best"] = "last",
    runs_dir: str = "runs",
    json: bool = False,
) -> None:
    """Measure a trained model: accuracy or bits, calibration, experts and macs.

    Args:
        split: Part of the data set.
        select: How experts are chosen: greedy takes the most likely (default), sample draws them.
        seed: Seed of the draws of --select sample.
        max_bytes: Of a store: the most bytes that a byte or token may read, such as 20MB; further experts are left out.
        batch_size: Samples per batch; changes only memory and speed.
        save_routes: File to write the route of every sample into: which experts ran, in which order.
        routes: File of such routes: the same experts run again, in place of a choice.
    """
    if save_routes is not None:
        is_file = save_routes.endswith(".safetensors") and Path(save_routes).parent.is_dir()
        require(is_file, "save_routes", save_routes, "must end in .safetensors, in an existing folder")
    require(batch_size >= 1, "batch_size", batch_size, "must be at least 1")
    check_seed(seed)
    check_greedy(select, experts, effort)
    if routes is not None:
        chosen = {"select": select, "max_experts": max_experts, "stop": stop, "experts": experts, "effort": effort}
        check_without_route("--routes", **chosen, confidence=confidence)
    has_effect = exit_every is None or confidence is not None
    require(has_effect, "exit_every", exit_every, "has no effect without --confidence: give it too")
    source = find_source(run, runs_dir, weights)
    from raytraced.io.routes import load_routes, model_digest
    from raytraced.io.routes import save_routes as write_routes
    from raytraced.training.evaluation import evaluate as evaluate_on
    from raytraced.training.evaluation import follow_routes, predict_batch, record_routes
    from raytraced.training.run_tables import print_evaluation
    from raytraced.training.world import World, choose_device

    model, task, dataset = open_model(source, data, data_root, skip_bad, memory)
    options = {"select": select, "max_experts": max_experts, "confidence": confidence, "exit_every": exit_every}
    options |= {"stop": stop, "experts": experts, "effort": effort}
    asked: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    along = ("select", "max_experts", "stop", "experts", "effort")
    check_budget_options(model, source, **{name: options[name] for name in along})
    if max_bytes is not None:
        asked["max_bytes"] = parse_deadline(model, max_bytes)
    world = World(0, 1, choose_device(device, model))
    predict: Any = partial(predict_batch, model.to(world.device).eval())
    num, recorded = len(dataset.splits[split]), list[Any]()
    if routes is not None:
        saved = load_routes(routes, model, dataset.name, split, num)
        if saved.about.get("model_sha256") != model_digest(model):
            print(f"raytraced: {printable(routes)}: was recorded with other weights", file=sys.stderr)
        predict = follow_routes(predict, saved.of)
    if save_routes is not None:
        rule = "no model can follow routes of path_tokens=2; leave it out"
        require(getattr(model, "path_tokens", 1) == 1, "save_routes", save_routes, rule)
        predict = record_routes(predict, recorded)
    with naming(source):
        result = evaluate_on(task, dataset, split, predict, world, batch_size=batch_size, seed=seed, full=True, **asked)
    if save_routes is not None:
        write_routes(save_routes, model, dataset.name, split, recorded, num)
    if json:
        print(dumps(result, indent=2))
    else:
        print_evaluation(result, task, dataset, title=f"{source}, {split} data")


def parse_deadline(model: "Model", max_bytes: str) -> int:
    """The bytes that a token may read; refuses a model that reads nothing."""
    from raytraced.models.gpt import GPT
    from raytraced.store.reader import parse_size

    if not isinstance(model, GPT):
        raise ValueError(
            f"max_bytes={max_bytes}: is for models loaded from a store whose paths depend on tokens alone; leave it out"
        )
    return parse_size("max_bytes", max_bytes)


@contextmanager
def naming(source: str) -> Iterator[None]:
    """Begin the message about answers that are not finite with the place of the model."""
    try:
        yield
    except DivergedError as error:
        raise DivergedError(f"{source}: {error}") from error


def open_model(
    source: str, data: str | None, data_root: str | None, skip_bad: bool = False, memory: str | None = None
) -> "tuple[Model, Task[Any], Any]":
    """A trained model, its task, and the data set that it was trained on or another one, as its run was configured.

    The data of a run is that of its config.yaml. Of a model file alone, the card's data is opened if the catalogue has it.
    """
    from raytraced.io.saving import load
    from raytraced.tasks.registry import catalogued_data, find_task, named_task

    near = (Path(source), *Path(source).parents[:2])
    config = next((RunFolder(folder).config for folder in near if (folder / "config.yaml").is_file()), None)
    model = load(source, memory=memory)
    if model.card.task is not None:
        named_task(model.card.task, model.card.plugins)  # a task that is not here is refused by its name
    name = data or (config.data if config else catalogued_data(model.card))
    if name is None:
        raise ValueError(f"{source}: its card names no data set of the catalogue; give the data with --data")
    task = find_task(name)
    if model.card.task not in (None, task.name):
        raise ValueError(f"data={name}: is for models of the task {task.name}, but {source} is for {model.card.task}")
    root = data_root or (config.data_root if config else None)
    options = {"skip_bad": True} if skip_bad else {}
    task.check_options(options)
    return model, task, task.load_for(model, name, root, **options)


def calibrate(
    run: str,
    within: float | None = None,
    exit_every: Literal["layer", "expert"] | None = None,
    data: str | None = None,
    data_root: str | None = None,
    output: str | None = None,
    runs_dir: str = "runs",
    json: bool = False,
) -> None:
    """Find the confidence threshold for early exit and the table of budgets on validation data; store both in the model's file.

    A model of images gets a threshold. A raytraced model gets a table of the mean number of experts, the multiply-adds and
    the loss at several values of --stop, by which the options --experts and --effort of other commands are understood.

    Args:
        within: Points of accuracy that may be lost on validation data, for models with exits (default: 0.1).
        exit_every: Where the exits are: after every layer (default) or after every expert.
        output: The model file to write (default: the model's own file; required for a shipped model).
    """
    require(within is None or within >= 0, "within", within, "must be at least 0 points")
    if output is not None:
        require(output.endswith(".safetensors"), "output", output, "must end in .safetensors")
        require(Path(output).parent.is_dir(), "output", output, "its folder does not exist; make it first")
        require(not Path(output).is_dir(), "output", output, "is a folder; give the name of a file")
    source = find_source(run, runs_dir)
    from raytraced.io.finding import find_model_file
    from raytraced.io.saving import is_store, save
    from raytraced.tables import make_table, print_table
    from raytraced.training.calibration import calibration, has_dial, has_exits, measure_dial

    place = Path(output) if output else find_model_file(source, runs_dir)
    is_shipped = place.parent == PRETRAINED
    require(not is_shipped, "run", run, "is a shipped model, which is not changed; give a file to write with --output")
    rule = "is a store, which is not changed; calibrate the run, then write the store"
    require(not is_store(source), "run", run, rule)
    model, task, dataset = open_model(source, data, data_root)
    for name, value in (("within", within), ("exit_every", exit_every)):
        rule = f"is for models with exits, {model.name} has none; leave it out"
        require(value is None or has_exits(model), name, value, rule)
    points = 0.1 if within is None else within
    with naming(source):
        dial = measure_dial(model, task, dataset) if has_dial(model) else {}
        found = calibration(model, task, dataset, points, exit_every or "layer") if has_exits(model) or not dial else {}
    model.card = replace(model.card, calibration=found, dial=dial)
    save(model, place)
    if json:
        print(dumps(found | {"dial": dial}, indent=2))
        return
    rows = []
    for split in ("validation", "test") if found else ():
        for name, label in (("stopped", f"stops at {found['confidence']:.4f}"), ("to_the_end", "to the end")):
            one = found[split][name]
            figures = {"accuracy": f"{one['accuracy']:.2%}", "experts": f"{one['experts']:.2f}"}
            lost = "{:+.2f} … {:+.2f}".format(*found["interval"][split]) if name == "stopped" else ""
            figures |= {"macs": f"{one['macs']:,.0f}", "points lost (95 %)": lost}
            rows.append({"data": split, "": label} | figures)
    if rows:
        print_table(make_table(rows))
    formats = {"stop": "g", "experts": ".2f", "macs": ",.0f", "loss": ".4f"}
    if dial:
        print_table(
            make_table([{name: f"{row[name]:{form}}" for name, form in formats.items()} for row in dial["rows"]])
        )
    print(printable(place))


def predict(
    run: str,
    files: list[str],
    top: int = 1,
    max_experts: int | None = None,
    stop: float | None = None,
    experts: float | None = None,
    effort: float | None = None,
    confidence: float | Literal["calibrated"] | None = None,
    sequence: str | None = None,
    skip_bad: bool = False,
    weights: Literal["last", "best"] = "last",
    device: str = "auto",
    runs_dir: str = "runs",
    json: bool = False,
) -> None:
    """Predict the class of image files: the answer, its probability, and the number of experts that ran.

    Args:
        files: Image files, or folders of them; images are resized to the size that the model was trained on.
        top: Number of the most likely answers to print.
        sequence: PNG file to draw the activation sequences of the first files into.
    """
    require(sequence is None or sequence.lower().endswith(".png"), "sequence", sequence, "must end in .png")
    for path in files:
        if not Path(path).exists():
            raise ValueError(f"{path}: there is no such file or folder")
    source = find_source(run, runs_dir, weights)
    from raytraced.io.saving import load
    from raytraced.tables import make_table, print_table
    from raytraced.tasks.registry import named_task
    from raytraced.training.world import choose_device

    model = load(source)
    if model.card.task is None:
        raise ValueError(f"{source}: its card names no task, so it is unknown how to read files for it")
    picture = None if sequence is None else Path(sequence)
    check_budget_options(model, source, max_experts=max_experts, stop=stop, experts=experts, effort=effort)
    asked = {"max_experts": max_experts, "confidence": confidence, "stop": model.resolve_budget(stop, experts, effort)}
    task = named_task(model.card.task, model.card.plugins)
    with naming(source):
        rows = task.predict(model.to(choose_device(device)), files, top, asked, picture, skip_bad)
    if json:
        for row in rows:
            print(dumps(row))
    else:
        print_table(make_table(rows))
        if sequence is not None:
            print(printable(sequence))


def runs(runs_dir: str = "runs", json: bool = False) -> None:
    """List past runs: what was trained, how many epochs, and the results."""
    from raytraced.training.run_tables import print_runs, run_row

    rows = []
    for run in list_runs(runs_dir):
        try:
            rows.append(run_row(run))
        except (ValueError, OSError) as error:  # one bad folder must not hide the others
            print(f"raytraced: {printable(run.path)}: left out: {printable(error)}", file=sys.stderr)
        except (LookupError, TypeError, AttributeError) as error:
            reason = f"summary.json or metrics.jsonl is not what training wrote ({type(error).__name__}: {error})"
            print(f"raytraced: {printable(run.path)}: left out: {printable(reason)}", file=sys.stderr)
    if json:
        for row in rows:
            print(dumps(row))
    elif rows:
        print_runs(rows)
    else:
        print(f"no runs in {printable(runs_dir)}; `raytraced train` makes one")


def compare(runs: list[str], output: str = "compare.png", runs_dir: str = "runs") -> None:
    """Draw the curves of several runs into one picture, and print their results side by side.

    Args:
        runs: Run folders, or their names in the runs folder.
        output: The PNG file to write; an existing file is kept, the new one gets a number.
    """
    folders = [open_run(run, runs_dir) for run in runs]
    from raytraced.training.curves import draw_curves
    from raytraced.training.run_tables import print_runs, run_row

    names = [folder.path.name for folder in folders]  # the whole path where two share one
    names = [name if names.count(name) == 1 else str(folder.path) for name, folder in zip(names, folders, strict=True)]
    histories = dict(zip(names, (folder.read_metrics() for folder in folders), strict=True))
    first = names[0]
    for name, history in histories.items():
        if not history:
            raise ValueError(f"{name}: has not finished an epoch yet, there is nothing to compare")
        if history[0].keys() != histories[first][0].keys():
            raise ValueError(f"{name}: has other figures than {first}, they cannot be compared")
    require(output.lower().endswith(".png"), "output", output, "must end in .png")
    number, path = 1, Path(output)
    while path.exists():  # an existing file is never overwritten
        number += 1
        path = Path(output).with_stem(f"{Path(output).stem}-{number}")
    draw_curves(histories, path)
    print_runs([run_row(folder) for folder in folders])
    print(printable(path))


def find_source(run: str, runs_dir: str, weights: str | None = None) -> str:
    """Find the model of a run, a file or a shipped model, as `raytraced.load` takes it.

    Args:
        run: What `raytraced.io.finding.find_model_place` takes.
        runs_dir: Folder that holds run folders.
        weights: "last" or "best"; None where the command has no such option.

    Returns:
        A path, or a shipped model's name.
    """
    place = find_model_place(run, runs_dir)
    if place.parent == PRETRAINED:
        return run
    if not place.is_dir() or (weights != "best" and find_weights(place)):
        return str(place)
    folder = RunFolder(place)
    if weights == "best" and not folder.best.is_file():
        raise ValueError(f"{folder.path}: has no best weights: no epoch is complete yet")
    if weights == "best":
        return str(folder.best)
    process = folder.writer()
    state = "is not complete" if process is None else f"is being trained by process {process}"
    remedies = [f"`raytraced resume {folder.path}` continues it" if process is None else "wait for it"]
    remedies += [] if weights is None else ["--weights best takes the best epoch so far"]
    raise ValueError(f"{folder.path}: {state}; {', '.join(remedies)}")


def _run(config: TrainConfig, folder: RunFolder | None, changes: dict[str, Any] | None = None) -> int:
    """Train, or continue with changes, and print how it ended; the last line is the run folder."""
    if config.precision == "bfloat16":
        # Some CPUs advertise AMX but cannot use it: bf16 products would end the process. Set before torch is imported.
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    from raytraced.training.callbacks import make_reporter
    from raytraced.training.interrupt import Interrupted, ignore_signals_at_exit, listen
    from raytraced.training.loop import train as run_training
    from raytraced.training.run_tables import print_outcome

    leads = os.environ.get("RANK", "0") == "0"
    with listen():  # a signal that comes after the run is complete must not change the exit code
        try:
            run = run_training(config, folder, make_reporter(config.quiet), changes=changes)
        except Interrupted as stop:
            if leads:
                if not config.quiet:
                    print(printable(f"{stop}; saved. Continue with: raytraced resume {stop.run}"))
                print(printable(stop.run), flush=True)
            return stop.exit_code
        ignore_signals_at_exit()
        if leads:
            if not config.quiet:
                print_outcome(run)
            print(printable(run.path), flush=True)
        return 0

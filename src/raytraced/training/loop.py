"""The training loop, for every model, on one process or many: read it from top to bottom.

A run's whole future follows from its state (weights, optimizer, step, metrics so far): draws, batches and learning
rates are pure functions of the seed and the step. So a run that was stopped anywhere goes on exactly where it was.
"""

import importlib.util
import os
import platform
import tempfile
import time
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from raytraced.models.output import Model, num_parameters
from raytraced.saving import load, rebuild, save_tensors
from raytraced.tasks.table import find_task
from raytraced.tasks.task import Data, Task
from raytraced.training import optim
from raytraced.training.config import TrainConfig
from raytraced.training.evaluation import evaluate
from raytraced.training.interrupt import Interrupted, StopRequest, listen
from raytraced.training.objective import Objective, step_seed
from raytraced.training.reporter import Reporter
from raytraced.training.run_folder import RunFolder, create_run_folder
from raytraced.training.state import (
    State,
    check_same_data,
    diverged,
    epoch_metrics,
    make_checkpoint,
    mean_figures,
    newest_checkpoint,
    restore_state,
    save_checkpoint,
    tells_how_to_go_on,
)
from raytraced.training.world import World, join_world

EVALUATION_BATCH = 1000


def train(
    config: TrainConfig,
    run: RunFolder | None = None,
    reporter: Reporter | None = None,
    pictures: bool = True,
    changes: dict[str, Any] | None = None,
) -> RunFolder:
    """Train as configured and return the run folder; with `run`, go on with that one, and note there what `changes`."""
    with join_world(config.device) as world, listen() as request, ExitStack() as held:
        reporter = reporter if reporter is not None and world.leads else Reporter()
        held.callback(reporter.close)
        try:
            return _train(config, run, world, request, held, reporter, pictures, changes)
        except Interrupted as stop:
            # the frames in its traceback hold what must go before the process group does, or that waits for ever
            interruption = stop.with_traceback(None)
    raise interruption


def check_memory(model: Model) -> None:
    """Refuse a model that cannot be trained here: the machine would grow slow, then kill the process."""
    if not hasattr(os, "sysconf"):  # Windows
        return
    # weights, gradients, two moments, the best weights; a checkpoint of three of them as it is written; a batch on its way
    needed = 10 * sum(tensor.nbytes for tensor in model.parameters())
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        sizes = f"training them takes some {needed / 1e9:,.0f} GB, the machine has {there / 1e9:,.0f}"
        raise ValueError(f"not enough memory for {num_parameters(model):,} parameters: {sizes}; make the model smaller")


def _train(
    config: TrainConfig,
    begun: RunFolder | None,
    world: World,
    request: StopRequest,
    held: ExitStack,
    reporter: Reporter,
    pictures: bool,
    changes: dict[str, Any] | None,
) -> RunFolder:
    if begun is not None:  # two processes must never write one run
        world.from_leader(partial(held.enter_context, begun.writing()))
    if config.threads:
        torch.set_num_threads(config.threads)

    # Data, model, loss and optimizer.
    task = find_task(config.data)
    data = task.load(config.data, config.data_root, **config.data_options)
    place = {"device": world.device, "rank": world.rank, "world_size": world.size}
    loader = task.loader(data, "train", config.batch_size, config.data_options, seed=config.seed, **place)
    if world.device.type == "cpu":  # where what is too large is not refused, but killed
        with torch.device("meta"):
            check_memory(task.build(config.model, data, config.model_options))
    torch.manual_seed(config.seed)
    model = task.build(config.model, data, config.model_options)
    # a path of one machine is no business of who gets the model
    training = {key: value for key, value in config.public().items() if key != "data"}
    card = replace(model.card, task=task.name, data=data.name, training=training)
    model.to(world.device)
    if config.compile:
        for part in model.children():
            part.compile()
    objective = Objective(model, config, task, world.size)
    amp = torch.autocast(world.device.type, torch.bfloat16) if config.precision == "bfloat16" else nullcontext()
    with amp:
        objective.rehearse(next(loader.epoch(0)))
    compute_loss = world.distribute(objective, config.strategy)
    optimizer = optim.build_optimizer(model, config)
    parameters = list(model.parameters())

    def judge(split: str, full: bool = False) -> dict[str, Any]:
        objective.eval()
        drawn: dict[str, Any] = {} if config.select == "greedy" else {"select": config.select}
        return evaluate(task, data, split, objective.predict, world, batch_size=EVALUATION_BATCH, full=full, **drawn)

    # A new run folder, or the state that an old one was left in.
    state = State()
    if begun is None:
        started = time.strftime("%Y-%m-%d-%H%M%S")
        run = world.from_leader(partial(create_run_folder, config, started))
        world.from_leader(partial(held.enter_context, run.writing()))
        reporter.note(f"{config.model} on {config.data}, {num_parameters(model):,} parameters, into {run.path}")
    else:
        run = begun
        checkpoint, problems = world.from_leader(partial(newest_checkpoint, run.last))
        if checkpoint is not None:
            for difference in check_same_data(task, checkpoint.state.get("spec", {}), card.spec, config.data):
                reporter.warn(difference)
            state = restore_state(checkpoint, model, optimizer, world)
        if world.leads:
            if changes:  # not before: what cannot go on leaves the run as it was
                run.add_continuation(config, changes)
            for problem in problems:
                reporter.warn(f"{problem}; the checkpoint before it is used")
            run.write_metrics(state.history)
        reporter.note(f"going on after step {state.step} (epoch {state.epoch + 1})")

    held.enter_context(tells_how_to_go_on(run))

    def save() -> float:
        """Write a checkpoint: every process gives its part, the leader writes."""
        checkpoint = make_checkpoint(config, card.spec, model, optimizer, state, world)
        world.from_leader(partial(save_checkpoint, run.last, checkpoint))
        return time.monotonic()

    def stop_if_asked(signal_number: int) -> None:
        if signal_number:
            raise Interrupted(signal_number, state.step, run.path)

    is_larger = config.batch_size > len(data.train) and len(loader) == 1  # texts are drawn from as often as asked
    if is_larger and world.leads:
        told = f"there are only {len(data.train)} training samples, all in one batch"
        reporter.warn(f"batch_size={config.batch_size}: {told}")
    reporter.start(task.formats, config.epochs, len(loader), state.epoch, state.batch)
    saved_at = time.monotonic()

    patience = config.epochs if config.patience is None else config.patience
    while state.epoch < config.epochs and state.epoch - state.best_epoch < patience:
        # One epoch of steps.
        model.train()
        before, since = state.seconds, time.monotonic()
        for batch in loader.epoch(state.epoch, start_batch=state.batch):
            optim.set_learning_rate(optimizer, optim.learning_rate_factor(config, state.step, len(loader)))
            with amp:
                result = compute_loss(batch, step_seed(config.seed, state.step), world.total(batch.num_targets))
            norm = optim.take_step(optimizer, parameters, result.loss, config.clip)
            if norm is None:
                raise diverged(run, state, batch.inputs, model, result)
            state.count(result, norm, world.leads)
            state.step, state.batch = state.step + 1, state.batch + 1
            state.seconds = before + time.monotonic() - since
            reporter.step(state.epoch, state.batch, partial(mean_figures, task, state.sums))

            # Signals and the clock: all processes decide alike.
            is_due = time.monotonic() - saved_at > config.checkpoint_seconds
            is_due |= config.checkpoint_steps is not None and state.step % config.checkpoint_steps == 0
            signal_number, must_save = world.largest([request.number, int(is_due)])
            if signal_number or must_save:
                saved_at = save()
            stop_if_asked(signal_number)

        # The epoch's figures; the best model is written before the checkpoint that says so.
        result_v = judge("validation")
        last_rate = config.lr * optim.learning_rate_factor(config, state.step - 1, len(loader))
        state.history.append(epoch_metrics(task, state, state.total(world), last_rate, result_v))
        value = result_v[task.better]
        if state.best is None or (value > state.best if task.higher else value < state.best):
            state.best, state.best_epoch = value, state.epoch + 1
            tensors = optim.model_tensors(model)
            if world.leads:
                save_tensors(run.best, tensors, card)
        state.epoch, state.batch, state.seconds = state.epoch + 1, 0, 0.0
        state.sums = {}
        saved_at = save()
        if world.leads:
            run.write_metrics(state.history)
            write_event(run, state.history)
        reporter.epoch(state.history[-1])
        stop_if_asked(*world.largest([request.number]))

    # The outcome: the last weights, or with early stopping the best, judged on test data.
    if config.patience is not None and state.best_epoch:
        best = world.from_leader(lambda: load(run.best).state_dict())
        optim.load_model_tensors(model, best)
    result_t, result_v = judge("test", full=True), judge("validation", full=True)
    tensors = optim.model_tensors(model)
    if world.leads:
        save_tensors(run.model, tensors, card)
        if pictures:
            draw_pictures(run, state.history, task, data, rebuild(card, tensors))
        run.write_summary(about_run(config, state, model, world) | {"validation": result_v, "test": result_t})
    return run


def write_event(run: RunFolder, history: list[dict[str, Any]]) -> None:
    """Tell TensorBoard, if that extra is installed, of all epochs up to this one: one file a run, resumed or not."""
    if importlib.util.find_spec("tensorboard") is None:
        return
    from torch.utils.tensorboard import SummaryWriter

    folder = run.path / "events"
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(".tmp", ".events-", run.path) as fresh:
        with SummaryWriter(fresh) as writer:
            for epoch in history:
                for name, value in epoch.items():
                    if isinstance(value, float):
                        writer.add_scalar(name, value, epoch["epoch"])
        (written,) = Path(fresh).iterdir()
        written.replace(folder / "events.out.tfevents.run")


def draw_pictures(run: RunFolder, history: list[dict[str, Any]], task: Task, data: Data, model: Model) -> None:
    """The curves of training, and how the model goes through some of the data; none without the extra plots."""
    if importlib.util.find_spec("matplotlib") is None:
        return
    from raytraced.training.curves import draw_curves

    if history:
        draw_curves({run.path.name: history}, run.path / "curves.png")
    task.draw(model, data, run.path)


def about_run(config: TrainConfig, state: State, model: Model, world: World) -> dict[str, Any]:
    """The content of summary.json besides the figures."""
    from raytraced import __version__

    return {
        "data": config.data,
        "model": config.model,
        "seed": config.seed,
        "epochs": state.epoch,
        "steps": state.step,
        "parameters": num_parameters(model),
        "weights": "last" if config.patience is None else "best",
        "best_epoch": state.best_epoch,
        "best_validation": state.best,
        "seconds": sum(epoch["seconds"] for epoch in state.history),
        "finished": time.strftime("%Y-%m-%d %H:%M:%S"),
        "processes": world.size,
        "threads": torch.get_num_threads(),
        "versions": {"raytraced": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }

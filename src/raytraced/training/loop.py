"""The training loop, for every model, on one process or many: read it from top to bottom.

A run's whole future follows from its state (weights, optimizer, step, metrics so far): draws, batches and learning
rates are pure functions of the seed and the step. So a run that was stopped anywhere goes on exactly where it was.
"""

import time
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from functools import partial

import torch

from raytraced.cost import num_parameters
from raytraced.models.card import ModelCard
from raytraced.saving import load, rebuild, save_tensors
from raytraced.tasks.table import find_task
from raytraced.tasks.task import Data, Task
from raytraced.training import optim
from raytraced.training.checkpoint import newest_checkpoint
from raytraced.training.config import PRIVATE_FIELDS, TrainConfig
from raytraced.training.distribute import distribute
from raytraced.training.evaluation import Evaluation, evaluate
from raytraced.training.faults import diverged, rehearse
from raytraced.training.interrupt import Interrupted, StopRequest, listen
from raytraced.training.objective import Objective, step_seed
from raytraced.training.outcome import summarise, write_event
from raytraced.training.reporter import Reporter, Silent
from raytraced.training.run_folder import RunFolder, create_run_folder
from raytraced.training.state import State, Totals, epoch_metrics, restore_state, save_state, tells_how_to_go_on
from raytraced.training.world import World, join_world

EVALUATION_BATCH = 1000


def train(
    config: TrainConfig, run: RunFolder | None = None, reporter: Reporter | None = None, pictures: bool = True
) -> RunFolder:
    """Train as configured and return the run folder; with `run`, go on with that one."""
    with join_world(config.device) as world, listen() as request, ExitStack() as held:
        reporter = (reporter or Silent()) if world.leads else Reporter()
        try:
            return _train(config, run, world, request, held, reporter, pictures)
        except Interrupted as stop:
            # the frames in its traceback hold what must go before the process group does, or that waits for ever
            interruption = stop.with_traceback(None)
        finally:
            reporter.close()
    raise interruption


def _train(
    config: TrainConfig,
    run: RunFolder | None,
    world: World,
    request: StopRequest,
    held: ExitStack,
    reporter: Reporter,
    pictures: bool,
) -> RunFolder:
    if run is not None:  # two processes must never write one run
        world.from_leader(partial(held.enter_context, run.writing()))
    if config.threads:
        torch.set_num_threads(config.threads)

    # Data, model, loss and optimizer.
    task = find_task(config.data)
    data = task.load(config.data, config.data_root, **config.data_options)
    task.check(data)
    place = {"device": world.device, "rank": world.rank, "world_size": world.size}
    loader = task.loader(data, "train", config.batch_size, config.data_options, seed=config.seed, **place)
    torch.manual_seed(config.seed)
    model = task.build(config.model, data, config.model_options)
    card = make_card(config, task, data, model.card)
    model.to(world.device)
    if config.compile:
        for part in model.children():
            part.compile()
    objective = Objective(model, config, task, world.size)
    amp = torch.autocast(world.device.type, torch.bfloat16) if config.precision == "bfloat16" else nullcontext()
    with amp:
        rehearse(objective, next(loader.epoch(0)))
    compute_loss = distribute(objective, world, config.strategy)
    optimizer = optim.build_optimizer(model, config)
    parameters = list(model.parameters())
    judge = partial(evaluate_on, task, data, objective, world)

    # A new run folder, or the state that an old one was left in.
    state, totals = State(), Totals(task, world)
    if run is None:
        started = time.strftime("%Y-%m-%d-%H%M%S")
        run = world.from_leader(partial(create_run_folder, config, started))
        world.from_leader(partial(held.enter_context, run.writing()))
        reporter.note(f"{config.model} on {config.data}, {num_parameters(model):,} parameters, into {run.path}")
    else:
        checkpoint, problems = world.from_leader(partial(newest_checkpoint, run.last))
        for problem in problems:
            reporter.warn(f"{problem}; the checkpoint before it is used")
        if checkpoint is not None:
            state = restore_state(checkpoint, model, optimizer, totals, world)
        if world.leads:
            run.write_metrics(state.history)
        reporter.note(f"going on after step {state.step} (epoch {state.epoch + 1})")
    save = partial(save_state, run, config, model, optimizer, totals, world)
    if config.batch_size > len(data.train):
        reporter.warn(
            f"batch_size={config.batch_size}: there are only {len(data.train)} training samples, all in one batch"
        )
    reporter.start(task.formats, config.epochs, len(loader), state.epoch, state.batch)
    saved_at = time.monotonic()

    while state.epoch < config.epochs and not out_of_patience(config, state):
        # One epoch of steps.
        model.train()
        before, since = state.seconds, time.monotonic()
        for batch in loader.epoch(state.epoch, start_batch=state.batch):
            optim.set_learning_rate(optimizer, optim.learning_rate_factor(config, state.step, len(loader)))
            with amp:
                result = compute_loss(batch, step_seed(config.seed, state.step), world.total(batch.num_targets))
            for parameter in parameters:
                parameter.grad = None  # what zero_grad does, in a twentieth of its time
            result.loss.backward()
            norm = optim.gradient_norm(parameters, config.clip)
            if not bool(torch.isfinite(norm)):  # before the weights move: the last checkpoint stays a good one
                raise diverged(run, state, batch.inputs, model, result)
            optimizer.step()
            totals.add(result, norm)
            state.step, state.batch = state.step + 1, state.batch + 1
            state.seconds = before + time.monotonic() - since
            reporter.step(state.epoch, state.batch, partial(totals.means, state.seconds))

            # Signals and the clock: all processes decide alike.
            is_due = time.monotonic() - saved_at > config.checkpoint_seconds
            is_due |= config.checkpoint_steps is not None and state.step % config.checkpoint_steps == 0
            signal_number, must_save = world.largest([request.number, int(is_due)])
            if signal_number or must_save:
                save(state)
                saved_at = time.monotonic()
            if signal_number:
                raise Interrupted(signal_number, state.step, run.path)

        # The epoch's figures; the best model is written before the checkpoint that says so.
        result_v = judge("validation")
        last_rate = config.lr * optim.learning_rate_factor(config, state.step - 1, len(loader))
        state.history.append(epoch_metrics(task, state, totals.reduced(), last_rate, result_v))
        if is_better(task, result_v[task.better], state.best):
            state.best, state.best_epoch = result_v[task.better], state.epoch + 1
            tensors = optim.model_tensors(model)
            if world.leads:
                with tells_how_to_go_on(run):
                    save_tensors(run.best, tensors, card)
        state.epoch, state.batch, state.seconds = state.epoch + 1, 0, 0.0
        totals.clear()
        save(state)
        saved_at = time.monotonic()
        if world.leads:
            run.write_metrics(state.history)
            write_event(run, state.history[-1])
        reporter.epoch(state.history[-1])
        (signal_number,) = world.largest([request.number])
        if signal_number:
            raise Interrupted(signal_number, state.step, run.path)

    # The outcome: the last weights, or with early stopping the best, judged on test data.
    if config.patience is not None and state.best_epoch:
        best = world.from_leader(lambda: load(run.best).state_dict())
        optim.load_model_tensors(model, best)
    result_t, result_v = judge("test", full=True), judge("validation", full=True)
    tensors = optim.model_tensors(model)
    if world.leads:
        save_tensors(run.model, tensors, card)
        if pictures:
            draw_pictures(run, state, task, data, card, tensors)
        run.write_summary(summarise(config, state, model, result_v, result_t, world.size))
    return run


def evaluate_on(
    task: Task, data: Data, objective: Objective, world: World, split: str, full: bool = False
) -> Evaluation:
    """Evaluate as a user of the model would: in evaluation mode, greedy."""
    objective.eval()
    return evaluate(task, data, split, objective.predict, world, batch_size=EVALUATION_BATCH, full=full)


def is_better(task: Task, value: float, best: float | None) -> bool:
    """Whether a figure is better than the best so far."""
    return best is None or (value > best if task.higher else value < best)


def out_of_patience(config: TrainConfig, state: State) -> bool:
    """Whether nothing has got better for `patience` epochs."""
    return config.patience is not None and state.epoch - state.best_epoch >= config.patience


def make_card(config: TrainConfig, task: Task, data: Data, built: ModelCard | None) -> ModelCard:
    """What a saved model must know about itself; a path of one machine is no business of who gets the model."""
    assert built is not None
    training = {key: value for key, value in asdict(config).items() if key not in (*PRIVATE_FIELDS, "data")}
    return replace(built, task=task.name, data=data.name, training=training)


def draw_pictures(
    run: RunFolder, state: State, task: Task, data: Data, card: ModelCard, tensors: dict[str, torch.Tensor]
) -> None:
    """The curves of training, and how the model goes through some of the data."""
    from raytraced.pictures.curves import draw_curves

    if state.history:
        draw_curves({run.path.name: state.history}, run.path / "curves.png")
    task.draw(rebuild(card, tensors), data, run.path)

"""The training loop, for every model, on one process or many: read it from top to bottom.

A run's whole future follows from its state (weights, optimizer, step, metrics so far): draws, batches and learning
rates are pure functions of the seed and the step. So a run that was stopped anywhere goes on exactly where it was.
"""

import time
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial

import torch

from raytraced import data
from raytraced.models import MODELS, build_model, complete_options
from raytraced.saving import ModelCard, load_with_card, save_model
from raytraced.training import optim
from raytraced.training.checkpoint import newest_checkpoint
from raytraced.training.config import TrainConfig
from raytraced.training.distribute import distribute
from raytraced.training.evaluation import Evaluation, evaluate
from raytraced.training.faults import check_classes, describe_divergence
from raytraced.training.interrupt import Interrupted, StopRequest, listen
from raytraced.training.objective import Objective, step_seed
from raytraced.training.outcome import count_parameters, draw_pictures, write_event, write_outcome
from raytraced.training.progress import Mute, Reporter, Silent
from raytraced.training.run_folder import RunFolder, create_run_folder
from raytraced.training.state import State, Totals, epoch_metrics, restore_state, save_state
from raytraced.training.world import World, join_world

EVALUATION_BATCH = 1000
PRIVATE = ("data", "data_root", "output", "name", "quiet")  # paths of one machine: no business of who gets the model


def train(
    config: TrainConfig, run: RunFolder | None = None, reporter: Reporter | None = None, pictures: bool = True
) -> RunFolder:
    """Train as configured and return the run folder; with `run`, go on with that one."""
    with join_world(config.device) as world, listen() as request:
        reporter = (reporter or Silent()) if world.leads else Mute()
        try:
            return _train(config, run, world, request, reporter, pictures)
        except Interrupted as stop:
            # the frames in its traceback hold what must go before the process group does, or that waits for ever
            interruption = stop.with_traceback(None)
        finally:
            reporter.close()
    raise interruption


def _train(
    config: TrainConfig, run: RunFolder | None, world: World, request: StopRequest, reporter: Reporter, pictures: bool
) -> RunFolder:
    if config.threads:
        torch.set_num_threads(config.threads)

    # Data, model, loss and optimizer.
    dataset = data.load(config.data, config.data_root, size=config.image_size)
    check_classes(dataset)
    normalised = partial(data.Loader, mean=dataset.mean, std=dataset.std)
    make_loader = partial(normalised, device=world.device, rank=world.rank, world_size=world.size)
    loader = make_loader(dataset.train, config.batch_size, seed=config.seed, augment=config.augment)
    validation = make_loader(dataset.validation, EVALUATION_BATCH, shuffle=False)
    torch.manual_seed(config.seed)
    model = build_model(config.model, dataset.image_shape, dataset.num_classes, **config.model_options)
    model.to(world.device)
    if config.compile:
        for part in model.children():  # not the whole: the loss on prefixes starts after the input block
            part.compile()
    objective = Objective(model, config, world.size)
    compute_loss = distribute(objective, world, config.strategy)
    optimizer = optim.build_optimizer(model, config)
    parameters = list(model.parameters())
    card = make_card(config, dataset)

    # A new run folder, or the state that an old one was left in.
    state, totals = State(), Totals(world)
    if run is None:
        started = time.strftime("%Y-%m-%d-%H%M%S")
        run = world.from_leader(partial(create_run_folder, config, started))
        reporter.note(f"{config.model} on {config.data}, {count_parameters(model):,} parameters, into {run.path}")
    else:
        checkpoint, problems = world.from_leader(partial(newest_checkpoint, run.last))
        for problem in problems:
            reporter.warn(f"{problem}; the checkpoint before it is used")
        if checkpoint is not None:
            state = restore_state(checkpoint, model, optimizer, totals, world)
        if world.leads:
            run.write_metrics(state.history)
        reporter.note(f"going on after step {state.step} (epoch {state.epoch + 1})")
    save = partial(save_state, run, model, optimizer, totals, world)
    reporter.start(config.epochs, len(loader), state.epoch, state.batch)
    amp = torch.autocast(world.device.type, torch.bfloat16) if config.precision == "bfloat16" else nullcontext()
    saved_at = time.monotonic()

    while state.epoch < config.epochs and not out_of_patience(config, state):
        # One epoch of steps.
        model.train()
        before, since = state.seconds, time.monotonic()
        for images, labels, rows in loader.epoch(state.epoch, start_batch=state.batch):
            num_global = min(config.batch_size, len(dataset.train) - state.batch * config.batch_size)
            optim.set_learning_rate(optimizer, optim.learning_rate_factor(config, state.step, len(loader)))
            with amp:
                result = compute_loss(images, labels, rows, step_seed(config.seed, state.step), num_global)
            optimizer.zero_grad()
            result.loss.backward()
            norm = optim.gradient_norm(parameters, config.clip)
            if not bool(torch.isfinite(norm)):  # before the weights move: the last checkpoint stays a good one
                raise ValueError(describe_divergence(run, state, images, model, result))
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
        result_v = evaluate_on(objective, validation, world, dataset.num_classes)
        last_rate = config.lr * optim.learning_rate_factor(config, state.step - 1, len(loader))
        state.history.append(epoch_metrics(state, totals.reduced(), last_rate, result_v))
        if result_v.accuracy > state.best_accuracy:
            state.best_accuracy, state.best_epoch = result_v.accuracy, state.epoch + 1
            tensors = optim.model_tensors(model)
            if world.leads:
                save_model(run.best, tensors, card)
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

    # The outcome: the last weights, or with early stopping the best, judged on the test images.
    if config.patience is not None and state.best_epoch:
        best = world.from_leader(partial(load_with_card, run.best))[0]
        optim.load_model_tensors(model, best.state_dict())
    test = make_loader(dataset.test, EVALUATION_BATCH, shuffle=False)
    has_prefixes = MODELS[config.model].anytime
    result_t = evaluate_on(objective, test, world, dataset.num_classes, by_prefix=has_prefixes)
    result_v = evaluate_on(objective, validation, world, dataset.num_classes)
    tensors = optim.model_tensors(model)
    if world.leads:
        save_model(run.model, tensors, card)
        if pictures:
            draw_pictures(run, state, dataset.test)
        write_outcome(run, config, state, result_v, result_t, world.size)
    return run


def evaluate_on(
    objective: Objective, loader: data.Loader, world: World, num_classes: int, by_prefix: bool = False
) -> Evaluation:
    """Evaluate as a user of the model would: in evaluation mode, greedy."""
    objective.eval()
    return evaluate(objective.predict, loader, world, num_classes, by_prefix=by_prefix)


def out_of_patience(config: TrainConfig, state: State) -> bool:
    """Whether validation accuracy has not risen for `patience` epochs."""
    return config.patience is not None and state.epoch - state.best_epoch >= config.patience


def make_card(config: TrainConfig, dataset: data.Dataset) -> ModelCard:
    """What a saved model must know about itself."""
    return ModelCard(
        model=config.model,
        image_shape=dataset.image_shape,
        num_classes=dataset.num_classes,
        options=complete_options(config.model, config.model_options),
        data=dataset.name,
        class_names=dataset.class_names,
        mean=dataset.mean,
        std=dataset.std,
        training={name: value for name, value in asdict(config).items() if name not in PRIVATE},
    )

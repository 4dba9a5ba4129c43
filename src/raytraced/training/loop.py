"""The training loop, for every model, on one process or many: read `Trainer.run` first.

The whole future of a run follows from its state (weights, optimizer, step, figures so far): draws, batches and learning
rates are pure functions of the seed and the step. A run that was stopped anywhere therefore continues bit for bit.
"""

import os
import platform
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from raytraced.io.saving import load, rebuild, save_tensors
from raytraced.models.output import Model, num_parameters
from raytraced.tasks.registry import find_task, is_catalogued, task_origin
from raytraced.tasks.task import LARGEST_BATCH, Batch
from raytraced.training import optim
from raytraced.training.callbacks import Callback, Pictures, Reporter, RunInfo
from raytraced.training.config import TrainConfig
from raytraced.training.evaluation import evaluate
from raytraced.training.interrupt import Interrupted, StopRequest, listen
from raytraced.training.objective import Objective, step_seed
from raytraced.training.run_folder import RunFolder, create_run_folder
from raytraced.training.state import (
    Checkpoint,
    State,
    add_resume_hint,
    check_same_data,
    diverged,
    epoch_metrics,
    make_checkpoint,
    newest_checkpoint,
    restore_state,
    save_checkpoint,
)
from raytraced.training.trackers.registry import make_trackers
from raytraced.training.world import World, join_world

EVALUATION_BATCH = 1000


def train(
    config: TrainConfig,
    run: RunFolder | None = None,
    reporter: Reporter | None = None,
    callbacks: Sequence[Callback] | None = None,
    changes: dict[str, Any] | None = None,
    request: StopRequest | None = None,
) -> RunFolder:
    """Train a model, or continue a run.

    Args:
        config: The options of the run.
        run: The run to continue; None starts a new one.
        reporter: Shows progress; None shows warnings only.
        callbacks: What else is attached to the loop; None stands for the trackers of the options and the pictures.
        changes: Options that differ from those the run was started with, as {name: {"from": …, "to": …}}; they are
            written down in the run folder.
        request: Lets another thread stop the run as a signal does: by its number. None listens to signals alone.

    Returns:
        The folder of the finished run.

    Raises:
        Interrupted: A signal asked to stop; the run is saved and can be continued.
    """
    with join_world(config.device) as world, listen(request) as request, ExitStack() as held:
        reporter = reporter if reporter is not None and world.leads else Reporter()
        if callbacks is None:
            callbacks = [*make_trackers(config.tracker, reporter), Pictures(reporter)]
        attached = [reporter, *callbacks]
        for callback in attached:
            held.callback(callback.close)
        try:
            # The trainer must be freed before the process group is destroyed, which would wait for ever: no name here holds it,
            return Trainer(config, world, request, reporter, attached).run(held, run, changes)
        except Interrupted as stop:
            # and neither may the frames of a traceback.
            interruption = stop.with_traceback(None)
    raise interruption


def check_memory(model: Model) -> None:
    """Refuse a model that is too large to train on this machine: the system would slow down, then kill the process."""
    if not hasattr(os, "sysconf"):  # Windows
        return
    # Weights, gradients, two moments, the best weights; a checkpoint of three of them while it is written; a batch.
    needed = 10 * sum(tensor.nbytes for tensor in model.parameters())
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        sizes = f"training them takes some {needed / 1e9:,.0f} GB, the machine has {available / 1e9:,.0f}"
        raise ValueError(f"not enough memory for {num_parameters(model):,} parameters: {sizes}; make the model smaller")


class Trainer:
    """One run of training, as a story of named steps.

    Args:
        config: The options of the run.
        world: The processes that train together.
        request: Holds the signal that asked to stop.
        reporter: Shows notes and warnings.
        callbacks: All that is attached, the reporter included; they are called in the leading process.
    """

    def __init__(
        self,
        config: TrainConfig,
        world: World,
        request: StopRequest,
        reporter: Reporter,
        callbacks: Sequence[Callback],
    ) -> None:
        self.config, self.world, self.request, self.reporter = config, world, request, reporter
        self.callbacks = list(callbacks) if world.leads else []
        self.state = State()

    def run(self, held: ExitStack, begun: RunFolder | None, changes: dict[str, Any] | None) -> RunFolder:
        """Train from the start or from the newest checkpoint to the end.

        Args:
            held: Holds the lock of the run folder until training has ended.
            begun: The run to continue; None starts a new one.
            changes: Options that differ from those the run was started with.

        Returns:
            The folder of the finished run.
        """
        if begun is not None:
            self.lock(held, begun)
        self.prepare_data()
        self.prepare_model()
        if begun is None:
            self.start(held)
        else:
            self.restore(begun, changes)
        with add_resume_hint(self.folder):
            self.warn_of_single_batch()
            self.notify_start()
            while not self.is_done():
                self.run_epoch()
                self.end_epoch()
            self.finish()
        return self.folder

    def lock(self, held: ExitStack, run: RunFolder) -> None:
        """Hold the lock of a run folder: two processes must never write one run."""
        self.world.from_leader(partial(held.enter_context, run.writing()))

    def prepare_data(self) -> None:
        """Load the data and make the batches of training."""
        config, world = self.config, self.world
        if config.threads:
            torch.set_num_threads(config.threads)
        self.task = find_task(config.data)
        self.data = self.task.load(config.data, config.data_root, **config.data_options)
        self.fingerprint = world.from_leader(partial(self.task.fingerprint, self.data))
        place = {"device": world.device, "rank": world.rank, "world_size": world.size}
        batch_size = self.choose_batch_size() if config.batch_size is None else config.batch_size
        self.config = config = replace(config, batch_size=batch_size)
        options = config.data_options
        self.loader = self.task.loader(self.data, "train", batch_size, options, seed=config.seed, **place)

    def choose_batch_size(self) -> int:
        """The usual batch size for catalogued data; for custom data, one that follows from the number of samples."""
        if is_catalogued(self.config.data):
            return LARGEST_BATCH
        size = max(self.world.size, self.task.choose_batch_size(self.data))
        reason = f"chosen for {len(self.data.train):,} training {self.task.sample_name}"
        self.reporter.note(f"batch_size={size}: {reason}; --batch-size sets another")
        return size

    def prepare_model(self) -> None:
        """Build the model, its objective and its optimizer, and run one batch to find what they refuse."""
        config, world, task = self.config, self.world, self.task
        if world.device.type == "cpu":  # a GPU refuses what is too large; here the system would kill the process
            with torch.device("meta"):
                check_memory(task.build(config.model, self.data, config.model_options))
        torch.manual_seed(config.seed)
        self.model = task.build(config.model, self.data, config.model_options)
        # Cards are shared: leave local paths out.
        training = {key: value for key, value in config.public().items() if key != "data"}
        origins = {*self.model.card.plugins, *filter(None, [task_origin(task.name)])}
        self.card = replace(
            self.model.card, task=task.name, data=self.data.name, training=training, plugins=sorted(origins)
        )
        self.model.to(world.device)
        if config.compile:
            for part in self.model.children():
                part.compile()
        self.objective = Objective(self.model, config, task, world.size)
        uses_bfloat16 = config.precision == "bfloat16"
        self.amp = torch.autocast(world.device.type, torch.bfloat16) if uses_bfloat16 else nullcontext()
        with self.amp:
            self.objective.rehearse(next(self.loader.epoch(0)))
        self.compute_loss = world.distribute(self.objective, config.strategy)
        self.optimizer = optim.build_optimizer(self.model, config)
        self.parameters = [one for one in self.model.parameters() if one.requires_grad]

    def start(self, held: ExitStack) -> None:
        """Make a new run folder."""
        started = time.strftime("%Y-%m-%d-%H%M%S")
        self.folder = self.world.from_leader(partial(create_run_folder, self.config, started))
        self.lock(held, self.folder)
        size = f"{num_parameters(self.model):,} parameters"
        self.reporter.note(f"{self.config.model} on {self.config.data}, {size}, into {self.folder.path}")

    def restore(self, begun: RunFolder, changes: dict[str, Any] | None) -> None:
        """Continue from the newest whole checkpoint of a run."""
        self.folder = begun
        checkpoint, problems = self.world.from_leader(partial(newest_checkpoint, begun.last))
        if checkpoint is not None:
            self.check_data(checkpoint)
            self.state = restore_state(checkpoint, self.model, self.optimizer, self.world)
        if self.world.leads:
            if changes:  # only now: a run that cannot be continued stays as it was
                begun.add_continuation(self.config, changes)
            for problem in problems:
                self.reporter.warn(f"{problem}; the checkpoint before it is used")
            begun.write_metrics(self.state.history)
        self.reporter.note(f"Resuming after step {self.state.step} (epoch {self.state.epoch + 1}).")

    def check_data(self, checkpoint: Checkpoint) -> None:
        """Refuse other data than the run began with, or warn, as the task decides."""
        spec, fingerprint = self.card.spec, self.fingerprint
        for difference in check_same_data(self.task, checkpoint.state, spec, fingerprint, self.config.data):
            self.reporter.warn(difference)

    def warn_of_single_batch(self) -> None:
        """Warn where the batch is larger than the data; an epoch of text has a fixed number of batches."""
        num_samples, batch_size = len(self.data.train), self.loader.batch_size
        if batch_size > num_samples and len(self.loader) == 1 and self.world.leads:
            found = f"there are only {num_samples} training samples, all in one batch"
            self.reporter.warn(f"batch_size={batch_size}: {found}")

    def notify_start(self) -> None:
        """Tell the callbacks that steps begin, and start the clock of checkpoints."""
        info = RunInfo(self.folder, self.task, self.data, self.config.epochs, len(self.loader))
        for callback in self.callbacks:
            callback.on_train_start(info, self.state)
        self.saved_at = time.monotonic()

    def is_done(self) -> bool:
        """Whether all epochs are done, or the last ones brought no better figure."""
        config, state = self.config, self.state
        patience = config.epochs if config.patience is None else config.patience
        return state.epoch >= config.epochs or state.epoch - state.best_epoch >= patience

    def run_epoch(self) -> None:
        """Take the steps of an epoch, or those that are left of it."""
        state = self.state
        self.model.train()
        before, since = state.seconds, time.monotonic()
        for batch in self.loader.epoch(state.epoch, start_batch=state.batch):
            self.take_step(batch)
            state.seconds = before + time.monotonic() - since
            for callback in self.callbacks:
                callback.on_step(state)
            self.save_if_due()

    def take_step(self, batch: Batch) -> None:
        """Move the weights once, and count what the step did."""
        config, state, world = self.config, self.state, self.world
        factor = optim.learning_rate_factor(config, state.step, len(self.loader))
        optim.set_learning_rate(self.optimizer, factor)
        with self.amp:
            result = self.compute_loss(batch, step_seed(config.seed, state.step), world.total(batch.num_targets))
        norm = optim.take_step(self.optimizer, self.parameters, result.loss, config.clip)
        if norm is None:
            raise diverged(self.folder, state, batch.inputs, self.model, result)
        state.count(result, norm, world.leads)
        state.step, state.batch = state.step + 1, state.batch + 1

    def save_if_due(self) -> None:
        """Write a checkpoint if a signal or the clock asks for one; all processes take the same decision."""
        config = self.config
        is_due = time.monotonic() - self.saved_at > config.checkpoint_seconds
        is_due |= config.checkpoint_steps is not None and self.state.step % config.checkpoint_steps == 0
        signal_number, must_save = self.world.largest([self.request.number, int(is_due)])
        if signal_number or must_save:
            self.save_checkpoint()
        self.stop_if_asked(signal_number)

    def save_checkpoint(self) -> None:
        """Write a checkpoint: every process gives its part, the leader writes."""
        about_data = self.card.spec, self.fingerprint
        checkpoint = make_checkpoint(self.config, *about_data, self.model, self.optimizer, self.state, self.world)
        path = self.world.from_leader(partial(save_checkpoint, self.folder.last, checkpoint))
        self.saved_at = time.monotonic()
        for callback in self.callbacks:
            callback.on_checkpoint(path)

    def stop_if_asked(self, signal_number: int) -> None:
        """Leave the loop where a signal asked for it; a checkpoint is written already."""
        if signal_number:
            raise Interrupted(signal_number, self.state.step, self.folder.path)

    def run_evaluation(self, split: str, full: bool = False) -> dict[str, Any]:
        """Evaluate the model on a split; `full` adds costs and the answers with 0, 1, … experts."""
        self.objective.eval()
        select: dict[str, Any] = {} if self.config.select == "greedy" else {"select": self.config.select}
        predict, size = self.objective.predict, EVALUATION_BATCH
        return evaluate(self.task, self.data, split, predict, self.world, batch_size=size, full=full, **select)

    def end_epoch(self) -> None:
        """Evaluate, keep the best weights, and write the epoch down."""
        state, world = self.state, self.world
        validation = self.run_evaluation("validation")
        last_factor = optim.learning_rate_factor(self.config, state.step - 1, len(self.loader))
        learning_rate = self.config.lr * last_factor
        state.history.append(epoch_metrics(self.task, state, state.total(world), learning_rate, validation))
        self.keep_best(validation[self.task.better])
        state.start_next_epoch()
        self.save_checkpoint()
        if world.leads:
            self.folder.write_metrics(state.history)
        for callback in self.callbacks:
            callback.on_epoch_end(state)
        self.stop_if_asked(*world.largest([self.request.number]))

    def keep_best(self, value: float) -> None:
        """Write the weights if no epoch had a better figure: before the checkpoint that names this epoch."""
        if not self.state.is_best(value, self.task.higher):
            return
        self.state.best, self.state.best_epoch = value, self.state.epoch + 1
        tensors = optim.model_tensors(self.model)
        if self.world.leads:
            save_tensors(self.folder.best, tensors, self.card)

    def finish(self) -> None:
        """Evaluate on test data, and write the model and the summary; pictures come last."""
        if self.config.patience is not None and self.state.best_epoch:
            best: dict[str, Tensor] = self.world.from_leader(lambda: load(self.folder.best).state_dict())
            optim.load_model_tensors(self.model, best)
        test, validation = self.run_evaluation("test", full=True), self.run_evaluation("validation", full=True)
        tensors = optim.model_tensors(self.model)
        if not self.world.leads:
            return
        save_tensors(self.folder.model, tensors, self.card)
        self.folder.write_summary(self.describe() | {"validation": validation, "test": test})
        model = rebuild(self.card, tensors)
        for callback in self.callbacks:
            callback.on_train_end(self.state, model)

    def describe(self) -> dict[str, Any]:
        """The content of summary.json besides the figures."""
        from raytraced import __version__

        config, state = self.config, self.state
        return {
            "data": config.data,
            "model": config.model,
            "seed": config.seed,
            "epochs": state.epoch,
            "steps": state.step,
            "parameters": num_parameters(self.model),
            "weights": "last" if config.patience is None else "best",
            "best_epoch": state.best_epoch,
            "best_validation": state.best,
            "seconds": sum(epoch["seconds"] for epoch in state.history),
            "finished": time.strftime("%Y-%m-%d %H:%M:%S"),
            "processes": self.world.size,
            "threads": torch.get_num_threads(),
            "versions": {"raytraced": __version__, "torch": torch.__version__, "python": platform.python_version()},
        }

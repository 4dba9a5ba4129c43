"""Callbacks hear every event of a run, change nothing, and cost no run its result; progress fits a narrow terminal."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest

from raytraced.training.callbacks import (
    Callback,
    LiveBar,
    Pictures,
    PlainLines,
    Reporter,
    RunInfo,
    make_reporter,
)
from raytraced.training.loop import train
from raytraced.training.state import list_checkpoints
from training.runs import assert_same_run

FORMATS = {"accuracy": ".2%"}
MEANS = {"loss": 0.12345, "accuracy": 0.98765, "experts": 17.25}
METRICS = {f"{part}_{name}": value for part in ("train", "validation") for name, value in MEANS.items()}


def report(reporter: Reporter) -> None:
    task = SimpleNamespace(formats=FORMATS)
    state = SimpleNamespace(epoch=0, batch=0, history=[], means=lambda task: MEANS)
    reporter.on_train_start(RunInfo(None, task, None, num_epochs=40, num_batches=211), state)
    state.batch = 211
    reporter.on_step(state)
    state.history.append({"epoch": 1, **METRICS, "validation_accuracy": 0.91234})
    state.epoch, state.batch = 1, 0
    reporter.on_epoch_end(state)
    state.batch = 105
    reporter.on_step(state)
    reporter.close()


def test_live_bar_has_room_for_everything_at_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    bar = LiveBar()
    ticks = itertools.count()
    monkeypatch.setattr("time.monotonic", lambda: float(next(ticks)))
    report(bar)
    epoch, run = capsys.readouterr().out.splitlines()[-2:]
    assert max(len(epoch), len(run)) <= 80
    assert epoch.startswith("epoch 2 ")
    assert "105/211" in epoch
    assert epoch.rstrip().endswith("loss 0.123 accuracy 98.77% experts 17.2")
    assert "316/8440" in run
    assert run.rstrip().endswith("validation 91.23%")


def test_plain_line_fits_80_columns_and_shows_the_time_left(monkeypatch, capsys):
    monkeypatch.setattr("time.monotonic", iter([0.0, 60.0]).__next__)
    report(PlainLines())
    (line,) = capsys.readouterr().out.splitlines()
    assert line == "epoch  1/40 loss 0.123 accuracy 98.77% experts 17.2 validation 91.23% 39:00 left"
    assert len(line) <= 80


def test_silent_says_only_warnings(capsys):
    reporter = Reporter()
    report(reporter)
    reporter.note("good to know")
    reporter.warn("must know")
    assert capsys.readouterr() == ("", "raytraced: must know\n")


@pytest.mark.parametrize(
    ("quiet", "terminal", "kind"), [(True, True, Reporter), (False, True, LiveBar), (False, False, PlainLines)]
)
def test_reporter_fits_where_the_output_goes(monkeypatch, quiet, terminal, kind):
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    assert type(make_reporter(quiet)) is kind


class Recorder(Callback):
    """Notes every event."""

    def __init__(self):
        self.events = []

    def on_train_start(self, info, state):
        self.info = info
        self.events.append(("start", state.step))

    def on_step(self, state):
        self.events.append(("step", state.step))

    def on_epoch_end(self, state):
        self.events.append(("epoch", state.history[-1]["epoch"]))

    def on_checkpoint(self, path):
        assert path == list_checkpoints(self.info.run.last)[0]
        self.events.append(("checkpoint", path.name))

    def on_train_end(self, state, model):
        assert self.info.run.read_summary()["steps"] == state.step
        assert not model.training
        self.events.append(("end", state.step))

    def close(self):
        self.events.append(("close", None))


def test_callbacks_hear_every_event_in_order_and_change_nothing(config, no_pictures, tmp_path):
    recorder = Recorder()
    config = replace(config, epochs=2)
    run = train(config, callbacks=[recorder])
    steps = [("step", number) for number in range(1, 13)]  # two epochs of six steps
    checkpoints = [("checkpoint", f"step-{number:010d}.safetensors") for number in (6, 12)]
    expected = [("start", 0), *steps[:6], checkpoints[0], ("epoch", 1), *steps[6:], checkpoints[1], ("epoch", 2)]
    assert recorder.events == [*expected, ("end", 12), ("close", None)]
    assert_same_run(run, train(replace(config, name="plain"), callbacks=()))


def test_callbacks_are_closed_when_training_fails(config, no_pictures):
    class Failing(Recorder):
        def on_step(self, state):
            raise ZeroDivisionError

    recorder = Failing()
    with pytest.raises(ZeroDivisionError):
        train(config, callbacks=[recorder])
    assert recorder.events == [("start", 0), ("close", None)]


def test_a_picture_that_cannot_be_drawn_is_one_warning_and_the_run_is_complete(config, monkeypatch, capsys):
    def fail(*_):
        raise RuntimeError("no such font\nand more lines")

    monkeypatch.setattr("raytraced.training.callbacks.draw_pictures", fail)
    reporter = Reporter()
    run = train(config, None, reporter, [Pictures(reporter)])
    assert run.read_summary()["epochs"] == config.epochs
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("a picture could not be drawn (RuntimeError: no such font); the run is complete")

"""What a run says fits a narrow terminal: count, time left and figures are all there."""

import itertools

import pytest

from raytraced.training.reporter import LiveBar, PlainLines, Reporter, make_reporter

FORMATS = {"accuracy": ".2%"}
MEANS = {"loss": 0.12345, "accuracy": 0.98765, "experts": 17.25}
METRICS = {f"{part}_{name}": value for part in ("train", "validation") for name, value in MEANS.items()}


def tell(reporter: Reporter) -> None:
    reporter.start(FORMATS, 40, 211, 0, 0)
    reporter.step(0, 211, lambda: MEANS)
    reporter.epoch({"epoch": 1, **METRICS, "validation_accuracy": 0.91234})
    reporter.step(1, 105, lambda: MEANS)
    reporter.close()


def test_live_bar_has_room_for_everything_at_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    bar = LiveBar()
    ticks = itertools.count()
    monkeypatch.setattr("time.monotonic", lambda: float(next(ticks)))
    tell(bar)
    epoch, run = capsys.readouterr().out.splitlines()[-2:]
    assert max(len(epoch), len(run)) <= 80
    assert epoch.startswith("epoch 2 ")
    assert "105/211" in epoch
    assert epoch.rstrip().endswith("loss 0.123 accuracy 98.77% experts 17.2")
    assert "316/8440" in run
    assert run.rstrip().endswith("validation 91.23%")


def test_plain_line_fits_80_columns_and_tells_the_time_left(monkeypatch, capsys):
    monkeypatch.setattr("time.monotonic", iter([0.0, 60.0]).__next__)
    tell(PlainLines())
    (line,) = capsys.readouterr().out.splitlines()
    assert line == "epoch  1/40 loss 0.123 accuracy 98.77% experts 17.2 validation 91.23% 39:00 left"
    assert len(line) <= 80


def test_silent_says_only_warnings(capsys):
    reporter = Reporter()
    tell(reporter)
    reporter.note("good to know")
    reporter.warn("must know")
    assert capsys.readouterr() == ("", "raytraced: must know\n")


@pytest.mark.parametrize(
    ("quiet", "terminal", "kind"), [(True, True, Reporter), (False, True, LiveBar), (False, False, PlainLines)]
)
def test_reporter_fits_where_the_output_goes(monkeypatch, quiet, terminal, kind):
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    assert type(make_reporter(quiet)) is kind

"""Trackers: what is logged where, one tracked run however often it is resumed, and failures that cost no run its result."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from raytraced.cli.main import main
from raytraced.training.callbacks import Callback
from raytraced.training.loop import train
from raytraced.training.run_folder import RunFolder
from raytraced.training.trackers import registry
from raytraced.training.trackers.registry import TRACKERS, find_trackers
from raytraced.training.trackers.tracker import RunTracker
from training.runs import assert_same_run


class Notebook(RunTracker):
    """A tracker whose library is a list; `fail_at` names the call that fails."""

    name, package = "notebook", "json"
    pages: list = []  # noqa: RUF012 (emptied by the fixture)
    fail_at = ""

    def note(self, what, *more):
        if what == self.fail_at:
            raise RuntimeError("the server is gone\nand more lines")
        self.pages.append((what, *more))

    def open(self, info, run_id):
        self.note("open", run_id)
        return run_id or "first"

    def log_epoch(self, figures, epoch):
        assert figures["validation_loss"] > 0
        self.note("epoch", epoch)

    def end(self, results):
        self.note("end", results and results["test_accuracy"])


@pytest.fixture
def notebook(monkeypatch, no_pictures):
    monkeypatch.setitem(TRACKERS, "notebook", Notebook)
    Notebook.pages, Notebook.fail_at = [], ""
    return Notebook


def test_every_epoch_and_the_test_results_are_logged(config, notebook):
    run = train(replace(config, tracker="notebook"))
    accuracy = run.read_summary()["test"]["accuracy"]
    assert notebook.pages == [("open", None), ("epoch", 1), ("epoch", 2), ("epoch", 3), ("end", accuracy)]
    assert json.loads((run.path / "trackers.json").read_text()) == {"notebook": {"id": "first", "epochs": 3}}


class StopAfter(Callback):
    """Ends training in the middle, before the tracker hears of the epoch."""

    def __init__(self, num_epochs):
        self.num_epochs = num_epochs

    def on_epoch_end(self, state):
        if state.epoch == self.num_epochs:
            raise KeyboardInterrupt


def test_a_resumed_run_continues_the_tracked_run_without_a_gap(config, notebook, monkeypatch):
    config = replace(config, tracker="notebook")
    make = registry.make_trackers
    with monkeypatch.context() as patch:
        patch.setattr("raytraced.training.loop.make_trackers", lambda *args: [StopAfter(2), *make(*args)])
        with pytest.raises(KeyboardInterrupt):
            train(config)
    assert notebook.pages == [("open", None), ("epoch", 1), ("end", None)]
    notebook.pages.clear()
    run = train(config, RunFolder(Path(config.runs_dir) / "run"))
    accuracy = run.read_summary()["test"]["accuracy"]
    assert notebook.pages == [("open", "first"), ("epoch", 2), ("epoch", 3), ("end", accuracy)]


@pytest.mark.parametrize(("fail_at", "heard"), [("open", 0), ("epoch", 1), ("end", 4)])
def test_a_tracker_that_fails_is_one_warning_and_costs_no_run_its_result(config, notebook, capsys, fail_at, heard):
    notebook.fail_at = fail_at
    run = train(replace(config, tracker="notebook"))
    assert len(notebook.pages) == heard
    assert capsys.readouterr().err == (
        "raytraced: tracker notebook failed (RuntimeError: the server is gone); training continues without it\n"
    )
    assert_same_run(run, train(replace(config, name="plain")))


def test_a_tracker_changes_no_card(config, notebook):
    run = train(replace(config, tracker="notebook", epochs=1))
    assert b"notebook" not in run.model.read_bytes()
    assert run.config.tracker == "notebook"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("wandbb", "tracker=wandbb: no such tracker; did you mean wandb?"),
        ("csv", "tracker=csv: no such tracker; must be one of tensorboard, wandb, trackio, mlflow"),
        (
            "wandb",
            "tracker=wandb: the package wandb is not installed; install it with pip install '.[wandb]' in a clone of raytraced",
        ),
    ],
)
def test_a_tracker_that_is_not_there_is_one_line_and_makes_no_run(
    data_file, tmp_path, capsys, monkeypatch, words, line
):
    monkeypatch.setattr(registry.WandbTracker, "is_installed", classmethod(lambda _: False))
    where = ("--data", str(data_file), "--runs-dir", str(tmp_path / "runs"))
    assert main(["train", *where, "--tracker", words]) == 2
    assert capsys.readouterr().err == f"raytraced: {line}\n"
    assert not (tmp_path / "runs").exists()


def test_several_trackers_are_named_with_commas_and_tensorboard_needs_no_name(monkeypatch):
    for kind in TRACKERS.values():
        monkeypatch.setattr(kind, "is_installed", classmethod(lambda _: True))
    assert [kind.name for kind in find_trackers("mlflow, wandb,mlflow")] == ["tensorboard", "mlflow", "wandb"]
    assert [kind.name for kind in find_trackers(None)] == ["tensorboard"]
    monkeypatch.setattr(registry.TensorBoardTracker, "is_installed", classmethod(lambda _: False))
    assert find_trackers(None) == []


# The real libraries, each in a process of its own: they keep threads, and write where the environment says.

PROGRAM = """
import sys
from pathlib import Path
from raytraced.training.callbacks import Reporter
from raytraced.training.loop import train
from raytraced.training.run_folder import RunFolder
from raytraced.training import callbacks, loop
import training.test_trackers as tests

callbacks.draw_pictures = lambda *_: None
folder = RunFolder(Path(sys.argv[1]))
config, make = folder.config, loop.make_trackers
if sys.argv[2:] == ["stop"]:
    loop.make_trackers = lambda *args: [*make(*args), tests.StopAfter(1)]
try:
    train(config, folder)
except KeyboardInterrupt:
    pass
"""


def run_with(tracker, config, **environment):
    """A run with a tracker, stopped after its first epoch and resumed; the run folder."""
    if not TRACKERS[tracker].is_installed():
        pytest.skip(f"{tracker} is not installed: pip install '.[{tracker}]'")
    from raytraced.training.run_folder import create_run_folder

    run = create_run_folder(replace(config, tracker=tracker), "")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB", "MLFLOW", "TRACKIO"))}
    paths = os.pathsep.join(path for path in sys.path if path)
    # No address but this machine's own can be reached: whatever is sent fails.
    nowhere = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    env = kept | environment | nowhere | {"PYTHONPATH": paths}
    for words in (["stop"], []):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, run.path, *words], env=env, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        assert "failed" not in done.stderr, done.stderr
    assert done.stdout == ""  # nothing but our own lines on the terminal
    assert run.read_summary()["epochs"] == 3
    return run


def read_log(file):
    """The records of a .wandb file: seven bytes, then LevelDB's log of blocks, of which each part has a header of seven."""
    content, place, whole = file.read_bytes(), 7, b""
    while place + 7 <= len(content):
        room = 32768 - place % 32768
        if room < 7:  # the end of a block is filled with zeros
            place += room
            continue
        size, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        whole += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


@pytest.mark.slow
def test_wandb_has_every_epoch_offline_in_the_run_folder(config, tmp_path):
    run = run_with("wandb", config)
    from wandb.proto.wandb_internal_pb2 import Record

    files = sorted((run.path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2  # one for each time it was started, with one identifier
    assert len({file.stem for file in files}) == 1
    epochs, results = [], {}
    for record in (Record.FromString(data) for file in files for data in read_log(file)):
        items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        epochs += [(items["epoch"], items["train_loss"])] if "epoch" in items else []
        results |= {item.key: json.loads(item.value_json) for item in record.summary.update if item.key}
    assert epochs == [(line["epoch"], line["train_loss"]) for line in run.read_metrics()]
    assert results["test_accuracy"] == run.read_summary()["test"]["accuracy"]


@pytest.mark.slow
def test_mlflow_has_every_epoch_in_a_database_beside_the_runs(config, tmp_path):
    run = run_with("mlflow", config)
    import sqlite3

    with sqlite3.connect(run.path.parent / "mlflow.db") as base:
        (tracked,) = base.execute("select run_uuid, status, name from runs").fetchall()
        losses = base.execute("select step, value from metrics where key = 'train_loss' order by step").fetchall()
        ((accuracy,),) = base.execute("select value from metrics where key = 'test_accuracy'").fetchall()
        params = dict(base.execute("select key, value from params").fetchall())
    assert tracked[1:] == ("FINISHED", "run")
    assert json.loads((run.path / "trackers.json").read_text())["mlflow"] == {"id": tracked[0], "epochs": 3}
    assert losses == [(line["epoch"], line["train_loss"]) for line in run.read_metrics()]
    assert accuracy == run.read_summary()["test"]["accuracy"]
    assert params["lr"] == str(config.lr)
    assert params["data"] == "stripes"  # no path of this machine


@pytest.mark.slow
def test_trackio_has_every_epoch_in_its_own_database(config, tmp_path):
    run = run_with("trackio", config, TRACKIO_DIR=str(tmp_path / "trackio"))
    import sqlite3

    with sqlite3.connect(tmp_path / "trackio" / "raytraced.db") as base:
        rows = base.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert len({name for name, _, _ in rows}) == 1
    figures = [(step, json.loads(metrics)) for _, step, metrics in rows]
    losses = [(step, one["train_loss"]) for step, one in figures if "train_loss" in one]
    assert losses == [(line["epoch"], line["train_loss"]) for line in run.read_metrics()]
    assert figures[-1][1]["test_accuracy"] == run.read_summary()["test"]["accuracy"]


@pytest.mark.slow
def test_nothing_is_sent_without_being_asked_for(config, tmp_path):
    """The first request of every library to a host would meet a proxy that counts; there is none."""
    import threading
    from http.server import BaseHTTPRequestHandler, HTTPServer

    asked = []

    class Proxy(BaseHTTPRequestHandler):
        def do_CONNECT(self):
            asked.append(self.path)
            self.send_error(502)

        do_GET = do_POST = do_CONNECT  # noqa: N815

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    place = f"http://127.0.0.1:{server.server_port}"
    names = [name for name, kind in TRACKERS.items() if kind.is_installed()]
    from raytraced.training.run_folder import create_run_folder

    run = create_run_folder(replace(config, tracker=",".join(names)), "")
    proxies = {name: place for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY")}
    paths = os.pathsep.join(path for path in sys.path if path)
    own = {"PYTHONPATH": paths, "TRACKIO_DIR": str(tmp_path / "trackio")} | proxies
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, run.path], env=os.environ | own, capture_output=True, text=True, timeout=300
        )
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 0, done.stderr
    assert asked == []
    assert set(json.loads((run.path / "trackers.json").read_text())) == {*names} - {"tensorboard"}

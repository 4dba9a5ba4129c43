"""What a new user meets: one writer a run, stated continuations, data that is found from anywhere, wrong weights printed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import raytraced as rt
from forked import Forked, command, with_parent
from raytraced.__main__ import main
from raytraced.training.run_folder import RunFolder

TINY = ("--batch_size", "16", "--model_options.num_layers", "2", "--model_options.num_experts", "3")


@pytest.fixture
def run_command(monkeypatch, capsys):
    """Run `raytraced WORDS` in this process: exit code, stdout, stderr."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["raytraced", *map(str, words)])
        code = main()
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def stripes(path, num=60):
    labels = np.arange(num) % 3
    images = np.random.default_rng(0).integers(0, 120, (num, 8, 8))
    for label, image in zip(labels, images, strict=True):
        image[label::3] += 100
    np.savez(path, x_train=images.astype(np.uint8), y_train=labels)
    return path


@pytest.fixture
def trained(tmp_path, run_command):
    """A small finished run of two epochs on a file of the user."""
    data = stripes(tmp_path / "stripes.npz")
    words = ("train", "--data", data, "--runs-dir", tmp_path / "runs", "--name", "one", "--epochs", 2, "--quiet", *TINY)
    assert run_command(*words)[0] == 0
    return tmp_path / "runs" / "one"


def test_a_run_finds_its_data_from_anywhere(tmp_path, monkeypatch, run_command):
    stripes(tmp_path / "stripes.npz")
    monkeypatch.chdir(tmp_path)
    assert run_command("train", "--data", "stripes.npz", "--name", "one", "--epochs", 1, "--quiet", *TINY)[0] == 0
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert run_command("evaluate", tmp_path / "runs" / "one")[0] == 0
    (tmp_path / "stripes.npz").rename(tmp_path / "moved.npz")
    code, _, printed = run_command("evaluate", tmp_path / "runs" / "one")
    assert code == 2
    assert "give the path of existing data with --data" in printed
    assert run_command("evaluate", tmp_path / "runs" / "one", "--data", tmp_path / "moved.npz")[0] == 0


def test_a_run_has_one_writer_and_its_death_frees_it(trained, run_command):
    program = f"""
import sys, time
from pathlib import Path
from raytraced.training.run_folder import RunFolder
with RunFolder(Path({str(trained)!r})).writing():
    print("held", flush=True)
    time.sleep(60)
"""
    holder = subprocess.Popen(with_parent([sys.executable, "-c", program]), stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        output = trained.parent
        assert f"running (process {holder.pid})" in run_command("runs", "--runs-dir", output)[1]
        code, _, printed = run_command("resume", trained, "--epochs", 3)
        assert code == 2
        assert f"is being trained by process {holder.pid}" in printed
        assert not (trained / "continuations.jsonl").exists()
    finally:
        holder.kill()
        holder.communicate()
    assert "complete" in run_command("runs", "--runs-dir", output)[1]
    assert run_command("resume", trained, "--epochs", 3, "--quiet")[0] == 0


def test_training_holds_the_lock_while_it_runs(tmp_path):
    data = stripes(tmp_path / "stripes.npz")
    words = ["train", "--data", str(data), "--runs-dir", str(tmp_path), "--name", "one", "--epochs", "2000", *TINY]
    process = Forked(command, *words)
    run = RunFolder(tmp_path / "one")
    try:
        deadline = time.monotonic() + 60
        while run.writer() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert run.writer() == process.pid
        with pytest.raises(ValueError, match=f"is being trained by process {process.pid}"), run.writing():
            pass
        os.kill(process.pid, signal.SIGHUP)  # a terminal that closes: the run saves itself
        printed = process.communicate(timeout=60)[0]
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGHUP
    assert "stopped by SIGHUP" in printed
    assert run.writer() is None
    assert list(run.last.glob("step-*.safetensors"))


def test_an_edited_config_does_not_change_a_run_in_silence(trained, run_command):
    (trained / "summary.json").unlink()
    content = yaml.safe_load((trained / "config.yaml").read_text())
    (trained / "config.yaml").write_text(yaml.safe_dump(content | {"lr": 1.0, "epochs": 9}))
    code, _, printed = run_command("resume", trained, "--quiet")
    assert code == 0
    assert "config.yaml was edited (epochs, lr), but the run continues as it was started" in printed
    assert len(RunFolder(trained).read_metrics()) == 2


def test_a_finished_run_continues_and_says_so(trained, run_command):
    code, printed, _ = run_command("resume", trained)
    assert (code, "is complete" in printed) == (0, True)
    code, printed, _ = run_command("resume", trained, "--epochs", 2)  # no more than it has
    assert (code, "is complete" in printed) == (0, True)
    first = RunFolder(trained).read_metrics()
    assert run_command("resume", trained, "--epochs", 4, "--lr", 0.002, "--quiet")[0] == 0
    (stated,) = RunFolder(trained).read_continuations()
    assert stated["changes"] == {"epochs": {"from": 2, "to": 4}, "lr": {"from": 0.005, "to": 0.002}}
    assert stated["after_epoch"] == 2
    assert stated["summary"]["epochs"] == 2
    history = RunFolder(trained).read_metrics()
    assert history[:2] == first
    assert len(history) == 4
    # 0.002 along a half cosine over 4 epochs of 3 batches, at the last step
    assert history[-1]["learning_rate"] == pytest.approx(0.002 * 0.5 * (1 + np.cos(np.pi * 11 / 12)), rel=1e-6)
    assert RunFolder(trained).config.epochs == 4


def test_fewer_epochs_than_are_done_are_refused(trained, run_command):
    code, _, printed = run_command("resume", trained, "--epochs", 1)
    assert code == 2
    assert "epochs=1: must be more than the 2 that are done" in printed
    assert (trained / "summary.json").exists()


def test_the_best_weights_of_an_unfinished_run_can_be_used(trained, run_command):
    (trained / "summary.json").unlink()
    (trained / "model.safetensors").unlink()
    code, _, printed = run_command("evaluate", trained)
    assert code == 2
    assert "is not complete" in printed
    assert "--weights best" in printed
    assert run_command("evaluate", trained, "--weights", "best")[0] == 0


def test_weights_that_are_not_finite_are_reported(trained, run_command):
    model = rt.load(trained)
    with torch.no_grad():
        model.head.bias[0] = float("nan")
    rt.save(model, trained / "model.safetensors")
    code, printed, error = run_command("evaluate", trained)
    assert code == 2
    assert f"{trained}: 12 of 12 answers are not finite" in error
    assert "nan%" not in printed


def test_predict_prints_several_answers_of_folders_under_a_budget(trained, tmp_path, run_command):
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, shade in (("dark", 10), ("bright", 245)):
        Image.new("L", (8, 8), shade).save(folder / f"{name}.png")
    words = ("predict", trained, folder, "--top", 2, "--max-experts", 1, "--json")
    code, printed, _ = run_command(*words)
    rows = [json.loads(line) for line in printed.splitlines()]
    assert code == 0
    assert [row["image"].rpartition("/")[2] for row in rows] == ["bright.png", "dark.png"]
    assert all(row["experts"] <= 1 for row in rows)
    assert all(row["probability"] >= row["2. probability"] for row in rows)
    assert all(row["answer"] != row["2."] for row in rows)
    assert (
        run_command("predict", trained, folder, "--top", 4)[2]
        .strip()
        .endswith("must lie in 1 … 3, the number of classes")
    )
    assert "there is no such file or folder" in run_command("predict", trained, tmp_path / "none")[2]


def test_predict_draws_the_path_of_my_image(trained, tmp_path, run_command):
    Image.new("L", (8, 8), 40).save(tmp_path / "mine.png")
    picture = tmp_path / "path.png"
    assert run_command("predict", trained, tmp_path / "mine.png", "--sequence", picture)[0] == 0
    with Image.open(picture) as drawn:
        assert drawn.width > 100


def test_an_inverted_image_is_reported(tmp_path, run_command):
    ink = np.zeros((28, 28), np.uint8)
    ink[4:24, 12:16] = 255
    Image.fromarray(ink).save(tmp_path / "ink.png")
    Image.fromarray(255 - ink).save(tmp_path / "paper.png")
    _, _, printed = run_command("predict", "mre-mnist", tmp_path / "ink.png", tmp_path / "paper.png")
    assert "paper.png: seems to be inverted" in printed
    assert "ink.png" not in printed


def test_a_picture_of_curves_is_not_overwritten(trained, tmp_path, monkeypatch, run_command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "compare.png").write_bytes(b"mine")
    code, printed, _ = run_command("compare", trained)
    assert code == 0
    assert printed.splitlines()[-1] == "compare-2.png"
    assert (tmp_path / "compare.png").read_bytes() == b"mine"


def test_the_command_ends_quietly_while_it_is_being_imported():
    process = subprocess.Popen(
        with_parent([sys.executable, "-X", "importtime", "-m", "raytraced", "--help"]),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    for line in process.stderr:
        if "jsonargparse" in line:
            break
    process.send_signal(signal.SIGINT)
    printed = process.communicate(timeout=60)[1]
    assert process.returncode in (0, 130)
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("train", "--learning-rate", "1"), "did you mean --lr?"),
        (("train", "--seed", str(2**70)), "must be below 2**63"),
        (("train", "--data", "fashion-mnits"), "did you mean fashion-mnist?"),
        (("train", "--model_options.num_experts", "100000", "--epochs", "1"), "not enough memory"),
        (
            ("train", "--model_options.num_layers", "1000000", "--epochs", "1"),
            "not enough memory for 7,392,000,042 parameters: training them takes some 296 GB",
        ),
    ],
)
def test_a_mistake_is_one_line(words, expected, tmp_path, run_command):
    code, _, error = run_command(*words, *(("--runs-dir", tmp_path / "runs") if words[0] == "train" else ()))
    assert code == 2
    assert expected in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize("flag", ["-c", "--config="])
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "holds no options"),
        (b"only words", "holds no options"),
        (b"epochs: [1\n model: {", "is not valid YAML, line 2, column 7"),
        (b"\xff\xfe\x00ep", "is not UTF-8 text"),
    ],
)
def test_a_file_that_holds_no_options_is_named(content, expected, flag, tmp_path, run_command):
    path = tmp_path / "options.yaml"
    path.write_bytes(content)
    code, _, error = run_command("train", *(f"{flag}{path}",) if "=" in flag else (flag, path))
    assert code == 2
    assert error == f"raytraced: train: -c {path}: {expected}; give a YAML file as --print-config prints it\n"


@pytest.mark.parametrize("content", [b"epochs: [1\n model: {", b"\xff\xfe\x00ep", b"lr: -1"])
def test_the_configuration_of_a_run_is_named(content, tmp_path, run_command):
    (tmp_path / "one").mkdir()
    (tmp_path / "one/config.yaml").write_bytes(content)
    code, _, error = run_command("resume", tmp_path / "one")
    assert code == 2
    assert f"{tmp_path}/one/config.yaml: is not the configuration of a run" in error


def test_ctrl_c_meets_no_import_but_ours():
    # what the package imports before __main__ is ready for Ctrl-C; without site, which imports what it likes
    script = "import sys; sys.path.insert(0, sys.argv[1]); import raytraced.__main__; print('typing' in sys.modules)"
    source = str(Path(rt.__file__).parents[1])
    printed = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script, source], capture_output=True, text=True, check=True, timeout=60
    )
    assert printed.stdout == "False\n"


def test_events_are_one_file_a_run_resumed_or_not(trained, run_command):
    assert run_command("resume", trained, "--epochs", 3, "--quiet")[0] == 0
    (file,) = (trained / "events").iterdir()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(file))
    events.Reload()
    printed = [(event.step, event.value) for event in events.Scalars("train_loss")]
    expected = [(line["epoch"], line["train_loss"]) for line in RunFolder(trained).read_metrics()]
    assert [step for step, _ in printed] == [1, 2, 3]
    np.testing.assert_allclose([value for _, value in printed], [value for _, value in expected], rtol=1e-6)


def test_a_batch_larger_than_the_data_is_reported(tmp_path, run_command):
    data = stripes(tmp_path / "stripes.npz")
    words = ("train", "--data", data, "--runs-dir", tmp_path, "--epochs", 1, "--quiet", "--batch_size", 1000)
    _, _, printed = run_command(*words)
    assert "batch_size=1000: there are only 42 training samples" in printed


def test_a_full_disk_while_writing_the_best_weights_says_how_to_continue(tmp_path, monkeypatch, run_command):
    data = stripes(tmp_path / "stripes.npz")
    from raytraced.training import loop

    def fill(path, tensors, card):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(loop, "save_tensors", fill)
    words = ("train", "--data", data, "--runs-dir", tmp_path, "--name", "one", "--epochs", 1, "--quiet", *TINY)
    code, _, printed = run_command(*words)
    assert code == 2
    assert "No space left on device" in printed
    assert f"raytraced resume {tmp_path / 'one'}" in printed


def test_many_classes_show_the_worst_and_the_best(tmp_path, run_command):
    labels = np.arange(150) % 30
    images = np.random.default_rng(0).integers(0, 255, (150, 8, 8)).astype(np.uint8)
    np.savez(tmp_path / "many.npz", x_train=images, y_train=labels)
    words = (
        "train",
        "--data",
        tmp_path / "many.npz",
        "--runs-dir",
        tmp_path,
        "--name",
        "one",
        "--epochs",
        1,
        "--quiet",
    )
    assert run_command(*words, *TINY)[0] == 0
    _, printed, _ = run_command("evaluate", tmp_path / "one", "--split", "train")
    assert "the worst 10 and the best 10 of 30" in printed
    assert len(json.loads(run_command("evaluate", tmp_path / "one", "--json")[1])["accuracy_per_class"]) == 30


@pytest.mark.parametrize("content", ["epochs: [", "", "epochs: many"])
def test_a_complete_run_is_complete_whatever_became_of_its_config(trained, run_command, content):
    (trained / "config.yaml").write_text(content)
    code, printed, warned = run_command("resume", trained)
    assert (code, "is complete" in printed, warned) == (0, True, "")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("evaluate", "mre-digits", "--exit-every", "expert"), "exit_every=expert: has no effect without --confidence: give it too"),
        (("evaluate", "mre-digts"), "did you mean mre-digits?"),
        (("train", "--device", "meta"), "device=meta: cannot compute; use cpu or cuda"),
        (("train", "--name", ".."), "name='..': must be a plain folder name"),
        (("train", "--data", ""), "data=: no such data set, file or folder"),
        (("models", "--seed", "-1"), "seed=-1: must lie in 0"),
        (("train", "--data", "shakespeare", "--model", "gpt-mre", "--model-options.context", "9"), "give --data_options.context"),
        (("train", "--data", "shakespeare", "--model", "gpt-mre", "--exit-loss", "0.5"), "exit_loss=0.5: model 'gpt-mre' has no exits; leave it at 0"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_with_their_remedy(tmp_path, monkeypatch, run_command, words, expected):
    monkeypatch.chdir(tmp_path)
    code, _, error = run_command(*words)
    assert (code, expected in error, error.count("\n")) == (2, True, 1), error
    assert not list(tmp_path.iterdir())


ODD = {"epochs: null": "epochs=None: must be a whole number", "clip: [1]": "clip", "model_options: 3": "model_options"}


@pytest.mark.parametrize(("content", "expected"), ODD.items())
def test_a_file_of_options_with_odd_values_is_one_line(tmp_path, run_command, content, expected):
    (tmp_path / "options.yaml").write_text(content)
    code, _, error = run_command("train", "-c", tmp_path / "options.yaml", "--runs-dir", tmp_path / "runs")
    assert (code, expected in error, error.count("\n")) == (2, True, 1), error


def test_an_option_that_only_another_command_has_is_not_offered(trained, run_command):
    code, _, error = run_command("resume", trained, "--batch-size", 3)
    assert (code, "did you mean" in error) == (2, False), error


def test_threads_of_zero_are_refused_when_a_run_continues(trained, run_command):
    code, _, error = run_command("resume", trained, "--epochs", 3, "--threads", 0)
    assert (code, error) == (2, "raytraced: threads=0: must lie in 1 … 1024; the number of cores is a good choice\n")

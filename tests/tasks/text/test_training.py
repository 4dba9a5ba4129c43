"""End to end, in small: trained on the bundled text, stopped and resumed, by one process and by two."""

import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import raytraced
from raytraced.cli.main import main
from raytraced.tasks.text.task import TextTask
from raytraced.training.callbacks import Reporter
from raytraced.training.config import TrainConfig, write_config
from raytraced.training.interrupt import Interrupted
from raytraced.training.loop import train
from raytraced.training.objective import Objective
from raytraced.training.run_folder import RunFolder, create_run_folder
from raytraced.training.state import list_checkpoints, load_checkpoint
from training.runs import assert_same_run
from training.test_distributed import torchrun
from training.test_resume import SignalAt


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setattr("raytraced.training.callbacks.draw_pictures", lambda *_: None)
    monkeypatch.setattr("raytraced.training.trackers.tensorboard.write_event", lambda *_: None)
    return TrainConfig(
        data="shakespeare",
        model="gpt-mre",
        model_options={
            "dim": 16,
            "num_heads": 2,
            "hidden": 16,
            "num_experts": 3,
            "train_select": "sample",
        },
        data_options={"context": 16, "steps": 6, "eval_tokens": 512},
        epochs=2,
        batch_size=9,
        lr=0.01,
        optimizer="adamw",
        threads=1,
        runs_dir=str(tmp_path),
        name="run",
    )


def test_it_learns_is_evaluated_and_resumes_where_it_was_stopped(config, tmp_path, capsys):
    whole = train(replace(config, name="whole"))
    first, last = whole.read_metrics()
    assert last["train_bits_per_byte"] < first["train_bits_per_byte"] < 9
    assert last["train_loss"] == pytest.approx(last["train_bits_per_byte"] * math.log(2))
    run = create_run_folder(config, "")
    for steps in (4, 5):  # within an epoch, each time
        with pytest.raises(Interrupted):
            train(config, run, SignalAt(steps))
    train(config, run)
    assert_same_run(run, whole)

    model, summary = raytraced.load(run.path), whole.read_summary()
    assert (model.card.task, model.card.data) == ("text", "shakespeare")
    spec = {"context": 16, "vocab_size": 256, "num_heads": 2, "depth": 2, "path_tokens": 1}
    assert model.card.spec == spec | {"routing_input": "token", "routing_dim": 16}
    assert summary["test"]["num_samples"] == 32
    assert main(["evaluate", str(run.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == summary["test"]
    assert main(["evaluate", str(run.path)]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("bits_per_byte", "letter", "position 4-16", "at most so many experts"))
    (tmp_path / "other.txt").write_bytes(b"\xff\xfe is no UTF-8, and is fine. " * 40)
    assert main(["evaluate", str(run.path), "--data", str(tmp_path / "other.txt")]) == 0
    assert main(["runs", "--runs-dir", str(tmp_path)]) == 0


def test_a_batch_may_have_more_windows_than_a_short_text(config, tmp_path):
    class Warned(Reporter):
        def warn(self, text):
            raise AssertionError(text)

    (tmp_path / "short.txt").write_bytes(b"Sing, goddess, the anger of Peleus' son. " * 9)
    data = {"data": str(tmp_path / "short.txt"), "data_options": config.data_options | {"steps": 2}}
    run = train(replace(config, **data, batch_size=30, epochs=1), reporter=Warned())
    assert run.read_metrics()[-1]["step"] == 2  # each of 30 windows, of which the text has 21 that do not overlap


def test_two_shares_of_a_batch_have_the_gradient_of_the_whole(config):
    task, torch_seed = TextTask(), 11
    data = task.load(config.data, **config.data_options)

    def gradients(world):
        torch.manual_seed(0)
        model = task.build(config.model, data, config.model_options)
        for rank in range(world):
            objective = Objective(model, config, task, world)
            batch = next(task.loader(data, "train", 9, {}, rank=rank, world_size=world).epoch(0))
            (objective(batch, torch_seed, 9 * 16).loss / world).backward()
        return [parameter.grad for parameter in model.parameters()]

    for one, other in zip(gradients(1), gradients(2), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_do_what_one_does(config, tmp_path, strategy):
    config = replace(config, optimizer="sgd")  # AdamW would make whole steps of the rounding of gradients near zero
    whole = train(replace(config, name="whole"))
    (tmp_path / "config.yaml").write_text(write_config(replace(config, strategy=strategy)))
    torchrun(2, "-m", "raytraced.cli.main", "train", "-c", str(tmp_path / "config.yaml"))
    run = RunFolder(tmp_path / "run")
    for ours, theirs in zip(run.read_metrics(), whole.read_metrics(), strict=True):
        for name in (
            "train_bits_per_byte",
            "train_experts",
            "validation_bits_per_byte",
            "validation_experts",
            "gradient_norm",
        ):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4), name
    one, other = raytraced.load(run.path).state_dict(), raytraced.load(whole.path).state_dict()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-3, atol=1e-4)


class StopAt(Reporter):
    """Sends SIGINT after so many steps, and keeps warnings."""

    def __init__(self, step):
        self.step, self.warnings = step, []

    def on_step(self, state):
        if state.step == self.step:
            os.kill(os.getpid(), signal.SIGINT)

    def warn(self, text):
        self.warnings.append(text)


@pytest.mark.parametrize("change", ["longer", "edited", "same"])
def test_a_text_that_changed_is_reported_when_a_run_is_resumed(config, tmp_path, change):
    file = tmp_path / "own.txt"
    file.write_bytes(b"Sing, goddess, the anger of Peleus' son. " * 20)
    config = replace(config, data=str(file), epochs=2)
    run = create_run_folder(config, "")
    with pytest.raises(Interrupted):
        train(config, run, StopAt(1))
    content = file.read_bytes()
    file.write_bytes({"longer": content + b"more", "edited": b"s" + content[1:], "same": content}[change])
    reporter = StopAt(0)
    train(config, run, reporter)
    names = {"longer": "number of tokens, content", "edited": "content"}.get(change)
    expected = f"data={file}: is not what the run began with ({names} differ); training continues on the new data, "
    assert [warning.startswith(expected) for warning in reporter.warnings] == [True] * (change != "same")


def test_a_text_cut_short_while_it_is_trained_on_is_one_line_and_keeps_the_checkpoint(config, tmp_path):
    file = tmp_path / "own.txt"
    file.write_bytes(b"Sing, goddess, the anger of Peleus' son. " * 4000)
    config = replace(config, data=str(file), epochs=3, checkpoint_steps=1)

    class Cutting(Reporter):
        def on_step(self, state):
            if state.step == 2:
                os.truncate(file, 5000)

    with pytest.raises(
        OSError, match=r"is cut short: it has 5,000 bytes, at least .* were there .*raytraced resume"
    ) as error:
        train(config, None, Cutting())
    assert error.value.filename == str(file)
    assert "\n" not in str(error.value)
    (newest, *_) = list_checkpoints(Path(config.runs_dir) / config.name / "last")
    assert load_checkpoint(newest).step >= 2

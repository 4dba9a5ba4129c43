"""A new task is one new file and one line in TASKS, and its models one line in FAMILIES: nothing else knows of them."""

import json
import math
from pathlib import Path

import pytest
import torch

import raytraced
from raytraced import tasks
from raytraced.cli.main import main
from raytraced.cost import sample_cost
from raytraced.models.registry import FAMILIES
from raytraced.tasks.registry import TASKS, TaskInfo, find_task


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setattr(
        tasks, "__path__", [*tasks.__path__, str(Path(__file__).parent)]
    )  # the file, as if it lay there
    monkeypatch.setitem(TASKS, "next-byte", TaskInfo("next_byte:NextByte", "next_byte:NAMES", "next_byte:takes_path"))
    monkeypatch.setitem(FAMILIES, "bytes", "tasks.next_byte:ByteModel")


def train(folder, *words):
    options = {
        "data": "pangrams",
        "model": "bytes-mre",
        "epochs": 3,
        "batch-size": 5,
        "runs-dir": folder,
        "quiet": "true",
    }
    options |= {"lr": 0.02, "model-options.dim": 8, "model-options.num-layers": 2, "model-options.num-experts": 3}
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    assert main(["train", *flags, *words]) == 0


def test_it_is_trained_evaluated_saved_and_loaded(tmp_path, capsys):
    train(tmp_path, "--name", "run", "--anytime-loss", "0.25")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    first, *_, last = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert last["train_bits"] < first["train_bits"] < 8.5  # before it learns, 8 bits per byte
    assert summary["best_validation"] == min(first["validation_bits"], last["validation_bits"])  # less is better

    model = raytraced.load(tmp_path / "run")
    task, data = find_task("pangrams"), find_task("pangrams").load("pangrams")
    assert (model.card.task, model.card.data, model.card.spec) == ("next-byte", "pangrams", {"window": 8})
    (batch,) = task.loader(data, "test", 100, {}, shuffle=False).epoch(0)
    assert not batch.mask[-1].all()
    with torch.no_grad():
        out = model(batch.inputs, mask=batch.mask)
    each = -out.logits.log_softmax(-1).gather(-1, batch.targets[..., None])[..., 0][batch.mask]
    assert summary["test"]["bits"] == pytest.approx(float(each.mean()) / math.log(2), rel=1e-6)
    # Padding neither routes nor costs: means are over real bytes alone.
    num, cost = int(batch.mask.sum()), sample_cost(model, batch.inputs, out, batch.mask)
    assert summary["test"]["mean_experts"] == pytest.approx(int(out.num_experts.sum()) / num)
    assert summary["test"]["macs"]["total"] == pytest.approx(int(cost.macs.sum()) / num)
    assert not out.num_experts[~batch.mask].any()
    assert summary["test"]["budgets"][-1]["bits"] == pytest.approx(summary["test"]["bits"])

    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == summary["test"]
    assert main(["evaluate", str(tmp_path / "run")]) == 0
    assert "bits" in capsys.readouterr().out
    assert main(["runs", "--runs-dir", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["test_bits"] == summary["test"]["bits"]
    assert main(["evaluate", str(tmp_path / "run"), "--data", "digits"]) == 2
    assert "data=digits: is for models of the task images" in capsys.readouterr().err
    assert main(["evaluate", "mre-digits", "--data", "pangrams"]) == 2
    assert "data=pangrams: is for models of the task next-byte" in capsys.readouterr().err


def test_a_resumed_run_ends_with_the_same_weights(tmp_path, monkeypatch):
    from raytraced.training.run_folder import RunFolder

    train(tmp_path, "--name", "whole", "--checkpoint-steps", "2")
    write_metrics, lines = RunFolder.write_metrics, []
    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "write_metrics", lambda *args: lines.append(args) or write_metrics(*args) or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(tmp_path, "--name", "cut", "--checkpoint-steps", "2")
    for checkpoint in sorted((tmp_path / "cut" / "last").iterdir())[1:]:
        checkpoint.unlink()  # back to the middle of an epoch
    assert len(lines) == 1
    assert main(["resume", str(tmp_path / "cut"), "--quiet"]) == 0
    whole, cut = (raytraced.load(tmp_path / name).state_dict() for name in ("whole", "cut"))
    assert all(torch.equal(whole[key], cut[key]) for key in whole)


def test_a_text_of_ones_own_is_taken_by_its_path(tmp_path):
    (tmp_path / "own.txt").write_bytes(b"abcdefg " * 30)
    assert find_task(str(tmp_path / "own.txt")).name == "next-byte"
    assert find_task("digits").name == "images"
    train(tmp_path, "--data", str(tmp_path / "own.txt"), "--name", "own", "--data-options.window", "5")
    assert raytraced.load(tmp_path / "own").card.spec == {"window": 5}

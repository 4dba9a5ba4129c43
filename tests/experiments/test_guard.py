"""The guard records a model's training and answers, and notices a change in the last bit."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

import raytraced as rt
from experiments import guard
from raytraced.cli.main import main


@pytest.fixture
def one_thread():
    """The guard sets the number of threads; restore it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_training_is_recorded_step_by_step_and_a_loss_that_changed_in_its_last_bit_is_noticed(tmp_path, monkeypatch):
    # The command runs in this process, which has imported PyTorch already.
    run = lambda command, **_: SimpleNamespace(returncode=main(command[3:]), stderr="")  # noqa: E731
    monkeypatch.setattr(guard.subprocess, "run", run)
    recorded = guard.record_training("top-k", num_steps=2)
    assert len(recorded["losses"]) == 2
    assert all(map(math.isfinite, recorded["losses"]))
    monkeypatch.setattr(guard, "record_training", lambda name: recorded)
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    assert guard.main([str(before), "--only", "train top-k"]) == 0
    assert json.loads(before.read_text()) == {"train top-k": recorded}
    assert guard.main([str(after), "--only", "train top-k", "--against", str(before)]) == 0
    first, last = recorded["losses"]
    changed = recorded | {"losses": [first, math.nextafter(last, 0.0)]}
    monkeypatch.setattr(guard, "record_training", lambda name: changed)
    assert guard.main([str(after), "--only", "train top-k", "--against", str(before)]) == 1


def test_a_weight_that_changed_is_noticed_in_the_answers(one_thread, monkeypatch):
    before = guard.record_answers("mre-digits")
    assert guard.compare({"answer": before}, {"answer": guard.record_answers("mre-digits")}) == []
    model = rt.load("mre-digits")
    with torch.no_grad():
        model.head.bias[0] += 1e-3
    monkeypatch.setattr(rt, "load", lambda name: model)
    after = guard.record_answers("mre-digits")
    assert guard.compare({"answer": before}, {"answer": after}) == [f"answer: {part}" for part in before]


def test_a_part_that_was_not_recorded_again_counts_as_changed():
    assert guard.compare({"train mre": {"losses": [1.0]}}, {}) == ["train mre: losses"]


def test_an_unknown_part_is_one_line_and_code_2(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        guard.main([str(tmp_path / "a.json"), "--only", "train mer"])
    assert ended.value.code == 2
    assert "--only train mer: no such part; did you mean train mre?" in capsys.readouterr().err

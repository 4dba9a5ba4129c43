"""How sure is sure enough: chosen on validation data alone, the cheapest that keeps what it promises, kept in the model's file."""

import json

import pytest
import torch

import raytraced as rt
import raytraced.cost
from raytraced.__main__ import main
from raytraced.tasks.table import find_task
from raytraced.training.calibration import Looked, calibrate, first_sure, look_at_all


@pytest.fixture
def raytraced(monkeypatch, capsys):
    """Run a command, and give what it printed."""

    def run(*args, code=0):
        monkeypatch.setattr("sys.argv", ["raytraced", *args])
        assert (main() or 0) == code
        return capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def digits():
    model, task = rt.load("mre-digits"), find_task("digits")
    return model, task, task.load_for(model, "digits", None)


def test_the_first_sure_look_or_the_last():
    confidence = torch.tensor([[0.9, 0.2, 0.3], [0.2, 0.8, 0.9], [0.1, 0.2, 0.3]])
    assert first_sure(confidence, 0.8).tolist() == [0, 1, 2]


def made(correct, confidence):
    correct, confidence = torch.tensor(correct, dtype=torch.float64), torch.tensor(confidence, dtype=torch.float64)
    steps = torch.arange(correct.shape[1], dtype=torch.float64).expand_as(correct)
    return Looked(confidence, correct, steps, 10 + steps, 10 + steps / 2)


def test_the_cheapest_threshold_that_loses_no_more_than_allowed():
    # half of the samples are right at once where they are 0.9 sure; the others, 0.5 sure, only at the end
    seen = made([[1, 1, 1], [0, 0, 1]] * 50, [[0.9, 0.95, 0.99], [0.5, 0.6, 0.7]] * 50)
    sure = calibrate(seen, 0.0)
    assert 0.6 < sure <= 0.9
    assert seen.stop(sure) == {"accuracy": 1.0, "experts": 1.0, "macs": 11.0}
    assert seen.to_the_end == {"accuracy": 1.0, "experts": 2.0, "macs": 11.0}
    assert calibrate(seen, 50.0) <= 0.5  # half of the accuracy may go
    # one in a hundred is wrong at once: a loss of 1 point is allowed, a loss of 0.9 is not
    seen = made([[1, 1]] * 99 + [[0, 1]], [[0.9, 0.95]] * 100)
    assert calibrate(seen, 1.0) <= 0.9 < calibrate(seen, 0.9)


def test_what_was_looked_at_is_what_stopping_gives(digits):
    model, task, data = digits
    for look in ("layer", "expert"):
        seen = look_at_all(model, task, data, "test", look, batch_size=100)
        (batch,) = task.loader(data, "test", 1000, {}, shuffle=False, rank=0, world_size=1, device="cpu").epoch(0)
        for sure in (0.5, 0.9, 0.99):
            with torch.no_grad():
                out = model(batch.inputs, sure=sure, look=look)
            found = seen.stop(sure)
            assert found["accuracy"] == pytest.approx(float((out.logits.argmax(-1) == batch.targets).double().mean()))
            assert found["experts"] == pytest.approx(float(out.num_runs.double().mean()))
            cost = rt.cost.sample_cost(model, batch.inputs, out).multiply_adds
            assert found["macs"] == pytest.approx(float(cost.double().mean()))


def test_test_labels_have_no_say(digits, monkeypatch):
    model, task, data = digits
    from raytraced.training import calibration

    honest = calibration.calibration(model, task, data, 0.5, "layer")
    real = calibration.look_at_all

    def wrong(model, task, data, split, look):
        seen = real(model, task, data, split, look)
        return seen if split == "validation" else seen._replace(correct=1 - seen.correct)

    monkeypatch.setattr(calibration, "look_at_all", wrong)
    lied = calibration.calibration(model, task, data, 0.5, "layer")
    assert lied["sure"] == honest["sure"]
    assert lied["test"] != honest["test"]


def test_the_command_keeps_it_in_the_file_and_others_use_it(raytraced, tmp_path):
    file = tmp_path / "mine.safetensors"
    told = raytraced("calibrate", "mre-digits", "--within", "0.5", "--file", str(file), "--json")
    found = json.loads(told.out)
    assert rt.load(file).card.calibration == found
    assert found["validation"]["stopped"]["macs"] < found["validation"]["to_the_end"]["macs"]
    lost = found["validation"]["to_the_end"]["accuracy"] - found["validation"]["stopped"]["accuracy"]
    assert lost <= 0.005 + 1e-9
    stopped = json.loads(raytraced("evaluate", str(file), "--sure", "calibrated", "--json").out)
    assert stopped["accuracy"] == pytest.approx(found["test"]["stopped"]["accuracy"])
    assert stopped["mean_experts"] == pytest.approx(found["test"]["stopped"]["experts"])
    by_hand = json.loads(raytraced("evaluate", str(file), "--sure", str(found["sure"]), "--json").out)
    assert by_hand["macs"] == stopped["macs"]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["calibrate", "mre-digits"], "is a shipped model and stays as it is; say where to with --file"),
        (["calibrate", "mre-digits", "--within", "-1", "--file", "x"], "within=-1.0: must be at least 0 points"),
        (["evaluate", "mre-digits", "--sure", "2"], "sure=2.0: must lie in 0 … 1, it is a probability"),
        (["evaluate", "mre-digits", "--sure", "0.9", "--look", "word"], "look"),
    ],
)
def test_mistakes_end_in_one_line(raytraced, args, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = raytraced(*args, code=2)
    assert told in done.err
    assert len(done.err.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_what_everyone_gets_at_a_look_and_who_ran_how_many():
    seen = made([[1, 1, 1], [0, 0, 1]] * 50, [[0.9, 0.95, 0.99], [0.5, 0.6, 0.7]] * 50)
    assert [row["accuracy"] for row in seen.looks()] == [0.5, 0.5, 1.0]
    assert [row["macs"] for row in seen.looks()] == [10.0, 10.5, 11.0]  # without the looks before
    assert seen.by_runs(0.8) == {"0": (50, 50), "2": (50, 50)}
    assert seen.by_runs(0.4) == {"0": (100, 50)}

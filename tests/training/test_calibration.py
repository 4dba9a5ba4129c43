"""The confidence threshold: chosen on validation data alone, the cheapest that keeps its promise, kept in the model's file."""

import json
import re
from dataclasses import replace
from functools import partial

import pytest
import torch

import raytraced as rt
import raytraced.cost
from raytraced.__main__ import main
from raytraced.tasks.images.dataset import Split
from raytraced.tasks.registry import find_task
from raytraced.training import calibration
from raytraced.training.calibration import ExitTable, calibrate, evaluate_exits, first_confident_exit
from raytraced.training.evaluation import evaluate, predict_batch
from raytraced.training.world import World


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


def test_the_first_confident_exit_or_the_last():
    confidence = torch.tensor([[0.9, 0.2, 0.3], [0.2, 0.8, 0.9], [0.1, 0.2, 0.3]])
    assert first_confident_exit(confidence, 0.8).tolist() == [0, 1, 2]


def made(correct, confidence, num_classes=10):
    correct, confidence = torch.tensor(correct, dtype=torch.float64), torch.tensor(confidence, dtype=torch.float64)
    steps = torch.arange(correct.shape[1], dtype=torch.float64).expand_as(correct)
    whole = torch.stack((correct[:, -1], steps[:, -1], 10 + steps[:, -1] / 2), 1)
    return ExitTable(confidence, correct, steps, 10 + steps, 10 + steps / 2, whole, num_classes)


def test_the_cheapest_threshold_that_loses_no_more_than_allowed():
    # half of the samples are right at once, with confidence 0.9; the others, with 0.5, only at the end
    seen = made([[1, 1, 1], [0, 0, 1]] * 50, [[0.9, 0.95, 0.99], [0.5, 0.6, 0.7]] * 50)
    threshold = calibrate(seen, 0.0)
    assert 0.6 < threshold <= 0.9
    assert seen.stop(threshold) == {"accuracy": 1.0, "experts": 1.0, "macs": 11.0}
    assert seen.to_the_end == {"accuracy": 1.0, "experts": 2.0, "macs": 11.0}
    assert calibrate(seen, 50.0) <= 0.5  # half of the accuracy may go
    # one in a hundred is wrong at once: a loss of 1 point is allowed, a loss of 0.9 is not
    seen = made([[1, 1]] * 99 + [[0, 1]], [[0.9, 0.95]] * 100)
    assert calibrate(seen, 1.0) <= 0.9 < calibrate(seen, 0.9)


def test_the_table_of_exits_is_what_early_exit_gives(digits):
    model, task, data = digits
    for exit_every in ("layer", "expert"):
        seen = evaluate_exits(model, task, data, "test", exit_every, batch_size=100)
        (batch,) = task.loader(data, "test", 1000, {}, shuffle=False, rank=0, world_size=1, device="cpu").epoch(0)
        for threshold in (0.5, 0.9, 0.99):
            with torch.no_grad():
                out = model(batch.inputs, confidence=threshold, exit_every=exit_every)
            found = seen.stop(threshold)
            assert found["accuracy"] == pytest.approx(float((out.logits.argmax(-1) == batch.targets).double().mean()))
            assert found["experts"] == pytest.approx(float(out.num_runs.double().mean()))
            cost = rt.cost.sample_cost(model, batch.inputs, out).macs
            assert found["macs"] == pytest.approx(float(cost.double().mean()))


def test_test_labels_have_no_influence(digits, monkeypatch):
    model, task, data = digits
    honest = calibration.calibration(model, task, data, 0.5, "layer")
    real = calibration.evaluate_exits

    def wrong(model, task, data, split, exit_every):
        seen = real(model, task, data, split, exit_every)
        return seen if split == "validation" else seen._replace(correct=1 - seen.correct)

    monkeypatch.setattr(calibration, "evaluate_exits", wrong)
    lied = calibration.calibration(model, task, data, 0.5, "layer")
    assert lied["confidence"] == honest["confidence"]
    assert lied["test"] != honest["test"]


def test_the_command_keeps_it_in_the_file_and_others_use_it(raytraced, tmp_path):
    file = tmp_path / "mine.safetensors"
    printed = raytraced("calibrate", "mre-digits", "--within", "0.5", "--output", str(file), "--json")
    found = json.loads(printed.out)
    assert rt.load(file).card.dial == found.pop("dial")
    assert rt.load(file).card.calibration == found
    assert found["validation"]["stopped"]["macs"] < found["validation"]["to_the_end"]["macs"]
    lost = found["validation"]["to_the_end"]["accuracy"] - found["validation"]["stopped"]["accuracy"]
    assert lost <= 0.005 + 1e-9
    stopped = json.loads(raytraced("evaluate", str(file), "--confidence", "calibrated", "--json").out)
    assert stopped["accuracy"] == pytest.approx(found["test"]["stopped"]["accuracy"])
    assert stopped["mean_experts"] == pytest.approx(found["test"]["stopped"]["experts"])
    by_hand = json.loads(raytraced("evaluate", str(file), "--confidence", str(found["confidence"]), "--json").out)
    assert by_hand["macs"] == stopped["macs"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["calibrate", "mre-digits"], "is a shipped model, which is not changed; give a file to write with --output"),
        (["calibrate", "mre-digits", "--within", "-1", "--output", "x"], "within=-1.0: must be at least 0 points"),
        (["evaluate", "mre-digits", "--confidence", "2"], "confidence=2.0: must lie in 0 … 1, it is a probability"),
        (["evaluate", "mre-digits", "--confidence", "0.9", "--exit-every", "word"], "exit_every"),
    ],
)
def test_mistakes_end_in_one_line(raytraced, args, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = raytraced(*args, code=2)
    assert message in done.err
    assert len(done.err.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_figures_of_each_exit_and_by_number_of_experts():
    seen = made([[1, 1, 1], [0, 0, 1]] * 50, [[0.9, 0.95, 0.99], [0.5, 0.6, 0.7]] * 50)
    assert [row["accuracy"] for row in seen.exits()] == [0.5, 0.5, 1.0]
    assert [row["macs"] for row in seen.exits()] == [10.0, 10.5, 11.0]  # without the output layers of earlier exits
    assert seen.by_runs(0.8) == {"0": (50, 50), "2": (50, 50)}
    assert seen.by_runs(0.4) == {"0": (100, 50)}


def test_a_threshold_is_never_below_chance():
    """Without that, a validation split on which no expert is needed gives a threshold at which none ever runs."""
    for num_classes in (2, 3, 4):
        seen = made([[1, 1]] * 24, [[0.95, 0.99]] * 24, num_classes)
        assert calibrate(seen, 0.1) > 1 / num_classes


@pytest.mark.parametrize("exit_every", ["layer", "expert"])
def test_the_row_without_early_exit_is_what_evaluation_gives(digits, exit_every):
    model, task, data = digits
    found = evaluate_exits(model, task, data, "test", exit_every).to_the_end
    world = World(0, 1, torch.device("cpu"))
    result = evaluate(task, data, "test", partial(predict_batch, model), world, batch_size=1000, full=True)
    assert found["accuracy"] == pytest.approx(result["accuracy"])
    assert found["experts"] == pytest.approx(result["mean_experts"])
    assert found["macs"] == pytest.approx(result["macs"]["total"])


def test_a_sample_whose_probability_rounds_to_one_is_followed_to_the_end(digits, monkeypatch):
    model, task, data = digits
    with torch.no_grad():
        model.head.weight *= 1000  # every answer is certain, in float32
        seen = evaluate_exits(model, task, data, "test", "layer")
        model.head.weight /= 1000
    assert bool((seen.confidence[:, 0] == 1).any())
    assert seen.experts[:, -1].mean() == pytest.approx(float(seen.whole[:, 1].mean()))


def test_the_interval_narrows_with_the_number_of_samples_and_holds_the_loss():
    widths = []
    for num in (10, 100, 1000):
        seen = made([[1, 1]] * (9 * num // 10) + [[0, 1]] * (num // 10), [[0.9, 0.95]] * num)
        low, high = seen.interval(0.5)
        assert low < 10 < high
        widths.append(high - low)
    assert widths[0] > 2 * widths[1] > 4 * widths[2]
    low, high = made([[1, 1]] * 24, [[0.9, 0.95]] * 24).interval(0.5)
    assert low < 0 < 5 < high  # 24 samples without a difference do not prove that there is none


def test_too_few_validation_images_are_reported_with_the_number_needed(digits, capsys):
    model, task, data = digits
    few = replace(data, validation=Split(data.validation.images[:24], data.validation.labels[:24]))
    found = calibration.calibration(model, task, few, 0.1, "layer")
    (line,) = capsys.readouterr().err.splitlines()
    assert "within=0.1: needs at least 1,000 validation images, there are 24; none of them may be lost" in line
    assert found["validation"]["stopped"]["accuracy"] >= found["validation"]["to_the_end"]["accuracy"]
    low, high = found["interval"]["validation"]
    assert low < 0 < 5 < high
    calibration.calibration(model, task, data, 50.0, "layer")
    assert capsys.readouterr().err == ""  # 145 images are enough for 50 points


def test_an_interval_beyond_the_loss_that_was_asked_for_is_reported(digits, capsys):
    model, task, data = digits
    few = replace(data, validation=Split(data.validation.images[:24], data.validation.labels[:24]))
    found = calibration.calibration(model, task, few, 10.0, "layer")
    assert found["interval"]["validation"][1] > 10  # else this test tests nothing
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(r"within=10: the loss may be up to \d+\.\d points \(95 %\) by 24 validation images; ", line)
    assert re.search(r"; (about [\d,]+ would do|choose a smaller --within to lose less)$", line)


def test_as_many_samples_as_would_do_keep_the_interval_within():
    def table(times):  # of 25 samples one is lost
        return made([[1, 1]] * 24 * times + [[0, 1]] * times, [[0.9, 0.95]] * 25 * times)

    few = table(1)
    assert few.interval(0.5)[1] > 10
    enough = few.samples_for(0.5, 10.0)
    assert 25 < enough < 200
    assert table(enough // 25 + 1).interval(0.5)[1] <= 10 < table(enough // 50).interval(0.5)[1]
    assert few.samples_for(0.5, 4.0) is None  # the loss itself is as large
    assert few.samples_for(0.5, 20.0) == 25

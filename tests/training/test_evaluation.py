"""Evaluation against slow loops, and against itself in other batches; whose data it is made on, and in which mode."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from raytraced import build, load
from raytraced.cost import sample_cost
from raytraced.models.classifier import InputBlock
from raytraced.models.output import Output
from raytraced.sequence import Route
from raytraced.tasks.images.dataset import Split
from raytraced.tasks.images.task import NUM_IN_GALLERY, ImageTask, calibration_error
from raytraced.tasks.task import Batch
from raytraced.training.config import TrainConfig
from raytraced.training.evaluation import Diverged, count_load, evaluate
from raytraced.training.loop import train
from raytraced.training.objective import Objective
from raytraced.training.world import World
from training.runs import assert_close
from training.stripes import GRID, write_stripes

ALONE = World(0, 1, torch.device("cpu"))
TASK = ImageTask()


@pytest.fixture(scope="module")
def digits():
    data = TASK.load("digits")
    return replace(data, test=Split(data.test.images[:80], data.test.labels[:80]))


@pytest.fixture
def model(digits):
    torch.manual_seed(0)
    return TASK.build("mre", digits, {"dim": 8, "num_layers": 2, "num_experts": 4}).eval()


def evaluate_test(model, data, batch_size: int, **options):
    predict = Objective(model, TrainConfig(), TASK).eval().predict
    return evaluate(TASK, data, "test", predict, ALONE, batch_size=batch_size, full=True, **options)


@pytest.mark.parametrize("select", ["greedy", "sample"])
def test_evaluation_does_not_depend_on_the_batch_size(model, digits, select):
    whole = evaluate_test(model, digits, 1000, select=select)
    assert whole.keys() >= {"budgets", "lengths", "gallery", "class_load", "macs", "accuracy_by_prefix"}
    for batch_size in (1, 7, 79, 80):
        # one row times a matrix is rounded otherwise than many: counts are equal, sums to the last digits
        assert_close(evaluate_test(model, digits, batch_size, select=select), whole)


def test_evaluation_is_deterministic(model, digits):
    assert evaluate_test(model, digits, 64) == evaluate_test(model, digits, 64)
    assert evaluate_test(model, digits, 64, select="sample") == evaluate_test(
        model, digits, 64, select="sample", seed=0
    )
    assert evaluate_test(model, digits, 64, select="sample") != evaluate_test(
        model, digits, 64, select="sample", seed=1
    )


def test_figures_equal_a_loop_over_samples(model, digits):
    result = evaluate_test(model, digits, 50)
    found, labels = result, digits.test.labels.tolist()
    steps = []  # by image, by budget: correct, experts, multiply-adds, those of experts
    losses, parameters, active = [], [], []
    with torch.no_grad():
        for image, label in zip(digits.test.images, labels, strict=True):
            own = []
            for budget in range(9):
                out = model(image[None], max_experts=budget)
                cost = sample_cost(model, image[None], out)
                right = float(out.logits.argmax() == label)
                own.append((right, *(float(x) for x in (cost.experts, cost.macs, cost.expert_macs))))
            steps.append(own)
            losses.append(float(-out.logits.log_softmax(-1)[0, label]))
            parameters.append(float(cost.parameters))
            active.append(out.routes[0].active[0].numpy())
    steps = np.array(steps)
    correct, lengths = steps[:, -1, 0], steps[:, -1, 1].astype(int)
    longest = max(lengths)
    assert 1 < longest <= 8
    assert found["num_samples"] == 80
    assert found["accuracy"] == pytest.approx(correct.mean(), abs=1e-9)
    assert found["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert found["mean_experts"] == pytest.approx(lengths.mean(), abs=1e-9)
    assert found["used_parameters"] == pytest.approx(np.mean(parameters))
    assert found["macs"]["total"] == pytest.approx(
        sum(found["macs"][name] for name in found["macs"] if name != "total")
    )
    assert found["macs"]["total"] == pytest.approx(steps[:, -1, 2].mean())
    assert found["macs"].keys() == {"total", "input", "routing", "experts", "head"}
    assert "figures" not in found, "the task's own stand beside the others"
    assert found["macs"]["input"] == 64 * 8
    assert found["macs"]["head"] == 8 * 10
    # a sample whose sequence has ended keeps its last answer; no more budgets than the longest sequence has experts
    names = ("accuracy", "experts", "macs", "expert_macs")
    expected = [dict(zip(names, steps[:, budget].mean(0).tolist(), strict=True)) for budget in range(longest + 1)]
    assert_close(found["budgets"], expected)
    assert found["accuracy_by_prefix"] == pytest.approx([row["accuracy"] for row in expected], abs=1e-9)
    np.testing.assert_allclose(found["expert_load"], np.mean(active, 0), atol=1e-9)
    for label in range(10):
        of = np.array(labels) == label
        assert found["accuracy_per_class"][label] == pytest.approx(correct[of].mean(), abs=1e-9)
        assert found["experts_per_class"][label] == pytest.approx(lengths[of].mean(), abs=1e-9)
        np.testing.assert_allclose(found["class_load"][label], np.mean(active, 0, where=of[:, None, None]), atol=1e-9)
    for length in set(lengths.tolist()):
        rows = (lengths == length).nonzero()[0]
        part = found["lengths"][str(length)]
        assert part["num"] == len(rows)
        assert part["accuracy"] == pytest.approx(steps[rows, : length + 1, 0].mean(0), abs=1e-9)
        shown = [row for row in rows.tolist() if correct[row]][:NUM_IN_GALLERY]
        assert found["gallery"].get(str(length), []) == shown


def test_costs_and_budgets_are_for_full_evaluations(model, digits):
    result = evaluate(TASK, digits, "test", Objective(model, TrainConfig(), TASK).predict, ALONE, batch_size=50)
    assert result["macs"] == {}
    assert result["used_parameters"] is None
    assert "budgets" not in result


def test_sequences_of_one_expert_have_two_budgets(digits):
    model = TASK.build("mre", digits, {"dim": 8, "num_layers": 1, "num_experts": 3}).eval()
    with torch.no_grad():
        model.layer.router.gate.bias.copy_(torch.tensor([50.0, 0.0, 0.0]))  # all rays enter at the first expert
    assert [row["experts"] for row in evaluate_test(model, digits, 50)["budgets"]] == [0, 1]


def test_answers_that_are_not_finite_are_counted(model, digits):
    predict = Objective(model, TrainConfig(), TASK).predict

    def spoiled(batch, *rest):
        spoil = (batch.rows == 3)[:, None]
        return [
            (out._replace(logits=out.logits.masked_fill(spoil, torch.nan)), cost) for out, cost in predict(batch, *rest)
        ]

    with pytest.raises(Diverged, match=r"^1 of 80 answers are not finite"):
        evaluate(TASK, digits, "test", spoiled, ALONE, batch_size=50)


def test_the_load_of_a_second_routed_layer_stands_below_that_of_the_first(digits):
    first, second = torch.randint(0, 2, (80, 2, 4)), torch.randint(0, 2, (80, 3, 4))
    out = Output(
        torch.zeros(80, 10), tuple(Route(active, None, active.sum((1, 2)), None) for active in (first, second))
    )
    batch = Batch(digits.test.images, digits.test.labels, torch.arange(80))
    load = count_load(TASK, digits, batch, out).sum(0)
    assert load.tolist() == [*first.sum(0).tolist(), *second.sum(0).tolist()]


class OneOfThree(World):
    """A process that hears nothing of the others."""

    def sum(self, tensor):
        return tensor

    def largest(self, values):
        return values


def test_each_process_answers_its_own_part_of_a_split(model, digits):
    predict, parts = Objective(model, TrainConfig(), TASK).predict, []
    for rank in range(3):
        parts.append([])

        def spy(batch, *rest, rank=rank, **options):
            parts[rank] += batch.rows.tolist()
            return predict(batch, *rest, **options)

        evaluate(TASK, digits, "test", spy, OneOfThree(rank, 3, torch.device("cpu")), batch_size=12)
    assert sorted(row for part in parts for row in part) == list(range(80))
    assert all(20 < len(part) < 40 for part in parts)


def test_every_sample_goes_through_the_input_once_for_all_budgets(model, digits, monkeypatch):
    seen, forward = [], InputBlock.forward
    monkeypatch.setattr(InputBlock, "forward", lambda self, images: seen.append(len(images)) or forward(self, images))
    assert len(evaluate_test(model, digits, 50)["budgets"]) > 2
    assert seen == [50, 30]


def test_run_judges_each_epoch_once_and_in_the_end_both_splits_once(config, no_pictures, monkeypatch):
    seen, predict = [], Objective.predict

    def spy(self, batch, seed, full=False, **options):
        seen.append((len(batch.targets), full))
        return predict(self, batch, seed, full, **options)

    monkeypatch.setattr(Objective, "predict", spy)
    train(config)
    assert seen == [(9, False)] * config.epochs + [(30, True), (9, True)]


def test_budget_is_kept_and_then_there_is_one_answer(model, digits):
    result = evaluate_test(model, digits, 50, max_experts=2)
    assert "budgets" not in result
    assert result["accuracy_by_prefix"] is None
    rows = evaluate_test(model, digits, 50)["budgets"]
    assert result["accuracy"] == pytest.approx(rows[2]["accuracy"])
    assert result["macs"]["total"] == pytest.approx(rows[2]["macs"])


def test_model_with_one_answer_has_no_budgets(digits):
    model = TASK.build("top-k", digits, {"dim": 8, "num_layers": 2, "num_experts": 4})
    found = evaluate_test(model, digits, 50)
    assert found["accuracy_by_prefix"] is None
    assert not found.keys() & {"budgets", "lengths", "gallery", "class_load"}
    assert found["mean_experts"] == 4  # the best two in both layers
    assert found["macs"]["experts"] > 0


def test_calibration_error_of_known_cases():
    confidence = torch.full((10,), 0.9, dtype=torch.float64)
    right = torch.tensor([1.0] * 9 + [0.0], dtype=torch.float64)
    assert calibration_error(confidence, right) == pytest.approx(0)  # nine of ten right, with 90 % confidence
    assert calibration_error(confidence, torch.zeros(10, dtype=torch.float64)) == pytest.approx(0.9)
    # two bins of five samples, one 0.2 too confident and one 0.3 not confident enough
    confidence = torch.tensor([1.0] * 5 + [0.7] * 5, dtype=torch.float64)
    correct = torch.tensor([1.0] * 4 + [0.0] + [1.0] * 5, dtype=torch.float64)
    assert calibration_error(confidence, correct) == pytest.approx((5 * 0.2 + 5 * 0.3) / 10)


def test_class_without_samples_has_no_figure(model, digits):
    kept = digits.test.labels != 4
    few = replace(digits, test=Split(digits.test.images[kept], digits.test.labels[kept]))
    result = evaluate_test(model, few, 64)
    assert result["accuracy_per_class"][4] is None
    assert all(value is not None for label, value in enumerate(result["experts_per_class"]) if label != 4)


# A model that draws in training (sample), and one that does more in training than in use (multi-exit).
@pytest.mark.parametrize(
    "options",
    [{"model_options": GRID | {"train_select": "sample"}}, {"model": "multi-exit", "model_options": {"dim": 8}}],
)
def test_figures_of_a_run_are_those_of_the_model_in_use(train_with, options):
    """The best epoch's and the last ones', from a model that is loaded anew: in evaluation mode, and drawing nothing."""
    run = train_with(patience=3, **options)
    lines, summary = run.read_metrics(), run.read_summary()
    data = TASK.load(run.config.data)
    for file, split, loss in (
        (run.best, "validation", lines[summary["best_epoch"] - 1]["validation_loss"]),
        (run.model, "validation", summary["validation"]["loss"]),
        (run.model, "test", summary["test"]["loss"]),
    ):
        part, model = getattr(data, split), load(file)
        assert not model.training
        with torch.no_grad():
            logits = model(part.images).logits
        assert loss == pytest.approx(float(torch.nn.functional.cross_entropy(logits, part.labels)), rel=1e-5)


def test_every_step_is_made_in_training_mode(train_with, monkeypatch):
    modes, forward = [], Objective.forward
    monkeypatch.setattr(
        Objective, "forward", lambda self, *rest: modes.append(self.model.layer.training) or forward(self, *rest)
    )
    train_with()
    assert len(modes) == 3 * 6 + 1  # and the rehearsal
    assert all(modes)


@pytest.mark.parametrize("patience", [None, 3])
def test_nothing_is_chosen_by_test_data(config, no_pictures, tmp_path, patience):
    """All test labels are wrong: if any choice used them, the best would be the worst."""
    data_file = write_stripes(tmp_path / "wrong.npz", test_labels_off_by=1)
    run = train(replace(config, data=str(data_file), patience=patience, lr=3e-4, epochs=12))
    honest = train(replace(config, patience=patience, lr=3e-4, epochs=12, name="honest"))
    lines, summary, expected = run.read_metrics(), run.read_summary(), honest.read_summary()
    accuracies = [line["validation_accuracy"] for line in lines]
    assert accuracies[0] < max(accuracies)
    assert summary["best_epoch"] == 1 + accuracies.index(max(accuracies))
    assert summary["best_validation"] == max(accuracies)
    assert summary["weights"] == ("last" if patience is None else "best")
    # the validation figures are those of the same run with honest test labels, budgets and all; the test figures are not
    assert summary["validation"] == expected["validation"]
    assert summary["validation"]["num_samples"] == 9
    assert summary["test"]["num_samples"] == 30
    assert summary["validation"]["accuracy"] > 0.6 > 0.4 > summary["test"]["accuracy"]
    assert [row["accuracy"] for row in summary["test"]["budgets"]] != [
        row["accuracy"] for row in expected["test"]["budgets"]
    ]
    for ours, theirs in zip(load(run.best).parameters(), load(honest.best).parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_untrained_model_answers_by_chance_alone():
    """The figures of known cases: a model whose head says nothing gives every class the same, and the loss is log Y."""
    digits = TASK.load("digits")
    model = build("top-k", **TASK.spec(digits), dim=8, num_layers=2, num_experts=4)
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.zero_()
    result = evaluate_test(model, digits, 500)
    assert result["loss"] == pytest.approx(np.log(10), rel=1e-6)
    assert result["accuracy"] == pytest.approx(float((digits.test.labels == 0).double().mean()))
    assert result["calibration_error"] == pytest.approx(abs(result["accuracy"] - 0.1), abs=1e-6)

"""What a step minimises and counts, and where its draws come from, each against a second computation."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from raytraced import RaytracedExperts, build, stop_losses
from raytraced.cost import sample_cost
from raytraced.tasks.images.task import ImageTask
from raytraced.tasks.task import Batch
from raytraced.training.config import TrainConfig
from raytraced.training.objective import PREFIXES, Objective, seeded, step_seed
from training.stripes import GRID


@pytest.fixture
def batch():
    return Batch(torch.rand(5, 1, 8, 8), torch.tensor([0, 1, 2, 0, 1]), torch.tensor([7, 3, 11, 0, 2]))


def make(world_size=1, model="mre", config=None, **options):
    made = build(model, image_shape=(1, 8, 8), num_classes=3, **GRID, **options)
    return Objective(made, config or TrainConfig(), ImageTask(), world_size)


def test_step_seeds_are_those_of_splitmix64():
    """Steele et al. 2014: x ^= x >> 30, · 0xBF58476D1CE4E5B9, x ^= x >> 27, · 0x94D049BB133111EB, x ^= x >> 31."""

    def splitmix(x):
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ x >> shift) * factor & 0xFFFF_FFFF_FFFF_FFFF
        return x ^ x >> 31

    for seed in (0, 1, 12345, 2**63 - 1):
        for step in (0, 1, 999_999):
            start = 0x9E3779B97F4A7C15 * seed + 0xBF58476D1CE4E5B9 * step + 0x94D049BB133111EB
            assert (
                step_seed(seed, step) == splitmix(start & 0xFFFF_FFFF_FFFF_FFFF) // 2
            )  # what a generator takes: 63 bits


def test_the_prefix_of_a_step_is_drawn_evenly_and_only_where_it_is_asked_for():
    assert PREFIXES == (0, 1, 2, 3, 4)  # docs/guides/train.md: an answer with 0 to 4 experts
    asked = make(config=TrainConfig(anytime_loss=0.5))
    drawn = torch.tensor([asked.budgets(step_seed(0, step)) for step in range(2000)])
    share = torch.bincount(drawn.flatten(), minlength=5) / 2000
    assert drawn.shape == (2000, 1)
    assert ((share - 0.2).abs() <= 5 * (0.16 / 2000) ** 0.5).all()  # five standard errors
    assert make().budgets(3) == ()


def test_the_sums_of_a_step_are_over_its_targets(batch):
    objective = make()
    found = objective(batch, 3, 5)
    out = objective.model(batch.inputs)
    assert float(found.sums["loss"]) == pytest.approx(cross_entropy(out.logits, batch.targets, reduction="sum").item())
    assert found.sums["targets"] == 5
    assert int(found.sums["experts"]) == int(out.num_experts.sum())
    assert int(found.sums["correct"]) == int((out.logits.argmax(-1) == batch.targets).sum())
    torch.testing.assert_close(found.logits, out.logits)
    assert not found.logits.requires_grad
    assert not found.sums["loss"].requires_grad


def test_draws_of_a_step_follow_from_its_seed_and_the_rows_numbers(batch):
    objective = make(train_select="sample")
    first, again, other = (objective(batch, seed, 5).logits for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    alone = objective.model(batch.inputs, generator=torch.Generator().manual_seed(3), rows=batch.rows)
    assert torch.equal(first, alone.logits)
    renumbered = objective(batch._replace(rows=batch.rows + 100), 3, 5).logits
    assert not torch.equal(first, renumbered)


def test_padding_is_left_out_of_a_step(batch):
    mask = torch.tensor([True, True, False, True, False])
    seen = []
    objective = make()
    objective.model.layer.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["mask"]), with_kwargs=True
    )
    for one in (batch, batch._replace(mask=mask)):
        objective.predict(one, 0)
        objective(one, 0, 5)
    assert seen[:2] == [None, None]
    assert seen[2] is mask
    assert seen[3] is mask


def test_the_loss_on_stops_shortens_long_sequences_and_lengthens_short_ones(batch):
    """By hand: the rank of each sample's loss, its target number of experts, and the gradient of the output node's rate."""
    objective = make(config=TrainConfig(target_experts=3.0))
    free = make()
    free.load_state_dict(objective.state_dict())
    with torch.no_grad():
        out = free.model(batch.inputs)
    (route,), each = out.routes, cross_entropy(out.logits, batch.targets, reduction="none")
    expected = 0.0
    for row in range(5):
        due = 3.0 * (0.4 + 1.2 * int((each < each[row]).sum()) / 4)
        rate, over = float(route.rates.output[row]), int(route.num_active[row]) - due
        expected += -math.log(rate) if over > 0.5 else -math.log(1 - rate) if over < -0.5 else 0.0
    more = objective(batch, 0, 5).loss - free(batch, 0, 5).loss
    assert expected > 0
    assert more.item() == pytest.approx(0.03 * expected / 5, rel=1e-4)  # the weight that every record was trained with


def test_the_loss_on_stops_asks_nothing_of_padding(batch):
    objective, free, kept = make(config=TrainConfig(target_experts=3.0)), make(), torch.tensor([1, 1, 0, 1, 0]).bool()
    free.load_state_dict(objective.state_dict())
    alone = Batch(batch.inputs[kept], batch.targets[kept], batch.rows[kept])
    padded, expected = (objective(one, 0, 3).loss - free(one, 0, 3).loss for one in (batch._replace(mask=kept), alone))
    assert expected > 0
    assert padded.item() == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize(
    ("estimator", "target"),
    [
        ("none", 2.0),
        ("reinmax", 5.0),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("none", 5.0), ("reinmax", 2.0))),
    ],
)
def test_lengths_come_to_their_target_and_follow_difficulty(estimator, target):
    """Gates that see the input learn how hard it is: here its first number is its difficulty."""
    torch.manual_seed(0)
    layer = RaytracedExperts(6, 3, 4, input_rank=4, estimator=estimator, output_logit_offset=0.0)
    optimizer = torch.optim.Adam(layer.router.parameters(), 0.01)
    hidden = torch.randn(256, 6)
    easier = hidden[:, 0].argsort().argsort() / 255
    for _ in range(300):
        optimizer.zero_grad()
        stop_losses(layer(hidden).route, easier, target).mean().backward()
        optimizer.step()
    lengths = layer.eval()(hidden).route.num_active.double()
    assert abs(float(lengths.mean()) - target) < 0.75  # within half an expert there is no gradient
    assert torch.stack((lengths, easier.double())).corrcoef()[0, 1] > 0.5


def test_how_many_are_easier_does_not_count_padding(batch):
    losses, mask = torch.tensor([[0.5, 2.0], [1.0, 0.0]]), torch.tensor([[True, True], [True, False]])
    assert make().easier(losses, None, 4)[0].tolist() == pytest.approx([1 / 3, 1.0])
    assert make().easier(losses, mask, 3)[mask].tolist() == [0.0, 1.0, 0.5]
    assert make().easier(torch.tensor([2.0, 1.0]), None, 2).tolist() == [1.0, 0.0]
    assert make().easier(torch.tensor([2.0]), None, 1).tolist() == [0.0]


def test_the_rank_of_a_loss_is_computed_over_all_processes(monkeypatch):
    """The other process's part by hand; tests/training/test_distributed.py has two that are real."""
    other = torch.tensor([0.3, 1.5, 2.5])

    def all_gather(parts, own):
        assert len(parts) == 2
        of_other = torch.tensor([3.0]) if len(own) == 1 else other
        assert own.tolist() == ([2.0] if len(own) == 1 else [2.0, 1.0, math.inf])
        for part, value in zip(parts, (own, of_other), strict=True):
            part.copy_(value)

    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
    assert make(world_size=2).easier(torch.tensor([2.0, 1.0]), None, 5).tolist() == [3 / 4, 1 / 4]
    monkeypatch.setattr(torch.distributed, "all_gather", lambda *_: pytest.fail("there is no other process"))
    assert make(world_size=1).easier(torch.tensor([2.0, 1.0]), None, 2).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("compiled", [True, False])
def test_a_model_that_cannot_be_compiled_is_one_line_and_other_errors_stay_as_they_are(batch, compiled, monkeypatch):
    objective = make(config=TrainConfig(compile=compiled))

    def fail(*args, **options):
        raise RuntimeError("no compiler\nand forty lines of where")

    monkeypatch.setattr(objective.model, "answer", fail)
    kind, message = (ValueError, r"compile=True: the model cannot be compiled here \(no compiler\)") if compiled else (
        RuntimeError, "no compiler\nand forty lines of where")  # fmt: skip
    with pytest.raises(kind, match=message):
        objective.rehearse(batch)


def test_every_parameter_has_a_gradient_where_processes_wait_for_one_another(batch):
    """Custom experts have parameters each, and one image leaves most of them out; in one process they keep no gradient."""
    one_image = batch._replace(inputs=batch.inputs[:1].expand(5, -1, -1, -1))
    for world_size in (1, 2):
        objective = make(world_size, model="top-k", expert=lambda: nn.Linear(8, 8))
        objective(one_image, 0, 5).loss.backward()
        missing = [name for name, one in objective.model.named_parameters() if one.grad is None]
        assert bool(missing) == (world_size == 1)


def test_what_takes_part_without_running_adds_nothing_even_where_all_weights_are_zero(batch):
    objective = make(2)
    with torch.no_grad():
        for parameter in objective.model.parameters():
            parameter.zero_()
    assert objective(batch, 0, 5).loss.item() == pytest.approx(2 * math.log(3))


def test_padding_costs_nothing(batch):
    mask = torch.tensor([True, True, False, True, False])
    with torch.no_grad():
        answers = make().eval().predict(batch._replace(mask=mask), 0, True)
    for _, cost in answers:
        assert (cost.macs > 0).tolist() == mask.tolist()
        assert (cost.parameters > 0).tolist() == mask.tolist()


def test_the_loss_is_twice_ones_own_where_gradients_are_averaged_over_two(batch):
    one, two = make(1), make(2)
    two.load_state_dict(one.state_dict())
    assert two(batch, 0, 5).loss.item() == pytest.approx(2 * one(batch, 0, 5).loss.item(), rel=1e-6)


def test_a_prediction_has_costs_and_prefixes_if_it_is_full_and_not_under_a_budget(batch):
    objective = make().eval()
    with torch.no_grad():
        ((out, cost),) = objective.predict(batch, 0)
        assert cost is None
        full = objective.predict(batch, 0, True)
        ((within, known),) = objective.predict(batch, 0, True, max_experts=1)
        ((surely, _),) = objective.predict(batch, 0, True, confidence=0.0)
        assert int(surely.num_experts.max()) == 0
        assert len(full) > 2
        assert [int(each.num_experts.max()) for each, _ in full[:3]] == [0, 1, 2]
        torch.testing.assert_close(full[-1][0].logits, out.logits)
        torch.testing.assert_close(within.logits, full[1][0].logits)
        expected = sample_cost(objective.model, batch.inputs, out)
        assert torch.equal(full[-1][1].macs, expected.macs)
        assert torch.equal(known.experts, full[1][1].experts)
        ((_, fixed),) = make(model="top-k").eval().predict(batch, 0, True)
        assert fixed is not None


def test_predictions_draw_by_seed_and_row_where_they_are_asked_to(batch):
    objective = make().eval()
    for full in (False, True):
        nodes = [objective.predict(batch, seed, full, select="sample")[-1][0].routes[0].nodes for seed in (1, 1, 2)]
        assert torch.equal(nodes[0], nodes[1])
        assert not torch.equal(nodes[0], nodes[2])
        other = objective.predict(batch._replace(rows=batch.rows + 50), 1, full, select="sample")[-1][0].routes[0].nodes
        assert not torch.equal(nodes[0], other)
    assert seeded(5, batch.inputs).initial_seed() == 5


def test_what_a_model_cannot_do_is_refused_but_an_empty_share_is_not(batch):
    with pytest.raises(ValueError, match=r"anytime_loss=0.5: model 'mre' does not answer along a sequence"):
        make(model="top-k", config=TrainConfig(anytime_loss=0.5))
    for model in ("top-k", "threshold"):
        with pytest.raises(
            ValueError, match=r"target_experts=3\.0: model 'mre' has no activation sequence; leave target_experts out"
        ):
            make(model=model, config=TrainConfig(target_experts=3.0))(batch, 0, 5)
    empty = Batch(batch.inputs[:0], batch.targets[:0], batch.rows[:0])
    assert make(2)(empty, 0, 5).loss.item() == 0  # another process has all of the batch


@pytest.mark.parametrize("model", ["mre", "top-k", "threshold"])
def test_the_exit_loss_is_that_of_the_answers_after_each_layer(batch, model):
    config = TrainConfig(exit_loss=0.3, label_smoothing=0.1)
    objective = make(model=model, config=config)
    found = objective(batch, 3, 5)
    out = objective.model(batch.inputs, exits=True)
    last = cross_entropy(out.logits, batch.targets, label_smoothing=0.1)
    early = torch.stack([cross_entropy(logits, batch.targets, label_smoothing=0.1) for logits in out.exits[:-1]]).mean()
    assert len(out.exits) == GRID["num_layers"] + 1
    assert torch.equal(out.exits[-1], out.logits)
    torch.testing.assert_close(found.loss, 0.7 * last + 0.3 * early)

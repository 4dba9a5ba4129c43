"""Stop when sure: each sample takes its first sure answer, nothing runs for it after that, and all that ran is counted."""

import pytest
import torch
from torch import nn

import raytraced as rt
import raytraced.models.card
from raytraced.cost import sample_cost
from raytraced.models.table import MODELS
from raytraced.sequence import Route

IMAGES = torch.rand(90, 1, 4, 4, generator=torch.Generator().manual_seed(0))
STACKS = [name for name in MODELS if name != "multi-exit"]


@pytest.fixture(autouse=True)
def _no_gradient():
    with torch.no_grad():
        yield


def make(name="mre", **options):
    torch.manual_seed(3)
    small = {} if name == "dense" else {"num_layers": 3}
    small |= {"reach": 10.0, "sight_rank": 0} if name == "mre" else {}  # sequences that reach every layer
    model = rt.build(name, image_shape=(1, 4, 4), num_classes=5, **small | options).double().eval()
    for head in model.heads if name == "multi-exit" else [model.head]:
        head.weight.data.mul_(6)  # answers of every degree of sureness
    return model


def images():
    return 4 * IMAGES.double() - 2


def by_hand(answers, sure):
    """Of each sample the first of the answers (S, B, Y) that is sure enough, and its number."""
    first = [
        next((s for s, one in enumerate(row) if one.softmax(-1).max() >= sure), len(row) - 1)
        for row in answers.transpose(0, 1)
    ]
    chosen = torch.tensor(first)
    return answers[chosen, torch.arange(len(chosen))], chosen


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize("sure", [0.0, 0.5, 0.8, 1.0])
def test_each_sample_takes_its_first_sure_answer(name, sure):
    model, generator = make(name), torch.Generator().manual_seed(5)
    whole = model(images(), looks=True, generator=generator)
    answers = whole.looks
    expected, chosen = by_hand(answers, sure)
    found = model(images(), sure=sure, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(found.logits, expected)
    ran = whole.routes[0].active * (torch.arange(len(answers) - 1)[None, :, None] < chosen[:, None, None])
    assert torch.equal(found.routes[0].active, ran.detach())
    # one look more is taken than there were layers, but for sequences that end before the last layer
    assert bool((found.num_looks <= chosen + 1).all())


def test_the_degrees_are_those_that_the_test_means():
    chosen = by_hand(make()(images(), looks=True).looks, 0.8)[1]
    assert len(chosen.unique()) == 4


@pytest.mark.parametrize("sure", [0.5, 0.8, 1.0])
def test_looking_after_each_expert_takes_the_first_sure_prefix(sure):
    model = make()
    answers = [step.logits for step in rt.anytime(model, images())]
    expected, chosen = by_hand(torch.stack(answers), sure)
    found = model(images(), sure=sure, look="expert")
    torch.testing.assert_close(found.logits, expected)
    whole = model(images()).num_experts
    assert torch.equal(found.num_experts, torch.minimum(chosen, whole))
    assert bool((found.num_runs >= found.num_experts).all())
    assert bool((found.num_runs > found.num_experts).any())  # some node joined above others


def test_drawn_sequences_stop_as_well():
    model = make()
    draw = {"select": "sample", "rows": torch.arange(7, 97)}
    whole = model(images(), looks=True, generator=torch.Generator().manual_seed(5), **draw)
    expected, _ = by_hand(whole.looks, 0.7)
    found = model(images(), sure=0.7, generator=torch.Generator().manual_seed(5), **draw)
    torch.testing.assert_close(found.logits, expected)


def test_a_threshold_for_each_look():
    model = make()
    whole = model(images(), looks=True)
    answers = whole.looks
    found = model(images(), sure=[1.0, 0.0])
    torch.testing.assert_close(found.logits, answers[1])
    assert torch.equal(found.num_looks, torch.full((90,), 2))


class Counting(nn.Module):
    rows = 0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        Counting.rows += len(x)
        return self.linear(x)


@pytest.mark.parametrize("look", ["layer", "expert"])
def test_only_what_still_runs_is_computed_and_all_of_it_counted(look):
    model = make(expert=Counting)
    Counting.rows = 0
    found = model(images(), sure=0.8, look=look)
    assert Counting.rows == int(found.num_runs.sum())
    assert Counting.rows > 0
    assert 0 < int((found.num_looks == 1).sum()) < 90


@pytest.mark.parametrize("name", ["mre", "top-k", "dense", "ada-k", "top-any"])
def test_costs_count_every_look_and_only_the_gates_that_decided(name):
    model = make(name)
    found, whole = model(images(), sure=0.8), model(images())
    cost, full = sample_cost(model, images(), found), sample_cost(model, images(), whole)
    head = model.head.weight.numel()
    assert torch.equal(cost.head_multiply_adds, head * found.num_looks)
    one = full.expert_multiply_adds.sum() / whole.num_experts.sum()
    torch.testing.assert_close(cost.expert_multiply_adds, (found.num_experts * one).long())
    steps = found.num_looks - 1
    if name == "mre":  # the whole path is known before its first expert runs, or not at all
        assert torch.equal(cost.routing_multiply_adds, full.routing_multiply_adds * (steps > 0))
    else:
        num_layers = 4 if name == "dense" else 3
        assert torch.equal(cost.routing_multiply_adds, full.routing_multiply_adds * steps // num_layers)
    assert bool((cost.multiply_adds < full.multiply_adds).any())


def test_multi_exit_stops_at_its_own_confidence_or_at_another():
    model = make("multi-exit", confidence=0.8)
    assert torch.equal(model(images()).logits, model(images(), sure=0.8).logits)
    assert model(images(), sure=0.5).num_experts.sum() < model(images()).num_experts.sum()


def test_padding_takes_no_look_and_no_expert():
    model, mask = make(), torch.arange(90) % 3 > 0
    found = model(images(), sure=0.9, mask=mask)
    assert not found.num_looks[~mask].any()
    assert not found.num_experts[~mask].any()
    alone = model(images()[mask], sure=0.9)
    torch.testing.assert_close(found.logits[mask], alone.logits)
    assert not sample_cost(model, images(), found, mask).multiply_adds[~mask].any()


def test_at_the_deadline_the_answer_so_far_is_given():
    model = make()
    found = model(images(), max_ms=1e-6)
    assert torch.equal(found.num_looks, torch.ones(90, dtype=torch.int64))
    torch.testing.assert_close(found.logits, model(images(), looks=True).looks[0])
    torch.testing.assert_close(model(images(), max_ms=1e6).logits, model(images()).logits)


def test_a_budget_and_a_threshold_go_together():
    model = make()
    for look in ("layer", "expert"):
        found = model(images(), sure=0.9, look=look, max_experts=2)
        assert int(found.num_experts.max()) == 2


def test_calibrated_is_what_the_card_says():
    model = make()
    with pytest.raises(ValueError, match="sure=calibrated: mre is not calibrated; do that with raytraced calibrate"):
        model(images(), sure="calibrated")
    found = {"sure": [0.7, 0.9], "look": "layer"}
    model.card = rt.models.card.ModelCard("mre", {}, {}, calibration=found)
    assert torch.equal(model(images(), sure="calibrated").logits, model(images(), sure=[0.7, 0.9]).logits)


def test_mistakes_are_told():
    model = make()
    for sure in (1.5, -0.1, float("nan"), True, [0.5, 2]):
        with pytest.raises(ValueError, match=r"sure=.*: must lie in 0 … 1, it is a probability"):
            model(images(), sure=sure)
    with pytest.raises(ValueError, match="must hold at least one probability"):
        model(images(), sure=[])
    with pytest.raises(ValueError, match="max_ms=0: must be above 0"):
        model(images(), max_ms=0)
    with pytest.raises(ValueError, match="look=expert: top-k has no order of experts; look after each layer"):
        make("top-k")(images(), sure=0.5, look="expert")
    with pytest.raises(ValueError, match="look='word': must be one of layer, expert"):
        model(images(), sure=0.5, look="word")
    with pytest.raises(ValueError, match="look=layer: says where to look for who stops; give sure or max_ms too"):
        model(images(), look="layer")


def test_looks_carry_gradients_as_the_layer_by_layer_definition_does():
    with torch.enable_grad():
        model = make(weighting="rates", estimator="none")
        out = model(images(), looks=True)
        got = torch.autograd.grad(out.looks.square().sum(), [*model.parameters()], allow_unused=True)
        with rt.operations.use("plain"):
            out = model(images(), looks=True)
            expected = torch.autograd.grad(out.looks.square().sum(), [*model.parameters()], allow_unused=True)
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


def test_a_route_that_stopped_keeps_its_plan():
    (route,) = make()(images(), sure=0.8).routes
    assert isinstance(route, Route)
    assert torch.equal((route.nodes >= 0).any(-1), route.active.sum((1, 2)) > 0)


def test_anytime_ends_when_all_are_sure():
    model = make()
    free, steps = list(rt.anytime(model, images())), list(rt.anytime(model, images(), sure=0.5))
    assert 1 < len(steps) < len(free)
    held = free[0].logits
    for step, other in zip(steps[1:], free[1:], strict=False):
        unsure = held.softmax(-1).amax(-1) < 0.5
        held = torch.where(unsure[:, None], other.logits, held)
        torch.testing.assert_close(step.logits, held)
    torch.testing.assert_close(steps[-1].logits, model(images(), sure=0.5, look="expert").logits)


def test_what_belongs_to_training_or_to_nobody_is_refused_beside_sure():
    model = make()
    for name, value, told in (
        ("judge", lambda logits: logits.sum(-1), "judge=.*: must be left out with sure"),
        ("budgets", (1,), "budgets=.*: must be left out with sure"),
        ("generator", 5, "generator=5: must be a torch.Generator"),
        ("rows", torch.arange(3), r"rows has shape \(3,\)"),
        ("rows", torch.rand(len(images())), "rows are torch.float32: must be whole numbers"),
    ):
        with pytest.raises(ValueError, match=told):
            model(images(), sure=0.5, **{name: value})
    for options in ({}, {"sure": 0.5}):
        with pytest.raises(ValueError, match="select='sample': must be greedy"):
            make("multi-exit")(images(), select="sample", **options)


def test_a_model_without_answers_on_the_way_says_so_at_once():
    with pytest.raises(ValueError, match="has one answer only"):
        make("top-k").prefixes(images())


@pytest.mark.parametrize("name", ["mre", "gpt-mre", "multi-exit"])
def test_answers_along_the_way_take_nothing_from_the_global_generator_unless_something_is_drawn(name):
    """Who looks at a model in the middle of a training of his own must not change what comes after."""
    torch.manual_seed(0)
    is_text = name.startswith("gpt")
    spec = {"context": 8} if is_text else {"image_shape": (1, 8, 8), "num_classes": 3}
    model = raytraced.build(name, **spec).eval()
    inputs = torch.randint(256, (5, 8)) if is_text else torch.randint(256, (5, 1, 8, 8), dtype=torch.uint8)
    before = torch.get_rng_state()
    answers = [step.logits for step in raytraced.anytime(model, inputs)]
    found = model(inputs, budgets=(0, 1, 2)).answers
    assert all(torch.equal(out.logits, answers[number]) for number, out in enumerate(found))
    assert torch.equal(torch.get_rng_state(), before)
    if name == "mre":
        sampled = [step.logits for step in raytraced.anytime(model, inputs, select="sample")]
        assert not torch.equal(torch.get_rng_state(), before)
        torch.set_rng_state(before)
        # one number for all prefixes of a sequence, the same that one call takes
        assert torch.equal(model(inputs, select="sample").logits, sampled[-1])

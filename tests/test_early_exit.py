"""Early exit: each sample takes its first confident answer, nothing runs for it after that, and all that ran is counted."""

import pytest
import torch
from torch import nn

import raytraced as rt
import raytraced.models.card
from raytraced.cost import sample_cost
from raytraced.early_exit import ExitPolicy, Walk, WalkStep, confidences
from raytraced.experts import run_dense
from raytraced.models.registry import MODELS
from raytraced.router import Call
from raytraced.routers.raytraced import RaytracedRouter
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
    small |= {"output_logit_offset": 10.0, "input_rank": 0} if name == "mre" else {}  # sequences that reach every layer
    model = rt.build(name, image_shape=(1, 4, 4), num_classes=5, **small | options).double().eval()
    for head in model.heads if name == "multi-exit" else [model.head]:
        head.weight.data.mul_(6)  # answers of every degree of sureness
    return model


def images():
    return 4 * IMAGES.double() - 2


def by_hand(answers, confidence):
    """Of each sample the first of the answers (S, B, Y) that is confident enough, and its number."""
    first = [
        next((s for s, one in enumerate(row) if one.softmax(-1).max() >= confidence), len(row) - 1)
        for row in answers.transpose(0, 1)
    ]
    chosen = torch.tensor(first)
    return answers[chosen, torch.arange(len(chosen))], chosen


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize("confidence", [0.0, 0.5, 0.8, 1.0])
def test_each_sample_takes_its_first_confident_answer(name, confidence):
    model, generator = make(name), torch.Generator().manual_seed(5)
    whole = model(images(), exits=True, generator=generator)
    answers = whole.exits
    expected, chosen = by_hand(answers, confidence)
    found = model(images(), confidence=confidence, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(found.logits, expected)
    ran = whole.routes[0].active * (torch.arange(len(answers) - 1)[None, :, None] < chosen[:, None, None])
    assert torch.equal(found.routes[0].active, ran.detach())
    # one exit more is taken than there were layers, except for sequences that end before the last layer
    assert bool((found.num_exits <= chosen + 1).all())


def test_the_degrees_are_those_that_the_test_means():
    chosen = by_hand(make()(images(), exits=True).exits, 0.8)[1]
    assert len(chosen.unique()) == 4


@pytest.mark.parametrize("confidence", [0.5, 0.8, 1.0])
def test_an_exit_after_each_expert_takes_the_first_confident_prefix(confidence):
    model = make()
    answers = [step.logits for step in rt.anytime(model, images())]
    expected, chosen = by_hand(torch.stack(answers), confidence)
    found = model(images(), confidence=confidence, exit_every="expert")
    torch.testing.assert_close(found.logits, expected)
    whole = model(images()).num_experts
    assert torch.equal(found.num_experts, torch.minimum(chosen, whole))
    assert bool((found.num_runs >= found.num_experts).all())
    assert bool((found.num_runs > found.num_experts).any())  # some node joined above others


def test_drawn_sequences_stop_as_well():
    model = make()
    draw = {"select": "sample", "rows": torch.arange(7, 97)}
    whole = model(images(), exits=True, generator=torch.Generator().manual_seed(5), **draw)
    expected, _ = by_hand(whole.exits, 0.7)
    found = model(images(), confidence=0.7, generator=torch.Generator().manual_seed(5), **draw)
    torch.testing.assert_close(found.logits, expected)


def test_a_threshold_for_each_exit():
    model = make()
    whole = model(images(), exits=True)
    answers = whole.exits
    found = model(images(), confidence=[1.0, 0.0])
    torch.testing.assert_close(found.logits, answers[1])
    assert torch.equal(found.num_exits, torch.full((90,), 2))


class Counting(nn.Module):
    rows = 0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        Counting.rows += len(x)
        return self.linear(x)


@pytest.mark.parametrize("exit_every", ["layer", "expert"])
def test_only_what_still_runs_is_computed_and_all_of_it_counted(exit_every):
    model = make(expert=Counting)
    Counting.rows = 0
    found = model(images(), confidence=0.8, exit_every=exit_every)
    assert Counting.rows == int(found.num_runs.sum())
    assert Counting.rows > 0
    assert 0 < int((found.num_exits == 1).sum()) < 90


@pytest.mark.parametrize("name", ["mre", "top-k", "dense", "ada-k", "top-any"])
def test_costs_count_every_exit_and_only_the_gates_that_decided(name):
    model = make(name)
    found, whole = model(images(), confidence=0.8), model(images())
    cost, full = sample_cost(model, images(), found), sample_cost(model, images(), whole)
    head = model.head.weight.numel()
    assert torch.equal(cost.head_macs, head * found.num_exits)
    one = full.expert_macs.sum() / whole.num_experts.sum()
    torch.testing.assert_close(cost.expert_macs, (found.num_experts * one).long())
    steps = found.num_exits - 1
    if name == "mre":  # the whole path is known before its first expert runs, or not at all
        assert torch.equal(cost.routing_macs, full.routing_macs * (steps > 0))
    else:
        num_layers = 4 if name == "dense" else 3
        assert torch.equal(cost.routing_macs, full.routing_macs * steps // num_layers)
    assert bool((cost.macs < full.macs).any())


def test_multi_exit_stops_at_its_own_confidence_or_at_another():
    model = make("multi-exit", confidence=0.8)
    assert torch.equal(model(images()).logits, model(images(), confidence=0.8).logits)
    assert model(images(), confidence=0.5).num_experts.sum() < model(images()).num_experts.sum()


def test_padding_takes_no_exit_and_no_expert():
    model, mask = make(), torch.arange(90) % 3 > 0
    found = model(images(), confidence=0.9, mask=mask)
    assert not found.num_exits[~mask].any()
    assert not found.num_experts[~mask].any()
    alone = model(images()[mask], confidence=0.9)
    torch.testing.assert_close(found.logits[mask], alone.logits)
    assert not sample_cost(model, images(), found, mask).macs[~mask].any()


def test_at_the_deadline_the_answer_so_far_is_given():
    model = make()
    found = model(images(), max_ms=1e-6)
    assert torch.equal(found.num_exits, torch.ones(90, dtype=torch.int64))
    torch.testing.assert_close(found.logits, model(images(), exits=True).exits[0])
    torch.testing.assert_close(model(images(), max_ms=1e6).logits, model(images()).logits)


def test_a_budget_and_a_threshold_go_together():
    model = make()
    for exit_every in ("layer", "expert"):
        found = model(images(), confidence=0.9, exit_every=exit_every, max_experts=2)
        assert int(found.num_experts.max()) == 2


def test_calibrated_is_what_the_card_says():
    model = make()
    with pytest.raises(ValueError, match="confidence=calibrated: mre is not calibrated; run raytraced calibrate first"):
        model(images(), confidence="calibrated")
    found = {"confidence": [0.7, 0.9], "exit_every": "layer"}
    model.card = rt.models.card.ModelCard("mre", {}, {}, calibration=found)
    assert torch.equal(model(images(), confidence="calibrated").logits, model(images(), confidence=[0.7, 0.9]).logits)


def test_mistakes_name_the_argument_its_value_and_the_rule():
    model = make()
    for confidence in (1.5, -0.1, float("nan"), True, [0.5, 2]):
        with pytest.raises(ValueError, match=r"confidence=.*: must lie in 0 … 1, it is a probability"):
            model(images(), confidence=confidence)
    with pytest.raises(ValueError, match="must hold at least one probability"):
        model(images(), confidence=[])
    with pytest.raises(ValueError, match="max_ms=0: must be above 0"):
        model(images(), max_ms=0)
    with pytest.raises(ValueError, match="exit_every=expert: top-k has no order of experts; use exit_every=layer"):
        make("top-k")(images(), confidence=0.5, exit_every="expert")
    with pytest.raises(ValueError, match="exit_every='word': must be one of layer, expert"):
        model(images(), confidence=0.5, exit_every="word")
    with pytest.raises(
        ValueError, match="exit_every='layer' has no effect without confidence= or max_ms=: set one of them"
    ):
        model(images(), exit_every="layer")


def test_exits_carry_gradients_as_the_layer_by_layer_definition_does():
    with torch.enable_grad():
        model = make(weighting="rates", estimator="none")
        out = model(images(), exits=True)
        got = torch.autograd.grad(out.exits.square().sum(), [*model.parameters()], allow_unused=True)
        with rt.kernels.use("plain"):
            out = model(images(), exits=True)
            expected = torch.autograd.grad(out.exits.square().sum(), [*model.parameters()], allow_unused=True)
    for a, b in zip(got, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


def test_a_route_that_stopped_keeps_its_plan():
    (route,) = make()(images(), confidence=0.8).routes
    assert isinstance(route, Route)
    assert torch.equal((route.nodes >= 0).any(-1), route.active.sum((1, 2)) > 0)


def test_anytime_ends_when_all_are_confident():
    model = make()
    free, steps = list(rt.anytime(model, images())), list(rt.anytime(model, images(), confidence=0.5))
    assert 1 < len(steps) < len(free)
    held = free[0].logits
    for step, other in zip(steps[1:], free[1:], strict=False):
        unconfident = held.softmax(-1).amax(-1) < 0.5
        held = torch.where(unconfident[:, None], other.logits, held)
        torch.testing.assert_close(step.logits, held)
    torch.testing.assert_close(steps[-1].logits, model(images(), confidence=0.5, exit_every="expert").logits)


def test_arguments_that_early_exit_cannot_use_are_refused():
    model = make()
    for name, value, message in (
        ("sample_loss_fn", lambda logits: logits.sum(-1), "sample_loss_fn=.*: must be left out with confidence"),
        ("budgets", (1,), "budgets=.*: must be left out with confidence"),
        ("generator", 5, "generator=5: must be a torch.Generator"),
        ("rows", torch.arange(3), r"rows has shape \(3,\)"),
        ("rows", torch.rand(len(images())), "rows are torch.float32: must be whole numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            model(images(), confidence=0.5, **{name: value})
    for options in ({}, {"confidence": 0.5}):
        with pytest.raises(ValueError, match="select='sample': must be greedy"):
            make("multi-exit")(images(), select="sample", **options)


def test_a_model_without_answers_on_the_way_says_so_at_once():
    with pytest.raises(ValueError, match="has one answer only"):
        make("top-k").prefixes(images())


@pytest.mark.parametrize("name", ["mre", "gpt-mre", "multi-exit"])
def test_answers_along_the_way_take_nothing_from_the_global_generator_unless_something_is_drawn(name):
    """Taking exits in the middle of a training run must not change what comes after."""
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


class ReversedWeights(RaytracedRouter):
    """Gives every active expert the weight 2, whatever its rate is."""

    def weigh(self, route):
        return 2 * route.active


class Shifted(rt.RaytracedExperts):
    """Changes what the layer runs."""

    def run(self, hidden_BD, call):
        out = super().run(hidden_BD, call)
        return out._replace(hidden=out.hidden + 1)


def test_a_subclass_of_the_router_or_the_layer_never_runs_the_fused_call():
    torch.manual_seed(0)
    layer, hidden = rt.RaytracedExperts(8, 3, 4).eval(), torch.randn(20, 8)
    plain = layer(hidden).hidden
    layer.router.__class__ = ReversedWeights
    assert not layer.router.fuses
    plan = layer.router.plan(hidden, Call())
    torch.testing.assert_close(
        layer(hidden).hidden, run_dense(layer.experts, hidden, plan.active, plan.weights, layer.stream)
    )
    layer.router.__class__, layer.__class__ = RaytracedRouter, Shifted
    torch.testing.assert_close(layer(hidden).hidden, plain + 1)


def test_a_subclass_may_declare_that_the_fused_call_stands_for_it():
    class Same(RaytracedRouter):
        fuses = True

    class Below(Same):
        pass

    assert (RaytracedRouter.fuses, Same.fuses, Below.fuses) == (True, True, False)


def test_rows_of_one_walk_may_have_policies_of_their_own():
    model, batch = make(), images()
    alone = [model(batch[row : row + 1], confidence=0.3 + 0.1 * row, exit_every="expert").logits for row in range(4)]
    policies = [ExitPolicy(0.3 + 0.1 * row, exit_every="expert") for row in range(4)]
    walk, rows, found = Walk(lambda: model.exits(batch[:4], "expert")), list(range(4)), {}
    while walk.step is not None:
        out, ended_n = walk.step.exit
        reasons = [
            policies[row].stop_reason(walk.step, highest, num, ended)
            for row, highest, num, ended in zip(
                rows, confidences(out.logits).tolist(), out.num_experts.tolist(), ended_n.tolist(), strict=True
            )
        ]
        found |= {row: out.logits[n] for n, row in enumerate(rows) if reasons[n]}
        rows = [row for n, row in enumerate(rows) if reasons[n] is None]
        walk.leave(torch.tensor([reason is not None for reason in reasons]))
    for row, logits in found.items():
        torch.testing.assert_close(logits, alone[row][0])
    assert sorted(found) == list(range(4))


def test_a_policy_names_the_first_reason_to_leave():
    step = WalkStep(1, None, None, next_end=10.0)
    policy = ExitPolicy([0.9, 0.6], max_experts=3, deadline=9.0)
    assert policy.stop_reason(step, 0.6, 3, True) == "confidence"
    assert policy.stop_reason(step, 0.5, 3, True) == "budget"
    assert policy.stop_reason(step, 0.5, 2, True) == "end"
    assert policy.stop_reason(step, 0.5, 2, False) == "deadline"
    assert ExitPolicy([0.9, 0.6], deadline=10.5).stop_reason(step, 0.5, 2, False) is None
    assert policy.stop_reason(step, float("nan"), 0, False) == "confidence"  # no later answer would be better


def test_a_time_limit_alone_sets_no_threshold():
    """Float32 probabilities round to 1 long before a sequence ends: a threshold of 1 would end it."""
    model, batch = make(), images()
    model.head.weight.data.mul_(1000)
    found = model(batch, max_ms=1e7)
    assert torch.equal(found.num_experts, model(batch).num_experts)


def test_budget_exits_are_the_answers_with_each_budget():
    torch.manual_seed(0)
    model, tokens = rt.build("gpt-mre", dim=8, hidden=8, num_heads=2).eval(), torch.randint(0, 256, (2, 5))
    exits = model.budget_exits(tokens, 2)
    for budget in range(3):
        torch.testing.assert_close(exits.current.output.logits, model(tokens, max_experts=budget).logits)
        assert not exits.current.ended.any() or budget == 2
        if budget < 2:
            exits.advance()
    with pytest.raises(ValueError, match=r"rows=.*: must be None: all rows continue"):
        exits.advance(torch.tensor([0]))

"""Every baseline against a loop over samples and experts; cases with a known answer; experts that no sample chose."""

import pytest
import torch

from raytraced.experts import Stream, make_grid, update_dense
from raytraced.layer import RoutedLayer, routed_layer
from raytraced.rng import uniform
from raytraced.router import Call, Choice, Draws, Router
from raytraced.routers.ada_k import AdaK
from raytraced.routers.aux_free import AuxFree
from raytraced.routers.chain import ChainOfExperts
from raytraced.routers.hash import HashRouting
from raytraced.routers.matryoshka import MatryoshkaTopK
from raytraced.routers.mixture_of_depths import MixtureOfDepths, top_share
from raytraced.routers.null_experts import NullExperts
from raytraced.routers.planned import PlannedTopK
from raytraced.routers.relu import ReLURouting
from raytraced.routers.seq_top_k import PACE, SeqTopK
from raytraced.routers.threshold import Threshold
from raytraced.routers.top_any import TopAny
from raytraced.routers.top_k import TopK
from routers import per_sample

ROUTERS = {
    "top-k": (TopK, {}, per_sample.top_k),
    "top-k-count": (TopK, {"k": 3, "total": "count"}, per_sample.top_k),
    "top-1": (TopK, {"k": 1}, per_sample.top_k),
    # in evaluation it is top-k
    "matryoshka": (MatryoshkaTopK, {"k": 3, "most": 3, "total": "count"}, per_sample.top_k),
    "matryoshka-1": (MatryoshkaTopK, {"k": 1, "most": 3}, per_sample.top_k),
    "mixture-of-depths": (MixtureOfDepths, {}, per_sample.mixture_of_depths),
    "relu": (ReLURouting, {}, per_sample.relu),
    "threshold": (Threshold, {}, per_sample.threshold),
    "threshold-0.9": (Threshold, {"threshold": 0.9}, per_sample.threshold),
    "threshold-count": (Threshold, {"total": "count"}, per_sample.threshold),
    "seq-top-k": (SeqTopK, {}, per_sample.seq_top_k),
    "seq-top-k-count": (SeqTopK, {"total": "count"}, per_sample.seq_top_k),
    "aux-free": (AuxFree, {}, per_sample.aux_free),
    "aux-free-count": (AuxFree, {"total": "count"}, per_sample.aux_free),
    "top-any": (TopAny, {}, per_sample.top_any),
    "null-experts": (NullExperts, {}, per_sample.null_experts),
    "null-experts-1": (NullExperts, {"k": 2, "num_null": 1}, per_sample.null_experts),
    "chain": (ChainOfExperts, {}, per_sample.chain),
    "chain-3": (ChainOfExperts, {"k": 2, "num_rounds": 3}, per_sample.chain),
}


def make_layer(cls, dim=5, num_layers=3, num_experts=4, **options):
    layer = routed_layer(cls, dim, num_layers, num_experts, **options).double()
    with torch.no_grad():  # far from uniform, so that samples run different numbers of experts
        for gate in layer.router.gates:
            gate.weight *= 4
    return layer


def gradients(module, loss, **inputs):
    """Gradients of the parameters and of the inputs, by name; 0 where the loss does not depend on one."""
    names, parameters = zip(*module.named_parameters(), *inputs.items(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for n, p, g in zip(names, parameters, found, strict=True)}


@pytest.mark.parametrize("stream", list(Stream))
@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_equals_a_loop_over_samples(name, stream):
    cls, options, route = ROUTERS[name]
    layer = make_layer(cls, stream=stream, **options).eval()
    if cls is AuxFree:
        layer.router.bias.normal_()
    if name == "top-any":
        layer.router.thresholds.data.normal_()
        layer.router.removed[1, 2] = True
    hidden, probe = torch.randn(9, 5, dtype=torch.float64), torch.randn(9, 5, dtype=torch.float64)
    hidden.requires_grad_()
    out = layer(hidden)
    slow = [per_sample.run_one(layer, row, route) for row in hidden]
    expected = torch.stack([row for row, _ in slow])
    torch.testing.assert_close(out.hidden, expected, rtol=1e-12, atol=1e-12)
    assert out.route.active.tolist() == [active for _, active in slow]
    ours, theirs = (gradients(layer, (value * probe).sum(), hidden=hidden) for value in (out.hidden, expected))
    for parameter in ours:
        torch.testing.assert_close(ours[parameter], theirs[parameter], rtol=1e-9, atol=1e-12, msg=parameter)


def test_ada_k_equals_a_loop_over_samples_that_draws_the_same():
    layer = make_layer(AdaK)
    layer.router.old_weight.normal_()
    layer.router.num_calls += 1  # the copy π_old stays different from π
    hidden, probe = torch.randn(9, 5, dtype=torch.float64), torch.randn(9, 5, dtype=torch.float64)
    rows = torch.arange(9) * 7
    out = layer(hidden, generator=torch.Generator().manual_seed(3), rows=rows)
    seed = torch.randint(2**63 - 1, (), generator=torch.Generator().manual_seed(3))

    def route_and_draw(draws):
        def route(router, step, row):
            logits = router.old_weight[step] @ row.detach() + router.old_bias[step]
            k, reached = 0, 0.0
            for prob in per_sample.normalised(logits):
                k, reached = k + 1, reached + per_sample.number(prob)
                if reached >= draws[step]:
                    break
            return per_sample.ada_k([k] * router.num_layers)(router, step, row)

        return route

    draws = torch.stack([uniform(seed, rows, step) for step in range(3)], 1).tolist()
    slow = [per_sample.run_one(layer, row, route_and_draw(draws[b])) for b, row in enumerate(hidden)]
    assert out.route.active.tolist() == [active for _, active in slow]
    assert len(set(out.route.active.sum((1, 2)).tolist())) > 2
    expected = torch.stack([row for row, _ in slow])
    torch.testing.assert_close(out.hidden, expected, rtol=1e-12, atol=1e-12)
    ours, theirs = (gradients(layer, (value * probe).sum()) for value in (out.hidden, expected))
    for parameter in ours:
        torch.testing.assert_close(ours[parameter], theirs[parameter], rtol=1e-9, atol=1e-12, msg=parameter)


@pytest.mark.parametrize("name", [*ROUTERS, "ada-k"])
def test_leading_axes_are_kept(name):
    layer = make_layer(AdaK if name == "ada-k" else ROUTERS[name][0]).eval()
    hidden = torch.randn(2, 3, 5, dtype=torch.float64)
    out, flat = layer(hidden), layer(hidden.flatten(0, 1))
    torch.testing.assert_close(out.hidden, flat.hidden.view(2, 3, 5), rtol=0, atol=0)
    assert out.route.active.shape == (2, 3, layer.router.num_layers * layer.router.num_rounds, 4)
    assert torch.equal(out.route.active.flatten(0, 1), flat.route.active)


def flat_gates(layer):
    """Set all gates to zero: every expert has the same probability."""
    with torch.no_grad():
        for gate in layer.router.gates:
            gate.weight.zero_()
            gate.bias.zero_()
    return layer


def test_k_of_all_experts_is_the_dense_sum_weighted_by_the_softmax():
    layer = make_layer(TopK, num_layers=1, k=4)
    hidden = torch.randn(6, 5, dtype=torch.float64)
    weights = layer.router.gates[0](hidden).softmax(-1)
    torch.testing.assert_close(layer(hidden).hidden, hidden + update_dense(layer.experts, 0, hidden, weights))


@pytest.mark.parametrize("cls", [TopK, AuxFree])
def test_a_uniform_gate_gives_each_of_k_experts_one_kth(cls):
    layer = flat_gates(make_layer(cls, num_layers=1, k=2)).eval()
    hidden = torch.randn(6, 5, dtype=torch.float64)
    out = layer(hidden)
    assert out.route.active.sum(-1).eq(2).all()
    torch.testing.assert_close(out.hidden, hidden + update_dense(layer.experts, 0, hidden, out.route.active[:, 0] / 2))


@pytest.mark.parametrize(
    ("threshold", "num_expected"), [(0.0, 1), (0.24, 1), (0.25, 1), (0.26, 2), (0.75, 3), (1.0, 4)]
)
def test_a_uniform_gate_runs_the_number_of_experts_that_reaches_the_threshold(threshold, num_expected):
    layer = flat_gates(make_layer(Threshold, threshold=threshold)).eval()
    out = layer(torch.randn(6, 5, dtype=torch.float64))
    assert out.route.active.sum(-1).eq(num_expected).all()


def test_a_threshold_of_1_runs_all_experts_and_of_0_the_most_probable_one():
    hidden = torch.randn(50, 5, dtype=torch.float64)
    layer = make_layer(Threshold, num_layers=1, threshold=1.0)
    assert layer(hidden).route.active.all()
    layer.router.threshold = 0.0
    strongest = layer.router.gates[0](hidden).argmax(-1)
    assert torch.equal(layer(hidden).route.active[:, 0].argmax(-1), strongest)
    assert layer(hidden).route.active.sum(-1).eq(1).all()


def test_the_only_expert_of_a_layer_has_weight_1():
    hidden = torch.randn(6, 5, dtype=torch.float64)
    for cls, options in [
        (TopK, {"k": 1}),
        (Threshold, {}),
        (AuxFree, {"k": 1}),
        (TopAny, {}),
    ]:
        layer = make_layer(cls, num_layers=1, num_experts=1, **options)
        torch.testing.assert_close(
            layer(hidden).hidden, hidden + layer.experts.run_expert(0, 0, hidden), msg=cls.__name__
        )


def test_aux_free_without_bias_is_top_k():
    torch.manual_seed(1)
    ours = make_layer(AuxFree).eval()
    theirs = make_layer(TopK).eval()
    theirs.load_state_dict({key: value for key, value in ours.state_dict().items() if key != "router.bias"})
    hidden = torch.randn(20, 5, dtype=torch.float64)
    torch.testing.assert_close(ours(hidden).hidden, theirs(hidden).hidden)
    assert torch.equal(ours(hidden).route.active, theirs(hidden).route.active)


def test_matryoshka_draws_every_k_up_to_the_largest_in_training_and_keeps_the_best_experts():
    layer = make_layer(MatryoshkaTopK, num_experts=4, most=3).train()
    hidden = torch.randn(3000, 5, dtype=torch.float64)
    out = layer(hidden, generator=torch.Generator().manual_seed(0))
    counts_BL = out.route.active.sum(-1).long()
    for layer_counts in counts_BL.unbind(1):
        share = torch.bincount(layer_counts, minlength=5) / len(hidden)
        assert share[0] == share[4] == 0
        assert (share[1:4] - 1 / 3).abs().max() < 5 * (2 / 9 / 3000) ** 0.5  # five standard deviations of a share
    assert (counts_BL[:, 0] != counts_BL[:, 1]).any()  # every layer draws its own
    logits_BN = layer.router.gate_logits(0, hidden)
    chosen_BN = out.route.active[:, 0].bool()
    weakest = logits_BN.masked_fill(~chosen_BN, float("inf")).amin(-1)
    strongest_left = logits_BN.masked_fill(chosen_BN, -float("inf")).amax(-1)
    assert (weakest >= strongest_left).all()


def test_seq_top_k_runs_the_largest_probabilities_of_a_whole_batch_in_training():
    layer = make_layer(SeqTopK, k=2).train()
    hidden = torch.randn(50, 5, dtype=torch.float64)
    out = layer(hidden)
    assert (out.route.active.sum((0, 2)) == 100).all()  # in every layer, two experts per vector on the mean
    assert out.route.active[:, 0].sum(-1).unique().numel() > 2  # and not the same number for all
    probs, runs = layer.router.gate_logits(0, hidden).softmax(-1), out.route.active[:, 0].bool()
    assert probs[runs].min() > probs[~runs].max()


def test_the_cut_of_seq_top_k_follows_training_so_that_evaluation_runs_as_many_experts():
    layer = make_layer(SeqTopK, num_layers=1, k=1).train()
    hidden = torch.randn(400, 5, dtype=torch.float64)
    probs, chosen = layer.router.gate_logits(0, hidden).softmax(-1), layer(hidden).route.active[:, 0].bool()
    assert layer.router.cut.item() == pytest.approx((1 - PACE) / 4 + PACE * probs[chosen].min().item())
    for _ in range(1000):
        layer(hidden)
    before = layer.router.cut.clone()
    assert torch.equal(layer.eval()(hidden).route.active.bool()[:, 0], probs >= before)
    assert layer(hidden).route.active.sum(-1).mean().item() == pytest.approx(1, abs=0.02)
    assert torch.equal(layer.router.cut, before)  # evaluation does not move it


def test_mixture_of_depths_runs_the_share_of_the_highest_scores_in_training():
    layer = make_layer(MixtureOfDepths, capacity=0.3).train()
    hidden = torch.randn(50, 5, dtype=torch.float64)
    out = layer(hidden)
    assert (out.route.active.amax(-1).sum(0) == 15).all()  # in every layer, three tenths of the vectors
    assert (out.route.active.amin(-1) == out.route.active.amax(-1)).all()  # all experts, or none
    scores, runs = layer.router.gate_logits(0, hidden)[:, 0], out.route.active[:, 0, 0].bool()
    assert scores[runs].min() > scores[~runs].max()


def test_the_gate_of_mixture_of_depths_learns_to_predict_the_choice_from_the_vector_alone():
    layer = make_layer(MixtureOfDepths, num_layers=1, capacity=0.25, prediction=1.0).train()
    hidden = torch.randn(400, 5, dtype=torch.float64)
    optimizer = torch.optim.Adam(layer.router.parameters(), lr=0.05)
    before = layer.eval()(hidden).route.active[:, 0, 0].mean()
    for _ in range(300):
        optimizer.zero_grad()
        layer.train()(hidden).loss.backward()
        optimizer.step()
    chosen = layer(hidden).route.active
    predicted = layer.eval()(hidden).route.active
    assert (before - 0.25).abs() > 0.1
    assert (predicted != chosen).any(-1).float().mean() < 0.05


def test_a_layer_that_every_vector_skips_gives_its_experts_a_zero_gradient():
    layer = make_layer(MixtureOfDepths).eval()
    with torch.no_grad():
        layer.router.gates[0].weight.zero_()
        layer.router.gates[0].bias.fill_(-30.0)
    out = layer(torch.randn(30, 5, dtype=torch.float64))
    for key, grad in gradients(layer.experts, out.hidden.square().sum()).items():
        assert not grad[0].any(), key
        assert grad[1:].any(), key


def test_a_share_of_no_vectors_is_empty_and_of_one_is_that_one():
    assert top_share(torch.zeros(0, 1), 0.5).shape == (0, 1)
    assert top_share(torch.zeros(1, 1), 0.01).tolist() == [[True]]


@pytest.mark.parametrize("options", [{"capacity": 0.0}, {"capacity": 1.5}, {"prediction": -1.0}])
def test_impossible_options_of_mixture_of_depths_are_refused(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}=.*: must"):
        routed_layer(MixtureOfDepths, 5, 2, 3, **options)


def test_hash_routing_follows_the_layers_input_in_all_layers_and_learns_nothing():
    layer = routed_layer(HashRouting, 5, 3, 4, k=2).double()
    hidden = torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
    out = layer(hidden)
    assert out.route.active.sum(-1).unique().tolist() == [2]
    expected = [[per_sample.hash_routing(layer.router, step, row).keys() for step in range(3)] for row in hidden]
    assert [[set(step.nonzero()[:, 0].tolist()) for step in row] for row in out.route.active] == [
        [set(step) for step in row] for row in expected
    ]
    assert not list(layer.router.parameters())
    assert "router.directions" in layer.state_dict()
    twice = layer(hidden.repeat(2, 1))
    assert twice.route.active[:9].equal(twice.route.active[9:])


def test_planned_equals_top_k_in_one_layer_and_reads_the_layers_input_in_all():
    hidden = torch.randn(20, 5, dtype=torch.float64)
    for num_layers in (1, 3):
        torch.manual_seed(num_layers)
        planned, stepwise = (make_layer(cls, num_layers=num_layers, balance=0.5) for cls in (PlannedTopK, TopK))
        stepwise.load_state_dict(planned.state_dict())
        steps = [stepwise.router.route(step, hidden, Draws(Call(), hidden)) for step in range(num_layers)]
        out = planned(hidden)
        assert torch.equal(out.route.active, torch.stack([step.active for step in steps], 1))
        torch.testing.assert_close(out.loss, sum(step.loss for step in steps))
        expected = hidden
        for layer, step in enumerate(steps):
            expected = expected + update_dense(planned.experts, layer, expected, step.weights)
        torch.testing.assert_close(out.hidden, expected)
        assert torch.allclose(out.hidden, stepwise(hidden).hidden) == (num_layers == 1)


def test_a_sample_with_null_experts_only_passes_unchanged():
    layer = flat_gates(make_layer(NullExperts, k=2, num_null=3))
    with torch.no_grad():
        for gate in layer.router.gates:
            gate.bias[4:] = 9.0
    hidden = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    out = layer(hidden)
    assert not out.route.active.any()
    assert torch.equal(out.hidden, hidden)
    assert not layer.router.route(0, hidden, Draws(Call(), hidden)).weights.any()  # 0, not 0 / 0
    (out.hidden.sum() + out.loss).backward()
    assert hidden.grad.isfinite().all()
    assert all(gate.weight.grad.isfinite().all() for gate in layer.router.gates)


def test_without_null_experts_adamoe_is_top_k():
    ours, theirs = make_layer(NullExperts, k=3, num_null=0).eval(), make_layer(TopK, k=3).eval()
    theirs.load_state_dict(ours.state_dict())
    hidden = torch.randn(20, 5, dtype=torch.float64)
    torch.testing.assert_close(ours(hidden).hidden, theirs(hidden).hidden)


def test_top_any_runs_the_most_similar_expert_if_none_reaches_its_threshold():
    layer = make_layer(TopAny, num_layers=1)
    layer.router.thresholds.data.fill_(2.0)  # no cosine reaches it
    hidden = torch.randn(20, 5, dtype=torch.float64)
    cosine = torch.nn.functional.cosine_similarity(hidden[:, None], layer.router.directions[0], dim=-1)
    active = layer(hidden).route.active[:, 0]
    assert active.sum(-1).eq(1).all()
    assert torch.equal(active.argmax(-1), cosine.argmax(-1))


def test_top_any_removes_experts_that_no_sample_chose_for_a_number_of_steps():
    layer = make_layer(TopAny, num_layers=2, removal=3)
    layer.router.thresholds.data[0, 1] = 9.0
    hidden = torch.randn(20, 5, dtype=torch.float64)
    for step in range(3):
        assert not layer.router.removed.any(), step
        layer(hidden)
    never = layer(hidden).route.active.eq(0).all(0)
    assert torch.equal(layer.router.removed, never)
    assert never[0, 1]
    layer.router.thresholds.data[0, 1] = -9.0  # has no effect any more
    assert not layer.eval()(hidden).route.active[:, 0, 1].any()


@pytest.mark.parametrize("options", [{"removal": 0}, {"removal": 1}])
def test_top_any_removes_no_expert_outside_training_or_without_removal(options):
    layer = make_layer(TopAny, **options).train(not options["removal"])
    layer.router.thresholds.data[0, 1] = 9.0
    layer(torch.randn(20, 5, dtype=torch.float64))
    assert not layer.router.removed.any()
    assert not layer.router.opened.any()


def test_top_any_starts_with_orthogonal_directions():
    directions = make_layer(TopAny).router.directions
    for one in directions:  # four of five dimensions
        torch.testing.assert_close(
            one @ one.mT, torch.eye(4, dtype=torch.float64), rtol=0, atol=1e-6
        )  # initialised in single precision


def test_top_any_thresholds_get_a_gradient_from_a_cost_of_active_experts():
    layer = make_layer(TopAny)
    layer(torch.randn(20, 5, dtype=torch.float64)).route.active.sum().backward()
    assert (layer.router.thresholds.grad < 0).all()  # a higher threshold, fewer active experts


def test_rounds_of_a_chain_share_the_experts_of_their_layer():
    layer = make_layer(ChainOfExperts, num_layers=1, num_rounds=2, k=4)
    hidden = torch.randn(6, 5, dtype=torch.float64)
    expected = hidden
    for gate in layer.router.gates:
        expected = expected + update_dense(layer.experts, 0, expected, gate(expected).softmax(-1))
    torch.testing.assert_close(layer(hidden).hidden, expected)


@pytest.mark.parametrize("name", [*(name for name in ROUTERS if name != "mixture-of-depths"), "ada-k"])
def test_an_expert_that_no_sample_chose_gets_a_zero_gradient(name):
    cls, options, _ = ROUTERS.get(name, (AdaK, {}, None))
    options = options | ({"threshold": 0.5} if cls is Threshold else {})
    layer = make_layer(cls, **options)
    with torch.no_grad():  # no gate chooses expert 0 of the first layer
        for gate in layer.router.gates[: layer.router.num_rounds]:
            gate.weight[0], gate.bias[0] = 0.0, -30.0
        if cls is TopAny:
            layer.router.thresholds[0, 0] = 9.0
        if cls is AdaK:  # never all four of them
            layer.router.allocator_weight.zero_()
            layer.router.allocator_bias[:, 3] = -30.0
    hidden = torch.randn(30, 5, dtype=torch.float64)
    out = layer(hidden)
    assert not out.route.active[:, 0, 0].any()
    assert out.route.active[:, 0, 1:].any()
    grads = gradients(layer, out.hidden.square().sum())
    for key, grad in grads.items():
        assert grad.isfinite().all(), key
        if key.startswith("experts."):
            assert not grad[0, 0].any(), key
            assert grad[0, 1:].any(), key


@pytest.mark.parametrize("name", [*ROUTERS, "ada-k"])
def test_an_empty_batch_gives_an_empty_output_and_a_finite_loss(name):
    layer = make_layer(AdaK if name == "ada-k" else ROUTERS[name][0])
    out = layer(torch.zeros(0, 5, dtype=torch.float64))
    assert out.hidden.shape == (0, 5)
    assert out.loss is None or out.loss.isfinite()


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (TopK, {"k": 5}, "k=5: must lie in 1 … num_experts=4"),
        (TopK, {"k": 0}, "k=0: must lie in 1 … num_experts=4"),
        (TopK, {"balance": -1.0}, "balance=-1.0: must not be negative"),
        (TopK, {"total": "two"}, "total='two': must be one of one, count"),
        (ReLURouting, {"k": 0.0}, "k=0.0: must lie in 0 … num_experts=4 (0 excluded)"),
        (ReLURouting, {"k": 4.5}, "k=4.5: must lie in 0 … num_experts=4 (0 excluded)"),
        (ReLURouting, {"pace": 0.9}, "pace=0.9: must be at least 1"),
        (TopK, {"stream": "river"}, "stream='river': must be one of residual, skip-sum, last"),
        (TopK, {"num_layers": 0}, "num_layers=0: must be at least 1"),
        (TopK, {"num_layers": 2.0}, "num_layers=2.0: must be a whole number"),
        (Threshold, {"threshold": 1.5}, "threshold=1.5: must lie in 0 … 1, it is a sum of probabilities"),
        (Threshold, {"threshold": -0.1}, "threshold=-0.1: must lie in 0 … 1, it is a sum of probabilities"),
        (Threshold, {"entropy": -0.1}, "entropy=-0.1: must not be negative"),
        (AuxFree, {"k": 9}, "k=9: must lie in 1 … num_experts=4"),
        (AuxFree, {"update_rate": -1.0}, "update_rate=-1.0: must not be negative"),
        (TopAny, {"diversity": -1.0}, "diversity=-1.0: must not be negative"),
        (TopAny, {"removal": -1}, "removal=-1: must not be negative, it is a number of steps"),
        (NullExperts, {"num_null": -1}, "num_null=-1: must not be negative"),
        (NullExperts, {"k": 7, "num_null": 2}, "k=7: must lie in 1 … 6, null ones included"),
        (ChainOfExperts, {"num_rounds": 0}, "num_rounds=0: must be at least 1"),
        (ChainOfExperts, {"k": 5}, "k=5: must lie in 1 … num_experts=4"),
        (AdaK, {"clip": 0.0}, "clip=0.0: must be positive"),
        (AdaK, {"policy_steps": 0}, "policy_steps=0: must be at least 1"),
        (AdaK, {"entropy": -1.0}, "entropy=-1.0: must not be negative"),
        (AdaK, {"expert_cost": -1.0}, "expert_cost=-1.0: must not be negative"),
    ],
)
def test_an_invalid_option_is_refused_with_its_name_value_and_rule(cls, options, message):
    with pytest.raises(ValueError) as error:
        routed_layer(cls, **{"dim": 5, "num_layers": 3, "num_experts": 4} | options)
    assert str(error.value) == message


def test_hidden_vectors_of_another_width_are_refused():
    with pytest.raises(ValueError, match=r"hidden has shape \(2, 6\): the last axis must be dim=5"):
        make_layer(TopK)(torch.zeros(2, 6, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"hidden has shape \(2, 3, 10\): the last axis must be dim=5"):
        make_layer(TopK)(torch.zeros(2, 3, 10, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"hidden has shape \(\): the last axis must be dim=5"):
        make_layer(TopK)(torch.zeros((), dtype=torch.float64))


def test_by_default_a_layer_has_a_residual_stream_and_two_hidden_layers_per_expert():
    layer = RoutedLayer(TopK(5, 3, 4), make_grid(5, 3, 4), 5)
    assert layer.stream == "residual"
    assert layer.experts.widths == routed_layer(TopK, 5, 3, 4).experts.widths == (5, 5, 5, 5)
    assert routed_layer(TopK, 5, 3, 4, hidden=7, num_hidden=1).experts.widths == (5, 7, 5)


@pytest.mark.parametrize("options", [{"hidden": 7}, {"num_hidden": 1}])
def test_custom_experts_refuse_the_options_of_the_default_experts(options):
    with pytest.raises(ValueError, match="are for the default MLP, not with `expert`"):
        routed_layer(TopK, 5, 3, 4, expert=lambda: torch.nn.Linear(5, 5), **options)


class Planned(Router):
    """A plan of all experts, with a loss."""

    def plan(self, hidden_BD, call):
        active_BSN = hidden_BD.new_ones(len(hidden_BD), self.num_layers, self.num_experts)
        return Choice(active_BSN, active_BSN, loss=hidden_BD.sum())


def test_the_loss_of_a_plan_is_the_loss_of_the_layer():
    hidden = torch.randn(2, 5, dtype=torch.float64)
    assert make_layer(Planned)(hidden).loss == hidden.sum()


def test_options_of_sequences_are_refused_and_greedy_is_accepted():
    layer, hidden = make_layer(TopK), torch.randn(2, 5, dtype=torch.float64)
    for asked in ({"select": "sample"}, {"max_experts": 2}):
        with pytest.raises(ValueError, match="select, max_experts and stop: this router supports none of them"):
            layer(hidden, **asked)
    assert torch.equal(layer(hidden, select="greedy").hidden, layer(hidden).hidden)


def test_the_gate_of_top_1_gets_a_gradient():
    layer = make_layer(TopK, k=1)
    layer(torch.randn(20, 5, dtype=torch.float64)).hidden.square().sum().backward()
    assert all(gate.weight.grad.abs().sum() > 0 for gate in layer.router.gates)

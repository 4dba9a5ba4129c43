"""The paper's recipe, entry by entry from the paper's text, and fair baselines: not copies of the code."""

import inspect
from typing import get_args

import pytest
import torch

from experiments.reproduce.plan import FULL, Planner
from experiments.reproduce.variants import EQUAL_LR, MRE_PAPER, PAPER_VARIANTS, compared_variants, swept_variants
from raytraced import PAPER, RaytracedExperts, activation_sequence, build
from raytraced.models.registry import GRID, complete_options
from raytraced.rng import exponential, new_seed
from raytraced.routers.raytraced_config import RaytracedConfig, Weighting
from raytraced.sequence import GRADIENTS, WEIGHTINGS, Estimator
from raytraced.training.config import preset_values
from reference import mlp, rates_of_one, sequence_of_one

IMAGES = {"image_shape": (1, 6, 6), "num_classes": 4}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# The equations of the text, letter by letter; where the text is open, `PAPER` has what comes nearest to the paper's tables.
AS_WRITTEN = PAPER | {"stream": "last", "gate_init": "normal"}


def written(L=3, N=3, D=5):
    """A layer of the paper's recipe, and its rows in training."""
    torch.manual_seed(14)  # some sequences reach the last layer
    layer = RaytracedExperts(D, L, N, **AS_WRITTEN).double()
    return layer, torch.randn(40, D, dtype=torch.float64, requires_grad=True)


def test_the_recipe_has_an_entry_for_each_statement_of_the_text_and_no_other():
    """What the tests below derive, one by one; the stop and the initialisation are those of every layer."""
    assert set(PAPER) == {
        "stream", "weighting", "mask_gradient", "estimator", "temperature", "train_select", "gate_init",
        "output_logit_offset", "input_rank",
    }  # fmt: skip


def test_a_layers_output_is_the_sum_of_its_active_experts_and_the_answer_is_the_last_layers():
    """The equation of section 3.3: h_ℓ = Σ_i E_i(h_{ℓ−1}) · A_i, "we do not need to weight the experts' outputs"."""
    layer, rows = written()
    out = layer(rows, generator=generator())
    for row, active, found in zip(rows, out.route.active, out.hidden, strict=True):
        hidden = row
        for l in range(3):
            hidden = sum((mlp(layer.experts, l, i, hidden) for i in range(3) if active[l, i]), torch.zeros_like(row))
        torch.testing.assert_close(found, hidden, rtol=1e-10, atol=1e-12)
    assert (out.route.active[:, -1].sum(-1) > 1).any()  # with one expert per layer, weights that sum to one are all 1


def test_the_next_node_is_drawn_in_proportion_to_its_firing_rate_in_training():
    """Section 3: "each candidate's firing rate serves as an (unnormalized) probability"; greedily there is one first node."""
    layer, rows = written(L=2, N=4)
    entry = layer.router.entry(rows[:1]).detach()[0]
    first = layer(rows[:1].expand(4000, -1), generator=generator()).route.nodes[:, 0]
    share = torch.bincount(first, minlength=8)[:4] / 4000
    assert ((share - entry).abs() <= 5 * (entry * (1 - entry) / 4000).sqrt()).all()  # five standard errors


def test_the_gradient_is_gumbel_softmax_straight_through_of_every_mask_at_the_recipes_temperature():
    """Algorithm 1's ste(P, τ): the soft part is softmax((log P + Gumbel noise) / τ), along the whole path, for each A_i."""
    layer, rows = written()
    rows = rows.detach()[:8].requires_grad_()
    out = layer(rows, generator=generator())
    gradient = torch.randn(8, 5, dtype=torch.float64)
    inputs = [rows, *layer.router.parameters()]
    fast = torch.autograd.grad((out.hidden * gradient).sum(), inputs)

    seed = new_seed(generator(), torch.device("cpu"))
    noise = torch.stack([exponential(seed, torch.arange(8), t, 10) for t in range(10)], 1)
    entry = torch.softmax(rows @ layer.router.gate.weight.T + layer.router.gate.bias, -1)
    loss = torch.zeros((), dtype=torch.float64)
    for b, nodes in enumerate(out.route.nodes.tolist()):
        path = [k for k in nodes if k >= 0]
        active = sequence_of_one(
            layer.router.routing, entry[b], path, stopped=len(path) < 9,
            estimator="gumbel", noise=noise[b], temperature=layer.router.config.temperature,
        )  # fmt: skip
        hidden = rows[b]
        for l in range(3):  # inactive experts too: their A_i is 0, its gradient is not
            hidden = sum(active[l][i] * mlp(layer.experts, l, i, hidden) for i in range(3))
        loss = loss + (hidden * gradient[b]).sum()
    for a, b in zip(fast, torch.autograd.grad(loss, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)
    assert all(float(one.abs().max()) > 0 for one in fast)


def test_the_temperature_is_the_one_tried_inside_the_papers_range():
    """ "A slight preference towards higher … values (in a range between 10 and 50)": its ends are tried, and one inside."""
    assert [tau for tau in FULL.temperatures if 10 <= tau <= 50] == [10, PAPER["temperature"], 50]
    assert RaytracedExperts(5, 2, 3, **PAPER).router.config.temperature == PAPER["temperature"]
    assert 1 in FULL.temperatures  # the usual one, outside of the claim


def test_fresh_gates_are_normal_with_variance_n_plus_one_towards_every_outlet_the_output_too():
    """Appendix A: "scaling by √(N_e + 1)"; nothing is said of a lower start towards the output node."""
    N = 16
    routing = RaytracedExperts(4, 12, N, **AS_WRITTEN).router.routing
    weights = torch.cat([routing.gate_weight(layer)[:, :, 0] for layer in range(11)]).detach()  # (11 · N, N + 1)
    for column in (weights[:, -1], weights[:, :-1].flatten()):
        num, variance = len(column), N + 1
        assert abs(float(column.mean())) <= 4 * (variance / num) ** 0.5
        assert float(column.var()) == pytest.approx(variance, abs=4 * variance * (2 / num) ** 0.5)


def test_the_sequence_stops_when_the_output_is_drawn_not_when_its_rate_is_the_largest():
    """Section 3.1 and its footnote: "met when the output node is chosen"; with dominance it would stop at one place only."""
    layer, rows = written()
    routing, entry = layer.router.routing, layer.router.entry(rows).detach()
    early = 0
    for b, nodes in enumerate(layer(rows, generator=generator()).route.nodes.tolist()):
        path = [k for k in nodes if k >= 0]
        rates, output = rates_of_one(
            routing, entry[b], [[float(3 * l + i in path) for i in range(3)] for l in range(3)]
        )
        inactive = [rates[k // 3][k % 3] for k in range(9) if k not in path]
        early += len(path) < 9 and bool(output < max(inactive))
    assert early > 0


def test_the_recipe_is_what_the_named_model_and_the_reproduction_build():
    options = complete_options("mre-paper", {})
    assert options == options | PAPER
    config = Planner(FULL, {}).configure(MRE_PAPER, "mnist", 0, 1, MRE_PAPER.lr)
    model = build("mre-paper", image_shape=(1, 28, 28), num_classes=10, **config.model_options)
    assert model.card.options == options
    assert (options["num_layers"], options["num_experts"], options["dim"]) == (4, 8, 16)  # appendix B
    assert {name: options[name] for name in GRID} == GRID


def test_the_papers_learning_rates():
    """Figure 3: "equal learning rate set to 10⁻³"; no schedule is named. Of 5×10⁻³, its "optimal" one, see docs/paper/paper.md."""
    for data in ("mnist", "fashion-mnist", "cifar10", "digits"):
        assert preset_values("paper", data, "mre-paper")["lr"] == MRE_PAPER.lr == 1e-3
        assert preset_values("paper", data, "top-k")["lr"] == EQUAL_LR == 1e-3
        assert preset_values("paper", data, "mre-paper")["schedule"] == "constant"
    assert MRE_PAPER.preset == "paper"


def test_the_papers_baselines():
    """Section 4.1: top-k "with k = 2", a threshold "fixed to 0.5"; appendix B: MLPs of 8 layers, 36 and 24 wide."""
    hidden = torch.randn(9, 16)
    assert build("top-k", **IMAGES).layer(hidden).route.num_active.tolist() == [2 * 4] * 9
    assert complete_options("threshold", {})["threshold"] == 0.5
    sizes = [[complete_options(f"mlp-{kind}", {})[name] for name in ("num_layers", "dim")] for kind in ("total", "avg")]
    assert sizes == [[8, 36], [8, 24]]


ALL_MODELS = {
    variant.label: variant for variant in (*PAPER_VARIANTS, *compared_variants(wide=False), *swept_variants((2.0,)))
}


@pytest.mark.parametrize("label", ALL_MODELS)
def test_every_baseline_has_the_residual_stream_that_ours_has(label):
    """With experts that add nothing, the input still reaches the answer."""
    config = Planner(FULL, {}).configure(ALL_MODELS[label], "mnist", 0, 1, 1e-3)
    model = build(config.model, **IMAGES, **config.model_options).eval()
    with torch.no_grad():
        for parameter in model.layer.experts.parameters():
            parameter.zero_()
        logits = model(torch.rand(2, 1, 6, 6), **({"max_experts": 8} if label == "multi-exit" else {})).logits
    assert not torch.equal(logits[0], logits[1])


def test_the_recipes_sequence_needs_no_option_that_it_does_not_name():
    """The same layer drawn by hand: the recipe's options reach the sequence."""
    layer, rows = written()
    entry = layer.router.entry(rows)
    options = {name: PAPER[name] for name in ("estimator", "temperature")}
    found = activation_sequence(layer.router.routing, entry, select="sample", generator=generator(), **options)
    assert torch.equal(layer(rows, generator=generator()).route.nodes, found.nodes)


def test_the_options_that_a_layer_names_are_those_that_its_tables_have():
    assert set(get_args(Weighting)) == {*WEIGHTINGS, "auto"}  # "auto" is one of the others, by the shape of the grid
    assert set(get_args(Estimator)) == {*GRADIENTS, "none"}
    for name, options in (
        ("weighting", WEIGHTINGS),
        ("estimator", get_args(Estimator)),
        ("mask_gradient", ("all", "active")),
    ):
        for option in options:
            made = build("mre", **IMAGES, **{"estimator": "reinmax"} | {name: option})
            assert made.card.options[name] == option


def test_a_sequence_by_itself_is_drawn_with_the_defaults_of_the_layer():
    ours, layers = (inspect.signature(one).parameters for one in (activation_sequence, RaytracedConfig))
    for name in ("estimator", "temperature", "stop"):
        assert ours[name].default == layers[name].default
    assert layers["temperature"].default == PAPER["temperature"]

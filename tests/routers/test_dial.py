"""`stop` as a dial: per call, per vector, drawn in training; the sharp start; and every grid's gates learn."""

from itertools import product

import pytest
import torch

import raytraced as rt
from raytraced import RaytracedConfig, RaytracedExperts, kernels
from raytraced.io.saving import load, save
from raytraced.rng import uniform


def generator(seed=3):
    return torch.Generator().manual_seed(seed)


def make(num_layers=3, num_experts=4, dtype=torch.float64, **options):
    torch.manual_seed(1)
    return RaytracedExperts(6, num_layers, num_experts, **{"input_init_std": 1.0} | options).to(dtype).eval()


def vectors(*shape, dtype=torch.float64):
    return torch.randn(*shape, 6, generator=generator(), dtype=dtype)


STOPS = torch.tensor([0.05, 0.3, 1.0, 3.0], dtype=torch.float64)


@pytest.mark.parametrize("grid", [(1, 5), (2, 3), (3, 7), (4, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weighting", ["relative", "rates"])
def test_outputs_and_gradients_with_a_stop_per_row_are_those_of_the_plain_path(grid, dtype, weighting):
    layer = make(*grid, dtype, weighting=weighting, weight_scale=2.5)
    stop, found = STOPS.repeat(10), []
    for kernel in ("", "plain"):
        hidden = vectors(40, dtype=dtype).requires_grad_()
        with kernels.use(kernel):
            out = layer(hidden, stop=stop)
            gradients = torch.autograd.grad(out.hidden.sin().sum(), [hidden, *layer.parameters()], allow_unused=True)
        found.append((out, [torch.zeros(()) if grad is None else grad for grad in gradients]))
    (fast, fast_gradients), (plain, plain_gradients) = found
    assert torch.equal(fast.route.nodes, plain.route.nodes)
    tolerance = 1e-11 if dtype is torch.float64 else 1e-3
    torch.testing.assert_close(fast.hidden, plain.hidden, rtol=tolerance, atol=tolerance)
    for one, two in zip(fast_gradients, plain_gradients, strict=True):
        torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance * max(1.0, float(two.abs().max())))


@pytest.mark.parametrize("scale", [1e2, 1e4, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_relative_weights_with_extreme_logits_are_those_of_the_plain_path(scale, dtype):
    layer = make(3, 5, dtype, weighting="relative", weight_scale=3.0, stop=0.01)
    with torch.no_grad():
        for parameter in layer.router.parameters():
            parameter *= scale**0.5
    hidden, found = vectors(30, dtype=dtype), []
    for kernel in ("", "plain"):
        with kernels.use(kernel):
            out = layer(hidden)
            found.append((out, torch.autograd.grad(out.hidden.sum(), [*layer.experts.parameters()])))
    (fast, fast_gradients), (plain, plain_gradients) = found
    same = (fast.route.nodes == plain.route.nodes).all(-1)  # rounding may decide between equal rates
    assert float(same.double().mean()) > 0.9
    torch.testing.assert_close(fast.hidden[same], plain.hidden[same], rtol=1e-3, atol=1e-3)
    if bool(same.all()):
        for one, two in zip(fast_gradients, plain_gradients, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-3)


def test_a_given_stop_takes_the_place_of_the_layers_own():
    dominant, by_number = make(stop="dominant"), make(stop=0.1)
    hidden = vectors(8, 4)
    expected = by_number(hidden)
    for stop in (0.1, torch.full((8, 4), 0.1), torch.full((32,), 0.1)):
        found = dominant(hidden, stop=stop)
        assert torch.equal(found.route.nodes, expected.route.nodes)
        assert torch.equal(found.hidden, expected.hidden)
    assert not torch.equal(dominant(hidden).route.nodes, expected.route.nodes)


def test_a_stop_belongs_to_its_vector_also_with_a_mask():
    layer, hidden = make(), vectors(4, 5)
    stop, mask = STOPS[:, None].expand(4, 5), torch.rand(4, 5, generator=generator()) > 0.4
    everything, kept = layer(hidden, stop=stop), layer(hidden, stop=stop, mask=mask)
    assert torch.equal(kept.route.nodes[mask], everything.route.nodes[mask])
    assert not bool(kept.route.num_active[~mask].any())
    counts = everything.route.num_active.double().mean(1)
    assert bool((counts[:-1] > counts[1:]).all())


def model_and_images(name="mre", **options):
    torch.manual_seed(0)
    sizes = {"dim": 8, "num_layers": 3, "num_experts": 4} | options
    model = rt.build(name, image_shape=(1, 4, 4), num_classes=3, **sizes).eval()
    return model, torch.randint(0, 256, (8, 1, 4, 4), dtype=torch.uint8, generator=generator())


@pytest.mark.parametrize("kernel", ["", "plain"])
@torch.no_grad()
def test_every_way_through_a_model_heeds_the_stop_of_each_row(kernel):
    model, images = model_and_images()
    stop = STOPS.repeat(2)
    with kernels.use(kernel):
        expected = [model(images[i : i + 1], stop=float(stop[i])) for i in range(8)]
        logits = torch.cat([out.logits for out in expected])
        counts = torch.cat([out.num_experts for out in expected])
        assert len(set(counts.tolist())) > 2
        *_, last = rt.anytime(model, images, stop=stop)
        *_, confident = rt.anytime(model, images, stop=stop, confidence=1.0)
        answers = {
            "forward": model(images, stop=stop),
            "fused": model(images, stop=stop, confidence=1.0),
            "experts": model(images, stop=stop, confidence=1.0, exit_every="expert"),
            "in time": model(images, stop=stop, max_ms=1e9),
        }
        budgets = model(images, stop=stop, budgets=(1, 12)).answers
    for out in (*answers.values(), budgets[1]):
        torch.testing.assert_close(out.logits, logits, rtol=1e-4, atol=1e-5)
        assert torch.equal(out.num_experts, counts)
    for step in (last, confident):
        torch.testing.assert_close(step.logits, logits, rtol=1e-4, atol=1e-5)
        assert torch.equal(step.num_active, counts)
    assert bool((budgets[0].num_experts == 1).all())


@torch.no_grad()
def test_rows_that_leave_early_take_their_own_stop_along():
    model, images = model_and_images(num_experts=8)
    stop = STOPS.repeat(2)
    together = model(images, stop=stop, confidence=[0.34, 0.36, 0.5])
    for row in range(8):
        alone = model(images[row : row + 1], stop=float(stop[row]), confidence=[0.34, 0.36, 0.5])
        assert torch.equal(alone.routes[0].active[0], together.routes[0].active[row])
        assert int(alone.num_exits) == int(together.num_exits[row])


@torch.no_grad()
def test_a_language_model_takes_a_stop_per_text_and_per_token():
    torch.manual_seed(0)
    model = rt.build("gpt-mre", dim=16, hidden=16, num_heads=2, context=8, depth=3, num_experts=4).eval()
    tokens = torch.randint(0, 256, (3, 6), generator=generator())
    per_text = torch.tensor([0.02, 0.3, 5.0])
    found = model(tokens, stop=per_text).num_experts
    assert torch.equal(found, model(tokens, stop=per_text[:, None].expand(3, 6)).num_experts)
    for row, value in enumerate(per_text.tolist()):
        assert torch.equal(found[row], model(tokens[row : row + 1], stop=value).num_experts[0])
    mask = torch.arange(6) < torch.tensor([6, 4, 5])[:, None]
    masked = model(tokens, stop=per_text, mask=mask).num_experts
    assert torch.equal(masked[mask], found[mask])
    with pytest.raises(ValueError, match=r"^stop has shape \(2, 6\): must be \(3, 6\)"):
        model(tokens, stop=torch.ones(2, 6))


@pytest.mark.parametrize("name", ["top-k", "threshold", "dense", "multi-exit"])
def test_models_without_a_dial_refuse_it_in_one_line(name):
    options = {"dim": 8} | ({"num_blocks": 2} if name == "dense" else {"num_layers": 2})
    model = rt.build(name, image_shape=(1, 4, 4), num_classes=3, **options).eval()
    with pytest.raises(ValueError, match=r"stop.*: .*(use a raytraced layer|leave it out)") as error:
        model(torch.zeros(2, 1, 4, 4), stop=0.5)
    assert "\n" not in str(error.value)


def test_stops_are_drawn_log_uniformly_from_the_range_in_training_alone():
    layer = make(stop_range=(0.05, 2.0))
    seen = []
    own = layer.router.resolve_stop
    layer.router.resolve_stop = lambda call, hidden: seen.append(own(call, hidden)) or seen[-1]
    hidden = vectors(4000)
    layer(hidden)
    assert seen == ["drawn"]
    layer.train()
    routes = [layer(hidden, generator=generator(seed)).route.nodes for seed in (1, 1, 2)]
    assert torch.equal(routes[0], routes[1])
    assert not torch.equal(routes[0], routes[2])
    stops = seen[1]
    assert 0.05 < float(stops.min()) < 0.055 < 1.9 < float(stops.max()) < 2.0
    middle = (0.05 * 2.0) ** 0.5
    assert abs(float((stops < middle).double().mean()) - 0.5) < 0.03  # four standard deviations
    layer(hidden, stop=0.7)
    assert seen[-1] == 0.7


def test_a_drawn_stop_depends_on_the_seed_and_the_row_alone():
    layer = make(stop_range=(0.05, 2.0)).train()
    hidden, rows = vectors(20), torch.arange(100, 120)
    together = layer(hidden, generator=generator(), rows=rows).route.nodes
    some = torch.tensor([7, 2, 19])
    assert torch.equal(layer(hidden[some], generator=generator(), rows=rows[some]).route.nodes, together[some])
    with kernels.use("plain"):
        assert torch.equal(layer(hidden, generator=generator(), rows=rows).route.nodes, together)
    seed = torch.randint(2**63 - 1, (), generator=generator())
    expected = layer(hidden, stop=0.05 * 40 ** uniform(seed, rows, 0)).route.nodes
    assert torch.equal(together, expected)


BAD_RANGES = [
    (0.0, 1.0),
    (0.2, 0.1),
    (0.1, float("inf")),
    (0.1, float("nan")),
    (0.1,),
    0.1,
    "0.1",
    (True, 2.0),
    ("a", "b"),
]


@pytest.mark.parametrize("stop_range", BAD_RANGES)
def test_a_bad_range_is_refused_in_one_line(stop_range):
    with pytest.raises(
        ValueError, match=r"^stop_range=.*: must be two numbers above 0, the smaller one first"
    ) as error:
        RaytracedConfig(stop_range=stop_range)
    assert "\n" not in str(error.value)


@torch.no_grad()
@pytest.mark.parametrize("budget", [True, 1.0])
def test_a_plan_is_not_looked_up_by_what_is_no_number_of_experts(budget):
    model, tokens = rt.build("gpt-mre", dim=16, hidden=8, num_heads=2, context=16).eval(), torch.tensor([[1, 2]])
    model(tokens, max_experts=1)  # fills the table of paths, whose key is equal
    with pytest.raises(ValueError, match=f"^max_experts={budget}: must be a whole number, at least 0"):
        model(tokens, max_experts=budget)


def test_a_range_beyond_float32_is_refused():
    with pytest.raises(ValueError, match=r"^stop_range=\(1.0, 1e\+39\): must be at most 3.4e\+38, float32's largest$"):
        RaytracedConfig(stop_range=(1.0, 1e39))


@pytest.mark.parametrize(
    ("option", "value"),
    [("weight_scale", 0.0), ("weight_scale", float("nan")), ("entry_scale", -1.0), ("input_init_std", -0.1),
     ("entry_scale", "4"), ("input_init_std", float("inf"))],
)  # fmt: skip
def test_bad_scales_are_refused_in_one_line(option, value):
    with pytest.raises(ValueError, match=rf"^{option}={value!r}: must be a number"):
        RaytracedConfig(**{option: value})


def test_a_sharp_start_scales_entry_logits_and_draws_the_input_map():
    def fresh(**options):
        torch.manual_seed(5)
        return RaytracedExperts(16, 4, 16, input_rank=8, **options).router

    usual, sharp = fresh(), fresh(entry_scale=4.0, input_init_std=1.5)
    for name in ("weight", "bias"):
        assert torch.equal(sharp.gate[name], 4 * usual.gate[name])
    assert not bool(usual.sight_out.any())
    assert abs(float(sharp.sight_out.detach().std()) - 1.5) < 0.05
    assert torch.equal(sharp.sight_in, usual.sight_in)


def test_a_sharp_start_runs_about_one_expert_in_every_layer():
    torch.manual_seed(0)
    hidden = torch.randn(500, 64)
    sharp = RaytracedExperts(64, 4, 16, entry_scale=4.0, input_init_std=1.0, input_rank=16, stop=1.0).eval()
    usual = RaytracedExperts(64, 4, 16, output_logit_offset=0.0, input_rank=16, stop=1.0).eval()
    per_layer = [layer(hidden).route.active.sum(-1).mean(0) for layer in (sharp, usual)]
    assert bool(((per_layer[0] > 0.8) & (per_layer[0] < 3)).all())
    assert float(per_layer[1][-1]) < 0.5


GRIDS = [grid for grid in product(range(1, 6), range(1, 9)) if grid != (1, 1)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.filterwarnings("error")
def test_every_grid_but_a_single_expert_trains_the_gates_that_can_matter(grid):
    """A gate can matter where its node was active for a vector, and the weights below it depend on it.

    A relative weight depends on the gates above it; weights that sum to one do where a layer has two of them.
    """
    torch.manual_seed(0)
    layer = RaytracedExperts(6, *grid).double()
    needed = 1 if layer.router.config.weighting == "relative" else 2
    before = {name: parameter.detach().clone() for name, parameter in layer.router.named_parameters()}
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    target, matters = torch.randn(6, 6, dtype=torch.float64), torch.zeros(*grid, dtype=torch.bool)
    for step in range(5):
        hidden = torch.randn(128, 6, dtype=torch.float64, generator=generator(step))
        out = layer(hidden)
        deepest_B = ((out.route.active.sum(-1) >= needed) * torch.arange(1, grid[0] + 1)).amax(-1)  # from 1; 0: none
        above_BL = torch.arange(1, grid[0] + 1) < deepest_B[:, None]
        matters |= (out.route.active.bool() & above_BL[..., None]).any(0)
        optimizer.zero_grad()
        (out.hidden - hidden @ target).square().mean().backward()
        optimizer.step()
    moved = {name: (parameter != before[name]) for name, parameter in layer.router.named_parameters()}
    if grid[1] > 1:  # one entry rate is 1 whatever its logit is
        assert bool(moved["gate.weight"].any(-1).all())
    if grid[0] > 1:
        assert bool(matters[0].any())
        assert bool(moved["routing.gate_first"].any(-1)[matters[0]].all())
        assert bool(moved["sight_out"][0].any(-1).any(-1)[matters[0]].all())
    if grid[0] > 2:
        assert bool(matters[1:-1].any()) or grid[0] == 3  # its last layer has one expert at most
        assert bool(moved["routing.gate_inner"].flatten(2).any(-1)[matters[1:-1]].all())


def test_the_weighting_auto_stands_for_one_that_learns():
    for grid, expected in (
        ((1, 8), "relative"),
        ((2, 8), "relative"),
        ((4, 1), "relative"),
        ((5, 2), "relative"),
        ((3, 3), "rates-to-one"),
    ):
        assert RaytracedExperts(6, *grid).router.config.weighting == expected
    assert RaytracedExperts(6, 1, 8, weighting="rates", stop=0.3).router.config.weighting == "rates"


def test_a_saved_model_keeps_the_new_options_and_an_old_card_loads_without_them(tmp_path):
    new = {"stop_range": (0.1, 1.0), "weight_scale": 2.0, "entry_scale": 4.0, "input_init_std": 1.0}
    model, images = model_and_images(**new)
    save(model, tmp_path / "new.safetensors")
    loaded = load(tmp_path / "new.safetensors").eval()
    assert loaded.layer.router.config == model.layer.router.config
    with torch.no_grad():
        assert torch.equal(loaded(images).logits, model(images).logits)
    old, _ = model_and_images(weighting="rates-to-one")
    for name in new:
        del old.card.options[name]
    save(old, tmp_path / "old.safetensors")
    assert load(tmp_path / "old.safetensors").layer.router.config == old.layer.router.config

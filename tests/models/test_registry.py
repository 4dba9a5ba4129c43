"""Every model by name: sizes, the interface they share, and that each of them learns."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

import raytraced as rt
from raytraced import Output, Route, build
from raytraced.models.registry import MODELS, complete_options, find_model
from raytraced.training.optim import routed_parameters

# Design 2: input block 784→16 = 12,560, an expert 3·272 = 816, an output layer 170, a gate 16→8 = 136.
BASE = 12_560 + 32 * 816 + 170
PARAMETERS = {
    "mre": 41_130,
    "mre-paper": 40_202,
    "top-k": 39_386,
    "planned": 39_386,
    "matryoshka": 39_386,
    "seq-top-k": 39_386,  # the cut is not learnt
    "mixture-of-depths": BASE + 4 * 17,  # a gate 16→1
    "hash": BASE,  # the random map is not learnt
    "threshold": 39_386,
    "relu": 39_386,  # the penalty is not learnt
    "mlp-total": 39_286,
    "mlp-avg": 23_890,
    "ada-k": BASE + 4 * (136 + 136 + 17),  # gate, allocator 16→8, critic 16→1
    "dense": 12_560 + 4 * 816 + 170,
    "aux-free": 39_386,  # the bias is not learnt
    "top-any": BASE + 4 * (8 * 16 + 8),  # directions and thresholds
    "null-experts": BASE + 4 * (16 * 16 + 16),  # gates over 8 experts and 8 null ones
    "chain": BASE + 4 * 2 * 136,  # two rounds per layer
    "multi-exit": 785 * 36 + 8 * 37 * 36 + 9 * 370,
}


def small(name, **options):
    """A model for 4 × 4 images and 3 classes."""
    grid = {"dim": 6, "num_layers": 2, "num_experts": 3}
    if name == "dense":
        grid = {"dim": 6, "num_blocks": 2}
    elif name.startswith(("mlp", "multi")):
        grid = {"dim": 6, "num_layers": 2}
    return build(name, image_shape=(1, 4, 4), num_classes=3, **grid | options)


def total_loss(model, images, labels, seed=0):
    out = model(
        images,
        sample_loss_fn=lambda logits: cross_entropy(logits, labels, reduction="none"),
        generator=torch.Generator().manual_seed(seed),
        rows=torch.arange(len(images)),
    )
    return cross_entropy(out.logits, labels) + (0 if out.loss is None else out.loss)


def test_the_table_of_parameters_has_every_model():
    assert PARAMETERS.keys() == MODELS.keys()


@pytest.mark.parametrize("name", MODELS)
def test_parameter_counts_are_those_of_the_design(name):
    model = build(name, image_shape=(1, 28, 28), num_classes=10)
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


def test_the_papers_model_for_colour_images_has_33330_parameters_and_ours_sees_with_928_more():
    for name, seeing in (("mre-paper", 0), ("mre", 4 * 16 + 3 * 8 * 9 * 4)):
        parameters = build(name, image_shape=(3, 32, 32), num_classes=10).parameters()
        assert sum(parameter.numel() for parameter in parameters) == 33_330 + seeing


@pytest.mark.parametrize("num_blocks", [1, 2, 4, 8])
def test_dense_controls_have_one_expert_block_a_layer(num_blocks):
    model = build("dense", image_shape=(1, 28, 28), num_classes=10, num_blocks=num_blocks)
    assert sum(parameter.numel() for parameter in model.parameters()) == 12_560 + num_blocks * 816 + 170
    assert model(torch.zeros(2, 1, 28, 28)).routes[0].active.tolist() == [[[1.0]] * num_blocks] * 2


@pytest.mark.parametrize("name", MODELS)
def test_every_model_answers_with_the_same_output(name):
    model = small(name)
    images = torch.randn(5, 1, 4, 4)
    out = model(images, generator=torch.Generator().manual_seed(0), rows=torch.arange(5))
    assert isinstance(out, Output)
    assert out.logits.shape == (5, 3)
    assert len(out.routes) == len(model.routed_layers()) == 1
    (route,) = out.routes
    assert isinstance(route, Route)
    assert route.active.shape[0] == 5
    assert route.active.ndim == 3
    assert set(route.active.unique().tolist()) <= {0.0, 1.0}
    assert torch.equal(route.num_active, route.active.sum((1, 2)).long())
    assert torch.equal(out.num_experts, route.num_active)
    assert (route.nodes is None) == (route.rates is None) == (not name.startswith("mre"))
    assert out.loss is None or out.loss.shape == ()
    assert model.card.model == model.name == name


@pytest.mark.parametrize("name", MODELS)
def test_evaluation_is_deterministic_and_each_answer_its_own(name):
    model = small(name).double().eval()
    images = torch.randn(20, 1, 4, 4, dtype=torch.float64)
    with torch.no_grad():
        first = model(images, generator=torch.Generator().manual_seed(1))
        second = model(images, generator=torch.Generator().manual_seed(2))
        turned = model(images.flip(0))
        alone = torch.cat([model(image[None]).logits for image in images])
    assert torch.equal(first.logits, second.logits)
    assert torch.equal(first.routes[0].active, second.routes[0].active)
    assert torch.equal(first.routes[0].active, turned.routes[0].active.flip(0))
    torch.testing.assert_close(turned.logits.flip(0), first.logits)
    torch.testing.assert_close(alone, first.logits)


@pytest.mark.parametrize("name", MODELS)
def test_masks_count_exactly_in_half_precision(name):
    model = small(name).half()
    for mode in (True, False):
        with torch.no_grad():
            active = model.train(mode)(torch.randn(2, 1, 4, 4, dtype=torch.float16)).routes[0].active
        assert active.dtype == torch.float32  # float16 counts to 2,048, bfloat16 to 256


@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_is_a_function_of_the_seed(name):
    images, labels = torch.randn(20, 1, 4, 4), torch.arange(20) % 3
    gradients = []
    for _ in range(2):
        torch.manual_seed(5)
        model = small(name)
        total_loss(model, images, labels).backward()
        gradients.append({key: value.grad for key, value in model.named_parameters() if value.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[0][key], gradients[1][key]) for key in gradients[0])


@pytest.mark.parametrize("name", MODELS)
def test_every_model_overfits_64_samples(name):
    torch.manual_seed(1)
    sizes = {"num_blocks": 2} if name == "dense" else {"num_layers": 2}
    sizes |= {"num_experts": 4} if "num_experts" in known_options(name) else {}
    options = {"confidence": 1.0} if name == "multi-exit" else {}
    model = build(name, image_shape=(1, 4, 4), num_classes=4, dim=24, **sizes, **options)
    images, labels = torch.randn(64, 1, 4, 4), torch.randint(0, 4, (64,))  # nothing to learn but by heart
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    accuracy = 0.0
    for step in range(600):
        optimizer.zero_grad()
        total_loss(model, images, labels, seed=step).backward()
        optimizer.step()
        if step % 20 == 19:
            model.eval()
            with torch.no_grad():
                accuracy = float((model(images).logits.argmax(-1) == labels).float().mean())
            model.train()
            if accuracy >= 0.98:
                break
    assert accuracy >= 0.98


def known_options(name):
    """The options that a model accepts, from what it says of an unknown one."""
    with pytest.raises(ValueError) as error:
        build(name, image_shape=(1, 4, 4), num_classes=3, zzzzzzzz=1)
    return str(error.value).partition("must be one of ")[2].split(", ")


@pytest.mark.parametrize("name", MODELS)
def test_parameters_fall_into_groups(name):
    groups = {"routing": 0, "experts": 0, "rest": 0}
    model = build(name, image_shape=(1, 28, 28), num_classes=10)
    home = routed_parameters(model)
    for parameter in model.parameters():
        groups[home.get(parameter, "rest")] += parameter.numel()
    if name.startswith("mlp"):
        width = 36 if name == "mlp-total" else 24
        assert groups == {"routing": 0, "experts": 8 * (width + 1) * width, "rest": 785 * width + (width + 1) * 10}
    elif name == "multi-exit":
        assert groups == {"routing": 0, "experts": 8 * 37 * 36, "rest": 785 * 36 + 9 * 370}
    else:
        num_experts = 4 if name == "dense" else 32
        assert groups["experts"] == num_experts * 816
        assert groups["rest"] == 12_730
        assert groups["routing"] == PARAMETERS[name] - groups["experts"] - 12_730


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("topk", {}, "model=topk: no such model; did you mean top-k?"),
        ("zzz", {}, f"model=zzz: no such model; must be one of {', '.join(MODELS)}"),
        ("top-k", {"num_expert": 4}, "model option num_expert: top-k has no such option; did you mean num_experts?"),
        ("mlp-avg", {"k": 4}, "model option k: mlp-avg has no such option; must be one of dim, num_layers, stream"),
        ("mre", {"estimater": "gumbel"}, "model option estimater: mre has no such option; did you mean estimator?"),
        ("top-k", {"k": "two"}, "k='two': must be a whole number"),
        ("top-k", {"k": 2.5}, "k=2.5: must be a whole number"),
        ("top-k", {"num_rounds": 2}, "model option num_rounds: top-k has no such option; did you mean num_layers?"),
        ("top-k", {"expert": "mlp"}, "expert='mlp': must be a function or null"),
        ("null-experts", {"num_null": "few"}, "num_null='few': must be a whole number or null"),
        ("threshold", {"threshold": True}, "threshold=True: must be a number"),
        ("threshold", {"threshold": 1.5}, "threshold=1.5: must lie in 0 … 1, it is a sum of probabilities"),
        ("mre", {"scale_init": 3}, "scale_init=3: must be true or false"),
        ("chain", {"stream": "river"}, "stream='river': must be one of residual, skip-sum, last"),
        ("dense", {"num_blocks": 0}, "num_blocks=0: must be at least 1"),
        ("mlp-total", {"num_layers": 0}, "num_layers=0: must be at least 1"),
        ("multi-exit", {"confidence": 2}, "confidence=2: must lie in 0 … 1, it is a probability"),
        (
            "multi-exit",
            {"k": 2},
            "model option k: multi-exit has no such option; must be one of dim, num_layers, confidence, stream",
        ),
    ],
)
def test_a_mistake_is_one_line_with_its_remedy(name, options, message):
    with pytest.raises(ValueError) as error:
        build(name, image_shape=(1, 28, 28), num_classes=10, **options)
    assert str(error.value) == message


@pytest.mark.parametrize("shape", [(28, 28), (1, 0, 28)])
def test_an_image_shape_must_be_three_positive_numbers(shape):
    with pytest.raises(ValueError, match="must be three positive numbers"):
        build("mre", image_shape=shape, num_classes=10)


def test_options_of_a_model_include_those_of_the_grid():
    grid = ("dim", "num_layers", "num_experts", "expert", "hidden", "num_hidden", "stream")
    assert known_options("top-k") == [*grid, "k", "balance", "total"]
    more = ("stop", "stop_range", "scale_init", "weight_scale", "entry_scale", "input_init_std")
    assert set(known_options("mre")) == {*grid, *rt.PAPER, *more}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_complete_options_is_the_same_whatever_the_defaults_become(name, monkeypatch):
    def answer(**options):
        torch.manual_seed(0)
        model = build(name, image_shape=(1, 4, 4), num_classes=3, **options).eval()
        return model(torch.randn(20, 1, 4, 4)).logits, model.layer.stream

    grid = {"num_blocks": 2} if name == "dense" else {"num_layers": 2}
    options = complete_options(name, grid)
    expected, stream = answer(**grid)
    assert stream == options["stream"]
    other = "last" if stream == "residual" else "residual"
    changed = replace(MODELS[name], recipe={}, defaults=MODELS[name].defaults | {"stream": other})
    monkeypatch.setitem(MODELS, name, changed)
    assert answer(**grid)[1] == other
    found, stream = answer(**options)
    assert stream == options["stream"]
    assert torch.equal(found, expected)


def test_names_can_be_checked_without_torch():
    code = (
        "import sys; from raytraced.models.registry import find_model as f; f('mre'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
    assert find_model("mre") == ("", MODELS["mre"])

"""The model in the page is the model in PyTorch: the same nodes in the same order, the same logits, the same account."""

import json
import subprocess
from pathlib import Path

import pytest
import torch

import raytraced as rt
from explore.engine import ENGINE, LOGITS, NODE, compare_images, run_engine
from raytraced.cost import sample_cost
from raytraced.draws import philox
from raytraced.explore.packing import deflated
from raytraced.saving import PRETRAINED
from raytraced.tasks.images.loading import load as load_data

if NODE is None:
    pytest.skip("node is not installed, which runs the page's model: apt-get install nodejs", allow_module_level=True)
SHIPPED = sorted(path.stem for path in PRETRAINED.glob("mre-*.safetensors"))
WAYS = [
    {},
    {"sample": True, "seed": 7},
    {"maxExperts": 3},
    {"sure": 0.6},
    {"sample": True, "seed": 2**32 - 1, "maxExperts": 4, "sure": 0.7},
]
LAYERS = [
    {},
    {"stream": "skip-sum", "weighting": "rates", "sight_rank": 2},
    {"stream": "last", "weighting": "unit", "estimator": "gumbel", "reach": 0.0},
    {"stop": "dominant", "weighting": "rates", "num_hidden": 1, "hidden": 5},
    {"stop": 0.2, "num_layers": 1, "weighting": "rates"},
    {"num_layers": 1, "stream": "skip-sum"},
    {"num_layers": 2, "num_experts": 5, "sight_rank": 3},
]


@pytest.mark.parametrize("shape", [(1, 6, 5), (3, 9, 12)], ids=["grey", "colour"])
@pytest.mark.parametrize("options", LAYERS, ids=str)
def test_every_kind_of_layer_runs_as_in_pytorch(options, shape, tmp_path):
    model = random_model(shape, options)
    images = torch.randint(0, 256, (40, *shape), dtype=torch.uint8)
    for option, found in zip(WAYS, run_engine(model, images, WAYS, tmp_path), strict=True):
        compare_images(model, images, option, found)


def random_model(shape, options):
    model = rt.build(
        "mre", image_shape=shape, num_classes=4, mean=[0.4] * shape[0], std=[0.3] * shape[0],
        **{"dim": 8, "num_layers": 3, "num_experts": 4, "reach": 3.0} | options,
    ).eval()  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sight_out" in name:  # zero at first, where sight would change nothing
                parameter.normal_()
            elif "router.gate." not in name and "gate_" not in name:
                parameter.mul_(1.5)
    return model


def test_answers_along_the_way_are_those_of_anytime(tmp_path):
    model = rt.load("mre-digits")
    images = load_data("digits").test.images[:20]
    (found,) = run_engine(model, images, [{"answers": True}], tmp_path)
    for image, each in zip(images, found, strict=True):
        logits = torch.cat([step.logits for step in rt.anytime(model, image[None])])
        answers = torch.tensor(each["answers"])
        # a last step in which nothing changes tells anytime that the sequence has ended
        torch.testing.assert_close(answers, logits[: len(answers)], atol=LOGITS, rtol=0)


def test_rates_are_those_of_the_routing_network(tmp_path):
    model = rt.load("mre-digits")
    images = load_data("digits").test.images[:50]
    (found,) = run_engine(model, images, [{"rates": True}], tmp_path)
    rates = model(images).routes[0].rates
    expected = torch.cat((rates.nodes.flatten(1), rates.output[:, None]), 1)
    torch.testing.assert_close(torch.tensor([each["rates"] for each in found]), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "mre-digits" else pytest.mark.data) for n in SHIPPED]
)
def test_a_shipped_model_runs_as_in_pytorch_on_1000_images(name, tmp_path):
    model = rt.load(name)
    data = load_data(model.card.data)
    images = torch.cat((data.test.images, data.validation.images, data.train.images))[
        :1000
    ]  # digits: 360 are for tests
    ways = (
        [{}, {"sample": True, "seed": 3}] if name == "mre-digits" else [{}, {"sample": True, "seed": 3}, {"sure": 0.9}]
    )
    for option, found in zip(ways, run_engine(model, images, ways, tmp_path), strict=True):
        compare_images(model, images, option, found)


def test_the_account_of_dense_blocks_is_that_of_the_model_dense(tmp_path):
    model = rt.load("mre-digits")
    images = load_data("digits").test.images[:1]
    dense = rt.build("dense", image_shape=(1, 8, 8), num_classes=10, dim=16, num_blocks=4)
    ((found,),) = run_engine(model, images, [{}], tmp_path)
    assert found["accounts"]["dense"] == int(sample_cost(dense, images, dense(images)).multiply_adds)


@pytest.mark.parametrize(
    "options", [{}, {"stream": "last", "weighting": "unit", "estimator": "reinmax", "sight_rank": 2}], ids=str
)
def test_a_language_model_runs_as_in_pytorch(options, tmp_path):
    small = {"dim": 16, "hidden": 12, "num_layers": 2, "num_experts": 4, "reach": 2.0}
    model = rt.build("gpt-mre", depth=2, num_heads=2, context=24, **small | options).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sight_out" in name:
                parameter.normal_()
    tokens = torch.randint(0, 256, (3, 24))
    tokens[1, :10], tokens[2, :20] = (
        tokens[0, :10],
        tokens[1, :20],
    )  # texts that begin alike: what is kept must be right
    ways = [{}, {"sample": True, "seed": 5}, {"maxExperts": 1}]
    for option, found in zip(ways, run_engine(model, tokens, ways, tmp_path), strict=True):
        for text_T, each in zip(tokens, found, strict=True):
            compare_text(model, text_T, option, each)


def compare_text(model, text_T, option, found):
    generator = torch.Generator().manual_seed(option["seed"]) if option.get("sample") else None
    select = "sample" if option.get("sample") else None
    with torch.no_grad():
        out = model(text_T[None], select=select, max_experts=option.get("maxExperts"), generator=generator)
        cost = sample_cost(model, text_T[None], out)
    for block, route in enumerate(out.routes):
        expected = [[node for node in row if node >= 0] for row in route.nodes[0].tolist()]
        assert [each["nodes"][block] for each in found] == expected
    torch.testing.assert_close(torch.tensor([each["logits"] for each in found]), out.logits[0], atol=LOGITS, rtol=0)
    assert [each["accounts"]["own"] for each in found] == cost.multiply_adds[0].tolist()


def test_bytes_of_every_length_are_unpacked():
    contents = [bytes(range(255, 255 - num, -1)) for num in range(30)]
    script = f"""
        const {{ inflate }} = require({str(ENGINE)!r}), texts = {json.dumps([deflated(each) for each in contents])};
        Promise.all(texts.map(inflate)).then((all) => console.log(JSON.stringify(all.map((bytes) => [...bytes]))));
    """
    told = subprocess.run([NODE, "-e", script], capture_output=True, text=True, check=True).stdout
    assert json.loads(told) == [list(each) for each in contents]
    assert {len(deflated(each)) % 5 for each in contents} == {0, 2, 3, 4}


def test_seeds_and_words_are_those_of_draws():
    script = f"""
        const {{ philox, torchSeeds }} = require({str(ENGINE)!r});
        const seeds = [0, 1, 2 ** 32 - 1].map((seed) => torchSeeds(seed, 5)).flat();
        console.log(seeds.join(" "), philox(seeds[4], [4294967295, 0, 3, 2]).join(" "));
    """
    told = subprocess.run([NODE, "-e", script], capture_output=True, text=True, check=True).stdout.split()
    seeds = [s for seed in (0, 1, 2**32 - 1) for s in torch_seeds(seed)]
    words = philox(torch.tensor(seeds[4]), tuple(torch.tensor(c) for c in (2**32 - 1, 0, 3, 2)))
    assert list(map(int, told)) == [*seeds, *words.tolist()]


def torch_seeds(seed):
    generator = torch.Generator().manual_seed(seed)
    return [int(torch.randint(2**63 - 1, (), generator=generator)) for _ in range(5)]


def test_the_engine_is_short_enough_to_read():
    assert len(Path(ENGINE).read_text().splitlines()) <= 520

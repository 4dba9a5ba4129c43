"""engine.js computes what PyTorch computes: the same nodes in the same order, the same logits, the same cost."""

import json
import subprocess

import pytest
import torch

import raytraced as rt
from explore.engine import ENGINE, LOGITS, NODE, compare_images, model_arguments, run_engine
from raytraced.cost import sample_cost
from raytraced.explore.packing import deflated
from raytraced.models.registry import SHIPPED_IMAGES
from raytraced.tasks.images.loading import load as load_data

if NODE is None:
    pytest.skip("node, which runs engine.js, is not installed: apt-get install nodejs", allow_module_level=True)
CALLS = [
    {},
    {"maxExperts": 3},
    {"confidence": 0.6},
    {"maxExperts": 4, "confidence": 0.7},
    {"stop": 0.05},
    {"stop": 4.0, "confidence": 0.6},
]
LAYERS = [
    {},
    {"stream": "skip-sum", "weighting": "rates", "input_rank": 2},
    {"stream": "last", "weighting": "unit", "estimator": "gumbel", "output_logit_offset": 0.0},
    {"stop": "dominant", "weighting": "rates", "num_hidden": 1, "hidden": 5},
    {"stop": 0.2, "num_layers": 1, "weighting": "rates"},
    {"num_layers": 1, "stream": "skip-sum"},
    {"weighting": "relative", "weight_scale": 2.5, "stop": 0.1},
    {"num_layers": 2, "num_experts": 5, "input_rank": 3},
]


SHAPES = {"grey": (1, 6, 5), "colour": (3, 9, 12)}


@pytest.mark.parametrize(
    ("options", "shape"),
    [  # quick: every kind of layer with one of the shapes, in turns
        pytest.param(options, shape, id=f"{options}-{name}", marks=pytest.mark.slow if (row + column) % 2 else ())
        for row, options in enumerate(LAYERS)
        for column, (name, shape) in enumerate(SHAPES.items())
    ],
)
def test_every_kind_of_layer_runs_as_in_pytorch(options, shape, tmp_path):
    model = random_model(shape, options)
    images = torch.randint(0, 256, (40, *shape), dtype=torch.uint8)
    for option, results in zip(CALLS, run_engine(model, images, CALLS, tmp_path), strict=True):
        compare_images(model, images, option, results)


def random_model(shape, options):
    model = rt.build(
        "mre", image_shape=shape, num_classes=4, mean=[0.4] * shape[0], std=[0.3] * shape[0],
        **{"dim": 8, "num_layers": 3, "num_experts": 4, "output_logit_offset": 3.0} | options,
    ).eval()  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sight_out" in name:  # zero at first: the gates would not depend on the input
                parameter.normal_()
            elif "router.gate." not in name and "gate_" not in name:
                parameter.mul_(1.5)
    return model


@pytest.mark.parametrize("stop", ["drawn", *(pytest.param(stop, marks=pytest.mark.slow) for stop in ("dominant", 0.2))])
def test_sampled_sequences_are_distributed_as_in_pytorch(stop, tmp_path):
    torch.manual_seed(0)
    model, num = random_model((1, 6, 5), {"stop": stop, "input_rank": 2}), 4000
    image = torch.randint(0, 256, (1, 1, 6, 5), dtype=torch.uint8)
    seeds = [{"sample": True, "seed": seed} for seed in range(num)]
    results = run_engine(model, image, seeds, tmp_path)
    generator = torch.Generator().manual_seed(0)
    route = model(image.expand(num, -1, -1, -1), select="sample", generator=generator).routes[0]
    lengths = torch.tensor([len(result["nodes"]) for (result,) in results])
    first = torch.tensor([result["nodes"][0] for (result,) in results])
    active = torch.zeros(num, model.layer.router.routing.num_nodes)
    for row, (result,) in enumerate(results):
        active[row, result["nodes"]] = 1
    expected_active = route.active.detach().flatten(1)
    # the difference of two frequencies of `num` draws has a standard deviation of at most sqrt(0.5 / num)
    bound = 5 * (0.5 / num) ** 0.5
    assert (active.mean(0) - expected_active.mean(0)).abs().max() < bound
    assert (share(first, active.shape[1]) - share(route.nodes[:, 0], active.shape[1])).abs().max() < bound
    assert (share(lengths, 20) - share(route.num_active, 20)).abs().max() < bound
    assert expected_active.mean(0).std() > 2 * bound  # another distribution would be noticed


def share(values, num):
    return values.bincount(minlength=num) / len(values)


def test_a_seed_gives_the_same_sequence_again_and_another_seed_another(tmp_path):
    model = random_model((1, 6, 5), {})
    images = torch.randint(0, 256, (20, 1, 6, 5), dtype=torch.uint8)
    options = [{"sample": True, "seed": seed} for seed in (2**32 - 1, 2**32 - 1, 0)]
    one, again, other = run_engine(model, images, options, tmp_path)
    assert one == again
    assert one != other


def test_random_numbers_are_uniform_and_independent():
    script = f"""
        const {{ uniform }} = require({str(ENGINE)!r}), rows = [];
        for (let seed = 0; seed < 400; seed++) for (let step = 0; step < 20; step++) rows.push(uniform(seed, step));
        console.log(JSON.stringify(rows));
    """
    printed = subprocess.run([NODE, "-e", script], capture_output=True, text=True, check=True, timeout=100).stdout
    numbers = torch.tensor(json.loads(printed), dtype=torch.float64).view(400, 20)
    assert numbers.min() > 0
    assert numbers.max() < 1
    counts = (numbers * 10).long().flatten().bincount(minlength=10)
    assert ((counts - 800) ** 2 / 800).sum() < 34  # chi-squared with 9 degrees of freedom: 1 in 10,000
    for one, other in ((numbers[1:], numbers[:-1]), (numbers[:, 1:], numbers[:, :-1])):  # next seed, next step
        assert abs(torch.corrcoef(torch.stack((one.flatten(), other.flatten())))[0, 1]) < 4 / 7600**0.5


def test_the_answer_after_each_expert_is_that_of_anytime(tmp_path):
    model = rt.load("mre-digits")
    images = load_data("digits").test.images[:20]
    (results,) = run_engine(model, images, [{"answers": True}], tmp_path)
    for image, each in zip(images, results, strict=True):
        logits = torch.cat([step.logits for step in rt.anytime(model, image[None])])
        answers = torch.tensor(each["answers"])
        # anytime may end with a step that changes nothing
        torch.testing.assert_close(answers, logits[: len(answers)], atol=LOGITS, rtol=0)


def test_rates_are_those_of_the_routing_network(tmp_path):
    model = rt.load("mre-digits")
    images = load_data("digits").test.images[:50]
    (results,) = run_engine(model, images, [{"rates": True}], tmp_path)
    rates = model(images).routes[0].rates
    expected = torch.cat((rates.nodes.flatten(1), rates.output[:, None]), 1)
    torch.testing.assert_close(torch.tensor([each["rates"] for each in results]), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "mre-digits" else pytest.mark.data) for name in SHIPPED_IMAGES]
)
def test_a_shipped_model_runs_as_in_pytorch_on_1000_images(name, tmp_path):
    model = rt.load(name)
    data = load_data(model.card.data)
    # digits has only 360 test images
    images = torch.cat((data.test.images, data.validation.images, data.train.images))[:1000]
    calls = [{}, {"confidence": 0.9}]
    for option, results in zip(calls, run_engine(model, images, calls, tmp_path), strict=True):
        compare_images(model, images, option, results)


def test_the_cost_of_dense_blocks_is_that_of_the_model_dense(tmp_path):
    model = rt.load("mre-digits")
    images = load_data("digits").test.images[:1]
    dense = rt.build("dense", image_shape=(1, 8, 8), num_classes=10, dim=16, num_blocks=4)
    ((result,),) = run_engine(model, images, [{}], tmp_path)
    assert result["costs"]["dense"] == int(sample_cost(dense, images, dense(images)).macs)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weighting": "unit", "estimator": "reinmax", "input_rank": 2, "routing_input": "embedding"},
        {"routing_input": "first-block"},
    ],
    ids=str,
)
def test_a_language_model_runs_as_in_pytorch(options, tmp_path):
    small = {"dim": 16, "hidden": 12, "num_experts": 4, "output_logit_offset": 2.0}
    model = rt.build("gpt-mre", depth=3, num_heads=2, context=24, **small | options).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sight_out" in name:
                parameter.normal_()
    tokens = torch.randint(0, 256, (3, 24))
    # texts with a common beginning: the cached results must be right
    tokens[1, :10] = tokens[0, :10]
    tokens[2, :20] = tokens[1, :20]
    calls = [{}, {"maxExperts": 1}, {"stop": 0.05}, {"stop": 0.3, "maxExperts": 5}]
    for option, results in zip(calls, run_engine(model, tokens, calls, tmp_path), strict=True):
        for text_T, each in zip(tokens, results, strict=True):
            compare_text(model, text_T, option, each)


def compare_text(model, text_T, option, results):
    with torch.no_grad():
        out = model(text_T[None], **model_arguments(option))
        cost = sample_cost(model, text_T[None], out)
    expected = [[node for node in row if node >= 0] for row in out.routes[0].nodes[0].tolist()]
    assert [each["nodes"] for each in results] == expected
    torch.testing.assert_close(torch.tensor([each["logits"] for each in results]), out.logits[0], atol=LOGITS, rtol=0)
    assert [each["costs"]["token"] for each in results] == cost.macs[0].tolist()


@pytest.mark.parametrize("routing_input", ["token", "embedding", "first-block"])
def test_the_table_of_paths_is_that_of_pytorch(routing_input, tmp_path):
    small = {"dim": 16, "hidden": 12, "num_experts": 4, "output_logit_offset": 2.0, "routing_input": routing_input}
    model = rt.build("gpt-mre", depth=3, num_heads=2, context=24, **small).eval()
    calls = [{}, {"maxExperts": 2}, {"stop": 0.05}, {"stop": 0.3, "maxExperts": 5}]
    tables = run_engine(
        model, torch.zeros(1, 1, dtype=torch.int64), [call | {"table": True} for call in calls], tmp_path
    )
    for call, (table,) in zip(calls, tables, strict=True):
        if routing_input == "first-block":
            assert table is None
        else:
            nodes = model.paths(**model_arguments(call)).nodes.tolist()
            assert table == [[node for node in row if node >= 0] for row in nodes]


def test_a_byte_keeps_its_sampled_sequence_when_text_is_appended(tmp_path):
    model = rt.build("gpt-mre", depth=2, num_heads=2, context=24, dim=16, hidden=12, num_experts=4).eval()
    short, long = torch.full((1, 12), 65), torch.full((1, 24), 65)
    option = [{"sample": True, "seed": 5}]
    ((shorter,),), ((longer,),) = (run_engine(model, tokens, option, tmp_path) for tokens in (short, long))
    assert shorter == longer[:12]
    assert len({str(each["nodes"]) for each in longer}) > 1  # equal bytes draw different sequences


def test_bytes_of_every_length_are_unpacked():
    contents = [bytes(range(255, 255 - num, -1)) for num in range(30)]
    script = f"""
        const {{ inflate }} = require({str(ENGINE)!r}), texts = {json.dumps([deflated(each) for each in contents])};
        Promise.all(texts.map(inflate)).then((all) => console.log(JSON.stringify(all.map((bytes) => [...bytes]))));
    """
    printed = subprocess.run([NODE, "-e", script], capture_output=True, text=True, check=True, timeout=100).stdout
    assert json.loads(printed) == [list(each) for each in contents]
    assert {len(deflated(each)) % 5 for each in contents} == {0, 2, 3, 4}


def test_the_engine_is_short_enough_to_read():
    assert len(ENGINE.read_text().splitlines()) <= 500

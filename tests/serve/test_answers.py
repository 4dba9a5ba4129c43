"""An answer is a function of its own input and options alone, bit for bit, and the one that the library gives."""

import pytest
import torch

import raytraced
from raytraced.cost import sample_cost
from raytraced.serve.answering import Asked, answer
from serve.conftest import SHIPPED, some_images

NUM = 24
OPTIONS = {
    "greedy": {},
    "budget": {"max_experts": 3},
    "sure": {"sure": 0.6},
    "along": {"every": True},
    "drawn": {"select": "sample", "seed": 5},
    "drawn along": {"select": "sample", "seed": 5, "every": True, "max_experts": 6},
}


def ask(served, images, rows, **options) -> dict:
    """The answers of some rows, answered in one run, by row."""
    asked = [Asked(served, images[row : row + 1], deliver=lambda *_: None, **options) for row in rows]
    number, found = {id(one): row for one, row in zip(asked, rows, strict=True)}, {row: [] for row in rows}
    with torch.inference_mode():
        for step in answer(asked):
            for one, told, _ in step:
                found[number[id(one)]].append(told)
    return found


@pytest.fixture(params=SHIPPED)
def served(request, models):
    return next(one for one in models if one.name == request.param)


@pytest.mark.parametrize("kind", OPTIONS)
def test_an_answer_does_not_depend_on_its_neighbours(served, kind):
    if not raytraced.operations.available():
        pytest.skip("without compiled operations rows are answered one by one")
    assert served.num_rows == 64
    images, options = some_images(served.image_shape, NUM), OPTIONS[kind]
    alone = {}
    for row in range(NUM):
        alone |= ask(served, images, [row], **options)
    assert len({told[-1]["probability"] for told in alone.values()}) > NUM // 2 or kind == "budget"
    for size in (2, 3, 7, NUM):
        for rows in torch.randperm(NUM).split(size)[:2]:
            for row, told in ask(served, images, rows.tolist(), **options).items():
                assert told == alone[row]


def test_rows_of_a_batch_stop_by_their_own_rules(served):
    images = some_images(served.image_shape, 4)
    rules = [{"max_experts": 2}, {"sure": 0.0}, {"every": True, "max_experts": 3}, {"sure": 1.0}]
    asked = [Asked(served, images[n : n + 1], deliver=lambda *_: None, **rule) for n, rule in enumerate(rules)]
    asked[0].deadline = 1e12
    with torch.inference_mode():
        last = {id(one): told for step in answer(asked) for one, told, done in step if done}
    assert [last[id(one)]["stop"] for one in asked] == ["budget", "sure", "budget", "end"]
    assert [last[id(one)]["experts"] for one in asked[:3]] == [2, 0, 3]


def test_answers_are_those_of_the_library(served):
    model, images = raytraced.load(served.name), some_images(served.image_shape, NUM)

    def probabilities(image, **options):
        with torch.no_grad():
            return model(image, **options)

    for kind in ("greedy", "budget", "drawn"):
        options = dict(OPTIONS[kind])
        for row in range(0, NUM, 5):
            (found,) = ask(served, images, [row], **options)[row]
            seed = {"generator": torch.Generator().manual_seed(5)} if kind == "drawn" else {}
            given = {name: value for name, value in options.items() if name != "seed"}
            out = probabilities(images[row : row + 1], **given, **seed)
            assert found["probabilities"] == out.logits.softmax(-1)[0].tolist()
            assert found["experts"] == int(out.num_experts)
            assert found["multiply_adds"] == int(sample_cost(model, images[row : row + 1], out).multiply_adds)
    for budget, found in enumerate(ask(served, images, [7], every=True)[7]):
        out = probabilities(images[7:8], max_experts=budget)
        assert found["probabilities"] == out.logits.softmax(-1)[0].tolist()
        nodes = [divmod(node, model.layer.router.num_experts) for node in out.routes[0].nodes[0].tolist() if node >= 0]
        assert found["nodes"] == [list(node) for node in nodes]
        assert len(nodes) == found["experts"] == min(budget, found["experts"])


def test_sure_is_that_of_the_library(served):
    model, images = raytraced.load(served.name), some_images(served.image_shape, NUM)
    for row, (found,) in ask(served, images, list(range(0, NUM, 4)), sure=0.7).items():
        with torch.no_grad():
            out = model(images[row : row + 1], sure=0.7, look="expert")
        assert found["experts"] == int(out.num_experts)
        assert found["stop"] == ("sure" if found["probability"] >= 0.7 else "end")
        assert found["probabilities"] == pytest.approx(out.logits.softmax(-1)[0].tolist(), abs=1e-5)


@pytest.mark.parametrize("name", ["top-k", "multi-exit"])
def test_models_without_an_order_of_experts_answer_after_each_layer(models, name):
    served = next(one for one in models if one.name == name)
    images = some_images((1, 8, 8), 5)
    assert served.num_rows == 1
    for row in range(5):
        (whole,) = ask(served, images, [row])[row]
        *_, last = ask(served, images, [row], look="layer", every=True)[row]
        assert last["probabilities"] == pytest.approx(whole["probabilities"], abs=1e-6)
        assert last["experts"] == whole["experts"]
        first, *_ = ask(served, images, [row], look="layer", sure=0.0)[row]
        assert (first["experts"], first["stop"]) == (0, "sure")


def test_a_look_after_a_layer_tells_only_the_nodes_of_the_layers_so_far(served):
    images, seen = some_images(served.image_shape, 8), 0
    for row in range(8):
        whole = ask(served, images, [row], every=True)[row][-1]["nodes"]
        for look, told in enumerate(ask(served, images, [row], look="layer", every=True)[row]):
            assert told["nodes"] == [node for node in whole if node[0] < look]
            seen += len(told["nodes"]) < len(whole)
    assert seen, "the test means sequences that go through several layers"


def test_a_text_is_answered_along_the_way_too(models, files):
    served = next(one for one in models if one.name == "gpt-mre")
    model, tokens = raytraced.load(files / "gpt-mre.safetensors"), torch.tensor([list(b"To be")])
    (whole,) = ask(served, tokens, [0])[0]
    steps = ask(served, tokens, [0], every=True)[0]
    with torch.no_grad():
        outputs = [model(tokens, max_experts=budget) for budget in range(len(steps))]
        exact = model(tokens)
    assert whole["probabilities"] == exact.logits[0, -1].softmax(-1).tolist() == steps[-1]["probabilities"]
    assert whole["multiply_adds"] == int(sample_cost(model, tokens, exact).multiply_adds.sum())
    for step, out in zip(steps, outputs, strict=True):
        assert step["probabilities"] == out.logits[0, -1].softmax(-1).tolist()
        assert step["token_experts"] == out.num_experts[0].tolist()
        assert step["experts"] == len(step["nodes"]) == int(out.num_experts[0, -1])
    costs = [int(sample_cost(model, tokens, out).multiply_adds.sum()) for out in outputs]
    assert [step["multiply_adds"] for step in steps] == torch.tensor(costs).cumsum(0).tolist()
    assert steps[-1]["stop"] == "end"
    drawn_steps = [ask(served, tokens, [0], every=True, select="sample", seed=seed)[0] for seed in range(12)]
    assert {steps[-1]["stop"] for steps in drawn_steps} == {"end"}
    assert any(len(steps) == 7 for steps in drawn_steps)  # all six nodes of a block: nothing is left to look at
    (drawn,) = ask(served, tokens, [0], select="sample", seed=3)[0]
    with torch.no_grad():
        out = model(tokens, select="sample", generator=torch.Generator().manual_seed(3))
    assert drawn["probabilities"] == out.logits[0, -1].softmax(-1).tolist()


def test_a_deadline_that_has_passed_still_gives_the_first_answer(served):
    images = some_images(served.image_shape, 3)
    asked = [Asked(served, images[n : n + 1], deliver=lambda *_: None, deadline=0.0) for n in range(3)]
    with torch.inference_mode():
        (step,) = answer(asked)
    assert [(told["stop"], told["experts"], done) for _, told, done in step] == [("deadline", 0, True)] * 3

"""An answer is a function of its own input and options alone, bit for bit, and the one that the library gives."""

from functools import partial

import pytest
import torch
from torch import nn

import raytraced
from raytraced.cost import sample_cost
from raytraced.models.classifier import Classifier, InputBlock
from raytraced.serve.answering import Query, answer_queries
from raytraced.serve.models import serve_model
from serve.conftest import SHIPPED, some_images

NUM = 24
OPTIONS = {
    "greedy": {},
    "budget": {"max_experts": 3},
    "confidence": {"confidence": 0.6},
    "exits": {"all_exits": True},
    "drawn": {"select": "sample", "seed": 5},
    "drawn exits": {"select": "sample", "seed": 5, "all_exits": True, "max_experts": 6},
}


def ask(served, images, rows, **options) -> dict:
    """The answers to some rows, computed in one batch, by row."""
    queries = [Query(served, images[row : row + 1], deliver=lambda *_: None, **options) for row in rows]
    number, found = {id(one): row for one, row in zip(queries, rows, strict=True)}, {row: [] for row in rows}
    with torch.inference_mode():
        for step in answer_queries(queries):
            for query, fields, _ in step:
                found[number[id(query)]].append(fields)
    return found


@pytest.fixture(params=SHIPPED)
def served(request, models):
    return next(one for one in models if one.name == request.param)


@pytest.mark.parametrize("kind", OPTIONS)
def test_an_answer_does_not_depend_on_its_neighbours(served, kind):
    if not raytraced.kernels.available():
        pytest.skip("without compiled kernels rows are answered one by one")
    assert served.num_rows == 64
    images, options = some_images(served.image_shape, NUM), OPTIONS[kind]
    alone = {}
    for row in range(NUM):
        alone |= ask(served, images, [row], **options)
    assert len({answers[-1]["probability"] for answers in alone.values()}) > NUM // 2 or kind == "budget"
    for size in (2, 3, 7, NUM):
        for rows in torch.randperm(NUM).split(size)[:2]:
            for row, answers in ask(served, images, rows.tolist(), **options).items():
                assert answers == alone[row]


def test_only_rows_that_asked_for_all_exits_state_their_path(served):
    """Issue: an answer gained `nodes` and `rates` when another client's stream was in its batch."""
    images = some_images(served.image_shape, 2)
    (alone,) = ask(served, images, [0], confidence=0.6)[0]
    rules = [{"confidence": 0.6}, {"all_exits": True}]
    queries = [Query(served, images[n : n + 1], deliver=lambda *_: None, **rule) for n, rule in enumerate(rules)]
    with torch.inference_mode():
        last = {id(one): fields for step in answer_queries(queries) for one, fields, done in step if done}
    assert last[id(queries[0])] == alone
    assert "nodes" in last[id(queries[1])]


def test_rows_of_a_batch_stop_by_their_own_rules(served):
    images = some_images(served.image_shape, 4)
    rules = [{"max_experts": 2}, {"confidence": 0.0}, {"all_exits": True, "max_experts": 3}, {"confidence": 1.0}]
    queries = [Query(served, images[n : n + 1], deliver=lambda *_: None, **rule) for n, rule in enumerate(rules)]
    queries[0].deadline = 1e12
    with torch.inference_mode():
        last = {id(one): fields for step in answer_queries(queries) for one, fields, done in step if done}
    assert [last[id(one)]["stop"] for one in queries] == ["budget", "confidence", "budget", "end"]
    assert [last[id(one)]["experts"] for one in queries[:3]] == [2, 0, 3]


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
            assert found["macs"] == int(sample_cost(model, images[row : row + 1], out).macs)
    for budget, found in enumerate(ask(served, images, [7], all_exits=True)[7]):
        out = probabilities(images[7:8], max_experts=budget)
        assert found["probabilities"] == out.logits.softmax(-1)[0].tolist()
        nodes = [divmod(node, model.layer.router.num_experts) for node in out.routes[0].nodes[0].tolist() if node >= 0]
        assert found["nodes"] == [list(node) for node in nodes]
        assert len(nodes) == found["experts"] == min(budget, found["experts"])


def test_confidence_stops_where_the_library_stops(served):
    model, images = raytraced.load(served.name), some_images(served.image_shape, NUM)
    for row, (found,) in ask(served, images, list(range(0, NUM, 4)), confidence=0.7).items():
        with torch.no_grad():
            out = model(images[row : row + 1], confidence=0.7, exit_every="expert")
        assert found["experts"] == int(out.num_experts)
        assert found["stop"] == ("confidence" if found["probability"] >= 0.7 else "end")
        assert found["probabilities"] == pytest.approx(out.logits.softmax(-1)[0].tolist(), abs=1e-5)


class DoubledLinear(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class DoubledBlock(InputBlock):
    def forward(self, images):
        return 2 * super().forward(images)


class OtherClassifier(Classifier):
    def answer_of(self, out, sample_loss_fn=None):
        answer = super().answer_of(out, sample_loss_fn)
        return answer._replace(logits=2 * answer.logits)


def doubled(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return 2 * nn.functional.linear(x, linear.weight, linear.bias)


def replace_class(part: nn.Module, cls: type) -> None:
    part.__class__ = cls


CHANGES = {
    "class of the head": lambda model: replace_class(model.head, DoubledLinear),
    "class of the input block's layer": lambda model: replace_class(model.input_block.linear, DoubledLinear),
    "class of the input block": lambda model: replace_class(model.input_block, DoubledBlock),
    "class of the model": lambda model: replace_class(model, OtherClassifier),
    "method of the head": lambda model: setattr(model.head, "forward", partial(doubled, model.head)),
    "parametrisation": lambda model: torch.nn.utils.parametrizations.weight_norm(model.head),
    "hook": lambda model: model.head.register_forward_hook(lambda *args: 2 * args[-1]),
    "hook before": lambda model: model.head.register_forward_pre_hook(lambda _, args: (2 * args[0],)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_of_which_a_part_is_replaced_keeps_it_and_answers_one_image_at_a_time(change, monkeypatch):
    model, plain = raytraced.load("mre-digits"), raytraced.load("mre-digits")
    CHANGES[change](model)
    monkeypatch.setattr("raytraced.serve.models.load", lambda *_, **__: model)
    images = some_images((1, 8, 8), 5)
    with torch.no_grad():
        expected = torch.cat([model(image).logits for image in images.split(1)]).softmax(-1)
        assert change == "parametrisation" or not torch.allclose(expected, plain(images).logits.softmax(-1))
    served = serve_model("changed")
    assert served.num_rows == 1
    for row in range(5):
        for options in ({}, {"confidence": 1.0}):
            (*_, last) = ask(served, images, [row], **options)[row]
            assert last["probabilities"] == pytest.approx(expected[row].tolist(), abs=1e-6)


@pytest.mark.parametrize("name", ["top-k", "multi-exit"])
def test_models_without_an_order_of_experts_answer_after_each_layer(models, name):
    served = next(one for one in models if one.name == name)
    images = some_images((1, 8, 8), 5)
    assert served.num_rows == 1
    for row in range(5):
        (whole,) = ask(served, images, [row])[row]
        *_, last = ask(served, images, [row], exit_every="layer", all_exits=True)[row]
        assert last["probabilities"] == pytest.approx(whole["probabilities"], abs=1e-6)
        assert last["experts"] == whole["experts"]
        first, *_ = ask(served, images, [row], exit_every="layer", confidence=0.0)[row]
        assert (first["experts"], first["stop"]) == (0, "confidence")


def test_an_exit_after_a_layer_states_only_the_nodes_of_the_layers_so_far(served):
    images, num_shorter = some_images(served.image_shape, 8), 0
    for row in range(8):
        whole = ask(served, images, [row], all_exits=True)[row][-1]["nodes"]
        for num_layers, step in enumerate(ask(served, images, [row], exit_every="layer", all_exits=True)[row]):
            assert step["nodes"] == [node for node in whole if node[0] < num_layers]
            num_shorter += len(step["nodes"]) < len(whole)
    assert num_shorter, "the sequences must go through several layers"


def test_a_text_has_exits_too(models, files):
    served = next(one for one in models if one.name == "gpt-mre")
    model, tokens = raytraced.load(files / "gpt-mre.safetensors"), torch.tensor([list(b"To be")])
    (whole,) = ask(served, tokens, [0])[0]
    steps = ask(served, tokens, [0], all_exits=True)[0]
    with torch.no_grad():
        outputs = [model(tokens, max_experts=budget) for budget in range(len(steps))]
        exact = model(tokens)
    assert whole["probabilities"] == exact.logits[0, -1].softmax(-1).tolist() == steps[-1]["probabilities"]
    assert whole["macs"] == int(sample_cost(model, tokens, exact).macs.sum())
    for step, out in zip(steps, outputs, strict=True):
        assert step["probabilities"] == out.logits[0, -1].softmax(-1).tolist()
        assert step["token_experts"] == out.num_experts[0].tolist()
        assert step["experts"] == len(step["nodes"]) == int(out.num_experts[0, -1])
    costs = [int(sample_cost(model, tokens, out).macs.sum()) for out in outputs]
    assert [step["macs"] for step in steps] == torch.tensor(costs).cumsum(0).tolist()
    assert steps[-1]["stop"] == "end"
    drawn_steps = [ask(served, tokens, [0], all_exits=True, select="sample", seed=seed)[0] for seed in range(12)]
    assert {steps[-1]["stop"] for steps in drawn_steps} == {"end"}
    assert any(len(steps) == 7 for steps in drawn_steps)  # all six nodes of a block
    (drawn,) = ask(served, tokens, [0], select="sample", seed=3)[0]
    with torch.no_grad():
        out = model(tokens, select="sample", generator=torch.Generator().manual_seed(3))
    assert drawn["probabilities"] == out.logits[0, -1].softmax(-1).tolist()


def test_a_deadline_that_has_passed_still_gives_the_first_answer(served):
    images = some_images(served.image_shape, 3)
    queries = [Query(served, images[n : n + 1], deliver=lambda *_: None, deadline=0.0) for n in range(3)]
    with torch.inference_mode():
        (step,) = answer_queries(queries)
    assert [(fields["stop"], fields["experts"], done) for _, fields, done in step] == [("deadline", 0, True)] * 3

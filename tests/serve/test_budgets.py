"""Requests that state `experts` or `effort`: the card's table decides, answers state the effort, mistakes are one line."""

import json
from dataclasses import replace
from time import perf_counter

import httpx
import openai
import pytest
import torch
import tritonclient.http

import raytraced
from raytraced.models.dial import effort_at, find_stop
from raytraced.serve.answering import Query
from raytraced.serve.app import Server
from raytraced.serve.batching import Worker
from raytraced.serve.budgets import read_budget
from raytraced.serve.metrics import Metrics
from raytraced.serve.models import serve_model
from serve.conftest import in_base64, png, running, some_images

ROWS = [
    {"stop": 1.0, "experts": 2.0, "macs": 20_000.0, "loss": 0.5},
    {"stop": 0.25, "experts": 4.0, "macs": 30_000.0, "loss": 0.2},
    {"stop": 0.0625, "experts": 6.0, "macs": 40_000.0, "loss": 0.1},
]
IMAGE = some_images((1, 8, 8), 4)
FILE = in_base64(png(IMAGE[3, 0].numpy()))


@pytest.fixture(scope="module")
def sources(tmp_path_factory, files):
    """Two models whose cards have a table of budgets, and two that have none."""
    folder = tmp_path_factory.mktemp("budgets")
    torch.manual_seed(0)
    sharp = {"entry_scale": 8.0, "input_init_std": 2.0, "weighting": "relative", "num_experts": 4}
    text = raytraced.build("gpt-mre", dim=16, hidden=8, depth=2, num_heads=2, context=64, **sharp)
    table = {"split": "validation", "rows": ROWS}
    digits = raytraced.load("mre-digits")
    for name, model, dial in (("digits", digits, table), ("text", text, table), ("uncalibrated", digits, {})):
        model.card = replace(model.card, dial=dial)
        raytraced.save(model, folder / f"{name}.safetensors")
    return [*map(str, sorted(folder.glob("*.safetensors"))), str(files / "top-k.safetensors")]


@pytest.fixture(scope="module")
def served(sources):
    return {one.name: one for one in map(serve_model, sources)}


@pytest.fixture(scope="module")
def address(served):
    yield from running(Server(list(served.values())))


def predict(address, status=200, **fields):
    response = httpx.post(f"{address}/api/predict", json={"model": "digits", "image": FILE} | fields, timeout=30)
    assert response.status_code == status, response.text
    return response.json()["answers"][0] if status == 200 else response.json()["error"]["message"]


@torch.inference_mode()
@pytest.mark.parametrize(
    ("fields", "stop", "effort"),
    [
        ({"effort": 1}, 0.0625, 1.0),
        ({"effort": 0.5}, 1.0, 0.5),
        ({"effort": 0.625}, 0.5, 0.625),
        ({"effort": [0.5, 0.75]}, 0.25, 0.75),
        ({"experts": 4}, 0.25, 0.75),
        ({"experts": 5, "confidence": 1}, 0.125, 0.875),
        ({"effort": 0.5, "max_ms": 600_000}, 1.0, 0.5),
    ],
)
def test_a_budget_gives_the_answer_of_its_stop_and_is_stated(address, served, fields, stop, effort):
    answer = predict(address, **fields)
    out = served["digits"].model(IMAGE[3:], stop=stop)
    assert answer["probabilities"] == pytest.approx(out.logits[0].softmax(-1).tolist(), rel=1e-6)
    assert answer["experts"] == int(out.num_experts)
    assert answer["effort"] == effort
    assert "effort" not in predict(address)


@pytest.mark.parametrize(
    ("fields", "stop"),
    [
        ({"max_experts": 0}, "budget"),
        ({"confidence": 0.0}, "confidence"),
        ({"max_experts": 1, "max_ms": 600_000}, "budget"),
    ],
)
def test_an_answer_that_another_limit_ended_states_no_effort(address, fields, stop):
    found = predict(address, effort=1, trace=True, **fields)
    assert found["stop"] == stop
    assert "effort" not in found
    assert not any("effort" in one for one in found["trace"])
    found = predict(address, effort=1, **fields)
    assert (found["stop"], "effort" in found) == (stop, False)


def test_only_the_answer_at_the_end_states_its_effort_in_every_protocol(address, openai_client):
    found = predict(address, effort=0.75, confidence=1.0, trace=True)
    assert (found["stop"], found["effort"]) == ("end", 0.75)
    assert [one.get("effort") for one in found["trace"]] == [None] * (len(found["trace"]) - 1) + [0.75]
    client = tritonclient.http.InferenceServerClient(address.removeprefix("http://"))
    given = tritonclient.http.InferInput("images", [4, 1, 8, 8], "UINT8")
    given.set_data_from_numpy(IMAGE.numpy())
    answer = client.infer("digits", [given], parameters={"effort": 0.75, "max_experts": 0})
    assert answer.as_numpy("effort").tolist() == [0.0] * 4
    limited = {"effort": 1, "max_experts": 1}
    (choice,) = openai_client.completions.create(model="text", prompt="Once", max_tokens=3, extra_body=limited).choices
    assert not hasattr(choice, "effort")


def test_budgets_change_how_many_experts_run(address):
    experts = [predict(address, effort=effort)["experts"] for effort in (0.5, 0.75, 1)]
    assert experts[0] < experts[2]
    assert experts == sorted(experts)


def test_every_path_takes_budgets(address, served):
    found = predict(address, effort=0.75)
    content = png(IMAGE[3, 0].numpy())
    for effort in (["0.75"], ["0.5,0.75"], ["0.5", "0.75"]):
        form = {"model": "digits", "effort": effort}
        response = httpx.post(f"{address}/api/upload", files={"files": content}, data=form)
        assert response.json()["answers"] == [found]
    body = {"model": "digits", "image": FILE, "effort": 0.75}
    events = httpx.post(f"{address}/api/stream", json=body).text.strip().split("\n\n")
    last = json.loads(events[-1].removeprefix("data: "))
    assert (last["effort"], last["probabilities"]) == (0.75, found["probabilities"])
    client = tritonclient.http.InferenceServerClient(address.removeprefix("http://"))
    given = tritonclient.http.InferInput("images", [1, 1, 8, 8], "UINT8")
    given.set_data_from_numpy(IMAGE[3:].numpy())
    answer = client.infer("digits", [given], parameters={"effort": 0.75})
    assert answer.as_numpy("effort").tolist() == [0.75]
    assert answer.as_numpy("experts").tolist() == [found["experts"]]
    assert client.infer("digits", [given]).as_numpy("effort") is None


@pytest.fixture
def openai_client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_texts_are_generated_with_their_budget_beside_others(address, served, openai_client):
    ask = openai_client.completions.create
    model = served["text"].model
    prompt = torch.tensor([list(b"Once")])

    def expected(stop):
        drawn = list(model.generate(prompt, 12, temperature=0, stop=stop))
        return [int(one.tokens) for one in drawn], sum(int(one.num_experts) for one in drawn)

    for fields, effort, stop in (
        ({"effort": 0.5}, 0.5, 1.0),
        ({"effort": 1}, 1, 0.0625),
        ({"effort": [0.5, 0.75]}, 0.75, 0.25),
        ({"experts": 2}, 0.5, 1.0),
        ({"experts": 4}, 0.75, 0.25),
    ):
        options = {"model": "text", "prompt": ["Once"] * 3, "max_tokens": 12, "temperature": 0, "logprobs": 0}
        choices = ask(**options, extra_body=fields).choices
        tokens, experts = expected(stop)
        texts = [bytes([one]).decode(errors="replace") for one in tokens]
        for choice in choices:
            assert (choice.effort, choice.experts) == (effort, experts)
            assert choice.logprobs.tokens == texts
        chunks = list(ask(**options, extra_body=fields, stream=True))
        last = {chunk.choices[0].index: chunk.choices[0] for chunk in chunks}
        assert [(one.effort, one.experts) for one in last.values()] == [(effort, experts)] * 3
    assert expected(1.0)[1] < expected(0.25)[1] < expected(0.0625)[1]
    for fields, words in (
        ({"experts": 9}, "experts=9: text runs at least 2 experts"),
        ({"effort": [0.1, 1]}, "effort=0.1: text runs at least 0.5"),
        ({"effort": 1, "experts": 4}, "experts=4.0: give either experts or effort"),
    ):
        with pytest.raises(openai.UnprocessableEntityError, match=words):
            ask(model="text", prompt="Once", extra_body=fields)
    body = {"model": "text", "text": "Once", "length": 3, "effort": 0.5}
    *others, last = httpx.post(f"{address}/api/generate", json=body).text.strip().split("\n\n")
    assert '"effort": 0.5' in last
    assert not any("effort" in event for event in others)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"effort": 0.1}, "effort=0.1: digits runs at least 0.5 of the full cost and at most 1, as calibrated"),
        ({"effort": 1.2}, "effort=1.2: digits runs at least 0.5"),
        ({"effort": [0.1, 1]}, "effort=0.1: digits runs at least 0.5"),
        ({"effort": [1, 0.5]}, "effort=[1.0, 0.5]: must be [lowest, highest]; exchange the two numbers"),
        ({"effort": 0}, "effort=0: must be a number above 0, or two of them, [lowest, highest]"),
        ({"effort": [0.5]}, "effort=[0.5]: must be a number above 0, or two"),
        ({"effort": [0.5, 0.6, 0.7]}, "effort=[0.5, 0.6, 0.7]: must be"),
        ({"effort": "much"}, "effort=much: must be"),
        ({"effort": [0.5, "x"]}, "effort=[0.5, 'x']: must be a number above 0, or two"),
        ({"experts": 90}, "experts=90: digits runs at least 2 experts on average and at most 6"),
        ({"experts": -1}, "experts=-1: must be greater than 0"),
        ({"experts": 3, "effort": 1}, "experts=3.0: give either experts or effort=1.0, not both"),
        ({"experts": 3, "effort": [0.5, 1]}, "experts=3.0: give either experts or effort=[0.5, 1.0], not both"),
        ({"experts": 3, "model": "top-k"}, "experts=3.0: has no effect on top-k"),
        ({"experts": 3, "select": "sample"}, "experts=3.0: must be left out with select=sample: budgets were measured with greedy"),
        ({"effort": [0.5, 1], "select": "sample"}, "effort=[0.5, 1.0]: must be left out with select=sample"),
        ({"effort": 0.5, "model": "uncalibrated"}, "effort=0.5: the card of uncalibrated has no table of budgets; run raytraced calibrate"),
    ],
)  # fmt: skip
def test_bad_budgets_are_refused_in_one_line(address, fields, message):
    found = predict(address, 422, **fields)
    assert found.startswith(message)
    assert "\n" not in found


def test_the_effort_of_a_stop_is_the_inverse_of_the_table():
    for effort in (0.5, 0.6, 0.75, 0.9, 1.0):
        assert effort_at({"rows": ROWS}, find_stop("m", {"rows": ROWS}, None, effort)) == pytest.approx(effort)
    assert effort_at({"rows": ROWS}, 7.0) == 0.5
    assert effort_at({"rows": ROWS}, 0.001) == 1.0


def test_what_an_answer_at_the_end_takes_is_measured_before_the_first_request(served):
    server = Server([served["digits"], served["text"], served["uncalibrated"]])
    for address in running(server):
        assert httpx.get(f"{address}/readyz", timeout=30).status_code == 200
        measured = server.engine.worker.times.seconds
        assert [key for key, seconds in measured.items() if seconds > 0] == [("digits", False)]


def test_an_expected_time_that_is_too_long_is_doubted(served):
    """Otherwise no answer would be computed at the end again, and the time never be measured again."""
    worker, is_direct = Worker(Metrics()), list[bool]()
    worker.times.seconds["digits", False] = 60.0
    for _ in range(500):
        budget = read_budget(served["digits"], None, 1.0)
        query = Query(served["digits"], IMAGE[:1], lambda _: None, budget=budget, deadline=perf_counter() + 60)
        worker.submit([query])
        is_direct.append(query.direct)
    assert not is_direct[0]
    assert is_direct[-1]

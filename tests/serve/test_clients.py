"""The clients that people have: OpenAI's for text, Triton's for classifiers."""

import json
import random
import time

import httpx
import jsonschema_rs
import numpy as np
import openai
import pytest
import torch
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

import raytraced
from raytraced.cli.main import main
from raytraced.serve.app import Server
from raytraced.serve.generation import TextBuffer
from serve.conftest import generated, running, some_images

IMAGES = some_images((1, 28, 28), 5).numpy()


@pytest.fixture(scope="module")
def openai_client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def gpt(files):
    return raytraced.load(files / "gpt-mre.safetensors")


def wait_until_idle(server: Server) -> None:
    until = time.monotonic() + 30
    while server.traffic.in_progress or any(batch.texts for batch in server.engine.worker.texts.values()):
        assert time.monotonic() < until
        time.sleep(0.001)


# OpenAI


def test_models_are_listed(openai_client):
    assert [model.id for model in openai_client.models.list()] == ["gpt-mre", "gpt-top-k"]
    assert openai_client.models.retrieve("gpt-mre").object == "model"
    with pytest.raises(openai.NotFoundError, match="gpt-mr: there is no such model; did you mean gpt-mre"):
        openai_client.models.retrieve("gpt-mr")


def test_a_completion_is_what_the_library_generates(openai_client, gpt):
    for options in ({"temperature": 0}, {"temperature": 1.3, "top_p": 0.9, "seed": 4}):
        found = openai_client.completions.create(model="gpt-mre", prompt="Once", max_tokens=30, **options)
        expected = generated(gpt, b"Once", 30, **options)
        assert found.choices[0].text == expected.decode(errors="replace")
        assert found.choices[0].finish_reason == "length"
        assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (4, 30, 34)


@pytest.mark.parametrize("model", ["gpt-mre", "gpt-top-k"])
def test_a_stream_adds_up_to_the_whole(openai_client, model):
    options = {"model": model, "prompt": ["Once", "upon"], "max_tokens": 20, "n": 2, "seed": 7, "logprobs": 2}
    whole = openai_client.completions.create(**options)
    texts, logprobs, reasons, usage = [""] * 4, [[] for _ in range(4)], [None] * 4, None
    for chunk in openai_client.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            logprobs[choice.index] += choice.logprobs.token_logprobs
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.text for choice in whole.choices]
    assert logprobs == [choice.logprobs.token_logprobs for choice in whole.choices]
    assert reasons == ["length"] * 4
    assert usage == whole.usage
    assert len(set(texts)) == 4, "each choice has draws of its own"


def test_a_stream_ends_with_done(address):
    body = {"prompt": "Once", "max_tokens": 2, "stream": True}
    lines = httpx.post(f"{address}/v1/completions", json=body).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]


def test_logprobs_are_those_of_the_model(openai_client, gpt):
    found = openai_client.completions.create(
        model="gpt-mre", prompt="Once", max_tokens=3, temperature=0, logprobs=3, echo=True
    )
    choice = found.choices[0]
    assert choice.text.startswith("Once")
    tokens = b"Once" + generated(gpt, b"Once", 3, temperature=0)
    with torch.no_grad():
        logprobs = gpt(torch.tensor([list(tokens)])).logits[0].log_softmax(-1)
    expected = [float(logprobs[place, tokens[place + 1]]) for place in range(len(tokens) - 1)]
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=1e-5)
    assert choice.logprobs.tokens[:4] == list("Once")
    assert choice.logprobs.text_offset[:5] == [0, 1, 2, 3, 4]
    for top, token in zip(choice.logprobs.top_logprobs[4:], choice.logprobs.token_logprobs[4:], strict=True):
        assert len(top) <= 3
        assert max(top.values()) == pytest.approx(token)
    scored = openai_client.completions.create(model="gpt-mre", prompt="Once", max_tokens=0, logprobs=1, echo=True)
    assert scored.choices[0].text == "Once"
    assert scored.choices[0].logprobs.token_logprobs == choice.logprobs.token_logprobs[:4]


def test_tokens_may_stand_for_texts(openai_client):
    ask = openai_client.completions.create
    text = ask(model="gpt-mre", prompt="Once", max_tokens=5, seed=1, echo=True).choices[0].text
    assert ask(model="gpt-mre", prompt=list(b"Once"), max_tokens=5, seed=1, echo=True).choices[0].text == text
    both = ask(model="gpt-mre", prompt=[list(b"Once"), list(b"Once")], max_tokens=5, seed=1, echo=True)
    assert [choice.text for choice in both.choices] == [text, text]


def test_a_stop_string_ends_a_text_and_is_not_part_of_it(openai_client):
    options = {"model": "gpt-mre", "prompt": "Once", "max_tokens": 60, "seed": 3, "temperature": 2.0}
    whole = openai_client.completions.create(**options).choices[0].text
    stop = next(whole[n : n + 2] for n in range(20, 60) if whole[n : n + 2].isascii())
    found = openai_client.completions.create(**options, stop=["never", stop]).choices[0]
    assert (found.text, found.finish_reason) == (whole[: whole.index(stop)], "stop")
    streamed = openai_client.completions.create(**options, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == found.text


def test_text_is_held_back_only_while_it_could_be_a_stop_string():
    draw = random.Random(0)
    for _ in range(300):
        content = bytes(draw.choice(b"ab") for _ in range(12))
        stops = tuple(bytes(draw.choice(b"ab") for _ in range(draw.randint(1, 4))) for _ in range(2))
        buffer, text, stopped = TextBuffer(stops), "", False
        for byte in content:
            piece, stopped = buffer.add(bytes((byte,)))
            text += piece
            if stopped:
                break
        text += "" if stopped else buffer.flush()
        ends = [content.find(stop) + len(stop) for stop in stops if stop in content]
        assert stopped == bool(ends)
        if not ends:
            assert text == content.decode()
        else:
            read = content[: min(ends)]
            assert text == read[: min(place for place in map(read.find, stops) if place >= 0)].decode()


def test_our_own_fields_pass_through_the_client(openai_client, gpt, server):
    ask = openai_client.completions.create
    found = ask(model="gpt-mre", prompt="Once", max_tokens=9, temperature=0, extra_body={"max_experts": 1})
    assert found.choices[0].text == generated(gpt, b"Once", 9, temperature=0, max_experts=1).decode(errors="replace")
    wait_until_idle(server)  # beside another request, this one would be refused
    late = ask(model="gpt-mre", prompt="Once", max_tokens=4000, extra_body={"max_ms": 1}).choices[0]
    assert (late.finish_reason, late.stop) == ("length", "deadline")


NULLABLE = (
    "best_of", "echo", "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "n", "presence_penalty", "seed",
    "stop", "stream", "stream_options", "suffix", "temperature", "top_p",
)  # fmt: skip  # in OpenAI's schema


def test_null_stands_for_the_default(openai_client):
    ask = openai_client.completions.create
    options = {"model": "gpt-mre", "prompt": "Once", "seed": 5}
    expected = ask(**options)
    for name in NULLABLE:
        found = ask(**{**options, name: None})
        assert found.usage == expected.usage
        assert name == "seed" or found.choices == expected.choices
    everything = dict.fromkeys(NULLABLE) | {"seed": 5, "prompt": "Once", "model": "gpt-mre"}
    assert ask(**everything).choices == expected.choices
    assert ask(model="gpt-mre", prompt=None, seed=5).choices == ask(model="gpt-mre", prompt="", seed=5).choices


def test_options_that_ask_for_nothing_are_accepted(openai_client):
    ask = openai_client.completions.create
    options = {"model": "gpt-mre", "prompt": "Once", "seed": 5, "n": 2}
    expected = ask(**options).choices
    for harmless in ({"best_of": 2}, {"best_of": 1}, {"logit_bias": {}}, {"suffix": ""}, {"user": "a"}):
        assert ask(**options, **harmless).choices == expected
    stream_options = {"include_obfuscation": True, "include_usage": None}
    chunks = list(ask(**options, stream=True, stream_options=stream_options))
    texts = ["".join(one.text for chunk in chunks for one in chunk.choices if one.index == n) for n in range(2)]
    assert texts == [choice.text for choice in expected]


def test_the_document_states_what_may_be_null(address):
    schemas = httpx.get(f"{address}/openapi.json").json()["components"]["schemas"]
    components = {"components": {"schemas": schemas}}
    validator = jsonschema_rs.validator_for({"$ref": "#/components/schemas/CompletionRequest"} | components)
    harmless = {"logit_bias": {}, "suffix": "", "stream_options": {"include_usage": None, "include_obfuscation": True}}
    for body in ({}, dict.fromkeys(NULLABLE), dict.fromkeys(["prompt", "effort", "max_ms", "user"]), harmless):
        assert validator.is_valid(body)
        assert httpx.post(f"{address}/v1/completions", json=body).status_code == 200
    for body in ({"suffix": "b"}, {"logit_bias": {"5": 1}}, {"stream_options": {"foo": 1}}, {"temperature": -1}):
        assert not validator.is_valid(body)
        assert httpx.post(f"{address}/v1/completions", json=body).status_code == 422


def test_mistakes_are_the_client_s_own_errors(openai_client):
    ask = openai_client.completions.create
    for options, words in (
        ({"prompt": "x" * 17}, "prompt: has 17 bytes"),
        ({"prompt": [300]}, "prompt=\\[300\\]: must be a text, or whole numbers in 0 … 255"),
        ({"prompt": [True]}, "prompt\\[0\\]=True: must be a text"),
        ({"prompt": []}, "prompt: has 0 texts"),
        ({"prompt": "a", "best_of": 2}, "best_of=2: must be at most n=1: no choices are discarded"),
        ({"prompt": "a", "presence_penalty": 1}, "presence_penalty=1: must be less than or equal to 0"),
        ({"prompt": ["a"] * 40, "n": 2}, "n=2: 40 prompts make 80 texts"),
        ({"prompt": "a", "suffix": "b"}, "suffix=b: is not supported, must be empty or left out"),
        ({"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias={'5': 1}: is not supported"),
        ({"prompt": "a", "stream_options": {"foo": 1}}, "stream_options.foo: is not a field of this request"),
        ({"prompt": "a", "stream_options": {"include_usage": 3}}, "stream_options.include_usage=3: must be a valid b"),
        ({"prompt": "a", "extra_body": {"foo": None}}, "foo: is not a field of this request"),
        ({"prompt": "a", "stop": 5}, "stop=5: must be a valid string or a valid list"),
        ({"prompt": "a", "stop": ""}, "stop"),
    ):
        with pytest.raises(openai.UnprocessableEntityError, match=words):
            ask(model="gpt-mre", **options)
    with pytest.raises(openai.UnprocessableEntityError, match="model=mre-mnist: takes images, not text"):
        ask(model="mre-mnist", prompt="a")


def num_finished(address: str) -> list[str]:
    """The counts of texts that were generated in full."""
    lines = httpx.get(f"{address}/metrics").text.splitlines()
    return [line for line in lines if line.startswith("raytraced_answers_total") and 'stop="length"' in line]


def test_a_whole_completion_stops_when_its_client_goes(address, server):
    wait_until_idle(server)
    before = num_finished(address)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{address}/v1/completions", json={"prompt": "Once", "max_tokens": 4096}, timeout=0.2)
    wait_until_idle(server)
    assert num_finished(address) == before


@pytest.mark.parametrize("model", ["gpt-mre", "gpt-top-k"])
def test_a_stream_that_is_closed_stops_its_work(openai_client, address, server, model):
    wait_until_idle(server)
    before = num_finished(address)
    options = {"model": model, "prompt": ["Once", "upon"], "max_tokens": 4096, "n": 2}
    stream = openai_client.completions.create(**options, stream=True)
    for _ in range(9):
        next(stream)
    assert len(server.engine.worker.texts[model].texts) == 4
    stream.close()
    wait_until_idle(server)
    assert num_finished(address) == before


def test_a_key_in_a_file_is_the_client_s_api_key(files, tmp_path, monkeypatch):
    (tmp_path / "key").write_text("open-sesame\n")
    servers = []
    monkeypatch.setattr("raytraced.cli.serve.run", lambda _, server, __: servers.append(server))
    assert (
        main(["serve", str(files / "gpt-mre.safetensors"), "--api-key-file", str(tmp_path / "key"), "--port", "0"]) == 0
    )
    for address in running(servers[0]):
        with openai.OpenAI(base_url=f"{address}/v1", api_key="open-sesame", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["gpt-mre"]
            options = {"model": "gpt-mre", "prompt": "Once", "max_tokens": 3, "seed": 1}
            whole = client.completions.create(**options).choices[0].text
            assert (
                "".join(chunk.choices[0].text for chunk in client.completions.create(**options, stream=True)) == whole
            )
            for bad in ("open-sesam", "none"):
                with pytest.raises(openai.AuthenticationError, match="must be Bearer and the server's API key"):
                    client.with_options(api_key=bad).completions.create(**options)


# Open Inference Protocol


@pytest.fixture
def triton_client(address):
    client = triton.InferenceServerClient(address.removeprefix("http://"))
    yield client
    client.close()


def image_input(images: np.ndarray, binary: bool) -> triton.InferInput:
    given = triton.InferInput("images", images.shape, "UINT8")
    given.set_data_from_numpy(images, binary_data=binary)
    return given


def test_health_and_metadata(triton_client):
    assert triton_client.is_server_live()
    assert triton_client.is_server_ready()
    assert triton_client.is_model_ready("mre-mnist")
    assert not triton_client.is_model_ready("mre-mnis")
    assert triton_client.get_server_metadata()["name"] == "raytraced"
    found = triton_client.get_model_metadata("mre-mnist")
    assert found["inputs"] == [{"name": "images", "datatype": "UINT8", "shape": [-1, 1, 28, 28]}]
    assert found["outputs"][0] == {"name": "probabilities", "datatype": "FP32", "shape": [-1, 10]}


@pytest.mark.parametrize("binary_input", [True, False])
@pytest.mark.parametrize("binary_output", [True, False])
def test_outputs_are_the_answers_of_our_own_path(triton_client, address, binary_input, binary_output):
    body = {"images": IMAGES.tolist(), "model": "mre-mnist", "max_experts": 3}
    expected = httpx.post(f"{address}/api/predict", json=body).json()["answers"]
    names = ("probabilities", "labels", "experts", "macs")
    outputs = [triton.InferRequestedOutput(name, binary_data=binary_output) for name in names]
    found = triton_client.infer(
        "mre-mnist", [image_input(IMAGES, binary_input)], outputs=outputs, request_id="7", parameters={"max_experts": 3}
    )
    assert found.get_response()["id"] == "7"
    probabilities = np.array([answer["probabilities"] for answer in expected], np.float32)
    assert (found.as_numpy("probabilities") == probabilities).all()
    labels = [label.decode() if isinstance(label, bytes) else label for label in found.as_numpy("labels").tolist()]
    assert labels == [answer["label"] for answer in expected]
    assert found.as_numpy("experts").tolist() == [answer["experts"] for answer in expected]
    assert found.as_numpy("macs").tolist() == [answer["macs"] for answer in expected]


def test_all_outputs_are_the_default(triton_client):
    found = triton_client.infer("mre-mnist", [image_input(IMAGES[:1], True)])
    assert found.as_numpy("probabilities").shape == (1, 10)


def test_every_model_has_version_1(triton_client):
    given, names = [image_input(IMAGES, True)], {"model_name": "mre-mnist", "model_version": "1"}
    assert triton_client.is_model_ready(**names)
    assert not triton_client.is_model_ready("mre-mnis", "1")
    found = triton_client.get_model_metadata(**names)
    assert found == triton_client.get_model_metadata("mre-mnist")
    assert found["versions"] == ["1"]
    answer = triton_client.infer(**names, inputs=given, parameters={"max_experts": 3})
    expected = triton_client.infer("mre-mnist", given, parameters={"max_experts": 3})
    assert answer.get_response()["model_version"] == "1"
    assert (answer.as_numpy("probabilities") == expected.as_numpy("probabilities")).all()
    assert not triton_client.is_model_ready("mre-mnist", "2")
    for version in ("2", "0", "latest"):
        rule = f"model_version={version}: mre-mnist has version 1 only; leave the version out"
        for call in (
            lambda version=version: triton_client.infer("mre-mnist", given, model_version=version),
            lambda version=version: triton_client.get_model_metadata("mre-mnist", version),
        ):
            with pytest.raises(InferenceServerException, match=rule):
                call()


def test_what_is_not_supported_is_refused(triton_client):
    given = [image_input(IMAGES, True)]
    with pytest.raises(InferenceServerException, match="/v2/models/mre-mnist/config: there is no such path"):
        triton_client.get_model_config("mre-mnist")
    with pytest.raises(InferenceServerException, match="content-encoding=gzip: must be identity"):
        triton_client.infer("mre-mnist", given, request_compression_algorithm="gzip")
    plain = triton_client.infer("mre-mnist", given, response_compression_algorithm="gzip")
    assert plain.get_response()["model_name"] == "mre-mnist"


def test_mistakes_are_triton_s_own_errors(triton_client, address):
    def infer(images=IMAGES, **options):
        triton_client.infer(options.pop("model", "mre-mnist"), [image_input(images, True)], **options)

    for call, words in (
        (lambda: infer(IMAGES[:, :, :8, :8]), "must be \\(n, 1, 28, 28\\) with n in 1 … 256"),
        (lambda: infer(model="mre-mnis"), "there is no such model; did you mean mre-mnist"),
        (lambda: infer(model="gpt-mre"), "model=gpt-mre: takes text, not images"),
        (lambda: infer(parameters={"max_experts": -1}), "max_experts=-1: must be greater than or equal to 0"),
        (lambda: infer(parameters={"expert": 1}), "expert: is not a field"),
        (lambda: infer(outputs=[triton.InferRequestedOutput("logits")]), "logits is not an output"),
    ):
        with pytest.raises(InferenceServerException, match=words):
            call()
    path = f"{address}/v2/models/mre-mnist/infer"
    tensor = {"name": "images", "datatype": "UINT8", "shape": [1, 1, 28, 28]}
    for body in (
        b"",
        b"[",
        b"[]",
        b"[" * 100_000,
        json.dumps({"inputs": []}).encode(),
        json.dumps({"inputs": [tensor]}).encode(),
        json.dumps({"inputs": [tensor | {"data": [1]}]}).encode(),
        json.dumps({"inputs": [tensor | {"data": [[True] * 784]}]}).encode(),
        json.dumps({"inputs": [tensor | {"data": [[0] * 783 + ["a"]]}]}).encode(),
        json.dumps({"inputs": [tensor | {"shape": [1 << 40, 1, 28, 28]}]}).encode(),
    ):
        response = httpx.post(path, content=body)
        assert response.status_code == 422
        assert isinstance(response.json()["error"], str)
    assert httpx.post(path, content=b"{}", headers={"Inference-Header-Content-Length": "9"}).status_code == 422
    assert httpx.post(path, content=b"{}", headers={"Content-Encoding": "gzip"}).status_code == 415

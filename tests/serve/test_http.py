"""What the server says over HTTP: answers, streams, texts; and how it says no, which never is a 5xx."""

import json
import socket
import time
from pathlib import Path

import httpx
import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import raytraced
from raytraced.cli import main
from raytraced.serve.limits import Limits, RefusedError
from raytraced.serve.schema import check, request_schemas
from raytraced.tasks.images.loading import load as load_data
from serve.conftest import in_base64, png, some_images

DIGIT = some_images((1, 8, 8), 3)[1, 0].numpy()
FILE = in_base64(png(DIGIT))


def ask(client, path="predict", **body) -> dict:
    response = client.post(f"/api/{path}", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def events(client, path, **body) -> list[dict]:
    response = client.post(f"/api/{path}", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return [json.loads(part.removeprefix("data: ")) for part in response.text.split("\n\n") if part]


def refusal(response: httpx.Response) -> tuple[int, str, str]:
    error = response.json()["error"]
    return response.status_code, error["rule"], error["message"]


def test_answers_are_those_of_raytraced_predict(client, tmp_path, capsys):
    colours = some_images((3, 40, 32), 4).permute(0, 2, 3, 1).numpy()
    greys = some_images((1, 30, 28), 4)[:, 0].numpy()
    cases = [("mre-cifar10", image) for image in colours] + [("mre-mnist", image) for image in greys]
    cases += [("mre-digits", colours[0]), ("mre-cifar10", greys[0])]
    for number, (model, pixels) in enumerate(cases):
        content = png(pixels, "JPEG" if number % 2 else "PNG")
        path = tmp_path / f"{number}.image"
        path.write_bytes(content)
        for budget in ({}, {"max_experts": 2}):
            (found,) = ask(client, image=in_base64(content), model=model, **budget)["answers"]
            words = [word for name, value in budget.items() for word in (f"--{name}", str(value))]
            assert main(["predict", model, str(path), "--json", *words]) == 0
            told = json.loads(capsys.readouterr().out)
            expected = found["label"], found["probability"], found["experts"]
            assert (told["answer"], told["probability"], told["experts"]) == expected


def test_many_requests_at_once_give_what_each_gives_alone(client, address):
    import concurrent.futures

    images = [png(image) for image in some_images((1, 28, 28), 24)[:, 0].numpy()]
    bodies = [{"image": in_base64(image), "model": "mre-mnist", "sure": 0.5 + n / 60} for n, image in enumerate(images)]
    bodies += [{"images": [in_base64(one) for one in images[n : n + 3]], "model": "mre-mnist"} for n in range(8)]
    alone = [ask(client, **body) for body in bodies]
    with httpx.Client(base_url=address, timeout=30) as other, concurrent.futures.ThreadPoolExecutor(16) as pool:
        for _ in range(3):
            assert list(pool.map(lambda body: ask(other, **body), bodies)) == alone
    rows = [line for line in client.get("/metrics").text.splitlines() if line.startswith("raytraced_batch_rows_")]
    values = dict(line.split() for line in rows)
    assert int(values["raytraced_batch_rows_count"]) > int(values['raytraced_batch_rows_bucket{le="4"}'])


def test_pixels_and_files_are_the_same_to_it(client):
    lists = [DIGIT.tolist(), [DIGIT.tolist()]]
    (answer,) = ask(client, image=FILE, model="mre-digits")["answers"]
    for image in lists:
        assert ask(client, image=image, model="mre-digits")["answers"] == [answer]
    assert ask(client, images=[FILE, *lists], model="mre-digits")["answers"] == [answer] * 3
    assert answer["probability"] == max(answer["probabilities"])
    assert sum(answer["probabilities"]) == pytest.approx(1, abs=1e-5)


def test_a_trace_is_the_stream_and_ends_in_the_answer(client):
    (answer,) = ask(client, image=FILE, model="mre-digits", trace=True)["answers"]
    found = events(client, "stream", image=FILE, model="mre-digits")
    assert [step["experts"] for step in found[:-1]] == list(range(len(found) - 1))
    assert [step.get("stop") for step in found] == [None] * (len(found) - 1) + ["end"]
    assert answer["trace"] == [{key: value for key, value in step.items() if key != "stop"} for step in found]
    (plain,) = ask(client, image=FILE, model="mre-digits")["answers"]
    assert answer["probabilities"] == plain["probabilities"] == found[-1]["probabilities"]
    assert found[3]["nodes"] == found[-1]["nodes"][:3]
    assert np.shape(found[3]["rates"]) == (4, 8)


@pytest.mark.data
def test_the_example_of_the_page_is_what_is_answered(client):
    page = (Path(__file__).parents[2] / "docs/serve.md").read_text()
    told = page[page.index('"answers": [') :].split("\n```")[0]
    image = load_data("mnist").test.images[0, 0].numpy()
    (answer,) = ask(client, image=in_base64(png(image)), model="mre-mnist", max_ms=600_000)["answers"]
    for name in ("label", "experts", "multiply_adds", "stop"):
        assert f'"{name}": {json.dumps(answer[name])}' in told
    assert f'"probability": {answer["probability"]:.6f}' in told


def test_why_it_stopped(client):
    def stop(**options):
        (answer,) = ask(client, image=FILE, model="mre-digits", **options)["answers"]
        return answer["stop"], answer["experts"]

    whole = stop()
    assert whole[0] == "end"
    assert stop(max_experts=2) == ("budget", 2)
    assert stop(sure=0) == ("sure", 0)
    assert stop(sure=1, max_experts=2) == ("budget", 2)
    assert stop(max_ms=600_000) == whole
    assert stop(max_ms=1e-6) == ("deadline", 0)
    assert stop(select="sample", seed=3) == stop(select="sample", seed=3.0)


def test_text_goes_on_as_raytraced_generate_does(client, files, capsys):
    for words in ({}, {"seed": 4, "temperature": 1.5, "top_p": 0.9, "max_experts": 1}):
        found = events(client, "generate", text="Once", model="gpt-mre", length=40, **words)
        options = [word for name, value in words.items() for word in (f"--{name}", str(value))]
        assert main(["generate", str(files / "gpt-mre.safetensors"), "Once", "--length", "40", "--json", *options]) == 0
        told = json.loads(capsys.readouterr().out)
        assert "".join(token["text"] for token in found) == told["text"]
        assert [token["experts"] for token in found] == told["experts"]
        assert [token.get("stop") for token in found] == [None] * 39 + ["length"]
    coldest = events(client, "generate", text="Once", length=8, temperature=5e-324)
    assert coldest == events(client, "generate", text="Once", length=8, temperature=0)
    (late,) = events(client, "generate", text="Once", max_ms=1e-6)
    assert late["stop"] == "deadline"
    assert len(events(client, "generate", text="", model="gpt-top-k", length=3)) == 3


def test_the_default_model_is_the_first_that_takes_the_input(client):
    assert ask(client, image=FILE)["model"] == "mre-digits"
    assert ask(client, text="a")["model"] == "gpt-mre"


def test_what_is_wrong_is_said_in_one_sentence(client):
    digits = {"model": "mre-digits"}
    many = [[[0]]] * 257
    wide = in_base64(png(np.zeros((4097, 4097), np.uint8)))
    cases = [
        ("predict", {}, "entry", "none given: must be one of image, images, text"),
        ("predict", {"image": FILE, "text": "a"}, "entry", "image, text given: must be one of image, images, text"),
        ("predict", {"image": FILE, "picture": 1}, "entry", "picture=1: must be left out"),
        ("predict", {"image": FILE, "max_experts": -1}, "range", "max_experts=-1: must be at least 0"),
        ("predict", {"image": FILE, "max_experts": 10**400}, "range", "must be at most 1000000"),
        ("predict", {"image": FILE, "max_experts": 1.5}, "type", "max_experts=1.5: must be an integer"),
        ("predict", {"image": FILE, "sure": True}, "type", "sure=True: must be a finite number or a string"),
        ("predict", {"image": FILE, "sure": "certain"}, "choice", "sure=certain: must be one of calibrated"),
        ("predict", {"image": FILE, "max_ms": 0}, "range", "max_ms=0: must be above 0"),
        ("predict", {"image": FILE, "model": "none"}, "choice", "model=none: must be one of mre-digits, "),
        ("predict", {"image": FILE, "model": "gpt-mre"}, "input", "model=gpt-mre: takes text"),
        ("predict", {"text": "a", "model": "mre-mnist"}, "input", "model=mre-mnist: takes images"),
        ("predict", {"images": many}, "batch", "images: must be at most 256 long, it is 257"),
        ("predict", {"image": wide} | digits, "pixels", "hold more than 16,777,216 pixels"),
        ("predict", {"image": "%%"} | digits, "image", "image: must be a file in base64"),
        ("predict", {"image": "é"} | digits, "image", "image: must be a file in base64"),
        ("predict", {"image": in_base64(b"GIF89a")} | digits, "image", "image: must be a PNG or JPEG file"),
        ("predict", {"images": [FILE, FILE[:60]]} | digits, "image", "images[1]: "),
        ("predict", {"image": [[1, 2], [3]]} | digits, "image", "image: must have rows of the same length"),
        ("predict", {"image": [[1, [2]]]} | digits, "image", "image: must have rows of the same length"),
        ("predict", {"image": [[1, 2]]} | digits, "image", "has shape (1, 2), must be (1, 8, 8)"),
        ("predict", {"image": [[1, 256]]} | digits, "range", "must be numbers in 0 … 255"),
        ("predict", {"image": [[1, True]]} | digits, "type", "image[0][1]=True: must be an integer or an array"),
        ("predict", {"image": DIGIT.tolist(), "model": "top-k", "max_experts": 1}, "option", "max_experts=1: only for"),
        ("predict", {"image": DIGIT.tolist(), "model": "multi-exit", "select": "sample"}, "option", "must be greedy"),
        ("stream", {"image": DIGIT.tolist(), "model": "multi-exit", "select": "sample"}, "option", "must be greedy"),
        ("predict", {"text": "a", "model": "gpt-top-k", "sure": 0.5}, "option", "gpt-top-k has one answer only"),
        (
            "predict",
            {"text": "a", "model": "gpt-top-k", "sure": 0.0},
            "option",
            "sure=0.0: gpt-top-k has one answer only",
        ),
        ("predict", {"text": "x" * 17}, "length", "text: has 17 bytes; gpt-mre looks at 16: give fewer"),
        ("predict", {"text": "x" * 65_537}, "length", "must be at most 65,536 characters, it has 65,537"),
        ("predict", {"text": "\ud800"}, "text", "text: must be Unicode"),
        ("predict", {"\ud800": 1, "text": "a"}, "entry", "must be left out"),
        ("stream", {"images": [FILE]}, "entry", "images=['"),
        ("stream", {"text": "a", "model": "gpt-top-k"}, "option", "stream=True: gpt-top-k has one answer only"),
        ("generate", {"model": "gpt-mre"}, "entry", "text: must be given"),
        ("generate", {"text": "a", "length": 4097}, "range", "length=4097: must be at most 4096"),
        ("generate", {"text": "a", "top_p": 0}, "range", "top_p=0: must be above 0"),
        ("generate", {"text": "a", "model": "mre-mnist"}, "input", "model=mre-mnist: takes images"),
        ("generate", {"text": "a", "model": "gpt-top-k", "max_experts": 1}, "option", "max_experts=1: only for"),
    ]
    for path, body, rule, told in cases:
        status, found, message = refusal(client.post(f"/api/{path}", content=json.dumps(body), headers=JSON))
        assert (status, found) == (422, rule), message
        assert told in message
        assert len(message) < 300
        assert "\n" not in message


JSON = {"content-type": "application/json"}
RAW = [b"", b"{", b"[" * 100_000, b"\xff\xfe", b'{"sure": NaN}', b'{"sure": 1e999, "text": "a"}', b"9" * 5000, b"null"]


@pytest.mark.parametrize("body", RAW, ids=range(len(RAW)))
def test_what_is_no_request_is_refused(client, body):
    assert refusal(client.post("/api/predict", content=body, headers=JSON))[0] == 422


def test_paths_methods_and_kinds(client):
    assert refusal(client.get("/etc/passwd")) == (
        404, "path", "/etc/passwd: there is no such path; /openapi.json names them all",
    )  # fmt: skip
    assert refusal(client.get("/../pyproject.toml"))[:2] == (404, "path")
    assert len(refusal(client.get(f"/{'x' * 5000}"))[2]) < 200
    assert refusal(client.get("/api/predict")) == (405, "method", "GET /api/predict: must be POST")
    assert refusal(client.post("/api/predict", content=b"{}", headers={"content-type": "text/plain"}))[:2] == (
        415, "content-type",
    )  # fmt: skip
    assert refusal(client.post("/api/predict", content=b" " * 2_000_001, headers=JSON))[:2] == (413, "body")
    pieces = client.post("/api/predict", content=(b" " * 100_000 for _ in range(30)), headers=JSON)
    assert refusal(pieces)[:2] == (413, "body")  # also where nobody said how long it is


def test_only_its_own_name_and_its_own_page(client, address):
    host = address.removeprefix("http://")
    port = host.rpartition(":")[2]
    for good in (host, f"localhost:{port}", "LOCALHOST", f"[::1]:{port}"):
        assert client.get("/healthz", headers={"host": good}).status_code == 200
    for bad in ("example.org", f"example.org:{port}", "127.0.0.1.example.org", "", "[", "192.168.0.1"):
        assert refusal(client.get("/healthz", headers={"host": bad}))[:2] == (403, "host")
    assert client.get("/healthz", headers={"origin": address}).status_code == 200
    for bad in ("http://example.org", "null", f"{address}.example.org", "http://127.0.0.1:1"):
        assert refusal(client.post("/api/predict", json={}, headers={"origin": bad}))[:2] == (403, "origin")
    asked = {"origin": "http://example.org", "access-control-request-method": "POST"}
    preflight = client.options("/api/predict", headers=asked)
    assert preflight.status_code == 403
    assert "access-control-allow-origin" not in preflight.headers


def test_a_server_for_the_network_is_called_by_number_or_by_given_names(models):
    from raytraced.serve.app import Server

    guard = Server(models[:1], hosts=["0.0.0.0", "Lab.example"]).app
    assert [guard.knows(host) for host in ("192.168.0.1", "::1", "lab.example", "example.org", None)] == [
        True, True, True, False, False,
    ]  # fmt: skip


def test_work_under_way_is_limited_and_a_slow_body_ends(small):
    server, address = small
    host, port = address.removeprefix("http://").split(":")
    head = f"POST /api/predict HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
    with httpx.Client(base_url=address) as client, socket.create_connection((host, int(port))) as slow:
        slow.sendall(head.encode() + b"{")
        while server.traffic.under_way == 0:
            time.sleep(0.001)
        full = client.post("/api/predict", json={"image": FILE})
        assert refusal(full)[:2] == (429, "under_way")
        assert full.headers["retry-after"] == "1"
        assert client.get("/healthz").status_code == 200
        received = b""
        while part := slow.recv(4096):
            received += part
        assert received.startswith(b"HTTP/1.1 408 ")
        assert b"must arrive within 0.2 seconds" in received
        while server.traffic.under_way:
            time.sleep(0.001)
        assert ask(client, image=FILE)["model"] == "mre-digits"


def test_a_server_that_is_about_to_end_begins_nothing(small):
    server, address = small
    with httpx.Client(base_url=address) as client:
        assert client.get("/healthz").json() == {"status": "ok", "under_way": 0}
        server.traffic.ending = True
        assert refusal(client.post("/api/predict", json={"image": FILE}))[:2] == (503, "ending")


def test_a_client_that_goes_away_stops_the_work(client, server):
    with client.stream("POST", "/api/generate", json={"text": "Once", "length": 4096}) as response:
        assert next(response.iter_lines()).startswith("data: ")
    until = time.monotonic() + 10
    while server.traffic.under_way or server.worker.going:
        assert time.monotonic() < until
        time.sleep(0.001)
    stopped = 'raytraced_answers_total{model="gpt-mre",stop="length"}'
    before = client.get("/metrics").text.count(stopped)
    assert ask(client, image=FILE)["answers"]
    assert client.get("/metrics").text.count(stopped) == before


def test_a_fault_of_a_model_is_one_rows_own(client, server, monkeypatch, capsys):
    digits = next(one for one in server.models if one.name == "mre-digits")

    def fail(*_):
        raise RuntimeError("broken weights")

    with monkeypatch.context() as patch:
        patch.setattr(digits.model.head, "forward", fail)
        assert refusal(client.post("/api/predict", json={"image": FILE}))[:2] == (500, "internal")
        response = client.post("/api/stream", json={"image": FILE})
        assert response.text.startswith("event: error\n")
    assert "broken weights" in capsys.readouterr().err
    assert ask(client, image=FILE)["answers"]


def test_models_page_and_metrics(client, models):
    told = client.get("/api/models").json()["models"]
    assert [one["name"] for one in told] == [served.name for served in models]
    assert told[0]["image_shape"] == [1, 8, 8]
    assert told[-3]["context"] == 16
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "mre-digits" in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    ask(client, image=FILE, max_ms=100)
    text = client.get("/metrics").text
    for line in text.splitlines():
        assert line.startswith("# ") or float(line.rpartition(" ")[2]) >= 0
    assert 'raytraced_requests_total{path="/api/predict",status="200"}' in text
    assert 'raytraced_overshoot_seconds_bucket{le="+Inf"}' in text


# One schema for the check and for the document.

SCHEMAS = request_schemas(["one", "two"], Limits(batch=2, text=5))
SCALARS = (
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats(-1, 2) | st.sampled_from([1e300, 2**53, "one", "sample"])
    | st.sampled_from(["greedy", "calibrated", "abc", "abcdef"])
)  # fmt: skip
VALUES = st.recursive(SCALARS, lambda part: st.lists(part, max_size=3), max_leaves=6)
ENTRIES = [*sorted({name for schema in SCHEMAS.values() for name in schema["properties"]}), "other"]


@pytest.mark.parametrize("path", SCHEMAS)
def test_what_is_checked_is_what_is_documented(path):
    validator = jsonschema_rs.validator_for(SCHEMAS[path])

    def agrees(body):
        try:
            check(body, SCHEMAS[path])
            fits = True
        except RefusedError:
            fits = False
        assert fits == validator.is_valid(body), body

    good = {"text": "a", "seed": 1.0, "max_ms": 2} | (
        {"sure": 0.5, "select": "sample"} if path != "/api/generate" else {}
    )
    agrees(good)
    assert validator.is_valid(good)
    given(st.dictionaries(st.sampled_from(ENTRIES), VALUES, max_size=3) | VALUES)(agrees)()
    given(st.sampled_from(ENTRIES), VALUES)(lambda name, value: agrees({**good, name: value}))()
    for image in ("x", [[0, 255]], [[[1]], [[2]]], [[256]], [[]], [], [[1, "a"]], [[1, [2]]], [[[[1]]]]):
        agrees({"image": image})


def test_the_document_is_valid_and_names_every_path(client, server):
    document = client.get("/openapi.json").json()
    assert set(document["paths"]) == server.app.paths
    for name, schema in document["components"]["schemas"].items():
        jsonschema_rs.meta.validate(schema), name
    for path, schema in server.schemas.items():
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert document["components"]["schemas"][body.rpartition("/")[2]] == json.loads(json.dumps(schema))
    answers = client.post("/api/predict", json={"image": FILE, "trace": True}).json()
    answer = document["components"]["schemas"]["Answer"]
    for one in answers["answers"]:
        jsonschema_rs.validate(answer, one)
        assert set(one) <= set(answer["properties"])


def test_shipped_models_are_loaded_from_safetensors_alone(tmp_path):
    from raytraced.serve.models import serve_model

    (tmp_path / "evil.safetensors").write_bytes(b"\x80\x04\x95cposix\nsystem\n")
    with pytest.raises(raytraced.saving.DamagedFileError):
        serve_model(str(tmp_path / "evil.safetensors"))

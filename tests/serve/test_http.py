"""Answers, streams and texts over HTTP, and refusals, which are never a 5xx."""

import concurrent.futures
import copy
import dataclasses
import json
import socket
import time
from functools import partial
from pathlib import Path

import httpx
import jsonschema_rs
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import raytraced
from raytraced.cli.main import main
from raytraced.cli.serve import allowed_names
from raytraced.serve.app import Server
from raytraced.serve.front_page import render_page
from raytraced.serve.limits import Limits
from raytraced.serve.models import Served, serve_model
from raytraced.tasks.images.loading import load as load_data
from serve.conftest import in_base64, png, running, some_images

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
            printed = json.loads(capsys.readouterr().out)
            expected = found["label"], found["probability"], found["experts"]
            assert (printed["answer"], printed["probability"], printed["experts"]) == expected


def test_many_requests_at_once_give_what_each_gives_alone(client, address):
    images = [png(image) for image in some_images((1, 28, 28), 24)[:, 0].numpy()]
    bodies = [
        {"image": in_base64(image), "model": "mre-mnist", "confidence": 0.5 + n / 60} for n, image in enumerate(images)
    ]
    bodies += [{"images": [in_base64(one) for one in images[n : n + 3]], "model": "mre-mnist"} for n in range(8)]
    alone = [ask(client, **body) for body in bodies]
    with httpx.Client(base_url=address, timeout=30) as other, concurrent.futures.ThreadPoolExecutor(16) as pool:
        for _ in range(3):
            assert list(pool.map(lambda body: ask(other, **body), bodies)) == alone
    rows = [line for line in client.get("/metrics").text.splitlines() if line.startswith("raytraced_batch_rows_")]
    values = dict(line.split() for line in rows)
    assert float(values["raytraced_batch_rows_count"]) > float(values['raytraced_batch_rows_bucket{le="4.0"}'])


def test_pixels_and_files_give_the_same_answer(client):
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
    example = page[page.index('"answers": [') :].split("\n```")[0]
    image = load_data("mnist").test.images[0, 0].numpy()
    (answer,) = ask(client, image=in_base64(png(image)), model="mre-mnist", max_ms=600_000)["answers"]
    for name in ("label", "experts", "macs", "stop"):
        assert f'"{name}": {json.dumps(answer[name])}' in example
    assert f'"probability": {answer["probability"]:.6f}' in example


def test_the_reason_to_stop_is_stated(client):
    def stop(**options):
        (answer,) = ask(client, image=FILE, model="mre-digits", **options)["answers"]
        return answer["stop"], answer["experts"]

    whole = stop()
    assert whole[0] == "end"
    assert stop(max_experts=2) == ("budget", 2)
    assert stop(confidence=0) == ("confidence", 0)
    assert stop(confidence=1, max_experts=2) == ("budget", 2)
    assert stop(max_ms=600_000) == whole
    assert stop(max_ms=1e-6) == ("deadline", 0)
    assert stop(select="sample", seed=3) == stop(select="sample", seed=3)


def test_text_is_continued_as_raytraced_generate_does(client, files, capsys):
    for words in ({}, {"seed": 4, "temperature": 1.5, "top_p": 0.9, "max_experts": 1}):
        found = events(client, "generate", text="Once", model="gpt-mre", length=40, **words)
        options = [word for name, value in words.items() for word in (f"--{name}", str(value))]
        assert main(["generate", str(files / "gpt-mre.safetensors"), "Once", "--length", "40", "--json", *options]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert "".join(token["text"] for token in found) == printed["text"]
        assert [token["experts"] for token in found] == printed["experts"]
        assert [token.get("stop") for token in found] == [None] * 39 + ["length"]
    coldest = events(client, "generate", text="Once", length=8, temperature=5e-324)
    assert coldest == events(client, "generate", text="Once", length=8, temperature=0)
    (late,) = events(client, "generate", text="Once", max_ms=1e-6)
    assert late["stop"] == "deadline"
    assert len(events(client, "generate", text="", model="gpt-top-k", length=3)) == 3


def test_the_default_model_is_the_first_that_takes_the_input(client):
    assert ask(client, image=FILE)["model"] == "mre-digits"
    assert ask(client, text="a")["model"] == "gpt-mre"


def test_every_mistake_is_one_line(client):
    digits = {"model": "mre-digits"}
    many = [[[0]]] * 257
    wide = in_base64(png(np.zeros((4097, 4097), np.uint8)))
    grey = DIGIT.tolist()
    cases = [
        ("predict", {}, "value_error", "no input: must be exactly one of image, images, text"),
        (
            "predict",
            {"image": FILE, "text": "a"},
            "value_error",
            "image, text: must be exactly one of image, images, text",
        ),
        ("predict", {"image": FILE, "picture": 1}, "extra_forbidden", "picture: is not a field of this request"),
        (
            "predict",
            {"image": FILE, "max_experts": -1},
            "greater_than_equal",
            "max_experts=-1: must be greater than or equal to 0",
        ),
        (
            "predict",
            {"image": FILE, "max_experts": 10**400},
            "less_than_equal",
            "must be less than or equal to 1000000",
        ),
        ("predict", {"image": FILE, "max_experts": 1.5}, "int_type", "max_experts=1.5: must be a valid integer"),
        ("predict", {"image": FILE, "seed": "1"}, "int_type", "seed=1: must be a valid integer"),
        (
            "predict",
            {"image": FILE, "confidence": True},
            "float_type",
            "confidence=True: must be a valid number or 'calibrated'",
        ),
        (
            "predict",
            {"image": FILE, "confidence": "certain"},
            "float_type",
            "confidence=certain: must be a valid number or 'calibrated'",
        ),
        (
            "predict",
            {"image": FILE, "confidence": 1.5},
            "less_than_equal",
            "confidence=1.5: must be less than or equal to 1 or 'calibrated'",
        ),
        ("predict", {"image": FILE, "max_ms": 0}, "greater_than", "max_ms=0: must be greater than 0"),
        ("predict", {"image": FILE, "select": "best"}, "literal_error", "select=best: must be '"),
        ("predict", {"image": FILE, "model": "gpt-mre"}, "input", "model=gpt-mre: takes text, not images"),
        ("predict", {"text": "a", "model": "mre-mnist"}, "input", "model=mre-mnist: takes images, not text"),
        ("predict", {"images": many}, "too_long", "images=[["),
        ("predict", {"images": [1]}, "string_type", "images[0]=1: must be a valid string or a valid list"),
        ("predict", {"image": wide} | digits, "pixels", "images: have more than 16,777,216 pixels in all"),
        ("predict", {"image": "%%"} | digits, "image", "image: must be an image file in base64"),
        ("predict", {"image": "é"} | digits, "image", "image: must be an image file in base64"),
        ("predict", {"image": "\ud800"} | digits, "image", "image: must be an image file in base64"),
        (
            "predict",
            {"image": in_base64(b"BM" + bytes(60))} | digits,
            "image",
            "image: must be a PNG, JPEG, WEBP or GIF file",
        ),
        ("predict", {"images": [FILE, FILE[:60]]} | digits, "image", "images[1]: "),
        ("predict", {"image": [[1, 2], [3]]} | digits, "image", "image: has shape (2,), must be (1, 8, 8)"),
        ("predict", {"image": [[1, [2]]]} | digits, "image", "image: has shape (1, 2), must be"),
        ("predict", {"image": [[[[[[1]]]]]]} | digits, "image", "image: has shape (1, 1, 1, 1), must be"),
        ("predict", {"image": []} | digits, "image", "image: has shape (0,), must be"),
        (
            "predict",
            {"image": [[256, *row[1:]] for row in grey]} | digits,
            "image",
            "has the value 256, must be whole numbers in 0 … 255",
        ),
        (
            "predict",
            {"image": [[True, *row[1:]] for row in grey]} | digits,
            "image",
            "has the value True, must be whole numbers",
        ),
        (
            "predict",
            {"image": [["1", *row[1:]] for row in grey]} | digits,
            "image",
            "has the value 1, must be whole numbers",
        ),
        (
            "predict",
            {"image": grey, "model": "top-k", "max_experts": 1},
            "option",
            "max_experts=1: has no effect on top-k",
        ),
        ("predict", {"image": grey, "model": "multi-exit", "select": "sample"}, "option", "must be greedy"),
        ("stream", {"image": grey, "model": "multi-exit", "select": "sample"}, "option", "must be greedy"),
        ("predict", {"image": grey, "model": "top-k", "confidence": "calibrated"}, "option", "top-k is not calibrated"),
        (
            "predict",
            {"text": "a", "model": "gpt-top-k", "confidence": 0.5},
            "option",
            "gpt-top-k, which has one answer only",
        ),
        (
            "predict",
            {"text": "a", "model": "gpt-top-k", "confidence": 0.0},
            "option",
            "confidence=0.0: has no effect on gpt-top-k",
        ),
        ("predict", {"text": "x" * 17}, "length", "text: has 17 bytes; the context of gpt-mre is 16"),
        ("predict", {"text": "x" * 65_537}, "string_too_long", "must be"),
        ("predict", {"text": "\ud800"}, "string_unicode", "must be a valid string"),
        ("predict", {"\ud800": 1, "text": "a"}, "string_unicode", "must be a valid string"),
        ("stream", {"images": [FILE]}, "extra_forbidden", "images: is not a field"),
        ("stream", {"text": "a", "model": "gpt-top-k"}, "option", "stream=True: has no effect on gpt-top-k"),
        ("generate", {"model": "gpt-mre"}, "missing", "text: is missing"),
        (
            "generate",
            {"text": "a", "length": 4097},
            "less_than_equal",
            "length=4097: must be less than or equal to 4096",
        ),
        ("generate", {"text": "a", "top_p": 0}, "greater_than", "top_p=0: must be greater than 0"),
        ("generate", {"text": "a", "model": "mre-mnist"}, "input", "model=mre-mnist: takes images"),
        (
            "generate",
            {"text": "a", "model": "gpt-top-k", "max_experts": 1},
            "option",
            "max_experts=1: has no effect on gpt-top-k",
        ),
    ]
    for path, body, rule, words in cases:
        status, found, message = refusal(client.post(f"/api/{path}", content=json.dumps(body), headers=JSON))
        assert (status, found) == (422, rule), message
        assert words in message
        assert len(message) < 300
        assert "\n" not in message
    unknown = client.post("/api/predict", json={"image": FILE, "model": "mre-digit"})
    assert refusal(unknown) == (404, "model", "model=mre-digit: there is no such model; did you mean mre-digits?")


JSON = {"content-type": "application/json"}
RAW = [
    b"",
    b"{",
    b"[" * 100_000,
    b"\xff\xfe",
    b'{"confidence": NaN}',
    b'{"confidence": NaN, "text": "a"}',
    b'{"confidence": 1e999, "text": "a"}',
    b"9" * 5000,
    b"null",
]


@pytest.mark.parametrize("body", RAW, ids=range(len(RAW)))
def test_bodies_that_are_not_requests_are_refused(client, body):
    status, _, message = refusal(client.post("/api/predict", content=body, headers=JSON))
    assert status == 422
    assert "\n" not in message
    assert len(message) < 200


def test_paths_methods_and_content_types(client):
    assert refusal(client.get("/etc/passwd")) == (
        404, "path", "/etc/passwd: there is no such path; /openapi.json lists all",
    )  # fmt: skip
    assert refusal(client.get("/../pyproject.toml"))[:2] == (404, "path")
    assert len(refusal(client.get(f"/{'x' * 5000}"))[2]) < 200
    assert refusal(client.get("/api/predict")) == (405, "method", "GET /api/predict: must be POST")
    text = client.post("/api/predict", content=b"{}", headers={"content-type": "text/plain"})
    assert refusal(text)[:2] == (415, "content_type")
    assert refusal(client.post("/api/predict", content=b" " * 2_000_001, headers=JSON))[:2] == (413, "body")
    pieces = client.post("/api/predict", content=(b" " * 100_000 for _ in range(30)), headers=JSON)
    assert refusal(pieces)[:2] == (413, "body")  # also without a stated length


def test_only_its_own_names_and_its_own_page(client, address):
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


def test_hosts_of_a_server_for_the_network():
    names = allowed_names("0.0.0.0", ["Lab.example", "*.lab.example"])
    assert {"127.0.0.1", "[::1]", socket.gethostname(), "Lab.example"} <= set(names)
    with pytest.raises(ValueError, match=r"hosts=a\*b: must be a name"):
        allowed_names("127.0.0.1", ["a*b"])


def test_an_api_key_opens_everything_but_health(models):
    for address in running(Server(models[:1], Limits(decoders=1), api_key=b"open sesame")):
        with httpx.Client(base_url=address) as client:
            for path in ("/healthz", "/readyz"):
                assert client.get(path).status_code == 200
            for path in ("/", "/metrics", "/api/models", "/openapi.json"):
                assert refusal(client.get(path))[:2] == (401, "api_key")
            for bad in (
                "Bearer open",
                "Bearer open sesame2",
                "Basic open sesame",
                "Bearer \xff",
                "open sesame",
                "Bearer",
            ):
                refused = client.post(
                    "/api/predict", json={"image": FILE}, headers={"authorization": bad.encode("latin-1")}
                )
                assert refusal(refused)[:2] == (401, "api_key")
                assert refused.headers["www-authenticate"] == "Bearer"
            client.headers["authorization"] = "Bearer open sesame"
            assert ask(client, image=FILE)["model"] == "mre-digits"


def test_image_files_arrive_in_a_form_or_in_base64_and_in_four_formats(client):
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        content = png(DIGIT.repeat(4, 0).repeat(4, 1), kind)
        (answer,) = ask(client, image=in_base64(content), model="mre-digits", confidence=0.9)["answers"]
        form = {"model": "mre-digits", "confidence": "0.9"}
        response = client.post("/api/upload", data=form, files=[("files", ("digit", content)), ("files", content)])
        assert response.status_code == 200, response.text
        assert response.json() == {"model": "mre-digits", "answers": [answer, answer]}
    for form, words in (
        ({"model": "mre-digits", "max_experts": "x"}, "max_experts=x: must be a valid integer"),
        ({"picture": "1"}, "picture: is not a field"),
    ):
        status, _, message = refusal(client.post("/api/upload", data=form, files={"files": png(DIGIT)}))
        assert (status, words in message) == (422, True), message
    assert refusal(client.post("/api/upload", data={"model": "mre-digits"}, files={"other": b""}))[0] == 422
    bad = client.post("/api/upload", content=b"--x\r\n", headers={"content-type": "multipart/form-data; boundary=y"})
    assert refusal(bad)[0] == 422
    bad = client.post("/api/upload", content=b"", headers={"content-type": "multipart/form-data"})
    assert refusal(bad)[0] == 422
    assert refusal(client.post("/api/upload", json={}))[:2] == (415, "content_type")


def test_work_in_progress_is_limited(models):
    server = Server(models, Limits(in_progress=1, decoders=1))
    for address in running(server):
        with httpx.Client(base_url=address) as client:
            body = {"text": "Once", "length": 4096}
            with client.stream("POST", "/api/generate", json=body) as response:
                lines = response.iter_lines()  # held: the stream closes with it
                next(lines)
                full = httpx.post(f"{address}/api/predict", json={"image": FILE})
                assert refusal(full)[:2] == (429, "in_progress")
                assert full.headers["retry-after"] == "1"
                assert httpx.get(f"{address}/healthz").status_code == 200
            while server.traffic.in_progress:
                time.sleep(0.001)
            assert ask(client, image=FILE)["model"] == "mre-digits"


def test_a_server_that_shuts_down_is_alive_but_not_ready(small):
    server, address = small
    with httpx.Client(base_url=address) as client:
        assert client.get("/healthz").json() == {"status": "alive", "in_progress": 0}
        assert client.get("/readyz").json() == {"status": "ready"}
        server.traffic.shutting_down = True
        assert refusal(client.post("/api/predict", json={"image": FILE}))[:2] == (503, "shutting_down")
        assert refusal(client.get("/readyz"))[:2] == (503, "shutting_down")
        assert client.get("/healthz").status_code == 200


def test_a_client_that_goes_away_stops_the_work(client, server):
    with client.stream("POST", "/api/generate", json={"text": "Once", "length": 4096}) as response:
        assert next(response.iter_lines()).startswith("data: ")
    until = time.monotonic() + 10
    while server.traffic.in_progress or server.engine.worker.running:
        assert time.monotonic() < until
        time.sleep(0.001)
    stopped = 'raytraced_answers_total{model="gpt-mre",stop="length"}'
    before = client.get("/metrics").text.count(stopped)
    assert ask(client, image=FILE)["answers"]
    assert client.get("/metrics").text.count(stopped) == before


def test_an_error_of_a_model_ends_its_own_request_only(client, server, monkeypatch, capsys):
    digits = next(one for one in server.models if one.name == "mre-digits")

    def fail(*_):
        raise RuntimeError("broken weights")

    with monkeypatch.context() as patch:
        patch.setattr(digits.model.head, "forward", fail)
        assert refusal(client.post("/api/predict", json={"image": FILE}))[:2] == (500, "internal")
        assert refusal(client.post("/api/stream", json={"image": FILE}))[:2] == (500, "internal")
    assert "broken weights" in capsys.readouterr().err
    assert ask(client, image=FILE)["answers"]


def test_models_page_and_metrics(client, models):
    found = client.get("/api/models").json()["models"]
    assert [one["name"] for one in found] == [served.name for served in models]
    assert found[0]["image_shape"] == [1, 8, 8]
    assert found[-3]["context"] == 16
    ask(client, image=FILE, max_ms=100)
    families = {one.name: one for one in text_string_to_metric_families(client.get("/metrics").text)}
    labels = [one.labels for one in families["raytraced_requests"].samples]
    assert {"path": "/api/predict", "status": "200"} in labels
    assert families["raytraced_late_seconds"].samples
    events(client, "generate", text="Once", length=2)
    first_token = "raytraced_first_token_seconds_count"
    before, after = (
        float(
            next(line for line in client.get("/metrics").text.splitlines() if line.startswith(first_token)).split()[1]
        )
        for _ in (0, events(client, "generate", text="Once", length=2))
    )
    assert after >= before > 0


def test_the_page_is_built_once_and_sent_from_a_compressed_file(models, monkeypatch):
    server = Server([one for one in models if one.name == "mre-digits"], Limits(decoders=1))
    builds = []
    build = server.page.build

    async def count_builds():
        builds.append(1)
        return await build()

    monkeypatch.setattr(server.page, "build", count_builds)
    for address in running(server):
        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            pages = list(pool.map(partial(httpx.get, timeout=120), [address] * 6))
        assert len(builds) == 1
        assert {page.text for page in pages} == {pages[0].text}
        assert "mre-digits" in pages[0].text
        assert pages[0].headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in pages[0].headers["content-security-policy"]
        assert pages[0].headers["content-encoding"] == "gzip"
        assert int(pages[0].headers["content-length"]) < len(pages[0].content)
        plain = httpx.get(address, headers={"accept-encoding": "identity"})
        assert "content-encoding" not in plain.headers
        assert plain.text == pages[0].text
        folder = server.page.folder
    assert not folder.exists()


def test_the_page_never_opens_a_path_of_a_model_file(tmp_path):
    """Issue: a card whose data was a path put the machine's files into the page, and the path into /api/models."""
    private = tmp_path / "private"
    for label in "0123456789":
        (private / label).mkdir(parents=True)
        for number in range(5):
            (private / label / f"{number}.png").write_bytes(png(DIGIT))
    model = raytraced.load("mre-digits")
    model.card = dataclasses.replace(model.card, data=str(private))  # saving.py refuses such files, too
    served = Served("hostile", model, "mre-digits")
    page = render_page([served])
    assert '"gallery":' not in page
    assert str(private) not in page
    assert served.description()["data"] is None


def test_a_model_with_nan_weights_is_refused_in_valid_json(tmp_path, models):
    """Issue: such a model was served with status 200 and bare NaN."""
    broken = []
    for name in ("mre-digits", "gpt-mre"):
        served = next(one for one in models if one.name == name)
        model = copy.deepcopy(served.model)
        next(iter(model.parameters())).data.fill_(float("nan"))
        broken.append(dataclasses.replace(served, model=model))
    for address in running(Server(broken, Limits(decoders=1))):
        with httpx.Client(base_url=address) as client:
            for path, body in (
                ("predict", {"image": FILE}),
                ("predict", {"image": FILE, "confidence": 0.9}),
                ("stream", {"image": FILE}),
                ("predict", {"text": "a"}),
                ("generate", {"text": "a", "temperature": 0}),
            ):
                status, rule, message = refusal(client.post(f"/api/{path}", json=body))
                assert (status, rule) == (500, "not_finite")
                assert "its answer is not finite" in message


def test_the_document_is_valid_and_describes_the_answers(client, models):
    document = client.get("/openapi.json").json()
    posts = {path for path, operations in document["paths"].items() if "post" in operations}
    assert {"/api/predict", "/api/upload", "/api/stream", "/api/generate"} <= posts
    names = document["components"]["schemas"]["PredictRequest"]["properties"]["model"]["anyOf"][0]["enum"]
    assert names == [served.name for served in models]
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        jsonschema_rs.meta.validate(schema)
    found = client.post("/api/predict", json={"image": FILE, "trace": True}).json()
    validator = jsonschema_rs.validator_for(
        {"$ref": "#/components/schemas/AnswerList", "components": {"schemas": schemas}}
    )
    validator.validate(found)
    assert set(found["answers"][0]) <= set(schemas["TracedAnswer"]["properties"])
    refused = client.post("/api/predict", json={}).json()
    jsonschema_rs.validate({"$ref": "#/components/schemas/RefusalBody", "components": {"schemas": schemas}}, refused)


def test_shipped_models_are_loaded_from_safetensors_alone(tmp_path):
    (tmp_path / "evil.safetensors").write_bytes(b"\x80\x04\x95cposix\nsystem\n")
    with pytest.raises(raytraced.io.saving.DamagedFileError):
        serve_model(str(tmp_path / "evil.safetensors"))

"""`raytraced serve` as a process: mistakes in one line, and a shutdown that finishes requests in progress."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import httpx
import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

import raytraced
from experiments.server.process import ENVIRONMENT, ServerProcess
from raytraced.cli.main import main
from raytraced.cli.serve import LAST_SECONDS
from raytraced.serve.limits import Limits
from serve.conftest import SHIPPED, generated

LENGTH = 300


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_finishes_requests_in_progress_and_refuses_new_ones(number, files):
    with ServerProcess(str(files / "gpt-mre.safetensors")) as server:
        tokens = tokens_while_it_shuts_down(server, number)
        assert len(tokens) == LENGTH
        assert '"stop": "length"' in tokens[-1]
        assert server.process.wait(30) == 0


def refuses(address: str) -> bool:
    """Whether new requests are refused."""
    try:
        return httpx.get(f"{address}/readyz").status_code == 503
    except httpx.TransportError:
        return True


def tokens_while_it_shuts_down(server: ServerProcess, number: int) -> list[str]:
    tokens, begun = [], threading.Event()

    def generate():
        body = {"text": "Once", "length": LENGTH}
        with httpx.stream("POST", f"{server.address}/api/generate", json=body, timeout=60) as response:
            for line in response.iter_lines():
                if line:
                    tokens.append(line)
                    begun.set()

    request = threading.Thread(target=generate, daemon=True)
    request.start()
    assert begun.wait(60)
    server.process.send_signal(number)
    refused = False
    while request.is_alive() and not refused:  # until the signal has arrived
        refused = refuses(server.address)
    assert refused, "the text ended before the signal arrived"
    request.join(60)
    return tokens


def test_sigterm_finishes_all_texts_of_a_shared_batch(files):
    """A completion of several texts, one that is streamed and a text of our own path have all of their tokens."""
    source, num = files / "gpt-mre.safetensors", 400
    options = {"model": "gpt-mre", "max_tokens": num}
    with (
        ServerProcess(str(source)) as server,
        openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as client,
        ThreadPoolExecutor() as pool,
    ):
        whole = pool.submit(client.completions.create, **options, prompt=["Once", "upon"], n=2, seed=3)
        stream = client.completions.create(**options, prompt="Once", n=2, seed=9, stream=True)
        first = next(stream)
        streamed = pool.submit(list, stream)
        body = {"text": "Once", "length": num, "temperature": 1}
        ours = pool.submit(httpx.post, f"{server.address}/api/generate", json=body, timeout=60)
        tasks = (whole, streamed, ours)
        while num_in_progress(server.address) < 3 or not num_large_calls(server.address):
            assert not any(task.done() for task in tasks), "the texts were not generated together"
        server.process.terminate()
        while not refuses(server.address):
            assert not any(task.done() for task in tasks), "a text ended before the signal arrived"
        model = raytraced.load(source)
        prompts = ((b"Once", 3), (b"Once", 4), (b"upon", 3), (b"upon", 4))
        expected = [generated(model, prompt, num, seed=seed).decode(errors="replace") for prompt, seed in prompts]
        assert [choice.text for choice in whole.result(60).choices] == expected
        texts, reasons = ["", ""], [None, None]
        for chunk in [first, *streamed.result(60)]:
            (choice,) = chunk.choices
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason
        assert texts == [generated(model, b"Once", num, seed=seed).decode(errors="replace") for seed in (9, 10)]
        assert reasons == ["length", "length"]
        events = ours.result(60).text.strip().split("\n\n")
        assert len(events) == num
        assert '"stop": "length"' in events[-1]
        assert server.process.wait(30) == 0


def num_in_progress(address: str) -> int:
    return httpx.get(f"{address}/healthz").json()["in_progress"]


def num_large_calls(address: str) -> float:
    """How many calls of the model have computed more than four rows."""
    families = text_string_to_metric_families(httpx.get(f"{address}/metrics").text)
    rows = next(one for one in families if one.name == "raytraced_batch_rows")
    counts = {sample.labels["le"]: sample.value for sample in rows.samples if sample.name.endswith("_bucket")}
    return counts["+Inf"] - counts["4.0"]


@contextmanager
def a_long_text(address: str) -> Iterator[None]:
    """A request that is in progress."""
    body = {"text": "Once", "length": 4096}
    with httpx.stream("POST", f"{address}/api/generate", json=body, timeout=60) as stream:
        chunks = stream.iter_bytes()  # held: the stream closes with it
        next(chunks)
        yield


def test_a_second_ctrl_c_ends_it_at_once_in_one_line_and_its_decoders_with_it(files):
    """A program that reads a server's stdout to its end waits for no other process."""
    with ServerProcess(str(files / "gpt-mre.safetensors")) as server:
        with a_long_text(server.address):
            decoders = psutil.Process(server.process.pid).children()
            assert len(decoders) == Limits().decoders
            os.kill(decoders[0].pid, signal.SIGSTOP)  # it cannot see that the socket closes
            server.process.send_signal(signal.SIGINT)
            while not refuses(server.address):
                pass  # until the first has arrived
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(60) == 130
        assert server.log() == "raytraced: stopped at once; requests in progress were cut off\n"
        assert server.process.stdout.read() == ""
        os.kill(decoders[0].pid, signal.SIGCONT)
        gone, _ = psutil.wait_procs(decoders, timeout=30)
        assert len(gone) == len(decoders)


@pytest.mark.slow
def test_sigterm_ends_it_within_thirty_seconds_whatever_is_in_progress(files):
    with ServerProcess(str(files / "gpt-mre.safetensors")) as server, ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(a_long_text(server.address))
        began = time.monotonic()
        server.process.terminate()
        server.process.wait(LAST_SECONDS + 2)
        assert time.monotonic() - began > 20, "all texts were finished: nothing was tested"


@pytest.fixture
def decoder():
    """A function that starts a decoder process whose socket stays open."""
    with ExitStack() as stack:

        def start(seconds: float, parent: int) -> tuple[socket.socket, subprocess.Popen]:
            ours, other = map(stack.enter_context, socket.socketpair())
            words = [str(word) for word in (other.fileno(), seconds, parent)]
            command = [sys.executable, "-m", "raytraced.serve.decode_worker", *words]
            process = stack.enter_context(subprocess.Popen(command, pass_fds=[other.fileno()], env=ENVIRONMENT))
            stack.callback(process.kill)
            return ours, process

        yield start


def test_an_idle_decoder_ends_when_its_parent_has(decoder):
    _, process = decoder(seconds=9, parent=os.getppid())  # not the process that started it
    assert process.wait(30) == 0


def test_a_decoder_ends_a_message_that_takes_too_long(decoder):
    ours, process = decoder(seconds=0.2, parent=os.getpid())
    ours.sendall(b"\0")  # the beginning of a message
    assert process.wait(30) == -signal.SIGALRM


def test_mistakes_are_one_line(capsys, files, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "same.safetensors").write_bytes((files / "top-k.safetensors").read_bytes())
    (tmp_path / "bad.safetensors").write_bytes(b"no model")
    (tmp_path / "short").write_text("a b\n")
    raytraced.save(raytraced.build("top-k", image_shape=(1, 8, 8), num_classes=3), tmp_path / "bare.safetensors")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        cases = {
            f"127.0.0.1:{port}: address already in use; choose another with --host or --port": [
                "mre-digits",
                "--port",
                port,
            ],
            "port=70000: must lie in 0 … 65535": ["--port", "70000"],
            "port=x: must be a whole number": ["--port", "x"],
            "threads=0: must lie in 1 … 1024": ["--threads", "0"],
            "threads=1000000: must lie in 1 … 1024": ["--threads", "1000000"],
            "max_body=0: must be at least 1": ["--max-body", "0"],
            "hosts=a*: must be a name": ["mre-digits", "--port", "0", "--hosts", "a*"],
            "missing: cannot be read (no such file or directory)": ["--api-key-file", "missing"],
            "must hold one key of at least 8 printable ASCII characters": ["--api-key-file", str(tmp_path / "short")],
            "host.invalid:0: ": ["mre-digits", "--host", "host.invalid", "--port", "0"],
            "mre-digit": ["mre-digit", "--port", "0"],
            "is not a safetensors file": [str(tmp_path / "bad.safetensors"), "--port", "0"],
            "its card states no task": [str(tmp_path / "bare.safetensors"), "--port", "0"],
            "same: two models have this name": [*map(str, tmp_path.glob("*/same.safetensors")), "--port", "0"],
            "--prot: no such option; did you mean --port?": ["--prot", "1"],
        }
        for expected, words in cases.items():
            assert main(["serve", *words]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith("raytraced: ")
            assert expected in line


def test_without_the_extra_one_line_says_how_to_get_it(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", "mre-digits"]) == 2
    assert (
        capsys.readouterr().err
        == "raytraced: serve: needs uvicorn; install it with pip install '.[serve]' in a clone of raytraced\n"
    )


def test_all_shipped_models_are_served_where_none_is_named(monkeypatch):
    from raytraced.models.registry import SHIPPED as ALL_SHIPPED

    assert set(SHIPPED) < set(ALL_SHIPPED)
    served = []
    monkeypatch.setattr("raytraced.cli.serve.run", lambda _, server, __: served.extend(server.models))
    assert main(["serve", "--port", "0"]) == 0
    assert [one.name for one in served] == list(ALL_SHIPPED)


def test_a_run_folder_goes_by_its_name(tmp_path, files, monkeypatch):
    (tmp_path / "my-run").mkdir()
    (tmp_path / "my-run" / "model.safetensors").write_bytes((files / "top-k.safetensors").read_bytes())
    served = []
    monkeypatch.setattr("raytraced.cli.serve.run", lambda _, server, __: served.extend(server.models))
    assert main(["serve", "my-run", "--runs-dir", str(tmp_path), "--port", "0"]) == 0
    assert main(["serve", str(tmp_path / "my-run" / "model.safetensors"), "--port", "0"]) == 0
    assert [one.name for one in served] == ["my-run", "my-run"]

"""`raytraced serve` as a process: mistakes in one line, and a shutdown that finishes requests in progress."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

import raytraced
from raytraced.cli.main import main
from serve.conftest import SHIPPED

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(raytraced.__file__).parent.parent)}


def start(*words: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "raytraced", "serve", *words, "--port", "0"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)


def address_of(process: subprocess.Popen) -> str:
    """The address that it prints once it listens."""
    line = process.stdout.readline()
    assert "http://" in line, process.stderr.read()
    return "http://" + line.partition("http://")[2].partition("/")[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_finishes_requests_in_progress_and_refuses_new_ones(number, files):
    process = start(str(files / "gpt-mre.safetensors"))
    try:
        tokens = tokens_while_it_shuts_down(process, number)
        assert len(tokens) == LENGTH
        assert '"stop": "length"' in tokens[-1]
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


LENGTH = 300


def refuses(address: str) -> bool:
    """Whether new requests are refused."""
    try:
        return httpx.get(f"{address}/readyz").status_code == 503
    except httpx.TransportError:
        return True


def tokens_while_it_shuts_down(process: subprocess.Popen, number: int) -> list[str]:
    address, tokens, begun = address_of(process), [], threading.Event()

    def generate():
        body = {"text": "Once", "length": LENGTH}
        with httpx.stream("POST", f"{address}/api/generate", json=body, timeout=60) as response:
            for line in response.iter_lines():
                if line:
                    tokens.append(line)
                    begun.set()

    request = threading.Thread(target=generate)
    request.start()
    assert begun.wait(60)
    process.send_signal(number)
    refused = False
    while request.is_alive() and not refused:  # until the signal has arrived
        refused = refuses(address)
    assert refused, "the text ended before the signal arrived"
    request.join(60)
    return tokens


def test_a_second_ctrl_c_ends_it_at_once_in_one_line(files):
    process = start(str(files / "gpt-mre.safetensors"))
    try:
        address = address_of(process)
        with httpx.stream(
            "POST", f"{address}/api/generate", json={"text": "Once", "length": 4000}, timeout=60
        ) as stream:
            chunks = stream.iter_bytes()  # held: the stream closes with it
            next(chunks)
            process.send_signal(signal.SIGINT)
            while not refuses(address):
                pass  # until the first has arrived
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        assert process.stderr.read() == "raytraced: stopped at once; requests in progress were cut off\n"
    finally:
        process.kill()
        process.communicate()


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
        capsys.readouterr().err == "raytraced: serve: needs uvicorn; install it with pip install 'raytraced[serve]'\n"
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

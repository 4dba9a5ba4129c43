"""A process that is killed while it reads experts leaves nothing behind, and the next call works."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import raytraced
from raytraced.store.layout import open_store

SECONDS = 120  # for what takes a few: only a hang is longer
KILLS = 5
SIZES = {"dim": 128, "hidden": 1024, "depth": 4, "num_heads": 4, "context": 64, "num_experts": 8}


def generate(folder: Path, *words: str) -> subprocess.Popen:
    """`raytraced generate` of the store in a folder, with three experts in memory and all its own files in that folder."""
    own = {name: str(folder / "own") for name in ("TMPDIR", "HOME", "RAYTRACED_HOME", "XDG_CACHE_HOME")}
    path = folder / "store.safetensors"
    memory = str(3 * open_store(path).run_bytes)
    command = [sys.executable, "-m", "raytraced", "generate", str(path), "To be", "--memory", memory, "--device", "cpu"]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([*command, *words], cwd=folder, env=os.environ | own | {"OMP_NUM_THREADS": "1"}, **streams)


def num_read(process: subprocess.Popen) -> int:
    """How many bytes the process has read so far."""
    lines = Path(f"/proc/{process.pid}/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def open_files(process: subprocess.Popen) -> dict[str, str]:
    """What the descriptors of a process lead to, by number."""
    found = {}
    for path in Path(f"/proc/{process.pid}/fd").iterdir():
        try:
            found[path.name] = str(path.readlink())
        except FileNotFoundError:  # closed meanwhile
            continue
    return found


def wait_for_reads(process: subprocess.Popen, path: Path, num_bytes: int) -> None:
    """Wait until the process has the store open, has read so many bytes since, and goes on reading."""
    deadline, start = time.monotonic() + SECONDS, None
    while True:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        before = num_read(process)
        time.sleep(0.002)
        if str(path) not in open_files(process).values():
            start = None  # its header is read, and the file closed, before the model is built
        elif start is None:
            start = before
        elif start + num_bytes < before < num_read(process):
            return


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="reads /proc")
def test_a_kill_while_experts_are_read_leaves_nothing_behind_and_the_next_call_works(tmp_path):
    raytraced.save(raytraced.build("gpt-mre", **SIZES), tmp_path / "store.safetensors", store=True)
    path, own = tmp_path / "store.safetensors", tmp_path / "own"
    own.mkdir()
    content, expert = path.read_bytes(), open_store(path).run_bytes

    def answer() -> dict:
        process = generate(tmp_path, "--length", "20", "--json")
        out, error = process.communicate(timeout=SECONDS)
        assert (process.returncode, error) == (0, b"")
        return json.loads(out)

    expected = answer()
    kept = sorted(tmp_path.rglob("*"))  # with an empty folder that PyTorch makes
    assert [each for each in kept if each.is_file()] == [path]
    source = random.Random(0)
    for _ in range(KILLS):
        with generate(tmp_path, "--length", "1000000") as process:
            wait_for_reads(process, path, source.randrange(40) * expert)
            children = psutil.Process(process.pid).children(recursive=True)
            # Memory that outlives a process has a name; of files, it has those that it reads open.
            shared = [line for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines() if "/dev/shm" in line]
            written = [file for file in open_files(process).values() if file.startswith(str(tmp_path))]
            process.kill()
            process.communicate(timeout=SECONDS)
        assert process.returncode == -signal.SIGKILL
        assert (children, shared, set(written)) == ([], [], {str(path)})
        assert sorted(tmp_path.rglob("*")) == kept
        assert path.read_bytes() == content
        assert answer() == expected

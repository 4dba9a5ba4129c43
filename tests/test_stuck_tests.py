"""A test that waits without end fails, the others run on, and no process of a test outlives the tests."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forked import with_parent

STUCK = """
import ctypes, threading
import pytest

@pytest.mark.timeout(1)
def test_waits_in_python():
    threading.Event().wait()

@pytest.mark.timeout(1)
def test_waits_in_compiled_code_and_lets_no_other_thread_run():
    lock = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.PyDLL(None).pthread_mutex_lock(lock)

@pytest.fixture
def endless():
    yield
    threading.Event().wait()

@pytest.mark.timeout(1)
def test_fails_and_its_fixture_waits(endless):
    assert False

@pytest.mark.parametrize("number", range(5))
def test_passes(number):
    pass
"""


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_process_ends_with_the_one_that_started_it():
    program = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:]).pid, flush=True); input()"
    child = with_parent([sys.executable, "-c", "import time; time.sleep(100)"])
    with subprocess.Popen(
        [sys.executable, "-c", program, *child], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        pid = int(parent.stdout.readline())
        while (
            "sleep" not in Path(f"/proc/{pid}/cmdline").read_text()
            or "prctl" in Path(f"/proc/{pid}/cmdline").read_text()
        ):
            time.sleep(0.01)  # until it is the command itself
        os.kill(parent.pid, signal.SIGKILL)
    until = time.monotonic() + 30
    while is_alive(pid):
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.slow
def test_tests_that_wait_without_end_fail_and_the_others_pass(tmp_path):
    tests = Path(__file__).parent
    (tmp_path / "test_stuck.py").write_text(STUCK)
    (tmp_path / "conftest.py").write_text(
        (tests / "conftest.py").read_text().replace("GRACE_SECONDS = 60", "GRACE_SECONDS = 1")
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 60\ntimeout_method = signal\nmarkers =\n  slow\n  data\n")
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", "-p", "no:cacheprovider", "-rfE"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 1, ended.stdout
    assert "5 passed" in ended.stdout
    for name in (
        "waits_in_python",
        "waits_in_compiled_code_and_lets_no_other_thread_run",
        "fails_and_its_fixture_waits",
    ):
        assert f"FAILED test_stuck.py::test_{name}" in ended.stdout
    assert "in test_waits_in_compiled_code" in ended.stderr  # where it waited

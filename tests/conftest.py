"""One thread and derandomised examples: a failure here is a failure everywhere. And no test can wait without end."""

import faulthandler
import gc
import os

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("project", deadline=None, derandomize=True, max_examples=30)
hypothesis.settings.load_profile("project")
torch.set_num_threads(1)
gc.disable()  # until all tests are imported

SLOW_SECONDS = 1800  # for a test that is marked slow or data; for the others `timeout` in pyproject.toml
GRACE_SECONDS = 60  # after which a test that its time limit cannot interrupt ends the process
stderr = pytest.StashKey[int]()


def pytest_configure(config):
    config.stash[stderr] = os.dup(2)  # not captured yet


def pytest_collection_modifyitems(items):
    for item in items:
        is_slow = item.get_closest_marker("slow") or item.get_closest_marker("data")
        if is_slow and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_SECONDS))


def end_if_stuck(item):
    """pytest-timeout interrupts Python code once, but no deadlock in compiled code and no fixture after that: end the process.

    pytest-xdist then reports the test as failed, and continues with the others in a new process.
    """
    marker = item.get_closest_marker("timeout")
    seconds = marker.args[0] if marker else item.config.getoption("timeout") or item.config.getini("timeout")
    faulthandler.dump_traceback_later(float(seconds) + GRACE_SECONDS, exit=True, file=item.config.stash[stderr])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item):
    return (yield from end_if_stuck(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item):
    return (yield from end_if_stuck(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item):
    return (yield from end_if_stuck(item))


def pytest_collection_finish():
    """What was imported stays: no collection of garbage need look through it, then or later."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _no_waiting_for_the_disk():
    """No test cuts the power, so none need wait until a file would survive that; processes of their own wait as ever."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # which refuses what is no open file, too
        yield


@pytest.fixture(autouse=True, scope="session")
def real_pictures():
    """No run in this process draws its pictures, which takes ten times as long as the run of a test; the function that would."""
    from raytraced.training import callbacks

    draw_pictures = callbacks.draw_pictures
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(callbacks, "draw_pictures", lambda *_: None)
        yield draw_pictures


@pytest.fixture
def pictures(real_pictures, monkeypatch):
    """The runs of this test draw their pictures."""
    monkeypatch.setattr("raytraced.training.callbacks.draw_pictures", real_pictures)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)

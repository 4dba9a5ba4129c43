"""A claim has one owner; a dead owner's claim is free, also where machines do not see each other's claims."""

import json
import os
import signal
import time

import pytest

from forked import Forked
from raytraced.training import claims
from raytraced.training.claims import ClaimedError, claim, is_claimed


def hold(work):
    with claim(work, "run"):
        (work / "held").touch()
        time.sleep(600)


def test_a_claim_is_held_by_one_and_free_afterwards(tmp_path):
    with claim(tmp_path, "run"):
        assert is_claimed(tmp_path, "run")
        with (
            pytest.raises(ClaimedError, match=f"run: is being trained by process {os.getpid()} on "),
            claim(tmp_path, "run"),
        ):
            pass
        with claim(tmp_path, "other"):  # runs are claimed one by one
            pass
    assert not is_claimed(tmp_path, "run")
    assert not is_claimed(tmp_path, "never")


def test_the_claim_of_a_killed_process_is_free_at_once(tmp_path):
    process = Forked(hold, tmp_path)
    while not (tmp_path / "held").exists():
        assert process.poll() is None
        time.sleep(0.005)
    assert is_claimed(tmp_path, "run")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert not is_claimed(tmp_path, "run")
    with claim(tmp_path, "run"):
        pass


@pytest.mark.parametrize(
    ("age", "claimed"), [(0, True), (claims.STALE_SECONDS - 10, True), (claims.STALE_SECONDS + 10, False)]
)
def test_a_claim_of_another_machine_counts_until_it_is_not_renewed(tmp_path, age, claimed):
    path = claims.claim_path(tmp_path, "run")
    path.parent.mkdir()
    path.write_text(json.dumps({"host": "another-machine", "process": 7}))  # not locked, as this machine sees it
    os.utime(path, (time.time() - age,) * 2)
    assert is_claimed(tmp_path, "run") == claimed


def test_an_owner_renews_its_claim(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "BEAT_SECONDS", 0.01)
    with claim(tmp_path, "run"):
        path = claims.claim_path(tmp_path, "run")
        os.utime(path, (0, 0))
        deadline = time.monotonic() + 60
        while path.stat().st_mtime < 1:
            assert time.monotonic() < deadline
            time.sleep(0.005)


def test_a_claim_that_was_half_written_is_free(tmp_path):
    path = claims.claim_path(tmp_path, "run")
    path.parent.mkdir()
    path.write_text('{"host": "another')
    with claim(tmp_path, "run"):
        pass

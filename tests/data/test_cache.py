"""The cache under faults: cut and altered files, two processes, a kill, a full disk, a folder that is not there."""

import os
import pickle
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data.originals import ARRAYS, FILES, assert_same, tiny_set
from forked import with_parent
from raytraced.data import cache
from raytraced.data.cache import cache_root, entry_folder, obtain, read_entry

OBTAIN = """
import pickle, sys
from pathlib import Path
from raytraced.data.cache import obtain
arrays = obtain(pickle.loads(bytes.fromhex(sys.argv[1])), Path(sys.argv[2]))
print(sum(int(array.sum(dtype=int)) for array in arrays.values()))
"""


def start(public_set, root, **options):
    """Another process that obtains the set and prints the sum of all its bytes."""
    command = with_parent([sys.executable, "-c", OBTAIN, pickle.dumps(public_set).hex(), str(root)])
    tests = str(Path(__file__).parents[1])  # where the set's `decode` is imported from
    path = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
    options |= {"env": os.environ | {"PYTHONPATH": path}, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, **options)


def alter(path, **change):
    """Change one byte in the middle of the pixels, or cut the file, or replace it."""
    content = bytearray(path.read_bytes())
    if "length" in change:
        content = content[: change["length"]]
    elif "text" in change:
        content = bytearray(change["text"])
    else:
        content[-change["from_end"]] ^= 1
    path.write_bytes(content)


def test_cached_arrays_are_memory_maps_that_never_change_the_file(server, tmp_path):
    public_set = tiny_set(server.address)
    arrays = obtain(public_set, tmp_path)
    assert all(isinstance(array, np.memmap) for array in arrays.values())
    arrays["letters"][:] = 0
    assert_same(obtain(public_set, tmp_path, hashed=True), ARRAYS)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"from_end": 7}, "expected sha256 .*, found "),
        ({"length": 200}, "cut or altered file"),
        ({"length": 20}, "cut or altered file"),
        ({"length": 0}, "cut or altered file"),
        ({"text": b"something else"}, "cut or altered file"),
    ],
)
def test_altered_entry_is_reported_discarded_and_fetched_again(server, tmp_path, capsys, change, found):
    public_set = tiny_set(server.address)
    obtain(public_set, tmp_path)
    alter(entry_folder(tmp_path, public_set) / "letters.npy", **change)
    capsys.readouterr()
    with pytest.raises(cache.DamagedError, match=found):
        read_entry(tmp_path, public_set)
    assert_same(obtain(public_set, tmp_path), ARRAYS)
    assert "tiny: the cached copy is discarded and fetched again: " in capsys.readouterr().err
    assert len(server.requests) == 8


def test_entry_that_lost_a_file_is_fetched_again(server, tmp_path, capsys):
    public_set = tiny_set(server.address)
    obtain(public_set, tmp_path)
    (entry_folder(tmp_path, public_set) / "marks.npy").unlink()
    assert_same(obtain(public_set, tmp_path), ARRAYS)
    assert "expected 4 arrays, some are missing" in capsys.readouterr().err


def test_altered_entry_is_not_used_when_nothing_can_replace_it(server, tmp_path):
    public_set = tiny_set(server.address)
    obtain(public_set, tmp_path)
    alter(entry_folder(tmp_path, public_set) / "letters.npy", from_end=7)
    server.files.clear()
    for _ in range(2):
        with pytest.raises(OSError, match="no source could provide it"):
            obtain(public_set, tmp_path)


def test_get_finds_an_altered_byte_even_behind_an_unchanged_time(server, tmp_path):
    public_set = tiny_set(server.address)
    obtain(public_set, tmp_path)
    path = entry_folder(tmp_path, public_set) / "letters.npy"
    status = path.stat()
    alter(path, from_end=7)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert read_entry(tmp_path, public_set) is not None
    with pytest.raises(cache.DamagedError, match="expected sha256"):
        read_entry(tmp_path, public_set, hashed=True)


def test_bytes_are_hashed_again_only_when_a_file_changed(server, tmp_path, monkeypatch):
    public_set = tiny_set(server.address)
    obtain(public_set, tmp_path)
    hashed = []
    plain_check = cache.check_array

    def note_check(label, array, info, **options):
        hashed.append(options["hashed"])
        plain_check(label, array, info, **options)

    monkeypatch.setattr(cache, "check_array", note_check)
    obtain(public_set, tmp_path)
    os.utime(entry_folder(tmp_path, public_set) / "letters.npy")
    obtain(public_set, tmp_path)
    obtain(public_set, tmp_path)
    assert hashed == [False] * 4 + [True, False, False, False] + [False] * 4


def test_two_processes_at_once_download_once_and_both_end_well(server, tmp_path):
    public_set = tiny_set(server.address)
    server.gate.clear()
    processes = [start(public_set, tmp_path), start(public_set, tmp_path)]
    # The one without the lock says so; only then may the download of the other continue.
    lines = {process: process.stderr.readline() for process in processes}
    assert sorted(lines.values()) == [
        f"tiny: trying {server.address}\n",
        "tiny: waiting for another process that downloads it\n",
    ]
    server.gate.set()
    total = sum(int(array.sum(dtype=int)) for array in ARRAYS.values())
    for process in processes:
        output, errors = process.communicate(timeout=60)
        assert (process.returncode, output) == (0, f"{total}\n"), errors
    assert sorted(server.requests) == sorted(FILES)


def test_process_killed_in_a_download_leaves_no_entry_and_no_lock(server, tmp_path):
    public_set = tiny_set(server.address)
    server.gate.clear()
    process = start(public_set, tmp_path)
    assert server.arrived.wait(60)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert len(list(tmp_path.glob(".tiny.*.tmp"))) == 1
    assert not entry_folder(tmp_path, public_set).exists()
    server.gate.set()
    assert_same(obtain(public_set, tmp_path), ARRAYS)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tiny.lock", "tiny-arrays"]


@pytest.mark.parametrize("stage", ["download", "array"])
def test_no_entry_appears_when_the_disk_is_full(server, tmp_path, stage):
    # The largest array has 1200 random bytes: gzip cannot make them fewer, and its file has a header of 128.
    largest = max(map(len, FILES.values()))
    limit = largest - 1 if stage == "download" else largest + 1
    assert 1200 < largest < 1300

    def limit_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    process = start(tiny_set(server.address), tmp_path, preexec_fn=limit_files)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    message = errors.splitlines()[-1]
    assert message.startswith(f"OSError: {tmp_path}: no space left (File too large), tiny needs up to ")
    assert message.endswith("name another folder with --data-root or RAYTRACED_HOME")
    assert [path.name for path in tmp_path.iterdir()] == [".tiny.lock"]
    assert (stage == "array") == ("every checksum matches" in errors)


def test_missing_cache_folder_is_made(server, tmp_path):
    assert_same(obtain(tiny_set(server.address), tmp_path / "not" / "yet" / "there"), ARRAYS)


def test_cache_folder_that_cannot_be_made_is_reported_with_the_remedy(server, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        OSError, match=r"file/data: cannot be used as the cache folder \(Not a directory\); name another"
    ):
        obtain(tiny_set(server.address), tmp_path / "file" / "data")


def test_cache_folder_follows_root_then_raytraced_home_then_xdg(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYTRACED_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root(tmp_path / "root") == tmp_path / "root"
    assert cache_root() == tmp_path / "home" / "data"
    monkeypatch.delenv("RAYTRACED_HOME")
    assert cache_root() == tmp_path / "xdg" / "raytraced" / "data"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "raytraced" / "data"

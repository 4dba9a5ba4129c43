"""A checkpoint is whole, or an error names the file and the reason."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

import forked
from raytraced.io.saving import DamagedFileError
from raytraced.training.state import (
    Checkpoint,
    list_checkpoints,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)


def example(step: int = 3) -> Checkpoint:
    tensors = {"weight": torch.arange(6.0).view(2, 3), "step": torch.tensor(4.0), "none": torch.zeros(0, 2)}
    return Checkpoint(step, tensors, {"epoch": 1, "history": [{"loss": 0.1 + 0.2}]})


def assert_equal(one: Checkpoint, other: Checkpoint) -> None:
    assert (one.step, one.state) == (other.step, other.state)
    assert one.tensors.keys() == other.tensors.keys()
    assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)


def test_checkpoint_comes_back_as_it_was(tmp_path):
    path = save_checkpoint(tmp_path, example())
    assert_equal(load_checkpoint(path), example())


def test_two_newest_are_kept(tmp_path):
    for step in (1, 2, 3, 40):
        save_checkpoint(tmp_path, example(step))
    assert [load_checkpoint(path).step for path in list_checkpoints(tmp_path)] == [40, 3]


def test_file_cut_anywhere_is_recognised(tmp_path):
    path = save_checkpoint(tmp_path, example())
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        with pytest.raises(DamagedFileError, match=path.name):
            load_checkpoint(path)


@given(st.data())
def test_any_altered_byte_is_recognised(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("altered")
    path = save_checkpoint(folder, example())
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    found, problems = None, []
    try:
        found = load_checkpoint(path)
    except DamagedFileError as error:
        problems.append(str(error))
    if found is None:
        assert path.name in problems[0]
    else:
        assert_equal(found, example())  # padding of the header, which means nothing


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "foreign"),
        (b"PK\x03\x04 a pickle in a zip file", "foreign"),
        (save({"weight": torch.zeros(2)}), "foreign: has no format"),
        (save({"weight": torch.zeros(2)}, {"format": "pt"}), "foreign: has pt"),
    ],
)
def test_foreign_file_is_recognised(tmp_path, content, reason):
    path = tmp_path / "step-0000000009.safetensors"
    path.write_bytes(content)
    with pytest.raises(DamagedFileError, match=reason):
        load_checkpoint(path)


def test_previous_checkpoint_is_used_and_the_damaged_one_named(tmp_path):
    save_checkpoint(tmp_path, example(1))
    damaged = save_checkpoint(tmp_path, example(2))
    damaged.write_bytes(damaged.read_bytes()[:-3])
    found, problems = newest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 1
    assert len(problems) == 1
    assert "step-0000000002.safetensors: cut or altered" in problems[0]


def test_folder_with_damaged_checkpoints_only_is_an_error_and_an_empty_one_is_not(tmp_path):
    assert newest_checkpoint(tmp_path) == (None, [])
    path = save_checkpoint(tmp_path, example())
    path.write_bytes(b"")
    with pytest.raises(DamagedFileError, match="no whole checkpoint"):
        newest_checkpoint(tmp_path)


def test_full_disk_keeps_the_last_checkpoint_and_leaves_no_part(tmp_path):
    """A limit on the size of files stands for the full disk: write() fails the same way."""
    save_checkpoint(tmp_path, example(1))
    program = f"""
import resource, signal, sys, pathlib, torch
from raytraced.training.state import Checkpoint, save_checkpoint
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
try:
    save_checkpoint(pathlib.Path({str(tmp_path)!r}), Checkpoint(2, {{"weight": torch.zeros(1000)}}, {{}}))
except OSError as error:
    sys.exit(0 if error.filename.endswith("step-0000000002.safetensors") else 4)
sys.exit(3)
"""
    done = forked.run(forked.program, program)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["step-0000000001.safetensors"]
    assert_equal(load_checkpoint(tmp_path / "step-0000000001.safetensors"), example(1))


def test_state_must_be_plain_json(tmp_path):
    with pytest.raises(TypeError):
        save_checkpoint(tmp_path, Checkpoint(1, {}, {"odd": object()}))
    assert json.loads(json.dumps(example().state)) == example().state

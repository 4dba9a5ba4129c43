"""A store in several files: the same experts, and one line for every index or file that is damaged."""

import json
import os
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import raytraced
from raytraced import kernels
from raytraced.cli.main import main
from raytraced.files import DamagedFileError
from raytraced.store.index import MAX_SHARDS
from raytraced.store.layout import ALIGNMENT, GridShape, open_store, write_store
from raytraced.store.reader import ExpertReader, aligned_memory

GRIDS = {"one": GridShape(2, 3), "two": GridShape(1, 2)}
OTHERS = {"head": torch.arange(15.0).view(3, 5), "steps": torch.arange(7)}
SIZE = 8192  # of an expert of 1,500 numbers, padded
FILES = [f"store-0000{number}-of-00004.safetensors" for number in range(1, 5)]


def numbers(grid: str, layer: int, expert: int) -> torch.Tensor:
    return torch.arange(1500.0) + 10_000 * (100 * (grid == "two") + 10 * layer + expert)


def write(path, max_bytes=2 * SIZE + ALIGNMENT):
    return write_store(path, OTHERS, GRIDS, numbers, "a card", max_bytes)


def read_all(file):
    """The numbers of every expert, each by a read of its own."""
    reader, memory, found = ExpertReader(file), aligned_memory(file.run_bytes), []
    for number in range(len(file.runs)):
        reader.read(number, memoryview(memory))
        found.append(torch.frombuffer(memory, dtype=file.dtype)[: file.num_numbers].clone())
    reader.close()
    return found


@pytest.fixture
def index(tmp_path):
    return write(tmp_path / "store.safetensors")


def test_a_store_in_several_files_holds_what_one_file_holds(tmp_path, index):
    assert index == tmp_path / "store.safetensors.index.json"
    assert sorted(path.name for path in tmp_path.iterdir()) == [*FILES, index.name]
    whole, shared = (
        open_store(write_store(tmp_path / "whole.safetensors", OTHERS, GRIDS, numbers, "a card")),
        open_store(index),
    )
    assert [len(load_file(tmp_path / name)) for name in FILES] == [2 + 1 + 2 * 2, 4, 4, 4]  # each with its padding
    assert [run.shard for run in shared.runs] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert shared.text == whole.text
    assert shared.grids == whole.grids
    assert all(torch.equal(shared.tensors[name], tensor) for name, tensor in whole.tensors.items())
    assert all(torch.equal(*pair) for pair in zip(read_all(shared), read_all(whole), strict=True))


def test_the_index_says_where_every_tensor_is_in_the_usual_layout(tmp_path, index):
    values = json.loads(index.read_text())
    tensors = {name: load_file(tmp_path / name) for name in FILES}
    assert values["weight_map"] == {tensor: name for name, held in tensors.items() for tensor in held}
    assert values["metadata"]["total_size"] == sum(each.nbytes for held in tensors.values() for each in held.values())


@given(st.integers(0, 9000), st.integers(1, 3000), st.integers(1, 60_000))
def test_no_file_is_larger_than_asked_unless_one_expert_is(tmp_path_factory, other, size, most):
    path = tmp_path_factory.mktemp("store") / "store.safetensors"
    expert, rest = torch.randn(9, size), {"rest": torch.zeros(other, dtype=torch.uint8)}
    made = write_store(
        path, rest, {"grid": GridShape(3, 3)}, lambda _, layer, number: expert[3 * layer + number], "", most
    )
    file = open_store(made)
    assert all(torch.equal(*pair) for pair in zip(read_all(file), expert, strict=True))
    held = [[run for run in file.runs if run.shard == number] for number in range(len(file.shards))]
    for number, runs in enumerate(held):
        others = other + -other % ALIGNMENT if number == 0 else 0
        assert others + len(runs) * file.run_bytes <= most or len(runs) == 1
    assert (made == path) == (len(file.shards) == 1)


def test_a_store_that_is_written_again_leaves_no_file_of_the_former_one(tmp_path):
    path = tmp_path / "store.safetensors"
    other = tmp_path / "store-a-of-b.safetensors"
    other.write_bytes(b"")
    for most, expected in ((3 * SIZE, 4), (SIZE, 9), (None, 1), (SIZE, 9), (4 * SIZE, 4)):
        made = write(path, most)
        assert len([each for each in tmp_path.iterdir() if each != other]) == expected
        assert len(read_all(open_store(made))) == 8
    assert other.exists()


def test_shards_that_cannot_be_written_leave_the_old_store_and_nothing_else(tmp_path, index):
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    calls = []

    def broken(*place):
        calls.append(place)
        if len(calls) > 14:
            raise OSError(28, "No space left on device")
        return numbers(*place)

    with pytest.raises(OSError, match="No space left"):
        write_store(tmp_path / "store.safetensors", {}, GRIDS, broken, "", SIZE)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_more_files_than_can_be_open_are_refused_with_the_least_that_works(tmp_path):
    shape, expert = {"grid": GridShape(1, MAX_SHARDS + 5)}, torch.zeros(1024)
    with pytest.raises(ValueError, match=rf"max_shard_size=4096: gives {MAX_SHARDS + 5} files.*allow at least 8192"):
        write_store(tmp_path / "store.safetensors", {}, shape, lambda *_: expert, "", 4096)
    assert not list(tmp_path.iterdir())
    assert (
        len(open_store(write_store(tmp_path / "store.safetensors", {}, shape, lambda *_: expert, "", 8192)).shards) > 1
    )


def edit(change):
    """Changes the values of the index."""

    def edited(index):
        values = json.loads(index.read_text())
        change(values)
        index.write_text(json.dumps(values))

    return edited


def move(tensor, file):
    return edit(lambda values: values["weight_map"].update({tensor: file}))


def metadata(**entries):
    return edit(lambda values: values["metadata"].update(entries))


def cut(name, share):
    def change(index):
        path = index.with_name(name)
        os.truncate(path, int(share * path.stat().st_size))

    return change


def replace_shard(change):
    """The third file with another header of the same length."""

    def changed(index):
        path = index.with_name(FILES[2])
        content = path.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        change(header)
        path.write_bytes(content[:8] + json.dumps(header).encode().ljust(end - 8) + content[end:])

    return changed


def from_another_store(index):
    folder = index.parent / "other"
    folder.mkdir()
    write_store(
        folder / "store.safetensors", OTHERS, GRIDS, lambda *place: numbers(*place) + 1, "", 2 * SIZE + ALIGNMENT
    )
    shutil.copy(folder / FILES[2], index.with_name(FILES[2]))


def as_pipe(index):
    index.with_name(FILES[1]).unlink()
    os.mkfifo(index.with_name(FILES[1]))


DAMAGES = {
    "no JSON": (lambda index: index.write_text("{"), "is not the JSON of an index"),
    "no text": (lambda index: index.write_bytes(b"\xff\xfe\x00"), "is not the JSON of an index"),
    "empty": (lambda index: index.write_text(""), "is not the JSON of an index"),
    "nested": (lambda index: index.write_text("[" * 10**5), "is not the JSON of an index"),
    "a list": (lambda index: index.write_text("[]"), "has no metadata and weight_map"),
    "no map": (edit(lambda values: values.pop("weight_map")), "has no metadata and weight_map"),
    "an empty map": (edit(lambda values: values["weight_map"].clear()), "has no metadata and weight_map"),
    "no metadata": (edit(lambda values: values.pop("metadata")), "has no metadata and weight_map"),
    "of another library": (edit(lambda values: values["metadata"].pop("format")), "foreign: has no format"),
    "no total": (edit(lambda values: values["metadata"].pop("total_size")), "total_size is None; must be a number"),
    "another total": (metadata(total_size=5), "total_size is 5, its files hold"),
    "a total of words": (metadata(total_size="5"), "total_size is '5'; must be a number"),
    "a number as file": (move("head", 5), "head is in 5; must be the name of a .safetensors file"),
    "another folder": (move("head", "../store-00001-of-00004.safetensors"), "must be the name of a .safetensors file"),
    "an absolute path": (move("head", "/etc/passwd.safetensors"), "must be the name of a .safetensors file"),
    "a byte 0": (move("head", "a\0.safetensors"), "must be the name of a .safetensors file"),
    "a pickle": (move("head", "model.bin"), "must be the name of a .safetensors file"),
    "a missing file": (lambda index: index.with_name(FILES[1]).unlink(), f"cut: {FILES[1]}, one of its files, is missing"),
    "a file that never was": (move("head", "none.safetensors"), "none.safetensors, one of its files, is missing"),
    "a tensor elsewhere": (move("one.0.0", FILES[3]), f"{FILES[0]} holds one.0.0, of which"),
    "a tensor that is nowhere": (move("three", FILES[3]), f"{FILES[3]} does not hold three"),
    "an expert that is not named": (edit(lambda values: values["weight_map"].pop("one.1.1")), "holds one.1.1, of which"),
    "many files": (edit(lambda values: values["weight_map"].update({f"t{n}": f"{n}.safetensors" for n in range(600)})), "at most 512"),
    "a file cut in its data": (cut(FILES[3], 0.9), f"{FILES[3]}: cut: its tensors need"),
    "a file cut in its header": (cut(FILES[3], 0.01), f"{FILES[3]}: cut: ends inside its header"),
    "an empty file": (cut(FILES[0], 0), f"{FILES[0]}: foreign: is not a safetensors file"),
    "a whole store as a file": (lambda index: write(index.with_name(FILES[1]), None), "has raytraced-store-1, not raytraced-store-shard-1"),
    "a file of another store": (from_another_store, f"{FILES[2]} and {FILES[0]} are files of two stores"),
    "a pipe": (as_pipe, "must be a regular file"),
    "another type": (replace_shard(lambda header: header["one.1.1"].update(dtype="I32")), "expert one.1.1 is I32"),
    "an overlap": (replace_shard(lambda header: header["one.1.1"].update(header["one.1.2"])), "overlaps|leaves a hole"),
    "no checksum": (replace_shard(lambda header: header["__metadata__"].pop("sha256")), "are files of two stores"),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "words"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_index_or_file_is_refused_in_one_line(index, damage, words):
    damage(index)
    with pytest.raises(DamagedFileError, match=words) as error:
        open_store(index)
    assert str(index.parent) in str(error.value)
    assert "\n" not in str(error.value)


def read_or_refuse(index):
    """The numbers of every expert, or the words with which the store is refused."""
    try:
        return read_all(open_store(index))
    except DamagedFileError as error:
        return str(error)


@given(st.sampled_from(["index", *FILES]), st.integers(0, 5000), st.binary(min_size=0, max_size=20), st.integers(0, 30))
def test_bytes_that_are_replaced_at_random_are_refused_or_change_nothing(tmp_path_factory, name, start, new, length):
    index = write(tmp_path_factory.mktemp("store") / "store.safetensors")
    path = index if name == "index" else index.with_name(name)
    content = path.read_bytes()
    path.write_bytes(content[:start] + new + content[start + length :])
    found = read_or_refuse(index)
    if isinstance(found, str):
        assert "\n" not in found
    else:
        places = [(grid, layer, e) for grid, (L, N) in GRIDS.items() for layer in range(L) for e in range(N)]
        assert all(torch.equal(one, numbers(*place)) for one, place in zip(found, places, strict=True))


def test_an_altered_expert_and_a_file_cut_later_are_named_with_their_file(index):
    file = open_store(index)
    reader, memory = ExpertReader(file, False), aligned_memory(file.run_bytes)
    with file.shards[3].path.open("r+b") as stream:
        stream.seek(file.runs[7].offset + 3)
        stream.write(b"\xff")
    with pytest.raises(DamagedFileError, match=rf"{FILES[3]}: altered: expert two\.0\.1 does not match its checksum"):
        reader.read(7, memoryview(memory))
    os.truncate(file.shards[3].path, file.runs[7].offset)
    with pytest.raises(DamagedFileError, match=rf"{FILES[3]}: cut: ends inside expert two\.0\.1"):
        reader.read(7, memoryview(memory))
    reader.close()
    with pytest.raises(DamagedFileError, match=rf"{FILES[3]}: altered: was replaced"):
        ExpertReader(file)


def test_a_reader_that_is_refused_keeps_no_file_open(index):
    file = open_store(index)
    os.truncate(file.shards[3].path, 100)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DamagedFileError):
        ExpertReader(file)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def model():
    return raytraced.build("gpt-mre", dim=16, hidden=24, depth=2, num_heads=2, context=16, num_experts=4).eval()


@torch.no_grad()
def test_a_model_in_several_files_answers_as_in_memory(model, tmp_path):
    raytraced.save(model, tmp_path / "plays.safetensors", store=True, max_shard_size="20 KB")
    raytraced.save_pretrained(model, tmp_path / "shared", store=True, max_shard_size="20 KB")
    assert not (tmp_path / "shared" / "model.safetensors").exists()
    tokens = torch.randint(0, 256, (2, 9))
    sources = ["plays.safetensors", "plays.safetensors.index.json", "shared", "shared/model.safetensors.index.json"]
    for source in sources:
        for memory in (8192, None):
            load = raytraced.from_pretrained if source == "shared" else raytraced.load
            loaded = load(tmp_path / source, memory=memory)
            pool = loaded.layer.experts.pool
            assert len(pool.file.shards) > 2
            equal = torch.equal if kernels.available() else torch.allclose
            assert equal(loaded(tokens).logits, model(tokens).logits)
            pool.close()
    part = tmp_path / "shared" / pool.file.shards[0].path.name
    with pytest.raises(ValueError, match="is one of several files of a store; load its index"):
        raytraced.load(part)
    with pytest.raises(ValueError, match="max_shard_size=5GB: is for stores; give store=True too"):
        raytraced.save(model, tmp_path / "plain.safetensors", max_shard_size="5GB")


def test_a_store_in_several_files_is_written_and_used_on_the_command_line(model, tmp_path, monkeypatch, capsys):
    raytraced.save(model, tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    assert main(["store", "model.safetensors", "plays.safetensors", "--max-shard-size", "20KB"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("plays.safetensors.index.json: 8 experts of")
    assert said.endswith("files\n")
    texts = []
    for source in ("model.safetensors", "plays.safetensors", "plays.safetensors.index.json"):
        assert main(["generate", source, "a", "--length", "5", "--json", "--device", "cpu"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[1:] == texts[:1] * 2
    assert main(["store", "plays.safetensors", "again.safetensors"]) == 2
    assert "its experts are in a store" in capsys.readouterr().err
    assert main(["store", "model.safetensors", "b.safetensors", "--max-shard-size", "much"]) == 2
    assert "max_shard_size=much: must be a number of bytes" in capsys.readouterr().err
    assert not list(tmp_path.glob("b*"))

"""The file of a store: any safetensors reader reads it, and nothing in it is used before it was checked."""

import json
import os
import stat

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

import raytraced
from raytraced.experts import MLPExperts
from raytraced.files import DamagedFileError
from raytraced.store.experts import expert_numbers
from raytraced.store.layout import ALIGNMENT, GridShape, open_store, write_store
from raytraced.store.reader import ExpertReader, aligned_memory

GRIDS = {"one": GridShape(2, 3), "two": GridShape(1, 2)}


def numbers(grid: str, layer: int, expert: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash((grid == "one", layer, expert)) % 1000)
    return torch.randn(1500, generator=generator)


@pytest.fixture
def store(tmp_path):
    path = tmp_path / "store.safetensors"
    write_store(path, {"head": torch.randn(3, 5), "steps": torch.arange(7)}, GRIDS, numbers, "a card")
    return path


def edit(path, change):
    """Write the file again with another header, which is as long as before."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    change(header)
    encoded = json.dumps(header).encode()
    encoded += b" " * (-(8 + len(encoded)) % ALIGNMENT)
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + content[end:])


def test_any_reader_of_safetensors_reads_the_same_numbers(store):
    tensors = load_file(store)
    for grid, shape in GRIDS.items():
        for layer in range(shape.num_layers):
            for expert in range(shape.num_experts):
                assert torch.equal(tensors[f"{grid}.{layer}.{expert}"], numbers(grid, layer, expert))
    assert torch.equal(tensors["steps"], torch.arange(7))


@pytest.mark.parametrize("direct", [False, None])
def test_every_expert_is_one_aligned_run_that_can_be_read_by_itself(store, direct):
    file = open_store(store)
    reader, memory = ExpertReader(file, direct), aligned_memory(file.run_bytes)
    assert file.run_bytes == 8192  # 6,000 bytes, padded
    places = [(name, layer, e) for name, (L, N) in GRIDS.items() for layer in range(L) for e in range(N)]
    for number, place in enumerate(places):
        assert file.runs[number].offset % ALIGNMENT == 0
        reader.read(number, memoryview(memory))
        assert torch.equal(torch.frombuffer(memory, dtype=torch.float32)[:1500], numbers(*place))
    assert file.first("two") == 6
    assert file.text == "a card"
    reader.close()


@given(
    st.lists(st.integers(0, 9000), max_size=3),
    st.integers(1, 3000),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_what_is_written_is_read_whatever_the_sizes_are(tmp_path_factory, sizes, size, dtype):
    path = tmp_path_factory.mktemp("store") / "store.safetensors"
    others = {f"t{n}": torch.randint(0, 255, (length,), dtype=torch.uint8) for n, length in enumerate(sizes)}
    expert = torch.randn(2, size).to(dtype)
    write_store(path, others, {"grid": GridShape(1, 2)}, lambda grid, layer, number: expert[number], "")
    file = open_store(path)
    assert file.tensors.keys() == others.keys()
    assert all(torch.equal(file.tensors[name], tensor) for name, tensor in others.items())
    assert (file.dtype, file.num_numbers) == (dtype, size)
    reader, memory = ExpertReader(file, False), aligned_memory(file.run_bytes)
    reader.read(1, memoryview(memory))
    assert torch.equal(torch.frombuffer(memory, dtype=dtype)[:size], expert[1])
    reader.close()


def move(header):
    header["one.0.1"]["data_offsets"] = header["one.0.0"]["data_offsets"]


def swap(header):
    one, other = header["one.0.1"], header["one.0.2"]
    one["data_offsets"], other["data_offsets"] = other["data_offsets"], one["data_offsets"]


def shift(header):
    pads = [name for name in header if name.startswith("padding.")]
    header[pads[0]]["shape"][0] -= 4
    header[pads[0]]["data_offsets"][1] -= 4
    for name, entry in header.items():
        if name != pads[0] and name != "__metadata__" and entry["data_offsets"][0] > header[pads[0]]["data_offsets"][1]:
            entry["data_offsets"] = [each - 4 for each in entry["data_offsets"]]
    header[pads[-1]]["shape"][0] += 4
    header[pads[-1]]["data_offsets"][1] += 4


ALTERED = {
    "overlap": (move, "overlaps the tensor before it|leaves a hole"),
    "not aligned": (shift, "must be aligned to 4096"),
    "missing expert": (lambda header: header.update({"one.9.9": header.pop("one.1.2")}), "expert one.1.2 is missing"),
    "another type": (lambda header: header["one.0.1"].update(dtype="I32"), "is I32 .*others are not"),
    "unknown type": (lambda header: header["one.0.1"].update(dtype="F7"), "has type 'F7'"),
    "a size that does not fit": (lambda header: header["one.0.1"].update(shape=[1501]), "needs 6004 bytes"),
    "a negative size": (lambda header: header["one.0.1"].update(shape=[-1, -1500]), "not whole numbers"),
    "a fraction": (lambda header: header["one.0.1"].update(shape=[1500.0]), "not whole numbers"),
    "a huge offset": (lambda header: header["one.0.1"].update(data_offsets=[2**63, 2**63 + 6000]), "within a file's size"),
    "an entry that is no table": (lambda header: header.update({"one.0.1": 5}), "has type None"),
    "another grid": (lambda header: header["__metadata__"].update(grids='{"one": [2, 300]}'), "describes 600 experts"),
    "a grid of words": (lambda header: header["__metadata__"].update(grids='{"one": ["a", "b"]}'), "does not describe grids"),
    "a grid of zeros": (lambda header: header["__metadata__"].update(grids='{"one": [0, 3]}'), "describes 0 experts"),
    "no grids": (lambda header: header["__metadata__"].pop("grids"), "does not describe grids"),
    "another card": (lambda header: header["__metadata__"].update(card="b card"), "does not match its checksum"),
    "another format": (lambda header: header["__metadata__"].update(format="pt"), "foreign: has pt"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "words"), ALTERED.values(), ids=ALTERED)
def test_an_altered_header_is_refused_in_one_line(store, change, words):
    edit(store, change)
    with pytest.raises(DamagedFileError, match=words) as error:
        open_store(store)
    assert str(store) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.999])
def test_a_file_that_is_cut_short_is_refused_in_one_line(store, share):
    content = store.read_bytes()
    store.write_bytes(content[: int(share * len(content))])
    with pytest.raises(DamagedFileError, match=r"cut|is not a safetensors file"):
        open_store(store)


def test_a_longer_file_is_refused(store):
    store.write_bytes(store.read_bytes() + bytes(4096))
    with pytest.raises(DamagedFileError, match=r"altered: its tensors need \d+ bytes"):
        open_store(store)


@pytest.mark.parametrize("content", [b"", b"{}", bytes(4096), b"\xff" * 64, b"\x10" + bytes(7) + b"[" * 16])
def test_what_is_not_a_store_is_refused(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(DamagedFileError):
        open_store(path)


def test_a_header_that_is_nested_too_deeply_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_bytes((10**6).to_bytes(8, "little") + b"[" * 10**6)
    with pytest.raises(DamagedFileError, match="not the JSON"):
        open_store(path)


@pytest.mark.parametrize("place", ["head", "one.1.0"])
def test_an_altered_byte_is_found_when_it_is_read(store, place):
    content = bytearray(store.read_bytes())
    end = 8 + int.from_bytes(content[:8], "little")
    content[end + json.loads(content[8:end])[place]["data_offsets"][0] + 5] ^= 1
    store.write_bytes(content)
    if place == "head":
        with pytest.raises(DamagedFileError, match="does not match its checksum"):
            open_store(store)
        return
    file = open_store(store)
    reader, memory = ExpertReader(file, False), aligned_memory(file.run_bytes)
    with pytest.raises(DamagedFileError, match=r"expert one\.1\.0 does not match its checksum"):
        reader.read(3, memoryview(memory))
    reader.close()


def test_two_experts_that_changed_places_are_found_when_they_are_read(store):
    edit(store, swap)
    file = open_store(store)
    reader, memory = ExpertReader(file, False), aligned_memory(file.run_bytes)
    with pytest.raises(DamagedFileError, match="does not match its checksum"):
        reader.read(1, memoryview(memory))
    reader.close()


def test_a_file_that_was_replaced_or_cut_after_it_was_opened_is_refused(store):
    file = open_store(store)
    reader, memory = ExpertReader(file, False), aligned_memory(file.run_bytes)
    os.truncate(store, file.runs[4].offset + 100)
    with pytest.raises(DamagedFileError, match=r"cut: ends inside expert one\.1\.1"):
        reader.read(4, memoryview(memory))
    reader.close()
    with pytest.raises(DamagedFileError, match="was replaced"):
        ExpertReader(file, False)


def test_a_store_that_cannot_be_written_leaves_the_old_file_and_nothing_else(tmp_path, store):
    before = store.read_bytes()

    def broken(grid, layer, expert):
        if broken.calls > 10:
            raise OSError(28, "No space left on device")
        broken.calls += 1
        return numbers(grid, layer, expert)

    broken.calls = 0
    with pytest.raises(OSError, match="No space left"):
        write_store(store, {}, GRIDS, broken, "")
    assert store.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == [store.name]


def test_an_experts_numbers_are_its_weights_and_biases_in_turn():
    grid = MLPExperts(2, 3, 4, 5)
    flat = expert_numbers(grid, 1, 2)
    assert len(flat) == grid.num_parameters
    assert torch.equal(flat[:20].view(5, 4), grid.weights[0][1, 2])
    assert torch.equal(flat[20:25], grid.biases[0][1, 2])
    assert torch.equal(flat[-4:], grid.biases[2][1, 2])


def test_a_pipe_is_not_read(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    assert stat.S_ISFIFO(path.stat().st_mode)
    writer = os.open(path, os.O_RDWR)
    try:
        with pytest.raises(DamagedFileError, match="must be a regular file"):
            open_store(path)
    finally:
        os.close(writer)


def test_a_model_without_experts_has_no_store(tmp_path):
    model = raytraced.build("mlp-avg", image_shape=(1, 8, 8), num_classes=3)
    with pytest.raises(ValueError, match="has no experts"):
        raytraced.save(model, tmp_path / "model.safetensors", store=True)
    assert not list(tmp_path.iterdir())

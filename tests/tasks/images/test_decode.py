"""Original formats -> arrays, and files that are not what they say."""

import gzip
import io
import json
import pickle
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from raytraced.tasks.images.catalog import MNIST
from raytraced.tasks.images.decode import (
    CIFAR_BATCHES,
    IDX_FILES,
    decode_cifar10,
    decode_cifar_binary,
    decode_cifar_pickle,
    decode_idx,
    decode_mnist,
    decode_sheet,
)


def encode_idx(array):
    """An IDX file as its page describes it: two zeros, the type, the number of axes, the sizes, the bytes."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def cifar_batch(seed, num=4):
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, (num, 3, 32, 32), dtype=np.uint8), generator.integers(0, 10, num, dtype=np.uint8)


def encode_cifar_binary(images, labels):
    return b"".join(bytes([label]) + image.tobytes() for image, label in zip(images, labels, strict=True))


def encode_cifar_pickle(images, labels):
    """A batch as Python 2 pickled it: byte strings, and an array rebuilt by numpy.core.multiarray._reconstruct."""

    def text(value):
        return b"U" + bytes([len(value)]) + value

    def number(value):
        return b"J" + struct.pack("<i", value)

    dtype = b"cnumpy\ndtype\n" + text(b"u1") + number(0) + number(1) + b"\x87R"
    dtype += b"(" + number(3) + text(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    shape = number(len(images)) + number(3072) + b"\x86"
    pixels = b"T" + struct.pack("<i", images.size) + images.tobytes()
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + number(0) + b"\x85" + text(b"b") + b"\x87R"
    array += b"(" + number(1) + shape + dtype + b"\x89" + pixels + b"tb"
    label_list = b"](" + b"".join(map(number, labels.tolist())) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + label_list + b"u."


def encode_sheet(images):
    rows = images.reshape(len(images), 3, 1024).transpose(0, 2, 1)
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(rows)).save(buffer, "PNG")
    return buffer.getvalue()


@given(shape=st.lists(st.integers(0, 5), min_size=1, max_size=4), zipped=st.booleans())
def test_idx_round_trip(shape, zipped):
    array = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    content = encode_idx(array)
    np.testing.assert_array_equal(decode_idx("x", gzip.compress(content) if zipped else content), array)


@pytest.mark.parametrize("zipped", [False, True])
def test_idx_file_cut_anywhere_is_refused(zipped):
    content = encode_idx(np.arange(24, dtype=np.uint8).reshape(2, 3, 4))
    content = gzip.compress(content) if zipped else content
    for length in range(len(content)):
        with pytest.raises(ValueError, match=r"^x: (not an IDX|\d+ bytes found|cut or damaged)"):
            decode_idx("x", content[:length])


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_the_four_files_of_mnist_become_four_arrays(suffix):
    generator = np.random.default_rng(0)
    arrays = {key: generator.integers(0, 256, (5, 1, 6, 4), dtype=np.uint8) for key in IDX_FILES}
    arrays |= {key: array[:, 0, 0, 0] for key, array in arrays.items() if key.endswith("labels")}
    contents = {key: encode_idx(array[:, 0] if array.ndim > 1 else array) for key, array in arrays.items()}
    files = {name + suffix: contents[key] for key, name in IDX_FILES.items()}
    if suffix:
        files = {name: gzip.compress(content) for name, content in files.items()}
    found = decode_mnist(files)
    assert found.keys() == arrays.keys()
    assert all(np.array_equal(found[key], array) for key, array in arrays.items())


def test_idx_file_with_bytes_too_many_is_refused():
    with pytest.raises(ValueError, match="x: 12 bytes found, its header asks for 11"):
        decode_idx("x", encode_idx(np.zeros(3, dtype=np.uint8)) + b"\0")


def test_the_test_pickle_is_one_that_numpy_reads():
    images, labels = cifar_batch(0)
    batch = pickle.loads(encode_cifar_pickle(images, labels).replace(b"numpy.core", b"numpy._core"), encoding="bytes")
    np.testing.assert_array_equal(batch[b"data"].reshape(images.shape), images)
    assert batch[b"labels"] == labels.tolist()


@pytest.mark.parametrize("encoding", ["binary", "pickle", "sheet"])
def test_the_three_encodings_of_cifar10_give_the_same_arrays(encoding):
    batches = [cifar_batch(seed) for seed in range(6)]
    if encoding == "binary":
        files = {f"{name}.bin": encode_cifar_binary(*batch) for name, batch in zip(CIFAR_BATCHES, batches, strict=True)}
    elif encoding == "pickle":
        files = {name: encode_cifar_pickle(*batch) for name, batch in zip(CIFAR_BATCHES, batches, strict=True)}
    else:
        files = {f"{name}.png": encode_sheet(images) for name, (images, _) in zip(CIFAR_BATCHES, batches, strict=True)}
        train_labels = np.concatenate([labels for _, labels in batches[:5]])
        files["train_lables.json"] = json.dumps(train_labels.tolist()).encode()
        files["test_lables.json"] = json.dumps(batches[5][1].tolist()).encode()
    arrays = decode_cifar10(files)
    np.testing.assert_array_equal(arrays["train_images"], np.concatenate([images for images, _ in batches[:5]]))
    np.testing.assert_array_equal(arrays["train_labels"], np.concatenate([labels for _, labels in batches[:5]]))
    np.testing.assert_array_equal(arrays["test_images"], batches[5][0])
    np.testing.assert_array_equal(arrays["test_labels"], batches[5][1])
    assert all(array.dtype == np.uint8 for array in arrays.values())


def test_a_pickle_cannot_run_code(tmp_path):
    class Harmful:
        def __reduce__(self):
            return (open, (str(tmp_path / "written"), "w"))

    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        content = pickle.dumps({b"data": Harmful(), b"labels": [0]}, protocol=protocol)
        with pytest.raises(ValueError, match=r"data_batch_1: not a batch .* refused to load"):
            decode_cifar_pickle("data_batch_1", content)
    assert not (tmp_path / "written").exists()


@given(position=st.integers(0, 200), value=st.integers(0, 255))
def test_an_altered_pickle_gives_an_array_or_a_value_error(position, value):
    content = bytearray(encode_cifar_pickle(*cifar_batch(0, num=1)))
    content[position] = value
    try:
        images, labels = decode_cifar_pickle("data_batch_1", bytes(content))
    except ValueError as error:
        assert str(error).startswith("data_batch_1: not a batch")  # noqa: PT017
    else:
        assert len(images) == len(labels) == 1


@pytest.mark.parametrize(
    ("decode", "content", "message"),
    [
        (decode_cifar_binary, bytes(3072), "x: 3072 bytes found, expected a multiple of 3073"),
        (decode_cifar_binary, b"", "x: 0 bytes found"),
        (decode_sheet, b"not a picture", "x: unreadable PNG sheet"),
        (decode_sheet, encode_sheet(cifar_batch(0)[0])[:-1000], "x: unreadable PNG sheet"),
    ],
)
def test_damaged_batches_are_named(decode, content, message):
    with pytest.raises(ValueError, match=message):
        decode("x", content)


def test_sheet_of_another_size_is_refused():
    buffer = io.BytesIO()
    Image.new("RGB", (1000, 4)).save(buffer, "PNG")
    with pytest.raises(ValueError, match=r"a sheet of shape \(4, 1000, 3\), expected \(images, 1024, 3\)"):
        decode_sheet("x", buffer.getvalue())


def test_missing_file_is_named():
    with pytest.raises(KeyError, match=r"train-images-idx3-ubyte\.gz"):
        decode_mnist({})


def test_arrays_of_mnist_are_those_of_its_page():
    assert {key: info.shape for key, info in MNIST.arrays.items()} == {
        "train_images": (60000, 1, 28, 28),
        "train_labels": (60000,),
        "test_images": (10000, 1, 28, 28),
        "test_labels": (10000,),
    }
    assert MNIST.num_bytes == 70000 * (28 * 28 + 1)

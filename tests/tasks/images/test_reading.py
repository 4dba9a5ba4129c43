"""One way from an image file to pixels, for training and for use."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from raytraced.tasks.images.image_file import read_image
from raytraced.tasks.images.loading import load


def read(path, image_shape):
    channels, height, width = image_shape
    return read_image(path, height=height, width=width, colour=None if channels is None else channels == 3)


ORIENTATION = 0x0112  # the EXIF tag; 6: the camera was held upright, its picture lies on its side


def write_photo(path, seed=0, orientation=6):
    """A colour picture that a camera stored sideways, without loss; returns its pixels as they were stored."""
    pixels = np.random.default_rng(seed).integers(0, 256, (12, 9, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    Image.fromarray(pixels).save(path, exif=exif)
    return pixels


def write_deep(path, seed=0):
    """A grey picture of sixteen bits; returns the higher byte of each pixel."""
    pixels = np.random.default_rng(seed).integers(0, 2**16, (9, 12), dtype=np.uint16)
    Image.fromarray(pixels).save(path)
    return (pixels >> 8).astype(np.uint8)


@pytest.mark.parametrize("write", [write_photo, write_deep])
def test_a_file_has_the_same_pixels_in_a_folder_and_alone(tmp_path, write):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(3):
            write(tmp_path / name / f"{number}.png", seed=number + 3 * (name == "b"))
    dataset = load(str(tmp_path), size=5)
    splits = (dataset.train, dataset.validation, dataset.test)
    in_folder = {image.numpy().tobytes() for split in splits for image in split.images}
    alone = {read(path, dataset.image_shape).tobytes() for path in tmp_path.glob("*/*.png")}
    assert len(alone) == 6
    assert in_folder == alone


def test_photo_is_turned_upright(tmp_path):
    stored = write_photo(tmp_path / "photo.png")
    upright = np.rot90(stored, -1)  # a quarter to the right, as tag 6 asks
    found = read(tmp_path / "photo.png", (3, 9, 12))
    np.testing.assert_array_equal(found, upright.transpose(2, 0, 1))
    assert found.flags.writeable  # torch warns of memory that it must not write to


@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
def test_sixteen_bits_are_scaled_not_clipped(tmp_path, suffix):
    expected = write_deep(tmp_path / f"deep.{suffix}")
    np.testing.assert_array_equal(read(tmp_path / f"deep.{suffix}", (1, 9, 12)), expected[None])
    np.testing.assert_array_equal(read(tmp_path / f"deep.{suffix}", (3, 9, 12)), np.stack([expected] * 3))


@given(
    width=st.integers(1, 40),
    height=st.integers(1, 40),
    size=st.integers(1, 12),
    mode=st.sampled_from(["L", "RGB", "1", "LA", "RGBA", "P", "CMYK"]),
    channels=st.sampled_from([1, 3]),
)
def test_square_target_is_the_middle_square_resized(tmp_path_factory, width, height, size, mode, channels):
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    path = tmp_path_factory.getbasetemp() / "one.tif"
    Image.fromarray(pixels).convert(mode).save(path)
    side = min(width, height)
    left, top = (width - side) // 2, (height - side) // 2
    with Image.open(path) as image:
        square = image.convert("L" if channels == 1 else "RGB").crop((left, top, left + side, top + side))
    expected = np.asarray(square.resize((size, size), Image.Resampling.BILINEAR)).reshape(size, size, -1)
    np.testing.assert_array_equal(read(path, (channels, size, size)), expected.transpose(2, 0, 1))


@pytest.mark.parametrize(
    ("shape", "rows", "columns"),
    [((1, 4, 8), slice(6, 14), slice(0, 16)), ((1, 8, 4), slice(0, 20), slice(3, 13)), ((1, 1, 100), 9, slice(0, 16))],
)
def test_oblong_target_takes_the_middle_of_its_own_proportions(tmp_path, shape, rows, columns):
    pixels = np.zeros((20, 16), dtype=np.uint8)
    pixels[rows, columns] = 200
    Image.fromarray(pixels).save(tmp_path / "one.png")
    found = read(tmp_path / "one.png", shape)
    assert found.shape == shape
    assert (found == 200).all()  # the cut is exact: nothing is blended across it


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("1", 1), ("LA", 1), ("RGB", 3), ("P", 3), ("CMYK", 3)])
def test_channels_are_those_of_the_file_unless_stated(tmp_path, mode, channels):
    Image.new("RGB", (4, 4), "red").convert(mode).save(tmp_path / "one.tif")
    assert read(tmp_path / "one.tif", (None, 2, 2)).shape == (channels, 2, 2)


def test_unreadable_files_are_one_line_that_names_them(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    Image.new("L", (50, 50)).save(tmp_path / "bomb.png")
    write_photo(tmp_path / "cut.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:-60])
    (tmp_path / "text.png").write_text("words")
    (tmp_path / "empty.png").touch()
    (tmp_path / "folder.png").mkdir()
    messages = {
        "bomb.png": "unreadable image (Image size (2500 pixels) exceeds limit of 2000 pixels",
        "cut.png": "unreadable image (",
        "text.png": "not an image that Pillow can read",
        "empty.png": "not an image that Pillow can read",
        "folder.png": "unreadable image (Is a directory)",
        "missing.png": "unreadable image (No such file or directory)",
    }
    for name, message in messages.items():
        with pytest.raises(ValueError, match=re.escape(f"{tmp_path / name}: {message}")) as caught:
            read(tmp_path / name, (3, 8, 8))
        assert "\n" not in str(caught.value)


def test_large_picture_below_the_guard_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)  # Pillow warns from there on and refuses twice as much
    Image.new("L", (40, 40), 7).save(tmp_path / "large.png")
    assert (read(tmp_path / "large.png", (1, 2, 2)) == 7).all()


@given(position=st.integers(0, 400), value=st.integers(0, 255))
def test_an_altered_file_gives_pixels_or_a_value_error(tmp_path_factory, position, value):
    path = tmp_path_factory.getbasetemp() / "altered.tif"
    pixels = np.random.default_rng(0).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, compression="tiff_lzw")
    content = bytearray(path.read_bytes())
    content[position] = value
    path.write_bytes(content)
    try:
        assert read(path, (3, 4, 4)).shape == (3, 4, 4)
    except ValueError as error:
        assert str(error).startswith(f"{path}: ")  # noqa: PT017

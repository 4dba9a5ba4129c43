"""The user's own images: folders and .npz files, good and bad."""

import os
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import raytraced
from raytraced.tasks.images.loading import load
from raytraced.tasks.images.task import ImageTask, image_files
from raytraced.tasks.paths import visible


def write_folder(folder, counts, mode="RGB", size=(9, 7)):
    """Random PNG files, one sub-folder a class."""
    generator = np.random.default_rng(0)
    for class_name, num in counts.items():
        (folder / class_name).mkdir(parents=True)
        for number in range(num):
            shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
            pixels = generator.integers(0, 256, shape, dtype=np.uint8)
            Image.fromarray(pixels).save(folder / class_name / f"{number:03}.png")
    return folder


def npz_arrays(num=40, shape=(6, 6)):
    generator = np.random.default_rng(0)
    return {
        "x_train": generator.integers(0, 256, (num, *shape), dtype=np.uint8),
        "y_train": np.arange(num) % 4,
        "x_test": generator.integers(0, 256, (8, *shape), dtype=np.uint8),
        "y_test": np.arange(8) % 4,
    }


def write_npz(path, **changes):
    arrays = npz_arrays() | changes
    np.savez(path, **{key: array for key, array in arrays.items() if array is not None})
    return str(path)


def test_folder_becomes_three_splits_of_every_class(tmp_path):
    folder = write_folder(tmp_path / "pets", {"cat": 20, "dog": 30})
    dataset = load(str(folder), size=8)
    assert (dataset.name, dataset.class_names, dataset.image_shape) == ("pets", ("cat", "dog"), (3, 8, 8))
    counts = [split.labels.bincount().tolist() for split in (dataset.train, dataset.validation, dataset.test)]
    # a fifth of each class is the test split, a tenth of the rest, rounded half up, the validation split
    assert counts == [[14, 22], [2, 2], [4, 6]]


def test_folder_with_train_and_test_keeps_the_users_split(tmp_path):
    write_folder(tmp_path / "train", {"a": 10, "b": 10})
    write_folder(tmp_path / "test", {"a": 3, "b": 4})
    dataset = load(str(tmp_path), size=4)
    assert dataset.test.labels.bincount().tolist() == [3, 4]
    assert len(dataset.train) + len(dataset.validation) == 20


def test_image_of_the_stated_size_keeps_its_pixels(tmp_path):
    folder = write_folder(tmp_path, {"a": 4, "b": 4}, size=(8, 8))
    dataset = load(str(folder), size=8)
    files = sorted(folder.glob("*/*.png"))
    expected = {np.asarray(Image.open(file)).transpose(2, 0, 1).tobytes() for file in files}
    splits = (dataset.train, dataset.validation, dataset.test)
    assert {image.numpy().tobytes() for split in splits for image in split.images} == expected


def test_wide_image_is_cut_to_its_middle_square_before_it_is_resized(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(3):
            pixels = np.zeros((10, 30), dtype=np.uint8)
            pixels[:, 10:20] = 100 + number
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    dataset = load(str(tmp_path), size=5)
    assert dataset.train.images.min() >= 100


@pytest.mark.parametrize(
    ("mode", "colour", "channels"), [("RGB", None, 3), ("L", None, 1), ("RGB", False, 1), ("L", True, 3)]
)
def test_colour_is_that_of_the_images_unless_stated(tmp_path, mode, colour, channels):
    folder = write_folder(tmp_path, {"a": 4, "b": 4}, mode=mode)
    assert load(str(folder), size=8, colour=colour).image_shape == (channels, 8, 8)


def test_sixteen_bit_images_are_scaled_not_clipped(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(3):
            pixels = np.full((4, 4), (0x10 + number) << 8, dtype=np.uint16)
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    dataset = load(str(tmp_path), size=4)
    splits = (dataset.train, dataset.validation, dataset.test)
    assert {int(value) for split in splits for value in split.images.unique()} == {0x10, 0x11, 0x12}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda folder: (folder / "a" / "000.png").write_text("no picture"),
            r"a/000.png: not an image that Pillow can",
        ),
        (lambda folder: cut_file(folder / "a" / "000.png", 120), r"a/000.png: unreadable image"),
        (
            lambda folder: write_folder(folder, {"few": 2}),
            r"class 'few' has 2 images to train on, at least 3 are needed",
        ),
        (lambda folder: write_folder(folder / "train", {"a": 3, "b": 3}), r"train: sub-folders but no images, where"),
    ],
)
def test_bad_folder_is_one_line(tmp_path, spoil, message):
    folder = write_folder(tmp_path, {"a": 4, "b": 4})
    spoil(folder)
    with pytest.raises(ValueError, match=message) as caught:
        load(str(folder))
    assert "\n" not in str(caught.value)


def cut_file(path, length):
    path.write_bytes(path.read_bytes()[:length])


def test_folder_with_fewer_than_two_classes_is_refused(tmp_path, capsys):
    with pytest.raises(ValueError, match="0 sub-folders with images, at least 2 are needed, one per class"):
        load(str(tmp_path))
    write_folder(tmp_path, {"only": 4})
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="1 sub-folders with images, at least 2 are needed, one per class"):
        load(str(tmp_path))
    assert capsys.readouterr().err == f"{tmp_path / 'empty'}: an empty folder, left out\n"


def test_all_bad_files_are_in_one_list_and_can_be_left_out(tmp_path, capsys):
    folder = write_folder(tmp_path / "pets", {"cat": 20, "dog": 20})
    kept = {pixels.tobytes() for pixels in pixels_of(load(str(folder), size=8))}
    for number in range(14):
        (folder / "cat" / f"x{number:02}.png").write_text("no picture")
    write_folder(folder, {"more": 1})
    (folder / "more" / "000.png").rename(folder / "dog" / "cut.png")
    (folder / "more").rmdir()
    cut_file(folder / "dog" / "cut.png", 120)
    with pytest.raises(ValueError, match="15 of 55 files cannot be read") as caught:
        load(str(folder), size=8)
    first, *others = [
        f"{folder / 'cat' / f'x{number:02}.png'}: not an image that Pillow can read" for number in range(10)
    ]
    assert str(caught.value) == f"{folder}: 15 of 55 files cannot be read (skip_bad leaves them out): {first}"
    assert caught.value.__notes__ == [*(f"  {other}" for other in others), "  and 5 more"]
    capsys.readouterr()
    dataset = load(str(folder), size=8, skip_bad=True)
    assert {pixels.tobytes() for pixels in pixels_of(dataset)} == kept
    assert dataset.class_names == ("cat", "dog")
    assert capsys.readouterr().err == f"{folder}: 15 of 55 files cannot be read, left out\n"


def test_class_of_bad_files_only_is_named_even_if_they_may_be_left_out(tmp_path):
    folder = write_folder(tmp_path, {"a": 4, "b": 4, "c": 3})
    for path in (folder / "c").iterdir():
        path.write_text("no picture")
    with pytest.raises(ValueError, match="class 'c' has 0 images to train on, at least 3 are needed"):
        load(str(folder), skip_bad=True)
    for path in folder.glob("*/*"):
        path.write_text("no picture")
    with pytest.raises(ValueError, match=f"{folder}: no images that can be read"):
        load(str(folder), skip_bad=True)


def test_empty_class_folder_is_reported_and_left_out(tmp_path, capsys):
    folder = write_folder(tmp_path, {"a": 4, "b": 4})
    (folder / "empty").mkdir()
    (folder / "empty" / ".hidden").write_text("not seen")
    assert load(str(folder), size=8).class_names == ("a", "b")
    assert capsys.readouterr().err == f"{folder / 'empty'}: an empty folder, left out\n"


def test_class_without_test_images_is_told(tmp_path, capsys):
    write_folder(tmp_path / "train", {"a": 4, "b": 4, "c": 4})
    write_folder(tmp_path / "test", {"a": 4})
    dataset = load(str(tmp_path), size=8)
    assert (dataset.class_names, set(dataset.test.labels.tolist())) == (("a", "b", "c"), {0})
    assert capsys.readouterr().err == f"{tmp_path / 'test'}: no images of b, c\n"
    write_folder(tmp_path / "test", {"d": 1})
    with pytest.raises(ValueError, match=r"test: classes \['d'\] are not in train"):
        load(str(tmp_path), size=8)


def test_current_folder_has_the_name_it_has_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(write_folder(tmp_path / "pets", {"a": 4, "b": 4}))
    assert load(".", size=8).name == "pets"


def pixels_of(dataset):
    return [image.numpy() for split in (dataset.train, dataset.validation, dataset.test) for image in split.images]


def test_npz_file_becomes_a_data_set(tmp_path):
    dataset = load(write_npz(tmp_path / "mine.npz", class_names=np.array(["n", "e", "s", "w"])))
    assert (dataset.name, dataset.class_names, dataset.image_shape) == ("mine", ("n", "e", "s", "w"), (1, 6, 6))
    assert (len(dataset.train), len(dataset.validation), len(dataset.test)) == (36, 4, 8)
    np.testing.assert_array_equal(dataset.test.images[:, 0].numpy(), npz_arrays()["x_test"])


@pytest.mark.parametrize(
    ("as_labels", "class_names"),
    [
        (lambda y: np.array(["north", "east", "south", "west"])[y], ("east", "north", "south", "west")),
        (lambda y: np.array([b"north", b"east", b"south", b"west"])[y], ("east", "north", "south", "west")),
        (lambda y: y >= 2, ("False", "True")),
    ],
)
def test_labels_may_be_words_or_truth_values(tmp_path, as_labels, class_names):
    arrays = npz_arrays()
    words = {key: as_labels(arrays[key]) for key in ("y_train", "y_test")}
    dataset = load(write_npz(tmp_path / "mine.npz", **words))
    assert dataset.class_names == class_names
    expected = [word.decode() if isinstance(word, bytes) else str(word) for word in words["y_test"].tolist()]
    assert [dataset.class_names[label] for label in dataset.test.labels] == expected


def test_class_names_give_the_order_of_words_and_the_names_of_truth_values(tmp_path):
    arrays = npz_arrays()
    names = np.array(["west", "south", "north", "east"])
    words = {key: names[arrays[key]] for key in ("y_train", "y_test")}
    dataset = load(write_npz(tmp_path / "mine.npz", **words, class_names=names))
    assert (dataset.class_names, dataset.test.labels.tolist()) == (tuple(names), arrays["y_test"].tolist())
    truth = {key: arrays[key] >= 2 for key in ("y_train", "y_test")}
    dataset = load(write_npz(tmp_path / "mine.npz", **truth, class_names=np.array(["no", "yes"])))
    assert (dataset.class_names, dataset.test.labels.tolist()) == (("no", "yes"), [0, 0, 1, 1] * 2)


def test_npz_file_without_a_test_split_is_split_as_a_folder_is(tmp_path):
    arrays = npz_arrays(num=60)
    arrays["y_train"] = np.sort(arrays["y_train"])
    alone = load(write_npz(tmp_path / "alone.npz", **arrays | {"x_test": None, "y_test": None}))
    for number, (image, label) in enumerate(zip(arrays["x_train"], arrays["y_train"], strict=True)):
        (tmp_path / "folder" / str(label)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(tmp_path / "folder" / str(label) / f"{number:02}.png")
    folder = load(str(tmp_path / "folder"), size=6)
    assert alone.test.labels.bincount().tolist() == [3] * 4
    for split in ("train", "validation", "test"):
        np.testing.assert_array_equal(getattr(alone, split).images, getattr(folder, split).images)
        np.testing.assert_array_equal(getattr(alone, split).labels, getattr(folder, split).labels)


@pytest.mark.parametrize("layout", ["first", "last"])
def test_colour_axis_may_be_first_or_last(tmp_path, layout):
    arrays = npz_arrays(shape=(6, 5, 3))
    if layout == "first":
        arrays |= {key: arrays[key].transpose(0, 3, 1, 2) for key in ("x_train", "x_test")}
    dataset = load(write_npz(tmp_path / "mine.npz", **arrays))
    np.testing.assert_array_equal(
        dataset.test.images.numpy(), npz_arrays(shape=(6, 5, 3))["x_test"].transpose(0, 3, 1, 2)
    )


@pytest.mark.parametrize(("dtype", "scale"), [(np.float32, 255), (np.float64, 1), (np.int32, 1)])
def test_numbers_of_other_types_become_the_same_bytes(tmp_path, dtype, scale):
    arrays = npz_arrays()
    changed = {key: (arrays[key] / scale).astype(dtype) for key in ("x_train", "x_test")}
    dataset = load(write_npz(tmp_path / "mine.npz", **changed))
    np.testing.assert_array_equal(dataset.test.images[:, 0].numpy(), arrays["x_test"])


NOT_FINITE = np.where(np.arange(36) == 5, np.nan, 0.5).reshape(1, 6, 6).repeat(40, axis=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_train": NOT_FINITE}, "x_train: 40 values are not finite"),
        ({"x_train": np.full((40, 6, 6), 300)}, r"x_train: values 300 … 300, expected 0 … 255, or fractions 0 … 1"),
        (
            {"x_train": np.arange(1440).reshape(40, 6, 6) / 1000},
            "x_train: fractions up to 1.439, expected whole numbers",
        ),
        ({"x_train": np.full((40, 6, 6), -0.5)}, r"x_train: values -0.5 … -0.5, expected"),
        ({"x_train": np.zeros((40, 36))}, r"x_train: shape \(40, 36\), expected \(n, H, W\)"),
        ({"x_train": np.zeros((0, 6, 6))}, r"x_train: shape \(0, 1, 6, 6\), expected"),
        ({"x_train": np.full((40, 6, 6), "a")}, "x_train: <U1, expected numbers"),
        ({"x_train": np.zeros((40, 6, 6))}, "channel 0: every pixel of the training images has the same value"),
        ({"x_test": np.zeros((8, 5, 5))}, r"x_train and x_test have different shapes \(1, 6, 6\) and \(1, 5, 5\)"),
        ({"y_train": np.arange(39) % 4}, "x_train has 40 images, y_train 39 labels"),
        ({"y_train": np.arange(40) % 4 + 0.5}, "y_train: expected whole numbers from 0"),
        ({"y_train": np.arange(40) % 4 - 1}, "y_train: expected whole numbers from 0"),
        ({"y_train": np.zeros((40, 4))}, r"y_train: shape \(40, 4\), expected \(n,\)"),
        ({"y_train": np.arange(40) % 3}, "mine: class '3' has 0 images to train on, at least 2 are needed"),
        ({"y_test": np.full(8, 9)}, "mine: class '4' has 0 images to train on, at least 2 are needed"),
        ({"y_train": np.zeros(40, int), "y_test": np.zeros(8, int)}, "mine: 1 class, at least 2 are needed"),
        ({"y_train": np.full(40, "a"), "y_test": np.full(8, "a")}, "mine: 1 class, at least 2 are needed"),
        ({"y_train": np.full(40, False), "y_test": np.full(8, False)}, "class 'True' has 0 images to train on"),
        ({"y_train": np.full(40, "a")}, "y_train: expected whole numbers from 0, or text in all labels"),
        (
            {"y_train": np.full(40, "a"), "y_test": np.full(8, "b"), "class_names": np.array(["a", "c"])},
            "y_test: label 'b' is not one of class_names",
        ),
        ({"y_train": np.full(40, 2**40)}, "y_train: label 1.09951e.12, expected numbers from 0 without gaps"),
        ({"y_train": None, "x_test": None, "y_test": None}, r"\(it has no y_train\)$"),
        ({"y_train": np.array(["a", "b"] * 20, dtype=object)}, r"np.array\(labels, dtype=str\) makes text of them"),
        ({"y_test": None}, r"mine.npz: not an .npz file with .* \(it has no y_test"),
        ({"class_names": np.array(["a"])}, "1 class_names for 4 classes"),
    ],
)
def test_bad_npz_file_is_one_line(tmp_path, changes, message):
    path = write_npz(tmp_path / "mine.npz", **changes)
    with pytest.raises(ValueError, match=message) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_file_that_is_not_npz_is_one_line(tmp_path):
    path = tmp_path / "mine.npz"
    write_npz(path)
    whole = path.read_bytes()
    np.save(tmp_path / "single.npy", np.zeros(3))
    np.savez(tmp_path / "pickled.npz", **npz_arrays() | {"x_train": np.array([object()])})
    broken = {"short.npz": whole[: len(whole) // 2], "empty.npz": b"", "text.npz": b"words, words"}
    for name, content in broken.items():
        (tmp_path / name).write_bytes(content)
    for name in ("single.npy", "pickled.npz", *broken):
        with pytest.raises(ValueError, match=f"{name}: not an .npz file with x_train and y_train") as caught:
            load(str(tmp_path / name))
        assert "\n" not in str(caught.value)


def test_two_classes_of_one_name_are_refused(tmp_path):
    with pytest.raises(ValueError, match="mine: two classes are called 'n'; give them different names"):
        load(write_npz(tmp_path / "mine.npz", class_names=np.array(["n", "n", "s", "w"])))


def test_an_npz_without_arrays_is_refused(tmp_path):
    write_npz(tmp_path / "mine.npz")
    with zipfile.ZipFile(tmp_path / "mine.npz") as whole, zipfile.ZipFile(tmp_path / "odd.npz", "w") as odd:
        for name in whole.namelist():
            odd.writestr(name.removesuffix(".npy"), b"no array") if "x_train" in name else odd.writestr(
                name, whole.read(name)
            )
    with pytest.raises(ValueError, match=r"odd.npz: x_train: shape \(\), expected"):
        load(str(tmp_path / "odd.npz"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else for a while")
@pytest.mark.parametrize("closed", ["c", "."])
def test_a_folder_that_may_not_be_read_is_refused_and_not_left_out(closed):
    # not pytest's folder, which only its owner may enter
    with tempfile.TemporaryDirectory() as place:
        folder = write_folder(Path(place) / "mine", dict.fromkeys("abc", 4))
        Path(place).chmod(0o755)
        (folder / closed).chmod(0o000)
        os.seteuid(65534)
        try:
            for exit_every in (lambda: load(str(folder), size=8), lambda: image_files([str(folder)])):
                with pytest.raises(PermissionError):
                    exit_every()
        finally:
            os.seteuid(0)
            (folder / closed).chmod(0o755)


def test_what_is_below_a_folder_comes_in_the_order_of_its_names(tmp_path):
    for name in ("b/2.png", "b/10.png", "a/z/1.png", "a.png", ".hidden/1.png", "b/.hidden"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = [str(path.relative_to(tmp_path)) for path in visible(tmp_path, below=True) if path.is_file()]
    assert found == ["a/z/1.png", "a.png", "b/10.png", "b/2.png"]


def test_a_class_folder_whose_name_is_not_utf8_has_a_name_that_can_be_printed(tmp_path):
    folder = write_folder(tmp_path, {"a": 4, "b": 4})
    try:
        os.rename(os.fsencode(folder / "b"), os.fsencode(folder) + b"/caf\xe9")
    except OSError:
        pytest.skip("this file system takes no names that are not UTF-8")
    assert load(str(folder), size=4).class_names == ("a", "caf\\xe9")


def test_predict_names_bad_files_or_leaves_them_out(tmp_path, capsys):
    model, task = raytraced.load("mre-digits"), ImageTask()
    write_folder(tmp_path, {"b": 2, "a": 1}, mode="L")
    (tmp_path / "a" / "notes.txt").write_text("no picture")
    options = {"max_experts": None, "confidence": None}
    paths = [str(tmp_path / "b"), str(tmp_path / "a")]
    with pytest.raises(
        ValueError, match=r"^1 of 4 files cannot be read \(skip_bad leaves them out\): .*notes.txt: not an image"
    ):
        task.predict(model, paths, 1, options, None)
    rows = task.predict(model, paths, 1, options, None, skip_bad=True)
    assert [Path(row["image"]).relative_to(tmp_path).as_posix() for row in rows] == [
        "b/000.png",
        "b/001.png",
        "a/000.png",
    ]
    assert "1 of 4 files cannot be read, left out" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"none of 1 files can be read: .*notes.txt"):
        task.predict(model, [str(tmp_path / "a" / "notes.txt")], 1, options, None, skip_bad=True)


def test_evaluation_leaves_bad_files_out_where_asked(tmp_path):
    model, task = raytraced.load("mre-digits"), ImageTask()
    folder = write_folder(tmp_path, {str(digit): 4 for digit in range(10)}, mode="L", size=(8, 8))
    (folder / "3" / "bad.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match="1 of 41 files cannot be read"):
        task.load_for(model, str(folder))
    data = task.load_for(model, str(folder), skip_bad=True)
    assert sum(map(len, data.splits.values())) == 40

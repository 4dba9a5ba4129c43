"""The parts of the page (weights, test images, one HTML file), and what a hostile model file cannot do to it."""

import hashlib
import json
import os
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

import raytraced as rt
from explore.engine import inflated
from raytraced.cli.explore import SHIPPED_IMAGES
from raytraced.cli.main import main
from raytraced.data.cache import replace_entry
from raytraced.data.sources import ArrayInfo, Entry, PublicSet
from raytraced.explore.gallery import choose_images, has_images, ink_of, pack_gallery
from raytraced.explore.packing import pack_model, planes_of, unpackable_reason
from raytraced.explore.page import make_page
from raytraced.io.saving import PRETRAINED
from raytraced.models.registry import SHIPPED
from raytraced.tasks.images.catalog import CATALOG
from raytraced.tasks.images.loading import load as load_data
from raytraced.tasks.images.task import ImageTask

GREY = {"image_shape": (1, 8, 8), "num_classes": 3}


def packs_of(page):
    return json.loads(re.search(r'id="models">(.*?)</script>', page, re.DOTALL)[1])


def test_packed_numbers_are_the_weights_to_a_millionth():
    numbers = np.concatenate(
        [np.random.default_rng(0).normal(size=1000), [0.0, -0.0, np.inf, 3.4028235e38, 1e-40]]
    ).astype(np.float32)
    planes = np.frombuffer(planes_of(numbers), np.uint8).reshape(4, -1)
    found = np.ascontiguousarray(planes.T).view("<f4")[:, 0]
    np.testing.assert_allclose(found[:1000], numbers[:1000], rtol=5e-7)
    np.testing.assert_allclose(found[1000:], numbers[1000:], rtol=5e-7, atol=1e-44)


def test_the_gallery_goes_from_easy_to_hard_and_has_wrong_answers():
    model, test = rt.load("mre-digits"), load_data("digits").test
    packed = pack_gallery(model, "digits")
    images = np.cumsum(np.frombuffer(inflated(packed["images"]), np.uint8), dtype=np.uint8)
    images, labels = torch.from_numpy(images.reshape(-1, 1, 8, 8)), torch.tensor(packed["labels"])
    out = model(images)
    right = out.logits.softmax(-1).gather(1, labels[:, None])[:, 0]
    assert (right.diff() <= 1e-6).all()
    assert 0 < int((out.logits.argmax(-1) != labels).sum()) < len(labels) / 2
    assert set(labels.tolist()) == set(range(10))
    active = model(test.images).routes[0].active.flatten(1)
    for label in range(10):
        expected = active[test.labels == label].mean(0) * 1000
        assert packed["shares"][label] == pytest.approx(expected.tolist(), abs=0.51)


def test_the_gallery_of_many_or_few_classes_is_about_as_large():
    right = torch.rand(5000)
    for num_classes in (2, 10, 100):
        labels = torch.arange(5000) % num_classes
        shown = choose_images(right, right > 0.3, labels)
        assert 20 <= len(shown) <= 32
        assert len(set(shown)) == len(shown)


def test_ink_is_how_much_of_the_frame_is_filled():
    images = torch.zeros(3, 1, 10, 10, dtype=torch.uint8)
    images[:, 0, 2:8, 4:6] = 255
    assert ink_of(images) == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (rt.build("top-k", **GREY), "not a raytraced model"),
        (rt.build("gpt-dense", dim=16), "not a raytraced model"),
        (rt.build("multi-exit", **GREY), "image and text models"),
        (rt.build("mre", **GREY, expert=lambda: torch.nn.Linear(16, 16)), "custom modules"),
        (rt.build("gpt-mre", dim=16, tokenizer="{}"), "tokenizer"),
    ],
    ids=["top-k", "gpt-dense", "multi-exit", "custom experts", "tokenizer"],
)
def test_a_model_that_the_page_cannot_run_is_refused(model, reason):
    assert reason in unpackable_reason(model)
    with pytest.raises(ValueError, match=f"^mine: .*{reason}"):
        make_page([("mine", model)])


def test_a_model_in_half_or_double_precision_is_packed_alike():
    model = rt.load("mre-digits")
    assert pack_model("a", model)["weights"] == pack_model("a", model.double())["weights"]


def test_a_model_whose_data_is_not_cached_is_in_the_page_without_images(capsys):
    model = rt.load("mre-mnist")
    page = make_page([("mre-mnist", model)], root="/nonexistent")
    assert "gallery" not in packs_of(page)[0]
    assert "raytraced data get mnist" in capsys.readouterr().err


@pytest.fixture
def private(tmp_path, monkeypatch):
    """Images in the working folder that fit the digits model, and a name of a text of the catalogue beside them."""
    images = np.random.default_rng(0).integers(0, 256, (60, 8, 8), np.uint8)
    np.savez(tmp_path / "private.npz", x_train=images, y_train=np.arange(60) % 10)
    (tmp_path / "shakespeare").write_bytes((tmp_path / "private.npz").read_bytes())
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "private.npz"


HOSTILE_PATHS = (
    "{private}",
    "private.npz",
    "./private.npz",
    "shakespeare",
    "pipe",
    "/dev/zero",
    "/dev/stdin",
    "~",
    "..",
    "",
)


@pytest.mark.parametrize("data", HOSTILE_PATHS)
def test_a_card_cannot_make_the_page_open_a_path(private, data, capsys, monkeypatch):
    opened = []
    monkeypatch.setattr(ImageTask, "load", lambda self, data, *args, **options: opened.append(data))
    model = rt.load("mre-digits")
    model.card = replace(model.card, data=data.format(private=private))
    page = make_page([("digits", model)])
    assert opened == []
    assert "gallery" not in packs_of(page)[0]
    assert "private" not in page
    assert capsys.readouterr().err.startswith(
        "raytraced: digits: no test images in the page: its card names no image data"
    )


def test_images_that_the_user_gives_are_shown_without_their_path(private):
    model = rt.load("mre-digits")
    model.card = replace(model.card, data="mine")
    page = make_page([("digits", model)], data=str(private))
    (packed,) = packs_of(page)
    assert packed["gallery"]["num_evaluated"] == 10  # one image per class
    assert str(private.parent) not in page
    assert "private" not in page


def test_data_of_the_catalogue_is_shown_instead_of_what_the_user_gives(private):
    (packed,) = packs_of(make_page([("digits", rt.load("mre-digits"))], data=str(private)))
    assert packed["gallery"]["num_evaluated"] == len(load_data("digits").test.labels)


@pytest.mark.parametrize("options", [{"root": "/dev"}, {"data": "/dev/zero"}, {"size": "x"}, {"size": 10**9}], ids=str)
def test_data_options_of_a_card_cannot_stop_the_page(options):
    model = rt.load("mre-digits")
    model.card = replace(model.card, training={"data_options": options})
    assert packs_of(make_page([("digits", model)]))[0]["name"] == "digits"


HOSTILE_NAMES = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "\x1b]0;owned\x07",
    "{{ models }}",
    "\u202e",
    "a\nb",
)


def test_hostile_names_of_models_and_classes_stay_text(capsys):
    spec = {"image_shape": (1, 4, 4), "class_names": list(HOSTILE_NAMES), "dim": 4, "num_layers": 2, "num_experts": 2}
    page = make_page([(name, rt.build("mre", **spec)) for name in HOSTILE_NAMES])
    packs = packs_of(page)
    assert [pack["name"] for pack in packs] == list(HOSTILE_NAMES)
    assert packs[0]["classes"] == list(HOSTILE_NAMES)
    assert "<img" not in page
    assert page.count("</script>") == 3
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(HOSTILE_NAMES)
    assert all(line.isprintable() for line in lines)


def test_data_that_does_not_fit_the_model_leaves_the_page_without_images(tmp_path, capsys):
    np.savez(tmp_path / "mine.npz", x_train=np.arange(225, dtype=np.uint8).reshape(9, 5, 5), y_train=np.arange(9) % 3)
    model = rt.load("mre-digits")
    model.card = replace(model.card, data=None)
    assert "gallery" not in packs_of(make_page([("digits", model)], data=str(tmp_path / "mine.npz")))[0]
    assert "has images of shape (1, 5, 5)" in capsys.readouterr().err


def test_an_altered_copy_of_a_data_set_is_reported_and_not_downloaded_again(tmp_path, monkeypatch, capsys):
    content = np.arange(12, dtype=np.uint8)
    info = ArrayInfo(content.shape, hashlib.sha256(content.tobytes()).hexdigest())
    own = PublicSet(name="own", arrays={"a": info}, file_names=frozenset(), decode=dict, sources=(), folders=("own",))
    monkeypatch.setitem(CATALOG, "own", Entry("twelve bytes", (own,)))
    replace_entry(tmp_path, own, {"a": content})
    assert has_images("own", str(tmp_path))
    file = tmp_path / "own-arrays" / "a.npy"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    model = rt.load("mre-digits")
    model.card = replace(model.card, data="own")
    assert "gallery" not in packs_of(make_page([("digits", model)], root=str(tmp_path)))[0]
    printed = capsys.readouterr().err
    assert "no test images in the page" in printed
    assert "expected sha256" in printed


def test_two_models_of_one_name_are_refused():
    model = rt.load("mre-digits")
    with pytest.raises(ValueError, match="models=digits: is given twice"):
        make_page([("digits", model), ("digits", model)])


def test_the_page_loads_nothing():
    page = make_page([("digits", rt.load("mre-digits"))])
    without = re.sub(r'id="models">.*?</script>', "", page, flags=re.DOTALL)
    assert re.findall(r"""(?:src|href)=["'](?!data:)[^"'$]+""", without) == []
    assert set(re.findall(r"https?://[^\s\"']+", without)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in page


def test_the_command_writes_a_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rt.save(rt.build("gpt-mre", dim=16, hidden=8), tmp_path / "own.safetensors")
    assert main(["explore", "mre-digits", "own.safetensors", "--output", "both.html"]) == 0
    assert capsys.readouterr().out.startswith("both.html: 2 models, ")
    assert [pack["name"] for pack in packs_of((tmp_path / "both.html").read_text())] == ["mre-digits", "own"]
    assert main(["explore", "--output", "page.txt"]) == 2
    assert main(["explore", "gone"]) == 2
    printed = capsys.readouterr().err
    assert "output='page.txt': must end in .html" in printed
    assert "gone" in printed


def test_the_default_page_has_every_shipped_image_model():
    assert {*SHIPPED_IMAGES, "mre-text"} == {path.stem for path in PRETRAINED.glob("*.safetensors")} == set(SHIPPED)


def test_the_shipped_language_model_has_a_page_of_its_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["explore", "mre-text"]) == 0
    assert capsys.readouterr().out.startswith("page.html: 1 model, ")
    (pack,) = packs_of((tmp_path / "page.html").read_text())
    assert pack["name"] == "mre-text"


@pytest.mark.data
def test_the_page_of_all_shipped_image_models_is_below_a_megabyte():
    page = make_page([(name, rt.load(name)) for name in SHIPPED_IMAGES])
    assert all("gallery" in pack for pack in packs_of(page))
    assert len(page.encode()) < 1_000_000

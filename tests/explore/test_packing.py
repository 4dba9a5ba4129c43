"""What the page is made of: weights, test images, and one file that nothing in it can break."""

import hashlib
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

import raytraced as rt
from explore.engine import inflated
from raytraced.cli import main
from raytraced.commands.explore import SHIPPED
from raytraced.data.cache import replace_entry
from raytraced.data.sources import ArrayInfo, Entry, PublicSet
from raytraced.explore.gallery import at_hand, choose_images, ink_of, pack_gallery
from raytraced.explore.packing import pack_model, planes_of, why_unpackable
from raytraced.explore.page import make_page
from raytraced.saving import PRETRAINED
from raytraced.tasks.images.catalog import CATALOG
from raytraced.tasks.images.loading import load as load_data

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


def test_no_name_can_break_out_of_the_page():
    name = '</script><script>alert("1")</script>'
    model = rt.build(
        "mre", image_shape=(1, 4, 4), class_names=["</script>", "<!--"], dim=4, num_layers=1, num_experts=2
    )
    page = make_page([(name, model)])
    (pack,) = packs_of(page)
    assert (pack["name"], pack["classes"]) == (name, ["</script>", "<!--"])
    assert name not in page
    assert page.count("</script>") == 3


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (rt.build("top-k", **GREY), "not raytraced"),
        (rt.build("gpt-dense", dim=16), "not raytraced"),
        (rt.build("multi-exit", **GREY), "images or of text"),
        (rt.build("mre", **GREY, expert=lambda: torch.nn.Linear(16, 16)), "modules of one's own"),
        (rt.build("gpt-mre", dim=16, tokenizer="{}"), "tokenizer"),
    ],
    ids=["top-k", "gpt-dense", "multi-exit", "own experts", "tokenizer"],
)
def test_a_model_that_the_page_cannot_run_is_refused(model, reason):
    assert reason in why_unpackable(model)
    with pytest.raises(ValueError, match=f"^mine: .*{reason}"):
        make_page([("mine", model)])


def test_a_model_in_half_or_double_precision_is_packed_alike():
    model = rt.load("mre-digits")
    assert pack_model("a", model)["weights"] == pack_model("a", model.double())["weights"]


def test_a_model_without_images_at_hand_says_so(capsys):
    model = rt.load("mre-mnist")
    page = make_page([("mre-mnist", model)], root="/nonexistent")
    assert "gallery" not in packs_of(page)[0]
    assert "raytraced data get mnist" in capsys.readouterr().err


def test_a_data_set_that_changed_leaves_the_page_without_a_gallery(tmp_path, capsys):
    np.savez(tmp_path / "own.npz", images=np.zeros((9, 5, 5), np.uint8), labels=np.arange(9) % 3)
    model = rt.load("mre-digits")
    model.card = replace(model.card, data=str(tmp_path / "own.npz"))
    assert "gallery" not in packs_of(make_page([("digits", model)]))[0]
    assert capsys.readouterr().err.startswith("raytraced: digits: without a gallery: ")


def test_an_altered_copy_of_a_data_set_is_told_and_not_fetched_again(tmp_path, monkeypatch, capsys):
    content = np.arange(12, dtype=np.uint8)
    info = ArrayInfo(content.shape, hashlib.sha256(content.tobytes()).hexdigest())
    own = PublicSet(name="own", arrays={"a": info}, wanted=frozenset(), decode=dict, sources=(), folders=("own",))
    monkeypatch.setitem(CATALOG, "own", Entry("twelve bytes", (own,)))
    replace_entry(tmp_path, own, {"a": content})
    assert at_hand("own", str(tmp_path))
    file = tmp_path / "own-arrays" / "a.npy"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    model = rt.load("mre-digits")
    model.card = replace(model.card, data="own")
    assert "gallery" not in packs_of(make_page([("digits", model)], root=str(tmp_path)))[0]
    assert "without a gallery" in (told := capsys.readouterr().err)
    assert "expected sha256" in told


def test_two_models_of_one_name_are_refused():
    model = rt.load("mre-digits")
    with pytest.raises(ValueError, match="digits is given twice"):
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
    told = capsys.readouterr().err
    assert "output='page.txt': must end in .html" in told
    assert "gone" in told


def test_every_shipped_model_is_in_the_page_of_no_arguments():
    assert set(SHIPPED) == {path.stem for path in PRETRAINED.glob("*.safetensors")}


@pytest.mark.data
def test_the_page_of_all_shipped_models_is_below_a_megabyte():
    page = make_page([(name, rt.load(name)) for name in SHIPPED])
    assert all("gallery" in pack for pack in packs_of(page))
    assert len(page.encode()) < 1_000_000

"""Models as files: what comes back is what went in, and nothing in a file is ever run."""

import json
import pickle

import pytest
import torch
from safetensors.torch import save

import raytraced
from raytraced import saving
from raytraced.models import build_model
from raytraced.saving import ModelCard, load_with_card, save_model

OPTIONS = {"dim": 8, "num_layers": 2, "num_experts": 3, "train_select": "greedy"}
CARD = ModelCard("mre", (1, 8, 8), 3, OPTIONS, "digits", ("a", "b", "c"), (0.5,), (0.25,), {"epochs": 3})


@pytest.fixture
def saved(tmp_path):
    model = build_model("mre", (1, 8, 8), 3, **OPTIONS).eval()
    save_model(tmp_path / "model.safetensors", model.state_dict(), CARD)
    return tmp_path / "model.safetensors", model


def test_model_comes_back_with_its_card_and_options(saved):
    path, model = saved
    found, card = load_with_card(path)
    images = torch.randn(5, 1, 8, 8)
    assert torch.equal(found(images).logits, model(images).logits)
    assert card == CARD
    assert found.layer.train_select == "greedy"
    assert not found.training


def test_file_that_could_run_code_is_refused_unread(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("code of the file was run",))

    path = tmp_path / "model.safetensors"
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match=r"model\.safetensors: foreign: is not a safetensors file"):
        raytraced.load(path)


def test_card_that_names_no_model_or_odd_options_is_refused(tmp_path, saved):
    _, model = saved
    for change, expected in (({"model": "os.system"}, "no such model"), ({"options": {"expert": "x"}}, "expert")):
        card = ModelCard(**(CARD.__dict__ | change))
        save_model(tmp_path / "odd.safetensors", model.state_dict(), card)
        with pytest.raises(ValueError, match=expected):
            raytraced.load(tmp_path / "odd.safetensors")


@pytest.mark.parametrize("place", [0.3, 0.6, 0.99])
def test_altered_or_cut_model_is_recognised(saved, place):
    path, _ = saved
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors: "):
        raytraced.load(path)
    path.write_bytes(content[:-5])
    with pytest.raises(ValueError, match=r"model\.safetensors: cut"):
        raytraced.load(path)


def test_weights_that_do_not_fit_are_told(tmp_path, saved):
    _, model = saved
    tensors = model.state_dict()
    tensors.pop("head.bias")
    save_model(tmp_path / "less.safetensors", tensors, CARD)
    with pytest.raises(ValueError, match="do not fit model 'mre'"):
        raytraced.load(tmp_path / "less.safetensors")


def test_foreign_safetensors_and_missing_files_are_told(tmp_path):
    path = tmp_path / "other.safetensors"
    path.write_bytes(save({"weight": torch.zeros(2)}, {"format": "pt"}))
    with pytest.raises(ValueError, match="foreign: has pt"):
        raytraced.load(path)
    with pytest.raises(ValueError, match="neither a run folder"):
        raytraced.load(tmp_path / "nowhere")


def test_shipped_model_is_found_by_name(saved, monkeypatch):
    path, model = saved
    path.rename(path.with_name("mre-tiny.safetensors"))
    monkeypatch.setattr(saving, "PRETRAINED", path.parent)
    found = raytraced.load("mre-tiny")
    assert torch.equal(found.head.weight, model.head.weight)
    with pytest.raises(ValueError, match="mre-tiny"):
        raytraced.load("mre-tin")


def test_card_is_plain_json(saved):
    header = saved[0].read_bytes()
    length = int.from_bytes(header[:8], "little")
    card = json.loads(json.loads(header[8 : 8 + length])["__metadata__"]["card"])
    assert card["class_names"] == ["a", "b", "c"]

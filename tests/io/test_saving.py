"""Models as files: what comes back is what went in, and nothing in a file is ever run."""

import json
import os
import pickle
import time
from dataclasses import asdict, replace

import pytest
import torch
from safetensors.torch import save as encode

import forked
import raytraced
from raytraced.files import write_file
from raytraced.io import finding, saving
from raytraced.io.saving import save_tensors
from raytraced.models.card import OLD_NAMES, ModelCard, translate_old_names
from raytraced.models.registry import MODELS

OPTIONS = {"dim": 8, "num_layers": 2, "num_experts": 3, "train_select": "sample"}
SPEC = {"image_shape": [1, 8, 8], "class_names": ["a", "b", "c"], "mean": [0.5], "std": [0.25]}
CARD = ModelCard("mre", SPEC, OPTIONS, task="images", data="digits", training={"epochs": 3})


@pytest.fixture
def saved(tmp_path):
    model = raytraced.build("mre", **SPEC, **OPTIONS).eval()
    model.card = replace(model.card, task="images", data="digits", training={"epochs": 3})
    raytraced.save(model, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors", model


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_file_whose_writing_was_broken_off_is_the_old_one_and_nothing_is_left(tmp_path, monkeypatch, error):
    path = tmp_path / "file"
    write_file(path, "old")

    def broken(descriptor):
        raise error

    monkeypatch.setattr("os.fsync", broken)
    with pytest.raises(type(error)) as raised:
        write_file(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    assert not isinstance(error, OSError) or raised.value.filename == str(path)


def test_model_comes_back_with_its_card_and_options(saved):
    path, model = saved
    found = raytraced.load(path)
    images = torch.randint(0, 256, (5, 1, 8, 8), dtype=torch.uint8)
    assert torch.equal(found(images).logits, model(images).logits)
    assert torch.equal(found(images / 255).logits, model(images).logits)
    assert found.card == model.card
    assert found.card.spec["class_names"] == ["a", "b", "c"]
    assert (found.card.task, found.card.data, found.card.training) == ("images", "digits", {"epochs": 3})
    assert found.layer.router.config.train_select == "sample"
    assert not found.training
    assert all(parameter.requires_grad for parameter in found.parameters())


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", MODELS)
def test_every_model_comes_back_bit_for_bit(name, precision, tmp_path):
    model = raytraced.build(name, image_shape=(1, 4, 4), num_classes=3, mean=[0.3], std=[0.6]).to(precision)
    for buffer in model.buffers():  # what a router keeps beside its parameters
        buffer.logical_not_() if buffer.dtype == torch.bool else buffer.add_(1)
    raytraced.save(model, tmp_path / "model.safetensors")
    found = raytraced.load(tmp_path / "model.safetensors")
    before, after = model.state_dict(), found.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[key], after[key]) and before[key].dtype == after[key].dtype for key in before)
    assert (found.card.model, found.card.options) == (name, model.card.options)


def test_a_model_that_cannot_be_built_again_is_not_saved(tmp_path):
    model = raytraced.build("top-k", image_shape=(1, 4, 4), num_classes=3, dim=6, expert=lambda: torch.nn.Linear(6, 6))
    with pytest.raises(ValueError, match="top-k: its card holds more than plain values, a file cannot"):
        raytraced.save(model, tmp_path / "model.safetensors")
    model.card = replace(model.card, model="", options={})
    with pytest.raises(ValueError, match="Classifier: its card has no model name; only a model made by"):
        raytraced.save(model, tmp_path / "model.safetensors")
    model.card = None
    with pytest.raises(ValueError, match=r"Classifier: has no card; only a model made by raytraced\.build or load"):
        raytraced.save(model, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="Linear: has no card"):
        raytraced.save(torch.nn.Linear(2, 2), tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name", ["mre-digits", "mre-mnist", "mre-fashion-mnist", "mre-cifar10", "mre-paper-fashion-mnist"]
)
def test_a_shipped_model_takes_images_as_they_are_and_knows_its_classes(name):
    model = raytraced.load(name)
    shape, names = model.card.spec["image_shape"], model.card.spec["class_names"]
    images = torch.randint(0, 256, (3, *shape), dtype=torch.uint8)
    assert torch.equal(model(images).logits, model(images / 255).logits)
    assert model(images).logits.shape == (3, len(names)) == (3, 10)
    assert model.card.data in name
    assert model.card.task == "images"
    with pytest.raises(ValueError, match="must be fractions in 0 … 1, or uint8; the model normalises them itself"):
        model(images.float())


def test_file_that_could_run_code_is_refused_unread(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("code of the file was run",))

    path = tmp_path / "model.safetensors"
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match=r"model\.safetensors: foreign: is not a safetensors file"):
        raytraced.load(path)


def write_with_card(path, tensors, text):
    """A file with any text for a card, its checksum right."""
    metadata = {"format": saving.MODEL_FORMAT, "card": text, "sha256": saving.checksum(tensors, text)}
    write_file(path, encode(tensors, metadata))


GOOD = asdict(CARD)
ODD_CARDS = {
    "no model": ({k: v for k, v in GOOD.items() if k != "model"}, "its card lacks model"),
    "nothing": ({}, "its card lacks model, spec, options"),
    "too much": (GOOD | {"colour": "red", "author": "x"}, "its card has entries that no card has: author, colour"),
    "a list": ([GOOD], "its card is list, not a table of names and values"),
    "odd model": (GOOD | {"model": 3}, "its card's model is 3, of the wrong kind"),
    "odd options": (GOOD | {"options": [1, 2]}, r"its card's options is \[1, 2\], of the wrong kind"),
    "odd task": (GOOD | {"task": 5}, "its card's task is 5, of the wrong kind"),
    "odd data options": (GOOD | {"training": {"data_options": 5}}, "its card's training has data_options of the wrong"),
    "odd calibration": (GOOD | {"calibration": {"confidence": "x", "exit_every": "layer"}}, "its card's calibration is .*'confidence': 'x'"),
    "half a calibration": (GOOD | {"calibration": {"confidence": 0.9}}, "its card's calibration is .*; must have a confidence and exit_every"),
    "numbers for classes": (GOOD | {"spec": SPEC | {"class_names": [1, 2, 3]}}, r"class_names=\[1, 2, 3\]: must be a list of words"),
    "one word for classes": (GOOD | {"spec": SPEC | {"class_names": "abc"}}, "class_names=abc: must be a list of words"),
    "odd shape": (GOOD | {"spec": SPEC | {"image_shape": "abc"}}, "image_shape=abc: must be three positive numbers"),
    "odd data": (GOOD | {"data": {}}, "its card's data is {}, of the wrong kind"),
    "a threshold below 0": (GOOD | {"calibration": {"confidence": -5, "exit_every": "layer"}}, "calibration has confidence=-5; must lie in 0 … 1"),
    "no threshold": (GOOD | {"calibration": {"confidence": float("nan"), "exit_every": "layer"}}, "its card's calibration holds nan; numbers must be finite"),
    "a mean of NaN": (GOOD | {"spec": SPEC | {"mean": [float("nan")]}}, "its card's spec holds nan; numbers must be finite"),
    "an infinite option": (GOOD | {"options": OPTIONS | {"stop": float("inf")}}, "its card's options holds inf; numbers must be finite"),
    "a path for data": (GOOD | {"data": "/dev/zero"}, "its card's data is '/dev/zero'; must be the name of a data set, not a path"),
    "odd option": (GOOD | {"options": {"expert": "x"}}, "expert='x': must be a function or null"),
    "unknown option": (GOOD | {"options": OPTIONS | {"nodes": 3}}, "model option nodes: mre has no such option"),
    "unknown spec": (GOOD | {"spec": SPEC | {"colour": "red"}}, "model option colour: mre has no such option"),
    "missing spec": (GOOD | {"spec": {"num_classes": 3}}, "mre: needs image_shape"),
    "odd spec": (GOOD | {"spec": SPEC | {"image_shape": 7}}, r"model\.safetensors: "),
    "odd classes": (GOOD | {"spec": SPEC | {"class_names": 7}}, r"model\.safetensors: "),
    "option and spec": (GOOD | {"options": OPTIONS | SPEC}, "its card's options repeat 'image_shape', 'class_names', 'mean', 'std'; its spec holds"),
    "other classes": (GOOD | {"spec": SPEC | {"class_names": list("abcd")}}, "its tensors do not fit model 'mre'"),
    "other shape": (GOOD | {"options": OPTIONS | {"dim": 9}}, "its tensors do not fit model 'mre'"),
}  # fmt: skip


@pytest.mark.parametrize("case", ODD_CARDS)
def test_a_card_with_missing_extra_or_wrong_entries_is_refused_in_one_line(case, saved):
    path, model = saved
    card, message = ODD_CARDS[case]
    write_with_card(path, model.state_dict(), json.dumps(card))
    with pytest.raises(saving.DamagedFileError, match=message) as error:
        raytraced.load(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text", ["", "{", '{"model": "mre",}', "[" * 100_000, "\ud83d".encode("utf-16", "surrogatepass").hex()]
)
def test_a_card_that_is_no_json_is_refused_with_the_files_name(text, saved):
    path, model = saved
    write_with_card(path, model.state_dict(), text)
    with pytest.raises(saving.DamagedFileError, match="its card is not JSON") as error:
        raytraced.load(path)
    assert str(error.value).startswith(f"{path}: ")


HUGE = {
    "mre": {"num_layers": 10**6},
    "mre-paper": {"num_hidden": 10**9},
    "top-k": {"num_layers": 10**6},
    "dense": {"num_blocks": 10**6},
    "mlp-total": {"num_layers": 10**6},
    "multi-exit": {"num_layers": 10**9},
    "chain": {"num_layers": 10**3, "num_rounds": 10**3},
    "null-experts": {"num_null": 10**30},
    "aux-free": {"dim": 10**15},
    "ada-k": {"dim": 10**30},
}


@pytest.mark.parametrize("name", HUGE)
def test_a_card_that_claims_more_than_its_file_holds_is_refused_before_it_is_built(name, saved):
    path, model = saved
    options = raytraced.build(name, image_shape=(1, 8, 8), num_classes=3).card.options | HUGE[name]
    save_tensors(path, model.state_dict(), ModelCard(name, SPEC, options))
    began = time.process_time()
    with pytest.raises(
        saving.DamagedFileError, match=r"its card claims \d+ parts|its tensors do not fit|verflow|too big|too large"
    ):
        raytraced.load(path)
    assert (
        time.process_time() - began < 2
    )  # a million modules would take minutes, their weights more memory than there is
    save_tensors(path, model.state_dict(), ModelCard(name, SPEC | {"num_classes": 10**6}, {}))
    with pytest.raises(saving.DamagedFileError):
        raytraced.load(path)


def test_a_small_file_that_claims_many_blocks_is_refused_at_once(tmp_path):
    sizes = {"dim": 16, "hidden": 8, "num_experts": 3, "num_heads": 2, "vocab_size": 16_000}
    model = raytraced.build("gpt-mre", **sizes, depth=1)
    num_held = sum(tensor.numel() for tensor in model.state_dict().values())
    card = replace(model.card, spec=model.card.spec | {"depth": 250_000})
    assert num_held > 250_000  # the file has more numbers than blocks, but not their tensors
    save_tensors(tmp_path / "model.safetensors", model.state_dict(), card)
    began = time.process_time()
    with pytest.raises(saving.DamagedFileError, match=r"it describes a model of many more tensors than \d+") as error:
        raytraced.load(tmp_path)
    assert time.process_time() - began < 2
    assert "\n" not in str(error.value)
    raytraced.build("gpt-mre", **sizes, depth=40)  # the limit holds while a file is loaded, and no longer


def test_a_header_that_is_nested_deeply_is_refused_in_one_line(tmp_path):
    header = b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(saving.DamagedFileError, match=r"model\.safetensors: altered: its header is nested too deeply$"):
        raytraced.load(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes in folders")
def test_a_pipe_or_a_device_is_never_read(tmp_path):
    pipe, device = tmp_path / "model.safetensors", tmp_path / "device" / "model.safetensors"
    os.mkfifo(pipe)
    device.parent.mkdir()
    device.symlink_to("/dev/zero")
    for path in (pipe, device):
        with pytest.raises(saving.DamagedFileError, match=r"is a pipe, a device or a folder; must be a regular file$"):
            saving.read_tensors(path, saving.MODEL_FORMAT, "card")
        for source in (path, path.parent):
            with pytest.raises(saving.DamagedFileError, match="is a pipe, a device or a folder; must be a regular"):
                raytraced.load(source)


def test_a_file_larger_than_its_header_says_is_not_read_for_it(tmp_path):
    with (tmp_path / "model.safetensors").open("wb") as stream:
        stream.write((10**12).to_bytes(8, "little") + b"{")
        stream.truncate(2 * 10**12)  # a hole: takes no place on the disk
    with pytest.raises(saving.DamagedFileError, match="foreign: is not a safetensors file"):
        raytraced.load(tmp_path)


def test_a_model_that_is_not_known_here_is_not_called_damaged(saved):
    path, model = saved
    write_with_card(path, model.state_dict(), json.dumps(GOOD | {"model": "my-router"}))
    with pytest.raises(
        ValueError, match=r"model=my-router: no such model; .*install its package, give its file with --plugin"
    ) as error:
        raytraced.load(path)
    assert not isinstance(error.value, saving.DamagedFileError)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": "/home/me/private"}, "mre: cannot be saved: its card's data is '/home/me/private'; must be the name"),
        ({"calibration": {"confidence": float("nan"), "exit_every": "layer"}}, "calibration holds nan"),
        (
            {"options": {"num_classes": 10**6}},
            "mre: cannot be saved: its card's options repeat 'num_classes'; its spec",
        ),
    ],
)
def test_a_card_that_could_not_be_loaded_is_not_saved(change, message, saved, tmp_path):
    _, model = saved
    model.card = replace(model.card, **change)
    with pytest.raises(ValueError, match=message):
        raytraced.save(model, tmp_path / "other.safetensors")
    assert not (tmp_path / "other.safetensors").exists()


OLD_CARD = {
    "model": "mre",
    "spec": SPEC,
    "options": OPTIONS | {"sight_rank": 2, "reach": 3.0},
    "training": {"look_loss": 0.5, "model_options": {"reach": 3.0}},
    "calibration": {"sure": 0.9, "look": "layer"},
}


def test_a_card_with_the_names_of_old_versions_is_translated(tmp_path):
    model = raytraced.build("mre", **SPEC, **OPTIONS, input_rank=2, output_logit_offset=3.0).eval()
    write_with_card(tmp_path / "model.safetensors", model.state_dict(), json.dumps(OLD_CARD))
    found = raytraced.load(tmp_path)
    assert (found.card.options["input_rank"], found.card.options["output_logit_offset"]) == (2, 3.0)
    assert found.card.training == {"exit_loss": 0.5, "model_options": {"output_logit_offset": 3.0}}
    assert found.card.calibration == {"confidence": 0.9, "exit_every": "layer"}
    images = torch.randint(0, 256, (5, 1, 8, 8), dtype=torch.uint8)
    assert torch.equal(found(images).logits, model(images).logits)
    raytraced.save(found, tmp_path / "new.safetensors")
    assert not any(f'\\"{name}\\"'.encode() in (tmp_path / "new.safetensors").read_bytes() for name in OLD_NAMES)


def test_shipped_cards_have_the_names_of_today():
    for file in saving.PRETRAINED.glob("*.safetensors"):
        _, text = saving.read_tensors(file, saving.MODEL_FORMAT, "card")
        assert json.loads(text) == translate_old_names(json.loads(text))
        assert {"plugins": [], "dial": {}} | json.loads(text) == asdict(raytraced.load(file).card)


def save_seeded(*paths):
    """Save the same model several times."""
    torch.manual_seed(0)
    model = raytraced.build("mre", image_shape=(1, 4, 4), num_classes=2, dim=4)
    for path in paths:
        raytraced.save(model, path)


def test_two_processes_write_the_same_bytes(tmp_path):
    """safetensors orders its metadata by a hash that differs from call to call and from process to process."""
    here = [tmp_path / f"{number}.safetensors" for number in range(12)]
    save_seeded(*here)
    done = forked.run(save_seeded, tmp_path / "there.safetensors", env=os.environ | {"PYTHONHASHSEED": "7"})
    assert done.returncode == 0, done.stderr
    written = {path.read_bytes() for path in tmp_path.iterdir()}
    assert len(written) == 1
    (content,) = written
    assert int.from_bytes(content[:8], "little") % 8 == 0  # tensors stay aligned


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


def test_weights_that_do_not_fit_are_named(tmp_path, saved):
    _, model = saved
    for change, difference in (
        (lambda tensors: tensors.pop("head.bias"), "head.bias: found none, expected"),
        (lambda tensors: tensors.update(more=torch.zeros(2)), "more: found .*, expected none"),
        (lambda tensors: tensors.update({"head.bias": torch.zeros(4)}), r"head.bias: found \(\(4,\), torch.float32\)"),
        (lambda tensors: tensors.update({"head.bias": tensors["head.bias"].half()}), "head.bias: found .*float16"),
    ):
        tensors = model.state_dict()
        change(tensors)
        save_tensors(tmp_path / "other.safetensors", tensors, CARD)
        with pytest.raises(ValueError, match=f"do not fit model 'mre' of this version .{difference}"):
            raytraced.load(tmp_path / "other.safetensors")


def test_foreign_safetensors_and_missing_files_are_refused(tmp_path):
    path = tmp_path / "other.safetensors"
    path.write_bytes(encode({"weight": torch.zeros(2)}, {"format": "pt"}))
    with pytest.raises(ValueError, match="foreign: has pt"):
        raytraced.load(path)
    with pytest.raises(ValueError, match="neither a run folder"):
        raytraced.load(tmp_path / "nowhere")


def test_shipped_model_is_found_by_name(saved, monkeypatch):
    path, model = saved
    path.rename(path.with_name("mre-tiny.safetensors"))
    monkeypatch.setattr(finding, "PRETRAINED", path.parent)
    found = raytraced.load("mre-tiny")
    assert torch.equal(found.head.weight, model.head.weight)
    with pytest.raises(ValueError, match="mre-tiny"):
        raytraced.load("mre-tin")


def test_run_is_found_by_its_name_in_the_runs_folder(saved, tmp_path, monkeypatch):
    """As in every command: `raytraced train --name mine`, then `raytraced.load("mine")`."""
    path, model = saved
    run = tmp_path / "here" / "runs" / "mine"
    run.mkdir(parents=True)
    path.rename(run / "model.safetensors")
    monkeypatch.chdir(tmp_path / "here")
    assert torch.equal(raytraced.load("mine").head.weight, model.head.weight)
    (run / "config.yaml").touch()
    with pytest.raises(ValueError, match=r"mien: is neither .*; did you mean mine\?"):
        raytraced.load("mien")
    (run / "model.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"runs/mine: holds no model.safetensors; the run is not complete: `raytraced re"
    ):
        raytraced.load("mine")


def test_card_is_plain_json(saved):
    header = saved[0].read_bytes()
    length = int.from_bytes(header[:8], "little")
    card = json.loads(json.loads(header[8 : 8 + length])["__metadata__"]["card"])
    assert card["spec"]["class_names"] == ["a", "b", "c"]
    assert card | {"plugins": [], "dial": {}} == asdict(raytraced.load(saved[0]).card)


def test_a_file_that_ends_inside_its_header_is_called_cut(tmp_path):
    model = raytraced.build("mre", image_shape=(1, 4, 4), num_classes=2)
    raytraced.save(model, tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:500])
    with pytest.raises(saving.DamagedFileError, match="cut: ends inside its header, at byte 500"):
        raytraced.load(tmp_path / "model.safetensors")
    header = b'{"__metadata__":null}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(saving.DamagedFileError, match="has no format"):
        raytraced.load(tmp_path / "model.safetensors")

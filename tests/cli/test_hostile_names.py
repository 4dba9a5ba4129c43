"""Names come from folders, files and cards of other people: no command lets a terminal obey them."""

import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import raytraced as rt
from raytraced.cli.main import main
from raytraced.errors import printable
from training.stripes import GRID

ESCAPE = "\x1b]0;owned\x07\x1b[31m"
CLASSES = (f"{ESCAPE}red", "two\nlines", "\u202ereversed\x9b1m")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Images in class folders, a run and a language model, all with names that a terminal would obey."""
    folder = tmp_path_factory.mktemp("hostile") / f"here{ESCAPE}"
    random = np.random.default_rng(0)
    for label, name in enumerate(CLASSES):
        (folder / "data" / name).mkdir(parents=True)
        for number in range(20):
            image = random.integers(0, 120, (8, 8))
            image[label::3] += 100
            Image.fromarray(image.astype(np.uint8)).save(folder / "data" / name / f"{number}{ESCAPE}.png")
    (folder / "bad").mkdir()
    (folder / "bad" / f"no-image{ESCAPE}.png").write_text("text")
    shutil.copy(next((folder / "data" / CLASSES[0]).iterdir()), folder / "bad" / "image.png")
    words = ["--data", folder / "data", "--data-options.size", 8, "--runs-dir", folder, "--name", f"one{ESCAPE}"]
    words += [word for name, value in GRID.items() for word in (f"--model-options.{name}", value)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raytraced.training.callbacks.draw_pictures", lambda *_: None)  # slow, and tested elsewhere
        assert main([str(word) for word in ("train", *words, "--epochs", 2, "--batch-size", 16, "--quiet")]) == 0
    model = rt.load(folder / f"one{ESCAPE}")
    model.card = replace(model.card, data=f"mine{ESCAPE}")
    rt.save(model, folder / f"alone{ESCAPE}.safetensors")
    torch.manual_seed(0)
    text = {"dim": 8, "num_heads": 2, "hidden": 8, "num_experts": 2, "context": 32}
    rt.save(rt.build("gpt-mre", **text), folder / f"text{ESCAPE}.safetensors")
    return folder


RUN, ALONE, TEXT = (
    f"{{place}}/{name}" for name in (f"one{ESCAPE}", f"alone{ESCAPE}.safetensors", f"text{ESCAPE}.safetensors")
)
COMMANDS = {
    "train": ("train --data {place}/data --data-options.size 8 --epochs 1 --batch-size 16 --runs-dir {place} --name more"
              " --model-options.num-layers 2 --model-options.num-experts 3", 0),
    "train, no data": ("train --data {place}/none", 2),
    "resume": (f"resume {RUN} --epochs 3", 0),
    "resume, complete": (f"resume {RUN}", 0),
    "evaluate": (f"evaluate {RUN}", 0),
    "evaluate, a card alone": (f"evaluate {ALONE}", 2),
    "evaluate, json": (f"evaluate {RUN} --json", 0),
    "evaluate, other classes": ("evaluate mre-digits --data {place}/data", 2),
    "calibrate": (f"calibrate {RUN} --within 50", None),
    "predict": (f"predict {RUN} {{place}}/data --top 3", 0),
    "predict, json": (f"predict {RUN} {{place}}/data --top 3 --json", 0),
    "predict, a bad file": (f"predict {RUN} {{place}}/bad", 2),
    "predict, a bad file left out": (f"predict {RUN} {{place}}/bad --skip-bad", 0),
    "generate": (f"generate {TEXT} {ESCAPE} --length 40", 0),
    "generate, json": (f"generate {TEXT} {ESCAPE} --length 40 --json", 0),
    "explore": (f"explore {ALONE} --output {{place}}/page.html", 0),
    "explore, with data": (f"explore {ALONE} --output {{place}}/page.html --data {{place}}/data", 0),
    "explore, no model": (f"explore none{ESCAPE}", 2),
    "export": (f"export {ALONE} --format torch --output {{place}}/none/x.pt2", 2),
    "serve": (f"serve {ALONE} --port 0", 0),
    "runs": ("runs --runs-dir {place}", 0),
    "runs, json": ("runs --runs-dir {place} --json", 0),
    "runs, none": ("runs --runs-dir {place}/none", 0),
    "compare": (f"compare {RUN} --output {{place}}/curves.png", 0),
    "checks": ("checks --data-root {place}", 0),
    "checks, json": ("checks --data-root {place} --json", 0),
    "data list": ("data list --data-root {place}", 0),
    "data get": (f"data get none{ESCAPE} --data-root {{place}}", 2),
    "data show": ("data show {place}/data --output {place}/sheet.png", 0),
    "data show, a bad file": ("data show {place}/bad --output {place}/sheet.png", 2),
    "a command": (f"{ESCAPE}", 2),
    "an option": (f"train --{ESCAPE}", 2),
    "a file of options": (f"train -c {{place}}/none{ESCAPE}", 2),
}  # fmt: skip


@pytest.mark.parametrize("case", COMMANDS)
def test_no_output_holds_what_a_terminal_would_obey(case, place, capsys, monkeypatch):
    monkeypatch.setattr("raytraced.cli.serve.run", lambda *_: None)
    monkeypatch.setattr("raytraced.training.callbacks.draw_pictures", lambda *_: None)
    monkeypatch.chdir(place)
    line, expected = COMMANDS[case]
    code = main([word.format(place=place) for word in line.split(" ")])
    printed = capsys.readouterr()
    assert expected in (None, code), printed.err
    for text in (printed.out, printed.err):
        assert {one for one in text if not one.isprintable()} <= {"\n"}, text
    if code == 2:
        assert len(printed.err.splitlines()) == 1


def test_what_is_escaped_is_still_shown(place, capsys):
    assert main(["predict", str(place / f"one{ESCAPE}"), str(place / "data" / CLASSES[1])]) == 0
    printed = capsys.readouterr().out
    assert r"two\nlines" in printed
    assert printable(next((place / "data" / CLASSES[1]).iterdir())) in printed


def test_letters_of_all_scripts_stay_as_they_are():
    assert printable("größe 漢字 ж é") == "größe 漢字 ж é"
    assert printable("a\x1b[0m\r\n\x9b\u202e\ud800") == r"a\x1b[0m\r\n\x9b\u202e\ud800"


def test_an_odd_byte_of_a_name_is_printed_as_that_byte_in_paths_and_classes():
    """A class has its name from a folder, decoded with \xe9; the path of the folder must not read otherwise."""
    assert printable(os.fsdecode(b"caf\xe9")) == r"caf\xe9" == b"caf\xe9".decode(errors="backslashreplace")


def test_a_page_holds_images_of_the_user_only_where_their_path_was_given(place, tmp_path, capsys, monkeypatch):
    """A card that names a folder does not make this machine open it."""
    monkeypatch.chdir(place)  # where the card's name is that of a folder
    model = rt.load(place / f"alone{ESCAPE}.safetensors")
    model.card = replace(model.card, data="data")
    rt.save(model, tmp_path / "model.safetensors")
    page = tmp_path / "page.html"
    for words, has_images in (((), False), (("--data", "data"), True)):
        assert main(["explore", str(tmp_path / "model.safetensors"), "--output", str(page), *words]) == 0
        printed = capsys.readouterr()
        assert ('"gallery":' in page.read_text()) == has_images
        assert ("explore --data PATH" in printed.err) == (not has_images)
        assert str(place.parent) not in page.read_text()


def test_json_of_predict_keeps_the_names_exactly(place, capsys):
    assert main(["predict", str(place / f"one{ESCAPE}"), str(place / "data"), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["answer"] for row in rows} <= set(CLASSES)
    assert all(os.path.exists(row["image"]) for row in rows)

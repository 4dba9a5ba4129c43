"""raytraced generate: the same text from the same seed, streamed, coloured in a terminal; mistakes in one line."""

import io
import json
import re

import pytest
import torch

import raytraced
from raytraced.cli import generate as command
from raytraced.cli.main import main


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name in ("mre", "top-k"):
        torch.manual_seed(0)
        sizes = {"dim": 16, "num_heads": 2, "hidden": 8, "num_experts": 3, "context": 16}
        raytraced.save(raytraced.build(f"gpt-{name}", **sizes), folder / f"{name}.safetensors")
    return folder


def generated(capsys, *words):
    assert main(["generate", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_seed_and_its_options_decide_the_text(files, capsys):
    model = files / "mre.safetensors"
    first = generated(capsys, model, "Once", "--length", 40)
    assert (first["prompt"], len(first["experts"])) == ("Once", 40)
    assert first == generated(capsys, model, "Once", "--length", 40)
    assert first["text"] != generated(capsys, model, "Once", "--length", 40, "--seed", 1)["text"]
    assert first["text"] != generated(capsys, model, "Twice", "--length", 40)["text"]
    most_likely = [
        generated(capsys, model, "Once", "--length", 40, "--seed", seed, "--temperature", 0) for seed in (0, 1)
    ]
    assert most_likely[0] == most_likely[1] == generated(capsys, model, "Once", "--length", 40, "--top_p", 1e-9)
    few = generated(capsys, model, "Once", "--length", 40, "--max_experts", 1)
    assert set(few["experts"]) <= {0, 1, 2}
    assert max(first["experts"]) > 2
    assert len(generated(capsys, model, "", "--length", 3)["experts"]) == 3


def test_drafts_leave_the_likeliest_text_as_it_is(files, capsys):
    words = (files / "mre.safetensors", "Once", "--length", 20, "--temperature", 0)
    expected = generated(capsys, *words)
    assert generated(capsys, *words, "--draft-experts", 1, "--draft-tokens", 3) == expected
    assert main(["generate", *map(str, words), "--draft-experts", "-1"]) == 2
    assert capsys.readouterr().err == "raytraced: draft_experts=-1: must not be negative\n"


def test_the_text_is_that_of_the_model(files, capsys):
    model = raytraced.load(files / "mre.safetensors")
    text, generator = list(b"Once"), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _ in range(12):  # up to the context, without any cache
            probs = (model(torch.tensor([text])).logits[0, -1].double() / 0.8).softmax(-1)
            ranked, order = probs.sort(descending=True, stable=True)
            text.append(int(order[torch.multinomial(ranked, 1, generator=generator)]))
    found = generated(capsys, files / "mre.safetensors", "Once", "--length", 12, "--seed", 5)
    assert found["text"] == bytes(text[4:]).decode(errors="replace")


def test_text_is_printed_as_it_comes_and_coloured_by_experts(monkeypatch, capsys):
    class Screen(io.StringIO):
        def isatty(self):
            return True

    parts = [(b"a", 2), ("é".encode()[:1], 4), ("é".encode()[1:], 30), (b"\x1b", 6), (b"\n", 6)]
    command.print_along("say ", iter(parts), 2, in_colour=False)
    assert capsys.readouterr().out == "say aé\ufffd\n\n"  # a terminal would obey it
    command.print_along("say ", iter(parts), 2, in_colour=True)
    printed = capsys.readouterr()
    colours = re.findall(r"\033\[38;5;(\d+)m(.)", printed.out, re.DOTALL)
    assert colours == [
        ("244", "a"),
        ("197", "é"),
        ("43", "\ufffd"),
        ("43", "\n"),
    ]  # a byte that a terminal obeys is not sent
    assert "experts per block:" in printed.err
    screen = Screen()
    monkeypatch.setattr("sys.stdout", screen)
    command.print_along("x", iter([]), 2, in_colour=False)
    assert screen.getvalue() == "\n"


def test_mistakes_are_one_line(files, capsys):
    model, top_k = str(files / "mre.safetensors"), str(files / "top-k.safetensors")
    cases = {
        "prompt: has 17 bytes; the context of gpt-mre is 16: give fewer": [model, "x" * 17],
        "mre-digits: is mre, which is not a language model; generate needs a model of the family gpt": [
            "mre-digits",
            "x",
        ],
        "max_experts=2: only for models that answer along the way, gpt-top-k does not": [
            top_k,
            "x",
            "--max_experts",
            "2",
        ],
        "temperature=-1.0: must not be negative": [model, "x", "--temperature", "-1"],
        "top_p=2.0: must lie in 0 … 1": [model, "x", "--top_p", "2"],
        "length=-1: must not be negative": [model, "x", "--length", "-1"],
    }
    for text, words in cases.items():
        assert main(["generate", *words]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        (line,) = printed.err.splitlines()
        assert text in line

"""`raytraced paths`: the table of paths as it is printed and saved is the one that the model runs."""

import csv
import json
import re

import numpy as np
import pytest
import torch

import raytraced as rt
from raytraced.cli.main import main

SMALL = {"dim": 16, "hidden": 8, "depth": 3, "num_heads": 2, "context": 16, "num_experts": 4}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Saves a small language model of a name and options, and returns its file."""
    folder = tmp_path_factory.mktemp("paths")

    def save(name, **options):
        torch.manual_seed(0)
        path = folder / f"{name}-{len(list(folder.iterdir()))}.safetensors"
        rt.save(rt.build(name, **SMALL | options), path)
        return path

    return save


@pytest.fixture(scope="module")
def model(saved):
    return saved("gpt-mre", entry_scale=8.0, input_init_std=2.0, weighting="relative", stop=0.2)


def parse(path):
    """The pairs of a path as it is printed."""
    return [tuple(int(number) - 1 for number in pair.split(":")) for pair in path.split()]


@torch.no_grad()
def test_the_file_of_rows_is_what_the_model_runs(model, tmp_path, capsys):
    file, loaded = tmp_path / "paths.csv", rt.load(model)
    assert main(["paths", str(model), "--output", str(file), "--stop", "0.05"]) == 0
    with file.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["text"] for row in rows] == [repr(bytes([byte]))[1:] for byte in range(256)]
    tokens = torch.tensor([list(b"Sing, goddess")])
    out = loaded(tokens, stop=0.05)
    for place, token in enumerate(tokens[0].tolist()):
        nodes = [node for node in out.routes[0].nodes[0, place].tolist() if node >= 0]
        assert parse(rows[token]["path"]) == [divmod(node, 4) for node in nodes]
        assert int(rows[token]["experts"]) == len(nodes)
        assert int(rows[token]["macs"]) == len(nodes) * 2 * 16 * 8
    printed = capsys.readouterr().out
    num = len({row["path"] for row in rows})
    assert f"256 tokens have {num} different paths" in printed
    assert "the first 20 are shown" in printed
    assert rows[19]["path"] in printed
    assert printed.endswith(f"{file}\n")


def test_the_file_of_arrays_holds_the_table(model, tmp_path):
    file = tmp_path / "paths.npz"
    assert main(["paths", str(model), "--output", str(file), "--max-experts", "3"]) == 0
    table = rt.load(model).paths(max_experts=3)
    with np.load(file) as arrays:
        assert set(arrays) == {"active", "weights", "nodes", "num_active", "macs"}
        for name in arrays:
            assert np.array_equal(arrays[name], getattr(table, name).detach().numpy()), name
    assert int(table.num_active.max()) == 3


def test_the_tokens_of_a_text_are_shown_with_control_characters_escaped(model, capsys):
    assert main(["paths", str(model), "--text", "a\x1b\n"]) == 0
    printed = capsys.readouterr().out
    assert re.findall(r"^ *(\d+) +(\S+) ", printed, re.MULTILINE)[:3] == [
        ("97", "'a'"),
        ("27", r"'\x1b'"),
        ("10", r"'\n'"),
    ]
    assert "\x1b" not in printed
    assert main(["paths", str(model), "--text", "ab", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["token"] for row in rows] == [97, 98]
    steps = rt.load(model).paths().steps()
    assert [[(block - 1, expert - 1) for block, expert in row["path"]] for row in rows] == [steps[97], steps[98]]


@torch.no_grad()
def test_the_paths_of_a_text_hang_on_the_token_before_where_the_model_says_so(saved, capsys):
    path = saved("gpt-mre", entry_scale=8.0, input_init_std=2.0, weighting="relative", stop=0.2, path_tokens=2)
    assert main(["paths", str(path), "--text", "abca", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    loaded = rt.load(path)
    active = loaded(torch.tensor([list(b"abca")])).routes[0].active[0]
    for row, active_LN in zip(rows, active, strict=True):
        steps = sorted([block - 1, expert - 1] for block, expert in row["path"])
        assert steps == active_LN.nonzero().tolist()
    assert rows[0]["path"] != rows[3]["path"]
    assert main(["paths", str(path)]) == 0
    assert "the path of a token that follows itself" in capsys.readouterr().out


def test_a_router_without_an_order_lists_its_experts_block_by_block(saved, tmp_path):
    path, file = saved("gpt-hash", k=2), tmp_path / "hash.csv"
    assert main(["paths", str(path), "--output", str(file)]) == 0
    active = rt.load(path).paths().active
    with file.open(newline="") as stream:
        paths = [parse(row["path"]) for row in csv.DictReader(stream)]
    assert all(
        path == [tuple(pair) for pair in one.nonzero().tolist()] for path, one in zip(paths, active, strict=True)
    )


def test_budgets_are_those_of_the_other_commands(capsys):
    assert main(["paths", "mre-text", "--experts", "5", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["experts"] for row in rows] == rt.load("mre-text").paths(experts=5.0).num_active.tolist()


def test_a_model_without_a_table_is_refused_in_one_line(saved, model, capsys, tmp_path):
    cases = {
        "mre-digits: is mre, which is not a language model; an image has no token": ["mre-digits"],
        "a token's path depends on the text before it": [str(saved("gpt-mre", routing_input="first-block"))],
        "routing_input=block: gpt-top-k: a token's path depends": [str(saved("gpt-top-k"))],
        "output=a.txt: must end in .csv or .npz": [str(model), "--output", "a.txt"],
        "text='': must have at least one character": [str(model), "--text", ""],
        "none/a.csv: folder": [str(model), "--output", f"{tmp_path}/none/a.csv"],
        "stop=0.0: must be": [str(model), "--stop", "0"],
        "has no table of budgets; run `raytraced calibrate": [str(model), "--experts", "4"],
        "text: has 99 bytes; the context of gpt-mre is 16": [str(model), "--text", "a" * 99],
    }
    cases["text: has 98 bytes"] = [str(model), "--text", "b" * 98, "--output", str(tmp_path / "left.csv")]
    for message, words in cases.items():
        assert main(["paths", *words]) == 2, words
        line = capsys.readouterr().err
        assert message in line
        assert line.count("\n") == 1
    assert not (tmp_path / "left.csv").exists()

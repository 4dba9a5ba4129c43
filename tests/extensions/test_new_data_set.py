"""A new data set is one new file and one line: it is listed, fetched, verified, cached and trained on by its name."""

from extensions.stripes import STRIPES
from raytraced.__main__ import main
from raytraced.data.sources import Entry
from raytraced.tasks.images import catalog


def test_a_new_data_set_is_one_line(monkeypatch, tmp_path, capsys):
    import sys

    monkeypatch.setitem(catalog.CATALOG, "stripes", Entry("60 images 1x8x8, 2 classes", (STRIPES,)))  # the line
    root, runs = str(tmp_path / "cache"), str(tmp_path / "runs")

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["raytraced", *words])
        return main()

    assert run("data", "list", "--data-root", root) == 0
    assert run("data", "get", "stripes", "--data-root", root) == 0
    train = ("train", "--data", "stripes", "--data_root", root, "--runs-dir", runs, "--name", "one", "--epochs", "3")
    assert run(*train, "--batch_size", "8") == 0
    assert run("evaluate", "one", "--runs-dir", runs, "--data_root", root) == 0
    printed = capsys.readouterr().out
    assert "60 images 1x8x8" in printed
    assert "2 arrays verified" in printed
    assert "accuracy 100.00%" in printed

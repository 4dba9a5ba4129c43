"""runs and compare: what there is to resume, and which run was better."""

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
from PIL import Image

from raytraced.cli.main import main
from raytraced.training.run_folder import create_run_folder


@pytest.fixture
def output(finished, tmp_path):
    """A folder with a finished run and one that stopped after an epoch."""
    folder = tmp_path / "runs"
    shutil.copytree(finished.path, folder / "one")
    half = create_run_folder(replace(finished.config, name="half", runs_dir=str(folder)), "")
    half.write_metrics(finished.read_metrics()[:1])
    return folder


def test_table_says_what_is_complete_and_what_can_be_resumed(finished, output, capsys):
    assert main(["runs", "--runs-dir", str(output)]) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line.strip()}
    summary = finished.read_summary()
    assert "3/3" in rows["one"]
    assert f"{summary['test']['accuracy']:.2%}" in rows["one"]
    assert f"{summary['test']['mean_experts']:.2f}" in rows["one"]
    assert f"{summary['parameters']:,}" in rows["one"]
    assert rows["one"][-1] == "complete"
    assert "1/3" in rows["half"]
    assert rows["half"][-3:] == ["can", "be", "resumed"]
    assert main(["runs", "--runs-dir", str(output / "none")]) == 0
    assert "no runs in" in capsys.readouterr().out


def test_json_holds_all(finished, output, capsys):
    assert main(["runs", "--runs-dir", str(output), "--json"]) == 0
    rows = {row["run"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    one, half = rows[str(output / "one")], rows[str(output / "half")]
    assert (one["complete"], half["complete"], half["epochs"], half["of"]) == (True, False, 1, 3)
    assert one["test_accuracy"] == finished.read_summary()["test"]["accuracy"]
    assert half["test_accuracy"] is half["experts"] is None
    assert half["validation_accuracy"] == finished.read_metrics()[0]["validation_accuracy"]


@pytest.mark.parametrize("width", [70, 80, 200])
def test_table_fits_the_terminal_and_never_cuts_a_name(finished, output, width):
    name = "2026-01-01-120000-stripes-mre"  # as long as those that are made up
    (output / "half").rename(output / name)
    program = (
        f"import sys; from raytraced.cli.main import main; sys.exit(main(['runs', '--runs-dir', {str(output)!r}]))"
    )
    leader, follower = pty.openpty()
    environment = os.environ | {"COLUMNS": str(width), "TERM": "dumb" if width == 80 else "xterm"}
    done = subprocess.Popen([sys.executable, "-c", program], stdout=follower, env=environment)
    assert done.wait(60) == 0
    with open(leader, "rb", buffering=0) as stream:
        lines = re.sub(r"\x1b\[[0-9;]*m", "", stream.read(65536).decode()).splitlines()
    assert max(map(len, lines)) <= width
    assert any(name in line and "can be resumed" in line for line in lines)
    assert any("no room for parameters" in line for line in lines) == (width < 120)


def test_bad_folder_is_named_and_hides_no_other(output, capsys):
    (output / "bad").mkdir()
    (output / "bad" / "config.yaml").write_text("image_size: 32")
    assert main(["runs", "--runs-dir", str(output)]) == 0
    found = capsys.readouterr()
    assert "one " in found.out
    assert f"{output / 'bad'}: left out" in found.err
    assert len(found.err.splitlines()) == 1


def test_compare_draws_and_prints_both(output, tmp_path, capsys):
    picture = tmp_path / "both.png"
    assert main(["compare", "one", "half", "--runs-dir", str(output), "--output", str(picture)]) == 0
    text = capsys.readouterr().out
    assert text.splitlines()[-1] == str(picture)
    assert "one " in text
    assert "half " in text
    with Image.open(picture) as image:
        assert image.width > 800


def test_what_cannot_be_compared_is_one_line(finished, output, tmp_path, capsys):
    create_run_folder(replace(finished.config, name="new", runs_dir=str(output)), "")
    other = create_run_folder(replace(finished.config, name="other", runs_dir=str(output)), "")
    other.write_metrics([{"epoch": 1, "train_loss": 1.0, "validation_loss": 1.0, "seconds": 1.0}])
    for name, picture, expected in (
        ("new", "a.png", "new: has not finished an epoch yet"),
        ("other", "a.png", "other: has other figures than one"),
        ("half", "a.jpg", "must end in .png"),
        ("hafl", "a.png", "did you mean half?"),
    ):
        words = ["compare", "one", name, "--runs-dir", str(output), "--output", str(tmp_path / picture)]
        assert main(words) == 2
        error = capsys.readouterr().err
        assert expected in error
        assert len(error.splitlines()) == 1
    assert not list(tmp_path.glob("a.*"))

"""evaluate prints what the run's own summary holds; other data is matched by the names of its classes."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from raytraced.cli.main import main
from raytraced.io.saving import MODEL_FORMAT, read_tensors, write_tensors


@pytest.fixture
def results(finished, capsys):
    """The JSON that `raytraced evaluate` prints."""

    def run(*words: str, source: str = str(finished.path)) -> dict:
        assert main(["evaluate", source, "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def test_it_prints_what_the_summary_holds(finished, results):
    summary = finished.read_summary()
    assert results() == summary["test"]
    assert results("--split", "validation") == summary["validation"]
    for source, words in ((str(finished.model), ()), ("one", ("--runs-dir", str(finished.path.parent)))):
        assert results(*words, source=source) == summary["test"]


def test_model_file_alone_needs_only_its_data(finished, results, tmp_path, capsys):
    alone = shutil.copy(finished.model, tmp_path)
    assert results("--data", finished.config.data, source=alone) == finished.read_summary()["test"]
    assert main(["evaluate", alone]) == 2  # its card has the name of the data, not where they lie on another machine
    assert "its card names no data set of the catalogue; give the data with --data" in capsys.readouterr().err


def test_it_takes_a_budget_a_seed_and_a_batch_size(finished, results):
    budgets = finished.read_summary()["test"]["budgets"]
    assert results("--max-experts", "1")["accuracy"] == pytest.approx(budgets[1]["accuracy"])
    assert results("--max-experts", "1")["mean_experts"] == pytest.approx(budgets[1]["experts"])
    drawn = [results("--select", "sample", "--seed", seed)["mean_experts"] for seed in ("1", "1", "2")]
    assert drawn[0] == drawn[1] != drawn[2]
    assert results("--batch-size", "7")["accuracy_by_prefix"] == finished.read_summary()["test"]["accuracy_by_prefix"]


def test_tables_fit_a_narrow_terminal_and_round_what_the_summary_holds(finished, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")  # so that rich takes it for a terminal
    monkeypatch.setenv("TERM", "dumb")  # without colours
    monkeypatch.chdir(finished.path.parent.parent)
    assert main(["evaluate", "one"]) == 0
    text, test = capsys.readouterr().out, finished.read_summary()["test"]
    lines = [line.split() for line in text.splitlines()]
    assert max(map(len, text.splitlines())) <= 80
    figures = f"accuracy {test['accuracy']:.2%} of 30 images loss {test['loss']:.4f}"
    figures += f" calibration error {test['calibration_error']:.4f} experts {test['mean_experts']:.2f}"
    assert figures in " ".join(text.split())
    for name, accuracy, experts in zip("012", test["accuracy_per_class"], test["experts_per_class"], strict=True):
        assert [name, f"{accuracy:.2%}", f"{experts:.2f}"] in lines
    for number, row in enumerate(test["budgets"]):
        assert [str(number), f"{row['accuracy']:.2%}", f"{row['experts']:.2f}", f"{row['macs']:,.0f}"] in lines


def test_redirected_figures_stay_on_one_line(finished, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["evaluate", str(finished.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{finished.path}, test data"
    assert lines[1].startswith("accuracy ")
    assert lines[1].endswith(f"experts {finished.read_summary()['test']['mean_experts']:.2f}")


def write_folder(path, stripes, names: dict[int, str]):
    """The stripes as image files in a folder for each class; those of a class without a name are left out."""
    arrays = np.load(stripes)
    for number, (image, label) in enumerate(zip(arrays["x_train"], arrays["y_train"], strict=True)):
        if label in names:
            (path / names[label]).mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(path / names[label] / f"{number}.png")
    return str(path)


def test_classes_of_a_folder_are_matched_by_name(finished, stripes, results, tmp_path, capsys):
    """In its own folders every image is scored as its own class: without class 0, label 0 of the folder is class 1."""
    all_classes = results(
        "--data", write_folder(tmp_path / "all", stripes, {0: "0", 1: "1", 2: "2"}), "--split", "train"
    )
    assert all_classes["accuracy"] > 0.9
    some = results("--data", write_folder(tmp_path / "some", stripes, {1: "1", 2: "2"}), "--split", "train")
    assert some["accuracy_per_class"] == pytest.approx([None, *all_classes["accuracy_per_class"][1:]], abs=0.05)
    assert main(["evaluate", str(finished.path), "--data", str(tmp_path / "some")]) == 0
    assert "no images" in capsys.readouterr().out
    other = write_folder(tmp_path / "other", stripes, {0: "cat", 1: "1", 2: "2"})
    assert main(["evaluate", str(finished.path), "--data", other]) == 2
    assert capsys.readouterr().err == "raytraced: data=other: class 'cat' is not one of mre's, which are 0, 1, 2\n"


def test_bad_files_of_a_folder_are_left_out_on_request(finished, stripes, tmp_path, capsys):
    folder = write_folder(tmp_path / "all", stripes, {0: "0", 1: "1", 2: "2"})
    (tmp_path / "all" / "0" / "bad.png").write_text("no image")
    words = ["evaluate", str(finished.path), "--data", folder]
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "1 of 97 files cannot be read (skip_bad leaves them out)" in line
    assert main([*words, "--skip-bad"]) == 0
    assert "1 of 97 files cannot be read, left out" in capsys.readouterr().err
    assert main(["evaluate", str(finished.path), "--data", str(stripes), "--skip-bad"]) == 0


def test_a_model_of_an_unknown_kind_is_one_clear_line(finished, tmp_path, capsys):
    tensors, text = read_tensors(finished.model, MODEL_FORMAT, "card")
    card = json.dumps(json.loads(text) | {"model": "mer"})
    write_tensors(tmp_path / "odd.safetensors", tensors, MODEL_FORMAT, "card", card)
    assert main(["evaluate", str(tmp_path / "odd.safetensors")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path / 'odd.safetensors'}: model=mer: no such model; did you mean mre?" in line
    assert "damaged" not in line


def test_data_of_another_shape_and_options_of_other_models_are_refused(finished, options, tmp_path, capsys):
    def error(*words: str) -> str:
        assert main(["evaluate", *words]) == 2
        text = capsys.readouterr().err
        assert len(text.splitlines()) == 1
        return text

    np.savez(
        tmp_path / "large.npz", **{key: np.repeat(a, 2, 1) if "x" in key else a for key, a in arrays(finished).items()}
    )
    shape = error(str(finished.path), "--data", str(tmp_path / "large.npz"))
    assert "large: has images of shape (1, 16, 8); mre was trained on (1, 8, 8)" in shape
    assert main(["train", *options, "--runs-dir", str(tmp_path), "--name", "k", "--model", "top-k", "--quiet"]) == 0
    assert "max_experts=1: only for models that answer along the way" in error(
        str(tmp_path / "k"), "--max-experts", "1"
    )
    assert "batch_size=0: must be at least 1" in error(str(finished.path), "--batch-size", "0")


def arrays(run) -> dict:
    return dict(np.load(run.config.data))

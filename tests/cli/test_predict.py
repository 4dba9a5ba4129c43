"""predict reads an image as training does, whichever way up it is stored, with however many bits."""

import json
import os

import numpy as np
import pytest
import torch
from PIL import Image

import forked
import raytraced
from raytraced.cli.main import main


@pytest.fixture
def images(finished) -> np.ndarray:
    return np.load(finished.config.data)["x_test"]


@pytest.fixture
def predict(finished, capsys):
    def run(*files) -> list[dict]:
        assert main(["predict", str(finished.path), *map(str, files), "--json"]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


def test_answers_are_those_of_the_loaded_model(finished, images, predict, tmp_path):
    files = [tmp_path / f"{number}.png" for number in range(4)]
    for file, image in zip(files, images, strict=False):
        Image.fromarray(image).save(file)
    rows = predict(*files)
    with torch.no_grad():
        out = raytraced.load(finished.path)(torch.from_numpy(images[:4])[:, None])
    assert [row["image"] for row in rows] == [str(file) for file in files]
    assert [row["answer"] for row in rows] == [str(int(answer)) for answer in out.logits.argmax(-1)]
    assert [row["probability"] for row in rows] == pytest.approx(out.logits.softmax(-1).amax(-1).tolist(), abs=1e-6)
    assert [row["experts"] for row in rows] == out.num_experts.tolist()


def test_rotated_deep_tall_and_coloured_images_are_read_as_in_training(images, predict, tmp_path):
    plain = Image.fromarray(images[0])
    plain.save(tmp_path / "plain.png")
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: the camera lay on its side
    plain.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "rotated.png", exif=exif)
    Image.fromarray(images[0].astype(np.uint16) * 257).save(tmp_path / "deep.png")
    tall = np.zeros((14, 8), np.uint8)
    tall[3:11] = images[0]
    Image.fromarray(tall).convert("RGB").save(tmp_path / "tall.png")
    Image.fromarray(images[1]).save(tmp_path / "another.png")
    names = ("plain", "rotated", "deep", "tall", "another")
    first, *same, another = predict(*(tmp_path / f"{name}.png" for name in names))
    for row in same:
        assert row | {"image": ""} == first | {"image": ""}
    assert another["probability"] != first["probability"]


def test_table_holds_the_same(finished, images, predict, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.fromarray(images[0]).save("0.png")
    (row,) = predict("0.png")
    assert main(["predict", str(finished.path), "0.png"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["image", "answer", "probability", "experts"] in lines
    assert ["0.png", row["answer"], f"{row['probability']:.1%}", str(row["experts"])] in lines


def test_redirected_table_keeps_whole_names(finished, images, tmp_path):
    """In a file or a pipe there is no width to fit: a cut name could not be used."""
    name = f"{'a-long-name-' * 12}.png"
    Image.fromarray(images[0]).save(tmp_path / name)
    words = ["predict", str(finished.path), str(tmp_path / name)]
    done = forked.run(forked.command, *words, env={**os.environ, "COLUMNS": "80"}, timeout=100)
    assert str(tmp_path / name) in done.stdout


def test_bad_files_are_left_out_on_request(finished, images, predict, tmp_path, capsys):
    (tmp_path / "mixed").mkdir()
    Image.fromarray(images[0]).save(tmp_path / "mixed" / "good.png")
    (tmp_path / "mixed" / "bad.png").write_text("no image")
    assert main(["predict", str(finished.path), str(tmp_path / "mixed")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "1 of 2 files cannot be read (skip_bad leaves them out)" in line
    assert f"{tmp_path / 'mixed' / 'bad.png'}: not an image that Pillow can read" in line
    assert main(["predict", str(finished.path), str(tmp_path / "mixed"), "--skip-bad", "--json"]) == 0
    printed = capsys.readouterr()
    assert [json.loads(row)["image"] for row in printed.out.splitlines()] == [str(tmp_path / "mixed" / "good.png")]
    assert printed.err == "1 of 2 files cannot be read, left out\n"
    (tmp_path / "mixed" / "good.png").unlink()
    assert main(["predict", str(finished.path), str(tmp_path / "mixed"), "--skip-bad"]) == 2
    assert "can be read" in capsys.readouterr().err.splitlines()[-1]


def test_a_file_that_is_not_an_image_is_one_line(finished, tmp_path, capsys):
    (tmp_path / "text.png").write_text("no image")
    for file, expected in (
        (tmp_path / "text.png", "not an image that"),
        (tmp_path / "none.png", "there is no such file"),
    ):
        assert main(["predict", str(finished.path), str(file)]) == 2
        error = capsys.readouterr().err
        assert f"{file}: {expected}" in error
        assert len(error.splitlines()) == 1


def test_model_that_knows_no_task_says_so(tmp_path, images, capsys):
    raytraced.save(raytraced.build("top-k", image_shape=(1, 8, 8), num_classes=3), tmp_path / "bare.safetensors")
    Image.fromarray(images[0]).save(tmp_path / "0.png")
    assert main(["predict", str(tmp_path / "bare.safetensors"), str(tmp_path / "0.png")]) == 2
    assert "its card names no task" in capsys.readouterr().err

"""Mixed precision and compilation, in processes of their own: on some CPUs bf16 products end the process."""

import subprocess
import sys
from dataclasses import replace

import pytest

from raytraced.training.config import write_config
from raytraced.training.loop import train
from raytraced.training.run_folder import RunFolder

from .runs import metrics


def train_in_a_process(config, tmp_path) -> list[dict]:
    file = tmp_path / "config.yaml"
    file.write_text(write_config(config))
    done = subprocess.run(
        [sys.executable, "-m", "raytraced.cli", "train", "-c", str(file)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return metrics(RunFolder(tmp_path / "runs" / config.name))


def test_bfloat16_trains_to_nearly_the_same_loss(config, no_pictures, tmp_path):
    exact = metrics(train(replace(config, name="exact")))
    rounded = train_in_a_process(replace(config, precision="bfloat16"), tmp_path)
    assert rounded[-1]["train_loss"] != exact[-1]["train_loss"]
    assert rounded[-1]["train_loss"] == pytest.approx(exact[-1]["train_loss"], abs=0.3)
    assert rounded[-1]["train_loss"] < exact[0]["train_loss"]


@pytest.mark.slow
def test_compiled_model_trains_to_the_same_loss(config, no_pictures, tmp_path):
    plain = metrics(train(replace(config, name="plain", epochs=1)))
    compiled = train_in_a_process(replace(config, compile=True, epochs=1), tmp_path)
    assert compiled[0]["train_loss"] == pytest.approx(plain[0]["train_loss"], rel=1e-2)

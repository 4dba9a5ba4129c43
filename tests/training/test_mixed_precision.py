"""Mixed precision and compilation, in separate processes: on some CPUs bf16 products end the process."""

from dataclasses import replace

import pytest

import forked
from raytraced.training.config import write_config
from raytraced.training.loop import train
from raytraced.training.run_folder import RunFolder
from training.runs import metrics


def train_in_a_process(config, tmp_path) -> list[dict]:
    file = tmp_path / "config.yaml"
    file.write_text(write_config(config))
    done = forked.run(forked.command, "train", "-c", file)
    assert done.returncode == 0, done.stdout + done.stderr
    return metrics(RunFolder(tmp_path / "runs" / config.name))


def test_bfloat16_gives_the_loss_and_gradient_that_its_eight_bits_allow(config, no_pictures, tmp_path):
    config = replace(config, lr=1e-9, epochs=1)  # the weights stay as they are: what differs is rounding alone
    (exact,) = metrics(train(replace(config, name="exact")))
    (rounded,) = train_in_a_process(replace(config, precision="bfloat16"), tmp_path)
    for name in ("train_loss", "gradient_norm"):
        assert rounded[name] != exact[name]
        assert rounded[name] == pytest.approx(exact[name], rel=2**-8)
    # evaluation is exact, and so are the weights
    assert rounded["validation_loss"] == pytest.approx(exact["validation_loss"], rel=1e-6)


def test_bfloat16_trains_as_single_precision_does(config, no_pictures, tmp_path):
    exact = metrics(train(replace(config, name="exact")))
    rounded = train_in_a_process(replace(config, precision="bfloat16"), tmp_path)
    for ours, theirs in zip(rounded, exact, strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=0.02)
        assert ours["validation_accuracy"] == theirs["validation_accuracy"]


@pytest.mark.slow
def test_compiled_model_trains_to_the_same_loss(config, no_pictures, tmp_path):
    plain = metrics(train(replace(config, name="plain", epochs=1)))
    compiled = train_in_a_process(replace(config, compile=True, epochs=1), tmp_path)
    assert compiled[0]["train_loss"] == pytest.approx(plain[0]["train_loss"], rel=1e-4)

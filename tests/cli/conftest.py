"""One finished run for all commands, made by the command line, pictures and all."""

import json
from pathlib import Path

import pytest

from raytraced.cli.main import main
from raytraced.training.run_folder import RunFolder
from training.stripes import GRID, write_stripes


@pytest.fixture(scope="session")
def stripes(tmp_path_factory) -> Path:
    return write_stripes(tmp_path_factory.mktemp("data") / "stripes.npz")


@pytest.fixture(scope="session")
def options(stripes, tmp_path_factory) -> list[str]:
    """What makes `raytraced train` take a fraction of a second."""
    file = tmp_path_factory.mktemp("options") / "config.yaml"
    file.write_text(f"data: {stripes}\nmodel_options: {json.dumps(GRID)}\nthreads: 1\ndevice: cpu\n")
    return ["-c", str(file), "--epochs", "3", "--batch-size", "16"]


@pytest.fixture(scope="session")
def finished(options, real_pictures, tmp_path_factory) -> RunFolder:
    output = tmp_path_factory.mktemp("finished") / "runs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raytraced.training.callbacks.draw_pictures", real_pictures)
        assert main(["train", *options, "--runs-dir", str(output), "--name", "one"]) == 0
    return RunFolder(output / "one")

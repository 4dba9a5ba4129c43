"""The files that the attack gives to every reader run their code where they are trusted, and none does in `raytraced.load`."""

import numpy as np
import pytest

import raytraced
from experiments.attack import read_file, readers
from experiments.code_files import MARKERS, run_themselves, take_markers, write_code_files


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("code")
    return folder, write_code_files(folder)


def test_a_program_that_trusts_the_files_runs_their_code(files):
    assert run_themselves(files[0]) == MARKERS


def test_no_model_is_read_from_them(files):
    folder, paths = files
    for path in paths:
        with pytest.raises((ValueError, OSError)):
            raytraced.load(path)
    assert not take_markers(folder)


def test_a_reader_that_unpickles_is_found(files, tmp_path, monkeypatch):
    folder, paths = files
    real = np.load
    monkeypatch.setattr(np, "load", lambda file, **options: real(file, **options | {"allow_pickle": True}))
    path = next(path for path in paths if path.name == "array.npz")
    read_file(readers(path, tmp_path)["data show"])
    assert take_markers(folder) == {"array"}

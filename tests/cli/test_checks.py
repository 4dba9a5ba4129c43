"""`raytraced checks`: what is results is so, also where there are no compiled kernels, or wrong ones."""

import json
import platform
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

import raytraced as rt
from raytraced.cli import checks
from raytraced.cli.main import main
from raytraced.kernels import cpp_library


@pytest.fixture
def results(capsys, tmp_path):
    """What `raytraced checks --json` prints, with an empty cache folder."""

    def run(code=0):
        assert main(["checks", "--json", "--data-root", str(tmp_path)]) == code
        return json.loads(capsys.readouterr().out)

    return run


def test_versions_threads_and_devices_are_those_of_this_process(results, tmp_path):
    found = results()
    assert found["raytraced"]["version"] == rt.__version__
    assert found["python"]["version"] == platform.python_version()
    assert (found["torch"], found["numpy"]) == (torch.__version__, np.__version__)
    assert found["threads"]["torch"] == torch.get_num_threads()
    assert len(found["devices"]["cuda"]) == torch.cuda.device_count()
    assert found["data"] == {"folder": str(tmp_path), "cached": []}


def test_every_package_of_an_extra_is_listed(results):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [one for name in set(extras) - {"test", "docs", "wheels", "bench"} for one in extras[name]]
    assert set(results()["extras"]) == {re.match(r"[\w-]+", one)[0] for one in asked}


def test_cached_data_is_listed(results, tmp_path):
    from raytraced.data.cache import entry_folder
    from raytraced.tasks.registry import catalog

    (part,) = catalog()["mnist"].parts
    entry_folder(tmp_path, part).mkdir()
    for key in part.arrays:
        (entry_folder(tmp_path, part) / f"{key}.npy").touch()
    assert results()["data"]["cached"] == ["mnist"]


@pytest.mark.skipif(not rt.kernels.available(), reason="there are none here")
def test_the_instructions_are_those_that_the_library_chose(results):
    found = results()["compiled_kernels"]
    assert found["there"]
    assert found["why_not"] is None
    assert found["instructions"] in ("avx2", "baseline")


def test_the_reason_for_missing_kernels_is_printed(results, monkeypatch):
    monkeypatch.setattr(cpp_library, "cpu", None)
    monkeypatch.setattr(cpp_library, "reason", "not built, as a test has it")
    monkeypatch.setattr(cpp_library, "instruction_set", None)
    found = results()["compiled_kernels"]
    assert (found["there"], found["instructions"]) == (False, None)
    assert found["why_not"] == "not built, as a test has it"


def test_operations_that_compute_something_else_are_a_failure(results, monkeypatch):
    monkeypatch.setattr(checks, "compare_with_plain", lambda: 0.5)
    assert not results(code=1)["compiled_kernels"]["agree_with_plain"]
    monkeypatch.setattr(checks, "compare_with_plain", lambda: float("nan"))
    assert not checks.collect()["compiled_kernels"]["agree_with_plain"]


def test_one_thread_is_a_number():
    assert [checks._format_value(value) for value in (1, 0, True, False, None)] == ["1", "0", "yes", "no", "–"]


def test_lines_say_the_same_as_json(capsys, tmp_path):
    assert main(["checks", "--data-root", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0].replace(" ", "_") for line in lines] == list(checks.collect())
    assert f"version {rt.__version__}; folder " in lines[0]
    assert lines[-1].endswith(f"folder {tmp_path}; cached none")

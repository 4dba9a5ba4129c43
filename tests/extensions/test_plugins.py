"""Code from outside the package, in a file that a command names or in an installed package, does what built-in code does."""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import raytraced as rt
from raytraced import kernels, plugins
from raytraced.cli.main import main
from raytraced.models.registry import find_model
from raytraced.tasks.images.catalog import CATALOG
from raytraced.tasks.registry import find_task, named_task

HERE = Path(__file__).parent
# The first blocks of the guide are files.
BLOCKS = re.findall(
    r"```python\n(# (\w+\.py)\n.*?)```", (HERE.parents[1] / "docs/guides/extending.md").read_text(), re.S
)
FILES = {name: text for text, name in BLOCKS}
TINY = ("--epochs", "1", "--batch-size", "512", "--quiet", "--model-options.dim", "8")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A working folder with the files of the guide; what they register is forgotten at the end."""
    tables = [(table, dict(table)) for table in (*plugins._registered.values(), CATALOG)]
    for operation in kernels.OPERATIONS.values():
        monkeypatch.setattr(operation, "implementations", operation.implementations)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for table, before in tables:
        table.clear()
        table.update(before)


def forget():
    for table in plugins._registered.values():
        table.clear()


def fails(capsys, *words):
    """The one line that a command fails with."""
    capsys.readouterr()
    assert main(list(words)) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    return printed.removeprefix("raytraced: ").strip()


def test_a_router_in_a_file_is_trained_evaluated_saved_and_loaded_by_commands(folder, capsys):
    plugin = ("--plugin", "positive.py")
    assert (
        main(["train", *plugin, "--model", "positive", "--model-options.threshold", "0.1", *TINY, "--name", "one"]) == 0
    )
    summary = json.loads((folder / "runs/one/summary.json").read_text())
    forget()
    capsys.readouterr()
    assert main(["evaluate", "one", "--plugin=positive.py", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == summary["test"]
    model = rt.load("one")
    assert (model.name, model.card.options["threshold"], model.card.plugins) == ("positive", 0.1, ["file positive.py"])
    rt.save(model, "copy.safetensors")
    rows = torch.randint(0, 256, (4, 1, 8, 8), dtype=torch.uint8)
    expected = model(rows).logits
    forget()
    needs = "'positive' is not a known model; needs the file positive.py: give it with --plugin, or raytraced.load_plugin in Python"
    assert fails(capsys, "evaluate", "one") == f"runs/one/model.safetensors: {needs}"
    with pytest.raises(ValueError, match=f"^copy.safetensors: {re.escape(needs)}$"):
        rt.load("copy.safetensors")
    rt.load_plugin("positive.py")
    assert torch.equal(rt.load("copy.safetensors")(rows).logits, expected)
    assert main(["models", "--sizes", "digits", "--json"]) == 0
    assert "positive" in json.loads(capsys.readouterr().out)


def test_a_resumed_run_needs_its_plugin_again(folder, capsys):
    assert main(["train", "--plugin", "positive.py", "--model", "positive", *TINY, "--name", "one"]) == 0
    forget()
    assert fails(capsys, "resume", "one", "--epochs", "2").startswith("model=positive: no such model")
    assert main(["resume", "one", "--epochs", "2", "--plugin", "positive.py", "--quiet"]) == 0


def test_a_router_of_a_plugin_is_in_language_models_too():
    rt.load_plugin("positive.py")
    model = rt.build("gpt-positive", dim=16, num_heads=2, hidden=8)
    assert model.card.plugins == ["file positive.py"]
    assert model(torch.randint(0, 256, (2, 5))).logits.shape == (2, 5, 256)


def test_a_folder_to_share_says_which_file_its_model_needs():
    from transformers import AutoConfig

    from raytraced.integrations.transformers import RaytracedConfig

    rt.load_plugin("positive.py")
    model = rt.build("gpt-positive", dim=8, num_heads=2, hidden=8, depth=1)
    rt.save_pretrained(model, "shared")
    assert "\nBesides raytraced it needs: file positive.py.\n" in Path("shared/README.md").read_text(encoding="utf-8")
    read = AutoConfig.from_pretrained("shared")
    assert isinstance(read, RaytracedConfig)
    assert read.card().plugins == model.card.plugins == ["file positive.py"]
    forget()
    with pytest.raises(ValueError, match=r"^layer=positive: is not known; needs the file positive.py: give it with"):
        AutoConfig.from_pretrained("shared")


def test_a_data_set_in_a_file_is_trained_on_by_its_name(folder, capsys):
    cache = ("--data-root", "cache")
    assert main(["train", "--plugin", "stripes.py", "--data", "stripes", *cache, *TINY, "--name", "one"]) == 0
    assert main(["data", "list", "--plugin", "stripes.py", *cache]) == 0
    assert re.search(r"stripes +0.0 MB, of file stripes.py +0 MB +cached", capsys.readouterr().out)
    assert main(["evaluate", "one", *cache]) == 0  # the name is known now
    del CATALOG["stripes"]
    forget()
    assert fails(capsys, "evaluate", "one", *cache).startswith("data=stripes: no such data set, file or folder")


def test_a_task_in_a_file_brings_its_data_sets_and_its_models(folder, capsys):
    (folder / "bytes.py").write_text((HERE / "next_byte.py").read_text())
    words = ("--data", "pangrams", "--model", "bytes-mre", "--epochs", "1", "--batch-size", "5", "--quiet")
    grid = ("--model-options.dim", "8", "--model-options.num-layers", "2", "--model-options.num-experts", "2")
    assert main(["train", "--plugin", "bytes.py", *words, *grid, "--name", "one"]) == 0
    model = rt.load("one")
    assert (model.card.task, model.card.plugins) == ("next-byte", ["file bytes.py"])
    (folder / "own.txt").write_bytes(b"abcdefg " * 30)
    assert find_task("own.txt").name == "next-byte"  # asked before the tasks of the package
    assert main(["evaluate", "one", "--json"]) == 0
    forget()
    assert find_task("own.txt").name == "text"
    assert "'bytes-mre' is not a known model; needs the file bytes.py" in fails(capsys, "evaluate", "one")
    with pytest.raises(
        ValueError, match=r"^task=next-byte: no such task; the model needs the file bytes.py: give it with"
    ):
        named_task("next-byte", model.card.plugins)


def test_a_kernel_in_a_file_comes_first_and_is_compared_with_the_plain_one():
    model = rt.build("mre", image_shape=(3, 32, 32), num_classes=10)
    images = torch.rand(2, 3, 32, 32)
    expected = model(images).logits
    rt.load_plugin("channels_last.py")
    rt.load_plugin("channels_last.py")  # again, as in a notebook
    block = model.input_block
    assert kernels.convolution.explain(images, list(block.weights), list(block.biases)).name == "channels_last"
    assert [one.name for one in kernels.convolution.implementations] == ["channels_last", "cpp", "plain"]
    torch.testing.assert_close(model(images).logits, expected)
    small = torch.rand(2, 3, 8, 8)
    assert kernels.convolution.explain(small, list(block.weights), list(block.biases)).name != "channels_last"


BAD_FILES = {
    "fails": ("1 / 0", "plugin=bad.py: cannot be loaded (ZeroDivisionError: division by zero); fix the file"),
    "no Python": ("def (", "plugin=bad.py: cannot be loaded (SyntaxError: invalid syntax (bad.py, line 1)); fix the file"),
    "needs more": ("import no_such_package", "cannot be loaded (ModuleNotFoundError: No module named 'no_such_package')"),
    "no table": ("x = 1", "plugin=bad.py: defines none of ROUTERS, TASKS, DATASETS, KERNELS; add a table"),
    "a list": ("ROUTERS = []", "plugin=bad.py: its table of routers is no dictionary; must hold names and values"),
    "no name": ("ROUTERS = {1: 3}", "plugin=bad.py: its table of routers has the name 1; names must be texts"),
    "no text": ("\0", "plugin=bad.py: cannot be loaded (SyntaxError: source code string cannot contain null bytes)"),
    "no router": ("ROUTERS = {'x': 3}", "router x of file bad.py: is 3; must be a subclass of Router, or a ModelInfo"),
    "taken": ("ROUTERS = {'mre': 3}", "router mre of file bad.py: raytraced has this name; choose another"),
    "taken task": ("TASKS = {'text': 3}", "task text of file bad.py: raytraced has this name; choose another"),
    "no kernel": ("KERNELS = {'convolution.x': 3}", "kernel convolution.x of file bad.py: is 3; must be an Implementation"),
    "no operation": ("KERNELS = {'x.y': 3}", "kernel x.y of file bad.py: must be named OPERATION.NAME, with one of"),
    "ends": ("import sys; sys.exit('no')", "plugin=bad.py: cannot be loaded (SystemExit: no); fix the file"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_plugin_is_one_clear_line_and_registers_nothing(name, folder, capsys):
    text, expected = BAD_FILES[name]
    (folder / "bad.py").write_text(text)
    line = fails(capsys, "train", "--plugin", "bad.py", "--model", "x", *TINY)
    assert expected in line
    assert not (folder / "runs").exists()


def test_a_plugin_that_is_not_there_is_one_clear_line(capsys):
    assert fails(capsys, "train", "--plugin", "none.py") == (
        "plugin=none.py: must be an existing Python file, with the suffix .py"
    )
    assert fails(capsys, "train", "--plugin").startswith("--plugin: needs the path of a Python file")
    assert fails(capsys, "--plugin", "positive.py").startswith("--plugin positive.py: name a command first")
    with pytest.raises(ValueError, match=r"^kind=routers: no such kind of plugin; did you mean router\?$"):
        plugins.register("routers", "x", object)


def test_nothing_is_imported_because_a_card_names_it(folder, monkeypatch):
    rt.load_plugin("positive.py")
    rt.save(rt.build("positive", image_shape=(1, 8, 8), num_classes=2), "model.safetensors")
    forget()
    (folder / "positive.py").write_text("raise SystemExit('it ran')")
    monkeypatch.syspath_prepend(str(folder))
    with pytest.raises(ValueError, match=r"needs the file positive.py"):
        rt.load("model.safetensors")


def test_an_installed_plugin_that_is_broken_stops_only_those_that_use_it(monkeypatch):
    def load():
        raise ImportError("its own dependency is missing")

    broken = plugins.Plugin("task", "broken", "package broken 1.0", load)
    router = plugins.Plugin("router", "broken", "package broken 1.0", load)
    installed = {"task": {"broken": broken}, "router": {"broken": router}, "dataset": {}, "kernel": {}}
    monkeypatch.setattr(plugins, "_installed", installed.__getitem__)
    assert find_model("gpt-mre")[0] == "gpt"
    assert find_task("digits").name == "images"
    why = r"router broken of package broken 1.0: cannot be loaded \(ImportError: its own dependency is missing\)"
    with pytest.raises(ValueError, match=why):
        find_model("broken")
    with pytest.warns(RuntimeWarning, match=r"task broken of package broken 1.0: cannot be loaded .*; it is left out$"):
        assert find_task(".").name == "text"


PROJECT = """
    [build-system]
    requires = ["setuptools"]
    build-backend = "setuptools.build_meta"

    [project]
    name = "positive-experts"
    version = "1.2"

    [project.entry-points."raytraced.routers"]
    positive = "positive_experts.positive:Positive"

    [project.entry-points."raytraced.tasks"]
    next-byte = "positive_experts.next_byte:NextByte"

    [project.entry-points."raytraced.datasets"]
    stripes = "positive_experts.stripes:STRIPES"

    [project.entry-points."raytraced.kernels"]
    "convolution.channels_last" = "positive_experts.channels_last:CHANNELS_LAST"
"""


@pytest.mark.slow
def test_an_installed_package_is_trained_evaluated_saved_and_loaded_by_commands(folder):
    package = folder / "project/positive_experts"
    package.mkdir(parents=True)
    (folder / "project/pyproject.toml").write_text(textwrap.dedent(PROJECT))
    (package / "__init__.py").touch()
    for name, text in FILES.items():
        (package / name).write_text(text)
    (package / "next_byte.py").write_text((HERE / "next_byte.py").read_text())
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", "site", "./project"], check=True)
    here = os.pathsep.join(filter(None, ["site", os.environ.get("PYTHONPATH")]))

    def run(*words, code=0, python=None, path=here):
        program = ["-c", python] if python else ["-m", "raytraced", *words]
        done = subprocess.run(
            [sys.executable, *program], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
        )
        assert done.returncode == code, done.stderr
        return done.stdout if code == 0 else done.stderr

    run("train", "--model", "positive", *TINY, "--name", "one")
    assert "accuracy" in run("evaluate", "one")
    run("train", "--data", "stripes", "--data-root", "cache", *TINY, "--name", "two")
    run("train", "--data", "pangrams", "--model", "bytes-positive", "--epochs", "1", "--quiet", "--name", "three")
    assert "bits" in run("evaluate", "three")
    assert "\npositive " in run("models", "--sizes", "digits")
    copy = "import raytraced as rt; m = rt.load('one'); rt.save(m, 'copy.safetensors'); print(m.card.plugins)"
    assert run(python=copy).strip() == "['package positive-experts 1.2']"
    first = "from raytraced import kernels; print(kernels.convolution.implementations[0].name)"
    assert run(python=first).strip() == "channels_last"
    line = run("evaluate", "one", code=2, path=os.environ.get("PYTHONPATH", ""))
    assert line.endswith("'positive' is not a known model; needs the package positive-experts 1.2: install it\n")
    line = run("evaluate", "three", code=2, path=os.environ.get("PYTHONPATH", ""))
    assert "needs the package positive-experts 1.2: install it" in line
    assert line.count("\n") == 1

"""The README's file map is the order in which files may import, and lists every file of the package."""

import ast
import re
import tomllib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "raytraced"


def mapped() -> list[str]:
    block = (ROOT / "README.md").read_text().partition("src/raytraced/\n")[2].partition("```")[0]
    return [name.rstrip("/").removesuffix(".py") for name in re.findall(r"^  (\S+)", block, re.M)]


def test_the_file_map_is_the_order_that_the_linter_enforces():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    assert mapped() == [layer.removeprefix("raytraced.") for layer in reversed(layers)]


def test_every_file_of_the_package_is_in_the_map():
    found = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    found |= {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert found == set(mapped())


def test_the_readme_is_short_and_narrow():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120
    assert max(map(len, lines)) <= 100


# What files of one kind have in common by design: they are asked for by these names.
PROTOCOLS = {
    "operations/": {"forward", "backward", "call", "cannot", "unless", "run", "make_args", "_empty", "_forward", "_backward", "_run"},
    "tasks/": {"CATALOG", "Dataset", "Split", "Loader", "build_dataset", "load", "takes_path"},
}  # fmt: skip
# A command is called as what it does; a workload as what it times.
NAMED_AFTER = ("commands/", "benchmark/layer_workloads", "benchmark/model_workloads")


def defined() -> dict[str, set[str]]:
    """The files that define each name, those left out that must have it."""
    found = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        file = path.relative_to(PACKAGE).as_posix()
        for node in ast.parse(path.read_text()).body:
            names = [node.name] if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) else []
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
            folder = next((folder for folder in PROTOCOLS if file.startswith(folder)), None)
            for name in names:
                if name not in PROTOCOLS.get(folder, ()) and not (file.startswith(NAMED_AFTER) and name.islower()):
                    found[name].add(file)
    return found


def test_one_word_is_one_thing():
    """A class, a function or a constant of one name is in one file, so that whoever finds it has found it."""
    apart = {"main": {"__main__.py", "cli.py"}}
    assert {name: files for name, files in defined().items() if len(files) > 1} == apart

"""README's file map is the order in which files may import, and lists every file of the package."""

import ast
import re
import tomllib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "raytraced"
MOST_FLOORS = 12


def existing_files() -> set[str]:
    """The modules and sub-packages of the package, without suffixes."""
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    return modules | {path.parent.name for path in PACKAGE.glob("*/__init__.py")}


def mapped_floors() -> list[set[str]]:
    """The floors of README's map, the lowest first. A line is a floor: `  errors, files.py, data/   what they hold`."""
    block = (ROOT / "README.md").read_text().partition("src/raytraced/\n")[2].partition("```")[0]
    floors = re.findall(r"^ {2}([^\s,]+(?:, [^\s,]+)*)(?: |$)", block, re.M)
    return [{name.rstrip("/").removesuffix(".py") for name in floor.split(", ")} for floor in floors]


def linted_floors() -> list[set[str]]:
    """The layers of the import linter's contract, the lowest first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    names = [{name.strip("()").removeprefix("raytraced.") for name in re.split(r" [:|] ", layer)} for layer in layers]
    return [floor & existing_files() for floor in reversed(names)]


def test_the_file_map_is_the_order_that_the_linter_enforces():
    assert mapped_floors() == linted_floors()


def test_every_file_of_the_package_is_on_one_floor():
    names = [name for floor in linted_floors() for name in floor]
    assert sorted(names) == sorted(existing_files())


def test_the_file_map_has_at_most_a_dozen_floors():
    assert 1 < len(linted_floors()) <= MOST_FLOORS


def test_the_readme_is_short_and_narrow():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120
    assert max(len(line) for line in lines if not line.startswith("|")) <= 100  # a row of a table cannot be wrapped


# Names that the files of a folder share by design: each implementation of a protocol defines them.
PROTOCOLS = {
    "kernels/": {
        "forward", "backward", "call", "unsupported_reason", "slower_reason", "is_custom", "run", "make_args",
        "_empty", "_forward", "_backward", "_run",
    },
    "tasks/": {"CATALOG", "Dataset", "Split", "Loader", "build_dataset", "load", "takes_path"},
}  # fmt: skip
# The function of a command has the command's name, whatever other files call by that name.
NAMED_AFTER_COMMANDS = "cli/"
# transformers expects the name of the model before Config, and so does the layer.
TWO_CLASSES = {"RaytracedConfig"}


def defined_names() -> dict[str, set[str]]:
    """The files that define each class, function and constant, except for names that are shared by design."""
    found = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        file = path.relative_to(PACKAGE).as_posix()
        shared = next((names for folder, names in PROTOCOLS.items() if file.startswith(folder)), set())
        for node in ast.parse(path.read_text()).body:
            names = [node.name] if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) else []
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
            for name in names:
                is_command = file.startswith(NAMED_AFTER_COMMANDS) and name.islower()
                is_local = len(name) == 1 or name.startswith("_")  # a type variable, or private to its file
                if name not in shared | TWO_CLASSES and not is_command and not is_local:
                    found[name].add(file)
    return found


def test_a_name_is_defined_in_one_file():
    """A search for a class, a function or a constant of the package finds one definition."""
    assert {name: files for name, files in defined_names().items() if len(files) > 1} == {}

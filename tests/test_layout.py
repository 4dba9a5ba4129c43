"""The README's file map is the order in which files may import, and lists every file of the package."""

import re
import tomllib
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

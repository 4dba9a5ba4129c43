"""The tables of docs/gpu.md and docs/scale.md are what their programs print."""

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("name", ["gpu", "scale"])
def test_the_page_has_what_the_program_prints(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    page = (DOCS / f"{name}.md").read_text()
    assert "\n".join(program.lines()) in page

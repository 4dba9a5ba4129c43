"""The tables of docs/lab/gpu.md and docs/lab/scale.md are what their programs print."""

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("name", ["gpu", "scale"])
def test_a_page_holds_the_output_of_its_program(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    page = (DOCS / "lab" / f"{name}.md").read_text()
    assert "\n".join(program.lines()) in page

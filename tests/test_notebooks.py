"""Notebooks run from top to bottom, as the site runs them; the site's links lead to where it has the files."""

import importlib.util
import json
from pathlib import Path

import pytest

import raytraced as rt

DOCS = Path(__file__).parents[1] / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
spec = importlib.util.spec_from_file_location("site_of_docs", DOCS / "site.py")
site = importlib.util.module_from_spec(spec)
spec.loader.exec_module(site)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path):
    cells = site.run_notebook(path)
    assert all(cell.printed or cell.figures or cell.kind != "code" or "class " in cell.source or "assert" in cell.source
               for cell in cells)  # fmt: skip
    assert any(cell.figures for cell in cells)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells if cell["cell_type"] == "code")


def test_what_goes_wrong_in_a_cell_is_not_swallowed(tmp_path):
    cell = {"cell_type": "code", "source": ["1 / 0"]}
    (tmp_path / "one.ipynb").write_text(json.dumps({"cells": [cell]}))
    with pytest.raises(ZeroDivisionError):
        site.run_notebook(tmp_path / "one.ipynb")


def test_the_value_of_a_last_expression_is_shown(tmp_path):
    cell = {"cell_type": "code", "source": ["x = 2\n", "x + 1"]}
    (tmp_path / "one.ipynb").write_text(json.dumps({"cells": [cell]}))
    assert site.run_notebook(tmp_path / "one.ipynb")[0].printed == "3\n"


def test_links_out_of_docs_lead_to_copies_in_the_site():
    class Page:
        parent = "a section"

        class file:  # noqa: N801 (as mkdocs has it)
            src_uri = "results.md"

    found = site.on_page_markdown("[a](../results/tables.md) [b](recipe.md#x) [c](../setup.py) [d](https://e.f)", Page)
    assert found == "[a](repository/results/tables.md) [b](recipe.md#x) [c](repository/setup.py.md) [d](https://e.f)"
    Page.file.src_uri = "repository/CONTRIBUTING.md"
    assert site.on_page_markdown("[a](docs/testing.md)", Page) == "[a](../testing.md)"


def test_every_page_is_in_the_navigation():
    navigation = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2].split()
    assert not {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} - set(navigation)


def test_every_public_name_is_in_the_reference():
    text = "".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    homes = set(rt._HOMES)
    missing = [home for home in homes if f"::: raytraced.{home}\n" not in text]
    assert not missing

"""Notebooks run and carry their outputs; links of the site lead to its copies of files."""

import importlib.util
import json
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
spec = importlib.util.spec_from_file_location("site_of_docs", DOCS / "site.py")
site = importlib.util.module_from_spec(spec)
spec.loader.exec_module(site)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_stores_an_output_for_every_cell_that_has_one(path):
    made, stored = site.run_notebook(path), site.read_notebook(path)
    assert [(cell.source, bool(cell.printed), len(cell.figures)) for cell in made] == [
        (cell.source, bool(cell.printed), len(cell.figures)) for cell in stored
    ], "run `make notebooks`"
    assert any(cell.figures for cell in made)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_linked_and_small(path):
    for page in (DOCS.parent / "README.md", DOCS / "index.md"):
        assert f"notebooks/{path.name}" in page.read_text(encoding="utf-8")
    assert path.stat().st_size < 200_000


def test_stored_outputs_are_read_back(tmp_path):
    source = ["import matplotlib.pyplot as plt\n", "plt.plot([1, 2])\n", "print('two')\n", "3"]
    cell = {"cell_type": "code", "source": source, "outputs": [], "execution_count": None}
    path = tmp_path / "one.ipynb"
    path.write_text(json.dumps({"cells": [cell]}))
    site.store_outputs(path)
    (found,) = site.read_notebook(path)
    assert found.printed == "two\n3\n"
    assert len(found.figures) == 1


def test_an_exception_in_a_cell_is_raised(tmp_path):
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
            src_uri = "paper/results.md"

    links = "[a](../../results/tables.md) [b](how.md#x) [c](../../setup.py) [d](https://e.f)"
    copies = "[a](../repository/results/tables.md) [b](how.md#x) [c](../repository/setup.py.md) [d](https://e.f)"
    assert site.on_page_markdown(links, Page) == copies
    Page.file.src_uri = "repository/CONTRIBUTING.md"
    assert site.on_page_markdown("[a](docs/testing.md)", Page) == "[a](../testing.md)"


def test_every_page_is_in_the_navigation():
    navigation = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2].split()
    assert not {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} - set(navigation)

"""Hooks of mkdocs: notebooks as pages, and the files outside docs/ that pages link to. `make docs` builds the site.

`make notebooks` (python docs/site.py) runs the notebooks and stores their outputs in the files.
"""

import ast
import base64
import io
import json
import os
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
NOTEBOOKS = ROOT / "docs" / "notebooks"
OUTSIDE = "repository"  # the folder of the site for files from outside docs/
LINK = re.compile(r"(\]\()(?!\w+:|#|/)([^)\s#]+)")


class Cell(NamedTuple):
    """A notebook's cell and its outputs."""

    kind: str  # "markdown" or "code"
    source: str
    printed: str = ""
    figures: tuple[bytes, ...] = ()  # PNG


def run_notebook(path: Path) -> list[Cell]:
    """Run a notebook from top to bottom in this process. Cells are plain Python, so Jupyter is not needed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    cells, namespace = [], {"__name__": "__main__"}
    for number, cell in enumerate(read_cells(path)):
        source = "".join(cell["source"])
        if cell["cell_type"] != "code":
            cells.append(Cell("markdown", source))
            continue
        with redirect_stdout(io.StringIO()) as printed:
            run_cell(source, f"{path.name}, cell {number}", namespace)
        figures = []
        for each in plt.get_fignums():
            plt.figure(each).savefig(stream := io.BytesIO(), dpi=80, bbox_inches="tight", metadata={"Software": None})
            figures.append(stream.getvalue())
        plt.close("all")
        cells.append(Cell("code", source, printed.getvalue(), tuple(figures)))
    return cells


def run_cell(source: str, name: str, namespace: dict[str, Any]) -> None:
    """Run a cell and print the value of a last expression, as Jupyter does."""
    lines = ast.parse(source, name).body
    last = lines.pop() if lines and isinstance(lines[-1], ast.Expr) else None
    exec(compile(ast.Module(lines, []), name, "exec"), namespace)
    value = eval(compile(ast.Expression(last.value), name, "eval"), namespace) if isinstance(last, ast.Expr) else None
    if value is not None:
        print(repr(value))


def read_cells(path: Path) -> list[dict[str, Any]]:
    """The cells of a notebook file."""
    cells: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return cells


def read_notebook(path: Path) -> list[Cell]:
    """The cells of a notebook with the outputs that are stored in the file."""
    found = []
    for cell in read_cells(path):
        outputs = cell.get("outputs", [])
        printed = "".join("".join(one["text"]) for one in outputs if one["output_type"] == "stream")
        pictures = [one["data"]["image/png"] for one in outputs if one["output_type"] == "display_data"]
        kind = "code" if cell["cell_type"] == "code" else "markdown"
        found.append(Cell(kind, "".join(cell["source"]), printed, tuple(map(base64.b64decode, pictures))))
    return found


def store_outputs(path: Path) -> None:
    """Run a notebook and write its outputs into the file."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    number = 0
    for stored, cell in zip(notebook["cells"], run_notebook(path), strict=True):
        if cell.kind != "code":
            continue
        number += 1
        stored["execution_count"] = number
        stored["outputs"] = outputs_of(cell)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def outputs_of(cell: Cell) -> list[dict[str, Any]]:
    """The outputs of a cell in the format of a notebook file."""
    outputs: list[dict[str, Any]] = []
    if cell.printed:
        outputs.append({"output_type": "stream", "name": "stdout", "text": cell.printed.splitlines(keepends=True)})
    for figure in cell.figures:
        data = {"image/png": base64.b64encode(figure).decode(), "text/plain": ["<Figure>"]}
        outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
    return outputs


def notebook_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and its pictures by name."""
    parts, pictures = [], {}
    for cell in read_notebook(path):
        parts.append(cell.source if cell.kind == "markdown" else f"```python\n{cell.source}\n```")
        if cell.printed:
            parts.append(f"```text\n{cell.printed.rstrip()}\n```")
        for figure in cell.figures:
            name = f"{path.stem}-{len(pictures) + 1}.png"
            pictures[name] = figure
            parts.append(f"![The figure of the cell above]({name})")
    parts.append(f"[Download this notebook]({path.name})")
    return "\n\n".join(parts), pictures


def in_site(path: Path) -> str:
    """The place of a file of the repository in the site; a source file becomes a page that shows it."""
    if path.is_relative_to(ROOT / "docs"):
        return path.relative_to(ROOT / "docs").as_posix()
    name = f"{OUTSIDE}/{path.relative_to(ROOT).as_posix()}"
    return name if path.suffix in (".md", ".png") else f"{name}.md"


def in_repository(uri: str) -> Path:
    """The file of the repository that a page of the site was made from."""
    return ROOT / uri.removeprefix(f"{OUTSIDE}/") if uri.startswith(f"{OUTSIDE}/") else ROOT / "docs" / uri


def targets(path: Path) -> list[Path]:
    """The files outside docs/ that a page links to."""
    found = [Path(os.path.normpath(path.parent / each[1])) for each in LINK.findall(path.read_text(encoding="utf-8"))]
    return [each for each in found if each.exists() and not each.is_relative_to(ROOT / "docs")]


def shown(path: Path) -> str | bytes:
    """The content of the site's copy of a file outside docs/."""
    if path.suffix == ".png":
        return path.read_bytes()
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        return f"# {name}\n\n" + "\n".join(f"- [{each.name}]({path.name}/{each.name}.md)" for each in listed(path))
    return f"# {name}\n\n```python\n{path.read_text(encoding='utf-8')}\n```\n"


def listed(folder: Path) -> list[Path]:
    """The Python files of a folder that the site shows."""
    return sorted(folder.glob("*.py"))


def on_files(files: Any, config: Any) -> Any:
    """Add the notebooks, and all files outside docs/ that pages link to."""
    from mkdocs.structure.files import File

    def add(uri: str, content: str | bytes) -> None:
        files.append(File.generated(config, uri, content=content))

    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        text, pictures = notebook_page(path)
        for name, content in {f"{path.stem}.md": text, **pictures}.items():
            add(f"notebooks/{name}", content)
    waiting = [ROOT / "docs" / one.src_uri for one in files.documentation_pages()]
    waiting = [path for path in waiting if path.exists()]
    waiting += [ROOT / name for name in entries(config["nav"]) if (ROOT / name).is_file()]
    seen = set()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        if path.suffix == ".md":
            waiting += targets(path)
        elif path.is_dir():
            waiting += listed(path)
        if not path.is_relative_to(ROOT / "docs"):
            add(in_site(path), shown(path))
    return files


def entries(nav: Any) -> list[str]:
    """The files from outside docs/ that the navigation names."""
    if isinstance(nav, str):
        return [nav.removeprefix(f"{OUTSIDE}/")] if nav.startswith(f"{OUTSIDE}/") else []
    return [name for each in (nav.values() if isinstance(nav, dict) else nav) for name in entries(each)]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links between files of the repository to their places in the site."""
    if page.parent is None:
        page.meta.setdefault("hide", ["navigation"])  # a page on its own needs no side bar
    home = in_repository(page.file.src_uri).parent
    here = os.path.dirname(page.file.src_uri)

    def lead(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(home / link[2]))
        return link[1] + (os.path.relpath(in_site(target), here or ".") if target.exists() else link[2])

    return LINK.sub(lead, markdown)


if __name__ == "__main__":
    for each in sorted(NOTEBOOKS.glob("*.ipynb")):
        store_outputs(each)

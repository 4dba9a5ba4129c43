"""`raytraced explore`: a page in which trained models run; torch is imported only when it begins."""

from pathlib import Path

from raytraced.commands.training import find_source
from raytraced.reproduce.variants import SHIPPED
from raytraced.words import require


def explore(runs: list[str] | None = None, output: str = "page.html", folder: str = "runs") -> None:
    """Write a page in which models run: draw, type or choose an input, and see which experts answer, in which order.

    Args:
        runs: Run folders, their names, model.safetensors files or shipped models' names (default: the shipped models).
        output: The HTML file to write; it needs no other file and no network.
        folder: Folder that run folders are in.
    """
    path = Path(output)
    require(path.suffix.lower() in (".html", ".htm"), "output", repr(output), "must end in .html")
    require(path.parent.is_dir(), "output", repr(output), f"folder {str(path.parent)!r} does not exist")
    sources = [(run, find_source(run, folder)) for run in runs or SHIPPED]
    from raytraced.explore.page import make_page
    from raytraced.files import write_file
    from raytraced.saving import load

    models = [(Path(run).stem if Path(run).is_file() else Path(run).name, load(source)) for run, source in sources]
    content = make_page(models).encode()
    write_file(path, content)
    num = f"{len(models)} model{'s' if len(models) > 1 else ''}"
    print(f"{path}: {num}, {len(content) / 1e6:.2f} MB; open it in a browser")

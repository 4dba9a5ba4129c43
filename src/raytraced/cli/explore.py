"""`raytraced explore`: a web page that runs trained models; torch is imported only when the command runs."""

from pathlib import Path

from raytraced.cli.training import find_source
from raytraced.errors import NOT_FINITE, printable, require
from raytraced.models.registry import SHIPPED_IMAGES


def explore(
    runs: list[str] | None = None,
    output: str = "page.html",
    data: str | None = None,
    data_root: str | None = None,
    runs_dir: str = "runs",
) -> None:
    """Write a web page that runs models: draw, type or choose an input, and watch which experts run, in which order.

    Args:
        runs: Run folders, their names in the runs folder, model.safetensors files or shipped models (default: all shipped image
            models).
        output: The HTML file to write; it needs no other file and no network.
        data: Path of your images for models that were trained on your data; the page shows some of them (default: none).
    """
    path = Path(output)
    require(path.suffix.lower() in (".html", ".htm"), "output", repr(output), "must end in .html")
    require(path.parent.is_dir(), "output", repr(output), f"folder {str(path.parent)!r} does not exist")
    sources = [(run, find_source(run, runs_dir)) for run in runs or SHIPPED_IMAGES]
    from raytraced.explore.page import make_page
    from raytraced.files import write_file
    from raytraced.io.saving import has_finite_weights, load

    models = [(Path(run).stem if Path(run).is_file() else Path(run).name, load(source)) for run, source in sources]
    for (_, source), (_, model) in zip(sources, models, strict=True):
        if not has_finite_weights(model):
            raise ValueError(f"{source}: {NOT_FINITE}")
    content = make_page(models, data_root, data).encode()
    write_file(path, content)
    num = f"{len(models)} model{'s' if len(models) > 1 else ''}"
    print(f"{printable(path)}: {num}, {len(content) / 1e6:.2f} MB; open it in a browser")

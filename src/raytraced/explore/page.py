"""One HTML file that runs trained models in a browser: it needs no server, no network and no other file."""

import json
import sys
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment

from raytraced.errors import printable
from raytraced.explore.gallery import has_images, pack_gallery
from raytraced.explore.packing import pack_model
from raytraced.models.classifier import Classifier
from raytraced.models.output import Model
from raytraced.tasks.images.catalog import CATALOG
from raytraced.tasks.registry import catalogued_data

SCRIPTS = ("input.js", "grid.js", "answer.js", "text.js", "picture.js", "page.js")


def make_page(models: Sequence[tuple[str, Model]], root: str | None = None, data: str | None = None) -> str:
    """Make a page that runs trained models.

    Test images of an image model come from the data set that its card names, if that is one of the catalogue and in the
    cache; nothing is downloaded. A card cannot make this function open a path. A model without test images is still in
    the page, and a line on stderr says why.

    Args:
        models: Names and models, at least one. Links into the page contain the names, so each must be unique.
        root: Folder of the data cache; the default one if None.
        data: Path of your own images, for models whose card names no data set of the catalogue. The page will contain
            some of its test images, but not the path.

    Returns:
        The HTML text. It depends on the arguments alone, so a caller can write it to a file and serve that.

    Raises:
        ValueError: There is no model, a name appears twice, or a model cannot run in the page.
    """
    if not models:
        raise ValueError("models=[]: the page needs at least one model")
    names = [name for name, _ in models]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"models={', '.join(repeated)}: is given twice; give each model its own name")
    packs = [pack(name, model, root, data) for name, model in models]
    # A text of the page never contains "<", so no name can end the element that contains it.
    text = json.dumps(packs, separators=(",", ":")).replace("<", "\\u003c")
    assets = {"style": asset("style.css"), "engine": asset("engine.js"), "page": "\n".join(map(asset, SCRIPTS))}
    return Environment(autoescape=False).from_string(asset("page.html")).render(models=text, **assets)


def pack(name: str, model: Model, root: str | None, data: str | None) -> dict[str, Any]:
    """A model as JSON values, with its gallery of test images if there is one."""
    packed = pack_model(name, model)
    if not isinstance(model, Classifier):
        return packed
    try:
        source = gallery_source(model, root, data)
        return packed | {"gallery": pack_gallery(model, source, root)}
    except (ValueError, OSError) as error:
        print(f"raytraced: {printable(name)}: no test images in the page: {printable(error)}", file=sys.stderr)
        return packed


def gallery_source(model: Classifier, root: str | None, data: str | None) -> str:
    """The data whose test images are shown: a data set of the catalogue by the model's card, else what the user gave."""
    named = catalogued_data(model.card)
    if named is None or named not in CATALOG:  # a card may also name a text
        if data is None:
            raise ValueError(
                "its card names no image data set of the catalogue; use `raytraced explore --data PATH` for your own images"
            )
        return data
    if not has_images(named, root):
        raise ValueError(f"{named} is not in the data cache; `raytraced data get {named}` downloads it")
    return named


def asset(name: str) -> str:
    """The text of a file beside this one."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")

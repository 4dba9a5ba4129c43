"""Models -> one HTML file in which they run: nothing is loaded from elsewhere, and it works from the file system."""

import json
import sys
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment

from raytraced.explore.gallery import at_hand, pack_gallery
from raytraced.explore.packing import pack_model
from raytraced.models.classifier import Classifier
from raytraced.models.output import Model

SCRIPTS = ("input.js", "grid.js", "answer.js", "text.js", "picture.js", "page.js")


def make_page(models: Sequence[tuple[str, Model]], root: str | None = None) -> str:
    """The page of some models, by their names; a ValueError names the first that cannot run in it.

    `root` is the cache folder of data sets: a model whose test images are not at hand has no gallery, nothing is fetched.
    """
    if not models:
        raise ValueError("models: none given; the page needs at least one")
    names = [name for name, _ in models]
    if doubled := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"models: {', '.join(sorted(doubled))} is given twice; links go by names, give each its own")
    packs = [pack(name, model, root) for name, model in models]
    # "<" never stands in a text of the page, so no name can end the element that it is in
    text = json.dumps(packs, separators=(",", ":")).replace("<", "\\u003c")
    assets = {"style": asset("style.css"), "engine": asset("engine.js"), "page": "\n".join(map(asset, SCRIPTS))}
    return Environment(autoescape=False).from_string(asset("page.html")).render(models=text, **assets)


def pack(name: str, model: Model, root: str | None) -> dict[str, Any]:
    """A model and, of images, its gallery."""
    found = pack_model(name, model)
    if not isinstance(model, Classifier):
        return found
    data = model.card.data
    try:
        if data is not None and at_hand(data, root):
            return found | {"gallery": pack_gallery(model, data, root)}
        reason = f"its test images are not at hand{f'; `raytraced data get {data}` fetches them' if data else ''}"
    except (ValueError, OSError) as error:  # a folder of one's own may have changed since
        reason = str(error)
    print(f"raytraced: {name}: without a gallery: {reason}", file=sys.stderr)
    return found


def asset(name: str) -> str:
    """One of the files beside this one."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")

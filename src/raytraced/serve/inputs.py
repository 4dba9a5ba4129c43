"""A request's fields -> the model it names and the model's inputs; every mistake is a RefusedError.

Legend: C channels, H and W height and width, T tokens.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raytraced.errors import did_you_mean
from raytraced.serve.decoding import Decoders
from raytraced.serve.limits import RefusedError, shorten
from raytraced.serve.models import Served


def choose_model(name: str | None, is_text: bool, models: Sequence[Served]) -> Served:
    """The model of a name, by default the first that takes the kind of input."""
    kinds = {True: "text", False: "images"}
    if name is None:
        for served in models:
            if (served.codec is not None) == is_text:
                return served
        raise RefusedError(422, "input", f"{kinds[is_text]}: no model of this server takes any; see /api/models")
    for served in models:
        if served.name != name:
            continue
        if (served.codec is not None) != is_text:
            raise RefusedError(422, "input", f"model={shorten(name)}: takes {kinds[not is_text]}, not {kinds[is_text]}")
        return served
    remedy = did_you_mean(name, [served.name for served in models])
    raise RefusedError(404, "model", f"model={shorten(name)}: there is no such model; {shorten(remedy)}")


def encode_text(name: str, text: str, served: Served) -> list[int]:
    """The tokens of a text; of an empty one, those of a new line."""
    assert served.codec is not None
    try:
        return served.codec.encode_prompt(name, text.encode())
    except UnicodeEncodeError:
        raise RefusedError(422, "text", f"{name}: must be Unicode, it has half of a surrogate pair") from None
    except ValueError as error:
        raise RefusedError(422, "length", str(error)) from None


async def read_images(images: dict[str, Any], served: Served, decoders: Decoders) -> list[Tensor]:
    """Images by name, files in base64 or nested lists -> one uint8 tensor (1, C, H, W) per image."""
    try:
        files = {name: image.encode("ascii") for name, image in images.items() if isinstance(image, str)}
    except UnicodeEncodeError as error:
        name = next(name for name, image in images.items() if image is error.object)
        raise RefusedError(422, "image", f"{name}: must be an image file in base64, or lists of pixels") from None
    decoded = await decoders.decode(files, served.image_shape, base64=True) if files else []
    found = dict(zip(files, decoded, strict=True))
    return [
        found[name] if name in found else read_pixels(name, image, served.image_shape) for name, image in images.items()
    ]


def read_pixels(name: str, rows: list[Any] | NDArray[np.uint8], shape: tuple[int, int, int]) -> Tensor:
    """Nested lists of the model's size, or the array of a large body -> uint8 (1, C, H, W)."""
    expected = f"{shape} (channels, height, width)" + (f" or {shape[1:]}" if shape[0] == 1 else "")
    found = rows.shape if isinstance(rows, np.ndarray) else nested_shape(rows)
    if found not in (shape, shape[1:] if shape[0] == 1 else shape):
        raise RefusedError(422, "image", f"{name}: has shape {found}, must be {expected}")
    if isinstance(rows, np.ndarray):
        return torch.from_numpy(rows.reshape(1, *shape).copy())
    flat = rows
    for _ in found[1:]:
        flat = [one for row in flat for one in row]
    bad = [one for one in flat if not is_whole_number(one) or not 0 <= one <= 255]
    if bad:
        raise RefusedError(422, "image", f"{name}: has the value {shorten(bad[0])}, must be whole numbers in 0 … 255")
    return torch.from_numpy(np.array(flat, dtype=np.uint8).reshape(1, *shape))


def is_whole_number(value: Any) -> bool:
    """Whether a value is a whole number; Python's booleans are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def nested_shape(rows: Any) -> tuple[int, ...]:
    """The lengths of nested lists, as far as all lists of a level have the same one."""
    shape, level = list[int](), [rows]
    while level and all(isinstance(one, list) for one in level) and len({len(one) for one in level}) == 1:
        shape.append(len(level[0]))
        level = [one for row in level for one in row]
        if len(shape) > 3:
            break
    return tuple(shape)

"""The body of a request -> inputs and options, checked; whatever is wrong with it is a RefusedError.

Legend: C channels, H and W height and width.
"""

import base64
import io
import json
import warnings
from collections.abc import Sequence
from math import inf
from typing import Any, NoReturn

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from raytraced.serve.limits import Limits, RefusedError, shown
from raytraced.serve.models import Served
from raytraced.serve.schema import Schema, check
from raytraced.tasks.images.loading import read_image

FILE_KINDS = {b"\x89PNG\r\n\x1a\n": "PNG", b"\xff\xd8\xff": "JPEG"}


def read_body(body: bytes, schema: Schema) -> dict[str, Any]:
    """The object that a body holds."""

    def refuse(word: str) -> NoReturn:
        raise ValueError(f"{word} is no JSON")

    try:
        value = json.loads(body, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise RefusedError(422, "json", f"body: must be JSON ({shown(str(error))})") from None
    check(value, schema)
    given: dict[str, Any] = value
    for name in ("max_experts", "seed", "length"):  # 3.0 is an integer too
        if name in given:
            given[name] = int(given[name])
    return given


def choose_model(given: dict[str, Any], models: Sequence[Served]) -> Served:
    """The model that is asked for, by default the first that takes such input."""
    is_text, name = "text" in given, given.get("model")
    for served in models:
        if name in (None, served.name) and (served.codec is not None) == is_text:
            return served
    if name is None:
        raise RefusedError(422, "input", f"{'text' if is_text else 'images'}: no model here takes any")
    takes = "images" if is_text else "text"
    raise RefusedError(422, "input", f"model={shown(name)}: takes {takes}, which was not given")


def read_inputs(given: dict[str, Any], served: Served, limits: Limits) -> list[Tensor]:
    """What a request gives the model, (1, …) each."""
    if served.codec is not None:
        return [read_text(given["text"], served)]
    if "image" in given:
        return read_images({"image": given["image"]}, served, limits)
    return read_images({f"images[{n}]": image for n, image in enumerate(given["images"])}, served, limits)


def read_text(text: str, served: Served) -> Tensor:
    """The tokens of a text (1, T); of an empty one, those of a new line."""
    assert served.codec is not None
    try:
        return torch.tensor([served.codec.encode_prompt("text", text.encode())])
    except UnicodeEncodeError:
        raise RefusedError(422, "text", "text: must be Unicode, it has half a surrogate pair") from None
    except ValueError as error:
        raise RefusedError(422, "length", str(error)) from None


def read_images(images: dict[str, Any], served: Served, limits: Limits) -> list[Tensor]:
    """Images by name -> uint8 (1, C, H, W) each, read as `raytraced predict` reads them."""
    files = {name: read_file(name, image) for name, image in images.items() if isinstance(image, str)}
    total = sum(num_pixels(name, content) for name, content in files.items())
    if total > limits.pixels:
        message = f"images: hold more than {limits.pixels:,} pixels in all; send smaller ones, or fewer"
        raise RefusedError(422, "pixels", message)
    C, H, W = served.image_shape
    found = []
    for name, image in images.items():
        if name not in files:
            found.append(read_pixels(name, image, (C, H, W)))
            continue
        try:
            pixels_CHW = read_image(io.BytesIO(files[name]), height=H, width=W, colour=C > 1)
        except ValueError as error:  # which begins with the file: one in memory has no name of its own
            raise RefusedError(422, "image", f"{name}: {str(error).partition(': ')[2]}") from None
        found.append(torch.from_numpy(pixels_CHW)[None])
    return found


def read_file(name: str, text: str) -> bytes:
    """The bytes of a PNG or JPEG file in base64."""
    try:
        content = base64.b64decode(text, validate=True)
    except ValueError:
        raise RefusedError(422, "image", f"{name}: must be a file in base64") from None
    if not content.startswith(tuple(FILE_KINDS)):
        raise RefusedError(422, "image", f"{name}: must be a {' or '.join(FILE_KINDS.values())} file")
    return content


def num_pixels(name: str, content: bytes) -> float:
    """What the head of a file says: nothing is unpacked before it is known how large it is."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(content), formats=list(FILE_KINDS.values())) as image:
                return image.width * image.height
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        return inf
    except Exception:  # as in read_image: a damaged file can fail in any way
        raise RefusedError(422, "image", f"{name}: not an image that Pillow can read") from None


def read_pixels(name: str, rows: list[Any], shape: tuple[int, int, int]) -> Tensor:
    """Nested lists of the model's own size -> uint8 (1, C, H, W)."""
    try:
        pixels = np.array(rows, dtype=np.uint8)
    except (ValueError, TypeError):
        raise RefusedError(422, "image", f"{name}: must have rows of the same length") from None
    if pixels.shape not in (shape, shape[1:] if shape[0] == 1 else shape):
        wanted = f"{shape}, channels, height and width" + (f", or {shape[1:]}" if shape[0] == 1 else "")
        raise RefusedError(422, "image", f"{name}: has shape {pixels.shape}, must be {wanted}")
    return torch.from_numpy(pixels.reshape(1, *shape))

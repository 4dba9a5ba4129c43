"""One image file -> its pixels. Imports no torch: the server decodes files in small processes that can be ended.

Axes: C channels, H and W height and width.
"""

import warnings
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError


def read_image(
    path: str | Path | IO[bytes], *, height: int, width: int, colour: bool | None = None
) -> NDArray[np.uint8]:
    """Read an image file: turned upright, cut to its middle and resized.

    Args:
        path: The file, or an open one.
        height: Height of the result in pixels.
        width: Width of the result in pixels.
        colour: Whether the result has colour or is grey; None: as the file.

    Returns:
        Pixels (C, H, W) in uint8, with C of 1 or 3.

    Raises:
        ValueError: The file cannot be read; the message names it.
    """
    try:
        with warnings.catch_warnings():
            # Up to twice Pillow's limit it only warns, and telephones take such pictures.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(path) as file:
                image = _grey_or_colour(ImageOps.exif_transpose(file), colour)
    except UnidentifiedImageError:
        raise ValueError(f"{path}: not an image that Pillow can read") from None
    # A damaged file can fail in any way, in any of Pillow's decoders.
    except Exception as error:
        raise ValueError(f"{path}: unreadable image ({getattr(error, 'strerror', None) or error})") from None
    cut_width = max(1, min(image.width, image.height * width // height))
    cut_height = max(1, min(image.height, image.width * height // width))
    left, top = (image.width - cut_width) // 2, (image.height - cut_height) // 2
    # Cut first: ImageOps.fit, or the box of resize, would blend in pixels from outside the cut.
    image = image.crop((left, top, left + cut_width, top + cut_height))
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    return np.array(np.asarray(image).reshape(height, width, -1).transpose(2, 0, 1), order="C")  # writable, for torch


def _grey_or_colour(image: Any, colour: bool | None) -> Any:
    """Return the image in Pillow's mode L or RGB, as asked for or as the image is."""
    is_grey = image.mode in ("1", "L", "LA", "F") or image.mode.startswith("I")
    if image.mode.startswith("I"):
        # Sixteen bits: Pillow would clip at 255 instead of scaling.
        image = Image.fromarray((np.asarray(image).clip(0, 0xFFFF) >> 8).astype(np.uint8))
    if is_grey:
        image = image.convert("L")
    return image.convert("RGB" if colour or (colour is None and not is_grey) else "L")

"""A contact sheet: the first training images of each class in rows, the class names beside them.

Axes: n samples, C channels, H and W height and width.
"""

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

NUM_COLUMNS = 12
MAX_ROWS = 60
_TILE = 56  # pixels at least for an image's side: 28x28 and 8x8 scale up by whole factors
_GAP = 4
_FONT_SIZE = 16


def contact_sheet(
    images_nCHW: NDArray[np.uint8], labels_n: NDArray[np.int64], class_names: tuple[str, ...]
) -> Image.Image:
    """Draw a contact sheet with one row per class: its name and number, then its first images.

    Args:
        images_nCHW: Images in uint8.
        labels_n: Numbers of their classes.
        class_names: Names of the classes.

    Returns:
        The picture; pixels stay square.
    """
    shown = class_names[:MAX_ROWS]
    factor = max(1, -(-_TILE // max(images_nCHW.shape[2:])))
    height, width = (side * factor for side in images_nCHW.shape[2:])
    font = ImageFont.load_default(_FONT_SIZE)
    captions = [f"{name}  ({label})" if name != str(label) else name for label, name in enumerate(shown)]
    margin = int(max(font.getlength(caption) for caption in captions)) + 3 * _GAP
    size = (margin + NUM_COLUMNS * (width + _GAP), len(shown) * (height + _GAP) + _GAP)
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    for label, caption in enumerate(captions):
        top = _GAP + label * (height + _GAP)
        draw.text((margin - 2 * _GAP, top + height // 2), caption, fill="black", font=font, anchor="rm")
        for column, row in enumerate(np.flatnonzero(labels_n == label)[:NUM_COLUMNS]):
            pixels = images_nCHW[row].transpose(1, 2, 0)
            image = Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[:, :, 0])
            tile = image.resize((width, height), Image.Resampling.NEAREST)
            sheet.paste(tile.convert("RGB"), (margin + column * (width + _GAP), top))
    return sheet

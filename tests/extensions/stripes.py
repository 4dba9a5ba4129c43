"""A new data set is one new file like this one, and one line in the catalog."""

from hashlib import sha256

import numpy as np

from raytraced.data.sources import ArrayInfo
from raytraced.tasks.images.catalog import ImageSet

_labels = np.arange(60, dtype=np.uint8) % 2
_images = np.zeros((60, 1, 8, 8), dtype=np.uint8)
_images[_labels == 1, :, ::2] = 255


class Shelf:
    """A source that gives the original file by name."""

    def fetch(self, file_names, folder, report):
        return {"stripes.bin": _images.tobytes() + _labels.tobytes()}


def decode(files):
    content = np.frombuffer(files["stripes.bin"], dtype=np.uint8)
    return {"train_images": content[:-60].reshape(60, 1, 8, 8), "train_labels": content[-60:]}


STRIPES = ImageSet(
    name="stripes",
    class_names=("plain", "striped"),
    arrays={
        "train_images": ArrayInfo(_images.shape, sha256(_images).hexdigest()),
        "train_labels": ArrayInfo(_labels.shape, sha256(_labels).hexdigest()),
    },
    file_names=frozenset({"stripes.bin"}),
    decode=decode,
    sources=(Shelf(),),
    folders=("stripes",),
)

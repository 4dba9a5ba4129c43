"""A public set of images: its classes, and the arrays that it is made of."""

from dataclasses import dataclass

from raytraced.data.sources import ArrayInfo, PublicSet

KEYS = ("train_images", "train_labels", "test_images", "test_labels")


@dataclass(frozen=True, kw_only=True)
class ImageSet(PublicSet):
    """Images (n, C, H, W) and labels (n,) of training and test, and the names of the classes."""

    class_names: tuple[str, ...]


def image_arrays(nums: tuple[int, int], image_shape: tuple[int, int, int], *sha256: str) -> dict[str, ArrayInfo]:
    """Shapes and SHA-256 of the images and labels of training, then of test."""
    shapes: list[tuple[int, ...]] = [shape for num in nums for shape in ((num, *image_shape), (num,))]
    return dict(zip(KEYS, map(ArrayInfo, shapes, sha256), strict=True))

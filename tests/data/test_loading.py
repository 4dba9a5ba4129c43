"""Names -> data sets: the bundled digits, the validation rule, the union."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits as sklearn_digits

from raytraced.data import Dataset, Split, load, loading
from raytraced.data.dataset import channel_statistics, stratified_split
from raytraced.data.hashing import VALIDATION
from raytraced.data.loading import grey_28


def test_digits_are_those_of_scikit_learn_each_once():
    dataset = load("digits")
    theirs = sklearn_digits()
    assert dataset.class_names == tuple(map(str, theirs.target_names))
    splits = (dataset.train, dataset.validation, dataset.test)
    ours = [
        (tuple((image.double() * 16 / 255).round().int().flatten().tolist()), label)
        for split in splits
        for image, label in zip(split.images, split.labels.tolist(), strict=True)
    ]
    expected = [(tuple(map(int, row)), label) for row, label in zip(theirs.data, theirs.target.tolist(), strict=True)]
    assert sorted(ours) == sorted(expected)


def test_digits_use_the_whole_range_of_a_byte():
    images = load("digits").train.images
    assert (images.dtype, int(images.min()), int(images.max())) == (torch.uint8, 0, 255)


def test_mean_and_std_normalise_the_training_split():
    dataset = load("digits")
    pixels = dataset.train.images.double() / 255
    torch.testing.assert_close(torch.tensor(dataset.mean, dtype=torch.double), pixels.mean((0, 2, 3)))
    torch.testing.assert_close(torch.tensor(dataset.std, dtype=torch.double), pixels.std((0, 2, 3), correction=0))


def test_channel_statistics_are_taken_channel_by_channel():
    images = torch.randint(0, 256, (2000, 3, 4, 4), dtype=torch.uint8) // torch.tensor([1, 2, 3]).view(3, 1, 1)
    mean, std = channel_statistics(images.to(torch.uint8))
    pixels = images.double() / 255
    torch.testing.assert_close(torch.tensor(mean, dtype=torch.double), pixels.mean((0, 2, 3)))
    torch.testing.assert_close(torch.tensor(std, dtype=torch.double), pixels.std((0, 2, 3), correction=0))


@given(counts=st.lists(st.integers(2, 60), min_size=1, max_size=6), seed=st.integers(0, 100))
def test_split_takes_a_tenth_of_each_class_and_loses_nothing(counts, seed):
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    names = tuple(map(str, range(len(counts))))
    held_out, kept = stratified_split(labels, 0.1, VALIDATION, names)
    assert sorted([*held_out, *kept]) == list(range(len(labels)))
    taken = np.bincount(labels[held_out], minlength=len(counts))
    assert taken.tolist() == [max(1, (count + 5) // 10) for count in counts]
    again, _ = stratified_split(labels, 0.1, VALIDATION, names)
    assert again.tolist() == held_out.tolist()


def test_split_takes_rows_from_the_whole_class():
    held_out, _ = stratified_split(np.zeros(10000, dtype=np.int64), 0.1, VALIDATION, ("a",))
    counts, _ = np.histogram(held_out, bins=10, range=(0, 10000))
    # 1000 rows over ten tenths: 5 standard deviations of a binomial count
    assert np.abs(counts - 100).max() < 5 * (1000 * 0.1 * 0.9) ** 0.5


def test_class_too_small_to_split_is_named():
    with pytest.raises(ValueError, match="class 'b': 1 training images, at least 2 are needed"):
        stratified_split(np.array([0, 0, 1]), 0.1, VALIDATION, ("a", "b"))


def test_unknown_name_is_told_with_the_names_there_are():
    with pytest.raises(
        ValueError, match="data set 'minst': neither a file or folder nor one of digits, mnist, fashion"
    ):
        load("minst")


def test_colour_is_made_grey_by_the_stated_weights_and_cut_to_the_middle():
    generator = torch.Generator().manual_seed(0)
    colour = torch.randint(0, 256, (50, 3, 32, 32), dtype=torch.uint8, generator=generator)
    weights = torch.tensor([0.299, 0.587, 0.114], dtype=torch.double).view(3, 1, 1)
    expected = (colour[:, :, 2:30, 2:30] * weights).sum(1, keepdim=True)
    # rounded, so never more than a half away
    assert float((grey_28(colour).double() - expected).abs().max()) <= 0.5 + 1e-9


def test_union_joins_the_three_sets_split_by_split(monkeypatch):
    def small(name, root=None):
        shape = (3, 32, 32) if name == "cifar10" else (1, 28, 28)
        splits = [
            Split(torch.randint(0, 256, (n, *shape), dtype=torch.uint8), torch.arange(n) % 10) for n in (30, 20, 10)
        ]
        return Dataset(name, *splits, tuple("abcdefghij"), (0.5,) * shape[0], (0.5,) * shape[0])

    monkeypatch.setattr(loading, "load", small)
    union = loading.load_union()
    assert (union.num_classes, union.image_shape) == (30, (1, 28, 28))
    assert (len(union.train), len(union.validation), len(union.test)) == (90, 60, 30)
    assert union.test.labels.tolist() == list(range(30))
    assert (union.class_names[0], union.class_names[29]) == ("mnist a", "cifar10 j")

"""Names -> data sets: the bundled digits, the validation rule, the union."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits as sklearn_digits

from raytraced.data.hashing import VALIDATION
from raytraced.tasks.images import loading
from raytraced.tasks.images.dataset import Dataset, Split, build_dataset, channel_statistics, stratified_split
from raytraced.tasks.images.loading import grey_28, load


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


def splitmix(state):
    """SplitMix64's next output, in Python's own integers."""
    word = (state + 0x9E3779B97F4A7C15) % 2**64
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) % 2**64
    return word ^ (word >> 31)


def hold_out(rows_by_class, tenths, stream):
    """The rule of docs/guides/data.md, word by word; every run ever recorded depends on it."""
    held_out = set()
    for label, rows in rows_by_class.items():
        start = splitmix(splitmix(splitmix(stream)) + label)  # the seed is 0
        in_order = sorted(range(len(rows)), key=lambda place, start=start: splitmix(start + place))
        held_out |= {rows[place] for place in in_order[: max(1, (tenths * len(rows) + 5) // 10)]}
    return held_out


def test_splits_of_the_digits_follow_the_stated_rule():
    dataset, labels = load("digits"), sklearn_digits().target.tolist()
    images = (torch.from_numpy(sklearn_digits().images) * 255 / 16).round().to(torch.uint8)
    rows_by_class = {label: [row for row, one in enumerate(labels) if one == label] for label in range(10)}
    test = hold_out(rows_by_class, 2, stream=5)
    kept = {label: [row for row in rows if row not in test] for label, rows in rows_by_class.items()}
    validation = hold_out(kept, 1, stream=4)
    train = set(range(len(labels))) - test - validation
    for split, rows in ((dataset.train, train), (dataset.validation, validation), (dataset.test, test)):
        assert split.labels.tolist() == [labels[row] for row in sorted(rows)]
        assert torch.equal(split.images[:, 0], images[sorted(rows)])


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
    held_out, kept = stratified_split(labels, 0.1, VALIDATION, len(counts))
    assert sorted([*held_out, *kept]) == list(range(len(labels)))
    taken = np.bincount(labels[held_out], minlength=len(counts))
    assert taken.tolist() == [max(1, (count + 5) // 10) for count in counts]
    again, _ = stratified_split(labels, 0.1, VALIDATION, len(counts))
    assert again.tolist() == held_out.tolist()


def test_split_takes_rows_from_the_whole_class():
    held_out, _ = stratified_split(np.zeros(10000, dtype=np.int64), 0.1, VALIDATION, 1)
    counts, _ = np.histogram(held_out, bins=10, range=(0, 10000))
    # 1000 rows over ten tenths: 5 standard deviations of a binomial count
    assert np.abs(counts - 100).max() < 5 * (1000 * 0.1 * 0.9) ** 0.5


@pytest.mark.parametrize(("has_test", "needed"), [(True, 2), (False, 3)])
def test_class_too_small_to_split_is_named(has_test, needed):
    def build(num):
        labels = np.array([0, 0, 0] + [1] * num)
        images = np.random.default_rng(0).integers(0, 256, (len(labels), 1, 2, 2), dtype=np.uint8)
        return build_dataset("mine", ("a", "b"), images, labels, *((images, labels) if has_test else ()))

    with pytest.raises(ValueError, match=f"mine: class 'b' has {needed - 1} images to train on, at least {needed} are"):
        build(needed - 1)
    assert build(needed).train.labels.unique().tolist() == [0, 1]


def test_one_class_is_refused():
    images, labels = np.zeros((9, 1, 2, 2), dtype=np.uint8), np.zeros(9, dtype=np.int64)
    with pytest.raises(ValueError, match="mine: 1 class, at least 2 are needed"):
        build_dataset("mine", ("only",), images, labels)


@pytest.mark.parametrize(
    ("name", "hint"), [("minst", r"did you mean mnist\?"), ("photos", "must be one of digits, mnist, fashion-mnist")]
)
def test_unknown_name_is_refused_with_a_suggestion(name, hint):
    with pytest.raises(ValueError, match=f"data set '{name}': neither a file, nor a folder, nor a known name; {hint}"):
        load(name)


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

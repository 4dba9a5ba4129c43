"""The loader: which samples, in which order, on which rank, and with which values."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raytraced.tasks.images.dataset import PAD, Loader, Split, pad_crop_flip


def numbered_split(num, channels=1, side=4):
    """Images whose label is their own number, so that a batch shows which samples it holds."""
    generator = torch.Generator().manual_seed(num)
    images = torch.randint(0, 256, (num, channels, side, side), dtype=torch.uint8, generator=generator)
    return Split(images, torch.arange(num))


def make_loader(split, batch_size=8, **options):
    return Loader(split, batch_size, **options)


def labels_of(loader, epoch, start_batch=0):
    return [batch.targets.tolist() for batch in loader.epoch(epoch, start_batch)]


def test_batches_hold_the_images_of_their_targets_as_they_are():
    split = numbered_split(20, channels=3)
    for batch in Loader(split, 8).epoch(0):
        assert batch.inputs.dtype == torch.uint8
        assert torch.equal(batch.inputs, split.images[batch.targets])
        assert batch.rows.tolist() == list(range(len(batch.targets)))
        assert batch.mask is None


@pytest.mark.parametrize(("num", "sizes"), [(20, [8, 8, 4]), (16, [8, 8]), (3, [3])])
def test_loader_knows_how_many_global_batches_there_are_and_fills_them(num, sizes):
    assert len(make_loader(numbered_split(num), rank=1, world_size=2)) == len(sizes)
    assert [len(batch.targets) for batch in make_loader(numbered_split(num)).epoch(0)] == sizes


@given(num=st.integers(1, 60), batch_size=st.integers(4, 70), world_size=st.integers(1, 4), seed=st.integers(0, 2**40))
def test_ranks_together_see_the_global_batches_of_one_rank(num, batch_size, world_size, seed):
    split = numbered_split(num)
    whole = list(make_loader(split, batch_size, seed=seed).epoch(3))
    shards = [
        list(make_loader(split, batch_size, seed=seed, rank=rank, world_size=world_size).epoch(3))
        for rank in range(world_size)
    ]
    for index, batch in enumerate(whole):
        for field in ("inputs", "targets", "rows"):
            together = torch.cat([getattr(shard[index], field) for shard in shards])
            assert torch.equal(together, getattr(batch, field))
    assert sorted(torch.cat([batch.targets for batch in whole]).tolist()) == list(range(num))
    assert [len(shard) for shard in shards] == [len(make_loader(split, batch_size))] * world_size


def test_same_seed_and_epoch_give_the_same_batches_whatever_came_before():
    split = numbered_split(50)
    fresh, used = make_loader(split, seed=7), make_loader(split, seed=7)
    list(used.epoch(0))
    assert labels_of(fresh, 2) == labels_of(used, 2)


def test_other_seeds_and_epochs_give_other_orders():
    split = numbered_split(50)
    orders = [str(labels_of(make_loader(split, seed=seed), epoch)) for seed in range(3) for epoch in range(3)]
    assert len(set(orders)) == 9


def test_order_is_the_file_order_without_shuffle():
    in_order = [list(range(8)), list(range(8, 16)), list(range(16, 20))]
    assert labels_of(make_loader(numbered_split(20), shuffle=False), 5) == in_order


def test_every_sample_lands_in_every_quarter_of_an_epoch_equally_often():
    num, num_epochs = 40, 500
    loader = make_loader(numbered_split(num), batch_size=10)
    counts = torch.zeros(num, 4)
    for epoch in range(num_epochs):
        for quarter, batch in enumerate(loader.epoch(epoch)):
            counts[batch.targets, quarter] += 1
    # 5 standard deviations of a binomial count: 160 of them exceed it together with probability below 1e-4
    assert (counts - num_epochs / 4).abs().max() < 5 * (num_epochs * 0.25 * 0.75) ** 0.5


@pytest.mark.parametrize("augment", [False, True])
def test_resumed_epoch_is_bitwise_the_rest_of_the_epoch(augment):
    loader = make_loader(numbered_split(30, channels=3), augment=augment)
    whole = list(loader.epoch(4))
    for start_batch in range(len(loader) + 1):
        rest = list(loader.epoch(4, start_batch))
        assert len(rest) == len(whole) - start_batch
        for batch, expected in zip(rest, whole[start_batch:], strict=True):
            assert torch.equal(batch.inputs, expected.inputs)
            assert torch.equal(batch.targets, expected.targets)


def test_augmentation_is_the_same_on_any_rank_and_in_any_batch_size():
    split = numbered_split(24, channels=3, side=6)

    def image_by_label(**options):
        batches = make_loader(split, seed=3, augment=True, **options).epoch(1)
        return {
            label: image for batch in batches for label, image in zip(batch.targets.tolist(), batch.inputs, strict=True)
        }

    expected = image_by_label(batch_size=24)
    found = image_by_label(batch_size=5) | image_by_label(batch_size=10, rank=1, world_size=2)
    assert all(torch.equal(found[label], expected[label]) for label in range(24))


def test_augmented_image_is_a_crop_of_the_padded_image_or_of_its_mirror():
    split = numbered_split(400, channels=3, side=6)
    samples = torch.arange(400).numpy()
    augmented = pad_crop_flip(split.images, samples, seed=0, epoch=0)
    padded = torch.nn.functional.pad(split.images, (PAD,) * 4)
    seen = set()
    for image, source in zip(augmented, padded, strict=True):
        crops = {
            (top, left, flip): crop.flip(-1) if flip else crop
            for top in range(2 * PAD + 1)
            for left in range(2 * PAD + 1)
            for flip in (False, True)
            for crop in [source[:, top : top + 6, left : left + 6]]
        }
        matches = [place for place, crop in crops.items() if torch.equal(crop, image)]
        assert matches
        seen.update(matches)
    assert {top for top, _, _ in seen} == {left for _, left, _ in seen} == set(range(2 * PAD + 1))
    assert {flip for _, _, flip in seen} == {False, True}


def test_augmentation_is_off_by_default():
    split = numbered_split(10, channels=3)
    plain, augmented = make_loader(split, augment=False), make_loader(split, augment=True)
    default = next(make_loader(split).epoch(0)).inputs
    assert torch.equal(default, next(plain.epoch(0)).inputs)
    assert not torch.equal(default, next(augmented.epoch(0)).inputs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0: must be at least world_size=1"),
        ({"batch_size": 3, "world_size": 4}, "batch_size=3: must be at least world_size=4"),
        ({"rank": 2, "world_size": 2}, "rank=2: must be 0 … 1, world_size=2"),
        ({"split": numbered_split(0)}, "split: has no samples"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Loader(**{"split": numbered_split(10), "batch_size": 8} | options)


def test_wrong_place_in_the_training_is_named_at_once():
    loader = make_loader(numbered_split(20))
    with pytest.raises(ValueError, match="start_batch=4: an epoch has 3 batches"):
        loader.epoch(0, start_batch=4)
    with pytest.raises(ValueError, match="epoch=-1: must be at least 0"):
        loader.epoch(-1)

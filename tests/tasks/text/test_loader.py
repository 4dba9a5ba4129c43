"""Batches are a pure function of (seed, step), in one process or many, from the start or from anywhere."""

import numpy as np
import pytest
import torch

from raytraced.tasks.text.dataset import MOST_TOKENS, Loader, Split, Text

TEXTS = (Text((np.arange(0, 60), np.arange(60, 100))), Text((np.arange(1000, 1030),)))


@pytest.fixture
def split():
    return Split(TEXTS, 8, None)


def same(one, other):
    return all((a is None and b is None) or torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_any_batch_is_found_again_without_those_before_it(split):
    batches = list(Loader(split, 6, 5, seed=3).epoch(2))
    assert len(batches) == len(Loader(split, 6, 5)) == 5
    for start in range(6):
        again = list(Loader(split, 6, 5, seed=3).epoch(2, start_batch=start))
        assert len(again) == 5 - start
        assert all(same(one, other) for one, other in zip(again, batches[start:], strict=True))
    assert not same(batches[0], next(Loader(split, 6, 5, seed=4).epoch(2)))
    assert not same(batches[0], next(Loader(split, 6, 5, seed=3).epoch(3)))
    # a step is a step, however many an epoch has
    assert same(batches[3], next(Loader(split, 6, 13, seed=3).epoch(1)))


def test_windows_begin_anywhere_in_each_domain_in_turn(split):
    batches = list(Loader(split, 4, 500).epoch(0))
    inputs = torch.cat([batch.inputs for batch in batches])
    targets = torch.cat([batch.targets for batch in batches])
    assert torch.equal(targets, inputs + 1)
    assert all(batch.mask is None for batch in batches)
    first = inputs[:, 0]
    assert int((first < 1000).sum()) == len(first) // 2  # equal shares, exactly
    assert sorted(set(first.tolist())) == [*range(92), *range(1000, 1022)]  # 8 and one more must follow


@pytest.mark.parametrize("shuffle", [True, False])
def test_processes_share_the_batches_of_one(split, shuffle):
    whole = list(Loader(split, 5, 4, shuffle=shuffle).epoch(1))
    for world in (2, 3):
        parts = [
            list(Loader(split, 5, 4, shuffle=shuffle, rank=rank, world_size=world).epoch(1)) for rank in range(world)
        ]
        for number, batch in enumerate(whole):
            mine = [part[number] for part in parts]
            for name in ("inputs", "targets", "rows"):
                assert torch.equal(torch.cat([getattr(one, name) for one in mine]), getattr(batch, name))


def test_evaluation_takes_the_windows_in_order_and_masks_what_is_not_there(split):
    loader = Loader(split, 5, 4, shuffle=False)
    batches = list(loader.epoch(0))
    assert len(batches) == len(loader) == 4  # 13 + 4 windows
    real = [batch.targets if batch.mask is None else batch.targets[batch.mask] for batch in batches]
    assert torch.cat([each.flatten() for each in real]).tolist() == [*range(1, 100), *range(1001, 1030)]
    assert [batch.mask is None for batch in batches] == [True, True, False, False]
    assert batches[-1].rows.tolist() == [0, 1]


def test_a_large_batch_of_evaluation_is_made_in_parts():
    split = Split((Text((np.zeros(100_000, dtype=np.uint8),)),), 256, None)
    loader = Loader(split, 1000, 4, shuffle=False)
    assert loader.batch_size == MOST_TOKENS // 256
    assert max(batch.inputs.numel() for batch in loader.epoch(0)) <= MOST_TOKENS
    assert Loader(split, 1000, 4).batch_size == 1000


def test_tokens_tell_their_bytes(split):
    (batch,) = Loader(
        Split((Text((np.array([0, 1, 2, 1]),)),), 3, None), 1, 1, lengths=np.array([5, 1, 7]), shuffle=False
    ).epoch(0)
    assert batch.sizes.tolist() == [[1, 7, 1]]
    with pytest.raises(ValueError, match="batch_size=1: must be at least world_size=2"):
        Loader(split, 1, 1, world_size=2)

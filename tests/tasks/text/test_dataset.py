"""Texts in pieces, their splits, and the windows that evaluation takes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytraced.tasks.text.dataset import Split, Text, build_dataset, held_out


@given(st.lists(st.integers(0, 7), min_size=1, max_size=6), st.data())
def test_pieces_are_read_as_one(sizes, data):
    whole = np.arange(sum(sizes), dtype=np.uint8)
    text = Text(tuple(np.split(whole, np.cumsum(sizes)[:-1])))
    start, stop = sorted((data.draw(st.integers(0, len(whole))), data.draw(st.integers(0, len(whole)))))
    assert len(text) == len(whole)
    assert text.read(start, stop).tolist() == whole[start:stop].tolist()
    assert len(text.part(start, stop)) == stop - start
    assert all(np.shares_memory(piece, whole) for piece in text.part(start, stop).pieces if len(piece))


@given(st.integers(0, 5000))
def test_splits_hold_every_byte_once_and_take_five_percent_each(num):
    splits = held_out(Text((np.arange(num),)))
    found = [np.concatenate([np.zeros(0, int), *part.pieces]) for part in splits.values()]
    assert sorted(np.concatenate(found).tolist()) == list(range(num))
    assert all((np.diff(part) > 0).all() for part in found)
    if num >= 100:
        assert [len(part) / num for part in found] == pytest.approx([0.9, 0.05, 0.05], abs=10 / num)
        assert found[1][-1] - found[1][0] > 0.75 * num  # spread over all of it


@given(st.integers(2, 60), st.integers(1, 12))
def test_windows_hold_every_target_once(num, context):
    split = Split((Text((np.arange(num),)), Text((np.arange(100, 103),))), context, None)
    tokens = split.read(split.windows)
    assert len(split) == len(tokens)
    targets = tokens[:, 1:][tokens[:, 1:] >= 0]
    assert sorted(targets.tolist()) == [*range(1, num), 101, 102]
    both = tokens[:, 1:] >= 0
    assert (tokens[:, 1:][both] - tokens[:, :-1][both] == 1).all()


def test_fewer_windows_are_spread_over_all_domains_alike():
    split = Split((Text((np.zeros(1001),)), Text((np.zeros(101),)), Text((np.zeros(21),))), 10, 120)
    domains, starts = split.windows.T
    assert np.bincount(domains).tolist() == [4, 4, 2]  # 120 tokens: 12 windows, 4 each; the last has but 2
    assert starts[domains == 0].tolist() == [0, 250, 500, 750]


def test_too_short_a_text_is_refused_with_what_would_do():
    def dataset(num, **options):
        splits = held_out(Text((np.zeros(num, dtype=np.uint8),)))
        return build_dataset("a", {"a": splits}, **{"context": 8, "steps": 1, "eval_tokens": None} | options)

    with pytest.raises(ValueError, match=r"^a: is empty; there is nothing to learn from$"):
        dataset(0)
    with pytest.raises(ValueError, match=r"^a: has 1,000 bytes, 900 of them to train on; a window takes 951: give"):
        dataset(1000, context=950)
    with pytest.raises(ValueError, match="a window takes 4"):
        dataset(12, context=3)  # long enough to train on, but not to hold out a target
    for name in ("context", "steps", "eval_tokens"):
        with pytest.raises(ValueError, match=f"data option {name}=0: must be at least 1"):
            dataset(1000, **{name: 0})
    assert len(dataset(1000).train.domains[0]) == 900

"""Which combinations of options the quick tests try: every pair of values, once at least; the slow tests try all others."""

from itertools import combinations, product

import pytest


def pairs(*options):
    """Parameters for all combinations of values, one collection of values an option.

    Combinations that together hold every pair of values of two options are quick: few faults need three values to meet.
    The others are marked slow.
    """
    options = [list(values) for values in options]
    cases = list(product(*(range(len(values)) for values in options)))
    missing = {pair for case in cases for pair in pairs_of(case)}
    chosen = set()
    while missing:
        best = max(cases, key=lambda case: len(missing.intersection(pairs_of(case))))
        chosen.add(best)
        missing.difference_update(pairs_of(best))
    return [
        pytest.param(*(values[at] for values, at in zip(options, case, strict=True)), marks=() if case in chosen else pytest.mark.slow)
        for case in cases
    ]  # fmt: skip


def pairs_of(case):
    """The pairs of options and values in a combination."""
    return combinations(enumerate(case), 2)

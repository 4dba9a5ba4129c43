from itertools import combinations, product

from cases import pairs


def test_quick_cases_hold_every_pair_of_values_and_slow_ones_the_rest():
    options = ("abcd", (1, 2), (None, 0.3), (False, True))
    cases = pairs(*options)
    assert [case.values for case in cases] == list(product(*options))
    quick = [case.values for case in cases if not case.marks]
    for one, other in combinations(range(len(options)), 2):
        assert {(case[one], case[other]) for case in quick} == set(product(options[one], options[other]))
    assert len(quick) <= 10  # of 32; the two longest options alone have 8 pairs

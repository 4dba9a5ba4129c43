"""Random numbers: the published test vectors, independence of batch order, and moments."""

import torch

from raytraced.rng import exponential, philox, uniform


def as_int64(*words):
    return tuple(torch.tensor(w) for w in words)


def test_philox_matches_the_published_test_vectors():
    # Test vectors of the generator's authors (Random123, kat_vectors, philox4x32 with 10 rounds).
    zeros = philox(torch.tensor(0), as_int64(0, 0, 0, 0))
    assert zeros.tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = philox(torch.tensor(-1), as_int64(*[0xFFFFFFFF] * 4))
    assert ones.tolist() == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_a_draw_depends_on_its_row_number_not_on_its_position():
    seed, rows = torch.tensor(1234567890123456789), torch.arange(50)
    order = torch.randperm(50)
    for step in (0, 3, 4, 31):
        assert torch.equal(uniform(seed, rows, step)[order], uniform(seed, rows[order], step))
        assert torch.equal(exponential(seed, rows, step, 7)[order], exponential(seed, rows[order], step, 7))


def test_draws_differ_between_steps_rows_and_seeds():
    rows = torch.arange(1000)
    numbers = torch.stack([uniform(torch.tensor(seed), rows, step) for seed in (1, 2) for step in range(9)])
    # 18,000 numbers on a grid of 2^23: about 19 equal pairs are expected by chance (n² / 2·2^23), 60 are not.
    assert numbers.unique().numel() > 18_000 - 60


def test_uniform_and_exponential_numbers_have_the_right_means():
    rows = torch.arange(100_000)
    u, e = uniform(torch.tensor(7), rows, 2), exponential(torch.tensor(7), rows, 2, 1)[:, 0]
    # Standard errors: 1/√(12·1e5) = 9.1e-4 and 1/√1e5 = 3.2e-3; five of each are allowed.
    assert abs(u.mean() - 0.5) < 4.6e-3
    assert abs(e.mean() - 1) < 0.016
    assert 0 < u.min() < u.max() < 1

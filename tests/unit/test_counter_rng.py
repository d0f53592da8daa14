"""Draws with an address: pinned, uniform, and different wherever an address differs."""

from __future__ import annotations

import numpy as np

from speechtrain.counter_rng import addressed, key_of, seed_at, uniform_at


def test_values_are_pinned() -> None:
    """A run continued by a later version draws as it did before."""
    assert seed_at(1, 2, 3) == 7510213797696614745
    assert key_of("digits-train-0-000001") == 8400877127006767635


def test_an_array_of_addresses_is_the_addresses_one_by_one() -> None:
    many = addressed(7, np.arange(5), 3)
    assert many.tolist() == [int(addressed(7, n, 3)) for n in range(5)]
    assert seed_at(7, 4, 3) == int(many[4]) >> 1


def test_neighbours_and_permutations_differ() -> None:
    seeds = {
        seed_at(*a) for a in [(1, 2), (2, 1), (1, 3), (0, 1, 2), (1, 2, 0), (1,), (2,), (0,), (-1,), (2**62,)]
    }
    assert len(seeds) == 10
    assert len(set(addressed(1, np.arange(100_000)).tolist())) == 100_000


def test_uniform_draws_are_uniform_and_uncorrelated() -> None:
    draws = uniform_at(3, np.arange(200_000))
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    counts = np.histogram(draws, bins=20, range=(0, 1))[0]
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 43.8  # chi squared, 19 degrees, p = 0.001
    other = uniform_at(4, np.arange(200_000))
    for a, b in ((draws[1:], draws[:-1]), (draws, other)):
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.01

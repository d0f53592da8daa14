"""Draws with an address: pinned, uniform, and different wherever an address differs."""

from __future__ import annotations

import ast
from enum import IntEnum
from pathlib import Path

import numpy as np

from speechtrain import counter_rng
from speechtrain.counter_rng import bits_at, key_of, seed_at, uniform_at

PACKAGE = Path(counter_rng.__file__).parent


def test_values_are_pinned() -> None:
    """A run continued by a later version draws as it did before."""
    assert seed_at(1, 2, 3) == 7510213797696614745
    assert key_of("digits-train-0-000001") == 8400877127006767635


def test_an_array_of_addresses_is_the_addresses_one_by_one() -> None:
    many = bits_at(7, np.arange(5), 3)
    assert many.tolist() == [int(bits_at(7, n, 3)) for n in range(5)]
    assert seed_at(7, 4, 3) == int(many[4]) >> 1


def test_neighbours_and_permutations_differ() -> None:
    seeds = {
        seed_at(*a) for a in [(1, 2), (2, 1), (1, 3), (0, 1, 2), (1, 2, 0), (1,), (2,), (0,), (-1,), (2**62,)]
    }
    assert len(seeds) == 10
    assert len(set(bits_at(1, np.arange(100_000)).tolist())) == 100_000


def test_uniform_draws_are_uniform_and_uncorrelated() -> None:
    draws = uniform_at(3, np.arange(200_000))
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    counts = np.histogram(draws, bins=20, range=(0, 1))[0]
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 43.8  # chi squared, 19 degrees, p = 0.001
    other = uniform_at(4, np.arange(200_000))
    for a, b in ((draws[1:], draws[:-1]), (draws, other)):
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.01


def test_streams_of_one_seed_have_distinct_numbers() -> None:
    streams = [e for e in vars(counter_rng).values() if isinstance(e, type) and issubclass(e, IntEnum)]
    for stream in (e for e in streams if e is not IntEnum):
        names = stream.__members__
        assert len(set(names.values())) == len(names) > 0, stream


def test_a_stream_is_the_number_that_it_names() -> None:
    assert seed_at(1, counter_rng.RunStream.ORDER, 7) == seed_at(1, 3, 7)


def bare_streams(source: str) -> list[int]:
    """The lines of addresses with a number, or a constant of the module, but without a member of an enum.

    An address that starts with a constant is a fixed table's, which no run draws. A hash of a name is fine.
    """
    tree, numbers = ast.parse(source), set()
    for node in tree.body:
        if isinstance(node, ast.Assign) and not ast.unparse(node.value).startswith("key_of("):
            names = [n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)]
            numbers |= set(names)
    found = []
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("seed_at", "uniform_at", "bits_at"):
            bare = [isinstance(a, ast.Constant) or ast.unparse(a) in numbers for a in call.args]
            is_named = any("Stream." in ast.unparse(a) for a in call.args)
            found += [call.lineno] if any(bare[1:]) and not bare[0] and not is_named else []
    return found


def test_no_module_passes_a_bare_number_as_a_stream() -> None:
    assert bare_streams("seed_at(seed, 3, epoch)") == [1]
    assert bare_streams("_A, _B = 3, 4\nseed_at(seed, epoch, _B)") == [2]
    for path in PACKAGE.rglob("*.py"):
        if path.name != "counter_rng.py":
            assert not bare_streams(path.read_text()), path

"""Error counts against jiwer; sums that are exact, whoever adds them."""

from __future__ import annotations

import math

import jiwer
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from speechtrain.metrics import MetricSums, character_errors, word_errors

texts = st.lists(st.sampled_from(["a", "b", "ab", "the", "cat", "é"]), max_size=8).map(" ".join)


@given(texts, texts)
def test_counts_are_those_of_jiwer(reference: str, hypothesis: str) -> None:
    errors, count = word_errors(reference, hypothesis)
    said = jiwer.process_words(reference, hypothesis)
    assert errors == said.substitutions + said.deletions + said.insertions
    assert count == said.hits + said.substitutions + said.deletions
    errors, count = character_errors(reference, hypothesis)
    assert count == len(reference)
    spelt = jiwer.process_characters(reference, hypothesis)
    assert errors == spelt.substitutions + spelt.deletions + spelt.insertions


def scalars(total: float, count: float, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.tensor(total, dtype=dtype), torch.tensor(count, dtype=dtype)


def test_means_divide_corpus_sums() -> None:
    sums = MetricSums()
    sums.add({"wer": scalars(1, 2), "loss": scalars(6.5, 2)})
    sums.add({"wer": scalars(0, 8)})
    assert sums.totals() == {"wer": (1.0, 10.0), "loss": (6.5, 2.0)}
    assert sums.means() == {"wer": 0.1, "loss": 3.25}
    sums.add({"wer": scalars(9, 0)})  # asking has not closed the account
    assert sums.means()["wer"] == 1.0


def test_no_words_is_an_infinite_error_rate() -> None:
    sums = MetricSums()
    sums.add({"wer": scalars(0, 0), "cer": scalars(3, 0)})
    assert sums.means() == {"wer": math.inf, "cer": math.inf}
    assert MetricSums().means() == {}


def test_counts_beyond_float32_are_exact() -> None:
    sums = MetricSums()
    for _ in range(3):
        sums.add({"words": scalars(2**24, 1)})
        sums.add({"words": scalars(1, 0)})
    assert sums.totals()["words"] == (3 * 2.0**24 + 3, 3.0)
    sums.add({"large": scalars(2**53 - 1, 1, torch.int64)})
    assert sums.totals()["large"][0] == 2.0**53 - 1


def test_long_evaluations_are_read_in_between() -> None:
    sums = MetricSums()
    for i in range(10_000):
        sums.add({"n": scalars(i, 1)})
        assert len(sums._pending) < 4096
    assert sums.totals() == {"n": (10_000 * 9_999 / 2, 10_000.0)}
    assert not sums._pending


def test_graphs_and_shapes_are_dropped() -> None:
    sums = MetricSums()
    weight = torch.ones(1, requires_grad=True)
    sums.add({"loss": (2 * weight, torch.ones(1, 1))})
    ((names, kept),) = sums._pending
    assert names == ["loss"]
    assert not kept.requires_grad
    assert sums.means() == {"loss": 2.0}


def test_ranks_are_summed_in_one_call_in_the_order_of_names() -> None:
    ranks = []
    for rank in range(3):
        sums = MetricSums()
        names = ["wer", "cer", "loss"] if rank else ["loss", "wer", "cer"]  # met in any order
        sums.add({name: scalars(len(name) + rank, 2) for name in names})
        ranks.append(sums)
    sent: list[Tensor] = []
    for sums in ranks:
        sums.reduce(lambda vector: sent.append(vector) or vector)  # type: ignore[func-returns-value]
    assert len(sent) == 3
    assert all(vector.dtype == torch.float64 and vector.shape == (6,) for vector in sent)
    calls = []

    def over_ranks(vector: Tensor) -> Tensor:
        calls.append(vector)
        return torch.stack(sent).sum(0)

    ranks[0].reduce(over_ranks)
    assert len(calls) == 1
    assert ranks[0].totals() == {"cer": (12.0, 6.0), "loss": (15.0, 6.0), "wer": (12.0, 6.0)}
    ranks[0].add({"cer": scalars(1, 1)})
    assert ranks[0].totals()["cer"] == (13.0, 7.0)


def test_nothing_to_reduce_is_no_call() -> None:
    sums = MetricSums()
    sums.reduce(lambda _: pytest.fail("an empty collective"))
    assert sums.means() == {}


@given(st.lists(st.tuples(st.integers(0, 2**20), st.integers(1, 2**20)), min_size=1), st.data())
def test_any_division_of_the_batches_gives_the_same_means(
    pairs: list[tuple[int, int]], data: st.DataObject
) -> None:
    whole = MetricSums()
    parts = [MetricSums() for _ in range(3)]
    for part in parts:
        part.add({"m": scalars(0, 0)})
    for total, count in pairs:
        whole.add({"m": scalars(total, count)})
        parts[data.draw(st.integers(0, 2))].add({"m": scalars(total, count)})
    sent: list[Tensor] = []
    for part in parts:
        part.reduce(lambda vector: sent.append(vector) or vector)  # type: ignore[func-returns-value]
    parts[0].reduce(lambda _: torch.stack(sent).sum(0))
    assert parts[0].means() == whole.means()

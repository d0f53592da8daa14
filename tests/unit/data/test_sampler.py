from __future__ import annotations

import itertools
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speechtrain.batch import Footprint
from speechtrain.counter_rng import key_of
from speechtrain.data.planned_lengths import planned_samples
from speechtrain.data.sampler import BatchLimits, EpochBatches, MicroBatch, Sampler
from tests.support.samplers import new_evaluation, new_sampler

FOOTPRINT = Footprint(per_second=1e7, per_second_label=1e5)
LIMITS = [
    BatchLimits(count=4),
    BatchLimits(count=7, window=1),
    BatchLimits(count=None, seconds=20.0),
    BatchLimits(count=3, seconds=20.0, window=3),
    BatchLimits(count=None, memory_gib=0.3),
    BatchLimits(count=5, seconds=30.0, memory_gib=0.3, window=2),
    BatchLimits(count=3, window=4, ranks=2),
    BatchLimits(count=None, seconds=20.0, ranks=3),
]


def corpus(count: int, seed: int = 0) -> dict[str, Any]:
    draws = np.random.default_rng(seed)
    seconds = draws.uniform(0.5, 12, count).astype(np.float32)
    return {
        "seconds": seconds,
        "keys": np.array([key_of(f"cut-{seed}-{i}") for i in range(count)]),
        "labels": (seconds * draws.uniform(0, 20, count)).astype(np.int32),
        "footprint": FOOTPRINT,
    }


def all_of(plan: EpochBatches) -> list[MicroBatch]:
    return [plan[i] for i in range(len(plan))]


def assert_within_limits(batch: MicroBatch, data: dict[str, Any], limits: BatchLimits) -> None:
    """A batch of several utterances is within each limit, and within its shape."""
    seconds = (data["seconds"][batch.rows] * 100.0 / batch.percents).max()
    labels = int(data["labels"][batch.rows].max())
    rows, longest, most_labels = len(batch.rows), seconds, labels
    if batch.shape is not None:
        samples = planned_samples(data["seconds"][batch.rows], batch.percents, 16_000)
        assert rows <= batch.shape.rows
        assert samples.max() <= batch.shape.samples
        assert labels <= batch.shape.labels
        # The limits hold for the padded batch.
        rows, longest, most_labels = batch.shape.rows, batch.shape.samples / 16_000, batch.shape.labels
    if rows > 1:
        assert rows <= (limits.count or rows)
        assert rows * longest <= (limits.seconds or np.inf) * (1 + 1e-5)
        most_bytes = (limits.memory_gib or np.inf) * 2**30
        assert FOOTPRINT.bytes(rows, longest, most_labels) <= most_bytes * (1 + 1e-5)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return (
            new_sampler(**corpus(100), seed=seed, limits=BatchLimits(count=4))
            .epoch_batches(epoch)
            .rows.tolist()
        )

    assert order(1, 0) == order(1, 0)
    assert len({tuple(order(seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4


def test_the_order_belongs_to_the_cuts_and_not_to_the_manifest() -> None:
    data = corpus(50)
    turned = {key: value[::-1] if isinstance(value, np.ndarray) else value for key, value in data.items()}
    plan = new_sampler(**data, seed=1, limits=BatchLimits(count=5), speed=(0.8, 1.2)).epoch_batches(2)
    other = new_sampler(**turned, seed=1, limits=BatchLimits(count=5), speed=(0.8, 1.2)).epoch_batches(2)
    assert data["keys"][plan.rows].tolist() == turned["keys"][other.rows].tolist()
    assert plan.percents.tolist() == other.percents.tolist()


def test_speeds_lie_on_the_grid_and_fill_it() -> None:
    sampler = new_sampler(**corpus(4000), seed=1, limits=BatchLimits(), speed=(0.9, 1.1))

    def percents_by_cut(epoch: int) -> np.ndarray:
        plan = sampler.epoch_batches(epoch)
        return plan.percents[plan.rows.argsort()]

    percents, next_percents = percents_by_cut(0), percents_by_cut(1)
    assert sorted(set(percents.tolist())) == list(range(90, 111))
    assert np.bincount(percents - 90).min() > 100  # 4,000 cuts at 21 speeds: about 190 for each speed
    assert (percents != next_percents).mean() > 0.9
    assert set(new_sampler(**corpus(9), seed=1, limits=BatchLimits()).epoch_batches(0).percents.tolist()) == {
        100
    }


def test_windows_save_padding_and_keep_the_order_random() -> None:
    data = corpus(4000)

    def padding(window: int) -> float:
        plan = new_sampler(**data, seed=1, limits=BatchLimits(count=8, window=window)).epoch_batches(0)
        padded = sum(float(data["seconds"][b.rows].max()) * len(b.rows) for b in all_of(plan))
        return padded / float(data["seconds"].sum()) - 1

    assert padding(20) < 0.1 < 0.5 < padding(1)
    plan = new_sampler(**data, seed=1, limits=BatchLimits(count=8, window=20)).epoch_batches(0)
    longest = np.array([data["seconds"][batch.rows].max() for batch in all_of(plan)])
    correlation = np.corrcoef(longest[:-1], longest[1:])[0, 1]
    assert abs(correlation) < 0.15, "the length of a batch depends on the length of the batch before it"


def lengths_of_ranks(ranks: int, count: int) -> np.ndarray:
    """Return the longest row, in seconds, of each rank's batch in 100 global batches of two ranks."""
    data = corpus(count)
    sampler = new_sampler(**data, seed=1, limits=BatchLimits(count=4, ranks=ranks))
    lengths = np.zeros(200)
    for number, batch in enumerate(islice(sampler.micro_batches(0, 0), 200)):
        seconds = data["seconds"][batch.rows]
        lengths[number] = seconds.max()
    return lengths.reshape(100, 2)


@pytest.mark.parametrize("count", [400, 401, 405])  # 100, 101 and 102 batches in an epoch
def test_batches_of_similar_length_follow_each_other_for_ranks(count: int) -> None:
    first, second = lengths_of_ranks(2, count).T
    differences = np.abs(first - second)
    assert np.median(differences) < 0.1
    assert (differences > 0.5).sum() <= 2  # global batches of two epochs
    steps = np.abs(np.diff(first))
    assert steps.mean() > 2  # The order of the pairs is still random.
    first, second = lengths_of_ranks(1, count).T
    assert np.median(abs(first - second)) > 1


def test_shapes_are_few_and_finite() -> None:
    data = corpus(500)
    outlier = 5000  # labels. All other transcripts have at most 20 labels × 12 s = 240.
    data["labels"][7] = outlier
    sampler = new_sampler(**data, seed=1, limits=BatchLimits(count=4), speed=(0.9, 1.1), shapes=5)
    assert len(sampler.shapes) <= 5
    met = {batch.shape for epoch in range(3) for batch in all_of(sampler.epoch_batches(epoch))}
    assert met <= set(sampler.shapes)
    assert all(shape.samples % 1600 == 0 and shape.labels % 8 == 0 for shape in sampler.shapes)
    assert sampler.shapes[-1].labels >= outlier
    assert sampler.shapes[0].labels < 400, "one odd transcript widens every shape"
    # The longest recording has a little less than 12 s, and 0.9 is the lowest speed.
    most_samples = 12 / 0.9 * 16_000
    assert sampler.shapes[-1].samples >= most_samples - 2000
    full = sum(
        len(batch.rows) == batch.shape.rows for batch in all_of(sampler.epoch_batches(0)) if batch.shape
    )
    assert full >= len(sampler.epoch_batches(0)) - 5


@settings(max_examples=40, deadline=None)
@given(count=st.integers(0, 80), limits=st.sampled_from(LIMITS), shapes=st.sampled_from([0, 3]))
def test_evaluation_has_every_cut_once_the_longest_first(
    count: int, limits: BatchLimits, shapes: int
) -> None:
    data = corpus(count)
    plan = new_evaluation(data["seconds"], data["labels"], limits, FOOTPRINT, shapes)
    batches = all_of(plan)
    assert sorted(row for batch in batches for row in batch.rows.tolist()) == list(range(count))
    assert all((batch.percents == 100).all() for batch in batches)
    if not shapes:
        lengths = [data["seconds"][row] for batch in batches for row in batch.rows]
        assert lengths == sorted(lengths, reverse=True)
    assert all(batch.shape in plan.shapes for batch in batches if plan.shapes)


# --- over ranks, with and without weights ---------------------------------------------------------

SET_WEIGHTS = ([], [1.0, 1.0], [3.0, 1.0, 0.2])
"""The weights of the training sets. An empty list is one set without a weight."""


def training_sampler(count: int, limits: BatchLimits, shapes: int, weights: list[float]) -> Sampler:
    data = corpus(count)
    sets = np.arange(count) % max(1, len(weights))
    return new_sampler(
        **data, seed=7, limits=limits, speed=(0.9, 1.1), shapes=shapes, sets=sets, weights=weights
    )


def address_of(batch: MicroBatch) -> tuple[int, int]:
    return batch.epoch, batch.index


def rank_parts(
    sampler: Sampler, world_size: int, start: tuple[int, int], count: int
) -> list[list[MicroBatch]]:
    """The next ``count`` micro-batches of each rank."""
    parts = []
    for rank in range(world_size):
        parts.append(list(islice(sampler.micro_batches(*start, rank, world_size), count)))
    return parts


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(3, 120),
    limits=st.sampled_from(LIMITS),
    shapes=st.sampled_from([0, 3]),
    weights=st.sampled_from(SET_WEIGHTS),
    world_size=st.integers(1, 5),
)
def test_ranks_divide_the_recordings_of_each_epoch(
    count: int, limits: BatchLimits, shapes: int, weights: list[float], world_size: int
) -> None:
    sampler = training_sampler(count, limits, shapes, weights)
    total = sampler.length(0) + sampler.length(1)
    parts = rank_parts(sampler, world_size, (0, 0), -(-total // world_size))
    assert len({len(part) for part in parts}) == 1
    for epoch in range(2):
        addresses, set_epochs_of_rows = [], []
        for batch in itertools.chain(*parts):
            if batch.epoch == epoch:
                addresses.append(batch.index)
                set_epochs = np.broadcast_to(batch.set_epochs, len(batch.rows)).tolist()
                set_epochs_of_rows += zip(batch.rows.tolist(), set_epochs, strict=True)
        assert sorted(addresses) == list(range(sampler.length(epoch)))
        # A recording of a small set is in several epochs of its set in an epoch, and once in each.
        assert len(set(set_epochs_of_rows)) == len(set_epochs_of_rows)
        if weights:
            assert len(set_epochs_of_rows) == sum(weighted.count for weighted in sampler.random_cuts.sets)
        else:
            assert sorted(row for row, _ in set_epochs_of_rows) == list(range(count))


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(3, 120),
    limits=st.sampled_from(LIMITS),
    shapes=st.sampled_from([0, 3]),
    weights=st.sampled_from(SET_WEIGHTS),
    epoch=st.integers(0, 4),
)
def test_no_micro_batch_of_a_weighted_epoch_exceeds_a_limit(
    count: int, limits: BatchLimits, shapes: int, weights: list[float], epoch: int
) -> None:
    data = corpus(count)
    for batch in all_of(training_sampler(count, limits, shapes, weights).epoch_batches(epoch)):
        assert_within_limits(batch, data, limits)


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(3, 60),
    limits=st.sampled_from(LIMITS),
    shapes=st.sampled_from([0, 3]),
    weights=st.sampled_from(SET_WEIGHTS),
    steps=st.integers(0, 30),
    before=st.sampled_from([1, 2, 3]),
    after=st.sampled_from([4, 6, 12]),
)
def test_a_resume_with_other_ranks_continues_the_same_plan(
    count: int, limits: BatchLimits, shapes: int, weights: list[float], steps: int, before: int, after: int
) -> None:
    """A global batch of 12 micro-batches is divided among ``before`` ranks, and then among ``after``."""
    sampler = training_sampler(count, limits, shapes, weights)
    expected = list(islice(sampler.micro_batches(0, 0), 12 * steps, 12 * (steps + 1)))
    address = (0, 0)
    for _ in range(steps):
        address = sampler.advance(*address, 12)
    resumed = training_sampler(count, limits, shapes, weights)
    assert address == resumed.advance(0, 0, 12 * steps)
    for world_size in (before, after):
        parts = rank_parts(resumed, world_size, address, 12 // world_size)
        merged = list(itertools.chain.from_iterable(zip(*parts, strict=True)))
        assert len(merged) == 12
        for planned, resumed_batch in zip(expected, merged, strict=True):
            assert address_of(planned) == address_of(resumed_batch)
            assert planned.shape == resumed_batch.shape
            assert planned.rows.tolist() == resumed_batch.rows.tolist()
            assert planned.percents.tolist() == resumed_batch.percents.tolist()
            assert np.array_equal(planned.set_epochs, resumed_batch.set_epochs)

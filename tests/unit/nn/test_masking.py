from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from numpy.typing import NDArray

from speechtrain.errors import ConfigError
from speechtrain.nn.masking import KINDS, SpanMask, frame_table, sample_negatives, skip_own_position


def spans(row: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """(start, length) of each run of masked frames."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], row.astype(np.int8), [0]])))
    return [(int(s), int(e - s)) for s, e in edges.reshape(-1, 2)]


def upstream_row(size: int, rng: np.random.Generator) -> tuple[int, int]:
    """Spans and masked frames of one row by the published rule, written plainly."""
    count = max(2, int(0.65 * size / 10 + rng.random()))
    covered = np.zeros(size, bool)
    for start in rng.permutation(size - 10)[:count]:
        covered[start : start + 10] = True
    return count, int(covered.sum())


@pytest.mark.parametrize(
    ("width", "coverage", "mean_spans"),
    [(49, 0.511, 3.2), (99, 0.497, 6.4), (499, 0.491, 32.4), (781, 0.491, 50.8)],
)
def test_coverage_is_that_of_the_reference(width: int, coverage: float, mean_spans: float) -> None:
    module = SpanMask()
    mask = module.sample([width] * 4000, width, seed=1)
    assert mask.mean() == pytest.approx(coverage, abs=0.005)
    drawn = [module._spans(width, u) for u in (np.arange(1000) + 0.5) / 1000]
    assert np.mean(drawn) == pytest.approx(mean_spans, abs=0.05)
    rng = np.random.default_rng(2)
    plain = np.array([upstream_row(width, rng) for _ in range(2000)])
    assert plain[:, 0].mean() == pytest.approx(mean_spans, abs=0.06)
    assert scipy.stats.ks_2samp(plain[:, 1], mask.sum(1)).pvalue > 1e-3


def test_static_spans_start_anywhere_but_the_end() -> None:
    mask = SpanMask(probability=0.01, min_masks=1).sample([40] * 3000, 40, seed=3)
    starts = mask.argmax(1)
    assert (mask.sum(1) == 10).all()
    assert starts.max() == 29  # of [0, 40 − 10): the last frame is never masked
    assert scipy.stats.chisquare(np.bincount(starts, minlength=30)).pvalue > 1e-3


@pytest.mark.parametrize("size", range(3, 13))
def test_short_rows_take_distinct_starts_from_the_first_frames(size: int) -> None:
    module, seen = SpanMask(), set()
    for seed in range(80):
        try:
            mask = module.sample([size], size, seed)
        except ConfigError:
            continue  # its starts include frame 0 and reach the end
        seen.add(tuple(mask[0].tolist()))
    assert all(sum(row) < size for row in seen)
    if size > 10:  # starts of {0, 1, 2}, two of them
        expected = {tuple(min(s) <= t < max(s) + 10 for t in range(size)) for s in ((0, 1), (0, 2), (1, 2))}
        assert seen == {row for row in expected if not all(row)}


def test_draw_refuses_a_row_masked_whole_unless_it_is_filler() -> None:
    module = SpanMask()
    # starts 0 and 1, 0 and 2 or 1 and 2: one of the first two comes soon
    with pytest.raises(ConfigError, match=r"SpanMask\.length is 10 .* all 2 frames") as caught:
        module.sample([2] * 20, 50, seed=0)
    assert "\n" not in str(caught.value)
    for seed in range(20):
        assert module.sample([2, 40], 50, seed, counted=[False, True])[0, 2:].sum() == 0
        assert module.sample([0], 50, seed).sum() == 0


@pytest.mark.parametrize("settings", [{}, {"probability": 0.9, "length": 3}, {"length": 2, "min_masks": 5}])
def test_shortest_is_where_static_spans_leave_a_frame(settings: dict[str, Any]) -> None:
    module = SpanMask(**settings)
    size = module.shortest()
    for longer in range(size, size + 25):
        module.sample([longer] * 100, longer, seed=longer)
    with pytest.raises(ConfigError):
        module.sample([size - 1] * 300, size, seed=0)
    assert SpanMask().shortest() == 13


@pytest.mark.parametrize(
    "settings", [{}, {"probability": 0.3, "length": 4}, {"length": 5, "min_masks": 0}, {"overlap": False}]
)
def test_most_bounds_every_draw_and_is_reached(settings: dict[str, Any]) -> None:
    module = SpanMask(**settings)
    for width in (20, 33):
        most = max(
            len(s) for row in range(4000) if len(s := np.flatnonzero(module.sample([width], width, row)))
        )
        assert (
            most == module.max_masked_frames(width)
            if module.overlap
            else most <= module.max_masked_frames(width)
        )
    assert SpanMask().max_masked_frames(499) == 330
    assert SpanMask().max_masked_frames(781) == 510
    assert all(SpanMask().max_masked_frames(w) <= SpanMask().max_masked_frames(w + 1) for w in range(1, 300))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overlap", [True, False])
def test_most_bounds_every_kind(kind: str, overlap: bool) -> None:
    module = SpanMask(kind=kind, other=3, overlap=overlap)
    for width in (60, 150):
        mask = module.sample([width, width - 20] * 100, width, seed=4)
        assert 0 < mask.sum(1).max() <= module.max_masked_frames(width)
        assert not mask[1::2, width - 20 :].any()


@pytest.mark.parametrize(
    ("kind", "other", "mean", "low", "high"),
    [
        ("static", 0.0, 10, 10, 10),
        ("uniform", 3.0, 11.5, 3, 20),
        ("normal", 4.0, 10, 1, 30),
        ("poisson", 0.0, 10, 0, 40),
    ],
)
def test_span_lengths_follow_their_kind(kind: str, other: float, mean: float, low: int, high: int) -> None:
    drawn = SpanMask(kind=kind, other=other)._lengths(20000, np.random.default_rng(5))
    assert drawn.mean() == pytest.approx(mean, abs=0.15)
    assert low <= drawn.min() <= drawn.max() <= high
    if kind == "uniform":
        assert scipy.stats.chisquare(np.bincount(drawn)[3:]).pvalue > 1e-3
    if kind == "normal":
        assert drawn.std() == pytest.approx(4, abs=0.2)
    if kind == "poisson":
        assert drawn.var() == pytest.approx(10, rel=0.05)


@pytest.mark.parametrize("space", [0, 1, 3])
def test_without_overlap_spans_keep_their_distance(space: int) -> None:
    module = SpanMask(overlap=False, min_space=space, length=4, kind="static")
    lengths, gaps = [], []
    for row in module.sample([120] * 300, 120, seed=7):
        found = spans(row)
        lengths += [n for _, n in found]
        gaps += [b - (a + n) for (a, n), (b, _) in itertools.pairwise(found)]
    if space:
        assert set(lengths) == {4}
        assert min(gaps) == space
    else:  # neighbours may touch, and then look like one span
        assert all(n % 4 == 0 for n in lengths)
        assert max(lengths) > 4
    # 0.65 of the row is asked for; what does not fit is left out, the more the wider the space
    masked = sum(lengths) / 300 / 120
    assert (0.55, 0.5, 0.35)[(0, 1, 3).index(space)] < masked < 0.65


def test_draw_equal_reduces_rows_at_random_to_the_smallest() -> None:
    module, sizes = SpanMask(), [300, 200, 250, 30, 5]
    counted = [True, True, True, False, False]
    ragged = module.sample(sizes, 300, seed=9, counted=counted)
    equal = module.sample(sizes, 300, seed=9, equal=True, counted=counted)
    least = ragged[:3].sum(1).min()
    assert equal[:3].sum(1).tolist() == [least] * 3
    assert not (equal[:3] & ~ragged[:3]).any()
    assert (equal[1] == ragged[1]).all()  # the smallest row is as it was drawn
    # filler takes as many as it has frames for, and nothing beyond its length
    assert equal[3:].sum(1).tolist() == [30, 5]
    assert not equal[3, 30:].any()
    assert module.sample([300, 300], 300, 9, True, [True, False]).sum(1).std() == 0
    # what is kept of a row is a uniform choice: every place of the row suffers alike
    kept = np.zeros(2)
    for seed in range(300):
        both = [module.sample([400, 60], 400, seed, equal=e)[0] for e in (False, True)]
        kept += [
            (both[1] & both[0])[:200].sum() / both[0].sum(),
            (both[1] & both[0])[200:].sum() / both[0].sum(),
        ]
    assert kept[0] == pytest.approx(kept[1], rel=0.1)


def test_a_row_is_drawn_at_its_address_whatever_surrounds_it() -> None:
    module = SpanMask()
    mask = module.sample([200, 150, 180], 200, seed=10)
    assert (module.sample([200, 150, 180], 200, seed=10) == mask).all()
    wider = module.sample([100, 150], 333, seed=10)
    assert (wider[1, :200] == mask[1]).all()
    assert not wider[:, 200:].any()
    assert (module.sample([200, 150, 180], 200, seed=11) != mask).any(1).all()
    assert len({row.tobytes() for row in module.sample([200] * 30, 200, seed=10)}) == 30


def test_draw_masks_nothing_at_probability_0() -> None:
    assert not SpanMask(probability=0.0).sample([100, 3], 100, seed=0).any()
    assert SpanMask(probability=0.0).max_masked_frames(100) == 0
    assert SpanMask().sample([], 100, seed=0, equal=True).shape == (0, 100)
    with pytest.raises(ValueError, match="101 frames"):
        SpanMask().sample([101], 100, seed=0)


def test_frame_table_gathers_masked_frames_with_their_weights() -> None:
    mask = SpanMask().sample([120, 60, 0], 120, seed=12)
    frames = torch.arange(3 * 120.0).view(3, 120)
    for width in (None, 90):
        index, weight = frame_table(mask, width)
        assert (index.dtype, weight.dtype) == (torch.int64, torch.float32)
        assert index.shape == weight.shape == (3, width or mask.sum(1).max())
        assert weight.sum(1).tolist() == mask.sum(1).tolist()
        for row in range(3):
            used = weight[row] == 1
            assert torch.equal(frames.gather(1, index)[row][used], frames[row][torch.from_numpy(mask[row])])
            assert (index[row][~used] == 0).all()
            assert (weight[row][~used] == 0).all()
            assert not used[int(used.sum()) :].any()
    with pytest.raises(ValueError, match="masked frames"):
        frame_table(mask, int(mask.sum(1).max()) - 1)


def test_negatives_are_uniform_over_the_others_of_the_row() -> None:
    negatives = sample_negatives([7, 4], 7, 3000, seed=13)
    assert negatives.shape == (2, 7, 3000)
    for row, count in enumerate((7, 4)):
        for own in range(count):
            times = np.bincount(negatives[row, own].numpy(), minlength=count)
            assert times[own] == 0
            assert len(times) == count  # never the surplus
            assert scipy.stats.chisquare(np.delete(times, own)).pvalue > 1e-3
    assert not negatives[1, 4:].any()


def test_negatives_have_addresses_and_do_not_depend_on_the_width() -> None:
    short = sample_negatives([20, 12], 20, 10, seed=14)
    wide = sample_negatives([20, 12, 9], 40, 10, seed=14)
    assert torch.equal(wide[:2, :20], short)
    assert torch.equal(wide[:2, :20], sample_negatives([20, 12], 40000, 10, seed=14)[:, :20].short())
    assert not torch.equal(short, sample_negatives([20, 12], 20, 10, seed=15))
    assert not torch.equal(short[0, :12], short[1, :12])


def test_rows_without_another_masked_frame_have_themselves() -> None:
    negatives = sample_negatives([0, 1, 2], 3, 5, seed=16)
    assert not negatives[:2].any()
    assert negatives[2, :2].tolist() == [[1] * 5, [0] * 5]


def test_negatives_are_int16_where_the_range_allows() -> None:
    # reference 5.2e: half-width draws are the same integers
    assert sample_negatives([5], 32767, 1, seed=0).dtype == torch.int16
    wide = sample_negatives([40000], 40000, 2, seed=0)
    assert wide.dtype == torch.int32
    assert wide.max() > 32767
    assert wide.min() >= 0
    limit = sample_negatives([32767], 32767, 2, seed=0)
    assert 32000 < limit.max() <= 32766
    assert limit.min() >= 0
    drawn = np.random.default_rng(0).integers(0, 389, (390, 100))
    for dtype in (np.int16, np.int32):
        assert (skip_own_position(drawn.astype(dtype)) == skip_own_position(drawn)).all()
        assert skip_own_position(drawn.astype(dtype)).dtype == dtype


def test_negative_arithmetic_is_bit_equal_to_indexed_increments() -> None:
    # reference 5.2d: v (1 − c) + (v + 1) c with c = v ≥ own, against upstream's indexed += 1
    drawn = np.random.default_rng(17).integers(0, 389, (390, 100))
    indexed = drawn.copy()
    indexed[indexed >= np.arange(390)[:, None]] += 1
    above = (drawn >= np.arange(390)[:, None]).astype(np.int64)
    assert (skip_own_position(drawn) == indexed).all()
    assert (drawn * (1 - above) + (drawn + 1) * above == indexed).all()

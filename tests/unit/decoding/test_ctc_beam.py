"""Prefix beam search of CTC against all label sequences."""

from __future__ import annotations

from itertools import groupby, pairwise, product

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from speechtrain.decoding.ctc_beam import CTCBeam
from speechtrain.decoding.greedy import Greedy
from speechtrain.start.compose import compose
from tests.support.label_sequences import ctc_sequences
from tests.support.scorers import BLANK, FRAMES, one_hot

LENGTHS = torch.arange(500) % 4 + 2


def lattices() -> Tensor:
    torch.manual_seed(0)
    return (torch.randn(500, 5, BLANK + 1) * 1.5).log_softmax(-1)


def test_search_finds_the_likeliest_sequence_with_exact_scores() -> None:
    frames, decoder = lattices(), CTCBeam(width=8, nbest=8)
    sequences, sums = decoder.search(FRAMES, frames, LENGTHS)
    decoded, greedy = decoder.decode(FRAMES, frames, LENGTHS), Greedy().decode(FRAMES, frames, LENGTHS)
    found = 0
    for row, length in enumerate(LENGTHS.tolist()):
        totals = ctc_sequences(frames[row, :length])
        for searched, total in zip(sequences[row], sums[row].tolist(), strict=False):
            assert total <= totals[searched.labels] + 1e-5, "a path is counted twice"
        listed = (decoded[row], *decoded[row].alternatives)
        for one in listed:
            assert one.score == pytest.approx(totals[one.labels], abs=1e-5)
        assert listed[0].score >= totals[greedy[row].labels] - 1e-5
        assert len({one.labels for one in listed}) == len(listed)
        found += max(totals, key=lambda name: totals[name]) in {one.labels for one in listed}
    assert found >= 0.99 * 500


def test_ctc_beam_returns_the_likeliest_text_by_default() -> None:
    options = OmegaConf.to_container(compose(["model=ctc", "decoder=ctc_beam"]).decoder)
    assert isinstance(options, dict)
    del options["_target_"]
    torch.manual_seed(0)
    frames = torch.randn(20, 30, 4).log_softmax(-1)
    for hypothesis in CTCBeam(**options).decode(FRAMES, frames, torch.full((20,), 30)):  # type: ignore[arg-type]
        assert hypothesis.alternatives
        assert hypothesis.score >= max(alternative.score for alternative in hypothesis.alternatives)


def test_a_label_lasts_from_its_first_frame_to_its_last() -> None:
    scores = one_hot(3, 0, 0, 3, 0, 1, 1)[None]
    (found,) = CTCBeam().decode(FRAMES, scores, torch.tensor([7]))
    (greedy,) = Greedy().decode(FRAMES, scores, torch.tensor([7]))
    assert (found.text, found.times, found.ends) == ("aab", (0.5, 2.0, 2.5), (1.5, 2.5, 3.5))
    assert (greedy.text, greedy.times, greedy.ends) == (found.text, found.times, found.ends)
    assert found.confidences == pytest.approx(greedy.confidences, abs=1e-6)


def runs_of(path: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Each label of a path with its first frame and the frame after its last."""
    runs: list[tuple[int, int, int]] = []
    begin = 0
    for label, run in groupby(path):
        end = begin + len(list(run))
        if label != BLANK:
            runs.append((label, begin, end))
        begin = end
    return runs


def likeliest_runs(scores: Tensor, labels: list[int]) -> list[tuple[int, int, int]]:
    """The runs of the likeliest of all paths of ``labels``, for scores (T, classes)."""
    candidates = []
    for path in product({*labels, BLANK}, repeat=len(scores)):
        runs = runs_of(path)
        if [label for label, *_ in runs] == labels:
            chances = scores[range(len(path)), path]
            candidates.append((float(chances.sum()), runs))
    return max(candidates)[1]


def test_ctc_beam_times_are_those_of_the_likeliest_path() -> None:
    frames, lengths = lattices()[:40], LENGTHS[:40]
    doubled_count = 0
    for row, hypothesis in enumerate(CTCBeam(width=8, nbest=8).decode(FRAMES, frames, lengths)):
        for candidate in (hypothesis, *hypothesis.alternatives):
            runs = likeliest_runs(frames[row, : lengths[row]], [*candidate.labels])
            spans = np.array(runs, float).reshape(-1, 3)[:, 1:] * FRAMES.frame_seconds
            assert [*candidate.times] == spans[:, 0].tolist()
            assert [*candidate.ends] == spans[:, 1].tolist()
            doubled_count += any(first == second for first, second in pairwise(candidate.labels))
    assert doubled_count, "between two equal labels a blank takes a frame"


def test_rows_without_frames_have_no_text() -> None:
    found = CTCBeam().decode(FRAMES, one_hot(0, 1)[None].expand(2, 2, 4), torch.tensor([0, 2]))
    assert [(one.text, one.score == 0) for one in found] == [("", True), ("ab", False)]


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_model_without_meaning_does_not_end_an_evaluation(value: float) -> None:
    frames = torch.full((2, 5, BLANK + 1), value)
    assert len(CTCBeam().decode(FRAMES, frames, torch.tensor([5, 3]))) == 2

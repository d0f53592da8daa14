"""Greedy search: CTC's best path, a transducer's labels, and the scores and times of both."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from speechtrain.decoding.base import NoDecoder
from speechtrain.decoding.greedy import Greedy
from tests.support.scorers import BLANK, FRAMES, one_hot, table


def test_best_path_merges_repetitions_and_drops_blanks() -> None:
    torch.manual_seed(0)
    scores = torch.randn(5, 40, 4).log_softmax(-1)
    lengths = torch.tensor([40, 1, 17, 0, 39])
    paths = scores.argmax(-1).tolist()
    plain = [
        tuple(label for label, _ in groupby(path[:length]) if label != BLANK)
        for path, length in zip(paths, lengths.tolist(), strict=True)
    ]
    found = Greedy().decode(FRAMES, scores, lengths)
    assert [h.labels for h in found] == plain
    totals = [scores[row, :length].max(-1).values.sum() for row, length in enumerate(lengths.tolist())]
    assert [h.score for h in found] == pytest.approx([float(total) for total in totals], abs=1e-4)


def test_a_ctc_label_begins_at_its_first_frame() -> None:
    scores = one_hot(0, 0, 3, 0, 1)[None]
    (found,) = Greedy().decode(FRAMES, scores, torch.tensor([5]))
    assert (found.text, found.times) == ("aab", (0.0, 1.5, 2.0))


def test_a_transducer_emits_at_its_frame_and_scores_every_symbol() -> None:
    # frame 0: a, then blank; frame 1: b, c, then blank
    logits = torch.stack([one_hot(0, 3, 3, 3), one_hot(3, 1, 2, 3)])
    frames = torch.tensor([[[0.0], [1.0]]])
    (found,) = Greedy().decode(table(logits), frames, torch.tensor([2]))
    assert (found.text, found.times) == ("abc", (0.0, 0.5, 0.5))
    assert found.score == pytest.approx(5 * float(one_hot(0).max()), abs=1e-5)
    (short,) = Greedy(max_symbols_per_step=1).decode(table(logits), frames, torch.tensor([2]))
    assert short.text == "ab"
    (shorter,) = Greedy(max_symbols=1).decode(table(logits), frames, torch.tensor([2]))
    assert shorter.text == "abc"  # The second frame begins with one label, which is not more than one.


def with_durations(logits: Tensor, chosen: list[list[int]]) -> Tensor:
    return torch.cat((logits, (torch.eye(3)[torch.tensor(chosen)] * 9).log_softmax(-1)), -1)


def test_durations_skip_frames_and_a_blank_takes_one_at_least() -> None:
    # frame 0: a (stays), b (2 on); frame 2: blank of 0, so 1 on; frame 3: c (2 on, the end)
    tokens = torch.stack([one_hot(0, 1, 0, 0), one_hot(0, 0, 0, 0), one_hot(3, 3, 3, 3), one_hot(3, 3, 2, 3)])
    logits = with_durations(tokens, [[0, 1, 0, 0], [0] * 4, [0] * 4, [0, 0, 1, 0]])
    scorer = table(logits, [0, 2, 3])
    frames = torch.arange(4.0)[None, :, None]
    (found,) = Greedy().decode(scorer, frames, torch.tensor([4]))
    assert (found.text, found.times) == ("abc", (0.0, 0.0, 1.5))
    likely = float(one_hot(0).max()) + float((torch.eye(3)[0] * 9).log_softmax(-1).max())
    assert found.score == pytest.approx(4 * likely, abs=1e-5)
    endless = with_durations(torch.stack([one_hot(*[0] * 9)] * 2), [[0] * 9] * 2)
    (found,) = Greedy(max_symbols_per_step=3).decode(
        table(endless, [0, 1, 2]), frames[:, :2], torch.tensor([2])
    )
    assert found.times == (0.0, 0.0, 0.0, 0.5, 0.5, 0.5)


def test_without_a_limit_a_row_gets_50_labels_a_second() -> None:
    endless = torch.stack([one_hot(*[0] * 200)])
    frames = torch.zeros(1, 4, 1)  # Two seconds allow 100 labels. The third frame would begin with 140.
    (found,) = Greedy(max_symbols_per_step=70).decode(table(endless), frames, torch.tensor([4]))
    assert len(found.labels) == 140


class Numbers(TorchDispatchMode):
    """Counts the numbers that the host takes from tensors, and the shapes that follow from data."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select")
        self.count += func.name() in names
        if func.name() == "aten::index.Tensor":
            self.count += any(index is not None and index.dtype == torch.bool for index in args[1])
        return func(*args, **kwargs or {})


class Copies(TorchFunctionMode):
    """Counts copies to the host, for which a CPU calls no operator."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (Tensor.cpu, Tensor.tolist)
        return func(*args, **kwargs or {})


def one_at_a_time(logits: Tensor, length: int) -> tuple[list[int], int]:
    """The labels of one utterance, by plain loops, and how many symbols were read for them."""
    labels, symbols = list[int](), 0
    for frame in range(length):
        while True:
            symbols += 1
            label = int(logits[frame, len(labels)].argmax())
            if label == BLANK:
                break
            labels.append(label)
    return labels, symbols


def test_the_host_reads_once_in_many_symbols() -> None:
    torch.manual_seed(0)
    logits = torch.randn(60, 400, 4)
    logits[..., BLANK] += 1
    frames = torch.arange(60.0)[None, :, None].expand(32, -1, -1)
    lengths = torch.arange(29, 61)
    with Numbers() as numbers, Copies() as copies:
        found = Greedy(max_symbols=399).decode(table(logits), frames, lengths)
    plain = [one_at_a_time(logits, int(length)) for length in lengths]
    assert [list(one.labels) for one in found] == [labels for labels, _ in plain]
    symbols = max(count for _, count in plain)  # the former search read once and more for each
    assert numbers.count + copies.count <= symbols / 4


def test_no_decoder_writes_nothing() -> None:
    found = NoDecoder().decode(FRAMES, torch.zeros(2, 3, 4), torch.tensor([3, 3]))
    assert [h.text for h in found] == ["", ""]

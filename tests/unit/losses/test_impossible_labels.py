"""Impossible classes of bias -inf: labels, blanks and durations, in all forms of the transducer loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from speechtrain.losses.transducer import transducer_loss
from speechtrain.losses.transducer_diagonals import posteriors_by_diagonals
from speechtrain.losses.transducer_durations import posteriors_of_durations
from speechtrain.losses.transducer_frames import posteriors_by_frames
from speechtrain.losses.transducer_lattice import Settings
from speechtrain.losses.transducer_recursion import Posteriors

ROWS, FRAMES, SYMBOLS, WIDTH, CLASSES = 3, 5, 2, 4, 6
BLANK, IMPOSSIBLE = 5, 2


def inputs(durations: int = 0) -> list[Tensor]:
    """Return encoder, prediction, weight and bias; the class IMPOSSIBLE has bias -inf."""
    torch.manual_seed(0)
    outputs = CLASSES + durations
    tensors = [
        torch.randn(ROWS, FRAMES, WIDTH),
        torch.randn(ROWS, SYMBOLS + 1, WIDTH),
        torch.randn(outputs, WIDTH),
        torch.randn(outputs),
    ]
    tensors[3][IMPOSSIBLE] = -torch.inf
    return [tensor.requires_grad_() for tensor in tensors]


def losses_of(tensors: list[Tensor], labels: list[list[int]], static: bool, durations: list[int]) -> Tensor:
    rows = len(labels)
    encoder, prediction, weight, bias = tensors
    lengths = torch.full((rows,), FRAMES), torch.full((rows,), SYMBOLS)
    return transducer_loss(
        encoder[:rows], prediction[:rows], weight, bias, torch.tensor(labels), *lengths,
        blank=BLANK, static=static, durations=durations,
    )  # fmt: skip


@pytest.mark.parametrize("durations", [[], [0, 1, 2]])
@pytest.mark.parametrize("static", [False, True])
def test_transducer_loss_is_infinite_for_an_impossible_label(static: bool, durations: list[int]) -> None:
    possible = [[0, 1], [3, 4]]
    tensors = inputs(len(durations))
    losses = losses_of(tensors, [*possible, [1, IMPOSSIBLE]], static, durations)
    assert losses[2] == torch.inf
    losses.sum().backward()
    alone = inputs(len(durations))
    expected = losses_of(alone, possible, static, durations)
    expected.sum().backward()
    torch.testing.assert_close(losses[:2], expected)
    for tensor, reference in zip(tensors, alone, strict=True):
        assert tensor.grad is not None
        assert reference.grad is not None
        assert bool(tensor.grad.isfinite().all())
        torch.testing.assert_close(tensor.grad, reference.grad, rtol=1e-5, atol=1e-6)
    assert not tensors[0].grad[2].any()  # type: ignore[index]


@pytest.mark.parametrize("static", [False, True])
def test_transducer_loss_ignores_an_impossible_class_that_no_label_needs(static: bool) -> None:
    tensors = inputs()
    losses = losses_of(tensors, [[0, 1]], static, [])
    unlikely = [tensor.detach().clone() for tensor in tensors]
    unlikely[3][IMPOSSIBLE] = -80.0
    torch.testing.assert_close(losses, losses_of(unlikely, [[0, 1]], static, []))


def plain_loss(arcs: Sequence[Tensor], durations: Sequence[int], frames: int, labels: int) -> float:
    """Return the loss of one utterance by the recursion of the forward variables, cell by cell in float64.

    ``arcs`` are the log-probabilities (T, P) of blank, next label and each duration. Without ``durations`` a
    blank takes one frame and a label none. The loss is 0 without a path.
    """
    blank, label, *log_durations = (log_p.double().tolist() for log_p in arcs)
    ways: dict[tuple[int, int], list[float]] = {(0, 0): [0.0]}
    for t in range(frames):
        for u in range(labels + 1):
            if (t, u) not in ways:
                continue
            alpha = _logsumexp(ways[t, u])
            blank_steps = [(1, 0.0)]
            label_steps = [(0, 0.0)]
            if durations:
                label_steps = [(d, log_durations[k][t][u]) for k, d in enumerate(durations)]
                blank_steps = [(d, log_p) for d, log_p in label_steps if d]
            for d, log_p in blank_steps:
                if t + d < frames or (t + d == frames and u == labels):
                    ways.setdefault((t + d, u), []).append(alpha + blank[t][u] + log_p)
            for d, log_p in label_steps:
                if u < labels and t + d < frames:
                    ways.setdefault((t + d, u + 1), []).append(alpha + label[t][u] + log_p)
    end = ways.get((frames, labels))
    return -_logsumexp(end) if frames and end else 0.0


def _logsumexp(terms: list[float]) -> float:
    highest = max(terms)
    if highest == -math.inf:
        return highest
    return highest + math.log(sum(math.exp(term - highest) for term in terms))


def by_durations(durations: tuple[int, ...]) -> Callable[..., Posteriors]:
    settings = Settings(
        blank=0,
        activation="relu",
        dropout=0.0,
        fastemit=0.0,
        dtype=torch.float64,
        skip_below=0.0,
        chunk=1,
        keep=0,
        durations=durations,
    )
    return lambda *arguments: posteriors_of_durations(settings, arguments[:-2], *arguments[-2:])


MODULES = [
    ("frames", (), posteriors_by_frames),
    ("diagonals", (), posteriors_by_diagonals),
    ("durations 0 1 2", (0, 1, 2), by_durations((0, 1, 2))),
    ("durations 2", (2,), by_durations((2,))),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize(
    ("name", "durations", "posteriors_of"), MODULES, ids=[module[0] for module in MODULES]
)
def test_modules_share_one_rule_for_no_path_and_for_impossible_paths(
    name: str, durations: tuple[int, ...], posteriors_of: Callable[..., Posteriors], dtype: torch.dtype
) -> None:
    """The loss is 0 without a path, and +inf if each path needs an impossible blank, label or duration."""
    generator = torch.Generator().manual_seed(5)
    rows, frames, positions = 400, 5, 4
    arcs = [
        torch.randn(rows, frames, positions, generator=generator).sub(2.0).to(dtype)
        for _ in range(2 + len(durations))
    ]
    frame_counts = torch.randint(0, frames + 1, (rows,), generator=generator)
    label_counts = torch.randint(0, positions, (rows,), generator=generator)
    # A class is impossible in all cells of an utterance: the label of a position, the blank or a duration.
    is_label = torch.arange(positions) < label_counts[:, None]
    is_impossible = is_label & (torch.rand(rows, positions, generator=generator) < 0.1)
    arcs[1].masked_fill_(is_impossible[:, None], -torch.inf)
    for log_p in (arcs[0], *arcs[2:]):
        log_p.masked_fill_(torch.rand(rows, 1, 1, generator=generator) < 0.2, -torch.inf)

    posteriors = posteriors_of(*arcs, frame_counts, label_counts)

    expected = []
    for row, (frame_count, label_count) in enumerate(zip(frame_counts, label_counts, strict=True)):
        row_arcs = [log_p[row] for log_p in arcs]
        expected.append(plain_loss(row_arcs, durations, int(frame_count), int(label_count)))
    losses = torch.tensor(expected, dtype=torch.float64)
    has_loss = losses.isfinite() & (losses != 0)
    assert min(int(has.sum()) for has in (losses == 0, losses.isinf(), has_loss)) >= 10
    torch.testing.assert_close(posteriors.loss.double(), losses, rtol=1e-5, atol=1e-5)
    has_gradient = posteriors.occupancy.flatten(1).any(1)
    assert torch.equal(has_gradient, has_loss)
    assert all(bool(values.isfinite().all()) for values in (posteriors.occupancy, posteriors.label_share))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("impossible", [BLANK, CLASSES + 1], ids=["blank", "duration 1"])
def test_the_tdt_loss_is_infinite_if_each_path_needs_an_impossible_class(
    static: bool, impossible: int
) -> None:
    tensors = inputs(2)
    with torch.no_grad():
        tensors[3][IMPOSSIBLE] = 0.0
        tensors[3][impossible] = -torch.inf
    losses = losses_of(tensors, [[0, 1]], static, [0, 1])
    assert losses.tolist() == [torch.inf]
    losses.sum().backward()
    assert not any(bool(tensor.grad.any()) for tensor in tensors if tensor.grad is not None)

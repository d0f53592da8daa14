"""Greedy decoding of a whole batch at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Step = Callable[[Tensor, Any], tuple[Tensor, Any]]
"""(labels (B,), state) to (joint-space prediction (B, H), new state)."""


def greedy(
    encoded: Tensor,
    lengths: Tensor,
    start: tuple[Tensor, Any],
    step: Step,
    joint: Callable[[Tensor, Tensor], Tensor],
    select: Callable[[Tensor, Any, Any], Any],
    blank: int,
    max_symbols_per_step: int,
    max_symbols: Tensor,
) -> list[list[int]]:
    """Decode every row by its most likely symbol at each lattice point, until its frames end.

    Every row has its own frame pointer: one iteration emits a label in some rows and moves to the next
    frame in others. A blank keeps the prediction state; a label replaces it by the new state. A frame
    ends after ``max_symbols_per_step`` labels, a row after its ``max_symbols`` (B,). The results do not
    depend on the batch: they equal those of one utterance at a time (MLPerf's reference decoder).

    ``encoded`` (B, T, H) and ``start`` (prediction (B, H), state) are in the joint's space; ``joint``
    maps two (B, H) to logits (B, V); ``select(mask (B,), new, old)`` merges states row by row.
    """
    rows, frames, _ = encoded.shape
    prediction, state = start
    index = torch.arange(rows, device=encoded.device)
    frame = torch.zeros(rows, dtype=torch.int64, device=encoded.device)
    in_frame, emitted = torch.zeros_like(frame), torch.zeros_like(frame)
    hypotheses: list[list[int]] = [[] for _ in range(rows)]
    active = frame < lengths
    while bool(active.any()):  # an iteration is one host read and one joint for all rows
        logits = joint(encoded[index, frame.clamp(max=frames - 1)], prediction)
        labels = logits.argmax(-1)
        emits = active & (labels != blank)
        in_frame = torch.where(emits, in_frame + 1, torch.zeros_like(in_frame))
        emitted = emitted + emits
        moves = active & (~emits | (in_frame >= max_symbols_per_step))
        frame = frame + moves
        in_frame = torch.where(moves, torch.zeros_like(in_frame), in_frame)
        if bool(emits.any()):
            for row, label in zip(emits.nonzero()[:, 0].tolist(), labels[emits].tolist(), strict=True):
                hypotheses[row].append(label)
            advanced, new_state = step(torch.where(emits, labels, torch.zeros_like(labels)), state)
            prediction = torch.where(emits[:, None], advanced, prediction)
            state = select(emits, new_state, state)
        active = (frame < lengths) & (emitted < max_symbols)
    return hypotheses


def best_path(scores: Tensor, lengths: Tensor, blank: int) -> list[list[int]]:
    """Decode CTC's best path: the best class of each frame, repetitions merged, blanks removed.

    ``scores`` (B, T, V) of any scale, ``lengths`` (B,) frames; one host read per batch.
    """
    classes = scores.argmax(-1)
    changed = torch.ones_like(classes, dtype=torch.bool)
    changed[:, 1:] = classes[:, 1:] != classes[:, :-1]
    kept = (changed & (classes != blank)).cpu()
    rows = zip(classes.cpu(), kept, lengths.tolist(), strict=True)
    return [row[:length][keep[:length]].tolist() for row, keep, length in rows]

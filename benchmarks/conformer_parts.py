"""Times of three parts of a FastConformer layer on a CPU, in their present and in their former form.

    OMP_NUM_THREADS=1 python benchmarks/conformer_parts.py      # 8 rows of 110 frames, as in recipe=scratch
    python benchmarks/conformer_parts.py --smoke

A time is of forward and backward. The former forms are relative scores with copies, a mask that is filled
in, and torch's dropout. Both forms take turns (A B A B). The table has the medians of the rounds, and the
median of the ratios of a round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from speechtrain.encoders.fastconformer import _distances_to_keys
from speechtrain.nn.dropout import Dropout
from speechtrain.nn.transformer import FORBIDDEN

HEADS, WIDTH = 4, 128
CALLS = 20  # in a round
Forms = tuple[Callable[[], Tensor], Callable[[], Tensor]]
"""The former and the present form of a part."""


def distances_to_keys_with_copies(scores: Tensor) -> Tensor:
    """Return what ``_distances_to_keys`` returns, for scores (B, H, T, 2T − 1) without the first column."""
    rows, heads, frames, distances = scores.shape
    skewed = F.pad(scores, (1, 0)).view(rows, heads, distances + 1, frames)[:, :, 1:]
    return skewed.reshape(rows, heads, frames, distances)[..., :frames]


def parts(rows: int, frames: int) -> dict[str, Forms]:
    """Return the forms of each part for a layer's input of ``rows`` and ``frames``."""
    scores = torch.randn(rows, HEADS, frames, 2 * frames, requires_grad=True)
    former_scores = scores[..., 1:].detach().clone().requires_grad_()
    key_scores = torch.randn(rows, HEADS, frames, frames, requires_grad=True)
    is_masked = torch.arange(frames) >= frames * torch.linspace(0.8, 1.0, rows)[:, None, None, None]
    mask = is_masked.float() * FORBIDDEN
    x = torch.randn(rows, frames, WIDTH, requires_grad=True)
    dropout = Dropout(0.1)
    return {
        "relative scores": (
            lambda: key_scores + distances_to_keys_with_copies(former_scores),
            lambda: key_scores + _distances_to_keys(scores),
        ),
        "mask and softmax": (
            lambda: key_scores.masked_fill(is_masked, FORBIDDEN).softmax(-1),
            lambda: (key_scores + mask).softmax(-1),
        ),
        "dropout": (lambda: F.dropout(x, 0.1), lambda: dropout(x)),
    }


def milliseconds(form: Callable[[], Tensor], calls: int) -> float:
    """Return the milliseconds of a forward and a backward."""
    upstream = torch.ones_like(form())
    start = time.perf_counter()
    for _ in range(calls):
        form().backward(upstream)
    return 1000 * (time.perf_counter() - start) / calls


def print_row(name: str, forms: Forms, rounds: int, calls: int) -> None:
    """Time the former and the present form in turn, and print the medians."""
    former_times, present_times, ratios = [], [], []
    for _ in range(rounds):
        former, present = (milliseconds(form, calls) for form in forms)
        former_times.append(former)
        present_times.append(present)
        ratios.append(present / former)
    medians = [statistics.median(times) for times in (former_times, present_times, ratios)]
    print("| {} | {:.2f} | {:.2f} | {:.2f} |".format(name, *medians))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--frames", type=int, default=110)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    calls = CALLS
    if options.smoke:
        options.frames, options.rounds, calls = 10, 2, 1
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print("| part | former, ms | present, ms | ratio |\n|---|---|---|---|")
    for name, forms in parts(options.rows, options.frames).items():
        print_row(name, forms, options.rounds, calls)


if __name__ == "__main__":
    main()

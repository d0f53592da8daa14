"""The cost of drawing wav2vec 2.0's negatives on the host: milliseconds and bytes of a step.

    python benchmarks/negatives.py             # base, batches of 87.5 s of audio
    python benchmarks/negatives.py --smoke     # one round

The host draws the indices of the negatives while the data workers prepare the next batch, and copies them to
the device. The reference draws them on the device as int64. Each round draws masks and negatives for one
batch of rows of equal length. The times are medians of processor time.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch

from speechtrain.nn.masking import SpanMask, draw_negatives, frame_table

FRAMES_PER_SECOND = 50
NEGATIVES = 100
LINK_BYTES = 16e9  # of a second, PCIe 4.0 x16 at half of its peak


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[6, 11, 22])
    parser.add_argument("--audio-seconds", type=float, default=87.5, help="of a batch")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    rounds = options.rounds
    if options.smoke:
        rounds = 1
    torch.set_num_threads(1)
    print(
        "| rows | frames of a row | masked frames | masks, ms | negatives, ms | KiB | int64, KiB | copy, ms |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for rows in options.rows:
        frames = int(options.audio_seconds / rows * FRAMES_PER_SECOND)
        print(f"| {' | '.join(measure(rows, frames, rounds))} |", flush=True)


def measure(rows: int, frames: int, rounds: int) -> list[str]:
    """Return the cells of a line of the table."""
    mask_seconds, negative_seconds = [], []
    for seed in range(rounds):
        start = time.process_time()
        mask = SpanMask().draw([frames] * rows, frames, seed, equal=True, counted=[True] * rows)
        index, _ = frame_table(mask, None)
        middle = time.process_time()
        counts = np.asarray(mask).sum(1).tolist()
        table = draw_negatives(counts, index.shape[1], NEGATIVES, seed=seed)
        negative_seconds.append(time.process_time() - middle)
        mask_seconds.append(middle - start)
    size = table.nbytes
    return [
        str(rows),
        str(frames),
        str(index.shape[1]),
        f"{1e3 * statistics.median(mask_seconds):.2f}",
        f"{1e3 * statistics.median(negative_seconds):.2f}",
        f"{size / 1024:.0f}",
        f"{table.numel() * 8 / 1024:.0f}",
        f"{1e3 * size / LINK_BYTES:.3f}",
    ]


if __name__ == "__main__":
    main()

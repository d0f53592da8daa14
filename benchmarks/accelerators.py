"""What accelerators would be given: operations, graphs, bytes and reads by the host, counted on the CPU.

    python benchmarks/accelerators.py gaudi            # MLPerf's RNN-T, 8 shapes, training and evaluation
    python benchmarks/accelerators.py gaudi --widths 8 --rows 2    # the same counts, in minutes
    python benchmarks/accelerators.py cuda             # joint and loss, B32 T500 U100 V1024; 15 GiB, minutes
    python benchmarks/accelerators.py --smoke

Counts of the recorder (``speechtrain.devices.recorder``): an operation is one of ATen that is no view, with
what is inside custom autograd functions. Widths change no count of operations, and full sizes take an hour.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from datetime import date

import torch

from speechtrain.batch import Batch
from speechtrain.compute_policy import apply_policy
from speechtrain.devices.cuda import CUDA
from speechtrain.devices.hpu import HPU
from speechtrain.devices.recorder import Costs, Recorder
from speechtrain.losses.transducer import transducer_loss
from speechtrain.rank.build import build_task
from speechtrain.runs.compose import compose

Shapes = Sequence[tuple[float, int]]
SHAPES = ((16.7, 100), (14, 90), (12, 80), (10, 70), (8, 60), (6, 50), (4, 30), (2, 20))  # seconds, labels


def batch_of(rows: int, seconds: float, labels: int, classes: int) -> Batch:
    samples = int(seconds * 16000)
    whole = torch.ones(rows, dtype=torch.int64)
    texts = torch.randint(0, classes - 1, (rows, labels))
    return Batch(
        0.1 * torch.randn(rows, samples), whole * samples, texts, whole * labels, torch.ones(rows), whole,
        ("a",) * rows, ("a",) * rows, seconds=rows * seconds,
    )  # fmt: skip


def gaudi(rows: int, widths: int | None, shapes: Shapes, dtype: torch.dtype) -> None:
    """Forward and backward of each shape, then its loss in evaluation."""
    device = HPU()
    small = [] if widths is None else [f"encoder.hidden={widths}", f"model.prediction.hidden={widths}"]
    task, tokenizer = build_task(compose(["model=rnnt_mlperf", "device=cpu", "data.workers=0", *small]))
    recorder = Recorder(device.facts.operations)
    policy = replace(device.policy(dtype), mark_step=recorder.mark_step)
    apply_policy(task, policy)
    print("| shape | operations | segments | largest | in evaluation | distinct so far |")
    print("|---|---|---|---|---|---|")
    for seconds, labels in shapes:
        batch = task.prepare(batch_of(rows, seconds, labels, tokenizer.size), 1)
        batch = recorder.move(batch)
        first, launches = len(recorder.segments), recorder.costs.launches
        task.train().zero_grad()
        with recorder.warm_up():
            with policy.autocast("cpu"):
                loss = task(batch).total
            torch.autograd.backward(loss)
            recorder.mark_step()
        trained, launched = recorder.segments[first:], recorder.costs.launches - launches
        task.eval()
        with recorder.warm_up(), torch.no_grad(), policy.autocast("cpu"):
            task(batch)
            recorder.mark_step()
        evaluated = len(recorder.segments) - first - len(trained)
        largest = max(recorder.segments[first:])
        print(
            f"| {rows} × {seconds} s × {labels} | {launched:,} | {len(trained)} | {largest:,} | {evaluated} "
            f"| {recorder.distinct} |",
            flush=True,
        )


def cuda(rows: int, frames: int, labels: int, classes: int, hidden: int) -> Costs:
    """Joint and loss with dropout in bf16, forward and backward, at random initialisation."""
    policy = CUDA().policy(torch.bfloat16)
    torch.manual_seed(0)
    joint = torch.nn.Linear(hidden, classes)
    sides = [0.5 * torch.randn(rows, length, hidden) for length in (frames, labels + 1)]
    given = [tensor.detach().requires_grad_() for tensor in (*sides, joint.weight, joint.bias)]
    texts = torch.randint(0, classes - 1, (rows, labels))
    lengths = torch.full((rows,), frames), torch.full((rows,), labels)
    recorder = Recorder(CUDA.facts.operations)
    with recorder:
        loss = transducer_loss(
            *given, texts, *lengths, blank=classes - 1, dropout=0.3, seed=5,
            compute_dtype=policy.product_dtype, chunk=policy.lattice_cells, keep=policy.logit_bytes,
        )  # fmt: skip
        loss.sum().backward()
    print(f"B{rows} T{frames} U{labels} V{classes} H{hidden}: {recorder.costs}")
    return recorder.costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("gaudi", "cuda"), default="gaudi")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--widths", type=int)
    parser.add_argument("--shapes", type=int, default=len(SHAPES))
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    print(f"{date.today()}, torch {torch.__version__}\n")
    if arguments.smoke:
        gaudi(rows=1, widths=8, shapes=[(3.0, 20)], dtype=torch.float32)
        cuda(2, 12, 4, classes=16, hidden=8)
    elif arguments.what == "cuda":
        cuda(32, 500, 100, classes=1024, hidden=512)
    else:
        dtype = torch.bfloat16 if arguments.precision == "bf16" else torch.float32
        gaudi(arguments.rows, arguments.widths, SHAPES[: arguments.shapes], dtype)


if __name__ == "__main__":
    main()

"""Operations, graphs, bytes and reads by the host that an accelerator would get, counted on the CPU.

    python benchmarks/accelerators.py gaudi            # MLPerf's RNN-T, 8 shapes, training and evaluation
    python benchmarks/accelerators.py gaudi --widths 8 --rows 2    # the same counts, in minutes
    python benchmarks/accelerators.py cuda             # joint and loss, B32 T500 U100 V1024: 15 GiB, minutes
    python benchmarks/accelerators.py updates          # whole updates of two small recipes on CUDA
    python benchmarks/accelerators.py --smoke

The recorder counts them (``tools/rehearsal/recorder.py``). Each ATen operation counts unless it is a view,
also inside custom autograd functions. The widths do not change the number of operations, and the full widths
take an hour.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import torch
from torch import Tensor

from speechtrain.batch import Batch
from speechtrain.compute_policy import ComputePolicy, apply_policy
from speechtrain.devices.cuda import CUDA
from speechtrain.devices.hpu import HPU
from speechtrain.losses.transducer import transducer_loss
from speechtrain.rank.build import build_task
from speechtrain.start.build import build_data
from speechtrain.start.compose import compose
from speechtrain.start.run_config import part_of, run_config
from speechtrain.task import Task

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.rehearsal.operations import GAUDI, Operations
from tools.rehearsal.recorded_updates import RecordedUpdates
from tools.rehearsal.recorder import Costs, Recorder

Shapes = Sequence[tuple[float, int]]
SHAPES = ((16.7, 100), (14, 90), (12, 80), (10, 70), (8, 60), (6, 50), (4, 30), (2, 20))  # seconds, labels


def batch_of(rows: int, seconds: float, labels: int, classes: int) -> Batch:
    samples = int(seconds * 16000)
    ones = torch.ones(rows, dtype=torch.int64)
    texts = torch.randint(0, classes - 1, (rows, labels))
    return Batch(
        0.1 * torch.randn(rows, samples), ones * samples, texts, ones * labels, torch.ones(rows), ones,
        ("a",) * rows, ("a",) * rows, seconds=rows * seconds,
    )  # fmt: skip


@dataclass
class Counts:
    """The figures of one shape in training and evaluation."""

    launches: int
    training_segments: int
    evaluation_segments: int
    largest: int  # operations of the largest segment


def count_shape(task: Task, batch: Batch, recorder: Recorder, policy: ComputePolicy) -> Counts:
    """Record forward and backward of a batch, then its loss in evaluation."""
    batch = recorder.move(batch)
    first, launches = len(recorder.segments), recorder.costs.launches
    task.train().zero_grad()
    with recorder.warm_up():
        with policy.autocast("cpu"):
            loss = task(batch).total
        torch.autograd.backward(loss)
        recorder.mark_step()
    training_segments = len(recorder.segments) - first
    training_launches = recorder.costs.launches - launches
    task.eval()
    with recorder.warm_up(), torch.no_grad(), policy.autocast("cpu"):
        task(batch)
        recorder.mark_step()
    segments = recorder.segments[first:]
    return Counts(
        training_launches, training_segments, len(segments) - training_segments, largest=max(segments)
    )


def gaudi(rows: int, widths: int | None, shapes: Shapes, dtype: torch.dtype) -> None:
    """Print the counts of each shape."""
    device = HPU()
    small = [] if widths is None else [f"encoder.hidden={widths}", f"model.prediction.hidden={widths}"]
    task, tokenizer = build_task(
        run_config(compose(["model=rnnt_mlperf", "device=cpu", "data.workers=0", *small]))
    )
    recorder = Recorder(GAUDI)
    policy = replace(device.policy(dtype), mark_step=recorder.mark_step)
    apply_policy(task, policy)
    print(
        "| shape | operations | segments in training | operations of the largest segment "
        "| segments in evaluation | distinct segments so far |"
    )
    print("|---|---|---|---|---|---|")
    for seconds, labels in shapes:
        batch = task.prepare(batch_of(rows, seconds, labels, tokenizer.size), 1)
        counts = count_shape(task, batch, recorder, policy)
        print(
            f"| {rows} × {seconds} s × {labels} | {counts.launches:,} | {counts.training_segments} "
            f"| {counts.largest:,} | {counts.evaluation_segments} | {recorder.distinct} |",
            flush=True,
        )


def joint_inputs(rows: int, frames: int, labels: int, classes: int, hidden: int) -> list[Tensor]:
    """Return random encoder frames and label states, and a new weight and bias of the joint."""
    torch.manual_seed(0)
    joint = torch.nn.Linear(hidden, classes)
    sides = [0.5 * torch.randn(rows, length, hidden) for length in (frames, labels + 1)]
    return [tensor.detach().requires_grad_() for tensor in (*sides, joint.weight, joint.bias)]


def cuda(rows: int, frames: int, labels: int, classes: int, hidden: int) -> Costs:
    """Print and return the costs of joint and loss in bf16, with dropout, forward and backward."""
    policy = CUDA().policy(torch.bfloat16)
    inputs = joint_inputs(rows, frames, labels, classes, hidden)
    texts = torch.randint(0, classes - 1, (rows, labels))
    lengths = torch.full((rows,), frames), torch.full((rows,), labels)
    recorder = Recorder(Operations())
    with recorder:
        loss = transducer_loss(
            *inputs, texts, *lengths, blank=classes - 1, dropout=0.3, seed=5,
            compute_dtype=policy.product_dtype, chunk=policy.lattice_cells, keep=policy.logit_bytes,
        )  # fmt: skip
        loss.sum().backward()
    print(f"B{rows} T{frames} U{labels} V{classes} H{hidden}: {recorder.costs}")
    return recorder.costs


UPDATES = {
    "RNN-T": ("recipe=demo", "data.train.utterances=200"),
    "wav2vec 2.0": ("model=wav2vec2_small", "data=digits", "data.train.utterances=200"),
}


def updates(names: Sequence[str]) -> None:
    """Print the costs of an update with its log line, for the smallest batch of each recipe."""
    print("| recipe | batch | launches | moved | reads by the host | copies to the device |")
    print("|---|---|---|---|---|---|")
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            config = compose([*UPDATES[name], "device=cuda", "data.workers=0", f"run_dir={folder}"])
            task, tokenizer = build_task(run_config(config))
            device = part_of(config, "device").build()
            policy = device.policy(part_of(config, "precision").build().dtype)
            with contextlib.closing(build_data(run_config(config), tokenizer, task)) as data:
                recorded = RecordedUpdates(config, data, task, device, policy, Path(folder))
                line = recorded.run()
        costs, shape = recorded.costs, line.removeprefix("updates of ").partition(" and ")[0]
        moved = f"{costs.moved / 1e9:.2f} GB"
        print(
            f"| {name} | {shape} | {costs.launches:,} | {moved} | {costs.reads} | {costs.copies} |",
            flush=True,
        )


def smoke() -> None:
    gaudi(rows=1, widths=8, shapes=[(3.0, 20)], dtype=torch.float32)
    cuda(2, 12, 4, classes=16, hidden=8)
    updates(["RNN-T"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("gaudi", "cuda", "updates"), default="gaudi")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--widths", type=int)
    parser.add_argument("--shapes", type=int, default=len(SHAPES))
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    print(f"{date.today()}, torch {torch.__version__}\n")
    if arguments.smoke:
        smoke()
    elif arguments.what == "updates":
        updates(list(UPDATES))
    elif arguments.what == "cuda":
        cuda(32, 500, 100, classes=1024, hidden=512)
    else:
        dtype = torch.bfloat16 if arguments.precision == "bf16" else torch.float32
        gaudi(arguments.rows, arguments.widths, SHAPES[: arguments.shapes], dtype)


if __name__ == "__main__":
    main()

"""Greedy search of a transducer against an earlier form of it: texts, time, reads by the host.

    git show 4932bcd:speechtrain/decoding/greedy.py > former.py
    python benchmarks/greedy.py former.py                  # 32 rows, with 32 and 1,024 classes
    python benchmarks/greedy.py former.py --run RUN        # and 32 rows of a run's evaluation set
    python benchmarks/greedy.py speechtrain/decoding/greedy.py --smoke

The models are random. The bias of the blank is set so that the search gives a label for every third frame,
as in speech. Both forms run in turn, --rounds times, on one thread. The table has the medians of wall time
and of processor time. A read by the host is a number that it takes from a tensor
(`aten::_local_scalar_dense`), a tensor that it copies, or a shape that follows from data. The host waits for
the device at each read.
"""

from __future__ import annotations

import argparse
import os
import runpy
import time
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from speechtrain.config.build import build_data
from speechtrain.decoding.base import Decoder, Hypothesis, TransducerScorer
from speechtrain.decoding.greedy import Greedy
from speechtrain.inference.loaded_run import load
from speechtrain.nn.joint import Joint
from speechtrain.nn.prediction import LSTMPrediction
from speechtrain.text.vocabulary import Characters

HIDDEN = 256
FRAME_SECONDS = 0.04
LABELS_A_FRAME = 1 / 3
Inputs = tuple[TransducerScorer, Tensor, Tensor]
"""The arguments of ``Decoder.decode``: scorer, frames and lengths."""


class Numbers(TorchDispatchMode):
    """Counts the numbers that the host takes from tensors, and the shapes that follow from data."""

    SHAPES = (torch.ops.aten.nonzero.default, torch.ops.aten.masked_select.default)

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_mask = False
        if func is torch.ops.aten.index.Tensor:
            is_mask = any(index is not None and index.dtype == torch.bool for index in args[1])
        self.count += is_mask or func in (torch.ops.aten._local_scalar_dense.default, *self.SHAPES)
        return func(*args, **kwargs or {})


class Copies(TorchFunctionMode):
    """Counts the copies to the host by their methods. On a CPU they copy nothing and call no operator."""

    COPIES = (Tensor.cpu, Tensor.tolist)

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in self.COPIES
        return func(*args, **kwargs or {})


def reads(search: Callable[[], object]) -> int:
    """Return the number of reads by the host in a search."""
    with Numbers() as numbers, Copies() as copies:
        search()
    return numbers.count + copies.count


@torch.no_grad()
def random_model(classes: int, rows: int, frames: int) -> Inputs:
    torch.manual_seed(classes)
    characters = map(chr, range(0x4E00, 0x4E00 + classes - 1))
    prediction = LSTMPrediction(embedding=128, hidden=HIDDEN, layers=1, dropout=0.0)
    prediction.connect(classes - 1)
    joint = Joint(hidden=HIDDEN, dropout=0.0)
    joint.connect(HIDDEN, prediction.width, classes)
    joint.output.weight *= 8  # Larger weights make the frames differ.
    scorer = TransducerScorer(
        Characters("".join(characters)), FRAME_SECONDS, prediction=prediction.eval(), joint=joint.eval()
    )
    encoded = torch.randn(rows, frames, HIDDEN)
    lengths = torch.linspace(frames // 2, frames, rows).long()
    inputs = scorer, encoded, lengths
    set_blank_bias(joint, inputs, LABELS_A_FRAME * lengths.sum())
    return inputs


def set_blank_bias(joint: Joint, inputs: Inputs, labels: Tensor) -> None:
    """Set the bias of the blank so that the search gives about ``labels`` labels, by bisection."""
    low, high = 0.0, 500.0
    for _ in range(16):
        bias = (low + high) / 2
        joint.output.bias[-1] = bias
        count = label_count(Greedy().decode(*inputs))
        if count < labels:
            high = bias
        else:
            low = bias


def label_count(hypotheses: Sequence[Hypothesis]) -> int:
    return sum(len(hypothesis.labels) for hypothesis in hypotheses)


@torch.no_grad()
def inputs_of_run(run: Path, rows: int) -> Inputs:
    """Return the encoded first batch of the evaluation set of a run."""
    opened = load(run, "device.threads=1", f"data.valid_batch.count={rows}").opened
    task: Any = opened.task
    data = build_data(opened.config, opened.tokenizer, opened.task)
    try:
        first_set = next(iter(data.valid().values()))
        batch = next(iter(first_set))
    finally:
        data.close()
    frames, lengths = task.encoder.encode(task.prepare(batch, 0))
    scorer = TransducerScorer(
        opened.tokenizer, task.frame_seconds, prediction=task.prediction, joint=task.joint
    )
    return scorer, task.joint.encoder(frames), lengths


def clocks() -> np.ndarray:
    """Return the wall and the processor time in seconds."""
    return np.array([time.perf_counter(), time.process_time()])


def search_seconds(forms: Sequence[Decoder], inputs: Inputs, rounds: int) -> np.ndarray:
    """Return the seconds (rounds, 2, forms) of wall time and of processor time."""
    seconds = np.zeros((rounds, 2, len(forms)))
    for number in range(rounds):
        for column, form in enumerate(forms):
            start = clocks()
            form.decode(*inputs)
            seconds[number, :, column] = clocks() - start
    return seconds


def compare(name: str, forms: Sequence[Decoder], inputs: Inputs, rounds: int) -> str:
    """Return a row of the table: the texts, times and reads of the former and the present search."""
    former, present = (form.decode(*inputs) for form in forms)
    equal = 0
    for former_hypothesis, hypothesis in zip(former, present, strict=True):
        equal += former_hypothesis.text == hypothesis.text
    seconds = search_seconds(forms, inputs, rounds)
    milliseconds = np.median(seconds, axis=0) * 1000
    ratios = np.median(seconds[..., 1] / seconds[..., 0], axis=0)
    frames = int(inputs[2].sum())
    characters = sum(len(hypothesis.text) for hypothesis in present)
    cells = [name, f"{frames} / {characters}", f"{equal} of {len(former)}"]
    for (former_ms, present_ms), ratio in zip(milliseconds, ratios, strict=True):
        cells.append(f"{former_ms:.1f} / {present_ms:.1f} / {ratio:.2f}")
    former_reads, present_reads = (reads(partial(form.decode, *inputs)) for form in forms)
    cells.append(f"{former_reads} / {present_reads}")
    return "| " + " | ".join(cells) + " |"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("former", type=Path)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--frames", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if options.smoke:
        options.rows, options.frames, options.rounds = 2, 20, 1
    return options


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(1)
    forms = (runpy.run_path(str(options.former))["Greedy"](), Greedy())
    print(f"{date.today()}, torch {torch.__version__}, load average {os.getloadavg()[0]:.1f}\n")
    columns = ["model", "frames / labels", "equal texts", "ms: former / now / ratio"]
    columns += ["processor ms", "reads: former / now"]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
    for classes in (32, 1024):
        inputs = random_model(classes, options.rows, options.frames)
        print(compare(f"{classes} classes", forms, inputs, options.rounds), flush=True)
    if options.run:
        inputs = inputs_of_run(options.run, options.rows)
        print(compare(options.run.name, forms, inputs, options.rounds), flush=True)


if __name__ == "__main__":
    main()

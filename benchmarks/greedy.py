"""Greedy search of a transducer against an earlier form of it: texts, time, reads by the host.

    git show 4932bcd:speechtrain/decoding/greedy.py > former.py
    python benchmarks/greedy.py former.py                  # 32 rows; 32 and 1,024 classes
    python benchmarks/greedy.py former.py --run RUN        # and 32 rows of a run's evaluation set
    python benchmarks/greedy.py speechtrain/decoding/greedy.py --smoke

The models are random; the bias of the blank is set so that there is a label for every third frame, as in
speech. Both forms run in turn, --rounds times, one thread; the table has medians, by the clock and of
processor time. A read by the host is a number that it takes from a tensor (`aten::_local_scalar_dense`), a
tensor that it copies, or a shape that follows from data, for all of which a device waits.
"""

from __future__ import annotations

import argparse
import os
import runpy
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from speechtrain.config.build import build_data
from speechtrain.decoding.base import Decoder, TransducerScorer
from speechtrain.decoding.greedy import Greedy
from speechtrain.inference.loaded_run import load
from speechtrain.nn.joint import Joint
from speechtrain.nn.prediction import LSTMPrediction
from speechtrain.text.vocabulary import Characters

HIDDEN, SECONDS = 256, 0.04  # of a frame
LABELS_A_FRAME = 1 / 3
Searched = tuple[TransducerScorer, Tensor, Tensor]


class Numbers(TorchDispatchMode):
    """Counts the numbers that the host takes from tensors, and the shapes that follow from data."""

    SHAPES = (torch.ops.aten.nonzero.default, torch.ops.aten.masked_select.default)

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_mask = func is torch.ops.aten.index.Tensor and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        self.count += is_mask or func in (torch.ops.aten._local_scalar_dense.default, *self.SHAPES)
        return func(*args, **kwargs or {})


class Copies(TorchFunctionMode):
    """Counts the copies to the host; on a CPU they are none, and no operator is called for them."""

    COPIES = (Tensor.cpu, Tensor.tolist)

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in self.COPIES
        return func(*args, **kwargs or {})


def reads(search: Callable[[], object]) -> int:
    with Numbers() as numbers, Copies() as copies:
        search()
    return numbers.count + copies.count


@torch.no_grad()
def random_model(classes: int, rows: int, frames: int) -> Searched:
    torch.manual_seed(classes)
    tokenizer = Characters("".join(chr(0x4E00 + number) for number in range(classes - 1)))
    prediction = LSTMPrediction(embedding=128, hidden=HIDDEN, layers=1, dropout=0.0)
    prediction.connect(classes - 1)
    joint = Joint(hidden=HIDDEN, dropout=0.0)
    joint.connect(HIDDEN, prediction.width, classes)
    joint.output.weight *= 8  # so that frames differ
    scorer = TransducerScorer(tokenizer, SECONDS, prediction=prediction.eval(), joint=joint.eval())
    encoded = torch.randn(rows, frames, HIDDEN)
    lengths = torch.linspace(frames // 2, frames, rows).long()
    low, high = 0.0, 500.0
    for _ in range(16):
        bias = (low + high) / 2
        joint.output.bias[-1] = bias
        labels = sum(len(one.labels) for one in Greedy().decode(scorer, encoded, lengths))
        low, high = (low, bias) if labels < LABELS_A_FRAME * lengths.sum() else (bias, high)
    return scorer, encoded, lengths


@torch.no_grad()
def of_run(run: Path, rows: int) -> Searched:
    """The first batch of a run's evaluation set."""
    opened = load(run, "device.threads=1", f"data.valid_batch.count={rows}").opened
    task: Any = opened.task
    data = build_data(opened.config, opened.tokenizer, opened.task)
    try:
        batch = next(iter(next(iter(data.valid().values()))))
    finally:
        data.close()
    frames, lengths = task.encoder.encode(task.prepare(batch, 0))
    scorer = TransducerScorer(
        opened.tokenizer, task.frame_seconds, prediction=task.prediction, joint=task.joint
    )
    return scorer, task.joint.encoder(frames), lengths


def compare(name: str, forms: Sequence[Decoder], given: Searched, rounds: int) -> str:
    taken = np.zeros((rounds, 2, len(forms)))
    texts = [[one.text for one in form.decode(*given)] for form in forms]
    for number in range(rounds):
        for place, form in enumerate(forms):
            begun = np.array([time.perf_counter(), time.process_time()])
            form.decode(*given)
            taken[number, :, place] = np.array([time.perf_counter(), time.process_time()]) - begun
    counts = [reads(lambda form=form: form.decode(*given)) for form in forms]  # type: ignore[misc]
    median = np.median(taken, axis=0) * 1000
    ratio = np.median(taken[..., 1] / taken[..., 0], axis=0)
    labels = sum(map(len, texts[1]))
    same = sum(one == other for one, other in zip(*texts, strict=True))
    cells = [name, f"{int(given[2].sum())} / {labels}", f"{same} of {len(texts[0])}"]
    cells += [f"{median[way, 0]:.1f} / {median[way, 1]:.1f} / {ratio[way]:.2f}" for way in (0, 1)]
    cells += [f"{counts[0]} / {counts[1]}"]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("former", type=Path)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--frames", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    if given.smoke:
        given.rows, given.frames, given.rounds = 2, 20, 1
    torch.set_num_threads(1)
    forms = (runpy.run_path(str(given.former))["Greedy"](), Greedy())
    print(f"{date.today()}, torch {torch.__version__}, load average {os.getloadavg()[0]:.1f}\n")
    columns = ["model", "frames / labels", "equal texts", "ms: former / now / ratio"]
    columns += ["processor ms", "reads: former / now"]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
    for classes in (32, 1024):
        searched = random_model(classes, given.rows, given.frames)
        print(compare(f"{classes} classes", forms, searched, given.rounds), flush=True)
    if given.run:
        print(compare(given.run.name, forms, of_run(given.run, given.rows), given.rounds), flush=True)


if __name__ == "__main__":
    main()

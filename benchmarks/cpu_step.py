"""Time of an RNN-T training step on the CPU, MLPerf's base model, against torch's LSTM and the full lattice.

    python benchmarks/cpu_step.py                       # the table of docs/benchmarks/cpu.md
    python benchmarks/cpu_step.py --smoke               # a small model, seconds
    python benchmarks/cpu_step.py --rows 16 --rounds 5 --threads 2

A step is features, forward and backward of one batch of noise (``--rows`` utterances of ``--seconds``,
``--labels`` labels each), without an optimizer. The baseline is the same model with torch's LSTM in fp32 and
the loss by the whole (B, T, U + 1, V) lattice of logits. Ours is the loop LSTM in bf16 with the chunked loss
where the chip has bf16 instructions, and what ``device=cpu`` chooses in fp32. Contenders take turns (A B A B
...), since other work on the machine comes and goes; ratios are medians of each round's ratio to the baseline
of the same round, of processor time (with one thread that is what wall time would be on an idle machine).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import transducer_loss as lattice
from torch import Tensor

from speechtrain.batch import Batch
from speechtrain.compute_policy import PLAIN, ComputePolicy, apply_policy
from speechtrain.devices.cpu import CPU, chip, is_medium_exact
from speechtrain.encoders.lstm import LSTMEncoder
from speechtrain.features.augment import Augment
from speechtrain.features.logmel import LogMel
from speechtrain.models import rnnt
from speechtrain.models.rnnt import RNNT
from speechtrain.nn.joint import Joint
from speechtrain.nn.prediction import LSTMPrediction
from speechtrain.text.vocabulary import Tokenizer

BASELINE = "torch's LSTM, full lattice, fp32"


class Numbers(Tokenizer):
    """As many subwords as wanted; a batch of noise has no text."""

    def __init__(self, count: int) -> None:
        self.labels = [str(n) for n in range(count)]

    def normalise(self, text: str) -> str:
        return text

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def unknown(self, text: str) -> set[str]:
        return set()

    def state(self) -> dict[str, Any]:
        return {"count": len(self.labels)}


def full_lattice(
    encoder: Tensor,
    prediction: Tensor,
    *,
    weight: Tensor,
    bias: Tensor,
    labels: Tensor,
    encoder_lengths: Tensor,
    label_lengths: Tensor,
    dropout: float,
    compute_dtype: torch.dtype,
    **others: object,
) -> Tensor:
    """``transducer_loss`` by way of every logit, as ``benchmarks/transducer_loss.py`` writes it."""
    shape = lattice.Shape(len(labels), encoder.shape[1], labels.shape[1], *weight.shape)
    inputs = [encoder, prediction, weight, bias]
    problem = lattice.Problem(shape, inputs, labels, encoder_lengths, label_lengths)
    return lattice.full_lattice(problem, dropout, compute_dtype)


@dataclass(frozen=True)
class Contender:
    policy: ComputePolicy = PLAIN
    is_plain: bool = False  # the loss

    @contextmanager
    def loss(self) -> Iterator[None]:
        """A context in which the model computes its loss this way."""
        ours = rnnt.transducer_loss
        if self.is_plain:
            rnnt.transducer_loss = full_lattice
        try:
            yield
        finally:
            rnnt.transducer_loss = ours

    def step(self, task: RNNT, batch: Batch) -> float:
        """Forward and backward; the loss of an utterance."""
        task.zero_grad(set_to_none=True)
        apply_policy(task, self.policy)
        torch.manual_seed(0)
        with self.loss(), self.policy.autocast("cpu"):
            found = task(batch)
        torch.autograd.backward(found.total)
        return float(found.total.detach() / found.weight)


def contenders() -> dict[str, Contender]:
    """By name; the first is what the others are measured against."""
    device = CPU()
    narrow = device.policy(torch.bfloat16)
    known = {
        BASELINE: Contender(is_plain=True),
        "torch's LSTM, chunked, fp32": Contender(),
        "loop LSTM, chunked, fp32": Contender(ComputePolicy(lstm="loop")),
    }
    if is_medium_exact():
        known["torch's LSTM, chunked, fp32 by oneDNN"] = Contender(ComputePolicy(fp32_matmul="medium"))
    if not device.precision_fallback_reason(torch.bfloat16):
        known["torch's LSTM in fp32, chunked, bf16"] = Contender(narrow)
        known["loop LSTM, chunked, bf16"] = Contender(replace(narrow, lstm="loop"))
    return known


def model(is_small: bool) -> RNNT:
    """MLPerf's base model, 1023 subwords."""
    torch.manual_seed(0)
    encoder = LSTMEncoder(LogMel(), Augment(), hidden=64 if is_small else 1024)
    nodes = (LSTMPrediction(32, 32), Joint(32)) if is_small else (LSTMPrediction(), Joint())
    return RNNT(Numbers(31 if is_small else 1023), encoder, *nodes).train()


def noise(rows: int, seconds: float, labels: int, classes: int) -> Batch:
    """Utterances of full length, so that nobody gains from padding."""
    generator = torch.Generator().manual_seed(0)
    samples = int(seconds * 16000)
    return Batch(
        audio=torch.randn(rows, samples, generator=generator) * 0.1,
        audio_lengths=torch.full((rows,), samples),
        labels=torch.randint(0, classes - 1, (rows, labels), generator=generator),
        label_lengths=torch.full((rows,), labels),
        weight=torch.ones(rows),
        keys=torch.arange(rows),
        ids=tuple(map(str, range(rows))),
        texts=("",) * rows,
    )


def measure(task: RNNT, batch: Batch, rounds: int) -> None:
    """Print a line for each contender."""
    known = contenders()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in known}
    losses = {}
    for number in range(rounds + 1):  # the first round builds oneDNN's kernels and is not counted
        for name, contender in known.items():
            wall, processor = time.perf_counter(), time.process_time()
            losses[name] = contender.step(task, batch)
            if number:
                times[name].append((time.perf_counter() - wall, time.process_time() - processor))
    for name, measured in times.items():
        wall, processor = (statistics.median(column) for column in zip(*measured, strict=True))
        shares = [own[1] / base[1] for own, base in zip(measured, times[BASELINE], strict=True)]
        ratio = f"{statistics.median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})"
        row = f"{len(batch.ids)} | {name} | {wall:.2f} | {processor:.2f} | {ratio} | {losses[name]:.2f}"
        print(f"| {row} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 16], help="utterances of a batch")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--labels", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--smoke", action="store_true", help="a small model, one round")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.smoke:
        given.rows, given.seconds, given.labels, given.rounds = [2], 2.0, 5, 1

    task = model(given.smoke)
    name, _ = chip()
    has_bf16 = not CPU().precision_fallback_reason(torch.bfloat16)
    print(f"{name}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}, load ", end="")
    print(f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores at the start")
    print(f"bf16 instructions: {'yes' if has_bf16 else 'no; contenders in bf16 are left out'}")
    print(f"fp32 products through oneDNN are as exact: {is_medium_exact()}")
    size = sum(p.numel() for p in task.parameters()) / 1e6
    print(f"{size:.1f} M parameters, {given.seconds:g} s and {given.labels} labels a row, ", end="")
    print(f"{given.threads} threads, {given.rounds} rounds\n")
    print("| rows | contender | wall s | processor s | ratio | loss |\n|---|---|---|---|---|---|")
    for rows in given.rows:
        measure(task, noise(rows, given.seconds, given.labels, task.tokenizer.size), given.rounds)
    print(f"\nload {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()

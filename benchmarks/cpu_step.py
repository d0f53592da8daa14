"""Time of a training step of MLPerf's base RNN-T on the CPU, against torch's LSTM and the full lattice.

    python benchmarks/cpu_step.py                       # the table of docs/benchmarks/steps.md
    python benchmarks/cpu_step.py --smoke               # a small model, seconds
    python benchmarks/cpu_step.py --rows 16 --rounds 5 --threads 2

A step is features, forward and backward of one batch of noise (``--rows`` utterances of ``--seconds``,
``--labels`` labels each), without an optimizer. The baseline is the same model with torch's LSTM in fp32 and
the loss by the whole (B, T, U + 1, V) lattice of logits. The other contenders have the chunked loss, with
torch's LSTM or the loop LSTM, in fp32 and, if the chip has instructions for it, in bf16. There
``device=cpu`` chooses the loop LSTM in bf16.

Contenders take turns, and ratios are of processor times (measuring.py).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import transducer_loss as lattice
from measuring import in_turn, machine, time_cells
from torch import Tensor

from speechtrain.batch import Batch
from speechtrain.compute_policy import PLAIN, ComputePolicy, apply_policy
from speechtrain.devices.cpu import CPU, is_medium_exact
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
    """A vocabulary of ``count`` numbers. A batch of noise has no text."""

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
    **_settings: object,
) -> Tensor:
    """Return the loss of ``transducer_loss`` from the full lattice of ``benchmarks/transducer_loss.py``."""
    shape = lattice.Shape(len(labels), encoder.shape[1], labels.shape[1], *weight.shape)
    inputs = [encoder, prediction, weight, bias]
    problem = lattice.Problem(shape, inputs, labels, encoder_lengths, label_lengths)
    return lattice.full_lattice(problem, dropout, compute_dtype)


@dataclass(frozen=True)
class Contender:
    """A way to compute a step: a compute policy, and the chunked loss or the full lattice."""

    policy: ComputePolicy = PLAIN
    has_full_lattice: bool = False

    @contextmanager
    def loss(self) -> Iterator[None]:
        """Enter a context in which the model computes the loss of this contender."""
        chunked_loss = rnnt.transducer_loss
        if self.has_full_lattice:
            rnnt.transducer_loss = full_lattice
        try:
            yield
        finally:
            rnnt.transducer_loss = chunked_loss

    def step(self, task: RNNT, batch: Batch) -> float:
        """Compute forward and backward. Return the loss of an utterance."""
        task.zero_grad(set_to_none=True)
        apply_policy(task, self.policy)
        torch.manual_seed(0)
        with self.loss(), self.policy.autocast("cpu"):
            loss = task(task.prepare(batch, 0))
        torch.autograd.backward(loss.total)
        return float(loss.total.detach() / loss.weight)


def contenders() -> dict[str, Contender]:
    """Return the contenders of this machine by name. The first is the baseline."""
    device = CPU()
    narrow = device.policy(torch.bfloat16)
    available = {
        BASELINE: Contender(has_full_lattice=True),
        "torch's LSTM, chunked, fp32": Contender(),
        "loop LSTM, chunked, fp32": Contender(ComputePolicy(lstm="loop")),
    }
    if is_medium_exact():
        available["torch's LSTM, chunked, fp32 by oneDNN"] = Contender(ComputePolicy(fp32_matmul="medium"))
    if not device.precision_fallback_reason(torch.bfloat16):
        available["torch's LSTM in fp32, chunked, bf16"] = Contender(narrow)
        available["loop LSTM, chunked, bf16"] = Contender(replace(narrow, lstm="loop"))
    return available


def model(is_small: bool) -> RNNT:
    """Return MLPerf's base model with 1023 subwords, or a small one."""
    torch.manual_seed(0)
    if is_small:
        encoder = LSTMEncoder(LogMel(), Augment(), hidden=64)
        return RNNT(Numbers(31), encoder, LSTMPrediction(32, 32), Joint(32)).train()
    encoder = LSTMEncoder(LogMel(), Augment(), hidden=1024)
    return RNNT(Numbers(1023), encoder, LSTMPrediction(), Joint()).train()


def noise(rows: int, seconds: float, labels: int, classes: int) -> Batch:
    """Return a batch of noise. All utterances have full length, so no contender gains from padding."""
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
    measured_contenders = contenders()
    losses = {}

    def runner(name: str) -> Callable[[int], None]:
        def run(number: int) -> None:
            losses[name] = measured_contenders[name].step(task, batch)

        return run

    times = in_turn({name: runner(name) for name in measured_contenders}, rounds)
    for name, measured in times.items():
        cells = time_cells(measured, times[BASELINE])
        print(f"| {len(batch.ids)} | {name} | {cells} | {losses[name]:.2f} |", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 16], help="utterances of a batch")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--labels", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--smoke", action="store_true", help="a small model, one round")
    options = parser.parse_args()
    if options.smoke:
        options.rows, options.seconds, options.labels, options.rounds = [2], 2.0, 5, 1
    return options


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    task = model(options.smoke)
    bf16 = "yes"
    if CPU().precision_fallback_reason(torch.bfloat16):
        bf16 = "no; contenders in bf16 are left out"
    print(f"{machine()} at the start, {torch.backends.cpu.get_cpu_capability()}")
    print(f"bf16 instructions: {bf16}")
    print(f"fp32 products through oneDNN are as exact: {is_medium_exact()}")
    size = sum(parameter.numel() for parameter in task.parameters()) / 1e6
    print(f"{size:.1f} M parameters, {options.seconds:g} s and {options.labels} labels a row, ", end="")
    print(f"{options.threads} threads, {options.rounds} rounds\n")
    print("| rows | contender | wall s | processor s | ratio | loss |\n|---|---|---|---|---|---|")
    for rows in options.rows:
        batch = noise(rows, options.seconds, options.labels, task.tokenizer.size)
        measure(task, batch, options.rounds)
    print(f"\nload {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()

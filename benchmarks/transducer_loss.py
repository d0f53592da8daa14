"""Time and peak memory of the transducer loss with its joint, forward and backward, against the full lattice.

    python benchmarks/transducer_loss.py                     # the table of docs/benchmarks/loss.md
    python benchmarks/transducer_loss.py --smoke             # a small lattice, seconds
    python benchmarks/transducer_loss.py --shape 16 300 80 512 640 --rounds 5 --threads 2
    python benchmarks/transducer_loss.py --recursions   # only the recursions over frames and over diagonals
    make peers && .venv-peers/bin/python benchmarks/transducer_loss.py --against torchaudio

The full lattice is the usual form, written as well as plain PyTorch allows: one (B, T, U + 1, V) tensor of
logits, one log-softmax, one gather of blank and label together, and the recursion of ``transducer_loss`` as
one autograd function. All utterances have full length, so no contender gains from padding.

With ``--against torchaudio`` the same lattice goes to ``torchaudio.functional.rnnt_loss``, which is then the
baseline. The environment of `make peers` has it.

Contenders take turns (measuring.py). Each round draws another batch and joint, since the share of cells that
backward visits depends on the draw. Peak memory is the growth of the resident set over a forward and backward
in a new process, in which a small lattice has loaded the libraries.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from measuring import in_turn, machine, peak_bytes, ratio, reset_peak, resident_bytes, time_cells
from torch import Tensor

from speechtrain.losses.transducer import transducer_loss
from speechtrain.losses.transducer_diagonals import posteriors_by_diagonals
from speechtrain.losses.transducer_frames import posteriors_by_frames

MiB = 2**20
TORCHAUDIO = "torchaudio's rnnt_loss, fp32"
FIRST = {"lattice": "full lattice, fp32", "torchaudio": TORCHAUDIO}
"""The baseline of each choice of ``--against``."""


@dataclass(frozen=True)
class Shape:
    batch: int
    frames: int
    labels: int
    vocabulary: int
    hidden: int


@dataclass
class Problem:
    """One batch and one joint."""

    shape: Shape
    inputs: list[Tensor]
    labels: Tensor
    frames: Tensor
    symbols: Tensor

    @classmethod
    def draw(cls, shape: Shape, initialisation: str, seed: int = 0) -> Problem:
        """Draw units of variance 1, as after a LayerNorm, and a weight of the joint.

        The variance of the weight is 1/H (``unit``) or 1/3H (``linear``, as torch.nn.Linear draws it).
        """
        torch.manual_seed(seed)
        b, t, u, v, h = shape.batch, shape.frames, shape.labels, shape.vocabulary, shape.hidden
        variance = {"unit": 1.0, "linear": 1 / 3}[initialisation] / h
        weight = torch.empty(v, h).uniform_(-1, 1) * (3 * variance) ** 0.5
        inputs = [torch.randn(b, t, h), torch.randn(b, u + 1, h), weight, torch.zeros(v)]
        lengths = torch.full((b,), t), torch.full((b,), u)
        labels = torch.randint(0, v - 1, (b, u))
        return cls(shape, [x.requires_grad_() for x in inputs], labels, *lengths)

    def first(self, dtype: torch.dtype) -> Problem:
        """Return the problem of the first utterance alone."""
        encoder, prediction, weight, bias = (tensor.detach() for tensor in self.inputs)
        inputs = encoder[:1], prediction[:1], weight, bias
        copies = [tensor.to(dtype, copy=True).requires_grad_() for tensor in inputs]
        return Problem(self.shape, copies, self.labels[:1], self.frames[:1], self.symbols[:1])


class _Recursion(torch.autograd.Function):
    """The recursion of ``transducer_loss``, from log-probabilities of blank and label to the loss."""

    @staticmethod
    def forward(ctx: Any, blank: Tensor, label: Tensor, frames: Tensor, symbols: Tensor) -> Tensor:
        loss, occupancy, label_share, _ = posteriors_by_frames(blank, label, frames, symbols)
        ctx.save_for_backward(
            (-occupancy * (1 - label_share)).to(blank.dtype), (-occupancy * label_share).to(label.dtype)
        )
        return loss.to(blank.dtype)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        blank, label = ctx.saved_tensors
        return upstream[:, None, None] * blank, upstream[:, None, None] * label, None, None


def lattice(problem: Problem, dropout: float, dtype: torch.dtype) -> Tensor:
    """Return all logits (B, T, U + 1, V). They are autocast if ``dtype`` is bfloat16."""
    encoder, prediction, weight, bias = problem.inputs
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        hidden = F.dropout(torch.relu_(encoder[:, :, None] + prediction[:, None]), dropout)
        return F.linear(hidden, weight, bias)


def arcs(problem: Problem, dropout: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities (B, T, U + 1) of blank and next label, from the full lattice."""
    blank = problem.shape.vocabulary - 1
    logits = lattice(problem, dropout, dtype)
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    next_label = F.pad(problem.labels, (0, 1), value=blank)
    both = torch.stack((torch.full_like(next_label, blank), next_label), -1)[:, None]
    blank_and_label = log_p.gather(-1, both.expand(-1, problem.shape.frames, -1, -1))
    return blank_and_label[..., 0], blank_and_label[..., 1]


def full_lattice(problem: Problem, dropout: float, dtype: torch.dtype) -> Tensor:
    blank, label = arcs(problem, dropout, dtype)
    loss: Tensor = _Recursion.apply(blank, label, problem.frames, problem.symbols)  # type: ignore[no-untyped-call]
    return loss


def torchaudio_loss(problem: Problem, dropout: float, dtype: torch.dtype) -> Tensor:
    from torchaudio.functional import rnnt_loss

    integers = (x.int() for x in (problem.labels, problem.frames, problem.symbols))
    blank = problem.shape.vocabulary - 1
    losses: Tensor = rnnt_loss(lattice(problem, dropout, dtype), *integers, blank=blank, reduction="none")
    return losses


def occupied(problem: Problem) -> float:
    """Return the share of cells that backward visits."""
    with torch.no_grad():
        posteriors = posteriors_by_frames(*arcs(problem, 0.0, torch.float32), problem.frames, problem.symbols)
    return float((posteriors.occupancy >= 1e-6).double().mean())


def chunked(problem: Problem, dropout: float, dtype: torch.dtype, skip_below: float = 1e-6) -> Tensor:
    encoder, prediction, weight, bias = problem.inputs
    return transducer_loss(
        encoder,
        prediction,
        weight,
        bias,
        problem.labels,
        problem.frames,
        problem.symbols,
        blank=problem.shape.vocabulary - 1,
        dropout=dropout,
        compute_dtype=dtype,
        skip_below=skip_below,
    )


@dataclass(frozen=True)
class Contender:
    loss: Callable[..., Tensor]
    arguments: dict[str, Any]
    matmul: str = "highest"
    dropout: float = 0.0

    def run(self, problem: Problem) -> None:
        """Compute forward and backward. Gradients are dropped before, as an optimizer does."""
        torch.set_float32_matmul_precision(self.matmul)
        for tensor in problem.inputs:
            tensor.grad = None
        torch.autograd.backward(self.loss(problem, self.dropout, **self.arguments).sum())


def contenders() -> dict[str, Contender]:
    """Return all contenders by name."""
    fp32, bf16 = {"dtype": torch.float32}, {"dtype": torch.bfloat16}
    without_dropout = {
        FIRST["lattice"]: Contender(full_lattice, fp32),
        "full lattice, fp32 oneDNN": Contender(full_lattice, fp32, "medium"),
        "full lattice, bf16": Contender(full_lattice, bf16),
        "chunked, fp32, every cell": Contender(chunked, fp32 | {"skip_below": 0.0}),
        "chunked, fp32": Contender(chunked, fp32),
        "chunked, fp32 oneDNN": Contender(chunked, fp32, "medium"),
        "chunked, bf16": Contender(chunked, bf16),
    }
    with_dropout = {}
    for name, contender in without_dropout.items():
        if "every" not in name:
            with_dropout[f"{name}, dropout 0.3"] = replace(contender, dropout=0.3)
    return without_dropout | with_dropout | {TORCHAUDIO: Contender(torchaudio_loss, fp32)}


def runner(name: str, problems: list[Problem]) -> Callable[[int], None]:
    """Return a function that runs a contender on the problem of a round."""
    contender = contenders()[name]
    return lambda number: contender.run(problems[number])


def growth(name: str, shape: Shape, initialisation: str) -> int:
    """Return the growth of the resident set over one run in this process, which must be a new one."""
    contender = contenders()[name]
    contender.run(Problem.draw(Shape(2, 20, 6, 64, 32), initialisation))
    problem = Problem.draw(shape, initialisation)
    for tensor in problem.inputs:
        tensor.data.add_(0)  # This touches every page of the inputs.
    gc.collect()
    reset_peak()
    before = resident_bytes()
    contender.run(problem)
    return peak_bytes() - before


def growth_apart(name: str, arguments: argparse.Namespace) -> int:
    """Return ``growth`` of a new process."""
    shape = map(str, arguments.shape)
    command = [sys.executable, __file__, "--memory-of", name, "--shape", *shape]
    command += ["--initialisation", arguments.initialisation, "--threads", str(arguments.threads)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(json.loads(output))


def error(problem: Problem, contender: Contender) -> float:
    """Return the largest relative error, in norm, of a gradient of one utterance.

    The reference is the full lattice in float64.
    """
    exact, approximate = problem.first(torch.float64), problem.first(torch.float32)
    torch.autograd.backward(full_lattice(exact, 0.0, torch.float64).sum())
    contender.run(approximate)
    errors = []
    for tensor, exact_tensor in zip(approximate.inputs, exact.inputs, strict=True):
        if tensor.grad is not None and exact_tensor.grad is not None:
            difference = tensor.grad - exact_tensor.grad
            errors.append(float(difference.norm() / exact_tensor.grad.norm()))
    return max(errors)


def median_and_ratio(seconds: list[float], baseline: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} | {ratio(seconds, baseline)}"


def report(names: list[str], arguments: argparse.Namespace) -> None:
    """Print the table, in Markdown."""
    shape = Shape(*arguments.shape)
    problems = [Problem.draw(shape, arguments.initialisation, seed) for seed in range(arguments.rounds)]
    visited = sorted(occupied(problem) for problem in problems)
    print(f"cells that backward visits: {visited[0]:.2f} to {visited[-1]:.2f} of all\n")
    times = in_turn({name: runner(name, problems) for name in names}, arguments.rounds)
    memory = {}
    for name in names:
        if arguments.smoke and memory:  # A smoke test starts one process only, since each takes seconds.
            memory[name] = growth(name, shape, arguments.initialisation)
        else:
            memory[name] = growth_apart(name, arguments)
    print("| contender | wall s | ratio | processor s | ratio | peak MiB | ratio | gradient error |")
    print("|---|---|---|---|---|---|---|---|")
    base = times[names[0]]
    for name in names:
        wall = median_and_ratio(times[name].wall, base.wall)
        processor = median_and_ratio(times[name].processor, base.processor)
        share = f"{memory[name] / MiB:.0f} | {memory[name] / memory[names[0]]:.3f}"
        gradient_error = ""
        if "dropout" not in name:
            gradient_error = f"{error(problems[0], contenders()[name]):.1e}"
        print(f"| {name} | {wall} | {processor} | {share} | {gradient_error} |", flush=True)


def report_recursions(arguments: argparse.Namespace) -> None:
    """Print the times of both recursions of a lattice, and the error of their occupancies."""
    shape = Shape(*arguments.shape)
    problem = Problem.draw(shape, arguments.initialisation)
    with torch.no_grad():
        blank, label = arcs(problem, 0.0, torch.float32)
    lengths = problem.frames, problem.symbols
    exact = posteriors_by_frames(blank.double(), label.double(), *lengths).occupancy
    recursions = {
        "frames, float64": lambda _: posteriors_by_frames(blank, label, *lengths),
        "diagonals, float64": lambda _: posteriors_by_diagonals(blank.double(), label.double(), *lengths),
        "diagonals, fp32": lambda _: posteriors_by_diagonals(blank, label, *lengths),
    }
    times = in_turn(recursions, arguments.rounds)
    print("| recursion | wall s | processor s | ratio | error of an occupancy |")
    print("|---|---|---|---|---|")
    for name, recursion in recursions.items():
        cells = time_cells(times[name], times["frames, float64"])
        print(f"| {name} | {cells} | {float((recursion(0).occupancy - exact).abs().max()):.1e} |")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", type=int, nargs=5, default=[8, 200, 60, 1024, 512], metavar=tuple("BTUVH"))
    parser.add_argument("--initialisation", choices=["unit", "linear"], default="unit")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--against", choices=[*FIRST], default="lattice")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="contenders beside the first")
    parser.add_argument("--smoke", action="store_true", help="a small lattice, one round")
    parser.add_argument("--recursions", action="store_true", help="only the two recursions of a lattice")
    parser.add_argument("--memory-of", metavar="NAME", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.shape, arguments.rounds = [4, 40, 12, 128, 64], 1
    return arguments


def measured_names(arguments: argparse.Namespace, has_bf16: bool) -> list[str]:
    """Return the names of the contenders, the baseline first."""
    names = [FIRST[arguments.against]]
    for name in contenders():
        is_possible = name != TORCHAUDIO and (has_bf16 or "bf16" not in name)
        is_requested = not arguments.only or name in arguments.only
        if is_possible and is_requested and name not in names:
            names.append(name)
    return names


def print_machine(arguments: argparse.Namespace, has_bf16: bool) -> None:
    bf16 = "yes" if has_bf16 else "no; contenders in bf16 are left out"
    print(f"{machine()}, {torch.backends.cpu.get_cpu_capability()}")
    print(f"bfloat16 instructions: {bf16}")
    print(f"B T U V H = {arguments.shape}, {arguments.initialisation} initialisation, ", end="")
    print(f"{arguments.threads} threads, {arguments.rounds} rounds")


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    if arguments.memory_of:
        shape = Shape(*arguments.shape)
        print(json.dumps(growth(arguments.memory_of, shape, arguments.initialisation)))
        return
    has_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    print_machine(arguments, has_bf16)
    if arguments.recursions:
        report_recursions(arguments)
        return
    if arguments.against == "torchaudio":
        try:
            import torchaudio
        except (ImportError, OSError) as error:  # OSError: torchaudio was built for another torch.
            print(f"not measured: torchaudio does not import here: {error}")
            return
        print(f"torchaudio {torchaudio.__version__}")
    report(measured_names(arguments, has_bf16), arguments)


if __name__ == "__main__":
    main()

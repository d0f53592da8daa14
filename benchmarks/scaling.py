"""The cost of more ranks: agreement, logging and the reduction of gradients. Predictions up to 1,000 ranks.

    python benchmarks/scaling.py                      # the page docs/benchmarks/scaling.md
    python benchmarks/scaling.py --smoke              # small models, a minute
    python benchmarks/scaling.py --models rnnt --rounds 5

Ranks are processes of this machine that speak gloo over its loopback, one thread each. A step is a step of
the trainer: forward, backward with the reduction of gradients by DDP, agreement, update. In each round rank 0
computes a step alone while the other rank waits, then both compute one (A B A B ...), since other work on the
machine comes and goes. Communication is measured by reductions of vectors, on 2 and on 4 ranks, and fitted as

    seconds(n ranks, m bytes, k pieces) = k · latency · (n − 1) + 2 (n − 1) / n · m / bandwidth

which is the cost of a ring (Patarasuk and Yuan, 2009). The prediction of a step on n ranks is the step alone
plus the reduction of its gradients, without overlap, since the reduction takes the core that computes. The
table has the prediction for 2 ranks beside the measured step. For more ranks the bandwidth is a parameter.
The share of the time that computes is then printed twice: with the reduction after backward, and with as
much of the reduction during backward as fits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from cpu_step import model as rnnt_base
from cpu_step import noise
from measuring import machine

from speechtrain.batch import Batch
from speechtrain.devices.cpu import CPU
from speechtrain.distributed.group import Group, SingleProcess, open_group
from speechtrain.distributed.world import World
from speechtrain.metrics import MetricSums
from speechtrain.optim.ema import NoEMA
from speechtrain.optim.lamb import LAMB
from speechtrain.rank.build import build_task
from speechtrain.start.compose import compose
from speechtrain.start.run_config import part_of, run_config
from speechtrain.task import Task
from speechtrain.tracking.jsonl import Jsonl
from speechtrain.trainer_config import TrainerConfig
from speechtrain.training.run_state import Parts, Progress, UpdateRecord
from speechtrain.training.trainer import Trainer

BUCKET = 25 * 2**20  # bytes that DDP reduces at once
LOG_EVERY = 10
RANKS = (8, 16, 64, 256, 1000)
BANDWIDTHS = (1.25, 3.125, 12.5, 50.0)  # GB/s: 10, 25, 100 and 400 Gbit/s
SECONDS = 10.0
ROWS = {"rnnt": 4, "wav2vec2": 1}


def task_and_batch(name: str, is_small: bool) -> tuple[Task, Batch]:
    """Return the base model, or a small one, and a batch of noise for it."""
    seconds, labels, size = SECONDS, 40, "model=wav2vec2"
    if is_small:
        seconds, labels, size = 2.0, 5, "model=wav2vec2_small"
    if name == "rnnt":
        task = rnnt_base(is_small)
        return task, noise(ROWS[name], seconds, labels, task.tokenizer.size)
    task, _ = build_task(run_config(compose([size, "data=digits"], None)))
    return task.train(), noise(ROWS[name], seconds, 0, 2)


class Steps:
    """Whole steps of the shared trainer on one batch."""

    def __init__(self, group: Group, task: Task, module: torch.nn.Module, batch: Batch, folder: Path) -> None:
        precision = part_of(compose(["precision=fp32"], None), "precision").build()
        tracker = Jsonl(folder)
        limits = TrainerConfig(clip=1.0)
        self.group, self.task, self.module, self.batch = group, task, module, batch
        self.trainer = Trainer(limits, CPU(), folder, tracker, precision=precision, group=group)
        # Data and schedule are not needed, since the batch is always the same.
        self.parts = Parts(
            task=task,
            data=None,  # type: ignore[arg-type]
            optimizer=LAMB(task.parameters(), lr=1e-6),
            schedule=None,  # type: ignore[arg-type]
            average=NoEMA(),
            precision=precision,
            progress=self.trainer.progress,
            updates_per_epoch=1.0,
        )

    def step(self) -> float:
        """Train a step and return its seconds."""
        start = time.perf_counter()
        self.run_update()
        return time.perf_counter() - start

    def run_update(self) -> UpdateRecord:
        batch = self.trainer.accumulate(self.task, self.module, itertools.repeat(self.batch), 1)
        norm = self.trainer.update(self.parts.trained, 1e-6, batch.scale, batch.healthy)
        self.trainer.update.results(True)
        return UpdateRecord(batch, 1e-6, norm)

    def log(self) -> float:
        """Write a log line of ``LOG_EVERY`` steps and return its seconds."""
        update, sums, total = self.run_update(), MetricSums(), torch.ones(())
        for _ in range(LOG_EVERY):
            sums.add(dict.fromkeys(("loss", "accuracy", "loss_bits"), (total, total)))
        start = time.perf_counter()
        self.trainer.log(self.parts, update, sums, since=Progress())
        return time.perf_counter() - start

    def all_reduce_status(self) -> float:
        """Return the seconds of an agreement of ranks that arrive at the same time."""
        self.group.barrier()
        start = time.perf_counter()
        self.group.all_reduce_status(torch.ones(()), stop=False, late=False, skip=torch.tensor(False))
        return time.perf_counter() - start


def reductions(world: World, rounds: int) -> list[tuple[int, float]]:
    """Return the bytes and the median seconds of sums over all ranks."""
    measured = []
    for size in (4, 2**18, 2**22, BUCKET):
        vector = torch.zeros(max(1, size // 4))
        seconds = []
        for _ in range(rounds):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(vector)
            seconds.append(time.perf_counter() - start)
        measured.append((vector.numel() * 4, statistics.median(seconds)))
    return measured


def rank(number: int, size: int, port: int, options: argparse.Namespace, out: str) -> None:
    """Run a process of the measurement. Rank 0 writes the figures to ``out``."""
    torch.set_num_threads(1)
    variables = World(number, size, number, size).variables()
    os.environ.update(variables, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    group = open_group(World(number, size, number, size))
    figures: dict[str, Any] = {"reductions": reductions(group.world, 3 * options.rounds)}
    if size == 2:
        for name in options.models:
            folder = Path(out).parent / f"{name}-{number}"
            folder.mkdir()
            task, batch = task_and_batch(name, options.smoke)
            figures[name] = measure(group, task, batch, options.rounds, folder)
    if number == 0:
        Path(out).write_text(json.dumps(figures))
    group.close()


def measure(group: Group, task: Task, batch: Batch, rounds: int, folder: Path) -> dict[str, Any]:
    """Return the seconds of steps alone and together, of an agreement and of a log line, and the bytes."""
    alone = Steps(SingleProcess(), task, task, batch, folder)
    together = Steps(group, task, group.wrap(task), batch, folder)
    together.parts = replace(together.parts, optimizer=alone.parts.optimizer)
    times: dict[str, list[float]] = {"alone": [], "together": []}
    for turn in range(rounds + 1):
        group.barrier()
        seconds_alone = alone.step() if group.world.rank == 0 else 0.0
        group.barrier()
        seconds_together = together.step()
        if turn:  # The first round builds kernels and buckets and does not count.
            times["alone"].append(seconds_alone)
            times["together"].append(seconds_together)
    return {
        **times,
        "bytes": gradient_bytes(task),
        "agree": statistics.median(together.all_reduce_status() for _ in range(50)),
        "log": statistics.median(together.log() for _ in range(9)),
    }


def gradient_bytes(task: Task) -> int:
    """Return the bytes of the gradients in fp32."""
    return 4 * sum(parameter.numel() for parameter in task.parameters() if parameter.requires_grad)


def run(size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Start ``size`` ranks and return their figures."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/figures.json"
        processes.spawn(rank, (size, port, options, out), nprocs=size)
        figures: dict[str, Any] = json.loads(Path(out).read_text())
    return figures


def fit(by_ranks: dict[int, list[tuple[int, float]]]) -> tuple[float, float]:
    """Return latency (s) and bandwidth (bytes/s), fitted by least squares of relative errors."""
    rows, targets = [], []
    for ranks, measured in by_ranks.items():
        for size, seconds in measured:
            rows.append([(ranks - 1) / seconds, 2 * (ranks - 1) / ranks * size / seconds])
            targets.append([1.0])
    exact = {"dtype": torch.float64}
    solved = torch.linalg.lstsq(torch.tensor(rows, **exact), torch.tensor(targets, **exact)).solution
    latency, inverse = solved.flatten().tolist()
    return max(latency, 0.0), 1 / inverse


def reduction(ranks: int, size: float, latency: float, bandwidth: float) -> float:
    """Return the predicted seconds of a sum of ``size`` bytes of gradients over ``ranks``."""
    pieces = -(-size // BUCKET)
    transferred = 2 * (ranks - 1) / ranks * size
    return pieces * latency * (ranks - 1) + transferred / bandwidth


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=("rnnt", "wav2vec2"), default=["rnnt", "wav2vec2"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="small models, two rounds")
    options = parser.parse_args()
    if options.smoke:
        options.rounds = 2
    print(f"{machine()}\n")
    two, four = run(2, options), run(4, options)
    latency, bandwidth = fit({2: two["reductions"], 4: four["reductions"]})
    print("| ranks | bytes | reduction, ms | fitted |\n|---|---|---|---|")
    for ranks, figures in ((2, two), (4, four)):
        for size, seconds in figures["reductions"]:
            transferred = 2 * (ranks - 1) / ranks * size
            fitted = latency * (ranks - 1) + transferred / bandwidth
            milliseconds = f"{1e3 * seconds:.2f} | {1e3 * fitted:.2f}"
            print(f"| {ranks} | {size:,} | {milliseconds} |")
    print(f"\nlatency {1e6 * latency:.0f} µs, bandwidth {bandwidth / 1e9:.2f} GB/s, over the loopback")
    for name in options.models:
        report(name, two[name], latency, bandwidth)
    print(f"\nload {os.getloadavg()[0]:.1f} at the end")


def report(name: str, figures: dict[str, Any], latency: float, bandwidth: float) -> None:
    """Print the measurements and the predictions of a model."""
    alone, together = statistics.median(figures["alone"]), statistics.median(figures["together"])
    size = figures["bytes"]
    predicted = alone + reduction(2, size, latency, bandwidth)
    overhead = figures["agree"] + figures["log"] / LOG_EVERY
    print(f"\n{name}: {ROWS[name]} rows, {size / 2**20:.0f} MiB of gradients")
    print("\n| | s |\n|---|---|")
    print(f"| step of one rank alone | {alone:.3f} |")
    print(f"| step of 2 ranks | {together:.3f} |")
    print(f"| predicted for 2 ranks | {predicted:.3f} ({predicted / together - 1:+.1%}) |")
    print(f"| agreement | {figures['agree']:.6f} |")
    print(f"| a log line | {figures['log']:.6f} |")
    print(f"| agreement and a tenth of a log line, of a step | {overhead / together:.3%} |")
    print_predictions(alone, size, latency)


def print_predictions(alone: float, size: float, latency: float) -> None:
    """Print the share of the time that computes, for each number of ranks and each bandwidth.

    ``alone`` is the seconds of a step of one rank. Two thirds of it are backward.
    """
    columns = [f"{8 * bandwidth:g} Gbit/s" for bandwidth in BANDWIDTHS]
    print(f"\n| ranks | {' | '.join(columns)} |")
    print("|---|" + "---|" * len(columns))
    for ranks in RANKS:
        cells = []
        for bandwidth in BANDWIDTHS:
            cost = reduction(ranks, size, latency, bandwidth * 1e9)
            cost_after_backward = max(0.0, cost - alone * 2 / 3)
            cells.append(f"{alone / (alone + cost):.0%}, {alone / (alone + cost_after_backward):.0%}")
        print(f"| {ranks} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

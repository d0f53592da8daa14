"""What more ranks cost: agreement and logging, the reduction of gradients, and 8 to 1,000 ranks predicted.

    python benchmarks/scaling.py                      # the page docs/benchmarks/scaling.md
    python benchmarks/scaling.py --smoke              # small models, a minute
    python benchmarks/scaling.py --models rnnt --rounds 5

Ranks are processes of this machine that speak gloo over its loopback, one thread each. A step is what
the trainer does: forward, backward with the reduction of gradients by DDP, agreement, update. In each
round rank 0 computes a step alone while the other waits, then both compute one (A B A B ...), since other
work on the machine comes and goes. Communication is measured by reductions of vectors, on 2 and on 4 ranks,
and fitted as

    seconds(n ranks, m bytes, k pieces) = k · latency · (n − 1) + 2 (n − 1) / n · m / bandwidth

which is the ring's cost (Patarasuk and Yuan, 2009). A step on n ranks is predicted as the step alone plus
the reduction of its gradients, without overlap: on a CPU, reducing takes the core that computes. The
prediction for 2 ranks stands beside the measured step. For more ranks bandwidth is a parameter, and the
share of the time that computes is given twice: with the reduction behind backward, and beneath it as far
as it fits.
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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from cpu_step import model as rnnt_base
from cpu_step import noise

from speechtrain.batch import Batch
from speechtrain.checkpoint.whole import Checkpointer
from speechtrain.config.build import build_precision
from speechtrain.devices.cpu import CPU, chip
from speechtrain.distributed.group import Group, SingleProcess, open_group
from speechtrain.launcher import World
from speechtrain.optim.ema import NoEMA
from speechtrain.optim.lamb import LAMB
from speechtrain.rank.build import build_task
from speechtrain.runs.compose import compose
from speechtrain.task import Task
from speechtrain.tracking.jsonl import Jsonl
from speechtrain.trainer_config import TrainerConfig
from speechtrain.training.run_state import Interval, Parts
from speechtrain.training.trainer import Trainer

BUCKET = 25 * 2**20  # bytes that DDP reduces at once
LOG_EVERY = 10
RANKS = (8, 16, 64, 256, 1000)
BANDWIDTHS = (1.25, 3.125, 12.5, 50.0)  # GB/s: 10, 25, 100 and 400 Gbit/s
SECONDS = {"rnnt": 10.0, "wav2vec2": 10.0}
ROWS = {"rnnt": 4, "wav2vec2": 1}


def task_and_batch(name: str, is_small: bool) -> tuple[Task, Batch]:
    """The base model and a batch of noise for it."""
    seconds = 2.0 if is_small else SECONDS[name]
    if name == "rnnt":
        task = rnnt_base(is_small)
        return task, noise(ROWS[name], seconds, 5 if is_small else 40, task.tokenizer.size)
    size = "model=wav2vec2_small" if is_small else "model=wav2vec2"
    task, _ = build_task(compose([size, "data=digits"], None))
    return task.train(), noise(ROWS[name], seconds, 0, 2)


class Steps:
    """Whole steps of the shared trainer on one batch."""

    def __init__(self, group: Group, task: Task, module: torch.nn.Module, batch: Batch, folder: Path) -> None:
        precision = build_precision(compose(["precision=fp32"], None))
        tracker = Jsonl(str(folder))
        limits = TrainerConfig(clip=1.0)
        self.group, self.task, self.module, self.batch = group, task, module, batch
        self.trainer = Trainer(
            limits, CPU(), precision, group, Checkpointer(folder), tracker, seed=1, run_dir=folder
        )
        optimizer, progress = LAMB(task.parameters(), lr=1e-6), self.trainer.progress
        # no data and no schedule: the batch is always the same
        self.parts = Parts(
            task=task,
            data=None,  # type: ignore[arg-type]
            optimizer=optimizer,
            schedule=None,  # type: ignore[arg-type]
            average=NoEMA(),
            precision=precision,
            progress=progress,
        )
        self.parts.wrapped = module
        self.trainer._updates_per_epoch = 1.0
        self.interval = Interval()

    def step(self) -> float:
        """One; its seconds."""
        begun = time.perf_counter()
        batches = itertools.repeat(self.batch)
        global_batch = self.trainer._accumulate(self.parts, batches, 1, self.interval)
        self.trainer._step(self.parts, global_batch, 1e-6)
        self.trainer.update.outcomes(True)
        return time.perf_counter() - begun

    def log(self) -> float:
        """A log line of ``LOG_EVERY`` steps; its seconds."""
        interval, one = Interval(), torch.ones(())
        for _ in range(LOG_EVERY):
            interval.sums.add(dict.fromkeys(("loss", "accuracy", "loss_bits"), (one, one)))
        begun = time.perf_counter()
        self.trainer._log(interval, 0.0, torch.zeros(()))
        return time.perf_counter() - begun

    def all_reduce_status(self) -> float:
        """The agreement of ranks that arrive together; its seconds."""
        self.group.barrier()
        begun = time.perf_counter()
        self.group.all_reduce_status(torch.ones(()), stop=False, late=False, skip=torch.tensor(False))
        return time.perf_counter() - begun


def reductions(world: World, rounds: int) -> list[tuple[int, float]]:
    """(bytes, seconds) of sums over all ranks, the median of ``rounds`` each."""
    measured = []
    for size in (4, 2**18, 2**22, BUCKET):
        vector = torch.zeros(max(1, size // 4))
        seconds = []
        for _ in range(rounds):
            dist.barrier()
            begun = time.perf_counter()
            dist.all_reduce(vector)
            seconds.append(time.perf_counter() - begun)
        measured.append((vector.numel() * 4, statistics.median(seconds)))
    return measured


def rank(number: int, size: int, port: int, given: argparse.Namespace, out: str) -> None:
    """A process of the measurement; rank 0 writes what was found to ``out``."""
    torch.set_num_threads(1)
    places = World(number, size, number, size).variables()
    os.environ.update(places, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    group = open_group(World(number, size, number, size))
    found: dict[str, Any] = {"reductions": reductions(group.world, 3 * given.rounds)}
    for name in given.models if size == 2 else []:
        task, batch = task_and_batch(name, given.smoke)
        folder = Path(out).parent / f"{name}-{number}"
        folder.mkdir()
        alone = Steps(SingleProcess(), task, task, batch, folder)
        together = Steps(group, task, group.wrap(task), batch, folder)
        together.parts.optimizer = alone.parts.optimizer
        times: dict[str, list[float]] = {"alone": [], "together": []}
        for count in range(
            given.rounds + 1
        ):  # the first round builds kernels and buckets, and does not count
            group.barrier()
            own = alone.step() if not number else 0.0
            group.barrier()
            both = together.step()
            if count:
                times["alone"].append(own)
                times["together"].append(both)
        gradients = sum(p.numel() for p in task.parameters() if p.requires_grad) * 4
        found[name] = {
            **times,
            "bytes": gradients,
            "agree": statistics.median(together.all_reduce_status() for _ in range(50)),
            "log": statistics.median(together.log() for _ in range(9)),
        }
        del together
    if not number:
        Path(out).write_text(json.dumps(found))
    group.close()


def run(size: int, given: argparse.Namespace) -> dict[str, Any]:
    """What ``size`` ranks found."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/found.json"
        processes.spawn(rank, (size, port, given, out), nprocs=size)
        found: dict[str, Any] = json.loads(Path(out).read_text())
    return found


def fit(by_ranks: dict[int, list[tuple[int, float]]]) -> tuple[float, float]:
    """Latency (s) and bandwidth (bytes/s) by least squares over relative errors."""
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
    """Seconds to sum gradients of ``size`` bytes over ``ranks``."""
    pieces = -(-size // BUCKET)
    return pieces * latency * (ranks - 1) + 2 * (ranks - 1) / ranks * size / bandwidth


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=("rnnt", "wav2vec2"), default=["rnnt", "wav2vec2"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="small models, two rounds")
    given = parser.parse_args()
    if given.smoke:
        given.rounds = 2
    print(f"{chip()[0]}, {os.cpu_count()} cores, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}\n")
    two, four = run(2, given), run(4, given)
    latency, bandwidth = fit({2: two["reductions"], 4: four["reductions"]})
    print("| ranks | bytes | reduction, ms | fitted |\n|---|---|---|---|")
    for ranks, found in ((2, two), (4, four)):
        for size, seconds in found["reductions"]:
            fitted = latency * (ranks - 1) + 2 * (ranks - 1) / ranks * size / bandwidth
            print(f"| {ranks} | {size:,} | {1e3 * seconds:.2f} | {1e3 * fitted:.2f} |")
    print(f"\nlatency {1e6 * latency:.0f} µs, bandwidth {bandwidth / 1e9:.2f} GB/s, over the loopback")
    for name in given.models:
        report(name, two[name], latency, bandwidth)
    print(f"\nload {os.getloadavg()[0]:.1f} at the end")


def report(name: str, found: dict[str, Any], latency: float, bandwidth: float) -> None:
    """One model's figures."""
    alone, together = statistics.median(found["alone"]), statistics.median(found["together"])
    predicted = alone + reduction(2, found["bytes"], latency, bandwidth)
    overhead = found["agree"] + found["log"] / LOG_EVERY
    print(f"\n{name}: {ROWS[name]} rows, {found['bytes'] / 2**20:.0f} MiB of gradients")
    print("\n| | s |\n|---|---|")
    print(f"| step of one rank alone | {alone:.3f} |")
    print(f"| step of 2 ranks | {together:.3f} |")
    print(f"| predicted for 2 ranks | {predicted:.3f} ({predicted / together - 1:+.1%}) |")
    print(f"| agreement | {found['agree']:.6f} |")
    print(f"| a log line | {found['log']:.6f} |")
    print(f"| agreement and a tenth of a log line, of a step | {overhead / together:.3%} |")
    print("\n| ranks | " + " | ".join(f"{8 * width:g} Gbit/s" for width in BANDWIDTHS) + " |")
    print("|---|" + "---|" * len(BANDWIDTHS))
    for ranks in RANKS:
        cells = []
        for width in BANDWIDTHS:
            cost = reduction(ranks, found["bytes"], latency, width * 1e9)
            hidden = max(0.0, cost - alone * 2 / 3)  # beneath backward
            cells.append(f"{alone / (alone + cost):.0%}, {alone / (alone + hidden):.0%}")
        print(f"| {ranks} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()

"""Peak memory and time of training steps with and without each key that saves memory.

    python benchmarks/memory.py                 # the table of docs/benchmarks/steps.md
    python benchmarks/memory.py --smoke         # one short row each, seconds
    python benchmarks/memory.py --rounds 5 --only joint_rows

Each measurement is a separate process, forked after the imports. Its peak is the growth of the resident set
(``ru_maxrss``) beyond the built model. The two recipes of a pair take turns (A B A B ...). The table has
medians, and the median of each round's ratios. A step is forward, backward and the update of the optimizer.
The first step makes buffers and the state of the optimizer, so it counts for the peak but not for the time.
Times are processor times. With one thread they equal the wall times of an idle machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch

from speechtrain.batch import Batch
from speechtrain.compute_policy import ComputePolicy, apply_policy
from speechtrain.rank.build import build_task
from speechtrain.start.build import build_optimizer
from speechtrain.start.compose import compose
from speechtrain.start.run_config import part_of, run_config
from speechtrain.task import Task

MiB = 2**20
EVEN, RAGGED = (6.0,) * 8, (12.0, 11.0, 10.0, 5.0, 4.0, 4.0, 3.0, 3.0)
TRANSFORMER = (
    *("model=ctc", "encoder=wav2vec2", "encoder.layers=8", "encoder.width=256", "encoder.feed_forward=1024"),
    *(
        "device=cpu",
        "encoder.heads=4",
        "encoder.conv_layers=[[64,10,5],[128,8,8],[256,8,8]]",
        "encoder.layer_drop=0",
    ),
)
LSTM = ("model=rnnt", "device=cpu", "encoder=lstm_small", "augment=none", "encoder.hidden=512")


@dataclass(frozen=True)
class Pair:
    """A recipe without and with a key that saves memory, and the rows of its batch."""

    name: str
    recipe: tuple[str, ...]
    without: str
    key: str
    seconds: tuple[float, ...] = EVEN  # of each row
    labels: float = 4.0  # per second
    needs: str = ""  # a package
    smoke: tuple[str, ...] = ("encoder.hidden=32",)

    def recipes(self, is_smoke: bool) -> list[list[str]]:
        """Return the overrides without and with the key."""
        recipes = []
        for key in (self.without, self.key):
            recipe = [*self.recipe, *filter(None, [key])]
            if is_smoke:
                recipe += self.smoke
            recipes.append(recipe)
        return recipes


PAIRS = (
    Pair(
        "checkpoint_layers, 8 transformer layers",
        TRANSFORMER,
        "",
        "trainer.checkpoint_layers=true",
        smoke=("encoder.layers=2",),
    ),
    Pair("checkpoint_layers, LSTM", LSTM, "", "trainer.checkpoint_layers=true"),
    Pair("joint_rows, 20 labels/s", LSTM, "", "model.joint_rows=1", labels=20.0),
    Pair("joint_rows, ragged rows", LSTM, "", "model.joint_rows=2", seconds=RAGGED, labels=20.0),
    Pair("split_segments, ragged rows", LSTM, "", "encoder.split_segments=true", seconds=RAGGED),
    Pair(
        "adamw8bit, 47.9 M weights",
        ("model=rnnt_intel", "device=cpu"),
        "optimizer=adamw",
        "optimizer=adamw8bit",
        seconds=(2.0,),
        needs="bitsandbytes",
        smoke=("encoder.hidden=32", "model.prediction.hidden=32"),
    ),
)


def batch_of(seconds: Sequence[float], labels: float) -> Batch:
    torch.manual_seed(0)
    rows = len(seconds)
    lengths = torch.tensor([int(16_000 * duration) for duration in seconds])
    symbols = torch.tensor([max(1, int(labels * duration)) for duration in seconds])
    audio = 0.1 * torch.randn(rows, int(lengths.max()))
    audio *= torch.arange(audio.shape[1]) < lengths[:, None]
    text = torch.randint(0, 20, (rows, int(symbols.max())))
    names = tuple(map(str, range(rows)))
    return Batch(audio, lengths, text, symbols, torch.ones(rows), torch.arange(rows), names, names)


def measure(
    recipe: Sequence[str], seconds: Sequence[float], labels: float, steps: int
) -> tuple[float, float]:
    """Return the peak in MiB beyond the built model, and the median seconds of a step."""
    torch.set_num_threads(1)
    config = compose([*recipe, "device.autotune=false"])
    task, _ = build_task(run_config(config))
    policy = part_of(config, "device").build().policy(part_of(config, "precision").build().dtype)
    apply_policy(task, policy)
    optimizer = build_optimizer(run_config(config), task.parameter_groups())
    batch = task.prepare(batch_of(seconds, labels), 0)
    task.train()
    before = psutil.Process().memory_info().rss
    times = [timed_step(step, task, batch, optimizer, policy) for step in range(1 + steps)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return (peak - before) / MiB, statistics.median(times[1:])


def timed_step(
    step: int, task: Task, batch: Batch, optimizer: torch.optim.Optimizer, policy: ComputePolicy
) -> float:
    """Train a step and return its processor seconds."""
    start = time.process_time()
    torch.manual_seed(step)
    with policy.autocast("cpu"):
        loss = task(batch)
    (loss.total / loss.weight).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return time.process_time() - start


def measure_in_process(*arguments: object) -> tuple[float, float]:
    """Return the result of ``measure`` in a new process."""
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        figures: tuple[float, float] = pool.apply(measure, arguments)
        return figures


def table_cells(without: list[float], saving: list[float], digits: int) -> list[str]:
    """Return both medians and the median ratio of two lists with an item for each round."""
    ratio = statistics.median(b / a for a, b in zip(without, saving, strict=True))
    medians = statistics.median(without), statistics.median(saving)
    return [f"{medians[0]:.{digits}f}", f"{medians[1]:.{digits}f}", f"{ratio:.2f}"]


def print_row(pair: Pair, is_smoke: bool, rounds: int, steps: int) -> None:
    """Measure a pair and print its row of the table."""
    if pair.needs and importlib.util.find_spec(pair.needs) is None:
        print(f"| {pair.name} | {pair.needs} is not installed |||||| ", flush=True)
        return
    seconds = pair.seconds
    if is_smoke:
        seconds = tuple(duration / 8 for duration in seconds)
    mebibytes: tuple[list[float], list[float]] = ([], [])
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for column, recipe in enumerate(pair.recipes(is_smoke)):
            peak, step_seconds = measure_in_process(recipe, seconds, pair.labels, steps)
            mebibytes[column].append(peak)
            times[column].append(step_seconds)
    cells = table_cells(*mebibytes, digits=0) + table_cells(*times, digits=2)
    print(f"| {pair.name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1, help="timed steps of a process")
    parser.add_argument("--only", default="", help="pairs whose name has this")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.rounds = arguments.steps = 1
    print(
        "| key | MiB without | MiB with | ratio | s without | s with | ratio |\n|---|---|---|---|---|---|---|"
    )
    for pair in PAIRS:
        if arguments.only in pair.name:
            print_row(pair, arguments.smoke, arguments.rounds, arguments.steps)


if __name__ == "__main__":
    compose([])  # This loads Hydra's parsers before the first fork.
    main()

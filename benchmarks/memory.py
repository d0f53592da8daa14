"""Peak memory and time of training steps with and without each key that saves memory.

    python benchmarks/memory.py                 # the table of docs/benchmarks/memory.md
    python benchmarks/memory.py --smoke         # one short row each, seconds
    python benchmarks/memory.py --rounds 5 --only joint_rows

Each measurement is a process of its own, forked after the imports: its peak is the growth of the resident set
(``ru_maxrss``) beyond the built model. The pairs take turns (A B A B ...); the table has medians, and the
median of each round's ratios. A step is forward, backward and the optimizer's update; the first one, which
makes buffers and the optimizer's state, counts for the peak and not for the time. With the one
thread, processor time is what wall time would be on an idle machine.
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
from speechtrain.compute_policy import apply_policy
from speechtrain.config.build import build_device, build_optimizer, build_precision
from speechtrain.rank.build import build_task
from speechtrain.runs.compose import compose

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
    """A recipe without and with a saver, on rows of so many seconds with so many labels a second."""

    name: str
    recipe: tuple[str, ...]
    without: str
    key: str
    seconds: tuple[float, ...] = EVEN
    labels: float = 4.0
    needs: str = ""
    smoke: tuple[str, ...] = ("encoder.hidden=32",)

    def recipes(self, is_smoke: bool) -> list[list[str]]:
        """The overrides without and with the saver."""
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
    lengths = torch.tensor([int(16_000 * s) for s in seconds])
    symbols = torch.tensor([max(1, int(labels * s)) for s in seconds])
    audio = 0.1 * torch.randn(len(seconds), int(lengths.max()))
    audio *= torch.arange(audio.shape[1]) < lengths[:, None]
    text = torch.randint(0, 20, (len(seconds), int(symbols.max())))
    names = tuple(map(str, range(len(seconds))))
    return Batch(
        audio, lengths, text, symbols, torch.ones(len(seconds)), torch.arange(len(seconds)), names, names
    )


def measure(
    recipe: Sequence[str], seconds: Sequence[float], labels: float, steps: int
) -> tuple[float, float]:
    """MiB beyond the built model, and the median seconds of a step."""
    torch.set_num_threads(1)
    config = compose([*recipe, "device.autotune=false"])
    task, _ = build_task(config)
    policy = build_device(config).policy(build_precision(config).dtype)
    apply_policy(task, policy)
    optimizer = build_optimizer(config, task.parameter_groups())
    batch = task.prepare(batch_of(seconds, labels), 0)
    task.train()
    start, taken = psutil.Process().memory_info().rss, []
    for step in range(1 + steps):
        begun = time.process_time()
        torch.manual_seed(step)
        with policy.autocast("cpu"):
            loss = task(batch)
        (loss.total / loss.weight).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        taken.append(time.process_time() - begun)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return (peak - start) / MiB, statistics.median(taken[1:])


def alone(*arguments: object) -> tuple[float, float]:
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        found: tuple[float, float] = pool.apply(measure, arguments)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1, help="timed steps of a process")
    parser.add_argument("--only", default="", help="pairs whose name has this")
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    rounds, steps = (1, 1) if arguments.smoke else (arguments.rounds, arguments.steps)
    print(
        "| key | MiB without | MiB with | ratio | s without | s with | ratio |\n|---|---|---|---|---|---|---|"
    )
    for pair in PAIRS:
        if arguments.only not in pair.name:
            continue
        if pair.needs and importlib.util.find_spec(pair.needs) is None:
            print(f"| {pair.name} | {pair.needs} is not installed |||||| ", flush=True)
            continue
        seconds = tuple(s / 8 for s in pair.seconds) if arguments.smoke else pair.seconds
        plain, saving = pair.recipes(arguments.smoke)
        found = [
            [alone(recipe, seconds, pair.labels, steps) for recipe in (plain, saving)] for _ in range(rounds)
        ]
        cells = []
        for kind, digits in ((0, 0), (1, 2)):
            one, other = ([turn[which][kind] for turn in found] for which in (0, 1))
            ratio = statistics.median(b / a for a, b in zip(one, other, strict=True))
            cells += [f"{statistics.median(each):.{digits}f}" for each in (one, other)] + [f"{ratio:.2f}"]
        print(f"| {pair.name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    compose([])  # It loads Hydra's parsers once, before processes are forked.
    main()

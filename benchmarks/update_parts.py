"""Shares of an update's time: decoding, features, encoder, losses, backward, optimizer, average.

    python benchmarks/update_parts.py RUN                                   # a run of recipe=scratch
    python benchmarks/update_parts.py RUN --updates 40 --threads 1 2
    python benchmarks/update_parts.py RUN --precision bf16 KEY=VALUE ...

RUN is the folder of a run, whose config and recordings are used. Training starts at random weights, and the
first --warm-up updates are not timed. One process does all work in turn, so decoding is visible, although a
data worker may do it in a run. The time of a part does not contain the time of another part within it.

With several --threads, the settings take turns (A B A B), --rounds times, on the same batches. The tables
have the medians over the rounds.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from speechtrain.batch import Batch
from speechtrain.compute_policy import PLAIN, ComputePolicy, apply_policy
from speechtrain.config.build import build_data, build_optimizer
from speechtrain.config.stored import read_config
from speechtrain.data import loader
from speechtrain.models import rnnt
from speechtrain.optim.ema import EMA
from speechtrain.precision import FP32
from speechtrain.rank.build import build_task, open_device
from speechtrain.training.optimizer_step import HostCheckedUpdate, Trained

OTHER = "rest of the update"


class Stopwatch:
    """The seconds of named parts. The time of a part excludes the parts within it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner: list[float] = [0.0]  # for each open part: the seconds of the parts within it

    def time(self, name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call the function, and add its seconds to the part ``name``."""
        self._inner.append(0.0)
        start = time.perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            seconds = time.perf_counter() - start
            self.seconds[name] += seconds - self._inner.pop()
            self._inner[-1] += seconds

    def watch(self, owner: Any, attribute: str, name: str) -> None:
        """Replace a function of ``owner`` by one that is timed as the part ``name``."""
        function = getattr(owner, attribute)

        def timed(*arguments: Any, **options: Any) -> Any:
            return self.time(name, function, *arguments, **options)

        setattr(owner, attribute, timed)


class Updates:
    """Updates of a run's model on its batches, timed by parts."""

    def __init__(self, config: DictConfig, policy: ComputePolicy) -> None:
        self.watch = Stopwatch()
        task, tokenizer = build_task(config)
        self.task, self.policy = task, policy
        apply_policy(task, policy)
        self.optimizer = build_optimizer(config, task.parameter_groups())
        self.average = EMA(task, config.trainer.ema)
        self.update = HostCheckedUpdate(FP32(), config.trainer.clip)
        self.rate = config.optimizer.lr / 10
        data = build_data(config, tokenizer, task)
        self.planned = data.sampler.micro_batches(0, 0, 0, 1)
        self.loader = data.stream.loader
        task.train()
        self._watch_parts()

    def _watch_parts(self) -> None:
        watch, task = self.watch, self.task
        watch.watch(self.loader, "_load", "rest of loading")
        watch.watch(loader, "read_cut", "decoding and resampling")
        watch.watch(loader, "change_speed", "change of speed")
        watch.watch(task.encoder, "augmented", "noise, features, masks")
        watch.watch(task.encoder, "forward", "encoder, forward")
        watch.watch(rnnt, "transducer_loss", "joint and transducer loss, with its gradients")
        watch.watch(rnnt, "ctc_loss", "CTC loss, forward")
        watch.watch(task.prediction, "forward", "prediction network, forward")

    def load(self) -> Batch:
        return self.loader(next(self.planned))

    def run(self, batch: Batch, step: int) -> None:
        """Run an update as the trainer does."""
        torch.manual_seed(step)
        self.watch.time(OTHER, self._run, batch, step)

    def _run(self, batch: Batch, step: int) -> None:
        self.task.advance(step, step)
        batch = self.task.prepare(batch, step)
        with self.policy.autocast("cpu"):
            loss = self.task(batch)
        self.watch.time("backward", loss.total.backward)
        trained = Trained(self.task, self.optimizer, self.average)
        weight = loss.weight.detach()
        self.watch.time(
            "clipping, optimizer, average", self.update, trained, self.rate, 1 / weight, weight > 0
        )


def rounds(updates: Updates, options: argparse.Namespace) -> Iterator[tuple[int, dict[str, float], float]]:
    """Yield the threads, the milliseconds of the parts of an update and the seconds of audio, per round."""
    for step in range(options.warm_up):
        updates.run(updates.load(), step)
    step = options.warm_up
    for _ in range(options.rounds):
        batches = []
        updates.watch.seconds.clear()
        for _ in range(options.updates):
            batches.append(updates.load())
        loading = dict(updates.watch.seconds)
        for threads in options.threads:
            torch.set_num_threads(threads)
            updates.watch.seconds.clear()
            for batch in batches:
                step += 1
                updates.run(batch, step)
            parts = loading | updates.watch.seconds
            milliseconds = {name: 1000 * seconds / options.updates for name, seconds in parts.items()}
            yield threads, milliseconds, sum(batch.seconds for batch in batches) / options.updates


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    return parser.parse_intermixed_args()


def main() -> None:
    options = parse_arguments()
    config = OmegaConf.merge(read_config(options.run), OmegaConf.from_dotlist(options.overrides))
    device, _ = open_device(config, 0)
    policy = PLAIN
    if options.precision == "bf16":
        policy = device.policy(torch.bfloat16)
    tables: dict[int, list[tuple[dict[str, float], float]]] = defaultdict(list)
    for threads, milliseconds, audio in rounds(Updates(config, policy), options):
        tables[threads].append((milliseconds, audio))
    for threads, table in tables.items():
        print_table(threads, table)


def print_table(threads: int, table: list[tuple[dict[str, float], float]]) -> None:
    """Print the medians of the parts, the largest first, with their shares of the core's time."""
    names = set(itertools.chain.from_iterable(parts for parts, _ in table))
    medians = {}
    for name in names:
        medians[name] = statistics.median(parts.get(name, 0.0) for parts, _ in table)
    total = sum(medians.values())
    print(f"\n{threads} threads\n\n| part | ms of an update | share |\n|---|---|---|")
    for name, milliseconds in sorted(medians.items(), key=lambda part: -part[1]):
        print(f"| {name} | {milliseconds:.0f} | {100 * milliseconds / total:.0f} % |")
    audio = statistics.median(seconds for _, seconds in table)
    print(f"| sum, {audio:.0f} s of audio | {total:.0f} | |")


if __name__ == "__main__":
    main()

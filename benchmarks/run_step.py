"""Time of an update of a run with other keys, on its own recordings and one thread.

    python benchmarks/run_step.py RUN encoder.heads=2 model.joint.hidden=128,encoder.channels=16

Each argument is a contender: one or more KEY=VALUE, with commas between them. ``compile=layers`` is a
contender whose encoder layers are compiled by torch.compile. The first contender is the run itself. The
contenders take turns. A round is the forward and backward of --batches batches, and one update by the
optimizer. Times are medians of the rounds.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch
import yaml
from measuring import machine
from omegaconf import DictConfig, OmegaConf

from speechtrain.compute_policy import apply_policy
from speechtrain.rank.build import build_task
from speechtrain.start.build import build_data, build_optimizer
from speechtrain.start.run_config import run_config


class Contender:
    """The task, the optimizer and the batches of a config, and the seconds of each round."""

    def __init__(self, config: DictConfig, batches: int, compiles_layers: bool) -> None:
        run = run_config(config)
        device = run.device.build()
        self.task, tokenizer = build_task(run)
        apply_policy(self.task, device.policy(torch.float32))
        data = build_data(run, tokenizer, self.task)
        data.check()
        stream = data.train()
        self.batches = [self.task.prepare(next(stream), number) for number in range(batches)]
        self.optimizer = build_optimizer(run, self.task.parameter_groups())
        self.task.train()
        if compiles_layers:
            for layer in self.task.encoder.layers:
                layer.compile(dynamic=True)
        self.forward, self.both, self.update = list[float](), list[float](), list[float]()

    def round(self) -> None:
        forward_s, both_s = 0.0, 0.0
        for batch in self.batches:
            start = time.perf_counter()
            loss = self.task(batch)
            forward_s += time.perf_counter() - start
            loss.total.backward()
            both_s += time.perf_counter() - start
        start = time.perf_counter()
        self.optimizer.step()
        self.update.append(time.perf_counter() - start)
        self.optimizer.zero_grad()
        self.forward.append(forward_s / len(self.batches))
        self.both.append(both_s / len(self.batches))


def changed(run_dir: Path, overrides: Sequence[str]) -> DictConfig:
    """Return the config of a run with other values of its keys."""
    config = OmegaConf.load(run_dir / "config.yaml")
    assert isinstance(config, DictConfig)
    for override in overrides:
        key, _, value = override.partition("=")
        OmegaConf.update(config, key, yaml.safe_load(value))
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run_dir", type=Path, metavar="RUN")
    parser.add_argument("contenders", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    contenders = {}
    print(f"{machine()}\n")
    print("| keys | weights | first round, s | forward, ms | and backward, ms | optimizer, ms |")
    print("|" + "---|" * 6)
    for name in ("", *options.contenders):
        overrides = [part for part in name.split(",") if part]
        keys = [part for part in overrides if part != "compile=layers"]
        config = changed(options.run_dir, keys)
        contenders[name or "none"] = Contender(config, options.batches, keys != overrides)
    first_s = {}
    for name, contender in contenders.items():
        start = time.perf_counter()
        contender.round()
        first_s[name] = time.perf_counter() - start
    for _ in range(options.rounds):
        for contender in contenders.values():
            contender.round()
    for name, contender in contenders.items():
        weights = sum(parameter.numel() for parameter in contender.task.parameters())
        times = (contender.forward, contender.both, contender.update)
        cells = " | ".join(f"{1000 * median(seconds[1:]):.0f}" for seconds in times)
        print(f"| {name} | {weights:,} | {first_s[name]:.1f} | {cells} |")


if __name__ == "__main__":
    main()

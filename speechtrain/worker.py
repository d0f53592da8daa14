"""The composition root: a resolved config becomes objects, and the objects train.

Every rank runs ``python -m speechtrain.worker <run>/config.yaml``. No Hydra composition happens
here: the file is the whole truth.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig

from speechtrain.checkpoint import Checkpointer, write_json
from speechtrain.config import build, load
from speechtrain.data.base import DataModule
from speechtrain.devices.base import Device
from speechtrain.distributed import Solo, World
from speechtrain.errors import MachineError, RunError, SpeechtrainError
from speechtrain.limits import Limits
from speechtrain.optim.ema import EMA, Average, NoEMA
from speechtrain.precision import Precision
from speechtrain.randomness import seed_at
from speechtrain.run import RESULT, RunLock
from speechtrain.task import Task
from speechtrain.text.vocabulary import Tokenizer
from speechtrain.trainer import Trainer, planned_steps

_INITIAL_WEIGHTS = 2  # stream number in the address of the initial weights


class StopRequest:
    """Becomes true at the first SIGTERM or SIGINT; the loop acts on it at the next step boundary."""

    def __init__(self) -> None:
        self.received = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True

    def __call__(self) -> bool:
        return self.received


def open_device(config: DictConfig, local_rank: int) -> tuple[Device, Precision]:
    """The device, claimed, and the precision. Raises MachineError where they do not go together."""
    device: Device = build(config, "device")
    precision: Precision = build(config, "precision")
    if not device.supports(precision.dtype):
        names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
        others = " or ".join(f"precision={name}" for dtype, name in names.items() if device.supports(dtype))
        raise MachineError(f"precision={precision.name}: device={device.name} does not train in it; use {others}")
    device.open(local_rank)
    return device, precision


def build_task(config: DictConfig) -> tuple[Task, Tokenizer]:
    """The task, its weights drawn from the run's seed, and its tokenizer."""
    tokenizer: Tokenizer = build(config, "tokenizer")
    torch.manual_seed(seed_at(config.seed, _INITIAL_WEIGHTS))
    encoder = build(config, "encoder", augment=build(config, "augment"))
    return build(config, "model", tokenizer=tokenizer, encoder=encoder), tokenizer


def seed_everything(seed: int) -> None:
    """Seed the generators that libraries may use on their own; ours are addressed, not carried."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def average_of(task: Task, decay: float) -> Average:
    """The weight average that ``trainer.ema`` asks for."""
    return EMA(task, decay) if decay > 0 else NoEMA()


def train(config: DictConfig, world: World, stop: StopRequest) -> dict[str, Any]:
    """Build everything, train, and return what ``result.json`` says."""
    run_dir = Path(config.run_dir)
    limits = Limits(**{str(k): v for k, v in config.trainer.items()})
    if limits.simulate_world is not None:
        limits.accumulate = limits.simulate_world // world.size
    seed_everything(config.seed)
    device, precision = open_device(config, world.local_rank)
    task, tokenizer = build_task(config)
    data: DataModule = build(config, "data", tokenizer=tokenizer, footprint=task.footprint())
    data.check()
    task.to(device.tensor(torch.zeros(())).device)

    per_epoch = data.micro_batches_per_epoch / (world.size * limits.accumulate)
    planned = planned_steps(limits, per_epoch)
    offers = {"steps_per_epoch": max(1, round(per_epoch)), "planned_steps": planned}
    schedule = build(config, "schedule", **offers)
    optimizer = build(config, "optimizer", params=list(task.parameter_groups()))
    module, optimizer = device.prepare(task, optimizer, precision.dtype)
    assert isinstance(module, Task)
    tracker = build(config, "tracking")
    tokenizer.save(str(run_dir))
    checkpointer = Checkpointer(run_dir, limits.keep, lambda m: tracker.log("warning", {"message": m}))
    resume = _resume(config.resume, checkpointer)
    tracker.log("start", {"parameters": sum(p.numel() for p in task.parameters()), "steps": planned, **data.report()})
    trainer = Trainer(limits, device, precision, Solo(), checkpointer, tracker, config.seed, run_dir, stop)
    try:
        status = trainer.fit(module, data, optimizer, schedule, average_of(task, limits.ema), resume)
    finally:
        data.close()
    progress = trainer.progress
    result = {
        "status": status,
        "metric": progress.metrics.get(task.metric),
        "metrics": progress.metrics,
        "steps": progress.step,
        "wall_s": round(progress.wall_s, 3),
        "skipped_updates": progress.skipped_updates,
    }
    tracker.log("end", result)
    tracker.close()
    return result


def _resume(wanted: str, checkpointer: Checkpointer) -> bool:
    found = bool(checkpointer.folders())
    if wanted == "must" and not found:
        raise RunError(f"resume=must, but {checkpointer.root} holds no checkpoint")
    if wanted == "never" and found:
        raise RunError(f"resume=never, but {checkpointer.root} holds checkpoints; set another run_dir")
    return wanted != "never"


def _die_with_parent() -> None:
    """Ask the kernel for a SIGTERM when the command that started this process is gone (Linux)."""
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    except (OSError, AttributeError):
        return


def main(argv: list[str] | None = None) -> int:
    """Run one rank; its outcome, good or bad, is in ``result.json``. Returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1:
        print("usage: python -m speechtrain.worker RUN/config.yaml", file=sys.stderr)
        return 2
    path = Path(arguments[0])
    if argv is None:
        _die_with_parent()
    stop = StopRequest()
    run_dir = path.parent
    lock = RunLock(run_dir)
    try:
        config = load(path)
        lock.acquire()
        result = train(config, World.from_environment(os.environ), stop)
        code = 0
    except Exception as error:  # the boundary of the process: whatever it is, the parent must be told
        code = error.exit_code if isinstance(error, SpeechtrainError) else 1
        (run_dir / "error.log").write_text(traceback.format_exc())
        message = str(error) if isinstance(error, SpeechtrainError) else f"{type(error).__name__}: {error}"
        result = {"status": "failed", "metric": None, "metrics": {}, "error": message.strip(), "exit_code": code}
    write_json(run_dir / RESULT, result)
    lock.release()
    return code


if __name__ == "__main__":
    sys.exit(main())

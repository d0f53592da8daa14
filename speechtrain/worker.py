"""The composition root: a resolved config becomes objects, and the objects train.

Every rank runs ``python -m speechtrain.worker <run>/config.yaml``. No Hydra composition happens
here: the file is the whole truth.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import random
import signal
import sys
import traceback
from dataclasses import dataclass, field
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
from speechtrain.distributed import PARENT, World, open_group
from speechtrain.errors import MachineError, RunError, SpeechtrainError
from speechtrain.limits import Limits
from speechtrain.optim.ema import EMA, Average, NoEMA
from speechtrain.precision import Precision
from speechtrain.randomness import seed_at
from speechtrain.run import RESULT, RunLock
from speechtrain.task import Task
from speechtrain.text.vocabulary import Tokenizer
from speechtrain.tracking.base import Tracker
from speechtrain.trainer import Progress, Trainer, planned_steps

_INITIAL_WEIGHTS = 2  # stream number in the address of the initial weights


class _Warnings(logging.Handler):
    """What the parts log (a skipped recording, a lost worker) becomes a warning of the run."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__(logging.WARNING)
        self.tracker = tracker

    def emit(self, record: logging.LogRecord) -> None:
        self.tracker.log("warning", {"message": record.getMessage()})


class StopRequest:
    """Becomes true at the first SIGTERM or SIGINT; the loop acts on it at the next step boundary.

    The launcher started this process with both blocked; they are let through from here on.
    """

    def __init__(self) -> None:
        self.received = False
        numbers = (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            signal.signal(number, self._receive)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

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
        raise MachineError(
            f"precision={precision.name}: device={device.name} does not train in it; use {others}"
        )
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


@dataclass
class Attempt:
    """One process's part of a run: how far it came is known even where it failed."""

    status: str = "failed"
    progress: Progress = field(default_factory=Progress)
    metric: str = "loss"
    tracker: Tracker | None = None

    def result(self) -> dict[str, Any]:
        """What ``result.json`` says."""
        return {
            "status": self.status,
            "metric": self.progress.metrics.get(self.metric),
            "metrics": self.progress.metrics,
            "steps": self.progress.step,
            "wall_s": round(self.progress.wall_s, 3),
            "skipped_updates": self.progress.skipped_updates,
            "scale_skips": self.progress.scale_skips,
        }

    def end(self, result: dict[str, Any]) -> None:
        """Tell the trackers, and close them."""
        if self.tracker is not None:
            self.tracker.log("end", result)
            self.tracker.close()


def train(config: DictConfig, world: World, stop: StopRequest, attempt: Attempt) -> None:
    """Build everything and train; ``attempt`` says how it went. Raises what stopped it."""
    run_dir = Path(config.run_dir)
    group = open_group(world)
    limits = Limits(**{str(k): v for k, v in config.trainer.items()})
    if limits.simulate_world is not None:
        limits.accumulate = limits.simulate_world // world.size
    seed_everything(config.seed)
    device, precision = open_device(config, world.local_rank)
    task, tokenizer = build_task(config)
    data: DataModule = build(
        config, "data", tokenizer=tokenizer, footprint=task.footprint(), normalise=task.normalise_audio
    )
    data.check()
    task.to(device.tensor(torch.zeros(())).device)

    per_epoch = data.micro_batches_per_epoch / (world.size * limits.accumulate)
    planned = planned_steps(limits, per_epoch)
    offers = {"steps_per_epoch": max(1, round(per_epoch)), "planned_steps": planned}
    schedule = build(config, "schedule", **offers)
    optimizer = build(config, "optimizer", params=list(task.parameter_groups()))
    module, optimizer = device.prepare(task, optimizer, precision.dtype)
    assert isinstance(module, Task)
    attempt.metric = task.metric
    attempt.tracker = tracker = build(config, "tracking")
    logging.getLogger("speechtrain").handlers[:] = [_Warnings(tracker)]
    tokenizer.save(str(run_dir))
    checkpointer = Checkpointer(run_dir, limits.keep, lambda m: tracker.log("warning", {"message": m}))
    if config.resume == "never" and checkpointer.folders():
        raise RunError(f"resume=never, but {checkpointer.root} holds checkpoints; set another run_dir")
    parameters = sum(p.numel() for p in task.parameters())
    tracker.log("start", {"parameters": parameters, "steps": planned, **data.report()})
    trainer = Trainer(limits, device, precision, group, checkpointer, tracker, config.seed, run_dir, stop)
    attempt.progress = trainer.progress
    try:
        average = average_of(task, limits.ema)
        attempt.status = trainer.fit(module, data, optimizer, schedule, average, config.resume)
    finally:
        data.close()


def _leave_with_parent(stop: StopRequest) -> None:
    """Stop as on a SIGTERM when the command that started this process here is gone (Linux)."""
    parent = os.environ.pop(PARENT, "")
    if not parent:
        return
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    except (OSError, AttributeError):
        return
    if str(os.getppid()) != parent:  # gone before the kernel was asked
        stop.received = True


def main(argv: list[str] | None = None) -> int:
    """Run one rank; its outcome, good or bad, is in ``result.json``. Returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1:
        print("usage: python -m speechtrain.worker RUN/config.yaml", file=sys.stderr)
        return 2
    path = Path(arguments[0])
    stop = StopRequest()
    _leave_with_parent(stop)
    run_dir = path.parent
    lock = RunLock(run_dir)
    try:
        lock.acquire()
    except (RunError, OSError) as error:  # the run is another's: so is its result
        print(f"speechtrain: error: {error}", file=sys.stderr)
        return RunError.exit_code
    try:
        return _attempt(path, stop)
    finally:
        lock.release()


def _attempt(path: Path, stop: StopRequest) -> int:
    """Train by the config at ``path``, write the outcome beside it and return the exit code."""
    attempt, code, trace = Attempt(), 0, path.parent / "error.log"
    trace.unlink(missing_ok=True)
    try:
        train(load(path), World.from_environment(os.environ), stop, attempt)
        result = attempt.result()
    except Exception as error:  # the boundary of the process: whatever it is, the parent must be told
        code = error.exit_code if isinstance(error, SpeechtrainError) else 1
        message = str(error) if isinstance(error, SpeechtrainError) else f"{type(error).__name__}: {error}"
        attempt.status = "failed"
        result = {**attempt.result(), "error": message.strip(), "exit_code": code}
        with contextlib.suppress(OSError):  # a full disk must not hide what went wrong
            trace.write_text(traceback.format_exc())
    attempt.end(result)
    try:
        write_json(path.parent / RESULT, result)
    except OSError as error:
        print(f"speechtrain: error: {path.parent / RESULT} cannot be written: {error}", file=sys.stderr)
        return code or MachineError.exit_code
    return code


if __name__ == "__main__":
    sys.exit(main())

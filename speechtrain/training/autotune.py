"""The choice of a run's compute policy: the one that the run has recorded, else the fastest by timing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from speechtrain.batch import Batch
from speechtrain.compute_policy import ComputePolicy, apply_policy, compile_module, fastest
from speechtrain.data.base import DataModule
from speechtrain.devices.base import Device
from speechtrain.distributed.group import Group
from speechtrain.files import write_json
from speechtrain.precision import Precision
from speechtrain.run_directory import DEVICE, DeviceRecord, read_device
from speechtrain.task import Task

_LOG = logging.getLogger(__name__)
_LATE = 2**30  # a step after which nothing is frozen or annealed


def recorded_policy(
    record: DeviceRecord | None, device: Device, precision: Precision
) -> ComputePolicy | None:
    """The policy that ``device.json`` records, or None if it does not fit device, precision and settings.

    On another chip it is kept where the device would choose by timing, although another policy may be
    faster there; only its fp32 products follow the chip, on which the faster path may be less exact.
    """
    if record is None or (record.device, record.precision) != (device.name, precision.name):
        return None
    policy = ComputePolicy.from_record(record.policy)
    if policy is None:
        return None
    candidates = device.candidates(precision.dtype)
    if policy not in candidates:
        if len(candidates) == 1 or record.chip == device.chip():
            return None
        if policy.fp32_matmul not in {candidate.fp32_matmul for candidate in candidates}:
            policy = replace(policy, fp32_matmul=candidates[0].fp32_matmul)
    return device.attach(policy)


def choose_policy(
    record: DeviceRecord | None, device: Device, precision: Precision, *, task: Task, data: DataModule
) -> DeviceRecord:
    """The content of ``device.json`` for this start: the policy, and the medians if policies were timed.

    Times ``task`` on a batch of ``data`` if the device has several policies and the run has recorded none.
    """
    chip, name = device.chip(), precision.name
    if record and (kept := recorded_policy(record, device, precision)):
        if record.chip != chip:
            _LOG.warning(
                f"the compute policy was chosen on {record.chip} and is kept on {chip}; "
                "set device.autotune=false for torch's own"
            )
        return replace(record, policy=kept.record())
    candidates = device.candidates(precision.dtype)
    if len(candidates) == 1:
        return DeviceRecord(device.name, chip, name, candidates[0].record())
    if (batch := data.sample()) is None:
        return DeviceRecord(device.name, chip, name, device.policy(precision.dtype).record())
    chosen, medians = fastest(candidates, _timer(task, device, precision, batch=batch))
    taken = {c.describe(): round(1000 * m, 1) for c, m in zip(candidates, medians, strict=True)}
    if chosen.autocast_dtype is None and precision.dtype != torch.float32:
        times = ", ".join(f"{name} {milliseconds} ms" for name, milliseconds in taken.items())
        _LOG.warning(f"precision={precision.name}: training is in fp32, which is as fast here ({times})")
    return DeviceRecord(device.name, chip, name, chosen.record(), milliseconds=taken)


def resolve_policy(
    device: Device, precision: Precision, group: Group, *, run_dir: Path, task: Task, data: DataModule
) -> tuple[ComputePolicy, dict[str, Any]]:
    """Apply the run's policy, which is rank 0's choice, to ``task``. Return it with its record."""
    with group.main_process_first():
        record = read_device(run_dir)
        if not group.world.rank:
            before, record = record, choose_policy(record, device, precision, task=task, data=data)
            if record != before:
                write_json(run_dir / DEVICE, asdict(record))
    assert record is not None
    policy = ComputePolicy.from_record(record.policy)
    assert policy is not None
    policy = device.attach(policy)
    apply_policy(task, policy)
    compile_module(task, policy, len(data.shapes()))
    return policy, {**asdict(record), "policy": policy.describe()}


def _timer(
    task: Task, device: Device, precision: Precision, *, batch: Batch
) -> Callable[[ComputePolicy], float]:
    """A function that times forward and backward under a policy, in seconds.

    It restores buffers and gradients; the policy stays applied.
    """
    task.train().advance(_LATE, 0)
    moved = device.move(task.prepare(batch, 0))
    buffers = [(buffer, buffer.detach().clone()) for buffer in task.buffers()]

    def seconds_of(policy: ComputePolicy) -> float:
        apply_policy(task, policy)
        torch.manual_seed(0)
        device.synchronize()
        begun = time.perf_counter()
        with policy.autocast(device.name):
            loss = task(moved)
        precision.backward(loss.total)
        device.mark_step()
        device.synchronize()
        seconds = time.perf_counter() - begun
        task.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        return seconds

    return seconds_of

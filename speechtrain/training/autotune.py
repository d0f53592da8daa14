"""The choice of a run's compute policy.

It is the policy in the run's ``device.json``. Without a recorded policy that fits, it is the fastest of the
device's candidates for the run's precision, which are timed on a batch of the run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from speechtrain.batch import Batch
from speechtrain.compute_policy import ComputePolicy, apply_policy, compile_module, fastest_policy
from speechtrain.data.base import DataModule
from speechtrain.devices.base import Device
from speechtrain.distributed.group import Group
from speechtrain.files import write_json
from speechtrain.precision import Precision
from speechtrain.run_directory import DEVICE, DeviceRecord, read_about, read_device
from speechtrain.task import Task
from speechtrain.training.graph_warmup import restored_buffers

_LOG = logging.getLogger(__name__)
# The step at which candidates are timed. At the beginning of a run, models freeze parts or anneal a
# temperature, which would change the times.
_LATE_STEP = 2**30


def _candidates(device: Device, precision: Precision) -> list[ComputePolicy]:
    """Return the policies of ``precision``, among which a timing may choose, the reference first."""
    candidates = list(device.candidates(precision.dtype))
    for dtype in precision.faster_dtypes:
        if device.supports(dtype) and not device.precision_fallback_reason(dtype):
            candidates += device.candidates(dtype)
    return candidates


def recorded_policy(
    record: DeviceRecord | None, device: Device, precision: Precision
) -> ComputePolicy | None:
    """Return the policy in ``device.json``, or None if it does not fit device, precision and settings.

    A policy that was chosen by timing on another chip stays, although another policy may be faster on this
    chip. Only its ``fp32_matmul`` is replaced if no candidate of this chip has that setting, because the
    setting may be less exact here.
    """
    if record is None or (record.device, record.precision) != (device.name, precision.name):
        return None
    policy = ComputePolicy.from_record(record.policy)
    if policy is None:
        return None
    dtype, policies = policy.autocast_dtype, _candidates(device, precision)
    candidates = [candidate for candidate in policies if candidate.autocast_dtype == dtype]
    if policy not in candidates:
        if len(candidates) <= 1 or record.chip == device.chip():
            return None
        settings = {candidate.fp32_matmul for candidate in device.candidates(torch.float32)}
        if policy.fp32_matmul not in settings:
            policy = replace(policy, fp32_matmul=candidates[0].fp32_matmul)
    return device.attach(policy)


def choose_policy(
    record: DeviceRecord | None, device: Device, precision: Precision, *, task: Task, data: DataModule
) -> DeviceRecord:
    """Return the content of ``device.json`` for this start: the policy, and the times of the candidates.

    If the device has several candidates and the run has not recorded a policy, ``task`` is timed on a batch
    of ``data``. Without a batch, the policy is the device's default.
    """
    chip = device.chip()
    policy = recorded_policy(record, device, precision)
    if record and policy:
        _warn_of_other_chip(record.chip, chip)
        return replace(record, policy=policy.record(), computes=policy.describe())
    candidates = _candidates(device, precision)
    policy, milliseconds = candidates[0], None
    batch = data.sample() if len(candidates) > 1 else None
    if batch is not None:
        timer = _timer(task, device, precision, batch=batch)
        policy, milliseconds = _timed_policy(candidates, device, precision, timer)
    return DeviceRecord(
        *(device.name, chip, precision.name, policy.record(), policy.describe()), milliseconds=milliseconds
    )


def _timed_policy(
    candidates: Sequence[ComputePolicy],
    device: Device,
    precision: Precision,
    seconds_of: Callable[[ComputePolicy], float],
) -> tuple[ComputePolicy, dict[str, float]]:
    """Return the fastest of ``candidates``, and the milliseconds of a step by policy.

    fp32 is also timed. If it would be faster, a warning says so.
    """
    fp32_policies = [policy for policy in device.candidates(torch.float32) if policy not in candidates]
    timed_policies = [*candidates, *fp32_policies]
    policy, medians = fastest_policy(timed_policies, seconds_of)
    milliseconds = {}
    for timed_policy, seconds in zip(timed_policies, medians, strict=True):
        milliseconds[timed_policy.describe()] = round(1000 * seconds, 1)
    if policy in fp32_policies:
        times = ", ".join(f"{name} {time_ms} ms" for name, time_ms in milliseconds.items())
        advice = "precision=auto computes in the faster of the two"
        _LOG.warning(f"precision={precision.name}: fp32 would be faster here ({times}). {advice}")
        policy, _ = min(zip(candidates, medians, strict=False), key=lambda pair: pair[1])
    return policy, milliseconds


def _warn_of_other_chip(recorded_chip: str, chip: str) -> None:
    if recorded_chip != chip:
        _LOG.warning(
            f"the compute policy was chosen on {recorded_chip} and is kept on {chip}. "
            "Set device.autotune=false to use torch's own kernels"
        )


def _records(run_dir: Path) -> Iterator[DeviceRecord | None]:
    """Yield the record of a run, then those of the runs beside it that the same command has started.

    So a sweep times once, and its jobs do not differ in their kernels.
    """
    yield read_device(run_dir)
    argv = read_about(run_dir).argv
    for path in sorted(run_dir.parent.glob(f"*/{DEVICE}")):
        if argv and read_about(path.parent).argv == argv:
            yield read_device(path.parent)


def resolve_policy(
    device: Device, precision: Precision, group: Group, *, run_dir: Path, task: Task, data: DataModule
) -> tuple[ComputePolicy, dict[str, Any]]:
    """Apply the policy of the run to ``task``. Return the policy, and the record of it for the log.

    Rank 0 chooses and writes ``device.json``. Then the other ranks read that file.
    """
    if group.world.rank == 0:
        stored_record = read_device(run_dir)
        records = (record for record in _records(run_dir) if recorded_policy(record, device, precision))
        chosen_record = choose_policy(next(records, None), device, precision, task=task, data=data)
        if chosen_record != stored_record:
            write_json(run_dir / DEVICE, asdict(chosen_record))
    group.barrier()
    record = read_device(run_dir)
    assert record is not None
    policy = ComputePolicy.from_record(record.policy)
    assert policy is not None
    policy = device.attach(policy)
    apply_policy(task, policy)
    compile_module(task, policy, len(data.shapes()))
    entries = asdict(record)
    del entries["policy"]  # "computes" has its text.
    return policy, entries


def _timer(
    task: Task, device: Device, precision: Precision, *, batch: Batch
) -> Callable[[ComputePolicy], float]:
    """Return a function that returns the seconds of one forward and backward under a policy.

    That function restores the buffers and clears the gradients of ``task``. The policy stays applied.
    """
    task.train().advance(_LATE_STEP, 0)
    device_batch = device.move(task.prepare(batch, 0))

    def time_step(policy: ComputePolicy) -> float:
        apply_policy(task, policy)
        torch.manual_seed(0)
        with restored_buffers(task):
            device.synchronize()
            start = time.perf_counter()
            with policy.autocast(device.name):
                loss = task(device_batch)
            precision.backward(loss.total)
            device.mark_step()
            device.synchronize()
            seconds = time.perf_counter() - start
        task.zero_grad(set_to_none=True)
        return seconds

    return time_step

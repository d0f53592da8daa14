"""Limits of memory: ``data.batch.memory_gib=auto`` and ``data.decoded_gib=auto`` become numbers of GiB."""

from __future__ import annotations

import os
from typing import Any

from speechtrain.devices import host
from speechtrain.devices.base import Device
from speechtrain.distributed.group import Group
from speechtrain.errors import MachineError
from speechtrain.start.auto_memory import (
    is_batch_memory_open,
    is_decoded_memory_open,
    store_batch_memory,
    with_batch_memory,
)
from speechtrain.start.build import bytes_per_weight
from speechtrain.start.run_config import RunConfig
from speechtrain.task import Task

_BATCH_FRACTION = 0.5
"""Fraction of the free memory that a batch may use. The predicted memory of a batch may be half of the real
memory."""

_DECODED_FRACTION = 0.25
"""Fraction of the host's free memory that the decoded recordings of all ranks may use."""


def with_decoded_memory(run: RunConfig) -> RunConfig:
    """Replace ``data.decoded_gib=auto`` by the share of this rank in the free memory of the host."""
    if not is_decoded_memory_open(run):
        return run
    free_bytes = _DECODED_FRACTION * host.free_memory() / _local_ranks()
    return run.with_data(decoded_gib=round(free_bytes / 2**30, 3))


def _local_ranks() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1)


def free_batch_memory(run: RunConfig, device: Device, task: Task) -> float:
    """Return the memory limit of a batch in GiB.

    It is half of the memory that is free on the device after the weights, gradients and optimizer state of a
    rank. Raises MachineError if no memory is left.
    """
    free_bytes = device.free_memory(_local_ranks())
    model_bytes = int(bytes_per_weight(run) * sum(p.numel() for p in task.parameters()))
    if free_bytes <= model_bytes:
        model_size = f"{model_bytes / 2**30:.2f} GiB of weights, gradients and state"
        raise MachineError(
            f"data.batch.memory_gib=auto: {model_size}, {free_bytes / 2**30:.2f} GiB free. "
            "Use a smaller model or another machine"
        )
    return round(_BATCH_FRACTION * (free_bytes - model_bytes) / 2**30, 3)


def choose_batch_memory(
    run: RunConfig, device: Device, group: Group, *, task: Task
) -> tuple[RunConfig, dict[str, Any]]:
    """Replace ``memory_gib=auto`` by the limit that rank 0 computes, also in the run's stored config.

    Return the run, and an entry for the start line of the log, which is empty if no batch has
    ``memory_gib=auto``. All ranks must call this.
    """
    if not is_batch_memory_open(run):
        return run, {}
    memory_gib = 0.0
    if group.world.rank == 0:
        memory_gib = free_batch_memory(run, device, task)
    memory_gib = group.from_rank_0(memory_gib)
    if group.world.rank == 0:
        store_batch_memory(run.run_dir, memory_gib)
    return with_batch_memory(run, memory_gib), {"memory of a batch": f"{memory_gib} GiB"}

"""Limits of memory: ``data.batch.memory_gib=auto`` and ``data.decoded_gib=auto`` become numbers of GiB."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from speechtrain.devices import host
from speechtrain.devices.base import Device
from speechtrain.distributed.group import Group
from speechtrain.errors import MachineError
from speechtrain.files import write_text
from speechtrain.run_directory import CONFIG
from speechtrain.start.build import rank_bytes
from speechtrain.start.resolved import dump, load
from speechtrain.task import Task

_BATCH_FRACTION = 0.5
"""Fraction of the free memory that a batch may use. The predicted memory of a batch may be half of the real
memory."""

_DECODED_FRACTION = 0.25
"""Fraction of the host's free memory that the decoded recordings of all ranks may use."""


def fill_decoded_memory(config: DictConfig) -> None:
    """Replace ``data.decoded_gib=auto`` by the share of this rank in the free memory of the host."""
    if config.data.get("decoded_gib") == "auto":
        free_bytes = _DECODED_FRACTION * host.free_memory() / _local_ranks()
        config.data.decoded_gib = round(free_bytes / 2**30, 3)


def _local_ranks() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1)


def fill_batch_memory(config: DictConfig, gib: Callable[[], float]) -> float:
    """Replace each ``memory_gib=auto`` in ``config.data`` by the number that ``gib`` returns.

    Return this number. If there is no ``memory_gib=auto``, ``gib`` is not called and 0 is returned.
    """
    auto_batches: list[Any] = []
    for name in ("batch", "valid_batch"):
        batch = config.data.get(name) or {}
        if batch.get("memory_gib") == "auto":
            auto_batches.append(batch)
    if not auto_batches:
        return 0.0
    memory_gib = gib()
    for batch in auto_batches:
        batch.memory_gib = memory_gib
    return memory_gib


def free_batch_memory(config: DictConfig, device: Device, task: Task) -> float:
    """Return the memory limit of a batch in GiB.

    It is half of the memory that is free on the device after the weights, gradients and optimizer state of a
    rank. Raises MachineError if no memory is left.
    """
    free_bytes = device.free_memory(_local_ranks())
    model_bytes = rank_bytes(config, sum(p.numel() for p in task.parameters()))
    if free_bytes <= model_bytes:
        model_size = f"{model_bytes / 2**30:.2f} GiB of weights, gradients and state"
        raise MachineError(
            f"data.batch.memory_gib=auto: {model_size}, {free_bytes / 2**30:.2f} GiB free. "
            "Use a smaller model or another machine"
        )
    return round(_BATCH_FRACTION * (free_bytes - model_bytes) / 2**30, 3)


def choose_batch_memory(config: DictConfig, device: Device, group: Group, *, task: Task) -> dict[str, Any]:
    """Replace ``memory_gib=auto`` by the limit that rank 0 computes, also in the run's stored config.

    Return an entry for the start line of the log. It is empty if no batch has ``memory_gib=auto``. All ranks
    must call this.
    """

    def memory_of_rank0() -> float:
        # The other ranks add zeros, so the sum is the value of rank 0.
        memory = torch.zeros(1, dtype=torch.float64)
        if group.world.rank == 0:
            memory[0] = free_batch_memory(config, device, task)
        return float(group.sum(memory)[0])

    memory_gib = fill_batch_memory(config, memory_of_rank0)
    if not memory_gib:
        return {}
    if group.world.rank == 0:
        path = Path(config.run_dir) / CONFIG
        stored_config = load(path)
        fill_batch_memory(stored_config, lambda: memory_gib)
        write_text(path, dump(stored_config))
    return {"memory of a batch": f"{memory_gib} GiB"}

"""The memory of a batch: ``memory_gib=auto`` becomes a number of GiB."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from speechtrain.config.build import rank_bytes
from speechtrain.config.resolved import dump, load
from speechtrain.devices.base import Device
from speechtrain.distributed.group import Group
from speechtrain.errors import MachineError
from speechtrain.files import write_text
from speechtrain.run_directory import CONFIG
from speechtrain.task import Task

_BATCH_SHARE = 0.5  # Predictions are within a factor of 2.


def fill_batch_memory(config: DictConfig, gib: Callable[[], float]) -> float:
    """Replace ``memory_gib=auto`` of the data's batches by the number that ``gib`` returns.

    Returns this number, or 0 if no batch has ``memory_gib=auto``.
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
    """Return the GiB of a batch.

    They are half of the device's free memory, less the weights, gradients and optimizer state of a rank.
    Raises MachineError if no memory is left.
    """
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1)
    free_bytes = device.free_memory(local_ranks)
    model_bytes = rank_bytes(config, sum(p.numel() for p in task.parameters()))
    if free_bytes <= model_bytes:
        model_size = f"{model_bytes / 2**30:.2f} GiB of weights, gradients and state"
        raise MachineError(
            f"data.batch.memory_gib=auto: {model_size}, {free_bytes / 2**30:.2f} GiB free. "
            "Use a smaller model or another machine"
        )
    return round(_BATCH_SHARE * (free_bytes - model_bytes) / 2**30, 3)


def choose_batch_memory(config: DictConfig, device: Device, group: Group, *, task: Task) -> dict[str, Any]:
    """Set ``memory_gib=auto`` to rank 0's choice, also in the run's stored config.

    Returns the fact for the start line of the run.
    """

    def memory_of_rank0() -> float:
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

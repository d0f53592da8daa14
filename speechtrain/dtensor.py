"""Functions for tensors that are sharded over the ranks (DTensors): shards, norms and files.

Every function also accepts ordinary tensors, and treats each as its own shard. ``torch.distributed.tensor``
is imported only in functions that need its collectives, because the import takes a second.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speechtrain.errors import one_line


def is_sharded(tensor: Tensor) -> bool:
    """Return whether this rank holds only a shard of ``tensor``."""
    return hasattr(tensor, "device_mesh")


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of ``tensor``, which shares its memory.

    A shard consists of rows of the full tensor. It is empty if there are fewer rows than ranks.
    """
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor.detach()
    shard: Tensor = sharded.to_local()
    return shard


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor, with the shards of all ranks. Every rank of the group must call this."""
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor.detach()
    gathered: Tensor = sharded.full_tensor()
    return gathered


def shard_like(value: Tensor, model: Tensor) -> Tensor:
    """Return ``value`` with the sharding of ``model``, without communication.

    Every rank must have the full ``value``.
    """
    if not is_sharded(model):
        return value
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = model
    value_on_device = value.to(local_shard(model).device)
    # ``src_data_rank=None`` means that each rank cuts its shard out of its own copy.
    return distribute_tensor(value_on_device, sharded.device_mesh, sharded.placements, src_data_rank=None)


def empty_shard_like(value: Tensor, model: Tensor | None) -> Tensor:
    """Return an uninitialised tensor of the dtype of ``value``, with shape, sharding and device of ``model``.

    Without ``model``, it is an ordinary tensor on the host with the shape of ``value``.
    """
    if model is None:
        return torch.empty(value.shape, dtype=value.dtype, device="cpu")
    return torch.empty_like(model, dtype=value.dtype, requires_grad=False)


def sum_shares(values: Tensor, model: Tensor) -> Tensor:
    """Add up ``values`` in place over the ranks that have shards of ``model``, and return them.

    If ``model`` is not sharded, ``values`` stay as they are.
    """
    if is_sharded(model):
        sharded: Any = model
        torch.distributed.all_reduce(values, group=sharded.device_mesh.get_group())
    return values


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm () of all tensors together, which is equal on every rank.

    Either all tensors are sharded over the same ranks, or none is sharded. There is one reduction.
    """
    norm = torch.nn.utils.get_total_norm([local_shard(tensor) for tensor in tensors])
    if not tensors or not is_sharded(tensors[0]):
        return norm
    return sum_shares(norm.square(), tensors[0]).sqrt()


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether every value of every tensor is finite. The result is equal on every rank.

    The host reads the device once.
    """
    if not tensors:
        return True
    flags = [(~torch.isfinite(local_shard(tensor))).any() for tensor in tensors]
    has_bad_values = torch.stack(flags).any()
    return not bool(sum_shares(has_bad_values.float(), tensors[0]))


def save_shares(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write every rank's shards of ``tensors`` into ``folder``, one safetensors file per rank.

    torch.distributed.checkpoint stores the positions of the shards in the header of the file. All ranks must
    call this. If a rank fails, all ranks raise OSError.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        save(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except CheckpointException as error:  # It is a BaseException, which no caller would catch.
        causes = set()
        for rank, (cause, _) in error.failures.items():
            causes.add(f"rank {rank}: {one_line(str(cause), 200)}")
        raise OSError("; ".join(sorted(causes))) from error


def load_shares(folder: Path, into: Mapping[str, Tensor]) -> None:
    """Overwrite the tensors in ``into`` with the values in the files of ``save_shares``.

    The tensors may be sharded differently, or not at all. Each rank calls this independently. Raises
    RuntimeError if a tensor is missing in the files or has another shape.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the other ranks do not take part (no_dist).
            load(dict(into), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise RuntimeError(f"{folder}: {one_line(str(cause), 200)}") from error

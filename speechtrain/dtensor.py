"""Tensors that are sharded over the ranks (DTensors): a rank's shard, norms of full tensors, and files.

Every function here also accepts ordinary tensors, and returns them unchanged. ``torch.distributed.tensor`` is
imported only in functions that need its collectives, since the import takes a second.
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
    """Return this rank's shard, in the same memory: rows of the full tensor, perhaps none."""
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor.detach()
    shard: Tensor = sharded.to_local()
    return shard


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor. Every rank of the group must call this."""
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor.detach()
    full_tensor: Tensor = sharded.full_tensor()
    return full_tensor


def shard_like(value: Tensor, model: Tensor) -> Tensor:
    """Shard ``value``, which every rank holds in full, like ``model``, without communication."""
    if not is_sharded(model):
        return value
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = model
    full_tensor = value.to(local_shard(model).device)
    return distribute_tensor(full_tensor, sharded.device_mesh, sharded.placements, src_data_rank=None)


def empty_shard_like(value: Tensor, model: Tensor | None) -> Tensor:
    """Allocate memory of ``value``'s shape and dtype, sharded and placed like ``model``.

    Without ``model``, the memory is on the host.
    """
    if model is None:
        return torch.empty(value.shape, dtype=value.dtype, device="cpu")
    return torch.empty_like(model, dtype=value.dtype, requires_grad=False)


def sum_shares(values: Tensor, model: Tensor) -> Tensor:
    """Sum ``values`` in place over the ranks that hold ``model``. If it is not sharded, do nothing."""
    if is_sharded(model):
        sharded: Any = model
        torch.distributed.all_reduce(values, group=sharded.device_mesh.get_group())
    return values


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm () of all tensors together, the same on every rank, by one reduction.

    Either all tensors are sharded over the same ranks, or none is sharded.
    """
    norm = torch.nn.utils.get_total_norm([local_shard(tensor) for tensor in tensors])
    if not tensors or not is_sharded(tensors[0]):
        return norm
    return sum_shares(norm.square(), tensors[0]).sqrt()


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether every value of every tensor is finite, the same on every rank, by one host read."""
    if not tensors:
        return True
    flags = [(~torch.isfinite(local_shard(tensor))).any() for tensor in tensors]
    has_bad_values = torch.stack(flags).any()
    return not bool(sum_shares(has_bad_values.float(), tensors[0]))


def save_shares(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write every rank's shards of ``tensors`` into ``folder``: one safetensors file per rank.

    torch.distributed.checkpoint stores a shard's position in the header of its file. All ranks must call
    this. If one rank fails, all ranks raise OSError.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        save(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except CheckpointException as error:  # a BaseException, which no caller would catch
        causes = {f"rank {rank}: {one_line(str(cause), 200)}" for rank, (cause, _) in error.failures.items()}
        raise OSError("; ".join(sorted(causes))) from error


def load_shares(folder: Path, into: Mapping[str, Tensor]) -> None:
    """Fill the tensors ``into`` from the files of ``save_shares``. Each rank calls this independently.

    The tensors may be sharded in any way, or not at all. Raises RuntimeError if a tensor is missing or has
    another shape.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        with warnings.catch_warnings():  # torch warns about ranks that do not take part, as intended
            warnings.simplefilter("ignore")
            load(dict(into), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise RuntimeError(f"{folder}: {one_line(str(cause), 200)}") from error

"""Tensors that are sharded over the ranks (DTensors): a rank's shard, norms of the whole, and files.

Everything here takes ordinary tensors, too, and returns them unchanged. ``torch.distributed.tensor`` is
imported only in functions that need its collectives: the import takes a second.
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
    """Whether this rank holds only a shard of ``tensor``."""
    return hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """This rank's shard, in the same memory: rows of the whole, perhaps none."""
    if not is_sharded(tensor):
        return tensor
    spread: Any = tensor.detach()
    share: Tensor = spread.to_local()
    return share


def whole(tensor: Tensor) -> Tensor:
    """All of ``tensor``; every rank of the group must call this."""
    if not is_sharded(tensor):
        return tensor
    spread: Any = tensor.detach()
    gathered: Tensor = spread.full_tensor()
    return gathered


def like(value: Tensor, model: Tensor) -> Tensor:
    """``value``, whole on every rank, sharded and placed like ``model``, without communication."""
    if not is_sharded(model):
        return value
    from torch.distributed.tensor import distribute_tensor

    spread: Any = model
    placed = value.to(local(model).device)
    return distribute_tensor(placed, spread.device_mesh, spread.placements, src_data_rank=None)


def empty(value: Tensor, model: Tensor | None) -> Tensor:
    """Memory of ``value``'s shape and dtype, sharded and placed like ``model``, by default on the host."""
    if model is None:
        return torch.empty(value.shape, dtype=value.dtype, device="cpu")
    return torch.empty_like(model, dtype=value.dtype, requires_grad=False)


def sum_shares(values: Tensor, model: Tensor) -> Tensor:
    """``values``, summed in place over the ranks that hold ``model``; unchanged if it is not sharded."""
    if is_sharded(model):
        spread: Any = model
        torch.distributed.all_reduce(values, group=spread.device_mesh.get_group())
    return values


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm () of all tensors together, the same on every rank; takes one reduction.

    Either all of them are sharded, over the same ranks, or none is.
    """
    norm = torch.nn.utils.get_total_norm([local(tensor) for tensor in tensors])
    if not tensors or not is_sharded(tensors[0]):
        return norm
    return sum_shares(norm.square(), tensors[0]).sqrt()


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether every value of every tensor is finite, the same on every rank; takes a host read."""
    if not tensors:
        return True
    bad = torch.stack([(~torch.isfinite(local(tensor))).any() for tensor in tensors]).any()
    return not bool(sum_shares(bad.float(), tensors[0]))


def save_shares(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write every rank's shards of ``tensors`` into ``folder``: one safetensors file per rank.

    torch.distributed.checkpoint stores a shard's position in the header of its file. All ranks must call
    this; if one fails, all raise OSError.
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
    """Fill tensors, sharded in any way or whole, from the files of ``save_shares``; each rank on its own.

    Raises RuntimeError if a tensor is missing or has another shape.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        with warnings.catch_warnings():  # about ranks that do not take part, as intended
            warnings.simplefilter("ignore")
            load(dict(into), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    except CheckpointException as error:
        cause = one_line(str(next(iter(error.failures.values()))[0]), 200)
        raise RuntimeError(f"{folder}: {cause}") from error

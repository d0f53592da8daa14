"""Checkpoints of runs with sharded parameters."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speechtrain.checkpoint.whole import SHARDED, SHARDS, UNWRITABLE, Checkpointer, Stateful, map_tensors
from speechtrain.distributed.group import Group
from speechtrain.dtensor import full_tensor, is_sharded, save_shares


class ShardedCheckpointer(Checkpointer):
    """A Checkpointer whose ``save`` every rank calls. Each rank writes its own shards.

    ``state.pt`` holds sharded tensors without their content. The content is in ``shards/``, with one
    safetensors file per rank. If one rank cannot write its file, no checkpoint is kept.
    """

    needs_all_ranks = True

    def __init__(self, run_dir: str | Path, keep: int, group: Group) -> None:
        super().__init__(run_dir, keep)
        self.group = group

    def save(self, step: int, states: Mapping[str, Stateful], weights: Mapping[str, Tensor]) -> Path:
        is_main = self.group.world.rank == 0
        state, shards = _split(states)
        whole_weights = self._gather(weights)
        folder, temporary = self._folders(step)
        with self._raise_on_all_ranks(step, temporary):
            if is_main:
                self._begin(temporary)
                (temporary / SHARDS).mkdir()
        with self._raise_on_all_ranks(step, temporary):
            save_shares(temporary / SHARDS, shards)
        with self._raise_on_all_ranks(step, temporary):
            if is_main:
                self._write(temporary, state, whole_weights)
                self._end(folder, temporary, SHARDED, step)
                self._prune()
        return folder

    def _gather(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the whole weights on rank 0, in host memory. Other ranks hold one whole tensor at a time."""
        gathered = {}
        for name, tensor in weights.items():
            whole_tensor = full_tensor(tensor)
            if self.group.world.rank == 0:
                gathered[name] = whole_tensor.cpu()
        return gathered

    @contextmanager
    def _raise_on_all_ranks(self, step: int, temporary: Path) -> Iterator[None]:
        """Return a context for a part of a save. If a rank cannot write, all ranks raise OSError.

        The folder ``temporary`` is then removed.
        """
        failure: Exception | None = None
        try:
            yield
        except UNWRITABLE as error:
            failure = error
        if self.group.any(failure is not None):
            if self.group.world.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            cause = failure or "another rank could not write its part"
            raise self._save_error(step, cause) from failure


def _split(states: Mapping[str, Stateful]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the states in host memory, without the content of sharded tensors, and these tensors by path."""
    shards: dict[str, Tensor] = {}

    def without_shard(path: str, tensor: Tensor) -> Tensor:
        if not is_sharded(tensor):
            return tensor.detach().cpu()
        shards[path] = tensor.detach()
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    state = map_tensors({name: part.state_dict() for name, part in states.items()}, without_shard)
    return state, shards

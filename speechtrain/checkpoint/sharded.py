"""Checkpoints of runs with sharded parameters."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from speechtrain.checkpoint.whole import SHARDED, SHARDS, UNWRITABLE, Checkpointer, Stateful, mapped
from speechtrain.distributed.group import Group
from speechtrain.dtensor import is_sharded, save_shares, whole


class ShardedCheckpointer(Checkpointer):
    """A Checkpointer whose ``save`` every rank calls; each rank writes its own shards.

    ``state.pt`` has sharded tensors without their content, which is in ``shards/``: one safetensors file
    per rank. If one rank cannot write its file, no checkpoint is kept.
    """

    needs_all = True

    def __init__(self, run_dir: str | Path, keep: int, group: Group) -> None:
        super().__init__(run_dir, keep)
        self.group = group

    def save(self, step: int, states: Mapping[str, Stateful], weights: Mapping[str, Tensor]) -> Path:
        is_first = self.group.world.rank == 0
        shares: dict[str, Tensor] = {}

        def stand_in(path: str, tensor: Tensor) -> Tensor:
            if not is_sharded(tensor):
                return tensor.detach().cpu()
            shares[path] = tensor.detach()
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

        held = mapped({name: part.state_dict() for name, part in states.items()}, stand_in)
        evaluated: dict[str, Tensor] = {}
        for name, tensor in weights.items():  # one at a time: only rank 0 keeps all of them
            gathered = whole(tensor)
            if is_first:
                evaluated[name] = gathered.cpu()
        folder, temporary = self._folders(step)
        with self._together(step, temporary):
            if is_first:
                self._begin(temporary)
                (temporary / SHARDS).mkdir()
        with self._together(step, temporary):
            save_shares(temporary / SHARDS, shares)
        with self._together(step, temporary):
            if is_first:
                self._write(temporary, held, evaluated)
                self._end(folder, temporary, SHARDED, step)
                self._prune()
        return folder

    @contextmanager
    def _together(self, step: int, temporary: Path) -> Iterator[None]:
        """A context for a part of a save: if a rank cannot write, all raise OSError; ``temporary`` goes."""
        failure: Exception | None = None
        try:
            yield
        except UNWRITABLE as error:
            failure = error
        if self.group.any(failure is not None):
            if self.group.world.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            cause = failure or "another rank could not write its part"
            raise self._unwritten(step, cause) from failure

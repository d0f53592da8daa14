"""Checkpoints of runs with sharded parameters."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from speechtrain.checkpoint.checkpointer import SHARDS, UNWRITABLE, Checkpointer, Stateful, sharded_tensors
from speechtrain.distributed.group import Group
from speechtrain.dtensor import full_tensor, save_shares


class ShardedCheckpointer(Checkpointer):
    """A Checkpointer for sharded parameters. Every rank must call ``save``, and each rank writes its shards.

    ``state.safetensors`` contains shape and dtype of sharded tensors, and their values are in ``shards/``,
    with one safetensors file per rank. If a rank cannot write its file, the incomplete checkpoint is removed.
    """

    needs_all_ranks = True

    def __init__(self, run_dir: str | Path, keep: int, group: Group) -> None:
        super().__init__(run_dir, keep)
        self.group = group

    def save(self, step: int, states: Mapping[str, Stateful], weights: Mapping[str, Tensor]) -> Path:
        """Write the checkpoint of ``step``. All ranks raise OSError if one of them fails."""
        is_rank0 = self.group.world.rank == 0
        whole_weights = {}
        for name, tensor in weights.items():
            whole_tensor = full_tensor(tensor)  # It collects the shards of all ranks, so every rank calls it.
            if is_rank0:
                whole_weights[name] = whole_tensor.cpu()
        folder, temporary = self.folder(step), self._temporary(step)
        # Each context is a point at which the ranks wait for each other.
        with self._raise_on_all_ranks(step, temporary):
            if is_rank0:
                self._begin(temporary)
                (temporary / SHARDS).mkdir()
        with self._raise_on_all_ranks(step, temporary):
            save_shares(temporary / SHARDS, sharded_tensors(states))
        with self._raise_on_all_ranks(step, temporary):
            if is_rank0:
                self._write(temporary, states, whole_weights)
                self._end(folder, temporary, step)
                self._prune()
        return folder

    @contextmanager
    def _raise_on_all_ranks(self, step: int, temporary: Path) -> Iterator[None]:
        """Return a context for a part of ``save``, at whose end the ranks exchange whether they could write.

        If a rank could not, the folder ``temporary`` is removed, and all ranks raise OSError.
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

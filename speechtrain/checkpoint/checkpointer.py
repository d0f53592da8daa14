"""Checkpoints: written completely or not at all, and verified before they are loaded.

A checkpoint is a folder ``checkpoints/step-00001200`` with these files:

- ``state.safetensors``: the state of each part of the run (``state_file``).
- ``model.safetensors``: the weights that were evaluated.
- ``checkpoint.json``: the format, the step, and the sha256 of each file.
- ``shards/``: one file per rank, only in a run with sharded parameters.

The folder is written under another name, flushed to the disk and renamed, so a reader finds a complete
checkpoint or none. A checkpoint with or without shards can continue a run with or without sharded parameters,
on any number of ranks.
"""

from __future__ import annotations

import errno
import itertools
import logging
import math
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from speechtrain.checkpoint import state_file
from speechtrain.checkpoint.best_metric import selection_key
from speechtrain.checkpoint.fit import check_fit, load_optimizer
from speechtrain.dtensor import empty_shard_like, is_sharded, load_shares, shard_like
from speechtrain.errors import RunError, SpeechtrainError, one_line
from speechtrain.files import flush, remove_temporaries, sha256, write_json
from speechtrain.run_directory import BEST, CheckpointManifest, read_manifest, write_manifest

_LOG = logging.getLogger(__name__)

FORMAT = 3
"""``CheckpointManifest.format`` of this version. In formats 1 and 2, the state was a pickle."""
SHARDS = "shards"
STATE = "state.safetensors"
WEIGHTS = "model.safetensors"
"""Name of the file with the evaluated weights, the only one that is read to use a model."""
_REQUIRED_FILES = {STATE, WEIGHTS}
UNWRITABLE = (OSError, RuntimeError, SafetensorError)
"""Errors of writing tensors to a full disk. Torch and safetensors raise their own errors."""
_SHARD_NAME = re.compile(rf"{SHARDS}/[\w.-]+\.safetensors")


class OtherFormat(RunError):
    """A checkpoint in the format of another version. It is not damaged, so it is not renamed."""


class Stateful(Protocol):
    """A part of a run whose state a checkpoint stores."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any) -> object: ...


def map_tensors(state: Any, change: Callable[[str, Tensor], Tensor], path: str = "") -> Any:
    """Return ``state`` with each tensor replaced by ``change(path, tensor)``.

    The path of a tensor in nested mappings and lists is, for example, ``optimizer/state/0/exp_avg``. ``path``
    is the path of ``state`` itself.
    """
    if isinstance(state, Tensor):
        return change(path, state)
    prefix = path and f"{path}/"
    if isinstance(state, Mapping):
        return {key: map_tensors(value, change, f"{prefix}{key}") for key, value in state.items()}
    if isinstance(state, list | tuple):
        items = [map_tensors(value, change, f"{prefix}{index}") for index, value in enumerate(state)]
        return type(state)(items)
    return state


def sharded_tensors(states: Mapping[str, Stateful]) -> dict[str, Tensor]:
    """Return the sharded tensors in the states of a run's parts, by their paths."""
    tensors = {}

    def add(path: str, tensor: Tensor) -> Tensor:
        if is_sharded(tensor):
            tensors[path] = tensor.detach()
        return tensor

    map_tensors({name: part.state_dict() for name, part in states.items()}, add)
    return tensors


def _sharded_examples(states: Mapping[str, Stateful]) -> dict[str, Tensor]:
    """Return the tensors of a run whose sharding the tensors of a checkpoint must get, by path.

    An optimizer has no state before its first step. A tensor in its saved state that has the shape of a
    parameter is therefore sharded like this parameter, which has the path of its state here.
    """
    examples = sharded_tensors(states)
    for name, part in states.items():
        if not isinstance(part, torch.optim.Optimizer):
            continue
        # The state of a parameter is at NAME/state/INDEX. The index counts the parameters of all groups.
        parameters = itertools.chain.from_iterable(group["params"] for group in part.param_groups)
        for index, parameter in enumerate(parameters):
            if is_sharded(parameter):
                examples[f"{name}/state/{index}"] = parameter.detach()
    return examples


def _shard(state: Any, states: Mapping[str, Stateful], folder: Path) -> Any:
    """Return a loaded ``state`` with each tensor sharded as in the run, whose parts are ``states``.

    Tensors on the meta device get their values from the files in ``folder``. Raises ValueError for such a
    tensor that is larger than these files.
    """
    examples = _sharded_examples(states)
    missing: dict[str, Tensor] = {}  # tensors whose values are in ``folder``, by path
    folder_bytes = sum(file.stat().st_size for file in folder.glob("*"))

    def shard_tensor(path: str, saved: Tensor) -> Tensor:
        parent_path, _, _ = path.rpartition("/")
        example = examples.get(path, examples.get(parent_path))
        if example is not None and example.shape != saved.shape:
            example = None  # The tensor stays whole.
        if not saved.is_meta:
            return saved if example is None else shard_like(saved, example)
        if saved.nbytes > folder_bytes:
            raise ValueError(f"{path} is larger than its file")
        missing[path] = empty_shard_like(saved, example)
        return missing[path]

    sharded = map_tensors(state, shard_tensor)
    if missing:
        load_shares(folder, missing)
    return sharded


def validation_metrics(folder: Path) -> dict[str, float | None]:
    """Return the metrics of a checkpoint's validation, or {} if it has not been validated."""
    manifest = read_manifest(folder)
    return (manifest and manifest.metrics) or {}


def read_state(folder: Path) -> dict[str, Any]:
    """Return the saved state of each part of a run. Raises RunError for a damaged file, and OtherFormat."""
    manifest = read_manifest(folder)
    if manifest is not None:
        _check_format(folder, manifest)
    return _read(folder / STATE, state_file.read_state, "Remove its folder")


def _read(path: Path, read: Callable[[Path], dict[str, Any]], fix: str) -> dict[str, Any]:
    """Return ``read(path)``. Raises RunError with ``fix`` for a damaged file."""
    try:
        return read(path)
    except Exception as error:  # The readers raise errors of many classes for a damaged file.
        cause = f"{type(error).__name__}: {one_line(str(error), 120)}"
        raise RunError(f"{path} cannot be read ({cause}). {fix}") from None


def _check_format(folder: Path, manifest: CheckpointManifest) -> None:
    """Raise OtherFormat if this version does not read the state of a checkpoint."""
    if manifest.format == FORMAT:
        return
    problem = f"{folder} has checkpoint format {manifest.format}, not {FORMAT}"
    if manifest.format > FORMAT:
        raise OtherFormat(f"{problem}. Update speechtrain")
    run_dir = folder.parents[1]
    fix = f"Train again in another run_dir, from its weights with init_from={run_dir}"
    raise OtherFormat(f"{problem}, so it cannot be continued. {fix}")


class Checkpointer:
    """Saves and restores the states of a run's parts in ``run_dir/checkpoints``.

    The newest ``keep`` checkpoints and the best checkpoint stay, and the others are removed. A damaged
    checkpoint is never loaded. It is renamed to ``<name>.damaged``, and a warning is logged.
    """

    needs_all_ranks = False
    """Whether every rank must call ``save``, not only rank 0."""

    def __init__(self, run_dir: str | Path, keep: int = 2) -> None:
        self.root = Path(run_dir) / "checkpoints"
        self.keep = max(1, keep)
        self._first_identity = self._identity()

    def save(self, step: int, states: Mapping[str, Stateful], weights: Mapping[str, Tensor]) -> Path:
        """Write the checkpoint of ``step`` and return its folder.

        ``states`` are the parts of the run by name, and ``weights`` are the weights that are evaluated.
        Raises OSError if the checkpoint cannot be written. Earlier checkpoints then stay intact.
        """
        folder, temporary = self.folder(step), self._temporary(step)
        self._begin(temporary)
        try:
            self._write(temporary, states, weights)
            self._end(folder, temporary, step)
        except UNWRITABLE as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise self._save_error(step, error) from error
        self._prune()
        return folder

    def add_validation(
        self,
        step: int,
        score: float | None,
        metrics: Mapping[str, float],
        wall_s: float = 0.0,
        metric_mode: str = "",
    ) -> None:
        """Add the result of a validation to the manifest of ``step``, and update ``best.json``.

        ``score`` is the value of the task's metric with its ``metric_mode``, and ``metrics`` are all metrics.
        If the checkpoint of ``step`` does not exist, because it could not be written, this does nothing.
        Raises OSError.
        """
        folder = self.folder(step)
        manifest = read_manifest(folder)
        if manifest is None:
            return
        finite: dict[str, float | None] = {}
        for name, value in metrics.items():
            if math.isfinite(value):
                finite[name] = value
        if score is not None and not math.isfinite(score):
            score = None
        manifest = replace(manifest, metric=score, metric_mode=metric_mode, metrics=finite, wall_s=wall_s)
        write_manifest(folder, manifest)
        best, best_score = self.best()
        if best is not None:
            write_json(self.root.parent / BEST, {"name": best.name, "metric": best_score})
        self._prune()

    def read_validation(self, step: int) -> dict[str, Any]:
        """Return what ``add_validation`` stored, as fields of ``Progress``, or {} without a validation."""
        folder = self.folder(step)
        manifest = read_manifest(folder)
        if manifest is None or manifest.metrics is None:
            return {}
        return {"metrics": manifest.metrics, "wall_s": manifest.wall_s}

    def _save_error(self, step: int, cause: object) -> OSError:
        """Return the error of a failed save, with ``cause`` and the free space of the disk."""
        free_mib = shutil.disk_usage(self.root).free // 2**20 if self.root.is_dir() else 0
        problem = f"checkpoint of step {step} could not be written to {self.root}"
        return OSError(f"{problem}: {cause} ({free_mib} MiB free)")

    def folder(self, step: int) -> Path:
        """Return the folder of the checkpoint of ``step``."""
        return self.root / f"step-{step:08d}"

    def _temporary(self, step: int) -> Path:
        """Return the folder in which the checkpoint of ``step`` is written."""
        return self.root / f".writing-{self.folder(step).name}"

    def _begin(self, temporary: Path) -> None:
        """Make the folder in which a checkpoint is written. Raises OSError if the run directory was moved."""
        if self._first_identity is None:
            self.root.parent.mkdir(parents=True, exist_ok=True)
            self._first_identity = self._identity()
        if self._identity() != self._first_identity:
            raise OSError(f"{self.root.parent} was moved or removed while the run went on. Move it back")
        self.root.mkdir(exist_ok=True)
        self._clear()
        temporary.mkdir()

    def _clear(self) -> None:
        """Remove the incomplete folders and files that a killed process has left."""
        for folder in (*self.root.glob(".writing-*"), *self.root.glob(".removing-*")):
            shutil.rmtree(folder, ignore_errors=True)
        for folder in (self.root, *self.folders()):
            remove_temporaries(folder)

    @staticmethod
    def _write(temporary: Path, states: Mapping[str, Stateful], weights: Mapping[str, Tensor]) -> None:
        state = {name: part.state_dict() for name, part in states.items()}
        state_file.write_state(temporary / STATE, state)
        state_file.write_tensors(temporary / WEIGHTS, weights)

    def _end(self, folder: Path, temporary: Path, step: int) -> None:
        """Write the manifest, flush all files, and rename ``temporary`` to ``folder``."""
        files = {}
        for path in sorted(temporary.rglob("*")):
            flush(path)
            if path.is_file():
                files[path.relative_to(temporary).as_posix()] = sha256(path)
        write_manifest(temporary, CheckpointManifest(FORMAT, step, files))
        flush(temporary)
        temporary.rename(folder)
        flush(self.root)

    def _prune(self) -> None:
        """Remove checkpoints that are neither the best nor among the newest.

        A checkpoint with a damaged manifest stays, because it may be the best.
        """
        best, _ = self.best()
        for folder in self.folders()[: -self.keep]:
            if folder != best and read_manifest(folder):
                # If the process is killed during the removal, the new name shows that the folder is
                # incomplete. With the old name, it would look like a checkpoint with a damaged manifest.
                incomplete = folder.rename(self.root / f".removing-{folder.name}")
                shutil.rmtree(incomplete, ignore_errors=True)

    def best(self) -> tuple[Path | None, float]:
        """Return the best checkpoint's folder and metric, or (None, inf) before the first validation.

        Checkpoints are compared by ``selection_key``. If two are equal, the earlier one is the best. This
        reads the manifests. ``best.json`` is only for other programs.
        """
        best = min(self.folders(), key=selection_key, default=None)
        if best is None:
            return None, math.inf
        manifest = read_manifest(best)
        if manifest is None or manifest.metric is None:
            return None, math.inf
        return best, manifest.metric

    def _identity(self) -> tuple[int, int] | None:
        """Return the device number and the inode number of the run directory, or None if it is missing."""
        try:
            status = self.root.parent.stat()
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def folders(self) -> list[Path]:
        """Return the checkpoint folders, the oldest first."""
        paths = self.root.glob("step-*")
        return sorted(path for path in paths if path.is_dir() and not path.suffix)

    def verify(self, folder: Path, only: str | None = None) -> CheckpointManifest:
        """Check that the files of a checkpoint exist and are unchanged, and return its manifest.

        With ``only``, this file alone is checked, also in an earlier format. Raises RunError with the name of
        a missing or changed file, and OtherFormat for a format that this version cannot read.
        """
        manifest = read_manifest(folder)
        if manifest is None:
            raise RunError(f"{folder} has no readable checkpoint.json")
        if only is None or manifest.format > FORMAT:
            _check_format(folder, manifest)
        files = manifest.files
        shards = {name for name in files if _SHARD_NAME.fullmatch(name)}
        has_its_files = set(files) - shards == _REQUIRED_FILES if only is None else only in files
        has_its_name = folder.name == f"step-{manifest.step:08d}"
        if not (has_its_files and has_its_name):
            raise RunError(f"{folder / 'checkpoint.json'} does not describe {folder.name}")
        if only is not None:
            files = {only: files[only]}
        for name, stored_digest in files.items():
            if not (folder / name).is_file():
                raise RunError(f"{folder / name} is missing")
            try:
                digest = sha256(folder / name)
            except OSError as error:
                # EINVAL is for a link or a sparse file. Other errors come from a broken disk, or from a
                # checkpoint that has just been deleted.
                if error.errno != errno.EINVAL:
                    raise
                raise RunError(f"{folder / name} cannot be read ({error.strerror})") from None
            if digest != stored_digest:
                raise RunError(f"{folder / name} does not match its sha256")
        return manifest

    def newest(self) -> int | None:
        """Return the step of the newest undamaged checkpoint, or None. Damaged checkpoints are set aside.

        Raises OtherFormat for a checkpoint in another format.
        """
        self._clear()
        folders = self.folders()
        while folders:
            folder = folders.pop()
            try:
                return self.verify(folder).step
            except OtherFormat:
                raise
            except RunError as error:
                self._set_aside(folder, error, earlier=folders)
        return None

    def restore(self, step: int, states: Mapping[str, Stateful]) -> None:
        """Load the checkpoint of ``step`` into ``states``. Raises RunError if it does not fit the run."""
        folder = self.folder(step)
        saved = read_state(folder)
        if set(saved) != set(states):
            names = one_line(str([*saved]), 200)
            raise RunError(f"{folder} holds {names}, but this run needs {sorted(states)}")
        try:
            saved = _shard(saved, states, folder / SHARDS)
            for name, part in states.items():
                if isinstance(part, torch.optim.Optimizer):
                    load_optimizer(part, saved[name])
                else:
                    check_fit(saved[name], part.state_dict(), name)
                    part.load_state_dict(saved[name])
        except (SpeechtrainError, OSError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # The parts raise errors of many classes for a malicious state.
            cause = f"{type(error).__name__}: {one_line(str(error), 200)}"
            raise RunError(f"{folder} does not fit this run ({cause}). Set another run_dir") from error

    @staticmethod
    def _set_aside(folder: Path, error: RunError, earlier: list[Path]) -> None:
        """Rename the folder of a damaged checkpoint, and log a warning.

        ``earlier`` has the folders of earlier checkpoints, of which the last is tried next.
        """
        damaged = folder.with_name(folder.name + ".damaged")
        shutil.rmtree(damaged, ignore_errors=True)
        folder.rename(damaged)
        consequence = "no other checkpoint is left, training starts at step 0"
        if earlier:
            consequence = f"trying {earlier[-1].name}"
        _LOG.warning(f"checkpoint not loaded: {error}; set aside as {damaged.name}, {consequence}")

    def find(self, which: str) -> Path:
        """Return the folder of a checkpoint.

        ``which`` is ``best``, ``last`` or the name of a folder. Before the first validation, ``best`` is the
        newest checkpoint. Raises RunError if the run has no checkpoint.
        """
        folders = self.folders()
        if not folders:
            raise RunError(f"{self.root} holds no checkpoint. Train first")
        if which == "best":
            return self.best()[0] or folders[-1]
        return folders[-1] if which == "last" else self.root / which

    def weights(self, which: str = "best") -> tuple[Path, dict[str, Tensor]]:
        """Return the folder and the evaluated weights of the checkpoint ``which``. Raises RunError."""
        folder = self.find(which)
        self.verify(folder, only=WEIGHTS)
        return folder, _read(folder / WEIGHTS, load_file, "Use another checkpoint")

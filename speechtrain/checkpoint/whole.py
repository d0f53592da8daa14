"""Checkpoints: named states, written completely or not at all, and verified before they are loaded.

A checkpoint is a folder ``checkpoints/step-00001200`` that holds ``state.pt`` (tensors and plain
values only, always read with ``weights_only=True``), ``model.safetensors`` (the weights that were
evaluated) and ``checkpoint.json`` (format, step, sha256 of each file). It is written under another
name, flushed to the disk and renamed, so a reader finds all of it or none.

A run with sharded parameters adds a folder ``shards`` with one file per rank. Either kind of checkpoint
continues either kind of run, on any number of ranks.
"""

from __future__ import annotations

import errno
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
from safetensors.torch import load_file, save_file
from torch import Tensor

from speechtrain.checkpoint.best_metric import selection_key
from speechtrain.checkpoint.fit import fit, load_optimizer
from speechtrain.checkpoint.migrations import current_name, migrate_names
from speechtrain.dtensor import empty, is_sharded, like, load_shares
from speechtrain.errors import MALFORMED, RunError, SpeechtrainError, one_line
from speechtrain.files import flush, follow_umask, names_in_archive, remove_temporaries, sha256, write_json
from speechtrain.run_directory import BEST, CheckpointManifest, read_manifest, write_manifest

_LOG = logging.getLogger(__name__)

WHOLE, SHARDED = 1, 2
SHARDS = "shards"
WEIGHTS = "model.safetensors"  # all that is read of a checkpoint to use a model; state.pt continues a run
_FILES = {"state.pt", WEIGHTS}
_MOST_VALUES = 2**22  # of a loaded state, each reference counted: skipped recordings are the most
UNWRITABLE = (OSError, RuntimeError, SafetensorError)
"""What writing tensors to a full disk raises: torch and safetensors have errors of their own."""
_SHARD = re.compile(rf"{SHARDS}/[\w.-]+\.safetensors")


class OtherFormat(RunError):
    """A checkpoint of another version: not damaged, so never set aside."""


class Stateful(Protocol):
    """What a checkpoint can hold: an object with these two methods."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any) -> object: ...


def mapped(state: Any, change: Callable[[str, Tensor], Tensor], path: str = "") -> Any:
    """``state`` with every tensor changed; ``change`` gets its path, as in ``optimizer/state/0/exp_avg``."""
    if isinstance(state, Tensor):
        return change(path, state)
    prefix = path and f"{path}/"
    if isinstance(state, Mapping):
        return {key: mapped(value, change, f"{prefix}{key}") for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(mapped(value, change, f"{prefix}{index}") for index, value in enumerate(state))
    return state


def on_host(state: Any) -> Any:
    """``state`` with every tensor in host memory: a checkpoint belongs to no device."""
    return mapped(state, lambda path, tensor: tensor.detach().cpu())


def _models_of(states: Mapping[str, Stateful]) -> Callable[[str, Tensor], Tensor | None]:
    """A function from a saved tensor and its path to the run's tensor that it is sharded like, if any.

    An optimizer has no state before its first step: what has a parameter's shape is sharded like it.
    """
    models: dict[str, Tensor] = {}
    parameters: dict[str, Tensor] = {}

    def note(path: str, tensor: Tensor) -> Tensor:
        if is_sharded(tensor):
            models[path] = tensor.detach()
        return tensor

    for name, part in states.items():
        mapped(part.state_dict(), note, name)
        if isinstance(part, torch.optim.Optimizer):
            trained = [p for group in part.param_groups for p in group["params"]]
            parameters |= {f"{name}/state/{index}": p.detach() for index, p in enumerate(trained)}

    def find(path: str, value: Tensor) -> Tensor | None:
        path = path if path in models else current_name(path)
        model = models.get(path, parameters.get(path.rpartition("/")[0]))
        return model if model is not None and is_sharded(model) and model.shape == value.shape else None

    return find


def _placed(saved: Any, states: Mapping[str, Stateful], shards: Path) -> Any:
    """``saved`` with each tensor sharded as in the run; ``shards`` has the content that ``saved`` has not."""
    model_of, missing = _models_of(states), {}
    stored = sum(file.stat().st_size for file in shards.glob("*"))

    def place(path: str, value: Tensor) -> Tensor:
        model = model_of(path, value)
        if value.nbytes > (stored if value.is_meta else value.untyped_storage().nbytes()):
            raise ValueError(f"{path} is larger than its file")
        if not value.is_meta:
            return value if model is None else like(value, model)
        missing[path] = empty(value, model)
        return missing[path]

    placed = mapped(saved, place)
    if missing:
        load_shares(shards, missing)
    return placed


def validated(folder: Path) -> dict[str, float | None]:
    """The metrics of a checkpoint's validation; empty if it has none."""
    manifest = read_manifest(folder)
    return (manifest and manifest.metrics) or {}


def read_state(folder: Path) -> dict[str, Any]:
    """The saved state of each part of a run, from its checkpoint. Raises RunError for a damaged file."""
    try:
        names_in_archive(folder / "state.pt")  # refuses a bomb
        state = dict(torch.load(folder / "state.pt", map_location="cpu", weights_only=True))
        _check_size(state)
        return state
    except Exception as error:  # whatever a damaged file makes the readers raise
        cause = f"{type(error).__name__}: {one_line(str(error), 120)}"
        raise RunError(f"{folder / 'state.pt'} cannot be read ({cause}); remove its folder") from None


def _check_size(state: dict[str, Any]) -> None:
    """Raise ValueError for lists and mappings that have too many values, each reference counted.

    After this check, every function may visit a loaded state without a bound.
    """
    nodes: list[Any] = [state]
    count = 0
    while nodes:
        node = nodes.pop()
        count += 1
        if count > _MOST_VALUES:
            raise ValueError("its values refer to each other too often")
        if isinstance(node, dict):
            nodes += node.values()
        elif isinstance(node, list | tuple):
            nodes += node


def _migrated(saved: Mapping[str, Any], states: Mapping[str, Stateful]) -> dict[str, Any]:
    """``saved`` with the model's present names of weights, also in their average."""
    if not isinstance(task := states.get("task"), torch.nn.Module):
        return dict(saved)
    known = task.state_dict().keys()
    average = dict(saved.get("average", {}))
    if "average" in average:
        average["average"] = migrate_names(average["average"], known)
    return {**saved, "task": migrate_names(saved["task"], known), **({"average": average} if average else {})}


class Checkpointer:
    """Saves and restores named Stateful objects under ``run_dir/checkpoints``.

    Keeps the newest ``keep`` and the best. It warns of a damaged checkpoint, renames it to
    ``<name>.damaged`` and never loads it.
    """

    needs_all = False
    """Whether every rank must call ``save``, not only rank 0."""

    def __init__(self, run_dir: str | Path, keep: int = 2) -> None:
        self.root = Path(run_dir) / "checkpoints"
        self.keep = max(1, keep)
        self._opened = self._identity()

    def save(self, step: int, states: Mapping[str, Stateful], weights: Mapping[str, Tensor]) -> Path:
        """Write the checkpoint of ``step``. Raises OSError if that fails; all earlier ones stay intact."""
        folder, temporary = self._folders(step)
        self._begin(temporary)
        try:
            held = {name: on_host(part.state_dict()) for name, part in states.items()}
            self._write(temporary, held, weights)
            self._end(folder, temporary, WHOLE, step)
        except UNWRITABLE as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise self._unwritten(step, error) from error
        self._prune()
        return folder

    def note(self, step: int, score: float | None, metrics: Mapping[str, float], wall_s: float = 0.0) -> None:
        """Add a later validation to the manifest of ``step``.

        ``score`` is the value of the task's metric. ``metrics`` are all metrics of the
        validation. ``best_metric.selection_key`` reads both. Does nothing if the checkpoint could not be
        written. Raises OSError.
        """
        folder, _ = self._folders(step)
        if manifest := read_manifest(folder):
            finite: dict[str, float | None] = {}
            for name, value in metrics.items():
                if math.isfinite(value):
                    finite[name] = value
            score = score if score is not None and math.isfinite(score) else None
            write_manifest(folder, replace(manifest, metric=score, metrics=finite, wall_s=wall_s))
            self._choose()
            self._prune()

    def noted(self, step: int) -> dict[str, Any]:
        """The fields of a run's progress that ``note`` was given; empty if there was none."""
        manifest = read_manifest(self._folders(step)[0])
        if manifest is None or manifest.metrics is None:
            return {}
        return {"metrics": manifest.metrics, "wall_s": manifest.wall_s}

    def _unwritten(self, step: int, cause: object) -> OSError:
        """The error of a save; a full disk is called so, which the cause of torch or safetensors is not."""
        free = shutil.disk_usage(self.root).free if self.root.is_dir() else 0
        return OSError(
            f"checkpoint of step {step} could not be written to {self.root}: {cause} ({free >> 20} MiB free)"
        )

    def _folders(self, step: int) -> tuple[Path, Path]:
        """The final folder of the checkpoint of ``step``, and the one in which it is written."""
        folder = self.root / f"step-{step:08d}"
        return folder, self.root / f".writing-{folder.name}"

    def _begin(self, temporary: Path) -> None:
        if self._opened is None:
            self.root.parent.mkdir(parents=True, exist_ok=True)
            self._opened = self._identity()
        if self._identity() != self._opened:
            raise OSError(f"{self.root.parent} was moved or removed while the run went on; move it back")
        self.root.mkdir(exist_ok=True)
        self._clear()
        temporary.mkdir()

    def _clear(self) -> None:
        """Remove what a killed process left half-written or half-removed."""
        for left_over in (*self.root.glob(".writing-*"), *self.root.glob(".removing-*")):
            shutil.rmtree(left_over, ignore_errors=True)
        for folder in (self.root, *self.folders()):
            remove_temporaries(folder)

    @staticmethod
    def _write(temporary: Path, held: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        # Gaudi's bridge changes the default to 4, which torch.load(weights_only=True) refuses elsewhere
        torch.save(held, temporary / "state.pt", pickle_protocol=2)
        on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        save_file(on_cpu, temporary / WEIGHTS)
        follow_umask(temporary / WEIGHTS)

    def _end(self, folder: Path, temporary: Path, form: int, step: int) -> None:
        """Flush and hash the written files, and rename their folder to ``folder``."""
        files = {}
        for path in sorted(temporary.rglob("*")):
            flush(path)
            if path.is_file():
                files[path.relative_to(temporary).as_posix()] = sha256(path)
        write_manifest(temporary, CheckpointManifest(form, step, files))
        flush(temporary)
        temporary.rename(folder)
        flush(self.root)

    def _choose(self) -> None:
        """Name the best checkpoint in ``best.json``."""
        best, least = self.best()
        if best is not None:
            write_json(self.root.parent / BEST, {"name": best.name, "metric": least})

    def _prune(self) -> None:
        """Remove what is neither the best nor among the newest; one with a damaged manifest may be best."""
        best, _ = self.best()
        for other in self.folders()[: -self.keep]:
            if other != best and read_manifest(other):
                # renamed first: half of it, after a kill, would pass for one with a damaged manifest
                shutil.rmtree(other.rename(self.root / f".removing-{other.name}"), ignore_errors=True)

    def best(self) -> tuple[Path | None, float]:
        """The best checkpoint's folder and metric, (None, inf) while there is none.

        ``selection_key`` orders them, and of equal ones the first is the best.
        The checkpoints themselves say it. ``best.json`` is a note for other programs, which is not read.
        """
        best = min(self.folders(), key=selection_key, default=None)
        if best is None:
            return None, math.inf
        manifest = read_manifest(best)
        if manifest is None or manifest.metric is None:
            return None, math.inf
        return best, manifest.metric

    def _identity(self) -> tuple[int, int] | None:
        """Device and number of the run directory; None while it is missing."""
        try:
            status = self.root.parent.stat()
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def folders(self) -> list[Path]:
        """Checkpoint folders, oldest first."""
        return sorted(p for p in self.root.glob("step-*") if p.is_dir() and not p.suffix)

    def verify(self, folder: Path, only: str | None = None) -> CheckpointManifest:
        """The manifest of a checkpoint, after a check that its files (``only`` one) are there and unchanged.

        Raises RunError that names the fault: a missing or changed file, or another format.
        """
        manifest = read_manifest(folder)
        if manifest is None:
            raise RunError(f"{folder} has no readable checkpoint.json")
        files, form = manifest.files, manifest.format
        shards = {name for name in files if form == SHARDED and _SHARD.fullmatch(name)}
        is_whole = set(files) - shards == _FILES and folder.name == f"step-{manifest.step:08d}"
        if form not in (WHOLE, SHARDED):
            raise OtherFormat(
                f"{folder} has checkpoint format {form}, not {WHOLE} or {SHARDED}; update speechtrain for it"
            )
        if not is_whole:
            raise RunError(f"{folder / 'checkpoint.json'} does not describe {folder.name}")
        for name, digest in files.items() if only is None else [(only, files[only])]:
            if not (folder / name).is_file():
                raise RunError(f"{folder / name} is missing")
            try:
                found = sha256(folder / name)
            except OSError as error:
                if error.errno != errno.EINVAL:  # of a broken disk, or a checkpoint that was deleted just now
                    raise
                raise RunError(f"{folder / name} cannot be read ({error.strerror})") from None
            if found != digest:
                raise RunError(f"{folder / name} does not match its sha256")
        return manifest

    def restore(self, states: Mapping[str, Stateful]) -> int | None:
        """Load the newest usable checkpoint into ``states`` and return its step; None if there is none.

        Raises RunError if a usable checkpoint does not fit the run, or has another format.
        """
        self._clear()
        folders = self.folders()
        for folder in reversed(folders):
            try:
                manifest = self.verify(folder)
            except OtherFormat:
                raise
            except RunError as error:
                aside = folder.with_name(folder.name + ".damaged")
                shutil.rmtree(aside, ignore_errors=True)
                folder.rename(aside)
                before = folders.index(folder)
                end = "no other checkpoint is left, training starts at step 0"
                then = f"trying {folders[before - 1].name}" if before else end
                _LOG.warning(f"checkpoint not loaded: {error}; set aside as {aside.name}, {then}")
                continue
            saved = read_state(folder)
            if set(saved) != set(states):
                found = one_line(str([*saved]), 200)
                raise RunError(f"{folder} holds {found}, but this run needs {sorted(states)}")
            self._load(folder, saved, states)
            return manifest.step
        return None

    @staticmethod
    def _load(folder: Path, saved: Mapping[str, Any], states: Mapping[str, Stateful]) -> None:
        try:
            saved = _migrated(_placed(saved, states, folder / SHARDS), states)
            for name, part in states.items():
                if isinstance(part, torch.optim.Optimizer):
                    load_optimizer(part, saved[name])
                else:
                    fit(saved[name], part.state_dict(), name)
                    part.load_state_dict(saved[name])
        except (SpeechtrainError, OSError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # whatever a stranger's state makes the parts raise
            cause = f"{type(error).__name__}: {one_line(str(error), 200)}"
            raise RunError(f"{folder} does not fit this run ({cause}); set another run_dir") from error

    def weights(self, which: str = "best") -> tuple[Path, dict[str, Tensor]]:
        """The evaluated weights of a checkpoint: ``best``, ``last`` or a folder's name.

        ``best`` falls back to the newest if no evaluation has chosen one. Raises RunError.
        """
        folders = self.folders()
        if not folders:
            raise RunError(f"{self.root} holds no checkpoint; train first")
        if which == "best":
            folder = self.best()[0] or folders[-1]
        else:
            folder = folders[-1] if which == "last" else self.root / which
        self.verify(folder, only=WEIGHTS)
        try:
            return folder, load_file(folder / WEIGHTS)
        except (SafetensorError, KeyError, TypeError, RuntimeError, *MALFORMED) as error:
            cause = f"{type(error).__name__}: {one_line(str(error), 120)}"
            raise RunError(f"{folder / WEIGHTS} cannot be read ({cause}); use another checkpoint") from None

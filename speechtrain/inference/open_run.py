"""Opens a run, finished or in progress, for use: its config, its weights, its tokenizer.

Nothing is written and no lock is taken, so a run in progress may be opened at any time.
"""

from __future__ import annotations

import inspect
import logging
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

from speechtrain.checkpoint.migrations import migrate_names
from speechtrain.checkpoint.whole import Checkpointer
from speechtrain.compute_policy import ComputePolicy, apply_policy
from speechtrain.config.build import build_device, build_precision, build_tokenizer, size_of_network
from speechtrain.config.check import mismatch
from speechtrain.config.resume_fields import flat, key_of
from speechtrain.config.schema import PLACES
from speechtrain.config.targets import parameter_types, target_class
from speechtrain.devices.base import Device
from speechtrain.errors import ConfigError, RunError, first_line, nearest, one_line
from speechtrain.run_directory import CONFIG, read_device
from speechtrain.runs.auto_device import AUTO, auto_device
from speechtrain.runs.command_line import rewrite
from speechtrain.runs.compose import compose, override_value
from speechtrain.runs.on_host import restart_for
from speechtrain.task import Task
from speechtrain.text.vocabulary import Tokenizer
from speechtrain.train_rank import build_task, open_device, read_config
from speechtrain.training.autotune import recorded_policy

_LOG = logging.getLogger(__name__)
_CHOICES = ("device", "precision", "decoder")
"""Groups whose choice may change when a trained run is opened."""


@dataclass(frozen=True)
class OpenedRun:
    """A run's parts, ready for evaluation, and the checkpoint of its weights."""

    config: DictConfig
    checkpoint: Path
    device: Device
    policy: ComputePolicy
    task: Task
    tokenizer: Tokenizer


def own_config(run_dir: Path) -> DictConfig:
    """Load a run's stored config, with the paths of its present folder and of its tokenizer's copy there."""
    config = read_config(run_dir)
    _relocate(config, str(config.run_dir), str(run_dir.resolve()))
    return config


def _config_for_use(run_dir: Path) -> DictConfig:
    """Load a run's stored config, which does not choose where the commands that use the run write."""
    config = read_config(run_dir)
    _relocate(config, None, str(run_dir.resolve()))
    for key in ("cache", "stage"):
        if OmegaConf.is_dict(config.data) and key in config.data:
            config.data[key] = None
    return config


def _relocate(node: DictConfig, before: str | None, now: str) -> None:
    """Replace the run's former folder, or any with None, by the present one in every part that has it."""
    values: Any = OmegaConf.to_container(node)
    for key, value in values.items():
        if isinstance(value, dict):
            _relocate(node[key], before, now)
        elif key == "run_dir" and before in (None, str(value)):
            node[key] = now


def open_run(
    run_dir: Path, checkpoint: str, overrides: Sequence[str], config_dir: str | None = None
) -> OpenedRun:
    """Build a run's task with the weights of ``checkpoint`` (``best``, ``last`` or a folder's name).

    ``overrides`` are KEY=VALUE pairs on its config, such as ``device.threads=1``; the choice of the
    device, the precision and the decoder may change as well, also to one in ``config_dir``. Without a
    choice, the run's device is used if this host has it, else ``device=auto``, with a line in the log. Raises
    RunError if there is no run or no usable checkpoint, ConfigError for a key that the config lacks.
    """
    if not (run_dir / CONFIG).is_file():
        raise RunError(f"{run_dir} has no {CONFIG}; give the run directory that speechtrain train printed")
    config = _config_for_use(run_dir)
    auto_line = _apply_for_use(config, overrides, config_dir)
    folder, weights = read_weights(run_dir, checkpoint)
    restart_for(build_device(config))
    if auto_line:
        _LOG.warning(auto_line)
    device, precision = open_device(config, 0)
    policy = recorded_policy(read_device(run_dir), device, precision) or device.policy(precision.dtype)
    _check_size(config, weights, f"{folder} does not fit {run_dir / CONFIG}")
    task, tokenizer = build_task(config)
    apply_policy(task, policy)
    try:
        task.load_state_dict(migrate_names(weights, task.state_dict()))
    except RuntimeError as error:
        raise RunError(f"{folder} does not fit {run_dir / CONFIG}: {one_line(str(error), 200)}") from None
    task.to(device.tensor(torch.zeros(())).device)
    return OpenedRun(
        config=config, checkpoint=folder, device=device, policy=policy, task=task.eval(), tokenizer=tokenizer
    )


def _apply_for_use(config: DictConfig, overrides: Sequence[str], config_dir: str | None) -> str:
    """Apply ``overrides``. Return the line on ``device=auto`` if it is used, or an empty text.

    It replaces a device that this host lacks, unless ``overrides`` choose the device.
    If it lacks the run's precision, it computes in fp32.
    """
    values = {key_of(text): text.partition("=")[2] for text in overrides}
    device_keys = [text for text in overrides if key_of(text).startswith("device.")]
    apply_overrides(config, [text for text in overrides if text not in device_keys], config_dir)
    line = ""
    if values.get("device") == AUTO:
        line = str(auto_device())
    elif "device" not in values and build_device(config).obstacle():
        choose(config, "device", AUTO, config_dir)
        line = str(auto_device())
        if "precision" not in values and not build_device(config).supports(build_precision(config).dtype):
            choose(config, "precision", "fp32")
            line += ", precision=fp32"
    apply_overrides(config, device_keys)
    return line


def _check_size(config: DictConfig, weights: Mapping[str, Tensor], problem: str) -> None:
    """Raise RunError, which begins with ``problem``, for a network far larger than its stored weights.

    It is known before the network takes memory.
    """
    _, values = size_of_network(config, build_tokenizer(config))
    stored = sum(map(Tensor.numel, weights.values()))
    if values > 2 * stored:
        raise RunError(f"{problem}: {stored:,} of {values:,} weights")


def read_weights(run_dir: Path, checkpoint: str) -> tuple[Path, dict[str, Tensor]]:
    """Folder and verified weights of a checkpoint. Raises RunError, which lists the checkpoints."""
    checkpointer = Checkpointer(run_dir)
    names = [folder.name for folder in checkpointer.folders()]
    if checkpoint not in ("best", "last", *names) and names:
        near = nearest(checkpoint, ["best", "last", *names])
        raise RunError(
            f"{checkpointer.root} has no {checkpoint!r}{near}; choose best, last, {', '.join(names)}"
        )
    for _ in range(2):  # a run in progress may delete a checkpoint while it is read
        try:
            return checkpointer.weights(checkpoint)
        except OSError:
            continue
        except RunError:
            if names == (names := [folder.name for folder in checkpointer.folders()]):
                raise
    return checkpointer.weights(checkpoint)


def apply_overrides(config: DictConfig, overrides: Sequence[str], config_dir: str | None = None) -> None:
    """Set KEY=VALUE pairs in a config, as speechtrain train reads them. Raises ConfigError."""
    for override in overrides:
        key, _, text = override.partition("=")
        if key in _CHOICES and text:
            choose(config, key, text, config_dir)
            continue
        for rewritten in rewrite([override]):  # ``allow_targets=`` moves to the environment
            set_key(config, key, override_value(rewritten))


def choose(config: DictConfig, group: str, choice: str, config_dir: str | None = None) -> None:
    """Replace a group of a run's config by another choice, whose interpolations that config resolves."""
    node = compose([f"{PLACES.get(group, group)}={choice}"], config_dir)[group]
    config[group] = OmegaConf.create(OmegaConf.to_container(node, resolve=False))


def set_key(config: DictConfig, key: str, value: Any) -> None:
    """Set one key of a run's config. Raises ConfigError for an unknown key or a value of another type."""
    try:
        parent, leaf = _parent(config, key)
        values: Any = OmegaConf.to_container(parent)
        if isinstance(values[leaf], dict) and not isinstance(value, Mapping | DictConfig):
            raise ConfigError(f"{key}: a trained run keeps its {key}; set keys below it, as {key}.KEY=VALUE")
        OmegaConf.update(config, key, value, merge=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key}: {first_line(error)}") from None
    _check_type(parent, key, leaf)


def stored_value(config: DictConfig, key: str) -> Any:
    """A run's value of a key. Raises ConfigError for an unknown key."""
    parent, leaf = _parent(config, key)
    value = parent[leaf]
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _parent(config: DictConfig, key: str) -> tuple[DictConfig, str]:
    """The node of ``key`` and its last part; a key newer than the run gets its constructor's default."""
    parent_key, _, leaf = key.rpartition(".")
    parent: Any = OmegaConf.select(config, parent_key) if parent_key else config
    if isinstance(parent, DictConfig) and "_target_" in parent and not _has_key(parent, leaf):
        known = inspect.signature(target_class(str(parent._target_), parent_key)).parameters.get(leaf)
        if known is not None and known.default is not known.empty:
            parent[leaf] = known.default
    if not isinstance(parent, DictConfig) or not _has_key(parent, leaf):
        raise ConfigError(f"{key}: the run's config has no such key{_near(config, key)}")
    return parent, leaf


def _has_key(node: DictConfig, key: str) -> bool:
    """Return whether a node has the key, also if its value is ``???``, which ``in`` takes as absent."""
    return OmegaConf.is_missing(node, key) or key in node


def _near(config: DictConfig, key: str) -> str:
    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, dict)
    values = flat(typing.cast("dict[str, Any]", plain)).items()
    return nearest(key, [k for k, v in values if k.rpartition(".")[2] != "_target_" and v != {}])


def _check_type(parent: DictConfig, key: str, leaf: str) -> None:
    """Raise ConfigError if the value just set does not fit its constructor's parameter."""
    if "_target_" not in parent:
        return
    found = target_class(str(parent["_target_"]), key.rpartition(".")[0])
    value = OmegaConf.to_container(parent, resolve=True)[leaf]  # type: ignore[call-overload,index]
    if problem := mismatch(value, parameter_types(found).get(leaf, Any)):
        raise ConfigError(f"{key}: {problem}")

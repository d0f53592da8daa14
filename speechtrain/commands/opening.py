"""A finished or running run, opened to be used: its config, its weights, its tokenizer."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from speechtrain.checkpoint import Checkpointer
from speechtrain.config import ALLOW_TARGETS, load, target_class
from speechtrain.devices.base import Device
from speechtrain.errors import ConfigError, RunError
from speechtrain.precision import Precision
from speechtrain.run import CONFIG
from speechtrain.task import Task
from speechtrain.text.vocabulary import Tokenizer
from speechtrain.worker import build_task, open_device


@dataclass(frozen=True)
class OpenedRun:
    """A run's parts, ready for evaluation, and the checkpoint that its weights are from."""

    config: DictConfig
    checkpoint: Path
    device: Device
    precision: Precision
    task: Task
    tokenizer: Tokenizer


def open_run(run_dir: Path, checkpoint: str, overrides: list[str]) -> OpenedRun:
    """Build a run's task with the weights of ``checkpoint`` (``best``, ``last`` or a folder's name).

    ``overrides`` are KEY=VALUE pairs on its config, such as ``device.threads=1``. Raises RunError
    where there is no run, ConfigError for a key that the run's config does not have.
    """
    if not (run_dir / CONFIG).is_file():
        raise RunError(f"{run_dir} holds no {CONFIG}; give the run directory that speechtrain-train printed")
    config = load(run_dir / CONFIG)
    config.run_dir = str(run_dir.resolve())
    apply_overrides(config, overrides)
    tokenizer_class = target_class(str(config.tokenizer._target_), "tokenizer")
    config.tokenizer.update(tokenizer_class.saved(str(run_dir)))  # type: ignore[attr-defined]
    folder, weights = Checkpointer(run_dir).weights(checkpoint)
    device, precision = open_device(config, 0)
    task, tokenizer = build_task(config)
    try:
        task.load_state_dict(weights)
    except RuntimeError as error:
        raise RunError(f"{folder} does not fit {run_dir / CONFIG}: {' '.join(str(error).split())[:200]}") from None
    return OpenedRun(config, folder, device, precision, task.eval(), tokenizer)


def apply_overrides(config: DictConfig, overrides: list[str]) -> None:
    """Set KEY=VALUE pairs; ``allow_targets=`` goes to the environment. Raises ConfigError."""
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"{override!r} is no KEY=VALUE")
        if key == "allow_targets":
            os.environ[ALLOW_TARGETS] = text
            continue
        try:
            value: Any = OmegaConf.from_dotlist([override])
            before = OmegaConf.select(config, key.rpartition(".")[0]) if "." in key else config
        except Exception as error:
            raise ConfigError(f"{override!r} cannot be read: {error}") from None
        if before is None or key.rpartition(".")[2] not in before:
            raise ConfigError(f"{key}: the run's config has no such key")
        config.merge_with(value)

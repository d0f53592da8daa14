"""Opens a run, finished or in progress, for use: its config, its weights, its tokenizer.

Nothing is written and no lock is taken, so a run in progress may be opened at any time.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from speechtrain.checkpoint.migrations import migrate_names
from speechtrain.checkpoint.whole import Checkpointer
from speechtrain.compute_policy import ComputePolicy, apply_policy
from speechtrain.config.build import build_device, build_precision, build_tokenizer, size_of_network
from speechtrain.config.resume_fields import key_of
from speechtrain.config.stored import read_config
from speechtrain.devices.base import Device
from speechtrain.errors import RunError, nearest, one_line
from speechtrain.rank.build import build_task, open_device
from speechtrain.run_directory import CONFIG, read_device
from speechtrain.runs.auto_device import AUTO, auto_device
from speechtrain.runs.on_host import restart_for
from speechtrain.runs.stored_config import apply_overrides, choose, relocate
from speechtrain.task import Task
from speechtrain.text.vocabulary import Tokenizer
from speechtrain.training.autotune import recorded_policy

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenedRun:
    """A run's parts, ready for evaluation, and the checkpoint of its weights."""

    config: DictConfig
    checkpoint: Path
    device: Device
    policy: ComputePolicy
    task: Task
    tokenizer: Tokenizer


def _config_for_use(run_dir: Path) -> DictConfig:
    """Load a run's stored config, which does not choose where the commands that use the run write."""
    config = read_config(run_dir)
    relocate(config, None, str(run_dir.resolve()))
    for key in ("cache", "stage"):
        if OmegaConf.is_dict(config.data) and key in config.data:
            config.data[key] = None
    return config


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

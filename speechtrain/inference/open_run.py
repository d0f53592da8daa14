"""Open a run for use, for example to transcribe: its config, its weights and its tokenizer.

The module writes no files and locks nothing, so a run in progress may be opened at any time.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from speechtrain.checkpoint.whole import Checkpointer
from speechtrain.compute_policy import ComputePolicy, apply_policy
from speechtrain.devices.base import Device
from speechtrain.errors import RunError, nearest, one_line
from speechtrain.overrides import key_of_override
from speechtrain.rank.build import build_task, open_device
from speechtrain.run_directory import CONFIG, read_device
from speechtrain.start.auto_device import AUTO, auto_device
from speechtrain.start.build import build_device, build_precision, build_tokenizer, size_of_network
from speechtrain.start.on_host import restart_for
from speechtrain.start.stored import read_config
from speechtrain.start.stored_config import apply_overrides, relocate, set_group
from speechtrain.task import Task
from speechtrain.text.vocabulary import Tokenizer
from speechtrain.training.autotune import recorded_policy

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenedRun:
    """A run's parts, ready for evaluation, and the checkpoint of its weights."""

    config: DictConfig
    checkpoint: Path  # the folder of the checkpoint
    device: Device
    policy: ComputePolicy
    task: Task  # on the device, in eval mode
    tokenizer: Tokenizer


def open_run(
    run_dir: Path, checkpoint: str, overrides: Sequence[str], config_dir: str | None = None
) -> OpenedRun:
    """Build a run's task with the weights of ``checkpoint`` (``best``, ``last`` or a folder's name).

    ``overrides`` are KEY=VALUE pairs for the run's config, such as ``device.threads=1``. They may also choose
    another device, precision or decoder, also from the folder ``config_dir``. Without a choice of the device,
    the run's device is used if this host has it. Otherwise ``device=auto`` is used, and a log line says so.

    Raises RunError without a run or a usable checkpoint, and ConfigError for a key that the config lacks.
    """
    if not (run_dir / CONFIG).is_file():
        raise RunError(f"{run_dir} has no {CONFIG}. Give the run directory that speechtrain train printed")
    config = _config_for_use(run_dir)
    auto_device_line = _apply_overrides_for_host(config, overrides, config_dir)
    folder, weights = read_weights(run_dir, checkpoint)
    # The device may need environment variables before Python starts. Then this process starts again here.
    restart_for(build_device(config))
    if auto_device_line:
        _LOG.warning(auto_device_line)
    device, precision = open_device(config, 0)
    policy = recorded_policy(read_device(run_dir), device, precision)
    if policy is None:  # This device is not the device for which training chose its kernels.
        policy = device.policy(precision.dtype)
    misfit = f"{folder} does not fit {run_dir / CONFIG}"
    _check_size(config, weights, misfit)
    task, tokenizer = build_task(config)
    apply_policy(task, policy)
    try:
        task.load_state_dict(weights)
    except RuntimeError as error:
        raise RunError(f"{misfit}: {one_line(str(error), 200)}") from None
    torch_device = device.tensor(torch.zeros(())).device
    task.to(torch_device)
    return OpenedRun(config, folder, device, policy, task=task.eval(), tokenizer=tokenizer)


def _config_for_use(run_dir: Path) -> DictConfig:
    """Return the run's stored config, without the folders for the cache and for staged data.

    Commands that use a run do not write to these folders.
    """
    config = read_config(run_dir)
    # None means that any stored ``run_dir`` is replaced. The run may have been moved to ``run_dir``.
    relocate(config, None, str(run_dir.resolve()))
    for key in ("cache", "stage"):
        if OmegaConf.is_dict(config.data) and key in config.data:
            config.data[key] = None
    return config


def _apply_overrides_for_host(config: DictConfig, overrides: Sequence[str], config_dir: str | None) -> str:
    """Apply ``overrides`` to ``config``. Return the log line of ``device=auto``, empty if it is not used.

    - ``device=auto`` replaces a device that this host lacks, unless ``overrides`` choose the device.
    - If the replacement does not support the run's precision, fp32 replaces the precision, unless
      ``overrides`` choose the precision.
    """
    choices = {}
    device_overrides = []
    other_overrides = []
    for override in overrides:
        key = key_of_override(override)
        _, _, choices[key] = override.partition("=")
        if key.startswith("device."):
            device_overrides.append(override)
        else:
            other_overrides.append(override)
    apply_overrides(config, other_overrides, config_dir)
    line = ""
    if choices.get("device") == AUTO:
        line = str(auto_device())
    elif "device" not in choices and build_device(config).obstacle():
        set_group(config, "device", AUTO, config_dir)
        line = str(auto_device())
        dtype = build_precision(config).dtype
        if "precision" not in choices and not build_device(config).supports(dtype):
            set_group(config, "precision", "fp32")
            line += ", precision=fp32"
    # The device's keys are set last, because a new choice of the device replaces all its keys.
    apply_overrides(config, device_overrides)
    return line


def _check_size(config: DictConfig, weights: Mapping[str, Tensor], misfit: str) -> None:
    """Raise RunError if the config describes a network of more than twice the stored weights.

    A changed config could otherwise exhaust the memory. This check allocates no memory for the network. The
    error begins with ``misfit``.
    """
    _, network_size = size_of_network(config, build_tokenizer(config))
    stored_size = sum([tensor.numel() for tensor in weights.values()])
    if network_size > 2 * stored_size:
        raise RunError(f"{misfit}: {stored_size:,} of {network_size:,} weights")


def read_weights(run_dir: Path, checkpoint: str) -> tuple[Path, dict[str, Tensor]]:
    """Return the folder and the verified weights of a checkpoint: ``best``, ``last`` or a folder's name.

    Raises RunError if the checkpoint does not exist or is damaged.
    """
    checkpointer = Checkpointer(run_dir)
    names = [folder.name for folder in checkpointer.folders()]
    choices = ["best", "last", *names]
    if names and checkpoint not in choices:
        suggestion = nearest(checkpoint, choices)
        raise RunError(f"{checkpointer.root} has no {checkpoint!r}: choose {', '.join(choices)}{suggestion}")
    # A run in progress may delete a checkpoint while it is read here. ``best`` or ``last`` then means another
    # checkpoint, so it is read again. An error of the third attempt is raised.
    for _ in range(2):
        try:
            return checkpointer.weights(checkpoint)
        except OSError:  # A file was deleted before it was read.
            continue
        except RunError:  # The checkpoint is damaged, or some of its files have been deleted.
            earlier_names = names
            names = [folder.name for folder in checkpointer.folders()]
            if names == earlier_names:  # No checkpoint was deleted, so the error stays.
                raise
    return checkpointer.weights(checkpoint)

"""Open a run for use, for example to transcribe: its config, its weights and its tokenizer.

The module writes no files and locks nothing, so a run in progress may be opened at any time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from speechtrain.checkpoint.checkpointer import Checkpointer
from speechtrain.compute_policy import ComputePolicy, apply_policy
from speechtrain.devices.base import Device
from speechtrain.errors import RunError, nearest, one_line
from speechtrain.rank.build import build_task, open_device
from speechtrain.run_directory import CONFIG, read_device
from speechtrain.start.build import network_without_values
from speechtrain.start.on_host import restart_for
from speechtrain.start.run_config import RunConfig
from speechtrain.start.used_run import UsedRun, read_used_run
from speechtrain.task import Task
from speechtrain.text.vocabulary import Tokenizer
from speechtrain.training.autotune import recorded_policy

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenedRun:
    """A run's parts, ready for evaluation, and the checkpoint of its weights."""

    used: UsedRun
    checkpoint: Path  # the folder of the checkpoint
    device: Device
    policy: ComputePolicy
    task: Task  # on the device, in eval mode
    tokenizer: Tokenizer

    @property
    def run(self) -> RunConfig:
        return self.used.run


def open_run(
    run_dir: Path, checkpoint: str, overrides: Sequence[str], config_dir: str | None = None
) -> OpenedRun:
    """Build a run's task with the weights of ``checkpoint`` (``best``, ``last`` or a folder's name).

    ``overrides`` are KEY=VALUE pairs for the run's config, as in ``read_used_run``. A log line says if
    another device replaces the run's device.

    Raises RunError without a run or a usable checkpoint, and ConfigError for a key that the config lacks.
    """
    if not (run_dir / CONFIG).is_file():
        raise RunError(f"{run_dir} has no {CONFIG}. Give the run directory that speechtrain train printed")
    used = read_used_run(run_dir, overrides, config_dir)
    run = used.run
    folder, weights = read_weights(run_dir, checkpoint)
    # The device may need environment variables before Python starts. Then this process starts again here.
    device = run.device.build()
    restart_for(device)
    if used.device_line:
        _LOG.warning(used.device_line)
    precision = open_device(device, run.precision.build())
    policy = recorded_policy(read_device(run_dir), device, precision)
    if policy is None:  # This device is not the device for which training chose its kernels.
        policy = device.policy(precision.dtype)
    misfit = f"{folder} does not fit {run_dir / CONFIG}"
    # A changed config could describe a network that exhausts the memory. This one has no values.
    network = network_without_values(run, run.tokenizer.build())
    if network is not None:
        _, model = network
        network_size = sum(p.numel() for p in model.parameters())
        stored_size = sum([tensor.numel() for tensor in weights.values()])
        if network_size > 2 * stored_size:
            raise RunError(f"{misfit}: {stored_size:,} of {network_size:,} weights")
    task, tokenizer = build_task(run)
    apply_policy(task, policy)
    try:
        task.load_state_dict(weights)
    except RuntimeError as error:
        raise RunError(f"{misfit}: {one_line(str(error), 200)}") from None
    torch_device = device.tensor(torch.zeros(())).device
    task.to(torch_device)
    return OpenedRun(used, folder, device, policy, task=task.eval(), tokenizer=tokenizer)


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

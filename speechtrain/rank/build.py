"""Builds the parts of a rank from a resolved config: device, group of ranks, task, weights and schedule."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speechtrain.checkpoint.checkpointer import Checkpointer
from speechtrain.counter_rng import RunStream, seed_at
from speechtrain.data.base import DataModule
from speechtrain.devices.base import Device
from speechtrain.distributed.group import Group, open_group
from speechtrain.distributed.world import World
from speechtrain.errors import ConfigError, MachineError
from speechtrain.optim.schedules import Schedule
from speechtrain.precision import FP32, Precision
from speechtrain.rank.hang import MARGIN_SECONDS, START_SECONDS
from speechtrain.start.build import build_encoder, build_model, initial_run
from speechtrain.start.run_config import RunConfig
from speechtrain.start.stored import read_tokenizer
from speechtrain.task import Task
from speechtrain.text.vocabulary import Tokenizer
from speechtrain.trainer_config import TrainerConfig, is_planned_by_time, planned_steps
from speechtrain.training.recompute import checkpoint_layers

_LOG = logging.getLogger(__name__)
_MOST_SHOWN_LABELS = 10


def open_device(device: Device, precision: Precision, local_rank: int = 0) -> Precision:
    """Open the device for this rank, and return the precision in which it computes.

    It is fp32 if the chip has no instructions for ``precision``. Raises MachineError if the device does not
    support the precision.
    """
    device.check_precision(precision)
    device.open(local_rank)
    reason = device.precision_fallback_reason(precision.dtype)
    if reason:
        _LOG.warning(f"precision={precision.name}: {reason}")
        return FP32()
    return precision


def build_task(run: RunConfig) -> tuple[Task, Tokenizer]:
    """Return the task, whose weights are initialised with the run's seed, and its tokenizer.

    Raises ConfigError for words of a decoder that the tokenizer cannot write.
    """
    tokenizer = run.tokenizer.build()
    # The generators of other devices keep their state, because the process may be another program.
    torch.default_generator.manual_seed(seed_at(run.seed, RunStream.INITIAL_WEIGHTS))
    task = build_model(run, tokenizer, build_encoder(run))
    if task.writes_text:
        task.decoder.check(tokenizer)
        task.final_decoder.check(tokenizer)
    if run.trainer.checkpoint_layers:
        checkpoint_layers(task)
    return task, tokenizer


def load_initial_weights(run: RunConfig, task: Task, tokenizer: Tokenizer) -> dict[str, Any]:
    """Load the weights at ``init_from`` into the task of a new run.

    Return entries for the start line of the log: the numbers of loaded and of newly initialised tensors. If
    the two runs have different labels, the rows of the labels that both have are loaded, and the rows of the
    other labels are newly initialised.
    """
    path = run.init_from
    if not path:
        return {}
    from speechtrain.interop.weights import initialise, read_weights

    weights = read_weights(path)
    labels, old_labels = tokenizer.labels, _labels_of_weights(run)
    entries = {}
    # A model without text, such as a pre-trained encoder, has the labels [] and no rows of labels.
    if old_labels not in ([], labels):
        axes = _label_axes(run, task, tokenizer)
        stored = {name: weights.pop(name) for name in axes if name in weights}
        if stored and old_labels is None:
            entries["labels kept"] = f"0 of {len(labels)} (the labels of {path} are unknown)"
        elif stored and old_labels is not None:
            entries["labels kept"] = _labels_kept(labels, old_labels)
            for name, tensor in stored.items():
                fresh = task.state_dict()[name]
                weights[name] = _with_kept_rows(fresh, tensor, axes[name], labels, old_labels)
    report = initialise(task, weights, path)
    return {"tensors taken over": len(report.loaded), "fresh": len(report.fresh), **entries}


def _labels_kept(labels: Sequence[str], old_labels: Sequence[str]) -> str:
    """Return how many of ``labels`` are among ``old_labels``, and the first of the others."""
    fresh_labels = [repr(label) for label in labels if label not in old_labels]
    count = f"{len(labels) - len(fresh_labels)} of {len(labels)}"
    if len(fresh_labels) > _MOST_SHOWN_LABELS:
        fresh_labels[_MOST_SHOWN_LABELS:] = ["…"]
    return f"{count} (fresh: {' '.join(fresh_labels)})" if fresh_labels else count


def _with_kept_rows(
    fresh: Tensor, stored: Tensor, axis: int, labels: Sequence[str], old_labels: Sequence[str]
) -> Tensor:
    """Return ``fresh`` with the rows of ``stored`` for the labels that both have, and for the blank.

    The rows lie along ``axis``. If ``stored`` has another shape beside that axis, it is returned, and
    ``initialise`` refuses it.
    """
    old_rows = {label: row for row, label in enumerate(old_labels)}
    pairs = [(row, old_rows[label]) for row, label in enumerate(labels) if label in old_rows]
    # The rows of the blank and of a TDT joint's durations follow those of the labels.
    rest, old_rest = fresh.shape[axis] - len(labels), stored.shape[axis] - len(old_labels)
    kept_rest = rest if rest == old_rest else min(rest, old_rest, 1)
    pairs += [(len(labels) + row, len(old_labels) + row) for row in range(kept_rest)]
    target, source = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).unbind(1)
    try:
        return fresh.index_copy(axis, target, stored.index_select(axis, source).to(fresh.dtype))
    except (IndexError, RuntimeError):
        return stored


def _labels_of_weights(run: RunConfig) -> list[str] | None:
    """Return the labels of the model at ``init_from``, or None if they are not known."""
    from speechtrain.interop.weights import read_labels

    run_dir = initial_run(run)
    if run_dir is None:
        return read_labels(str(run.init_from))
    return read_tokenizer(run_dir).labels


def _label_axes(run: RunConfig, task: Task, tokenizer: Tokenizer) -> dict[str, int]:
    """Return the axis along which a tensor has a row for each label, by the name of the tensor.

    The axes are found by a comparison with a second model, which is built for twice as many labels.
    """
    longer_tokenizer = copy.copy(tokenizer)
    longer_tokenizer.labels = tokenizer.labels * 2
    longer_tensors = build_model(run, longer_tokenizer, build_encoder(run)).state_dict()
    axes = {}
    for name, tensor in task.state_dict().items():
        for axis, size in enumerate(tensor.shape):
            if size != longer_tensors[name].shape[axis]:
                axes[name] = axis
    return axes


def seed_everything(seed: int) -> None:
    """Seed the generators that libraries may use. This project itself uses ``counter_rng``."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def trainer_config_for(run: RunConfig, world: World) -> TrainerConfig:
    """Return the trainer's settings, with the micro-batches of an update divided among the ranks.

    Raises MachineError if the number of ranks is not ``run.world_size``, and ConfigError if it does not
    divide the micro-batches.
    """
    if world.size != run.world_size:
        raise MachineError(
            f"WORLD_SIZE={world.size} in the environment, but the run has world_size={run.world_size}. "
            "Unset RANK and WORLD_SIZE, or start that many processes"
        )
    settings = replace(run.trainer)
    settings.divide_micro_batches(world.size)
    return settings


def open_ranks(
    settings: TrainerConfig, world: World, device: Device, run_dir: Path
) -> tuple[Group, Checkpointer]:
    """Return the group that connects the ranks of this run, and the checkpointer.

    If ``trainer.shard`` is set and there are several ranks, both are for sharded parameters. Raises
    ConfigError if the device cannot shard.
    """
    # Before the first step, a rank may wait for START_SECONDS.
    timeout = max(settings.timeout_seconds, START_SECONDS) + MARGIN_SECONDS
    if settings.shard == "none" or world.size == 1:
        return open_group(world, device.facts, timeout), Checkpointer(run_dir, settings.keep)
    if not device.facts.fsdp:
        raise ConfigError(
            f"trainer.shard={settings.shard}: device={device.name} needs whole parameters. "
            "Use trainer.shard=none"
        )
    # These imports take a second, so they are not at the top.
    from speechtrain.checkpoint.sharded import ShardedCheckpointer
    from speechtrain.distributed.fsdp import ShardedGroup

    group = ShardedGroup(world, device.facts, timeout)
    return group, ShardedCheckpointer(run_dir, settings.keep, group)


def plan_updates(run: RunConfig, settings: TrainerConfig, data: DataModule) -> tuple[Schedule, int | None]:
    """Return the learning rate schedule and the planned number of updates.

    The number is None if the settings limit the run neither by updates nor by epochs.

    Warnings about the data, and about a schedule that does not fit the run, are logged.
    """
    updates_per_epoch = data.micro_batches_per_epoch / (run.world_size * settings.accumulate)
    planned_updates = planned_steps(settings, updates_per_epoch)
    # If the run is planned by time, the trainer sets the schedule's length later, when it has timed updates.
    schedule_updates = 1 if is_planned_by_time(settings) else planned_updates
    schedule = run.schedule.build(
        steps_per_epoch=max(1, round(updates_per_epoch)), planned_steps=schedule_updates
    )
    for warning in data.warnings():
        _LOG.warning(warning)
    if not data.valid():
        _LOG.warning("data.valid is empty: nothing chooses the best checkpoint. Add data.valid.NAME=FILE")
    if planned_updates and planned_updates <= schedule.warmup:
        _LOG.warning(
            f"the warm-up takes {schedule.warmup} of {planned_updates} updates. Change schedule.warmup_*"
        )
    schedule_steps = getattr(schedule, "steps", None)
    if planned_updates and schedule_steps and schedule_steps < planned_updates:
        rest = f"the last {planned_updates - schedule_steps} of {planned_updates} updates"
        _LOG.warning(f"schedule.steps={schedule_steps}: {rest} have the learning rate of its end")
    return schedule, planned_updates

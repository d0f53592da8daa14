"""Whole updates of the trainer on the CPU, watched for a device that this machine lacks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import torch
from omegaconf import DictConfig

from speechtrain.batch import Batch
from speechtrain.compute_policy import ComputePolicy, apply_policy
from speechtrain.data.base import DataModule
from speechtrain.devices.base import Device
from speechtrain.optim.ema import EMA
from speechtrain.rank.trial_steps import batches_by_size, select_rows
from speechtrain.start.build import build_optimizer
from speechtrain.start.run_config import part_of, run_config
from speechtrain.task import Task
from speechtrain.tracking.group import Trackers
from speechtrain.trainer_config import TrainerConfig
from speechtrain.training.run_state import Parts, Progress
from speechtrain.training.trainer import Trainer
from tools.rehearsal.operations import operations_of
from tools.rehearsal.recorder import RecordedDevice, Recorder

CROSSINGS = {
    "optim/optimizer_step.py:HostCheckedUpdate._is_finite": "the host skips an update that is not finite",
    # Python 3.11 runs a comprehension as a function, and later versions do not.
    "optim/adamw.py:AdamW._correct_settings": "the count of a fused kernel, with another form than torch",
    "optim/adamw.py:AdamW._correct_settings.<locals>.<listcomp>": "the same",
    "optim/adamw8bit.py:_maps": "the values of the codes, once",
    "dtensor.py:all_finite": "after an update that is not finite, in fp16",
    "compute_policy.py:ComputePolicy.lengths_on_host": "the lengths, with split_segments and joint_rows",
    "optim/optimizer_step.py:BranchFreeUpdate.results": "with a log line",
    "training/trainer.py:Trainer.log": "with a log line",
    "metrics.py:MetricSums._read_all": "with a log line",
    "optim/optimizer_step.py:_flag": "the flag of an update, on devices with static shapes",
    "optim/ema.py:EMA.update": "the decay, on devices with static shapes",
    # The cells of the ragged transducer loss depend on lengths and occupancies.
    "losses/transducer.py:_check_values": "lengths and labels out of range",
    "losses/transducer_ragged.py:RaggedJoint._groups": "the cells of each row",
    "losses/transducer_ragged.py:RaggedJoint._fill_arcs": "the cells of a group",
    "losses/transducer_ragged.py:RaggedJoint.add_gradients": "the cells with a gradient",
    "losses/transducer.py:_RaggedLoss.backward": "whether the gradients can be scaled",
    "losses/ctc.py:ctc_loss": "lengths that the device computes, with trim_silence_db",
}
"""The functions that may read values of the device and copy to it in an update, with the reason."""

_MAX_SECONDS = 20.0  # audio of a watched batch of several rows. All rows of a large model would take minutes.
_BATCHES = 4  # batches of the smallest shape
_LOG_EVERY = 2
_WARM_UPS, _UPDATES = 2, 2  # The first update creates the optimizer's state. Each second one has a log line.
_NEVER = 10**9


class RecordedUpdates:
    """Whole updates of ``task`` under a recorder: batch, forward, backward, optimizer, average, log line.

    They follow ``policy`` of ``device``. At most two micro-batches are accumulated. ``folder`` exists, and
    nothing is written there.
    """

    def __init__(
        self,
        config: DictConfig,
        data: DataModule,
        task: Task,
        device: Device,
        policy: ComputePolicy,
        folder: Path,
    ) -> None:
        operations = operations_of(device)
        if policy.autocast_dtype == torch.float16:
            # The operations are the same, and products of fp16 take 20 times as long on a CPU.
            policy = replace(policy, autocast_dtype=torch.bfloat16)
        if policy.compiler:  # The sizes of these graphs are compared by a counting backend.
            operations = replace(operations, largest_graph=0)
        self.recorder = Recorder(operations, CROSSINGS)
        self.data, self.task = data, task
        self.policy = replace(policy, mark_step=self.recorder.mark_step)
        apply_policy(task.train(), self.policy)
        self.trainer = Trainer(
            _settings(config), RecordedDevice(device, self.recorder), folder, Trackers(),
            precision=part_of(config, "precision").build(), seed=config.seed, policy=self.policy,
        )  # fmt: skip
        optimizer = build_optimizer(
            run_config(config), task.parameter_groups(), **device.facts.optimizer_flags
        )
        self.recorder.allow_numbers(optimizer)
        schedule = part_of(config, "schedule").build(steps_per_epoch=_NEVER, planned_steps=_NEVER)
        self.parts = Parts(
            task=task,
            data=data,
            optimizer=optimizer,
            schedule=schedule,
            average=EMA(task, 0.999),
            precision=self.trainer.precision,
            progress=self.trainer.progress,
            updates_per_epoch=_NEVER,
        )
        self.parts.progress.backward_divisor = 1.0  # A run reads a batch once to choose it.

    def run(self) -> str:
        """Run updates of the smallest shape, an evaluation of it, and an update of the longest recording.

        A large batch of the smallest shape has fewer rows, because operations, reads and copies do not depend
        on their number. The longest recording is one row of the largest shape, because all rows would take
        minutes on a CPU. If the device records graphs, the first updates learn the graphs of the smallest
        shape. Return a line with ``costs``, the costs of the last update of the smallest shape, and with the
        graphs. Raises Unfit with the line of code if the device does not allow a part of an update.
        """
        recorder = self.recorder
        self.trainer.planning.start(self.parts)
        batches = batches_by_size(self.data, lambda total: range(min(_BATCHES, total)))
        seconds_per_row = batches[0].audio.shape[1] / self.task.sample_rate
        rows = slice(max(2, int(_MAX_SECONDS / seconds_per_row)))
        small_batches = [select_rows(batch, rows) for batch in batches if _shape(batch) == _shape(batches[0])]
        large_batch = _with_longest_row(self.data)
        stream = itertools.cycle(small_batches)
        self._update(stream, _WARM_UPS, recorder.warm_up())
        self._update(stream, _UPDATES - 1, recorder)
        recorder.clear()
        self._update(stream, 1, recorder)
        self.costs = recorder.costs
        recorder.clear()
        self._evaluate(small_batches[0])
        # A CTC loss without the vendor's kernel has a graph that grows with the recording.
        recorder.operations = replace(recorder.operations, largest_graph=0)
        self._update(itertools.repeat(large_batch), 1, recorder.warm_up())
        shapes = [" × ".join(map(str, batch.audio.shape)) for batch in (small_batches[0], large_batch)]
        line = f"updates of {shapes[0]} and {shapes[1]} samples. The first shape has {self.costs}"
        graphs = recorder.segments
        if recorder.operations.records and not self.policy.compiler:
            line += f", {len(graphs)} graphs, {recorder.distinct} of them distinct, of up to {max(graphs):,}"
        return line

    def _update(self, batches: Iterator[Batch], count: int, watch: AbstractContextManager[object]) -> None:
        """Run ``count`` updates in ``watch``, the context in which the recorder sees the operations."""
        host_batches = (batch.to(self.recorder.keep_on_host) for batch in batches)
        with watch:
            for _ in range(count):
                update = self.trainer.run_update(self.parts, self.task, host_batches)
                has_line = self.trainer.progress.step % _LOG_EVERY == 0
                self.trainer.update.results(has_line)
                if has_line:
                    self.trainer.log(self.parts, update, update.batch.sums, since=Progress())

    def _evaluate(self, batch: Batch) -> None:
        prepared = self.recorder.move(self.task.prepare(batch, seed=0))
        with self.recorder.warm_up(), torch.no_grad(), self.policy.autocast("cpu"):
            self.task.eval()(prepared)
        self.task.train()


def _settings(config: DictConfig) -> TrainerConfig:
    settings = TrainerConfig(**{str(name): setting for name, setting in config.trainer.items()})
    settings.divide_micro_batches(1)
    return replace(
        settings, max_steps=None, max_epochs=None, max_hours=None, target=None, validate_every=_NEVER,
        save_every=None, log_every=_LOG_EVERY, accumulate=min(2, settings.accumulate), profile="",
    )  # fmt: skip


def _with_longest_row(data: DataModule) -> Batch:
    """Return the longest row of the micro-batch with the most audio, as a batch of its shape with one row."""
    batch = batches_by_size(data, lambda total: [total - 1])[0]
    row = int(batch.audio_lengths.argmax())
    return select_rows(batch, slice(row, row + 1))


def _shape(batch: Batch) -> tuple[torch.Size, torch.Size]:
    return batch.audio.shape, batch.labels.shape

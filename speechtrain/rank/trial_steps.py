"""Training steps on a recipe's own batches, with which ``speechtrain doctor`` tests memory and speed."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from speechtrain.batch import Batch
from speechtrain.compute_policy import ComputePolicy, apply_policy, compile_module, usable_cpus
from speechtrain.data.base import DataModule
from speechtrain.data.module import SpeechData
from speechtrain.devices.base import Device
from speechtrain.precision import Precision
from speechtrain.start.build import build_optimizer
from speechtrain.start.run_config import RunConfig
from speechtrain.task import Task
from speechtrain.training.autotune import choose_policy

_TIMED_BATCHES = 8  # micro-batches whose steps are timed, to predict the time of an epoch


def _spread_positions(total: int) -> list[int]:
    """Return ``_TIMED_BATCHES`` positions below ``total``, each in the middle of one of as many intervals."""
    count = min(_TIMED_BATCHES, total)
    return [total * (2 * interval + 1) // (2 * count) for interval in range(count)]


def batches_by_size(data: DataModule, positions_of: Callable[[int], Sequence[int]]) -> list[Batch]:
    """Return micro-batches of the first epoch by their positions in the order of their size.

    ``positions_of`` maps the number of micro-batches to the positions. The smallest micro-batch has position
    0. If the data has no sampler, its first batches are returned instead.
    """
    if not isinstance(data, SpeechData):
        count = len(positions_of(_TIMED_BATCHES))
        return list(itertools.islice(data.train(), count))
    batches = data.sampler.epoch_batches(0)
    order = data.sampler.tensor_sizes(0).argsort(kind="stable")
    positions = list(positions_of(len(order)))
    numbers = order[positions].tolist()
    return [data.loader(batches[number]) for number in numbers]


def select_rows(batch: Batch, rows: slice) -> Batch:
    ids, texts, unspoken = batch.ids[rows], batch.texts[rows], batch.unspoken[rows]
    return replace(batch.to(lambda tensor: tensor[rows]), ids=ids, texts=texts, unspoken=unspoken)


class TrialSteps:
    """Complete training steps of a task on its device, with the compute policy that a run would choose."""

    def __init__(
        self, run: RunConfig, data: DataModule, task: Task, device: Device, precision: Precision
    ) -> None:
        record = choose_policy(None, device, precision, task=task, data=data)
        policy = ComputePolicy.from_record(record.policy)
        assert policy is not None
        self.policy = device.attach(policy)
        apply_policy(task, self.policy)
        compile_module(task, self.policy, len(data.shapes()))
        optimizer = build_optimizer(run, task.parameter_groups(), **device.facts.optimizer_flags)
        _, self.optimizer = device.prepare(task, optimizer)
        self.task, self.device = task, device

    def __call__(self, batch: Batch) -> tuple[float, float]:
        """Make one update with ``batch``. Return the loss per unit of weight, and the seconds.

        Raises ValueError if the loss or the gradient is not finite.
        """
        start = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        prepared = self.task.prepare(batch, seed=0)
        with self.policy.autocast(self.device.name):
            loss = self.task.train()(self.device.move(prepared))
        torch.autograd.backward(loss.total)
        self.device.mark_step()
        gradients = [p.grad for p in self.task.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if not (torch.isfinite(loss.total) and torch.isfinite(norm)):
            raise ValueError("the loss or the gradient of the largest batch is not finite")
        self.optimizer.step()
        self.device.mark_step()
        self.device.synchronize()
        mean_loss = loss.total.item() / max(1.0, loss.weight.item())
        return mean_loss, time.perf_counter() - start

    def describe_largest_step(self, data: DataModule, rate: int) -> str:
        """Make a step on the largest batch of ``data``. Return its shape, loss, time and memory as a line.

        ``rate`` is the sample rate of the audio in Hz.
        """
        batch = batches_by_size(data, lambda count: [count - 1])[0]
        loss, seconds = self(batch)
        rows, labels = batch.labels.shape
        length = int(batch.audio.shape[1]) / rate
        memory = self.device.memory() / 2**20
        return (
            f"largest batch, {rows} rows of up to {length:.1f} s and {labels} labels: "
            f"loss {loss:.1f}, {seconds:.1f} s, peak memory {memory:.0f} MiB"
        )

    def predict_epoch(self, data: DataModule, ranks: int) -> str:
        """Return a line with the predicted time of an epoch on ``ranks`` ranks, from a few timed steps.

        Validation is not included.
        """
        start = time.process_time()
        batches = batches_by_size(data, _spread_positions)
        seconds = 0.0
        if self.device.on_host:
            # The workers that load batches use the same cores as the steps, so the loading time is added.
            seconds = (time.process_time() - start) / len(usable_cpus())
        for batch in batches:
            self(batch)  # The first step of a shape builds kernels, so only the second step is timed.
            _, step_seconds = self(batch)
            seconds += step_seconds
        steps = data.micro_batches_per_epoch / ranks
        hours = steps * seconds / len(batches) / 3600
        return f"{hours:.3g} hours for each epoch of {steps:,.0f} micro-batches of a rank, without validation"

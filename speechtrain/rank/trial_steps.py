"""Training steps that the doctor tries on a recipe's own batches."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import torch
from omegaconf import DictConfig

from speechtrain.batch import Batch
from speechtrain.compute_policy import ComputePolicy, apply_policy, compile_module, usable_cpus
from speechtrain.config.build import build_optimizer
from speechtrain.data.base import DataModule
from speechtrain.data.module import SpeechData
from speechtrain.devices.base import Device
from speechtrain.precision import Precision
from speechtrain.task import Task
from speechtrain.training.autotune import choose_policy

_TIMED = 8  # micro-batches, from which the time of an epoch follows


def smallest_batches(data: DataModule, count: int) -> list[Batch]:
    """Return the ``count`` micro-batches of the first epoch with the least audio, padding included."""

    def first_places(total: int) -> Sequence[int]:
        return range(min(count, total))

    return _batches(data, first_places)


def _evenly(total: int) -> list[int]:
    """Return places that are evenly spaced among ``total``."""
    count = min(_TIMED, total)
    return [total * (2 * number + 1) // (2 * count) for number in range(count)]


def _batches(data: DataModule, places_of: Callable[[int], Sequence[int]]) -> list[Batch]:
    """Return micro-batches of the first epoch by their places in the order of their audio.

    ``places_of`` takes the number of micro-batches. Data that has no plan gives its first batches.
    """
    if not isinstance(data, SpeechData):
        return list(itertools.islice(data.train(), len(places_of(_TIMED))))
    plan, order = data.sampler.plan(0), data.sampler.sizes(0).argsort(kind="stable")
    places = list(places_of(len(order)))
    numbers = order[places].tolist()
    return [data.stream.loader(plan[number]) for number in numbers]


class TrialSteps:
    """Whole training steps of a task on its device, by the compute policy that a run would choose."""

    def __init__(
        self, config: DictConfig, data: DataModule, task: Task, device: Device, precision: Precision
    ) -> None:
        record = choose_policy(None, device, precision, task=task, data=data)
        policy = ComputePolicy.from_record(record.policy)
        assert policy is not None
        self.policy = device.attach(policy)
        apply_policy(task, self.policy)
        compile_module(task, self.policy, len(data.shapes()))
        optimizer = build_optimizer(config, task.parameter_groups(), **device.facts.optimizer_flags)
        _, self.optimizer = device.prepare(task, optimizer)
        self.task, self.device = task, device

    def __call__(self, batch: Batch) -> tuple[float, float]:
        """Train on a batch; return the loss per unit of weight and the seconds.

        Raises ValueError if loss or gradient is not finite.
        """
        start = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        prepared = self.task.prepare(batch, seed=0)
        with self.policy.autocast(self.device.name):
            loss = self.task.train()(self.device.move(prepared))
        torch.autograd.backward(loss.total)
        self.device.mark_step()
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.task.parameters() if p.grad is not None])
        if not (torch.isfinite(loss.total) and torch.isfinite(norm)):
            raise ValueError("the loss or the gradient of the largest batch is not finite")
        self.optimizer.step()
        self.device.mark_step()
        self.device.synchronize()
        return loss.total.item() / max(1.0, loss.weight.item()), time.perf_counter() - start

    def on_largest(self, data: DataModule, rate: int) -> str:
        """Describe one step on the largest batch of ``data``, whose sample rate is ``rate``."""
        batch = _batches(data, lambda count: [count - 1])[0]
        loss, seconds = self(batch)
        rows, labels = batch.labels.shape
        length = int(batch.audio.shape[1]) / rate
        memory = self.device.memory() / 2**20
        return (
            f"largest batch, {rows} rows of up to {length:.1f} s and {labels} labels: "
            f"loss {loss:.1f}, {seconds:.1f} s, peak memory {memory:.0f} MiB"
        )

    def epoch(self, data: DataModule, ranks: int) -> str:
        """Predict the time of an epoch of ``ranks`` processes, without validation, from a few steps.

        On a host's device, the workers that load batches compute on the same cores as the steps.
        """
        start = time.process_time()
        batches = _batches(data, _evenly)
        seconds = 0.0
        if self.device.on_host:
            seconds = (time.process_time() - start) / len(usable_cpus())
        for batch in batches:
            self(batch)  # The first step of a shape builds kernels.
            seconds += self(batch)[1]
        steps = data.micro_batches_per_epoch / ranks
        hours = steps * seconds / len(batches) / 3600
        return f"{hours:.3g} hours for each epoch of {steps:,.0f} micro-batches of a rank, without validation"

"""Warm-up steps without side effects, which compile a device's graphs before a run's first step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from speechtrain.batch import Batch
from speechtrain.checkpoint.whole import on_host
from speechtrain.devices.base import Device
from speechtrain.errors import RunError
from speechtrain.tracking.base import Tracker
from speechtrain.training.optimizer_step import Trained
from speechtrain.training.run_state import Parts

Step = Callable[[Batch], None]
Evaluate = Callable[[dict[str, Iterable[Batch]]], object]


def padding_batch(rows: int, samples: int, labels: int) -> Batch:
    """A batch of the given shape, with silent rows of weight 0."""
    return Batch(
        audio=torch.zeros(rows, samples),
        audio_lengths=torch.full((rows,), samples),
        labels=torch.zeros(rows, labels, dtype=torch.int64),
        label_lengths=torch.zeros(rows, dtype=torch.int64),
        weight=torch.zeros(rows),
        keys=torch.zeros(rows, dtype=torch.int64),
        ids=("",) * rows,
        texts=("",) * rows,
    )


@contextmanager
def without_side_effects(trained: Trained) -> Iterator[None]:
    """A context that undoes what updates that are not taken change: buffers and counters on the host.

    Such an update leaves weights, moments and average unchanged by itself. Forward writes buffers
    (BatchNorm's statistics); they are restored here.
    """
    module, optimizer, average = trained
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    before = {parameter: _counters(parameter, state) for parameter, state in optimizer.state.items()}
    updates = average.updates
    yield
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
    for parameter, state in optimizer.state.items():
        for name, now in _counters(parameter, state).items():
            kept = before.get(parameter, {}).get(name, 0)
            state[name] = torch.full_like(now, float(kept)) if isinstance(now, Tensor) else kept
    average.updates = updates


def _counters(parameter: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """The part of an optimizer's state of a parameter that is on the host."""
    return {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in state.items()
        if not isinstance(value, Tensor) or value.device != parameter.device
    }


@dataclass(eq=False)
class Graphs:
    """Counts a device's graph compilations; on an eager device the warm-up does nothing."""

    device: Device
    tracker: Tracker
    most: int | None
    _known: int = field(init=False, default=0)  # compiled by the end of the warm-up, or reported since

    def warm_up(self, parts: Parts, step: Step, evaluate: Evaluate) -> None:
        """Compile the device's graphs for all fixed shapes; the run is unchanged afterwards."""

    def settle(self) -> None:
        """Count what was compiled since, before the first update, as the warm-up's."""
        self._known = self.device.graphs()

    def check(self, step: int) -> None:
        """Report compilations since the warm-up; raise RunError above ``trainer.max_graphs``."""
        graphs = self.device.graphs()
        if self.most is not None and graphs > self.most:
            raise RunError(
                f"{graphs} graphs compiled by step {step}, more than trainer.max_graphs={self.most}"
            )
        if graphs > self._known:
            message = f"{graphs - self._known} more graphs compiled after the warm-up"
            self.tracker.log("warning", {"step": step, "message": message})
            self._known = graphs


class WarmedUpGraphs(Graphs):
    """Graphs of a device with fixed shapes, which are compiled before the first update."""

    def warm_up(self, parts: Parts, step: Step, evaluate: Evaluate) -> None:
        """Run steps, an evaluation and a checkpoint's reads twice: the first pass creates optimizer state."""
        # the weight of a real batch would be a host read; only fp16 needs it, which such devices lack
        parts.progress.backward_divisor = parts.progress.backward_divisor or 1.0
        started = time.perf_counter()
        segments = {"steps": 0, "evaluation": 0, "checkpoint": 0}
        for _ in range(2):
            with self._counted(segments, "steps"), without_side_effects(parts.trained):
                for shape in parts.data.shapes() * 2:
                    step(padding_batch(*shape))
            with self._counted(segments, "evaluation"):
                evaluate({"warm-up": [padding_batch(*s) for s in parts.data.evaluation_shapes()]})
            with self._counted(segments, "checkpoint"):
                # nothing is kept: a tensor that is alive at mark_step is an output of its graph
                states = parts.states.values()
                on_host(
                    [parts.average.averaged_state_dict(parts.task), *(part.state_dict() for part in states)]
                )
        self.settle()
        counts = {"shapes": len(parts.data.shapes()), "graphs": self._known}
        counts |= {f"graphs_{name}": count for name, count in segments.items()}
        self.tracker.log("warm_up", {**counts, "seconds": time.perf_counter() - started})

    @contextmanager
    def _counted(self, segments: dict[str, int], name: str) -> Iterator[None]:
        """A context that adds its compilations, including its last graph's, to ``segments[name]``."""
        before = self.device.graphs()
        yield
        self.device.mark_step()
        segments[name] += self.device.graphs() - before

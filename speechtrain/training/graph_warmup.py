"""The warm-up of a device that compiles graphs: steps without side effects, before a run's first update."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from speechtrain.batch import Batch
from speechtrain.checkpoint.whole import map_tensors
from speechtrain.devices.base import Device
from speechtrain.errors import RunError
from speechtrain.tracking.base import Tracker
from speechtrain.training.optimizer_step import Trained
from speechtrain.training.run_state import Parts

Step = Callable[[Batch], None]
"""Runs a whole update on copies of a batch, without applying it."""

Evaluate = Callable[[dict[str, Iterable[Batch]]], object]
"""Evaluates named sets of batches."""


def padding_batch(rows: int, samples: int, labels: int) -> Batch:
    """Return a batch with audio (rows, samples) and labels (rows, labels), whose rows have the weight 0."""
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
def restored_buffers(module: nn.Module) -> Iterator[None]:
    """Return a context that restores the buffers, such as the statistics of BatchNorm, at its end."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    yield
    with torch.no_grad():
        for buffer, copy in buffers:
            buffer.copy_(copy)


@contextmanager
def without_side_effects(trained: Trained) -> Iterator[None]:
    """Return a context for updates that are computed but not applied.

    Such an update does not change weights, moments and average. But forward writes buffers, such as the
    statistics of BatchNorm, and the optimizer counts its steps. The context restores the buffers and counts.
    """
    module, optimizer, average = trained
    old_counters = {parameter: _counters(parameter, state) for parameter, state in optimizer.state.items()}
    average_updates = average.updates
    with restored_buffers(module):
        yield
    for parameter, state in optimizer.state.items():
        for name, counter in _counters(parameter, state).items():
            # A counter that did not exist before starts at 0.
            count = old_counters.get(parameter, {}).get(name, 0)
            if isinstance(counter, Tensor):
                state[name] = torch.full_like(counter, float(count))
            else:
                state[name] = count
    average.updates = average_updates


def _counters(parameter: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """Return copies of the counters in the optimizer's state of a parameter.

    Counters are numbers, or tensors on the host while the parameter is on a device.
    """
    counters = {}
    for name, counter in state.items():
        if not isinstance(counter, Tensor):
            counters[name] = counter
        elif counter.device != parameter.device:
            counters[name] = counter.clone()
    return counters


@dataclass(eq=False)
class Graphs:
    """Counts the graphs that a device compiles. This class is for eager devices, which have no warm-up."""

    device: Device
    tracker: Tracker
    max_graphs: int | None  # the limit of a run, or None for no limit
    _reported_graphs: int = field(init=False, default=0)  # compiled in the warm-up, or reported since then

    def warm_up(self, parts: Parts, run_step: Step, evaluate: Evaluate) -> None:
        """Compile the device's graphs for all fixed shapes, without a change of the run."""

    def settle(self) -> None:
        """Count all graphs that are compiled so far as graphs of the warm-up."""
        self._reported_graphs = self.device.graphs()

    def check(self, step: int) -> None:
        """Warn of graphs that were compiled since the last call, up to ``step``.

        Raises RunError if the run has more graphs than ``trainer.max_graphs``.
        """
        graphs = self.device.graphs()
        if self.max_graphs is not None and graphs > self.max_graphs:
            raise RunError(
                f"{graphs} graphs compiled by step {step}, more than trainer.max_graphs={self.max_graphs}"
            )
        if graphs > self._reported_graphs:
            message = f"{graphs - self._reported_graphs} more graphs compiled after the warm-up"
            self.tracker.log("warning", {"step": step, "message": message})
            self._reported_graphs = graphs


class WarmedUpGraphs(Graphs):
    """Graphs of a device with fixed shapes, which are compiled before the first update."""

    def warm_up(self, parts: Parts, run_step: Step, evaluate: Evaluate) -> None:
        """Run steps, an evaluation and the reads of a checkpoint twice.

        The first round creates the optimizer's state. With that state, the graphs of the second round differ.
        """
        # Computing the divisor from a real batch would need a host read. Only fp16 needs that divisor, and
        # devices with fixed shapes do not have fp16.
        if not parts.progress.backward_divisor:
            parts.progress.backward_divisor = 1.0
        start = time.perf_counter()
        graphs = {"steps": 0, "evaluation": 0, "checkpoint": 0}
        for _ in range(2):
            with self._count_graphs(graphs, "steps"), without_side_effects(parts.trained):
                for shape in parts.data.shapes() * 2:
                    run_step(padding_batch(*shape))
            with self._count_graphs(graphs, "evaluation"):
                batches = [padding_batch(*shape) for shape in parts.data.evaluation_shapes()]
                evaluate({"warm-up": batches})
            with self._count_graphs(graphs, "checkpoint"):
                _read_states(parts)
        self.settle()
        counts = {"shapes": len(parts.data.shapes()), "graphs": self._reported_graphs}
        counts |= {f"graphs_{name}": count for name, count in graphs.items()}
        self.tracker.log("warm_up", {**counts, "seconds": time.perf_counter() - start})

    @contextmanager
    def _count_graphs(self, graphs: dict[str, int], name: str) -> Iterator[None]:
        """Return a context that adds the number of graphs that are compiled in it to ``graphs[name]``."""
        start = self.device.graphs()
        yield
        self.device.mark_step()  # compiles the last graph
        graphs[name] += self.device.graphs() - start


def _read_states(parts: Parts) -> None:
    """Copy the states of a checkpoint to the host, and discard the copies.

    The function returns nothing, because a tensor that is alive at mark_step would be an output of the graph.
    """
    weights = parts.average.averaged_state_dict(parts.task)
    states = [weights, *(part.state_dict() for part in parts.states.values())]
    map_tensors(states, lambda path, tensor: tensor.detach().cpu())

"""The warm-up of a device that compiles graphs: steps without side effects, before a run's first update."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from speechtrain.batch import Batch
from speechtrain.checkpoint.checkpointer import map_tensors
from speechtrain.devices.base import Device
from speechtrain.optim.optimizer_step import Trained
from speechtrain.tracking.base import Tracker
from speechtrain.training.run_state import Parts

Step = Callable[[Batch], object]
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


def compile_graphs(
    parts: Parts, device: Device, tracker: Tracker, run_step: Step, evaluate: Evaluate
) -> None:
    """Run steps of all shapes, an evaluation and the reads of a checkpoint twice.

    The first round creates the optimizer's state. With that state, the graphs of the second round differ.
    """
    # Computing the divisor from a real batch would need a host read. Only fp16 needs that divisor, and
    # devices with fixed shapes do not have fp16.
    if not parts.progress.backward_divisor:
        parts.progress.backward_divisor = 1.0
    start = time.perf_counter()
    graphs = {"steps": 0, "evaluation": 0, "checkpoint": 0}

    @contextmanager
    def count_graphs(name: str) -> Iterator[None]:
        """Return a context that adds the number of graphs that are compiled in it to ``graphs[name]``."""
        graphs_before = device.graphs()
        yield
        device.mark_step()  # compiles the last graph
        graphs[name] += device.graphs() - graphs_before

    shapes = parts.data.shapes()
    for _ in range(2):
        with count_graphs("steps"), without_side_effects(parts.trained):
            for shape in shapes * 2:
                run_step(padding_batch(*shape))
        with count_graphs("evaluation"):
            batches = [padding_batch(*shape) for shape in parts.data.evaluation_shapes()]
            evaluate({"warm-up": batches})
        with count_graphs("checkpoint"):
            _read_states(parts)
    counts = {"shapes": len(shapes), "graphs": device.graphs()}
    counts |= {f"graphs_{name}": count for name, count in graphs.items()}
    tracker.log("warm_up", {**counts, "seconds": time.perf_counter() - start})


def _read_states(parts: Parts) -> None:
    """Copy the states of a checkpoint to the host, and discard the copies.

    The function returns nothing, because a tensor that is alive at mark_step would be an output of the graph.
    """
    weights = parts.average.averaged_state_dict(parts.task)
    states = [weights, *(part.state_dict() for part in parts.states.values())]
    map_tensors(states, lambda path, tensor: tensor.detach().cpu())

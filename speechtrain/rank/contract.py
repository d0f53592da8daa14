"""The check of a task's parts on two rows of a batch, before the first update."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speechtrain.batch import Batch
from speechtrain.data.base import DataModule
from speechtrain.errors import require_contract
from speechtrain.rank.trial_steps import select_rows
from speechtrain.task import KNOWN_METRICS, Evaluation, Loss, Task, require_sums
from speechtrain.training.graph_warmup import restored_buffers


def check_contract(task: Task, data: DataModule, move: Callable[[Batch], Batch], ranks: int = 1) -> None:
    """Evaluate two rows of a training batch, and compute their loss. The task stays as it is.

    ``move`` copies a batch to the device of ``task``. Raises ConfigError, which begins with the file, line
    and name of a class, if a part breaks the contract of its interface.
    """
    batch = data.sample()
    if batch is None:
        return
    batch = select_rows(batch, slice(2))
    with torch.random.fork_rng(devices=[]), restored_buffers(task):
        task.eval().advance(0, 0)
        prepared = move(task.prepare(batch, 0))
        _call(task, task.check, prepared)
        with torch.no_grad():
            evaluation = task.evaluate(prepared, task.decoder)
        is_evaluation = isinstance(evaluation, Evaluation)
        require_contract(is_evaluation, task, f"evaluate returns {type(evaluation).__name__}, no Evaluation")
        require_sums(task, "evaluate", evaluation.metrics)
        problem = f"metric is {task.metric!r}, which evaluate does not return"
        require_contract(task.metric in evaluation.metrics, task, problem)
        has_mode = task.metric in KNOWN_METRICS or task.metric_mode in ("min", "max")
        problem = f'metric is {task.metric!r}. Add metric_mode = "min" or "max", so that the best is known'
        require_contract(has_mode, task, problem)
        loss = _call(task.train(), task, move(task.prepare(batch, 0)))
        is_scalar = isinstance(loss, Loss) and loss.total.shape == loss.weight.shape == ()
        require_contract(is_scalar, task, "forward does not return a Loss of a scalar total and weight")
        require_contract(loss.total.requires_grad, task, "forward returns a loss without a gradient")
        require_sums(task, "forward", loss.metrics)
        if ranks > 1 and not task.skips_parameters:
            _check_gradients(task, loss)


def _check_gradients(task: Task, loss: Loss) -> None:
    """Raise ConfigError for parameters without a gradient, for which DDP would wait."""
    torch.autograd.backward(loss.total)
    unused = [name for name, p in task.named_parameters() if p.requires_grad and p.grad is None]
    task.zero_grad(set_to_none=True)
    problem = f"the loss does not use {', '.join(unused)}. With several ranks, set skips_parameters = True"
    require_contract(not unused, task, f"{problem} in the class of the model or of the encoder")


def _call(task: Task, function: Callable[[Batch], Any], batch: Batch) -> Any:
    """Return the result of ``function`` for a copy of ``batch``, which it must not change."""
    copy = batch.to(Tensor.clone)
    state = _generator_state()
    result = function(copy)
    for name, tensor in vars(batch).items():
        if isinstance(tensor, Tensor):
            is_equal = torch.equal(tensor, getattr(copy, name))
            require_contract(is_equal, task, f"an update changes batch.{name} in place. Change a copy")
    problem = "an update draws from random or numpy.random, whose state no checkpoint has. Draw from torch"
    require_contract(_generator_state() == state, task, problem)
    return result


def _generator_state() -> Any:
    """Return a value that differs after the use of ``random`` or ``numpy.random``."""
    numpy_state: Any = np.random.get_state()
    return random.getstate(), numpy_state[2:]

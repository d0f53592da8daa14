"""A whole training step at full size on a device that no machine has, on tensors without values.

``FakeTensorMode`` computes shapes, types and devices, and no numbers. The device is PyTorch's private one, so
the mode refuses an operation that combines it with a tensor of the host. Neither a GPU nor memory is needed.

A process that has called ``run`` has one more device, and cached tensors without values. Therefore use a
process of its own: ``python -m tools.rehearsal.fake_step CONFIG ROWS,SAMPLES,LABELS …``. ``CONFIG`` is a file
with a resolved config.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from speechtrain.batch import Batch
from speechtrain.compute_policy import apply_policy
from speechtrain.devices.base import Device
from speechtrain.errors import SpeechtrainError, first_line
from speechtrain.optim.ema import EMA
from speechtrain.optim.optimizer_step import BranchFreeUpdate, Trained
from speechtrain.rank.build import build_task
from speechtrain.start.build import build_optimizer, rank_bytes
from speechtrain.start.resolved import load
from speechtrain.start.run_config import part_of, run_config
from speechtrain.task import Task
from speechtrain.training.graph_warmup import padding_batch
from tools.rehearsal.recorder import SourceLine, Unfit, is_of_torch

NAME = "chip"
_LIBRARY: list[torch.library.Library] = []  # its registrations hold as long as it exists
Shape = tuple[int, int, int]
"""Rows, samples and labels of a batch."""


class _Backend:
    """The functions that torch calls in the module of a device."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        # Otherwise the mode would copy scalars to the device, which has no kernels.
        return False

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def _is_in_bad_fork(self) -> bool:
        return False


@cache
def _mode() -> Any:
    """Return the mode of this process."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Backend())
    # Autocast of this device changes no type, because its lists belong to the vendors.
    _LIBRARY.append(torch.library.Library("_", "IMPL"))  # type: ignore[no-untyped-call]
    _LIBRARY[0].fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")  # type: ignore[no-untyped-call]
    return FakeTensorMode(allow_non_fake_inputs=False)


def run(config: DictConfig, shapes: Sequence[Shape]) -> None:
    """Run training updates and evaluations of ``shapes`` by the policy of the config's device.

    An update is forward, backward, optimizer and average. The losses are the static ones, because the cells
    of the ragged ones depend on values. So are the shapes, because no length has a value. Raises Unfit, which
    names the line that combines tensors of the host and of the device, or that reads a value.
    """
    rank_bytes(run_config(config), 0)  # The optimizer's library computes its tables, which needs values.
    with _mode(), _named_faults():
        task, _ = build_task(run_config(config))
        device = part_of(config, "device").build()
        policy = device.policy(part_of(config, "precision").build().dtype)
        policy = replace(
            policy, static_shapes=True, ctc="static", transducer="static", mark_step=lambda: None, compiler=""
        )
        apply_policy(task.train(), policy)
        _move_module(task)
        update = _update(config, task, device)
        for number, shape in enumerate(shapes):
            batch = _batch(task, shape, seed=number)
            with policy.autocast(NAME):
                loss = task(batch)
            torch.autograd.backward(loss.total)
            update(loss.weight)
            with torch.no_grad(), policy.autocast(NAME):
                task.eval()(_batch(task, shape, seed=number))
            task.train()


def _update(config: DictConfig, task: Task, device: Device) -> Callable[[Tensor], object]:
    """Return a function of the batch's weight () that updates the task and its average."""
    optimizer = build_optimizer(run_config(config), task.parameter_groups(), **device.facts.optimizer_flags)
    trained = Trained(task, optimizer, EMA(task, 0.999))
    update = BranchFreeUpdate(part_of(config, "precision").build(), config.trainer.clip)

    def apply(weight: Tensor) -> object:
        return update(trained, 1e-3, 1 / weight.clamp(min=1.0), torch.ones_like(weight))

    return apply


def _batch(task: Task, shape: Shape, seed: int) -> Batch:
    """Return a prepared batch on the device. The preparation computes on the host, with numbers."""
    with unset_fake_temporarily():
        task.advance(0, seed)
        prepared = task.prepare(padding_batch(*shape), seed)
    return prepared.to(_moved)


def _moved(tensor: Tensor) -> Tensor:
    fake: Tensor = _mode().from_tensor(tensor)
    return fake.to(NAME)


def _move_module(module: nn.Module) -> None:
    """Move parameters and buffers, as ``Module.to`` does. It refuses tensors without values."""
    for part in module.modules():
        _move_part_of(part)


def _move_part_of(part: nn.Module) -> None:
    for name, parameter in part.named_parameters(recurse=False):
        copy = nn.Parameter(_moved(parameter.detach()), parameter.requires_grad)
        setattr(part, name, copy)
    for name, buffer in part.named_buffers(recurse=False):
        setattr(part, name, _moved(buffer))


@contextmanager
def _named_faults() -> Iterator[None]:
    """Turn an error of torch into the error that names the innermost line outside torch."""
    try:
        yield
    except SpeechtrainError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame for frame in frames if frame.filename != __file__ and not is_of_torch(frame.filename)]
        if not lines:
            raise
        source = SourceLine(lines[-1].filename, lines[-1].lineno or 0)
        raise Unfit(source, "the step", f"fails on the device: {first_line(error)[:200]}") from error


def main(arguments: list[str]) -> int:
    """Print one line for the config and the shapes of the command line. Return the exit code."""
    path, *shapes = arguments
    try:
        config = load(Path(path))
        run(config, [tuple(map(int, shape.split(","))) for shape in shapes])  # type: ignore[misc]
    except SpeechtrainError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(f"{len(shapes)} shapes: forward, backward, update, average and evaluation")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

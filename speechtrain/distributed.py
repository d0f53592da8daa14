"""World and Group: how many processes there are, and how they speak to each other.

Nothing above asks whether a run is distributed: one process is ``Solo``, a full group of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from speechtrain.errors import MachineError

PARENT = "SPEECHTRAIN_PARENT"
"""Environment variable: the process that started this one here; without it there is no reason to go on."""


@dataclass(frozen=True)
class World:
    """This process's place among its peers, read once from the environment."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> World:
        """Read torchrun's variables; absent ones mean a single process.

        Raises MachineError naming the variable where only some are set or one is no number.
        """
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if "RANK" not in environ and "WORLD_SIZE" not in environ:
            return cls()
        values = []
        for name, fallback in zip(names, (None, None, "0", "1"), strict=True):
            text = environ.get(name, fallback)
            if text is None or not text.isdigit():
                raise MachineError(
                    f"environment variable {name} is {text!r}; the launcher must set it to a number"
                )
            values.append(int(text))
        return cls(*values)


class Group(ABC):
    """The processes of a run, as one object."""

    world: World

    @abstractmethod
    def wrap(self, module: nn.Module) -> nn.Module:
        """The module whose forward synchronises gradients as sums over the group."""

    @abstractmethod
    def hold(self, module: nn.Module) -> AbstractContextManager[object]:
        """A context in which backward does not synchronise (all micro-batches but the last)."""

    @abstractmethod
    def sum(self, tensor: Tensor) -> Tensor:
        """The elementwise sum over the group."""

    @abstractmethod
    def barrier(self) -> None: ...

    def agree(
        self, weight: Tensor, *, stop: bool, late: bool, skip: Tensor
    ) -> tuple[Tensor, bool, bool, Tensor]:
        """After backward: the global weight, whether anyone must stop, is out of time, or skips.

        ``weight`` () fp32; ``skip`` () bool. Returns the summed weight, ``stop`` and ``late`` on the
        host and ``skip`` on the device. Clocks and signals differ between ranks: no rank may end
        on its own word.
        """
        total = self.sum(weight.double().reshape(1))[0].float()
        return total, self.any(stop), self.any(late), self.sum(skip.float().reshape(1))[0] > 0

    def any(self, flag: bool) -> bool:
        """Whether the flag of any process is set; every process must ask."""
        return bool(self.sum(torch.tensor([float(flag)]))[0] > 0)

    def close(self) -> None:  # noqa: B027 - nothing is a sensible default
        """Leave the group. Call after the wrapped module has been dropped."""


class Solo(Group):
    """A group of one."""

    def __init__(self) -> None:
        self.world = World()

    def wrap(self, module: nn.Module) -> nn.Module:
        return module

    def hold(self, module: nn.Module) -> AbstractContextManager[object]:
        return nullcontext()

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def barrier(self) -> None:
        return None

    def agree(
        self, weight: Tensor, *, stop: bool, late: bool, skip: Tensor
    ) -> tuple[Tensor, bool, bool, Tensor]:
        return weight, stop, late, skip

    def any(self, flag: bool) -> bool:
        return flag


def open_group(world: World) -> Group:
    """The group of ``world``'s processes. Raises MachineError for more than one."""
    if world.size != 1:
        raise MachineError(
            f"WORLD_SIZE={world.size}: this version trains in one process; "
            "unset RANK and WORLD_SIZE, or set them to 0 and 1"
        )
    return Solo()

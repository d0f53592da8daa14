"""Ranks that share out the parameters, their gradients and the optimizer's state (FSDP2).

Each rank keeps its rows of every parameter. A unit's parameters are gathered before its forward and
its backward, and freed after; gradients arrive as each rank's rows of their sums. What the ranks hold
besides, and the model's code, is as with DDP.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from speechtrain.distributed.group import TorchGroup
from speechtrain.dtensor import is_sharded
from speechtrain.errors import ConfigError, MachineError, one_line
from speechtrain.launcher import World


def units_of(module: nn.Module) -> list[nn.Module]:
    """The parts of ``module`` that are gathered one after the other, inner ones first.

    A module names such parts in ``shard_units``, a list of modules for each of its members. A part must
    be used through its ``forward`` alone and, in evaluation too, equally often on every rank: a decoder
    that is stepped as long as its hypotheses last stays with the rest, which is gathered once a batch.
    """
    found: list[nn.Module] = []
    for owner in module.modules():
        for name in getattr(owner, "shard_units", ()):
            part = owner.get_submodule(name)
            found += list(part) if isinstance(part, nn.ModuleList) else [part]
    return found[::-1]


class ShardedGroup(TorchGroup):
    """Processes of which each holds its share of every parameter."""

    def __init__(self, world: World, backends: str = "cpu:gloo", timeout_seconds: float = 1800.0) -> None:
        super().__init__(world, backends, timeout_seconds)
        self._module: nn.Module | None = None

    def shard(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Spread ``module``'s parameters, and let ``optimizer`` train this rank's shares of them.

        All begin with rank 0's values. The whole model is in every rank's memory until here.
        Raises ConfigError for a model or an optimizer that this cannot be done to.
        """
        # here, behind the opening of the group: it complains at its end where these were imported before
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

        for parameter in module.parameters():
            self._broadcast(parameter.data)
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        places = [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
        if optimizer.state or not all(map(all, places)):
            raise ConfigError(
                "trainer.shard=parameters: the optimizer trains what is no parameter of the model, "
                "or has begun; use trainer.shard=none"
            )
        device = next(module.parameters()).device.type
        mesh = init_device_mesh(device, (self.world.size,))
        try:
            for unit in units_of(module):
                fully_shard(unit, mesh=mesh, reshard_after_forward=True)
            fully_shard(module, mesh=mesh, reshard_after_forward=False)
        except (ValueError, NotImplementedError) as error:  # parameters without a dimension, or not in order
            cause = one_line(str(error), 200)
            raise ConfigError(
                f"trainer.shard=parameters cannot spread this model ({cause}); use trainer.shard=none"
            ) from error
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)  # sums: only the trainer divides
                part.set_force_sum_reduction_for_comms(True)  # gloo has no other
        if hasattr(module, "evaluate"):
            register_fsdp_forward_method(module, "evaluate")
            _free_after(module, "evaluate")
        shares = dict(module.named_parameters())
        for group, place in zip(optimizer.param_groups, places, strict=True):
            group["params"] = [shares[name] for name in place]

    def wrap(self, module: nn.Module) -> nn.Module:
        """``module``, which ``shard`` has spread, with rank 0's buffers everywhere."""
        self._share_buffers(module)
        self._module = module
        return _FSDPWrapper(module)

    def no_sync(self, module: nn.Module) -> AbstractContextManager[object]:
        assert isinstance(module, _FSDPWrapper)
        return module.no_sync()

    def all_reduce_status(
        self, weight: Tensor, *, stop: bool, late: bool, skip: Tensor
    ) -> tuple[Tensor, bool, bool, Tensor]:
        if self._module is not None and not all(map(is_sharded, self._module.parameters())):
            # never with the torch that this was written for; another may not see a loss in a dataclass
            raise MachineError(
                f"torch {torch.__version__} has not reduced the gradients of trainer.shard=parameters; "
                "use trainer.shard=none"
            )
        return super().all_reduce_status(weight, stop=stop, late=late, skip=skip)

    def close(self) -> None:
        self._module = None
        super().close()


def _free_after(module: Any, name: str) -> None:
    """Have the method ``name`` of a sharded module leave no parameter gathered."""
    method: Callable[..., Any] = getattr(module, name)

    def called(*inputs: Any) -> Any:
        try:
            return method(*inputs)
        finally:
            module.reshard()  # no backward does, and the next forward must see new values

    setattr(module, name, called)


class _FSDPWrapper(nn.Module):
    """A sharded module whose backward leaves this rank's rows of the sums of all ranks' gradients."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module: Any = module

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which gradients stay whole and on their rank, one for each whole parameter."""
        self.module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)

    def forward(self, *inputs: Any) -> Any:
        with warnings.catch_warnings():  # units may return views: nothing writes into them
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
            return self.module(*inputs)

"""Parameters, gradients and optimizer state that are sharded over the ranks (FSDP2).

Each rank keeps its rows of every parameter. A unit's parameters are gathered before its forward and its
backward, and freed after it. A rank's gradients are its rows of the sums over the ranks. Everything
else, the model's code included, is as with DDP.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from speechtrain.devices.base import DeviceFacts
from speechtrain.distributed.group import HOST, Status, TorchGroup
from speechtrain.dtensor import is_sharded
from speechtrain.errors import ConfigError, MachineError, one_line
from speechtrain.launcher import World
from speechtrain.task import units_of


class ShardedGroup(TorchGroup):
    """A group in which each process holds its rows of every parameter."""

    def __init__(self, world: World, facts: DeviceFacts = HOST, timeout_seconds: float = 1800.0) -> None:
        if TorchVersion(torch.__version__) < "2.8":  # it has no set_gradient_divide_factor
            needs = "trainer.shard=parameters needs torch 2.8 or newer"
            raise MachineError(f"{needs}, and this is {torch.__version__}; use trainer.shard=none")
        super().__init__(world, facts, timeout_seconds)
        self._module: nn.Module | None = None

    def shard(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, narrow: torch.dtype | None = None
    ) -> None:
        """Shard ``module``'s parameters, and make ``optimizer`` train this rank's shards of them.

        ``narrow`` halves what the ranks send for units whose products are in that type anyway; gradients
        are summed in fp32. All ranks start with rank 0's values. Until here, every rank has the whole model
        in memory.
        Raises ConfigError for a model or an optimizer that cannot be sharded.
        """
        # imported after the group is open; otherwise torch warns when the group is closed
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import (
            FSDPModule,
            MixedPrecisionPolicy,
            fully_shard,
            register_fsdp_forward_method,
        )

        for parameter in module.parameters():
            self._broadcast(parameter.data)
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        places = [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
        if optimizer.state or not all(map(all, places)):
            raise ConfigError(
                "trainer.shard=parameters: the optimizer trains a tensor that is not a parameter of the "
                "model, or already has state; use trainer.shard=none"
            )
        if not getattr(optimizer, "can_shard", True):
            name = type(optimizer).__name__
            raise ConfigError(f"trainer.shard=parameters: {name} needs whole tensors; use optimizer=adamw")
        device = next(module.parameters()).device.type
        mesh = init_device_mesh(device, (self.world.size,))
        try:
            for unit in units_of(module, is_even=True):
                dtype = narrow if getattr(unit, "computes_narrow", False) else None
                types = MixedPrecisionPolicy(dtype, dtype and torch.float32, cast_forward_inputs=False)
                fully_shard(unit, mesh=mesh, reshard_after_forward=True, mp_policy=types)
            fully_shard(module, mesh=mesh, reshard_after_forward=False)
        except (ValueError, NotImplementedError) as error:  # scalar or non-contiguous parameters
            cause = one_line(str(error), 200)
            raise ConfigError(
                f"trainer.shard=parameters cannot shard this model ({cause}); use trainer.shard=none"
            ) from error
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)  # sums: only the trainer divides
                part.set_force_sum_reduction_for_comms(True)  # gloo has no average
        if hasattr(module, "evaluate"):
            register_fsdp_forward_method(module, "evaluate")
            _free_after(module, "evaluate")
        shares = dict(module.named_parameters())
        for group, place in zip(optimizer.param_groups, places, strict=True):
            group["params"] = [shares[name] for name in place]

    def wrap(self, module: nn.Module) -> nn.Module:
        """Wrap ``module``, which ``shard`` has sharded, and give all ranks rank 0's buffers."""
        self._share_buffers(module)
        self._module = module
        return _FSDPWrapper(module)

    def no_sync(self, module: nn.Module) -> AbstractContextManager[object]:
        assert isinstance(module, _FSDPWrapper)
        return module.no_sync()

    def all_reduce_status(self, weight: Tensor, *, stop: bool, late: bool, skip: Tensor) -> Status:
        if self._module is not None and not all(map(is_sharded, self._module.parameters())):
            # not with the torch that this was written for; another version may miss a loss in a dataclass
            raise MachineError(
                f"torch {torch.__version__} does not reduce gradients with trainer.shard=parameters; "
                "use trainer.shard=none"
            )
        return super().all_reduce_status(weight, stop=stop, late=late, skip=skip)

    def close(self) -> None:
        self._module = None
        super().close()


def _free_after(module: Any, name: str) -> None:
    """Free the gathered parameters after each call of the method ``name`` of a sharded module."""
    method: Callable[..., Any] = getattr(module, name)

    def called(*inputs: Any) -> Any:
        try:
            return method(*inputs)
        finally:
            module.reshard()  # there is no backward to do so, and the next forward needs new values

    setattr(module, name, called)


class _FSDPWrapper(nn.Module):
    """A sharded module; after backward, the gradients are this rank's rows of the sums over all ranks."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module: Any = module

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which gradients are not reduced: each rank keeps its own, of whole parameters."""
        self.module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)

    def forward(self, *inputs: Any) -> Any:
        with warnings.catch_warnings():  # units may return views, as nothing writes into them
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
            return self.module(*inputs)

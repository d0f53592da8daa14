"""Parameters, gradients and optimizer state that are sharded over the ranks (FSDP2).

Each rank keeps its rows of every parameter. The parameters of a unit are gathered before its forward and
its backward, and freed after each. The gradients of a rank are its rows of the sums over the ranks. All
other code, also the model's, is the same as with DDP.
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
        if TorchVersion(torch.__version__) < "2.8":  # It lacks set_gradient_divide_factor.
            requirement = "trainer.shard=parameters needs torch 2.8 or newer"
            raise MachineError(f"{requirement}, and this is {torch.__version__}. Use trainer.shard=none")
        super().__init__(world, facts, timeout_seconds)
        self._module: nn.Module | None = None

    def shard(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, narrow: torch.dtype | None = None
    ) -> None:
        """Shard ``module``'s parameters, and make ``optimizer`` train this rank's shards of them.

        All ranks start with rank 0's values. Until this call, every rank has the whole model in memory.
        Units that set ``computes_narrow`` are gathered in the type ``narrow``, which halves the bytes sent.
        Their matmuls use that type anyway. Gradients are summed in fp32.
        Raises ConfigError for a model or an optimizer that cannot be sharded.
        """
        # This import follows the opening of the group. Otherwise torch warns when the group is closed.
        from torch.distributed.fsdp import register_fsdp_forward_method

        for parameter in module.parameters():
            self._broadcast(parameter.data)
        names_by_group = _parameter_names(module, optimizer)
        try:
            _shard_units(module, self.world.size, narrow)
        except (ValueError, NotImplementedError) as error:  # scalar or non-contiguous parameters
            cause = one_line(str(error), 200)
            raise ConfigError(
                f"trainer.shard=parameters cannot shard this model ({cause}). Use trainer.shard=none"
            ) from error
        if hasattr(module, "evaluate"):
            register_fsdp_forward_method(module, "evaluate")
            _free_after(module, "evaluate")
        shards = dict(module.named_parameters())
        for group, names in zip(optimizer.param_groups, names_by_group, strict=True):
            group["params"] = [shards[name] for name in names]

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
            # A version of torch other than the tested ones may fail to find a loss in a dataclass.
            raise MachineError(
                f"torch {torch.__version__} does not reduce gradients with trainer.shard=parameters. "
                "Use trainer.shard=none"
            )
        return super().all_reduce_status(weight, stop=stop, late=late, skip=skip)

    def close(self) -> None:
        self._module = None
        super().close()


def _parameter_names(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the names of the parameters that each of the optimizer's groups trains. Raises ConfigError."""
    if not getattr(optimizer, "can_shard", True):
        name = type(optimizer).__name__
        raise ConfigError(f"trainer.shard=parameters: {name} needs whole tensors. Use optimizer=adamw")
    name_of = {parameter: name for name, parameter in module.named_parameters()}
    names_by_group = []
    for group in optimizer.param_groups:
        names_by_group.append([name_of.get(parameter, "") for parameter in group["params"]])
    if optimizer.state or any("" in names for names in names_by_group):
        raise ConfigError(
            "trainer.shard=parameters: the optimizer trains a tensor that is not a parameter of the "
            "model, or already has state. Use trainer.shard=none"
        )
    return names_by_group


def _shard_units(module: nn.Module, ranks: int, gather_dtype: torch.dtype | None) -> None:
    """Shard each unit of ``module``, then the parameters outside of units. Gradients are sums over ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    device = next(module.parameters()).device.type
    mesh = init_device_mesh(device, (ranks,))
    for unit in units_of(module, is_even=True):
        types = MixedPrecisionPolicy(cast_forward_inputs=False)
        if gather_dtype is not None and getattr(unit, "computes_narrow", False):
            types = MixedPrecisionPolicy(gather_dtype, torch.float32, cast_forward_inputs=False)
        fully_shard(unit, mesh=mesh, reshard_after_forward=True, mp_policy=types)
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)  # Only the trainer divides.
            part.set_force_sum_reduction_for_comms(True)  # Gloo does not average.


def _free_after(module: Any, name: str) -> None:
    """Free the gathered parameters after each call of the method ``name`` of a sharded module."""
    method: Callable[..., Any] = getattr(module, name)

    def call(*inputs: Any) -> Any:
        try:
            return method(*inputs)
        finally:
            module.reshard()  # Evaluation has no backward that frees them. The next forward needs new values.

    setattr(module, name, call)


class _FSDPWrapper(nn.Module):
    """A sharded module. After backward, the gradients are this rank's rows of the sums over all ranks."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module: Any = module

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do not reduce gradients in this context. Each rank keeps its gradients of whole parameters."""
        self.module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)

    def forward(self, *inputs: Any) -> Any:
        with warnings.catch_warnings():  # Units may return views, because no code writes into them.
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
            return self.module(*inputs)

"""Parameters, gradients and optimizer state that are sharded over the ranks (FSDP2).

Each rank stores some rows (slices of dimension 0) of every parameter, and the same rows of its gradient and
its optimizer state. Gradients are sums over the ranks. A unit is a part of the model, such as an encoder
layer (``task.units_of``). FSDP gathers the parameters of a unit before the unit's forward and again before
its backward. It frees them after each. All other code, also the model's, is the same as with DDP.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from speechtrain.devices.base import DeviceFacts
from speechtrain.distributed.group import HOST, GlobalStatus, TorchGroup
from speechtrain.distributed.world import World
from speechtrain.dtensor import is_sharded
from speechtrain.errors import ConfigError, MachineError, one_line
from speechtrain.task import units_of


class ShardedGroup(TorchGroup):
    """A group in which each process stores some rows of every parameter."""

    def __init__(self, world: World, facts: DeviceFacts = HOST, timeout_seconds: float = 1800.0) -> None:
        if TorchVersion(torch.__version__) < "2.8":  # Older versions lack set_gradient_divide_factor.
            requirement = "trainer.shard=parameters needs torch 2.8 or newer"
            raise MachineError(f"{requirement}, and this is {torch.__version__}. Use trainer.shard=none")
        super().__init__(world, facts, timeout_seconds)
        self._sharded_module: nn.Module | None = None

    def shard(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, gather_dtype: torch.dtype | None = None
    ) -> None:
        """Shard the parameters of ``module``, and make ``optimizer`` train this rank's shards.

        All ranks start with rank 0's values. Until this call, every rank has the whole model in memory.

        ``gather_dtype`` is the type in which FSDP sends the parameters of units that set ``computes_narrow``.
        bf16 halves the bytes, and the matmuls of these units compute in bf16 anyway. Without a
        ``gather_dtype``, and for other units, the parameters are sent in their own type. Gradients are always
        summed in fp32.

        Raises ConfigError for a model or an optimizer that cannot be sharded.
        """
        # Torch warns when the group is closed if this import comes before the group is opened.
        from torch.distributed.fsdp import register_fsdp_forward_method

        for parameter in module.parameters():
            self._broadcast(parameter.data)
        names_by_optimizer_group = _parameter_names(module, optimizer)
        try:
            _shard_units(module, self.world.size, gather_dtype)
        except (ValueError, NotImplementedError) as error:  # scalar or non-contiguous parameters
            cause = one_line(str(error), 200)
            raise ConfigError(
                f"trainer.shard=parameters cannot shard this model ({cause}). Use trainer.shard=none"
            ) from error
        if hasattr(module, "evaluate"):
            # FSDP gathers parameters before ``forward`` only, and evaluation calls another method.
            register_fsdp_forward_method(module, "evaluate")
            _free_after(module, "evaluate")
        # Sharding has replaced the parameters by new objects, and the optimizer still has the old ones.
        shards = dict(module.named_parameters())
        for optimizer_group, names in zip(optimizer.param_groups, names_by_optimizer_group, strict=True):
            optimizer_group["params"] = [shards[name] for name in names]

    def wrap(self, module: nn.Module) -> nn.Module:
        """Wrap ``module``, which ``shard`` has sharded, and copy rank 0's buffers to all ranks."""
        self._share_buffers(module)
        self._sharded_module = module
        return _FSDPWrapper(module)

    def all_reduce_status(self, weight: Tensor, *, stop: bool, late: bool, skip: Tensor) -> GlobalStatus:
        if self._sharded_module is not None:
            # FSDP finds the end of backward by the tensors that forward returned, here in a dataclass. A
            # version of torch that does not look into dataclasses leaves the parameters gathered.
            for parameter in self._sharded_module.parameters():
                if not is_sharded(parameter):
                    raise MachineError(
                        f"torch {torch.__version__} does not reduce gradients with trainer.shard=parameters. "
                        "Use trainer.shard=none"
                    )
        return super().all_reduce_status(weight, stop=stop, late=late, skip=skip)

    def close(self) -> None:
        self._sharded_module = None
        super().close()


def _parameter_names(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the names of the parameters in each of the optimizer's parameter groups.

    Raises ConfigError if the optimizer cannot train shards of these parameters.
    """
    if not getattr(optimizer, "can_shard", True):
        name = type(optimizer).__name__
        raise ConfigError(f"trainer.shard=parameters: {name} needs whole tensors. Use optimizer=adamw")
    name_of = {parameter: name for name, parameter in module.named_parameters()}
    names_by_group = []
    has_unknown_tensor = False
    for group in optimizer.param_groups:
        names = [name_of.get(parameter, "") for parameter in group["params"]]
        has_unknown_tensor = has_unknown_tensor or "" in names
        names_by_group.append(names)
    if optimizer.state or has_unknown_tensor:
        raise ConfigError(
            "trainer.shard=parameters: the optimizer trains a tensor that is not a parameter of the "
            "model, or already has state. Use trainer.shard=none"
        )
    return names_by_group


def _shard_units(module: nn.Module, ranks: int, gather_dtype: torch.dtype | None) -> None:
    """Shard each unit of ``module`` over ``ranks`` ranks, then the parameters outside of units.

    Gradients become sums over the ranks, because only the trainer divides, by the weight of the update.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    device = next(module.parameters()).device.type
    mesh = init_device_mesh(device, (ranks,))
    for unit in units_of(module, is_even=True):
        dtypes = MixedPrecisionPolicy(cast_forward_inputs=False)
        if gather_dtype is not None and getattr(unit, "computes_narrow", False):
            dtypes = MixedPrecisionPolicy(
                param_dtype=gather_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        fully_shard(unit, mesh=mesh, reshard_after_forward=True, mp_policy=dtypes)
    # The parameters outside of units stay gathered until backward, which starts with some of them.
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            submodule.set_gradient_divide_factor(1.0)
            # With this, FSDP asks the backend for a sum. Gloo cannot average.
            submodule.set_force_sum_reduction_for_comms(True)


def _free_after(module: Any, method_name: str) -> None:
    """Free the gathered parameters after each call of a method of a sharded module.

    In training, backward frees them. Evaluation has no backward, and the next forward would use the gathered
    old values.
    """
    method: Callable[..., Any] = getattr(module, method_name)

    def call_and_free(*inputs: Any) -> Any:
        try:
            return method(*inputs)
        finally:
            module.reshard()

    setattr(module, method_name, call_and_free)


class _FSDPWrapper(nn.Module):
    """A sharded module. After backward, each rank has its rows of the gradients, summed over all ranks."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module: Any = module

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which backward does not reduce gradients.

        Each rank accumulates gradients of whole parameters until the next reduction.
        """
        self.module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(True)

    def forward(self, *inputs: Any) -> Any:
        with warnings.catch_warnings():
            # FSDP warns if a unit returns a view. This is safe, because no code writes into the views.
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
            return self.module(*inputs)

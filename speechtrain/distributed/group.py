"""The group of a run's processes (its ranks), and how they communicate.

Callers need not know whether a run is distributed: the group of a single process is ``SingleProcess``, whose
collectives return their input.
"""

from __future__ import annotations

import gc
import json
import re
import warnings
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from speechtrain.devices.base import DeviceFacts
from speechtrain.distributed.loopback import store_of_one_host
from speechtrain.distributed.rank_status import RankStatus
from speechtrain.distributed.world import World
from speechtrain.errors import MachineError, first_line

HOST = DeviceFacts()
"""The facts of a host without an accelerator."""


class GlobalStatus(NamedTuple):
    """The state of an update over all ranks, after its backward."""

    weight: Tensor  # () fp32, the sum of the ranks' weights
    stop: bool  # whether a rank got a stop request
    late: bool  # whether a rank has used up its time
    skip: Tensor  # () bool, whether a rank skips the update


class PeerLost(MachineError):
    """Another rank has ended or does not answer. The error on this rank is a consequence."""


class Group(ABC):
    """The processes of a run, as one object."""

    world: World

    @cached_property
    def rank_status(self) -> RankStatus:
        """The step and phase of this rank, and whether the rank waits for its peers."""
        return RankStatus()

    def shard(  # noqa: B027
        self, module: nn.Module, optimizer: torch.optim.Optimizer, gather_dtype: torch.dtype | None = None
    ) -> None:
        """Shard parameters and optimizer if this group shards. Call this before any weights are loaded.

        ``gather_dtype`` is the type in which the parameters of units with ``computes_narrow`` are gathered.
        None means the type of the parameters.
        """

    @abstractmethod
    def wrap(self, module: nn.Module) -> nn.Module:
        """Wrap ``module`` so that its backward sums the gradients over the group."""

    @abstractmethod
    def no_sync(self, module: nn.Module) -> AbstractContextManager[object]:
        """Return a context in which backward does not reduce gradients.

        The trainer uses it for all micro-batches of an update except the last one.
        """

    @abstractmethod
    def sum(self, tensor: Tensor) -> Tensor:
        """Return the elementwise sum over the group. ``tensor`` must be in host memory."""

    def barrier(self) -> None:
        """Wait until every process has called this method."""
        self.any(False)  # The flag is reduced in host memory. NCCL's own barrier allocates device memory.

    @abstractmethod
    def all_reduce_status(self, weight: Tensor, *, stop: bool, late: bool, skip: Tensor) -> GlobalStatus:
        """Return the sum of the ranks' weights, and for each flag whether any rank has set it.

        Every rank calls this once per update, after backward. ``weight`` is () fp32 and ``skip`` () bool.
        Both stay on the device. ``stop`` and ``late`` are on the host. Clocks and signals differ between
        ranks, so no rank may decide alone to end.
        """

    def any(self, flag: bool) -> bool:
        """Return whether any process passes True. Every process must call this."""
        count = self.sum(torch.tensor([float(flag)]))
        return bool(count[0] > 0)

    def from_rank_0(self, value: Any) -> Any:
        """Return the ``value`` of rank 0, which JSON can hold. Every process must call this."""
        content = json.dumps(value).encode() if self.world.rank == 0 else b""
        # Groups can sum tensors only. The other ranks add zeros, so each sum is the number of rank 0.
        length = int(self.sum(torch.tensor(len(content))))
        numbers = torch.zeros(length)
        numbers[: len(content)] = torch.tensor(list(content))
        return json.loads(bytes(self.sum(numbers).int().tolist()))

    def explain_error(self, error: Exception) -> Exception:
        """Return ``error``, or a PeerLost if a lost peer is the cause of ``error``."""
        return error

    def close(self) -> None:  # noqa: B027 - nothing is a sensible default
        """Leave the group. Call this after the wrapped module has been dropped."""


class SingleProcess(Group):
    """A group of one process, which communicates with no other process."""

    world = World()

    def wrap(self, module: nn.Module) -> nn.Module:
        return module

    def no_sync(self, module: nn.Module) -> AbstractContextManager[object]:
        return nullcontext()

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_reduce_status(self, weight: Tensor, *, stop: bool, late: bool, skip: Tensor) -> GlobalStatus:
        return GlobalStatus(weight, stop, late, skip)


class TorchGroup(Group):
    """Processes that communicate through ``torch.distributed``.

    The processes find each other by torchrun's environment variables. ``facts`` has the backends of the run's
    device. Counts and metrics are always reduced in host memory, gradients and weights on their device.

    Raises MachineError if the processes do not find each other. Later, a collective raises RuntimeError if a
    peer does not answer for ``timeout_seconds``, and at once if a peer has died.
    """

    # The group that reduces in host memory. None means torch's default group, if its backends include the
    # CPU.
    _host_group: dist.ProcessGroup | None = None

    def __init__(self, world: World, facts: DeviceFacts = HOST, timeout_seconds: float = 1800.0) -> None:
        self.world = world
        self.facts = facts
        self._averaged_buffers: list[Tensor] = []
        timeout = timedelta(seconds=timeout_seconds)
        try:
            # The argument device_id is left out unless needed. Some vendors' replacements of
            # ``init_process_group`` do not have it.
            device_option: dict[str, Any] = {}
            if facts.group_device:
                # Torch then creates the communicator at once, on the device that this rank has opened.
                device_option["device_id"] = torch.empty(0, device=facts.group_device).device
            dist.init_process_group(
                facts.backends,
                store=store_of_one_host(world, facts.network_variables, timeout_seconds),
                rank=world.rank,
                world_size=world.size,
                timeout=timeout,
                **device_option,
            )
            if "cpu" not in facts.collectives:
                self._host_group = dist.new_group(backend="gloo", timeout=timeout)
        except (RuntimeError, ValueError, OSError) as error:  # no answer, no MASTER_ADDR, or a port in use
            failure = f"rank {world.rank} of {world.size} did not find its peers ({facts.backends})"
            raise MachineError(f"{failure}: {first_line(error)}") from error

    def wrap(self, module: nn.Module) -> nn.Module:
        """Wrap ``module`` in DDP, with rank 0's parameters and buffers on all ranks.

        ``requires_grad`` may change between updates, in the same way on all ranks. Every
        ``all_reduce_status`` averages the buffers called ``running_*`` (BatchNorm's) over the group.
        """
        with self.rank_status.collective():
            self._share_buffers(module)
            return _DDPWrapper(module, self.rank_status, self.facts)

    def _share_buffers(self, module: nn.Module) -> None:
        """Copy rank 0's buffers to all ranks, and list the buffers that ``all_reduce_status`` averages."""
        with torch.no_grad():
            for buffer in module.buffers():
                self._broadcast(buffer)
        self._averaged_buffers = []
        for path, buffer in module.named_buffers():
            name = path.rpartition(".")[2]
            if name.startswith("running_") and buffer.is_floating_point():
                self._averaged_buffers.append(buffer)

    def no_sync(self, module: nn.Module) -> AbstractContextManager[object]:
        wrapper: Any = module  # from ``wrap``
        context: AbstractContextManager[object] = wrapper.no_sync()
        return context

    def sum(self, tensor: Tensor) -> Tensor:
        total = tensor.detach().clone()
        with self.rank_status.collective():
            dist.all_reduce(total, group=self._host_group)
        return total

    def all_reduce_status(self, weight: Tensor, *, stop: bool, late: bool, skip: Tensor) -> GlobalStatus:
        # All values are concatenated into one vector, because each reduction costs a round trip.
        dtype = self.facts.sum_dtype
        flags = torch.tensor([stop, late], dtype=dtype)
        tensors = [weight, skip, *self._averaged_buffers]
        # On an accelerator, the flags have a reduction of their own in host memory. Then no rank must wait
        # for its device before it knows whether to stop.
        flags_in_vector = weight.device == flags.device
        if flags_in_vector:
            tensors.insert(0, flags)
        sums = torch.cat([tensor.detach().to(dtype).reshape(-1) for tensor in tensors])
        with self.rank_status.collective():
            dist.all_reduce(sums)
            if flags_in_vector:
                flags, sums = sums[:2], sums[2:]
            else:
                dist.all_reduce(flags, group=self._host_group)
        self._average_buffers(sums[2:])
        return GlobalStatus(
            weight=sums[0].float(), stop=bool(flags[0]), late=bool(flags[1]), skip=sums[1] > 0
        )

    def _average_buffers(self, buffer_sums: Tensor) -> None:
        """Store the means over the ranks in the averaged buffers.

        ``buffer_sums`` (elements,) contains the sums of all these buffers, one buffer after another.
        """
        sizes = [buffer.numel() for buffer in self._averaged_buffers]
        means = torch.split(buffer_sums / self.world.size, sizes)
        for buffer, mean in zip(self._averaged_buffers, means, strict=True):
            buffer.copy_(mean.view_as(buffer))

    def explain_error(self, error: Exception) -> Exception:
        if isinstance(error, RuntimeError) and re.search(self.facts.peer_lost, str(error), re.I):
            # The text of gloo or NCCL stays in the trace.
            rank = f"rank {self.world.rank} ({self.rank_status})"
            return PeerLost(f"{rank} has lost a peer, or got no answer from it")
        return error

    def close(self) -> None:
        """Leave the group."""
        # Objects that refer to the communicator must be freed first. Otherwise a run of two processes
        # sometimes died when the interpreter exited ("terminate called without an active exception").
        self._averaged_buffers = []
        gc.collect()
        dist.destroy_process_group()

    def _broadcast(self, tensor: Tensor) -> None:
        """Copy the content of rank 0's ``tensor`` to every rank.

        The content is sent from host memory as bytes, so every dtype works.
        """
        host_copy = tensor.detach().cpu()
        content = host_copy.reshape(-1).contiguous().view(torch.uint8)
        dist.broadcast(content, src=0, group=self._host_group)
        tensor.copy_(content.view(tensor.dtype).view_as(tensor))


class _DDPWrapper(nn.Module):
    """A module in DDP. After backward, the gradients are sums over all ranks.

    DDP reduces gradients during the backward pass. It requires that the set of parameters with
    ``requires_grad`` does not change. After a change, for example when an encoder is unfrozen, the wrapper
    builds DDP again. If a module sets ``skips_parameters``, DDP searches its graph for parameters that an
    update does not use.
    """

    def __init__(self, module: nn.Module, rank_status: RankStatus, facts: DeviceFacts) -> None:
        super().__init__()
        self.module = module
        self.rank_status = rank_status
        self.facts = facts
        self.ddp: DistributedDataParallel | None = None
        self._trainable: list[bool] = []
        self._build_ddp()

    def _build_ddp(self) -> None:
        """Build DDP if the set of parameters that require a gradient has changed."""
        trainable = [parameter.requires_grad for parameter in self.module.parameters()]
        if trainable == self._trainable:
            return
        is_first_build = not self._trainable
        self._trainable = trainable
        self.ddp = None
        gc.collect()  # The old DDP is part of a reference cycle, and its hooks on the parameters must go.
        if not any(trainable):
            return
        # Torch 2.13 warns that broadcast_buffers has a new name. Earlier versions know only this name.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.ddp = DistributedDataParallel(
                self.module,
                broadcast_buffers=False,
                init_sync=is_first_build,  # Later the parameters of all ranks are equal.
                find_unused_parameters=bool(getattr(self.module, "skips_parameters", False)),
                **self.facts.ddp_options,
            )
        # DDP refuses a hook whose annotations differ from its own hooks' annotations. A lambda has none.
        self.ddp.register_comm_hook(self.rank_status, lambda status, bucket: _sum_bucket(status, bucket))

    def no_sync(self) -> AbstractContextManager[object]:
        self._build_ddp()
        if self.ddp is None:
            return nullcontext()
        context: AbstractContextManager[object] = self.ddp.no_sync()
        return context

    def forward(self, *inputs: Any) -> Any:
        self._build_ddp()
        return self.module(*inputs) if self.ddp is None else self.ddp(*inputs)


def _sum_bucket(rank_status: RankStatus, bucket: Any) -> torch.futures.Future[Tensor]:
    """Start to sum a bucket of gradients over the ranks. Return the future sum.

    DDP's own hook averages. In fp16 the average loses precision, and the trainer would have to undo it.
    """

    def record_end(reduction: torch.futures.Future[list[Tensor]]) -> Tensor:
        gradients = reduction.value()[0]  # If the reduction failed, this raises, and no end is recorded.
        rank_status.end_collective()
        return gradients

    rank_status.begin_collective()
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    gradients: torch.futures.Future[Tensor] = work.get_future().then(record_end)
    return gradients


def open_group(world: World, facts: DeviceFacts = HOST, timeout_seconds: float = 1800.0) -> Group:
    """Return the group of the processes in ``world``.

    Raises MachineError if the processes do not find each other.
    """
    if world.size == 1:
        return SingleProcess()
    return TorchGroup(world, facts, timeout_seconds)

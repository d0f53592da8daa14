"""The group of a run's processes, and how they communicate.

Callers do not ask whether a run is distributed. A run of one process has the group ``SingleProcess``.
"""

from __future__ import annotations

import gc
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from speechtrain.devices.base import DeviceFacts
from speechtrain.distributed.loopback import store_of_one_host
from speechtrain.distributed.watchdog import RankStatus, collective
from speechtrain.errors import MachineError, first_line
from speechtrain.launcher import World

HOST = DeviceFacts()


class Status(NamedTuple):
    """The state of an update over all ranks, after its backward."""

    weight: Tensor  # () fp32, the sum of the ranks' weights
    stop: bool  # a rank must stop
    late: bool  # a rank is out of time
    skip: Tensor  # () bool, a rank skips the update


class PeerLost(MachineError):
    """Another rank has ended or does not answer. The error on this rank is not the cause."""


class Group(ABC):
    """The processes of a run, as one object."""

    world: World

    @cached_property
    def rank_status(self) -> RankStatus:
        """The step and the phase of this rank. It also says whether the rank waits for peers."""
        return RankStatus()

    def shard(  # noqa: B027
        self, module: nn.Module, optimizer: torch.optim.Optimizer, narrow: torch.dtype | None = None
    ) -> None:
        """Shard parameters and optimizer if this group shards. Call this before any weights are loaded.

        ``narrow`` is the type in which units that set ``computes_narrow`` are gathered. With None it is the
        type of their parameters.
        """

    @abstractmethod
    def wrap(self, module: nn.Module) -> nn.Module:
        """Wrap ``module`` so that its backward sums the gradients over the group."""

    @abstractmethod
    def no_sync(self, module: nn.Module) -> AbstractContextManager[object]:
        """Return a context in which backward does not reduce gradients.

        It is used for all micro-batches of an update except the last one.
        """

    @abstractmethod
    def sum(self, tensor: Tensor) -> Tensor:
        """Return the elementwise sum over the group. ``tensor`` is in host memory."""

    def barrier(self) -> None:
        """Wait until all processes are here."""
        self.any(False)  # This is reduced on the host. The barrier of nccl allocates memory on a device.

    def main_process_first(self) -> AbstractContextManager[None]:
        """Return a context that rank 0 runs first. The other ranks then see the files that it wrote."""
        return nullcontext()

    @abstractmethod
    def all_reduce_status(self, weight: Tensor, *, stop: bool, late: bool, skip: Tensor) -> Status:
        """After backward, sum the weights of all ranks, and combine each flag by "or".

        ``weight`` is () fp32 and ``skip`` () bool. Both stay on the device. ``stop`` and ``late`` are on the
        host. Clocks and signals differ between ranks, so no rank may decide alone to end.
        """

    def any(self, flag: bool) -> bool:
        """Return whether the flag of any process is set. Every process must call this."""
        flags_set = self.sum(torch.tensor([float(flag)]))
        return bool(flags_set[0] > 0)

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

    def all_reduce_status(self, weight: Tensor, *, stop: bool, late: bool, skip: Tensor) -> Status:
        return Status(weight, stop, late, skip)


class TorchGroup(Group):
    """Processes that communicate through ``torch.distributed``. They find each other by torchrun's variables.

    ``facts`` names the backends of the run's device. Counts and metrics are always reduced in host memory,
    gradients and weights on their device. A wait for a peer raises RuntimeError after ``timeout_seconds``
    without an answer, and at once if the peer has died.
    Raises MachineError if the processes do not find each other.
    """

    _host_group: dist.ProcessGroup | None = None  # None: the default group, which also reduces in host memory

    def __init__(self, world: World, facts: DeviceFacts = HOST, timeout_seconds: float = 1800.0) -> None:
        self.world = world
        self.facts = facts
        self._averaged_buffers: list[Tensor] = []
        timeout = timedelta(seconds=timeout_seconds)
        try:
            binding: dict[str, Any] = {}  # A vendor's replacement of the function may not take device_id.
            if facts.group_device:
                # The group is bound to the device that this rank has opened. Its communicator starts there.
                binding["device_id"] = torch.empty(0, device=facts.group_device).device
            dist.init_process_group(
                facts.backends,
                store=store_of_one_host(world, facts.network_variables, timeout_seconds),
                rank=world.rank,
                world_size=world.size,
                timeout=timeout,
                **binding,
            )
            if "cpu" not in facts.collectives:
                self._host_group = dist.new_group(backend="gloo", timeout=timeout)
        except (RuntimeError, ValueError, OSError) as error:  # a port in use, no answer, no MASTER_ADDR
            failure = f"rank {world.rank} of {world.size} did not find its peers ({facts.backends})"
            raise MachineError(f"{failure}: {first_line(error)}") from error

    @collective
    def wrap(self, module: nn.Module) -> nn.Module:
        """Wrap ``module`` in DDP, with rank 0's parameters and buffers on all ranks.

        ``requires_grad`` may change between updates, on all ranks alike. Buffers called ``running_*``
        (BatchNorm's) are averaged over the group in every ``all_reduce_status``.
        """
        self._share_buffers(module)
        return _DDPWrapper(module, self.rank_status, self.facts)

    def _share_buffers(self, module: nn.Module) -> None:
        """Give all ranks rank 0's buffers, and list the buffers that ``all_reduce_status`` averages."""
        with torch.no_grad():
            for buffer in module.buffers():
                self._broadcast(buffer)
        self._averaged_buffers = []
        for path, buffer in module.named_buffers():
            name = path.rpartition(".")[2]
            if name.startswith("running_") and buffer.is_floating_point():
                self._averaged_buffers.append(buffer)

    def no_sync(self, module: nn.Module) -> AbstractContextManager[object]:
        assert isinstance(module, _DDPWrapper)
        return module.no_sync()

    @collective
    def sum(self, tensor: Tensor) -> Tensor:
        total = tensor.detach().clone()
        dist.all_reduce(total, group=self._host_group)
        return total

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        if self.world.rank:
            self.barrier()
        yield
        if not self.world.rank:
            self.barrier()

    @collective
    def all_reduce_status(self, weight: Tensor, *, stop: bool, late: bool, skip: Tensor) -> Status:
        dtype = self.facts.sum_dtype
        flags = torch.tensor([stop, late], dtype=dtype)
        parts = [weight, skip, *self._averaged_buffers]
        # If the weight is on another device, the flags are reduced on the host and need not wait for it.
        is_apart = weight.device != flags.device
        if not is_apart:
            parts.insert(0, flags)
        vectors = [part.detach().to(dtype).reshape(-1) for part in parts]
        joined = torch.cat(vectors)
        dist.all_reduce(joined)
        if is_apart:
            dist.all_reduce(flags, group=self._host_group)
        else:
            flags, joined = joined[:2], joined[2:]
        self._average_buffers(joined[2:])
        return Status(joined[0].float(), bool(flags[0]), bool(flags[1]), joined[1] > 0)

    def _average_buffers(self, sums: Tensor) -> None:
        """Store the means over the ranks in the averaged buffers. ``sums`` has all their sums in a row."""
        sizes = [buffer.numel() for buffer in self._averaged_buffers]
        means = torch.split(sums / self.world.size, sizes)
        for buffer, mean in zip(self._averaged_buffers, means, strict=True):
            buffer.copy_(mean.view_as(buffer))

    def explain_error(self, error: Exception) -> Exception:
        if isinstance(error, RuntimeError) and re.search(self.facts.peer_lost, str(error), re.I):
            # The trace has the text of gloo or nccl.
            rank = f"rank {self.world.rank} ({self.rank_status})"
            return PeerLost(f"{rank} has lost a peer, or got no answer from it")
        return error

    def close(self) -> None:
        """Leave the group. First free all objects that refer to its communicator.

        Otherwise a run of two processes sometimes died when the interpreter exited ("terminate called without
        an active exception").
        """
        self._averaged_buffers = []
        gc.collect()
        dist.destroy_process_group()

    def _broadcast(self, tensor: Tensor) -> None:
        """Copy rank 0's content to every rank. It is sent from host memory as bytes, so every dtype works."""
        host_copy = tensor.detach().cpu()
        content = host_copy.reshape(-1).contiguous().view(torch.uint8)
        dist.broadcast(content, 0, group=self._host_group)
        tensor.copy_(content.view(tensor.dtype).view_as(tensor))


class _DDPWrapper(nn.Module):
    """A module in DDP. After backward, the gradients are sums over all ranks.

    DDP reduces gradients during the backward pass, but the parameters that require a gradient must stay the
    same. After a change, such as an unfrozen encoder, DDP is built again. If a module sets
    ``skips_parameters``, DDP searches its graph for parameters that an update does not use.
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
        """Build DDP if the parameters that require a gradient have changed."""
        trainable = [parameter.requires_grad for parameter in self.module.parameters()]
        if trainable == self._trainable:
            return
        is_first = not self._trainable
        self._trainable = trainable
        self.ddp = None
        gc.collect()  # DDP is part of a reference cycle. This also frees its hooks on the parameters.
        if not any(trainable):
            return
        # Torch 2.13 renames broadcast_buffers and warns. Earlier versions need this name.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.ddp = DistributedDataParallel(
                self.module,
                broadcast_buffers=False,
                init_sync=is_first,
                find_unused_parameters=bool(getattr(self.module, "skips_parameters", False)),
                **self.facts.ddp_options,
            )
        # DDP refuses a hook that has other annotations than its own hooks. A lambda has none.
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
    """Sum a bucket of gradients over the ranks.

    DDP's hook averages. In fp16 the average loses precision, and the trainer would have to undo it.
    """

    def end(reduction: torch.futures.Future[list[Tensor]]) -> Tensor:
        gradients = reduction.value()[0]  # This raises if the reduction failed. It then never completes.
        rank_status.leave()
        return gradients

    rank_status.enter()
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    gradients: torch.futures.Future[Tensor] = work.get_future().then(end)
    return gradients


def open_group(world: World, facts: DeviceFacts = HOST, timeout_seconds: float = 1800.0) -> Group:
    """Return the group of ``world``'s processes. Raises MachineError if they do not find each other."""
    return SingleProcess() if world.size == 1 else TorchGroup(world, facts, timeout_seconds)

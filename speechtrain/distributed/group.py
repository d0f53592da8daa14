"""The group of a run's processes, and how they communicate.

No caller asks whether a run is distributed: one process is a ``SingleProcess``, a group of one.
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
from typing import Any

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
Status = tuple[Tensor, bool, bool, Tensor]
"""The summed weight (), whether a rank must stop, whether one is out of time, and whether one skips ()."""


class PeerLost(MachineError):
    """Another rank has ended or does not answer: the error on this rank is not the cause."""


class Group(ABC):
    """The processes of a run, as one object."""

    world: World

    @cached_property
    def rank_status(self) -> RankStatus:
        """This rank's step and phase, and whether it waits for peers."""
        return RankStatus()

    def shard(  # noqa: B027
        self, module: nn.Module, optimizer: torch.optim.Optimizer, narrow: torch.dtype | None = None
    ) -> None:
        """Shard parameters and optimizer if this group shards; call it before anything is loaded.

        ``narrow`` is the type in which units that set ``computes_narrow`` are gathered; None: their own.
        """

    @abstractmethod
    def wrap(self, module: nn.Module) -> nn.Module:
        """Wrap ``module`` so that its backward sums the gradients over the group."""

    @abstractmethod
    def no_sync(self, module: nn.Module) -> AbstractContextManager[object]:
        """A context in which backward does not reduce gradients (all micro-batches but the last)."""

    @abstractmethod
    def sum(self, tensor: Tensor) -> Tensor:
        """The elementwise sum over the group, of a tensor in host memory."""

    def barrier(self) -> None:
        self.any(False)  # a host reduction: nccl's own barrier takes memory on a device of its choice

    def main_process_first(self) -> AbstractContextManager[None]:
        """A context that rank 0 runs before the others, which then find what it has written."""
        return nullcontext()

    @abstractmethod
    def all_reduce_status(self, weight: Tensor, *, stop: bool, late: bool, skip: Tensor) -> Status:
        """After backward, sum the weight and find whether any rank must stop, is out of time, or skips.

        ``weight`` () fp32; ``skip`` () bool. Returns ``stop`` and ``late`` on the host, the others on the
        device. Clocks and signals differ between ranks: no rank may decide alone to end.
        """

    def any(self, flag: bool) -> bool:
        """Whether the flag of any process is set; every process must call this."""
        return bool(self.sum(torch.tensor([float(flag)]))[0] > 0)

    def explained(self, error: Exception) -> Exception:
        """``error``, or a PeerLost if a lost peer is the cause of ``error``."""
        return error

    def close(self) -> None:  # noqa: B027 - nothing is a sensible default
        """Leave the group. Call after the wrapped module has been dropped."""


class SingleProcess(Group):
    world = World()

    def wrap(self, module: nn.Module) -> nn.Module:
        return module

    def no_sync(self, module: nn.Module) -> AbstractContextManager[object]:
        return nullcontext()

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_reduce_status(self, weight: Tensor, *, stop: bool, late: bool, skip: Tensor) -> Status:
        return weight, stop, late, skip


class TorchGroup(Group):
    """Processes that communicate through ``torch.distributed``, found by torchrun's variables.

    ``facts`` names the backends of the run's device. Flags, counts and metrics are always reduced in host
    memory, gradients and weights on their device. A wait for a peer raises RuntimeError after
    ``timeout_seconds`` without an answer, and at once if the peer has died.
    Raises MachineError if the processes do not find each other.
    """

    _of_host: dist.ProcessGroup | None = None  # None: the default group, which also reduces in host memory

    def __init__(self, world: World, facts: DeviceFacts = HOST, timeout_seconds: float = 1800.0) -> None:
        self.world = world
        self.facts = facts
        self._statistics: list[Tensor] = []
        timeout = timedelta(seconds=timeout_seconds)
        try:
            dist.init_process_group(
                facts.backends,
                store=store_of_one_host(world, facts.network_variables, timeout_seconds),
                rank=world.rank,
                world_size=world.size,
                timeout=timeout,
                # the device that this rank has opened, so that its communicator starts here
                device_id=torch.empty(0, device=facts.bound).device if facts.bound else None,
            )
            if "cpu" not in facts.collectives:
                self._of_host = dist.new_group(backend="gloo", timeout=timeout)
        except (RuntimeError, ValueError, OSError) as error:  # a taken port, no answer, no MASTER_ADDR
            missed = f"rank {world.rank} of {world.size} did not find its peers ({facts.backends})"
            raise MachineError(f"{missed}: {first_line(error)}") from error

    @collective
    def wrap(self, module: nn.Module) -> nn.Module:
        """Wrap ``module`` in DDP, with rank 0's parameters and buffers on all ranks.

        ``requires_grad`` may change between updates, on all ranks alike. Buffers called ``running_*``
        (BatchNorm's) are averaged over the group in every ``all_reduce_status``.
        """
        self._share_buffers(module)
        return _DDPWrapper(module, self.rank_status, self.facts)

    def _share_buffers(self, module: nn.Module) -> None:
        """Give all ranks rank 0's buffers, and note those that ``all_reduce_status`` averages."""
        with torch.no_grad():
            for buffer in module.buffers():
                self._broadcast(buffer)
        self._statistics = [
            buffer
            for name, buffer in module.named_buffers()
            if name.rpartition(".")[2].startswith("running_") and buffer.is_floating_point()
        ]

    def no_sync(self, module: nn.Module) -> AbstractContextManager[object]:
        assert isinstance(module, _DDPWrapper)
        return module.no_sync()

    @collective
    def sum(self, tensor: Tensor) -> Tensor:
        total = tensor.detach().clone()
        dist.all_reduce(total, group=self._of_host)
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
        is_apart = weight.device != flags.device  # the host's flags then wait for no device
        numbers = [weight.reshape(1), skip.reshape(1), *(s.reshape(-1) for s in self._statistics)]
        joined = torch.cat([part.detach().to(dtype) for part in (numbers if is_apart else [flags, *numbers])])
        dist.all_reduce(joined)
        if is_apart:
            dist.all_reduce(flags, group=self._of_host)
        else:
            flags, joined = joined[:2], joined[2:]
        means = torch.split(joined[2:] / self.world.size, [s.numel() for s in self._statistics])
        for statistic, mean in zip(self._statistics, means, strict=True):
            statistic.copy_(mean.view_as(statistic))
        stop, late = (count > 0 for count in flags.tolist())
        return joined[0].float(), stop, late, joined[1] > 0

    def explained(self, error: Exception) -> Exception:
        if isinstance(error, RuntimeError) and re.search(self.facts.peer_lost, str(error), re.I):
            # the text of gloo or nccl is in the trace
            place = f"rank {self.world.rank} ({self.rank_status})"
            return PeerLost(f"{place} has lost a peer, or got no answer from it")
        return error

    def close(self) -> None:
        """Everything that refers to the group's communicator must be freed before it: otherwise a two-process
        run sometimes died at interpreter exit ("terminate called without an active exception").
        """
        self._statistics = []
        gc.collect()
        dist.destroy_process_group()

    def _broadcast(self, tensor: Tensor) -> None:
        """Copy rank 0's content to every rank, by the host and as bytes, so that every dtype works."""
        content = tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8)
        dist.broadcast(content, 0, group=self._of_host)
        tensor.copy_(content.view(tensor.dtype).view_as(tensor))


class _DDPWrapper(nn.Module):
    """A module in DDP; after backward, the gradients are sums over all ranks.

    DDP overlaps the reductions with the backward pass, but fixes the set of parameters that require a
    gradient: after a change (such as an unfrozen encoder) it is built again. If a module sets
    ``skips_parameters``, DDP searches its graph for parameters that an update does not use.
    """

    def __init__(self, module: nn.Module, rank_status: RankStatus, facts: DeviceFacts) -> None:
        super().__init__()
        self.module = module
        self.rank_status = rank_status
        self.facts = facts
        self.ddp: DistributedDataParallel | None = None
        self._trainable: list[bool] = []
        self._renew()

    def _renew(self) -> None:
        trainable = [parameter.requires_grad for parameter in self.module.parameters()]
        if trainable == self._trainable:
            return
        is_first = not self._trainable
        self._trainable = trainable
        self.ddp = None
        gc.collect()  # DDP is part of a reference cycle; this frees its hooks on the parameters, too
        if not any(trainable):
            return
        with warnings.catch_warnings():  # torch 2.13 renames broadcast_buffers; earlier ones need that name
            warnings.simplefilter("ignore", FutureWarning)
            self.ddp = DistributedDataParallel(
                self.module,
                broadcast_buffers=False,
                init_sync=is_first,
                find_unused_parameters=bool(getattr(self.module, "skips_parameters", False)),
                **self.facts.ddp_options,
            )
        self.ddp.register_comm_hook(self.rank_status, lambda status, bucket: _sum_bucket(status, bucket))

    def no_sync(self) -> AbstractContextManager[object]:
        self._renew()
        held: AbstractContextManager[object] = nullcontext() if self.ddp is None else self.ddp.no_sync()
        return held

    def forward(self, *inputs: Any) -> Any:
        self._renew()
        return self.module(*inputs) if self.ddp is None else self.ddp(*inputs)


def _sum_bucket(rank_status: RankStatus, bucket: Any) -> torch.futures.Future[Tensor]:
    """Sum a bucket without DDP's average, which fp16 would round and the trainer would have to undo."""

    def summed(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        content = done.value()[0]  # raises if the reduction failed: it has not completed
        rank_status.leave()
        return content

    rank_status.enter()
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    reduced: torch.futures.Future[Tensor] = work.get_future().then(summed)
    return reduced


def open_group(world: World, facts: DeviceFacts = HOST, timeout_seconds: float = 1800.0) -> Group:
    """The group of ``world``'s processes. Raises MachineError if they do not find each other."""
    return SingleProcess() if world.size == 1 else TorchGroup(world, facts, timeout_seconds)

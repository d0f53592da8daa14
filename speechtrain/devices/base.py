"""The interface of a device. No code above it depends on the kind of device."""

from __future__ import annotations

import resource
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from speechtrain import torch_private
from speechtrain.batch import Batch
from speechtrain.compute_policy import STATIC, ComputePolicy, usable_cpus
from speechtrain.errors import ConfigError, MachineError
from speechtrain.precision import NAMES, Precision

_CORES_OF_A_CARD = 100  # the speed of an accelerator in a plan

Prepared = tuple[nn.Module, torch.optim.Optimizer]
"""A module and its optimizer, with the vendor's transformations."""


@dataclass(frozen=True)
class Operations:
    """What a device runs; the defaults are those of eager devices. ``Recorder`` holds a step against it."""

    known: frozenset[str] = frozenset()  # ATen's names without overload and final underscore; empty: all
    refused_dtypes: tuple[torch.dtype, ...] = ()
    int64_bits: int = 64  # that int64 really has
    reinterprets: bool = True  # Tensor.view(dtype)
    largest_graph: int = 0  # most operations of a graph; 0: any number
    records: bool = False  # graphs, which a read by the host or a shape that depends on data ends


@dataclass(frozen=True)
class DeviceFacts:
    """Facts of a device for other parts. A host without an accelerator has the defaults."""

    # the torch.distributed backend of each torch device type; without cpu the host has a group of its own
    collectives: Mapping[str, str] = field(default_factory=lambda: {"cpu": "gloo"})
    bound: str = ""  # the torch device type to whose opened chip the group is bound; empty: to none
    ddp_options: Mapping[str, Any] = field(default_factory=dict)  # of torch's DistributedDataParallel
    network_variables: tuple[str, ...] = ("GLOO_SOCKET_IFNAME",)  # they name the collectives' interface
    forwarded_variables: tuple[str, ...] = ()  # patterns of the vendor's, which remote ranks get, too
    # values of ``Device.environment`` that commands other than training replace
    evaluation_variables: Mapping[str, str] = field(default_factory=dict)
    # case-insensitive patterns in error texts: of allocators without memory, of collectives without a peer
    out_of_memory: str = (
        "out of memory|not enough memory|can't allocate memory|cannot allocate memory"
        "|CU(BLAS|DNN)_STATUS_ALLOC_FAILED"
    )
    peer_lost: str = "gloo"
    optimizer_flags: Mapping[str, bool] = field(default_factory=dict)  # they override the config's
    sum_dtype: torch.dtype = torch.float64  # of sums over ranks: accelerators may lack fp64
    fsdp: bool = True  # whether ranks may shard parameters: not where graphs hold fixed tensors
    host_gib: int = 0  # GiB of the host's memory that each process may need
    narrow_gathers: bool = False  # whether sharded parameters are sent in autocast's type
    operations: Operations = Operations()
    packages: tuple[str, ...] = ()  # patterns of the vendor's modules, named in the device's file only
    plugin: str = ""  # the vendor's distribution that extends torch
    plugin_torch: Mapping[str, str] = field(default_factory=dict)  # torch version by release of the plugin

    @property
    def backends(self) -> str:
        """The collectives in torch's form: ``cpu:gloo,hpu:hccl``."""
        return ",".join(f"{kind}:{backend}" for kind, backend in self.collectives.items())


class Device(ABC):
    """One kind of chip: its environment, its tensors, its memory."""

    name: str
    """Torch's device type, also for autocast."""

    facts: DeviceFacts = DeviceFacts()
    """What other parts must know of it, before it is opened."""

    oversubscribe: bool = True
    """Whether a host may get more ranks than it has CPUs, or memory for their models."""

    on_host: bool = False
    """Whether it computes on the host's cores, in the host's memory."""

    static_shapes: bool = False
    """Whether every tensor shape of a step must come from a fixed set, which the start line prints."""

    compile: bool = False
    """Whether ``torch.compile`` compiles the model, for each shape (``compute_policy.compile_module``)."""

    def environment(self, processes: int) -> dict[str, str]:
        """Variables that must be set before Python starts, for ``processes`` ranks on this host.

        Imports no vendor library. The launcher lets values that the user has set override these.
        """
        return {}

    def check(self, processes: int) -> None:  # noqa: B027 - nothing is a sensible default
        """Raise MachineError if this host clearly cannot run ``processes`` ranks. It claims no chip.

        The command calls it before it starts processes. ``open`` makes the final check.
        """

    def absence(self, processes: int) -> str:
        """Return the error of ``check``, empty if there is none."""
        try:
            self.check(processes)
        except MachineError as error:
            return str(error)
        return ""

    def obstacle(self) -> str:
        """Return in few words why ``device=auto`` cannot mean this device here, or an empty text.

        It may ask the driver, and claims no chip.
        """
        return self.absence(1)

    def equivalent_cores(self, world_size: int) -> int:
        """Return the number of CPU cores that a plan for ``world_size`` ranks on this host counts with."""
        return len(usable_cpus()) if self.on_host else _CORES_OF_A_CARD * world_size

    def validate_shapes(self, shapes: Sequence[tuple[int, int, int]]) -> None:
        """Check the fixed shapes of training, none if they vary. Raises ConfigError if they must not vary."""
        if (self.static_shapes or self.compile) and not shapes:
            raise ConfigError(
                f"data.shapes=0: device={self.name} compiles a graph for every shape; set data.shapes=8"
            )

    @abstractmethod
    def open(self, local_rank: int) -> None:
        """Claim the chip for this process. Raises MachineError if that fails."""

    def check_precision(self, precision: Precision) -> None:
        """Raise MachineError if this device cannot train in ``precision``."""
        if not self.supports(precision.dtype):
            others = " or ".join(f"precision={name}" for dtype, name in NAMES.items() if self.supports(dtype))
            fault = f"precision={precision.name}: device={self.name} does not train in it"
            raise MachineError(f"{fault}; use {others}")

    @abstractmethod
    def supports(self, dtype: torch.dtype) -> bool:
        """Whether training in ``dtype`` is supported here."""

    def precision_fallback_reason(self, dtype: torch.dtype) -> str:
        """A warning that training is in fp32 on this chip, or of a known problem with it, else empty."""
        return ""

    def policy(self, dtype: torch.dtype) -> ComputePolicy:
        """The plain policy of training in ``dtype``: torch's own kernels where the device has them."""
        policy = ComputePolicy()
        if self.static_shapes:
            policy = replace(STATIC, mark_step=self.mark_step)
        if self.compile:
            policy = replace(policy, compiler="inductor")
        if dtype == torch.float32:
            return policy
        products = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32  # float16 is too narrow
        return replace(policy, autocast_dtype=dtype, product_dtype=products)

    def attach(self, policy: ComputePolicy) -> ComputePolicy:
        """``policy``, read from a record, with this opened device's own functions."""
        own = self.policy(torch.float32)
        return replace(policy, compiler=own.compiler, mark_step=self.mark_step, ctc_kernel=own.ctc_kernel)

    def candidates(self, dtype: torch.dtype) -> list[ComputePolicy]:
        """The policies to time on this opened device before the first step, the reference first."""
        return [self.policy(dtype)]

    def chip(self) -> str:
        """The name of the chip, for which a policy was chosen."""
        return self.name

    def move(self, batch: Batch) -> Batch:
        """The batch with its tensors on the device."""
        return batch.to(self.tensor)

    def prepare(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> Prepared:
        """Apply vendor transformations to a built module and its optimizer, before a checkpoint is read."""
        return module, optimizer

    def tensor(self, value: Tensor) -> Tensor:
        """One tensor on the device."""
        return value.to(self.name, non_blocking=True)

    def mark_step(self) -> None:  # noqa: B027 - nothing is a sensible default
        """End of a graph segment: after each micro-batch's backward and after the optimizer step."""

    def synchronize(self) -> None:  # noqa: B027 - nothing is a sensible default
        """Wait for queued work. It is called before a clock is read."""

    def memory(self) -> int:
        """Peak bytes in use so far: by default, of this process in the host's memory."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def free_memory(self, processes: int) -> int:
        """The bytes that this rank, of ``processes`` on its host, may still use. Raises MachineError."""
        raise MachineError(
            f"data.batch.memory_gib=auto: device={self.name} does not tell its free memory; set GiB"
        )

    def counts(self) -> dict[str, int]:
        """Counts since the run started, for log lines: compilations, cache hits, ends of graphs."""
        return {}

    def graphs(self) -> int:
        """Number of compilations so far: by default, by ``torch.compile``."""
        if not self.compile:
            return 0
        return int(torch_private.dynamo_counters["stats"].get("unique_graphs", 0))

"""The interface of a device. No code above it depends on the kind of device."""

from __future__ import annotations

import resource
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from speechtrain import torch_private
from speechtrain.batch import Batch
from speechtrain.compute_policy import ComputePolicy, usable_cpus
from speechtrain.errors import ConfigError, MachineError
from speechtrain.optim.optimizer_step import HostCheckedUpdate, Update
from speechtrain.precision import NAMES, Precision
from speechtrain.trainer_config import TrainerConfig

_CORES_OF_ACCELERATOR = 100  # A plan of a run counts an accelerator as this number of CPU cores.

Prepared = tuple[nn.Module, torch.optim.Optimizer]
"""A module and its optimizer, with the vendor's transformations."""


@dataclass(frozen=True)
class DeviceFacts:
    """Facts of a device that other parts need. A host without an accelerator has the defaults."""

    # The torch.distributed backend for each torch device type. If "cpu" is absent, a second process group
    # (gloo) reduces tensors in host memory.
    collectives: Mapping[str, str] = field(default_factory=lambda: {"cpu": "gloo"})
    # The torch device type that the process group is bound to when it is created. If it is empty, the first
    # collective creates the connections.
    group_device: str = ""
    ddp_options: Mapping[str, Any] = field(default_factory=dict)  # of torch's DistributedDataParallel
    # The environment variables that set the network interface of the collectives.
    network_variables: tuple[str, ...] = ("GLOO_SOCKET_IFNAME",)
    # Patterns of the vendor's environment variables. Remote ranks get this host's values.
    forwarded_variables: tuple[str, ...] = ()
    # Commands other than training use these values instead of those from ``Device.environment``.
    evaluation_variables: Mapping[str, str] = field(default_factory=dict)
    # A case-insensitive pattern in the errors of allocators without memory.
    out_of_memory: str = (
        "out of memory|not enough memory|can't allocate memory|cannot allocate memory"
        "|CU(BLAS|DNN)_STATUS_ALLOC_FAILED"
    )
    # A case-insensitive pattern in the errors of collectives that have lost a peer.
    peer_lost: str = "gloo"
    optimizer_flags: Mapping[str, bool] = field(default_factory=dict)  # override the flags in the config
    sum_dtype: torch.dtype = torch.float64  # of sums over ranks. Some accelerators do not have fp64.
    # Whether ranks may shard parameters. Graphs whose tensors have fixed addresses make that impossible,
    # because FSDP frees and allocates parameters in each step.
    fsdp: bool = True
    host_gib: int = 0  # GiB of the host's memory that each process may need
    narrow_gathers: bool = False  # whether sharded parameters are sent in autocast's type
    packages: tuple[str, ...] = ()  # patterns of the vendor's modules, which only the device's file imports
    plugin: str = ""  # the vendor's distribution that extends torch
    plugin_torch: Mapping[str, str] = field(default_factory=dict)  # torch version by release of the plugin

    @property
    def backends(self) -> str:
        """The collectives in torch's syntax: ``cpu:gloo,hpu:hccl``."""
        return ",".join([f"{kind}:{backend}" for kind, backend in self.collectives.items()])


class Device(ABC):
    """One kind of chip: its environment, its tensors, its memory."""

    name: str
    """Torch's device type, also for autocast."""

    facts: DeviceFacts = DeviceFacts()
    """The facts that other parts need before the device is opened."""

    oversubscribe: bool = True
    """Whether a host may start more ranks than it has CPUs, or memory for their models."""

    on_host: bool = False
    """Whether the device computes on the host's cores, in the host's memory."""

    static_shapes: bool = False
    """Whether every tensor shape of a step must come from a fixed set, as for each ``StaticDevice``."""

    compile: bool = False
    """Whether ``torch.compile`` compiles the model, for each shape (``compute_policy.compile_module``)."""

    def environment(self, processes: int) -> dict[str, str]:
        """Return the variables that must be set before Python starts, for ``processes`` ranks on this host.

        This imports no vendor library. Values that the user has set override the returned values.
        """
        return {}

    def check(self, processes: int) -> None:  # noqa: B027 - nothing is a sensible default
        """Raise MachineError if this host clearly cannot run ``processes`` ranks. This claims no chip.

        The command calls this before it starts processes. ``open`` makes the final check in each rank.
        """

    def library_fault(self) -> str:
        """Return why the installed library of the vendor cannot work here, or an empty text.

        This is one of the problems for which ``check`` raises MachineError, with the same text. The library
        is not imported.
        """
        return ""

    def absence(self, processes: int) -> str:
        """Return why this host cannot run ``processes`` ranks, or an empty text.

        This is the message of the MachineError that ``check`` raises, for callers that do not stop.
        """
        try:
            self.check(processes)
        except MachineError as error:
            return str(error)
        return ""

    def obstacle(self) -> str:
        """Return in few words why ``device=auto`` cannot choose this device here, or an empty text.

        A subclass may use shorter words than ``absence``, and may ask the driver. This claims no chip.
        """
        return self.absence(1)

    def equivalent_cores(self, world_size: int) -> int:
        """Return the number of CPU cores that are as fast as ``world_size`` ranks, for the plan of a run."""
        if self.on_host:
            return len(usable_cpus())
        return _CORES_OF_ACCELERATOR * world_size

    def rank_cores(self) -> int:
        """Return the number of cores of this host that may have a rank each. It is 1 for an accelerator."""
        return 1

    def validate_shapes(self, shapes: Sequence[tuple[int, int, int]]) -> None:
        """Raise ConfigError if training needs fixed shapes and ``shapes`` is empty.

        ``shapes`` is empty if the shapes of batches vary.
        """
        if (self.static_shapes or self.compile) and not shapes:
            raise ConfigError(
                f"data.shapes=0: device={self.name} compiles a graph for every shape. Set data.shapes=8"
            )

    def check_settings(self, settings: TrainerConfig) -> None:  # noqa: B027 - nothing is a sensible default
        """Raise ConfigError if this device cannot train with ``settings``."""

    @abstractmethod
    def open(self, local_rank: int = 0) -> None:
        """Claim the chip for this process. Raises MachineError if that fails."""

    def check_precision(self, precision: Precision) -> None:
        """Raise MachineError if this device cannot train in ``precision``."""
        if not self.supports(precision.dtype):
            choices = []
            for dtype, name in NAMES.items():
                if self.supports(dtype):
                    choices.append(f"precision={name}")
            fault = f"precision={precision.name}: device={self.name} does not train in it"
            raise MachineError(f"{fault}. Use {' or '.join(choices)}")

    @abstractmethod
    def supports(self, dtype: torch.dtype) -> bool:
        """Return whether training in ``dtype`` is supported here."""

    def precision_fallback_reason(self, dtype: torch.dtype) -> str:
        """Return why training in ``dtype`` on this chip falls back to fp32, or an empty text.

        The caller logs the text as a warning and trains in fp32.
        """
        return ""

    def policy(self, dtype: torch.dtype) -> ComputePolicy:
        """Return the default policy of training in ``dtype``: torch's own kernels if the device has them."""
        policy = ComputePolicy()
        if self.compile:
            policy = replace(policy, compiler="inductor")
        if dtype == torch.float32:
            return policy
        # The LSTM loop and the transducer joint cast their inputs to ``product_dtype``. The range of fp16 is
        # too narrow for their matmuls.
        product_dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        return replace(policy, autocast_dtype=dtype, product_dtype=product_dtype)

    def attach(self, policy: ComputePolicy) -> ComputePolicy:
        """Return ``policy``, which was read from a record, with the functions of this opened device.

        A record cannot store functions. They are the same in the policies of all dtypes.
        """
        default_policy = self.policy(torch.float32)
        return replace(
            policy,
            compiler=default_policy.compiler,
            mark_step=self.mark_step,
            ctc_kernel=default_policy.ctc_kernel,
        )

    def candidates(self, dtype: torch.dtype) -> list[ComputePolicy]:
        """Return the policies to time on this opened device before the first step, the reference first."""
        return [self.policy(dtype)]

    def chip(self) -> str:
        """Return the name of the chip. A stored policy is valid for chips with the same name."""
        return self.name

    def move(self, batch: Batch) -> Batch:
        """Return the batch with its tensors on the device."""
        return batch.to(self.tensor)

    def prepare(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> Prepared:
        """Return a module and its optimizer with the vendor's transformations.

        This is called after both are built and before a checkpoint is read.
        """
        return module, optimizer

    def check_parts(self, check: Callable[[], None]) -> None:
        """Call ``check``, which computes two recordings before the first update, and raises ConfigError."""
        check()

    def update(self, precision: Precision, clip: float) -> Update:
        """Return how a run updates its weights. Gradients are clipped to the norm ``clip`` unless it is 0."""
        return HostCheckedUpdate(precision, clip)

    def warm_up(self, rehearse: Callable[[], None]) -> None:  # noqa: B027 - nothing is a sensible default
        """Compile graphs before the first update. ``rehearse`` computes all shapes of a run, for minutes.

        By default nothing is compiled in advance.
        """

    def tensor(self, value: Tensor) -> Tensor:
        """Return the tensor ``value`` on the device."""
        return value.to(self.name, non_blocking=True)

    def mark_step(self) -> None:  # noqa: B027 - nothing is a sensible default
        """End a graph. The trainer calls this after each micro-batch's backward and each optimizer step."""

    def synchronize(self) -> None:  # noqa: B027 - nothing is a sensible default
        """Wait for queued work. The trainer calls this before it reads a clock."""

    def memory(self) -> int:
        """Return the peak of the memory in use so far, in bytes.

        By default this is the memory of this process on the host.
        """
        # Linux reports the peak in KiB.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def free_memory(self, processes: int) -> int:
        """Return the number of bytes that this rank may still use, as one of ``processes`` on its host.

        Raises MachineError if the device does not report its free memory.
        """
        raise MachineError(
            f"data.batch.memory_gib=auto: device={self.name} does not report its free memory. Set GiB"
        )

    def counts(self) -> dict[str, int]:
        """Return counts since the run started, for log lines: compilations, cache hits, ends of graphs."""
        return {}

    def graphs(self) -> int:
        """Return the number of compilations so far, by default by ``torch.compile``."""
        if not self.compile:
            return 0
        return int(torch_private.dynamo_counters["stats"].get("unique_graphs", 0))

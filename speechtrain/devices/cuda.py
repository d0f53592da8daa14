"""NVIDIA GPUs: plain PyTorch, one GPU for each process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speechtrain.batch import Batch
from speechtrain.compute_policy import ComputePolicy, usable_cpus
from speechtrain.devices import affinity, host
from speechtrain.devices.base import Device, DeviceFacts
from speechtrain.errors import MachineError, one_line

_CAPABILITY = {torch.bfloat16: (8, 0), torch.float16: (7, 0)}  # Ampere and Volta
# of the transducer loss, which launches kernels for every block of cells and every group of kept logits
_LATTICE_CELLS, _LOGIT_BYTES = 65536, 4 * 2**30
# NCCL's last collectives, written to a file when one times out; older torch reads the second name
_FLIGHT_RECORDER = dict.fromkeys(("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), "2000")
_FLIGHT_RECORDER["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1"
# the GPUs that Slurm binds to each task alone: --gpus-per-task, --tres-per-task, --gpu-bind
_BOUND = {
    "SLURM_GPUS_PER_TASK": r"(?:\w+:)?(\d+)",
    "SLURM_TRES_PER_TASK": r".*\bgpu(?:[:=]\w+)??[:=](\d+)\b.*",
    "SLURM_GPU_BIND": r"(?:.*,)?(?:single:(?=1$)|per_task:)(\d+)",
}

_DRIVER_SECONDS = 60.0
# A driver runs the CUDA releases of its own major version, and older ones.
_START_DRIVER = """
import ctypes, sys
driver, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
is_refused = driver.cuInit(0) or driver.cuDriverGetVersion(ctypes.byref(version))
sys.exit(bool(is_refused) or version.value // 1000 < int(sys.argv[1]))
"""


def _has_own_gpus(local_rank: int, visible: int) -> bool:
    """Whether the GPUs that are visible here are this rank's alone, so that its GPU is the first of them.

    Either Slurm's srun started this rank and bound as many to it as are visible, or ``CUDA_VISIBLE_DEVICES``
    is the rank's own number. Ranks of one launcher that all see the same GPU meet neither condition.
    """
    environ = os.environ
    if environ.get("CUDA_VISIBLE_DEVICES") == str(local_rank):
        return visible == 1
    found = [re.fullmatch(pattern, environ.get(name, "")) for name, pattern in _BOUND.items()]
    return environ.get("SLURM_LOCALID") == str(local_rank) and any(m and int(m[1]) == visible for m in found)


def _near(index: int, devices: Path = Path("/sys/bus/pci/devices")) -> set[int]:
    """The usable CPUs on the memory node of GPU ``index``; none where the kernel or torch does not say."""
    gpu: Any = torch.cuda.get_device_properties(index)
    if not hasattr(gpu, "pci_domain_id"):  # torch 2.8
        return set()
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    node = affinity.read(devices / address / "numa_node")  # -1 on a host of one node
    cores = affinity.usable(affinity.topology(), usable_cpus())
    return {cpu for core in cores if str(core.node) == node for cpu in core.cpus}


def obstacle(count: int, has_file: bool, starts: bool) -> str:
    """Return why none of ``count`` GPUs is usable by this torch, or an empty text.

    ``has_file``: whether the host has the device file of a GPU. ``starts``: what ``driver_starts`` returns.
    """
    if count and not starts:
        return f"the NVIDIA driver does not start for the CUDA {torch.version.cuda} of this torch"
    if not count and has_file and not torch.version.cuda:
        return "this torch is built without CUDA"
    return "" if count else "no CUDA device"


def driver_starts(release: str) -> bool:
    """Return whether the NVIDIA driver starts and is new enough for a torch of this CUDA release.

    Another process asks, because a process that has started the driver cannot fork users of it.
    """
    line = [sys.executable, "-c", _START_DRIVER, release.partition(".")[0]]
    try:
        return not subprocess.run(line, capture_output=True, timeout=_DRIVER_SECONDS, check=False).returncode
    except subprocess.TimeoutExpired:
        return False


@dataclass(eq=False)
class CUDA(Device):
    """One GPU for each process: TF32, compilation, copies and the allocator.

    ``tf32``: fp32 products, convolutions and LSTMs with 10 bits of mantissa on tensor cores; null: wherever
    ``precision`` is not fp32, whose other products have 8 or 11 bits. ``compile``: the
    repeated layers (or, without any, the model but its loss) through ``torch.compile``, compiled for every
    shape once in training and once in evaluation, so only together with ``data.shapes``.
    ``pinned``: batches go through page-locked memory and are copied on a stream of their own, beside the
    kernels that are queued.
    ``allocator`` is PyTorch's ``PYTORCH_CUDA_ALLOC_CONF``; null keeps PyTorch's default.
    """

    name = "cuda"
    facts = DeviceFacts(
        collectives={"cpu": "gloo", "cuda": "nccl"},
        bound="cuda",
        sum_dtype=torch.float32,
        network_variables=("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
        forwarded_variables=("NCCL_*", "TORCH_NCCL_*", "TORCH_FR_*", "PYTORCH_CUDA_ALLOC_CONF"),
        peer_lost="gloo|nccl|distbackend",
        narrow_gathers=True,
        packages=(r"torch\.cuda",),
    )

    tf32: bool | None = None
    compile: bool = False
    pinned: bool = True
    allocator: str | None = "expandable_segments:True"
    _copies: torch.cuda.Stream | None = field(init=False, default=None)

    def environment(self, processes: int) -> dict[str, str]:
        memory = {} if self.allocator is None else {"PYTORCH_CUDA_ALLOC_CONF": self.allocator}
        # torchrun would set one thread, and data workers are processes of their own
        return {**memory, **_FLIGHT_RECORDER, "OMP_NUM_THREADS": str(host.threads(processes))}

    def check(self, processes: int) -> None:
        count = torch.cuda.device_count()  # asks the driver and initialises no GPU
        if not count:
            why = "no GPU is visible here" if torch.version.cuda else "this torch is built without CUDA"
            raise MachineError(
                f"device=cuda: {why} (torch {torch.__version__}, see nvidia-smi and CUDA_VISIBLE_DEVICES); "
                "install a CUDA build of torch on a machine with a GPU, or set device=cpu"
            )
        if processes > count:
            raise MachineError(
                f"device=cuda: {processes} processes on this host, which has {count} GPUs; lower world_size "
                "or start more hosts"
            )

    def obstacle(self) -> str:
        count = torch.cuda.device_count()
        release = torch.version.cuda
        starts = bool(count) and (release is None or driver_starts(release))
        return obstacle(count, any(Path("/dev").glob("nvidia[0-9]*")), starts)

    def open(self, local_rank: int) -> None:
        index = 0 if _has_own_gpus(local_rank, torch.cuda.device_count()) else local_rank
        self.check(index + 1)
        try:
            torch.cuda.set_device(index)
            torch.zeros((), device=self.name)
        except (RuntimeError, AssertionError) as error:
            problem = one_line(str(error), 200)
            raise MachineError(f"device=cuda: GPU {index} cannot be used ({problem})") from None
        if (cpus := _near(index)) and len(cpus) < len(usable_cpus()):
            affinity.pin(cpus)
        # one layer's weights are a part of the memory of all: cuDNN copies them in 0.1 ms
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous")

    def chip(self) -> str:
        return torch.cuda.get_device_name()

    def policy(self, dtype: torch.dtype) -> ComputePolicy:
        tf32 = dtype != torch.float32 if self.tf32 is None else self.tf32
        return replace(
            super().policy(dtype),
            fp32_matmul="high" if tf32 else "highest",
            lstm="layers",
            lattice_cells=_LATTICE_CELLS,
            logit_bytes=_LOGIT_BYTES,
            feature_frames=0,
        )

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.float32, torch.bfloat16, torch.float16)

    def precision_fallback_reason(self, dtype: torch.dtype) -> str:
        if dtype == torch.float32 or not torch.cuda.device_count():
            return ""
        capability = torch.cuda.get_device_capability()
        if capability >= _CAPABILITY[dtype]:
            return ""
        gpu = f"this GPU (compute capability {capability[0]}.{capability[1]})"
        if dtype == torch.float16:
            return f"{gpu} has no tensor cores for fp16, so training is in fp32, which is as fast"
        return f"{gpu} has no bf16, so training is in fp32; precision=fp16 is faster"

    def move(self, batch: Batch) -> Batch:
        if not self.pinned:
            return batch.to(self.tensor)
        # on a stream of its own, the copy runs beside the kernels that are queued already; torch keeps the
        # page-locked memory until the copy is done
        computing = torch.cuda.current_stream()
        if self._copies is None:
            self._copies = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._copies):
            moved = batch.to(lambda value: self.tensor(value.pin_memory()))
        computing.wait_stream(self._copies)

        def used(value: Tensor) -> Tensor:
            value.record_stream(computing)  # its memory is free for the next copy after its last kernel
            return value

        return moved.to(used)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def free_memory(self, processes: int) -> int:
        return int(torch.cuda.mem_get_info()[0])

    def memory(self) -> int:
        return int(torch.cuda.max_memory_allocated())

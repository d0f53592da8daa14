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
from speechtrain.compute_policy import STATIC, ComputePolicy, usable_cpus
from speechtrain.devices import affinity, host
from speechtrain.devices.base import Device, DeviceFacts
from speechtrain.errors import MachineError, one_line

# The first compute capability with tensor cores for a type: Ampere and Volta.
_CAPABILITY = {torch.bfloat16: (8, 0), torch.float16: (7, 0)}
# The sizes in which the transducer loss divides its work. Smaller sizes mean more kernel launches.
_LATTICE_CELLS, _LOGIT_BYTES = 65536, 4 * 2**30
# If a collective times out, torch writes the last 2000 collectives of NCCL to a file.
_FLIGHT_RECORDER = {
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",  # the name of the same setting in older versions of torch
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}
# The variables by which Slurm says that GPUs belong to one task alone. Each pattern captures their number.
# The options of srun are --gpus-per-task, --tres-per-task and --gpu-bind.
_GPUS_OF_A_TASK = {
    "SLURM_GPUS_PER_TASK": r"(?:\w+:)?(\d+)",
    "SLURM_TRES_PER_TASK": r".*\bgpu(?:[:=]\w+)??[:=](\d+)\b.*",
    "SLURM_GPU_BIND": r"(?:.*,)?(?:single:(?=1$)|per_task:)(\d+)",
}

_DRIVER_SECONDS = 60.0
# A program that exits with 0 if the driver starts and supports CUDA's major version in its argument. A driver
# supports all releases of its own major version, and older ones.
_START_DRIVER = """
import ctypes, sys
driver, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
is_refused = driver.cuInit(0) or driver.cuDriverGetVersion(ctypes.byref(version))
sys.exit(bool(is_refused) or version.value // 1000 < int(sys.argv[1]))
"""


def _has_own_gpus(local_rank: int, visible_gpus: int) -> bool:
    """Return whether the visible GPUs belong to this rank alone. Then the rank uses the first of them.

    This is so if ``CUDA_VISIBLE_DEVICES`` is the local rank, or if Slurm's srun started this rank and bound
    all visible GPUs to it. It is not so if one launcher started several ranks that all see the same GPU.
    """
    environ = os.environ
    if environ.get("CUDA_VISIBLE_DEVICES") == str(local_rank):
        return visible_gpus == 1
    if environ.get("SLURM_LOCALID") != str(local_rank):
        return False
    for name, pattern in _GPUS_OF_A_TASK.items():
        match = re.fullmatch(pattern, environ.get(name, ""))
        if match and int(match[1]) == visible_gpus:
            return True
    return False


def _near_cpus(index: int, devices: Path = Path("/sys/bus/pci/devices")) -> set[int]:
    """Return the usable logical CPUs on the NUMA node of GPU ``index``.

    The set is empty if the kernel does not report a node, or torch does not report the GPU's PCI address.
    """
    gpu: Any = torch.cuda.get_device_properties(index)
    if not hasattr(gpu, "pci_domain_id"):  # torch 2.8
        return set()
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    node = affinity.read_small_file(devices / address / "numa_node")  # -1 on a host with one node
    cpus: set[int] = set()
    for core in affinity.cores_within(affinity.topology(), usable_cpus()):
        if str(core.node) == node:
            cpus.update(core.cpus)
    return cpus


def obstacle(count: int, has_file: bool, starts: bool) -> str:
    """Return why this torch cannot use any of the ``count`` visible GPUs, or an empty text if it can.

    ``has_file`` says whether the host has the device file of a GPU, and ``starts`` whether the driver starts.
    """
    if count and not starts:
        return f"the NVIDIA driver does not start for the CUDA {torch.version.cuda} of this torch"
    if count:
        return ""
    if has_file and not torch.version.cuda:
        return "this torch is built without CUDA"
    return "no CUDA device"


def driver_starts(release: str) -> bool:
    """Return whether the NVIDIA driver starts, and supports the CUDA release (``12.8``) of this torch.

    The driver is started in another process. A process that has started it cannot use it in forked children.
    """
    major_version, _, _ = release.partition(".")
    command = [sys.executable, "-c", _START_DRIVER, major_version]
    try:
        completed = subprocess.run(command, capture_output=True, timeout=_DRIVER_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return False
    return completed.returncode == 0


@dataclass(eq=False)
class CUDA(Device):
    """One GPU for each process: TF32, compilation, copies and the allocator.

    ``tf32``: fp32 matmuls, convolutions and LSTMs run on tensor cores with 10 bits of mantissa. Null allows
    this unless ``precision`` is fp32. In the other precisions, the other matmuls have 8 or 11 bits. The
    setting holds for the whole process, also for blocks that compute without autocast.

    ``compile``: ``torch.compile`` compiles the repeated layers, or the model without its loss if it has no
    repeated layers. It compiles for every shape once in training and once in evaluation, so it requires
    ``data.shapes``.

    ``pinned``: batches go through page-locked memory and are copied on a separate stream, while the queued
    kernels run.

    ``allocator`` is PyTorch's ``PYTORCH_CUDA_ALLOC_CONF``. Null keeps PyTorch's default.

    ``deterministic``: torch uses its deterministic algorithms, so a run gives the same bits again on the same
    GPU and software. Without it, sums by atomic additions differ in their last bits. CTC and transducer
    losses are then computed in static shapes, because torch's CTC loss and cumulative sum on a GPU are not
    deterministic. If a part of yours calls such an operation, torch raises an error. Steps are slower.
    """

    name = "cuda"
    facts = DeviceFacts(
        collectives={"cpu": "gloo", "cuda": "nccl"},
        group_device="cuda",
        sum_dtype=torch.float32,
        network_variables=("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
        forwarded_variables=("NCCL_*", "TORCH_NCCL_*", "TORCH_FR_*", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_*"),
        peer_lost="gloo|nccl|distbackend",
        narrow_gathers=True,
        packages=(r"torch\.cuda",),
    )

    tf32: bool | None = None
    compile: bool = False
    pinned: bool = True
    allocator: str | None = "expandable_segments:True"
    deterministic: bool = False
    _copy_stream: torch.cuda.Stream | None = field(init=False, default=None)

    def environment(self, processes: int) -> dict[str, str]:
        # Without OMP_NUM_THREADS, torchrun sets one thread. The data workers are separate processes, so they
        # do not need threads of a rank.
        variables = {**_FLIGHT_RECORDER, "OMP_NUM_THREADS": str(host.threads(processes))}
        if self.allocator is not None:
            variables["PYTORCH_CUDA_ALLOC_CONF"] = self.allocator
        if self.deterministic:
            # cuBLAS has two deterministic values. Only this one is also valid for LSTMs.
            variables["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
        return variables

    def check(self, processes: int) -> None:
        count = torch.cuda.device_count()  # This asks the driver and initialises no GPU.
        if not count:
            reason = "no GPU is visible here" if torch.version.cuda else "this torch is built without CUDA"
            raise MachineError(
                f"device=cuda: {reason} (torch {torch.__version__}). See nvidia-smi and "
                "CUDA_VISIBLE_DEVICES. Install a CUDA build of torch on a machine with a GPU, or "
                "set device=cpu"
            )
        if processes > count:
            raise MachineError(
                f"device=cuda: {processes} processes on this host, which has {count} GPUs. Lower world_size "
                "or start more hosts"
            )

    def obstacle(self) -> str:
        count = torch.cuda.device_count()
        release = torch.version.cuda
        starts = count > 0
        if starts and release is not None:
            starts = driver_starts(release)
        has_file = any(Path("/dev").glob("nvidia[0-9]*"))
        return obstacle(count, has_file, starts)

    def open(self, local_rank: int = 0) -> None:
        index = local_rank
        if _has_own_gpus(local_rank, torch.cuda.device_count()):
            index = 0
        self.check(index + 1)
        try:
            torch.cuda.set_device(index)
            torch.zeros((), device=self.name)
        except (RuntimeError, AssertionError) as error:
            problem = one_line(str(error), 200)
            raise MachineError(f"device=cuda: GPU {index} cannot be used ({problem})") from None
        cpus = _near_cpus(index)
        if cpus and len(cpus) < len(usable_cpus()):
            affinity.pin(cpus)
            # OMP_NUM_THREADS was computed from the cores of all nodes. Now fewer are usable.
            torch.set_num_threads(min(torch.get_num_threads(), host.threads(1)))
        if self.deterministic:
            torch.use_deterministic_algorithms(True)
        # torch.lstm is called for one layer at a time. The weights of a layer are a part of a larger block of
        # memory, so cuDNN copies them (0.1 ms), and torch warns about that.
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous")

    def chip(self) -> str:
        return torch.cuda.get_device_name()

    def policy(self, dtype: torch.dtype) -> ComputePolicy:
        tf32 = self.tf32
        if tf32 is None:
            tf32 = dtype != torch.float32
        policy = super().policy(dtype)
        if self.deterministic:
            policy = replace(policy, ctc=STATIC.ctc, transducer=STATIC.transducer)
        return replace(
            policy,
            fp32_matmul="high" if tf32 else "highest",
            lstm="layers",
            dropout="torch",
            conv="conv1d",  # Matmuls over strided views need several launches for each row.
            lattice_cells=_LATTICE_CELLS,
            logit_bytes=_LOGIT_BYTES,
            feature_frames=0,
        )

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.float32, torch.bfloat16, torch.float16)

    def precision_fallback_reason(self, dtype: torch.dtype) -> str:
        if dtype == torch.float32 or not torch.cuda.device_count():
            return ""
        major, minor = torch.cuda.get_device_capability()
        if (major, minor) >= _CAPABILITY[dtype]:
            return ""
        gpu = f"this GPU (compute capability {major}.{minor})"
        if dtype == torch.float16:
            return f"{gpu} has no tensor cores for fp16, so training is in fp32, which is as fast"
        return f"{gpu} has no bf16, so training is in fp32. precision=fp16 is faster"

    def move(self, batch: Batch) -> Batch:
        if not self.pinned:
            return batch.to(self.tensor)
        # On a separate stream, the copy runs at the same time as the kernels that are already queued. Torch
        # does not reuse the page-locked memory before the copy has ended.
        compute_stream = torch.cuda.current_stream()
        if self._copy_stream is None:
            self._copy_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._copy_stream):
            device_batch = batch.to(lambda tensor: self.tensor(tensor.pin_memory()))
        compute_stream.wait_stream(self._copy_stream)

        def record_use(tensor: Tensor) -> Tensor:
            # With this, the allocator does not reuse the tensor's memory before all queued kernels have read
            # it.
            tensor.record_stream(compute_stream)
            return tensor

        return device_batch.to(record_use)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def free_memory(self, processes: int) -> int:
        free_bytes, _ = torch.cuda.mem_get_info()
        return int(free_bytes)

    def memory(self) -> int:
        return int(torch.cuda.max_memory_allocated())

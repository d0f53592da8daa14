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

_CAPABILITY = {torch.bfloat16: (8, 0), torch.float16: (7, 0)}  # Ampere and Volta
# Sizes of the transducer loss, which launches kernels for every block of cells and every group of logits.
_LATTICE_CELLS, _LOGIT_BYTES = 65536, 4 * 2**30
# If a collective times out, NCCL writes its last collectives to a file. Older torch reads the second name.
_FLIGHT_RECORDER = dict.fromkeys(("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), "2000")
_FLIGHT_RECORDER["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1"
# The numbers of GPUs that Slurm binds to one task alone: --gpus-per-task, --tres-per-task, --gpu-bind.
_GPUS_OF_A_TASK = {
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
    """Return whether the visible GPUs belong to this rank alone. Its GPU is then the first of them.

    Either Slurm's srun started this rank and bound all visible GPUs to it, or ``CUDA_VISIBLE_DEVICES`` is the
    local rank. Ranks of one launcher that all see the same GPU meet neither condition.
    """
    environ = os.environ
    if environ.get("CUDA_VISIBLE_DEVICES") == str(local_rank):
        return visible == 1
    if environ.get("SLURM_LOCALID") != str(local_rank):
        return False
    for name, pattern in _GPUS_OF_A_TASK.items():
        match = re.fullmatch(pattern, environ.get(name, ""))
        if match and int(match[1]) == visible:
            return True
    return False


def _near_cpus(index: int, devices: Path = Path("/sys/bus/pci/devices")) -> set[int]:
    """Return the usable CPUs on the memory node of GPU ``index``, none if the kernel or torch has no node."""
    gpu: Any = torch.cuda.get_device_properties(index)
    if not hasattr(gpu, "pci_domain_id"):  # torch 2.8
        return set()
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    node = affinity.read_small_file(devices / address / "numa_node")  # -1 on a host of one node
    cpus = set()
    for core in affinity.cores_within(affinity.topology(), usable_cpus()):
        if str(core.node) == node:
            cpus |= {*core.cpus}
    return cpus


def obstacle(count: int, has_file: bool, starts: bool) -> str:
    """Return why none of ``count`` GPUs is usable by this torch, or an empty text.

    ``has_file``: whether the host has the device file of a GPU. ``starts``: whether the driver starts.
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
        # torchrun would set one thread. Data workers are separate processes.
        variables = {**_FLIGHT_RECORDER, "OMP_NUM_THREADS": str(host.threads(processes))}
        if self.allocator is not None:
            variables["PYTORCH_CUDA_ALLOC_CONF"] = self.allocator
        if self.deterministic:
            variables["CUBLAS_WORKSPACE_CONFIG"] = (
                ":16:8"  # the value that is valid for matmuls and for LSTMs
            )
        return variables

    def check(self, processes: int) -> None:
        count = torch.cuda.device_count()  # asks the driver and initialises no GPU
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
        cpus = _near_cpus(index)
        if cpus and len(cpus) < len(usable_cpus()):
            affinity.pin(cpus)
            # OMP_NUM_THREADS counts the cores of all nodes.
            torch.set_num_threads(min(torch.get_num_threads(), host.threads(1)))
        if self.deterministic:
            torch.use_deterministic_algorithms(True)
        # torch.lstm runs one layer at a time, whose weights are a part of the memory of all layers. cuDNN
        # therefore copies them, in 0.1 ms, and torch would warn.
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous")

    def chip(self) -> str:
        return torch.cuda.get_device_name()

    def policy(self, dtype: torch.dtype) -> ComputePolicy:
        tf32 = dtype != torch.float32 if self.tf32 is None else self.tf32
        policy = super().policy(dtype)
        if self.deterministic:
            policy = replace(policy, ctc=STATIC.ctc, transducer=STATIC.transducer)
        return replace(
            policy,
            fp32_matmul="high" if tf32 else "highest",
            lstm="layers",
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
        capability = torch.cuda.get_device_capability()
        if capability >= _CAPABILITY[dtype]:
            return ""
        gpu = f"this GPU (compute capability {capability[0]}.{capability[1]})"
        if dtype == torch.float16:
            return f"{gpu} has no tensor cores for fp16, so training is in fp32, which is as fast"
        return f"{gpu} has no bf16, so training is in fp32. precision=fp16 is faster"

    def move(self, batch: Batch) -> Batch:
        if not self.pinned:
            return batch.to(self.tensor)
        # On a separate stream, the copy runs beside the kernels that are already queued. Torch keeps the
        # page-locked memory until the copy ends.
        compute_stream = torch.cuda.current_stream()
        if self._copy_stream is None:
            self._copy_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._copy_stream):
            device_batch = batch.to(lambda tensor: self.tensor(tensor.pin_memory()))
        compute_stream.wait_stream(self._copy_stream)

        def record_use(tensor: Tensor) -> Tensor:
            # The next copy may use the tensor's memory after the last kernel that reads the tensor.
            tensor.record_stream(compute_stream)
            return tensor

        return device_batch.to(record_use)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def free_memory(self, processes: int) -> int:
        return int(torch.cuda.mem_get_info()[0])

    def memory(self) -> int:
        return int(torch.cuda.max_memory_allocated())

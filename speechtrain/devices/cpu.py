"""The CPU: plain PyTorch, oneDNN underneath."""

from __future__ import annotations

import logging
import os
import platform
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speechtrain.batch import Batch
from speechtrain.compute_policy import ComputePolicy, usable_cpus
from speechtrain.devices import affinity, preload
from speechtrain.devices.base import Device
from speechtrain.errors import MachineError

_LOG = logging.getLogger(__name__)

_CHOICES = {
    "matmul": ("auto", "highest", "high", "medium"),
    "lstm": ("auto", "fused", "loop"),
    "bf16": ("auto", "software"),
    "allocator": ("auto", "jemalloc", "tcmalloc", "default"),
    "openmp": ("auto", "intel", "default"),
    "pin": ("auto", "cores", "numa", "none"),
}
_ALLOCATORS = {"jemalloc": ("libjemalloc.so",), "tcmalloc": ("libtcmalloc.so", "libtcmalloc_minimal.so")}
_INTEL_OPENMP = ("libiomp5.so",)
# Intel's settings for training: memory is never returned to the system
_MALLOC_CONF = (
    "oversize_threshold:1,background_thread:true,metadata_thp:auto,"
    "dirty_decay_ms:9000000000,muzzy_decay_ms:9000000000"
)
_COMPACT = "granularity=fine,compact,1,0"
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # of x86 and ARM

# products of training: activations by weights, a gradient by weights, a weight's gradient (m, k, n)
_PROBED = ((256, 512, 2048), (256, 2048, 512), (512, 256, 2048))
_TRIALS = 4
_WORTH = 1.15  # a smaller gain may be the noise of a busy machine
_WORSE = 4.0  # oneDNN sums in another order; rounding to bf16 is ten thousand times worse


def chip(path: Path = Path("/proc/cpuinfo")) -> tuple[str, set[str]]:
    """The processor's name and its instruction sets; none if the kernel does not report them."""
    try:
        first = path.read_text().partition("\n\n")[0]  # all processors of a host are assumed to be equal
    except OSError:
        first = ""
    pairs = (line.partition(":") for line in first.splitlines())
    told = {key.strip(): value.strip() for key, _, value in pairs}
    name = told.get("model name") or platform.processor() or platform.machine()
    return name, set(told.get("flags", told.get("Features", "")).split())  # x86, ARM


def has_bf16() -> bool:
    """Whether the chip has bf16 instructions (with AVX512 alone, oneDNN emulates them)."""
    return bool(_BF16_FLAGS & chip()[1])


class CPU(Device):
    """Threads, libraries, core pinning, matmul path and bf16 support of a CPU.

    ``threads`` 0 divides the usable physical cores evenly among the ranks of a host.

    ``matmul``: ``highest`` computes fp32 products in fp32; ``medium`` lets them run through oneDNN, 1.6 to
    2.3 times faster on an AVX512-BF16 machine with unchanged error, but rounded to bf16 where the chip
    has AMX. ``auto`` measures both at the start of a run, and uses oneDNN if it is clearly faster and
    as exact.

    ``bf16``: ``auto`` trains in fp32, with a warning, if the chip has no bf16 instructions;
    ``software`` computes in bf16 anyway, slowly. ``lstm``: the implementation of LSTM blocks; ``auto``
    is the loop for bf16 if the chip has bf16 (torch's LSTM is slower there than in fp32), else torch's
    own (the loop took 1.0 to 1.3 of its time in fp32).

    ``allocator`` and ``openmp``: libraries loaded before Python; ``auto`` uses those that are installed,
    jemalloc before tcmalloc, and Intel's OpenMP. ``isa`` is the highest instruction set that oneDNN may
    use (``AVX512_CORE_AMX``); with null oneDNN chooses.

    ``pin``: ``cores`` gives each rank its share of the physical cores, ``numa`` all cores of its memory
    node, ``auto`` the share if there are several ranks and several memory nodes and this process is not
    bound yet. ``comm_cores``: cores of each rank's share that are reserved for communication.
    """

    name = "cpu"
    collectives = "gloo"

    def __init__(
        self,
        threads: int = 0,
        matmul: str = "highest",
        lstm: str = "auto",
        bf16: str = "auto",
        allocator: str = "auto",
        openmp: str = "auto",
        isa: str | None = None,
        pin: str = "auto",
        comm_cores: int = 0,
    ) -> None:
        given = {"matmul": matmul, "lstm": lstm, "bf16": bf16, "allocator": allocator}
        given |= {"openmp": openmp, "pin": pin}
        for key, value in given.items():
            if value not in _CHOICES[key]:
                raise ValueError(f"device.{key} is {value!r}; it is one of {', '.join(_CHOICES[key])}")
        for key, count in {"threads": threads, "comm_cores": comm_cores}.items():
            if count < 0:
                raise ValueError(f"device.{key} is {count}; it is at least 0")
        self.threads = threads
        self.matmul = matmul
        self.lstm = lstm
        self.bf16 = bf16
        self.allocator = allocator
        self.openmp = openmp
        self.isa = isa
        self.pin = pin
        self.comm_cores = comm_cores

    # --- before Python starts -------------------------------------------------------------------

    def environment(self, processes: int) -> dict[str, str]:
        cores = self._cores()
        each = len(cores) // processes
        threads = self.threads or max(1, each - self.comm_cores)
        # without it torchrun sets one thread, which is very slow here; oneDNN otherwise keeps 1024
        # primitives, which variable lengths fill with memory that is never used again
        variables = {"OMP_NUM_THREADS": str(threads), "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
        # libgomp's threads otherwise spin 300,000 times for the next parallel region. On two cores that other
        # processes also used, a step (an LSTM and small products) took 819 ms of CPU and 2.1 s with two
        # threads, and 164 ms and 0.66 s with this setting (2026-11-21, load 9; no idle machine available)
        variables["GOMP_SPINCOUNT"] = "1000"
        if self.isa is not None:
            variables["DNNL_MAX_CPU_ISA"] = self.isa
        if self.comm_cores and self.pin != "none" and each > self.comm_cores:
            workers = affinity.reserved_cpus(cores, processes, self.comm_cores)
            variables["I_MPI_PIN_DOMAIN"] = affinity.pin_domains(cores, processes, self.comm_cores)
            variables["CCL_WORKER_COUNT"] = str(self.comm_cores)
            variables["CCL_WORKER_AFFINITY"] = ",".join(map(str, workers))
        return variables | self._preloads(preload.folders(os.environ))

    def _preloads(self, places: list[Path]) -> dict[str, str]:
        """``LD_PRELOAD`` and its libraries' settings. Raises MachineError for a required but missing one."""
        variables: dict[str, str] = {}
        loaded = []
        wanted = {"auto": ["jemalloc", "tcmalloc"], "default": []}.get(self.allocator, [self.allocator])
        found = {name: preload.library(_ALLOCATORS[name], places) for name in wanted}
        allocator = next((name for name in wanted if found[name]), None)
        if allocator is None and self.allocator not in ("auto", "default"):
            package = {"jemalloc": "libjemalloc2", "tcmalloc": "libtcmalloc-minimal4"}[self.allocator]
            raise MachineError(
                f"device.allocator={self.allocator}: lib{self.allocator}.so is in no library folder; "
                f"apt-get install {package}, or set device.allocator=default"
            )
        if allocator is not None:
            loaded.append(str(found[allocator]))
        if allocator == "jemalloc":
            variables["MALLOC_CONF"] = _MALLOC_CONF
        openmp = None if self.openmp == "default" else preload.library(_INTEL_OPENMP, places)
        if openmp is None and self.openmp == "intel":
            raise MachineError(
                "device.openmp=intel: libiomp5.so is in no library folder; "
                "pip install intel-openmp, or set device.openmp=default"
            )
        if openmp is not None:
            loaded.append(openmp)
            variables["KMP_BLOCKTIME"] = "1"
            if self.pin == "cores":
                # each thread is then bound to one core, which processes that the first one starts inherit
                variables["KMP_AFFINITY"] = _COMPACT
        return variables | ({"LD_PRELOAD": ":".join(loaded)} if loaded else {})

    def _cores(self) -> list[affinity.Core]:
        return affinity.usable(affinity.topology(), usable_cpus())

    # --- at the start -----------------------------------------------------------------------------

    def open(self, local_rank: int) -> None:
        self._pin(local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1))
        threads = self.threads or int(os.environ.get("OMP_NUM_THREADS", "0") or 0)
        if threads > 0:
            torch.set_num_threads(threads)
        torch.set_float32_matmul_precision("highest" if self.matmul == "auto" else self.matmul)

    def _pin(self, local_rank: int, processes: int) -> None:
        if not hasattr(os, "sched_setaffinity"):
            return
        cores = self._cores()
        cpus = self._share(cores, local_rank, processes, is_bound=len(cores) < len(affinity.topology()))
        if cpus:
            nodes = {core.node for core in cores if cpus & set(core.cpus)}
            if len(nodes) > 1 and processes > 1:
                _LOG.warning(f"rank {local_rank} computes on cores of memory nodes {sorted(nodes)}")
            affinity.pin(cpus)

    def _share(self, cores: list[affinity.Core], rank: int, processes: int, is_bound: bool) -> set[int]:
        """The CPUs to bind local rank ``rank`` to; none if it stays as it is."""
        if self.pin == "auto":
            nodes = {core.node for core in cores}
            is_useful = processes > 1 and len(nodes) > 1 and not is_bound
            if not is_useful or len(cores) // processes <= self.comm_cores:
                return set()
            own = affinity.share(cores, processes, rank, self.comm_cores)
            return {cpu for core in own for cpu in core.cpus}  # the data workers use the hyperthreads
        if self.pin == "cores":
            return {core.first for core in affinity.share(cores, processes, rank, self.comm_cores)}
        if self.pin == "numa":
            return {cpu for core in affinity.on_node(cores, processes, rank) for cpu in core.cpus}
        return set()

    def autotune(self, before: Mapping[str, Any]) -> dict[str, Any]:
        if self.matmul != "auto":
            return {}
        name, _ = chip()
        known = before.get("matmul") in ("highest", "medium") and before.get("chip") == name
        chosen = dict(before) if known else {"chip": name, **probe_matmul()}
        torch.set_float32_matmul_precision(chosen["matmul"])
        return chosen

    # --- while training ---------------------------------------------------------------------------

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.float32, torch.bfloat16)

    def precision_fallback_reason(self, dtype: torch.dtype) -> str:
        if dtype != torch.bfloat16 or self.bf16 == "software" or has_bf16():
            return ""
        return "this chip has no bf16 instructions, so training is in fp32 (device.bf16=software forces bf16)"

    def policy(self, dtype: torch.dtype) -> ComputePolicy:
        chosen = "loop" if dtype == torch.bfloat16 and has_bf16() else "fused"
        return ComputePolicy(lstm=chosen if self.lstm == "auto" else self.lstm)

    def move(self, batch: Batch) -> Batch:
        return batch

    def memory(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def probe_matmul() -> dict[str, Any]:
    """Measure time and error of fp32 products, by torch's default and through oneDNN, in under a second.

    Returns ``matmul``, ``medium`` or ``highest``; ``speedup`` of the former over the latter; and the
    relative errors of both, ``error_medium`` and ``error_highest``.
    """
    generator = torch.Generator().manual_seed(0)
    before = torch.get_float32_matmul_precision()
    fast, exact = _Tally(), _Tally()
    gains, is_same = [], True
    try:
        for m, k, n in _PROBED:
            a, b = torch.randn(m, k, generator=generator), torch.randn(k, n, generator=generator)
            wanted = a.double() @ b.double()
            (took, product), (took_exact, product_exact) = _timed(a, b, "medium"), _timed(a, b, "highest")
            for _ in range(_TRIALS - 1):  # they alternate, since the machine's load varies
                took = min(took, _timed(a, b, "medium")[0])
                took_exact = min(took_exact, _timed(a, b, "highest")[0])
            fast.add(took, product, wanted)
            exact.add(took_exact, product_exact, wanted)
            gains.append(took_exact / took)
            is_same = is_same and torch.equal(product, product_exact)
    finally:
        torch.set_float32_matmul_precision(before)
    # if oneDNN has no other path for this chip, they differ by noise only
    is_faster = not is_same and exact.seconds > _WORTH * fast.seconds and min(gains) > 1.0
    return {
        "matmul": "medium" if is_faster and fast.error <= _WORSE * exact.error else "highest",
        "speedup": round(exact.seconds / fast.seconds, 2),
        "error_medium": float(f"{fast.error:.2g}"),
        "error_highest": float(f"{exact.error:.2g}"),
    }


@dataclass
class _Tally:
    seconds: float = 0.0
    error: float = 0.0

    def add(self, seconds: float, product: Tensor, wanted: Tensor) -> None:
        self.seconds += seconds
        self.error = max(self.error, float((product - wanted).norm() / wanted.norm()))


def _timed(a: Tensor, b: Tensor, setting: str) -> tuple[float, Tensor]:
    """Time of one product in seconds, and the product; a first one generates code and starts threads."""
    torch.set_float32_matmul_precision(setting)
    torch.mm(a, b)
    begun = time.perf_counter()
    product = torch.mm(a, b)
    return time.perf_counter() - begun, product

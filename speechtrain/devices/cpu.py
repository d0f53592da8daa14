"""The CPU: plain PyTorch, oneDNN underneath."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import platform
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from speechtrain import torch_private
from speechtrain.batch import Batch
from speechtrain.compute_policy import ComputePolicy, set_fp32_matmul, usable_cpus
from speechtrain.devices import affinity, host, preload
from speechtrain.devices.base import Device, DeviceFacts
from speechtrain.errors import MachineError, require_least

_LOG = logging.getLogger(__name__)

_CHOICES = {
    "matmul": ("auto", "highest", "high", "medium"),
    "bf16": ("auto", "software"),
    "allocator": ("auto", "jemalloc", "tcmalloc", "default"),
    "openmp": ("auto", "intel", "default"),
    "pin": ("auto", "cores", "numa", "none"),
    "collectives": ("gloo", "ccl"),
}
_ONECCL = "oneccl_bindings_for_pytorch"
ALLOCATORS = {"jemalloc": ("libjemalloc.so",), "tcmalloc": ("libtcmalloc.so", "libtcmalloc_minimal.so")}
INTEL_OPENMP = ("libiomp5.so",)
"""The files of libraries that can be loaded before Python."""

# Intel's settings for training: memory is never returned to the system
_MALLOC_CONF = (
    "oversize_threshold:1,background_thread:true,metadata_thp:auto,"
    "dirty_decay_ms:9000000000,muzzy_decay_ms:9000000000"
)
_COMPACT = "granularity=fine,compact,1,0"
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # of x86 and ARM

# products of training (m, k, n): activations by weights, a gradient by weights, a weight's gradient
_PROBED = ((256, 512, 2048), (256, 2048, 512), (512, 256, 2048))
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


@dataclass(eq=False)
class CPU(Device):
    """Threads, libraries, core pinning, matmul path and bf16 support of a CPU.

    ``threads`` 0 divides the usable physical cores evenly among the ranks of a host.

    ``matmul``: ``highest`` computes fp32 products in fp32; ``medium`` lets them run through oneDNN, 1.6 to
    2.3 times faster on an AVX512-BF16 machine with unchanged error, but rounded to bf16 where the chip
    has AMX. ``auto`` is ``highest``, or oneDNN where it is as exact and timed to be faster.

    ``bf16``: ``auto`` trains in fp32, with a warning, if the chip has no bf16 instructions;
    ``software`` computes in bf16 anyway, slowly. ``autotune`` times the policies that fit before the
    first step: under ``precision=bf16`` training in fp32, and in bf16 with torch's LSTM (fp32 inside,
    since its backward is slower in bf16) or with a loop over frames. False takes torch's own kernels.

    ``allocator`` and ``openmp``: libraries loaded before Python; ``auto`` uses those that are installed,
    jemalloc before tcmalloc, and Intel's OpenMP. ``isa`` is the highest instruction set that oneDNN may
    use (``AVX512_CORE_AMX``); with null oneDNN chooses.

    ``pin``: ``cores`` gives each rank its share of the physical cores, ``numa`` all cores of its memory
    node, ``auto`` the share if there are several ranks and several memory nodes and this process is not
    bound yet. ``comm_cores``: cores of each rank's share that are reserved for communication.

    ``collectives``: ``ccl`` is Intel's oneCCL, in a package of its own for each release of torch.

    ``oversubscribe`` allows more ranks on a host than it has CPUs, or memory for their models.
    """

    name = "cpu"
    on_host = True
    facts = DeviceFacts(
        forwarded_variables=("OMP_*", "KMP_*", "GOMP_*", "ONEDNN_*", "DNNL_*", "MALLOC_CONF", "CCL_*"),
        # Search is 7 % slower alone and a third faster beside busy processes (docs/benchmarks/evaluation.md).
        evaluation_variables={"GOMP_SPINCOUNT": "3000"},
    )

    threads: int = 0
    matmul: str = "highest"
    autotune: bool = True
    bf16: str = "auto"
    allocator: str = "auto"
    openmp: str = "auto"
    isa: str | None = None
    pin: str = "auto"
    comm_cores: int = 0
    collectives: str = "gloo"
    oversubscribe: bool = False

    def __post_init__(self) -> None:
        for key, known in _CHOICES.items():
            if (value := getattr(self, key)) not in known:
                raise ValueError(f"{key} is {value!r}; it is one of {', '.join(known)}")
        require_least(0, threads=self.threads, comm_cores=self.comm_cores)
        self.facts = replace(self.facts, collectives={"cpu": self.collectives})

    def check(self, processes: int) -> None:
        if self.collectives == "ccl" and importlib.util.find_spec(_ONECCL) is None:
            raise MachineError(
                f"device.collectives=ccl: {_ONECCL} is not installed here; install Intel's build for torch "
                f"{torch.__version__.partition('+')[0]}, or set device.collectives=gloo"
            )

    # --- before Python starts -------------------------------------------------------------------

    def environment(self, processes: int) -> dict[str, str]:
        cores = self._cores()
        each = len(cores) // processes
        usable = min(each, host.cpu_quota() // processes)  # a container may use fewer than it sees
        threads = self.threads or max(1, usable - self.comm_cores)
        # without it torchrun sets one thread, which is very slow here; oneDNN otherwise keeps 1024
        # primitives, which variable lengths fill with memory that is never used again
        variables = {"OMP_NUM_THREADS": str(threads), "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
        # libgomp's threads otherwise spin 300,000 times for the next parallel region, which takes a busy core
        # from others; where they sleep at once (1,000), an idle machine trains at half the speed
        # (docs/benchmarks/openmp.md)
        variables["GOMP_SPINCOUNT"] = "12000"
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
        found = {name: preload.library(ALLOCATORS[name], places) for name in wanted}
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
        openmp = None if self.openmp == "default" else preload.library(INTEL_OPENMP, places)
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
        if self.collectives == "ccl":
            self.check(1)
            importlib.import_module(_ONECCL)  # which gives torch.distributed the backend
        self._pin(local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1))
        threads = self.threads or int(os.environ.get("OMP_NUM_THREADS", "0") or 0)
        if threads > 0:
            torch.set_num_threads(threads)

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
            own = affinity.share(cores, processes, rank, reserved=self.comm_cores)
            return {cpu for core in own for cpu in core.cpus}  # the data workers use the hyperthreads
        if self.pin == "cores":
            return {core.first for core in affinity.share(cores, processes, rank, reserved=self.comm_cores)}
        if self.pin == "numa":
            return {cpu for core in affinity.on_node(cores, processes, rank) for cpu in core.cpus}
        return set()

    def chip(self) -> str:
        return chip()[0]

    def policy(self, dtype: torch.dtype) -> ComputePolicy:
        plain = super().policy(dtype)
        # oneDNN emulates bf16 where AVX512 is the best that it has or may use, and is slow without it
        products = plain.product_dtype if _has_onednn_bf16() else torch.float32
        matmul = "highest" if self.matmul == "auto" else self.matmul
        return replace(plain, product_dtype=products, fp32_matmul=matmul)

    def candidates(self, dtype: torch.dtype) -> list[ComputePolicy]:
        if not self.autotune:
            return [self.policy(dtype)]
        found = [self.policy(torch.float32)]
        if self.matmul == "auto" and is_medium_exact():
            found.append(replace(found[0], fp32_matmul="medium"))
        if dtype == torch.bfloat16:
            narrow = replace(self.policy(dtype), fp32_matmul=found[-1].fp32_matmul)
            if self.bf16 == "software":
                return [narrow]
            found += [narrow, replace(narrow, lstm="loop")]
        return found

    # --- while training ---------------------------------------------------------------------------

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.float32, torch.bfloat16)

    def precision_fallback_reason(self, dtype: torch.dtype) -> str:
        if dtype != torch.bfloat16 or self.bf16 == "software" or has_bf16():
            return ""
        return "this chip has no bf16 instructions, so training is in fp32 (device.bf16=software forces bf16)"

    def move(self, batch: Batch) -> Batch:
        return batch

    def free_memory(self, processes: int) -> int:
        return host.free_memory() // processes


def is_medium_exact() -> bool:
    """Whether fp32 products through oneDNN are another computation here, and as exact as torch's default."""
    generator = torch.Generator().manual_seed(0)
    before = torch.get_float32_matmul_precision()
    errors, is_same = {"highest": 0.0, "medium": 0.0}, True
    try:
        for m, k, n in _PROBED:
            a, b = torch.randn(m, k, generator=generator), torch.randn(k, n, generator=generator)
            wanted, products = a.double() @ b.double(), []
            for setting in errors:
                set_fp32_matmul(setting)
                products.append(torch.mm(a, b))
                error = float((products[-1] - wanted).norm() / wanted.norm())
                errors[setting] = max(errors[setting], error)
            is_same = is_same and torch.equal(*products)
    finally:
        set_fp32_matmul(before)
    return not is_same and errors["medium"] <= _WORSE * errors["highest"]


def _has_onednn_bf16() -> bool:
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(has_onednn and torch_private.is_onednn_bf16_supported())

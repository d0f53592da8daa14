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
"""The files of the libraries that can be loaded before Python."""

# Intel's settings for training. Memory is never returned to the system.
_MALLOC_CONF = (
    "oversize_threshold:1,background_thread:true,metadata_thp:auto,"
    "dirty_decay_ms:9000000000,muzzy_decay_ms:9000000000"
)
_COMPACT = "granularity=fine,compact,1,0"
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # of x86 and ARM

# Matmuls of training (m, k, n): activations by weights, a gradient by weights, a weight's gradient.
_PROBE_SHAPES = ((256, 512, 2048), (256, 2048, 512), (512, 256, 2048))
# An exact matmul has at most this many times the error of torch's default, since oneDNN sums in another
# order. Rounding to bf16 is ten thousand times worse.
_ERROR_RATIO = 4.0


def chip(path: Path = Path("/proc/cpuinfo")) -> tuple[str, set[str]]:
    """Return the processor's name and its instruction sets, none if the kernel does not report them."""
    try:
        processor = path.read_text().partition("\n\n")[0]  # all processors of a host are assumed to be equal
    except OSError:
        processor = ""
    pairs = (line.partition(":") for line in processor.splitlines())
    fields = {key.strip(): text.strip() for key, _, text in pairs}
    name = fields.get("model name") or platform.processor() or platform.machine()
    return name, set(fields.get("flags", fields.get("Features", "")).split())  # x86, ARM


def has_bf16() -> bool:
    """Return whether the chip has bf16 instructions. With AVX512 alone, oneDNN emulates them."""
    return bool(_BF16_FLAGS & chip()[1])


@dataclass(eq=False)
class CPU(Device):
    """Threads, libraries, core pinning, matmul path and bf16 support of a CPU.

    ``threads`` 0 divides the usable physical cores evenly among the ranks of a host.

    ``matmul`` sets how fp32 matmuls are computed:

    - ``highest``: in fp32.
    - ``medium``: through oneDNN. On an AVX512-BF16 machine this is 1.6 to 2.3 times faster with unchanged
      error. If the chip has AMX, oneDNN rounds to bf16.
    - ``auto``: like ``medium`` if that is as exact and measured to be faster, otherwise like ``highest``.

    ``bf16``: with ``auto``, training is in fp32, with a warning, if the chip has no bf16 instructions.
    ``software`` computes in bf16 anyway, slowly.

    ``autotune`` times several policies before the first step. Under ``precision=bf16`` these are training in
    fp32, and in bf16 with torch's LSTM (fp32 inside, since its backward is slower in bf16) or with a loop
    over frames. False selects torch's own kernels.

    ``allocator`` and ``openmp`` are libraries that are loaded before Python. ``auto`` loads an installed
    allocator, jemalloc before tcmalloc, and Intel's OpenMP if it is installed. ``isa`` is the highest
    instruction set that oneDNN may use (``AVX512_CORE_AMX``). With null, oneDNN chooses.

    ``pin``: ``cores`` gives each rank its share of the physical cores, ``numa`` all cores of its memory
    node. ``auto`` is the share if there are several ranks and several memory nodes and this process is not
    bound yet. ``comm_cores``: cores of each rank's share that are reserved for communication.

    ``collectives``: ``ccl`` is Intel's oneCCL, which has a package for each release of torch.

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
        for key, choices in _CHOICES.items():
            choice = getattr(self, key)
            if choice not in choices:
                raise ValueError(f"{key} is {choice!r}. It must be one of {', '.join(choices)}")
        require_least(0, threads=self.threads, comm_cores=self.comm_cores)
        self.facts = replace(self.facts, collectives={"cpu": self.collectives})

    def check(self, processes: int) -> None:
        if self.collectives == "ccl" and importlib.util.find_spec(_ONECCL) is None:
            raise MachineError(
                f"device.collectives=ccl: {_ONECCL} is not installed here. Install Intel's build for torch "
                f"{torch.__version__.partition('+')[0]}, or set device.collectives=gloo"
            )

    # --- before Python starts -------------------------------------------------------------------

    def environment(self, processes: int) -> dict[str, str]:
        cores = self._cores()
        cores_per_rank = len(cores) // processes
        # A quota may allow a container fewer CPUs than it sees.
        usable = min(cores_per_rank, host.cpu_quota() // processes)
        threads = self.threads or max(1, usable - self.comm_cores)
        # Without OMP_NUM_THREADS, torchrun sets one thread, which is very slow here. Without the capacity,
        # oneDNN keeps 1024 primitives, which variable lengths fill with memory that is never used again.
        variables = {"OMP_NUM_THREADS": str(threads), "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
        # By default libgomp's threads spin 300,000 times for the next parallel region, which takes a busy
        # core from other processes. If they sleep at once (1,000), an idle machine trains at half the speed
        # (docs/benchmarks/openmp.md).
        variables["GOMP_SPINCOUNT"] = "12000"
        if self.isa is not None:
            variables["DNNL_MAX_CPU_ISA"] = self.isa
        if self.comm_cores and self.pin != "none" and cores_per_rank > self.comm_cores:
            workers = affinity.reserved_cpus(cores, processes, self.comm_cores)
            variables["I_MPI_PIN_DOMAIN"] = affinity.pin_domains(cores, processes, self.comm_cores)
            variables["CCL_WORKER_COUNT"] = str(self.comm_cores)
            variables["CCL_WORKER_AFFINITY"] = ",".join(map(str, workers))
        return variables | self._preloads(preload.library_folders(os.environ))

    def _preloads(self, folders: list[Path]) -> dict[str, str]:
        """Return ``LD_PRELOAD`` and the settings of its libraries.

        Raises MachineError if a library that a key names is missing.
        """
        variables: dict[str, str] = {}
        libraries = []
        names = {"auto": ["jemalloc", "tcmalloc"], "default": []}.get(self.allocator, [self.allocator])
        for name in names:
            allocator = preload.find_library(ALLOCATORS[name], folders)
            if allocator is not None:
                libraries.append(allocator)
                if name == "jemalloc":
                    variables["MALLOC_CONF"] = _MALLOC_CONF
                break
        if not libraries and self.allocator not in ("auto", "default"):
            package = {"jemalloc": "libjemalloc2", "tcmalloc": "libtcmalloc-minimal4"}[self.allocator]
            raise MachineError(
                f"device.allocator={self.allocator}: lib{self.allocator}.so is in no library folder. "
                f"apt-get install {package}, or set device.allocator=default"
            )
        openmp = None if self.openmp == "default" else preload.find_library(INTEL_OPENMP, folders)
        if openmp is None and self.openmp == "intel":
            raise MachineError(
                "device.openmp=intel: libiomp5.so is in no library folder. "
                "pip install intel-openmp, or set device.openmp=default"
            )
        if openmp is not None:
            libraries.append(openmp)
            variables["KMP_BLOCKTIME"] = "1"
            if self.pin == "cores":
                # Each thread is bound to one core. The processes that the first thread starts inherit that.
                variables["KMP_AFFINITY"] = _COMPACT
        if libraries:
            variables["LD_PRELOAD"] = ":".join(libraries)
        return variables

    def _cores(self) -> list[affinity.Core]:
        return affinity.cores_within(affinity.topology(), usable_cpus())

    # --- at the start -----------------------------------------------------------------------------

    def open(self, local_rank: int) -> None:
        if self.collectives == "ccl":
            self.check(1)
            importlib.import_module(_ONECCL)  # the import registers the backend with torch.distributed
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
        """Return the CPUs to bind local rank ``rank`` to, or none if its binding stays unchanged."""
        if self.pin == "none":
            return set()
        if self.pin == "auto":
            nodes = {core.node for core in cores}
            is_useful = processes > 1 and len(nodes) > 1 and not is_bound
            if not is_useful or len(cores) // processes <= self.comm_cores:
                return set()
        if self.pin == "numa":
            rank_cores = affinity.cores_of_node(cores, processes, rank)
        else:
            rank_cores = affinity.cores_of_rank(cores, processes, rank, reserved=self.comm_cores)
        if self.pin == "cores":
            return {core.first for core in rank_cores}
        # The data workers use the hyperthreads.
        return set[int]().union(*[core.cpus for core in rank_cores])

    def chip(self) -> str:
        return chip()[0]

    def policy(self, dtype: torch.dtype) -> ComputePolicy:
        policy = super().policy(dtype)
        # If AVX512 is the best instruction set that oneDNN may use, it emulates bf16. Below, it is slow.
        product_dtype = policy.product_dtype if _has_onednn_bf16() else torch.float32
        matmul = "highest" if self.matmul == "auto" else self.matmul
        return replace(policy, product_dtype=product_dtype, fp32_matmul=matmul)

    def candidates(self, dtype: torch.dtype) -> list[ComputePolicy]:
        if not self.autotune:
            return [self.policy(dtype)]
        policies = [self.policy(torch.float32)]
        if self.matmul == "auto" and is_medium_exact():
            policies.append(replace(policies[0], fp32_matmul="medium"))
        if dtype == torch.bfloat16:
            bf16_policy = replace(self.policy(dtype), fp32_matmul=policies[-1].fp32_matmul)
            if self.bf16 == "software":
                return [bf16_policy]
            policies += [bf16_policy, replace(bf16_policy, lstm="loop")]
        return policies

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
    """Return whether fp32 matmuls through oneDNN differ from torch's default here, and are as exact."""
    generator = torch.Generator().manual_seed(0)
    initial_setting = torch.get_float32_matmul_precision()
    errors, is_same = {"highest": 0.0, "medium": 0.0}, True
    try:
        for m, k, n in _PROBE_SHAPES:
            a, b = torch.randn(m, k, generator=generator), torch.randn(k, n, generator=generator)
            expected, products = a.double() @ b.double(), []
            for setting in errors:
                set_fp32_matmul(setting)
                products.append(torch.mm(a, b))
                difference = products[-1] - expected
                error = float(difference.norm() / expected.norm())
                errors[setting] = max(errors[setting], error)
            is_same = is_same and torch.equal(*products)
    finally:
        set_fp32_matmul(initial_setting)
    return not is_same and errors["medium"] <= _ERROR_RATIO * errors["highest"]


def _has_onednn_bf16() -> bool:
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(has_onednn and torch_private.is_onednn_bf16_supported())

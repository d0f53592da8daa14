"""The CPU: plain PyTorch, which computes with oneDNN."""

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
"""The file names of the allocators that can be loaded before Python."""
_PACKAGES = {"jemalloc": "libjemalloc2", "tcmalloc": "libtcmalloc-minimal4"}  # of apt
INTEL_OPENMP = ("libiomp5.so",)
"""The file name of Intel's OpenMP, which can be loaded before Python."""

# Intel's settings of jemalloc for training. With them, memory is never returned to the system.
_MALLOC_CONF = (
    "oversize_threshold:1,background_thread:true,metadata_thp:auto,"
    "dirty_decay_ms:9000000000,muzzy_decay_ms:9000000000"
)
_KMP_COMPACT = "granularity=fine,compact,1,0"  # Intel's OpenMP binds thread N of a rank to its core N.
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # in the lists of x86 and ARM

# The sizes (m, k, n) of three matmuls of training: activations by weights, a gradient by weights, and the
# gradient of weights.
_PROBE_SHAPES = ((256, 512, 2048), (256, 2048, 512), (512, 256, 2048))
# A matmul counts as exact if its error is at most this many times the error of torch's default. The errors
# differ because oneDNN sums in another order. Rounding to bf16 makes the error ten thousand times larger.
_ERROR_RATIO = 4.0


def chip(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, set[str]]:
    """Return the processor's name and the names of its instruction sets.

    The set is empty if the kernel does not report instruction sets.
    """
    try:
        # The file has a block of lines for each processor. All processors of a host are assumed to be equal.
        first_processor, _, _ = cpuinfo.read_text().partition("\n\n")
    except OSError:
        first_processor = ""
    fields = {}
    for line in first_processor.splitlines():
        key, _, text = line.partition(":")
        fields[key.strip()] = text.strip()
    name = fields.get("model name") or platform.processor() or platform.machine()
    flags = fields.get("flags", fields.get("Features", ""))  # the key on x86, and on ARM
    return name, set(flags.split())


def has_bf16() -> bool:
    """Return whether the chip has bf16 instructions. Without them, oneDNN emulates bf16 by AVX512."""
    _, instruction_sets = chip()
    return bool(_BF16_FLAGS & instruction_sets)


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

    ``autotune`` times several policies of the precision before the first step and chooses one. With
    ``precision=bf16`` these are: torch's LSTM (which computes in fp32, because its backward is slower in
    bf16), and an LSTM as a loop over frames. False selects torch's own kernels.

    ``allocator`` and ``openmp`` are libraries that are loaded before Python. ``auto`` loads an installed
    allocator, jemalloc before tcmalloc, and Intel's OpenMP if it is installed. ``isa`` is the highest
    instruction set that oneDNN may use (``AVX512_CORE_AMX``). With null, oneDNN chooses.

    ``pin`` binds a rank to cores:

    - ``cores``: an equal part of the physical cores for each rank, without hyperthreads.
    - ``numa``: all cores of the rank's NUMA node.
    - ``auto``: an equal part of the physical cores with their hyperthreads, if there are several ranks and
      several NUMA nodes, and the rank is not bound yet.
    - ``none``: no binding.

    ``comm_cores`` is the number of cores of each rank that are reserved for communication.

    ``collectives``: ``ccl`` is Intel's oneCCL, which has a package for each release of torch.

    ``oversubscribe`` allows more ranks on a host than it has CPUs, or memory for their models.
    """

    name = "cpu"
    on_host = True
    facts = DeviceFacts(
        forwarded_variables=("OMP_*", "KMP_*", "GOMP_*", "ONEDNN_*", "DNNL_*", "MALLOC_CONF", "CCL_*"),
        # Search is 7 % slower alone and a third faster beside busy processes (docs/benchmarks/decoding.md).
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
        flags = {} if has_bf16() else {"bf16": False}
        self.facts = replace(self.facts, collectives={"cpu": self.collectives}, optimizer_flags=flags)

    def check(self, processes: int) -> None:
        if self.collectives == "ccl" and importlib.util.find_spec(_ONECCL) is None:
            raise MachineError(
                f"device.collectives=ccl: {_ONECCL} is not installed here. Install Intel's build for torch "
                f"{torch.__version__.partition('+')[0]}, or set device.collectives=gloo"
            )
        folders = preload.library_folders(os.environ)
        if self.allocator in _PACKAGES and not preload.find_library(ALLOCATORS[self.allocator], folders):
            raise MachineError(
                f"device.allocator={self.allocator}: lib{self.allocator}.so is in no library folder. "
                f"apt-get install {_PACKAGES[self.allocator]}, or set device.allocator=default"
            )
        if self.openmp == "intel" and not preload.find_library(INTEL_OPENMP, folders):
            raise MachineError(
                "device.openmp=intel: libiomp5.so is in no library folder. "
                "pip install intel-openmp, or set device.openmp=default"
            )

    # --- before Python starts -------------------------------------------------------------------

    def environment(self, processes: int) -> dict[str, str]:
        cores = self._cores()
        cores_per_rank = len(cores) // processes
        # A quota may allow a container fewer CPUs than it sees.
        usable_cores = min(cores_per_rank, host.cpu_quota() // processes)
        threads = self.threads or max(1, usable_cores - self.comm_cores)
        variables = {
            # Without this variable, torchrun sets one thread, which is very slow here.
            "OMP_NUM_THREADS": str(threads),
            # By default, oneDNN caches 1024 primitives. With variable lengths, most are never used again, and
            # their memory is wasted.
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
            # By default, an idle thread of libgomp spins 300,000 times before it sleeps, which keeps a core
            # busy that other processes need. If it sleeps at once (1,000), an idle machine trains at half the
            # speed (docs/benchmarks/steps.md).
            "GOMP_SPINCOUNT": "12000",
        }
        if self.isa is not None:
            variables["DNNL_MAX_CPU_ISA"] = self.isa
        if self.comm_cores and self.pin != "none" and cores_per_rank > self.comm_cores:
            comm_cpus = affinity.reserved_cpus(cores, processes, self.comm_cores)
            variables["I_MPI_PIN_DOMAIN"] = affinity.pin_domains(cores, processes, self.comm_cores)
            variables["CCL_WORKER_COUNT"] = str(self.comm_cores)
            variables["CCL_WORKER_AFFINITY"] = ",".join(map(str, comm_cpus))
        return variables | self._preload_variables(preload.library_folders(os.environ))

    def _preload_variables(self, folders: list[Path]) -> dict[str, str]:
        """Return ``LD_PRELOAD`` and the settings of its libraries, as far as they are in ``folders``."""
        variables: dict[str, str] = {}
        libraries = []
        allocators = [self.allocator]
        if self.allocator == "auto":
            allocators = ["jemalloc", "tcmalloc"]
        elif self.allocator == "default":
            allocators = []
        for name in allocators:
            path = preload.find_library(ALLOCATORS[name], folders)
            if path is not None:
                libraries.append(path)
                if name == "jemalloc":
                    variables["MALLOC_CONF"] = _MALLOC_CONF
                break
        openmp = None
        if self.openmp != "default":
            openmp = preload.find_library(INTEL_OPENMP, folders)
        if openmp is not None:
            libraries.append(openmp)
            variables["KMP_BLOCKTIME"] = "1"
            if self.pin == "cores":
                # With this variable, child processes inherit the binding of the first thread to one core. So
                # it is set only on request.
                variables["KMP_AFFINITY"] = _KMP_COMPACT
        if libraries:
            variables["LD_PRELOAD"] = ":".join(libraries)
        return variables

    def _cores(self) -> list[affinity.Core]:
        """Return the cores of this host that this process may use."""
        return affinity.cores_within(affinity.topology(), usable_cpus())

    def rank_cores(self) -> int:
        return min(len(self._cores()), host.cpu_quota())

    # --- at the start -----------------------------------------------------------------------------

    def open(self, local_rank: int = 0) -> None:
        if self.collectives == "ccl":
            self.check(1)
            importlib.import_module(_ONECCL)  # The import registers the backend with torch.distributed.
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1)
        self._pin(local_rank, processes)
        threads = self.threads or int(os.environ.get("OMP_NUM_THREADS", "0") or 0)
        if threads > 0:
            torch.set_num_threads(threads)

    def _pin(self, local_rank: int, processes: int) -> None:
        """Bind this process to the cores of its rank, one of ``processes`` on this host."""
        if not hasattr(os, "sched_setaffinity"):  # The system is not Linux.
            return
        cores = self._cores()
        is_bound = len(cores) < len(affinity.topology())
        cpus = self._cpus_of_rank(cores, local_rank, processes, is_bound)
        if cpus:
            nodes = {core.node for core in cores if cpus & set(core.cpus)}
            if len(nodes) > 1 and processes > 1:
                _LOG.warning(f"rank {local_rank} computes on cores of memory nodes {sorted(nodes)}")
            affinity.pin(cpus)

    def _cpus_of_rank(
        self, cores: list[affinity.Core], rank: int, processes: int, is_bound: bool
    ) -> set[int]:
        """Return the logical CPUs to which local rank ``rank`` must be bound, empty for no binding.

        ``is_bound`` says whether this process may use only some of the host's cores already.
        """
        if self.pin == "none":
            return set()
        if self.pin == "auto":
            nodes = {core.node for core in cores}
            is_useful = processes > 1 and len(nodes) > 1 and not is_bound
            has_enough_cores = len(cores) // processes > self.comm_cores
            if not is_useful or not has_enough_cores:
                return set()
        if self.pin == "numa":
            rank_cores = affinity.cores_of_numa_nodes(cores, processes, rank)
        else:
            rank_cores = affinity.cores_of_rank(cores, processes, rank, reserved=self.comm_cores)
        if self.pin == "cores":
            return {core.first for core in rank_cores}
        cpus: set[int] = set()
        for core in rank_cores:
            cpus.update(core.cpus)  # The data workers use the hyperthreads.
        return cpus

    def chip(self) -> str:
        name, _ = chip()
        return name

    def policy(self, dtype: torch.dtype) -> ComputePolicy:
        policy = super().policy(dtype)
        # oneDNN has fast bf16 from AVX512 on (emulated, if the chip has no bf16 instructions).
        product_dtype = policy.product_dtype if _has_onednn_bf16() else torch.float32
        matmul = "highest" if self.matmul == "auto" else self.matmul
        return replace(policy, product_dtype=product_dtype, fp32_matmul=matmul)

    def candidates(self, dtype: torch.dtype) -> list[ComputePolicy]:
        if not self.autotune:
            return [self.policy(dtype)]
        policies = [self.policy(dtype)]
        if self.matmul == "auto" and is_medium_exact():
            policies.append(replace(policies[0], fp32_matmul="medium"))
        if dtype == torch.float32:
            return policies
        # The matmuls that stay in fp32 are few, so only the LSTM is timed.
        bf16_policy = policies[-1]
        if self.bf16 == "software":
            return [bf16_policy]
        return [bf16_policy, replace(bf16_policy, lstm="loop")]

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
    """Return whether the setting ``medium`` of fp32 matmuls is worth timing here.

    It is if its results differ from the setting ``highest`` (so another kernel computes them) and are as
    exact.
    """
    generator = torch.Generator().manual_seed(0)
    initial_setting = torch.get_float32_matmul_precision()
    max_errors = {"highest": 0.0, "medium": 0.0}  # relative to the norm of the result
    is_same = True
    try:
        for m, k, n in _PROBE_SHAPES:
            a = torch.randn(m, k, generator=generator)
            b = torch.randn(k, n, generator=generator)
            expected = a.double() @ b.double()
            products = []
            for setting in max_errors:
                set_fp32_matmul(setting)
                product = torch.mm(a, b)
                products.append(product)
                error = float((product - expected).norm() / expected.norm())
                max_errors[setting] = max(max_errors[setting], error)
            is_same = is_same and torch.equal(*products)
    finally:
        set_fp32_matmul(initial_setting)
    return not is_same and max_errors["medium"] <= _ERROR_RATIO * max_errors["highest"]


def _has_onednn_bf16() -> bool:
    """Return whether this torch has oneDNN, and oneDNN computes in bf16 on this chip."""
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(has_onednn and torch_private.is_onednn_bf16_supported())

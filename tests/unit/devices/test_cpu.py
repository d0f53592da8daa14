"""What the CPU's keys become: variables, core sets, forms, and choices that are kept."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from speechtrain.compute_policy import PLAIN
from speechtrain.devices import affinity, cpu, host, preload
from speechtrain.devices.affinity import Core
from speechtrain.devices.cpu import CPU, chip
from speechtrain.errors import MachineError

X86 = "processor\t: 0\nmodel name\t: Xeon\nflags\t\t: fpu avx2 {flags}\n\nprocessor\t: 1\nflags\t\t: none\n\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd bf16\n\n"


@pytest.fixture
def has_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "chip", lambda: ("Xeon", {"avx512_bf16"}))


@pytest.fixture
def has_no_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "chip", lambda: ("Epyc", {"avx2"}))


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> list[Core]:
    """Two nodes of four cores with two hyperthreads each, all of them usable."""
    cores = [Core((c, c + 8), c // 4) for c in range(8)]
    monkeypatch.setattr(affinity, "topology", lambda: cores)
    monkeypatch.setattr(cpu, "usable_cpus", lambda: set(range(16)))
    return cores


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The only folder of libraries there is."""
    monkeypatch.setattr(preload, "library_folders", lambda environ: [tmp_path / "absent", tmp_path])
    return tmp_path


def put(folder: Path, *names: str) -> None:
    for name in names:
        shutil.copyfile(sys.executable, folder / name)  # of this interpreter's kind


# --- the chip -----------------------------------------------------------------------------------


def test_the_chip_is_read(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(X86.format(flags="amx_bf16"))
    assert chip(file) == ("Xeon", {"fpu", "avx2", "amx_bf16"})
    file.write_text(ARM)
    assert chip(file)[1] == {"fp", "asimd", "bf16"}
    assert chip(tmp_path / "absent")[1] == set()


def test_bf16_is_fp32_where_the_chip_has_none(has_no_bf16: None) -> None:
    assert "no bf16 instructions" in CPU().precision_fallback_reason(torch.bfloat16)
    assert not CPU().precision_fallback_reason(torch.float32)
    assert not CPU(bf16="software").precision_fallback_reason(torch.bfloat16)
    narrow = CPU(bf16="software").policy(torch.bfloat16)
    assert (narrow.autocast_dtype, narrow.lstm) == (torch.bfloat16, "fused")


def test_products_are_bf16_where_onednn_computes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_bf16, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(cpu, "_has_onednn_bf16", lambda has_bf16=has_bf16: has_bf16)
        assert CPU().policy(torch.bfloat16).product_dtype == expected
        assert CPU().policy(torch.float32) == PLAIN


def test_optimizers_compute_in_bf16_if_the_chip_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "chip", lambda: ("Xeon", {"amx_bf16"}))
    assert CPU().facts.optimizer_flags == {}
    monkeypatch.setattr(cpu, "chip", lambda: ("Epyc", {"avx2"}))
    assert CPU().facts.optimizer_flags == {"bf16": False}


def test_all_candidates_compute_in_the_precision(has_bf16: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "is_medium_exact", lambda: False)
    assert CPU().candidates(torch.float32) == [PLAIN]
    candidates = CPU().candidates(torch.bfloat16)
    assert [policy.lstm for policy in candidates] == ["fused", "loop"]
    assert {policy.autocast_dtype for policy in candidates} == {torch.bfloat16}
    assert CPU(autotune=False).candidates(torch.bfloat16) == [CPU().policy(torch.bfloat16)]
    forced = CPU(bf16="software").candidates(torch.bfloat16)
    assert [policy.autocast_dtype for policy in forced] == [torch.bfloat16]


def test_products_through_onednn_are_timed_where_they_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_exact, settings in ((True, ["highest", "medium"]), (False, ["highest"])):
        monkeypatch.setattr(cpu, "is_medium_exact", lambda is_exact=is_exact: is_exact)
        found = CPU(matmul="auto").candidates(torch.float32)
        assert [policy.fp32_matmul for policy in found] == settings
        assert [p.fp32_matmul for p in CPU(matmul="high").candidates(torch.float32)] == ["high"]


@pytest.mark.parametrize("key", ["matmul", "bf16", "allocator", "openmp", "pin"])
def test_a_key_of_no_such_value_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match=rf"^{key} is 'x'\. It must be one of auto"):
        CPU(**{key: "x"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^comm_cores is -1"):
        CPU(comm_cores=-1)


# --- variables ----------------------------------------------------------------------------------


def test_threads_share_the_physical_cores(two_nodes: list[Core], libraries: Path) -> None:
    assert CPU().environment(1)["OMP_NUM_THREADS"] == "8"
    assert CPU().environment(4)["OMP_NUM_THREADS"] == "2"
    assert CPU().environment(99)["OMP_NUM_THREADS"] == "1"
    assert CPU(threads=3).environment(2)["OMP_NUM_THREADS"] == "3"


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Control groups of which a test writes the files; this process is in /pod/own."""
    for name in ("", "memory", "cpu,cpuacct"):
        (tmp_path / name / "pod" / "own").mkdir(parents=True)
    lines = "4:memory:/pod/own\n3:cpu,cpuacct:/pod/own\n0::/pod/own\n"
    monkeypatch.setattr(host, "_CGROUPS", tmp_path)
    monkeypatch.setattr(
        host,
        "read_small_file",
        lambda path: lines if path.name == "cgroup" else affinity.read_small_file(path),
    )
    return tmp_path


@pytest.mark.parametrize(
    ("file", "text", "threads"),
    [
        ("pod/cpu.max", "600000 100000", "3"),  # of the parent group
        ("pod/own/cpu.max", "50000 100000", "1"),
        ("cpu,cpuacct/pod/own/cpu.cfs_quota_us", "200000", "1"),
        ("cpu,cpuacct/cpu.cfs_quota_us", "400000", "2"),  # a container's own group, seen as the root
        ("cpu.max", "max 100000", "4"),
        ("cpu,cpuacct/pod/cpu.cfs_quota_us", "-1", "4"),
    ],
)
def test_threads_share_the_quota_of_a_container(
    two_nodes: list[Core], libraries: Path, groups: Path, file: str, text: str, threads: str
) -> None:
    (groups / file).write_text(text)
    assert CPU().environment(2)["OMP_NUM_THREADS"] == threads


def test_more_ranks_than_cpus_or_memory_are_named(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "usable_cpus", lambda: {3, 5, 7, 9})
    end = ". Lower world_size, or set device.oversubscribe=true"
    name = platform.node()
    assert host.oversubscription(4, 2**20) == ""
    assert host.oversubscription(5, 0) == f"{name}: 5 ranks would share 4 CPUs{end}"
    (groups / "cpu.max").write_text("150000 100000")
    assert host.oversubscription(2, 0) == f"{name}: 2 ranks would share 1 CPU{end}"
    (groups / "cpu.max").unlink()
    for file in ("pod/memory.max", "memory/pod/own/memory.limit_in_bytes"):
        (groups / file).write_text(str(3 * 2**28))
        assert host.oversubscription(3, 2**28) == ""
        parts = "weights, gradients, optimizer state, average"
        reason = f"4 x 0.2 GiB each ({parts}) do not fit into 0.8 GiB of free memory"
        assert host.oversubscription(4, 2**28) == f"{name}: {reason}{end}"
        (groups / file).write_text("max")


@pytest.mark.parametrize(
    ("files", "stat"),
    [
        (("pod/memory.max", "pod/memory.current"), "anon 5\ninactive_file {}"),
        (
            ("memory/pod/own/memory.limit_in_bytes", "memory/pod/own/memory.usage_in_bytes"),
            "inactive_file 0\ntotal_inactive_file {}",
        ),
    ],
)
def test_used_memory_of_a_container_is_not_free(groups: Path, files: tuple[str, str], stat: str) -> None:
    """2 of 8 MiB are in use, and the kernel can drop half a MiB of files, which counts as free."""
    limit, used = (groups / name for name in files)
    limit.write_text(str(8 * 2**20))
    assert host.free_memory() == 8 * 2**20
    used.write_text(str(2 * 2**20))
    assert host.free_memory() == 6 * 2**20
    (limit.parent / "memory.stat").write_text(stat.format(2**19))
    assert host.free_memory() == 6.5 * 2**20
    used.write_text(str(9 * 2**20))
    assert host.free_memory() == 0


def test_reserved_cores_are_named_to_communication(two_nodes: list[Core], libraries: Path) -> None:
    found = CPU(comm_cores=1, pin="cores").environment(2)
    assert found["OMP_NUM_THREADS"] == "3"
    assert found["I_MPI_PIN_DOMAIN"] == "[0xe,0xe0,]"
    assert (found["CCL_WORKER_COUNT"], found["CCL_WORKER_AFFINITY"]) == ("1", "0,4")
    assert "I_MPI_PIN_DOMAIN" not in CPU().environment(2)


def test_the_instruction_set_is_passed_on(libraries: Path) -> None:
    assert CPU(isa="AVX512_CORE_AMX").environment(1)["DNNL_MAX_CPU_ISA"] == "AVX512_CORE_AMX"
    assert "DNNL_MAX_CPU_ISA" not in CPU().environment(1)


def test_nothing_is_loaded_where_nothing_is_found(libraries: Path) -> None:
    assert not {"LD_PRELOAD", "MALLOC_CONF", "KMP_BLOCKTIME"} & CPU().environment(1).keys()


@pytest.mark.parametrize(
    ("key", "value"), [("allocator", "jemalloc"), ("allocator", "tcmalloc"), ("openmp", "intel")]
)
def test_what_is_asked_for_and_absent_is_told(libraries: Path, key: str, value: str) -> None:
    with pytest.raises(
        MachineError, match=rf"device\.{key}={value}: .* install .*device\.{key}=default"
    ) as raised:
        CPU(**{key: value}).check(1)  # type: ignore[arg-type]
    assert "LD_PRELOAD" not in CPU(**{key: value}).environment(1)  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)


def test_what_is_found_is_loaded_with_the_references_settings(libraries: Path) -> None:
    put(libraries, "libjemalloc.so.2", "libtcmalloc.so.4", "libiomp5.so")
    found = CPU().environment(1)
    assert found["LD_PRELOAD"] == f"{libraries / 'libjemalloc.so.2'}:{libraries / 'libiomp5.so'}"
    assert found["MALLOC_CONF"] == (
        "oversize_threshold:1,background_thread:true,metadata_thp:auto,"
        "dirty_decay_ms:9000000000,muzzy_decay_ms:9000000000"
    )
    assert found["KMP_BLOCKTIME"] == "1"
    assert "KMP_AFFINITY" not in found
    assert CPU(pin="cores").environment(1)["KMP_AFFINITY"] == "granularity=fine,compact,1,0"
    found = CPU(allocator="tcmalloc", openmp="default").environment(1)
    assert found["LD_PRELOAD"] == str(libraries / "libtcmalloc.so.4")
    assert "MALLOC_CONF" not in found
    assert "LD_PRELOAD" not in CPU(allocator="default", openmp="default").environment(1)


def test_libraries_of_another_kind_are_passed_over(tmp_path: Path) -> None:
    put(tmp_path, "libjemalloc.so.2")
    other = bytearray((tmp_path / "libjemalloc.so.2").read_bytes()[:64])
    other[4] = 3 - other[4]  # 32 for 64 bits
    (tmp_path / "libjemalloc.so.1").write_bytes(other)
    (tmp_path / "libjemalloc.so").write_text("INPUT(libjemalloc.so.2)")
    assert preload.find_library(["libjemalloc.so"], [tmp_path]) == str(tmp_path / "libjemalloc.so.2")
    assert preload.find_library(["libtcmalloc.so"], [tmp_path]) is None


def test_libraries_are_looked_for_where_they_lie(tmp_path: Path) -> None:
    found = preload.library_folders({"LD_LIBRARY_PATH": f"{tmp_path}:", "VIRTUAL_ENV": "/venv"})
    assert found[0] == Path("/venv/lib")
    assert {tmp_path, Path(sys.prefix) / "lib", Path("/usr/lib"), Path("/usr/lib64")} <= set(found)
    (tmp_path / "vendor.conf").write_text("# where\n/opt/vendor/lib \n")
    assert list(preload._loader_folders(tmp_path)) == [Path("/opt/vendor/lib")]


def test_a_library_of_the_system_is_found() -> None:
    """libc is in the multiarch folder of Debian, or in /usr/lib64."""
    if not sys.platform.startswith("linux"):
        pytest.skip("no ld.so here")
    assert preload.find_library(["libm.so"], preload.library_folders(os.environ))


# --- pinning ------------------------------------------------------------------------------------


def shares(device: CPU, cores: list[Core], processes: int, is_bound: bool = False) -> list[set[int]]:
    return [device._cpus_of_rank(cores, rank, processes, is_bound) for rank in range(processes)]


def test_ranks_are_bound_as_asked(two_nodes: list[Core]) -> None:
    assert shares(CPU(pin="cores"), two_nodes, 2) == [{0, 1, 2, 3}, {4, 5, 6, 7}]
    assert shares(CPU(pin="cores", comm_cores=1), two_nodes, 2) == [{1, 2, 3}, {5, 6, 7}]
    assert shares(CPU(pin="numa"), two_nodes, 2) == [
        {0, 1, 2, 3, 8, 9, 10, 11},
        {4, 5, 6, 7, 12, 13, 14, 15},
    ]
    assert shares(CPU(pin="none"), two_nodes, 2) == [set(), set()]
    assert shares(CPU(), two_nodes, 4) == [{0, 1, 8, 9}, {2, 3, 10, 11}, {4, 5, 12, 13}, {6, 7, 14, 15}]


def test_auto_leaves_alone_what_gains_nothing(two_nodes: list[Core]) -> None:
    assert shares(CPU(), two_nodes, 1) == [set()]
    assert shares(CPU(), two_nodes, 2, is_bound=True) == [set(), set()]
    assert shares(CPU(), two_nodes[:4], 2) == [set(), set()]  # one node
    assert shares(CPU(), two_nodes, 9) == [set()] * 9


_OPEN = """
import os
from speechtrain.devices.cpu import CPU
cpus = sorted(os.sched_getaffinity(0))
device = CPU(pin="cores", threads=1)
device.open(1)
assert os.sched_getaffinity(0) == {cpus[len(cpus) // 2]}, os.sched_getaffinity(0)
"""


@pytest.mark.slow
def test_open_binds_this_process() -> None:
    cores = affinity.cores_within(affinity.topology(), cpu.usable_cpus())
    if len(cores) != 2 or any(len(core.cpus) > 1 for core in cores):
        pytest.skip(f"written for two plain cores, here are {cores}")
    environment = {**os.environ, "LOCAL_WORLD_SIZE": "2"}
    done = subprocess.run(
        [sys.executable, "-c", _OPEN],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


# --- the matmul path ----------------------------------------------------------------------------


def is_exact(monkeypatch: pytest.MonkeyPatch, error: float, is_same: bool = False) -> bool:
    """What the probe says of a oneDNN with a relative ``error`` of its products."""

    def multiplied(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        product = (a.double() @ b.double()).float()
        noise = torch.randn(product.shape, generator=torch.Generator().manual_seed(1)) * product.std()
        is_plain = is_same or torch.get_float32_matmul_precision() == "highest"
        return product + (3e-7 if is_plain else error) * noise

    with monkeypatch.context() as patched:
        patched.setattr(torch, "mm", multiplied)
        return cpu.is_medium_exact()


def test_the_probe_asks_for_the_same_error(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_float32_matmul_precision()
    assert is_exact(monkeypatch, 4e-7)
    assert not is_exact(monkeypatch, 2e-3)  # rounded to bf16 inside
    assert not is_exact(monkeypatch, 0.0, is_same=True)  # nothing to choose between
    assert torch.get_float32_matmul_precision() == before


def test_one_ccl_is_asked_for_by_name() -> None:
    assert CPU().facts.backends == "cpu:gloo"
    device = CPU(collectives="ccl")
    assert device.facts.backends == "cpu:ccl"
    for refused in (lambda: device.check(2), lambda: device.open(0)):
        with pytest.raises(
            MachineError, match=r"device\.collectives=ccl: oneccl_bindings_for_pytorch is not"
        ):
            refused()
    with pytest.raises(ValueError, match=r"collectives is 'mpi'\. It must be one of gloo, ccl"):
        CPU(collectives="mpi")

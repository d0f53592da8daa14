"""Tests of the cores of ranks, with the masks of Intel's AIDK launcher and with topologies from Linux."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from speechtrain.devices import affinity
from speechtrain.devices.affinity import Core
from speechtrain.errors import MachineError


def parse(text: str) -> list[Core]:
    """Parse the output of ``lscpu --parse=CPU,CORE,SOCKET,NODE`` into cores, ordered by node.

    ``0,0,0,0`` and ``4,0,0,0`` are two hyperthreads of one core. An absent node counts as 0.
    """
    cpus_by_core: dict[tuple[int, int, int], list[int]] = {}  # The keys are node, socket and core.
    for line in text.splitlines():
        if line and not line.startswith("#"):
            cpu, core, socket, node = (int(field or 0) for field in line.split(",")[:4])
            cpus_by_core.setdefault((node, socket, core), []).append(cpu)
    cores = []
    for (node, _, _), cpus in cpus_by_core.items():
        cores.append(Core(tuple(sorted(cpus)), node))
    return sorted(cores, key=lambda core: (core.node, core.first))


def host(cores: int, nodes: int = 1, hyperthreads: int = 2) -> list[Core]:
    """Return cores whose CPUs are numbered as by Intel's firmware.

    The first hyperthreads of all cores have the lowest numbers, then the second hyperthreads follow.
    """
    text = "# CPU,Core,Socket,Node\n"
    for thread in range(hyperthreads):
        for core in range(cores):
            node = core * nodes // cores
            text += f"{thread * cores + core},{core},{node},{node}\n"
    return parse(text)


def test_pin_domains_and_reserved_cpus_equal_those_of_aidk() -> None:
    """These are the values of Intel's AIDK launcher for hosts of 104 and of 36 cores on two NUMA nodes."""
    cores = host(104, nodes=2)
    assert affinity.pin_domains(cores, 2, 4) == "[0xffffffffffff0,0xffffffffffff00000000000000,]"
    assert affinity.reserved_cpus(cores, 2, 4) == [0, 1, 2, 3, 52, 53, 54, 55]
    assert len(affinity.cores_of_rank(cores, 2, 0, 4)) == 48
    cores = host(36, nodes=2)
    assert affinity.pin_domains(cores, 2, 4) == "[0x3fff0,0xfffc00000,]"
    assert affinity.reserved_cpus(cores, 2, 4) == [0, 1, 2, 3, 18, 19, 20, 21]
    assert len(affinity.cores_of_rank(cores, 2, 1, 4)) == 14


def test_cores_of_rank_are_disjoint_and_on_one_node() -> None:
    cores = host(12, nodes=2)
    all_cores, nodes = [], []
    for rank in range(4):
        rank_cores = affinity.cores_of_rank(cores, 4, rank)
        all_cores += rank_cores
        nodes.append({core.node for core in rank_cores})
    assert all_cores == cores
    assert nodes == [{0}, {0}, {1}, {1}]


def test_cores_of_rank_are_on_one_node_if_the_cpus_of_nodes_alternate() -> None:
    cores = parse("0,0,0,0\n1,1,1,1\n2,2,0,0\n3,3,1,1\n")
    assert cores == [Core((0,), 0), Core((2,), 0), Core((1,), 1), Core((3,), 1)]
    assert affinity.core_mask(affinity.cores_of_rank(cores, 2, 1)) == "0xa"


@pytest.mark.parametrize(
    ("nodes", "processes", "expected"),
    [(2, 2, [{0}, {1}]), (2, 4, [{0}, {0}, {1}, {1}]), (4, 2, [{0, 1}, {2, 3}]), (1, 3, [{0}] * 3)],
)
def test_memory_nodes_are_shared_in_order(nodes: int, processes: int, expected: list[set[int]]) -> None:
    cores = host(8, nodes=nodes)
    all_cores, nodes_of_ranks = set(), []
    for rank in range(processes):
        rank_cores = affinity.cores_of_numa_nodes(cores, processes, rank)
        all_cores.update(rank_cores)
        nodes_of_ranks.append({core.node for core in rank_cores})
    assert nodes_of_ranks == expected
    assert all_cores == set(cores)


def test_cores_of_rank_refuses_more_ranks_than_the_cores_suffice_for() -> None:
    with pytest.raises(MachineError, match="8 usable cores are too few for 4 ranks with 2 reserved"):
        affinity.cores_of_rank(host(8), 4, 0, reserved=2)


def test_cores_within_omits_cpus_that_this_process_may_not_use() -> None:
    cores = host(4)  # CPUs 0 to 3, hyperthreads 4 to 7
    assert affinity.cores_within(cores, {1, 5, 6}) == [Core((1, 5)), Core((6,))]


def test_cpus_of_reads_lists_of_the_kernel() -> None:
    assert affinity.cpus_of("0-2,8,10-11") == [0, 1, 2, 8, 10, 11]
    assert affinity.cpus_of("") == []


def test_topology_reads_cores_and_nodes_from_sys(tmp_path: Path) -> None:
    for cpu in range(8):
        folder = tmp_path / "cpu" / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    (tmp_path / "cpu" / "cpu9").mkdir()  # This CPU is offline.
    (tmp_path / "cpu" / "cpufreq").mkdir()
    for node, cpus in enumerate(("0-1,4-5", "2-3,6-7")):
        (tmp_path / "node" / f"node{node}").mkdir(parents=True)
        (tmp_path / "node" / f"node{node}" / "cpulist").write_text(cpus)
    assert affinity.topology(tmp_path) == host(4, nodes=2)
    assert len(affinity.topology(tmp_path / "nothing")) == os.cpu_count()


def test_topology_of_this_host_agrees_with_lscpu() -> None:
    try:
        lscpu = subprocess.run(
            ["lscpu", "--parse=CPU,CORE,SOCKET,NODE"], capture_output=True, text=True, check=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"lscpu does not run here: {error}")
    assert parse(lscpu.stdout) == affinity.topology()


def test_pin_binds_every_thread() -> None:
    program = """
import os, threading
from speechtrain.devices import affinity
event = threading.Event()
thread = threading.Thread(target=event.wait)
thread.start()
cpu = min(os.sched_getaffinity(0))
affinity.pin({cpu})
cpus_of_threads = [os.sched_getaffinity(int(name)) for name in os.listdir("/proc/self/task")]
event.set()
assert len(cpus_of_threads) >= 2 and all(cpus == {cpu} for cpus in cpus_of_threads), cpus_of_threads
"""
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert process.returncode == 0, process.stderr

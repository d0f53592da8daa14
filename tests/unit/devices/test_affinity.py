"""The masks of the reference's launcher, and topologies as Linux writes them."""

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
    found: dict[tuple[int, int, int], list[int]] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            cpu, core, socket, node = (int(field or 0) for field in line.split(",")[:4])
            found.setdefault((node, socket, core), []).append(cpu)
    cores = [Core(tuple(sorted(cpus)), place[0]) for place, cpus in found.items()]
    return sorted(cores, key=lambda core: (core.node, core.first))


def host(cores: int, nodes: int = 1, hyperthreads: int = 2) -> list[Core]:
    """CPUs numbered as Intel's firmware does: first one of every core, then the second ones."""
    text = "# CPU,Core,Socket,Node\n"
    for thread in range(hyperthreads):
        for core in range(cores):
            node = core * nodes // cores
            text += f"{thread * cores + core},{core},{node},{node}\n"
    return parse(text)


def test_the_masks_of_record() -> None:
    cores = host(104, nodes=2)
    assert affinity.pin_domains(cores, 2, 4) == "[0xffffffffffff0,0xffffffffffff00000000000000,]"
    assert affinity.reserved_cpus(cores, 2, 4) == [0, 1, 2, 3, 52, 53, 54, 55]
    assert len(affinity.cores_of_rank(cores, 2, 0, 4)) == 48
    cores = host(36, nodes=2)
    assert affinity.pin_domains(cores, 2, 4) == "[0x3fff0,0xfffc00000,]"
    assert affinity.reserved_cpus(cores, 2, 4) == [0, 1, 2, 3, 18, 19, 20, 21]
    assert len(affinity.cores_of_rank(cores, 2, 1, 4)) == 14


def test_shares_are_disjoint_and_stay_on_a_node() -> None:
    cores = host(12, nodes=2)
    shares = [affinity.cores_of_rank(cores, 4, p) for p in range(4)]
    assert [core for share in shares for core in share] == cores
    assert [{core.node for core in share} for share in shares] == [{0}, {0}, {1}, {1}]


def test_interleaved_cpus_are_sorted_by_node() -> None:
    cores = parse("0,0,0,0\n1,1,1,1\n2,2,0,0\n3,3,1,1\n")
    assert cores == [Core((0,), 0), Core((2,), 0), Core((1,), 1), Core((3,), 1)]
    assert affinity.core_mask(affinity.cores_of_rank(cores, 2, 1)) == "0xa"


@pytest.mark.parametrize(
    ("nodes", "processes", "expected"),
    [(2, 2, [{0}, {1}]), (2, 4, [{0}, {0}, {1}, {1}]), (4, 2, [{0, 1}, {2, 3}]), (1, 3, [{0}] * 3)],
)
def test_memory_nodes_are_shared_in_order(nodes: int, processes: int, expected: list[set[int]]) -> None:
    cores = host(8, nodes=nodes)
    found = [affinity.cores_of_numa_nodes(cores, processes, rank) for rank in range(processes)]
    assert [{core.node for core in share} for share in found] == expected
    assert {core for share in found for core in share} == set(cores)


def test_too_many_ranks_are_told_so() -> None:
    with pytest.raises(MachineError, match="8 usable cores are too few for 4 ranks with 2 reserved"):
        affinity.cores_of_rank(host(8), 4, 0, reserved=2)


def test_what_may_not_be_used_is_left_out() -> None:
    cores = host(4)  # CPUs 0 to 3, hyperthreads 4 to 7
    assert affinity.cores_within(cores, {1, 5, 6}) == [Core((1, 5)), Core((6,))]


def test_the_kernels_lists() -> None:
    assert affinity.cpus_of("0-2,8,10-11") == [0, 1, 2, 8, 10, 11]
    assert affinity.cpus_of("") == []


def test_the_topology_is_read_from_sys(tmp_path: Path) -> None:
    for cpu in range(8):
        folder = tmp_path / "cpu" / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    (tmp_path / "cpu" / "cpu9").mkdir()  # switched off
    (tmp_path / "cpu" / "cpufreq").mkdir()
    for node, cpus in enumerate(("0-1,4-5", "2-3,6-7")):
        (tmp_path / "node" / f"node{node}").mkdir(parents=True)
        (tmp_path / "node" / f"node{node}" / "cpulist").write_text(cpus)
    assert affinity.topology(tmp_path) == host(4, nodes=2)
    assert len(affinity.topology(tmp_path / "nothing")) == os.cpu_count()


def test_this_host_agrees_with_lscpu() -> None:
    try:
        done = subprocess.run(
            ["lscpu", "--parse=CPU,CORE,SOCKET,NODE"], capture_output=True, text=True, check=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"lscpu does not run here: {error}")
    assert parse(done.stdout) == affinity.topology()


def test_every_thread_is_bound() -> None:
    program = """
import os, threading
from speechtrain.devices import affinity
event = threading.Event()
thread = threading.Thread(target=event.wait)
thread.start()
cpu = min(os.sched_getaffinity(0))
affinity.pin({cpu})
found = [os.sched_getaffinity(int(name)) for name in os.listdir("/proc/self/task")]
event.set()
assert len(found) >= 2 and all(cpus == {cpu} for cpus in found), found
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr

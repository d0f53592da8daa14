"""The group of several processes, as its members see it: each check runs in two real ones over gloo."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from speechtrain.devices.base import DeviceFacts
from speechtrain.devices.cuda import CUDA
from speechtrain.devices.hpu import HPU
from speechtrain.distributed import group as module
from speechtrain.distributed.group import GlobalStatus, SingleProcess, TorchGroup, open_group
from speechtrain.distributed.loopback import store_of_one_host
from speechtrain.distributed.world import World
from speechtrain.errors import MachineError
from tests.support.ranks import RANKS, accounts_of_ranks


class Net(nn.Module):
    """A line, a head that may be left out, and BatchNorm's statistics."""

    skips_parameters = False

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.line = nn.Linear(3, 2)
        self.head = nn.Linear(2, 1)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("constant", torch.full((3,), 0.1 + seed))
        self.uses_head = True

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.line(x))
        # cubed: the sum of squares behind BatchNorm is constant, and its gradient nothing but rounding
        return (self.head(hidden) if self.uses_head else hidden).pow(3).sum()


def rows(number: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(number))


def gradients(net: nn.Module) -> list[Tensor | None]:
    found = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
    net.zero_grad(set_to_none=True)
    return found


def alone(numbers: list[int], change: Callable[[Net], object] = lambda net: None) -> list[Tensor | None]:
    """The summed gradients of several micro-batches in one process."""
    net = Net(0)
    change(net)
    for number in numbers:
        net(rows(number)).backward()
    return gradients(net)


def freeze(net: Net) -> None:
    net.line.requires_grad_(False)


def leave_out(net: Net) -> None:
    net.uses_head = False


def member(rank: int, folder: Path) -> dict[str, Any]:
    """What one of two processes sees."""
    group = open_group(World(rank, RANKS, rank, RANKS), timeout_seconds=60)
    told: dict[str, Any] = {}
    told["sum"] = [
        group.sum(torch.tensor([rank + 1.0, 2.0**-40], dtype=torch.float64)),
        group.sum(torch.tensor(rank + 3)),
    ]
    told["of rank 0"] = [group.from_rank_0(value) for value in ({"rank": rank, "text": "ä"}, None)]
    told["any"] = [group.any(rank == 1), group.any(False), group.any(True)]
    nothing = torch.tensor(False)
    told["agree"] = [
        group.all_reduce_status(torch.tensor(rank + 1.5), stop=rank == 1, late=False, skip=nothing),
        group.all_reduce_status(
            torch.tensor(16777217.0), stop=False, late=rank == 0, skip=torch.tensor(rank == 1)
        ),
    ]

    net = Net(seed=rank)  # rank 0's state must reach all
    wrapped = group.wrap(net)
    told["begin"] = {name: value.clone() for name, value in net.state_dict().items()}
    wrapped(rows(rank)).backward()
    told["synchronised"] = gradients(net)
    with group.no_sync(wrapped):
        wrapped(rows(rank)).backward()
        told["held"] = [None if p.grad is None else p.grad.clone() for p in net.parameters()]
    wrapped(rows(RANKS + rank)).backward()
    told["accumulated"] = gradients(net)

    told["statistics"] = [net.norm.running_mean.clone()]
    group.all_reduce_status(torch.tensor(1.0), stop=False, late=False, skip=nothing)
    told["statistics"] += [net.norm.running_mean.clone()]
    told["constant"] = net.constant.clone()

    for name, change in (("frozen", freeze), ("thawed", lambda n: n.requires_grad_(True))):
        change(net)
        with group.no_sync(wrapped):
            wrapped(rows(rank)).backward()
        wrapped(rows(RANKS + rank)).backward()
        told[name] = gradients(net)
    net.requires_grad_(False)
    told["all frozen"] = wrapped(rows(rank)).requires_grad
    net.requires_grad_(True)
    del wrapped
    net = Net(0)
    net.skips_parameters = True
    wrapped = group.wrap(net)
    for name, change in (("left out", leave_out), ("taken in", lambda n: setattr(n, "uses_head", True))):
        change(net)
        wrapped(rows(rank)).backward()
        told[name] = gradients(net)
    net = Net(0)
    group.facts = replace(group.facts, ddp_options=HPU.facts.ddp_options)
    wrapped = group.wrap(net)
    wrapped(rows(rank)).backward()
    told["of Gaudi's DDP"] = gradients(net)
    told["bucket bytes of Gaudi's DDP"] = wrapped.ddp.bucket_bytes_cap
    del wrapped
    group.barrier()
    group.close()
    return told


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Every rank's account; each is a process of its own that ends by itself, without a complaint."""
    with torch.serialization.safe_globals([GlobalStatus]):
        results, errors = accounts_of_ranks(__file__, tmp_path_factory.mktemp("group"))
    assert "terminate called" not in errors
    return results


def close(found: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.allclose(a, b, atol=1e-6))
        for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("rank", range(RANKS))
def test_sums_and_flags(told: list[dict[str, Any]], rank: int) -> None:
    mine = told[rank]
    assert mine["sum"][0].tolist() == [3.0, 2.0**-39]
    assert mine["sum"][0].dtype == torch.float64
    assert mine["sum"][1].item() == 7
    assert mine["of rank 0"] == [{"rank": 0, "text": "ä"}, None]
    assert mine["any"] == [True, False, True]


@pytest.mark.parametrize("rank", range(RANKS))
def test_all_agree(told: list[dict[str, Any]], rank: int) -> None:
    (first, *flags), (second, *others) = told[rank]["agree"]
    assert (first.item(), first.dtype, first.shape) == (4.0, torch.float32, ())
    assert flags == [True, False, torch.tensor(False)]
    assert second.item() == 33554432.0  # 2 × 16777216, what float32 makes of the summand
    assert others == [False, True, torch.tensor(True)]


@pytest.mark.parametrize("rank", range(RANKS))
def test_all_begin_with_the_weights_of_rank_0(told: list[dict[str, Any]], rank: int) -> None:
    expected = Net(0).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in told[rank]["begin"].items())


@pytest.mark.parametrize("rank", range(RANKS))
def test_gradients_are_sums_over_ranks_and_micro_batches(told: list[dict[str, Any]], rank: int) -> None:
    assert close(told[rank]["synchronised"], alone([0, 1]))
    assert close(told[rank]["held"], alone([rank]))  # nothing has travelled yet
    assert close(told[rank]["accumulated"], alone([0, 1, 2, 3]))


def test_running_statistics_are_averaged(told: list[dict[str, Any]]) -> None:
    (before, after), (others, same) = told[0]["statistics"], told[1]["statistics"]
    assert not torch.equal(before, others)
    assert torch.equal(after, same)
    assert torch.allclose(after, (before + others) / 2)
    assert torch.equal(told[1]["constant"], Net(0).constant)


@pytest.mark.parametrize("rank", range(RANKS))
def test_what_is_trained_may_change(told: list[dict[str, Any]], rank: int) -> None:
    frozen = alone([0, 1, 2, 3], freeze)
    assert frozen[0] is None
    assert close(told[rank]["frozen"], frozen)
    assert close(told[rank]["thawed"], alone([0, 1, 2, 3]))
    assert not told[rank]["all frozen"]


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_parameter_that_an_update_leaves_out_has_no_gradient(told: list[dict[str, Any]], rank: int) -> None:
    left_out = alone([0, 1], leave_out)
    assert left_out[2] is None
    assert close(told[rank]["left out"], left_out)
    assert close(told[rank]["taken in"], alone([0, 1]))


@pytest.mark.parametrize("rank", range(RANKS))
def test_ddp_sums_gradients_with_gaudis_options(told: list[dict[str, Any]], rank: int) -> None:
    assert close(told[rank]["of Gaudi's DDP"], alone([0, 1]))
    assert told[rank]["bucket bytes of Gaudi's DDP"] == 230 * 2**20


def test_one_process_is_a_group_of_its_own() -> None:
    group = open_group(World())
    assert isinstance(group, SingleProcess)
    net = Net(0)
    assert group.wrap(net) is net
    with group.no_sync(net):
        group.barrier()
    answer = group.all_reduce_status(torch.tensor(2.5), stop=True, late=False, skip=torch.tensor(False))
    assert answer == (torch.tensor(2.5), True, False, torch.tensor(False))
    group.close()


def test_peers_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(MachineError, match=r"rank 1 of 2 did not find its peers .*MASTER_ADDR"):
        open_group(World(rank=1, size=2), timeout_seconds=1)


def test_ranks_of_one_host_meet_on_the_loopback_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    given = {"MASTER_ADDR": "a.name", "MASTER_PORT": str(port), "MINE": "eth7", "GLOO_SOCKET_IFNAME": ""}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    ours, theirs = (
        store_of_one_host(World(rank, 2, rank, 2), ("GLOO_SOCKET_IFNAME", "MINE"), 30) for rank in range(2)
    )
    theirs.set("key", "value")
    assert ours.get("key") == b"value"
    sockets = psutil.Process().net_connections("inet")
    assert {s.laddr.ip for s in sockets if s.laddr.port == port} == {"127.0.0.1"}
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["MINE"]) == ("lo", "eth7")


@pytest.mark.parametrize(
    ("world", "address", "has_agent", "interface"),
    [
        (World(0, 4, 0, 2), "10.0.0.1", False, ""),
        (World(0, 2, 0, 2), "", False, ""),
        (World(0, 2, 0, 2), "10.0.0.1", True, "lo"),
        (World(0, 2, 0, 1), "127.0.0.1", True, "lo"),
    ],
)
def test_torch_finds_the_store_of_several_hosts_and_of_an_agent(
    world: World, address: str, has_agent: bool, interface: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"MASTER_ADDR": address, "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": str(has_agent)}
    for name, value in {**given, "MINE": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MINE")
    assert store_of_one_host(world, ["MINE"], 30) is None
    assert os.environ.get("MINE", "") == interface


def test_a_taken_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("MASTER_ADDR", "localhost")
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        with pytest.raises(MachineError, match=r"rank 0 of 2 did not find its peers .*in use"):
            open_group(World(0, 2, 0, 2), timeout_seconds=5)


TWO_OF_FOUR = [
    {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
    {
        "OMPI_COMM_WORLD_RANK": "2",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    },
    {
        "SLURM_PROCID": "2",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "PMI_RANK": "9",
        "PMI_SIZE": "9",
    },
    {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
]


@pytest.mark.parametrize("environ", TWO_OF_FOUR, ids=lambda environ: next(iter(environ)))
def test_every_starters_words_are_understood(environ: dict[str, str]) -> None:
    world = World.from_environment(environ)
    assert world == World(2, 4, 1, 2)
    assert World.from_environment(world.variables()) == world
    assert World.from_environment({**environ, **World().variables()}) == World()  # torchrun's first
    broken = {n: v if n.endswith("SIZE") or "TASKS" in n else "x" for n, v in environ.items()}
    with pytest.raises(MachineError, match=r"is 'x'\. The launcher must set it"):
        World.from_environment(broken)


@pytest.mark.parametrize(("node", "ranks"), [("0", 2), ("2", 2), ("3", 1)])
def test_slurm_counts_the_ranks_of_each_node(node: str, ranks: int) -> None:
    step = {"SLURM_PROCID": "6", "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}
    assert World.from_environment({**step, "SLURM_NODEID": node}).local_size == ranks


def test_a_batch_script_of_slurm_is_one_process() -> None:
    assert World.from_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) == World()


def test_flags_are_reduced_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """An accelerator's numbers stay there: a read of a ``meta`` tensor would raise an error."""
    reduced: list[torch.Tensor] = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor, group=None: reduced.append(tensor))
    group = object.__new__(TorchGroup)
    group.world, group.facts = World(0, 2, 0, 2), DeviceFacts(sum_dtype=torch.float32)
    running = torch.zeros(3, device="meta")
    group._averaged_buffers = [running]
    nothing = torch.tensor(False, device="meta")
    weight, stop, late, skip = group.all_reduce_status(
        torch.tensor(2.0, device="meta"), stop=True, late=False, skip=nothing
    )
    assert [(tensor.device.type, len(tensor)) for tensor in reduced] == [("meta", 5), ("cpu", 2)]
    assert (stop, late) == (True, False)
    assert weight.device == skip.device == running.device
    reduced.clear()
    group._averaged_buffers = [torch.ones(3)]
    answer = group.all_reduce_status(torch.tensor(2.0), stop=False, late=True, skip=torch.tensor(False))
    assert (len(reduced), answer[1:3]) == (1, (False, True))
    assert torch.equal(group._averaged_buffers[0], torch.full((3,), 0.5))


def test_a_lost_peer_is_one_line_without_the_text_of_gloo() -> None:
    group = object.__new__(TorchGroup)
    group.world, group.facts = World(1, 2, 1, 2), DeviceFacts()
    group.rank_status.begin_phase(7, "backward")
    text = "[/third_party/gloo/transport/tcp/pair.cc:547] Connection closed by peer. GLHF!\nAt: group.py(276)"
    error = group.explain_error(RuntimeError(text))
    assert str(error) == "rank 1 (step 7, backward) has lost a peer, or got no answer from it"


def test_the_group_is_bound_to_the_chip_that_the_device_names(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **named: given.update(named))
    monkeypatch.setattr(module, "store_of_one_host", lambda *_: None)
    TorchGroup(World(0, 2, 0, 2), DeviceFacts(group_device="meta"))
    assert given["device_id"] == torch.device("meta")
    assert CUDA.facts.group_device == "cuda"


@pytest.mark.parametrize("facts", [DeviceFacts(), HPU.facts], ids=["host", "hpu"])
def test_an_unbound_group_passes_no_device_id(facts: DeviceFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = []

    def init_process_group(
        backend: str, init_method: None = None, timeout: Any = None,
        world_size: int = -1, rank: int = -1, store: Any = None,
    ) -> None:  # fmt: skip
        """The arguments that Gaudi's bridge of release 1.19 takes."""
        groups.append((backend, world_size, rank))

    monkeypatch.setattr(torch.distributed, "init_process_group", init_process_group)
    monkeypatch.setattr(torch.distributed, "new_group", lambda **_: None)
    monkeypatch.setattr(module, "store_of_one_host", lambda *_: None)
    TorchGroup(World(1, 2, 1, 2), facts)
    assert groups == [(facts.backends, 2, 1)]


def test_sharding_names_the_torch_version_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    from speechtrain.distributed.fsdp import ShardedGroup

    monkeypatch.setattr(torch, "__version__", "2.7.1+cu126")
    with pytest.raises(MachineError, match=r"needs torch 2\.8 or newer, and this is 2\.7\.1\+cu126\. Use"):
        ShardedGroup(World(0, 2, 0, 2))

"""Shared-out parameters train what whole ones do: each check runs in two real processes over gloo."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from speechtrain.checkpoint.checkpointer import FORMAT, Checkpointer
from speechtrain.distributed.group import Group, SingleProcess, TorchGroup
from speechtrain.distributed.world import World
from speechtrain.dtensor import full_tensor, local_shard
from speechtrain.errors import ConfigError, RunError
from speechtrain.nn.transformer import Transformer
from speechtrain.optim.adamw import AdamW
from speechtrain.optim.ema import EMA, Average
from speechtrain.optim.lamb import LAMB
from speechtrain.optim.novograd import NovoGrad
from speechtrain.optim.optimizer_step import HostCheckedUpdate, Trained, UpdateResult
from speechtrain.precision import FP16, FP32, Precision
from speechtrain.training.recompute import checkpoint_layers
from tests.support.checkpoints import restore
from tests.support.ranks import RANKS, accounts_of_ranks

NEEDS_TORCH_2_8 = pytest.mark.skipif(TorchVersion(torch.__version__) < "2.8", reason="sharding needs 2.8")
pytestmark = [pytest.mark.slow, NEEDS_TORCH_2_8]

STEPS = 12
CLIP = 3.0  # among the norms of the first updates

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "lamb": lambda params: LAMB(params, lr=0.02),
    "adamw": lambda params: AdamW(params, lr=0.01, fused=True),
    "adamw written": lambda params: AdamW(params, lr=0.01, fused=False, foreach=False, amsgrad=True),
    "novograd": lambda params: NovoGrad(params, lr=0.01),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
}


@dataclass(frozen=True)
class Loss:
    total: Tensor


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.line = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x + self.line(x).tanh())
        return y


class Net(nn.Module):
    """Blocks of their own, and around them odd sizes: five rows on two ranks, one row, statistics."""

    shard_units = ("blocks",)
    skips_parameters = False

    def __init__(self, seed: int = 0, is_frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(3, 5, bias=False)  # one would get gradients of rounding only
        self.statistics = nn.BatchNorm1d(5)
        self.blocks = nn.ModuleList(Block(5) for _ in range(3))
        self.last = nn.Linear(5, 1)
        self.is_frozen = is_frozen

    def forward(self, x: Tensor) -> Loss:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.is_frozen):
            x = self.statistics(self.first(x))
            for block in self.blocks:
                x = block(x)
        return Loss((self.last(x) - 1).square().sum())

    def evaluate(self, x: Tensor) -> Tensor:
        loss = self(x).total
        total: Tensor = loss + 0 * self.last.weight.sum()  # whole after a forward within
        return total


def narrowed(group: Group, narrow: torch.dtype | None) -> dict[str, Any]:
    """Losses of a small transformer in bf16, and the types of a weight: gathered, its gradient, and kept."""
    torch.manual_seed(0)
    net = Transformer(16, 2, 32, 2, dropout=0.0, attention_dropout=0.0, position_kernel=3, position_groups=2)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    group.shard(net, optimizer, narrow)
    wrapped, weight = group.wrap(net), "layers.0.attention.query.weight"
    gathered, losses = set[str](), []
    net.layers[0].attention.register_forward_hook(
        lambda *_: gathered.add(str(net.get_parameter(weight).dtype))
    )
    x, lengths = torch.randn(2, 6, 16), torch.tensor([6, 4])
    for _ in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = (wrapped(x, lengths)[:, :4].float() - x[:, :4].flip(2)).square().mean()
        loss.backward()
        gradient = net.get_parameter(weight).grad
        assert gradient is not None
        optimizer.step()
        losses.append(loss.item())
    kept = net.get_parameter(weight).dtype
    return {"losses": losses, "types": [*gathered, str(gradient.dtype), str(kept)]}


def rows(number: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(number))


class Run:
    """A little trainer: two micro-batches a rank and update, clipped, averaged, evaluated in between."""

    def __init__(
        self, group: Group, optimizer: str, precision: Precision | None = None, net: Net | None = None
    ) -> None:
        self.group = group
        self.net = net or Net()
        decayed = [p for p in self.net.parameters() if p.ndim > 1]
        plain = [p for p in self.net.parameters() if p.ndim == 1]
        groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = OPTIMIZERS[optimizer](groups)
        group.shard(self.net, self.optimizer)
        self.average: Average = EMA(self.net, 0.9)
        self.update = HostCheckedUpdate(precision or FP32(), CLIP)
        self.wrapped: nn.Module | None = None
        self.step = 0

    def states(self) -> dict[str, Any]:
        return {"task": self.net, "optimizer": self.optimizer, "average": self.average}

    def train(self, until: int) -> list[list[float]]:
        """Loss of each update, its gradient norm, and now and then the loss of the averaged weights."""
        group = self.group
        told: list[list[float]] = []
        self.wrapped = self.wrapped or group.wrap(self.net)
        world = group.world
        for step in range(self.step + 1, until + 1):
            share = [step * 4 + micro * world.size + world.rank for micro in range(4 // world.size)]
            losses = []
            for number in share:
                with group.no_sync(self.wrapped) if number != share[-1] else torch.enable_grad():
                    loss = self.wrapped(rows(number)).total
                    self.update.precision.backward(loss)
                losses.append(loss.detach())
            weight, _, _, _ = group.all_reduce_status(
                torch.stack(losses).sum(), stop=False, late=False, skip=torch.tensor(False)
            )
            trained = Trained(self.net, self.optimizer, self.average)
            norm = self.update(trained, 0.01, torch.tensor(1 / 16), torch.tensor(True))
            told.append([float(weight), float(norm)])
            if step % 4 == 0:
                self.net.eval()
                with torch.no_grad(), self.average.use_average(self.net):
                    told[-1].append(float(self.net.evaluate(rows(0))))
                self.net.train()
        self.step = until
        return told

    def weights(self) -> dict[str, Tensor]:
        return whole_state(self.net.state_dict())


def whole_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: full_tensor(value).clone() for name, value in state.items()}


def member(rank: int, folder: Path) -> dict[str, Any]:
    """What one of two processes sees."""
    from speechtrain.checkpoint.sharded import ShardedCheckpointer
    from speechtrain.distributed.fsdp import ShardedGroup

    sharded = ShardedGroup(World(rank, RANKS, rank, RANKS), timeout_seconds=300)
    plain = object.__new__(TorchGroup)  # of the same processes
    plain.facts = sharded.facts
    plain.world, plain._averaged_buffers = sharded.world, []
    told: dict[str, Any] = {}
    begun = Run(sharded, "sgd", net=Net(seed=rank))
    sharded.wrap(begun.net)
    told["begin"] = begun.weights()
    for name in OPTIMIZERS:
        for kind, group in (("plain", plain), ("sharded", sharded)):
            run = Run(group, name)
            told[f"{name}, {kind}"] = run.train(STEPS), run.weights()
    again = Net()
    checkpoint_layers(again)
    run = Run(sharded, "sgd", net=again)
    told["sgd, sharded, computed again"] = run.train(STEPS), run.weights()
    told["shares"] = [
        sum(local_shard(t).numel() for t in tensors)
        for tensors in (
            run.net.parameters(),
            run.average.averaged_state_dict(run.net).values(),
            [state["momentum_buffer"] for state in run.optimizer.state.values()],
        )
    ]

    for kind, group in (("plain", plain), ("sharded", sharded)):
        run = Run(group, "lamb", net=Net(is_frozen=True))
        run.net.skips_parameters = True
        frozen = run.train(4)
        held = [name for name, p in run.net.named_parameters() if p in run.optimizer.state]
        run.net.is_frozen = False
        told[f"thawed, {kind}"] = frozen + run.train(8), run.weights()
        told[f"trained while frozen, {kind}"] = held

        run = Run(group, "adamw", FP16(initial_scale=2.0**126))  # overflows until it is lowered
        run.train(8)
        told[f"fp16, {kind}"] = [verdict is UpdateResult.APPLIED for verdict in run.update.results(True)]

    for name in ("lamb", "adamw", "novograd"):
        run = Run(sharded, name)
        checkpointer = ShardedCheckpointer(folder / name / "sharded", 3, sharded)
        run.train(5)
        states, evaluated = run.states(), run.average.averaged_state_dict(run.net)
        checkpointer.save(5, states, evaluated)
        unshared = Run(plain, name)
        unshared.train(5)
        if not rank:
            Checkpointer(folder / name / "whole").save(
                5, unshared.states(), unshared.average.averaged_state_dict(unshared.net)
            )
        told[f"averaged, {name}"] = whole_state(evaluated)
        told[f"rest, {name}"] = run.train(10), run.weights()
        sharded.barrier()
        for kind in ("sharded", "whole"):
            again = Run(sharded, name)
            told[f"found, {name}, {kind}"] = restore(Checkpointer(folder / name / kind), again.states())
            again.step = 5
            told[f"again, {name}, {kind}"] = again.train(10), again.weights()

    told["narrow"] = [narrowed(sharded, narrow) for narrow in (None, torch.bfloat16)]

    if rank:  # a disk that this rank cannot write to
        (folder / "file").write_text("")
    failing = ShardedCheckpointer(folder / "failing", 3, sharded)
    failing.save(4, run.states(), {})
    if rank:
        failing._temporary = lambda step: folder / "file" / "b"  # type: ignore[method-assign]
    try:
        failing.save(5, run.states(), {})
    except OSError as error:
        told["failure"] = str(error)
    sharded.barrier()
    told["left"] = sorted(path.name for path in (folder / "failing" / "checkpoints").iterdir())

    class Scalar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

    refused = []
    for net, params in ((Scalar(), None), (Net(), [nn.Parameter(torch.ones(2))]), (Net(), None)):
        optimizer = torch.optim.SGD(params or net.parameters(), lr=1)
        optimizer.can_shard = not refused[1:]  # type: ignore[attr-defined]
        try:
            sharded.shard(net, optimizer)
        except ConfigError as error:
            refused.append(str(error))
    told["refused"] = refused
    del begun, run, unshared, again, states, evaluated, net, optimizer
    sharded.close()
    return told


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharding")


@pytest.fixture(scope="module")
def told(folder: Path) -> list[dict[str, Any]]:
    """Every rank's account; each is a process of its own that ends by itself, without a complaint."""
    results, errors = accounts_of_ranks(__file__, folder)
    assert not [line for line in errors.splitlines() if "reducer.cpp" not in line]
    return results


def assert_same(found: Any, expected: Any) -> None:
    """The same losses and norms to 1e-5, and the same weights."""
    (figures, weights), (others, theirs) = found, expected
    for mine, other in zip(figures, others, strict=True):
        assert mine == pytest.approx(other, rel=1e-5)
    assert weights.keys() == theirs.keys()
    for name, value in weights.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "rank"), list(itertools.product(OPTIMIZERS, range(RANKS))))
def test_every_optimizer_trains_alike(told: list[dict[str, Any]], name: str, rank: int) -> None:
    figures, _ = told[rank][f"{name}, plain"]
    norms = [figure[1] for figure in figures]
    assert max(norms) > CLIP > min(norms)
    assert [len(figure) for figure in figures].count(3) == STEPS // 4
    assert_same(told[rank][f"{name}, sharded"], told[rank][f"{name}, plain"])


@pytest.mark.parametrize("rank", range(RANKS))
def test_layers_that_are_computed_again_are_gathered_for_it(told: list[dict[str, Any]], rank: int) -> None:
    (figures, weights), (others, theirs) = (
        told[rank][f"sgd, sharded{end}"] for end in (", computed again", "")
    )
    assert figures == others
    assert all(torch.equal(weights[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("rank", range(RANKS))
def test_all_begin_with_the_weights_of_rank_0(told: list[dict[str, Any]], rank: int) -> None:
    expected = Net(0).state_dict()
    assert told[rank]["begin"].keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in told[rank]["begin"].items())


def test_narrow_units_are_sent_in_autocasts_type_and_summed_in_fp32(told: list[dict[str, Any]]) -> None:
    plain, narrow = told[0]["narrow"]
    assert plain["types"] == ["torch.float32"] * 3
    assert narrow["types"] == ["torch.bfloat16", "torch.float32", "torch.float32"]
    assert narrow["losses"] == pytest.approx(plain["losses"], rel=1e-2)
    assert narrow["losses"][-1] < 0.8 * narrow["losses"][0]


def test_a_rank_holds_its_share(told: list[dict[str, Any]]) -> None:
    net = Net()
    parameters = sum(p.numel() for p in net.parameters())
    buffers = sum(b.numel() for b in net.buffers())
    assert [sum(counts) for counts in zip(*(mine["shares"] for mine in told), strict=True)] == [
        parameters,
        parameters + RANKS * buffers,
        parameters,
    ]
    assert max(mine["shares"][0] for mine in told) < 0.65 * parameters  # three of five rows, mostly


@pytest.mark.parametrize("rank", range(RANKS))
def test_what_is_trained_may_change(told: list[dict[str, Any]], rank: int) -> None:
    assert told[rank]["trained while frozen, sharded"] == ["last.weight", "last.bias"]
    assert told[rank]["trained while frozen, plain"] == ["last.weight", "last.bias"]
    assert_same(told[rank]["thawed, sharded"], told[rank]["thawed, plain"])


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_loss_scale_is_lowered_on_all_ranks(told: list[dict[str, Any]], rank: int) -> None:
    taken = told[rank]["fp16, sharded"]
    assert taken == told[0]["fp16, plain"]
    assert True in taken
    assert False in taken


@pytest.mark.parametrize(
    ("name", "kind"), list(itertools.product(("lamb", "adamw", "novograd"), ("sharded", "whole")))
)
def test_either_kind_of_checkpoint_continues_the_run(
    told: list[dict[str, Any]], name: str, kind: str
) -> None:
    for mine in told:
        assert mine[f"found, {name}, {kind}"] == 5
        assert_same(mine[f"again, {name}, {kind}"], mine[f"rest, {name}"])


@pytest.mark.parametrize("name", ["lamb", "adamw", "novograd"])
def test_one_process_continues_what_several_have_shared(
    told: list[dict[str, Any]], folder: Path, name: str
) -> None:
    """As a run that shares nothing: two ranks of two micro-batches are four micro-batches here."""
    run = Run(SingleProcess(), name)
    checkpointer = Checkpointer(folder / name / "sharded")
    assert restore(checkpointer, run.states()) == 5
    run.step = 5
    figures, weights = run.train(10), run.weights()
    others, theirs = told[0][f"rest, {name}"]
    for name_, value in weights.items():
        if name_ in dict(run.net.named_parameters()):  # what is counted and averaged over ranks differs
            torch.testing.assert_close(value, theirs[name_], rtol=1e-4, atol=1e-5)
    losses = torch.tensor([figure[:2] for figure in figures])
    torch.testing.assert_close(losses, torch.tensor([other[:2] for other in others]), rtol=1e-5, atol=0)


def test_what_a_checkpoint_holds(told: list[dict[str, Any]], folder: Path) -> None:
    checkpointer = Checkpointer(folder / "lamb" / "sharded")
    (step,) = checkpointer.folders()
    manifest = checkpointer.verify(step)
    shards = [f"shards/shard-0000{rank + 1}-model-00001-of-00001.safetensors" for rank in range(RANKS)]
    assert manifest.format == FORMAT
    assert sorted(manifest.files) == ["model.safetensors", *shards, "state.safetensors"]
    assert not [path for path in step.rglob("*") if path.suffix in (".distcp", ".metadata", ".pkl", ".pt")]
    chosen, weights = checkpointer.weights("best")
    assert chosen == step
    expected = told[0]["averaged, lamb"]
    assert weights.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in weights.items())
    assert not (folder / "lamb" / "whole" / "checkpoints" / step.name / "shards").exists()


@pytest.mark.parametrize("damage", ["missing", "changed", "misnamed"])
def test_a_damaged_share_is_named(
    told: list[dict[str, Any]], folder: Path, tmp_path: Path, damage: str
) -> None:
    shutil.copytree(folder / "lamb" / "sharded", tmp_path / "run")
    checkpointer = Checkpointer(tmp_path / "run")
    (step,) = checkpointer.folders()
    share = sorted((step / "shards").iterdir())[1]
    if damage == "missing":
        share.unlink()
    elif damage == "changed":
        content = bytearray(share.read_bytes())
        content[-1] ^= 1
        share.write_bytes(content)
    else:
        manifest = (step / "checkpoint.json").read_text()
        (step / "checkpoint.json").write_text(manifest.replace("shards/shard-00002", "../shard-00002"))
    with pytest.raises(RunError, match="checkpoint.json" if damage == "misnamed" else share.name):
        checkpointer.verify(step)
    assert restore(checkpointer, Run(SingleProcess(), "lamb").states()) is None


def test_what_one_rank_cannot_write_all_leave_unwritten(told: list[dict[str, Any]]) -> None:
    for mine in told:
        assert "checkpoint of step 5 could not be written" in mine["failure"]
        assert mine["left"] == ["step-00000004"]


@pytest.mark.parametrize("rank", range(RANKS))
def test_models_that_cannot_be_spread(told: list[dict[str, Any]], rank: int) -> None:
    scalar, stranger, wholes = told[rank]["refused"]
    assert "SGD needs whole tensors. Use optimizer=adamw" in wholes
    assert "trainer.shard=none" in scalar
    assert "scalar" in scalar
    assert "not a parameter of the model" in stranger
    assert "\n" not in scalar + stranger


def test_one_process_shares_nothing_and_fixed_graphs_cannot(tmp_path: Path) -> None:
    from speechtrain.devices.cpu import CPU  # in here: the ranks above need none of these
    from speechtrain.devices.cuda import CUDA
    from speechtrain.devices.hpu import HPU
    from speechtrain.devices.ipex import IPEX
    from speechtrain.devices.lazy import Lazy
    from speechtrain.rank.build import open_ranks
    from speechtrain.trainer_config import TrainerConfig

    limits = TrainerConfig(shard="parameters")
    group, checkpointer = open_ranks(limits, World(), Lazy(), tmp_path)
    assert isinstance(group, SingleProcess)
    assert not checkpointer.needs_all_ranks
    for device in (Lazy(), HPU(), IPEX()):
        with pytest.raises(ConfigError, match=f"device={device.name} needs whole parameters.*shard=none"):
            open_ranks(limits, World(0, 2, 0, 2), device, tmp_path)
    assert CPU().facts.fsdp
    assert CUDA().facts.fsdp

"""AdamW with moments of 8 bits: near AdamW, a quarter of its state, and continued exactly."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from speechtrain.checkpoint.checkpointer import Checkpointer
from speechtrain.errors import MachineError, RunError
from speechtrain.optim import adamw8bit
from speechtrain.optim.adamw import AdamW
from speechtrain.optim.adamw8bit import AdamW8bit
from speechtrain.start.build import dry_build
from speechtrain.start.compose import compose
from speechtrain.start.run_config import part_of, run_config
from tests.support.checkpoints import restore


@pytest.fixture
def library() -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is missing (extra 'memory')")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.odd = (
            nn.Linear(96, 128),
            nn.Linear(128, 33),
        )  # of 8 bits, the second in part of a block
        self.norm = nn.LayerNorm(33)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.odd(self.wide(x).relu()))
        return y


def train(net: Net, optimizer: torch.optim.Optimizer, steps: range) -> float:
    for step in steps:
        x = torch.randn(64, 96, generator=torch.Generator().manual_seed(step))
        loss = (net(x) - x[:, :33]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1, (step + 1) / 10)
        optimizer.step()
    return loss.item()


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(v.nbytes for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor))


@pytest.mark.usefixtures("library")
def test_it_learns_as_adamw_does_with_a_quarter_of_its_state() -> None:
    losses, sizes = [], []
    for cls in (AdamW, AdamW8bit):
        net = Net()
        optimizer = cls(net.parameters(), weight_decay=0.01)
        losses.append(train(net, optimizer, range(100)))
        sizes.append(state_bytes(optimizer))
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert sizes[1] < 0.3 * sizes[0]


@pytest.mark.usefixtures("library")
def test_a_run_continues_bit_equally(tmp_path: Path) -> None:
    net = Net()
    optimizer = AdamW8bit(net.parameters())
    train(net, optimizer, range(5))
    Checkpointer(tmp_path).save(5, {"task": net, "optimizer": optimizer}, net.state_dict())
    train(net, optimizer, range(5, 12))

    again = Net()
    other = AdamW8bit(again.parameters())
    train(again, other, range(1))  # what is loaded replaces it
    assert restore(Checkpointer(tmp_path), {"task": again, "optimizer": other}) == 5
    train(again, other, range(5, 12))
    for name, value in net.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
    for mine, theirs in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            assert theirs[name].dtype == value.dtype if isinstance(value, Tensor) else theirs[name] == value
            assert not isinstance(value, Tensor) or torch.equal(theirs[name], value)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("damage", ["scale", "exp_avg", "adamw"])
def test_a_state_that_does_not_fit_is_refused(tmp_path: Path, damage: str) -> None:
    net = Net()
    optimizer = AdamW8bit(net.parameters()) if damage != "adamw" else AdamW(net.parameters())
    train(net, optimizer, range(1))
    state = optimizer.state[net.odd.weight]
    if damage != "adamw":
        state[damage] = state[damage].flatten()[:3].clone()
    Checkpointer(tmp_path).save(1, {"optimizer": optimizer}, {})
    with pytest.raises(
        RunError, match=r"does not fit this run \(ValueError: the state of a parameter of shape"
    ):
        restore(Checkpointer(tmp_path), {"optimizer": AdamW8bit(net.parameters())})


@pytest.mark.usefixtures("library")
def test_a_rank_is_known_to_need_less() -> None:
    keys = ["run_dir=x", "model=rnnt_mlperf"]
    sizes = {}
    for name in ("adamw8bit", "adamw"):
        sizes[name] = dry_build(run_config(compose([*keys, f"optimizer={name}"]))).rank_bytes
    # weights, gradients, average and the state
    assert sizes["adamw8bit"] == pytest.approx(3.51 / 5 * sizes["adamw"], rel=0.01)


def test_a_missing_library_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    adamw8bit._library.cache_clear()
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    with pytest.raises(
        MachineError, match=r"bitsandbytes is not installed here\. Run pip install -e '\.\[memory\]'"
    ):
        part_of(compose(["optimizer=adamw8bit"]), "optimizer").build(params=[nn.Parameter(torch.zeros(1))])

"""trainer.checkpoint_layers: less is kept for backward, and every loss, gradient and buffer is bit-equal."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from speechtrain.compute_policy import apply_policy
from speechtrain.devices.cpu import CPU
from speechtrain.distributed.world import World
from speechtrain.errors import ConfigError
from speechtrain.rank.attempt import Attempt
from speechtrain.rank.build import build_task
from speechtrain.rank.main import train
from speechtrain.rank.stop import StopRequest
from speechtrain.start.build import build_encoder, build_model
from speechtrain.start.choices import choices
from speechtrain.start.compose import compose
from speechtrain.start.run_config import part_of, run_config
from speechtrain.task import Task, units_of
from speechtrain.training.recompute import checkpoint_layers
from tests.support.composed import composed
from tests.support.noise import batch
from tests.support.stored import stored_bytes

SMALL = {
    "hidden": 8, "width": 16, "layers": 2, "heads": 2, "feed_forward": 16, "position_kernel": 4,
    "position_groups": 2, "conv_layers": [[16, 10, 5], [16, 8, 8]], "dropout": 0.3, "layer_norm": True,
    "feature_norm": True, "attention_dropout": 0.2, "layer_drop": 0.2, "filters": 16,
}  # fmt: skip


def model_of(encoder: str, *more: str, checkpointed: bool = False) -> Task:
    config = composed("model=ctc", f"encoder={encoder}", *more)
    for key, value in SMALL.items():
        if key in config.encoder:
            config.encoder[key] = value
    if "blocks" in config.encoder:  # of a convolutional encoder: each kind once, and narrow
        blocks = []
        for block in config.encoder.blocks:
            blocks.append({**block, "times": 1, "repeat": min(2, block.get("repeat", 2)), "filters": 16})
        config.encoder.blocks = blocks
    torch.manual_seed(1)
    model = build_model(
        run_config(config), part_of(config, "tokenizer").build(), build_encoder(run_config(config))
    )
    if checkpointed:
        checkpoint_layers(model)
    return model.train()


def kept_bytes(model: nn.Module, *inputs: object) -> tuple[int, Tensor]:
    torch.manual_seed(7)
    return stored_bytes(model, *inputs)


ENCODERS = [name for name in choices(None)["encoder"] if name != "none"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("encoder", ENCODERS)
def test_every_encoder_trains_the_same_with_less_memory(encoder: str, dtype: torch.dtype) -> None:
    found, policy = [], CPU().policy(dtype)
    for checkpointed in (False, True):
        model = model_of(encoder, checkpointed=checkpointed)
        apply_policy(model, policy)
        kept = []
        for samples in (4000, 8000):  # two micro-batches
            with policy.autocast("cpu"):
                given = model.prepare(batch(samples, samples // 2), 3)
                size, loss = kept_bytes(model, given)
            loss.total.backward()  # type: ignore[attr-defined]
            kept.append((size, loss.total.detach()))  # type: ignore[attr-defined]
        gradients = {name: p.grad for name, p in model.named_parameters()}
        found.append((kept, gradients, dict(model.named_buffers())))
    (plain, wanted, buffers), (less, gradients, others) = found
    assert [loss for _, loss in plain] == [loss for _, loss in less]
    assert gradients.keys() == wanted.keys()
    for name, value in wanted.items():
        assert value is None or (gradients[name] is not None and torch.equal(gradients[name], value)), name
    assert all(torch.equal(others[name], value) for name, value in buffers.items())
    assert less[1][0] < plain[1][0]


class Block(nn.Module):
    """A part of an encoder with all that a second computation could change or miss."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.norm, self.dropout = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("table", torch.arange(6.0))

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.calls += 1
        y: Tensor = x + self.dropout(self.norm(self.line(x * self.table))) * (0 + self.calls) * scale
        return y


class Net(nn.Module):
    shard_units = ("blocks", "block")

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.block = nn.ModuleList([Block(), Block()]), Block()

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, self.block, self.block):  # one of them is used twice
            x = block(x, scale=0.5)
        return x.square().sum()


def test_buffers_change_once_in_two_computations() -> None:
    plain, net = Net(), Net()
    checkpoint_layers(net)
    for number in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
        (_, wanted), (_, loss) = kept_bytes(plain, x), kept_bytes(net, x)
        assert torch.equal(loss, wanted)
        wanted.backward()
        loss.backward()
    assert net.state_dict().keys() == plain.state_dict().keys()
    for one, other in zip(plain.buffers(), net.buffers(), strict=True):
        assert torch.equal(one, other)
    for mine, theirs in zip(plain.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=0)


def test_a_copy_computes_with_its_own_weights() -> None:
    net = Net()
    checkpoint_layers(net)
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.block.line.weight.zero_()
        other.block.line.bias.zero_()
    other(torch.randn(4, 6)).backward()
    assert net.block.line.weight.grad is None
    assert other.block.line.weight.grad is not None


def test_a_model_without_units_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint_layers=true: no part of Linear names repeated layers"):
        checkpoint_layers(nn.Linear(1, 1))


def test_the_key_reaches_every_model_of_a_rank(tmp_path: Path) -> None:
    config = compose(["trainer.checkpoint_layers=true", f"run_dir={tmp_path}"])
    task, _ = build_task(run_config(config))
    assert all(type(unit).__mro__[1].__name__ == "_Checkpointed" for unit in units_of(task))
    assert {name: v.shape for name, v in task.state_dict().items()} == {
        name: v.shape for name, v in build_task(run_config(compose([])))[0].state_dict().items()
    }


def test_a_device_that_records_graphs_refuses_it() -> None:
    config = compose(["trainer.checkpoint_layers=true", "device=lazy", "data.shapes=2"])
    with pytest.raises(ConfigError, match=r"trainer.checkpoint_layers=true: device=lazy records"):
        train(run_config(config), World(), StopRequest(), Attempt())

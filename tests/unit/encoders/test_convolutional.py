"""ContextNet and QuartzNet: published sizes, a second implementation without padding, wrong YAMLs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import Tensor

from speechtrain.compute_policy import apply_policy
from speechtrain.devices.hpu import HPU
from speechtrain.encoders.convolutional import ConvolutionalEncoder
from speechtrain.features.augment import Augment
from speechtrain.features.logmel import LogMel
from speechtrain.nn.norm import MaskedBatchNorm
from speechtrain.start.run_config import part_of
from tests.support.composed import composed
from tests.support.noise import batch
from tests.support.stored import stored_bytes
from tools.rehearsal.operations import GAUDI
from tools.rehearsal.recorder import Recorder

CHOICES = [f"contextnet_{size}" for size in ("large", "medium", "small", "dummy", "tiny")]
CHOICES += ["quartznet15x5", "quartznet_tiny"]


def parameters(*overrides: str) -> dict[str, int]:
    config = composed(*overrides)
    with torch.device("meta"):
        encoder = part_of(config, "encoder").build(augment=part_of(config, "augment").build())
        model = part_of(config, "model").build(
            tokenizer=part_of(config, "tokenizer").build(), encoder=encoder
        )
    return {name: parameter.numel() for name, parameter in model.named_parameters()}


def with_classes(found: dict[str, int], classes: int) -> int:
    """The parameters with other labels than characters: what depends on their number is scaled."""
    total = 0
    for name, count in found.items():
        if name == "prediction.embedding.weight":
            count = count // 28 * (classes - 1)
        elif name.startswith("joint.output"):
            count = count // 29 * classes
        total += count
    return total


@pytest.mark.parametrize(
    ("size", "count"), [("large", 144_946_705), ("medium", 40_760_849), ("small", 14_521_873)]
)
def test_contextnet_has_the_size_of_nemos(size: str, count: int) -> None:
    """NeMo's table has 145 M, 40 M and 14 M. Its encoder sets a reduction of 8 where its YAML has none."""
    whole = ["model=rnnt_mlperf", f"encoder=contextnet_{size}", "prediction=contextnet"]
    found = parameters(*whole, "model.joint.hidden=640", "model.joint.dropout=0.1")
    assert with_classes(found, 1025) == count


def test_quartznet_has_its_published_size() -> None:
    found = parameters("model=ctc", "encoder=quartznet15x5")
    assert round(sum(found.values()) / 1e6, 1) == 18.9
    assert sum(name.endswith("depthwise.weight") for name in found) == 1 + 15 * 5 + 1


def shrink(node: dict[str, Any]) -> None:
    """Leave one of equal blocks, with few channels and its first and last convolution."""
    for mapping in (node, *node["blocks"]):
        if "filters" in mapping:
            mapping["filters"] = {1024: 24, 512: 20, 640: 24}.get(mapping["filters"], 16)
        mapping.pop("times", None)
        if mapping.get("repeat", 0) > 2:
            mapping["repeat"] = 2


def narrow(choice: str, **values: Any) -> ConvolutionalEncoder:
    """The encoder of a YAML with few channels, whose statistics are those of some noise."""
    torch.manual_seed(0)
    node = OmegaConf.to_container(composed(f"encoder={choice}").encoder, resolve=True)
    assert isinstance(node, dict)
    del node["_target_"], node["features"]["_target_"]
    shrink(node)
    features = LogMel(**{**node.pop("features"), "dither": 0.0, "mels": 10})
    encoder = ConvolutionalEncoder(
        features, Augment(), **{**node, "squeeze": min(node["squeeze"], 4), **values}
    )
    norms = [m for m in encoder.modules() if isinstance(m, MaskedBatchNorm)]
    for norm in norms:
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
        torch.nn.init.uniform_(norm.bias, -0.5, 0.5)
        norm.momentum = 1.0
    encoder(batch(24_000, 24_000))
    for norm in norms:
        norm.momentum = 0.1
    return encoder


def second(encoder: ConvolutionalEncoder, rows: list[Tensor]) -> list[Tensor]:
    """Rows (C, T) without padding, in lockstep: a norm's statistics are those of all their frames."""
    weights = dict(encoder.named_parameters()) | dict(encoder.named_buffers())
    act = F.silu if encoder.blocks[0].activation is F.silu else F.relu

    def convolved(rows: list[Tensor], name: str, options: dict[str, int]) -> list[Tensor]:
        if (depthwise := weights.get(f"{name}.depthwise.weight")) is not None:
            rows = [F.conv1d(row[None], depthwise, groups=len(row), **options)[0] for row in rows]
            options = {}
        stride = options.get("stride", 1)
        pointwise = weights[f"{name}.pointwise.weight"][:, :, None]
        rows = [F.conv1d(row[None], pointwise, stride=stride)[0] for row in rows]
        statistics = [
            weights[f"{name}.norm.{key}"] for key in ("running_mean", "running_var", "weight", "bias")
        ]
        if encoder.training:
            statistics[:2] = [s.clone() for s in statistics[:2]]
        whole = F.batch_norm(torch.cat(rows, 1)[None], *statistics, encoder.training, 0.1, 1e-3)[0]
        return list(whole.split([row.shape[1] for row in rows], 1))

    for number, block in enumerate(encoder.blocks):
        start, last = rows, len(block.convs) - 1
        for index, conv in enumerate(block.convs):
            options = {"padding": conv.padding, "dilation": conv.dilation}
            if index == last:
                options["stride"] = block.stride
            rows = convolved(rows, f"blocks.{number}.convs.{index}", options)
            rows = [act(row) for row in rows] if index < last else rows
        if block.squeeze is not None:
            reduce, expand = block.squeeze.reduce.weight, block.squeeze.expand.weight
            rows = [row * (expand @ act(reduce @ row.mean(1))).sigmoid()[:, None] for row in rows]
        if block.residual is not None:
            added = convolved(start, f"blocks.{number}.residual", {"stride": block.stride})
            rows = [row + more for row, more in zip(rows, added, strict=True)]
        rows = [act(row) for row in rows]
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("choice", CHOICES)
def test_a_second_implementation_finds_the_same(choice: str, training: bool) -> None:
    encoder = narrow(choice, dropout=0.0)
    given = batch(20_000, 12_345, 7_000)
    x, lengths = encoder.features(given.audio, given.audio_lengths)
    x, frames = x.double(), lengths
    encoder.double().train(training)
    rows = [row[:length].t() for row, length in zip(x, lengths.tolist(), strict=True)]
    expected = second(encoder, rows)
    for block in encoder.blocks:
        x, frames = block(x, frames)
    x = x.detach()
    assert x.shape[1:] == (encoder.frames(20_000), encoder.width)
    assert (
        frames.tolist()
        == [row.shape[1] for row in expected]
        == [encoder.frames(n) for n in given.audio_lengths]
    )
    for row, length, other in zip(x, frames.tolist(), expected, strict=True):
        torch.testing.assert_close(row[:length], other.t().detach(), rtol=1e-7, atol=1e-9)
        assert not row[length:].any()


_HALF = """
import torch
from speechtrain.encoders.convolutional import SeparableConv
for channels in (8, 16):
    conv = SeparableConv(channels, channels, 33).bfloat16()
    conv.norm.float()
    conv(torch.randn(1, 50, channels).bfloat16(), torch.tensor([50])).float().sum().backward()
"""


@pytest.mark.slow
def test_few_channels_in_bf16_end() -> None:
    subprocess.run([sys.executable, "-c", _HALF], timeout=120, check=True)


def test_quartznet15x5_has_the_published_window_and_weights() -> None:
    config = composed("model=ctc", "encoder=quartznet15x5").encoder
    assert (config.features.window_seconds, config.init) == (0.02, "xavier_uniform")
    torch.manual_seed(0)
    encoder = narrow("quartznet15x5", filters=256, init="xavier_uniform")
    depthwise = encoder.blocks[0].convs[0].depthwise.weight.detach()
    channels, _, taps = depthwise.shape
    bound = (6 / (taps + channels * taps)) ** 0.5
    assert 0.95 * bound < float(depthwise.abs().max()) <= bound


def test_initial_weights_are_within_their_bound() -> None:
    encoder = ConvolutionalEncoder(LogMel(), Augment(), [{"kernel": 9}], filters=64, repeat=1)
    (block,) = encoder.blocks
    for weight, fan_in in ((block.convs[0].depthwise.weight, 9), (block.residual.pointwise.weight, 240)):
        assert 1.9 < weight.abs().max() * fan_in**0.5 <= 2.0


@pytest.mark.parametrize("choice", CHOICES)
def test_predicted_activations_are_within_a_factor_of_two(choice: str) -> None:
    config = composed(f"encoder={choice}")
    encoder = part_of(config, "encoder").build(augment=part_of(config, "augment").build())
    measured = stored_bytes(encoder, batch(32_000, 32_000))[0] / 4
    assert 0.5 < encoder.activation_bytes() / measured < 2.0


def test_the_statistics_of_the_norm_are_fp32_whatever_its_input() -> None:
    torch.manual_seed(0)
    x, lengths = torch.randn(3, 500, 8), torch.tensor([500, 301, 0])  # 801 is no number in bf16
    wide, half = MaskedBatchNorm(8), MaskedBatchNorm(8)
    y = half(x.bfloat16(), lengths)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, wide(x.bfloat16().float(), lengths).bfloat16(), rtol=0, atol=0)
    torch.testing.assert_close(half.running_var, wide.running_var, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("choice", ["contextnet_tiny", "contextnet_large", "quartznet15x5"])
def test_gaudi_refuses_nothing(choice: str, dtype: torch.dtype) -> None:
    encoder = narrow(choice)
    recorder = Recorder(GAUDI)
    policy = replace(HPU().policy(dtype), mark_step=recorder.mark_step)
    apply_policy(encoder, policy)
    for number in range(2):
        given = recorder.move(batch(8_000, 4_500))
        encoder.zero_grad()
        with recorder.warm_up() if number == 0 else recorder:
            with policy.autocast("cpu"):
                frames, _ = encoder(given)
            frames.float().square().mean().backward()
            recorder.mark_step()
    print(choice, recorder.segments, recorder.distinct)

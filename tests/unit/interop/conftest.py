"""Small models of both kinds, converted weights, and files as fairseq and Hugging Face write them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from speechtrain.encoders.wav2vec2 import Wav2Vec2Encoder
from speechtrain.interop.pretrained import Pretrained, describe
from speechtrain.models.wav2vec2 import Wav2Vec2
from speechtrain.nn.masking import SpanMask

THIN = [[32, 10, 5], *[[32, 3, 2]] * 4, *[[32, 2, 2]] * 2]
KINDS: dict[str, dict[str, Any]] = {
    "group": {},
    "layer": {"conv_norm": "layer", "conv_bias": True, "pre_norm": True, "gradient_scale": 1.0},
}


def make(kind: str = "group", **values: Any) -> Wav2Vec2:
    """A task with weights far from their initial ones, so that no two tensors are alike."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"conv_layers": THIN, "width": 48, "layers": 2, "feed_forward": 96, "heads": 4}
    encoder = Wav2Vec2Encoder(**(sizes | KINDS[kind] | {"mask": SpanMask()} | values))
    task = Wav2Vec2(encoder, final_width=24, codes=32, code_width=16)
    with torch.no_grad():
        for value in task.parameters():
            value += 0.05 * torch.randn_like(value)
    return task


@pytest.fixture(params=["group", "layer"])
def pretrained(request: pytest.FixtureRequest) -> Pretrained:
    """A small model of each norm mode."""
    task = make(request.param)
    return describe(task, task.state_dict())


@pytest.fixture
def small() -> Pretrained:
    """The small group-norm model."""
    task = make()
    return describe(task, task.state_dict())

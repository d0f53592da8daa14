"""BEST-RQ as a task: its formula by numpy, its masks, and the encoders that it pretrains."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from speechtrain.batch import Batch
from speechtrain.errors import ConfigError
from speechtrain.models.bestrq import BestRQ
from speechtrain.start.run_config import part_of
from tests.support import noise
from tests.support.composed import composed

SMALL = ["model=bestrq", "encoder.width=32", "encoder.feed_forward=48", "encoder.layers=1", "model.codes=50"]


def built(*overrides: str) -> BestRQ:
    config = composed(*overrides)
    torch.manual_seed(1)
    encoder = part_of(config, "encoder").build(augment=part_of(config, "augment").build())
    task: BestRQ = part_of(config, "model").build(encoder=encoder)
    return task


def a_batch(*seconds: float) -> Batch:
    return noise.batch(*[round(16_000 * length) for length in seconds])


@pytest.mark.parametrize(
    "encoder",
    [
        ["encoder.subsampling=4"],
        ["encoder.subsampling=2", "encoder.causal=true", "encoder.context=[20,4,0]"],
        ["encoder=lstm_small", "encoder.hidden=16"],
        ["encoder=quartznet_tiny"],
    ],
)
def test_the_loss_is_that_of_the_formula(encoder: list[str]) -> None:
    is_conformer = not encoder[0].startswith("encoder=")
    sizes = SMALL if is_conformer else ["model=bestrq", "model.codes=50"]
    task = built(*sizes, *encoder).double().eval()
    batch = task.encoder.with_features(task.prepare(a_batch(1.5, 0.9, 1.21), 5))
    features, counts = batch.extra["features"].double(), batch.extra["feature_lengths"]
    batch = replace(batch, extra=batch.extra | {"features": features})
    loss = task(batch)

    mask, columns = batch.extra["mask"].numpy(), task.columns
    changed = features.clone()
    for row, frame in zip(*np.nonzero(mask), strict=True):
        changed[row, frame * columns : (frame + 1) * columns] = 0
    given = replace(batch, extra=batch.extra | {"features": changed, "feature_lengths": counts})
    frames, _ = task.encoder(given)
    logits = (frames @ task.output.weight.t() + task.output.bias).detach().numpy()
    total, number = 0.0, 0
    projection, codebook = task.quantizer.projection.numpy(), task.quantizer.codebook.numpy()
    for row, frame in zip(*np.nonzero(mask), strict=True):
        stacked = np.zeros(columns * features.shape[2])
        own = features[row, frame * columns : (frame + 1) * columns].numpy().ravel()
        stacked[: len(own)] = own
        projected = stacked @ projection
        distances = ((codebook - projected / np.linalg.norm(projected)) ** 2).sum(1)
        scores = logits[row, frame]
        total += math.log(np.exp(scores).sum()) - scores[distances.argmin()]
        number += 1
    assert loss.weight.item() == number > 20
    assert loss.total.item() == pytest.approx(total, rel=1e-6)
    assert loss.metrics["loss_bits"][0].item() == pytest.approx(total / math.log(2), rel=1e-6)


def test_only_masked_frames_are_hidden_and_training_hides_them_behind_noise() -> None:
    task = built(*SMALL)
    batch = task.prepare(a_batch(1.5, 1.5), 5)
    features, _ = task.encoder.augmented(batch)
    hidden = task._masked(features, batch.extra["mask"])
    is_masked = batch.extra["mask"].repeat_interleave(task.columns, 1)[:, : features.shape[1]]
    assert torch.equal(hidden[~is_masked], features[~is_masked])
    assert hidden[is_masked].std().item() == pytest.approx(0.1, rel=0.1)


def test_a_row_too_short_to_mask_and_a_padding_row_weigh_nothing() -> None:
    task = built(*SMALL).eval()
    batch = a_batch(1.2, 0.1, 1.2)
    batch = task.prepare(replace(batch, weight=torch.tensor([1.0, 1.0, 0.0])), 5)
    assert batch.extra["masked"].sum(1).gt(0).tolist() == [True, False, False]
    assert torch.isfinite(task(batch).total)


def test_codes_that_follow_the_audio_are_learnt() -> None:
    task = built(*SMALL, "encoder.residual_dropout=0", "encoder.dropout=0")
    batch = task.prepare(a_batch(1.5, 1.5), 5)
    optimizer = torch.optim.Adam(task.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = task(batch)
        loss.total.backward()
        optimizer.step()
        losses.append(loss.total.item() / loss.weight.item())
    assert losses[0] == pytest.approx(math.log(50), abs=1.0)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("encoder=wav2vec2_small", "model=bestrq cannot pretrain Wav2Vec2Encoder"),
        ("encoder.features.normalise=none", "encoder.features.normalise is none"),
        ("model.codes=1", "codes is 1"),
        ("model.noise=-1", "noise is -1"),
    ],
)
def test_wrong_values_are_refused(override: str, line: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=line):
        built("model=bestrq", override)

"""wav2vec 2.0 as a task: golden sizes, its objective in static shapes, its draws, and its collapses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from speechtrain.batch import Batch
from speechtrain.models.wav2vec2 import CollapseWatch, Wav2Vec2
from speechtrain.start.run_config import part_of
from tests.support import noise
from tests.support.composed import composed

TINY = [
    "model=wav2vec2_small",
    "encoder.conv_layers=[[16,10,5],[16,3,2],[16,3,2],[16,3,2],[16,3,2],[16,2,2],[16,2,2]]",
    *("encoder.width=32", "encoder.feed_forward=48", "encoder.layers=2"),
    *("model.codes=24", "model.code_width=16", "model.final_width=16", "model.negatives=12"),
]


def built(*overrides: str) -> Wav2Vec2:
    config = composed(*overrides)
    torch.manual_seed(1)
    encoder = part_of(config, "encoder").build(augment=part_of(config, "augment").build())
    task: Wav2Vec2 = part_of(config, "model").build(encoder=encoder)
    return task


def a_batch(*seconds: float, filler: int = 0) -> Batch:
    samples = [round(16_000 * length) for length in seconds]
    batch = noise.batch(*samples, *[max(samples)] * filler)
    weight = torch.tensor([1.0] * len(samples) + [0.0] * filler)
    return replace(batch, audio=batch.audio * weight[:, None], weight=weight)


def step(task: Wav2Vec2, batch: Batch, seed: int = 5) -> tuple[Any, dict[str, Tensor]]:
    """Loss and gradients of one micro-batch."""
    task.zero_grad()
    task.advance(100, seed=7)
    batch = task.prepare(batch, seed)
    torch.manual_seed(11)
    loss = task(batch)
    loss.total.backward()
    return loss, {name: p.grad.clone() for name, p in task.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("choice", "parameters"), [("wav2vec2", 95_044_608), ("wav2vec2_large", 317_390_592)]
)
def test_golden_parameter_counts(choice: str, parameters: int) -> None:
    with torch.device("meta"):
        task = built(f"model={choice}")
    assert sum(p.numel() for p in task.parameters()) == parameters


def test_a_fixed_width_changes_nothing_but_shapes() -> None:
    batch = a_batch(1.3, 0.9, 1.1, filler=1)
    batch = replace(batch, audio=batch.audio.double())
    found = []
    for fixed in ("false", "true"):
        # without dropout and noise, whose draws would follow the shapes
        task = built(*TINY, f"model.fixed_width={fixed}").double().eval()
        prepared = task.prepare(batch, 5)
        loss = task(prepared)
        loss.total.backward()
        gradients = {name: p.grad for name, p in task.named_parameters() if p.grad is not None}
        found.append((prepared.extra["index"].shape[1], loss, gradients))
    (narrow, loss, gradients), (wide, wide_loss, wide_gradients) = found
    assert wide > narrow
    assert loss.weight.item() == wide_loss.weight.item() == 3 * narrow
    torch.testing.assert_close(wide_loss.total, loss.total, rtol=1e-12, atol=0)
    torch.testing.assert_close(wide_gradients, gradients, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(wide_loss.metrics, loss.metrics)


def test_filler_rows_change_nothing() -> None:
    task = built(*TINY, *(f"encoder.{name}=0" for name in ("dropout", "attention_dropout", "input_dropout")))
    task.target_dropout = 0.0
    task.eval()  # no noise either: its shape would follow the rows
    plain, with_filler = a_batch(1.2, 1.2), a_batch(1.2, 1.2, filler=2)
    ours = task(task.prepare(plain, 5))
    theirs = task(task.prepare(with_filler, 5))
    assert ours.weight.item() == theirs.weight.item() > 0
    for name in ("loss_contrastive", "loss_diversity", "accuracy", "code_perplexity"):
        torch.testing.assert_close(theirs.metrics[name], ours.metrics[name], rtol=1e-5, atol=1e-5)


def test_a_row_too_short_to_mask_weighs_nothing() -> None:
    task = built(*TINY).eval()
    batch = task.prepare(a_batch(1.2, 0.1, 1.0), 5)
    assert batch.extra["masked"][1].sum() == 0
    assert torch.isfinite(task(batch).total)
    alone = task(task.prepare(a_batch(0.1), 5))
    assert alone.weight.item() == 0
    assert torch.isfinite(alone.total)


def test_the_temperature_falls_with_the_updates() -> None:
    task, batch = built("model=wav2vec2_small", "model.temperature=[2,0.5,0.999995]"), a_batch(1.0)
    for updates, expected in ((0, 2.0), (100_000, 1.21306), (277_259, 0.5), (400_000, 0.5)):
        task.advance(updates, seed=0)
        assert task.prepare(batch, 1).extra["temperature"].item() == pytest.approx(expected, rel=1e-5)


def test_at_first_the_loss_is_that_of_chance() -> None:
    task, batch = built("model=wav2vec2_small"), a_batch(2.0, 2.0)
    loss, _ = step(task, batch)
    total, count = loss.metrics["loss_contrastive"]
    assert total.item() / count.item() == pytest.approx(math.log2(101), abs=0.35)
    parts = sum(loss.metrics[f"loss_{name}"][0].item() for name in ("contrastive", "diversity", "penalty"))
    assert parts == pytest.approx(loss.total.item() / math.log(2), rel=1e-5)
    assert loss.metrics["loss_bits"][0].item() == pytest.approx(parts, rel=1e-5)
    assert loss.metrics["code_perplexity"][0].item() == pytest.approx(
        sum(loss.metrics[f"code_perplexity_{group}"][0].item() for group in range(2)), rel=1e-5
    )


def test_it_learns() -> None:
    task, batch = built(*TINY, "model.code_init=1"), a_batch(1.0, 1.0)
    optimizer = torch.optim.Adam(task.parameters(), lr=3e-3)
    losses = []
    for seed in range(120):
        loss, _ = step(task, batch, seed)
        optimizer.step()
        total, count = loss.metrics["loss_contrastive"]
        losses.append(total.item() / count.item())
    assert sum(losses[-10:]) < 0.93 * sum(losses[:10])


HEALTHY = {
    "code_perplexity_0": 150.0,
    "code_perplexity_1": 140.0,
    "shared_negatives": 0.01,
    "distinct_codes": 0.9,
    "accuracy": 0.4,
}


@pytest.mark.parametrize(
    ("sign", "words"),
    [
        ({"code_perplexity_1": 3.0}, "3.0 of 320 codes are in use in codebook 1"),
        ({"shared_negatives": 0.5}, "50 % of the negatives have"),
        ({"distinct_codes": 0.02}, "2 % of an utterance's codes"),
        ({"accuracy": 0.999}, "99.9 %, too high to be real"),
    ],
)
def test_a_collapse_is_named_once_and_in_time(sign: dict[str, float], words: str) -> None:
    watch = CollapseWatch(codebooks=2, codes=320)
    for at in range(10, 300, 10):
        assert watch(at, HEALTHY, "") is None
    alarms = [(at, watch(at, {**HEALTHY, **sign}, "Do this")) for at in range(300, 900, 10)]
    ((at, alarm),) = [(at, alarm) for at, alarm in alarms if alarm is not None]
    assert alarm.onset == 300
    assert at - alarm.onset <= 500
    assert words in alarm.message
    assert alarm.message.endswith("Do this")


def test_a_run_that_stays_at_chance_is_named() -> None:
    watch = CollapseWatch(codebooks=2, codes=320, chance=math.log2(101), chance_updates=400)
    still = {**HEALTHY, "loss_contrastive": 6.6577}
    alarms = {at: watch(at, still, "Do this") for at in range(10, 900, 10)}
    ((at, alarm),) = [(at, alarm) for at, alarm in alarms.items() if alarm is not None]
    assert (at, alarm.onset) == (410, 10)
    assert "is at chance, 6.658 bits. Do this" in alarm.message
    learns = {**HEALTHY, "loss_contrastive": 6.6}
    watch = CollapseWatch(codebooks=2, codes=320, chance=math.log2(101), chance_updates=400)
    assert not [at for at in range(10, 3000, 10) if watch(at, learns if at % 300 == 0 else still, "")]
    task = built("model=wav2vec2_small", "model.chance_updates=0")
    assert not [at for at in range(10, 3000, 10) if task.watch(at, still)]


def test_a_dip_raises_no_alarm() -> None:
    watch = CollapseWatch(codebooks=2, codes=320)
    dip = {**HEALTHY, "code_perplexity_0": 2.0}
    assert not [at for at in range(10, 2000, 10) if watch(at, dip if at % 90 else HEALTHY, "")]
    # with rare log lines three of them are waited for
    watch = CollapseWatch(codebooks=2, codes=320)
    assert [watch(at, dip, "") is None for at in (1000, 2000, 3000)] == [True, True, False]

"""CTC: the loss, its best path and its evaluation; an encoder that is frozen at first."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from speechtrain.batch import Batch
from speechtrain.encoders.base import Encoder
from speechtrain.errors import ConfigError
from speechtrain.models.ctc import CTC
from speechtrain.text.vocabulary import Characters, NoText

SAMPLES_A_FRAME = 160


class Frames(Encoder):
    """One linear layer over windows of audio."""

    width = 8
    sample_rate = 16_000

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(SAMPLES_A_FRAME, self.width)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        windows = batch.audio.unflatten(1, (-1, SAMPLES_A_FRAME))
        return self.linear(windows), batch.audio_lengths // SAMPLES_A_FRAME

    def frames(self, samples: int) -> int:
        return samples // SAMPLES_A_FRAME

    def activation_bytes(self) -> float:
        return 1.0


def a_batch(tokenizer: Characters, *texts: str) -> Batch:
    torch.manual_seed(3)
    labels = [tokenizer.encode(text) for text in texts]
    lengths = torch.tensor([SAMPLES_A_FRAME * (12 - row) for row in range(len(texts))])
    width = max(map(len, labels))
    return Batch(
        audio=torch.randn(len(texts), SAMPLES_A_FRAME * 12),
        audio_lengths=lengths,
        labels=torch.tensor([ids + [0] * (width - len(ids)) for ids in labels]),
        label_lengths=torch.tensor([len(ids) for ids in labels]),
        weight=torch.ones(len(texts)),
        keys=torch.arange(len(texts)),
        ids=tuple(f"cut-{row}" for row in range(len(texts))),
        texts=texts,
    )


def model(**arguments: float) -> CTC:
    torch.manual_seed(1)
    return CTC(Characters(), Frames(), **arguments)


def test_the_loss_sums_over_utterances_and_forgives_too_long_transcripts() -> None:
    task = model(dropout=0.0)
    batch = a_batch(task.tokenizer, "one", "two two")
    together = task(batch)
    assert together.weight.item() == 2
    rows = [replace(batch, weight=torch.tensor(mask)) for mask in ([1.0, 0.0], [0.0, 1.0])]
    torch.testing.assert_close(sum(task(row).total for row in rows), together.total)
    too_long = a_batch(task.tokenizer, "a much longer transcript than frames")
    loss = task(too_long)
    loss.total.backward()
    assert loss.total.item() == 0
    assert all(bool(p.grad.isfinite().all()) for p in task.parameters() if p.grad is not None)


def test_it_learns_to_read_noise() -> None:
    task = model(dropout=0.0)
    batch = a_batch(task.tokenizer, "one", "two")
    optimizer = torch.optim.Adam(task.parameters(), lr=0.05)
    for _ in range(80):
        optimizer.zero_grad()
        task(batch).total.backward()
        optimizer.step()
    result = task.eval().evaluate(batch, task.decoder)
    assert [(e.reference, e.hypothesis) for e in result.examples] == [("one", "one"), ("two", "two")]
    assert result.metrics["wer"][0].item() == 0
    assert result.metrics["wer"][1].item() == 2
    assert [found.text for found in task.transcribe(batch, task.decoder)] == ["one", "two"]


def test_a_frozen_encoder_moves_when_its_time_has_come() -> None:
    task = model(freeze_encoder_steps=2)
    batch = a_batch(task.tokenizer, "one", "two")
    for step, moves in ((0, False), (1, False), (2, True)):
        task.zero_grad()
        task.advance(step, seed=0)
        task(batch).total.backward()
        assert task.output.weight.grad is not None
        assert (task.encoder.linear.weight.grad is not None) is moves


def test_dropout_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^dropout is 1\.0"):
        model(dropout=1.0)


def test_a_tokenizer_without_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="learns from transcripts"):
        CTC(NoText(), Frames())

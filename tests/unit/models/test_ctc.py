"""CTC: the loss, its best path and its evaluation; an encoder that is frozen at first."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from speechtrain.batch import Batch
from speechtrain.encoders.base import Encoder
from speechtrain.models.ctc import CTC
from speechtrain.text.vocabulary import Characters
from tests.support.noise import batch

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
    samples = [SAMPLES_A_FRAME * (12 - row) for row in range(len(texts))]
    labels = [tokenizer.encode(text) for text in texts]
    return replace(batch(*samples, labels=labels), texts=texts)


def model(**arguments: float) -> CTC:
    torch.manual_seed(1)
    return CTC(Characters(), Frames(), **arguments)


def test_ctc_sums_over_rows_and_forgives_long_transcripts() -> None:
    task = model(dropout=0.0)
    speech = a_batch(task.tokenizer, "one", "two two")
    together = task(speech)
    assert together.weight.item() == 2
    rows = [replace(speech, weight=torch.tensor(mask)) for mask in ([1.0, 0.0], [0.0, 1.0])]
    torch.testing.assert_close(sum(task(row).total for row in rows), together.total)
    too_long = a_batch(task.tokenizer, "a much longer transcript than frames")
    loss = task(too_long)
    loss.total.backward()
    assert loss.total.item() == 0
    assert all(bool(p.grad.isfinite().all()) for p in task.parameters() if p.grad is not None)


def test_it_learns_to_read_noise() -> None:
    task = model(dropout=0.0)
    speech = a_batch(task.tokenizer, "one", "two")
    optimizer = torch.optim.Adam(task.parameters(), lr=0.05)
    for _ in range(80):
        optimizer.zero_grad()
        task(speech).total.backward()
        optimizer.step()
    result = task.eval().evaluate(speech, task.decoder)
    assert [(e.reference, e.hypothesis) for e in result.examples] == [("one", "one"), ("two", "two")]
    assert result.metrics["wer"][0].item() == 0
    assert result.metrics["wer"][1].item() == 2
    assert [found.text for found in task.transcribe(speech, task.decoder)] == ["one", "two"]


def test_a_frozen_encoder_moves_when_its_time_has_come() -> None:
    task = model(freeze_encoder_steps=2)
    speech = a_batch(task.tokenizer, "one", "two")
    for step, moves in ((0, False), (1, False), (2, True)):
        task.zero_grad()
        task.advance(step, seed=0)
        task(speech).total.backward()
        assert task.output.weight.grad is not None
        assert (task.encoder.linear.weight.grad is not None) is moves


def test_two_views_of_a_recording_are_compared_in_training_only() -> None:
    speech = a_batch(model().tokenizer, "one", "two")
    without, with_views = model(dropout=0.0), model(dropout=0.0, consistency=0.5)
    torch.testing.assert_close(with_views(speech).total, without(speech).total)  # Equal views do not diverge.
    torch.manual_seed(2)
    different = model(dropout=0.4, consistency=0.5)
    loss = different(speech)
    assert loss.weight.item() == 2
    assert loss.rows is not None
    assert loss.rows.shape == (2,)
    different.consistency = 1e-12
    torch.manual_seed(2)
    assert loss.total.item() > different(speech).total.item()
    different.eval()
    assert len(different.losses(*different.encoder.encode(speech), speech)[0]) == 2

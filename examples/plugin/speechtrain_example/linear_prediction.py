"""A model without an encoder: linear prediction of the next sample (Atal and Hanauer, 1971)."""

from typing import Any

import torch
from torch import nn

from speechtrain.batch import Batch
from speechtrain.task import Evaluation, Loss, Task


class LinearPrediction(Task):
    """Predicts a sample as a weighted sum of the ``order`` samples before it."""

    def __init__(self, order: int = 16) -> None:
        super().__init__()
        self.filter = nn.Conv1d(1, 1, order, bias=False)
        self.order = order

    def forward(self, batch: Batch) -> Loss:
        audio = batch.audio[:, None]
        difference = self.filter(audio[..., :-1]) - audio[..., self.order :]
        error = difference[:, 0].float().square()
        predicted = torch.arange(error.shape[1], device=error.device) + self.order
        valid = (predicted < batch.audio_lengths[:, None]) * batch.weight[:, None]
        return Loss((error * valid).sum(), valid.sum())

    def evaluate(self, batch: Batch, decoder: Any) -> Evaluation:
        loss = self(batch)
        return Evaluation({"loss": (loss.total, loss.weight)})

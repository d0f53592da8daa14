"""Scorers whose search can be checked by hand: three letters, and a prediction network that counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from speechtrain.decoding.base import CTCScorer, TransducerScorer
from speechtrain.nn.joint import Joint
from speechtrain.nn.prediction import Prediction
from speechtrain.text.vocabulary import Tokenizer

BLANK = 3


class Letters(Tokenizer):
    """Three labels."""

    blank, size, labels = BLANK, BLANK + 1, ("a", "b", "c")

    def normalise(self, text: str) -> str:
        return text

    def encode(self, text: str) -> list[int]:
        return ["abc".index(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join("abc"[label] for label in ids)

    def unknown(self, text: str) -> set[str]:
        return set(text) - {*"abc"}

    def state(self) -> dict[str, Any]:
        return {}


FRAMES = CTCScorer(Letters(), 0.5)


class Counting(Prediction):
    """The number of labels so far."""

    def connect(self, labels: int) -> None:
        pass

    def forward(self, labels: Tensor) -> Tensor:
        raise AssertionError("a search takes one label at a time")

    def start(self, rows: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(rows, 1), torch.zeros(rows, dtype=torch.int64)

    def step(self, labels: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return (state[:, None] + 1).float(), state + 1

    def select(self, mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
        return torch.where(mask, new, old)


class Table(Joint):
    """Logits (T, U + 1, V) by the frame's number, which is its only feature, and the number of labels."""

    def __init__(self, logits: Tensor, durations: list[int] | None = None) -> None:
        super().__init__(durations=durations)
        self.logits, self.prediction = logits, torch.nn.Identity()

    def forward(self, encoded: Tensor, predicted: Tensor) -> Tensor:
        return self.logits[encoded[:, 0].long(), predicted[:, 0].long()]


def table(logits: Tensor, durations: list[int] | None = None) -> TransducerScorer:
    return TransducerScorer(Letters(), 0.5, prediction=Counting(), joint=Table(logits, durations))


def one_hot(*classes: int) -> Tensor:
    return (torch.eye(4)[list(classes)] * 9).log_softmax(-1)

"""Prediction networks of a transducer: what the labels so far say about the next one.

Legend: B rows, U labels, P positions, E embedding width, W output width, n labels of context.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speechtrain.nn.lstm import LSTM, State


class Prediction(nn.Module, ABC):
    """Maps the labels so far to a vector.

    The input before the first label is a zero vector; the embedding table has no row for the blank.
    """

    width: int
    """W, of the output."""

    @abstractmethod
    def connect(self, labels: int) -> None:
        """Create the layers for so many labels, without the blank; the model calls it once."""

    @abstractmethod
    def forward(self, labels: Tensor) -> Tensor:
        """Map labels (B, U) to (B, U + 1, W); position u depends on the first u labels."""

    @abstractmethod
    def start(self, rows: int) -> tuple[Tensor, Any]:
        """Return the output (B, W) and the state before the first label."""

    @abstractmethod
    def step(self, labels: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Return the output (B, W) and the state after one more label per row (B,)."""

    @abstractmethod
    def select(self, mask: Tensor, new: Any, old: Any) -> Any:
        """Return the state ``new`` in rows where ``mask`` (B,) is True, else ``old``."""

    def take(self, rows: Tensor, state: Any) -> Any:
        """Return the state of ``rows`` (N,), as a beam search needs it; here, a tensor's first axis is B."""
        return state[rows]


def _check(dropout: float, **sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout is {dropout}; it must be at least 0 and below 1")


class LSTMPrediction(Prediction):
    """Embedding and LSTM over all labels so far (Graves, 2012; MLPerf RNN-T)."""

    def __init__(
        self,
        embedding: int = 512,
        hidden: int = 512,
        layers: int = 2,
        dropout: float = 0.3,
        layer_norm: bool = False,
        forget_gate_bias: float = 1.0,
        init_scale: float = 0.5,
    ) -> None:
        super().__init__()
        _check(dropout, embedding=embedding, hidden=hidden, layers=layers)
        self.width = hidden
        self._embedding_width = embedding
        self._lstm = {"hidden": hidden, "layers": layers, "dropout": dropout, "layer_norm": layer_norm}
        self._lstm |= {"forget_gate_bias": forget_gate_bias, "init_scale": init_scale}

    def connect(self, labels: int) -> None:
        self.embedding = nn.Embedding(labels, self._embedding_width)
        self.rnn = LSTM(self._embedding_width, **self._lstm)  # type: ignore[arg-type]

    def forward(self, labels: Tensor) -> Tensor:
        embedded: Tensor = F.pad(self.embedding(labels), (0, 0, 1, 0))
        output: Tensor = self.rnn(embedded)[0]
        return output

    def start(self, rows: int) -> tuple[Tensor, State]:
        output, state = self.rnn(self.embedding.weight.new_zeros(rows, 1, self._embedding_width))
        return output[:, 0], state

    def step(self, labels: Tensor, state: State) -> tuple[Tensor, State]:
        output, state = self.rnn(self.embedding(labels)[:, None], state)
        return output[:, 0], state

    def select(self, mask: Tensor, new: State, old: State) -> State:
        rows = mask[None, :, None]  # states are (layers, B, hidden)
        return torch.where(rows, new[0], old[0]), torch.where(rows, new[1], old[1])

    def take(self, rows: Tensor, state: State) -> State:
        return state[0][:, rows], state[1][:, rows]


class StatelessPrediction(Prediction):
    """The last ``context`` labels' embeddings, joined and projected (Ghodsi et al., ICASSP 2020).

    With no recurrence, hypotheses that end in the same labels have the same state.
    """

    def __init__(
        self, embedding: int = 256, hidden: int = 512, context: int = 2, dropout: float = 0.1
    ) -> None:
        super().__init__()
        _check(dropout, embedding=embedding, hidden=hidden, context=context)
        self.width, self.context = hidden, context
        self._embedding_width = embedding
        self.dropout = nn.Dropout(dropout)

    def connect(self, labels: int) -> None:
        self.embedding = nn.Embedding(labels, self._embedding_width)
        self.projection = nn.Linear(self.context * self._embedding_width, self.width)

    def forward(self, labels: Tensor) -> Tensor:
        return self._projected(F.pad(self.embedding(labels), (0, 0, self.context, 0)))

    def start(self, rows: int) -> tuple[Tensor, Tensor]:
        state = self.embedding.weight.new_zeros(rows, self.context, self._embedding_width)
        return self._projected(state)[:, 0], state

    def step(self, labels: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.cat((state[:, 1:], self.embedding(labels)[:, None]), 1)
        return self._projected(state)[:, 0], state

    def select(self, mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
        return torch.where(mask[:, None, None], new, old)

    def _projected(self, embedded: Tensor) -> Tensor:
        """Map embeddings (B, P + n − 1, E) to (B, P, W): output p is of the embeddings p to p + n − 1."""
        positions = embedded.shape[1] - self.context + 1
        windows = torch.cat([embedded[:, first : first + positions] for first in range(self.context)], 2)
        output: Tensor = self.projection(self.dropout(windows))
        return output

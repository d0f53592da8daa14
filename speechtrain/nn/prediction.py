"""Prediction networks of a transducer: they map the labels so far to a vector that predicts the next label.

Legend: B rows, U labels, P positions, E embedding width, W output width, n labels of context. Position u is
the point after the first u labels of a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speechtrain.errors import require_least, require_shares
from speechtrain.nn.lstm import LSTM, State


class Prediction(nn.Module, ABC):
    """Maps the labels so far to a vector.

    The input before the first label is a zero vector, and the embedding table does not have a row for the
    blank (MLPerf). With ``starts_with_blank``, that input is the trained embedding of the blank, which is the
    last row of the table (transformers' Parakeet, NeMo's ``blank_as_pad=False``).
    """

    width: int
    """W, the width of the output."""

    embedding: nn.Embedding
    starts_with_blank: bool = False
    label_dropout: float = 0.0
    """The share of the labels that training hides, so that the network does not remember whole texts."""

    def _embed(self, labels: Tensor, start_inputs: int) -> Tensor:
        """Return ``start_inputs`` inputs before the first label, then the embeddings of labels (B, U).

        The result is (B, ``start_inputs`` + U, E).
        """
        if self.starts_with_blank:
            blank = self.embedding.num_embeddings - 1
            embeddings: Tensor = self.embedding(F.pad(labels, (start_inputs, 0), value=blank))
        else:
            embeddings = F.pad(self.embedding(labels), (0, 0, start_inputs, 0))
        # dropout1d sets whole vectors to zero.
        return F.dropout1d(embeddings, self.label_dropout, self.training)

    @abstractmethod
    def connect(self, labels: int) -> None:
        """Create the layers for ``labels`` labels, without the blank. The model calls this once."""

    @abstractmethod
    def forward(self, labels: Tensor) -> Tensor:
        """Map labels (B, U) to (B, U + 1, W). Position u depends on the first u labels."""

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
        """Return the state of ``rows`` (N,), for a beam search.

        Here the first axis of ``state`` is the rows. A class with another state overrides this method.
        """
        return state[rows]


def _check_settings(dropout: float, label_dropout: float, start: str, **sizes: int) -> None:
    if start not in ("zero", "blank"):
        raise ValueError(f"start is {start!r}. It must be zero or blank")
    require_least(1, **sizes)
    require_shares(dropout=dropout, label_dropout=label_dropout)


class LSTMPrediction(Prediction):
    """Embedding and LSTM over all labels so far (Graves, 2012, and MLPerf RNN-T).

    ``start`` is the input before the first label: ``zero`` or ``blank``.
    """

    def __init__(
        self,
        embedding: int = 512,
        hidden: int = 512,
        layers: int = 2,
        dropout: float = 0.3,
        layer_norm: bool = False,
        forget_gate_bias: float = 1.0,
        init_scale: float = 0.5,
        start: str = "zero",
        label_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        _check_settings(dropout, label_dropout, start, embedding=embedding, hidden=hidden, layers=layers)
        self.label_dropout = label_dropout
        self.width, self.starts_with_blank = hidden, start == "blank"
        self._embedding_width = embedding
        self._lstm_settings = {
            "hidden": hidden,
            "layers": layers,
            "dropout": dropout,
            "layer_norm": layer_norm,
            "forget_gate_bias": forget_gate_bias,
            "init_scale": init_scale,
        }

    def connect(self, labels: int) -> None:
        self.embedding = nn.Embedding(labels + int(self.starts_with_blank), self._embedding_width)
        self.rnn = LSTM(self._embedding_width, **self._lstm_settings)  # type: ignore[arg-type]

    def forward(self, labels: Tensor) -> Tensor:
        output: Tensor = self.rnn(self._embed(labels, 1))[0]
        return output

    def start(self, rows: int) -> tuple[Tensor, State]:
        no_labels = torch.zeros(rows, 0, dtype=torch.int64, device=self.embedding.weight.device)
        output, state = self.rnn(self._embed(no_labels, 1))
        return output[:, 0], state

    def step(self, labels: Tensor, state: State) -> tuple[Tensor, State]:
        output, state = self.rnn(self.embedding(labels)[:, None], state)
        return output[:, 0], state

    def select(self, mask: Tensor, new: State, old: State) -> State:
        row_mask = mask[None, :, None]  # Hidden and cell state are (layers, B, hidden).
        hidden, cell = new
        old_hidden, old_cell = old
        return torch.where(row_mask, hidden, old_hidden), torch.where(row_mask, cell, old_cell)

    def take(self, rows: Tensor, state: State) -> State:
        hidden, cell = state
        return hidden[:, rows], cell[:, rows]


class StatelessPrediction(Prediction):
    """Embeddings of the last ``context`` labels, concatenated and projected (Ghodsi et al., ICASSP 2020).

    The state is these embeddings (B, n, E), so hypotheses that end in the same labels have the same state.
    ``start`` is the input before the first label: ``zero`` or ``blank``.
    """

    def __init__(
        self,
        embedding: int = 256,
        hidden: int = 512,
        context: int = 2,
        dropout: float = 0.1,
        start: str = "zero",
        label_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        _check_settings(dropout, label_dropout, start, embedding=embedding, hidden=hidden, context=context)
        self.label_dropout = label_dropout
        self.width, self.context, self.starts_with_blank = hidden, context, start == "blank"
        self._embedding_width = embedding
        self.dropout = nn.Dropout(dropout)

    def connect(self, labels: int) -> None:
        self.embedding = nn.Embedding(labels + int(self.starts_with_blank), self._embedding_width)
        self.projection = nn.Linear(self.context * self._embedding_width, self.width)

    def forward(self, labels: Tensor) -> Tensor:
        return self._project(self._embed(labels, self.context))

    def start(self, rows: int) -> tuple[Tensor, Tensor]:
        no_labels = torch.zeros(rows, 0, dtype=torch.int64, device=self.embedding.weight.device)
        state = self._embed(no_labels, self.context)
        return self._project(state)[:, 0], state

    def step(self, labels: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.cat((state[:, 1:], self.embedding(labels)[:, None]), 1)
        return self._project(state)[:, 0], state

    def select(self, mask: Tensor, new: Tensor, old: Tensor) -> Tensor:
        return torch.where(mask[:, None, None], new, old)

    def _project(self, embeddings: Tensor) -> Tensor:
        """Map embeddings (B, P + n − 1, E) to (B, P, W): output p depends on embeddings p to p + n − 1."""
        positions = embeddings.shape[1] - self.context + 1
        windows = torch.cat([embeddings[:, start : start + positions] for start in range(self.context)], 2)
        output: Tensor = self.projection(self.dropout(windows))
        return output

"""CTC recognition (Graves et al., 2006): an encoder and one linear layer."""

from __future__ import annotations

from torch import Tensor, nn

from speechtrain.batch import Batch, Footprint
from speechtrain.compute_policy import ComputePolicy, PolicyAware
from speechtrain.decoding.greedy import best_path
from speechtrain.encoders.base import Encoder
from speechtrain.errors import ConfigError
from speechtrain.losses.ctc import ctc_loss
from speechtrain.metrics import error_rates
from speechtrain.task import Evaluation, Loss, Task, examples_of
from speechtrain.text.vocabulary import Tokenizer


class CTC(Task, PolicyAware):
    """A linear layer on an encoder's frames, trained by CTC: the usual fine-tuning of wav2vec 2.0.

    The loss of a batch is the sum over its utterances, and its weight is their number; an utterance whose
    labels do not fit its frames adds 0. A pretrained encoder does not change for the first
    ``freeze_encoder_steps`` updates; ``dropout`` applies to the encoder's frames.
    """

    metric = "wer"

    def __init__(
        self, tokenizer: Tokenizer, encoder: Encoder, dropout: float = 0.1, freeze_encoder_steps: int = 0
    ) -> None:
        super().__init__()
        if not 0 <= dropout < 1:
            raise ValueError(f"model.dropout is {dropout}; it must be at least 0 and below 1")
        if not tokenizer.reads_text:
            raise ConfigError("model=ctc learns from transcripts; replace tokenizer=none by another one")
        self.tokenizer = tokenizer
        self.encoder = encoder
        self.normalise_audio = encoder.normalise_audio
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(encoder.width, tokenizer.size)
        self.freeze_encoder_steps = freeze_encoder_steps
        self.skips_parameters = freeze_encoder_steps > 0
        self._policy = ComputePolicy()

    def apply_policy(self, policy: ComputePolicy) -> None:
        self._policy = policy

    def advance(self, step: int, seed: int) -> None:
        self.encoder.frozen = step < self.freeze_encoder_steps
        self.encoder.advance(step, seed)

    def prepare(self, batch: Batch, seed: int) -> Batch:
        return self.encoder.prepare(batch, seed)

    def forward(self, batch: Batch) -> Loss:
        scores, lengths = self._scores(batch)
        return Loss(*self._loss(scores, lengths, batch))

    def _scores(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute log-probabilities (B, T, V) fp32, blank last, and frames (B,)."""
        encoded, lengths = self.encoder.encode(batch)
        return self.output(self.dropout(encoded)).float().log_softmax(-1), lengths

    def _loss(self, scores: Tensor, lengths: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        blank, is_static = self.tokenizer.blank, self._policy.ctc == "static"
        per_row = ctc_loss(scores, batch.labels, lengths, batch.label_lengths, blank, static=is_static)
        return (per_row * batch.weight).sum(), batch.weight.sum()

    def evaluate(self, batch: Batch) -> Evaluation:
        scores, lengths = self._scores(batch)
        examples = examples_of(batch, self._decode(scores, lengths))
        metrics = error_rates((e.reference, e.hypothesis) for e in examples)
        total, weight = self._loss(scores, lengths, batch)
        return Evaluation({**metrics, "loss": (total, weight)}, examples)

    def transcribe(self, batch: Batch) -> list[str]:
        return self._decode(*self._scores(batch))

    def _decode(self, scores: Tensor, lengths: Tensor) -> list[str]:
        if self._policy.static_shapes:  # merging equal labels has data-dependent shapes, so the host does it
            scores, lengths = scores.cpu(), lengths.cpu()
        return [self.tokenizer.decode(ids) for ids in best_path(scores, lengths, self.tokenizer.blank)]

    def footprint(self) -> Footprint:
        return Footprint(self.encoder.activation_bytes())

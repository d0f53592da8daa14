"""CTC recognition (Graves et al., 2006): an encoder and one linear layer.

Legend: B rows, T frames, V classes with the blank last.
"""

from __future__ import annotations

from torch import Tensor, nn

from speechtrain.batch import Batch, Footprint
from speechtrain.decoding.base import CTCScorer, Scorer
from speechtrain.encoders.base import Encoder
from speechtrain.errors import require_shares
from speechtrain.models.recogniser import Recogniser
from speechtrain.task import Sums
from speechtrain.text.vocabulary import Tokenizer


class CTC(Recogniser):
    """A linear layer on an encoder's frames, trained by CTC. This is the usual fine-tuning of wav2vec 2.0.

    An utterance whose labels do not fit its frames adds 0 to the loss. ``dropout`` applies to the encoder's
    frames.
    """

    beam = "ctc_beam"

    def __init__(
        self,
        tokenizer: Tokenizer,
        encoder: Encoder,
        dropout: float = 0.1,
        freeze_encoder_steps: float = 0,
        encoder_lr_scale: float = 1.0,
        consistency: float = 0.0,
    ) -> None:
        super().__init__(tokenizer, encoder, freeze_encoder_steps, encoder_lr_scale, consistency)
        require_shares(dropout=dropout)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(encoder.width, tokenizer.size)

    def ctc_scores(self, encoded: Tensor) -> Tensor:
        logits: Tensor = self.output(self.dropout(encoded))
        return logits.float().log_softmax(-1)

    def search_frames(self, encoded: Tensor) -> Tensor:
        """Return log-probabilities (B, T, V) in fp32 of the encoder's frames (B, T, ·)."""
        return self.ctc_scores(encoded)

    def losses(self, encoded: Tensor, lengths: Tensor, batch: Batch) -> tuple[Tensor, Sums]:
        return self.ctc_losses(self.search_frames(encoded), lengths, batch), {}

    def scorer(self) -> Scorer:
        return CTCScorer(self.tokenizer, self.frame_seconds)

    def footprint(self) -> Footprint:
        return Footprint(self.view_count * self.encoder.activation_bytes())

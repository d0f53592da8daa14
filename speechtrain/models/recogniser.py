"""What recognisers share: an encoder, transcripts, and the decoder that writes them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from speechtrain.batch import Batch
from speechtrain.compute_policy import PLAIN, ComputePolicy, PolicyAware
from speechtrain.decoding.base import Decoder, Hypothesis
from speechtrain.decoding.greedy import Greedy
from speechtrain.encoders.base import Encoder
from speechtrain.errors import ConfigError
from speechtrain.metrics import error_rates
from speechtrain.task import Evaluation, Loss, Sums, Task, examples_of
from speechtrain.text.vocabulary import Tokenizer


class Recogniser(Task, PolicyAware):
    """A model that is trained on transcripts and evaluated by the WER of its decoder.

    The loss of a batch is the sum over its utterances, and its weight is their number. A pretrained encoder
    does not change for the first ``freeze_encoder_steps`` updates; below 1, that is their share of the plan.
    Its learning rate is the others' times ``encoder_lr_scale``.
    """

    metric = "wer"
    writes_text = True
    decoder: Decoder

    def __init__(
        self,
        tokenizer: Tokenizer,
        encoder: Encoder,
        freeze_encoder_steps: float,
        encoder_lr_scale: float = 1.0,
    ) -> None:
        super().__init__()
        if not encoder_lr_scale >= 0:
            raise ValueError(f"encoder_lr_scale is {encoder_lr_scale}; it must be 0 or above")
        self.encoder_lr_scale = encoder_lr_scale
        if not tokenizer.reads_text:
            raise ConfigError(f"{type(self).__name__} learns from transcripts; replace tokenizer=none")
        if not encoder.width:
            raise ConfigError("encoder=none: this model needs one; choose it with encoder=NAME")
        self.tokenizer = tokenizer
        self.encoder = encoder
        self.sample_rate, self.normalise_audio = encoder.sample_rate, encoder.normalise_audio
        self.freeze_encoder_steps = freeze_encoder_steps
        self.skips_parameters = freeze_encoder_steps > 0
        self.decoder = Greedy()
        self.policy = PLAIN

    @abstractmethod
    def losses(self, encoded: Tensor, lengths: Tensor, batch: Batch) -> tuple[Tensor, Sums]:
        """Compute each row's loss (B,) fp32 from frames (B, T, W), and its parts if there are several."""

    @abstractmethod
    def hypotheses(self, encoded: Tensor, lengths: Tensor) -> list[Hypothesis]:
        """Decode frames (B, T, W) of ``lengths`` (B,) with the model's decoder."""

    @property
    def frame_seconds(self) -> float:
        """Seconds from one encoder frame to the next."""
        return 100 / self.encoder.frames(100 * self.encoder.sample_rate)

    def apply_policy(self, policy: ComputePolicy) -> None:
        self.policy = policy

    def advance(self, step: int, seed: int) -> None:
        steps = self.freeze_encoder_steps
        self.encoder.frozen = step < (steps * self.planned_updates if steps < 1 else steps)
        self.encoder.advance(step, seed)

    def parameter_groups(self) -> Iterable[dict[str, Any]]:
        if self.encoder_lr_scale == 1:
            return super().parameter_groups()
        own = [p for p in self.encoder.parameters() if p.requires_grad]
        known = set(map(id, own))
        rest = [p for p in self.parameters() if p.requires_grad and id(p) not in known]
        return [{"params": own, "lr_scale": self.encoder_lr_scale}, {"params": rest}]

    def prepare(self, batch: Batch, seed: int) -> Batch:
        return self.encoder.prepare(batch, seed)

    def forward(self, batch: Batch) -> Loss:
        per_row, parts = self.losses(*self.encoder.encode(batch), batch)
        return Loss((per_row * batch.weight).sum(), batch.weight.sum(), parts)

    def evaluate(self, batch: Batch) -> Evaluation:
        encoded, lengths = self.encoder.encode(batch)
        per_row, _ = self.losses(encoded, lengths, batch)
        examples = examples_of(batch, self.hypotheses(encoded, lengths))
        metrics = error_rates((e.reference, e.hypothesis) for e in examples)
        metrics["loss"] = ((per_row * batch.weight).sum(), batch.weight.sum())
        return Evaluation(metrics, examples)

    def transcribe(self, batch: Batch) -> list[Hypothesis]:
        return self.hypotheses(*self.encoder.encode(batch))

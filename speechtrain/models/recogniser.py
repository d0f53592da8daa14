"""The base of the models that recognise speech: an encoder, a loss on transcripts, and a decoder.

Legend: B rows, T encoder frames, W encoder width.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from speechtrain.batch import Batch
from speechtrain.compute_policy import PLAIN, ComputePolicy, PolicyAware
from speechtrain.decoding.base import Decoder, Hypothesis, Scorer, SearchStream
from speechtrain.decoding.greedy import Greedy
from speechtrain.encoders.base import Encoder
from speechtrain.encoders.stream import FrameStream, StreamTiming
from speechtrain.errors import ConfigError, require_contract, require_least
from speechtrain.losses.ctc import ctc_loss, view_divergence
from speechtrain.metrics import delay_counts, equal_words, error_rates
from speechtrain.nn.conformer import Context
from speechtrain.task import Evaluation, Example, Loss, Sums, Task, examples_of, require_sums
from speechtrain.text.vocabulary import Tokenizer


@dataclass(frozen=True)
class TextStream:
    """The encoder and the search of one recording whose samples arrive in pieces."""

    recogniser: Recogniser
    encoder: FrameStream
    search: SearchStream

    def step(self, samples: Tensor) -> Tensor:
        """Append samples (1, S), and return new frames (1, T, ·) for ``search``."""
        return self.recogniser.search_frames(self.encoder.step(samples))

    def finish(self) -> Tensor:
        """Return the last frames (1, T, ·) for ``search``."""
        return self.recogniser.search_frames(self.encoder.finish())


class Recogniser(Task, PolicyAware):
    """A model that is trained on transcripts and evaluated by the WER of its decoder.

    - The loss of a batch is the sum over its utterances, and its weight is the number of utterances.
    - In the first ``freeze_encoder_steps`` updates, the encoder does not change. If this number is below 1,
      it is a fraction of the planned updates. Otherwise it is an integer.
    - ``encoder_lr_scale`` multiplies the learning rate of the encoder's parameters.
    - In training, the CTC loss on a middle layer of the encoder is added with the weight that the encoder has
      for it (``Encoder.middle_ctc``).
    - ``consistency`` is the weight of the divergence of two views of each recording in the CTC loss
      (``losses.ctc.view_divergence``). Above 0, training reads each recording twice, with an augmentation and
      a dropout for each view, and the loss of a recording is the mean of its views.
    """

    metric = "wer"
    writes_text = True
    # The losses compile their recursions. A vendor's kernel is one operation.
    graph_units = ("encoder",)
    decoder: Decoder

    def __init__(
        self,
        tokenizer: Tokenizer,
        encoder: Encoder,
        freeze_encoder_steps: float,
        encoder_lr_scale: float = 1.0,
        consistency: float = 0.0,
    ) -> None:
        super().__init__()
        require_least(0, consistency=consistency)
        if not encoder_lr_scale >= 0:
            raise ValueError(f"encoder_lr_scale is {encoder_lr_scale}. It must be 0 or above")
        if isinstance(freeze_encoder_steps, float) and freeze_encoder_steps >= 1:
            numbers = "A share of the updates is below 1, and a number of updates is an integer"
            raise ValueError(f"freeze_encoder_steps is {freeze_encoder_steps}. {numbers}")
        if not tokenizer.reads_text:
            raise ConfigError(f"{type(self).__name__} learns from transcripts. Replace tokenizer=none")
        if not encoder.width:
            raise ConfigError("encoder=none: this model needs an encoder. Choose one with encoder=NAME")
        self.encoder_lr_scale = encoder_lr_scale
        self.consistency = consistency
        self.tokenizer = tokenizer
        self.encoder = encoder
        self.sample_rate, self.normalise_audio = encoder.sample_rate, encoder.normalise_audio
        self.freeze_encoder_steps = freeze_encoder_steps
        if freeze_encoder_steps > 0 or encoder.skips_parameters:
            self.skips_parameters = True
        self.decoder = Greedy()
        self.policy = PLAIN

    @abstractmethod
    def losses(self, encoded: Tensor, lengths: Tensor, batch: Batch) -> tuple[Tensor, Sums]:
        """Return the loss (B,) of each row in fp32, and the metrics of the terms of the loss.

        ``encoded`` (B, T, W) are the encoder's frames, and ``lengths`` (B,) are the frames of each row.
        Frames beyond them are arbitrary. The caller multiplies the losses by ``batch.weight``, which is 0 for
        padding rows. A metric is a pair of sums over the rows, which are weighted here.
        """

    @abstractmethod
    def ctc_scores(self, encoded: Tensor) -> Tensor:
        """Return CTC's log-probabilities (B, T, V) in fp32 of the encoder's frames (B, T, W)."""

    @abstractmethod
    def scorer(self) -> Scorer:
        """Return the part of the model that a search needs."""

    @abstractmethod
    def search_frames(self, encoded: Tensor) -> Tensor:
        """Return the frames (B, T, ·) that the scorer reads, for the encoder's frames (B, T, W)."""

    def hypotheses(self, encoded: Tensor, lengths: Tensor, decoder: Decoder) -> list[Hypothesis]:
        """Return the hypothesis of each row for frames (B, T, W) of ``lengths`` (B,), by ``decoder``."""
        frames, lengths = self.policy.tensors_for_search(self.search_frames(encoded), lengths)
        return decoder.decode(self.scorer(), frames, lengths)

    @property
    def frame_seconds(self) -> float:
        """Seconds from one encoder frame to the next."""
        return self.encoder.frame_seconds

    def apply_policy(self, policy: ComputePolicy) -> None:
        self.policy = policy

    def advance(self, step: int, seed: int) -> None:
        frozen_updates = self.freeze_encoder_steps
        if frozen_updates < 1:
            frozen_updates *= self.planned_updates
        self.encoder.frozen = step < frozen_updates
        self.encoder.advance(step, seed)

    def frozen(self) -> str:
        span = self.freeze_encoder_steps
        if not span:
            return super().frozen()
        weights = sum(p.numel() for p in self.encoder.parameters())
        updates = f"{span:.3g} of the" if span < 1 else f"{span:,}"
        return f"encoder ({weights:,} weights) in the first {updates} updates"

    def parameter_groups(self) -> Iterable[dict[str, Any]]:
        if self.encoder_lr_scale == 1:
            return super().parameter_groups()
        encoder_parameters = [p for p in self.encoder.parameters() if p.requires_grad]
        encoder_ids = set(map(id, encoder_parameters))
        other_parameters = [p for p in self.parameters() if p.requires_grad and id(p) not in encoder_ids]
        return [
            {"params": encoder_parameters, "lr_scale": self.encoder_lr_scale},
            {"params": other_parameters},
        ]

    def prepare(self, batch: Batch, seed: int) -> Batch:
        """Add the lengths that the host knows to the batch, so that no loss reads them from the device."""
        batch, encoder = self.encoder.prepare(batch, seed), self.encoder
        if not encoder.has_exact_frames:
            return batch
        frames = [encoder.frames(samples) for samples in batch.audio_lengths.tolist()]
        return replace(batch, host_lengths=(frames, batch.label_lengths.tolist()))

    def check(self, batch: Batch) -> None:
        self.encoder.check(batch)
        encoded, lengths = self.encoder.encode(batch)
        output: Any = self.losses(encoded, lengths, batch)
        is_pair = isinstance(output, tuple) and len(output) == 2
        require_contract(is_pair, self, "losses does not return the loss (B,) of each row and the metrics")
        row_losses, metrics = output
        is_trained = isinstance(row_losses, Tensor) and row_losses.requires_grad
        require_contract(is_trained, self, "losses returns a loss without a gradient")
        shape, rows = tuple(row_losses.shape), len(batch.ids)
        require_contract(shape == (rows,), self, f"losses returns a loss of shape {shape} for {rows} rows")
        require_sums(self, "losses", metrics)

    @property
    def view_count(self) -> int:
        """The number of views of each recording in training."""
        return 2 if self.consistency else 1

    def forward(self, batch: Batch) -> Loss:
        views = self._views(batch)
        if self.encoder.middle_ctc and self.training:
            encoded, lengths, middle = self.encoder.encode_with_middle(views)
            row_losses, metrics = self.losses(encoded, lengths, views)
            middle_losses = self.ctc_losses(self.ctc_scores(middle), lengths, views)
            row_losses = row_losses + self.encoder.middle_ctc * middle_losses
            total = (middle_losses.detach() * views.weight).sum()
            metrics = {**metrics, "loss_middle_ctc": (total, views.weight.sum())}
        else:
            encoded, lengths = self.encoder.encode(views)
            row_losses, metrics = self.losses(encoded, lengths, views)
        row_losses = row_losses.view(-1, len(batch.audio)).mean(0)
        total = (row_losses * batch.weight).sum()
        return Loss(total, batch.weight.sum(), metrics, row_losses.detach())

    def _views(self, batch: Batch) -> Batch:
        """Return the batch of a training step: with ``consistency``, all rows, and then all rows again."""
        count = self.view_count
        if count == 1 or not self.training:
            return batch
        host_lengths = batch.host_lengths
        if host_lengths is not None:
            host_lengths = (host_lengths[0] * count, host_lengths[1] * count)
        return replace(
            batch,
            audio=batch.audio.repeat(count, 1),
            audio_lengths=batch.audio_lengths.repeat(count),
            labels=batch.labels.repeat(count, 1),
            label_lengths=batch.label_lengths.repeat(count),
            weight=batch.weight.repeat(count),
            keys=batch.keys.repeat(count),
            host_lengths=host_lengths,
        )

    def ctc_losses(self, scores: Tensor, lengths: Tensor, batch: Batch) -> Tensor:
        """Return the CTC loss (B,) of log-probabilities ``scores`` (B, T, V), for the texts of a batch.

        ``consistency`` adds the divergence of the views. ``lengths`` (B,) are the frames of each row.
        """
        losses = ctc_loss(
            scores,
            batch.labels,
            lengths,
            label_counts=batch.label_lengths,
            blank=self.tokenizer.blank,
            policy=self.policy,
            host_lengths=batch.host_lengths,
        )
        if not self.consistency or not self.training:
            return losses
        return losses + self.consistency * view_divergence(scores, lengths)

    def evaluate(self, batch: Batch, decoder: Decoder) -> Evaluation:
        """Return the metrics of the encoder's context, and of a stream for each of ``encoder.timings``.

        For a look-ahead of 160 ms, the metrics are ``cer_160ms``, ``wer_160ms``, and the mean and the 90th
        percentile of the delays of words in seconds, ``delay_160ms`` and ``delay_160ms_90``. No stream is
        needed, because its frames are those of one pass with its context.
        """
        if self.encoder.timings:
            batch = self.encoder.with_features(batch)
        encoded, lengths = self.encoder.encode(batch)
        row_losses, _ = self.losses(encoded, lengths, batch)
        hypotheses = self.hypotheses(encoded, lengths, decoder)
        examples = examples_of(batch, hypotheses)
        metrics = _error_rates(examples)
        metrics["loss"] = ((row_losses * batch.weight).sum(), batch.weight.sum())
        spoken_ids = {example.id for example in examples if example.hypothesis}
        delays_by_name = {}
        for timing in self.encoder.timings:
            encoded, lengths = self.encoder.encode(batch, timing.context)
            streamed = self.hypotheses(encoded, lengths, decoder)
            look_ahead = f"{timing.milliseconds}ms"
            for name, rate in _error_rates(examples_of(batch, streamed)).items():
                metrics[f"{name}_{look_ahead}"] = rate
            delays = list[float]()
            for row, utterance_id in enumerate(batch.ids):
                if utterance_id in spoken_ids:
                    delays += self.word_delays(hypotheses[row], streamed[row], timing)
            total = torch.tensor(sum(delays), dtype=torch.float64)
            metrics[f"delay_{look_ahead}"] = (total, torch.tensor(len(delays), dtype=torch.float64))
            delays_by_name[f"delay_{look_ahead}_90"] = delay_counts(delays)
        return Evaluation(metrics, examples, delays_by_name)

    def stream(self, context: Context | None, decoder: Decoder) -> TextStream:
        return TextStream(self, self.encoder.stream(context), decoder.stream(self.scorer()))

    def word_delays(self, offline: Hypothesis, streamed: Hypothesis, timing: StreamTiming) -> Iterator[float]:
        """Yield the delay in seconds of each word that both hypotheses have, in audio time.

        It is the time from the end of the word in ``offline`` to the departure of the frame in which the last
        label of the word begins in ``streamed``. The departure may be after the end of a recording.
        """
        frame_seconds = self.frame_seconds  # the unit of the times of hypotheses
        texts = [word.text for word in offline.words]
        streamed_texts = [word.text for word in streamed.words]
        for position, streamed_position in equal_words(texts, streamed_texts):
            last_label = bisect_left(streamed.times, streamed.words[streamed_position].end) - 1
            frame = round(streamed.times[last_label] / frame_seconds)
            end = round(offline.words[position].end / frame_seconds)
            yield (timing.departure(frame) - end) * timing.frame_seconds

    def transcribe(self, batch: Batch, decoder: Decoder) -> list[Hypothesis]:
        encoded, lengths = self.encoder.encode(batch)
        return self.hypotheses(encoded, lengths, decoder)


def _error_rates(examples: Iterable[Example]) -> Sums:
    return error_rates((example.reference, example.hypothesis) for example in examples)

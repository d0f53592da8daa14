"""wav2vec 2.0 pretraining (Baevski et al., 2020): find the code of a masked frame among codes of its row.

Legend: B rows, T frames, M masked frames of a row, K negatives, C extractor channels, D width, G codebooks.
"Upstream" is fairseq. ``masking.py`` explains tables (B, M) and surplus entries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speechtrain.batch import Batch, Footprint
from speechtrain.compute_policy import PLAIN, ComputePolicy, PolicyAware, scale_scalar
from speechtrain.counter_rng import BatchStream, seed_at
from speechtrain.encoders.wav2vec2 import Wav2Vec2Encoder
from speechtrain.errors import ConfigError, require_shares
from speechtrain.losses.contrastive import Contrastive, contrastive_loss, nats_to_bits
from speechtrain.nn.masking import frame_table, frames_at, sample_negatives
from speechtrain.nn.quantizer import GumbelQuantizer, Quantized, code_temperature, gumbel
from speechtrain.task import Alarm, Evaluation, Loss, Sums, Task, detached

# A sign of collapse must last for this number of updates, and for this number of log lines.
_PATIENCE, _MIN_LINES = 100, 3
_NEAR_CHANCE = 0.01  # bits. The loss of a run that learns nothing is within 0.001 bits of chance.


class CollapseWatch:
    """Detects collapsed codebooks, whose codes do not depend on the audio.

    Their contrastive loss is low: with one code for all frames, every negative is excluded, and the accuracy
    is 100 %. These are signs of a collapse:

    - Less than 5 % of a codebook's entries are in use (perplexity).
    - More than 20 % of the negatives have the code of their positive.
    - Less than 10 % of an utterance's codes are distinct.
    - The accuracy is above 97 %.

    An alarm is raised if every log line of 100 updates has a sign. In a healthy run, signs last shorter.

    Every run starts with a contrastive loss of ``chance`` bits. If the loss stays there for
    ``chance_updates`` updates, this is also an alarm. With 0 it is never one.
    """

    def __init__(self, codebooks: int, codes: int, chance: float = 0.0, chance_updates: int = 0) -> None:
        self.codebooks, self.codes = codebooks, codes
        self.chance, self.chance_updates = chance, chance_updates
        self._reset()

    def _reset(self) -> None:
        self._onset: int | None = None  # the step of the first log line with a sign, without a gap since then
        self._sign_lines = 0  # the number of log lines since then
        self._has_alarm = False

    def __call__(self, step: int, means: Mapping[str, float], cause: str) -> Alarm | None:
        """Return an alarm if the log line of ``step`` raises one, only once for a collapse.

        ``means`` are the metrics of the log line. The message of the alarm ends with ``cause``.
        """
        sign, patience = self._sign(means), _PATIENCE
        if not sign and self.chance_updates and means["loss_contrastive"] > self.chance - _NEAR_CHANCE:
            sign = f"the contrastive loss is at chance, {self.chance:.3f} bits"
            patience = self.chance_updates
        if not sign:
            self._reset()
            return None
        if self._onset is None:
            self._onset = step
        self._sign_lines += 1
        if self._has_alarm or self._sign_lines < _MIN_LINES or step - self._onset < patience:
            return None
        self._has_alarm = True
        return Alarm(self._onset, f"the codebooks collapsed at step {step}: {sign}. {cause}")

    def _sign(self, means: Mapping[str, float]) -> str:
        """Return a description of the first sign of a collapse in a log line, or an empty string."""
        for group in range(self.codebooks):
            codes_in_use = means[f"code_perplexity_{group}"]
            if codes_in_use < 0.05 * self.codes:
                return f"only {codes_in_use:.1f} of {self.codes} codes are in use in codebook {group}"
        if means["shared_negatives"] > 0.2:
            return f"{100 * means['shared_negatives']:.0f} % of the negatives have their positive's code"
        if means["distinct_codes"] < 0.1:
            return f"only {100 * means['distinct_codes']:.0f} % of an utterance's codes are distinct"
        if means["accuracy"] > 0.97:
            return f"the accuracy is {100 * means['accuracy']:.1f} %, too high to be real"
        return ""


class Wav2Vec2(Task, PolicyAware):
    """Contrastive pretraining of an encoder on raw audio, without transcripts.

    The weight of the loss is the number N of masked frames in the batch. The loss is the sum of

    - the contrastive cross-entropy, summed over the masked frames,
    - N × ``diversity_weight`` × (1 − perplexity / codes),
    - N × ``penalty_weight`` × the mean square of the extractor's output.

    In a batch, the same number of frames is masked in every row, and the loss gathers its inputs by index. So
    the host reads nothing from the device. With ``fixed_width``, M is the largest possible number of masked
    frames. All shapes then depend only on the shape of the audio, as static devices need.

    ``temperature`` is [start, floor, decay]. The quantiser's temperature after n updates is
    max(start × decay^n, floor). With ``host_noise``, the host draws the Gumbel noise, so that all devices use
    the same noise.
    """

    metric = "loss"

    def __init__(
        self,
        encoder: Wav2Vec2Encoder,
        final_width: int = 256,
        codebooks: int = 2,
        codes: int = 320,
        code_width: int = 256,
        code_init: float = 1.0,
        chance_updates: int = 0,
        temperature: list[float] | None = None,
        negatives: int = 100,
        contrast_temperature: float = 0.1,
        diversity_weight: float = 0.1,
        penalty_weight: float = 10.0,
        target_dropout: float = 0.1,
        fixed_width: bool = False,
        host_noise: bool = False,
    ) -> None:
        super().__init__()
        _check_encoder(encoder)
        if negatives < 1 or contrast_temperature <= 0:
            raise ConfigError("negatives must be at least 1, and contrast_temperature above 0")
        require_shares(target_dropout=target_dropout)
        self.encoder = encoder
        self.sample_rate, self.normalise_audio = encoder.sample_rate, encoder.normalise_audio
        self.quantizer = GumbelQuantizer(
            encoder.extractor.channels, code_width, codebooks, entries=codes, init_std=code_init
        )
        self.project_q = nn.Linear(code_width, final_width)
        self.final_proj = nn.Linear(encoder.width, final_width)
        self.target_dropout = target_dropout
        self.temperature = _temperature_schedule(temperature or [2.0, 0.5, 0.999995])
        self.negatives = negatives
        self.contrast_temperature = contrast_temperature
        self.diversity_weight = diversity_weight
        self.penalty_weight = penalty_weight
        self.fixed_width = fixed_width
        self.host_noise = host_noise
        self._step = 0
        self._policy = PLAIN
        chance = math.log2(1 + negatives)
        self._collapse_watch = CollapseWatch(codebooks, codes, chance=chance, chance_updates=chance_updates)

    def apply_policy(self, policy: ComputePolicy) -> None:
        self._policy = policy

    def advance(self, step: int, seed: int) -> None:
        self._step = step
        self.encoder.advance(step, seed)

    def watch(self, step: int, means: Mapping[str, float]) -> Alarm | None:
        start, floor, _ = self.temperature
        cause = "Lower optimizer.lr, or raise model.diversity_weight"
        if start <= floor:
            cause = f"model.temperature starts at its floor of {floor:g}. Set its start to 2"
        elif self.diversity_weight == 0:
            cause = "model.diversity_weight is 0, so nothing keeps the codes in use. Set it to 0.1 to 0.5"
        return self._collapse_watch(step, means, cause)

    def prepare(self, batch: Batch, seed: int) -> Batch:
        seeds = {stream: seed_at(seed, stream) for stream in BatchStream}
        extra = batch.extra | self._mask_tensors(batch, seeds)
        if self.training:
            extra |= self._training_tensors(extra["index"].shape, seeds)
        return replace(batch, extra=extra)

    def _mask_tensors(self, batch: Batch, seeds: Mapping[BatchStream, int]) -> dict[str, Tensor]:
        """Return the random masks and negatives of a batch, by their names in ``Batch.extra``.

        - ``mask`` (B, T) is True for masked frames.
        - ``index`` (B, M) is the table of masked frames, and ``masked`` (B, M) has their weights.
        - ``negatives`` (B, M, K) are entries of the table.
        """
        encoder = self.encoder
        assert encoder.mask is not None
        lengths = [encoder.frames(samples) for samples in batch.audio_lengths.tolist()]
        frames = encoder.frames(batch.audio.shape[1])
        counted = _counted_rows(batch.ids, lengths, encoder.mask.shortest())
        mask = encoder.mask.sample(lengths, frames, seeds[BatchStream.FRAMES], equal=True, counted=counted)
        largest_width = encoder.mask.max_masked_frames(frames)
        table_width = largest_width if self.fixed_width else self._policy.fixed_width(largest_width)
        index, weight = frame_table(mask, table_width)
        row_weight = batch.weight * torch.tensor(counted)
        masked_counts, seed = mask.sum(1).tolist(), seeds[BatchStream.NEGATIVES]
        return {
            "mask": torch.from_numpy(mask),
            "index": index,
            "masked": weight * row_weight[:, None],
            "negatives": sample_negatives(masked_counts, index.shape[1], self.negatives, seed=seed),
        }

    def _training_tensors(
        self, table_shape: torch.Size, seeds: Mapping[BatchStream, int]
    ) -> dict[str, Tensor]:
        """Return the random tensors that only training needs, for tables of ``table_shape`` (B, M).

        All of them are tensors. For Python numbers, a static device would compile the graph in each step.
        """
        encoder = self.encoder
        tensors = {
            "temperature": torch.tensor(code_temperature(self._step, *self.temperature)),
            "keep": encoder.sample_keep(),
        }
        if encoder.channel_mask is not None:
            widths = [encoder.width] * table_shape[0]
            channel_mask = encoder.channel_mask.sample(widths, encoder.width, seeds[BatchStream.CHANNELS])
            tensors["channel_mask"] = torch.from_numpy(channel_mask)
        if self.host_noise:
            generator = torch.Generator().manual_seed(seeds[BatchStream.NOISE])
            noise_shape = (*table_shape, self.quantizer.groups, self.quantizer.entries)
            tensors["noise"] = gumbel(torch.rand(noise_shape, generator=generator))
        return tensors

    def forward(self, batch: Batch) -> Loss:
        extra = batch.extra
        features, lengths, penalty = self.encoder.extract(batch.audio, batch.audio_lengths)
        temperature = extra.get("temperature", torch.ones_like(penalty))  # Evaluation does not use it.
        contrastive, quantized = self._contrast(features, lengths, temperature, extra)
        count = contrastive.frames  # N
        diversity = scale_scalar(quantized.diversity(), self.diversity_weight) * count
        feature_penalty = scale_scalar(penalty, self.penalty_weight) * count
        total = contrastive.loss + diversity + feature_penalty
        metrics: Sums = {
            "loss_bits": (nats_to_bits(total), count),
            "loss_contrastive": (nats_to_bits(contrastive.loss), count),
            "loss_diversity": (nats_to_bits(diversity), count),
            "loss_penalty": (nats_to_bits(feature_penalty), count),
            **self._negatives_metrics(contrastive),
            "masked_share": (count, (lengths * batch.weight).sum()),
            **_codebook_metrics(quantized, temperature, count),
        }
        return Loss(total, count, detached(metrics))

    def _contrast(
        self, features: Tensor, lengths: Tensor, temperature: Tensor, extra: Mapping[str, Tensor]
    ) -> tuple[Contrastive, Quantized]:
        """Return the contrastive sums, and the codes of the masked ``features`` (B, T, C), which are targets.

        ``temperature`` is (), and ``extra`` is ``Batch.extra``.
        """
        context = self.encoder.contextualise(
            features, lengths, extra["mask"], channel_mask=extra.get("channel_mask"), keep=extra.get("keep")
        )
        index, weight = extra["index"], extra["masked"]
        # The masked frames, which are about half of all, are gathered first, to save dropout and projection.
        targets = F.dropout(frames_at(features, index), self.target_dropout, self.training)
        quantized = self.quantizer(targets, temperature, weight, extra.get("noise"))
        contrastive = contrastive_loss(
            self.final_proj(frames_at(context, index)),
            self.project_q(quantized.codes),
            quantized.ids,
            negatives=extra["negatives"],
            weight=weight,
            temperature=self.contrast_temperature,
        )
        return contrastive, quantized

    def _negatives_metrics(self, contrastive: Contrastive) -> Sums:
        """Return metrics of the comparison of codes with their negatives."""
        count = contrastive.frames
        return {
            "accuracy": (contrastive.correct, count),
            "shared_negatives": (contrastive.shared, scale_scalar(count, self.negatives)),
            "distinct_codes": (contrastive.distinct, count),
        }

    def evaluate(self, batch: Batch, decoder: Any) -> Evaluation:
        loss = self(batch)
        metrics = {"loss": (loss.total, loss.weight), **loss.metrics}
        del metrics["temperature"]
        return Evaluation(metrics)

    def footprint(self) -> Footprint:
        """Return the memory of the encoder.

        The memory of the scores is not included, because it grows with the square of a row's masked frames.
        """
        return Footprint(self.encoder.activation_bytes())


def _check_encoder(encoder: object) -> None:
    """Raise ConfigError for an encoder that cannot be pretrained."""
    if not isinstance(encoder, Wav2Vec2Encoder):
        raise ConfigError(
            f"model=wav2vec2 cannot pretrain {type(encoder).__name__}. Use encoder=wav2vec2, "
            "wav2vec2_large or wav2vec2_small"
        )
    if encoder.mask is None:
        raise ConfigError("encoder.mask is null. model=wav2vec2 needs it for its loss on masked frames")


def _counted_rows(ids: Sequence[str], lengths: Sequence[int], shortest: int) -> list[bool]:
    """Return whether each row counts in the loss.

    A padding row, which has an empty id, does not count, and neither does a row of fewer than ``shortest``
    frames.
    """
    return [bool(row_id) and length >= shortest for row_id, length in zip(ids, lengths, strict=True)]


def _temperature_schedule(temperature: Sequence[float]) -> tuple[float, float, float]:
    """Return start, floor and decay of the quantiser's temperature. Raises ConfigError for other values."""
    start, floor, decay = temperature
    if not (start >= floor > 0 and 0 < decay <= 1):
        raise ConfigError(
            f"temperature is {temperature}. It must be [start, floor, decay], start >= floor > 0 "
            "and 0 < decay <= 1"
        )
    return float(start), float(floor), float(decay)


def _codebook_metrics(quantized: Quantized, temperature: Tensor, count: Tensor) -> Sums:
    """Return the perplexities of all codebooks together and of each, and the quantiser's temperature.

    ``count`` () is the number of masked frames.
    """
    has_codes = (count > 0).to(count.dtype)  # A batch with only padding rows does not have codes.
    code_perplexity = quantized.code_perplexity() * has_codes
    prob_perplexity = quantized.prob_perplexity() * has_codes
    metrics: Sums = {
        "prob_perplexity": (prob_perplexity.sum(), has_codes),
        "code_perplexity": (code_perplexity.sum(), has_codes),
        "temperature": (temperature, torch.ones_like(count)),
    }
    for group in range(len(code_perplexity)):
        metrics[f"code_perplexity_{group}"] = (code_perplexity[group], has_codes)
    return metrics

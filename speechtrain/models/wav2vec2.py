"""wav2vec 2.0 pretraining (Baevski et al., 2020): find the code of a masked frame among codes of its row.

Legend: B rows, T frames, M masked frames of a row, K negatives, C extractor channels, D width, G codebooks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speechtrain.batch import Batch, Footprint
from speechtrain.compute_policy import ComputePolicy, PolicyAware, scale_scalar
from speechtrain.counter_rng import BatchStream, seed_at
from speechtrain.encoders.wav2vec2 import Wav2Vec2Encoder
from speechtrain.errors import ConfigError, require_shares
from speechtrain.losses.contrastive import Contrastive, contrastive_loss, nats_to_bits
from speechtrain.nn.masking import draw_negatives, frame_table
from speechtrain.nn.quantizer import GumbelQuantizer, Quantized, code_temperature, gumbel
from speechtrain.task import Alarm, Evaluation, Loss, Sums, Task

_PATIENCE = 100  # updates
_MIN_LINES = 3  # log lines
_NEAR_CHANCE = 0.01  # bits. The loss of a run that learns nothing is within 0.001 bits of chance.


class CollapseWatch:
    """Detects collapsed codebooks, which carry no information but have a low contrastive loss.

    With one code for all frames, every negative is excluded and the accuracy is 100 %. These are signs:

    - Less than 5 % of a codebook's entries are in use (perplexity).
    - More than 20 % of the negatives have the code of their positive.
    - Less than 10 % of an utterance's codes are distinct.
    - The accuracy is above 97 %.

    A sign in every log line of 100 updates raises the alarm. A dip of a healthy run is shorter. Every run
    starts with a contrastive loss of ``chance`` bits. A loss that stays there for ``chance_updates`` updates
    (0: never) also raises the alarm.
    """

    def __init__(self, codebooks: int, codes: int, chance: float = 0.0, chance_updates: int = 0) -> None:
        self.codebooks, self.codes = codebooks, codes
        self.chance, self.chance_updates = chance, chance_updates
        self._reset()

    def _reset(self) -> None:
        self._onset: int | None = None
        self._sign_lines = 0
        self._has_alarm = False

    def __call__(self, step: int, means: Mapping[str, float], cause: str) -> Alarm | None:
        """Return the alarm of the log line of ``step``, once per collapse. ``cause`` ends its message."""
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
        """Describe the first sign of a collapse in the metrics of a log line, or return an empty text."""
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

    Every row of a batch masks the same number of frames, and the loss gathers its inputs by index. A step
    therefore has no data-dependent shape, and the host reads nothing back. With ``fixed_width``, the index
    tables are as wide as the longest mask that the frames allow, and surplus entries have weight 0. All
    shapes then depend only on the shape of the audio, as static devices need.

    The weight of the loss is the number N of masked frames in the batch. The loss is the sum of

    - the contrastive cross-entropy, summed over the masked frames,
    - N × ``diversity_weight`` × (1 − perplexity / codes),
    - N × ``penalty_weight`` × the mean square of the extractor's output.

    The quantiser's temperature after n updates is
    max(``temperature[0]`` × ``temperature[2]``^n, ``temperature[1]``). ``host_noise`` draws the Gumbel noise
    on the host, so that all devices use the same noise.
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
        self._collapse = CollapseWatch(
            codebooks, codes, chance=math.log2(1 + negatives), chance_updates=chance_updates
        )

    def apply_policy(self, policy: ComputePolicy) -> None:
        self.fixed_width = self.fixed_width or policy.static_shapes

    def advance(self, step: int, seed: int) -> None:
        self._step = step
        self.encoder.advance(step, seed)

    def watch(self, step: int, means: Mapping[str, float]) -> Alarm | None:
        cause = "Lower optimizer.lr, or raise model.diversity_weight"
        if self.temperature[0] <= self.temperature[1]:
            cause = f"model.temperature starts at its floor of {self.temperature[1]:g}. Set its start to 2"
        elif self.diversity_weight == 0:
            cause = "model.diversity_weight is 0, so nothing keeps the codes in use. Set it to 0.1 to 0.5"
        return self._collapse(step, means, cause)

    def prepare(self, batch: Batch, seed: int) -> Batch:
        seeds = {stream: seed_at(seed, stream) for stream in BatchStream}
        extra = batch.extra | self._mask_draws(batch, seeds)
        if self.training:
            extra |= self._training_draws(extra["index"].shape, seeds)
        return replace(batch, extra=extra)

    def _mask_draws(self, batch: Batch, seeds: Mapping[BatchStream, int]) -> dict[str, Tensor]:
        """Return the mask (B, T), and index, weight (B, M) and negatives (B, M, K) of the masked frames."""
        encoder = self.encoder
        assert encoder.mask is not None
        lengths = [encoder.frames(samples) for samples in batch.audio_lengths.tolist()]
        width = encoder.frames(batch.audio.shape[1])
        counted = _counted_rows(batch.ids, lengths, encoder.mask.shortest())
        mask = encoder.mask.draw(lengths, width, seeds[BatchStream.FRAMES], equal=True, counted=counted)
        table_width = encoder.mask.max_masked_frames(width) if self.fixed_width else None
        index, weight = frame_table(mask, table_width)
        row_weight = batch.weight * torch.tensor(counted)
        seed = seeds[BatchStream.NEGATIVES]
        return {
            "mask": torch.from_numpy(mask),
            "index": index,
            "masked": weight * row_weight[:, None],
            "negatives": draw_negatives(mask.sum(1).tolist(), index.shape[1], self.negatives, seed=seed),
        }

    def _training_draws(self, table_shape: torch.Size, seeds: Mapping[BatchStream, int]) -> dict[str, Tensor]:
        """Return the draws that only training needs, for index tables of shape (B, M).

        All are tensors and none is a Python number, so that a static device compiles once.
        """
        encoder = self.encoder
        draws = {
            "temperature": torch.tensor(code_temperature(self._step, *self.temperature)),
            "keep": encoder.draw_keep(),
        }
        if encoder.channel_mask is not None:
            widths = [encoder.width] * table_shape[0]
            channel_mask = encoder.channel_mask.draw(widths, encoder.width, seeds[BatchStream.CHANNELS])
            draws["channel_mask"] = torch.from_numpy(channel_mask)
        if self.host_noise:
            generator = torch.Generator().manual_seed(seeds[BatchStream.NOISE])
            noise_shape = (*table_shape, self.quantizer.groups, self.quantizer.entries)
            draws["noise"] = gumbel(torch.rand(noise_shape, generator=generator))
        return draws

    def forward(self, batch: Batch) -> Loss:
        extra = batch.extra
        features, lengths, penalty = self.encoder.extract(batch.audio, batch.audio_lengths)
        temperature = extra.get("temperature", torch.ones_like(penalty))  # Evaluation ignores it.
        contrastive, quantized = self._contrast(features, lengths, temperature, extra)
        count = contrastive.frames
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
        return Loss(total, count, _detached(metrics))

    def _contrast(
        self, features: Tensor, lengths: Tensor, temperature: Tensor, extra: Mapping[str, Tensor]
    ) -> tuple[Contrastive, Quantized]:
        """Quantise the masked ``features`` (B, T, C), and find their codes from the frames around them."""
        context = self.encoder.contextualise(
            features, lengths, extra["mask"], channel_mask=extra.get("channel_mask"), keep=extra.get("keep")
        )
        index, weight = extra["index"], extra["masked"]
        # Only masked frames are gathered, so dropout and projection cost half as much as on all frames.
        targets = F.dropout(_gather_frames(features, index), self.target_dropout, self.training)
        quantized = self.quantizer(targets, temperature, weight, extra.get("noise"))
        contrastive = contrastive_loss(
            self.final_proj(_gather_frames(context, index)),
            self.project_q(quantized.codes),
            quantized.ids,
            negatives=extra["negatives"],
            weight=weight,
            temperature=self.contrast_temperature,
        )
        return contrastive, quantized

    def _negatives_metrics(self, contrastive: Contrastive) -> Sums:
        """Return how well the codes differ from their negatives and are found among them."""
        count = contrastive.frames
        return {
            "accuracy": (contrastive.correct, count),
            "shared_negatives": (contrastive.shared, scale_scalar(count, self.negatives)),
            "distinct_codes": (contrastive.distinct, count),
        }

    def evaluate(self, batch: Batch) -> Evaluation:
        loss = self(batch)
        metrics = {"loss": (loss.total, loss.weight), **loss.metrics}
        del metrics["temperature"]
        return Evaluation(metrics)

    def footprint(self) -> Footprint:
        """Predict the memory of the encoder only.

        The memory of scores and negatives grows with the square of a row's masked frames.
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
    """Return which rows count. A row of fewer than ``shortest`` frames does not, like a padding row."""
    return [bool(name) and length >= shortest for name, length in zip(ids, lengths, strict=True)]


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
    """Return the use of the codebooks, together and each, and the quantiser's temperature."""
    has_codes = (count > 0).to(count.dtype)  # A batch with only padding rows has no codes.
    code = quantized.code_perplexity() * has_codes
    prob = quantized.prob_perplexity() * has_codes
    metrics: Sums = {
        "prob_perplexity": (prob.sum(), has_codes),
        "code_perplexity": (code.sum(), has_codes),
        "temperature": (temperature, torch.ones_like(count)),
    }
    for group in range(len(code)):
        metrics[f"code_perplexity_{group}"] = (code[group], has_codes)
    return metrics


def _detached(metrics: Sums) -> Sums:
    """Return the metrics without gradients."""
    detached_metrics: Sums = {}
    for name, (total, count) in metrics.items():
        detached_metrics[name] = (total.detach(), count.detach())
    return detached_metrics


def _gather_frames(frames: Tensor, index: Tensor) -> Tensor:
    """Gather frames (B, T, X) at ``index`` (B, M) to (B, M, X)."""
    return frames.gather(1, index[:, :, None].expand(-1, -1, frames.shape[2]))

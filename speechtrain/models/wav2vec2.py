"""wav2vec 2.0 pretraining (Baevski et al., 2020): find a masked frame's code among others of its row.

Legend: B rows, T frames, M masked frames of a row, K negatives, C extractor channels, D width, G codebooks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speechtrain.batch import Batch, Footprint
from speechtrain.compute_policy import ComputePolicy, PolicyAware, scaled
from speechtrain.counter_rng import BatchStream, seed_at
from speechtrain.encoders.wav2vec2 import Wav2Vec2Encoder
from speechtrain.errors import ConfigError
from speechtrain.losses.contrastive import bits, contrastive_loss
from speechtrain.nn.masking import draw_negatives, frame_table
from speechtrain.nn.quantizer import GumbelQuantizer, code_temperature, gumbel
from speechtrain.task import Alarm, Evaluation, Loss, Sums, Task

_PATIENCE = 100  # updates
_NEAR_CHANCE = 0.01  # bits; a run that learns nothing is within 0.001 of chance


class CollapseWatch:
    """Detects collapsed codebooks, which carry no information but have a low contrastive loss.

    With one code for all frames, every negative is excluded and the accuracy is 100 %. The signs are: less
    than 5 % of a codebook's entries in use (perplexity); more than 20 % of the negatives with their
    positive's code; less than 10 % of an utterance's codes distinct; accuracy above 97 %. A sign in every
    log line of 100 updates raises the alarm, so a dip of a healthy run does not. A loss at
    ``chance`` bits, where every run starts, raises it after ``chance_updates`` updates (0: never).
    """

    def __init__(self, codebooks: int, codes: int, chance: float = 0.0, chance_updates: int = 0) -> None:
        self.codebooks, self.codes = codebooks, codes
        self.chance, self.chance_updates = chance, chance_updates
        self._onset: int | None = None
        self._lines, self._is_told = 0, False

    def __call__(self, step: int, means: Mapping[str, float], cause: str) -> Alarm | None:
        """Return the alarm of the log line of ``step``, once per collapse; ``cause`` ends its message."""
        sign, patience = self._sign(means), _PATIENCE
        if not sign and self.chance_updates and means["loss_contrastive"] > self.chance - _NEAR_CHANCE:
            sign = f"the contrastive loss is at chance, {self.chance:.3f} bits"
            patience = self.chance_updates
        if not sign:
            self._onset, self._lines, self._is_told = None, 0, False
            return None
        self._onset = step if self._onset is None else self._onset
        self._lines += 1
        if self._is_told or self._lines < 3 or step - self._onset < patience:
            return None
        self._is_told = True
        return Alarm(self._onset, f"the codebooks collapsed at step {step}: {sign}; {cause}")

    def _sign(self, means: Mapping[str, float]) -> str:
        for group in range(self.codebooks):
            in_use = means[f"code_perplexity_{group}"]
            if in_use < 0.05 * self.codes:
                return f"only {in_use:.1f} of {self.codes} codes are in use in codebook {group}"
        if means["shared_negatives"] > 0.2:
            return f"{100 * means['shared_negatives']:.0f} % of the negatives have their positive's code"
        if means["distinct_codes"] < 0.1:
            return f"only {100 * means['distinct_codes']:.0f} % of an utterance's codes are distinct"
        if means["accuracy"] > 0.97:
            return f"the accuracy is {100 * means['accuracy']:.1f} %, too high to be real"
        return ""


class Wav2Vec2(Task, PolicyAware):
    """Contrastive pretraining of an encoder on raw audio, without transcripts.

    Every row of a batch masks the same number of frames, and the loss gathers its inputs by index, so a
    step has no data-dependent shape and the host reads nothing back. With ``fixed_width``, the index
    tables are as wide as the longest mask that the frames allow, and surplus entries have weight 0: all
    shapes then depend on the audio's shape only, as static devices need.

    The loss of a batch with N masked frames is the contrastive cross-entropy summed over them, plus
    N × ``diversity_weight`` × (1 − perplexity / codes), plus N × ``penalty_weight`` × the mean square of
    the extractor's output; its weight is N. The quantiser's temperature after n updates is
    max(``temperature[0]`` × ``temperature[2]``^n, ``temperature[1]``). ``host_noise`` draws the Gumbel
    noise on the host, so that all devices use the same noise.
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
        if not isinstance(encoder, Wav2Vec2Encoder):
            raise ConfigError(
                f"model=wav2vec2 cannot pretrain {type(encoder).__name__}; use encoder=wav2vec2, "
                "wav2vec2_large or wav2vec2_small"
            )
        if encoder.mask is None:
            raise ConfigError("encoder.mask is null; model=wav2vec2 needs it for its loss on masked frames")
        start, floor, decay = temperature or (2.0, 0.5, 0.999995)
        if not (start >= floor > 0 and 0 < decay <= 1):
            raise ConfigError(
                f"temperature is {temperature}; it must be [start, floor, decay], start >= floor > 0 "
                "and 0 < decay <= 1"
            )
        if negatives < 1 or contrast_temperature <= 0:
            raise ConfigError("negatives must be at least 1, and contrast_temperature above 0")
        if not 0 <= target_dropout < 1:
            raise ConfigError(f"target_dropout is {target_dropout}; it must be from 0 to below 1")
        self.encoder = encoder
        self.sample_rate, self.normalise_audio = encoder.sample_rate, encoder.normalise_audio
        self.quantizer = GumbelQuantizer(
            encoder.extractor.channels, code_width, codebooks, entries=codes, init_std=code_init
        )
        self.project_q = nn.Linear(code_width, final_width)
        self.final_proj = nn.Linear(encoder.width, final_width)
        self.target_dropout = target_dropout
        self.temperature = (float(start), float(floor), float(decay))
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
        cause = "lower optimizer.lr, or raise model.diversity_weight"
        if self.temperature[0] <= self.temperature[1]:
            cause = f"model.temperature starts at its floor of {self.temperature[1]:g}; set its start to 2"
        elif self.diversity_weight == 0:
            cause = "model.diversity_weight is 0, so nothing keeps the codes in use; set it to 0.1 to 0.5"
        return self._collapse(step, means, cause)

    def prepare(self, batch: Batch, seed: int) -> Batch:
        encoder = self.encoder
        assert encoder.mask is not None
        lengths = [encoder.frames(samples) for samples in batch.audio_lengths.tolist()]
        width = encoder.frames(batch.audio.shape[1])
        # a row too short for an unmasked frame has weight 0, as a padding row has
        shortest = encoder.mask.shortest()
        counted = [bool(name) and n >= shortest for name, n in zip(batch.ids, lengths, strict=True)]
        seeds = {stream: seed_at(seed, stream) for stream in BatchStream}
        mask = encoder.mask.draw(lengths, width, seeds[BatchStream.FRAMES], equal=True, counted=counted)
        index, weight = frame_table(mask, encoder.mask.most(width) if self.fixed_width else None)
        counts, entries = mask.sum(1).tolist(), index.shape[1]
        extra = {
            "mask": torch.from_numpy(mask),
            "index": index,
            "masked": weight * (batch.weight * torch.tensor(counted))[:, None],
            "negatives": draw_negatives(counts, entries, self.negatives, seed=seeds[BatchStream.NEGATIVES]),
        }
        if self.training:
            # every draw is a tensor, none a Python number, so a static device compiles once
            extra["temperature"] = torch.tensor(code_temperature(self._step, *self.temperature))
            extra["keep"] = encoder.draw_keep()
            if encoder.channel_mask is not None:
                rows = [encoder.width] * len(lengths)
                channels = encoder.channel_mask.draw(rows, encoder.width, seeds[BatchStream.CHANNELS])
                extra["channel_mask"] = torch.from_numpy(channels)
            if self.host_noise:
                generator = torch.Generator().manual_seed(seeds[BatchStream.NOISE])
                shape = (*index.shape, self.quantizer.groups, self.quantizer.entries)
                extra["noise"] = gumbel(torch.rand(shape, generator=generator))
        return replace(batch, extra={**batch.extra, **extra})

    def forward(self, batch: Batch) -> Loss:
        extra = batch.extra
        features, lengths, penalty = self.encoder.extract(batch.audio, batch.audio_lengths)
        context = self.encoder.contextualise(
            features, lengths, extra["mask"], channel_mask=extra.get("channel_mask"), keep=extra.get("keep")
        )
        index, weight = extra["index"], extra["masked"]
        # gathered before dropout and projection, which then cost half as much as on all frames
        unmasked = F.dropout(_gathered(features, index), self.target_dropout, self.training)
        temperature = extra.get("temperature", torch.ones_like(penalty))  # evaluation ignores it
        quantized = self.quantizer(unmasked, temperature, weight, extra.get("noise"))
        contrastive = contrastive_loss(
            self.final_proj(_gathered(context, index)),
            self.project_q(quantized.codes),
            quantized.ids,
            negatives=extra["negatives"],
            weight=weight,
            temperature=self.contrast_temperature,
        )
        count = contrastive.frames
        diversity = scaled(quantized.diversity(), self.diversity_weight) * count
        pressure = scaled(penalty, self.penalty_weight) * count
        total = contrastive.loss + diversity + pressure
        one = (count > 0).to(count.dtype)  # a batch of padding rows only has no codes
        code, prob = quantized.code_perplexity() * one, quantized.prob_perplexity() * one
        parts: Sums = {
            "loss_bits": (bits(total), count),
            "loss_contrastive": (bits(contrastive.loss), count),
            "loss_diversity": (bits(diversity), count),
            "loss_penalty": (bits(pressure), count),
            "accuracy": (contrastive.correct, count),
            "shared_negatives": (contrastive.shared, scaled(count, self.negatives)),
            "distinct_codes": (contrastive.distinct, count),
            "masked_share": (count, (lengths * batch.weight).sum()),
            "prob_perplexity": (prob.sum(), one),
            "code_perplexity": (code.sum(), one),
            "temperature": (temperature, torch.ones_like(count)),
            **{f"code_perplexity_{group}": (code[group], one) for group in range(len(code))},
        }
        return Loss(total, count, {name: (a.detach(), b.detach()) for name, (a, b) in parts.items()})

    def evaluate(self, batch: Batch) -> Evaluation:
        loss = self(batch)
        pairs = {"loss": (loss.total, loss.weight), **loss.metrics}
        del pairs["temperature"]
        return Evaluation(pairs)

    def footprint(self) -> Footprint:
        """The encoder's memory only; scores and negatives grow with the square of a row's masked frames."""
        return Footprint(self.encoder.activation_bytes())


def _gathered(frames: Tensor, index: Tensor) -> Tensor:
    """Gather frames (B, T, X) at ``index`` (B, M) to (B, M, X)."""
    return frames.gather(1, index[:, :, None].expand(-1, -1, frames.shape[2]))

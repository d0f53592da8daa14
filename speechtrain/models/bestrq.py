"""BEST-RQ pretraining (Chiu et al., 2022): classify masked frames by the codes of a random quantiser.

Legend: B rows, C log-mel columns, T frames, k columns of a frame, F features of a column, M masked frames of
a row. ``masking.py`` explains tables (B, M).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speechtrain.batch import Batch, Footprint
from speechtrain.compute_policy import PLAIN, ComputePolicy, PolicyAware
from speechtrain.counter_rng import BatchStream, seed_at
from speechtrain.encoders.base import LogMelEncoder
from speechtrain.errors import ConfigError, require_least
from speechtrain.nn.full_precision import at_least_fp32, full_precision
from speechtrain.nn.masking import SpanMask, frame_table, frames_at
from speechtrain.nn.quantizer import perplexity
from speechtrain.nn.stack_time import stack_time
from speechtrain.task import Evaluation, Loss, Sums, Task, detached


class RandomQuantizer(nn.Module):
    """Maps vectors (…, ``input_width``) to the nearest of ``codes`` random codes. Nothing of it is trained.

    A random matrix (Xavier) projects a vector to ``width`` values. Its code is the one of the smallest
    distance, after both have been divided by their norms.
    """

    projection: Tensor
    codebook: Tensor

    def __init__(self, input_width: int, codes: int, width: int) -> None:
        super().__init__()
        self.register_buffer("projection", nn.init.xavier_uniform_(torch.empty(input_width, width)))
        self.register_buffer("codebook", F.normalize(torch.randn(codes, width), dim=1))

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        """Return the codes (…) int64 of vectors (…, ``input_width``)."""
        with full_precision(x.device):
            # Of vectors of length 1, the nearest one has the largest product. The length of ``x`` does not
            # change which one this is.
            products = torch.matmul(torch.matmul(at_least_fp32(x), self.projection), self.codebook.t())
            return products.argmax(-1)


class BestRQ(Task, PolicyAware):
    """Pretraining of any encoder on log-mel features, without transcripts.

    The features of a frame's columns decide its code. ``mask`` draws spans of frames. The columns of masked
    frames are replaced by normal noise of deviation ``noise``, which is 0 in evaluation, and a linear
    layer classifies the codes of these frames. The loss is the summed cross-entropy of the masked frames, and
    its weight is their number.

    ``codes`` is the number of codes, and ``code_width`` the width in which a code is chosen.

    Raises ConfigError for an encoder without log-mel features, or whose features are not normalised, since
    nearly all frames then have the same code.
    """

    metric = "loss"

    def __init__(
        self,
        encoder: LogMelEncoder,
        mask: SpanMask,
        codes: int = 8192,
        code_width: int = 16,
        noise: float = 0.1,
    ) -> None:
        super().__init__()
        _check_encoder(encoder)
        require_least(2, codes=codes)
        require_least(1, code_width=code_width)
        require_least(0, noise=noise)
        self.encoder, self.mask, self.noise = encoder, mask, noise
        self.sample_rate, self.normalise_audio = encoder.sample_rate, encoder.normalise_audio
        self.skips_parameters = encoder.skips_parameters
        self.columns = round(encoder.frame_seconds / encoder.features.frame_seconds)  # k
        self.quantizer = RandomQuantizer(self.columns * encoder.features.features, codes, code_width)
        self.output = nn.Linear(encoder.width, codes)
        self._policy = PLAIN

    def apply_policy(self, policy: ComputePolicy) -> None:
        self._policy = policy

    def advance(self, step: int, seed: int) -> None:
        self.encoder.advance(step, seed)

    def prepare(self, batch: Batch, seed: int) -> Batch:
        """Add the random masks: ``mask`` (B, T), the table ``index`` (B, M), and its weights ``masked``."""
        encoder, batch = self.encoder, self.encoder.prepare(batch, seed)
        lengths = [encoder.frames(samples) for samples in batch.audio_lengths.tolist()]
        counted = [length >= self.mask.shortest() for length in lengths]
        frames = encoder.frames(batch.audio.shape[1])
        frame_seed = seed_at(seed, BatchStream.FRAMES)
        mask = self.mask.sample(lengths, frames, frame_seed, counted=counted)
        width = self._policy.fixed_width(self.mask.max_masked_frames(frames))
        index, weight = frame_table(mask, width)
        row_weight = batch.weight * torch.tensor(counted)
        masks = {"mask": torch.from_numpy(mask), "index": index, "masked": weight * row_weight[:, None]}
        return replace(batch, extra=batch.extra | masks)

    def forward(self, batch: Batch) -> Loss:
        batch = self.encoder.with_features(batch)
        features, mask = batch.extra["features"], batch.extra["mask"]
        index, weight = batch.extra["index"], batch.extra["masked"]
        codes = self.quantizer(frames_at(self._stacked(features, mask.shape[1]), index))
        masked = {"features": self._masked(features, mask)}
        frames, _ = self.encoder(replace(batch, extra=batch.extra | masked))
        logits = at_least_fp32(self.output(frames_at(frames, index)))
        losses = F.cross_entropy(logits.transpose(1, 2), codes, reduction="none")
        total, count = (losses * weight).sum(), weight.sum()
        return Loss(total, count, detached(self._metrics(total, logits, codes, weight)))

    def _stacked(self, features: Tensor, frames: int) -> Tensor:
        """Return the columns of each frame, concatenated: (B, C, F) to (B, ``frames``, k·F)."""
        missing = max(0, frames * self.columns - features.shape[1])  # A causal encoder has one more frame.
        return stack_time(F.pad(features, (0, 0, 0, missing)), self.columns)

    def _masked(self, features: Tensor, mask: Tensor) -> Tensor:
        """Return ``features`` (B, C, F) with noise in the columns of the frames of ``mask`` (B, T)."""
        rows, columns, _ = features.shape
        is_masked = mask.to(features.dtype)[:, :, None].expand(-1, -1, self.columns).reshape(rows, -1)
        is_masked = is_masked[:, :columns, None]
        noise = torch.zeros_like(features)
        if self.training:
            noise = self.noise * torch.randn_like(features)
        return features * (1 - is_masked) + noise * is_masked

    def _metrics(self, total: Tensor, logits: Tensor, codes: Tensor, weight: Tensor) -> Sums:
        """Return the loss in bits, the share of right codes, and the number of codes in use."""
        count = weight.sum()
        is_right = (logits.argmax(2) == codes).to(weight.dtype)
        code = torch.arange(self.output.out_features, device=codes.device)
        uses = ((codes.flatten()[:, None] == code).to(weight.dtype) * weight.flatten()[:, None]).sum(0)
        has_frames = (count > 0).to(count.dtype)
        return {
            "loss_bits": (total / math.log(2), count),
            "accuracy": ((is_right * weight).sum(), count),
            "code_perplexity": (perplexity(uses[None], count)[0] * has_frames, has_frames),
        }

    def evaluate(self, batch: Batch, decoder: Any) -> Evaluation:
        loss = self(batch)
        return Evaluation({"loss": (loss.total, loss.weight), **loss.metrics})

    def footprint(self) -> Footprint:
        return Footprint(self.encoder.activation_bytes())


def _check_encoder(encoder: object) -> None:
    """Raise ConfigError for an encoder that cannot be pretrained."""
    if not isinstance(encoder, LogMelEncoder):
        raise ConfigError(
            f"model=bestrq cannot pretrain {type(encoder).__name__}, which reads no log-mel features. Use "
            "encoder=fastconformer_tiny, or model=wav2vec2 for its own encoder"
        )
    if encoder.features.normalise == "none":
        raise ConfigError("encoder.features.normalise is none. The codes need normalised features: set loud")

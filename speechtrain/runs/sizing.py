"""The table of ``recipe=scratch`` and ``recipe=finetune``: what follows from the data and the time there is.

Frames, the small network and its batch are as measured on four hours of field recordings (decision 12).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Speech:
    """What is known of a training set, and of the time to learn it in."""

    recordings: int
    hours: float
    labels_per_second: float  # of the fast speakers (95 %); a doubled label counts twice, as CTC needs frames
    core_hours: float  # of the plan, over all ranks (Device.equivalent_cores)
    width: int = 0  # of a pretrained Transformer; 0 for another encoder

    @property
    def passes(self) -> float:
        """How often the plan's time suffices to train the small network on the speech."""
        return _SPEED * self.core_hours / max(self.hours, 1e-9)


_SPEED = 40.0  # hours of speech that a core trains the small network on in an hour
# milliseconds between windows, and how many of them are a frame: 80, 60, 40, 30 and 20 ms
_FRAMES = ((10, 8), (15, 4), (10, 4), (15, 2), (10, 2))
_SPARE = 2.0  # frames for each label of fast speech: at 1.8 the loss fell slower, at 1.2 CTC could not align
_CTC = 1.0  # weight of the auxiliary CTC: at 0.3 the encoder was the last to learn, 3 gave no more
# hours of speech and passes from which a network is worth its cost
_NETWORKS: tuple[tuple[float, float, dict[str, Any]], ...] = (
    (
        200.0,
        200.0,
        {"width": 256, "layers": 16, "feed_forward": 1024, "channels": 256, "joint": 512, "lr": 7e-4},
    ),
    (
        20.0,
        75.0,
        {"width": 176, "layers": 16, "feed_forward": 704, "channels": 176, "joint": 384, "lr": 1e-3},
    ),
    (0.0, 0.0, {"width": 128, "layers": 5, "feed_forward": 256, "channels": 32, "joint": 256, "lr": 1.5e-3}),
)
_BATCHES = ((20_000, 32), (1_000, 16), (100, 8), (0, 4))  # recordings, and those of a batch
_SPAN_MASK = "speechtrain.nn.masking.SpanMask"
_PIECES = ((500.0, 1000), (50.0, 300))  # hours, and pieces of SentencePiece; below: characters
_MOST_CHARACTERS = 100  # of an alphabet that pieces may replace
_MASKED_PASSES = 24.0  # SpecAugment costs more than it gives in fewer
_HELD_OUT = (0.05, 0.5, 0.1)  # a share, at most so many hours; the share of fewer than 200 recordings
# of a pretrained Transformer: hours, the share of the updates before it learns, and that of masked frames
_FREEZING = ((10.0, 0.1, 0.65), (1.0, 0.2, 0.5), (0.2, 0.3, 0.25), (0.0, 0.3, 0.0))
_MASKED_CHANNELS = 0.25  # share of the units of a frame, in spans of a twelfth of them
_RATES = ((1024, 3e-5), (512, 1e-4), (1, 1e-3), (0, 5e-4))  # width: a higher rate undoes what was learnt


def pieces(hours: float, characters: int) -> int:
    """The number of SentencePiece's pieces for so much speech; 0: characters are the labels."""
    enough = (size for least, size in _PIECES if hours >= least)
    return next(enough, 0) if characters <= _MOST_CHARACTERS else 0


def frame(labels_per_second: float) -> tuple[int, int]:
    """Milliseconds between windows and ``subsampling`` of the longest frame that fits the labels."""
    fits = (one for one in _FRAMES if _SPARE * labels_per_second * math.prod(one) <= 1000)
    return next(fits, _FRAMES[-1])


def hold_out(speech: Speech) -> float:
    """The share of the recordings that validates."""
    share, hours, small = _HELD_OUT
    return small if speech.recordings < 200 else round(min(share, hours / max(speech.hours, 1e-9)), 4)


def scratch(speech: Speech) -> dict[str, Any]:
    """Keys and values of ``recipe=scratch``."""
    hop, subsampling = frame(speech.labels_per_second)
    rows = (row for hours, passes, row in _NETWORKS if speech.hours >= hours and speech.passes >= passes)
    network = next(rows)
    masks = 2 if speech.passes >= _MASKED_PASSES else 0
    return {
        **{f"encoder.{key}": network[key] for key in ("width", "layers", "feed_forward", "channels")},
        "encoder.features.hop_seconds": hop / 1000,
        "encoder.subsampling": subsampling,
        "model.prediction.hidden": network["joint"],
        "model.joint.hidden": network["joint"],
        "model.ctc_weight": _CTC,
        "optimizer.lr": network["lr"],
        "augment.freq_masks": masks,
        "augment.time_masks": masks,
        "data.batch.count": next(count for least, count in _BATCHES if speech.recordings >= least),
        "data.hold_out": hold_out(speech),
    }


def finetune(speech: Speech) -> dict[str, Any]:
    """Keys and values of ``recipe=finetune``; the masks are those of a pretrained Transformer's encoder."""
    found: dict[str, Any] = {
        "optimizer.lr": next(rate for least, rate in _RATES if speech.width >= least),
        "data.batch.count": next(count for least, count in _BATCHES if speech.recordings >= least),
        "data.hold_out": hold_out(speech),
    }
    if speech.width:
        frozen, masked = next(row[1:] for row in _FREEZING if speech.hours >= row[0])
        found["model.freeze_encoder_steps"] = frozen
        found["encoder.mask"] = _mask(masked, 10)
        found["encoder.channel_mask"] = _mask(_MASKED_CHANNELS if masked else 0.0, max(1, speech.width // 12))
    return found


def _mask(share: float, length: int) -> dict[str, Any] | None:
    return {"_target_": _SPAN_MASK, "probability": share, "length": length} if share else None


TABLES = {"scratch": scratch, "finetune": finetune}

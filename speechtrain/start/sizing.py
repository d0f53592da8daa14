"""The tables of the recipes scratch, streaming and finetune: config keys that follow from data and time.

The lengths of frames, the small network and its batch size were measured on four hours of field recordings
(docs/decisions, number 12).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Speech:
    """The size of a training set, and the time to train on it."""

    recordings: int  # number of recordings
    hours: float  # of speech
    labels_per_second: float  # 95 % of the recordings have fewer. A doubled label needs a blank, which counts
    core_hours: float  # training time in hours, times the cores of all ranks (Device.equivalent_cores)
    width: int = 0  # width of the encoder if it is a pretrained Transformer, else 0
    rank_cores: int = 1  # cores of this host that ranks may divide. 1: there is one rank

    @property
    def epochs(self) -> float:
        """Return the epochs for which the small network can train in the training time."""
        return _SPEED * self.core_hours / max(self.hours, 1e-9)


@dataclass(frozen=True)
class _Network:
    """The size of a network for training from scratch.

    It is worth its cost with at least ``min_hours`` of speech and time for ``min_epochs`` epochs.
    """

    min_hours: float  # of speech
    min_epochs: float  # ``Speech.epochs``
    width: int  # width of the encoder's layers
    layers: int
    feed_forward: int  # units of the hidden layer of a feed-forward module
    channels: int  # channels of the subsampling convolutions
    joint: int  # units of the joint network and of the prediction network
    lr: float  # learning rate
    heads: int = 4  # of attention
    label_dropout: float = 0.0  # fraction of the labels that training hides from the prediction network


@dataclass(frozen=True)
class _Freezing:
    """How a pretrained Transformer is trained on at least ``min_hours`` hours of speech."""

    min_hours: float
    frozen_share: float  # fraction of all updates that pass before the encoder is trained
    masked_share: float  # fraction of the frames that are masked


_SPEED = 60.0  # hours of speech on which one core trains the small network in one hour
# (milliseconds between windows, windows per frame), so frames are 80, 60, 40, 30 and 20 ms apart.
_FRAMES = ((10, 8), (15, 4), (10, 4), (15, 2), (10, 2))
# Frames for each label of fast speech. At 1.8 the loss fell more slowly, at 1.2 CTC could not align.
_FRAMES_PER_LABEL = 2.0
# The look-aheads of a streaming encoder, and how far it looks back.
_LOOK_AHEADS_MS, _HISTORY_MS = (0, 160, 320), 4800
_NETWORKS = (
    _Network(200.0, 300.0, width=256, layers=16, feed_forward=1024, channels=256, joint=512, lr=7e-4),
    _Network(20.0, 112.0, width=176, layers=16, feed_forward=704, channels=176, joint=384, lr=1e-3),
    _Network(
        min_hours=0.0,
        min_epochs=0.0,
        width=128,
        layers=5,
        feed_forward=256,
        channels=16,
        joint=128,
        lr=1.5e-3,
        heads=2,
        label_dropout=0.3,
    ),
)
# Tables for ``_look_up`` have rows of (lower bound of a size, value from this size on), the largest first.
_BATCHES = ((20_000, 32), (1_000, 16), (100, 8), (0, 4))  # recordings of the set, recordings in a batch
_ROWS_OF_RANK = 8  # recordings in a batch of a rank. With 4, each recording takes 1.6 times as long.
_PIECES = ((500.0, 1000), (50.0, 300))  # hours of speech, pieces of SentencePiece
_MAX_CHARACTERS = 100  # A larger alphabet, such as that for Chinese, is not replaced by pieces.
_MIN_MASKED_EPOCHS = 24.0  # In fewer epochs, SpecAugment costs more than it gains.
_HOLD_OUT_SHARE, _HOLD_OUT_HOURS = 0.05, 0.5  # The held-out set is the smaller of the two.
_FEW_RECORDINGS, _HOLD_OUT_OF_FEW = 200, 0.1  # Below 200 recordings, the held-out share is 0.1.
_SPAN_MASK = "speechtrain.nn.masking.SpanMask"
_FREEZING = (
    _Freezing(10.0, frozen_share=0.1, masked_share=0.65),
    _Freezing(1.0, frozen_share=0.2, masked_share=0.5),
    _Freezing(0.2, frozen_share=0.3, masked_share=0.25),
    _Freezing(0.0, frozen_share=0.3, masked_share=0.0),
)
_MASKED_CHANNELS = (
    0.25  # fraction of a frame's channels that are masked, in spans of a twelfth of the channels
)
# Width of the encoder, learning rate. A higher rate destroys the pretrained weights. The row with 0 is for
# encoders that are not pretrained Transformers.
_RATES = ((1024, 3e-5), (512, 1e-4), (1, 1e-3), (0, 5e-4))


def pieces(hours: float, characters: int) -> int:
    """Return the number of SentencePiece's pieces, or 0 if the labels should be characters.

    ``hours`` is the size of the training set, and ``characters`` is the size of its alphabet.
    """
    return int(_look_up(_PIECES, hours)) if characters <= _MAX_CHARACTERS else 0


def frame(labels_per_second: float) -> tuple[int, int]:
    """Return the longest frame that is short enough for the label rate.

    Return the milliseconds between two windows, and ``subsampling``, which is the windows per frame.
    """
    for hop_ms, subsampling in _FRAMES:
        frame_ms = hop_ms * subsampling
        if _FRAMES_PER_LABEL * labels_per_second * frame_ms <= 1000:
            return hop_ms, subsampling
    return _FRAMES[-1]


def hold_out(speech: Speech) -> float:
    """Return the fraction of the recordings that is held out for validation."""
    if speech.recordings < _FEW_RECORDINGS:
        return _HOLD_OUT_OF_FEW
    return round(min(_HOLD_OUT_SHARE, _HOLD_OUT_HOURS / max(speech.hours, 1e-9)), 4)


def scratch(speech: Speech) -> dict[str, Any]:
    """Return the config keys that ``recipe=scratch`` sets, with their values."""
    hop_ms, subsampling = frame(speech.labels_per_second)
    network = _choose_network(speech)
    masks = 2 if speech.epochs >= _MIN_MASKED_EPOCHS else 0
    batch = int(_look_up(_BATCHES, speech.recordings))
    ranks = _choose_ranks(batch, speech.rank_cores)
    return {
        "encoder.width": network.width,
        "encoder.layers": network.layers,
        "encoder.feed_forward": network.feed_forward,
        "encoder.heads": network.heads,
        "encoder.channels": network.channels,
        "encoder.features.hop_seconds": hop_ms / 1000,
        "encoder.subsampling": subsampling,
        "model.prediction.hidden": network.joint,
        "model.prediction.label_dropout": network.label_dropout,
        "model.joint.hidden": network.joint,
        "optimizer.lr": network.lr,
        "augment.freq_masks": masks,
        "augment.time_masks": masks,
        "world_size": ranks,
        "data.batch.ranks": ranks,
        "data.batch.count": batch // ranks,
        "data.hold_out": hold_out(speech),
    }


def streaming(speech: Speech) -> dict[str, Any]:
    """Return the config keys that ``recipe=streaming`` sets, with their values.

    They are those of ``recipe=scratch``, and the contexts of which each micro-batch draws one. The last one
    is the whole recording.
    """
    settings = scratch(speech)
    frame_ms = round(1000 * settings["encoder.features.hop_seconds"]) * settings["encoder.subsampling"]
    contexts: list[list[int] | None] = []
    for look_ahead_ms in _LOOK_AHEADS_MS:
        contexts.append([_HISTORY_MS // frame_ms, look_ahead_ms // frame_ms + 1, 0])
    return {**settings, "encoder.contexts": [*contexts, None]}


def finetune(speech: Speech) -> dict[str, Any]:
    """Return the config keys that ``recipe=finetune`` sets, with their values.

    Only a pretrained Transformer has masks and is frozen at first.
    """
    settings: dict[str, Any] = {
        "optimizer.lr": _look_up(_RATES, speech.width),
        "data.batch.count": _look_up(_BATCHES, speech.recordings),
        "data.hold_out": hold_out(speech),
    }
    if speech.width:
        freezing = next(row for row in _FREEZING if speech.hours >= row.min_hours)
        masked_channels = _MASKED_CHANNELS if freezing.masked_share else 0.0
        settings["model.freeze_encoder_steps"] = freezing.frozen_share
        settings["encoder.mask"] = _mask(freezing.masked_share, 10)
        settings["encoder.channel_mask"] = _mask(masked_channels, max(1, speech.width // 12))
    return settings


def _choose_network(speech: Speech) -> _Network:
    """Return the largest network that is worth its cost."""
    for network in _NETWORKS:
        if speech.hours >= network.min_hours and speech.epochs >= network.min_epochs:
            return network
    return _NETWORKS[-1]


def _choose_ranks(batch: int, cores: int) -> int:
    """Return the number of ranks for ``batch`` recordings in an update, on ``cores`` cores.

    A second thread saves only a quarter of the time of the small network (docs/benchmarks/steps.md).
    """
    ranks = 1
    while 2 * ranks <= cores and batch >= 2 * ranks * _ROWS_OF_RANK:
        ranks *= 2
    return ranks


def _look_up(table: Sequence[tuple[float, float]], size: float) -> float:
    """Return the value of the first row of ``table`` whose lower bound is at most ``size``, else 0."""
    return next((value for bound, value in table if size >= bound), 0)


def _mask(share: float, length: int) -> dict[str, Any] | None:
    """Return the config node of a mask, or None for a share of 0.

    It masks the fraction ``share`` of all frames or channels, in spans of ``length``.
    """
    return {"_target_": _SPAN_MASK, "probability": share, "length": length} if share else None


TABLES = {"scratch": scratch, "streaming": streaming, "finetune": finetune}
"""The function of each value of ``from_data``."""

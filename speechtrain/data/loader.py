"""The loader of planned batches: decodes audio, changes its speed, encodes transcripts and pads rows."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speechtrain.batch import Batch, Skip
from speechtrain.counter_rng import RunStream, bits_at, dither_offset, uniform_at
from speechtrain.data.acoustics import Acoustics
from speechtrain.data.audio import (
    DECODED_SECONDS,
    check_headers,
    files_of,
    first_file,
    read_with_faults,
    standardise,
)
from speechtrain.data.formats.lhotse_cuts import Samples
from speechtrain.data.formats.manifests import Record, seconds_of, text_of
from speechtrain.data.index import Index
from speechtrain.data.planned_lengths import Integers, PlannedLengths, crop_samples, planned_samples
from speechtrain.data.recordings import Unusable
from speechtrain.data.sampler import MicroBatch
from speechtrain.data.speed import change_speed
from speechtrain.data.static_shapes import Shape
from speechtrain.data.voice_activity import is_silent, shorten_pauses
from speechtrain.errors import one_line
from speechtrain.text.vocabulary import Tokenizer

REASONS = {
    "missing": "the file does not exist",
    "empty_file": "the file is empty",
    "unreadable": "the file cannot be decoded",
    "no_samples": "the file has a header but no samples",
    "wrong_length": "its length differs too much from its header or from the manifest",
    "other_length": "its length differs a little from its header or from the manifest, so it is used",
    "unexplained_bytes": "the header does not explain 1 % of the file or more",
    "opposed_channels": "the mean of its channels is much quieter than they are",
    "silent_channel": "one of its channels is silent",
    "no_channel": "it has no channel data.channel",
    "not_finite": "samples are NaN, infinite or far beyond full scale",
    "silent": "no sample differs from the mean by −60 dBFS or more, but the transcript is not empty",
    "too_short": "shorter than data.min_seconds",
    "too_long": "longer than data.max_seconds, or in evaluation data.max_decoded_seconds",
    "empty_transcript": "the transcript is empty, and data.allow_empty is false",
    "unknown_symbol": "the tokenizer cannot encode the transcript",
    "long_transcript": "more labels per second than data.max_labels_per_second",
    "bad_noise": "a recording of augment.noise cannot be read",
    "bad_room": "a recording of augment.rooms cannot be read",
}
"""The explanation of each ``Skip.reason`` for messages."""

_MANY_LABELS = 10_000  # The loss of a transcript with this number of labels needs gigabytes.
_SHORTEST_SECONDS = 0.1  # Shorter rows are padded to this duration, because a front end needs one frame.


@dataclass
class _Row:
    """One row of a batch before padding. The defaults are a padding row."""

    id: str = ""
    samples: Samples = field(default_factory=lambda: np.zeros(0, np.float32))
    labels: list[int] = field(default_factory=list)
    text: str = ""
    weight: float = 0.0  # the weight of the row in the loss
    seconds: float = 0.0  # the duration of the audio, 0 for a padding row
    is_unspoken: bool = False  # whether nobody speaks in a recording of an evaluation set
    # The unusable cut that this padding row replaces, or the faults of this row's cut, noise and room
    skips: Sequence[Skip] = ()


@dataclass(eq=False)
class BatchLoader(ABC):
    """Converts planned micro-batches of one set to batches. Data workers receive it pickled.

    An unusable cut becomes a padding row and a ``Skip``. If the tokenizer reads no text, transcripts are not
    checked. ``channel`` of each recording is read, counted from 0, unless its cut names channels. None is
    their mean. Longer pauses than ``longest_pause`` seconds are shortened, unless it is None. ``normalise``
    gives every recording zero mean and unit variance.
    """

    index: Index
    tokenizer: Tokenizer
    sample_rate: int = 16_000
    max_labels_per_second: float = 50.0
    normalise: bool = False
    channel: int | None = None
    longest_pause: float | None = None

    def __call__(self, micro_batch: MicroBatch) -> Batch:
        """Return the batch of a planned micro-batch. Raises DataError if a manifest has changed."""
        rows = self._rows(micro_batch)
        batch = collate(rows, self.sample_rate, micro_batch.shape)
        skipped = tuple(skip for row in rows for skip in row.skips)
        return replace(batch, epoch=micro_batch.epoch, index=micro_batch.index, skipped=skipped)

    @abstractmethod
    def _rows(self, micro_batch: MicroBatch) -> list[_Row]:
        """Return the row of each cut of a micro-batch."""

    @abstractmethod
    def lengths(self, rows: Integers, with_labels: bool) -> PlannedLengths:
        """Return the lengths of the cuts in ``rows`` of the index, by which their batches are planned.

        Label counts are included only if ``with_labels`` is true and the tokenizer reads text.
        """

    def recordings(self, micro_batch: MicroBatch) -> list[str]:
        """Return the id and the files of each cut of a micro-batch, as text for a message."""
        cuts = [self.index.cut(row) for row in micro_batch.rows.tolist()]
        return [f"{cut['id']!r} ({', '.join(files_of(cut))})" for cut in cuts]

    def _label_counts(self, rows: Integers, with_labels: bool) -> Integers | None:
        """Return the label counts of the cuts in ``rows``, or None if batches do not depend on them."""
        if with_labels and self.tokenizer.reads_text:
            return self.index.labels(self.tokenizer)[rows]
        return None

    def _read(self, cut: Record, max_seconds: float, skips: list[Skip]) -> Samples:
        """Return the samples of a cut, and add its faults to ``skips``. Raises Unusable."""
        samples, faults = read_with_faults(cut, self.sample_rate, max_seconds, self.channel)
        skips += [Skip(cut["id"], fault.reason, fault.detail) for fault in faults]
        return samples

    def _shorten_pauses(self, samples: Samples) -> Samples:
        """Return samples (S,) with short pauses. None are left of a recording without speech."""
        if self.longest_pause is None:
            return samples
        return shorten_pauses(samples, self.sample_rate, self.longest_pause)


@dataclass(eq=False)
class EvaluationLoader(BatchLoader):
    """The loader of an evaluation set, in which every cut with readable audio is used.

    If the transcript of a cut cannot be encoded, or exceeds both ``max_labels_per_second`` and 10,000 labels,
    the row has no labels and weight 0. Such a cut counts in the error rates but not in the loss. So does a
    recording in which nobody speaks, with an empty text. A cut of more than ``max_decoded_seconds`` is
    unusable.
    """

    max_decoded_seconds: float = DECODED_SECONDS

    def lengths(self, rows: Integers, with_labels: bool) -> PlannedLengths:
        # A recording that claims more is not decoded, and must not widen a shape.
        seconds = np.minimum(self.index.seconds[rows], self.max_decoded_seconds)
        return PlannedLengths(seconds, self._label_counts(rows, with_labels), self.sample_rate)

    def _rows(self, micro_batch: MicroBatch) -> list[_Row]:
        rows = []
        for index_row in micro_batch.rows.tolist():
            cut = self.index.cut(index_row)
            text = self.index.text(index_row, self.tokenizer.normalise, cut)
            try:
                row = self._row(cut, text)
            except Unusable as problem:
                # The lengths of other rows do not depend on this one, and a manifest may name any duration.
                row = _Row(skips=[Skip(cut["id"], problem.reason, problem.detail)])
            rows.append(row)
        return rows

    def _row(self, cut: Record, text: str) -> _Row:
        """Return the row of a cut. Raises Unusable."""
        labels: list[int] | None = None
        with suppress(KeyError, ValueError):
            labels = self.tokenizer.encode(text)
        if labels and len(labels) > max(_MANY_LABELS, self.max_labels_per_second * seconds_of(cut)):
            labels = None
        skips: list[Skip] = []
        samples = self._shorten_pauses(self._read(cut, self.max_decoded_seconds, skips))
        is_unspoken = is_silent(samples)
        weight = 0.0 if labels is None or is_unspoken else 1.0
        row = audio_row(cut["id"], samples, self.sample_rate, self.normalise)
        return replace(
            row, labels=labels or [], text=text, weight=weight, is_unspoken=is_unspoken, skips=skips
        )


@dataclass(eq=False)
class TrainingLoader(BatchLoader):
    """The loader of the training set, which changes the speed of recordings and augments them.

    A cut is unusable if it is silent, or if its transcript is empty (unless ``allow_empty``), cannot be
    encoded, or has more than ``max_labels_per_second``.

    After the speed change, ``acoustics`` adds rooms and noise to a recording, at random by the address
    (``seed``, epoch of the set, cut). If one of them cannot be read, the recording is used without it, and
    the batch has a ``Skip``. With ``crop_seconds``, each row is then cropped at a random offset of the same
    address. A batch of a fixed shape is cropped to ``crop_seconds``. Another batch is cropped to its shortest
    row if that is shorter than ``crop_seconds``, so that it needs no padding (as in fairseq's collater
    without padding).

    With ``keeps_decoded``, each recording is decoded once in a process.
    """

    allow_empty: bool = False
    crop_seconds: float | None = None
    seed: int = 0
    acoustics: Acoustics = field(default_factory=Acoustics)
    keeps_decoded: bool = False
    decoded: dict[int, Samples] = field(default_factory=dict)  # by the row in the index

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "decoded": {}}  # A data worker begins without samples.

    def lengths(self, rows: Integers, with_labels: bool) -> PlannedLengths:
        seconds = self.index.seconds[rows]
        labels = self._label_counts(rows, with_labels)
        if labels is not None:
            # A transcript with too many labels is not used, so it must not widen a shape.
            labels = np.where(labels > self.max_labels_per_second * seconds, 0, labels)
        seconds = seconds + np.float32(2 * self.acoustics.silence)
        return PlannedLengths(seconds, labels, self.sample_rate, self.crop_seconds or math.inf)

    def skip_of(self, index_row: int) -> Skip | None:
        """Return the skip of a cut if its transcript or a header shows that it is unusable."""
        cut = self.index.cut(index_row)
        try:
            text = self.index.text(index_row, self.tokenizer.normalise, cut)
            self._labels(cut, text, shape=None)
            check_headers(cut)
        except Unusable as problem:
            return Skip(cut["id"], problem.reason, problem.detail)
        return None

    def _rows(self, micro_batch: MicroBatch) -> list[_Row]:
        index_rows, percents, shape = micro_batch.rows, micro_batch.percents, micro_batch.shape
        lengths = planned_samples(self.index.seconds[index_rows], percents, self.sample_rate)
        keys = self.index.keys[index_rows]
        seeds = bits_at(self.seed, RunStream.ACOUSTICS, micro_batch.set_epochs, keys)
        rows = []
        for index_row, percent, length, seed in zip(
            index_rows.tolist(), percents.tolist(), lengths, seeds.tolist(), strict=True
        ):
            cut = self.index.cut(index_row)
            try:
                row = self._row(index_row, cut, percent, shape, seed)
            except Unusable as problem:
                # Zeros of its planned length replace an unusable cut.
                skip = Skip(cut["id"], problem.reason, problem.detail)
                row = _Row(samples=np.zeros(length, np.float32), skips=[skip])
            rows.append(row)
        if self.crop_seconds is not None:
            self._crop(rows, micro_batch, self.crop_seconds)
        return rows

    def _row(self, index_row: int, cut: Record, percent: int, shape: Shape | None, seed: int) -> _Row:
        """Return the row of a cut with ``percent`` % of its speed. Raises Unusable.

        ``seed`` is for the random numbers of ``acoustics``.
        """
        text = self.index.text(index_row, self.tokenizer.normalise, cut)
        # The labels are checked first. If they are unusable, the audio need not be decoded.
        labels = self._labels(cut, text, shape)
        skips: list[Skip] = []
        samples = self._decoded(index_row, cut, skips)
        if text and is_silent(samples):
            detail = skips[-1].detail if skips else first_file(cut, default=cut["id"])
            raise Unusable("silent", detail)
        samples = self.acoustics.surround(samples, self.sample_rate, seed)
        samples = change_speed(samples, percent, self.sample_rate)
        samples, acoustic_skips = self.acoustics.apply(samples, self.sample_rate, seed)
        row = audio_row(cut["id"], samples, self.sample_rate, self.normalise)
        return replace(row, labels=labels, text=text, skips=[*skips, *acoustic_skips])

    def _decoded(self, index_row: int, cut: Record, skips: list[Skip]) -> Samples:
        """Return the samples of a cut with short pauses, and add its faults to ``skips``. Raises Unusable."""
        if index_row in self.decoded:
            return self.decoded[index_row]
        samples = self._read(cut, math.inf, skips)
        spoken = self._shorten_pauses(samples)
        if len(spoken):  # The transcript of a recording without speech is a better witness than its sound.
            samples = spoken
        if self.keeps_decoded:
            self.decoded[index_row] = samples
        return samples

    def _crop(self, rows: Sequence[_Row], micro_batch: MicroBatch, crop_seconds: float) -> None:
        """Crop the rows of a batch in place, each at a random start (see the class)."""
        crop_length = crop_samples(crop_seconds, self.sample_rate)
        if micro_batch.shape is None:
            # A row that replaces an unusable cut has the planned length, so it does not shorten the crop.
            crop_length = min(crop_length, *(len(row.samples) for row in rows))
        keys = self.index.keys[micro_batch.rows]
        numbers = uniform_at(self.seed, RunStream.CROPS, micro_batch.set_epochs, keys)
        for row, number in zip(rows, numbers.tolist(), strict=True):
            last_start = max(0, len(row.samples) - crop_length)
            start = int(number * (last_start + 1))
            row.samples = row.samples[start : start + crop_length]
            row.seconds = min(row.seconds, crop_length / self.sample_rate)

    def _labels(self, cut: Record, text: str, shape: Shape | None) -> list[int]:
        """Return the labels of a transcript. Raises Unusable for a transcript that is empty or too long.

        In a batch of a fixed shape, the shape also limits the number of labels.
        """
        if not text.strip() and not self.allow_empty and self.tokenizer.reads_text:
            raise Unusable("empty_transcript", f"the manifest has {text_of(cut)!r}")
        try:
            labels = self.tokenizer.encode(text)
        except (KeyError, ValueError) as error:
            raise Unusable("unknown_symbol", one_line(str(error), 300)) from None
        max_labels = self.max_labels_per_second * seconds_of(cut)
        if shape is not None:
            max_labels = min(max_labels, shape.labels)
        if len(labels) > max_labels:
            detail = f"{len(labels)} labels for {seconds_of(cut):.2f} s, at most {max_labels:.0f} are allowed"
            raise Unusable("long_transcript", detail)
        return labels


def check_audio(
    sample_rate: int, channel: int | None, crop_seconds: float | None, tokenizer: Tokenizer
) -> None:
    """Raise ValueError for audio settings that are invalid or do not suit the tokenizer."""
    if sample_rate <= 0:
        raise ValueError(f"sample_rate={sample_rate}: it must be above 0")
    if channel is not None and channel < 0:
        raise ValueError(f"channel={channel}: it must be a number from 0 on, or null for the mean")
    if crop_seconds is not None and crop_seconds <= 0:
        raise ValueError(f"crop_seconds={crop_seconds}: it must be above 0, or null for no cropping")
    if crop_seconds is not None and tokenizer.reads_text:
        raise ValueError(
            f"crop_seconds={crop_seconds}: a part of a recording does not match its transcript. "
            "Use tokenizer=none to train on audio alone, or crop_seconds=null"
        )


def collate(rows: Sequence[_Row], sample_rate: int, shape: Shape | None = None) -> Batch:
    """Return the batch of ``rows``. Its rows are padded to the longest row.

    With ``shape``, they are padded to the length of the shape, and padding rows are added at the end.
    """
    shortest = round(_SHORTEST_SECONDS * sample_rate)
    if shape is None:
        longest = max((len(row.samples) for row in rows), default=0)
        label_counts = [len(row.labels) for row in rows]
        shape = Shape(len(rows), max(shortest, longest), max(label_counts, default=0))
    padding_rows = shape.rows - len(rows)
    # They include the zeros that extend a row to 0.1 s, and all zeros of a padding row, because a front end
    # needs samples in each row.
    lengths = [min(max(shortest, len(row.samples)), shape.samples) for row in rows]
    lengths += [shape.samples] * padding_rows
    rows = [*rows, *(_Row() for _ in range(padding_rows))]
    return Batch(
        audio=_padded([row.samples[: shape.samples] for row in rows], shape.samples, torch.float32),
        audio_lengths=torch.tensor(lengths),
        labels=_padded([row.labels for row in rows], shape.labels, torch.int64),
        label_lengths=torch.tensor([len(row.labels) for row in rows]),
        weight=torch.tensor([row.weight for row in rows]),
        # The front end reads the dither of a row from this position of its table.
        keys=torch.tensor([dither_offset(row.samples) for row in rows]),
        ids=tuple(row.id for row in rows),
        unspoken=tuple(row.is_unspoken for row in rows),
        texts=tuple(row.text for row in rows),
        seconds=sum(row.seconds for row in rows),
    )


def audio_row(name: str, samples: Samples, sample_rate: int, normalise: bool = False) -> _Row:
    """Return a row of the samples (S,) without a transcript, for ``collate``.

    ``normalise`` gives the samples zero mean and unit variance, as in the task's training.
    """
    if normalise:
        samples = standardise(samples)
    return _Row(name, samples, weight=1.0, seconds=len(samples) / sample_rate)


def _padded(sequences: Sequence[Any], width: int, dtype: torch.dtype) -> Tensor:
    """Return the sequences as a tensor (N, width), padded with zeros."""
    padded = torch.zeros(len(sequences), width, dtype=dtype)
    for row, sequence in enumerate(sequences):
        padded[row, : len(sequence)] = torch.as_tensor(sequence, dtype=dtype)
    return padded

"""Loads the batches of planned cuts: decode audio, change speed, encode transcripts, pad."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speechtrain.batch import Batch, Skip
from speechtrain.counter_rng import RunStream, dither_offset, uniform_at
from speechtrain.data.audio import DECODED_SECONDS, files_of, read_cut, standardise
from speechtrain.data.formats.lhotse_cuts import Samples
from speechtrain.data.formats.manifests import Record, seconds_of, text_of
from speechtrain.data.index import Index
from speechtrain.data.planned_lengths import Integers, PlannedLengths, crop_samples, planned_samples
from speechtrain.data.recordings import Unusable
from speechtrain.data.sampler import MicroBatch
from speechtrain.data.speed import change_speed
from speechtrain.data.stage import reading_from
from speechtrain.data.static_shapes import Shape
from speechtrain.errors import DataError, one_line
from speechtrain.text.vocabulary import Tokenizer

REASONS = {
    "missing": "the file does not exist",
    "empty_file": "the file is empty",
    "unreadable": "the file cannot be decoded",
    "no_samples": "the file has a header but no samples",
    "wrong_length": "its length differs from the manifest",
    "not_finite": "samples are NaN, infinite or far beyond full scale",
    "silent": "every sample is zero, but the transcript is not empty",
    "too_short": "shorter than data.min_seconds",
    "too_long": "longer than data.max_seconds, or in evaluation data.max_decoded_seconds",
    "empty_transcript": "the transcript is empty, and data.allow_empty is false",
    "unknown_symbol": "the tokenizer cannot encode the transcript",
    "long_transcript": "more labels per second than data.max_labels_per_second",
}
"""Explanation of each ``Skip.reason``: why a recording is not used."""

_MANY_LABELS = 10_000  # of an evaluation transcript: their losses take gigabytes
_SHORTEST_SECONDS = 0.1  # rows are padded to it: a front end needs at least one frame


@dataclass
class _Row:
    """One row of a batch before padding."""

    id: str = ""
    samples: Samples = field(default_factory=lambda: np.zeros(0, np.float32))
    labels: list[int] = field(default_factory=list)
    text: str = ""
    weight: float = 0.0
    seconds: float = 0.0  # 0 for a padding row


@dataclass(eq=False)
class BatchLoader:
    """Converts planned micro-batches of one set to batches; picklable, so that workers can use it.

    In training, an unusable cut becomes a padding row and a ``Skip``. In an evaluation set
    (``is_evaluation``), unreadable audio is a DataError that names the file, unless ``is_strict`` is false;
    every other cut is kept.
    If its transcript cannot be encoded, or has more than ``max_labels_per_second`` and 10,000 labels, it has
    no labels and weight 0: it counts in the error rates but not in the loss. With a tokenizer that reads
    no text, transcripts are not checked.

    ``normalise`` gives every recording zero mean and unit variance. With ``crop_seconds``, each row is
    then cropped at an offset drawn from (``seed``, epoch, cut): to ``crop_seconds`` if the batch has a
    fixed shape; else to the shortest row, if that is shorter, so that nothing is padded (as in
    fairseq's collater without padding). A copy in the folder ``stage`` is read instead of its recording.
    """

    index: Index
    tokenizer: Tokenizer
    sample_rate: int = 16_000
    max_labels_per_second: float = 50.0
    allow_empty: bool = False
    is_evaluation: bool = False
    normalise: bool = False
    crop_seconds: float | None = None
    seed: int = 0
    max_decoded_seconds: float = DECODED_SECONDS
    is_strict: bool = True
    stage: str = ""

    def __call__(self, planned: MicroBatch) -> Batch:
        """Load one micro-batch. Raises DataError in an evaluation set, or if a manifest has changed."""
        with _one_thread(), reading_from(self.stage):
            return self._load(planned)

    def for_thread(self) -> BatchLoader:
        """Return this loader for another thread: an index has open files, each at one position."""
        return replace(self, index=copy(self.index))

    def lengths(self, rows: Integers, with_labels: bool) -> PlannedLengths:
        """Return the lengths of cuts by which their batches are planned, with label counts if necessary."""
        seconds = self.index.seconds[rows]
        labels = None
        if with_labels and self.tokenizer.reads_text:
            labels = self.index.labels(self.tokenizer)[rows]
            if not self.is_evaluation:
                # A transcript that is too long becomes a padding row, which must not widen a shape.
                labels = np.where(labels > self.max_labels_per_second * seconds, 0, labels)
        return PlannedLengths(seconds, labels, self.sample_rate, self.crop_seconds or math.inf)

    def files(self, planned: MicroBatch) -> Iterator[str]:
        """The paths of a micro-batch's recordings."""
        return (path for row in planned.rows.tolist() for path in files_of(self.index.cut(row)))

    def recordings(self, planned: MicroBatch) -> list[str]:
        """The ids and files of a micro-batch's cuts."""
        cuts = [self.index.cut(int(row)) for row in planned.rows]
        return [f"{cut['id']!r} ({', '.join(files_of(cut))})" for cut in cuts]

    def _load(self, planned: MicroBatch) -> Batch:
        lengths = planned_samples(self.index.seconds[planned.rows], planned.percents, self.sample_rate)
        rows, skipped = [], []
        for row, percent, length in zip(planned.rows, planned.percents, lengths, strict=True):
            cut = self.index.cut(int(row))
            try:
                text = self.index.text(int(row), self.tokenizer.normalise, cut)
                rows.append(self._row(cut, text, int(percent), shape=planned.shape))
            except Unusable as problem:
                if self.is_evaluation and self.is_strict:
                    raise DataError(
                        f"{problem.detail}: {REASONS[problem.reason]} (cut {cut['id']!r} of an evaluation "
                        "set, which is never filtered); repair it or remove it from the manifest"
                    ) from None
                skipped.append(Skip(cut["id"], problem.reason, problem.detail))
                rows.append(_Row(samples=np.zeros(int(length), np.float32)))
        if self.crop_seconds is not None:
            self._crop(rows, planned)
        batch = collate(rows, self.sample_rate, planned.shape)
        return replace(batch, epoch=planned.epoch, index=planned.index, skipped=tuple(skipped))

    def _row(self, cut: Record, text: str, percent: int, *, shape: Shape | None) -> _Row:
        if self.is_evaluation:
            samples = read_cut(cut, self.sample_rate, self.max_decoded_seconds)
            try:
                labels, weight = self.tokenizer.encode(text), 1.0
            except (KeyError, ValueError):
                labels, weight = [], 0.0
            if len(labels) > max(_MANY_LABELS, self.max_labels_per_second * seconds_of(cut)):
                labels, weight = [], 0.0
        else:
            labels, weight = self._labels(cut, text, shape), 1.0  # before the audio, which costs more
            samples = read_cut(cut, self.sample_rate)
            if text and not samples.any():
                raise Unusable("silent", next(iter(files_of(cut)), cut["id"]))
            samples = change_speed(samples, percent, self.sample_rate)
        if self.normalise:
            samples = standardise(samples)
        return _Row(
            cut["id"], samples, labels, text=text, weight=weight, seconds=len(samples) / self.sample_rate
        )

    def _crop(self, rows: Sequence[_Row], planned: MicroBatch) -> None:
        """Crop the rows of a batch; an unusable row counts with its planned length, so shapes are fixed."""
        assert self.crop_seconds is not None
        most = crop_samples(self.crop_seconds, self.sample_rate)
        if planned.shape is None:
            most = min(most, *(len(row.samples) for row in rows))
        draws = uniform_at(self.seed, RunStream.CROPS, planned.passes, self.index.keys[planned.rows])
        for row, draw in zip(rows, draws.tolist(), strict=True):
            start = int(draw * (max(0, len(row.samples) - most) + 1))
            row.samples = row.samples[start : start + most]
            row.seconds = min(row.seconds, most / self.sample_rate)

    def _labels(self, cut: Record, text: str, shape: Shape | None) -> list[int]:
        if not text.strip() and not self.allow_empty and self.tokenizer.reads_text:
            raise Unusable("empty_transcript", f"the manifest has {text_of(cut)!r}")
        try:
            labels = self.tokenizer.encode(text)
        except (KeyError, ValueError) as error:
            raise Unusable("unknown_symbol", one_line(str(error), 300)) from None
        most = self.max_labels_per_second * seconds_of(cut)
        if shape is not None:
            most = min(most, shape.labels)
        if len(labels) > most:
            detail = f"{len(labels)} labels for {seconds_of(cut):.2f} s; {most:.0f} at most"
            raise Unusable("long_transcript", detail)
        return labels


def check_audio(sample_rate: int, crop_seconds: float | None, tokenizer: Tokenizer) -> None:
    """Raise ValueError for audio that no loader can make."""
    if sample_rate <= 0:
        raise ValueError(f"sample_rate={sample_rate}: it must be above 0")
    if crop_seconds is not None and crop_seconds <= 0:
        raise ValueError(f"crop_seconds={crop_seconds}: it must be above 0, or null for no cropping")
    if crop_seconds is not None and tokenizer.reads_text:
        raise ValueError(
            f"crop_seconds={crop_seconds}: a part of a recording does not match its transcript. "
            "Use tokenizer=none to train on audio alone, or crop_seconds=null"
        )


def collate(rows: Sequence[_Row], sample_rate: int, shape: Shape | None = None) -> Batch:
    """Pad rows into a batch: to the longest row, or to ``shape`` with padding rows."""
    shortest = round(_SHORTEST_SECONDS * sample_rate)
    if shape is None:
        longest = max((len(row.samples) for row in rows), default=0)
        most_labels = max((len(row.labels) for row in rows), default=0)
        shape = Shape(len(rows), max(shortest, longest), most_labels)
    padding_rows = shape.rows - len(rows)
    lengths = [min(max(shortest, len(row.samples)), shape.samples) for row in rows]
    lengths += [shape.samples] * padding_rows
    rows = [*rows, *[_Row()] * padding_rows]
    audio = torch.zeros(shape.rows, shape.samples, dtype=torch.float32)
    labels = torch.zeros(shape.rows, shape.labels, dtype=torch.int64)
    for i, row in enumerate(rows):
        samples = torch.from_numpy(row.samples[: shape.samples])
        audio[i, : len(samples)] = samples
        labels[i, : len(row.labels)] = _int64(row.labels)
    return Batch(
        audio=audio,
        audio_lengths=_int64(lengths),
        labels=labels,
        label_lengths=_int64([len(row.labels) for row in rows]),
        weight=torch.tensor([row.weight for row in rows], dtype=torch.float32),
        keys=_int64([dither_offset(row.samples) for row in rows]),
        ids=tuple(row.id for row in rows),
        texts=tuple(row.text for row in rows),
        seconds=sum(row.seconds for row in rows),
    )


def audio_row(name: str, samples: Samples, sample_rate: int, normalise: bool = False) -> _Row:
    """Return samples (S,) as a row without a transcript, for ``collate``.

    ``normalise`` gives it zero mean and unit variance, as in the task's training.
    """
    samples = standardise(samples) if normalise else samples
    return _Row(name, samples, weight=1.0, seconds=len(samples) / sample_rate)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread, as workers do: sums over more threads may round differently."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _int64(values: Sequence[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)

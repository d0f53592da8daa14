"""Recordings to transcribe, each in pieces of a length that the model can process.

A piece ends where its recording is quietest. Memory holds one piece at a time, so an hour needs the memory of
a minute. Pieces do not depend on the other recordings of a batch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from speechtrain.data.audio import check_seconds, files_of, read_cut, read_file
from speechtrain.data.formats.folder import AUDIO_SUFFIXES
from speechtrain.data.formats.lhotse_cuts import Samples, is_simple
from speechtrain.data.formats.manifests import SEGMENT, Record, seconds_of
from speechtrain.data.loader import REASONS
from speechtrain.data.prepare.cut_files import cuts_of
from speechtrain.data.recordings import Unusable, header_or_none, read_header
from speechtrain.data.sources import open_source
from speechtrain.errors import DataError

_HOP_SECONDS = 0.01
_PAUSE_HOPS = 20  # Loudness is summed over these hops, because shorter pauses lie within words.
_SHORT = 0.9  # A damaged file ends early: its last piece is below this share of the expected length.

Read = Callable[[float, float], Samples]
"""Reads samples (S,) from a start, for a duration, both in seconds."""


@dataclass(frozen=True)
class Recording:
    """A recording to transcribe. ``read`` raises Unusable."""

    name: str  # the path as the user named it, or the id in a manifest
    audio: str  # the audio file, or "" without one
    seconds: float
    read: Read
    sample_rate: int

    def pieces(self, max_seconds: float) -> Iterator[tuple[float, Samples]]:
        """Yield pieces of at most ``max_seconds`` with their starts in seconds. Raises DataError."""
        start = 0.0
        try:
            while self.seconds - start > max_seconds:
                samples = self.read(start, max_seconds)
                if len(samples) < _SHORT * max_seconds * self.sample_rate:
                    yield start, samples
                    return
                end = piece_end(samples, self.sample_rate)
                yield start, samples[:end]
                start += end / self.sample_rate
            yield start, self.read(start, self.seconds - start)
        except Unusable as problem:
            raise _data_error(problem) from None


def piece_end(samples: Samples, sample_rate: int) -> int:
    """Return the number of samples of a piece. ``samples`` (S,) are the longest possible piece.

    The piece ends in the middle of the quietest 0.2 s of their second half, the latest of equally quiet ones.
    """
    hop, middle = round(_HOP_SECONDS * sample_rate), len(samples) // 2
    count = (len(samples) - middle) // hop
    hops = samples[middle : middle + count * hop].reshape(-1, hop)
    energies = np.square(hops).sum(axis=1, dtype=np.float64)
    loudness = np.convolve(energies, np.ones(_PAUSE_HOPS), "valid")
    quietest = len(loudness) - 1 - int(loudness[::-1].argmin())
    return middle + (quietest + _PAUSE_HOPS // 2) * hop


def recordings(name: str, sample_rate: int, max_seconds: float) -> Iterator[Recording | DataError]:
    """Yield the recordings at the path ``name``, an audio file, a folder or a manifest, in their order.

    An error takes the place of a recording that cannot be opened or has more than ``max_seconds``.
    """
    is_folder = os.path.isdir(name)
    is_audio = os.path.splitext(name)[1].lower() in AUDIO_SUFFIXES or not os.path.exists(name)
    if not is_folder and (is_audio or header_or_none(name)):
        yield _file_recording(name, sample_rate, max_seconds)
        return
    try:
        source = open_source(name)
        for cut in cuts_of(source):
            yield _cut_recording(cut, sample_rate, max_seconds, in_folder=is_folder)
        yield from map(DataError, source.warnings())
    except DataError as error:
        yield error


def _file_recording(path: str, sample_rate: int, max_seconds: float) -> Recording | DataError:
    try:
        seconds = read_header(path).duration
        check_seconds(seconds, max_seconds, path)
    except Unusable as problem:
        return _data_error(problem)
    return Recording(path, path, seconds, partial(read_file, path, sample_rate), sample_rate)


def _cut_recording(
    cut: Record, sample_rate: int, max_seconds: float, *, in_folder: bool
) -> Recording | DataError:
    path, seconds = next(iter(files_of(cut)), ""), seconds_of(cut)

    def read_part(start: float, part_seconds: float) -> Samples:
        # lhotse reads mixtures and transforms as a whole.
        if (start, part_seconds) == (0.0, seconds) or not is_simple(cut):
            first = round(start * sample_rate)
            end = first + round(part_seconds * sample_rate)
            return read_cut(cut, sample_rate, max_seconds)[first:end]
        custom = {**(cut.get("custom") or {}), SEGMENT: True}
        part = {**cut, "start": cut["start"] + start, "duration": part_seconds, "custom": custom}
        return read_cut(part, sample_rate)

    try:
        check_seconds(seconds, max_seconds, path)
    except Unusable as problem:
        return _data_error(problem)
    name = path if in_folder else str(cut["id"])
    return Recording(name, path, seconds, read_part, sample_rate)


def _data_error(problem: Unusable) -> DataError:
    return DataError(f"{problem.detail}: {REASONS[problem.reason]}")

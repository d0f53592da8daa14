"""Recordings to transcribe: whatever is named, each in pieces that a model can take.

A piece ends where its recording is quietest, and only one is held at a time, so an hour needs the memory of
a minute. Pieces do not depend on what is decoded together.
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
from speechtrain.data.recordings import Unusable, header, read_header
from speechtrain.data.sources import open_source
from speechtrain.errors import DataError

_HOP_SECONDS = 0.01
_PAUSE_HOPS = 20  # over which loudness is summed: shorter ones lie within words
_SHORT = 0.9  # of a piece: what a damaged file gives where its header promises more

Read = Callable[[float, float], Samples]
"""Reads samples (S,) from a start, for a duration, both in seconds."""


@dataclass(frozen=True)
class Recording:
    """Something to transcribe; ``read`` raises Unusable."""

    name: str  # as it was named, or its id in a manifest
    audio: str  # the file, if there is one
    seconds: float
    read: Read
    sample_rate: int

    def pieces(self, most_seconds: float) -> Iterator[tuple[float, Samples]]:
        """Yield pieces of at most ``most_seconds`` with their starts in seconds. Raises DataError."""
        at = 0.0
        try:
            while self.seconds - at > most_seconds:
                samples = self.read(at, most_seconds)
                if len(samples) < _SHORT * most_seconds * self.sample_rate:
                    yield at, samples
                    return
                end = quietest(samples, self.sample_rate)
                yield at, samples[:end]
                at += end / self.sample_rate
            yield at, self.read(at, self.seconds - at)
        except Unusable as problem:
            raise DataError(f"{problem.detail}: {REASONS[problem.reason]}") from None


def quietest(samples: Samples, sample_rate: int) -> int:
    """Where to end a piece: in the middle of the quietest 0.2 s of its second half, the last of equals."""
    hop, half = round(_HOP_SECONDS * sample_rate), len(samples) // 2
    hops = samples[half : half + (len(samples) - half) // hop * hop].reshape(-1, hop)
    loudness = np.convolve(np.square(hops).sum(axis=1, dtype=np.float64), np.ones(_PAUSE_HOPS), "valid")
    last = len(loudness) - 1 - int(loudness[::-1].argmin())
    return half + (last + _PAUSE_HOPS // 2) * hop


def recordings(name: str, sample_rate: int, most_seconds: float) -> Iterator[Recording | DataError]:
    """The recordings called ``name``: a file of audio, a folder or a manifest, in their order.

    One that cannot be opened, or has more than ``most_seconds``, is an error in its place.
    """
    is_folder = os.path.isdir(name)
    is_audio = os.path.splitext(name)[1].lower() in AUDIO_SUFFIXES or not os.path.exists(name)
    if not is_folder and (is_audio or header(name)):
        yield _of_file(name, sample_rate, most_seconds)
        return
    try:
        source = open_source(name)
        for cut in cuts_of(source):
            yield _of_cut(cut, sample_rate, most_seconds, in_folder=is_folder)
        yield from map(DataError, source.warnings())
    except DataError as error:
        yield error


def _of_file(path: str, sample_rate: int, most_seconds: float) -> Recording | DataError:
    try:
        seconds = read_header(path).duration
        check_seconds(seconds, most_seconds, path)
    except Unusable as problem:
        return DataError(f"{problem.detail}: {REASONS[problem.reason]}")
    return Recording(path, path, seconds, partial(read_file, path, sample_rate), sample_rate)


def _of_cut(cut: Record, sample_rate: int, most_seconds: float, *, in_folder: bool) -> Recording | DataError:
    path, seconds = next(iter(files_of(cut)), ""), seconds_of(cut)

    def part(start: float, wanted: float) -> Samples:
        if (start, wanted) == (0.0, seconds) or not is_simple(cut):  # what transforms it is held whole
            first = round(start * sample_rate)
            return read_cut(cut, sample_rate, most_seconds)[first : first + round(wanted * sample_rate)]
        custom = {**(cut.get("custom") or {}), SEGMENT: True}
        return read_cut(
            {**cut, "start": cut["start"] + start, "duration": wanted, "custom": custom}, sample_rate
        )

    try:
        check_seconds(seconds, most_seconds, path)
    except Unusable as problem:
        return DataError(f"{problem.detail}: {REASONS[problem.reason]}")
    return Recording(path if in_folder else str(cut["id"]), path, seconds, part, sample_rate)

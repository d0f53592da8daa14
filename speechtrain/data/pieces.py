"""Reads recordings to transcribe, in pieces of a length that the model can process.

A piece ends where its recording is quiet. Only one piece is in memory at a time, so the memory does not grow
with the recording. The pieces of a recording do not depend on the other recordings of a batch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from speechtrain.data.audio import (
    check_seconds,
    first_file,
    read_with_faults,
    refuse_opposed_channels,
)
from speechtrain.data.formats.folder import AUDIO_SUFFIXES, AudioFolder, Folder
from speechtrain.data.formats.lhotse_cuts import Samples, is_simple
from speechtrain.data.formats.manifests import SEGMENT, Record, seconds_of, simple_cut
from speechtrain.data.loader import REASONS
from speechtrain.data.prepare.cut_files import cuts_of
from speechtrain.data.recordings import Unusable, header_or_none, read_header
from speechtrain.data.sources import NotManifest, open_source
from speechtrain.errors import DataError, RecordingError

_HOP_SECONDS = 0.01
_PAUSE_HOPS = 20  # Energy is summed over this number of hops, because shorter pauses occur within words.
_SHORT_PIECE = 0.9  # A piece below this share of the expected length shows that a damaged file ends early.

ReadPart = Callable[[float, float], Samples]
"""Returns the samples (S,) from a start, for a duration, both in seconds."""


@dataclass(frozen=True)
class Recording:
    """A recording to transcribe. ``read`` raises Unusable."""

    name: str  # the path as the user named it, or the id in a manifest
    audio: str  # the path of the audio file, or "" if the recording has no file
    seconds: float
    read: ReadPart
    sample_rate: int
    start: float = 0.0  # in seconds of the file

    def pieces(self, max_seconds: float) -> Iterator[tuple[float, Samples]]:
        """Yield the start of each piece in seconds, and its samples (S,), at most ``max_seconds``.

        Raises DataError if the recording cannot be used.
        """
        start = 0.0
        try:
            while self.seconds - start > max_seconds:
                samples = self.read(start, max_seconds)
                if len(samples) < _SHORT_PIECE * max_seconds * self.sample_rate:
                    yield start, samples
                    return
                end = piece_end(samples, self.sample_rate)
                yield start, samples[:end]
                start += end / self.sample_rate
            yield start, self.read(start, self.seconds - start)
        except Unusable as problem:
            raise recording_error(problem, self.name, self.audio) from None


def piece_end(samples: Samples, sample_rate: int) -> int:
    """Return the number of samples of a piece. ``samples`` (S,) are the longest possible piece.

    The piece ends in the middle of the quietest 0.2 s in the second half of ``samples``. Of several equally
    quiet places, it is the last one.
    """
    hop, middle = round(_HOP_SECONDS * sample_rate), len(samples) // 2
    hop_count = (len(samples) - middle) // hop
    hops = samples[middle : middle + hop_count * hop].reshape(-1, hop)
    energies = np.square(hops).sum(axis=1, dtype=np.float64)
    # Entry i is the energy of the pause that begins with hop i.
    pause_energies = np.convolve(energies, np.ones(_PAUSE_HOPS), "valid")
    hops_after_pause = int(pause_energies[::-1].argmin())  # argmin returns the first of equal entries.
    quietest_hop = len(pause_energies) - 1 - hops_after_pause
    return middle + (quietest_hop + _PAUSE_HOPS // 2) * hop


def recordings(
    name: str, sample_rate: int, max_seconds: float, channel: int | None = None
) -> Iterator[Recording | RecordingError]:
    """Yield the recordings of ``name``: the path of an audio file, a folder or a manifest.

    ``channel`` counts from 0, and a manifest may name other channels. None is the mean of all channels.
    A RecordingError is yielded instead of a recording that cannot be opened or has more than ``max_seconds``.
    """
    is_folder = os.path.isdir(name)
    has_audio_suffix = os.path.splitext(name)[1].lower() in AUDIO_SUFFIXES
    # A missing path counts as an audio file, so that the error says that the file does not exist.
    is_audio = has_audio_suffix or not os.path.exists(name) or header_or_none(name) is not None
    if is_audio and not is_folder:
        yield _file_recording(name, sample_rate, max_seconds, channel)
        return
    try:
        source = open_source(name)
        if isinstance(source, Folder):
            source = AudioFolder(source.path)  # A text that cannot be read is no reason to stop.
        for cut in cuts_of(source):
            cut_name = first_file(cut) if is_folder else str(cut["id"])
            yield _cut_recording(cut, cut_name, sample_rate, max_seconds, channel)
        if isinstance(source, AudioFolder):  # Other warnings are about transcripts.
            for warning in source.warnings():
                yield RecordingError(warning, name, name)
    except NotManifest:
        yield _file_recording(name, sample_rate, max_seconds, channel)
    except DataError as error:
        yield RecordingError(str(error), name, name)


def _file_recording(
    path: str, sample_rate: int, max_seconds: float, channel: int | None
) -> Recording | RecordingError:
    try:
        seconds = read_header(path).duration
    except Unusable as problem:
        return recording_error(problem, path, path)
    # As a segment, the file may be longer than its header says.
    cut = simple_cut(path, path, 0.0, seconds, text="", segment=True)
    return _cut_recording(cut, path, sample_rate, max_seconds, channel)


def _cut_recording(
    cut: Record, name: str, sample_rate: int, max_seconds: float, channel: int | None
) -> Recording | RecordingError:
    path, seconds = first_file(cut), seconds_of(cut)

    def read_part(start: float, part_seconds: float) -> Samples:
        is_whole_cut = start == 0.0 and part_seconds == seconds
        part = cut
        if not is_whole_cut and is_simple(cut):  # A mixture or a transform cannot be read in parts.
            # SEGMENT says that the part may be shorter than its file.
            custom = {**(cut.get("custom") or {}), SEGMENT: True}
            part = {**cut, "start": cut["start"] + start, "duration": part_seconds, "custom": custom}
        samples, faults = read_with_faults(part, sample_rate, max_seconds, channel)
        refuse_opposed_channels(faults)
        if is_whole_cut or part is not cut:  # The file may be a little longer than the manifest says.
            return samples
        first_sample = round(start * sample_rate)
        return samples[first_sample : first_sample + round(part_seconds * sample_rate)]

    try:
        check_seconds(seconds, max_seconds, path)
    except Unusable as problem:
        return recording_error(problem, name, path)
    start = float(cut["start"]) if is_simple(cut) else 0.0
    return Recording(name, path, seconds, read_part, sample_rate, start)


def recording_error(problem: Unusable, name: str, audio: str) -> RecordingError:
    """Return the error of a recording that cannot be used."""
    message = problem.detail
    if problem.reason != "unreadable":  # The detail of an unreadable file has the reason.
        message += f": {REASONS[problem.reason]}"
    return RecordingError(message, name, audio)

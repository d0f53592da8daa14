"""Opening of one recording from an untrusted file: its header, or the reason why it is unusable."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from speechtrain.data.stage import open_near
from speechtrain.data.tar_members import file_of, open_member
from speechtrain.errors import one_line

if TYPE_CHECKING:
    from soundfile import SoundFile

MOST_CHANNELS = 1_024
RATES = (1_000, 768_000)
"""Sampling rates in Hz; a header with any other is damaged, and a filter for it is too large."""


_CUT_FILE = re.compile(r"^(?:data|SSND) : (\d+) \(should be (\d+)\)", re.MULTILINE)
"""The line of libsndfile's log on a WAV or AIFF file that is shorter than its header says."""
_STREAMED = 2**31 - 2**16
"""Bytes of audio from which on a header holds a placeholder: its program wrote to a pipe."""


class Unusable(Exception):
    """Audio that cannot be used; ``reason`` is a key of ``data.loader.REASONS``."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@contextlib.contextmanager
def open_recording(path: str) -> Iterator[SoundFile]:
    """A context with an open recording, whose header has been checked.

    libsndfile gets an open file, or the bytes of a tar's member, and no name: nothing reads the name as a
    command, a URL or a device. Raises Unusable.
    """
    from soundfile import LibsndfileError, SoundFile

    try:
        file = open_near(file_of(path))
    except (FileNotFoundError, NotADirectoryError):
        raise Unusable("missing", path) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or one_line(str(error), 300)
        raise Unusable("unreadable", f"{path}: {reason}") from None
    with file:
        try:
            member = open_member(file, path)
        except ValueError as error:
            raise Unusable("unreadable", f"{path}: {error}") from None
        start = os.pread(file.fileno(), 1024, 0) if member is None else member.peek(1024)[:1024]
        if not start:
            raise Unusable("empty_file", path)
        if start.startswith(b"NIST_1A") and b"embedded-shorten" in start:
            remedy = f"convert it (sph2pipe -f wav {shlex.quote(path)} OUT.wav)"
            raise Unusable("unreadable", f"{path}: compressed by Shorten; {remedy}")
        try:
            recording = SoundFile(file.fileno() if member is None else member, closefd=False)
        except LibsndfileError as error:
            raise Unusable("unreadable", f"{path}: {error.error_string}") from None
        with or_unusable(path), recording:
            _check_header(recording, path)
            yield recording


def _check_header(recording: SoundFile, path: str) -> None:
    """Raise Unusable for a rate that no recording has, and for a file shorter than its header says."""
    rate, channels = recording.samplerate, recording.channels
    if not RATES[0] <= rate <= RATES[1] or not 1 <= channels <= MOST_CHANNELS:
        raise Unusable("unreadable", f"{path}: its sampling rate is {rate} Hz, of {channels} channels")
    cut = _CUT_FILE.search(recording.extra_info)
    if cut and int(cut[1]) < _STREAMED:
        lengths = f"its header promises {cut[1]} bytes of audio, and {cut[2]} are there"
        raise Unusable("wrong_length", f"{path}: {lengths}. Copy it again")


@dataclass(frozen=True)
class Header:
    """What a recording says of itself."""

    frames: int
    samplerate: int
    channels: int

    @property
    def duration(self) -> float:
        """Seconds."""
        return self.frames / self.samplerate


def read_header(path: str) -> Header:
    """The header of a recording. Raises Unusable, also where it has no samples."""
    with open_recording(path) as file:
        if file.frames < 1:
            raise Unusable("no_samples", path)
        return Header(file.frames, file.samplerate, file.channels)


def header(path: str) -> Header | None:
    """The header of a recording with samples, or None if there is none."""
    try:
        return read_header(path)
    except Unusable:
        return None


@contextlib.contextmanager
def or_unusable(path: str) -> Iterator[None]:
    """Convert any other error to Unusable: lhotse and libsndfile raise many kinds for a damaged file."""
    try:
        yield
    except Unusable:
        raise
    except Exception as error:
        message = one_line(str(error), 300) or type(error).__name__
        raise Unusable("unreadable", message if path in message else f"{path}: {message}") from None

"""Opens a recording from an untrusted file and checks its header. ``Unusable`` has the reason of a failure.

The path of a recording is the path of an audio file or of a member of a tar (see ``data.tar_members``).
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from speechtrain.data.tar_members import file_of, open_member
from speechtrain.errors import one_line
from speechtrain.files import open_regular

if TYPE_CHECKING:
    from soundfile import SoundFile

_START_BYTES = 1024  # the bytes at the start of a file that show compression by Shorten
_UNKNOWN_FORMAT = 1  # libsndfile's SF_ERR_UNRECOGNISED_FORMAT
MOST_CHANNELS = 1_024
RATES = (1_000, 768_000)
"""The lowest and the highest sampling rate in Hz. A header with another rate is damaged, and a filter for
that rate would be too large."""

_SHORT_FILE = re.compile(r"^ *(?:data|riff|SSND|Data Size) *: (\d+) \(should be (\d+)\)", re.MULTILINE)
"""A line of libsndfile's log for WAV, W64, AIFF and AU. It has the bytes of audio by the header, and then the
bytes that the file has, if these are fewer."""
_END_OF_HEADERS = re.compile(r"Unknown chunk marker .* at position (\d+)\. Exiting parser")
"""A line of libsndfile's log: the bytes of a WAV file up to which its headers explain what there is."""
_LENGTH = re.compile(r"^Length : (\d+)", re.MULTILINE)
"""A line of libsndfile's log: the bytes of the file."""
_EXPLAINED_SHARE = 0.99  # Less than this share of a file is a fault. Some programs add bytes to the end.
_PLACEHOLDER_BYTES = 2**31 - 2**16
"""A header with at least this number of bytes of audio has a placeholder. A program that writes to a pipe
writes the header before it knows the length."""


LEAST_SHARE = 0.9
"""The least share of the audio that a header promises. With less, words of the transcript may be missing. Of
Mboshi, 11 of 514 recordings lack 0.4 to 1.4 %."""


def tolerated_seconds(seconds: float) -> float:
    """Return the least difference from the ``seconds`` of a manifest at which a recording is not used.

    Other tools round durations or count the padding of an MP3. lhotse, too, tolerates 0.5 s. The half of a
    short word is not the word.
    """
    return max(0.1 * seconds, min(0.5, 0.5 * seconds))


class Fault(NamedTuple):
    """A fault of a recording that is used nevertheless."""

    reason: str  # a key of ``data.loader.REASONS``
    detail: str


class Unusable(Exception):
    """A recording cannot be used. ``reason`` is a key of ``data.loader.REASONS``."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


def path_on_disk(path: str) -> str:
    """Return ``path``, or the path of an existing file with the same name in another Unicode form.

    A name such as ``café.wav`` has a composed letter in most manifests, and two characters on a Mac's disk.
    """
    if path.isascii() or os.path.lexists(path):
        return path
    folder, name = os.path.split(path)
    for form in ("NFC", "NFD"):
        path_in_form = os.path.join(path_on_disk(folder), unicodedata.normalize(form, name))
        if os.path.lexists(path_in_form):
            return path_in_form
    return path


@contextlib.contextmanager
def open_recording(path: str) -> Iterator[SoundFile]:
    """Open a recording. Raises Unusable, also for an impossible header and for a file that is cut off.

    libsndfile receives an open file or the bytes of a tar's member, and never a path. So no part of it can
    interpret the path as a command, a URL or a device.
    """
    from soundfile import LibsndfileError, SoundFile

    try:
        file = open_regular(path_on_disk(file_of(path)))
    except (FileNotFoundError, NotADirectoryError):
        hint = ""
        if os.path.islink(path):
            hint = " (a link to content that is not here. git annex get or dvc pull fetches it)"
        raise Unusable("missing", path + hint) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or one_line(str(error), 300)
        raise Unusable("unreadable", f"{path}: {reason}") from None
    with file:
        try:
            member = open_member(file, path)
        except ValueError as error:
            raise Unusable("unreadable", f"{path}: {error}") from None
        sndfile_input: int | io.BufferedReader
        if member is None:
            sndfile_input = file.fileno()
            start = os.pread(file.fileno(), _START_BYTES, 0)
        else:
            sndfile_input = member
            start = member.peek(_START_BYTES)[:_START_BYTES]
        if not start:
            raise Unusable("empty_file", path)
        stand_in = stand_in_of(start)
        if start.startswith(b"NIST_1A") and b"embedded-shorten" in start:  # libsndfile does not read it.
            remedy = f"Convert it (sph2pipe -f wav {shlex.quote(path)} OUT.wav)"
            stand_in = f"compressed by Shorten. {remedy}"
        if stand_in:
            raise Unusable("unreadable", f"{path}: {stand_in}")
        try:
            recording = SoundFile(sndfile_input, closefd=False)
        except LibsndfileError as error:
            problem = error.error_string
            if error.code == _UNKNOWN_FORMAT:
                command = f"ffmpeg -i {shlex.quote(file_of(path))} OUT.wav"
                problem = f"its format is not read. Convert a recording to WAV or FLAC, as with {command}"
            raise Unusable("unreadable", f"{path}: {problem}") from None
        with or_unusable(path), recording:
            rate, channels = recording.samplerate, recording.channels
            if not RATES[0] <= rate <= RATES[1] or not 1 <= channels <= MOST_CHANNELS:
                raise Unusable(
                    "unreadable", f"{path}: its sampling rate is {rate} Hz, of {channels} channels"
                )
            header_bytes, file_bytes = _bytes_of_audio(recording)
            if file_bytes < LEAST_SHARE * header_bytes:
                raise Unusable("wrong_length", _short_file_text(path, header_bytes, file_bytes))
            yield recording


def stand_in_of(start: bytes) -> str:
    """Return what a file is that begins with ``start``, if a download left it in place of the file, or ""."""
    text = start.lstrip().lower()
    if text.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer. Run git lfs pull"
    if text.startswith((b"<!doctype html", b"<html")):
        return "is a web page. Download the file again"
    return ""


def _bytes_of_audio(recording: SoundFile) -> tuple[int, int]:
    """Return the bytes of audio by the header, and those in the file. Both are 0 if the file has them all."""
    match = _SHORT_FILE.search(recording.extra_info)
    if match is None or int(match[1]) >= _PLACEHOLDER_BYTES:
        return 0, 0
    return int(match[1]), int(match[2])


def _short_file_text(path: str, header_bytes: int, file_bytes: int) -> str:
    lengths = f"its header promises {header_bytes} bytes of audio, and {file_bytes} are there"
    return f"{path}: {lengths}. Copy it again"


def header_faults(recording: SoundFile, path: str) -> list[Fault]:
    """Return the faults of a file with a little less audio than its header promises, or with more bytes."""
    header_bytes, file_bytes = _bytes_of_audio(recording)
    if file_bytes < header_bytes:
        return [Fault("other_length", _short_file_text(path, header_bytes, file_bytes))]
    log = recording.extra_info
    end, length = _END_OF_HEADERS.search(log), _LENGTH.search(log)
    if end is None or length is None or int(end[1]) >= _EXPLAINED_SHARE * int(length[1]):
        return []
    return [Fault("unexplained_bytes", f"{path}: its header explains {end[1]} of {length[1]} bytes")]


def no_samples(recording: SoundFile, path: str) -> Unusable:
    """Return the error of a file without samples, which names the bytes that its header does not explain."""
    details = [fault.detail for fault in header_faults(recording, path)]
    return Unusable("no_samples", "; ".join(details) or path)


@dataclass(frozen=True)
class Header:
    """The length and the format of a recording, from its header."""

    frames: int  # samples of each channel
    samplerate: int  # in Hz
    channels: int

    @property
    def duration(self) -> float:
        """The length in seconds."""
        return self.frames / self.samplerate


def read_header(path: str) -> Header:
    """Return the header of a recording. Raises Unusable if it cannot be opened or has no samples."""
    with open_recording(path) as file:
        if file.frames < 1:
            raise no_samples(file, path)
        return Header(file.frames, file.samplerate, file.channels)


def header_or_none(path: str) -> Header | None:
    """Return the header of a recording, or None if the recording cannot be used."""
    try:
        return read_header(path)
    except Unusable:
        return None


@contextlib.contextmanager
def or_unusable(path: str) -> Iterator[None]:
    """Return a context that converts every error to Unusable, with the path in its message.

    lhotse and libsndfile raise many kinds of errors for a damaged file.
    """
    try:
        yield
    except Unusable:
        raise
    except Exception as error:
        message = one_line(str(error), 300) or type(error).__name__
        if path not in message:
            message = f"{path}: {message}"
        raise Unusable("unreadable", message) from None

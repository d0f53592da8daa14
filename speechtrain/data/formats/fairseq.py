"""Reader of fairseq's manifests: a TSV of recordings and, next to it, a label file with a line for each."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice, zip_longest
from pathlib import Path

from speechtrain.data.formats.manifests import (
    ASSUMED_RATE,
    Entry,
    Manifest,
    decode_line,
    digest,
    numbered_lines,
    simple_cut,
    stamp,
)
from speechtrain.data.recordings import header_or_none
from speechtrain.errors import DataError

LABELS = (".wrd", ".ltr")
"""Suffixes of label files, by preference: words, and letters with ``|`` at the end of each word."""

_RECORDING = re.compile(rb"[^\t]+\t\d+\s*")
_FRAMES = re.compile(r"0*[1-9][0-9]{0,10}")
_MAX_HEADERS = 10  # the most headers that are read to find the sampling rate


class Fairseq(Manifest):
    """fairseq's TSV: the root folder on the first line, then lines ``path<TAB>frames``.

    The root is absolute or, unlike in fairseq, relative to the manifest. ``frames`` are samples at the
    recording's rate, which the manifest does not contain. All recordings are assumed to have the rate of the
    first header that can be read. If the first ten headers cannot be read, the rate is 16 kHz. Later headers
    are not read. A recording with a different rate is noticed when it is decoded, because its length is
    wrong. For a line without ``frames``, length and rate come from the recording's header.

    Transcripts are in ``NAME.wrd`` or ``NAME.ltr`` next to ``NAME.tsv``, if it exists. Line i belongs to
    recording i. A cut's id consists of the manifest's name and the recording's path.
    """

    kind = "fairseq"

    def fingerprint(self) -> str:
        files = [self.path] if self.labels is None else [self.path, self.labels]
        return digest(self.kind, self.name, *map(stamp, files), self.sampling_rate)

    @cached_property
    def labels(self) -> Path | None:
        """Path of the label file, or None."""
        manifest = self.path.with_suffix("") if self.path.suffix == ".gz" else self.path
        for suffix in LABELS:
            path = manifest.with_suffix(suffix)
            if path.is_file():
                return path
        return None

    @cached_property
    def sampling_rate(self) -> int:
        """Assumed sampling rate of the recordings in Hz."""
        for _, name, _ in islice(self._recordings(), _MAX_HEADERS):
            recording = header_or_none(os.path.join(self.root, name))
            if recording is not None:
                return recording.samplerate
        return ASSUMED_RATE

    @cached_property
    def root(self) -> str:
        """The folder in the first line. Raises DataError if there is none."""
        name = next(self._lines(self.path), (1, ""))[1].strip()
        if not name or _RECORDING.fullmatch(name.encode()):
            problem = f"is {name!r}, a recording" if name else "is empty"
            raise self.error_at(1, f"{problem}. The first line must be the root folder of the paths below")
        return os.path.normpath(self.beside(name))

    def entries(self) -> Iterator[Entry]:
        if not os.path.isdir(self.root):
            raise self.error_at(1, f"the root folder {self.root} does not exist. Correct it or mount it")
        line = 0
        for (line, name, frames), text in self._labelled_recordings():
            path, rate = os.path.join(self.root, name), self.sampling_rate
            if not frames:
                recording = header_or_none(path)
                if recording is None:
                    raise self.error_at(line, f"is {name!r}, not a path, a tab and a number of frames")
                frames, rate = recording.frames, recording.samplerate
            cut = simple_cut(f"{self.name}/{name}", path, 0.0, duration=frames / rate, text=text, rate=rate)
            yield Entry(cut, line, -1)
        if not line:
            raise DataError(f"{self.path} lists no recordings. Add a line 'path<TAB>frames' for each")

    def _labelled_recordings(self) -> Iterator[tuple[tuple[int, str, int], str]]:
        """Yield each recording with its transcript. Raises DataError if their numbers differ."""
        if self.labels is None:
            yield from ((recording, "") for recording in self._recordings())
            return
        self.refuse_outside(self.labels)
        to_text = _text_of_letters if self.labels.suffix == ".ltr" else str.strip
        recordings = labels = 0
        for recording, label in zip_longest(self._recordings(), self._lines(self.labels)):
            recordings += recording is not None
            labels += label is not None
            if recording is not None and label is not None:
                yield recording, to_text(label[1])
        if recordings != labels:
            raise DataError(
                f"{self.labels} has {labels} lines, but {self.path} has {recordings} recordings. Write one "
                "line for each recording, or remove the file to use no transcripts"
            )

    def _recordings(self) -> Iterator[tuple[int, str, int]]:
        """Yield (line, path below the root, frames or 0) of each recording."""
        for line, text in islice(self._lines(self.path), 1, None):
            if not text.strip():
                continue
            name, tab, frames = text.rpartition("\t")
            if not tab:
                yield line, text, 0
                continue
            frames = frames.strip()
            if not name or "\t" in name:
                raise self.error_at(line, f"is {text!r}, not a path, a tab and a number of frames")
            # int() would also accept signs, spaces, underscores and the digits of all scripts.
            if not _FRAMES.fullmatch(frames):
                raise self.error_at(line, f"{frames[:40]!r} is not a number of frames")
            yield line, name, int(frames)

    def _lines(self, path: Path) -> Iterator[tuple[int, str]]:
        """Yield (number, text without line end) of each line. Raises DataError with file and line."""
        for line, content in numbered_lines(path):
            yield line, decode_line(content, path, line).rstrip("\r\n")


def looks_like_fairseq(head: Sequence[bytes], folder: Path) -> bool:
    """Return whether ``head``, the first two lines of a file in ``folder``, can be from fairseq's TSV.

    Either line is a recording (the first line if the root is missing), or the first line is a folder.
    """
    if any(_RECORDING.fullmatch(line) for line in head):
        return True
    try:
        root = head[0].decode("utf-8-sig").strip()
        return bool(root) and os.path.isdir(folder / os.path.expanduser(root))
    except ValueError:  # not UTF-8
        return False


def _text_of_letters(letters: str) -> str:
    """Convert letters to words: ``O N E | T W O |`` is ``ONE TWO``."""
    words = "".join(letters.split()).replace("|", " ")
    return " ".join(words.split())

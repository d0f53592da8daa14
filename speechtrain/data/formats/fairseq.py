"""Reader of fairseq's manifests: a TSV of recordings and, next to it, a label file of transcripts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, zip_longest
from pathlib import Path

from speechtrain.data.formats.manifests import (
    ASSUMED_RATE,
    Manifest,
    Record,
    decode_line,
    digest,
    numbered_lines,
    simple_cut,
    stamp,
)
from speechtrain.data.recordings import header_or_none
from speechtrain.errors import DataError

LABELS = (".wrd", ".ltr")
"""Suffixes of label files, the preferred one first.

``.wrd`` has words, and ``.ltr`` has letters with ``|`` at the end of each word.
"""

_RECORDING_LINE = re.compile(rb"[^\t]+\t\d+\s*")  # path, tab, number of frames
_FRAMES = re.compile(r"0*[1-9][0-9]{0,10}")
_MAX_HEADERS = 10  # the most headers that are read to find the sampling rate


@dataclass(frozen=True)
class _Line:
    """A line of the TSV that lists a recording."""

    number: int  # from 1, the line of the root folder
    path: str  # relative to the root folder
    frames: int  # samples of each channel, or 0 if the line does not have them


class Fairseq(Manifest):
    """fairseq's TSV: the root folder on the first line, then lines ``path<TAB>frames``.

    The root is absolute or, unlike in fairseq, relative to the manifest. ``frames`` are samples at the
    recording's rate, which the manifest does not contain. To read few headers, all recordings are assumed to
    have the rate of the first header that can be read. If the first ten headers cannot be read, the rate is
    16 kHz. A recording with a different rate is detected when it is decoded, because its duration is wrong.
    If a line has no ``frames``, its length and rate are read from the recording's header.

    Transcripts are in ``NAME.wrd`` or ``NAME.ltr`` next to ``NAME.tsv``. If both are missing, transcripts are
    empty. Line i belongs to recording i. A cut's id is the manifest's name, a slash and the recording's path.
    """

    kind = "fairseq"

    def fingerprint(self) -> str:
        files = [self.path] if self.labels is None else [self.path, self.labels]
        return digest(self.kind, self.name, *map(stamp, files), self.sampling_rate)

    @cached_property
    def labels(self) -> Path | None:
        """The path of the label file, or None without labels."""
        manifest = self.path.with_suffix("") if self.path.suffix == ".gz" else self.path
        for suffix in LABELS:
            path = manifest.with_suffix(suffix)
            if path.is_file():
                return path
        return None

    @cached_property
    def sampling_rate(self) -> int:
        """The assumed sampling rate of the recordings in Hz."""
        for line in islice(self._recording_lines(), _MAX_HEADERS):
            header = header_or_none(os.path.join(self.root, line.path))
            if header is not None:
                return header.samplerate
        return ASSUMED_RATE

    @cached_property
    def root(self) -> str:
        """The absolute path of the folder in the first line. Raises DataError for another first line."""
        _, first_line = next(self._lines(self.path), (1, ""))
        name = first_line.strip()
        if not name or _RECORDING_LINE.fullmatch(name.encode()):
            problem = f"is {name!r}, a recording" if name else "is empty"
            raise self.error_at(1, f"{problem}. The first line must be the root folder of the paths below")
        return os.path.normpath(self.resolve_path(name))

    def entries(self) -> Iterator[tuple[int, Record]]:
        if not os.path.isdir(self.root):
            raise self.error_at(1, f"the root folder {self.root} does not exist. Correct it or mount it")
        is_empty = True
        for line, text in self._labelled_lines():
            is_empty = False
            path, frames, rate = os.path.join(self.root, line.path), line.frames, self.sampling_rate
            if not frames:
                header = header_or_none(path)
                if header is None:
                    problem = f"is {line.path!r}, not a path, a tab and a number of frames"
                    raise self.error_at(line.number, problem)
                frames, rate = header.frames, header.samplerate
            cut_id = f"{self.name}/{line.path}"
            cut = simple_cut(cut_id, path, 0.0, duration=frames / rate, text=text, rate=rate)
            yield line.number, cut
        if is_empty:
            raise DataError(f"{self.path} lists no recordings. Add a line 'path<TAB>frames' for each")

    def _labelled_lines(self) -> Iterator[tuple[_Line, str]]:
        """Yield the line and the transcript of each recording. Raises DataError if their numbers differ."""
        if self.labels is None:
            for line in self._recording_lines():
                yield line, ""
            return
        self.refuse_outside(self.labels)
        recordings, labels = self._recording_lines(), self._lines(self.labels)
        for number, (recording, label) in enumerate(zip_longest(recordings, labels)):
            if recording is None or label is None:
                # One of the two has ended, so the other one has more lines.
                label_count = number if label is None else number + 1 + sum(1 for _ in labels)
                recording_count = number if recording is None else number + 1 + sum(1 for _ in recordings)
                raise DataError(
                    f"{self.labels} has {label_count} lines, but {self.path} has {recording_count} "
                    "recordings. Write one line for each recording, or remove the file to use no transcripts"
                )
            text = label[1].strip()
            if self.labels.suffix == ".ltr":  # O N E | T W O | becomes ONE TWO.
                words = "".join(text.split()).split("|")
                text = " ".join(filter(None, words))
            yield recording, text

    def _recording_lines(self) -> Iterator[_Line]:
        """Yield the lines that list recordings. Raises DataError with the line for another line."""
        for number, text in islice(self._lines(self.path), 1, None):
            if not text.strip():
                continue
            path, tab, frames = text.rpartition("\t")
            if not tab:
                yield _Line(number, text, 0)
                continue
            frames = frames.strip()
            if not path or "\t" in path:
                raise self.error_at(number, f"is {text!r}, not a path, a tab and a number of frames")
            # int() would also accept signs, spaces, underscores and the digits of all scripts.
            if not _FRAMES.fullmatch(frames):
                raise self.error_at(number, f"{frames[:40]!r} is not a number of frames")
            yield _Line(number, path, int(frames))

    def _lines(self, path: Path) -> Iterator[tuple[int, str]]:
        """Yield the number, from 1, and the text of each line. Raises DataError with file and line."""
        for number, content in numbered_lines(path):
            yield number, decode_line(content, path, number).rstrip("\r\n")


def looks_like_fairseq(first_lines: Sequence[bytes], folder: Path) -> bool:
    """Return whether a file in ``folder`` can be fairseq's TSV. ``first_lines`` are its first two lines.

    One of the lines is a recording, or the first line is the root folder. The first line is a recording in a
    TSV without its root, for which the reader then shows the fix.
    """
    if any(_RECORDING_LINE.fullmatch(line) for line in first_lines):
        return True
    try:
        root = first_lines[0].decode("utf-8-sig").strip()
        return bool(root) and os.path.isdir(folder / os.path.expanduser(root))
    except ValueError:  # not UTF-8
        return False

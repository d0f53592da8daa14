"""fairseq's manifests: a TSV of recordings, with label files next to it that have one line for each."""

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
    decoded,
    digest,
    numbered_lines,
    simple_cut,
    stamp,
)
from speechtrain.data.recordings import header
from speechtrain.errors import DataError

LABELS = (".wrd", ".ltr")
"""Label files, by preference: words, and letters whose words end in ``|``."""

_RECORDING = re.compile(rb"[^\t]+\t\d+\s*")
_FRAMES = re.compile(r"0*[1-9][0-9]{0,10}")
_TRIED = 10  # most headers that are read to find the sampling rate


class Fairseq(Manifest):
    """fairseq's TSV: the root folder on the first line, then lines ``path<TAB>frames``.

    The root is absolute or, unlike in fairseq, relative to the manifest. ``frames`` are samples at the
    recording's own rate, which the manifest does not contain. All recordings are assumed to have the
    rate of the first one whose header can be read (of ten; else 16 kHz). No other header is read: a
    recording of another rate is found when it is decoded, because its length is wrong. A line without
    ``frames`` takes length and rate from the header. Transcripts are
    read from ``NAME.wrd`` or ``NAME.ltr`` next to ``NAME.tsv`` if it exists; line i belongs to
    recording i. Ids are the manifest's name and the recording's path.
    """

    kind = "fairseq"

    def fingerprint(self) -> str:
        files = [self.path] if self.labels is None else [self.path, self.labels]
        return digest(self.kind, self.name, *map(stamp, files), self.sampling_rate)

    @cached_property
    def labels(self) -> Path | None:
        """Path of the label file, or None."""
        stem = self.path.with_suffix("") if self.path.suffix == ".gz" else self.path
        return next((p for suffix in LABELS if (p := stem.with_suffix(suffix)).is_file()), None)

    @cached_property
    def sampling_rate(self) -> int:
        """Assumed sampling rate of the recordings in Hz."""
        names = (name for _, name, _ in islice(self._recordings(), _TRIED))
        infos = (header(os.path.join(self.root, name)) for name in names)
        return next((int(info.samplerate) for info in infos if info is not None), 0) or ASSUMED_RATE

    @cached_property
    def root(self) -> str:
        """The folder in the first line. Raises DataError if there is none."""
        name = next(self._lines(self.path), (1, ""))[1].strip()
        if not name or _RECORDING.fullmatch(name.encode()):
            found = f"is {name!r}, a recording" if name else "is empty"
            raise self.bad(1, f"{found}; the first line must be the root folder of the paths below")
        return os.path.normpath(self.beside(name))

    def entries(self) -> Iterator[Entry]:
        if not os.path.isdir(self.root):
            raise self.bad(1, f"the root folder {self.root} does not exist; correct it or mount it")
        line = 0
        for (line, name, frames), text in self._labelled():
            path, rate = os.path.join(self.root, name), self.sampling_rate
            if not frames:
                if (info := header(path)) is None:
                    raise self.bad(line, f"is {name!r}, not a path, a tab and a number of frames")
                frames, rate = info.frames, info.samplerate
            cut = simple_cut(f"{self.name}/{name}", path, 0.0, duration=frames / rate, text=text, rate=rate)
            yield Entry(cut, line, -1)
        if not line:
            raise DataError(f"{self.path} lists no recordings; add a line 'path<TAB>frames' for each")

    def _labelled(self) -> Iterator[tuple[tuple[int, str, int], str]]:
        """Yield each recording with its transcript. Raises DataError if their numbers differ."""
        if self.labels is None:
            yield from ((recording, "") for recording in self._recordings())
            return
        self.check_place(self.labels)
        spell = _from_letters if self.labels.suffix == ".ltr" else str.strip
        recordings = texts = 0
        for recording, text in zip_longest(self._recordings(), self._lines(self.labels)):
            recordings += recording is not None
            texts += text is not None
            if recording is not None and text is not None:
                yield recording, spell(text[1])
        if recordings != texts:
            raise DataError(
                f"{self.labels} has {texts} lines, but {self.path} has {recordings} recordings; write one "
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
                raise self.bad(line, f"is {text!r}, not a path, a tab and a number of frames")
            # not int(): it accepts signs, spaces, underscores and the digits of all scripts
            if not _FRAMES.fullmatch(frames):
                raise self.bad(line, f"{frames[:40]!r} is not a number of frames")
            yield line, name, int(frames)

    def _lines(self, path: Path) -> Iterator[tuple[int, str]]:
        """Yield (number, text without line end) of each line. Raises DataError that names file and line."""
        for line, raw in numbered_lines(path):
            yield line, decoded(raw, path, line).rstrip("\r\n")


def looks_like_fairseq(head: Sequence[bytes], folder: Path) -> bool:
    """Whether ``head``, the first two lines of a file in ``folder``, can be from fairseq's TSV.

    One of them is a recording (the first one if the root is missing), or the first is a folder.
    """
    if any(_RECORDING.fullmatch(line) for line in head):
        return True
    try:
        root = head[0].decode("utf-8-sig").strip()
        return bool(root) and os.path.isdir(folder / os.path.expanduser(root))
    except ValueError:  # no UTF-8
        return False


def _from_letters(text: str) -> str:
    """Convert letters to words: ``O N E | T W O |`` is ``ONE TWO``."""
    return " ".join("".join(text.split()).replace("|", " ").split())

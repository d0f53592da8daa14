"""fairseq's manifests: a TSV of recordings, with label files beside it that go line by line."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice, zip_longest
from pathlib import Path

from speechtrain.data.manifests import (
    ASSUMED_RATE,
    Entry,
    Manifest,
    decoded,
    digest,
    header,
    numbered_lines,
    simple_cut,
    stamp,
)
from speechtrain.errors import DataError

LABELS = (".wrd", ".ltr")
"""Label files, by preference: words, and letters whose words end in ``|``."""

_RECORDING = re.compile(rb"[^\t]+\t\d+\s*")
_TRIED = 10  # recordings whose headers are looked at for the sampling rate


class Fairseq(Manifest):
    """fairseq's TSV: the root folder on the first line, then ``path<TAB>frames`` below it.

    The root is absolute or, unlike in fairseq, relative to the manifest. ``frames`` are samples at the
    recording's own rate, which the manifest does not tell: all recordings are taken to have that of
    the first whose header can be read (of ten; else 16 kHz), and no other is opened before it is
    decoded, when one of another rate is found to be of the wrong length. Transcripts are read from
    ``NAME.wrd`` or ``NAME.ltr`` beside ``NAME.tsv`` where there is one; its line i is that of the
    i-th recording. Ids are the manifest's name and the recording's path.
    """

    kind = "fairseq"

    def fingerprint(self) -> str:
        files = [self.path] if self.labels is None else [self.path, self.labels]
        return digest(self.kind, self.name, *map(stamp, files), self.sampling_rate)

    @cached_property
    def labels(self) -> Path | None:
        """The label file, if there is one."""
        stem = self.path.with_suffix("") if self.path.suffix == ".gz" else self.path
        return next((p for suffix in LABELS if (p := stem.with_suffix(suffix)).is_file()), None)

    @cached_property
    def sampling_rate(self) -> int:
        """Sampling rate in Hz of the recordings."""
        names = (name for _, name, _ in islice(self._recordings(), _TRIED))
        infos = (header(os.path.join(self.root, name)) for name in names)
        return next((int(info.samplerate) for info in infos if info is not None), 0) or ASSUMED_RATE

    @cached_property
    def root(self) -> str:
        """The folder that the first line names. Raises DataError where it names none."""
        name = next(self._lines(self.path), (1, ""))[1].strip()
        if not name or _RECORDING.fullmatch(name.encode()):
            found = f"is {name!r}, a recording" if name else "is empty"
            raise self.bad(1, f"{found}; the first line is the folder that the paths below are relative to")
        return os.path.normpath(self.beside(name))

    def entries(self) -> Iterator[Entry]:
        if not os.path.isdir(self.root):
            raise self.bad(1, f"the root folder {self.root} does not exist; is it right, and mounted?")
        rate, line = self.sampling_rate, 0
        for (line, name, frames), text in self._labelled():
            path = os.path.join(self.root, name)
            cut = simple_cut(f"{self.name}/{name}", path, 0.0, frames / rate, text, rate=rate)
            yield Entry(cut, line, -1)
        if not line:
            raise DataError(f"{self.path} lists no recordings below its root folder {self.root}")

    def _labelled(self) -> Iterator[tuple[tuple[int, str, int], str]]:
        """Each recording with its transcript. Raises DataError where they do not number the same."""
        if self.labels is None:
            yield from ((recording, "") for recording in self._recordings())
            return
        spell = _from_letters if self.labels.suffix == ".ltr" else str.strip
        recordings = texts = 0
        for recording, text in zip_longest(self._recordings(), self._lines(self.labels)):
            recordings += recording is not None
            texts += text is not None
            if recording is not None and text is not None:
                yield recording, spell(text[1])
        if recordings != texts:
            raise DataError(
                f"{self.labels} has {texts} lines and {self.path} {recordings} recordings; they go line by "
                "line: write it again, or take it away to do without transcripts"
            )

    def _recordings(self) -> Iterator[tuple[int, str, int]]:
        """(line, path below the root, frames) of each recording."""
        for line, text in islice(self._lines(self.path), 1, None):
            if not text.strip():
                continue
            name, tab, frames = text.rpartition("\t")
            frames = frames.strip()
            if not (tab and name) or "\t" in name:
                raise self.bad(line, f"is {text!r}, not a path, a tab and a number of frames")
            # not int(): it takes signs, spaces, underscores and the digits of all scripts
            if not (frames.isascii() and frames.isdigit() and int(frames)):
                raise self.bad(line, f"{frames!r} is no number of frames")
            yield line, name, int(frames)

    def _lines(self, path: Path) -> Iterator[tuple[int, str]]:
        """(number, text without its end) of each line. Raises DataError naming file and line."""
        for line, raw in numbered_lines(path):
            yield line, decoded(raw, path, line).rstrip("\r\n")


def looks_like_fairseq(head: Sequence[bytes], folder: Path) -> bool:
    """Whether the first two lines of a file in ``folder`` are those of fairseq's TSV.

    Either is a recording (the first, where the root is missing), or the first names a folder.
    """
    if any(_RECORDING.fullmatch(line) for line in head):
        return True
    try:
        root = head[0].decode("utf-8-sig").strip()
        return bool(root) and (folder / Path(root).expanduser()).is_dir()
    except (UnicodeDecodeError, ValueError, OSError, RuntimeError):  # names that no system takes
        return False


def _from_letters(text: str) -> str:
    """``O N E | T W O |`` is ``ONE TWO``."""
    return " ".join("".join(text.split()).replace("|", " ").split())

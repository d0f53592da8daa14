"""A folder of recordings as a corpus."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from speechtrain.data.manifests import ASSUMED_RATE, Entry, Manifest, digest, simple_cut
from speechtrain.errors import DataError

AUDIO_SUFFIXES = (".wav", ".flac", ".ogg", ".opus", ".mp3", ".sph", ".aiff", ".aif")
_UNKNOWN_SECONDS = 1.0  # planned length of a recording whose header cannot be read


class Folder(Manifest):
    """Every recording below a folder, in two layouts that may be mixed.

    ``x.wav`` (or flac, ogg, opus, mp3, sph, aiff) with its transcript in ``x.txt`` beside it, or
    LibriSpeech's: ``*.trans.txt`` whose lines are an id, a space and the transcript of ``<id>.flac``
    beside it. A recording without either has an empty transcript. Ids are paths from the folder's
    name on, without suffix. Each header is read once, to know the length; a recording whose header cannot be
    read stays in the set, so that it is counted, or named, like any other bad recording.
    """

    kind = "folder"

    def fingerprint(self) -> str:
        """Of every file's path, size and time of change."""
        return digest(self.kind, str(self.path), self._files)

    @cached_property
    def _files(self) -> list[tuple[str, int, int]]:
        """(path below the folder, size, time of change in ns) of audio and text files, sorted."""
        found = []

        def refuse(error: OSError) -> None:
            raise DataError(f"{error.filename}: {error.strerror}") from None

        for folder, _, names in os.walk(self.path, onerror=refuse, followlinks=True):
            for name in names:
                path = os.path.join(folder, name)
                if not name.lower().endswith((*AUDIO_SUFFIXES, ".txt")):
                    continue
                try:
                    status = os.stat(path)
                except OSError:  # a link to nowhere: kept, it is a missing recording
                    found.append((os.path.relpath(path, self.path), -1, -1))
                else:
                    found.append((os.path.relpath(path, self.path), status.st_size, status.st_mtime_ns))
        return sorted(found)

    def entries(self) -> Iterator[Entry]:
        names = {name for name, _, _ in self._files}
        recordings = {_stem(n): n for n in sorted(names, reverse=True) if not n.lower().endswith(".txt")}
        if not recordings:
            raise DataError(f"{self.path}: no recordings below this folder ({', '.join(AUDIO_SUFFIXES)})")
        listed = self._listed(names)
        for number, stem in enumerate(sorted({*recordings, *listed}), 1):
            name = recordings.get(stem, stem + ".flac")
            text = listed.get(stem)
            if text is None:
                text = self._read(stem + ".txt") if stem + ".txt" in names else ""
            path = str(self.path / name)
            seconds, rate = _measure(path)
            yield Entry(simple_cut(f"{self.name}/{stem}", path, 0.0, seconds, text, rate=rate), number, -1)

    def _listed(self, names: set[str]) -> dict[str, str]:
        """Transcripts by stem from LibriSpeech's lists."""
        transcripts = {}
        for name in sorted(n for n in names if n.endswith(".trans.txt")):
            folder = os.path.dirname(name)
            for line in self._read(name, keep_lines=True).splitlines():
                identifier, _, text = line.strip().partition(" ")
                if identifier:
                    transcripts[os.path.join(folder, identifier)] = " ".join(text.split())
        return transcripts

    def _read(self, name: str, keep_lines: bool = False) -> str:
        try:
            text = (self.path / name).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{self.path / name}: cannot be read as text ({error})") from None
        return text if keep_lines else " ".join(text.split())


def _stem(name: str) -> str:
    return os.path.splitext(name)[0]


def _measure(path: str) -> tuple[float, int]:
    """Seconds and rate from a recording's header; a nominal second where there is none."""
    import soundfile

    try:
        if not Path(path).is_file():  # a pipe would wait for its writer
            return _UNKNOWN_SECONDS, ASSUMED_RATE
        info = soundfile.info(path)
    except (OSError, RuntimeError):
        return _UNKNOWN_SECONDS, ASSUMED_RATE
    if info.frames < 1 or info.samplerate < 1:
        return _UNKNOWN_SECONDS, ASSUMED_RATE
    return info.frames / info.samplerate, int(info.samplerate)

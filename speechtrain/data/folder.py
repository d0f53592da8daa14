"""A folder of recordings as a corpus."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from speechtrain.data.manifests import MOST_TEXT_BYTES, Entry, Manifest, Record, digest, measure, simple_cut
from speechtrain.errors import DataError

AUDIO_SUFFIXES = (".wav", ".flac", ".ogg", ".opus", ".mp3", ".sph", ".aiff", ".aif")
_MOST_LIST_BYTES = 2**25  # of one list of transcripts: 300,000 of LibriSpeech, whose largest list has 0.03 MB
_MOST_WAYS = 100  # by which a folder is reached, over links


class Folder(Manifest):
    """Every recording below a folder, in two layouts that may be mixed.

    One is ``x.wav`` (or flac, ogg, opus, mp3, sph, aiff) with its transcript in ``x.txt`` next to it.
    The other is LibriSpeech's: each line of ``*.trans.txt`` is an id, a space and the transcript of
    ``<id>.flac`` next to it, and an id begins with the speaker. A recording without either has an empty
    transcript. Ids are paths that start with the folder's name, without suffix. Each header is read once,
    for the length; a recording whose header cannot be read is kept and reported like any other bad one.
    """

    kind = "folder"

    def fingerprint(self) -> str:
        """Return a hash of every file's path, size and modification time."""
        return digest(self.kind, str(self.path), self._files)

    @cached_property
    def _files(self) -> list[tuple[str, int, int]]:
        """(path below the folder, size, modification time in ns) of audio and text files, sorted."""
        found = []
        for name in files_below(self.path, (*AUDIO_SUFFIXES, ".txt")):
            try:
                status = os.stat(self.path / name)
                found.append((name, status.st_size, status.st_mtime_ns))
            except OSError:  # a broken link is kept as a missing recording
                found.append((name, -1, -1))
        return found

    def entries(self) -> Iterator[Entry]:
        names = {name for name, _, _ in self._files}
        audio = [name for name in sorted(names, reverse=True) if not name.lower().endswith(".txt")]
        recordings = {os.path.splitext(name)[0]: name for name in audio}
        if not recordings:
            raise DataError(f"{self.path} contains no recordings ({', '.join(AUDIO_SUFFIXES)})")
        listed = self._listed(names)
        # b.wav may have its transcript in B.TXT, if there is no b.txt
        texts = {key: name for name in sorted(names - {*audio}) for key in (name.lower(), name)}
        for number, stem in enumerate(sorted({*recordings, *listed}), 1):
            name = recordings.get(stem, stem + ".flac")
            text, speaker = listed.get(stem, (None, None))
            if text is None:
                beside = texts.get(f"{stem}.txt") or texts.get(f"{stem}.txt".lower())
                text = " ".join(self._read(beside).split()) if beside else ""
            path = str(self.path / name)
            seconds, rate = measure(path)
            more: Record = {"rate": rate, "speaker": speaker}
            cut = simple_cut(f"{self.name}/{stem}", path, 0.0, duration=seconds, text=text, **more)
            yield Entry(cut, number, -1)

    def _listed(self, names: set[str]) -> dict[str, tuple[str, str | None]]:
        """Return transcript and speaker by stem from LibriSpeech's lists, SPEAKER-CHAPTER.trans.txt."""
        transcripts = {}
        for name in sorted(n for n in names if n.endswith(".trans.txt")):
            folder, chapter = os.path.split(name.removesuffix(".trans.txt"))
            for line in self._read(name, _MOST_LIST_BYTES).splitlines():
                identifier, _, text = line.strip().partition(" ")
                if identifier:
                    is_named = "-" in chapter and identifier.startswith(chapter + "-")
                    speaker = chapter.partition("-")[0] if is_named else None
                    transcripts[os.path.join(folder, identifier)] = " ".join(text.split()), speaker
        return transcripts

    def _read(self, name: str, limit: int = MOST_TEXT_BYTES) -> str:
        try:
            return self.transcript(self.path / name, limit)
        except (OSError, ValueError) as error:
            raise DataError(f"{self.path / name}: cannot be read as UTF-8 text ({error})") from None


def files_below(folder: Path, suffixes: tuple[str, ...]) -> list[str]:
    """Return the sorted relative paths of files with these suffixes, without hidden files and folders.

    Raises DataError for a folder that cannot be read.
    """

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: {error.strerror}") from None

    found = []
    ways: dict[str, tuple[tuple[int, int], ...]] = {}  # the folders on the way to each: links may lead back
    visits: Counter[tuple[int, int]] = Counter()  # or double the ways at each level
    for place, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        status, above = os.stat(place), ways.get(os.path.dirname(place), ())
        own = (status.st_dev, status.st_ino)
        ways[place], visits[own] = (*above, own), visits[own] + 1
        if own in above or visits[own] > _MOST_WAYS:
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if name.lower().endswith(suffixes) and not name.startswith("."):
                found.append(os.path.relpath(os.path.join(place, name), folder))
    return sorted(found)

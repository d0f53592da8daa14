"""A folder of recordings as a corpus."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from speechtrain.data.formats.manifests import (
    MOST_TEXT_BYTES,
    Entry,
    Manifest,
    Record,
    digest,
    measure,
    simple_cut,
)
from speechtrain.errors import DataError

AUDIO_SUFFIXES = (".wav", ".flac", ".ogg", ".opus", ".mp3", ".sph", ".aiff", ".aif")
_OTHER_SUFFIXES = (".m4a", ".mp4", ".aac", ".wma", ".amr", ".3gp", ".webm", ".caf", ".au", ".mov", ".mkv")
_MOST_LIST_BYTES = 2**25  # of one list of transcripts: 300,000 of LibriSpeech, whose largest list has 0.03 MB
_LAYOUTS = 3  # that are read: an index of fewer is built again
_MOST_WAYS = 100  # by which a folder is reached, over links


class Folder(Manifest):
    """Every recording below a folder, in three layouts that may be mixed.

    One is ``x.wav`` (or flac, ogg, opus, mp3, sph, aiff) with its transcript in ``x.txt`` next to it.
    Another is a folder ``wav`` with a folder ``txt`` beside it: ``wav/x.wav`` and ``txt/x.txt``.
    The third is LibriSpeech's: each line of ``*.trans.txt`` is an id, a space and the transcript of
    ``<id>.flac`` next to it, and an id begins with the speaker. A recording without either has an empty
    transcript. Ids are paths that start with the folder's name, without suffix. Each header is read once,
    for the length; a recording whose header cannot be read is kept and reported like any other bad one.
    """

    kind = "folder"

    def fingerprint(self) -> str:
        """Return a hash of every file's path, size and modification time."""
        return digest(self.kind, _LAYOUTS, str(self.path), self._files)

    def warnings(self) -> Iterator[str]:
        names = files_below(self.path, _OTHER_SUFFIXES)
        names = [name for name in names if os.path.splitext(name)[0] not in self._recordings]
        if names:
            suffixes = ", ".join(AUDIO_SUFFIXES)
            yield f"{self.path}: {len(names)} files are not read, such as {names[0]}. Convert to {suffixes}"

    def text_hint(self) -> str:
        names = [name for name in files_below(self.path, ("",)) if not name.lower().endswith(AUDIO_SUFFIXES)]
        namesakes = {Path(name).stem: name for name in names}
        stems = sorted(self._recordings)
        stem = next((stem for stem in stems if os.path.basename(stem) in namesakes), stems[0])
        hint = f"{len(stems)} recordings, for example {self._recordings[stem]}; no {stem}.txt"
        namesake = namesakes.get(os.path.basename(stem))
        return f"{hint}, but {namesake} has its name" if namesake else hint

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

    @cached_property
    def _recordings(self) -> dict[str, str]:
        """The path of each recording, by the path without suffix."""
        names = [name for name, _, _ in reversed(self._files) if not name.lower().endswith(".txt")]
        return {os.path.splitext(name)[0]: name for name in names}

    @cached_property
    def _texts(self) -> dict[str, str]:
        """The path of each text, by itself and in lower case: b.wav may have B.TXT."""
        texts = dict[str, str]()
        for name, _, _ in self._files:
            if name.lower().endswith(".txt"):
                texts |= {name.lower(): name, name: name}
        return texts

    def _text(self, stem: str) -> str:
        """Return the transcript of a recording. It is empty if there is none."""
        for name in (stem, f"/{stem}".replace("/wav/", "/txt/")[1:]):
            if path := self._texts.get(f"{name}.txt") or self._texts.get(f"{name}.txt".lower()):
                return " ".join(self._read(path).split())
        return ""

    def entries(self) -> Iterator[Entry]:
        if not self._recordings:
            raise DataError(f"{self.path} contains no recordings ({', '.join(AUDIO_SUFFIXES)})")
        listed = self._listed({name for name, _, _ in self._files})
        for number, stem in enumerate(sorted({*self._recordings, *listed}), 1):
            name = self._recordings.get(stem, stem + ".flac")
            text, speaker = listed.get(stem, (None, None))
            if text is None:
                text = self._text(stem)
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

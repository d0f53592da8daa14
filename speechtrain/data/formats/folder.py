"""Reader of a folder of recordings as a corpus."""

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
    digest,
    measure,
    simple_cut,
)
from speechtrain.errors import DataError

AUDIO_SUFFIXES = (".wav", ".flac", ".ogg", ".opus", ".mp3", ".sph", ".aiff", ".aif")
_OTHER_SUFFIXES = (".m4a", ".mp4", ".aac", ".wma", ".amr", ".3gp", ".webm", ".caf", ".au", ".mov", ".mkv")
# The largest list of transcripts: 300,000 of LibriSpeech, whose largest list has 0.03 MB.
_MAX_LIST_BYTES = 2**25
_LAYOUTS = 3  # the number of layouts that are read: an index of fewer layouts is built again
_MAX_VISITS = 100  # the most paths by which one folder is read, if links lead to it


class Folder(Manifest):
    """Every recording below a folder, in three layouts that may be mixed.

    - ``x.wav`` (or flac, ogg, opus, mp3, sph, aiff) with its transcript in ``x.txt`` next to it.
    - A folder ``wav`` with a folder ``txt`` next to it: ``wav/x.wav`` and ``txt/x.txt``.
    - LibriSpeech's: each line of ``*.trans.txt`` is an id, a space and the transcript of ``<id>.flac`` next
      to it. An id begins with the speaker.

    A recording without a transcript file has an empty transcript. The id of a cut is the path of the
    recording without suffix, from the folder's name on. Each header is read once, for the length. A
    recording with a damaged header stays in the corpus and is reported like other damaged recordings.
    """

    kind = "folder"

    def fingerprint(self) -> str:
        """Return a hash of every file's path, size and modification time."""
        return digest(self.kind, _LAYOUTS, str(self.path), self._files)

    def warnings(self) -> Iterator[str]:
        names = []
        for name in files_below(self.path, _OTHER_SUFFIXES):
            if os.path.splitext(name)[0] not in self._recordings:
                names.append(name)
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
        """The (path below the folder, size, modification time in ns) of audio and text files, sorted."""
        files = []
        for name in files_below(self.path, (*AUDIO_SUFFIXES, ".txt")):
            try:
                status = os.stat(self.path / name)
                files.append((name, status.st_size, status.st_mtime_ns))
            except OSError:  # A broken link counts as a recording that is missing.
                files.append((name, -1, -1))
        return files

    @cached_property
    def _recordings(self) -> dict[str, str]:
        """The path of each recording by its stem, which is the path without suffix."""
        names = [name for name, _, _ in reversed(self._files) if not name.lower().endswith(".txt")]
        return {os.path.splitext(name)[0]: name for name in names}

    @cached_property
    def _texts(self) -> dict[str, str]:
        """The path of each text by the same path and by that path in lower case: b.wav may have B.TXT."""
        texts = dict[str, str]()
        for name, _, _ in self._files:
            if name.lower().endswith(".txt"):
                texts |= {name.lower(): name, name: name}
        return texts

    def _text(self, stem: str) -> str:
        """Return the transcript of a recording from its text file. It is empty if the file is missing."""
        for text_stem in (stem, f"/{stem}".replace("/wav/", "/txt/")[1:]):
            name = f"{text_stem}.txt"
            path = self._texts.get(name) or self._texts.get(name.lower())
            if path:
                return " ".join(self._read(path).split())
        return ""

    def entries(self) -> Iterator[Entry]:
        if not self._recordings:
            raise DataError(f"{self.path} contains no recordings ({', '.join(AUDIO_SUFFIXES)})")
        utterances = self._librispeech()
        for number, stem in enumerate(sorted({*self._recordings, *utterances}), 1):
            name = self._recordings.get(stem, stem + ".flac")
            text, speaker = utterances.get(stem, (None, None))
            if text is None:
                text = self._text(stem)
            path = str(self.path / name)
            seconds, rate = measure(path)
            cut = simple_cut(f"{self.name}/{stem}", path, 0.0, seconds, text, rate=rate, speaker=speaker)
            yield Entry(cut, number, -1)

    def _librispeech(self) -> dict[str, tuple[str, str | None]]:
        """Return transcript and speaker by stem from LibriSpeech's lists, SPEAKER-CHAPTER.trans.txt."""
        transcripts = {}
        for name, _, _ in self._files:
            if not name.endswith(".trans.txt"):
                continue
            folder, chapter = os.path.split(name.removesuffix(".trans.txt"))
            for line in self._read(name, _MAX_LIST_BYTES).splitlines():
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
    files = []
    for parent, names in _walk(folder):
        for name in names:
            if name.lower().endswith(suffixes) and not name.startswith("."):
                files.append(os.path.relpath(os.path.join(parent, name), folder))
    return sorted(files)


def _walk(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder that is not hidden, with the names of its files. Links are followed.

    Links may lead back to a folder above them, or double the number of paths at each level. So a folder is
    not read below itself, and not more than ``_MAX_VISITS`` times.
    """

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: {error.strerror}") from None

    chains: dict[str, tuple[tuple[int, int], ...]] = {}  # each folder with the folders above it
    visits: Counter[tuple[int, int]] = Counter()
    for parent, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        status = os.stat(parent)
        identity = (status.st_dev, status.st_ino)
        ancestors = chains.get(os.path.dirname(parent), ())
        chains[parent] = (*ancestors, identity)
        visits[identity] += 1
        if identity in ancestors or visits[identity] > _MAX_VISITS:
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield parent, names

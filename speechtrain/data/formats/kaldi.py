"""Kaldi's data directories."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import cached_property

from speechtrain.data.formats.manifests import (
    Entry,
    Manifest,
    Record,
    decoded,
    digest,
    is_gzip,
    numbered_lines,
    simple_cut,
    stamp,
)
from speechtrain.errors import DataError

LIST = "wav.scp"
_FILES = (LIST, "segments", "text", "utt2spk")
_NO_FILE = re.compile(r".*\||\|.*|-|.*\.ark:\d+")
_ABOVE = 4  # folders between a recipe, where paths of Kaldi and ESPnet start, and its data directories


class Kaldi(Manifest):
    """A folder with ``wav.scp`` and, if they exist, ``segments``, ``text`` and ``utt2spk``.

    A command in ``wav.scp`` is refused: no file of a corpus runs a program here. Relative paths start at the
    folder, or at the nearest of four above it that has the first recording. A speaker who is called
    like the utterance, as Kaldi writes where nobody knows, is none. Ids are the folder's name and
    the utterance's.
    """

    kind = "kaldi"

    def fingerprint(self) -> str:
        found = [stamp(self.path / name) for name in _FILES if (self.path / name).is_file()]
        return digest(self.kind, self.name, self._root, found)

    def bad(self, line: int, problem: str) -> DataError:
        """Return a DataError that names the list of utterances and its line."""
        return DataError(f"{self.path / self._utterances}:{line}: {problem}")

    def entries(self) -> Iterator[Entry]:
        recordings = {key: self._audio(rest, line) for line, key, rest in self._lines(LIST)}
        texts, speakers = ({key: rest for _, key, rest in self._lines(name)} for name in ("text", "utt2spk"))
        line, is_part = 0, self._utterances != LIST
        for line, name, rest in self._lines(self._utterances):
            recording, start, end = rest.split() if rest.count(" ") == 2 else (name, "0", "-1")
            if is_part and (rest.count(" ") != 2 or recording not in recordings):
                raise self.bad(line, f"is no 'UTTERANCE RECORDING START END' of a recording in {LIST}")
            times, path = {"start": start, "end": end}, recordings[recording]
            begin, last = (self.time(times, key, line) or 0.0 for key in ("start", "end"))
            length = {"duration": None if last == -1 else last - begin}
            seconds = self.seconds(length, "duration", line, path, begin)
            speaker = speakers.get(name, name)
            more: Record = {"speaker": None if speaker == name else speaker, "segment": is_part}
            more |= {"duration": seconds, "text": texts.get(name, "")}
            yield Entry(simple_cut(f"{self.name}/{name}", path, begin, **more), line, -1)
        if not line:
            raise DataError(f"{self.path / self._utterances} is empty; it has a line for each utterance")

    @property
    def _utterances(self) -> str:
        return "segments" if (self.path / "segments").is_file() else LIST

    def _lines(self, name: str) -> Iterator[tuple[int, str, str]]:
        """Yield line, first word and the others, with single spaces, of each line; none of a missing file."""
        path = self.path / name
        if not path.is_file():
            return
        self.check_place(path)
        if is_gzip(path):
            raise DataError(f"{path} is gzipped, which Kaldi does not read: unpack it")
        for line, raw in numbered_lines(path):
            if words := decoded(raw, path, line).split():
                yield line, words[0], " ".join(words[1:])

    @cached_property
    def _root(self) -> str:
        names = (rest for _, _, rest in self._lines(LIST))
        folders, first = (self.path, *self.path.parents[:_ABOVE]), next(names, "")
        return str(next((folder for folder in folders if os.path.isfile(folder / first)), self.path))

    def _audio(self, name: str, line: int) -> str:
        if not name or _NO_FILE.fullmatch(name):
            told = f"is {name[:80]!r}; commands and archives are not read: name a file, such as the one that"
            raise DataError(f"{self.path / LIST}:{line}: {told} the command reads, or its output")
        return os.path.join(self._root, os.path.expanduser(name))

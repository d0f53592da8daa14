"""Reader of Kaldi's data directories."""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterator
from functools import cached_property

from speechtrain.data.formats.manifests import (
    Manifest,
    Record,
    decode_line,
    digest,
    is_gzip,
    numbered_lines,
    simple_cut,
    stamp,
)
from speechtrain.data.recordings import path_on_disk
from speechtrain.errors import DataError

LIST = "wav.scp"
"""The list of recordings. A folder with this file is a data directory."""

_FILES = (LIST, "segments", "text", "utt2spk")
_COMMAND_OR_ARCHIVE = re.compile(r".*\||\|.*|-|.*\.ark:\d+")
# The most levels between a data directory and the recipe's folder. Paths in the recipes of Kaldi and ESPnet
# are relative to the recipe's folder.
_MAX_LEVELS = 4


class Kaldi(Manifest):
    """A folder with ``wav.scp`` and, if they exist, ``segments``, ``text`` and ``utt2spk``.

    A command in ``wav.scp`` is refused, because no file of a corpus may run a program. Paths are relative to
    this folder or to one of four folders above it: the nearest one that has the first recording. Kaldi writes
    the utterance's id as the speaker if the speaker is unknown, so such a speaker is omitted. The id of a cut
    is the folder's name, a slash and the utterance's id.
    """

    kind = "kaldi"

    def fingerprint(self) -> str:
        stamps = [stamp(self.path / name) for name in _FILES if (self.path / name).is_file()]
        return digest(self.kind, self.name, self._root, stamps)

    def error_at(self, line: int, problem: str) -> DataError:
        """Return a DataError with the path of the list of utterances, the line and the problem."""
        return DataError(f"{self.path / self._utterance_list}:{line}: {problem}")

    def entries(self) -> Iterator[tuple[int, Record]]:
        paths = {}
        for line, recording, name in self._lines(LIST):
            if not name or _COMMAND_OR_ARCHIVE.fullmatch(name):
                raise DataError(
                    f"{self.path / LIST}:{line}: is {name[:80]!r}. Commands and archives are not read: name "
                    "a file, such as the one that the command reads, or its output"
                )
            paths[recording] = os.path.join(self._root, os.path.expanduser(name))
        texts = {utterance: words for _, utterance, words in self._lines("text")}
        speakers = {utterance: words for _, utterance, words in self._lines("utt2spk") if words != utterance}
        is_segment = self._utterance_list != LIST
        line = 0
        for line, utterance, words in self._lines(self._utterance_list):
            # Without ``segments``, an utterance is a whole recording with the same id.
            recording, start, duration = utterance, 0.0, None
            if is_segment:
                recording, start, duration = self._segment(words, line, paths)
            path = paths[recording]
            duration = self.duration_field({"duration": duration}, "duration", line, path, start)
            cut = simple_cut(
                f"{self.name}/{utterance}",
                path,
                start,
                duration,
                text=texts.get(utterance, ""),
                speaker=speakers.get(utterance),
                segment=is_segment,
            )
            yield line, cut
        if not line:
            raise DataError(
                f"{self.path / self._utterance_list} is empty. It needs a line for each utterance"
            )

    @property
    def _utterance_list(self) -> str:
        """The name of the file with a line for each utterance."""
        return "segments" if (self.path / "segments").is_file() else LIST

    def _segment(self, words: str, line: int, recordings: Container[str]) -> tuple[str, float, float | None]:
        """Return recording, start and duration in seconds from a line of ``segments``.

        ``words`` is the line without the utterance's id. The duration is None if the end is -1, which means
        the end of the recording.
        """
        recording, *times = words.split(" ")
        if len(times) != 2 or recording not in recordings:
            raise self.error_at(line, f"is not 'UTTERANCE RECORDING START END' of a recording in {LIST}")
        record = {"start": times[0], "end": times[1]}
        start = self.time_field(record, "start", line) or 0.0
        end = self.time_field(record, "end", line) or 0.0
        duration = None if end == -1 else end - start
        return recording, start, duration

    def _lines(self, name: str) -> Iterator[tuple[int, str, str]]:
        """Yield (line number, first word, text after it) of each line that is not blank.

        The words of the text are separated by single spaces. A missing file yields nothing.
        """
        path = self.path / name
        if not path.is_file():
            return
        self.refuse_outside(path)
        if is_gzip(path):
            raise DataError(f"{path} is gzipped, which Kaldi does not read: unpack it")
        for line, content in numbered_lines(path):
            words = decode_line(content, path, line).split()
            if words:
                yield line, words[0], " ".join(words[1:])

    @cached_property
    def _root(self) -> str:
        """The folder to which paths are relative (see the class)."""
        _, _, first_recording = next(self._lines(LIST), (0, "", ""))
        for folder in (self.path, *self.path.parents[:_MAX_LEVELS]):
            if os.path.isfile(path_on_disk(str(folder / first_recording))):
                return str(folder)
        return str(self.path)

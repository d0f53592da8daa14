"""The results that ``speechtrain transcribe --out DIR`` writes: a file for each recording, and a journal.

The names of the files follow from the list of recordings alone. A result that is in the journal is not
computed again by the same command.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from speechtrain.errors import ConfigError, DataError, RecordingError, escape_controls
from speechtrain.files import atomic, json_text, writing
from speechtrain.inference.transcript import Transcript, format_transcript, utf8

if TYPE_CHECKING:
    from speechtrain.data.pieces import Recording

OUT_FIX = "name a folder that can be written by --out DIR"
_JOURNAL = ".transcribed"
_SUFFIXES = {"text": ".txt"}
"""Suffixes of files by format. For a format that is not listed, the suffix is the name of the format."""
_UNSAFE_CHARACTER = re.compile(r"^\.|[/\\%\x00-\x1f\x7f]")
_LONGEST_ID = 200  # bytes. The name of a file may have 255.
_KEPT_CHARACTERS = 40  # of a longer id. A character has up to four bytes.

Outcome = Transcript | RecordingError


@dataclass(frozen=True)
class Input:
    """A recording to transcribe, or one that cannot be used."""

    source: str  # the argument of the command that names it, or the folder or manifest that contains it
    name: str  # as in Recording
    audio: str  # as in Recording

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.audio

    @property
    def is_file(self) -> bool:
        """Whether the recording is a file of its own, and not an id in a manifest."""
        return self.name == self.audio

    @property
    def folder(self) -> str:
        """The folder that contains all recordings of the source. A manifest counts as a folder of its ids."""
        source = os.path.abspath(self.source)
        if os.path.isdir(source):
            return source
        return os.path.dirname(source) if self.is_file else os.path.splitext(source)[0]

    @property
    def place(self) -> str:
        """The path of the recording below ``folder``."""
        return (
            os.path.abspath(self.audio) if self.is_file else os.path.join(self.folder, _safe_name(self.name))
        )


def format_outcome(outcome: Outcome, form: str) -> str:
    """Return a transcript in the format ``form``. An error is an object of JSON, or an empty text."""
    if isinstance(outcome, Transcript):
        return format_transcript(outcome, form)
    if form != "json":
        return ""
    content = {"audio": utf8(outcome.audio), "error": utf8(str(outcome))}
    if outcome.name != outcome.audio:
        content["id"] = utf8(outcome.name)
    return json_text(content) + "\n"


class ResultFolder:
    """A folder of results in the format ``form``.

    ``command`` has everything that the text of a recording depends on, besides the recording.
    """

    def __init__(self, folder: Path, form: str, command: object, inputs: Iterable[Input]) -> None:
        self._folder, self._form, self._command = folder, form, command
        self._inputs = {recording.key: recording for recording in inputs}
        self._paths = result_paths(self._inputs.values(), _SUFFIXES.get(form, f".{form}"))
        self._journal = folder / _JOURNAL
        self._complete = set[str]()
        with writing(f"--out {folder}", OUT_FIX):
            if self._journal.exists():
                self._complete = set(self._journal.read_text().split())

    def lacks(self, recording: Recording | DataError) -> bool:
        """Return whether the result of ``recording`` has yet to be written."""
        if isinstance(recording, DataError):
            return True
        is_written = (self._folder / self._paths[recording.name, recording.audio]).exists()
        return not is_written or self._key(recording) not in self._complete

    def write(self, outcome: Outcome, form: str) -> None:
        """Write a transcript, or remove an earlier transcript of a recording that has become unusable."""
        name = self._paths.get((outcome.name, outcome.audio))
        if name is None:  # The error is of a whole folder.
            return
        path = self._folder / name
        text = format_outcome(outcome, form)
        with writing(str(path), OUT_FIX):
            if not text:
                path.unlink(missing_ok=True)
                return
            with atomic(path) as temporary:
                temporary.write_text(text, encoding="utf-8", errors="surrogateescape")
            if isinstance(outcome, Transcript):
                with self._journal.open("a") as journal:
                    journal.write(self._key(outcome) + "\n")

    def _key(self, recording: Recording | Transcript) -> str:
        """Return the entry of the journal: a hash of the command, the recording and its files."""
        source = self._inputs[recording.name, recording.audio].source
        files = [_version(path) for path in (source, recording.audio)]
        seconds = round(recording.seconds, 3)
        return _digest([self._command, self._form, recording.name, recording.audio, seconds, files])


def _digest(content: object) -> str:
    """Return a hash of JSON-like content as 16 hexadecimal digits."""
    return hashlib.sha256(json_text(content).encode(errors="surrogateescape")).hexdigest()[:16]


def _version(path: str) -> tuple[int, int]:
    """Return the size and the modification time in ns of a file, but not of a folder: files may be added."""
    if not os.path.isfile(path):
        return -1, -1
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def result_paths(inputs: Iterable[Input], suffix: str) -> dict[tuple[str, str], str]:
    """Return the path of each result below the folder of ``--out``, by the key of its input.

    A recording keeps the folders below the common folder of all sources. A manifest counts as a folder. If
    two recordings differ only in their suffixes, their results keep these. Raises ConfigError for two
    recordings with one result.
    """
    inputs = [recording for recording in inputs if not os.path.isdir(recording.audio)]
    if not inputs:
        return {}
    common_folder = os.path.commonpath([recording.folder for recording in inputs])
    places = {recording.key: os.path.relpath(recording.place, common_folder) for recording in inputs}
    stem_counts = Counter(os.path.splitext(place)[0] for place in places.values())
    paths = dict[str, tuple[str, str]]()
    for recording in inputs:
        path = places[recording.key]
        stem, _ = os.path.splitext(path)
        if recording.is_file and stem_counts[stem] == 1:
            path = stem
        path += suffix
        if path in paths:
            both = f"{escape_controls(recording.name)} and {escape_controls(paths[path][0])}"
            raise ConfigError(f"--out: {both} would both be written to {path}. Transcribe them one by one")
        paths[path] = recording.key
    return {key: path for path, key in paths.items()}


def _safe_name(name: str) -> str:
    """Return the id in a manifest as the name of a file. Different ids have different names."""
    safe_name = _UNSAFE_CHARACTER.sub(lambda match: f"%{ord(match[0]):02X}", name) or "%"
    if len(safe_name.encode(errors="surrogateescape")) > _LONGEST_ID:
        return f"{safe_name[:_KEPT_CHARACTERS]}-{_digest(name)}"
    return safe_name

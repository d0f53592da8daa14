"""The files of ``speechtrain transcribe --out DIR``. Their names follow from the list of recordings alone."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from speechtrain.errors import ConfigError, DataError, RecordingError, escape_controls
from speechtrain.files import atomic, json_text, read_text, writing
from speechtrain.inference.transcript import Transcript, format_transcript, utf8

if TYPE_CHECKING:
    from speechtrain.data.pieces import Recording

OUT_FIX = "name a folder that can be written by --out DIR"
_COMMAND_FILE = ".transcribed"
_SUFFIXES = {"text": ".txt"}
"""Suffixes of files by format. For a format that is not listed, the suffix is the name of the format."""
_UNSAFE_CHARACTER = re.compile(r"^\.|[/\\%\x00-\x1f\x7f\ud800-\udfff]")
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
    def path(self) -> str:
        """The path of the recording below ``folder``."""
        if self.is_file:
            return os.path.abspath(self.audio)
        return f"{self.folder}/{_safe_name(self.name)}"


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


def print_outcome(outcome: Outcome, form: str) -> None:
    """Print a transcript or an error in the format ``form``."""
    print(format_outcome(outcome, form), end="", flush=True)


class ResultFolder:
    """A folder of results. A result is complete if it is newer than its recording and than the command.

    The file ``.transcribed`` has ``command``, everything that a text depends on besides the recording. It is
    written only if the command differs from the previous one.
    """

    def __init__(self, folder: Path, form: str, command: object, inputs: Sequence[Input]) -> None:
        self._command_file = folder / _COMMAND_FILE
        self._sources = {recording.key: recording.source for recording in inputs}
        paths = result_paths(inputs, _SUFFIXES.get(form, f".{form}"))
        self._paths = {key: folder / path for key, path in paths.items()}
        is_new = not self._command_file.exists()
        if is_new:
            for path in self._paths.values():
                if os.path.lexists(path):
                    raise ConfigError(f"--out: {escape_controls(str(path))} exists. Name another folder")
        text = json_text([form, command])
        with writing(f"--out {folder}", OUT_FIX):
            if is_new or read_text(self._command_file) != text:
                with atomic(self._command_file) as temporary:
                    temporary.write_text(text)

    def lacks(self, recording: Recording | DataError) -> bool:
        """Return whether the result of ``recording`` has yet to be written."""
        if isinstance(recording, DataError):
            return True
        key = recording.name, recording.audio
        needed_files: list[str | Path] = [recording.audio, self._sources[key], self._command_file]
        return _time(self._paths[key]) <= max(map(_time, needed_files))

    def write(self, outcome: Outcome, form: str) -> None:
        """Write a transcript. Instead of an error, an earlier transcript of the recording is removed."""
        path = self._paths.get((outcome.name, outcome.audio))
        if isinstance(outcome, RecordingError):
            print_outcome(outcome, form)
            if path is not None:  # Otherwise the error is of a whole folder.
                path.unlink(missing_ok=True)
            return
        path = self._paths[outcome.name, outcome.audio]
        with writing(str(path), OUT_FIX), atomic(path) as temporary:
            temporary.write_text(format_outcome(outcome, form), encoding="utf-8", errors="surrogateescape")


def _time(path: str | Path) -> int:
    """Return the modification time of a file in ns. The files of a folder have their own, so it has 0."""
    return os.stat(path).st_mtime_ns if os.path.isfile(path) else 0


def result_paths(inputs: Sequence[Input], suffix: str) -> dict[tuple[str, str], str]:
    """Return the path of each result below the folder of ``--out``, by the key of its input.

    A recording keeps the folders below the common folder of all sources. If two recordings differ only in
    their suffixes, their results keep these. Raises ConfigError for two recordings with one result.
    """
    files = [recording for recording in inputs if not os.path.isdir(recording.audio)]
    if not files:
        return {}
    common_folder = os.path.commonpath([recording.folder for recording in files])
    relative_paths = {recording: os.path.relpath(recording.path, common_folder) for recording in files}
    stem_counts = Counter(os.path.splitext(path)[0] for path in set(relative_paths.values()))
    keys = dict[str, tuple[str, str]]()  # by the path of the result
    for recording, relative_path in relative_paths.items():
        stem, _ = os.path.splitext(relative_path)
        is_stem_unique = recording.is_file and stem_counts[stem] == 1
        path = (stem if is_stem_unique else relative_path) + suffix
        if keys.setdefault(path, recording.key) != recording.key:
            both = f"{escape_controls(recording.name)} and {escape_controls(keys[path][0])}"
            raise ConfigError(f"--out: {both} would both be written to {path}. Transcribe them one by one")
    return {key: path for path, key in keys.items()}


def _safe_name(name: str) -> str:
    """Return the id in a manifest as the name of a file. Different ids have different names."""
    safe_name = _UNSAFE_CHARACTER.sub(lambda match: f"%{ord(match[0]):02X}", name) or "%"
    name_bytes = os.fsencode(safe_name)
    if len(name_bytes) > _LONGEST_ID:
        return f"{safe_name[:_KEPT_CHARACTERS]}-{hashlib.sha256(name_bytes).hexdigest()[:16]}"
    return safe_name

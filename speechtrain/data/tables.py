"""Tables of recordings: CSV, TSV and JSON objects, whose columns are found by name."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from speechtrain.data.folder import AUDIO_SUFFIXES
from speechtrain.data.manifests import (
    Entry,
    Manifest,
    Record,
    decoded,
    digest,
    first_line,
    numbered_lines,
    records,
    simple_cut,
    stamp,
)
from speechtrain.errors import DataError

COLUMNS = {
    "audio": (
        *("audio", "path", "file", "file_name", "filename", "wav", "wav_filename"),
        *("audio_path", "audio_file", "audio_filename", "audio_filepath"),
    ),
    "text": ("text", "sentence", "transcript", "transcription", "wrd", "words", "tgt_text"),
    "speaker": ("speaker", "speaker_id", "client_id", "spk_id", "spk"),
    "duration": ("duration",),
    "start": ("start", "offset"),
    "end": ("end",),
}
"""Names, in small letters, by which a column is found; the keys are those of a source."""

_DELIMITERS = "\t,;|"
_LONGEST_HEADER, _LONGEST_ROW = 2**16, 2**20  # bytes; a text of LONGEST_TRANSCRIPT has fewer
_ROOT = re.compile(r"[${]*data_(root|folder)}?/")  # of SpeechBrain, whose recipes replace it
_LJSPEECH = ["id", "text", "normalised"]


class Form(NamedTuple):
    """How a table is written: the delimiter (of JSON: empty), and the columns (of no table: none)."""

    mark: str
    columns: list[str]
    has_header: bool = False


class Table(Manifest):
    """A table with a header, or LJSpeech's: lines ``id|text`` or ``id|text|normalised`` of wavs/id.wav.

    ``columns`` names the column for a key of COLUMNS; others are found by name, and a recording without
    the column of texts has an empty one. Times are in seconds; what ``duration`` and ``end`` do not tell is
    in the header of the recording. Paths are relative to the table, of Common Voice's to ``clips``
    beside it. Tabs and ``|`` separate without quoting, because a text may have a single quotation mark.
    """

    kind = "table"

    def __init__(self, path: Path, columns: Mapping[str, str] | None = None) -> None:
        super().__init__(path)
        self.columns = dict(columns or {})
        if self.name == "metadata":  # as every corpus calls it
            self.name = self.path.parent.name

    def fingerprint(self) -> str:
        return digest(self.kind, self.name, self.columns, self._root, *stamp(self.path))

    @cached_property
    def form(self) -> Form:
        """How this table is written."""
        if first_line(self.path)[1].startswith((b"{", b"[", b"-")):
            return Form("", list(next(records(self.path))[2]))
        # not first_line's, which has no tab before its first word
        raw = next(raw for _, raw in numbered_lines(self.path, in_array=True) if raw.strip())
        head = raw[:_LONGEST_HEADER].decode("utf-8-sig", errors="replace")
        rows = {mark: _cells(head, mark) for mark in _DELIMITERS}
        named = self.columns.values() or {name for names in COLUMNS.values() for name in names}
        for mark, cells in rows.items():
            if any(cell in named or cell.lower() in named for cell in cells):
                return Form(mark, cells, has_header=True)
        if not self.columns and 2 <= len(rows["|"]) <= 3:
            return Form("|", _LJSPEECH[: len(rows["|"])])
        mark = max(rows, key=lambda mark: len(rows[mark]))
        is_table = len(rows[mark]) > 1 and len(raw) <= _LONGEST_HEADER and "\0" not in head
        return Form(mark, rows[mark] if is_table else [], has_header=True)

    @property
    def _is_ljspeech(self) -> bool:
        return bool(self.form.mark) and not self.form.has_header

    @cached_property
    def _chosen(self) -> dict[str, str]:
        """The column of each key that has one. Raises DataError that says how to choose it."""
        columns, chosen = self.form.columns, dict[str, str]()
        if self._is_ljspeech:
            return {"audio": columns[0], "text": columns[-1]}
        for key, names in COLUMNS.items():
            wanted = self.columns.get(key)
            found = [c for c in columns if (c == wanted if wanted else c.lower() in names)]
            if (wanted and not found) or (key == "audio" and not found):
                told = f"no column {wanted!r}" if wanted else "no column that is known as its recordings"
                raise self._unclear(f"has {told}", key)
            if len(found) > 1 and (wanted or key in ("audio", "text")):
                raise self._unclear(f"has {len(found)} columns that may be its {key}", key)
            chosen |= {key: found[0]} if found else {}
        return chosen

    def _unclear(self, problem: str, key: str) -> DataError:
        columns = self.form.columns
        shown = ", ".join(repr(column[:40]) for column in columns[:20]) + (" …" if len(columns) > 20 else "")
        return self.bad(1, f"{problem}: {shown}; choose with {{path: {self.path.name}, {key}: COLUMN}}")

    @cached_property
    def _root(self) -> str:
        """The folder of relative paths."""
        clips = self.path.parent / "clips"
        return str(clips if "client_id" in self.form.columns and clips.is_dir() else self.path.parent)

    def entries(self) -> Iterator[Entry]:
        chosen, line = self._chosen, 0
        for line, row in self._rows():
            given = {key: row.get(chosen[key]) if key in chosen else None for key in COLUMNS}
            yield Entry(self._cut(given, line), line, -1)
        if not line:
            raise DataError(f"{self.path} has a header only; add a row for each recording")

    def _rows(self) -> Iterator[tuple[int, Record]]:
        """Yield (line, value by column) of each recording."""
        mark, columns, has_header = self.form
        if not mark:
            yield from ((line, record) for line, _, record in records(self.path))
            return
        left = _LONGEST_ROW

        def lines() -> Iterator[str]:
            nonlocal left
            for line, raw in numbered_lines(self.path):
                left -= len(raw)
                if left < 0:
                    raise self.bad(line, "a row is too long to be read; is a quotation mark not closed?")
                yield decoded(raw, self.path, line)

        reader = _reader(lines(), mark)
        try:
            for cells in reader:
                left = _LONGEST_ROW
                if not "".join(cells).strip():
                    continue
                if has_header:
                    has_header = False
                    continue
                if len(cells) != len(columns):
                    told = f"has {len(cells)} cells, the table has {len(columns)} columns"
                    raise self.bad(reader.line_num, f"{told}; put a cell with {mark!r} in quotation marks")
                cells = map(_unquoted, cells) if mark == "\t" else cells
                yield reader.line_num, dict(zip(columns, cells, strict=True))
        except csv.Error as error:
            raise self.bad(reader.line_num, f"is no row of a table ({error})") from None

    def _cut(self, given: Record, line: int) -> Record:
        name = _ROOT.sub("", self.text(given, "audio", line), count=1)
        if not name:
            raise self.bad(line, f"has no recording in column {self._chosen['audio']!r}")
        if self._is_ljspeech:
            name = name if name.lower().endswith(AUDIO_SUFFIXES) else f"{name}.wav"
            name = name if "/" in name else f"wavs/{name}"
        path = os.path.join(self._root, os.path.expanduser(name))
        start, end = self._time(given, "start", line), self._time(given, "end", line)
        begin, is_part = start or 0.0, start is not None or end is not None
        if end is None:
            given["duration"] = self._time(given, "duration", line)
            end = begin + self.seconds(given, "duration", line, path, begin)
        if not 0 <= begin <= end:
            raise self.bad(line, f"starts at {begin:g} s and ends at {end:g} s")
        cut_id = f"{self.name}:{line}:{os.path.splitext(os.path.basename(name))[0]}"
        said: dict[str, Any] = {"text": " ".join(self.text(given, "text", line).split())}
        said |= {"speaker": given["speaker"] or None, "segment": is_part}
        return simple_cut(cut_id, path, begin, duration=end - begin, **said)

    def _time(self, given: Record, key: str, line: int) -> float | None:
        value = given[key]
        if isinstance(value, str):
            try:
                value = float(value) if value.strip() else None
            except ValueError:
                raise self.bad(line, f"{key!r} is {value[:40]!r}, not a number") from None
        return None if value is None else self.number({key: value}, key, line)


def _reader(lines: Any, mark: str) -> Any:
    quoting: Any = csv.QUOTE_NONE if mark in "\t|" else csv.QUOTE_MINIMAL
    return csv.reader(lines, delimiter=mark, quoting=quoting, skipinitialspace=True, strict=True)


def _cells(head: str, mark: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(_reader([head], mark))]
    except csv.Error:
        return []


def _unquoted(cell: str) -> str:
    """A cell without the quotation marks that are around it, as others write one of a TSV."""
    inner = cell[1:-1].replace('""', "")
    return (
        cell[1:-1].replace('""', '"') if cell[:1] == cell[-1:] == '"' != cell and '"' not in inner else cell
    )

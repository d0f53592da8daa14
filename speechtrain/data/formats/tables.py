"""Tables of recordings: CSV, TSV and JSON objects, whose columns are found by name."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from speechtrain.data.formats.folder import AUDIO_SUFFIXES
from speechtrain.data.formats.manifests import (
    Entry,
    Nemo,
    Record,
    decode_line,
    digest,
    numbered_lines,
    records,
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


class Table(Nemo):
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
        return digest(self.kind, self.name, self.columns, self.beside(""), *stamp(self.path))

    @cached_property
    def form(self) -> Form:
        """How this table is written."""
        raw = next(raw for _, raw in numbered_lines(self.path, in_array=True) if raw.strip())
        head = raw[:_LONGEST_HEADER].decode("utf-8-sig", errors="replace")
        if head.lstrip().startswith(("{", "[", "-")):
            for _, _, record in records(self.path):
                return Form("", list(record))
        return self._form_of(head, len(raw) <= _LONGEST_HEADER and "\0" not in head)

    def _form_of(self, head: str, is_table: bool) -> Form:
        """Return the form of a table with delimiters. ``is_table`` is whether its first line may be one."""
        rows = {mark: _cells(head, mark) for mark in _DELIMITERS}
        named = self.columns.values() or {name for names in COLUMNS.values() for name in names}
        for mark, cells in rows.items():
            if any(cell in named or cell.lower() in named for cell in cells):
                return Form(mark, cells, has_header=True)
        if not self.columns and 2 <= len(rows["|"]) <= 3:
            return Form("|", _LJSPEECH[: len(rows["|"])])
        mark = max(rows, key=lambda mark: len(rows[mark]))
        columns = rows[mark]
        if len(columns) < 2 or not is_table:
            columns = []
        return Form(mark, columns, has_header=True)

    @cached_property
    def _chosen(self) -> dict[str, str]:
        """The column of each key that has one. Raises DataError that says how to choose it."""
        columns, chosen = self.form.columns, dict[str, str]()
        if self.form.mark and not self.form.has_header:
            return {"audio": columns[0], "text": columns[-1]}
        for key, names in COLUMNS.items():
            wanted = self.columns.get(key)
            found = [c for c in columns if (c == wanted if wanted else c.lower() in names)]
            problem = f"{len(found)} columns that may be its {key}" if len(found) > 1 else ""
            if not found:
                problem = f"no column {wanted!r}" if wanted else "no column that is known as its recordings"
            if problem and (wanted or key == "audio" or (found and key == "text")):
                more = " …" if len(columns) > 20 else ""
                shown = ", ".join(repr(column[:40]) for column in columns[:20]) + more
                how = f"choose with {{path: {self.path.name}, {key}: COLUMN}}"
                raise self.bad(1, f"has {problem}: {shown}; {how}")
            chosen |= {key: found[0]} if found else {}
        return chosen

    @cached_property
    def _clips(self) -> str:
        is_there = "client_id" in self.form.columns and os.path.isdir(f"{self._folder}/clips")
        return "clips" if is_there else ""

    def beside(self, name: str) -> str:
        """Resolve a path of the table."""
        return super().beside(os.path.join(self._clips, os.path.expanduser(name)))

    def entries(self) -> Iterator[Entry]:
        chosen, line = self._chosen, 0
        for line, row in self._rows():
            yield Entry(self.cut_of({key: row.get(chosen[key]) for key in chosen}, line), line, -1)
        if not line:
            raise DataError(f"{self.path} has a header only; add a row for each recording")

    def cut_of(self, record: Record, line: int) -> Record:
        name = _ROOT.sub("", self.text(record, "audio", line), count=1)
        if not name:
            raise self.bad(line, f"has no recording in column {self._chosen['audio']!r}")
        if self.form.mark and not self.form.has_header:
            name = name if name.lower().endswith(AUDIO_SUFFIXES) else f"{name}.wav"
            name = name if "/" in name else f"wavs/{name}"
        start, end, duration = (self.time(record, key, line) for key in ("start", "end", "duration"))
        begin = start or 0.0
        if begin < 0 or (end is not None and end < begin):
            raise self.bad(line, f"starts at {begin:g} s and ends at {end or 0:g} s")
        known: Record = {"audio_filepath": name, "speaker": record.get("speaker") or None}
        known["text"] = " ".join(self.text({"text": None, **record}, "text", line).split())
        known["offset"] = start if end is None else begin
        known["duration"] = duration if end is None else end - begin
        return super().cut_of(known, line)

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
                yield decode_line(raw, self.path, line)

        reader = _reader(lines(), mark)
        try:
            for cells in reader:
                left = _LONGEST_ROW
                if not "".join(cells).strip():
                    continue
                if len(cells) != len(columns):
                    told = f"has {len(cells)} cells, the table has {len(columns)} columns"
                    raise self.bad(reader.line_num, f"{told}; put a cell with {mark!r} in quotation marks")
                if not has_header:
                    cells = map(_unquoted, cells) if mark == "\t" else cells
                    yield reader.line_num, dict(zip(columns, cells, strict=True))
                has_header = False
        except csv.Error as error:
            raise self.bad(reader.line_num, f"is no row of a table ({error})") from None


def _reader(lines: Iterable[str], mark: str) -> Any:
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

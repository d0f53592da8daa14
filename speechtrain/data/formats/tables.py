"""Reader of tables of recordings: CSV, TSV and JSON objects, whose columns are detected by name."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

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
"""The names, in lower case, by which the column of each key of a source is detected."""

_DELIMITERS = "\t,;|"
_LONGEST_HEADER = 2**16  # bytes
_LONGEST_ROW = 2**20  # bytes. A text of LONGEST_TRANSCRIPT has fewer
_ROOT = re.compile(r"[${]*data_(root|folder)}?/")  # SpeechBrain's variable for the root folder of a table
_LJSPEECH = ["id", "text", "normalised"]


@dataclass(frozen=True)
class Form:
    """How a table is written."""

    delimiter: str  # empty for JSON
    columns: list[str]  # empty if the file is not a table
    has_header: bool = False


class Table(Nemo):
    """A table with a header, or LJSpeech's: lines ``id|text`` or ``id|text|normalised`` of wavs/id.wav.

    ``columns`` names the columns of keys of COLUMNS. Other columns are detected by name. Without a column of
    texts, each transcript is empty. Times are in seconds. Without ``duration`` and ``end``, the header of
    the recording is read. Paths are relative to the table. In Common Voice's tables they are relative to
    ``clips`` next to the table. Tabs and ``|`` separate without quoting, because a text may have a single
    quotation mark.
    """

    kind = "table"

    def __init__(self, path: Path, columns: Mapping[str, str] | None = None) -> None:
        super().__init__(path)
        self.columns = dict(columns or {})
        if self.name == "metadata":  # the table of every corpus in this layout has this name
            self.name = self.path.parent.name

    def fingerprint(self) -> str:
        return digest(self.kind, self.name, self.columns, self.resolve_path(""), *stamp(self.path))

    @cached_property
    def form(self) -> Form:
        """How this table is written."""
        lines = numbered_lines(self.path, in_array=True)
        header = next(content for _, content in lines if content.strip())
        text = header[:_LONGEST_HEADER].decode("utf-8-sig", errors="replace")
        if text.lstrip().startswith(("{", "[", "-")):
            for _, _, record in records(self.path):
                return Form("", list(record))
        return self._delimited_form(text, len(header) <= _LONGEST_HEADER and "\0" not in text)

    def _delimited_form(self, header: str, is_complete: bool) -> Form:
        """Return the form of a table with delimiters, from its first line.

        The form has no columns unless one column has a known name, or ``is_complete`` and there are several.
        """
        cells_by_delimiter = {delimiter: _cells(header, delimiter) for delimiter in _DELIMITERS}
        names = set(self.columns.values())
        if not names:
            names.update(*COLUMNS.values())
        for delimiter, cells in cells_by_delimiter.items():
            if not names.isdisjoint(cells) or not names.isdisjoint(map(str.lower, cells)):
                return Form(delimiter, cells, has_header=True)
        bar_cells = len(cells_by_delimiter["|"])
        if not self.columns and 2 <= bar_cells <= 3:
            return Form("|", _LJSPEECH[:bar_cells])
        delimiter = max(_DELIMITERS, key=lambda delimiter: len(cells_by_delimiter[delimiter]))
        columns = cells_by_delimiter[delimiter]
        if len(columns) < 2 or not is_complete:
            columns = []
        return Form(delimiter, columns, has_header=True)

    @property
    def _is_ljspeech(self) -> bool:
        return bool(self.form.delimiter) and not self.form.has_header

    @cached_property
    def _column_names(self) -> dict[str, str]:
        """The column of each key that has one. Raises DataError with the setting that chooses a column."""
        columns = self.form.columns
        if self._is_ljspeech:
            return {"audio": columns[0], "text": columns[-1]}
        column_names = {}
        for key, names in COLUMNS.items():
            explicit = self.columns.get(key)
            if explicit:
                candidates = [column for column in columns if column == explicit]
            else:
                candidates = [column for column in columns if column.lower() in names]
            must_be_one = explicit or key == "audio" or (candidates and key == "text")
            if must_be_one and len(candidates) != 1:
                raise self._column_error(key, len(candidates))
            if candidates:
                column_names[key] = candidates[0]
        return column_names

    def _column_error(self, key: str, candidates: int) -> DataError:
        """Return the error for a key with no column or several, with the setting that chooses a column."""
        explicit = self.columns.get(key)
        problem = "no column that is known as its recordings"
        if candidates:
            problem = f"{candidates} columns that may be its {key}"
        elif explicit:
            problem = f"no column {explicit!r}"
        columns = [repr(column[:40]) for column in self.form.columns[:20]]
        if len(self.form.columns) > 20:
            columns.append("…")
        setting = f"{{path: {self.path.name}, {key}: COLUMN}}"
        return self.error_at(1, f"has {problem}: {', '.join(columns)}. Choose with {setting}")

    @cached_property
    def _clips(self) -> str:
        """The folder of Common Voice's recordings, relative to the table. It is empty for other tables."""
        is_common_voice = "client_id" in self.form.columns and os.path.isdir(f"{self._folder}/clips")
        return "clips" if is_common_voice else ""

    def resolve_path(self, name: str) -> str:
        """Return an absolute path. A relative ``name`` starts at the folder of the recordings."""
        return super().resolve_path(os.path.join(self._clips, os.path.expanduser(name)))

    def entries(self) -> Iterator[Entry]:
        line, column_names = 0, self._column_names
        for line, row in self._rows():
            record = {key: row.get(column) for key, column in column_names.items()}
            yield Entry(self.cut_of(record, line), line, -1)
        if not line:
            raise DataError(f"{self.path} has a header only. Add a row for each recording")

    def cut_of(self, record: Record, line: int) -> Record:
        name = self._recording_name(record, line)
        start, end, duration = (self.time_field(record, key, line) for key in ("start", "end", "duration"))
        begin = start or 0.0
        if begin < 0 or (end is not None and end < begin):
            raise self.error_at(line, f"starts at {begin:g} s and ends at {end or 0:g} s")
        if end is not None:
            start, duration = begin, end - begin
        text = self.text_field(record, "text", line) if "text" in record else ""
        nemo_record = {
            "audio_filepath": name,
            "speaker": record.get("speaker") or None,
            "text": " ".join(text.split()),
            "offset": start,
            "duration": duration,
        }
        return super().cut_of(nemo_record, line)

    def _recording_name(self, record: Record, line: int) -> str:
        """Return the path of a recording, as the table has it. Raises DataError if the cell is empty."""
        name = _ROOT.sub("", self.text_field(record, "audio", line), count=1)
        if not name:
            raise self.error_at(line, f"has no recording in column {self._column_names['audio']!r}")
        if self._is_ljspeech:
            if not name.lower().endswith(AUDIO_SUFFIXES):
                name = f"{name}.wav"
            if "/" not in name:
                name = f"wavs/{name}"
        return name

    def _rows(self) -> Iterator[tuple[int, Record]]:
        """Yield line and value by column of each recording."""
        form = self.form
        if not form.delimiter:
            for line, _, record in records(self.path):
                yield line, record
            return
        rows = self._delimited_rows()
        if form.has_header:
            next(rows, None)
        for line, cells in rows:
            if form.delimiter == "\t":
                cells = [_unquoted(cell) for cell in cells]
            yield line, dict(zip(form.columns, cells, strict=True))

    def _delimited_rows(self) -> Iterator[tuple[int, list[str]]]:
        """Yield line and cells of each row that is not blank, with the header. Raises DataError."""
        form = self.form
        bytes_left = _LONGEST_ROW

        def lines() -> Iterator[str]:
            nonlocal bytes_left
            for line, content in numbered_lines(self.path):
                bytes_left -= len(content)
                if bytes_left < 0:
                    raise self.error_at(line, "a row is too long to be read. Is a quotation mark not closed?")
                yield decode_line(content, self.path, line)

        reader = _reader(lines(), form.delimiter)
        try:
            for cells in reader:
                bytes_left = _LONGEST_ROW
                if not "".join(cells).strip():
                    continue
                if len(cells) != len(form.columns):
                    counts = f"has {len(cells)} cells, the table has {len(form.columns)} columns"
                    fix = f"Put a cell with {form.delimiter!r} in quotation marks"
                    raise self.error_at(reader.line_num, f"{counts}. {fix}")
                yield reader.line_num, cells
        except csv.Error as error:
            raise self.error_at(reader.line_num, f"is not a row of a table ({error})") from None


def _reader(lines: Iterable[str], delimiter: str) -> Any:
    quoting: Any = csv.QUOTE_NONE if delimiter in "\t|" else csv.QUOTE_MINIMAL
    return csv.reader(lines, delimiter=delimiter, quoting=quoting, skipinitialspace=True, strict=True)


def _cells(line: str, delimiter: str) -> list[str]:
    """Return the cells of a line, or none if it is not a row."""
    try:
        return [cell.strip() for cell in next(_reader([line], delimiter))]
    except csv.Error:
        return []


def _unquoted(cell: str) -> str:
    """Return a cell of a TSV without the quotation marks that some programs write around it."""
    inner = cell[1:-1]
    is_quoted = len(cell) > 1 and cell[0] == cell[-1] == '"'
    if is_quoted and '"' not in inner.replace('""', ""):
        return inner.replace('""', '"')
    return cell

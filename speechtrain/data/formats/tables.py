"""Reader of tables of recordings: CSV, TSV and JSON objects, whose columns are detected by name."""

from __future__ import annotations

import codecs
import contextlib
import csv
import os
import re
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from speechtrain.data.formats.folder import AUDIO_SUFFIXES
from speechtrain.data.formats.manifests import (
    Nemo,
    Record,
    decode_line,
    digest,
    numbered_lines,
    open_bytes,
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
    "start": ("start", "start_time", "begin", "begin_time", "tmin", "xmin", "from", "onset", "offset"),
    "end": ("end", "end_time", "stop", "tmax", "xmax", "to", "offset"),
}
"""The names by which the column of each key of a source is detected, in lower case and with ``_`` for spaces.

A column belongs to the first key that has its name. So ``offset`` is the end only beside another start.
"""

_LABELS = ("class", "label", "word", "command")  # the names of the texts in a table without another text
_DELIMITERS = "\t,;|"
_LONGEST_HEADER = 2**16  # bytes
_LONGEST_ROW = 3 * 2**20  # bytes. A text of LONGEST_TRANSCRIPT has 2 MiB at most.
_MOST_LINES = 100  # the most line ends in a row
_LARGEST_CONVERTED = 2**26  # bytes of a table in UTF-16, or with CR line ends, which is read at once
_ROOT_VARIABLE = re.compile(r"[${]*data_(root|folder)}?/")  # SpeechBrain's variable for the table's folder
_LJSPEECH_COLUMNS = ["id", "text", "normalised"]


@dataclass(frozen=True)
class Form:
    """The delimiter and the columns of a table."""

    delimiter: str  # empty for JSON
    columns: list[str]  # empty if the file is not a table
    has_header: bool = False


class Table(Nemo):
    """A table with a header, or a table as in LJSpeech, which has no header.

    A line of LJSpeech is ``id|text`` or ``id|text|normalised``, for the recording wavs/id.wav. ``columns``
    maps keys of COLUMNS to columns of the table. The columns of other keys are detected by name.

    Without a column of texts, each transcript is empty. Times are in seconds. Without ``duration`` and
    ``end``, the duration is read from the recording's header. Paths are relative to the table, or in Common
    Voice's tables to the folder ``clips`` next to the table. Missing last cells are empty.

    Cells between tabs or ``|`` are not quoted, because a text may contain a single quotation mark. But a row
    that would have a wrong number of cells is read with quotation marks, if it then has the right number.
    """

    kind = "table"

    def __init__(self, path: Path, columns: Mapping[str, str] | None = None, **options: Any) -> None:
        super().__init__(path, **options)
        self.columns = dict(columns or {})

    def name_at(self, path: Path) -> str:
        # Many corpora have a table with the name metadata, so the folder's name is used.
        return path.parent.name if path.stem == "metadata" else path.stem

    def fingerprint(self) -> str:
        return digest(self.kind, self.name, self._column_names, self.resolve_path(""), *stamp(self.path))

    def warnings(self) -> Iterator[str]:
        column = self._column_names.get("text", "")
        if column.lower() in _LABELS and not self.columns.get("text"):
            setting = f"{{path: {self.path.name}, text: COLUMN}}"
            yield f"{self.path}: the transcripts are column {column!r}. Another one is {setting}"

    @cached_property
    def form(self) -> Form:
        """The form of this table, from its first line that is not blank.

        The delimiter of a table is the one that gives a column with a known name. Without such a column, a
        line of two or three cells between ``|`` is LJSpeech's. Otherwise the delimiter is the one that gives
        the most columns. The form has no columns if there are fewer than two, or if the line is no text.
        """
        lines = self._lines(in_array=True)
        first_line = next((content for _, content in lines if content.strip()), b"")
        header = first_line[:_LONGEST_HEADER].decode("utf-8-sig", errors="replace")
        if header.lstrip().startswith(("{", "[", "-")):
            for _, record in records(self.path):
                return Form("", list(record))
        cells_by_delimiter = {delimiter: _cells(header, delimiter) for delimiter in _DELIMITERS}
        known_names = set(self.columns.values())
        if not known_names:
            # Names of times, such as stop, may be the transcript in the first row of LJSpeech's form.
            known_names.update(COLUMNS["audio"], COLUMNS["text"])
        for delimiter, cells in cells_by_delimiter.items():
            if not known_names.isdisjoint([*cells, *map(_column_key, cells)]):
                return Form(delimiter, cells, has_header=True)
        bar_cells = len(cells_by_delimiter["|"])
        if not self.columns and 2 <= bar_cells <= 3:
            return Form("|", _LJSPEECH_COLUMNS[:bar_cells])
        delimiter = max(_DELIMITERS, key=lambda delimiter: len(cells_by_delimiter[delimiter]))
        columns = cells_by_delimiter[delimiter]
        is_text_line = len(first_line) <= _LONGEST_HEADER and "\0" not in header
        if len(columns) < 2 or not is_text_line:
            columns = []
        return Form(delimiter, columns, has_header=True)

    @property
    def _is_ljspeech(self) -> bool:
        return bool(self.form.delimiter) and not self.form.has_header

    @cached_property
    def _column_names(self) -> dict[str, str]:
        """The name of the column of each key of COLUMNS that the table has.

        Raises DataError if the column of a key is missing or not clear, with the setting that chooses it.
        """
        columns = self.form.columns
        if self._is_ljspeech:
            return {"audio": columns[0], "text": columns[-1]}
        column_names = dict[str, str]()
        for key in COLUMNS:
            explicit = self.columns.get(key, "")
            candidates = candidate_columns(columns, key, explicit)
            if not explicit:
                candidates = [column for column in candidates if column not in column_names.values()]
            if key == "text" and not explicit and not candidates:
                candidates = [column for column in columns if column.lower() in _LABELS]
            # A wrong recording or text is an error. Of other columns, the first one is used.
            needs_one = explicit or key == "audio" or (candidates and key == "text")
            if needs_one and len(candidates) != 1:
                problem = "no column that is known as its recordings"
                if candidates:
                    problem = f"{len(candidates)} columns that may be its {key}"
                elif explicit:
                    problem = f"no column {explicit!r}"
                raise self._column_error(problem, f"{key}: COLUMN")
            if candidates:
                column_names[key] = candidates[0]
        return column_names

    def _column_error(self, problem: str, choice: str) -> DataError:
        """Return the error of a table with a problem of its columns, and with the keys that choose others."""
        columns = [repr(column[:40]) for column in self.form.columns[:20]]
        if len(self.form.columns) > 20:
            columns.append("…")
        setting = f"{{path: {self.path.name}, {choice}}}"
        return self.error_at(1, f"has {problem}: {', '.join(columns)}. Choose with {setting}")

    @cached_property
    def _clips(self) -> str:
        """The folder of Common Voice's recordings, relative to the table. It is empty for other tables."""
        is_common_voice = "client_id" in self.form.columns and os.path.isdir(f"{self._folder}/clips")
        return "clips" if is_common_voice else ""

    def resolve_path(self, name: str) -> str:
        """Return an absolute path. ``name`` is absolute or relative to the folder of the recordings."""
        return super().resolve_path(os.path.join(self._clips, os.path.expanduser(name)))

    def entries(self) -> Iterator[tuple[int, Record]]:
        line, column_names = 0, self._column_names
        spans = set[int]()  # a hash of the recording and the times of each row, which takes little memory
        for line, row in self._rows():
            record = {key: row.get(column) for key, column in column_names.items()}
            cut = self.cut_of(record, line)
            span = [record["audio"], record.get("start"), record.get("end") or record.get("duration")]
            if not {None, ""}.isdisjoint(span):
                span = span[:1]  # Other rows of a recording would contain a row without start or end.
            if hash(tuple(span)) in spans:
                known = ", ".join(COLUMNS["start"] + COLUMNS["end"])
                problem = f"rows of {span[0]} without distinct times (line {line}). Names of times: {known}"
                raise self._column_error(f"{problem}. Its columns", "start: COLUMN, end: COLUMN")
            spans.add(hash(tuple(span)))
            yield line, cut
        if not line:
            raise DataError(f"{self.path} has a header only. Add a row for each recording")

    def cut_of(self, record: Record, line: int) -> Record:
        name = _ROOT_VARIABLE.sub("", self.text_field(record, "audio", line), count=1)
        if not name:
            raise self.error_at(line, f"has no recording in column {self._column_names['audio']!r}")
        if self._is_ljspeech:
            if not name.lower().endswith(AUDIO_SUFFIXES):
                name = f"{name}.wav"
            if "/" not in name:
                name = f"wavs/{name}"
        start = self.time_field(record, "start", line)
        end = self.time_field(record, "end", line)
        duration = self.time_field(record, "duration", line)
        start_seconds = start or 0.0
        if start_seconds < 0 or (end is not None and end < start_seconds):
            raise self.error_at(line, f"starts at {start_seconds:g} s and ends at {end or 0:g} s")
        if end is not None:
            start, duration = start_seconds, end - start_seconds
        text = self.text_field(record, "text", line) if "text" in record else ""
        nemo_record = {
            "audio_filepath": name,
            "speaker": record.get("speaker") or None,
            "text": " ".join(text.split()),
            "offset": start,
            "duration": duration,
        }
        return super().cut_of(nemo_record, line)

    def _rows(self) -> Iterator[tuple[int, Record]]:
        """Yield the line number of each row that is not blank, and its values by column.

        Missing last cells are empty, if the table has a header. Raises DataError for a row with more cells
        than the header, and for a row that is too long.
        """
        form = self.form
        if not form.delimiter:
            yield from records(self.path)
            return
        lines, is_header = self._lines(), form.has_header
        ahead = deque(islice(lines, 1))  # the lines that have been read and are in no row yet
        while ahead:
            line, content = ahead.popleft()
            if len(content) > _LONGEST_ROW:
                raise self.error_at(line, "a row is too long to be read")
            text = decode_line(content, self.path, line)
            cells = _cells(text, form.delimiter)
            if len(cells) != len(form.columns):
                cells = self._quoted_row(text, ahead, lines) or cells
            if not ahead:
                ahead.extend(islice(lines, 1))
            if not cells and text.strip():
                fix = "Close its quotation marks, and write those within a cell twice"
                raise self.error_at(line, f"is not a row of a table. {fix}")
            if not "".join(cells).strip():
                continue
            missing = len(form.columns) - len(cells)
            if missing < 0 or (missing and not form.has_header):
                counts = f"has {len(cells)} cells, the table has {len(form.columns)} columns"
                fix = f"Put a cell with {form.delimiter!r} in quotation marks"
                raise self.error_at(line, f"{counts}. {fix}")
            if form.has_header and not is_header and [cell.strip() for cell in cells] == form.columns:
                raise self.error_at(line, "is the header again. Delete this line")
            if not is_header:
                yield line, dict(zip(form.columns, cells + [""] * missing, strict=True))
            is_header = False

    def _quoted_row(
        self, text: str, ahead: deque[tuple[int, bytes]], lines: Iterator[tuple[int, bytes]]
    ) -> list[str]:
        """Return the cells of a row that begins with ``text`` and has quotation marks, or an empty list.

        If a quotation mark is open, the next of ``ahead`` and of ``lines`` belong to the row. They are
        removed from ``ahead`` if the row has the right number of cells.
        """
        row, count = text, 0
        while row.count('"') % 2 and count < _MOST_LINES and len(row) < _LONGEST_ROW:
            if count == len(ahead):
                ahead.extend(islice(lines, 1))
            if count == len(ahead):
                return []
            line, content = ahead[count]
            row += decode_line(content, self.path, line)
            count += 1
        cells = _csv_cells(row, self.form.delimiter)
        if len(cells) != len(self.form.columns):
            return []
        for _ in range(count):
            ahead.popleft()
        return cells

    def _lines(self, in_array: bool = False) -> Iterator[tuple[int, bytes]]:
        """Yield the number and the bytes of each line. UTF-16 becomes UTF-8, and CR becomes LF."""
        content, encoding = b"", ""
        with contextlib.suppress(OSError, EOFError, zlib.error), open_bytes(self.path) as file:
            content = file.read(_LONGEST_HEADER)
            if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                encoding = "utf-16"
            elif b"\r" in content and b"\n" not in content:
                encoding = "utf-8-sig"
            if encoding:
                content += file.read(_LARGEST_CONVERTED)
        if not encoding:
            yield from numbered_lines(self.path, in_array)
            return
        try:
            text = content.decode(encoding)
        except UnicodeDecodeError as error:
            raise DataError(f"{self.path}: not {encoding} ({error.reason}). Save it as UTF-8") from None
        if len(content) > _LARGEST_CONVERTED:
            limit = f"more than {_LARGEST_CONVERTED >> 20} MiB in UTF-16 or with CR line ends"
            raise DataError(f"{self.path}: {limit}. Save it as UTF-8 with LF line ends")
        lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        for number, line in enumerate(lines, 1):
            yield number, f"{line}\n".encode()


def _csv_cells(row: str, delimiter: str) -> list[str]:
    """Return the cells of a row with quotation marks, or an empty list if it is not a row.

    A cell may be longer than the limit of the csv module, which is global.
    """
    reader = csv.reader([row], delimiter=delimiter, skipinitialspace=delimiter in ",;", strict=True)
    limit = csv.field_size_limit(_LONGEST_ROW)
    try:
        return next(reader, [])
    except csv.Error:
        return []
    finally:
        csv.field_size_limit(limit)


def _cells(line: str, delimiter: str) -> list[str]:
    """Return the cells of a line, or an empty list if the line is not a row."""
    if delimiter == "|":
        return [cell.strip() for cell in line.split(delimiter)]
    if delimiter == "\t":
        return [_unquoted(cell.strip()) for cell in line.rstrip("\r\n").split(delimiter)]
    return [cell.strip() for cell in _csv_cells(line, delimiter)]


def candidate_columns(columns: Iterable[str], key: str, explicit: str = "") -> list[str]:
    """Return the columns that may be ``key`` of COLUMNS: the column ``explicit``, or those with its names."""
    if explicit:
        return [column for column in columns if column == explicit]
    return [column for column in columns if _column_key(column) in COLUMNS[key]]


def _column_key(column: str) -> str:
    """Return the name of a column as COLUMNS has it."""
    return column.lower().replace(" ", "_")


def _unquoted(cell: str) -> str:
    """Return a cell of a TSV without the quotation marks that some programs write around it."""
    inner = cell[1:-1]
    is_quoted = len(cell) > 1 and cell[0] == cell[-1] == '"'
    if is_quoted and '"' not in inner.replace('""', ""):
        return inner.replace('""', '"')
    return cell

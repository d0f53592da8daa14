"""Readers of lhotse, NeMo and MLPerf manifests, which convert each line to a lhotse cut.

A manifest may have a million lines, so entries are plain dictionaries in lhotse's JSON format (an
object costs 50 to 150 µs, a dictionary 6); ``cuts()`` converts them to objects.
"""

from __future__ import annotations

import copy
import gzip
import hashlib
import json
import math
import os
import zlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from speechtrain.data.formats.lhotse_cuts import UnknownPart, known_cut
from speechtrain.data.recordings import RATES, header
from speechtrain.data.source import Source
from speechtrain.errors import MALFORMED, DataError
from speechtrain.files import open_regular, read_bytes, whole_path

if TYPE_CHECKING:
    from lhotse.cut import Cut

Record = dict[str, Any]

SEGMENT = "speechtrain_segment"
"""Custom field of a cut that is a part of a recording of unknown length."""

LONGEST_LINE = 2**24  # bytes
LARGEST_ARRAY = 2**28  # bytes, for about 250,000 recordings of MLPerf with three speeds each
LONGEST_TRANSCRIPT = 2**19  # characters; people speak 15 a second, so ten hours
_MOST_PACKED = 40  # bytes for each of a gzipped file that is above LONGEST_LINE; manifests have 5 to 20
_LEAST_BYTES = 128  # that a line of a gzipped file or a bracket of an array counts: its object takes as much
ASSUMED_RATE = 16_000  # of recordings whose manifest has no rate; its audio is read at the rate of its file
_LARGEST_NUMBER = 1e6  # seconds, which are 11 days, and hertz
TEXT_SUFFIXES = (".txt", ".text", ".lab", ".trn")  # of a transcript that a manifest names
MOST_TEXT_BYTES = 2**20  # of one transcript: ten hours of speech have less
_UNKNOWN_SECONDS = 1.0  # assumed length of a recording whose header cannot be read
_CUT_TYPES = ("MonoCut", "MultiCut", "MixedCut", "PaddingCut")


@dataclass(frozen=True, slots=True)
class Entry:
    """One cut in lhotse's JSON format, with its position in the manifest."""

    cut: Record
    line: int
    offset: int  # of the line's first byte, if the manifest is a plain file of JSON lines


class Manifest(Source):
    """A source in one file (or folder) whose entries are converted one at a time."""

    kind: str
    """A short word for the format; part of the fingerprint."""

    def __init__(self, path: Path) -> None:
        self.path = whole_path(path)
        self.name = self.path.stem
        self._folder = str(self.path.parent)

    @property
    def in_place(self) -> bool:
        """Whether ``path`` is plain JSON lines of lhotse cuts, which can be read at any offset."""
        return False

    @abstractmethod
    def entries(self) -> Iterator[Entry]:
        """Yield every cut in order. Raises DataError that names file and line of a malformed one."""

    def cuts(self) -> Iterator[Cut]:
        """Yield the entries as lhotse objects."""
        from lhotse.cut.set import deserialize_cut

        for entry in self.entries():
            self._check_known(entry.cut, entry.line)
            try:
                cut = deserialize_cut(copy.deepcopy(entry.cut))  # lhotse changes it
            except Exception as error:  # lhotse raises many kinds for a wrong field
                raise self.bad(entry.line, f"not a lhotse cut ({type(error).__name__}: {error})") from None
            yield cut

    def fingerprint(self) -> str:
        """Return a hash of the format and of the file's path, size and modification time."""
        return digest(self.kind, self.name, *stamp(self.path))

    def bad(self, line: int, problem: str) -> DataError:
        """Return a DataError that names file and line."""
        return DataError(f"{self.at(line)}: {problem}")

    def at(self, line: int) -> str:
        """The place of an entry: file and line."""
        return f"{self.path}:{line}"

    def _check_known(self, cut: Record, line: int) -> Record:
        """The parts of a cut that its audio needs. Raises DataError unless lhotse may read it."""
        try:
            return known_cut(cut)
        except UnknownPart as error:
            raise self.bad(line, str(error)) from None

    def field(self, record: Mapping[str, Any], name: str, line: int) -> Any:
        """Return ``record[name]``. Raises DataError if it is missing."""
        if name not in record:
            raise self.bad(line, f"has no {name!r}")
        return record[name]

    def number(self, record: Mapping[str, Any], name: str, line: int) -> float:
        """Return a numeric field. Raises DataError if it is missing or not a number."""
        value = self.field(record, name, line)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.bad(line, f"{name!r} is {value!r}, not a number")
        if 0 <= value < _LARGEST_NUMBER:
            return float(value)
        if not abs(value) < _LARGEST_NUMBER:
            raise self.bad(line, f"{name!r} is {str(value)[:40]}, not a finite number below 1e6")
        if name.endswith("duration"):
            raise self.bad(line, f"{name!r} is {value!r}, below 0; without it the audio is measured")
        return float(value)

    def time(self, record: Mapping[str, Any], name: str, line: int) -> float | None:
        """Return a number of seconds, which may be in a string; None where there is none."""
        value: Any = record.get(name)
        if isinstance(value, str):
            try:
                value = float(value) if value.strip() else None
            except ValueError:
                raise self.bad(line, f"{name!r} is {value[:40]!r}, not a number") from None
        return None if value is None else self.number({name: value}, name, line)

    def seconds(
        self, record: Mapping[str, Any], name: str, line: int, path: str, start: float = 0.0
    ) -> float:
        """Return a duration; where it is missing, what the header of ``path`` has from ``start`` on."""
        if record.get(name) is None:  # one more file to open, 0.1 ms where it is near
            return max(0.0, measure(path)[0] - start)
        return self.number(record, name, line)

    def text(self, record: Mapping[str, Any], name: str, line: int) -> str:
        """Return a string field (null is empty). Raises DataError if it is missing or not a string."""
        value = self.field(record, name, line)
        if value is not None and not isinstance(value, str):
            raise self.bad(line, f"{name!r} is {value!r}, not a string")
        return value or ""

    def rate(self, record: Mapping[str, Any], name: str, line: int) -> int:
        """Return a sampling rate in Hz, or the assumed rate if it is not given."""
        rate = self.number(record, name, line) if record.get(name) is not None else ASSUMED_RATE
        return int(rate) if 0 < rate < 2**31 else ASSUMED_RATE

    def beside(self, name: str) -> str:
        """Resolve a path of the manifest: relative paths start at its folder."""
        return os.path.join(self._folder, os.path.expanduser(name))

    @cached_property
    def _places(self) -> tuple[str, ...]:
        """The folders of transcripts, with a slash: the manifest's and, of a link, that of its file."""
        real = os.path.realpath(self.path)
        found = [real] if os.path.isdir(real) else [os.path.realpath(self._folder), os.path.dirname(real)]
        return tuple(os.path.join(folder, "") for folder in found)

    def check_place(self, path: Path) -> None:
        """Raise DataError if a transcript lies elsewhere or is hidden: its text is shown to others."""
        real = os.path.realpath(path)
        folder = max((parent for parent in self._places if real.startswith(parent)), key=len, default="")
        name = real.removeprefix(folder)
        if not folder or name.startswith(".") or "/." in name:
            raise DataError(
                f"{path} lies in {real}; transcripts are read below {self._places[0]}, unless hidden"
            )

    def transcript(self, path: Path, limit: int = MOST_TEXT_BYTES) -> str:
        """The UTF-8 text of a file of at most ``limit`` bytes. Raises DataError, OSError, ValueError."""
        self.check_place(path)
        return read_bytes(path, limit, follow=True).decode("utf-8-sig")


class JsonLines(Manifest):
    """A manifest with one JSON object per line, or an array of them, plain or gzipped."""

    @abstractmethod
    def cut_of(self, record: Record, line: int) -> Record:
        """Convert one line to a cut."""

    def entries(self) -> Iterator[Entry]:
        for line, offset, record in records(self.path):
            yield Entry(self.cut_of(record, line), line, offset)


class LhotseCuts(JsonLines):
    """A lhotse cut manifest. Recordings from shell commands or URLs are refused: their size is unknown."""

    kind = "lhotse"

    @property
    def in_place(self) -> bool:
        return not is_gzip(self.path) and first_line(self.path)[1].startswith(b"{")

    def cut_of(self, record: Record, line: int) -> Record:
        self._check(record, line)
        if not isinstance(record.get("id"), str) or not record["id"]:
            raise self.bad(line, "has no 'id'")
        return record

    def _check(self, cut: Record, line: int) -> None:
        kind = cut.get("type")
        if kind not in _CUT_TYPES:
            raise self.bad(line, f"'type' is {kind!r}; a lhotse cut has one of {', '.join(_CUT_TYPES)}")
        supervisions = cut.get("supervisions") or []
        if not isinstance(supervisions, list):
            raise self.bad(line, "'supervisions' is not a list of objects")
        for supervision in supervisions:
            if not isinstance(supervision, dict):
                raise self.bad(line, "'supervisions' is not a list of objects")
            if not isinstance(supervision.get("text"), (str, type(None))):
                raise self.bad(line, f"'text' is {supervision['text']!r}, not a string")
        if kind == "MixedCut":
            self._check_known(cut, line)
            for track in cut["tracks"]:
                self._check({**track["cut"], "type": track.get("type", track["cut"].get("type"))}, line)
            return
        self.number(cut, "duration", line)
        if kind == "PaddingCut":
            return
        self.number(cut, "start", line)
        recording = cut.get("recording")
        if not isinstance(recording, dict):
            raise self.bad(line, "has no 'recording' (a cut with features only has no audio)")
        self._check_recording(recording, line)
        if len(recording["sources"]) > 1 or recording.get("transforms"):  # else it is_simple
            self._check_known(cut, line)

    def _check_recording(self, recording: Record, line: int) -> None:
        rate = self.number(recording, "sampling_rate", line)
        if not RATES[0] <= rate <= RATES[1]:
            raise self.bad(line, f"'sampling_rate' is {rate:g} Hz, not from {RATES[0]} to {RATES[1]}")
        sources = recording.get("sources")
        if not isinstance(sources, list) or not sources:
            raise self.bad(line, "'recording' has no 'sources'")
        for source in sources:
            if not isinstance(source, dict):
                raise self.bad(line, "'sources' is not a list of objects")
            if (storage := source.get("type")) != "file":
                problem = f"the audio has the type {storage!r}; save it as files (lhotse: save_audios)"
                raise self.bad(line, problem)
            if not isinstance(source.get("source"), str) or not source["source"]:
                raise self.bad(line, "the audio has no 'source' that is a path")


class LhotseRecordings(LhotseCuts):
    """A lhotse recording manifest alone: each recording is a cut without a transcript."""

    kind = "recordings"
    in_place = False

    def cut_of(self, record: Record, line: int) -> Record:
        ids = record.get("channel_ids")
        channels = ids if isinstance(ids, list) and ids else [0]
        kind, channel = ("MultiCut", channels) if len(channels) > 1 else ("MonoCut", channels[0])
        whole = {"id": record.get("id"), "start": 0.0, "duration": record.get("duration"), "channel": channel}
        return super().cut_of({**whole, "recording": record, "supervisions": [], "type": kind}, line)


class LhotsePair(LhotseCuts):
    """A lhotse recording manifest and its supervision manifest: one cut for each supervision."""

    kind = "lhotse-pair"
    in_place = False

    def __init__(self, recordings: Path, supervisions: Path) -> None:
        super().__init__(supervisions)
        self.recordings = whole_path(recordings)

    def fingerprint(self) -> str:
        return digest(self.kind, *stamp(self.recordings), *stamp(self.path))

    def entries(self) -> Iterator[Entry]:
        recordings: dict[str, bytes] = {}  # as JSON, which takes a tenth of the memory
        for line, _, record in records(self.recordings):
            name = record.get("id")
            if not isinstance(name, str) or not isinstance(record.get("sources"), list):
                raise DataError(f"{self.recordings}:{line}: not a recording ('id' or 'sources' is missing)")
            if any(not isinstance(s, dict) or s.get("type") != "file" for s in record["sources"]):
                raise DataError(f"{self.recordings}:{line}: the audio is not a file; save it as files first")
            recordings[name] = json.dumps(record).encode()
        for line, offset, supervision in records(self.path):
            name, wanted = self.text(supervision, "id", line), self.text(supervision, "recording_id", line)
            if wanted not in recordings:
                raise self.bad(line, f"recording {wanted!r} is not in {self.recordings}")
            channel = supervision.get("channel", 0)
            cut = {
                "id": name,
                "start": self.number(supervision, "start", line),
                "duration": self.number(supervision, "duration", line),
                "channel": channel,
                "supervisions": [{**supervision, "start": 0.0}],
                "recording": json.loads(recordings[wanted]),
                "type": "MultiCut" if isinstance(channel, list) else "MonoCut",
            }
            yield Entry(self.cut_of(cut, line), line, offset)


class Nemo(JsonLines):
    """NeMo's JSON lines (reference: nemo/collections/common/parts/preprocessing/manifest.py).

    ``audio_filepath`` (or ``audio_file``, ``audio_filename``); optional are ``duration`` in seconds (else the
    audio's header has it), ``text`` (or ``normalized_text``, ``text_filepath``; "" without), ``offset``,
    ``speaker``, ``lang`` and ``orig_sample_rate``. Paths are relative to the manifest. A line with
    ``offset`` is a part of its recording; without it, the whole recording. The lines have no ids: a
    cut's id consists of the manifest's name, the line number and the recording's name.
    """

    kind = "nemo"
    AUDIO = ("audio_filepath", "audio_file", "audio_filename")

    def cut_of(self, record: Record, line: int) -> Record:
        audio = next((record[key] for key in self.AUDIO if record.get(key)), None)
        if not isinstance(audio, str):
            several = " of one file: write its channels into one" if isinstance(audio, list) else ""
            raise self.bad(line, f"has no 'audio_filepath'{several}")
        if line == 1 and "shard_id" in record and not os.path.isfile(self.beside(audio)):
            told = f"is of a tarred set, and {self._folder} has no {audio!r}"
            raise self.bad(
                line, f"{told}; unpack its tars there (tar -xf audio_0.tar), which holds the recordings"
            )
        whole = record.get("offset") is None
        start = 0.0 if whole else self.number(record, "offset", line)
        duration = self.seconds(record, "duration", line, self.beside(audio), start)
        more: Record = {"rate": self.rate(record, "orig_sample_rate", line), "segment": not whole}
        more |= {"speaker": record.get("speaker"), "language": record.get("lang")}
        cut_id, text = f"{self.name}:{line}:{_stem(audio)}", self._transcript(record, line)
        return simple_cut(cut_id, self.beside(audio), start, duration=duration, text=text, **more)

    def _transcript(self, record: Record, line: int) -> str:
        for name in ("text", "normalized_text"):
            if name in record:
                return self.text(record, name, line)
        if "text_filepath" not in record:
            return ""
        path = Path(self.beside(self.text(record, "text_filepath", line)))
        if path.suffix.lower() not in TEXT_SUFFIXES:
            raise self.bad(line, f"text_filepath {path} does not end in {', '.join(TEXT_SUFFIXES)}")
        try:
            return " ".join(self.transcript(path).split())
        except (OSError, ValueError) as error:
            raise self.bad(line, f"text_filepath {path} cannot be read ({error})") from None


class Mlperf(JsonLines):
    """The JSON of MLPerf's and Intel's RNN-T: one array per file, or JSON lines of the same objects.

    ``transcript`` ("" without), ``original_duration`` in seconds (else that of the header) and ``files``.
    Only the file of speed 1 is used, because speed is changed in training. File names are relative to the
    manifest.
    """

    kind = "mlperf"

    def cut_of(self, record: Record, line: int) -> Record:
        text = self.text(record, "transcript", line) if "transcript" in record else ""
        files = self.field(record, "files", line)
        if not isinstance(files, list) or not files or not all(isinstance(f, dict) for f in files):
            raise self.bad(line, "'files' is empty or not a list of objects")
        file = next((f for f in files if f.get("speed", 1) == 1), files[0])
        name = self.text(file, "fname", line)
        known = {"duration": record.get("original_duration"), **file}
        duration = self.seconds(known, "duration", line, self.beside(name))
        rate = self.rate(file, "sample_rate", line)
        cut_id = f"{self.name}:{line}:{_stem(name)}"
        return simple_cut(cut_id, self.beside(name), 0.0, duration=duration, text=text, rate=rate)


def simple_cut(
    name: str,
    path: str,
    start: float,
    duration: float,
    text: str,
    *,
    rate: int = ASSUMED_RATE,
    speaker: object = None,
    language: object = None,
    segment: bool = False,
) -> Record:
    """Return a ``MonoCut`` of one file in lhotse's JSON format; times are in seconds."""
    supervision: Record = {"id": name, "recording_id": name, "start": 0.0, "duration": duration}
    supervision |= {"channel": 0, "text": text}
    supervision |= {k: str(v) for k, v in (("speaker", speaker), ("language", language)) if v is not None}
    end = start + duration
    cut: Record = {
        "id": name,
        "start": start,
        "duration": duration,
        "channel": 0,
        "supervisions": [supervision],
        "recording": {
            "id": name,
            "sources": [{"type": "file", "channels": [0], "source": path}],
            "sampling_rate": rate,
            "num_samples": round(end * rate) if math.isfinite(end) else 0,
            "duration": end,
            "channel_ids": [0],
        },
        "type": "MonoCut",
    }
    if segment:
        cut["custom"] = {SEGMENT: True}
    return cut


def _stem(path: str) -> str:
    # pathlib costs 10 µs, a million times
    return os.path.splitext(os.path.basename(path))[0]


def seconds_of(cut: Mapping[str, Any]) -> float:
    """Return the duration of a cut in lhotse's JSON format; 0 if it is not positive and finite."""
    if cut.get("type") == "MixedCut":
        ends = (float(track.get("offset", 0.0)) + seconds_of(track["cut"]) for track in cut["tracks"])
        seconds = max(ends, default=0.0)
    else:
        seconds = float(cut["duration"])
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0


def text_of(cut: Mapping[str, Any]) -> str:
    """Return the transcript of a cut in lhotse's JSON format: its supervisions' texts in order.

    A lone surrogate, which no text of UTF-8 has, becomes ``?``. Raises DataError for more characters than
    LONGEST_TRANSCRIPT.
    """
    if cut.get("type") == "MixedCut":
        parts = [text_of(track["cut"]) for track in cut["tracks"]]
    else:
        parts = [supervision.get("text") or "" for supervision in cut.get("supervisions") or ()]
    text = " ".join(part for part in parts if part)
    if len(text) > LONGEST_TRANSCRIPT:
        most = f"{len(text)} characters; the most are {LONGEST_TRANSCRIPT}"
        raise DataError(f"the transcript of {str(cut.get('id'))[:200]!r} has {most}: split the recording")
    return text if text.isascii() else text.encode(errors="replace").decode()


def speaker_of(cut: Mapping[str, Any]) -> str:
    """Return the speaker of a cut in lhotse's JSON format; empty if none or several are named."""
    tracks = [track["cut"] for track in cut["tracks"]] if cut.get("type") == "MixedCut" else [cut]
    spoken = (one for track in tracks for one in track.get("supervisions") or ())
    speakers = {str(one.get("speaker") or "") for one in spoken}
    return speakers.pop() if len(speakers) == 1 else ""


# --- reading ------------------------------------------------------------------------------------


def is_gzip(path: Path) -> bool:
    """Whether a file is gzipped, by its first two bytes. Raises DataError if it cannot be opened."""
    try:
        with open_regular(path) as file:
            return file.read(2) == b"\x1f\x8b"
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: {getattr(error, 'strerror', error)}") from None


def open_bytes(path: Path) -> IO[bytes]:
    """Open the file for reading, decompressed if it is gzipped."""
    if is_gzip(path):
        return cast("IO[bytes]", gzip.open(path, "rb"))
    return open_regular(path)


def numbered_lines(path: Path, in_array: bool = False) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, bytes) of each line; of an array, a long line in parts of LONGEST_LINE.

    Raises DataError with file and line for a damaged file, for a line that is too long, and for a gzipped
    file that is nothing but repetition.
    """
    line = 0
    longest = math.inf if in_array else LONGEST_LINE
    try:
        with open_bytes(path) as file:
            left = _most_bytes(path)
            for line, raw in enumerate(iter(partial(file.readline, LONGEST_LINE), b""), 1):
                left -= max(len(raw), _LEAST_BYTES)
                if left < 0:
                    raise DataError(f"{path}:{line}: more than {_MOST_PACKED} times its gzipped size")
                if len(raw) >= longest:
                    raise DataError(f"{path}:{line}: too long to be read; this is no manifest")
                yield line, raw
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}:{line + 1}: the file is damaged ({error})") from None


def _most_bytes(path: Path) -> float:
    """Return how many bytes a list may have: a bound for a gzipped file, which may be small."""
    if not is_gzip(path):
        return math.inf
    return LONGEST_LINE + _MOST_PACKED * path.stat().st_size


def first_line(path: Path) -> tuple[int, bytes]:
    """Return number and bytes of the first line that is not blank, without byte order mark and indent.

    Raises DataError for an empty file.
    """
    for line, raw in numbered_lines(path, in_array=True):
        if raw.strip():
            return line, raw.removeprefix(b"\xef\xbb\xbf").lstrip()
    raise DataError(f"{path} is empty; a manifest has at least one cut")


def records(path: Path) -> Iterator[tuple[int, int, Record]]:
    """Yield (line, byte offset, object) of JSON lines, or (number of the object, -1, object) of an array.

    Raises DataError that names file and line, for YAML with the command that converts it.
    """
    line, start = first_line(path)
    if start.startswith(b"-"):
        output = f"{path.stem}.jsonl.gz"
        raise DataError(f"{path}:{line}: YAML is not read. Convert it: lhotse copy {path.name} {output}")
    return json_array(path) if start.startswith(b"[") else json_lines(path)


def json_lines(path: Path) -> Iterator[tuple[int, int, Record]]:
    """Yield (line number from 1, byte offset, object) of each line that is not blank.

    Raises DataError that names file and line if a line is not a JSON object.
    """
    offset = 0
    for line, raw in numbered_lines(path):
        if raw.strip():
            yield line, offset, parse(raw, path, line)
        offset += len(raw)


def decoded(raw: bytes, path: Path, line: int) -> str:
    """Decode a line of UTF-8, without byte order mark. Raises DataError that names file and line."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}:{line}: not UTF-8 ({error.reason} at byte {error.start + 1})") from None


def parse(raw: bytes, path: Path, line: int) -> Record:
    """Parse one JSON object. Raises DataError that names file and line."""
    return _record(_json_value(raw, path, line), path, line)


def _json_value(raw: bytes, path: Path, line: int) -> Any:
    """Parse JSON that begins in line ``line``. Raises DataError that names file and line."""
    try:
        return json.loads(decoded(raw, path, line))
    except json.JSONDecodeError as error:
        line += error.lineno - 1
        raise DataError(f"{path}:{line}: bad JSON ({error.msg} at column {error.colno})") from None
    except MALFORMED:
        raise DataError(f"{path}:{line}: bad JSON (nested too deeply, or a number too long)") from None


def _record(value: Any, path: Path, line: int) -> Record:
    if not isinstance(value, dict):
        raise DataError(f"{path}:{line}: is a JSON {type(value).__name__}, not an object")
    return value


def json_array(path: Path) -> Iterator[tuple[int, int, Record]]:
    """Yield (number from 1, -1, object) of each element of a JSON array, which is parsed as a whole.

    Raises DataError that names the file and the line, or the number of an element that is not an object.
    """
    left = min(LARGEST_ARRAY, _most_bytes(path))
    parts = []
    for line, raw in numbered_lines(path, in_array=True):
        left -= max(len(raw), _LEAST_BYTES * (raw.count(b"{") + raw.count(b"[")))
        if left < 0:
            raise DataError(
                f"{path}:{line}: a JSON array has at most {LARGEST_ARRAY >> 20} MiB and no more than "
                f"{_MOST_PACKED} times its gzipped size. Write it as JSON lines, one object a line"
            )
        parts.append(raw)
    for number, value in enumerate(_json_value(b"".join(parts), path, 1), 1):
        yield number, -1, _record(value, path, number)


def measure(path: str) -> tuple[float, int]:
    """Return seconds and rate from a recording's header, or assumed ones if it cannot be read."""
    info = header(path)
    return (_UNKNOWN_SECONDS, ASSUMED_RATE) if info is None else (info.duration, info.samplerate)


def stamp(path: Path) -> tuple[str, int, int]:
    """Return absolute path, size and modification time. Raises DataError if the file does not exist."""
    try:
        found = path.stat()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    return str(path), found.st_size, found.st_mtime_ns


def digest(*parts: object) -> str:
    """Return a hash of JSON-like parts as 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

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
import re
import zlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from speechtrain.data.source import Source
from speechtrain.errors import DataError

if TYPE_CHECKING:
    from lhotse.cut import Cut

Record = dict[str, Any]

SEGMENT = "speechtrain_segment"
"""Custom field of a cut that is a part of a recording of unknown length."""

ASSUMED_RATE = 16_000  # of recordings whose manifest has no rate; the decoder uses the file's own
_CUT_TYPES = ("MonoCut", "MultiCut", "MixedCut", "PaddingCut")
_ELEMENT = re.compile(r"[^ \t\r\n,]")  # start of the next element or of the closing bracket


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
        self.path = path.expanduser().absolute()
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
        return DataError(f"{self.path}:{line}: {problem}")

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
        return float(value)

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


class JsonLines(Manifest):
    """A manifest with one JSON object per line, plain or gzipped (detected by content)."""

    @abstractmethod
    def cut_of(self, record: Record, line: int) -> Record:
        """Convert one line to a cut."""

    def entries(self) -> Iterator[Entry]:
        for line, offset, record in json_lines(self.path):
            yield Entry(self.cut_of(record, line), line, offset)


class LhotseCuts(JsonLines):
    """A lhotse cut manifest. Recordings from shell commands or URLs are refused: their size is unknown."""

    kind = "lhotse"

    @property
    def in_place(self) -> bool:
        return not is_gzip(self.path)

    def cut_of(self, record: Record, line: int) -> Record:
        self._check(record, line)
        if not isinstance(record.get("id"), str) or not record["id"]:
            raise self.bad(line, "has no 'id'")
        return record

    def _check(self, cut: Record, line: int) -> None:
        kind = cut.get("type")
        if kind not in _CUT_TYPES:
            raise self.bad(line, f"'type' is {kind!r}; a lhotse cut has one of {', '.join(_CUT_TYPES)}")
        if kind == "MixedCut":
            tracks = self.field(cut, "tracks", line)
            if not isinstance(tracks, list) or not tracks:
                raise self.bad(line, "'tracks' is empty or not a list")
            for track in tracks:
                inner = track.get("cut") if isinstance(track, dict) else None
                if not isinstance(inner, dict):
                    raise self.bad(line, "a track has no 'cut'")
                self._check({"type": track.get("type", inner.get("type")), **inner}, line)
            return
        self.number(cut, "duration", line)
        if kind == "PaddingCut":
            return
        self.number(cut, "start", line)
        recording = cut.get("recording")
        if not isinstance(recording, dict):
            raise self.bad(line, "has no 'recording' (a cut with features only has no audio)")
        sources = recording.get("sources")
        if not isinstance(sources, list) or not sources or not all(isinstance(s, dict) for s in sources):
            raise self.bad(line, "'recording' has no 'sources'")
        for source in sources:
            if (storage := source.get("type")) != "file":
                problem = f"the audio has the type {storage!r}; save it as files (lhotse: save_audios)"
                raise self.bad(line, problem)
        supervisions = cut.get("supervisions") or []
        if not isinstance(supervisions, list) or not all(isinstance(s, dict) for s in supervisions):
            raise self.bad(line, "'supervisions' is not a list of objects")
        for supervision in supervisions:
            if not isinstance(supervision.get("text"), (str, type(None))):
                raise self.bad(line, f"'text' is {supervision['text']!r}, not a string")


class LhotsePair(Manifest):
    """A lhotse recording manifest and its supervision manifest: one cut for each supervision."""

    kind = "lhotse-pair"

    def __init__(self, recordings: Path, supervisions: Path) -> None:
        super().__init__(supervisions)
        self.recordings = recordings.expanduser().absolute()

    def fingerprint(self) -> str:
        return digest(self.kind, *stamp(self.recordings), *stamp(self.path))

    def entries(self) -> Iterator[Entry]:
        recordings: dict[str, Record] = {}
        for line, _, record in json_lines(self.recordings):
            name = record.get("id")
            if not isinstance(name, str) or not isinstance(record.get("sources"), list):
                raise DataError(f"{self.recordings}:{line}: not a recording ('id' or 'sources' is missing)")
            if any(not isinstance(s, dict) or s.get("type") != "file" for s in record["sources"]):
                raise DataError(f"{self.recordings}:{line}: the audio is not a file; save it as files first")
            recordings[name] = record
        for line, offset, supervision in json_lines(self.path):
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
                "recording": recordings[wanted],
                "type": "MultiCut" if isinstance(channel, list) else "MonoCut",
            }
            yield Entry(cut, line, offset)


class Nemo(JsonLines):
    """NeMo's JSON lines (reference: nemo/collections/common/parts/preprocessing/manifest.py).

    ``audio_filepath`` (or ``audio_file``, ``audio_filename``), ``duration`` in seconds, and ``text``
    (or ``normalized_text``, ``text_filepath``); optional are ``offset``, ``speaker``, ``lang`` and
    ``orig_sample_rate``. Paths are relative to the manifest. A line with ``offset`` is a part of its
    recording; without it, the whole recording. The lines have no ids: a cut's id consists of the
    manifest's name, the line number and the recording's name.
    """

    kind = "nemo"
    AUDIO = ("audio_filepath", "audio_file", "audio_filename")

    def cut_of(self, record: Record, line: int) -> Record:
        audio = next((record[key] for key in self.AUDIO if record.get(key)), None)
        if not isinstance(audio, str):
            raise self.bad(line, "has no 'audio_filepath'")
        duration = self.number(record, "duration", line)
        whole = record.get("offset") is None
        start = 0.0 if whole else self.number(record, "offset", line)
        more: Record = {"rate": self.rate(record, "orig_sample_rate", line), "segment": not whole}
        more |= {"speaker": record.get("speaker"), "language": record.get("lang")}
        cut_id, text = f"{self.name}:{line}:{_stem(audio)}", self._transcript(record, line)
        return simple_cut(cut_id, self.beside(audio), start, duration=duration, text=text, **more)

    def _transcript(self, record: Record, line: int) -> str:
        for name in ("text", "normalized_text"):
            if name in record:
                return self.text(record, name, line)
        if "text_filepath" not in record:
            raise self.bad(line, "has no 'text', 'normalized_text' or 'text_filepath'")
        path = Path(self.beside(self.text(record, "text_filepath", line)))
        try:
            return " ".join(path.read_text(encoding="utf-8").split())
        except (OSError, UnicodeDecodeError) as error:
            raise self.bad(line, f"text_filepath {path} cannot be read ({error})") from None


class Mlperf(JsonLines):
    """The JSON of MLPerf's and Intel's RNN-T: one array per file, or JSON lines of the same objects.

    ``transcript``, ``original_duration`` in seconds and ``files``. Only the file of speed 1 is used,
    because speed is changed in training. File names are relative to the manifest.
    """

    kind = "mlperf"

    def entries(self) -> Iterator[Entry]:
        if not first_line(self.path)[1].startswith(b"["):
            yield from super().entries()
            return
        for line, record in json_array(self.path):
            yield Entry(self.cut_of(record, line), line, -1)

    def cut_of(self, record: Record, line: int) -> Record:
        text = self.text(record, "transcript", line)
        files = self.field(record, "files", line)
        if not isinstance(files, list) or not files or not all(isinstance(f, dict) for f in files):
            raise self.bad(line, "'files' is empty or not a list of objects")
        file = next((f for f in files if f.get("speed", 1) == 1), files[0])
        name = self.text(file, "fname", line)
        source = file if "duration" in file else record
        duration = self.number(source, "duration" if "duration" in source else "original_duration", line)
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
    """Return the transcript of a cut in lhotse's JSON format: its supervisions' texts in order."""
    if cut.get("type") == "MixedCut":
        parts = [text_of(track["cut"]) for track in cut["tracks"]]
    else:
        parts = [supervision.get("text") or "" for supervision in cut.get("supervisions") or ()]
    return " ".join(part for part in parts if part)


# --- reading ------------------------------------------------------------------------------------


def is_gzip(path: Path) -> bool:
    """Whether a file is gzipped, by its first two bytes. Raises DataError if it cannot be opened."""
    try:
        with path.open("rb") as file:
            return file.read(2) == b"\x1f\x8b"
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None


def open_bytes(path: Path) -> IO[bytes]:
    """Open the file for reading, decompressed if it is gzipped."""
    if is_gzip(path):
        return cast("IO[bytes]", gzip.open(path, "rb"))
    return path.open("rb")


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, bytes) of each line. Raises DataError for a damaged file, with file and line."""
    line = 0
    try:
        with open_bytes(path) as file:
            for line, raw in enumerate(file, 1):
                yield line, raw
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}:{line + 1}: the file is damaged ({error})") from None


def first_line(path: Path) -> tuple[int, bytes]:
    """Return number and bytes of the first line that is not blank, without byte order mark and indent.

    Raises DataError for an empty file.
    """
    for line, raw in numbered_lines(path):
        if raw.strip():
            return line, raw.removeprefix(b"\xef\xbb\xbf").lstrip()
    raise DataError(f"{path} is empty; a manifest has at least one cut")


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
    try:
        record = json.loads(decoded(raw, path, line))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{line}: bad JSON ({error.msg} at column {error.colno})") from None
    except RecursionError:
        raise DataError(f"{path}:{line}: bad JSON (nested too deeply)") from None
    if not isinstance(record, dict):
        raise DataError(f"{path}:{line}: is a JSON {type(record).__name__}, not an object")
    return record


def json_array(path: Path) -> Iterator[tuple[int, Record]]:
    """Yield (line number, object) of each element of a JSON array, whose whole text is in memory.

    Raises DataError that names file and line.
    """
    try:
        text = b"".join(raw for _, raw in numbered_lines(path)).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{path}: is not UTF-8") from None
    decode = json.JSONDecoder().raw_decode
    line, at, end = 1, 0, text.index("[") + 1
    while (found := _ELEMENT.search(text, end)) is not None:
        line, at = line + text.count("\n", at, found.start()), found.start()
        if text[at] == "]":
            return
        try:
            record, end = decode(text, at)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}:{error.lineno}: bad JSON ({error.msg})") from None
        if not isinstance(record, dict):
            raise DataError(f"{path}:{line}: is a JSON {type(record).__name__}, not an object")
        yield line, record
    raise DataError(f"{path}:{text.count(chr(10)) + 1}: the file ends before the array's closing bracket")


def header(path: str) -> Any:
    """Return soundfile's info of a recording (``frames``, ``samplerate``, …), or None if unreadable."""
    import soundfile

    try:
        return soundfile.info(path) if os.path.isfile(path) else None  # a pipe would block
    except (OSError, RuntimeError):
        return None


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

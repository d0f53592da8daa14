"""Readers of lhotse, NeMo and MLPerf manifests. A reader converts each line to a lhotse cut.

A manifest may have a million lines. So a reader yields plain dictionaries in lhotse's JSON format. A
dictionary takes 6 µs to make, and an object of lhotse 50 to 150 µs. Only ``cuts()`` makes objects.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import re
import shlex
import zlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any, cast

from speechtrain.data.formats.lhotse_cuts import UnknownField, known_cut
from speechtrain.data.recordings import header_or_none
from speechtrain.data.source import Facts, Source
from speechtrain.errors import MALFORMED, DataError
from speechtrain.files import absolute_path, open_regular, read_bytes

Record = dict[str, Any]

SEGMENT = "speechtrain_segment"
"""Custom field of a cut that is a part of a recording of unknown length."""

LONGEST_LINE = 2**24  # bytes
LARGEST_ARRAY = 2**28  # bytes of about 250,000 recordings of MLPerf with three speeds each
LONGEST_TRANSCRIPT = 2**19  # characters of ten hours of speech, at 15 characters per second
# A gzipped file may expand to LONGEST_LINE plus this multiple of its size. Manifests expand 5 to 20 times.
_MAX_EXPANSION = 40
# Shorter lines of a gzipped file, and brackets of an array, count as this number of bytes, because the Python
# object of each needs about as much memory.
_MIN_COUNTED_BYTES = 128
AS_TABLE = "give a table with the columns file, start, end and text instead"
"""The cure for annotations, in messages."""
_OTHER_FORMATS = {
    "an Audacity label track": re.compile(r"[\d.,]+\t[\d.,]+\t"),
    "captions": re.compile(r"WEBVTT|(\d+\s+)?[\d:]+[.,]\d+ +-->"),
    "XML": re.compile(r"<(\?xml|!\w|[\w:]+ [\w:]+=)"),
    "a Praat TextGrid": re.compile('File type = "ooTextFile'),
}
# The rate of a recording in Hz if the manifest has none. Its audio is read at the rate of the file.
ASSUMED_RATE = 16_000
_LARGEST_NUMBER = 1e6  # seconds (11 days) or hertz
TEXT_SUFFIXES = (".txt", ".text", ".lab", ".trn")  # the allowed suffixes of NeMo's transcript files
MOST_TEXT_BYTES = 2**20  # the most bytes of a transcript file. Ten hours of speech have fewer.
_UNKNOWN_SECONDS = 1.0  # the assumed length of a recording whose header cannot be read
# The folders to which a data set links its files, each with the folder beside it by which it is known: the
# cache of Hugging Face, git-annex and DVC.
_STORES = {"blobs": "snapshots", ".git/annex/objects": "", ".dvc/cache": ""}


class Manifest(Source):
    """A source in one file or folder. Its entries are converted to cuts one after another.

    Methods such as ``number_field`` return a checked field of a record. They raise DataError with the file
    and ``line``, the number of the record's line.
    """

    kind: str
    """A short word for the format. It is part of the fingerprint."""

    def __init__(self, path: Path, facts: Facts = Source.facts, former_path: Path | None = None) -> None:
        self.path = absolute_path(path)
        self.facts = facts
        self.former_path = former_path or self.path
        """Where the data was when its run started. Names and ids come from this path, so they stay."""
        self.name = self.name_at(self.former_path)
        self._folder = str(self.path.parent)

    def name_at(self, path: Path) -> str:
        """Return the name that this source has at ``path``. Ids of cuts contain it."""
        return path.stem

    def former(self, path: str) -> str:
        """Return where the recording ``path`` was when its run started, unless it is outside this source."""
        if self.former_path == self.path:
            return path
        folder, former_folder = self.path, self.former_path
        if self.path.is_file():
            folder, former_folder = folder.parent, former_folder.parent
        name = path.removeprefix(os.path.join(folder, ""))
        return path if name == path else os.path.join(former_folder, name)

    @abstractmethod
    def entries(self) -> Iterator[tuple[int, Record]]:
        """Yield the line, from 1, and the cut of every cut in order.

        Raises DataError with file and line for a malformed cut.
        """

    def cuts(self) -> Iterator[Record]:
        for _, cut in self.entries():
            yield cut

    def fingerprint(self) -> str:
        """Return a hash of the format and of the file's path, size and modification time."""
        return digest(self.kind, self.name, *stamp(self.path))

    def error_at(self, line: int, problem: str) -> DataError:
        """Return a DataError with file, line and problem."""
        return DataError(f"{self.location_of(line)}: {problem}")

    def location_of(self, line: int) -> str:
        """Return the file and the line of an entry, as ``FILE:LINE``."""
        return f"{self.path}:{line}"

    def _known_parts(self, cut: Record, line: int) -> Record:
        """Return the keys of a cut that its audio needs. Raises DataError for an unknown part."""
        try:
            return known_cut(cut)
        except UnknownField as error:
            raise self.error_at(line, str(error)) from None

    def required_field(self, record: Mapping[str, Any], name: str, line: int) -> Any:
        """Return ``record[name]``. Raises DataError if it is missing."""
        if name not in record:
            raise self.error_at(line, f"has no {name!r}")
        return record[name]

    def number_field(self, record: Mapping[str, Any], name: str, line: int) -> float:
        """Return a number. Raises DataError if it is missing, not finite, too large or a duration below 0."""
        number = self.required_field(record, name, line)
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            raise self.error_at(line, f"{name!r} is {number!r}, not a number")
        if not abs(number) < _LARGEST_NUMBER:
            raise self.error_at(line, f"{name!r} is {str(number)[:40]}, not a finite number below 1e6")
        if number < 0 and name.endswith("duration"):
            raise self.error_at(line, f"{name!r} is {number!r}, below 0. Without it the audio is measured")
        return float(number)

    def time_field(self, record: Mapping[str, Any], name: str, line: int) -> float | None:
        """Return a number of seconds, which may be a string, or None if the field is missing or empty."""
        seconds: Any = record.get(name)
        if isinstance(seconds, str):
            try:
                seconds = float(seconds) if seconds.strip() else None
            except ValueError:
                fix = ". If its column has no times, rename the column"
                if "," in seconds:
                    fix = f". Write {seconds[:40].replace(',', '.')}"
                raise self.error_at(line, f"{name!r} is {seconds[:40]!r}, not a number{fix}") from None
        return None if seconds is None else self.number_field({name: seconds}, name, line)

    def duration_field(
        self, record: Mapping[str, Any], name: str, line: int, path: str, start: float = 0.0
    ) -> float:
        """Return a duration. If the field is missing, it is the time from ``start`` to the end of ``path``.

        The header of the audio file ``path`` then has to be read, which takes 0.1 ms on a local disk.
        """
        if record.get(name) is None:
            file_seconds, _ = measure(path)
            return max(0.0, file_seconds - start)
        return self.number_field(record, name, line)

    def text_field(self, record: Mapping[str, Any], name: str, line: int) -> str:
        """Return a string field (null is empty). Raises DataError if it is missing or not a string."""
        text = self.required_field(record, name, line)
        if text is not None and not isinstance(text, str):
            raise self.error_at(line, f"{name!r} is {text!r}, not a string")
        return text or ""

    def rate_field(self, record: Mapping[str, Any], name: str, line: int) -> int:
        """Return a sampling rate in Hz. It is ASSUMED_RATE if the field is missing or out of range."""
        rate = self.number_field(record, name, line) if record.get(name) is not None else ASSUMED_RATE
        return int(rate) if 0 < rate < 2**31 else ASSUMED_RATE

    def resolve_path(self, name: str) -> str:
        """Return an absolute path. ``name`` is absolute or relative to the manifest's folder."""
        return os.path.join(self._folder, os.path.expanduser(name))

    @cached_property
    def _text_folders(self) -> list[str]:
        """The folders in which transcripts are read, each with a slash at the end.

        The folder is the manifest itself if it is a folder. Otherwise it is the folder of the manifest and,
        if the manifest is a link, also the folder of the file to which it links.
        """
        target = os.path.realpath(self.path)
        folders = [target]
        if not os.path.isdir(target):
            folders = [os.path.realpath(self._folder), os.path.dirname(target)]
        return [os.path.join(folder, "") for folder in folders]

    def refuse_outside(self, path: Path) -> None:
        """Raise DataError for a text file that is hidden or outside of the source and of its store.

        Such a file may be private, and a run publishes its transcripts. The store counts for a link that the
        source itself has, not for a link in a folder outside to which the source links.
        """
        target = os.path.realpath(path)
        if _is_visible_below(target, self._text_folders):
            return
        link_folder = os.path.join(os.path.realpath(path.parent), "")
        is_own_link = link_folder.startswith(tuple(self._text_folders))
        if is_own_link and _is_visible_below(target, _stores_of(Path(link_folder))):
            return
        folder = str(self.path) if self.path.is_dir() else self._folder
        fix = "Copy this file there and name the copy"
        if _is_visible_below(os.path.normpath(path), [os.path.join(folder, "")]):
            fix = f"To read a copy without links, run cp -rL {shlex.quote(folder)} COPY"
        reason = f"transcripts are read below {folder}, unless hidden"
        raise DataError(f"{path} lies in {target}: {reason}. {fix}")

    def read_transcript(self, path: Path, max_bytes: int = MOST_TEXT_BYTES) -> str:
        """Return the text of a file of at most ``max_bytes``. Raises DataError, OSError, ValueError."""
        self.refuse_outside(path)
        text = read_bytes(path, max_bytes, follow=True).decode("utf-8-sig")
        other_format = other_format_of(text)
        if other_format:
            raise DataError(f"{path} is {other_format}, no transcript. Write the words only, or {AS_TABLE}")
        return text


def other_format_of(text: str) -> str:
    """Return the format of annotations or of markup that ``text`` has, or ""."""
    text = text.lstrip()
    for name, start in _OTHER_FORMATS.items():
        if start.match(text):
            return name
    return ""


def _is_visible_below(path: str, folders: Sequence[str]) -> bool:
    """Return whether a file is below one of the folders and not hidden. Folders end in a slash."""
    parents = [folder for folder in folders if path.startswith(folder)]
    name = path.removeprefix(max(parents, key=len, default=""))  # relative to the innermost folder
    return bool(parents) and not name.startswith(".") and "/." not in name


def _stores_of(folder: Path) -> list[str]:
    """Return the stores of the nearest folder that has one, from ``folder`` upwards, each with a slash."""
    for parent in (folder, *folder.parents):
        stores = []
        for store, sibling in _STORES.items():
            if (parent / store).is_dir() and (parent / sibling).is_dir():
                stores.append(os.path.join(parent, store, ""))
        if stores:
            return stores
    return []


class JsonLines(Manifest):
    """A manifest with one JSON object per line, or with an array of objects, plain or gzipped."""

    @abstractmethod
    def cut_of(self, record: Record, line: int) -> Record:
        """Return the cut of one object."""

    def entries(self) -> Iterator[tuple[int, Record]]:
        for line, record in records(self.path):
            yield line, self.cut_of(record, line)


class LhotseCuts(JsonLines):
    """A lhotse cut manifest.

    Recordings from shell commands or URLs are refused, because their size is unknown.
    """

    kind = "lhotse"

    def cut_of(self, record: Record, line: int) -> Record:
        """Return the cut, which is checked. Raises DataError for a cut that cannot be read."""
        self._known_parts(record, line)
        for supervision in supervisions_of(record):
            if not isinstance(supervision, dict):
                raise self.error_at(line, "'supervisions' is not a list of objects")
            if not isinstance(supervision.get("text"), (str, type(None))):
                raise self.error_at(line, f"'text' is {supervision['text']!r}, not a string")
        if not isinstance(record.get("id"), str) or not record["id"]:
            raise self.error_at(line, "has no 'id'")
        return record


class LhotseRecordings(LhotseCuts):
    """A lhotse recording manifest alone. Each recording is a cut without a transcript."""

    kind = "recordings"

    def cut_of(self, record: Record, line: int) -> Record:
        channel_ids = record.get("channel_ids")
        cut = {"id": record.get("id"), "start": 0.0, "duration": record.get("duration"), "channel": 0}
        cut |= {"recording": record, "supervisions": [], "type": "MonoCut"}
        if isinstance(channel_ids, list) and channel_ids:
            cut["channel"] = channel_ids[0]
            if len(channel_ids) > 1:
                cut |= {"channel": channel_ids, "type": "MultiCut"}
        return super().cut_of(cut, line)


class LhotsePair(LhotseCuts):
    """A lhotse recording manifest and its supervision manifest. Each supervision is a cut."""

    kind = "lhotse-pair"

    def __init__(self, recordings: Path, supervisions: Path, **options: Any) -> None:
        super().__init__(supervisions, **options)
        self.recordings = absolute_path(recordings)

    def fingerprint(self) -> str:
        return digest(self.kind, *stamp(self.recordings), *stamp(self.path))

    def entries(self) -> Iterator[tuple[int, Record]]:
        recordings = {}  # by id, as JSON, which needs a tenth of the memory of dictionaries
        for line, recording in records(self.recordings):
            recording_id = recording.get("id")
            if not isinstance(recording_id, str):
                raise DataError(f"{self.recordings}:{line}: not a recording ('id' is missing)")
            recordings[recording_id] = json.dumps(recording).encode()
        for line, supervision in records(self.path):
            recording_id = self.text_field(supervision, "recording_id", line)
            if recording_id not in recordings:
                raise self.error_at(line, f"recording {recording_id!r} is not in {self.recordings}")
            cut = cut_of_supervision(supervision, json.loads(recordings[recording_id]))
            yield line, self.cut_of(cut, line)


class Nemo(JsonLines):
    """NeMo's JSON lines (reference: nemo/collections/common/parts/preprocessing/manifest.py).

    A line has ``audio_filepath`` (or ``audio_file``, ``audio_filename``). The other fields are optional:

    - ``duration`` in seconds. Without it, the duration is read from the audio's header.
    - ``text`` (or ``normalized_text``, ``text_filepath``). Without it, the transcript is empty.
    - ``offset`` in seconds. A line without it is the whole recording, and a line with it is a part.
    - ``speaker``, ``lang`` and ``orig_sample_rate``.

    Paths are relative to the manifest. The lines have no ids, so a cut's id is ``MANIFEST:LINE:RECORDING``
    with the names of the manifest and the recording.
    """

    kind = "nemo"
    AUDIO = ("audio_filepath", "audio_file", "audio_filename")

    def cut_of(self, record: Record, line: int) -> Record:
        audio_name = self._audio_name(record, line)
        path = self.resolve_path(audio_name)
        is_segment = record.get("offset") is not None
        start = self.number_field(record, "offset", line) if is_segment else 0.0
        return simple_cut(
            f"{self.name}:{line}:{_stem(audio_name)}",
            path,
            start,
            duration=self.duration_field(record, "duration", line, path, start),
            text=self._transcript(record, line),
            rate=self.rate_field(record, "orig_sample_rate", line),
            speaker=record.get("speaker"),
            language=record.get("lang"),
            segment=is_segment,
        )

    def _audio_name(self, record: Record, line: int) -> str:
        """Return the path of the recording, as the line has it. Raises DataError if it has none."""
        name = next((record[key] for key in self.AUDIO if record.get(key)), None)
        if isinstance(name, list):
            raise self.error_at(line, "has no 'audio_filepath' of one file: write its channels into one")
        if not isinstance(name, str):
            raise self.error_at(line, "has no 'audio_filepath'")
        # One line is enough to detect a manifest whose recordings are still in tars.
        if line == 1 and "shard_id" in record and not os.path.isfile(self.resolve_path(name)):
            problem = f"is of a tarred set, and {self._folder} has no {name!r}"
            fix = "Unpack the tars with the recordings there (tar -xf audio_0.tar)"
            raise self.error_at(line, f"{problem}. {fix}")
        return name

    def _transcript(self, record: Record, line: int) -> str:
        for name in ("text", "normalized_text"):
            if name in record:
                return self.text_field(record, name, line)
        if "text_filepath" not in record:
            return ""
        path = Path(self.resolve_path(self.text_field(record, "text_filepath", line)))
        if path.suffix.lower() not in TEXT_SUFFIXES:
            raise self.error_at(line, f"text_filepath {path} does not end in {', '.join(TEXT_SUFFIXES)}")
        try:
            return " ".join(self.read_transcript(path).split())
        except (OSError, ValueError) as error:
            raise self.error_at(line, f"text_filepath {path} cannot be read ({error})") from None


class Mlperf(JsonLines):
    """The JSON of MLPerf's and Intel's RNN-T: one array per file, or JSON lines of the same objects.

    An object has ``files``, one for each speed of the recording. Only the file of speed 1 is used, because
    training changes the speed. ``transcript`` is optional and empty by default. ``original_duration`` is in
    seconds. Without it, the duration is read from the audio's header. File names are relative to the
    manifest.
    """

    kind = "mlperf"

    def cut_of(self, record: Record, line: int) -> Record:
        text = self.text_field(record, "transcript", line) if "transcript" in record else ""
        files = self.required_field(record, "files", line)
        if not isinstance(files, list) or not files or not all(isinstance(file, dict) for file in files):
            raise self.error_at(line, "'files' is empty or not a list of objects")
        normal_file = next((file for file in files if file.get("speed", 1) == 1), files[0])
        name = self.text_field(normal_file, "fname", line)
        path = self.resolve_path(name)
        # A duration of the file itself replaces ``original_duration``.
        fields = {"duration": record.get("original_duration"), **normal_file}
        duration = self.duration_field(fields, "duration", line, path)
        rate = self.rate_field(normal_file, "sample_rate", line)
        cut_id = f"{self.name}:{line}:{_stem(name)}"
        return simple_cut(cut_id, path, 0.0, duration=duration, text=text, rate=rate)


def cut_of_supervision(supervision: Mapping[str, Any], recording: Record) -> Record:
    """Return the cut of a supervision and its recording, all in lhotse's JSON format."""
    channel = supervision.get("channel", 0)
    return {
        "id": supervision.get("id"),
        "start": supervision.get("start"),
        "duration": supervision.get("duration"),
        "channel": channel,
        "supervisions": [{**supervision, "start": 0.0}],
        "recording": recording,
        "type": "MultiCut" if isinstance(channel, list) else "MonoCut",
    }


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
    """Return a ``MonoCut`` of the file ``path`` in lhotse's JSON format. Times are in seconds.

    ``name`` is the id of the cut, of its supervision and of its recording. ``segment`` says that the cut is a
    part of a recording of unknown length.
    """
    supervision: Record = {"id": name, "recording_id": name, "start": 0.0, "duration": duration}
    supervision |= {"channel": 0, "text": text}
    if speaker is not None:
        supervision["speaker"] = str(speaker)
    if language is not None:
        supervision["language"] = str(language)
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
    # pathlib takes 10 µs, and a manifest may have a million paths.
    return os.path.splitext(os.path.basename(path))[0]


def seconds_of(cut: Mapping[str, Any]) -> float:
    """Return the duration in seconds of a cut in lhotse's JSON format, or 0 if it is not positive and finite.

    A mixed cut lasts until the end of its last track.
    """
    if cut.get("type") == "MixedCut":
        track_ends = [float(track.get("offset", 0.0)) + seconds_of(track["cut"]) for track in cut["tracks"]]
        seconds = max(track_ends, default=0.0)
    else:
        seconds = float(cut["duration"])
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0


def single_cuts(cut: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the cuts of the tracks of a mixed cut in lhotse's JSON format, or a list of the cut itself."""
    return [track["cut"] for track in cut["tracks"]] if cut.get("type") == "MixedCut" else [cut]


def supervisions_of(cut: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the supervisions of a cut in lhotse's JSON format, and of the tracks of a mixed cut."""
    for single_cut in single_cuts(cut):
        yield from single_cut.get("supervisions") or ()


def text_of(cut: Mapping[str, Any]) -> str:
    """Return the transcript of a cut in lhotse's JSON format: the texts of its supervisions, in order.

    A lone surrogate, which UTF-8 cannot encode, becomes ``?``. Raises DataError for more characters than
    LONGEST_TRANSCRIPT.
    """
    parts = [supervision.get("text") or "" for supervision in supervisions_of(cut)]
    text = " ".join(part for part in parts if part)
    if len(text) > LONGEST_TRANSCRIPT:
        raise DataError(
            f"the transcript of {str(cut.get('id'))[:200]!r} has {len(text)} characters, the most are "
            f"{LONGEST_TRANSCRIPT}: split the recording"
        )
    return text if text.isascii() else text.encode(errors="replace").decode()


def speaker_of(cut: Mapping[str, Any]) -> str:
    """Return the speaker of a cut in lhotse's JSON format. It is empty if there are several or none."""
    speakers = {str(supervision.get("speaker") or "") for supervision in supervisions_of(cut)}
    return speakers.pop() if len(speakers) == 1 else ""


def language_of(cut: Mapping[str, Any]) -> str:
    """Return the language of the first supervision of a cut in lhotse's JSON format, or ""."""
    for supervision in supervisions_of(cut):
        return str(supervision.get("language") or "")
    return ""


# --- reading ------------------------------------------------------------------------------------


def is_gzip(path: Path) -> bool:
    """Return whether a file begins like a gzipped file. Raises DataError if it cannot be opened."""
    try:
        with open_regular(path) as file:
            return file.read(2) == b"\x1f\x8b"
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: {getattr(error, 'strerror', error)}") from None


def open_bytes(path: Path) -> IO[bytes]:
    """Open a file for reading. If it is gzipped, reading decompresses it."""
    if is_gzip(path):
        return cast("IO[bytes]", gzip.open(path, "rb"))
    return open_regular(path)


def numbered_lines(path: Path, in_array: bool = False) -> Iterator[tuple[int, bytes]]:
    """Yield the number, from 1, and the bytes of each line.

    Lines have at most LONGEST_LINE bytes. With ``in_array``, a longer line is yielded in several parts.
    Raises DataError with file and line for a damaged file, for a line that is too long, and for a gzipped
    file that expands too much.
    """
    line = 0
    max_line_bytes = math.inf if in_array else LONGEST_LINE
    try:
        with open_bytes(path) as file:
            bytes_left = _max_content_bytes(path)
            for line, content in enumerate(iter(partial(file.readline, LONGEST_LINE), b""), 1):
                bytes_left -= max(len(content), _MIN_COUNTED_BYTES)
                if bytes_left < 0:
                    raise DataError(f"{path}:{line}: more than {_MAX_EXPANSION} times its gzipped size")
                if len(content) >= max_line_bytes:
                    raise DataError(f"{path}:{line}: too long to be read. This is not a manifest")
                yield line, content
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}:{line + 1}: the file is damaged ({error})") from None


def _max_content_bytes(path: Path) -> float:
    """Return the most bytes of a file's content: infinite, but for a gzipped file, which can expand."""
    if not is_gzip(path):
        return math.inf
    return LONGEST_LINE + _MAX_EXPANSION * path.stat().st_size


def first_line(path: Path) -> tuple[int, bytes]:
    """Return the number and the bytes of the first line that is not blank.

    The bytes have no byte order mark and no spaces at the start.

    Raises DataError for an empty file.
    """
    for line, content in numbered_lines(path, in_array=True):
        if content.strip():
            return line, content.removeprefix(b"\xef\xbb\xbf").lstrip()
    raise DataError(f"{path} is empty. A manifest has at least one cut")


def records(path: Path) -> Iterator[tuple[int, Record]]:
    """Yield (line, object) of JSON lines, or (number of the object, object) of an array.

    Raises DataError with file and line. If the file is YAML, the message has the command that converts it.
    """
    line, content = first_line(path)
    if content.startswith(b"-"):
        output = f"{path.stem}.jsonl.gz"
        raise DataError(f"{path}:{line}: YAML is not read. Convert it: lhotse copy {path.name} {output}")
    if content.startswith(b"["):
        return json_array(path)
    return json_lines(path)


def json_lines(path: Path) -> Iterator[tuple[int, Record]]:
    """Yield (line number from 1, object) of each line that is not blank.

    Raises DataError with file and line if a line is not a JSON object.
    """
    for line, content in numbered_lines(path):
        if content.strip():
            yield line, parse(content, path, line)


def decode_line(content: bytes, path: Path, line: int) -> str:
    """Decode UTF-8 and remove a byte order mark. Raises DataError with file and line."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}:{line}: not UTF-8 ({error.reason} at byte {error.start + 1}). Save a manifest as UTF-8. "
            "Of recordings, give the folder"
        ) from None


def parse(content: bytes, path: Path, line: int) -> Record:
    """Return the JSON object in ``content``. Raises DataError with file and line."""
    return _check_object(_parse_json(content, path, line), path, line)


def _parse_json(content: bytes, path: Path, line: int) -> Any:
    """Return the value of JSON that begins in ``line``. Raises DataError with file and line."""
    try:
        return json.loads(decode_line(content, path, line))
    except json.JSONDecodeError as error:
        line += error.lineno - 1
        problem = f"bad JSON ({error.msg} at column {error.colno})"
        raise DataError(f"{path}:{line}: {problem}. Write one JSON object a line, or an array") from None
    except MALFORMED:
        raise DataError(f"{path}:{line}: bad JSON (nested too deeply, or a number too long)") from None


def _check_object(element: Any, path: Path, line: int) -> Record:
    if not isinstance(element, dict):
        raise DataError(f"{path}:{line}: is a JSON {type(element).__name__}, not an object")
    return element


def json_array(path: Path) -> Iterator[tuple[int, Record]]:
    """Yield (number from 1, object) of each element of a JSON array, which is parsed as a whole.

    Raises DataError with the file and the line, or with the number of an element that is not an object.
    """
    bytes_left = min(LARGEST_ARRAY, _max_content_bytes(path))
    lines = []
    for line, content in numbered_lines(path, in_array=True):
        brackets = content.count(b"{") + content.count(b"[")
        bytes_left -= max(len(content), _MIN_COUNTED_BYTES * brackets)
        if bytes_left < 0:
            raise DataError(
                f"{path}:{line}: a JSON array has at most {LARGEST_ARRAY >> 20} MiB and no more than "
                f"{_MAX_EXPANSION} times its gzipped size. Write it as JSON lines, one object a line"
            )
        lines.append(content)
    for number, element in enumerate(_parse_json(b"".join(lines), path, 1), 1):
        yield number, _check_object(element, path, number)


def measure(path: str) -> tuple[float, int]:
    """Return the seconds and the rate from a recording's header, or assumed ones if it cannot be read."""
    header = header_or_none(path)
    if header is None:
        return _UNKNOWN_SECONDS, ASSUMED_RATE
    return header.duration, header.samplerate


def stamp(path: Path) -> tuple[str, int, int]:
    """Return the path, size and modification time in ns of a file, for a fingerprint.

    Raises DataError if the file does not exist.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None
    return str(path), status.st_size, status.st_mtime_ns


def digest(*parts: object) -> str:
    """Return a hash of JSON-like parts as 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]

"""Reads the cuts of any source with their measured lengths, and writes files of cuts atomically."""

from __future__ import annotations

import contextlib
import gzip
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, TypeVar, cast

from speechtrain.counter_rng import key_of
from speechtrain.data.formats.manifests import Manifest, Record, language_of, seconds_of, text_of
from speechtrain.data.recordings import Header, Unusable, header_or_none, tolerated_seconds
from speechtrain.data.source import Source
from speechtrain.data.sources import located_cuts, sources_of
from speechtrain.errors import DataError, MachineError, escape_controls, shorten
from speechtrain.files import atomic, writing
from speechtrain.text.normalise import normalise_in, normaliser

Item = TypeVar("Item")
Output = TypeVar("Output")

FIX = "use another --out"
"""The fix in the message of an error that an output cannot be written."""

_INCOMPLETE_FORMATS = ("nemo", "mlperf", "fairseq", "table", "kaldi")
"""Formats whose manifests lack the exact length, the rate or the channels of a recording.

Fairseq's manifests have the number of samples, but not the rate."""
_RESERVED_BYTES = 64 * 2**20  # bytes of the disk that stay free
_CHUNK = 64  # items for each thread that are read from the input at once


def cuts_of(source: Source) -> Iterator[Record]:
    """Yield every cut in lhotse's JSON format. Raises DataError for a repeated id.

    The supervisions have the language of their set, and transcripts that its normaliser has normalised.
    """
    keys = set[int]()  # the keys of the ids so far. A million keys need 60 MB, less than the ids.
    for member in sources_of(source):
        for location, cut in located_cuts(member):
            key = key_of(str(cut["id"]))
            if key in keys:
                raise DataError(f"{location}: cut id {cut['id']!r} is repeated. Ids must be unique")
            keys.add(key)
            facts = member.facts
            for supervision in cut.get("supervisions") or ():
                if facts.language:
                    supervision["language"] = facts.language
                if facts.normaliser and supervision.get("text"):
                    normalise = normaliser(facts.normaliser)
                    supervision["text"] = normalise_in(facts.language, normalise, supervision["text"])
            if isinstance(member, Manifest) and member.kind in _INCOMPLETE_FORMATS:
                cut = with_measured_length(cut, counts_samples=member.kind == "fairseq")
            yield cut


def normalised_texts(cuts: Iterable[Record], normaliser_name: str) -> Iterator[str]:
    """Yield the normalised transcript of each cut, with the lower case of its language."""
    normalise = normaliser(normaliser_name)
    for cut in cuts:
        yield normalise_in(language_of(cut), normalise, text_of(cut))


def with_measured_length(cut: Record, counts_samples: bool = False) -> Record:
    """Set the rate, length and channels of a cut of one file from its recording's header. Return the cut.

    Lhotse refuses a recording whose rate, length or channels differ from its file.

    - ``counts_samples`` says that the manifest has the number of samples of the recording. If it is the
      number in the header, the cut gets the header's duration.
    - Durations in other manifests are rounded. A cut that ends after the recording, by less than
      ``tolerated_seconds``, is shortened to the end of the recording.
    - A cut whose header cannot be read does not change, so that it is reported like other bad recordings.
    """
    recording = cut["recording"]
    header = header_or_none(recording["sources"][0]["source"])
    if header is None:
        return cut
    if counts_samples and header.frames == recording["num_samples"]:
        cut["duration"] = header.duration
    set_header(cut, header)
    if header.channels > 1:  # Training and transcription average all channels.
        cut |= {"type": "MultiCut", "channel": recording["channel_ids"]}
    seconds_beyond_end = cut["start"] + cut["duration"] - header.duration
    if 0 < seconds_beyond_end < tolerated_seconds(cut["duration"]):
        cut["duration"] = header.duration - cut["start"]
    for supervision in cut["supervisions"]:
        supervision["duration"] = cut["duration"]
        supervision["channel"] = cut["channel"]
    return cut


def set_header(cut: Record, header: Header) -> None:
    """Set the rate, the length and the channels of the recording of a cut of one file."""
    recording, channels = cut["recording"], list(range(header.channels))
    recording |= {"sampling_rate": header.samplerate, "num_samples": header.frames}
    recording |= {"duration": header.duration, "channel_ids": channels}
    recording["sources"][0]["channels"] = channels


@dataclass
class Totals:
    """The totals of a manifest, and its numbers of bad recordings by reason."""

    utterances: int = 0
    seconds: float = 0.0
    characters: int = 0
    empty: int = 0  # empty transcripts
    bad: Counter[str] = field(default_factory=Counter)

    def add(self, cut: Record) -> None:
        text = text_of(cut)
        self.utterances += 1
        self.seconds += seconds_of(cut)
        self.characters += len(text)
        if not text.strip():
            self.empty += 1

    def refuse(self, cut_id: object, problem: Unusable) -> None:
        """Count a bad recording, and print its id, the reason and the detail in a line with tabs."""
        self.bad[problem.reason] += 1
        columns = []
        for text in (str(cut_id), problem.reason, problem.detail):
            columns.append(escape_controls(shorten(text, 8_000)))
        print("bad: " + "\t".join(columns), flush=True)

    def describe(self) -> str:
        """Return the totals as a line of text."""
        hours = self.seconds / 3600
        description = f"{self.utterances} utterances, {hours:.2f} h, {self.characters} characters"
        if self.empty:
            description += f", {self.empty} empty transcripts"
        if self.bad:
            reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(self.bad.items()))
            description += f", bad: {reasons}"
        return description


def write_cuts(
    out: Path, checked: Iterable[tuple[Record, Record | Unusable]], keeps_bad: bool = False
) -> int:
    """Write the new cut of each pair (cut, new cut), and print the bad recordings and the totals.

    The new cut of a bad recording is an Unusable. The recording is left out or, with ``keeps_bad``, written
    with its old cut. Returns the number of bad recordings. Raises DataError if no recording is left,
    MachineError if the file cannot be written.
    """
    totals = Totals()
    with open_output(out) as file:
        for cut, new_cut in checked:
            if isinstance(new_cut, Unusable):
                totals.refuse(cut["id"], new_cut)
                if not keeps_bad:
                    continue
                new_cut = cut
            totals.add(new_cut)
            file.write(line_of(new_cut))
        refuse_empty(totals, out)
    print(f"{out}: {totals.describe()}")
    return totals.bad.total()


def line_of(cut: Record) -> bytes:
    """Return a cut as a JSON line in UTF-8."""
    # A lone surrogate, which UTF-8 cannot encode, becomes the JSON escape \udcxx.
    return json.dumps(cut, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def refuse_empty(totals: Totals, out: Path) -> None:
    """Raise DataError if no recording is left to write."""
    if not totals.utterances:
        raise DataError(f"{out} is not written: no recording is usable. Repair the sources")


@contextlib.contextmanager
def open_output(path: Path) -> Iterator[IO[bytes]]:
    """Return a context with a file to write, which is gzipped if its name ends in ``.gz``.

    The file gets its final name only if the context ends without an error. Raises MachineError if the file
    cannot be written.
    """
    with writing(path, FIX), atomic(path) as temporary, temporary.open("wb") as file:
        if path.suffix == ".gz":
            with gzip.GzipFile(fileobj=file, filename="", mode="wb", mtime=0) as gzip_file:
                yield cast("IO[bytes]", gzip_file)
        else:
            yield file


def map_in_threads(
    function: Callable[[Item], Output], items: Iterable[Item], jobs: int
) -> Iterator[tuple[Item, Output | Unusable]]:
    """Yield each item with the result of ``function``, or with the Unusable that it raised, in order.

    ``jobs`` threads call the function. Threads suffice, because decoding releases Python's global lock.
    """

    def output_or_refusal(item: Item) -> Output | Unusable:
        try:
            return function(item)
        except Unusable as problem:
            return problem

    remaining_items = iter(items)
    with ThreadPoolExecutor(jobs) as pool:
        # A pool reads all its items at once, so it gets a chunk of them.
        while chunk := list(islice(remaining_items, _CHUNK * jobs)):
            yield from zip(chunk, pool.map(output_or_refusal, chunk), strict=True)


def check_room(folder: Path, needed_bytes: float, qualifier: str, fix: str) -> str:
    """Return a line with the size that ``folder`` needs and the free space of its disk.

    ``qualifier`` precedes the needed size: "about " or "up to ". Raises MachineError if too little space is
    free. Its message ends with ``fix``.
    """
    path = folder.absolute()
    existing_folder = next(parent for parent in (path, *path.parents) if parent.exists())
    free_bytes = shutil.disk_usage(existing_folder).free
    line = f"{folder} needs {qualifier}{size_text(needed_bytes)}, {size_text(free_bytes)} are free"
    if needed_bytes + _RESERVED_BYTES > free_bytes:
        raise MachineError(f"{line}. Free some space, {fix}")
    return line


def size_text(byte_count: float) -> str:
    """Return a number of bytes as text in MB or GB."""
    return f"{byte_count / 1e9:.1f} GB" if byte_count >= 1e9 else f"{byte_count / 1e6:.0f} MB"

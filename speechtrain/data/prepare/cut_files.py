"""Manifests of cuts: the cuts of any source, their measured lengths, and the atomic writing of files."""

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
from speechtrain.data.formats.manifests import Manifest, Record, seconds_of, text_of
from speechtrain.data.recordings import Unusable, header_or_none
from speechtrain.data.source import Facts, Source
from speechtrain.data.sources import parts_of
from speechtrain.errors import DataError, MachineError, escape_controls, shorten
from speechtrain.files import atomic, writing
from speechtrain.text.normalise import normaliser

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")

_MEASURED = ("nemo", "mlperf", "fairseq", "table", "kaldi")
"""Formats whose manifests lack the length and the rate of the recording."""
FIX = "use another --out"  # if an output cannot be written
_ROOM = 64 * 2**20  # bytes that stay free
_CHUNK = 64  # recordings for each thread that the threads receive at once


def cuts_of(source: Source) -> Iterator[Record]:
    """Yield every cut in lhotse's JSON format. Raises DataError for a repeated id."""
    seen_keys: set[int] = set()  # A million keys need 60 MB, less than the ids.
    for part in parts_of(source):
        if not isinstance(part, Manifest):
            yield from (cut.to_dict() for cut in part.cuts())
            continue
        for entry in part.entries():
            key = key_of(str(entry.cut["id"]))
            if key in seen_keys:
                raise part.error_at(entry.line, f"cut id {entry.cut['id']!r} is repeated. Ids must be unique")
            seen_keys.add(key)
            _apply_facts(entry.cut, part.facts)
            if part.kind in _MEASURED:
                yield with_measured_length(entry.cut, counts_samples=part.kind == "fairseq")
            else:
                yield entry.cut


def _apply_facts(cut: Record, facts: Facts) -> None:
    """Give a cut the language of its set, and normalise its transcripts by the normaliser of the set."""
    for supervision in cut.get("supervisions") or ():
        if facts.language:
            supervision["language"] = facts.language
        if facts.normaliser and supervision.get("text"):
            supervision["text"] = normaliser(facts.normaliser)(supervision["text"])


def with_measured_length(cut: Record, counts_samples: bool = False) -> Record:
    """Set the rate, length and channels of a cut of one file from its recording's header, if readable.

    The lines of NeMo and MLPerf lack them, and lhotse refuses a recording that differs from its file. The end
    of the cut moves by at most 0.1 s or 1 %, the tolerance of rounded durations. If the manifest
    ``counts_samples`` and the header has the same count, the header's duration replaces the cut's.
    """
    recording = cut["recording"]
    file = header_or_none(recording["sources"][0]["source"])
    if file is None:
        return cut  # The cut is kept, because it is reported like any other bad recording.
    if counts_samples and file.frames == recording["num_samples"]:
        cut["duration"] = file.duration
    channels = list(range(file.channels))
    recording |= {"sampling_rate": file.samplerate, "num_samples": file.frames, "duration": file.duration}
    recording["channel_ids"] = recording["sources"][0]["channels"] = channels
    if len(channels) > 1:  # Training averages all channels, as the commands do.
        cut |= {"type": "MultiCut", "channel": channels}
    excess = cut["start"] + cut["duration"] - file.duration
    if 0 < excess <= max(0.1, 0.01 * cut["duration"]):
        cut["duration"] = file.duration - cut["start"]
    for supervision in cut["supervisions"]:
        supervision["duration"] = cut["duration"]
        supervision["channel"] = cut["channel"]
    return cut


@dataclass
class Totals:
    """Totals of a manifest, and its bad recordings by reason."""

    utterances: int = 0
    seconds: float = 0.0
    characters: int = 0
    empty: int = 0
    bad: Counter[str] = field(default_factory=Counter)

    def add(self, cut: Record) -> None:
        text = text_of(cut)
        self.utterances += 1
        self.seconds += seconds_of(cut)
        self.characters += len(text)
        self.empty += not text.strip()

    def refuse(self, name: object, problem: Unusable) -> None:
        self.bad[problem.reason] += 1
        columns = [shorten(text, 8_000) for text in (str(name), problem.reason, problem.detail)]
        print("bad: " + "\t".join(map(escape_controls, columns)), flush=True)

    def describe(self) -> str:
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
    """Write the new cut of each (cut, new cut) pair, and print the bad recordings and the totals.

    A bad recording has its refusal in place of the new cut. With ``keeps_bad``, its old cut is written.
    Returns the number of bad recordings. Raises DataError if no recording is left, MachineError if the file
    cannot be written.
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
    # A lone surrogate becomes the escape \udcxx, as JSON writes it.
    return json.dumps(cut, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def refuse_empty(totals: Totals, out: Path) -> None:
    """Raise DataError if no recording is left to write."""
    if not totals.utterances:
        raise DataError(f"{out} is not written: no recording is usable. Repair the sources")


@contextlib.contextmanager
def open_output(path: Path) -> Iterator[IO[bytes]]:
    """Open a file to write, gzipped if its name ends in ``.gz``. It gets its name only on success.

    Raises MachineError if the file cannot be written.
    """
    with writing(path, FIX), atomic(path) as temporary, temporary.open("wb") as file:
        if path.suffix == ".gz":
            with gzip.GzipFile(fileobj=file, filename="", mode="wb", mtime=0) as gzip_file:
                yield cast("IO[bytes]", gzip_file)
        else:
            yield file


def map_in_threads(
    function: Callable[[Item], Outcome], items: Iterable[Item], jobs: int
) -> Iterator[tuple[Item, Outcome | Unusable]]:
    """Apply ``function`` to items in ``jobs`` threads. Yields (item, outcome or refusal) in order.

    Threads suffice, because decoding releases Python's lock.
    """

    def outcome_or_refusal(item: Item) -> Outcome | Unusable:
        try:
            return function(item)
        except Unusable as problem:
            return problem

    remaining = iter(items)
    with ThreadPoolExecutor(jobs) as pool:
        while chunk := list(islice(remaining, _CHUNK * jobs)):
            yield from zip(chunk, pool.map(outcome_or_refusal, chunk), strict=True)


def check_room(folder: Path, need: float, qualifier: str, fix: str) -> str:
    """Return a line with the bytes that ``folder`` needs and the bytes that are free.

    Raises MachineError if too few bytes are free. ``qualifier`` precedes the need: "about " or "up to ".
    ``fix`` ends the error.
    """
    path = folder.absolute()
    existing_folder = next(parent for parent in (path, *path.parents) if parent.exists())
    free = shutil.disk_usage(existing_folder).free
    line = f"{folder} needs {qualifier}{size_text(need)}, {size_text(free)} are free"
    if need + _ROOM > free:
        raise MachineError(f"{line}. Free some space, {fix}")
    return line


def size_text(count: float) -> str:
    """Return a number of bytes as MB or GB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"

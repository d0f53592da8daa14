"""Manifests of cuts on the disk: reading any source, measuring it, and writing it whole or not at all."""

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
from speechtrain.data.recordings import Unusable, header
from speechtrain.data.source import Facts, Source
from speechtrain.data.sources import parts_of
from speechtrain.errors import DataError, MachineError, printable, shortened
from speechtrain.files import atomic, writing
from speechtrain.text.normalise import normaliser

Item = TypeVar("Item")
Made = TypeVar("Made")

_MEASURED = ("nemo", "mlperf", "fairseq", "table", "kaldi")
"""Formats without the recording's own length and rate."""
FIX = "use another --out"  # for what cannot be written
_ROOM = 64 * 2**20  # bytes that stay free
_CHUNK = 64  # recordings per thread that are given to the threads together


def cuts_of(source: Source) -> Iterator[Record]:
    """Yield every cut in lhotse's JSON format. Raises DataError for a repeated id."""
    seen: set[int] = set()  # keys, not ids: 60 MB for a million
    for part in parts_of(source):
        if isinstance(part, Manifest):
            for entry in part.entries():
                if (key := key_of(str(entry.cut["id"]))) in seen:
                    raise part.bad(entry.line, f"cut id {entry.cut['id']!r} is repeated; ids must be unique")
                seen.add(key)
                _tell(entry.cut, part.facts)
                if part.kind in _MEASURED:
                    yield measured(entry.cut, counts_samples=part.kind == "fairseq")
                else:
                    yield entry.cut
        else:
            yield from (cut.to_dict() for cut in part.cuts())


def _tell(cut: Record, facts: Facts) -> None:
    """Give a cut the language of its set, and transcripts by the set's normaliser."""
    for supervision in cut.get("supervisions") or ():
        supervision |= {"language": facts.language} if facts.language else {}
        if facts.normaliser and supervision.get("text"):
            supervision["text"] = normaliser(facts.normaliser)(supervision["text"])


def measured(cut: Record, counts_samples: bool = False) -> Record:
    """Set the rate, length and channels of a cut of one file from its recording's header, if readable.

    NeMo's and MLPerf's lines lack them, and lhotse refuses a recording that differs from its file.
    The cut's end moves by at most 0.1 s or 1 %, the tolerance of rounded durations. If the manifest
    ``counts_samples`` and the header has the same count, the duration becomes the header's.
    """
    recording = cut["recording"]
    info = header(recording["sources"][0]["source"])
    if info is None:
        return cut  # kept: it is reported like any other bad recording
    if counts_samples and info.frames == recording["num_samples"]:
        cut["duration"] = info.duration
    channels = list(range(info.channels))
    recording |= {"sampling_rate": info.samplerate, "num_samples": info.frames, "duration": info.duration}
    recording["channel_ids"] = recording["sources"][0]["channels"] = channels
    if len(channels) > 1:  # all of them are averaged, here and in training
        cut |= {"type": "MultiCut", "channel": channels}
    over = cut["start"] + cut["duration"] - info.duration
    if 0 < over <= max(0.1, 0.01 * cut["duration"]):
        cut["duration"] = info.duration - cut["start"]
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
        told = (shortened(part, 8_000) for part in (str(name), problem.reason, problem.detail))
        print("bad: " + "\t".join(map(printable, told)), flush=True)

    def describe(self) -> str:
        empty = f", {self.empty} empty transcripts" if self.empty else ""
        bad = ", ".join(f"{count} {reason}" for reason, count in sorted(self.bad.items()))
        return (
            f"{self.utterances} utterances, {self.seconds / 3600:.2f} h, {self.characters} characters{empty}"
            + (f"; bad: {bad}" if bad else "")
        )


def write_cuts(
    out: Path, checked: Iterable[tuple[Record, Record | Unusable]], keeps_bad: bool = False
) -> int:
    """Write the result of each (cut, result) pair, print refusals and totals; return the count of bad ones.

    ``keeps_bad`` writes the original cut of a bad recording. Raises DataError if no recording is left,
    MachineError if the file cannot be written.
    """
    totals = Totals()
    with opened(out) as file:
        for cut, made in checked:
            if isinstance(made, Unusable):
                totals.refuse(cut["id"], made)
                if not keeps_bad:
                    continue
                made = cut
            totals.add(made)
            file.write(line_of(made))
        refuse_empty(totals, out)
    print(f"{out}: {totals.describe()}")
    return totals.bad.total()


def line_of(cut: Record) -> bytes:
    # a lone surrogate becomes the escape \udcxx, as JSON writes it
    return json.dumps(cut, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"


def refuse_empty(totals: Totals, out: Path) -> None:
    if not totals.utterances:
        raise DataError(f"{out} is not written: no recording is usable; repair the sources")


@contextlib.contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file to write, gzipped if its name ends in ``.gz``; it gets its name only on success.

    Raises MachineError if it cannot be written.
    """
    with writing(path, FIX), atomic(path) as temporary, temporary.open("wb") as raw:
        if path.suffix == ".gz":
            with gzip.GzipFile(fileobj=raw, filename="", mode="wb", mtime=0) as file:
                yield cast("IO[bytes]", file)
        else:
            yield raw


def parallel(
    function: Callable[[Item], Made], items: Iterable[Item], jobs: int
) -> Iterator[tuple[Item, Made | Unusable]]:
    """Yield (item, result or refusal) in order from ``jobs`` threads; decoding releases Python's lock."""

    def made(item: Item) -> Made | Unusable:
        try:
            return function(item)
        except Unusable as problem:
            return problem

    remaining = iter(items)
    with ThreadPoolExecutor(jobs) as pool:
        while chunk := list(islice(remaining, _CHUNK * jobs)):
            yield from zip(chunk, pool.map(made, chunk), strict=True)


def check_room(place: Path, need: float, what: str, fix: str) -> str:
    """A line that tells the bytes that ``place`` needs and those that are free.

    Raises MachineError if less is free. ``what`` stands before the need, ``fix`` ends the error.
    """
    whole = place.absolute()
    free = shutil.disk_usage(next(path for path in (whole, *whole.parents) if path.exists())).free
    told = f"{place} needs {what}{size_text(need)}, {size_text(free)} are free"
    if need + _ROOM > free:
        raise MachineError(f"{told}; free some space, {fix}")
    return told


def size_text(count: float) -> str:
    """Bytes as MB or GB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"

"""What a set of recordings holds: lengths, speakers, characters and likely errors."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from speechtrain.data.formats.manifests import Record, seconds_of, speaker_of, text_of
from speechtrain.data.recordings import Unusable

_FAST, _SLOW = 2.0, 0.2  # times the median of characters per second; who reads aloud varies by a quarter
_SILENT = 2e-3  # largest sample of full scale 1, 65 of 16 bits
LONG = 20.0  # seconds: data.max_seconds of a run, unless it is set
_CLIPPED = 5e-4  # share of samples at full scale


class Heard(NamedTuple):
    """A hash of a recording's samples, and what is likely wrong with them, if anything."""

    content: bytes
    fault: str


def hear(cut: Record) -> Heard:
    """Decode a cut at its own rate. Raises Unusable."""
    from speechtrain.data.audio import read_cut

    samples = np.abs(read_cut(cut, int((cut.get("recording") or {}).get("sampling_rate", 16_000))))
    is_clipped = float((samples >= 0.999).mean()) > _CLIPPED
    fault = "silent" if float(samples.max()) < _SILENT else "clipped" if is_clipped else ""
    return Heard(hashlib.blake2b(samples.tobytes(), digest_size=16).digest(), fault)


class Statistics:
    """Collects cuts, with what was heard of each, why it cannot be used, or None."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.seconds: list[float] = []
        self.spoken: list[int] = []  # characters of each transcript, without spaces
        self.characters, self.speakers = Counter[str](), Counter[str]()
        self.errors: dict[str, list[str]] = defaultdict(list)
        self._copies: dict[object, list[str]] = defaultdict(list)

    def add(self, cut: Record, heard: Heard | Unusable | None) -> None:
        from speechtrain.data.audio import files_of

        name, text = str(cut["id"]), text_of(cut)
        self.ids.append(name)
        self.seconds.append(seconds_of(cut))
        self.spoken.append(len("".join(text.split())))
        self.characters.update(text)
        self.speakers[speaker_of(cut)] += 1
        fault = heard.fault if isinstance(heard, Heard) else heard.reason if heard else ""
        for found in (fault, "" if text.strip() else "no_transcript"):
            if found:
                self.errors[found].append(name)
        if heard is None:
            self._copies[(*files_of(cut), cut.get("start"), cut.get("duration"))].append(name)
        elif isinstance(heard, Heard) and fault != "silent":
            self._copies[heard.content].append(name)

    def long(self) -> dict[str, Any]:
        """Return the number and hours of recordings that a run does not use."""
        seconds = [length for length in self.seconds if length > LONG]
        return {"long": {"recordings": len(seconds), "hours": round(sum(seconds) / 3600, 4)}}

    def result(self) -> dict[str, Any]:
        """Return the figures as JSON has them; each likely error with the ids that show it."""
        seconds, spoken = np.array(self.seconds), np.array(self.spoken)
        rates = np.divide(spoken, seconds, out=np.zeros(len(spoken)), where=seconds > 0)
        median = float(np.median(rates[rates > 0])) if (rates > 0).any() else 0.0
        shares = {"shortest": 0, "5 %": 5, "median": 50, "95 %": 95, "longest": 100}
        likely = {
            "too_fast": [self.ids[row] for row in np.flatnonzero(rates > _FAST * median)],
            "too_slow": [self.ids[row] for row in np.flatnonzero((rates > 0) & (rates < _SLOW * median))],
            "duplicates": [name for names in self._copies.values() if len(names) > 1 for name in names],
        }
        return {
            "recordings": len(self.ids),
            "hours": round(float(seconds.sum()) / 3600, 4),
            "speakers": len(self.speakers.keys() - {""}),
            "without_speaker": self.speakers[""],
            "seconds": {name: round(float(np.percentile(seconds, p)), 2) for name, p in shares.items()},
            "characters_per_second": round(median, 2),
            "characters": dict(self.characters.most_common()),
            "likely_errors": {name: ids for name, ids in {**self.errors, **likely}.items() if ids},
        }


def table(result: Mapping[str, Any]) -> Iterable[str]:
    """Yield the lines of a text table of ``Statistics.result``."""
    unknown = f" ({result['without_speaker']} recordings without one)" if result["without_speaker"] else ""
    yield f"recordings  {result['recordings']}"
    yield f"hours       {result['hours']:.2f}"
    yield f"speakers    {result['speakers']}{unknown}"
    yield "seconds     " + ", ".join(f"{name} {value:g}" for name, value in result["seconds"].items())
    if count := result["long"]["recordings"]:
        hours = result["long"]["hours"]
        yield f"long        {count} recordings ({hours:.2f} h) are longer than data.max_seconds={LONG:g}"
    yield f"characters  {sum(result['characters'].values())}, {result['characters_per_second']:g} a second"
    counts = [f"{character!r} {count}" for character, count in result["characters"].items()]
    for first in range(0, min(len(counts), 200), 10):
        yield "            " + "  ".join(counts[first : first + 10])
    if len(counts) > 200:
        yield f"            and {len(counts) - 200} more, which --json lists"
    for name, ids in result["likely_errors"].items():
        shown = ", ".join(ids[:3]) + (" …" if len(ids) > 3 else "")
        yield f"{name.replace('_', ' '):<14}{len(ids):>6}  {shown}"

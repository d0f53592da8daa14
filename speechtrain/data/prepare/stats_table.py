"""Statistics of a set of recordings: lengths, speakers, characters and likely errors."""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from unicodedata import category

import numpy as np

from speechtrain.data.formats.manifests import Record, seconds_of, speaker_of, text_of
from speechtrain.data.recordings import Fault, Unusable
from speechtrain.data.voice_activity import is_silent
from speechtrain.text.normalise import DAMAGED, REMARK, invisible

LONG = 60.0
"""The highest ``data.max_seconds`` that ``recipe=scratch`` sets. Recordings of up to 35 s were tried."""
# The dropped remarks, and other words in brackets, which may be remarks
_REMARKS = re.compile(rf"{REMARK.pattern}|[\[(][^\[\]()]*[\])]", re.IGNORECASE)

# A recording is too fast or too slow at this multiple of the median of characters per second. The rate of
# reading aloud varies only by a quarter between speakers.
_FAST, _SLOW = 2.0, 0.2
_CLIPPED_SHARE = 5e-4  # A recording with a larger share of samples at full scale is clipped.
_PERCENTILES = {"shortest": 0, "5 %": 5, "median": 50, "95 %": 95, "longest": 100}
_MOST_DETAILS = 10  # the most files in the text table that are described
_MOST_CHARACTERS = 200  # the most characters in the text table


class AudioCheck(NamedTuple):
    """The result of decoding a recording."""

    content_hash: bytes  # a hash of the samples, which shows copies
    fault: str  # the likely error of the samples, or ""
    file_faults: list[Fault]  # the faults of the file


def check_audio_of(cut: Record) -> AudioCheck:
    """Return the result of decoding a cut at the rate of its recording. Raises Unusable."""
    from speechtrain.data.audio import read_with_faults

    rate = int((cut.get("recording") or {}).get("sampling_rate", 16_000))
    samples, file_faults = read_with_faults(cut, rate)
    magnitudes = np.abs(samples)
    fault = ""
    if is_silent(samples):
        fault = "silent"
    elif float((magnitudes >= 0.999).mean()) > _CLIPPED_SHARE:
        fault = "clipped"
    content_hash = hashlib.blake2b(magnitudes.tobytes(), digest_size=16).digest()
    return AudioCheck(content_hash, fault, file_faults)


class Statistics:
    """The statistics of the cuts that have been added."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.seconds: list[float] = []
        self.spoken: list[int] = []  # the number of characters of each transcript, without spaces
        self.characters = Counter[str]()  # how often each character occurs
        self.remarks = Counter[str]()  # how often each string in brackets, tag and sign of no speech occurs
        self.speakers = Counter[str]()  # the number of cuts of each speaker. "" is an unknown speaker.
        self.errors: dict[str, list[str]] = defaultdict(list)  # ids by likely error
        self.details: list[str] = []  # of unusable recordings and of the faults of files
        self._ids_by_content: dict[object, list[str]] = defaultdict(list)

    def add(self, cut: Record, check: AudioCheck | Unusable | None) -> None:
        """Add a cut with the check of its audio, or with None if the audio is not decoded.

        Without a check, two recordings are copies if their files, starts and durations are equal.
        """
        from speechtrain.data.audio import files_of

        name, text = str(cut["id"]), text_of(cut)
        self.ids.append(name)
        self.seconds.append(seconds_of(cut))
        self.spoken.append(len("".join(text.split())))
        self.characters.update(text)
        self.remarks.update(_REMARKS.findall(text))
        self.speakers[speaker_of(cut)] += 1
        fault = ""
        if check is None:
            self._ids_by_content[(*files_of(cut), cut.get("start"), cut.get("duration"))].append(name)
        elif isinstance(check, Unusable):
            fault = check.reason
            self.details.append(check.detail)
        else:
            fault = check.fault
            if fault != "silent":
                self._ids_by_content[check.content_hash].append(name)
            for file_fault in check.file_faults:
                self.errors[file_fault.reason].append(name)
                self.details.append(file_fault.detail)
        if fault:
            self.errors[fault].append(name)
        if not text.strip():
            self.errors["no_transcript"].append(name)
        if DAMAGED in text:
            self.errors["damaged_text"].append(name)
        if invisible(text):
            self.errors["invisible"].append(name)

    def as_json(self) -> dict[str, Any]:
        """Return the statistics as JSON stores them, with the ids of the recordings by likely error."""
        seconds, spoken = np.array(self.seconds), np.array(self.spoken)
        rates = np.divide(spoken, seconds, out=np.zeros(len(spoken)), where=seconds > 0)
        positive_rates = rates[rates > 0]
        median = float(np.median(positive_rates)) if len(positive_rates) else 0.0
        lengths = {}
        for name, percentile in _PERCENTILES.items():
            lengths[name] = round(float(np.percentile(seconds, percentile)), 2)
        # Numbers and symbols stay as labels.
        no_letters = {sign: n for sign, n in self.characters.items() if category(sign)[0] in "NS"}
        hours = float(seconds.sum()) / 3600
        long_seconds = seconds[seconds > LONG]
        duplicates: list[str] = []
        for names in self._ids_by_content.values():
            if len(names) > 1:
                duplicates += names
        is_slow = (rates > 0) & (rates < _SLOW * median)  # A recording without a transcript has the rate 0.
        likely_errors = {
            **self.errors,
            "too_fast": [self.ids[row] for row in np.flatnonzero(rates > _FAST * median)],
            "too_slow": [self.ids[row] for row in np.flatnonzero(is_slow)],
            "duplicates": duplicates,
        }
        return {
            "recordings": len(self.ids),
            "hours": round(hours, 4),
            "speakers": len(self.speakers.keys() - {""}),
            "without_speaker": self.speakers[""],
            "seconds": lengths,
            "characters_per_second": round(median, 2),
            "characters": dict(self.characters.most_common()),
            "no_letters": dict(Counter({**self.remarks, **no_letters}).most_common()),
            "likely_errors": {name: ids for name, ids in likely_errors.items() if ids},
            "details": self.details,
            "long": {"recordings": len(long_seconds), "hours": round(float(long_seconds.sum()) / 3600, 4)},
        }


def table_lines(result: Mapping[str, Any]) -> Iterable[str]:
    """Yield the lines of a text table of ``Statistics.as_json``."""
    unknown = f" ({result['without_speaker']} recordings without one)" if result["without_speaker"] else ""
    lengths = ", ".join(f"{name} {seconds:g}" for name, seconds in result["seconds"].items())
    yield f"recordings  {result['recordings']}"
    yield f"hours       {result['hours']:.2f}"
    yield f"speakers    {result['speakers']}{unknown}"
    yield f"seconds     {lengths}"
    long_count, long_hours = result["long"]["recordings"], result["long"]["hours"]
    if long_count:
        long = (
            f"{long_count} recordings ({long_hours:.2f} h) are too long for recipe=scratch (above {LONG:g} s)"
        )
        yield f"long        {long}"
    yield f"characters  {sum(result['characters'].values())}, {result['characters_per_second']:g} a second"
    counts = [f"{character!r} {count}" for character, count in result["characters"].items()]
    for start in range(0, min(len(counts), _MOST_CHARACTERS), 10):
        yield "            " + "  ".join(counts[start : start + 10])
    if len(counts) > _MOST_CHARACTERS:
        yield f"            and {len(counts) - _MOST_CHARACTERS} more, which --json lists"
    if result["no_letters"]:
        signs = [f"{sign[:40]!r} {count}" for sign, count in result["no_letters"].items()]
        yield f"no letters  {len(signs)} signs and strings in brackets: {'  '.join(signs[:10])}"
    for name, ids in result["likely_errors"].items():
        examples = ", ".join(ids[:3])
        if len(ids) > 3:
            examples += " …"
        yield f"{name.replace('_', ' '):<18}{len(ids):>6}  {examples}"
    yield from result["details"][:_MOST_DETAILS]
    if len(result["details"]) > _MOST_DETAILS:
        yield f"and {len(result['details']) - _MOST_DETAILS} more, which --json lists"

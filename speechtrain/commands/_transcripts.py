"""What was said in a recording, and the forms in which it is written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speechtrain.commands._cli import json_text
from speechtrain.errors import SPELLING, printable
from speechtrain.files import finite

if TYPE_CHECKING:
    from speechtrain.decoding.base import Hypothesis, Word

_CAPTION_CHARACTERS = 84  # two lines of 42, as broadcasters write them
_CAPTION_SECONDS = 7.0
_PAUSE_SECONDS = 1.0  # after which a new caption begins


@dataclass(frozen=True)
class Segment:
    """A piece of a recording, in seconds, and its text, whose times count from ``start``."""

    start: float
    end: float
    hypothesis: Hypothesis


@dataclass(frozen=True)
class Transcript:
    """What was said in a recording."""

    name: str  # as it was named, or its id in a manifest
    audio: str  # the file, if there is one
    seconds: float
    segments: tuple[Segment, ...]
    delays: tuple[float, float] = (0.0, 0.0)  # seconds by which words begin and end late, taken off

    @property
    def text(self) -> str:
        return " ".join(text for s in self.segments if (text := s.hypothesis.text.strip()))

    @property
    def score(self) -> float:
        """The log-probability of the text, with what the decoder added."""
        return sum(segment.hypothesis.score for segment in self.segments)

    @property
    def words(self) -> tuple[Word, ...]:
        """The words with start and end in seconds of the recording, and their confidence."""
        late_start, late_end = self.delays
        found = []
        for segment in self.segments:
            for word in segment.hypothesis.words:
                start = min(max(0.0, segment.start + word.start - late_start), self.seconds)
                end = min(max(start, segment.start + word.end - late_end), self.seconds)
                found.append(replace(word, start=start, end=end))
        return tuple(found)

    def captions(self) -> Iterator[tuple[float, float, str]]:
        """Start, end and text of captions: whole words, at most two lines and 7 s, none over a pause."""
        words = self.words
        if not words:
            yield from ((s.start, s.end, s.hypothesis.text) for s in self.segments if s.hypothesis.text)
        while words:
            count = 1
            for word in words[1:]:
                length = len(" ".join(w.text for w in words[: count + 1]))
                is_late = word.end - words[0].start > _CAPTION_SECONDS
                if (
                    length > _CAPTION_CHARACTERS
                    or is_late
                    or word.start - words[count - 1].end > _PAUSE_SECONDS
                ):
                    break
                count += 1
            yield words[0].start, words[count - 1].end, " ".join(word.text for word in words[:count])
            words = words[count:]

    def content(self) -> dict[str, Any]:
        """All of it as JSON's types."""
        found: dict[str, Any] = {"audio": self.audio} | ({"id": self.name} if self.name != self.audio else {})
        found |= {"text": self.text, "seconds": round(self.seconds, 3), "score": round(self.score, 4)}
        found["words"] = [
            {"word": word.text, **{k: round(getattr(word, k), 3) for k in ("start", "end", "confidence")}}
            for word in self.words
        ]
        if len(self.segments) == 1 and (others := self.segments[0].hypothesis.alternatives):
            found["alternatives"] = [{"text": one.text, "score": round(one.score, 4)} for one in others]
        return found


def _plain(text: str) -> str:
    return printable(text, SPELLING)


def _text(transcript: Transcript) -> str:
    return f"{printable(transcript.name)}\t{_plain(transcript.text)}\n"


def _json(transcript: Transcript) -> str:
    return json_text(finite(transcript.content())) + "\n"


def _srt(transcript: Transcript) -> str:
    captions = enumerate(transcript.captions(), 1)
    return "".join(
        f"{n}\n{_clock(a, ',')} --> {_clock(b, ',')}\n{_plain(text)}\n\n" for n, (a, b, text) in captions
    )


def _vtt(transcript: Transcript) -> str:
    escaped = {ord("&"): "&amp;", ord("<"): "&lt;", ord(">"): "&gt;"}
    cues = (
        f"{_clock(a)} --> {_clock(b)}\n{_plain(t).translate(escaped)}\n\n"
        for a, b, t in transcript.captions()
    )
    return "WEBVTT\n\n" + "".join(cues)


def _ctm(transcript: Transcript) -> str:
    """NIST's form: file, channel, start, duration, word, confidence."""
    is_file = transcript.name == transcript.audio
    name = Path(transcript.name).stem if is_file else transcript.name
    name = printable(re.sub(r"\s", "_", name))
    rows = ((word, max(0.0, word.end - word.start)) for word in transcript.words)
    return "".join(f"{name} 1 {w.start:.3f} {s:.3f} {_plain(w.text)} {w.confidence:.3f}\n" for w, s in rows)


def _clock(seconds: float, mark: str = ".") -> str:
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}{mark}{thousandths:03}"


_FORMS = {"text": _text, "json": _json, "srt": _srt, "vtt": _vtt, "ctm": _ctm}
FORMATS = tuple(_FORMS)
ONE_RECORDING = ("srt", "vtt")
"""Formats whose files have one recording each."""


def written(transcript: Transcript, form: str) -> str:
    """A transcript in a form of FORMATS, with an end of line; control characters are escaped."""
    return _FORMS[form](transcript)

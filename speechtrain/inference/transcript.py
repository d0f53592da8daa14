"""What was said in a recording, and the forms in which it is written."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speechtrain.errors import SPELLING, printable
from speechtrain.files import finite, json_text

if TYPE_CHECKING:
    from speechtrain.decoding.base import Hypothesis, Word

_LINE_CHARACTERS = 42  # as broadcasters write them
_CAPTION_CHARACTERS = 2 * _LINE_CHARACTERS
_CAPTION_SECONDS = 7.0
_PAUSE_SECONDS = 1.0  # after which a new caption begins


_Caption = tuple[float, float, str]
"""Start and end in seconds, and text."""


@dataclass(frozen=True)
class Segment:
    """A piece of a recording, in seconds, and its text, whose times count from ``start``."""

    start: float  # in seconds of the recording
    end: float  # in seconds of the recording
    hypothesis: Hypothesis  # its text, with times from the start of the piece


@dataclass(frozen=True)
class Transcript:
    """The text of a recording, with its times."""

    name: str  # the name of the file, or the id in a manifest
    audio: str  # the file, if there is one
    seconds: float  # the length of the recording
    segments: tuple[Segment, ...]  # its pieces in order

    def __repr__(self) -> str:
        return f"<Transcript {self.name}, {self.seconds:.1f} s: {self.text}>"

    @property
    def text(self) -> str:
        return " ".join(text for s in self.segments if (text := s.hypothesis.text.strip()))

    @property
    def score(self) -> float:
        """The log-probability of the text, with the terms of the decoder."""
        return sum(segment.hypothesis.score for segment in self.segments)

    @property
    def words(self) -> tuple[Word, ...]:
        """The words with start and end in seconds of the recording, and their confidence.

        A word ends at the latest when the next one begins. Words that begin together share their time.
        """
        groups = [list(group) for _, group in groupby(self._timed(), key=attrgetter("start"))]
        starts = [group[0].start for group in groups]
        limits = [*starts, self.seconds][1:]
        words: list[Word] = []
        for group, limit in zip(groups, limits, strict=True):
            start = group[0].start
            times = _spread([word.text for word in group], start, max(start, min(group[-1].end, limit)))
            for word, (word_start, word_end, _) in zip(group, times, strict=True):
                words.append(replace(word, start=word_start, end=word_end))
        return tuple(words)

    def _timed(self) -> Iterator[Word]:
        """Yield each word with its times in the recording."""
        for segment in self.segments:
            for word in segment.hypothesis.words:
                start = min(segment.start + word.start, self.seconds)
                end = min(segment.start + word.end, self.seconds)
                yield replace(word, start=start, end=end)

    def captions(self) -> Iterator[tuple[float, float, str]]:
        """Start, end and text of captions: at most two lines and 7 s, no overlap, none over a pause.

        A caption that would last longer ends after 7 s. A word of more than two lines is divided.
        """
        caption: list[_Caption] = []
        for word in self._spoken():
            if caption and not _fits(caption, word):
                yield _joined(caption)
                caption = []
            caption.append(word)
        if caption:
            yield _joined(caption)

    def _spoken(self) -> Iterator[_Caption]:
        """Words with their times, of which none is longer than a caption."""
        words = self.words
        for word in words:
            yield from _spread(textwrap.wrap(word.text, _CAPTION_CHARACTERS), word.start, word.end)
        if not words:  # The decoder gives no times, so that each character gets an equal part of its piece.
            for segment in self.segments:
                parts = textwrap.wrap(segment.hypothesis.text, _LINE_CHARACTERS)
                yield from _spread(parts, segment.start, segment.end)

    def content(self) -> dict[str, Any]:
        """All of it as JSON's types."""
        content: dict[str, Any] = {"audio": self.audio}
        if self.name != self.audio:
            content["id"] = self.name
        content |= {"text": self.text, "seconds": round(self.seconds, 3), "score": round(self.score, 4)}
        content["words"] = [
            {"word": word.text, **{k: round(getattr(word, k), 3) for k in ("start", "end", "confidence")}}
            for word in self.words
        ]
        if len(self.segments) == 1 and self.segments[0].hypothesis.alternatives:
            hypothesis = self.segments[0].hypothesis
            content |= _scores(hypothesis)
            content["alternatives"] = [{"text": h.text, **_scores(h)} for h in hypothesis.alternatives]
        return content


def _scores(hypothesis: Hypothesis) -> dict[str, float]:
    """The score and, from a beam, the merit of a text, for JSON."""
    scores = {"score": round(hypothesis.score, 4)}
    if hypothesis.merit is not None:
        scores["merit"] = round(hypothesis.merit, 4)
    return scores


def _spread(parts: list[str], start: float, end: float) -> Iterator[_Caption]:
    """Divide the time from ``start`` to ``end`` among ``parts`` by their characters."""
    seconds_per_character = (end - start) / max(1, sum(map(len, parts)))
    for part in parts:
        part_end = min(end, start + len(part) * seconds_per_character)
        yield start, part_end, part
        start = part_end


def _fits(caption: list[_Caption], word: _Caption) -> bool:
    """Whether a word can follow in the caption."""
    start, end, text = word
    if end - caption[0][0] > _CAPTION_SECONDS or start - caption[-1][1] > _PAUSE_SECONDS:
        return False
    return len(_lines(f"{_joined(caption)[2]} {text}")) <= 2


def _joined(caption: list[_Caption]) -> _Caption:
    start = round(caption[0][0], 3)  # Captions have milliseconds, and a sum of rounded times stays below 7 s.
    end = min(round(caption[-1][1], 3), round(start + _CAPTION_SECONDS, 3))
    return start, end, " ".join(text for *_, text in caption)


def _lines(text: str) -> list[str]:
    return textwrap.wrap(text, _LINE_CHARACTERS, break_on_hyphens=False)


def _plain(text: str) -> str:
    return printable(text, SPELLING)


def _text(transcript: Transcript) -> str:
    return f"{printable(transcript.name)}\t{_plain(transcript.text)}\n"


def _json(transcript: Transcript) -> str:
    return json_text(finite(transcript.content())) + "\n"


def _srt(transcript: Transcript) -> str:
    cues = []
    for number, (start, end, text) in enumerate(transcript.captions(), 1):
        lines = "\n".join(_lines(_plain(text)))
        cues.append(f"{number}\n{_clock(start, ',')} --> {_clock(end, ',')}\n{lines}\n\n")
    return "".join(cues)


def _vtt(transcript: Transcript) -> str:
    escaped = {ord("&"): "&amp;", ord("<"): "&lt;", ord(">"): "&gt;"}
    cues = ["WEBVTT\n\n"]
    for start, end, text in transcript.captions():
        lines = "\n".join(_lines(_plain(text))).translate(escaped)
        cues.append(f"{_clock(start)} --> {_clock(end)}\n{lines}\n\n")
    return "".join(cues)


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

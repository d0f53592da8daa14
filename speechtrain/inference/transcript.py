"""The transcript of a recording, and its forms: text, JSON, SRT, WebVTT and CTM."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from speechtrain.errors import SPELLING, escape_controls
from speechtrain.files import json_text, with_finite_numbers

if TYPE_CHECKING:
    from speechtrain.decoding.base import Hypothesis, Word

_LINE_CHARACTERS = 42  # as broadcasters write them
_CAPTION_CHARACTERS = 2 * _LINE_CHARACTERS
_CAPTION_SECONDS = 7.0
_PAUSE_SECONDS = 1.0  # A new caption begins after a longer pause.


class _Caption(NamedTuple):
    """A text with its time in the recording, in seconds."""

    start: float
    end: float
    text: str


@dataclass(frozen=True)
class Segment:
    """A piece of a recording, and its text."""

    start: float  # in seconds of the recording
    end: float  # in seconds of the recording
    hypothesis: Hypothesis  # the text, with times that count from ``start``


@dataclass(frozen=True)
class Transcript:
    """The text of a recording, with its times."""

    name: str  # the name of the file, or the id in a manifest
    audio: str  # the path of the file, or an empty text without a file
    seconds: float  # the length of the recording
    segments: tuple[Segment, ...]  # the pieces of the recording in order

    def __repr__(self) -> str:
        return f"<Transcript {self.name}, {self.seconds:.1f} s: {self.text}>"

    @property
    def text(self) -> str:
        texts = [segment.hypothesis.text.strip() for segment in self.segments]
        return " ".join(filter(None, texts))

    @property
    def score(self) -> float:
        """The log-probability of the text, with the terms of the decoder."""
        return sum(segment.hypothesis.score for segment in self.segments)

    @property
    def words(self) -> tuple[Word, ...]:
        """The words with start and end in seconds of the recording, and their confidence.

        A word ends at the latest when the next word begins. Words that begin together share their time.
        """
        groups = [list(group) for _, group in groupby(self._words_in_recording(), key=attrgetter("start"))]
        starts = [group[0].start for group in groups]
        latest_ends = [*starts, self.seconds][1:]
        words: list[Word] = []
        for group, start, latest_end in zip(groups, starts, latest_ends, strict=True):
            end = max(start, min(group[-1].end, latest_end))
            parts = _spread([word.text for word in group], start, end)
            for word, part in zip(group, parts, strict=True):
                words.append(replace(word, start=part.start, end=part.end))
        return tuple(words)

    def _words_in_recording(self) -> Iterator[Word]:
        """Yield each word with its times in the recording."""
        for segment in self.segments:
            for word in segment.hypothesis.words:
                start = min(segment.start + word.start, self.seconds)
                end = min(segment.start + word.end, self.seconds)
                yield replace(word, start=start, end=end)

    def captions(self) -> Iterator[tuple[float, float, str]]:
        """Yield start, end and text of captions.

        A caption has at most two lines and 7 s. Captions do not overlap, and none spans a pause. A caption
        that would last longer ends after 7 s. A word of more than two lines is divided.
        """
        caption: list[_Caption] = []
        for part in self._caption_parts():
            if caption and not _fits(caption, part):
                yield _join(caption)
                caption = []
            caption.append(part)
        if caption:
            yield _join(caption)

    def _caption_parts(self) -> Iterator[_Caption]:
        """Yield the words with their times. A word that is longer than a caption is divided."""
        words = self.words
        for word in words:
            yield from _spread(textwrap.wrap(word.text, _CAPTION_CHARACTERS), word.start, word.end)
        if not words:  # The decoder gives no times, so each character gets an equal part of its piece.
            for segment in self.segments:
                parts = textwrap.wrap(segment.hypothesis.text, _LINE_CHARACTERS)
                yield from _spread(parts, segment.start, segment.end)

    def content(self) -> dict[str, Any]:
        """Return the transcript as types of JSON."""
        content: dict[str, Any] = {"audio": self.audio}
        if self.name != self.audio:
            content["id"] = self.name
        content |= {"text": self.text, "seconds": round(self.seconds, 3), "score": round(self.score, 4)}
        content["words"] = [_word_content(word) for word in self.words]
        if len(self.segments) == 1 and self.segments[0].hypothesis.alternatives:
            hypothesis = self.segments[0].hypothesis
            content |= _scores(hypothesis)
            content["alternatives"] = [
                {"text": alternative.text, **_scores(alternative)} for alternative in hypothesis.alternatives
            ]
        return content


def _word_content(word: Word) -> dict[str, str | float]:
    """Return a word with its times and confidence, for JSON."""
    return {
        "word": word.text,
        "start": round(word.start, 3),
        "end": round(word.end, 3),
        "confidence": round(word.confidence, 3),
    }


def _scores(hypothesis: Hypothesis) -> dict[str, float]:
    """Return the score and, from a beam search, the merit of a text, for JSON."""
    scores = {"score": round(hypothesis.score, 4)}
    if hypothesis.merit is not None:
        scores["merit"] = round(hypothesis.merit, 4)
    return scores


def _spread(parts: list[str], start: float, end: float) -> Iterator[_Caption]:
    """Divide the time from ``start`` to ``end`` among ``parts`` by their characters."""
    seconds_per_character = (end - start) / max(1, sum(map(len, parts)))
    for part in parts:
        part_end = min(end, start + len(part) * seconds_per_character)
        yield _Caption(start, part_end, part)
        start = part_end


def _fits(caption: list[_Caption], part: _Caption) -> bool:
    """Return whether ``part`` can follow in the caption."""
    seconds = part.end - caption[0].start
    pause_seconds = part.start - caption[-1].end
    if seconds > _CAPTION_SECONDS or pause_seconds > _PAUSE_SECONDS:
        return False
    lines = _lines(f"{_join(caption).text} {part.text}")
    return len(lines) <= 2


def _join(parts: list[_Caption]) -> _Caption:
    """Return the caption of ``parts``. Its times are in whole milliseconds, and it lasts at most 7 s."""
    start = round(parts[0].start, 3)
    end = min(round(parts[-1].end, 3), round(start + _CAPTION_SECONDS, 3))
    return _Caption(start, end, " ".join(part.text for part in parts))


def _lines(text: str) -> list[str]:
    return textwrap.wrap(text, _LINE_CHARACTERS, break_on_hyphens=False)


def _printable_text(text: str) -> str:
    return escape_controls(text, SPELLING)


def _text(transcript: Transcript) -> str:
    return f"{escape_controls(transcript.name)}\t{_printable_text(transcript.text)}\n"


def _json(transcript: Transcript) -> str:
    return json_text(with_finite_numbers(transcript.content())) + "\n"


def _srt(transcript: Transcript) -> str:
    cues = []
    for number, (start, end, text) in enumerate(transcript.captions(), 1):
        lines = "\n".join(_lines(_printable_text(text)))
        cues.append(f"{number}\n{_clock(start, ',')} --> {_clock(end, ',')}\n{lines}\n\n")
    return "".join(cues)


def _vtt(transcript: Transcript) -> str:
    escaped = {ord("&"): "&amp;", ord("<"): "&lt;", ord(">"): "&gt;"}
    cues = ["WEBVTT\n\n"]
    for start, end, text in transcript.captions():
        lines = "\n".join(_lines(_printable_text(text))).translate(escaped)
        cues.append(f"{_clock(start)} --> {_clock(end)}\n{lines}\n\n")
    return "".join(cues)


def _ctm(transcript: Transcript) -> str:
    """Return the form of NIST: file, channel, start, duration, word, confidence."""
    is_file = transcript.name == transcript.audio
    name = Path(transcript.name).stem if is_file else transcript.name
    name = escape_controls(re.sub(r"\s", "_", name))
    lines = []
    for word in transcript.words:
        seconds = max(0.0, word.end - word.start)
        text = _printable_text(word.text)
        lines.append(f"{name} 1 {word.start:.3f} {seconds:.3f} {text} {word.confidence:.3f}\n")
    return "".join(lines)


def _clock(seconds: float, mark: str = ".") -> str:
    """Return a time as hours, minutes, seconds and milliseconds, with ``mark`` before the last."""
    whole_seconds, milliseconds = divmod(round(seconds * 1000), 1000)
    minutes, second = divmod(whole_seconds, 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{second:02}{mark}{milliseconds:03}"


_FORMS = {"text": _text, "json": _json, "srt": _srt, "vtt": _vtt, "ctm": _ctm}
FORMATS = tuple(_FORMS)
ONE_RECORDING = ("srt", "vtt")
"""Formats with one recording per file."""


def format_transcript(transcript: Transcript, form: str) -> str:
    """Return a transcript in a form of FORMATS, with an end of line. Control characters are escaped."""
    return _FORMS[form](transcript)

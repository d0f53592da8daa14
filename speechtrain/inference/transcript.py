"""The transcript of a recording, and its output formats: text, JSON, SRT, WebVTT and CTM."""

from __future__ import annotations

import os
import re
import textwrap
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from speechtrain.errors import FORMAT_CHARACTERS, escape_controls
from speechtrain.files import json_text, with_finite_numbers

if TYPE_CHECKING:
    from speechtrain.decoding.base import Hypothesis, Word

_LINE_CHARACTERS = 42  # the maximum in the style guides of broadcasters
_CAPTION_CHARACTERS = 2 * _LINE_CHARACTERS
_CAPTION_SECONDS = 7.0
_PAUSE_SECONDS = 1.0  # A new caption begins after a longer pause.


class _Caption(NamedTuple):
    """A caption, or a part of one: a text with its start and end in seconds of the recording."""

    start: float
    end: float
    text: str


@dataclass(frozen=True)
class Segment:
    """A piece of a recording, and its text."""

    start: float  # in seconds of the recording
    end: float  # in seconds of the recording
    hypothesis: Hypothesis  # the text, with times that count from ``start``
    pauses: tuple[float, ...] = ()  # the middles of the pauses, in seconds of the recording

    @property
    def parts(self) -> list[Hypothesis]:
        """The hypothesis, divided at the pauses. A model of utterances writes no space there.

        A text that is not the text of its labels cannot be divided, such as one that a task has changed.
        """
        hypothesis, tokenizer = self.hypothesis, self.hypothesis.tokenizer
        if tokenizer is None or tokenizer.decode(hypothesis.labels) != hypothesis.text:
            return [hypothesis]
        bounds = [0, *[bisect(hypothesis.times, pause - self.start) for pause in self.pauses]]
        bounds.append(len(hypothesis.times))
        parts = [hypothesis.part(begin, end) for begin, end in pairwise(bounds) if begin < end]
        return parts if len(parts) > 1 else [hypothesis]


@dataclass(frozen=True)
class Transcript:
    """The text of a recording, with its times."""

    name: str  # the name of the file, or the id in a manifest
    audio: str  # the path of the file, or an empty text without a file
    seconds: float  # the length of the recording
    segments: tuple[Segment, ...]  # one for each piece of the recording, in order
    start: float = 0.0  # of the recording, in seconds of the file

    def __repr__(self) -> str:
        return f"<Transcript {self.name}, {self.seconds:.1f} s: {self.text}>"

    @property
    def text(self) -> str:
        """The texts between pauses, joined by spaces."""
        texts = [part.text.strip() for segment in self.segments for part in segment.parts]
        return " ".join([text for text in texts if text])

    @property
    def score(self) -> float:
        """The log-probability of the text, with the terms that the decoder adds to it."""
        return sum(segment.hypothesis.score for segment in self.segments)

    @property
    def words(self) -> tuple[Word, ...]:
        """The words with start and end in seconds of the recording, and their confidence.

        A word ends at the latest when the next word starts. If a decoder reports the same start for several
        words, they divide the time until the next word in proportion to their characters.
        """
        groups: list[list[Word]] = []  # of words with equal starts, with times in the recording
        for segment in self.segments:
            for word in [word for part in segment.parts for word in part.words]:
                start = min(segment.start + word.start, self.seconds)
                end = min(segment.start + word.end, self.seconds)
                if not groups or start != groups[-1][0].start:
                    groups.append([])
                groups[-1].append(replace(word, start=start, end=end))
        words: list[Word] = []
        for index, group in enumerate(groups):
            latest_end = self.seconds
            if index + 1 < len(groups):
                latest_end = groups[index + 1][0].start
            start = group[0].start
            end = max(start, min(group[-1].end, latest_end))
            parts = _divide_time([word.text for word in group], start, end)
            for word, part in zip(group, parts, strict=True):
                words.append(replace(word, start=part.start, end=part.end))
        return tuple(words)

    def captions(self) -> Iterator[tuple[float, float, str]]:
        """Yield start, end (seconds of the recording) and text of each caption.

        A caption has at most two lines and lasts at most 7 s. Captions do not overlap. A pause ends a
        caption. A word that is longer than two lines is divided.
        """
        pauses = [pause for segment in self.segments for pause in (segment.start, *segment.pauses)]
        parts: list[_Caption] = []  # of the current caption
        pause_count = 0  # before the current caption
        for part in self._caption_parts():
            is_after_pause = bisect(pauses, part.start) > pause_count
            pause_count = bisect(pauses, part.start)
            if parts and (is_after_pause or not _can_follow(parts, part)):
                yield _join(parts)
                parts = []
            parts.append(part)
        if parts:
            yield _join(parts)

    def _caption_parts(self) -> Iterator[_Caption]:
        """Yield the words with their times. A word that is longer than a caption is divided.

        If the decoder gives no times, yield lines of each segment instead, with equal time for each
        character.
        """
        words = self.words
        for word in words:
            parts = textwrap.wrap(word.text, _CAPTION_CHARACTERS)
            yield from _divide_time(parts, word.start, word.end)
        if not words:
            for segment in self.segments:
                lines = textwrap.wrap(segment.hypothesis.text, _LINE_CHARACTERS)
                yield from _divide_time(lines, segment.start, segment.end)

    def content(self) -> dict[str, Any]:
        """Return the transcript as a mapping for JSON.

        The alternatives of a beam search are included if the recording is a single piece.
        """
        content: dict[str, Any] = {"audio": utf8(self.audio)}
        if self.name != self.audio:
            content["id"] = utf8(self.name)
        content["text"] = self.text
        content["seconds"] = round(self.seconds, 3)
        content["score"] = round(self.score, 4)
        content["words"] = [word_content(word) for word in self.words]
        if len(self.segments) == 1:
            hypothesis = self.segments[0].hypothesis
            if hypothesis.alternatives:
                content |= _scores(hypothesis)
                content["alternatives"] = [
                    {"text": alternative.text, **_scores(alternative)}
                    for alternative in hypothesis.alternatives
                ]
        return content


def word_content(word: Word) -> dict[str, Any]:
    """Return a word as a mapping for JSON."""
    times = {"start": round(word.start, 3), "end": round(word.end, 3)}
    return {"word": word.text, **times, "confidence": round(word.confidence, 3)}


def utf8(path: str) -> str:
    """Return a path for JSON. Python reads paths as ASCII with escaped bytes if the locale is C."""
    return os.fsencode(path).decode("utf-8", "surrogateescape")


def _scores(hypothesis: Hypothesis) -> dict[str, float]:
    """Return the score of a text for JSON. A beam search also has the merit, by which it orders texts."""
    scores = {"score": round(hypothesis.score, 4)}
    if hypothesis.merit is not None:
        scores["merit"] = round(hypothesis.merit, 4)
    return scores


def _divide_time(parts: list[str], start: float, end: float) -> Iterator[_Caption]:
    """Divide the time from ``start`` to ``end`` among ``parts`` in proportion to their characters."""
    characters = sum([len(part) for part in parts])
    seconds_per_character = (end - start) / max(1, characters)
    for part in parts:
        part_end = min(end, start + len(part) * seconds_per_character)
        yield _Caption(start, part_end, part)
        start = part_end


def _can_follow(parts: list[_Caption], part: _Caption) -> bool:
    """Return whether a caption of ``parts`` stays within the limits if ``part`` follows."""
    seconds = part.end - parts[0].start
    pause_seconds = part.start - parts[-1].end
    if seconds > _CAPTION_SECONDS or pause_seconds > _PAUSE_SECONDS:
        return False
    lines = _caption_lines(f"{_join(parts).text} {part.text}")
    return len(lines) <= 2


def _join(parts: list[_Caption]) -> _Caption:
    """Return the caption of ``parts``. Its times are in whole milliseconds, and it lasts at most 7 s."""
    start = round(parts[0].start, 3)
    end = min(round(parts[-1].end, 3), round(start + _CAPTION_SECONDS, 3))
    return _Caption(start, end, " ".join([part.text for part in parts]))


def _caption_lines(text: str) -> list[str]:
    return textwrap.wrap(text, _LINE_CHARACTERS, break_on_hyphens=False)


def _escape(text: str) -> str:
    """Return ``text`` with control characters escaped, except characters that some scripts need."""
    return escape_controls(text, FORMAT_CHARACTERS)


def _format_text(transcript: Transcript) -> str:
    return f"{escape_controls(transcript.name)}\t{_escape(transcript.text)}\n"


def _format_json(transcript: Transcript) -> str:
    return json_text(with_finite_numbers(transcript.content())) + "\n"


def _format_srt(transcript: Transcript) -> str:
    cues = []
    for number, (start, end, text) in enumerate(transcript.captions(), 1):
        lines = "\n".join(_caption_lines(_escape(text)))
        cues.append(f"{number}\n{_format_time(start, ',')} --> {_format_time(end, ',')}\n{lines}\n\n")
    return "".join(cues)


def _format_vtt(transcript: Transcript) -> str:
    escapes = {ord("&"): "&amp;", ord("<"): "&lt;", ord(">"): "&gt;"}
    cues = ["WEBVTT\n\n"]
    for start, end, text in transcript.captions():
        lines = "\n".join(_caption_lines(_escape(text))).translate(escapes)
        cues.append(f"{_format_time(start)} --> {_format_time(end)}\n{lines}\n\n")
    return "".join(cues)


def ctm_name(name: str, audio: str) -> str:
    """Return the name of a recording in CTM: without the folders, without the suffix and without spaces."""
    if name == audio:  # The name is the path of a file.
        name = Path(name).stem
    return escape_controls(re.sub(r"\s", "_", name))


def _format_ctm(transcript: Transcript) -> str:
    """Return a line per word in the CTM format of NIST: file, channel, start, duration, word, confidence."""
    name = ctm_name(transcript.name, transcript.audio)
    lines = []
    for word in transcript.words:
        duration = max(0.0, word.end - word.start)
        text = _escape(word.text)
        lines.append(f"{name} 1 {word.start:.3f} {duration:.3f} {text} {word.confidence:.3f}\n")
    return "".join(lines)


def _format_time(seconds: float, decimal_mark: str = ".") -> str:
    """Return a time as ``HH:MM:SS.mmm``, with ``decimal_mark`` before the milliseconds."""
    total_seconds, milliseconds = divmod(round(seconds * 1000), 1000)
    total_minutes, second = divmod(total_seconds, 60)
    hours, minute = divmod(total_minutes, 60)
    return f"{hours:02}:{minute:02}:{second:02}{decimal_mark}{milliseconds:03}"


_FORMATTERS = {
    "text": _format_text,
    "json": _format_json,
    "srt": _format_srt,
    "vtt": _format_vtt,
    "ctm": _format_ctm,
}
FORMATS = tuple(_FORMATTERS)
ONE_RECORDING = ("srt", "vtt")
"""Formats with one recording per file."""


def format_transcript(transcript: Transcript, form: str) -> str:
    """Return a transcript in the format ``form``, one of FORMATS, with a line end after it.

    Control characters are escaped.
    """
    return _FORMATTERS[form](transcript)

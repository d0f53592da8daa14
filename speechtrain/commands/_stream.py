"""``speechtrain transcribe --stream``: the text of one recording while it arrives."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from speechtrain.errors import FORMAT_CHARACTERS, ConfigError, DataError, escape_controls, print_notice
from speechtrain.files import json_text
from speechtrain.inference.transcript import Transcript, word_content
from speechtrain.metrics import equal_words

if TYPE_CHECKING:
    from speechtrain.data.formats.lhotse_cuts import Samples
    from speechtrain.decoding.base import Word
    from speechtrain.inference.loaded_run import LoadedRun
    from speechtrain.inference.stream import StreamEvent

_LIVE_SECONDS = 0.04  # of audio that are read at once from standard input, and with --realtime
_FILE_SECONDS = 20.0  # of a recording that are in memory at once
_LIVE_SHARE = 0.95  # Audio that arrived in less than this share of its duration was not spoken live.
_CLEAR_LINE = "\r\x1b[K"


def transcribe_stream(
    loaded: LoadedRun,
    source: str,
    context: list[int] | None,
    channel: int | None,
    realtime: bool,
    as_json: bool,
) -> None:
    """Print the text of ``source``, the path of a recording or ``-`` for standard input.

    ``channel`` of a recording is read, and None is the run's. With ``realtime``, a recording is read as
    slowly as it was spoken. Ctrl-C ends the stream, as the end of the audio does.
    """
    clock = _Clock()
    show = _show_json if as_json or not sys.stdout.isatty() else _show_line
    with tempfile.NamedTemporaryFile(suffix=".wav") as copy, loaded.stream(context) as session:
        if source == "-":
            pieces = _standard_input(session.sample_rate, copy)
            source = copy.name
        else:
            pieces = _recording(loaded, source, channel)
            if realtime:
                pieces = _at_speed_of_speech(pieces, session.sample_rate)
        with contextlib.suppress(KeyboardInterrupt):
            for samples in pieces:
                for event in clock.timed(session.feed(samples), len(samples) / session.sample_rate):
                    show(event)
        for event in clock.timed(session.finish(), 0.0):
            show(event)
        print_notice(clock.speed())
        if clock.is_live and clock.words:
            (transcript,) = loaded.transcripts(loaded.recordings(source, channel))
            if isinstance(transcript, Transcript):
                print_notice(clock.delays(transcript.words))


def _standard_input(sample_rate: int, copy: Any) -> Iterator[Samples]:
    """Yield the samples of standard input, 16-bit PCM, and write them to the WAV file ``copy``."""
    import soundfile

    if sys.stdin.isatty():
        raise ConfigError(
            "--stream reads 16-bit PCM from standard input, and that is a terminal. Name a recording, or use "
            f"arecord -q -t raw -f S16_LE -r {sample_rate} | speechtrain transcribe RUN --stream"
        )
    print_notice(f"standard input: 16-bit PCM, one channel, {sample_rate} Hz")
    is_first = True
    with soundfile.SoundFile(copy, "w", sample_rate, 1, "PCM_16", format="WAV") as recording:
        size = 2 * round(_LIVE_SECONDS * sample_rate)
        while received := sys.stdin.buffer.read(size):
            if is_first and received.startswith((b"RIFF", b"fLaC", b"OggS", b"ID3", b"caff")):
                raise DataError(
                    "standard input is a file with a header, not raw PCM. Name the file instead, or "
                    f"convert it: ffmpeg -i FILE -f s16le -ac 1 -ar {sample_rate} -"
                )
            is_first = False
            complete = len(received) // 2 * 2  # Half a sample may be left at the end.
            samples = np.frombuffer(received[:complete], "<i2")
            recording.write(samples)
            yield samples


def _recording(loaded: LoadedRun, source: str, channel: int | None) -> Iterator[Samples]:
    """Yield the samples of a recording. Raises DataError if it cannot be read, ConfigError for several."""
    recordings = list(islice(loaded.recordings(source, channel), 2))
    if len(recordings) != 1:
        count = "several recordings" if recordings else "no recording"
        raise ConfigError(f"--stream reads one recording, and {source} has {count}. Name a file")
    (recording,) = recordings
    if isinstance(recording, DataError):
        raise recording
    for _, samples in recording.pieces(_FILE_SECONDS):
        yield samples


def _at_speed_of_speech(pieces: Iterator[Samples], sample_rate: int) -> Iterator[Samples]:
    """Yield short parts of ``pieces``, each of them when it has been spoken."""
    size = round(_LIVE_SECONDS * sample_rate)
    beginning = 0.0
    spoken_seconds = 0.0
    for piece in pieces:
        if not spoken_seconds:
            beginning = time.monotonic()  # To open a recording takes time, in which nobody speaks.
        for start in range(0, len(piece), size):
            part = piece[start : start + size]
            spoken_seconds += len(part) / sample_rate
            time.sleep(max(0.0, beginning + spoken_seconds - time.monotonic()))
            yield part


def _show_line(event: StreamEvent) -> None:
    """Rewrite the last line of the terminal. A final text keeps its line."""
    text = escape_controls(event.text, FORMAT_CHARACTERS)
    print(_CLEAR_LINE + text, end="\n" if event.is_final else "", flush=True)


def _show_json(event: StreamEvent) -> None:
    """Print the event as a line of JSON. Only a final text has its words."""
    content: dict[str, Any] = {"text": event.text, "final": event.is_final}
    if event.is_final:
        content["words"] = [word_content(word) for word in event.words]
    print(json_text(content), flush=True)


class _Clock:
    """The times at which words became final, and the time of the computation."""

    def __init__(self) -> None:
        # The words of final texts, each with the seconds at which it was settled.
        self.words: list[tuple[Word, float]] = []
        # Those seconds, by the position and the text of the settled words of the present utterance.
        self._settled: dict[tuple[int, str], float] = {}
        self._start = time.monotonic()
        self._audio_seconds = 0.0  # that have arrived
        self._computing_seconds = 0.0
        self._arrival_seconds = 0.0  # from the start to the arrival of the last audio

    @property
    def is_live(self) -> bool:
        """Whether the audio arrived as slowly as it was spoken."""
        return self._arrival_seconds >= _LIVE_SHARE * self._audio_seconds > 0

    def timed(self, pending: Iterator[StreamEvent], audio_seconds: float) -> list[StreamEvent]:
        """Return the ``pending`` events of audio of ``audio_seconds`` that has arrived."""
        start = time.monotonic()
        if not self._audio_seconds:
            self._start = start - audio_seconds  # A microphone may be opened late.
        if audio_seconds:
            self._audio_seconds += audio_seconds
            self._arrival_seconds = start - self._start
        events = list(pending)
        end = time.monotonic()
        self._computing_seconds += end - start
        for event in events:
            self._note(event, end - self._start)
        return events

    def _note(self, event: StreamEvent, seconds: float) -> None:
        """Note which words are settled now. A word is settled when its text has changed for the last time."""
        for position, word in enumerate(event.words[: event.settled]):
            self._settled.setdefault((position, word.text), seconds)
        if event.is_final:
            for position, word in enumerate(event.words):
                self.words.append((word, self._settled[position, word.text]))
            self._settled.clear()

    def speed(self) -> str:
        """Return a line with the real-time factor."""
        factor = self._computing_seconds / max(self._audio_seconds, 1e-9)
        return f"{self._audio_seconds:.1f} s of audio, real-time factor {factor:.3f}"

    def delays(self, offline_words: tuple[Word, ...]) -> str:
        """Return a line with the delays of words: from the end of a word to the time at which it was settled.

        ``offline_words`` are the words of the same model without a limited context. Their times are the best
        that are known. A word that differs there is not counted.
        """
        texts = [word.text for word, _ in self.words]
        offline_texts = [word.text for word in offline_words]
        delays = []
        for position, offline_position in equal_words(texts, offline_texts):
            _, seconds = self.words[position]
            delays.append(seconds - offline_words[offline_position].end)
        if not delays:
            return "delays: no word of the stream is in the text of the whole recording"
        median, high = np.percentile(delays, [50, 90])
        return f"delay of {len(delays)} of {len(texts)} words: median {median:.2f} s, 90 % below {high:.2f} s"

"""Words and captions across the pauses between joined recordings, with and without the rules of pauses.

    python benchmarks/pauses.py RUN [KEY=VALUE …]

The held-out recordings of a run are joined in tens with 0.4 to 4 s of their rooms' tone between them
(``silence.rooms``). Each row has the CER, the WER, the joins inside a word, and the captions that span a
pause of a second or more. The first row has neither voice activity nor pauses, the second one only voice
activity.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from silence import JOINED, RATE, Samples, rooms

import speechtrain
from speechtrain.export.held_out import utterances
from speechtrain.inference import loaded_run
from speechtrain.inference.loaded_run import LoadedRun
from speechtrain.inference.transcript import Transcript
from speechtrain.metrics import error_rates

SHORTEST, LONGEST = 0.4, 4.0  # seconds between two recordings
LONG_PAUSE = 1.0  # seconds. A caption should not span such a pause.


@dataclass(frozen=True)
class Joined:
    """Recordings one after the other."""

    samples: Samples
    pauses: list[tuple[float, float]]  # start and end in seconds
    reference: str


def join(recordings: Sequence[Samples], references: Sequence[str]) -> list[Joined]:
    """Return the recordings in tens, with pauses of random lengths."""
    generator = np.random.default_rng(0)
    tones = rooms(recordings)
    joined = []
    for first in range(0, len(recordings), JOINED):
        parts = list[Samples]()
        pauses = list[tuple[float, float]]()
        for recording, tone in zip(recordings[first:][:JOINED], tones[first:][:JOINED], strict=True):
            pause = np.resize(tone, round(generator.uniform(SHORTEST, LONGEST) * RATE))
            start = (sum(map(len, parts)) + len(recording)) / RATE
            pauses.append((start, start + len(pause) / RATE))
            parts += [recording, pause]
        reference = " ".join(references[first : first + JOINED])
        joined.append(Joined(np.concatenate(parts[:-1]), pauses[:-1], reference))
    return joined


def is_in_word(transcript: Transcript, pause: tuple[float, float]) -> bool:
    middle = sum(pause) / 2
    return any(word.start < middle < word.end for word in transcript.words)


def spanning_captions(transcript: Transcript, pauses: Sequence[tuple[float, float]]) -> int:
    """Return the number of captions that span a long pause."""
    long_pauses = [(start, end) for start, end in pauses if end - start >= LONG_PAUSE]
    count = 0
    for start, end, _ in transcript.captions():
        count += any(start < pause_start and pause_end < end for pause_start, pause_end in long_pauses)
    return count


def measure(loaded: LoadedRun, joined: Sequence[Joined]) -> str:
    """Return the cells of a row."""
    transcripts = loaded.transcribe([recording.samples for recording in joined], batch=16)
    pairs = zip([recording.reference for recording in joined], [t.text for t in transcripts], strict=True)
    rates = {metric: 100.0 * float(errors / units) for metric, (errors, units) in error_rates(pairs).items()}
    joins = words = captions = spanning = 0
    for transcript, recording in zip(transcripts, joined, strict=True):
        joins += len(recording.pauses)
        words += sum(is_in_word(transcript, pause) for pause in recording.pauses)
        captions += len(list(transcript.captions()))
        spanning += spanning_captions(transcript, recording.pauses)
    return f"{rates['cer']:.2f} | {rates['wer']:.2f} | {words} of {joins} | {spanning} of {captions}"


def whole(samples: Samples, *_: Any) -> list[tuple[int, int]]:
    """Return one stretch, as without voice activity."""
    return [(0, len(samples))]


def no_pauses(*_: Any) -> list[float]:
    return []


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    loaded = speechtrain.load(arguments.run, *arguments.overrides)
    held_out = list(utterances(loaded))
    joined = join([u.samples for u in held_out], [u.reference for u in held_out])
    rules: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
        "neither": (whole, no_pauses),
        "voice activity": (loaded_run.speech_spans, no_pauses),
        "voice activity and pauses": (loaded_run.speech_spans, loaded_run.pause_middles),
    }
    print("| rules | CER | WER | joins in a word | captions over a pause |\n|---|---|---|---|---|")
    for name, (speech_spans, pause_middles) in rules.items():
        loaded_run.speech_spans = speech_spans  # type: ignore[assignment]
        loaded_run.pause_middles = pause_middles  # type: ignore[assignment]
        print(f"| {name} | {measure(loaded, joined)} |", flush=True)


if __name__ == "__main__":
    main()

"""Error rates of a run with silence and noise before, after and between its held-out recordings.

    python benchmarks/silence.py RUN [KEY=VALUE …] [--recordings N] [--room-tone] [--stream]

Silence is zeros, or white noise of -60 and -40 dBFS. "Between" joins ten recordings, and is compared with the
ten joined without silence. The program then transcribes half a minute of silence, hum and noise, and an hour
of silence. Each word that it finds in them is wrong.

With --room-tone, the silence is the room of real recordings: the quietest half second of each recording,
played forwards and backwards, if it is 30 dB below the loudest tenth of a second. A recording without such a
pause has the room of an earlier one. The program then prints the rates of the recordings alone, with 2 s of
it before and after, and joined in tens with 1 to 6 s of it between.

With --stream, the texts are those of `speechtrain.load(RUN).stream()`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import speechtrain
from speechtrain.export.held_out import Utterance, utterances
from speechtrain.inference.loaded_run import LoadedRun
from speechtrain.metrics import error_rates

Samples = NDArray[np.float32]
Silence = Callable[[Samples, float], Samples]
"""Returns the silence of a number of seconds for a recording."""
Recogniser = Callable[[Sequence[Samples]], list[str]]
"""Returns the texts of recordings."""

RATE = 16_000
SECONDS = (0.5, 2.0, 5.0, 15.0)
JOINED = 10


def zeros(recording: Samples, seconds: float) -> Samples:
    return np.zeros(round(seconds * RATE), np.float32)


def noise(decibels: float) -> Silence:
    generator = np.random.default_rng(1)

    def white(recording: Samples, seconds: float) -> Samples:
        samples = generator.standard_normal(round(seconds * RATE), np.float32)
        return samples * np.float32(10.0 ** (decibels / 20.0))

    return white


def level(samples: Samples) -> float:
    """Return the power in dB of full scale."""
    return 10.0 * math.log10(float(np.square(samples).mean()) + 1e-12)


def quietest(recording: Samples) -> Samples:
    """Return the half second of a recording with the least power."""
    half_second = RATE // 2
    starts = range(0, max(1, len(recording) - half_second), RATE // 100)
    start = min(starts, key=lambda start: level(recording[start : start + half_second]))
    return recording[start : start + half_second]


def rooms(recordings: Sequence[Samples]) -> list[Samples]:
    """Return the room of each recording, forwards and backwards."""
    tone = quietest(recordings[0])
    tones = []
    for recording in recordings:
        tenths = recording[: len(recording) // 1600 * 1600].reshape(-1, 1600)
        own_tone = quietest(recording)
        if level(own_tone) <= max(map(level, tenths)) - 30.0:
            tone = own_tone
        tones.append(np.concatenate([tone, tone[::-1]]))
    return tones


KINDS: dict[str, Silence] = {
    "zeros": zeros,
    "noise of -60 dB": noise(-60.0),
    "noise of -40 dB": noise(-40.0),
}


def offline(loaded: LoadedRun) -> Recogniser:
    def texts(recordings: Sequence[Samples]) -> list[str]:
        return [transcript.text for transcript in loaded.transcribe(recordings, batch=16)]

    return texts


def streamed(loaded: LoadedRun) -> Recogniser:
    def text(samples: Samples) -> str:
        with loaded.stream() as stream:
            events = [*stream.feed(samples), *stream.finish()]
        return " ".join(event.text for event in events if event.is_final)

    def texts(recordings: Sequence[Samples]) -> list[str]:
        return [text(samples) for samples in recordings]

    return texts


def rates(
    recognise: Recogniser, recordings: Sequence[Samples], references: Sequence[str]
) -> dict[str, float]:
    """Return WER and CER in percent."""
    texts = recognise(recordings)
    totals = error_rates(zip(references, texts, strict=True))
    return {metric: 100.0 * float(errors / units) for metric, (errors, units) in totals.items()}


def differences(recognise: Recogniser, held_out: Sequence[Utterance], kinds: dict[str, Silence]) -> None:
    """Print the table of the error rates."""
    recordings = [utterance.samples for utterance in held_out]
    references = [utterance.reference for utterance in held_out]
    tens = [range(first, min(first + JOINED, len(held_out))) for first in range(0, len(held_out), JOINED)]
    joined_references = [" ".join(references[i] for i in ten) for ten in tens]

    def joined(silence: Silence, seconds: float) -> list[Samples]:
        return [
            np.concatenate([part for i in ten for part in (recordings[i], silence(recordings[i], seconds))])
            for ten in tens
        ]

    alone = rates(recognise, recordings, references)
    together = rates(recognise, joined(zeros, 0.0), joined_references)
    for name, clean in (("alone", alone), ("joined", together)):
        print(f"{name}: WER {clean['wer']:.2f} %, CER {clean['cer']:.2f} %", flush=True)
    print("\n| silence | seconds | before: WER, CER | after | between |\n|---|---|---|---|---|")
    for kind, silence in kinds.items():
        for seconds in SECONDS:
            before = [np.concatenate([silence(samples, seconds), samples]) for samples in recordings]
            after = [np.concatenate([samples, silence(samples, seconds)]) for samples in recordings]
            cells = [
                cell(rates(recognise, before, references), alone),
                cell(rates(recognise, after, references), alone),
                cell(rates(recognise, joined(silence, seconds), joined_references), together),
            ]
            print(f"| {kind} | {seconds:g} | {' | '.join(cells)} |", flush=True)


def room_tones(recognise: Recogniser, held_out: Sequence[Utterance]) -> None:
    """Print the error rates with the silence of rooms."""
    recordings = [utterance.samples for utterance in held_out]
    references = [utterance.reference for utterance in held_out]
    tones = rooms(recordings)
    generator = np.random.default_rng(0)
    surrounded, joined, joined_references = [], [], []
    for recording, tone in zip(recordings, tones, strict=True):
        around = np.resize(tone, 2 * RATE)
        surrounded.append(np.concatenate([around, recording, around]))
    for first in range(0, len(recordings), JOINED):
        parts = []
        for recording, tone in zip(recordings[first:][:JOINED], tones[first:][:JOINED], strict=True):
            pause = np.resize(tone, round(generator.uniform(1, 6) * RATE))
            parts += [recording, pause]
        joined.append(np.concatenate(parts[:-1]))
        joined_references.append(" ".join(references[first : first + JOINED]))
    print("| recordings | CER | WER |\n|---|---|---|")
    rows = (
        ("alone", recordings, references),
        ("2 s before and after", surrounded, references),
        ("1 to 6 s between ten", joined, joined_references),
    )
    for name, samples, texts in rows:
        found = rates(recognise, samples, texts)
        print(f"| {name} | {found['cer']:.2f} | {found['wer']:.2f} |", flush=True)


def cell(found: dict[str, float], clean: dict[str, float]) -> str:
    return f"{found['wer'] - clean['wer']:+.2f}, {found['cer'] - clean['cer']:+.2f}"


def words_of_silence(recognise: Recogniser) -> None:
    """Print how many words the run finds where nobody speaks."""
    nothing = np.zeros(0, np.float32)
    time = np.arange(30 * RATE) / RATE
    recordings = {
        "30 s of zeros": zeros(nothing, 30.0),
        "30 s of hum, 50 Hz": (0.1 * np.sin(2.0 * math.pi * 50.0 * time)).astype(np.float32),
        "30 s of noise of -50 dB": noise(-50.0)(nothing, 30.0),
        "30 s of noise of -20 dB": noise(-20.0)(nothing, 30.0),
        "an hour of zeros": zeros(nothing, 3600.0),
        "an hour of noise of -60 dB": noise(-60.0)(nothing, 3600.0),
    }
    print("\n| recording | words |\n|---|---|")
    for name, samples in recordings.items():
        (text,) = recognise([samples])
        print(f"| {name} | {len(text.split())} |", flush=True)


def main() -> None:
    description = str(__doc__).partition("\n")[0]
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--recordings", type=int, default=300, help="the largest number of recordings")
    parser.add_argument(
        "--room-tone", action="store_true", help="use the silence of the recordings' rooms only"
    )
    parser.add_argument("--stream", action="store_true", help="recognise the recordings as streams")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    loaded = speechtrain.load(arguments.run, *arguments.overrides)
    if loaded.sample_rate != RATE:
        parser.error(f"the run has {loaded.sample_rate} Hz, not {RATE}")
    held_out = list(utterances(loaded))[: arguments.recordings]
    recognise = streamed(loaded) if arguments.stream else offline(loaded)
    if arguments.room_tone:
        room_tones(recognise, held_out)
        return
    differences(recognise, held_out, KINDS)
    words_of_silence(recognise)


if __name__ == "__main__":
    main()

"""Memory and time of `speechtrain transcribe` on long and short recordings, and the errors of word times.

    python benchmarks/transcribe.py long RUN --audio FOLDER [KEY=VALUE …]
    python benchmarks/transcribe.py words RUN [KEY=VALUE …]

`long` joins the recordings of FOLDER, with half a second between them, to 2, 10 and 60 minutes at 16 kHz. The
console command transcribes each file. Memory is the peak of its process. Time is from the start to the end of
the process. The real-time factor leaves out the time of the two minutes, and with it the start of Python and
torch.

`words` needs a run of `recipe=demo`. It transcribes 300 utterances of voices that are not in the training
set. Their words are joined at known times. If a transcript has no error, the times of its words are compared
with the known ones.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import subprocess
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

COMMAND = Path(sysconfig.get_path("scripts"), "speechtrain-transcribe")
RATE = 16_000
MINUTES = (2, 10, 60)


def joined(folder: Path, path: Path, minutes: float) -> Path:
    """Write the recordings below ``folder`` end to end, in several rounds, into one WAV file."""
    from speechtrain.data.pieces import recordings

    files = sorted(file for file in folder.rglob("*") if file.suffix in (".wav", ".flac", ".opus"))
    with soundfile.SoundFile(path, "w", RATE, 1) as out:
        for file in itertools.cycle(files):
            if out.frames >= minutes * 60 * RATE:
                break
            (recording,) = recordings(str(file), RATE, math.inf)
            out.write(recording.read(0.0, recording.seconds))
            out.write(np.zeros(RATE // 2, np.float32))
    return path


@dataclass
class Usage:
    """The resources of one process, and the number of words that it printed."""

    seconds: float
    mebibytes: float
    words: int


def usage_of_transcription(run: str, path: Path, overrides: list[str]) -> Usage:
    """Transcribe a file by the console command."""
    start = time.perf_counter()
    process = subprocess.Popen([COMMAND, run, path, *overrides], stdout=subprocess.PIPE)
    assert process.stdout is not None
    output = process.stdout.read()
    _, code, resources = os.wait4(process.pid, 0)
    assert code == 0, code
    words = len(output.split()) - 1  # The first field is the path.
    return Usage(time.perf_counter() - start, resources.ru_maxrss / 1024, words)


def long(options: argparse.Namespace) -> None:
    """Print a row for each length, then the real-time factor."""
    print("| minutes | seconds | peak MiB | of two minutes' | words |\n|---|---|---|---|---|")
    usages: list[Usage] = []
    with tempfile.TemporaryDirectory() as folder:
        for minutes in MINUTES:
            path = joined(options.audio, Path(folder) / f"{minutes}.wav", minutes)
            usage = usage_of_transcription(options.run, path, options.overrides)
            usages.append(usage)
            ratio = usage.mebibytes / usages[0].mebibytes
            print(
                f"| {minutes} | {usage.seconds:.1f} | {usage.mebibytes:.0f} | {ratio:.3f} | {usage.words} |",
                flush=True,
            )
    audio_seconds = 60 * (MINUTES[-1] - MINUTES[0])
    rate = (usages[-1].seconds - usages[0].seconds) / audio_seconds
    print(f"\nreal-time factor, without the start: {rate:.4f} ({1 / rate:.0f} times as fast as speech)")


def known_times(utterance: Any, clips: Any) -> list[tuple[float, float]]:
    """Return the start and the end of each word of an utterance, in seconds."""
    samples, times = 0, []
    for clip, gap in zip(utterance.clips, (*utterance.gaps, 0), strict=True):
        end = samples + clips.lengths[clip]
        times.append((samples / RATE, end / RATE))
        samples = end + gap
    return times


def words(options: argparse.Namespace) -> None:
    """Print the errors of the starts and of the ends of words."""
    import speechtrain
    from speechtrain.data.corpora.digits import Digits

    run = speechtrain.load(options.run, *options.overrides)
    source = Digits(split="valid", utterances=300, seed=5)
    errors: list[tuple[float, float]] = []
    correct = 0
    for utterance in source.all_utterances():
        audio = utterance.audio(source.clips).astype(np.float32) / 2**15
        (transcript,) = run.transcribe((audio, RATE))
        is_correct = transcript.text.split() == utterance.text.split()
        if is_correct and len(transcript.words) == len(utterance.clips):
            correct += 1
            times = known_times(utterance, source.clips)
            for word, (start, end) in zip(transcript.words, times, strict=True):
                errors.append((word.start - start, word.end - end))
    print(f"{correct} of 300 utterances without an error\n")
    print_errors(np.array(errors))


def print_errors(errors: np.ndarray) -> None:
    """Print the medians and percentiles of errors (words, 2) in seconds: of the starts, then of the ends."""
    print("| start: median | median error | 90 % | end: median | median error | 90 % |")
    print("|---|---|---|---|---|---|")
    cells = []
    for milliseconds in errors.T * 1000:
        distances = abs(milliseconds)
        figures = np.median(milliseconds), np.median(distances), np.percentile(distances, 90)
        cells += [f"{figure:.0f} ms" for figure in figures]
    print("| " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("long", "words"))
    parser.add_argument("run")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--audio", type=Path, help="a folder of recordings (long)")
    options = parser.parse_intermixed_args()
    {"long": long, "words": words}[options.what](options)


if __name__ == "__main__":
    main()

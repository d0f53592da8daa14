"""Memory and time of `speechtrain transcribe` on a long recording, against a short one; errors of word times.

    python benchmarks/transcribe.py long RUN --audio FOLDER [KEY=VALUE …]
    python benchmarks/transcribe.py words RUN [KEY=VALUE …]

`long` joins the recordings of FOLDER, with half a second between, to 2, 10 and 60 minutes at 16 kHz. Each is
transcribed by the console command in a process of its own; memory is the peak of that process, and time is
from its start to its end, and again without what two minutes take (the start of Python and torch).
`words` takes a run of `recipe=demo`: words of 300 utterances in voices never heard are joined at known times,
and each word of a text without errors is compared with them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np
import soundfile

COMMAND = Path(sysconfig.get_path("scripts"), "speechtrain-transcribe")
RATE = 16_000
MINUTES = (2, 10, 60)


def joined(folder: Path, path: Path, minutes: float) -> Path:
    """The recordings below ``folder`` end to end, again and again, in one WAV file."""
    from speechtrain.data.audio import read_file

    files = sorted(p for p in folder.rglob("*") if p.suffix in (".wav", ".flac", ".opus"))
    with soundfile.SoundFile(path, "w", RATE, 1) as out:
        number = 0
        while out.frames < minutes * 60 * RATE:
            out.write(read_file(str(files[number % len(files)]), RATE))
            out.write(np.zeros(RATE // 2, np.float32))
            number += 1
    return path


def long(given: argparse.Namespace) -> None:
    print("| minutes | seconds | peak MiB | of two minutes' | words |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        base: tuple[float, float] | None = None
        for minutes in MINUTES:
            path = joined(given.audio, Path(folder) / f"{minutes}.wav", minutes)
            begun = time.perf_counter()
            running = subprocess.Popen([COMMAND, given.run, path, *given.overrides], stdout=subprocess.PIPE)
            assert running.stdout is not None
            words = len(running.stdout.read().split()) - 1
            _, code, used = os.wait4(running.pid, 0)
            assert code == 0, code
            seconds, mebibytes = time.perf_counter() - begun, used.ru_maxrss / 1024
            base = base or (seconds, mebibytes)
            row = [minutes, f"{seconds:.1f}", f"{mebibytes:.0f}", f"{mebibytes / base[1]:.3f}", words]
            print("| " + " | ".join(map(str, row)) + " |", flush=True)
        rate = (seconds - base[0]) / (60 * (MINUTES[-1] - MINUTES[0]))
        print(f"\nreal-time factor, without the start: {rate:.4f} ({1 / rate:.0f} times as fast as speech)")


def words(given: argparse.Namespace) -> None:
    import speechtrain
    from speechtrain.data.corpora.digits import Digits

    run = speechtrain.load(given.run, *given.overrides)
    source = Digits(split="valid", utterances=300, seed=5)
    errors: list[tuple[float, float]] = []
    used = 0
    for said in source.plan():
        (found,) = run.transcribe((said.audio(source.clips).astype(np.float32) / 2**15, RATE))
        if found.text.split() != said.text.split() or len(found.words) != len(said.clips):
            continue
        used += 1
        at, spans = 0, []
        for clip, gap in zip(said.clips, (*said.gaps, 0), strict=True):
            spans.append((at / RATE, (at + source.clips.lengths[clip]) / RATE))
            at += source.clips.lengths[clip] + gap
        for word, (begin, end) in zip(found.words, spans, strict=True):
            errors.append((word.start - begin, word.end - end))
    print(f"{used} of 300 utterances without an error\n")
    print("| start: median | median error | 90 % | end: median | median error | 90 % |")
    print("|---|---|---|---|---|---|")
    figures = []
    for milliseconds in np.array(errors).T * 1000:
        distances = abs(milliseconds)
        figures += [np.median(milliseconds), np.median(distances), np.percentile(distances, 90)]
    print("| " + " | ".join(f"{figure:.0f} ms" for figure in figures) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("long", "words"))
    parser.add_argument("run")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--audio", type=Path, help="a folder of recordings (long)")
    given = parser.parse_intermixed_args()
    {"long": long, "words": words}[given.what](given)


if __name__ == "__main__":
    main()

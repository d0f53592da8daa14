"""Error rates of `recipe=scratch` on a speaker that it never heard, with and without noise and rooms.

    python benchmarks/voices.py --data FSDD_FOLDER --out DIR                        # 4 × 3 runs of 10 minutes
    python benchmarks/voices.py --data FSDD_FOLDER --out DIR --runs clean noise --seeds 1
    python benchmarks/voices.py --data FSDD_FOLDER --out DIR --noise DIR --rooms DIR  # recordings of your own

The recordings of --data are DIGIT_SPEAKER_NUMBER.wav, each with one digit. Training has all speakers except
--speaker. `recipe=scratch` holds out a share of their recordings, which selects the checkpoint. The WER is of
all recordings of --speaker.

Without --noise, the noise is babble: sums of joined recordings of the training speakers. Without --rooms, a
room is a direct path and an exponentially decaying tail of Gaussian noise. Both are made from a fixed seed.

Every run is a console command and stays in --out. A run that exists there is continued, and a finished one is
only scored. So single runs can be made one after another. The tables are Markdown. The second one has the
median over the seeds that --out has, and its ratio to the clean runs. KEY=VALUE arguments go to every run.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
from numpy.typing import NDArray
from scratch import WORDS, events_of, percent, print_row, result_of, train, wer_on_training_set

RUNS = {"clean": (), "noise": ("noise",), "rooms": ("rooms",), "both": ("noise", "rooms")}
"""The keys of ``augment`` that each run sets."""
FILES = 40  # made noises and rooms
VOICES = 5  # speakers at a time in a babble
NOISE_SECONDS = 10.0
ROOM_SECONDS = (0.2, 0.8)  # the shortest and the longest reverberation time (60 dB)
DIRECT_PATH_MS = 5.0
TAIL_LEVEL = (0.02, 0.1)  # amplitude of the tail at its start, relative to the direct path


def speaker_of(path: Path) -> str:
    return path.name.split("_")[1]


def write_table(path: Path, recordings: list[Path]) -> Path:
    """Write the recordings and their digits as a CSV, and return its path."""
    lines = ["path,text\n"]
    for recording in recordings:
        digit = int(recording.name.split("_")[0])
        lines.append(f"{recording.absolute()},{WORDS[digit]}\n")
    path.write_text("".join(lines))
    return path


def make_babble(folder: Path, recordings: list[Path]) -> Path:
    """Write sums of joined recordings into a folder, unless it exists."""
    if folder.exists():
        return folder
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    rate = soundfile.info(recordings[0]).samplerate
    length = round(NOISE_SECONDS * rate)
    for number in range(FILES):
        babble = np.zeros(length)
        for _ in range(VOICES):
            babble += voice(recordings, length, rng)
        soundfile.write(folder / f"babble-{number:02d}.wav", 0.5 * babble / np.abs(babble).max(), rate)
    return folder


def voice(recordings: list[Path], length: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return ``length`` samples of random recordings, one after another, each with a power of 1."""
    joined = np.zeros(0)
    while len(joined) < length:
        path = recordings[rng.integers(len(recordings))]
        samples, _ = soundfile.read(path)
        joined = np.append(joined, samples / np.sqrt(np.square(samples).mean()))
    return joined[:length]


def make_rooms(folder: Path, rate: int) -> Path:
    """Write room responses into a folder, unless it exists."""
    if folder.exists():
        return folder
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    direct_path = round(DIRECT_PATH_MS / 1000 * rate)
    for number in range(FILES):
        seconds = rng.uniform(*ROOM_SECONDS)
        times = np.arange(round(seconds * rate)) / rate
        # The amplitude falls by 60 dB, a factor of 1,000, in the reverberation time.
        tail = rng.normal(size=len(times)) * 10.0 ** (-3.0 * times / seconds)
        response = np.append(np.zeros(direct_path), rng.uniform(*TAIL_LEVEL) * tail)
        response[direct_path] = 1.0
        soundfile.write(folder / f"room-{number:02d}.wav", response, rate, subtype="FLOAT")
    return folder


def score(run_dir: Path, unheard: Path) -> float | None:
    """Return the WER of a finished run on the unheard speaker. It is computed once and stored."""
    stored = run_dir.with_suffix(".wer")
    if stored.exists():
        return float(stored.read_text())
    rate = wer_on_training_set(run_dir, unheard)
    if rate is not None:
        stored.write_text(str(rate))
    return rate


def print_medians(out: Path) -> None:
    """Print the median WER of each kind of run over the seeds in ``out``."""
    medians = {}
    print("\n| run | number of seeds | WER, median | of clean |\n|---|---|---|---|")
    for name in RUNS:
        rates = [float(path.read_text()) for path in sorted(out.glob(f"{name}-*.wer"))]
        if not rates:
            continue
        medians[name] = statistics.median(rates)
        ratio = "–"
        if medians.get("clean"):
            ratio = f"{medians[name] / medians['clean']:.2f}"
        print_row(name, len(rates), percent(medians[name]), ratio)


@dataclass
class Material:
    """The tables of recordings, and the noise and the rooms by their keys."""

    train: Path
    unheard: Path
    sources: dict[str, Path]


def prepare(options: argparse.Namespace) -> Material:
    """Write the tables, and the noise and the rooms that no option names."""
    training, unheard = [], []
    for path in sorted(options.data.rglob("*_*_*.wav")):
        if speaker_of(path) == options.speaker:
            unheard.append(path)
        else:
            training.append(path)
    noise = options.noise or make_babble(options.out / "babble", training)
    rooms = options.rooms or make_rooms(options.out / "rooms", rate=16_000)
    return Material(
        write_table(options.out / "train.csv", training),
        write_table(options.out / "unheard.csv", unheard),
        {"noise": noise.absolute(), "rooms": rooms.absolute()},
    )


def run(name: str, seed: int, material: Material, options: argparse.Namespace) -> None:
    """Train and score one run, and print its row."""
    run_dir = options.out / f"{name}-{seed}"
    overrides = ["recipe=scratch", f"data.train={material.train.absolute()}", f"seed={seed}"]
    overrides.append(f"trainer.max_hours={options.hours:.6g}")
    overrides += [f"augment.{key}={material.sources[key]}" for key in RUNS[name]]
    seconds, last_line = train(run_dir, [*overrides, *options.overrides])
    result = result_of(run_dir)
    if not result:
        print_row(name, seed, last_line)
        return
    epochs = max(event["epoch"] for event in events_of(run_dir, "train"))
    cells = [name, seed, f"{seconds:.0f}", result["steps"], f"{epochs:.1f}"]
    print_row(*cells, percent(result["metrics"]["wer"]), percent(score(run_dir, material.unheard)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--speaker", default="nicolas", help="the speaker that is left out of training")
    parser.add_argument("--hours", type=float, default=1 / 6)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--noise", type=Path, help="a folder or manifest of noise instead of babble")
    parser.add_argument("--rooms", type=Path, help="a folder or manifest of room responses")
    options = parser.parse_intermixed_args()
    options.out.mkdir(parents=True, exist_ok=True)
    material = prepare(options)
    print("| run | seed | seconds | updates | epochs | WER held out | WER unheard |\n|" + "---|" * 7)
    for seed in options.seeds:  # The kinds of runs take turns.
        for name in options.runs:
            run(name, seed, material, options)
    print_medians(options.out)


if __name__ == "__main__":
    main()

"""How much slower an evaluation is beside busy processes, for each GOMP_SPINCOUNT.

    python benchmarks/evaluation.py RUN --data MANIFEST --minutes 40
    python benchmarks/evaluation.py RUN --smoke          # one short evaluation

``speechtrain evaluate RUN decoder=beam`` runs alone and beside two processes that compute without end. The
values of GOMP_SPINCOUNT take turns (A B A B ...). ``device`` stands for the value that the device sets.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from openmp import busy

DEVICE = "device"


def write_set(manifest: Path, minutes: float, folder: Path) -> Path:
    """Write the first ``minutes`` of audio of a manifest of JSON lines, with absolute paths."""
    path = folder / "set.jsonl"
    seconds = 0.0
    with path.open("w") as file:
        for line in manifest.read_text().splitlines():
            row = json.loads(line)
            row["audio_filepath"] = str((manifest.parent / row["audio_filepath"]).resolve())
            file.write(json.dumps(row) + "\n")
            seconds += row["duration"]
            if seconds >= 60 * minutes:
                break
    return path


def evaluate(run: Path, sets: list[str], decoder: str, spin: str) -> float:
    """Return the seconds of one evaluation, from the start of its process to the end."""
    program = Path(sys.executable).parent / "speechtrain-evaluate"
    command = [str(program), str(run), f"decoder={decoder}", "--worst", "0", *sets]
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    if spin != DEVICE:
        environment["GOMP_SPINCOUNT"] = spin
    start = time.monotonic()
    subprocess.run(command, env=environment, check=True, capture_output=True)
    return time.monotonic() - start


def options_of_command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--data", type=Path, help="a manifest of JSON lines; without it, the run's own sets")
    parser.add_argument("--minutes", type=float, default=40)
    parser.add_argument("--decoder", default="beam")
    parser.add_argument("--spins", nargs="+", default=[DEVICE, "0", "1000", "300000"])
    parser.add_argument("--processes", type=int, nargs="+", default=[0, 2], help="busy processes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if options.smoke:
        options.spins, options.processes, options.rounds = [DEVICE], [0], 1
    return options


def measure(options: argparse.Namespace) -> dict[tuple[str, int], list[float]]:
    """Return the seconds of each round, by GOMP_SPINCOUNT and number of busy processes."""
    seconds: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        sets = []
        if options.data:
            sets = ["--set", f"set={write_set(options.data, options.minutes, Path(folder))}"]
        for _ in range(options.rounds):
            for processes in options.processes:
                with busy(processes):
                    for spin in options.spins:
                        duration = evaluate(options.run, sets, options.decoder, spin)
                        seconds.setdefault((spin, processes), []).append(duration)
    return seconds


def main() -> None:
    options = options_of_command_line()
    seconds = measure(options)
    print("| GOMP_SPINCOUNT | busy processes | seconds | of the same alone |")
    print("|---|---|---|---|")
    for (spin, processes), durations in sorted(seconds.items()):
        alone = seconds[spin, options.processes[0]]
        ratios = [duration / base for duration, base in zip(durations, alone, strict=True)]
        median, ratio = statistics.median(durations), statistics.median(ratios)
        print(f"| {spin} | {processes} | {median:.1f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()

"""How long libgomp's threads should spin before they sleep: training speed, alone and beside busy processes.

    python benchmarks/openmp.py                 # about ten minutes
    python benchmarks/openmp.py --smoke         # one short run each, a minute

Runs of `recipe=demo` with two encoders take turns over the values of GOMP_SPINCOUNT (A B C A B C ...). The
speed of a run is the median of its log lines after the first two. The table also has the processor time of
the whole run, since threads that spin take that time from other processes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ENCODERS = {"LSTM": (), "FastConformer": ("encoder=fastconformer_tiny",)}
BASE = ("recipe=demo", "trainer.log_every=5", "tracking=jsonl", "device=cpu", "device.autotune=false")


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Run a number of processes that compute without end."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


SMOKE_STEPS = 4
SMOKE = (
    *("launcher=local", "launcher.inline=true", "trainer.log_every=1"),
    *("data.train.utterances=64", "data.valid.unheard.utterances=2"),
)


def train(spin: str, overrides: tuple[str, ...], steps: int) -> tuple[float, float]:
    """Train, and return the seconds of audio per second and the processor seconds of the run."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    if steps == SMOKE_STEPS:
        overrides += SMOKE
    with tempfile.TemporaryDirectory() as folder:
        keys = (
            *BASE,
            *overrides,
            f"trainer.max_steps={steps}",
            f"run_dir={folder}/run",
            "trainer.validate_every=1000",
        )
        command = [str(Path(sys.executable).parent / "speechtrain-train"), *keys]
        subprocess.run(command, env={**os.environ, "GOMP_SPINCOUNT": spin}, check=True, capture_output=True)
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    speeds = [event["audio_s_per_s"] for event in map(json.loads, lines) if "audio_s_per_s" in event]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return statistics.median(speeds[2:]), after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--spins", nargs="+", default=["1000", "12000", "300000"])
    parser.add_argument(
        "--others", dest="processes", type=int, nargs="+", default=[0, 2], help="busy processes"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if options.smoke:
        options.spins, options.processes = options.spins[:1], [0]
        options.rounds, options.steps = 1, SMOKE_STEPS
    print("| encoder | busy processes | GOMP_SPINCOUNT | audio-s/s | ratio | processor s |")
    print("|---|---|---|---|---|---|", flush=True)
    for name in ENCODERS:
        for processes in options.processes:
            compare(name, processes, options)


def compare(encoder: str, processes: int, options: argparse.Namespace) -> None:
    """Print a row for each value of GOMP_SPINCOUNT. A ratio is to the first value in the same round."""
    speeds: dict[str, list[float]] = {spin: [] for spin in options.spins}
    cpu_seconds: dict[str, list[float]] = {spin: [] for spin in options.spins}
    with busy(processes):
        for _ in range(options.rounds):
            for spin in options.spins:
                speed, seconds = train(spin, ENCODERS[encoder], options.steps)
                speeds[spin].append(speed)
                cpu_seconds[spin].append(seconds)
    for spin in options.spins:
        speed, seconds = statistics.median(speeds[spin]), statistics.median(cpu_seconds[spin])
        baseline = speeds[options.spins[0]]
        ratio = statistics.median(a / b for a, b in zip(speeds[spin], baseline, strict=True))
        print(f"| {encoder} | {processes} | {spin} | {speed:.0f} | {ratio:.2f} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()

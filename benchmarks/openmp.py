"""How long libgomp's threads should spin before they sleep: training speed, alone and beside busy processes.

    python benchmarks/openmp.py                 # about ten minutes
    python benchmarks/openmp.py --smoke         # one short run each, a minute

Runs of `recipe=demo` with both encoders take turns over the values of GOMP_SPINCOUNT (A B C A B C ...). The
speed of a run is the median of its log lines after the first two; beside it stands the processor time of
the whole run, since threads that spin take it from others.
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
    """So many processes that compute without end."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


SMOKE_STEPS = 4
SMOKE = (
    *("launcher=local", "launcher.inline=true", "trainer.log_every=1"),
    *("data.train.utterances=64", "data.valid.unheard.utterances=2"),
)


def train(spin: str, overrides: tuple[str, ...], steps: int) -> tuple[float, float]:
    """Seconds of audio a second, and processor seconds of the run."""
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
    speeds = [found["audio_s_per_s"] for found in map(json.loads, lines) if "audio_s_per_s" in found]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return statistics.median(speeds[2:]), after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--spins", nargs="+", default=["1000", "12000", "300000"])
    parser.add_argument("--others", type=int, nargs="+", default=[0, 2], help="busy processes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    if given.smoke:
        given.spins, given.others, given.rounds, given.steps = given.spins[:1], [0], 1, SMOKE_STEPS
    print("| encoder | busy processes | GOMP_SPINCOUNT | audio-s/s | ratio | processor s |")
    print("|---|---|---|---|---|---|", flush=True)
    for name, overrides in ENCODERS.items():
        for others in given.others:
            with busy(others):
                rounds = [
                    [train(spin, overrides, given.steps) for spin in given.spins] for _ in range(given.rounds)
                ]
            for column, spin in enumerate(given.spins):
                speed, seconds = (statistics.median(row[column][i] for row in rounds) for i in (0, 1))
                ratio = statistics.median(row[column][0] / row[0][0] for row in rounds)
                print(
                    f"| {name} | {others} | {spin} | {speed:.0f} | {ratio:.2f} | {seconds:.0f} |", flush=True
                )


if __name__ == "__main__":
    main()

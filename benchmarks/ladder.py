"""The reference's ladder of speed-ups, rung by rung, on one host or on the hosts of a list.

    python benchmarks/ladder.py                                       # 1 and 2 ranks of this host
    python benchmarks/ladder.py --hostfile hosts --ranks 8 --folder /shared/ladder
    python benchmarks/ladder.py --smoke                               # small networks, a minute

Intel AIDK's rungs are: more ranks, StackTime 8 with a smaller network, norms, fewer cores for communication.
Each rung is a short training run of this project on the embedded corpus, and the rungs take turns
(A B C A B C ...). The speed of a run is the median of the seconds of audio in a second of its log lines
after the first. The ratio is the median of each round's ratio to the first rung of that round. The
reference's ladder is the time to its target error rate: the norms save epochs there (49 for 52), which a
speed does not show.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

BASE = (
    *("data=digits", "device=cpu", "trainer.log_every=1"),
    *("tracking=jsonl", "tracking.trackers.jsonl.enabled=true"),
)
STOCK = ("model=rnnt_mlperf",)
SMALLER = ("model=rnnt_aidk", "encoder.feature_norm=false", "encoder.layer_norm=false")
NO_NORMS = (*SMALLER, "model.prediction.layer_norm=false")
NORMS = ("model=rnnt_aidk",)
TINY = (
    *("encoder.hidden=64", "model.prediction.hidden=64", "model.prediction.embedding=32"),
    "model.joint.hidden=64",
)


@dataclass(frozen=True)
class Rung:
    """One line of the ladder: its keys, its ranks, and the reference's factor over the line before."""

    name: str
    overrides: tuple[str, ...]
    ranks: int
    reference: str


def ladder(ranks: int, comm_cores: int) -> list[Rung]:
    rungs = [
        Rung("stock network, 1 rank", STOCK, 1, ""),
        Rung(f"stock network, {ranks} ranks", STOCK, ranks, "5.16 on 4 nodes of 2 ranks"),
        Rung("StackTime 8, 2 + 2 layers of 512", NO_NORMS, ranks, "1.86"),
        Rung("norms", NORMS, ranks, "1.07, by fewer epochs"),
    ]
    if comm_cores:
        cores = f"device.comm_cores={comm_cores}"
        rungs.append(Rung(f"{comm_cores} cores for communication", (*NORMS, cores), ranks, "1.07"))
    return rungs


def audio_seconds_per_second(rung: Rung, options: argparse.Namespace, folder: Path) -> float:
    """Train a few updates in ``folder`` and return the run's speed over all ranks."""
    keys = [*BASE, *rung.overrides, f"world_size={rung.ranks}", f"trainer.max_steps={options.steps}"]
    keys += [f"run_dir={folder}", "trainer.max_epochs=null", "trainer.validate_every=null"]
    keys += [f"data.batch.count={options.rows}", f"precision={options.precision}", "trainer.save_every=null"]
    if options.smoke:
        keys += [*TINY, "device.threads=1", "data.workers=0", "device.oversubscribe=true"]
    environment = dict(os.environ)
    if options.hostfile is not None and rung.ranks > 1:
        keys += ["launcher=ssh"]
        environment["HOSTFILE"] = str(options.hostfile.absolute())
    program = Path(sys.executable).parent / "speechtrain-train"
    subprocess.run([str(program), *keys, *options.override], env=environment, check=True, capture_output=True)
    speeds = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "train":
            speeds.append(event["audio_s_per_s"])
    return statistics.median(speeds[1:])


def options_of_command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hostfile", type=Path, help="addresses of the hosts, one a line (this host)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of all hosts together")
    parser.add_argument("--folder", type=Path, help="of the runs, which all hosts see")
    parser.add_argument("--comm-cores", type=int, default=0, help="adds the rung with device.comm_cores")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--rows", type=int, default=4, help="utterances of a rank's batch")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--override", nargs="*", default=[], metavar="KEY=VALUE", help="of every run")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if options.hostfile is not None and options.folder is None:
        parser.error("--hostfile needs --folder, a folder that all hosts see")
    if options.smoke:
        options.steps, options.rounds = 3, 1
    return options


def main() -> None:
    options = options_of_command_line()
    rungs = ladder(options.ranks, options.comm_cores)
    speeds: list[list[float]] = [[] for _ in rungs]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for number in range(options.rounds):
            for position, rung in enumerate(rungs):
                run_dir = Path(folder) / f"{number}-{position}"
                speeds[position].append(audio_seconds_per_second(rung, options, run_dir))
    print("| rung | audio-s/s | of the first | of the line before | reference |\n|---|---|---|---|---|")
    for position, rung in enumerate(rungs):
        rounds = speeds[position]
        of_first = statistics.median(a / b for a, b in zip(rounds, speeds[0], strict=True))
        before = speeds[max(position - 1, 0)]
        of_previous = statistics.median(a / b for a, b in zip(rounds, before, strict=True))
        cells = [rung.name, f"{statistics.median(rounds):.1f}", f"{of_first:.2f}", f"{of_previous:.2f}"]
        print(f"| {' | '.join(cells)} | {rung.reference} |", flush=True)


if __name__ == "__main__":
    main()

"""Whether runs survive: killed ranks, signals to one rank, a kill a minute, other numbers of ranks.

    python benchmarks/survival.py kills --seeds 20           # kill -9 of a random rank of 2 to 4, anywhere
    python benchmarks/survival.py signals --tries 50         # SIGTERM to one of 2 ranks, phase by phase
    python benchmarks/survival.py goodput --minutes 15 --every 60
    python benchmarks/survival.py worlds                     # 1, 2, 4 and 1 ranks, five updates each

Every run is the console command in processes of its own, one thread a rank, on the embedded digits. A line
for each kill, try or world, and a summary; exit code 1 where a bar does not hold. Runs stay in --out for a
look, and are begun anew. KEY=VALUE arguments go to every run. Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes import TRAIN

from speechtrain.batch import Batch
from speechtrain.checkpoint.whole import Checkpointer
from speechtrain.data.module import SpeechData
from speechtrain.errors import RunError
from speechtrain.supervision.process_tree import children_of

SMALL = [
    *("recipe=demo", "schedule=constant", "schedule.warmup_steps=60"),
    *("device=cpu", "device.threads=1", "device.matmul=highest", "tracking=jsonl"),
    *("data.workers=0", "data.train.utterances=400", "data.valid.unheard.utterances=12"),
    *("data.batch.count=4", "trainer.max_epochs=null", "trainer.log_every=1", "allow_targets=survival"),
    *("data._target_=survival.RecordedData", "trainer.validate_every=1000000"),
]
"""The RNN-T of `recipe=demo` with 4 utterances a micro-batch: 0.1 to 0.2 s an update."""

UPDATES = 30
DETECTED, AGAIN = 10.0, 30.0  # seconds
GOODPUT = 0.8
TOLERANCE = 1e-5
PATIENCE = 600.0  # seconds, after which a run hangs
POLL = 0.005  # seconds
PAUSE = "SURVIVAL_PAUSE"
_NOTICED = re.compile(r"closing signal|exitcode: -?\d")  # torchrun's first word of a dead rank or its peer


class RecordedData(SpeechData):
    """Appends each training batch's address, ids and a checksum of its audio to ``handed.jsonl``.

    ``$SURVIVAL_PAUSE`` seconds pass before each, as from a slow disk.
    """

    def train(self, rank: int = 0, world_size: int = 1, accumulate: int = 1) -> Iterator[Batch]:
        return self._recorded(super().train(rank, world_size, accumulate))

    def _recorded(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        pause = float(os.environ.get(PAUSE, "0"))
        with (Path(self.run_dir) / "handed.jsonl").open("a", buffering=1) as file:
            for batch in batches:
                time.sleep(pause)
                audio = zlib.crc32(batch.audio.numpy().tobytes())
                file.write(json.dumps([batch.epoch, batch.index, batch.ids, audio]) + "\n")
                yield batch


class Run:
    """One run directory and the commands that are given on it."""

    def __init__(self, run_dir: Path, overrides: list[str], pause: float = 0.0) -> None:
        self.run_dir = run_dir
        self.overrides = overrides
        self.pause = pause
        self.process: subprocess.Popen[str] | None = None
        shutil.rmtree(run_dir, ignore_errors=True)
        run_dir.parent.mkdir(parents=True, exist_ok=True)

    def start(self, *extra: str) -> None:
        line = [str(TRAIN), *SMALL, *self.overrides, *extra, f"run_dir={self.run_dir}"]
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        environment |= {PAUSE: str(self.pause), "OMP_NUM_THREADS": "1"}
        with self.run_dir.with_suffix(".log").open("a") as log:
            self.process = subprocess.Popen(line, env=environment, stdout=log, stderr=log, text=True)

    def wait(self, patience: float = PATIENCE) -> int:
        """The command's exit code; it is killed, with what it has started, where it hangs."""
        assert self.process is not None
        try:
            return self.process.wait(patience)
        except subprocess.TimeoutExpired:
            for pid in children_of(self.process.pid, all_generations=True):
                os.kill(pid, signal.SIGKILL)
            self.process.kill()
            self.process.wait()
            raise

    def done(self, *extra: str, patience: float = PATIENCE) -> None:
        """The command to its end, which must be a good one."""
        self.start(*extra)
        if code := self.wait(patience):
            sys.exit(f"{self.run_dir} ended with {code}: see {self.run_dir.with_suffix('.log')}")

    def until(self, reached: Callable[[], object]) -> bool:
        """Poll until ``reached`` says something true; False where the command ends first, or hangs."""
        assert self.process is not None
        begun = time.monotonic()
        while not reached():
            if self.process.poll() is not None or time.monotonic() - begun > PATIENCE:
                return bool(reached())
            time.sleep(POLL)
        return True

    def ranks(self) -> dict[int, int]:
        """Process ids of the ranks that live now, by rank."""
        assert self.process is not None
        found = {}
        for agent in children_of(self.process.pid):
            for pid in children_of(agent):
                try:
                    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                except OSError:
                    continue
                numbers = [v.removeprefix(b"RANK=") for v in variables if v.startswith(b"RANK=")]
                found.update({int(number): pid for number in numbers})
        return found

    def family(self) -> set[int]:
        """Everything that the command has started and that lives now."""
        assert self.process is not None
        return children_of(self.process.pid, all_generations=True)

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        """What the run's record says, attempts that were made void included."""
        try:
            lines = (self.run_dir / "metrics.jsonl").read_text().split("\n")[:-1]
        except OSError:
            return []
        records = [json.loads(line) for line in lines if line.endswith("}")]
        return [r for r in records if not kind or r["event"] == kind]

    def losses(self) -> dict[int, float]:
        """The loss of each update, as the last attempt at it logged it."""
        return {e["step"]: e["loss"] for e in self.events("train")}

    def handed(self) -> dict[tuple[int, int], list[Any]]:
        """Ids and checksum of each micro-batch by its address; every attempt must get the same."""
        found: dict[tuple[int, int], list[Any]] = {}
        for line in (self.run_dir / "handed.jsonl").read_text().splitlines():
            epoch, index, *rest = json.loads(line)
            if found.setdefault((epoch, index), rest) != rest:
                sys.exit(f"{self.run_dir}: micro-batch {epoch}/{index} was not the same in two attempts")
        return found

    def samples(self) -> dict[tuple[int, int], list[Any]]:
        """What ``handed`` says of the updates that count: a killed attempt may have fetched ahead."""
        handed = self.handed()
        size = self.events("start")[-1]["ranks"] * self.events("start")[-1]["accumulate"]
        return {place: handed[place] for place in sorted(handed)[: size * len(self.losses())]}

    def result(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.run_dir / "result.json").read_text())
        return content


def difference(ours: dict[int, float], theirs: dict[int, float]) -> float:
    """The largest relative difference of losses; infinite where the updates are not the same ones."""
    if sorted(ours) != sorted(theirs):
        return float("inf")
    return max(abs(ours[step] - theirs[step]) / abs(theirs[step]) for step in ours)


def is_gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


@dataclass
class Kill:
    """What became of one kill -9."""

    rank: int
    step: int
    at: float  # Unix seconds
    detected: float = float("inf")  # seconds until the agent's first word of it
    ended: float = float("inf")  # until all ranks of the attempt have ended
    again: float = float("inf")  # until an update is logged again
    resumed: int = 0


def kill_a_rank(run: Run, draw: random.Random) -> Kill | None:
    """kill -9 of a random rank now, and how long the run takes to train again; None where it has ended."""
    log = run.run_dir / "agent.log"
    ranks = run.ranks()
    if not ranks:
        return None
    rank = draw.choice(sorted(ranks))
    before, said = len(run.events()), _size(log)
    steps = [e["step"] for e in run.events("train")]
    kill = Kill(rank, steps[-1] if steps else 0, time.time())
    os.kill(ranks[rank], signal.SIGKILL)

    def is_training() -> bool:
        now = time.time() - kill.at
        if kill.detected == float("inf") and _NOTICED.search(_tail(log, said)):
            kill.detected = now
        if kill.ended == float("inf") and all(map(is_gone, ranks.values())):
            kill.ended = now
        events = run.events()[before:]  # a dying attempt may have logged an update more
        starts = [number for number, e in enumerate(events) if e["event"] == "start"]
        return bool(starts) and any(e["event"] == "train" for e in events[starts[0] :])

    if not run.until(is_training):
        return kill
    events = run.events()[before:]
    events = events[next(n for n, e in enumerate(events) if e["event"] == "start") :]
    first = next(e for e in events if e["event"] == "train")
    kill.again = first["time"] - kill.at
    kill.resumed = next((e["step"] for e in events if e["event"] == "resume"), 0)
    if first["step"] != kill.resumed + 1:
        sys.exit(f"{run.run_dir}: resumed at step {kill.resumed}, but update {first['step']} came first")
    return kill


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _tail(path: Path, offset: int) -> str:
    if not path.exists():
        return ""
    with path.open(errors="replace") as file:
        file.seek(offset)
        return file.read()


def kills(out: Path, first: int, seeds: int, overrides: list[str]) -> bool:
    """A random rank of 2 to 4 is killed at a random step; the run must end as if nothing had been."""
    plan = ["trainer.save_every=5", f"trainer.max_steps={UPDATES}", "device.oversubscribe=true", *overrides]
    undisturbed: dict[int, Run] = {}
    for size in (2, 3, 4):
        undisturbed[size] = Run(out / f"undisturbed-{size}", [*plan, f"world_size={size}"])
        undisturbed[size].done()
    rows: list[tuple[Kill, float, bool]] = []
    for seed in range(first, first + seeds):
        draw = random.Random(seed)
        size, step, delay = draw.choice((2, 3, 4)), draw.randrange(UPDATES), draw.uniform(0.0, 0.3)
        more = [f"world_size={size}", "launcher=torchrun", "launcher.max_restarts=3"]
        # workers of the data, too, which a killed rank leaves behind
        run = Run(out / f"seed-{seed}", [*plan, *more, *(["data.workers=1"] if seed % 5 == 0 else [])])
        run.start()
        run.until(lambda: len(run.ranks()) == size)  # noqa: B023
        run.until(lambda: len(run.losses()) >= step)  # noqa: B023
        time.sleep(delay)
        family = run.family()
        kill = kill_a_rank(run, draw)
        family |= run.family()
        code = run.wait()
        assert kill is not None
        left = [pid for pid in family if not is_gone(pid)]
        apart = difference(run.losses(), undisturbed[size].losses())
        whole = run.result()["metrics"] == undisturbed[size].result()["metrics"]
        is_same = run.samples() == undisturbed[size].samples()
        is_good = code == 0 and not left and is_same and apart <= TOLERANCE
        rows.append((kill, apart, is_good))
        print(
            f"seed {seed}: {size} ranks, rank {kill.rank} killed after step {kill.step}, detected "
            f"{kill.detected:.2f} s, all ended {kill.ended:.2f} s, resumed at {kill.resumed}, training again "
            f"{kill.again:.2f} s, exit {code}, losses apart {apart:.1e}, validation equal {whole}, "
            f"samples equal {is_same}, left over {len(left)}, load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
        if is_good:
            shutil.rmtree(run.run_dir)
    print("\n| | median | largest |\n|---|---|---|")
    for name in ("detected", "ended", "again"):
        seconds = [getattr(kill, name) for kill, _, _ in rows]
        print(f"| {name}, s | {statistics.median(seconds):.2f} | {max(seconds):.2f} |")
    good = sum(is_good for _, _, is_good in rows)
    equal = sum(apart == 0 for _, apart, _ in rows)
    print(f"\n{good} of {seeds} reach step {UPDATES} with the same samples, {equal} with bit-equal losses")
    in_time = [kill.detected <= DETECTED and kill.again <= AGAIN for kill, _, _ in rows]
    return good == seeds and all(in_time)


@dataclass
class Phase:
    """A recipe in which a phase dominates, and when the signal is sent."""

    overrides: list[str]
    ready: Callable[[Run, int], bool]
    delay: float = 0.0  # seconds, at most, after ``ready``
    pause: float = 0.0
    hit: Callable[[Run, int], bool] = field(default=lambda run, before: True)
    """Whether the record says that the signal came within the phase; ``before`` counts its older events."""


def _new(run: Run, before: int, kind: str) -> bool:
    return any(e["event"] == kind for e in run.events()[before:])


def _is_writing(run: Run, before: int) -> bool:
    return _new(run, before, "train") and any((run.run_dir / "checkpoints").glob(".writing-*"))


def _has_trained_on(run: Run, before: int) -> bool:
    """Whether an update was made after the first validation, which may be owed by the attempt before."""
    events = [e["event"] for e in run.events()[before:]]
    return "valid" in events and "train" in events[events.index("valid") :]


LONG = "trainer.save_every=1000000"
PHASES = {
    "start": Phase(
        [LONG],
        ready=lambda run, before: len(run.ranks()) == 2,
        delay=3.0,  # the ranks import for longer than that
        hit=lambda run, before: not _new(run, before, "train"),
    ),
    "data wait": Phase(
        [LONG],
        ready=lambda run, before: _new(run, before, "train"),
        delay=1.0,
        pause=1.0,
    ),
    "forward": Phase(
        [LONG, "data.batch.count=24"],
        ready=lambda run, before: _new(run, before, "train"),
        delay=1.0,
    ),
    "validation": Phase(
        [
            *(LONG, "trainer.validate_every=1", "data.valid.unheard.utterances=100"),
            *("data.valid_batch.count=1", "decoder.max_symbols=300"),
        ],
        ready=_has_trained_on,
        delay=1.0,
        hit=lambda run, before: max(run.losses()) > run.events("valid")[-1]["step"],
    ),
    "checkpoint": Phase(
        ["trainer.save_every=1", "encoder.hidden=768"],
        ready=_is_writing,
    ),
}


def signals(out: Path, tries: int, names: list[str], overrides: list[str]) -> bool:
    """SIGTERM to one random rank of two; the tries of a phase continue each other's run."""
    good, hangs = 0, 0
    draw = random.Random(0)
    shares = {}
    for number, name in enumerate(names):
        phase = PHASES[name]
        own = ["world_size=2", "trainer.max_steps=1000000", *phase.overrides, *overrides]
        run = Run(out / name.replace(" ", "-"), own, phase.pause)
        for attempt in range(tries // len(names) + (number < tries % len(names))):
            try:
                good += signal_a_rank(run, phase, f"{name} {attempt + 1}", draw)
            except subprocess.TimeoutExpired:
                hangs += 1
                print(f"{name} {attempt + 1}: hangs", flush=True)
        last = run.result()["steps"] + 2
        run.done(f"trainer.max_steps={last}", "trainer.validate_every=1000000", "resume=must")
        shares[name] = statistics.mean(e["data_wait"] for e in run.events("train"))
        assert sorted(run.losses()) == list(range(1, last + 1))
    print(f"\n{good} of {tries} as they should be, {hangs} hangs. Share of waiting for data: ", end="")
    print(", ".join(f"{name} {100 * share:.0f} %" for name, share in shares.items()))
    return good == tries


def signal_a_rank(run: Run, phase: Phase, name: str, draw: random.Random) -> bool:
    """One try; whether everything about it was as it should be."""
    before = len(run.events())
    saved = run.result()["steps"] if before else 0
    run.start()
    if not run.until(lambda: phase.ready(run, before)):
        sys.exit(f"{run.run_dir} ended too early: see {run.run_dir.with_suffix('.log')}")
    time.sleep(draw.uniform(0.0, phase.delay))
    ranks, family = run.ranks(), run.family()
    rank = draw.choice(sorted(ranks))
    at = time.time()
    os.kill(ranks[rank], signal.SIGTERM)
    code = run.wait()
    seconds = time.time() - at
    time.sleep(0.2)  # what the command had started is its own to wait for, but the kernel takes a moment
    left = [pid for pid in family if not is_gone(pid)]
    steps = [json.loads(path.read_text())["steps"] for path in _results(run)]
    status = run.result()["status"]
    checkpointer = Checkpointer(run.run_dir)
    newest = checkpointer.folders()[-1:]
    try:
        is_whole = bool(newest) and checkpointer.verify(newest[0]).step == run.result()["steps"]
    except RunError as error:
        print(error)
        is_whole = False
    events = run.events()[before:]
    resumed = next((e["step"] for e in events if e["event"] == "resume"), 0)
    is_hit = phase.hit(run, before)
    is_good = code == 75 and not left and is_whole and len(set(steps)) == 1 and len(steps) == 2
    is_good = is_good and status == "preempted" and resumed == saved
    print(
        f"{name}: rank {rank}, in the phase {is_hit}, exit {code} after {seconds:.1f} s, "
        f"resumed at {resumed}, ranks saved at {steps}, newest checkpoint whole {is_whole}, "
        f"left over {len(left)}",
        flush=True,
    )
    return is_good


def _results(run: Run) -> list[Path]:
    return [run.run_dir / "result.json", *run.run_dir.glob("ranks/*/result.json")]


def goodput(out: Path, minutes: float, every: float, measured: float, overrides: list[str]) -> bool:
    """A kill every so many seconds, between two parts of an undisturbed run.

    Each part takes ``measured`` seconds; then that run, too, goes on to as many updates.
    """
    plan = ["world_size=2", "trainer.save_every=20", "data.train.utterances=2000", *overrides]
    undisturbed = Run(out / "undisturbed", plan)
    seconds = [_trained_for(undisturbed, measured)]
    run = Run(out / "killed", [*plan, "launcher=torchrun", "launcher.max_restarts=1000"])
    draw, made, begun = random.Random(0), [], time.time()
    load = []
    run.start("trainer.max_steps=1000000")
    while (due := begun + every * (len(made) + 1)) < begun + 60 * minutes:
        time.sleep(max(0.0, due - time.time()))
        load.append(os.getloadavg()[0])
        run.until(run.ranks)  # between two attempts there are none
        kill = kill_a_rank(run, draw)
        assert kill is not None
        made.append(kill)
        lost = kill.step - kill.resumed
        print(
            f"{time.time() - begun:.0f} s: rank {kill.rank} killed after step {kill.step}, detected "
            f"{kill.detected:.2f} s, training again {kill.again:.2f} s, {lost} updates lost, "
            f"load {load[-1]:.1f}",
            flush=True,
        )
    time.sleep(max(0.0, begun + 60 * minutes - time.time()))
    os.kill(draw.choice(sorted(run.ranks().values())), signal.SIGTERM)
    code = run.wait()
    wall = time.time() - begun
    kept = run.result()["steps"]
    seconds.append(_trained_for(undisturbed, measured))
    share = kept * statistics.mean(seconds) / wall
    print(
        f"\nexit {code}, {len(made)} kills in {wall:.0f} s, {kept} updates kept, seconds per update ", end=""
    )
    print(f"{seconds[0]:.4f} before and {seconds[1]:.4f} after, load {statistics.mean(load):.1f}")
    print(f"goodput {100 * share:.1f} % ({100 * kept * min(seconds) / wall:.1f} % by the faster)")
    for name in ("detected", "again"):
        values = [getattr(kill, name) for kill in made]
        print(f"{name}: median {statistics.median(values):.2f} s, largest {max(values):.2f} s")
    sys.stdout.flush()
    last = max(kept, max(undisturbed.losses()))
    for name, other in (("killed", run), ("undisturbed", undisturbed)):
        other.done(f"trainer.max_steps={last}", f"trainer.validate_every={last}", patience=10 * wall)
        print(
            f"{name}: loss {other.losses()[kept]!r} at update {kept}, validation {other.result()['metrics']}"
        )
    apart = difference(run.losses(), undisturbed.losses())
    print(f"losses apart {apart:.1e}, samples equal {run.samples() == undisturbed.samples()}")
    return share >= GOODPUT and apart <= TOLERANCE


def _trained_for(run: Run, seconds: float) -> float:
    """Train so long, and save; the seconds of an update meanwhile, checkpoints included."""
    before = len(run.events())
    run.start("trainer.max_steps=1000000")
    run.until(lambda: _new(run, before, "train"))
    time.sleep(seconds)
    assert run.process is not None
    run.process.send_signal(signal.SIGTERM)
    run.wait()
    found = [e for e in run.events()[before:] if e["event"] == "train"]
    return (found[-1]["time"] - found[0]["time"]) / (found[-1]["step"] - found[0]["step"])


def worlds(out: Path, overrides: list[str]) -> bool:
    """The same 20 updates on 1, 2, 4 and 1 ranks in turn as on one."""
    plan = ["trainer.simulate_world=4", "data.batch.count=2", LONG, *overrides]
    alone = Run(out / "alone", plan)
    alone.done("trainer.max_steps=20")
    run = Run(out / "worlds", plan)
    print("| ranks | accumulate | updates | losses apart | gradient norms apart |\n|---|---|---|---|---|")
    for number, size in enumerate((1, 2, 4, 1)):
        run.done(f"world_size={size}", f"trainer.max_steps={5 * (number + 1)}")
        begun, last = 5 * number, 5 * (number + 1)
        cells = [size, run.events("start")[-1]["accumulate"], f"{begun + 1} to {last}"]
        for key in ("loss", "grad_norm"):
            ours, theirs = (
                {e["step"]: e[key] for e in one.events("train") if begun < e["step"] <= last}
                for one in (run, alone)
            )
            cells.append(f"{difference(ours, theirs):.1e}")
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    apart = difference(run.losses(), alone.losses())
    is_same = run.samples() == alone.samples()
    print(f"\n{len(run.samples())} micro-batches, in the same order {is_same}, losses {apart:.1e} apart")
    return is_same and apart <= TOLERANCE


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("kills", "signals", "goodput", "worlds"))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=1, help="of the seeds")
    parser.add_argument("--tries", type=int, default=50)
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=[*PHASES], help="of the signals")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between kills")
    parser.add_argument("--measured", type=float, default=120.0, help="seconds of the undisturbed run, twice")
    parser.add_argument("--out", type=Path, default=Path("runs/survival"))
    given = parser.parse_intermixed_args()
    programs = {
        "kills": lambda: kills(given.out, given.first, given.seeds, given.overrides),
        "signals": lambda: signals(given.out, given.tries, given.phases, given.overrides),
        "goodput": lambda: goodput(given.out, given.minutes, given.every, given.measured, given.overrides),
        "worlds": lambda: worlds(given.out, given.overrides),
    }
    sys.exit(not programs[given.what]())


if __name__ == "__main__":
    main()

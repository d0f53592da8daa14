"""Four tests of disturbed runs: killed ranks, signals to a rank, a kill every minute, other numbers of ranks.

    python benchmarks/survival.py kills --seeds 20           # kill -9 of a random rank of 2 to 4
    python benchmarks/survival.py signals --tries 50         # SIGTERM to one of 2 ranks, phase by phase
    python benchmarks/survival.py goodput --minutes 15 --every 60
    python benchmarks/survival.py worlds                     # 1, 2, 4 and 1 ranks, five updates each

Every run is a console command on the embedded digits, with one thread per rank. The program prints a line for
each kill, signal or number of ranks, and a summary. The exit code is 1 if a run exceeds a limit below. The
runs stay in --out until the next call replaces them. KEY=VALUE arguments are overrides of every run. The
program needs Linux.
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
from speechtrain.checkpoint.checkpointer import Checkpointer
from speechtrain.data.module import SpeechData
from speechtrain.errors import RunError
from speechtrain.launch.process_tree import children_of

SMALL = [
    *("recipe=demo", "schedule=constant", "schedule.warmup_steps=60"),
    *("device=cpu", "device.threads=1", "device.matmul=highest", "tracking=jsonl"),
    *("data.workers=0", "data.train.utterances=400", "data.valid.unheard.utterances=12"),
    *("data.batch.count=4", "trainer.max_epochs=null", "trainer.log_every=1", "allow_targets=survival"),
    *("data._target_=survival.RecordedData", "trainer.validate_every=1000000"),
]
"""The RNN-T of `recipe=demo` with 4 utterances per micro-batch. An update takes 0.1 to 0.2 s."""

UPDATES = 30  # of a run in which a rank is killed
LONGEST_DETECTION, LONGEST_RECOVERY = 10.0, 30.0  # limits in seconds after a kill
GOODPUT = 0.8  # the lowest allowed ratio of updates in a killed run to updates in an undisturbed run
TOLERANCE = 1e-5  # the largest allowed relative difference of losses
PATIENCE = 600.0  # A run that takes more seconds counts as hanging.
POLL = 0.005  # seconds
PAUSE = "SURVIVAL_PAUSE"  # the environment variable with the seconds before each batch
_NOTICED = re.compile(r"closing signal|exitcode: -?\d")  # in torchrun's first line about a dead rank


class RecordedData(SpeechData):
    """The data of a run, with a record of its training batches in ``handed.jsonl``.

    A line has the epoch and the index of a batch, the ids of its recordings, and a checksum of its audio.
    There is a pause of ``$SURVIVAL_PAUSE`` seconds before each batch, like from a slow disk.
    """

    def train(self, rank: int = 0, world_size: int = 1, accumulate: int = 1) -> Iterator[Batch]:
        return self._recorded(super().train(rank, world_size, accumulate))

    def _recorded(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        pause = float(os.environ.get(PAUSE, "0"))
        assert self.skips.path is not None
        with (self.skips.path.parent / "handed.jsonl").open("a", buffering=1) as file:
            for batch in batches:
                time.sleep(pause)
                audio = zlib.crc32(batch.audio.numpy().tobytes())
                file.write(json.dumps([batch.epoch, batch.index, batch.ids, audio]) + "\n")
                yield batch


class Run:
    """A run directory and the commands that train in it."""

    def __init__(self, run_dir: Path, overrides: list[str], pause: float = 0.0) -> None:
        self.run_dir = run_dir
        self.overrides = overrides
        self.pause = pause
        self.process: subprocess.Popen[str] | None = None
        shutil.rmtree(run_dir, ignore_errors=True)
        run_dir.parent.mkdir(parents=True, exist_ok=True)

    def start(self, *extra: str) -> None:
        """Start the command, with the overrides ``extra``. Its output is appended to the run's log."""
        command = [str(TRAIN), *SMALL, *self.overrides, *extra, f"run_dir={self.run_dir}"]
        python_path = str(Path(__file__).parent)  # for ``survival.RecordedData``
        if os.environ.get("PYTHONPATH"):
            python_path += os.pathsep + os.environ["PYTHONPATH"]
        environment = {
            **os.environ,
            "PYTHONPATH": python_path,
            PAUSE: str(self.pause),
            "OMP_NUM_THREADS": "1",
        }
        with self.run_dir.with_suffix(".log").open("a") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, text=True)

    def wait(self, patience: float = PATIENCE) -> int:
        """Return the exit code of the command. If it hangs, kill it and its processes, and raise."""
        assert self.process is not None
        try:
            return self.process.wait(patience)
        except subprocess.TimeoutExpired:
            for pid in children_of(self.process.pid, all_generations=True):
                os.kill(pid, signal.SIGKILL)
            self.process.kill()
            self.process.wait()
            raise

    def complete(self, *extra: str, patience: float = PATIENCE) -> None:
        """Run the command to its end. If it fails, exit."""
        self.start(*extra)
        code = self.wait(patience)
        if code:
            sys.exit(f"{self.run_dir} ended with {code}: see {self.run_dir.with_suffix('.log')}")

    def until(self, condition: Callable[[], object]) -> bool:
        """Wait until ``condition()`` is true. Return False if the command ends before that, or hangs."""
        assert self.process is not None
        start = time.monotonic()
        while not condition():
            if self.process.poll() is not None or time.monotonic() - start > PATIENCE:
                return bool(condition())
            time.sleep(POLL)
        return True

    def ranks(self) -> dict[int, int]:
        """Return the process id of each living rank, by the number of the rank."""
        assert self.process is not None
        pids = {}
        for agent in children_of(self.process.pid):
            for pid in children_of(agent):
                try:
                    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                except OSError:
                    continue
                for variable in variables:
                    if variable.startswith(b"RANK="):
                        pids[int(variable.removeprefix(b"RANK="))] = pid
        return pids

    def family(self) -> set[int]:
        """Return the ids of all living processes that the command has started."""
        assert self.process is not None
        return children_of(self.process.pid, all_generations=True)

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        """Return the events in ``metrics.jsonl``, or with ``kind`` only the events of this kind.

        They include updates that were lost in a kill and were computed again.
        """
        try:
            complete_lines = (self.run_dir / "metrics.jsonl").read_text().split("\n")[:-1]
        except OSError:
            return []
        events = [json.loads(line) for line in complete_lines if line.endswith("}")]
        return [event for event in events if not kind or event["event"] == kind]

    def losses(self) -> dict[int, float]:
        """Return the loss of each update by its step. Of an update that was repeated, it is the last loss."""
        return {event["step"]: event["loss"] for event in self.events("train")}

    def logged_step(self) -> int:
        """Return the step of the newest logged update, or 0."""
        updates = self.events("train")
        return updates[-1]["step"] if updates else 0

    def handed(self) -> dict[tuple[int, int], list[Any]]:
        """Return the ids and the checksum of each micro-batch, by its epoch and its index.

        If a micro-batch was read several times and was not always the same, exit.
        """
        batches: dict[tuple[int, int], list[Any]] = {}
        for line in (self.run_dir / "handed.jsonl").read_text().splitlines():
            epoch, index, *content = json.loads(line)
            if batches.setdefault((epoch, index), content) != content:
                sys.exit(f"{self.run_dir}: micro-batch {epoch}/{index} was not the same in two attempts")
        return batches

    def samples(self) -> dict[tuple[int, int], list[Any]]:
        """Return the micro-batches of the logged updates, as ``handed`` does.

        A killed attempt may have read further micro-batches.
        """
        handed = self.handed()
        start = self.events("start")[-1]
        batches_per_update = start["ranks"] * start["accumulate"]
        count = batches_per_update * len(self.losses())
        return {address: handed[address] for address in sorted(handed)[:count]}

    def result(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.run_dir / "result.json").read_text())
        return content


def difference(losses: dict[int, float], baseline: dict[int, float]) -> float:
    """Return the largest relative difference of losses, or infinity if the updates are not the same."""
    if losses.keys() != baseline.keys():
        return float("inf")
    differences = []
    for step, loss in baseline.items():
        distance = abs(losses[step] - loss)
        differences.append(distance / abs(loss))
    return max(differences)


def is_gone(pid: int) -> bool:
    """Return whether a process has ended."""
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


@dataclass
class Kill:
    """A kill -9 of a rank and the times of its effects, in seconds after the kill."""

    rank: int
    step: int
    time: float  # Unix seconds
    detected: float = float("inf")  # until the agent's first line about it
    ended: float = float("inf")  # until all ranks of the attempt have ended
    recovered: float = float("inf")  # until the next update is logged
    resumed: int = 0  # step of the checkpoint

    def __str__(self) -> str:
        """Return the text of a kill and its effects in a long run."""
        return (
            f"rank {self.rank} killed after step {self.step}, detected {self.detected:.2f} s, training again "
            f"{self.recovered:.2f} s, {self.step - self.resumed} updates lost"
        )


def kill_a_rank(run: Run, draw: random.Random) -> Kill | None:
    """Kill a random rank and wait until the run trains again. Return None if no rank lives."""
    log = run.run_dir / "agent.log"
    ranks = run.ranks()
    if not ranks:
        return None
    rank = draw.choice(sorted(ranks))
    earlier_events, log_size = len(run.events()), _size(log)
    kill = Kill(rank, run.logged_step(), time.time())
    os.kill(ranks[rank], signal.SIGKILL)

    def is_training() -> bool:
        seconds = time.time() - kill.time
        if kill.detected == float("inf") and _NOTICED.search(_tail(log, log_size)):
            kill.detected = seconds
        if kill.ended == float("inf") and all(map(is_gone, ranks.values())):
            kill.ended = seconds
        return any(event["event"] == "train" for event in _since_start(run, earlier_events))

    if run.until(is_training):
        note_recovery(kill, run, _since_start(run, earlier_events))
    return kill


def _since_start(run: Run, earlier_events: int) -> list[dict[str, Any]]:
    """Return the events since the first start after ``earlier_events`` events.

    A dying attempt may log one more update before that start.
    """
    events = run.events()[earlier_events:]
    kinds = [event["event"] for event in events]
    if "start" not in kinds:
        return []
    return events[kinds.index("start") :]


def note_recovery(kill: Kill, run: Run, events: list[dict[str, Any]]) -> None:
    """Note the first update of the new attempt. It must follow the checkpoint directly."""
    first_update = next(event for event in events if event["event"] == "train")
    kill.recovered = first_update["time"] - kill.time
    kill.resumed = resumed_step(events)
    step = first_update["step"]
    if step != kill.resumed + 1:
        sys.exit(f"{run.run_dir}: resumed at step {kill.resumed}, but update {step} came first")


def resumed_step(events: list[dict[str, Any]]) -> int:
    """Return the step of the first resumption, or 0 if there is none."""
    for event in events:
        if event["event"] == "resume":
            return int(event["step"])
    return 0


def _size(path: Path) -> int:
    """Return the bytes of a file, 0 if it does not exist."""
    return path.stat().st_size if path.exists() else 0


def _tail(path: Path, offset: int) -> str:
    """Return the text of a file after the first ``offset`` bytes, empty if the file does not exist."""
    if not path.exists():
        return ""
    with path.open(errors="replace") as file:
        file.seek(offset)
        return file.read()


@dataclass
class KillOutcome:
    """A killed run in comparison with an undisturbed run."""

    kill: Kill
    difference: float  # of losses, relative
    is_good: bool


def kills(out: Path, first: int, seeds: int, overrides: list[str]) -> bool:
    """Kill a random rank of 2 to 4 at a random step. The run must end like an undisturbed run."""
    plan = ["trainer.save_every=5", f"trainer.max_steps={UPDATES}", "device.oversubscribe=true", *overrides]
    undisturbed: dict[int, Run] = {}
    for size in (2, 3, 4):
        undisturbed[size] = Run(out / f"undisturbed-{size}", [*plan, f"world_size={size}"])
        undisturbed[size].complete()
    outcomes = [kill_in_run(out, seed, plan, undisturbed) for seed in range(first, first + seeds)]
    print("\n| | median | largest |\n|---|---|---|")
    for name, field_name in (("detected", "detected"), ("ended", "ended"), ("again", "recovered")):
        seconds = [getattr(outcome.kill, field_name) for outcome in outcomes]
        print(f"| {name}, s | {statistics.median(seconds):.2f} | {max(seconds):.2f} |")
    good = sum(outcome.is_good for outcome in outcomes)
    equal = sum(outcome.difference == 0 for outcome in outcomes)
    print(f"\n{good} of {seeds} reach step {UPDATES} with the same samples, {equal} with bit-equal losses")
    return good == seeds and all(is_in_time(outcome.kill) for outcome in outcomes)


def is_in_time(kill: Kill) -> bool:
    return kill.detected <= LONGEST_DETECTION and kill.recovered <= LONGEST_RECOVERY


def kill_in_run(out: Path, seed: int, plan: list[str], undisturbed: dict[int, Run]) -> KillOutcome:
    """Start a run, kill one of its ranks and wait for the end. Print a line."""
    draw = random.Random(seed)
    size, step, delay = draw.choice((2, 3, 4)), draw.randrange(UPDATES), draw.uniform(0.0, 0.3)
    extra = [f"world_size={size}", "launcher=torchrun", "launcher.max_restarts=3"]
    if seed % 5 == 0:
        extra.append("data.workers=1")  # A killed rank leaves its data worker behind.
    run = Run(out / f"seed-{seed}", [*plan, *extra])
    run.start()
    run.until(lambda: len(run.ranks()) == size)
    run.until(lambda: len(run.losses()) >= step)
    time.sleep(delay)
    family = run.family()
    kill = kill_a_rank(run, draw)
    family |= run.family()
    code = run.wait()
    assert kill is not None
    outcome = kill_outcome(run, kill, code, family, undisturbed[size], f"seed {seed}: {size} ranks")
    if outcome.is_good:
        shutil.rmtree(run.run_dir)
    return outcome


def kill_outcome(
    run: Run, kill: Kill, code: int, family: set[int], undisturbed: Run, title: str
) -> KillOutcome:
    """Compare a killed run with an undisturbed one and print a line."""
    left = [pid for pid in family if not is_gone(pid)]
    apart = difference(run.losses(), undisturbed.losses())
    has_equal_metrics = run.result()["metrics"] == undisturbed.result()["metrics"]
    has_equal_samples = run.samples() == undisturbed.samples()
    print(
        f"{title}, rank {kill.rank} killed after step {kill.step}, detected {kill.detected:.2f} s, all ended "
        f"{kill.ended:.2f} s, resumed at {kill.resumed}, training again {kill.recovered:.2f} s, exit {code}, "
        f"losses apart {apart:.1e}, validation equal {has_equal_metrics}, samples equal {has_equal_samples}, "
        f"left over {len(left)}, load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    is_good = code == 0 and not left and has_equal_samples and apart <= TOLERANCE
    return KillOutcome(kill, apart, is_good)


@dataclass
class Phase:
    """A recipe in which most of the time is spent in one phase, and the time of the signal.

    The arguments of the functions are the run and the number of its events before the start.
    """

    overrides: list[str]
    ready: Callable[[Run, int], bool]  # returns whether the signal may be sent
    delay: float = 0.0  # the signal comes at most this number of seconds after ``ready``
    pause: float = 0.0  # seconds before each batch
    hit: Callable[[Run, int], bool] = field(default=lambda run, before: True)
    """Returns whether the signal came within the phase."""


def _has_new(run: Run, before: int, kind: str) -> bool:
    """Return whether an event of a kind follows the first ``before`` events."""
    return any(event["event"] == kind for event in run.events()[before:])


def _is_writing(run: Run, before: int) -> bool:
    return _has_new(run, before, "train") and any((run.run_dir / "checkpoints").glob(".writing-*"))


def _has_trained_on(run: Run, before: int) -> bool:
    """Return whether an update came after the first validation, which may belong to the attempt before."""
    kinds = [event["event"] for event in run.events()[before:]]
    return "valid" in kinds and "train" in kinds[kinds.index("valid") :]


LONG = "trainer.save_every=1000000"
PHASES = {
    "start": Phase(
        [LONG],
        ready=lambda run, before: len(run.ranks()) == 2,
        delay=3.0,  # The imports of the ranks take longer.
        hit=lambda run, before: not _has_new(run, before, "train"),
    ),
    "data wait": Phase(
        [LONG],
        ready=lambda run, before: _has_new(run, before, "train"),
        delay=1.0,
        pause=1.0,
    ),
    "forward": Phase(
        [LONG, "data.batch.count=24"],
        ready=lambda run, before: _has_new(run, before, "train"),
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
    """Send SIGTERM to a random rank of two. The tries of a phase continue the same run."""
    good, hangs = 0, 0
    draw = random.Random(0)
    shares = []
    for number, name in enumerate(names):
        phase = PHASES[name]
        plan = ["world_size=2", "trainer.max_steps=1000000", *phase.overrides, *overrides]
        run = Run(out / name.replace(" ", "-"), plan, phase.pause)
        attempts = tries // len(names) + (number < tries % len(names))
        for attempt in range(1, attempts + 1):
            try:
                good += signal_a_rank(run, phase, f"{name} {attempt}", draw)
            except subprocess.TimeoutExpired:
                hangs += 1
                print(f"{name} {attempt}: hangs", flush=True)
        shares.append(f"{name} {100 * finish(run):.0f} %")
    print(f"\n{good} of {tries} as they should be, {hangs} hangs. Share of waiting for data: ", end="")
    print(", ".join(shares))
    return good == tries


def finish(run: Run) -> float:
    """Train two more updates to the end. Return the share of the time that waits for data."""
    last_step = run.result()["steps"] + 2
    run.complete(f"trainer.max_steps={last_step}", "trainer.validate_every=1000000", "resume=must")
    assert sorted(run.losses()) == list(range(1, last_step + 1))
    return statistics.mean(event["data_wait"] for event in run.events("train"))


def signal_a_rank(run: Run, phase: Phase, name: str, draw: random.Random) -> bool:
    """Start the run and send SIGTERM to a rank. Return whether the run ends as it must."""
    before = len(run.events())
    saved = run.result()["steps"] if before else 0
    run.start()
    if not run.until(lambda: phase.ready(run, before)):
        sys.exit(f"{run.run_dir} ended too early: see {run.run_dir.with_suffix('.log')}")
    time.sleep(draw.uniform(0.0, phase.delay))
    ranks, family = run.ranks(), run.family()
    rank = draw.choice(sorted(ranks))
    code, seconds = terminate(run, ranks[rank])
    left = [pid for pid in family if not is_gone(pid)]
    steps = saved_steps(run)
    is_whole = is_newest_checkpoint_whole(run)
    resumed = resumed_step(run.events()[before:])
    print(
        f"{name}: rank {rank}, in the phase {phase.hit(run, before)}, exit {code} after {seconds:.1f} s, "
        f"resumed at {resumed}, ranks saved at {steps}, newest checkpoint whole {is_whole}, "
        f"left over {len(left)}",
        flush=True,
    )
    return is_preempted(run, code) and not left and is_whole and len(set(steps)) == 1 and resumed == saved


def saved_steps(run: Run) -> list[int]:
    """Return the last step of each rank by its ``result.json``."""
    return [json.loads(path.read_text())["steps"] for path in _results(run)]


def terminate(run: Run, pid: int) -> tuple[int, float]:
    """Send SIGTERM to a rank. Return the exit code of the command and its seconds to the end."""
    start = time.time()
    os.kill(pid, signal.SIGTERM)
    code = run.wait()
    seconds = time.time() - start
    time.sleep(0.2)  # The command waits for its processes, but the kernel needs a moment to remove them.
    return code, seconds


def is_preempted(run: Run, code: int) -> bool:
    """Return whether the command ended as after a signal, with a result of both ranks."""
    return code == 75 and run.result()["status"] == "preempted" and len(_results(run)) == 2


def is_newest_checkpoint_whole(run: Run) -> bool:
    """Return whether the newest checkpoint is complete and has the last step of the run."""
    checkpointer = Checkpointer(run.run_dir)
    folders = checkpointer.folders()
    try:
        return bool(folders) and checkpointer.verify(folders[-1]).step == run.result()["steps"]
    except RunError as error:
        print(error)
        return False


def _results(run: Run) -> list[Path]:
    return [run.run_dir / "result.json", *run.run_dir.glob("ranks/*/result.json")]


def goodput(out: Path, minutes: float, every: float, measured: float, overrides: list[str]) -> bool:
    """Kill a rank every ``every`` seconds, and compare the number of updates with an undisturbed run.

    The undisturbed run trains for ``measured`` seconds before the killed run and again after it. Then the run
    that has fewer updates catches up.
    """
    plan = ["world_size=2", "trainer.save_every=20", "data.train.utterances=2000", *overrides]
    undisturbed = Run(out / "undisturbed", plan)
    seconds_before = _trained_for(undisturbed, measured)
    run = Run(out / "killed", [*plan, "launcher=torchrun", "launcher.max_restarts=1000"])
    killed = train_with_kills(run, minutes, every)
    seconds_after = _trained_for(undisturbed, measured)
    share = killed.updates * (seconds_before + seconds_after) / 2 / killed.wall
    largest_share = killed.updates * min(seconds_before, seconds_after) / killed.wall
    print(f"\n{killed}, seconds per update ", end="")
    print(f"{seconds_before:.4f} before and {seconds_after:.4f} after, load {killed.load:.1f}")
    print(f"goodput {100 * share:.1f} % ({100 * largest_share:.1f} % by the faster)")
    print_medians(killed.kills)
    apart = catch_up(run, undisturbed, killed)
    return share >= GOODPUT and apart <= TOLERANCE


def print_medians(kills_made: list[Kill]) -> None:
    for name, field_name in (("detected", "detected"), ("again", "recovered")):
        seconds = [getattr(kill, field_name) for kill in kills_made]
        print(f"{name}: median {statistics.median(seconds):.2f} s, largest {max(seconds):.2f} s", flush=True)


@dataclass
class KilledRun:
    """The outcome of a run whose ranks were killed."""

    code: int
    kills: list[Kill]
    wall: float  # seconds
    updates: int
    load: float

    def __str__(self) -> str:
        return f"exit {self.code}, {len(self.kills)} kills in {self.wall:.0f} s, {self.updates} updates kept"


def catch_up(run: Run, undisturbed: Run, killed: KilledRun) -> float:
    """Train both runs to the same update. Return the largest relative difference of their losses."""
    last_step = max(killed.updates, max(undisturbed.losses()))
    overrides = f"trainer.max_steps={last_step}", f"trainer.validate_every={last_step}"
    for name, part in (("killed", run), ("undisturbed", undisturbed)):
        part.complete(*overrides, patience=10 * killed.wall)
        loss, metrics = part.losses()[killed.updates], part.result()["metrics"]
        print(f"{name}: loss {loss!r} at update {killed.updates}, validation {metrics}")
    apart = difference(run.losses(), undisturbed.losses())
    print(f"losses apart {apart:.1e}, samples equal {run.samples() == undisturbed.samples()}")
    return apart


def train_with_kills(run: Run, minutes: float, every: float) -> KilledRun:
    """Train for a time, kill a rank every ``every`` seconds, and stop the run by SIGTERM."""
    draw, start = random.Random(0), time.time()
    end = start + 60 * minutes
    kills_made: list[Kill] = []
    loads = []
    run.start("trainer.max_steps=1000000")
    due = start + every
    while due < end:
        time.sleep(max(0.0, due - time.time()))
        loads.append(os.getloadavg()[0])
        run.until(run.ranks)  # There may be a pause without ranks between two attempts.
        kill = kill_a_rank(run, draw)
        assert kill is not None
        kills_made.append(kill)
        print(f"{time.time() - start:.0f} s: {kill}, load {loads[-1]:.1f}", flush=True)
        due += every
    time.sleep(max(0.0, end - time.time()))
    pids = sorted(run.ranks().values())
    code, _ = terminate(run, draw.choice(pids))
    wall = time.time() - start
    return KilledRun(code, kills_made, wall, run.result()["steps"], statistics.mean(loads))


def _trained_for(run: Run, seconds: float) -> float:
    """Train for ``seconds`` and save. Return the seconds of an update, checkpoints included."""
    before = len(run.events())
    run.start("trainer.max_steps=1000000")
    run.until(lambda: _has_new(run, before, "train"))
    time.sleep(seconds)
    assert run.process is not None
    run.process.send_signal(signal.SIGTERM)
    run.wait()
    updates = [event for event in run.events()[before:] if event["event"] == "train"]
    first, newest = updates[0], updates[-1]
    return float((newest["time"] - first["time"]) / (newest["step"] - first["step"]))


def worlds(out: Path, overrides: list[str]) -> bool:
    """Train 20 updates on 1, 2, 4 and 1 ranks in turn, and compare them with the same updates on one rank."""
    plan = ["trainer.simulate_world=4", "data.batch.count=2", LONG, *overrides]
    alone = Run(out / "alone", plan)
    alone.complete("trainer.max_steps=20")
    run = Run(out / "worlds", plan)
    print("| ranks | accumulate | updates | losses apart | gradient norms apart |\n|---|---|---|---|---|")
    for number, size in enumerate((1, 2, 4, 1)):
        steps = range(5 * number + 1, 5 * number + 6)
        run.complete(f"world_size={size}", f"trainer.max_steps={steps[-1]}")
        accumulate = run.events("start")[-1]["accumulate"]
        cells = [str(size), str(accumulate), f"{steps[0]} to {steps[-1]}"]
        for key in ("loss", "grad_norm"):
            apart = difference(values_of(run, key, steps), values_of(alone, key, steps))
            cells.append(f"{apart:.1e}")
        print(f"| {' | '.join(cells)} |", flush=True)
    apart = difference(run.losses(), alone.losses())
    is_same = run.samples() == alone.samples()
    print(f"\n{len(run.samples())} micro-batches, in the same order {is_same}, losses {apart:.1e} apart")
    return is_same and apart <= TOLERANCE


def values_of(run: Run, key: str, steps: range) -> dict[int, float]:
    """Return a value of each update in ``steps``."""
    return {event["step"]: event[key] for event in run.events("train") if event["step"] in steps}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("kills", "signals", "goodput", "worlds"))
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=1, help="first seed")
    parser.add_argument("--tries", type=int, default=50)
    parser.add_argument(
        "--phases", nargs="+", choices=PHASES, default=[*PHASES], help="phases of the signals"
    )
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--every", type=float, default=60.0, help="seconds between kills")
    parser.add_argument("--measured", type=float, default=120.0, help="seconds of the undisturbed run, twice")
    parser.add_argument("--out", type=Path, default=Path("runs/survival"))
    return parser.parse_intermixed_args()


def holds(options: argparse.Namespace) -> bool:
    """Run the chosen test and return whether its bounds hold."""
    out, overrides = options.out, options.overrides
    if options.what == "kills":
        return kills(out, options.first, options.seeds, overrides)
    if options.what == "signals":
        return signals(out, options.tries, options.phases, overrides)
    if options.what == "goodput":
        return goodput(out, options.minutes, options.every, options.measured, overrides)
    return worlds(out, overrides)


def main() -> None:
    sys.exit(not holds(parse_arguments()))


if __name__ == "__main__":
    main()

"""Real runs through the console command: a tiny recipe, in processes that can be signalled and killed."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import subprocess
import time
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from speechtrain.start.compose import compose
from speechtrain.start.resolved import dump

from .starting import Started, Starter

if TYPE_CHECKING:
    from .forked import Forks

STARTER = Starter()
TINY = [
    *("recipe=demo", "device.threads=1", "device.autotune=false", "tracking=jsonl", "data.workers=0"),
    *("data.train.utterances=48", "data.valid.unheard.utterances=6", "data.batch.count=4"),
    *("encoder.hidden=32", "encoder.features.mels=20", "model.prediction.hidden=32"),
    *("model.prediction.embedding=16", "model.joint.hidden=32", "decoder.max_symbols=30"),
    *("trainer.max_epochs=null", "trainer.max_steps=30", "trainer.log_every=1", "device.oversubscribe=true"),
    *("trainer.save_every=3", "trainer.validate_every=10", "schedule.warmup_steps=5"),
]
"""30 updates of 12 utterances' seconds each; dropout, noise, warping, speed and EMA as in the demo."""

INLINE = ("launcher=local", "launcher.inline=true")
RECORDED = ["data._target_=recording.RecordingData", "allow_targets=recording"]
DEADLINE = 300.0  # seconds; nothing here takes a tenth of it on a free machine


class Command:
    """``speechtrain train`` with the tiny recipe on one run directory."""

    def __init__(self, run_dir: Path, environment: dict[str, str], overrides: list[str]) -> None:
        self.run_dir = run_dir
        self.environment = environment
        self.arguments = [*TINY, *overrides, f"run_dir={run_dir}"]

    def start(self, *extra: str) -> Started:
        """The command, in the background."""
        return STARTER.start([*self.arguments, *extra], self.environment)

    def write(self) -> Path:
        """The run's config.yaml, as the command would leave it for the ranks."""
        self.run_dir.mkdir(parents=True, exist_ok=True)
        keys = [argument for argument in self.arguments if not argument.startswith("allow_targets=")]
        path = self.run_dir / "config.yaml"
        path.write_text(dump(compose(keys)))
        (self.run_dir / "run.json").write_text(json.dumps({"overrides": keys}))
        return path

    def _popen(self, line: list[str]) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(line, env=self.environment, stdout=pipe, stderr=pipe, text=True)

    def run(self, *extra: str) -> subprocess.CompletedProcess[str]:
        """The command, to its end."""
        return finish(self.start(*extra))

    def run_inline(self, *extra: str) -> subprocess.CompletedProcess[str]:
        """The command, to its end, with its only rank in the same process: that saves an import of torch."""
        return self.run(*extra, *INLINE)

    def tool(self, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Another of the package's commands, to its end."""
        return finish(STARTER.start([*arguments], self.environment, name))

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        """What the run's record says, attempts that were made void included."""
        try:
            text = (self.run_dir / "metrics.jsonl").read_text()
        except OSError:
            return []
        lines = [line for line in text.split("\n")[:-1] if line]
        records = [json.loads(line) for line in lines if line.endswith("}")]
        return [r for r in records if not kind or r["event"] == kind]

    def losses(self) -> dict[int, float]:
        """The loss of each update. Where several attempts made the same update, they must agree."""
        found: dict[int, float] = {}
        for record in self.events("train"):
            assert found.setdefault(record["step"], record["loss"]) == record["loss"]
        return found

    def handed(self) -> list[list[Any]]:
        """Training batches in the order of their addresses. Every attempt must have had the same ones."""
        found: dict[tuple[int, int], list[Any]] = {}
        for line in (self.run_dir / "handed.jsonl").read_text().splitlines():
            record = json.loads(line)
            assert found.setdefault((record[0], record[1]), record) == record
        return list(found.values())

    def scored(self) -> list[str]:
        """Ids of the utterances that were evaluated, fillers left out."""
        lines = (self.run_dir / "scored.jsonl").read_text().splitlines()
        return [name for line in lines for name in json.loads(line)]

    def result(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.run_dir / "result.json").read_text())
        return content

    def checkpoints(self) -> list[Path]:
        return sorted((self.run_dir / "checkpoints").glob("step-????????"))

    def weights(self) -> str:
        """sha256 of the newest checkpoint's weights."""
        return hashlib.sha256((self.checkpoints()[-1] / "model.safetensors").read_bytes()).hexdigest()

    def pid(self) -> int:
        """The process that trains."""
        return int((self.run_dir / "lock").read_text().split()[1])


def finish(process: subprocess.Popen[str] | Started) -> subprocess.CompletedProcess[str]:
    """Wait for a process and its output."""
    out, err = process.communicate(timeout=DEADLINE)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def wait_for(
    reached: Callable[[], object],
    process: subprocess.Popen[str] | Started | None = None,
    goal: str = "the condition",
) -> None:
    """Poll until ``reached`` returns something true. Fails after DEADLINE, or if ``process`` ends first.

    A question may take a tenth of a core and not more: the ranks need the rest.
    """
    begun = time.monotonic()
    before_s = _busy_s()
    while not reached():
        question_s = _busy_s() - before_s
        if process is not None and process.poll() is not None and not reached():
            out, err = process.communicate()
            pytest.fail(f"the process ended with {process.returncode} before {goal}: {out}{err}")
        assert time.monotonic() - begun < DEADLINE, f"{DEADLINE:g} s have passed without {goal}"
        time.sleep(min(max(0.005, 9 * question_s), 0.1))
        before_s = _busy_s()


def _busy_s() -> float:
    """Processor time of this thread and of the children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.thread_time() + children.ru_utime + children.ru_stime


def beyond_loopback(pid: int) -> list[str]:
    """The network sockets of a process and its descendants that have another address than loopback."""
    process = psutil.Process(pid)
    found = [(p, s) for p in [process, *process.children(recursive=True)] for s in p.net_connections("inet")]
    assert len(found) > 2, "ranks that talk have sockets"
    return [f"{s} of {p}" for p, s in found if not ip_address(s.laddr.ip.removeprefix("::ffff:")).is_loopback]


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One cache of joined utterances for all runs."""
    cache = tmp_path_factory.mktemp("cache")
    ours = {"SPEECHTRAIN_CACHE": str(cache), "PYTHONPATH": str(Path(__file__).parent)}
    return {**os.environ, **ours}


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str], forks: Forks) -> Command:
    """What two ranks must equal, whichever launcher starts them: ``engines.run_alone``."""
    from .engines import run_alone

    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return run_alone(shared / "alone", environment, forks)


@pytest.fixture(scope="session")
def forks(environment: dict[str, str]) -> Forks:
    """Ranks without a launcher; one run at a time."""
    from .forked import Forks

    return Forks(environment)


@pytest.fixture
def command(tmp_path: Path, environment: dict[str, str]) -> Callable[..., Command]:
    """``command("name", *overrides)``: the tiny recipe in a run directory of that name."""
    return lambda name, *overrides: Command(tmp_path / name, environment, list(overrides))

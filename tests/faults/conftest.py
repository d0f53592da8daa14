"""Faults done to real runs: kills, signals, full disks, damaged files. ``make test-faults`` runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from speechtrain.launch.launcher import WORKER

from ..conftest import PATIENCE_SECONDS
from ..integration.conftest import Command, command, environment, forks, wait_for
from ..integration.starting import Started

__all__ = ["command", "environment", "forks"]

SLOW_DATA = ["data._target_=parts.SlowData"]
TAG = "FAULTS_RUN"
"""Environment variable by which the processes of a run are found, whoever their parent is."""
WORKERS = "FAULTS_WORKERS"
"""Environment variable: the file in which ``SlowData`` lists the data workers."""
FIGURES = "figures"
"""Name of the property of a test's report that holds a line of its figures."""


class Run(Command):
    """A run whose processes can be found, also those that have lost their parents."""

    def __init__(self, run_dir: Path, environment: dict[str, str], overrides: list[str]) -> None:
        here = str(Path(__file__).parent)
        paths = f"{here}:{environment['PYTHONPATH']}"
        own = {"PYTHONPATH": paths, TAG: str(run_dir), "SPEECHTRAIN_ALLOW_TARGETS": "parts"}
        own[WORKERS] = f"{run_dir}.workers"
        super().__init__(run_dir, {**environment, **own}, overrides)

    def popen(self, *extra: str, **how: Any) -> subprocess.Popen[str]:
        """The command, executed anew: with streams, limits and signals of its own."""
        line = [sys.executable, "-m", "speechtrain.commands.train", *self.arguments, *extra]
        streams = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        return subprocess.Popen(line, env=self.environment, text=True, **{**streams, **how})

    def processes(self) -> list[psutil.Process]:
        """The processes below the command, each with the ``info`` that it has at this moment."""
        processes = []
        for process in psutil.process_iter(["environ", "cmdline", "ppid", "status"]):
            environment = process.info["environ"] or {}  # None for another user's process
            is_zombie = process.info["status"] == psutil.STATUS_ZOMBIE
            if environment.get(TAG) == str(self.run_dir) and not is_zombie:
                processes.append(process)
        return processes

    def running(self, module: str) -> list[psutil.Process]:
        """The processes that Python has started with ``-m module``."""
        return [process for process in self.processes() if module_of(process.info["cmdline"]) == module]

    def ranks(self) -> list[psutil.Process]:
        return self.running(WORKER)

    def agents(self) -> list[psutil.Process]:
        return self.running("speechtrain.launch.agent")

    def fork_servers(self) -> list[psutil.Process]:
        """The parents of the ready data workers."""
        parents = {worker.info["ppid"] for worker in self.data_workers()}
        return [process for process in self.processes() if process.pid in parents]

    def data_workers(self) -> list[psutil.Process]:
        """The ready data workers of the ranks, which ``SlowData`` lists."""
        try:
            lines = Path(self.environment[WORKERS]).read_text().splitlines()
        except FileNotFoundError:
            return []
        pids = {pid for line in lines for pid in json.loads(line)}
        return [process for process in self.processes() if process.pid in pids]

    def step(self) -> int:
        """The step of the last update."""
        return max((e["step"] for e in self.events("train")), default=0)

    def updates(self) -> int:
        """How many updates the record has, those made twice included."""
        return len(self.events("train"))

    def wait_for_step(self, step: int, process: subprocess.Popen[str] | Started) -> None:
        """Wait for update ``step``. Fails if the command ends first."""
        wait_for(lambda: self.step() >= step, process, f"update {step}")

    def wait_for_update(self, number: int, process: subprocess.Popen[str] | Started) -> None:
        """Wait until the record has so many updates, or for the end of the command."""
        wait_until(lambda: self.updates() >= number, process, f"{number} updates in the record")

    def wait_until_gone(self) -> None:
        wait_for(lambda: not self.processes(), goal="the end of all processes of the run")


def module_of(arguments: list[str]) -> str:
    """The module that a command line of Python runs as its program, or an empty string."""
    # the command line of an agent ends with the command of its ranks
    return arguments[arguments.index("-m") + 1] if "-m" in arguments else ""


def wait_until(condition: Callable[[], object], process: subprocess.Popen[str] | Started, goal: str) -> None:
    """Wait for ``condition`` or for the end of ``process``."""
    wait_for(lambda: condition() or process.poll() is not None, goal=f"{goal}, nor the command's end")


@pytest.fixture
def run(tmp_path: Path, environment: dict[str, str]) -> Iterator[Callable[..., Run]]:
    """``run("name", *overrides)`` is the tiny recipe. A process that outlives it fails the test."""
    made: list[Run] = []

    def make(name: str, *overrides: str) -> Run:
        made.append(Run(tmp_path / name, environment, list(overrides)))
        return made[-1]

    yield make
    running = [process for found in made for process in found.processes()]
    # a fork server notices the end of its rank after the fact
    _, left = psutil.wait_procs(running, timeout=PATIENCE_SECONDS)
    for process in left:
        process.kill()
    assert not left, f"processes left behind: {left}"


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Add a line of figures to the test's report, which also reaches the parent of parallel processes."""
    return lambda line: request.node.user_properties.append((FIGURES, f"{request.node.name}: {line}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    properties = []
    for report in terminalreporter.getreports("passed"):
        properties += report.user_properties
    lines = [text for name, text in properties if name == FIGURES]
    if lines:
        terminalreporter.section("figures")
        terminalreporter.write("\n".join(lines) + "\n")

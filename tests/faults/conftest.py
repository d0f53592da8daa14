"""Faults done to real runs: kills, signals, full disks, damaged files. ``make test-faults`` runs them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from speechtrain.launcher import WORKER

from ..integration.conftest import Command, command, environment, forks, wait_for

__all__ = ["command", "environment", "forks"]

SLOW_DATA = ["data._target_=parts.SlowData"]
TAG = "FAULTS_RUN"
"""Environment variable by which the processes of a run are found, whoever their parent is."""
_FIGURES: list[str] = []


class Run(Command):
    """A run whose processes can be found, also those that have lost their parents."""

    def __init__(self, run_dir: Path, environment: dict[str, str], overrides: list[str]) -> None:
        here = str(Path(__file__).parent)
        paths = f"{here}:{environment['PYTHONPATH']}"
        own = {"PYTHONPATH": paths, TAG: str(run_dir), "SPEECHTRAIN_ALLOW_TARGETS": "parts"}
        super().__init__(run_dir, {**environment, **own}, overrides)

    def popen(self, *extra: str, **how: Any) -> subprocess.Popen[str]:
        """The command, executed anew: with streams, limits and signals of its own."""
        line = [sys.executable, "-m", "speechtrain.commands.train", *self.arguments, *extra]
        streams = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        return subprocess.Popen(line, env=self.environment, text=True, **{**streams, **how})

    def processes(self, *words: str) -> list[psutil.Process]:
        """The processes below the command that have all of ``words`` on their command lines."""
        found = []
        for process in psutil.process_iter():
            try:
                is_ours = process.environ().get(TAG) == str(self.run_dir)
                line = " ".join(process.cmdline())
                if is_ours and process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    found += [process] if all(word in line for word in words) else []
            except psutil.Error:  # it has ended, or is another user's
                continue
        return found

    def ranks(self) -> list[psutil.Process]:
        return [p for p in self.processes(WORKER) if p.cmdline()[1:3] == ["-m", WORKER]]

    def agents(self) -> list[psutil.Process]:
        return self.processes("torch.distributed.run")

    def fork_servers(self) -> list[psutil.Process]:
        servers = self.processes("multiprocessing.forkserver")
        return [p for p in servers if p.ppid() not in {server.pid for server in servers}]

    def data_workers(self) -> list[psutil.Process]:
        servers = self.processes("multiprocessing.forkserver")
        return [p for p in servers if p.ppid() in {server.pid for server in servers}]

    def step(self) -> int:
        """The step of the last update."""
        return max((e["step"] for e in self.events("train")), default=0)

    def updates(self) -> int:
        """How many updates the record has, those made twice included."""
        return len(self.events("train"))

    def wait_until_gone(self) -> None:
        wait_for(lambda: not self.processes())


@pytest.fixture
def run(tmp_path: Path, environment: dict[str, str]) -> Iterator[Callable[..., Run]]:
    """``run("name", *overrides)``: the tiny recipe; what is left of its processes fails the test."""
    made: list[Run] = []

    def make(name: str, *overrides: str) -> Run:
        made.append(Run(tmp_path / name, environment, list(overrides)))
        return made[-1]

    yield make
    left = [process for found in made for process in found.processes()]
    for process in left:
        process.kill()
    assert not left, f"processes left behind: {left}"


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Note a line of figures; all are printed at the end."""
    return lambda line: _FIGURES.append(f"{request.node.name}: {line}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _FIGURES:
        terminalreporter.section("figures")
        terminalreporter.write("\n".join(_FIGURES) + "\n")

"""Supervision of one child: its code, the signals it gets, and how it may be rendered."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from speechtrain.errors import ConfigError
from speechtrain.launch.launcher import SHUTDOWN_SECONDS, Job
from speechtrain.launch.process_tree import children_of
from speechtrain.launch.rendezvous import agent_command
from speechtrain.launch.supervise import supervise, wait_for_job

# what a worker does: act on the signals that waited while it could not
OBEDIENT = """
import pathlib, signal, sys, time
time.sleep({busy})
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))
signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
pathlib.Path({ready!r}).touch()
time.sleep(60)
"""


def ended(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return ") Z" in stat.read_text()
    except OSError:
        return True


def wait_until(reached: Callable[[], object]) -> None:
    begun = time.monotonic()
    while not reached():
        assert time.monotonic() - begun < 60
        time.sleep(0.01)


@contextlib.contextmanager
def signals(*numbers: int, when: Callable[[], object]) -> Iterator[None]:
    """This process gets the signals once ``when`` returns something true."""

    def send() -> None:
        wait_until(when)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.3)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def until_handled(before: object) -> Callable[[], bool]:
    """Return a condition: SIGTERM has another handler than ``before``."""
    return lambda: signal.getsignal(signal.SIGTERM) is not before


def test_the_childs_code_is_returned_and_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    assert supervise([sys.executable, "-c", "raise SystemExit(3)"], os.environ) == 3
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGTERM, signal.SIGINT} == set()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks(tmp_path: Path, number: int) -> None:
    ready = tmp_path / "ready"
    code = OBEDIENT.format(busy=0, ready=str(ready))
    with signals(number, when=ready.exists):
        assert supervise([sys.executable, "-c", code], os.environ) == 7


def test_a_signal_waits_for_a_child_that_is_still_starting(tmp_path: Path) -> None:
    code = OBEDIENT.format(busy=1.0, ready=str(tmp_path / "ready"))
    with signals(signal.SIGTERM, when=until_handled(signal.getsignal(signal.SIGTERM))):
        assert supervise([sys.executable, "-c", code], os.environ) == 7


def test_a_signal_before_the_child_starts_reaches_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread blocks the signal, so another thread of this process gets it."""
    start = subprocess.Popen
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()

    def start_late(*arguments: Any, **keywords: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        return start(*arguments, **keywords)

    monkeypatch.setattr(subprocess, "Popen", start_late)
    code = OBEDIENT.format(busy=0, ready=str(tmp_path / "ready")).replace("sleep(60)", "sleep(5)")
    try:
        assert supervise([sys.executable, "-c", code], os.environ) == 7
    finally:
        end.set()
        thread.join()


# what an agent does: children in sessions of their own; it ends when they have ended, and with their word
AGENT_OF_TWO = """
import subprocess, sys
line = [sys.executable, "-c", sys.argv[1]]
children = [subprocess.Popen([*line, str(i)], start_new_session=True) for i in range(2)]
print("W1121 03:40:12.123000 4711 torch/distributed/run.py:1] a warning of the agent", file=sys.stderr)
print("[rank0]:[W1121 03:40:12.671648576 reducer.cpp:1] Warning: of torch in a rank", file=sys.stderr)
print("[W1121 03:40:12.1 TCPStore.cpp:1] [c10d] recvValue failed", file=sys.stderr)
print("Exception raised from recvBytes\\nframe #0: c10::Error::Error(", file=sys.stderr)
print("<omitting python frames>\\nframe #1: clone\\n", file=sys.stderr)
print("speechtrain: warning: of a rank", file=sys.stderr, flush=True)
codes = [child.wait() for child in children]
if codes != [7, 7]:
    raise RuntimeError(codes)
"""
RANK = """
import pathlib, signal, sys, time
time.sleep(0.5 * int(sys.argv[1]))  # they are not ready at the same time
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))
signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
pathlib.Path({folder!r}, sys.argv[1]).touch()
time.sleep(60)
"""


@pytest.mark.parametrize("ready", [1, 2])
def test_the_first_signal_is_for_an_agents_ranks(
    tmp_path: Path, ready: int, capfd: pytest.CaptureFixture[str]
) -> None:
    line = [sys.executable, "-c", AGENT_OF_TWO, RANK.format(folder=str(tmp_path))]
    with signals(signal.SIGTERM, when=lambda: len([*tmp_path.glob("[01]")]) >= ready):
        assert supervise(line, os.environ, agent_log=tmp_path / "agent.log") == 0
    assert capfd.readouterr().err == "speechtrain: warning: of a rank\n"
    assert "a warning of the agent" in (tmp_path / "agent.log").read_text()


WAITING = """
import sys, time
print("W1121 03:40:12.1 4711 a host that does not resolve", file=sys.stderr, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_agent_without_ranks_says_what_it_waits_for(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """torchrun waits for minutes where a host's name does not resolve, without a word on the terminal."""
    monkeypatch.setattr("speechtrain.launch.supervise._QUIET_SECONDS", 0.5)
    is_handled = until_handled(signal.getsignal(signal.SIGTERM))
    begun = time.monotonic()
    with signals(number, when=lambda: is_handled() and time.monotonic() > begun + 2.0):
        assert supervise([sys.executable, "-c", WAITING], os.environ, tmp_path / "agent.log") == 75
    assert time.monotonic() - begun < 20
    said = "speechtrain: warning: no rank runs yet; W1121 03:40:12.1 4711 a host that does not resolve\n"
    assert capfd.readouterr().err == said


def test_the_second_signal_kills_an_agent_and_its_ranks(tmp_path: Path) -> None:
    pids: list[int] = []
    others = set(children_of(os.getpid()))  # a fork server that an earlier test has left
    code = RANK.format(folder=str(tmp_path)).replace("sys.exit(7)", "None")  # takes no notice
    line = [sys.executable, "-c", AGENT_OF_TWO, code]

    def are_ready() -> bool:
        if len([*tmp_path.glob("[01]")]) < 2:
            return False
        (agent,) = set(children_of(os.getpid())) - others
        pids.extend([agent, *children_of(agent)])
        return True

    with signals(signal.SIGINT, signal.SIGINT, when=are_ready), pytest.raises(KeyboardInterrupt):
        supervise(line, os.environ, agent_log=tmp_path / "agent.log")
    assert len(pids) == 3
    wait_until(lambda: all(map(ended, pids)))


DEAF = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "0":
    while not (folder / "deaf").exists():
        time.sleep(0.01)
    sys.exit(3)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
(folder / "deaf").write_text(str(os.getpid()))
time.sleep(120)
"""


def test_a_rank_that_stays_after_a_failure_is_killed(tmp_path: Path) -> None:
    line = agent_command(sys.executable, ranks=2, nodes=1)
    line += [sys.executable, "-c", DEAF, str(tmp_path)]
    log = tmp_path / "agent.log"
    begun = time.monotonic()
    assert supervise(line, {**os.environ, SHUTDOWN_SECONDS: "1"}, agent_log=log) != 0
    assert time.monotonic() - begun < 25  # torchrun itself waits for 30 s
    assert "exitcode: 3" in log.read_text()
    wait_until(lambda: ended(int((tmp_path / "deaf").read_text())))


def test_an_agent_does_not_outlive_its_command(tmp_path: Path) -> None:
    line = [sys.executable, "-c", AGENT_OF_TWO, RANK.format(folder=str(tmp_path))]
    program = (
        "import os, pathlib; from speechtrain.launch.supervise import supervise\n"
        f"supervise({line!r}, os.environ, agent_log=pathlib.Path({str(tmp_path / 'agent.log')!r}))"
    )
    command = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    wait_until(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
    (agent,) = children_of(command.pid)
    ranks = children_of(agent)
    command.kill()
    command.wait()
    wait_until(lambda: ended(agent))
    for pid in ranks:  # these ranks, unlike a worker, do not ask to be told
        os.kill(pid, signal.SIGKILL)
    assert len(ranks) == 2


def test_the_local_launcher_starts_one_process(tmp_path: Path) -> None:
    from speechtrain.launchers.local import Local

    with pytest.raises(ConfigError, match="Use launcher=torchrun, or set world_size=1"):
        Local().check(Job(tmp_path / "c.yaml", tmp_path, world_size=2))
    rendered = Local().render(Job(tmp_path / "c.yaml", tmp_path, environment={"A": "1"}))
    assert rendered == f"A=1 {sys.executable} -P -m speechtrain.rank {tmp_path / 'c.yaml'}"


def test_the_default_launcher_counts_the_ranks(tmp_path: Path) -> None:
    from speechtrain.launchers.auto import Auto
    from speechtrain.launchers.local import Local
    from speechtrain.launchers.torchrun import Torchrun

    launcher = Auto(Local(), Torchrun(max_restarts=2, shutdown_seconds=9))
    one, two = (Job(tmp_path / "c.yaml", tmp_path, size, {"A": "1"}) for size in (1, 2))
    for job in (one, two):
        launcher.check(job)
    assert launcher.render(one) == f"A=1 {sys.executable} -P -m speechtrain.rank {tmp_path / 'c.yaml'}"
    assert launcher.render(two) == (
        f"A=1 TORCH_ELASTIC_SHUTDOWN_TIMEOUT=9 {sys.executable} -P -m speechtrain.launch.agent "
        "--nnodes=1 --nproc-per-node=2 --max-restarts=2 --rdzv-backend=loopback --log-dir=/dev/null "
        f"--no-python {sys.executable} -P -m speechtrain.rank {tmp_path / 'c.yaml'}"
    )
    with pytest.raises(ValueError, match="max_restarts=-1"):
        Torchrun(max_restarts=-1)


def test_a_job_elsewhere_is_asked_to_stop_until_it_accepts() -> None:
    codes = iter([None, None, None, 7])
    answers = iter([False, True])
    signals: list[int] = []

    def exit_code() -> int | None:
        if not signals:
            os.kill(os.getpid(), signal.SIGTERM)
        return next(codes)

    def stop(count: int) -> bool:
        signals.append(count)
        return next(answers)

    assert wait_for_job(exit_code, stop, poll_seconds=0.01) == 7
    assert signals == [1, 1]


def test_what_the_user_has_set_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    job = Job(Path("c.yaml"), Path(), environment={"OMP_NUM_THREADS": "2", "SPEECHTRAIN_TEST_ONLY": "1"})
    assert job.environ()["OMP_NUM_THREADS"] == "3"
    assert job.environ()["SPEECHTRAIN_TEST_ONLY"] == "1"


def test_wait_for_job_interrupts_after_a_second_signal() -> None:
    signals: list[int] = []

    def exit_code() -> int | None:
        if signals == [1, 2]:
            return 0
        os.kill(os.getpid(), signal.SIGINT)
        return None

    def stop(count: int) -> bool:
        signals.append(count)
        return True

    with pytest.raises(KeyboardInterrupt):
        wait_for_job(exit_code, stop, poll_seconds=0.01)
    assert signals == [1, 2]

"""The process that a launcher starts on each host of a run over several hosts. Imports no torch.

``python -m MODULE look FILE PORT ADDRESS`` prints, as one line of JSON, what this host sees and has.
``python -m MODULE run [--attached SECONDS] [--address ADDRESS] LOG -- COMMAND …`` is an agent's parent: it
stops the ranks on request. With ``--outcome RUN_DIR`` it exits with the run's exit code, not with the
agent's. ``python -m MODULE outcome RUN_DIR`` exits with the exit code of the run in that directory.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from speechtrain.errors import EXIT_KILLED, EXIT_PREEMPTED
from speechtrain.files import read_text
from speechtrain.launcher import NETWORK_VARIABLES
from speechtrain.run_directory import read_failure, read_result, versions_of
from speechtrain.supervision.process_tree import ancestors_of, kill, kill_descendants, processes_with
from speechtrain.supervision.rendezvous import why_taken
from speechtrain.supervision.supervise import supervise

STOP, KILL, ALIVE = b"s", b"k", b"."
"""The bytes that an attached node reads on its standard input; its end means a lost connection."""
SILENCE_SECONDS = 60.0
"""After so long without a byte, the connection counts as lost."""
CLOSING_SECONDS = 10.0
"""The time that ranks have to end on their own after another rank has failed."""

MODULE = "speechtrain.supervision.node_agent"
_LOOK_TWICE_SECONDS = 0.1
_LOOKS = 50  # a network file system may show a new file late


def versions() -> dict[str, str]:
    """The versions that must be the same on all hosts of a run, by name."""
    return versions_of("speechtrain", "torch")


def look(file: Path, port: int, address: str) -> dict[str, Any]:
    """What this host sees: content of ``file``, its versions, why ``port`` at ``address`` is not free."""
    content = None
    for _ in range(_LOOKS):
        try:
            content = read_text(file)
            break
        except OSError:
            time.sleep(_LOOK_TWICE_SECONDS)
    return {"token": content, "versions": versions(), "taken": why_taken(address, port)}


def interface_of(address: str) -> str:
    """The network interface with ``address`` (a name or IPv4); empty if there is none."""
    with suppress(OSError):
        wanted = socket.gethostbyname(address)
        for name, its in psutil.net_if_addrs().items():
            if any(found.address == wanted for found in its):
                return name
    return ""


def run(command: list[str], log: Path, address: str, attached: float | None) -> int:
    """Supervise ``command``, an agent with ranks; with ``attached``, handle the standard input, too.

    Its end, or silence, is a request to stop; ``attached`` seconds later, what still runs is killed.
    """
    environment = dict(os.environ)
    if address and (interface := interface_of(address)):
        for name in environment.get(NETWORK_VARIABLES, "").split():  # a host's name may mean its loopback
            environment.setdefault(name, interface)
    if attached is not None:
        _end_leftovers(log)
        threading.Thread(target=_obey, args=(attached,), daemon=True).start()
    try:
        return supervise(command, environment, agent_log=log, grace=CLOSING_SECONDS)
    except KeyboardInterrupt:
        return EXIT_KILLED


def _end_leftovers(log: Path) -> None:
    """Kill this node's processes of an earlier connection, which would train next to the new ones."""
    mine = {os.getpid(), *ancestors_of(os.getpid())}
    for old in processes_with(MODULE, "run", str(log)) - mine:
        kill_descendants(old)
        kill(old)


def _obey(grace: float) -> None:
    """Turn the bytes of the standard input into signals for this process."""
    asked = False

    def ask() -> None:
        nonlocal asked
        if not asked:
            asked = True
            os.kill(os.getpid(), signal.SIGTERM)

    while True:
        ready, _, _ = select.select([0], [], [], SILENCE_SECONDS)
        said = os.read(0, 1) if ready else b""
        if said == STOP:
            ask()
        elif said == KILL:
            break
        elif said != ALIVE:  # end of file, or silence
            ask()
            time.sleep(grace)
            break
    ask()
    time.sleep(_LOOK_TWICE_SECONDS)  # two signals at once would arrive as one
    os.kill(os.getpid(), signal.SIGTERM)


def outcome(run_dir: Path) -> int:
    """The exit code that the command would have for the run in ``run_dir``; 1 if it has no result."""
    result = read_result(run_dir)
    if result is None or result.status == "failed":
        failure = read_failure(run_dir)
        return (failure and failure.exit_code) or 1
    return EXIT_PREEMPTED if result.status == "preempted" else 0


def leave(run_dir: Path) -> int:
    """Return the run's exit code on one of several nodes, after the node's agent has ended.

    Rank 0, or the rank that failed, may write its result on another node, and late.
    """
    for _ in range(_LOOKS):
        if read_result(run_dir) or read_failure(run_dir):
            break
        time.sleep(_LOOK_TWICE_SECONDS)
    return outcome(run_dir)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m speechtrain.supervision.node_agent", description=__doc__)
    parts = parser.add_subparsers(dest="part", required=True)
    looking = parts.add_parser("look")
    looking.add_argument("file", type=Path)
    looking.add_argument("port", type=int)
    looking.add_argument("address")
    running = parts.add_parser("run")
    running.add_argument("--attached", type=float, metavar="SECONDS")
    running.add_argument("--address", default="")
    running.add_argument("--outcome", type=Path, metavar="RUN_DIR", help="exit with the run's exit code")
    running.add_argument("--node", type=int, default=0, help="number of this node, added to its log's name")
    running.add_argument("log", type=Path)
    running.add_argument("command", nargs=argparse.REMAINDER)
    ending = parts.add_parser("outcome")
    ending.add_argument("run_dir", type=Path)
    given = parser.parse_args(argv)
    if given.part == "look":
        print(json.dumps(look(given.file, given.port, given.address)))
        return 0
    if given.part == "outcome":
        return outcome(given.run_dir)
    if given.outcome is not None and outcome(given.outcome) == 0:
        return 0  # the run ended while this node was lost
    log = given.log.with_stem(f"{given.log.stem}-{given.node}") if given.node else given.log
    code = run(given.command[given.command[:1] == ["--"] :], log, given.address, attached=given.attached)
    if given.outcome is None or code == EXIT_PREEMPTED:  # the latter: stopped before it had ranks
        return code
    return leave(given.outcome)


if __name__ == "__main__":
    sys.exit(main())

"""The process that a launcher starts on each host (node) of a run over several hosts.

- ``python -m MODULE look FILE PORT ADDRESS`` checks this host and prints the facts as one line of JSON.
- ``python -m MODULE run [--attached SECONDS] [--address ADDRESS] LOG -- COMMAND …`` starts COMMAND, an agent
  that starts the ranks of this host, such as torchrun. It stops the ranks on request. With ``--outcome
  RUN_DIR`` it exits with the exit code of the run, otherwise with the agent's.
- ``python -m MODULE outcome RUN_DIR`` exits with the exit code of the run in that directory.

This module does not import torch.
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
from speechtrain.launch.launcher import NETWORK_VARIABLES
from speechtrain.launch.process_tree import ancestors_of, kill, kill_descendants, processes_with
from speechtrain.launch.rendezvous import port_error
from speechtrain.launch.supervise import supervise
from speechtrain.run_directory import read_failure, read_result, versions_of

STOP, KILL, ALIVE = b"s", b"k", b"."
"""The bytes that the launcher sends to a node's standard input. The end of the input is a lost connection."""
SILENCE_SECONDS = 60.0
"""The connection also counts as lost after this time without a byte."""
CLOSING_SECONDS = 10.0
"""The time in which ranks must end by themselves after another rank has failed."""

MODULE = "speechtrain.launch.node_agent"
# A network file system may show a new file late, so a file is read up to _POLLS times.
_POLL_SECONDS = 0.1
_POLLS = 50
_SIGNAL_SECONDS = 0.1  # the pause between two signals. Without it, they would arrive as one.


def versions() -> dict[str, str]:
    """Return the versions of the packages that must be the same on all hosts of a run, by package name."""
    return versions_of("speechtrain", "torch")


def check_host(token_file: Path, port: int, address: str) -> dict[str, Any]:
    """Return the facts by which a launcher decides whether this host can run ranks.

    - ``token``: the text of ``token_file``, or None if the file is not here. The launcher has written it into
      the run directory, so the text shows whether this host sees that directory.
    - ``versions``: the versions of packages.
    - ``port_error``: the reason why this host cannot listen on ``port`` of ``address``, empty if it can.
    """
    token = None
    for _ in range(_POLLS):
        try:
            token = read_text(token_file)
            break
        except OSError:
            time.sleep(_POLL_SECONDS)
    return {"token": token, "versions": versions(), "port_error": port_error(address, port)}


def interface_of(address: str) -> str:
    """Return the name of the network interface with ``address``, a host name or IPv4 address.

    Returns an empty text if no interface of this host has the address.
    """
    with suppress(OSError):
        ip_address = socket.gethostbyname(address)
        for name, addresses in psutil.net_if_addrs().items():
            if any(entry.address == ip_address for entry in addresses):
                return name
    return ""


def run(command: list[str], log: Path, address: str, input_grace: float | None) -> int:
    """Supervise ``command``, the agent of this host's ranks, and return its exit code.

    The agent's stderr is appended to ``log``. The collectives of the ranks use the network interface with
    ``address``, if it is not empty.

    If ``input_grace`` is not None, the launcher also sends requests by the standard input. The end of the
    input, or silence, counts as a stop request. Processes that still run ``input_grace`` seconds later are
    killed.
    """
    environment = dict(os.environ)
    interface = ""
    if address:
        interface = interface_of(address)
    if interface:
        # Without this, the collectives use the address of the host's name, which may be the loopback address.
        for name in environment.get(NETWORK_VARIABLES, "").split():
            environment.setdefault(name, interface)
    if input_grace is not None:
        _kill_leftovers(log)
        threading.Thread(target=_handle_input, args=(input_grace,), daemon=True).start()
    try:
        return supervise(command, environment, agent_log=log, grace=CLOSING_SECONDS)
    except KeyboardInterrupt:
        return EXIT_KILLED


def _kill_leftovers(log: Path) -> None:
    """Kill processes of an earlier connection that have the same ``log``.

    They would train the run at the same time as the new processes.
    """
    this_process = {os.getpid(), *ancestors_of(os.getpid())}  # An ancestor may have the same command line.
    for pid in processes_with(MODULE, "run", str(log)) - this_process:
        kill_descendants(pid)
        kill(pid)


def _handle_input(grace: float) -> None:
    """Turn the bytes of the standard input into signals to this process.

    ``supervise`` handles these signals: the first SIGTERM stops the ranks, and the second kills them.
    """
    has_sent_stop = False

    def stop_once() -> None:
        nonlocal has_sent_stop
        if not has_sent_stop:
            has_sent_stop = True
            os.kill(os.getpid(), signal.SIGTERM)

    stdin = 0
    while True:
        readable, _, _ = select.select([stdin], [], [], SILENCE_SECONDS)
        request = b""  # after a silence
        if readable:
            request = os.read(stdin, 1)  # empty at the end of the input
        if request == STOP:
            stop_once()
        elif request == KILL:
            break
        elif request != ALIVE:  # The connection is lost.
            stop_once()
            time.sleep(grace)
            break
    stop_once()
    time.sleep(_SIGNAL_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)


def exit_code_of_run(run_dir: Path) -> int:
    """Return the exit code of speechtrain-train for the run in ``run_dir``, or 1 without a result."""
    result = read_result(run_dir)
    if result is None or result.status == "failed":
        failure = read_failure(run_dir)
        if failure is None or not failure.exit_code:
            return 1
        return failure.exit_code
    if result.status == "preempted":
        return EXIT_PREEMPTED
    return 0


def wait_for_outcome(run_dir: Path) -> int:
    """Wait for the result of the run after this node's agent has ended, and return the run's exit code.

    Another node writes the result, perhaps later: the node of rank 0, or the node of a rank that failed.
    """
    for _ in range(_POLLS):
        if read_result(run_dir) or read_failure(run_dir):
            break
        time.sleep(_POLL_SECONDS)
    return exit_code_of_run(run_dir)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m speechtrain.launch.node_agent", description=__doc__)
    subcommands = parser.add_subparsers(dest="subcommand", required=True)
    look_parser = subcommands.add_parser("look")
    look_parser.add_argument("file", type=Path)
    look_parser.add_argument("port", type=int)
    look_parser.add_argument("address")
    run_parser = subcommands.add_parser("run")
    run_parser.add_argument("--attached", type=float, metavar="SECONDS")
    run_parser.add_argument("--address", default="")
    run_parser.add_argument("--outcome", type=Path, metavar="RUN_DIR", help="exit with the run's exit code")
    run_parser.add_argument(
        "--node", type=int, default=0, help="number of this node, added to its log's name"
    )
    run_parser.add_argument("log", type=Path)
    run_parser.add_argument("command", nargs=argparse.REMAINDER)
    outcome_parser = subcommands.add_parser("outcome")
    outcome_parser.add_argument("run_dir", type=Path)
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    if arguments.subcommand == "look":
        print(json.dumps(check_host(arguments.file, arguments.port, arguments.address)))
        return 0
    if arguments.subcommand == "outcome":
        return exit_code_of_run(arguments.run_dir)
    if arguments.outcome is not None and exit_code_of_run(arguments.outcome) == 0:
        return 0  # The run ended while this node was lost.
    log = arguments.log
    if arguments.node:
        log = log.with_stem(f"{log.stem}-{arguments.node}")
    command = arguments.command
    if command[:1] == ["--"]:
        command = command[1:]
    code = run(command, log, arguments.address, input_grace=arguments.attached)
    # With EXIT_PREEMPTED, the agent was stopped before it had ranks. Then the run may have no result.
    if arguments.outcome is None or code == EXIT_PREEMPTED:
        return code
    return wait_for_outcome(arguments.outcome)


if __name__ == "__main__":
    sys.exit(main())

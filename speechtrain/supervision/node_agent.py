"""The process that a launcher starts on each host of a run over several hosts. Imports no torch.

``python -m MODULE look FILE PORT ADDRESS`` checks this host and prints the facts as one line of JSON.
``python -m MODULE run [--attached SECONDS] [--address ADDRESS] LOG -- COMMAND …`` starts the command,
which is the agent that starts the ranks of this host, and stops the ranks on request. With ``--outcome
RUN_DIR`` it exits with the run's exit code, not with the agent's. ``python -m MODULE outcome RUN_DIR`` exits
with the exit code of the run in that directory.
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
from speechtrain.supervision.rendezvous import port_error
from speechtrain.supervision.supervise import supervise

STOP, KILL, ALIVE = b"s", b"k", b"."
"""The bytes that an attached node reads on its standard input. Its end means a lost connection."""
SILENCE_SECONDS = 60.0
"""The connection counts as lost after this time without a byte."""
CLOSING_SECONDS = 10.0
"""The time that ranks have to end by themselves after another rank has failed."""

MODULE = "speechtrain.supervision.node_agent"
_POLL_SECONDS = 0.1  # from one look for a file to the next
_POLLS = 50  # A network file system may show a new file late.
_SIGNAL_SECONDS = 0.1  # between two signals. Without a pause, they would arrive as one.


def versions() -> dict[str, str]:
    """Return the versions by name that must be the same on all hosts of a run."""
    return versions_of("speechtrain", "torch")


def check_host(file: Path, port: int, address: str) -> dict[str, Any]:
    """Return the content of ``file``, the versions, and the error of listening on ``port`` of ``address``."""
    content = None
    for _ in range(_POLLS):
        try:
            content = read_text(file)
            break
        except OSError:
            time.sleep(_POLL_SECONDS)
    return {"token": content, "versions": versions(), "port_error": port_error(address, port)}


def interface_of(address: str) -> str:
    """Return the network interface with ``address`` (a name or IPv4), or "" without one."""
    with suppress(OSError):
        ip_address = socket.gethostbyname(address)
        for name, addresses in psutil.net_if_addrs().items():
            if any(entry.address == ip_address for entry in addresses):
                return name
    return ""


def run(command: list[str], log: Path, address: str, input_grace: float | None) -> int:
    """Supervise ``command``, an agent with ranks.

    With ``input_grace``, a stop request may also come by the standard input. The end of the input, or
    silence, is a stop request. Processes that still run ``input_grace`` seconds later are killed.
    """
    environment = dict(os.environ)
    interface = interface_of(address) if address else ""
    if interface:
        # The collectives get the name of the interface, because a host's name may mean its loopback.
        for name in environment.get(NETWORK_VARIABLES, "").split():
            environment.setdefault(name, interface)
    if input_grace is not None:
        _end_leftovers(log)
        threading.Thread(target=_handle_input, args=(input_grace,), daemon=True).start()
    try:
        return supervise(command, environment, agent_log=log, grace=CLOSING_SECONDS)
    except KeyboardInterrupt:
        return EXIT_KILLED


def _end_leftovers(log: Path) -> None:
    """Kill this node's processes of an earlier connection, which would train next to the new ones."""
    ancestors = {os.getpid(), *ancestors_of(os.getpid())}
    for pid in processes_with(MODULE, "run", str(log)) - ancestors:
        kill_descendants(pid)
        kill(pid)


def _handle_input(grace: float) -> None:
    """Turn the bytes of the standard input into signals for this process.

    ``supervise`` receives them. The first SIGTERM stops the ranks, and the second kills them.
    """
    has_asked = False

    def ask_to_stop() -> None:
        nonlocal has_asked
        if not has_asked:
            has_asked = True
            os.kill(os.getpid(), signal.SIGTERM)

    while True:
        ready, _, _ = select.select([0], [], [], SILENCE_SECONDS)
        request = os.read(0, 1) if ready else b""
        if request == STOP:
            ask_to_stop()
        elif request == KILL:
            break
        elif request != ALIVE:  # end of file, or silence
            ask_to_stop()
            time.sleep(grace)
            break
    ask_to_stop()
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
    return EXIT_PREEMPTED if result.status == "preempted" else 0


def wait_for_outcome(run_dir: Path) -> int:
    """Wait for the result of the run, and return the run's exit code. The agent of this node has ended.

    Another node may write the result later: the node of rank 0, or of a rank that failed.
    """
    for _ in range(_POLLS):
        if read_result(run_dir) or read_failure(run_dir):
            break
        time.sleep(_POLL_SECONDS)
    return exit_code_of_run(run_dir)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m speechtrain.supervision.node_agent", description=__doc__)
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
    # An agent that was stopped before it had ranks returns EXIT_PREEMPTED, and its run may have no result.
    if arguments.outcome is None or code == EXIT_PREEMPTED:
        return code
    return wait_for_outcome(arguments.outcome)


if __name__ == "__main__":
    sys.exit(main())

"""The process that a launcher starts on each host (node) of a run over several hosts.

- ``python -m MODULE look FILE TOKEN VERSIONS ADDRESS PORT`` prints the reason why this host cannot run
  ranks, or an empty line.
- ``python -m MODULE run [--node N] [--attached SECONDS] [--address ADDRESS] LOG COMMAND …`` starts COMMAND,
  an agent that starts the ranks of this host, such as torchrun. It stops the ranks on request. With
  ``--outcome RUN_DIR`` it exits with the exit code of the run, otherwise with the agent's.
- ``python -m MODULE outcome RUN_DIR`` exits with the exit code of the run in that directory.

This module does not import torch.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil

from speechtrain.errors import EXIT_KILLED, EXIT_PREEMPTED
from speechtrain.files import read_text
from speechtrain.launch.launcher import AGENT, NETWORK_VARIABLES, Job, escape_for_torchrun
from speechtrain.launch.process_tree import ancestors_of, kill, kill_descendants, processes_with
from speechtrain.launch.rendezvous import agent_command, port_error
from speechtrain.launch.supervise import supervise
from speechtrain.run_directory import read_failure, read_result, versions_of

STOP, KILL, ALIVE = b"s", b"k", b"."
"""The bytes that the launcher sends to a node's standard input. The end of the input is a lost connection."""
SILENCE_SECONDS = 60.0
"""The connection also counts as lost after this time without a byte."""

MODULE = "speechtrain.launch.node_agent"
# A network file system may show a new file late, so a file is read up to _POLLS times.
_POLL_SECONDS = 0.1
_POLLS = 50
_SIGNAL_SECONDS = 0.1  # the pause between two signals. Without it, they would arrive as one.


def versions() -> str:
    """Return the versions of the packages that must be the same on all hosts of a run, as one line."""
    return ", ".join(map(" ".join, versions_of("speechtrain", "torch").items()))


def node_command(
    job: Job, nodes: int, python: str, *options: str, node: str, address: str, master: str, port: int
) -> list[str]:
    """Return the command of the host with the number ``node`` and with ``address``, one of ``nodes`` hosts.

    The command starts this module's ``run`` with ``options``. It starts ``job.on_host``, which sets the
    device's variables and becomes torchrun's agent. That agent starts the ranks with the interpreter
    ``python``. They meet at ``port`` of the host ``master``.
    """
    ranks = job.ranks_per_node(nodes)
    agent = agent_command(python, ranks, nodes, f"--master-addr={master}", f"--master-port={port}")
    agent += [python, *escape_for_torchrun(job.command[1:])]
    command = [python, "-P", "-m", MODULE, "run", f"--node={node}", *options]
    if nodes > 1:
        command.append(f"--address={address}")
    return [*command, str(job.run_dir / AGENT), *job.on_host(agent, ranks, python)]


def fault_of_host(token_file: str, token: str, launcher_versions: str, address: str, port: str) -> str:
    """Return the reason why this host cannot run ranks, with the fix, or an empty text.

    The launcher has written ``token`` to ``token_file`` in the run directory, so the file shows whether this
    host sees that directory. ``launcher_versions`` are the ``versions`` of the launcher's host. If ``port``
    is not 0, this host must be able to listen on it at ``address``.
    """
    for _ in range(_POLLS):
        with suppress(OSError):
            if read_text(token_file) == token:
                break
        time.sleep(_POLL_SECONDS)
    else:
        return f"does not see {Path(token_file).parent}; set run_dir to a folder that all hosts share"
    if versions() != launcher_versions:
        difference = f"{versions()} there, {launcher_versions} here"
        return f"has other versions: {difference}; install the same versions on all hosts"
    error = int(port) and port_error(address, int(port))
    return f"port {port} cannot be used ({error}); set launcher.port to a free port" if error else ""


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


def run(command: list[str], log: Path, node: int, *, address: str, input_grace: float | None) -> int:
    """Supervise ``command``, the agent of this host's ranks, and return its exit code.

    The agent's stderr is appended to ``log``, in whose name the hosts after the first have their number
    ``node``. The collectives of the ranks use the network interface with ``address``, if it is not empty.

    If ``input_grace`` is not None, the launcher also sends requests by the standard input. The end of the
    input, or silence, counts as a stop request. Processes that still run ``input_grace`` seconds later are
    killed.
    """
    environment = {**os.environ, "PET_NODE_RANK": str(node)}  # torchrun's default of --node-rank
    interface = interface_of(address)
    if interface:
        # Without this, the collectives use the address of the host's name, which may be the loopback address.
        for name in environment.get(NETWORK_VARIABLES, "").split():
            environment.setdefault(name, interface)
    if input_grace is not None:
        _kill_leftovers(log, node)
        threading.Thread(target=_handle_input, args=(input_grace,), daemon=True).start()
    if node:
        log = log.with_stem(f"{log.stem}-{node}")
    try:
        return supervise(command, environment, agent_log=log)
    except KeyboardInterrupt:
        return EXIT_KILLED


def _kill_leftovers(log: Path, node: int) -> None:
    """Kill processes of an earlier connection that have the same ``log`` and ``node``.

    They would train the run at the same time as the new processes.
    """
    this_process = {os.getpid(), *ancestors_of(os.getpid())}  # An ancestor may have the same command line.
    for pid in processes_with(MODULE, f"--node={node}", str(log)) - this_process:
        kill_descendants(pid)
        kill(pid)


def _handle_input(grace: float) -> None:
    """Turn the bytes of the standard input into signals to this process.

    ``supervise`` handles these signals: the first SIGTERM stops the ranks, and the second kills them.
    """
    stdin = 0
    is_stopped = False
    request = ALIVE
    while request in (ALIVE, STOP):
        if request == STOP and not is_stopped:
            is_stopped = True
            os.kill(os.getpid(), signal.SIGTERM)
        readable, _, _ = select.select([stdin], [], [], SILENCE_SECONDS)
        request = os.read(stdin, 1) if readable else b""  # empty at the end of the input
    if not is_stopped:
        os.kill(os.getpid(), signal.SIGTERM)
    # Without a request KILL, the connection is lost.
    time.sleep(_SIGNAL_SECONDS if request == KILL else grace)
    os.kill(os.getpid(), signal.SIGTERM)


def exit_code_of_run(run_dir: Path) -> int:
    """Return the exit code of speechtrain-train for the run in ``run_dir``, or 1 without a result."""
    result = read_result(run_dir)
    if result and result.status != "failed":
        return EXIT_PREEMPTED if result.status == "preempted" else 0
    failure = read_failure(run_dir)
    return (failure and failure.exit_code) or 1


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
    look_parser.add_argument("facts", nargs=5)
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
        print(fault_of_host(*arguments.facts))
        return 0
    if arguments.subcommand == "outcome":
        return exit_code_of_run(arguments.run_dir)
    if arguments.outcome is not None and exit_code_of_run(arguments.outcome) == 0:
        return 0  # The run ended while this node was lost.
    code = run(
        arguments.command,
        arguments.log,
        arguments.node,
        address=arguments.address,
        input_grace=arguments.attached,
    )
    # With EXIT_PREEMPTED, the agent was stopped before it had ranks. Then the run may have no result.
    if arguments.outcome is None or code == EXIT_PREEMPTED:
        return code
    return wait_for_outcome(arguments.outcome)


if __name__ == "__main__":
    sys.exit(main())

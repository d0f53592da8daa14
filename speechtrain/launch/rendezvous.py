"""The command of torchrun's agent, and the port at which the agents of a run meet (the rendezvous)."""

from __future__ import annotations

import socket
import zlib
from pathlib import Path

_NO_LOGS = "--log-dir=/dev/null"
"""An option for every agent. Without it the agent leaves empty folders in TMPDIR."""
# Rendezvous ports are below 32768, where Linux begins to assign ports to programs.
_FIRST_PORT, _PORT_COUNT = 20000, 12000


def rendezvous_port(run_dir: Path) -> int:
    """Return the rendezvous port of a run. It depends on ``run_dir`` only, so all hosts compute the same."""
    checksum = zlib.crc32(str(run_dir).encode())
    return _FIRST_PORT + checksum % _PORT_COUNT


def port_error(address: str, port: int) -> str:
    """Return the reason why this host cannot listen on ``port`` of ``address``, empty if it can."""
    try:
        with socket.create_server((address, port)):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def agent_command(python: str, ranks: int, nodes: int, *rendezvous: str, restarts: int = 0) -> list[str]:
    """Return the command of an agent that starts ``ranks`` ranks on its host, one of ``nodes`` hosts.

    The caller appends the command of a rank. ``rendezvous`` are torchrun's options by which the agents find
    each other. A single host does not use them. The number of a host is in the environment. If ranks fail,
    the agent starts all of them again, up to ``restarts`` times.
    """
    if nodes == 1:
        rendezvous = ("--rdzv-backend=loopback",)
    counts = [f"--nnodes={nodes}", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    return [python, "-P", "-m", "speechtrain.launch.agent", *counts, *rendezvous, _NO_LOGS, "--no-python"]

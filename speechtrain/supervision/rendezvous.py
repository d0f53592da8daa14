"""Settings for torchrun, and for the rendezvous of a run's processes."""

from __future__ import annotations

import socket
import zlib
from pathlib import Path

RESTARTABLE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Variables for agents that restart ranks. In a shared store, new ranks find the addresses of dead ranks."""
_NO_LOGS = "--log-dir=/dev/null"
"""An option for every agent. Without it the agent leaves empty folders in TMPDIR."""
_FIRST_PORT, _PORTS = 20000, 12000


def rendezvous_port(run_dir: Path) -> int:
    """Return a port that is derived from ``run_dir``. It is below the ports that systems assign."""
    checksum = zlib.crc32(str(run_dir).encode())
    return _FIRST_PORT + checksum % _PORTS


def port_error(address: str, port: int) -> str:
    """Return the reason why this host cannot listen on ``port`` of ``address``. It is empty if it can."""
    try:
        with socket.create_server((address, port)):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def agent_command(python: str, ranks: int, nodes: int, *rendezvous: str, restarts: int = 0) -> list[str]:
    """Return the command of an agent that starts ``ranks`` ranks on each of ``nodes`` hosts.

    ``rendezvous`` are its options by which the hosts meet. They are left out for a single host. The ranks'
    command must be appended.
    """
    module = "speechtrain.distributed.local_agent" if nodes == 1 else "torch.distributed.run"
    options = rendezvous if nodes > 1 else ()
    counts = (f"--nnodes={nodes}", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}")
    return [python, "-P", "-m", module, *counts, *options, _NO_LOGS, "--no-python"]

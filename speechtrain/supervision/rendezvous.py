"""Settings for torchrun, and for the rendezvous of a run's processes."""

from __future__ import annotations

import socket
import zlib
from pathlib import Path

RESTARTABLE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""For agents that restart ranks: in a shared store, new ranks would find the addresses of dead ones."""
_NO_LOGS = "--log-dir=/dev/null"
"""For every agent, which else leaves empty folders in TMPDIR: the ranks write their own logs."""
_FIRST_PORT, _PORTS = 20000, 12000


def rendezvous_port(run_dir: Path) -> int:
    """A port derived from ``run_dir``, the same each time, below the ports that systems assign."""
    return _FIRST_PORT + zlib.crc32(str(run_dir).encode()) % _PORTS


def why_taken(address: str, port: int) -> str:
    """Why this host cannot listen on ``port`` of ``address``; empty if it can."""
    try:
        with socket.create_server((address, port)):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def agent_command(python: str, ranks: int, nodes: int, *meeting: str, restarts: int = 0) -> list[str]:
    """An agent that starts ``ranks`` ranks on each of ``nodes`` hosts, which meet as its options say.

    A single host meets nobody. The ranks' own command follows.
    """
    module = "speechtrain.distributed.local_agent" if nodes == 1 else "torch.distributed.run"
    options = meeting if nodes > 1 else ()
    counts = (f"--nnodes={nodes}", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}")
    return [python, "-P", "-m", module, *counts, *options, _NO_LOGS, "--no-python"]

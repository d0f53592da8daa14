"""Settings for the rendezvous of a run's processes."""

from __future__ import annotations

import zlib
from pathlib import Path

RESTARTABLE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""For agents that restart ranks: in a shared store, new ranks would find the addresses of dead ones."""
_FIRST_PORT, _PORTS = 20000, 12000


def rendezvous_port(run_dir: Path) -> int:
    """A port derived from ``run_dir``, the same each time, below the ports that systems assign."""
    return _FIRST_PORT + zlib.crc32(str(run_dir).encode()) % _PORTS

"""Where the processes of a run find each other."""

from __future__ import annotations

import zlib
from pathlib import Path

RESTARTABLE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""For agents that start ranks again, which would find the dead ones' addresses in a store that is shared."""
_FIRST_PORT, _PORTS = 20000, 12000


def rendezvous_port(run_dir: Path) -> int:
    """A port of this run's own, the same each time, below those that systems hand out."""
    return _FIRST_PORT + zlib.crc32(str(run_dir).encode()) % _PORTS

"""Ranks of one host: what they listen on is the loopback address."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable
from datetime import timedelta

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.torch_version import TorchVersion

from speechtrain.launcher import World

ADDRESS = "127.0.0.1"
# The libuv server of torch 2.7 accepts no socket that already listens. The older server does. Torch 2.8 is
# untried.
_USES_LIBUV = TorchVersion(torch.__version__) >= "2.9"
_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


def loopback_store(port: int = 0, is_server: bool = True, timeout: float = 300.0) -> TCPStore:
    """A store at ``port`` of the loopback address; 0 is any free port. Raises OSError if it is taken."""
    handle = None
    if is_server:  # torch itself listens on all addresses, whatever the host's name
        server = socket.create_server((ADDRESS, port))
        port, handle = server.getsockname()[1], server.detach()
    limit = timedelta(seconds=timeout)
    return TCPStore(
        ADDRESS, port, None, is_server, limit, False, master_listen_fd=handle, use_libuv=_USES_LIBUV
    )


def store_of_one_host(world: World, variables: Iterable[str], timeout: float) -> TCPStore | None:
    """The store of ranks that are all on this host; None where torch finds or makes it.

    The collectives' network ``variables`` that are not set then name the loopback interface.
    """
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    is_local = world.local_size == world.size or host == "localhost" or host.startswith("127.")
    if not (is_local and host and port):
        return None
    for name in variables:
        os.environ.setdefault(name, _INTERFACE)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    return loopback_store(int(port), is_server=world.rank == 0, timeout=timeout)

"""The store of ranks that share one host. It listens on the loopback address only."""

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
# The libuv server of torch 2.7 does not accept a socket that already listens. The older server does.
# Torch 2.8 has not been tried.
_USES_LIBUV = TorchVersion(torch.__version__) >= "2.9"
_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


def loopback_store(port: int = 0, is_server: bool = True, timeout: float = 300.0) -> TCPStore:
    """Return a store at ``port`` of the loopback address. Port 0 is any free port.

    Raises OSError if another program uses the port.
    """
    descriptor = None
    if is_server:  # A socket that torch opens listens on all addresses, even for the host name 127.0.0.1.
        server = socket.create_server((ADDRESS, port))
        port, descriptor = server.getsockname()[1], server.detach()
    limit = timedelta(seconds=timeout)
    return TCPStore(
        ADDRESS, port, None, is_server, limit, False, master_listen_fd=descriptor, use_libuv=_USES_LIBUV
    )


def store_of_one_host(world: World, variables: Iterable[str], timeout: float) -> TCPStore | None:
    """Return the store of ranks that are all on this host, or None if torch must find or make the store.

    If there is a store, each of the environment ``variables`` that is not set gets the name of the loopback
    interface. The collectives read these variables.
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

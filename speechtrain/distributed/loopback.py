"""The key-value store by which the ranks of one host find each other.

The store listens on the loopback address only, so no other machine can reach it.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable
from datetime import timedelta

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.torch_version import TorchVersion

from speechtrain.distributed.world import World

ADDRESS = "127.0.0.1"
# Torch has two store servers: libuv and an older one. ``loopback_store`` passes a socket that already
# listens. The libuv server of torch 2.7 refuses such a socket. Torch 2.8 has not been tried.
_USES_LIBUV = TorchVersion(torch.__version__) >= "2.9"
_LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


def loopback_store(port: int = 0, is_server: bool = True, timeout: float = 300.0) -> TCPStore:
    """Return a store at ``port`` of the loopback address.

    The server chooses a free port if ``port`` is 0. A client waits ``timeout`` seconds for the server and for
    each key. Raises OSError if another program uses the port.
    """
    descriptor = None
    if is_server:
        # A socket that torch opens listens on all addresses, even for the host name 127.0.0.1.
        server = socket.create_server((ADDRESS, port))
        _, port = server.getsockname()
        descriptor = server.detach()  # Torch closes the socket.
    return TCPStore(
        ADDRESS,
        port,
        is_master=is_server,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=descriptor,
        use_libuv=_USES_LIBUV,
    )


def store_of_one_host(world: World, network_variables: Iterable[str], timeout: float) -> TCPStore | None:
    """Return the store of ranks that are all on this host, or None if torch must find or create the store.

    Rank 0 is the server of the store. If all ranks are on this host, this function also sets the environment
    variables in ``network_variables`` to the loopback interface. The collectives read these variables. The
    user's values stay.
    """
    host = os.environ.get("MASTER_ADDR", "")
    port = os.environ.get("MASTER_PORT", "")
    if not host or not port:
        return None
    is_one_host = world.local_size == world.size or host == "localhost" or host.startswith("127.")
    if not is_one_host:
        return None
    for name in network_variables:
        os.environ.setdefault(name, _LOOPBACK_INTERFACE)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None  # Torchrun's agent already runs a server at this port, and torch connects to it.
    return loopback_store(int(port), is_server=world.rank == 0, timeout=timeout)

"""Torchrun for the ranks of one host: ``python -m speechtrain.distributed.local_agent OPTIONS … COMMAND …``.

Torchrun's own rendezvous listens on all addresses, and unpickles the messages of any client.
"""

from __future__ import annotations

import sys

from torch.distributed import run
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from speechtrain.distributed.loopback import ADDRESS, loopback_store


class _Loopback(StaticTCPRendezvous):
    """The rendezvous of an agent without peers.

    Each restart gets a new store, because the previous store holds the addresses of dead ranks.
    """

    def get_backend(self) -> str:
        return "loopback"

    def next_rendezvous(self) -> RendezvousInfo:
        store = loopback_store()
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(ADDRESS, store.port))


if __name__ == "__main__":
    rendezvous_handler_registry.register("loopback", lambda _: _Loopback(ADDRESS, 0, 0, 1, "loopback", 60))
    run.main(["--rdzv-backend=loopback", *sys.argv[1:]])

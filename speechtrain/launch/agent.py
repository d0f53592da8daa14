"""Torchrun for the ranks of one host: ``python -m speechtrain.launch.agent OPTIONS … COMMAND …``.

This program is torchrun with two differences:

- The rendezvous ``loopback`` listens on the loopback address only. Torchrun's own rendezvous for one host
  listens on all addresses and unpickles the messages of any client.
- ``SHUTDOWN_SECONDS`` limits the time of a rank that must end. After a failure, torchrun itself always waits
  for 30 s, and so do its older releases after a signal.
"""

from __future__ import annotations

import os
import sys

from torch.distributed import run
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from speechtrain.distributed.loopback import ADDRESS, loopback_store
from speechtrain.launch.launcher import SHUTDOWN_SECONDS
from speechtrain.torch_private import limit_shutdown


class _LoopbackRendezvous(StaticTCPRendezvous):
    """The rendezvous of an agent that is the only agent of its run."""

    def get_backend(self) -> str:
        return "loopback"

    def next_rendezvous(self) -> RendezvousInfo:
        """Return a new store. Torchrun calls this at the start and at each restart of the ranks.

        The store of the previous start contains the addresses of dead ranks.
        """
        store = loopback_store()
        address = RendezvousStoreInfo(ADDRESS, store.port)
        return RendezvousInfo(store, rank=0, world_size=1, bootstrap_store_info=address)


if __name__ == "__main__":
    rendezvous = _LoopbackRendezvous(
        ADDRESS, master_port=0, rank=0, world_size=1, run_id="loopback", timeout=60
    )
    rendezvous_handler_registry.register("loopback", lambda _: rendezvous)
    limit_shutdown(int(os.environ[SHUTDOWN_SECONDS]))
    run.main(sys.argv[1:])

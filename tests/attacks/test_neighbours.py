"""Who shares the machine or the folder with a run: what it listens to, and what it imports."""

from __future__ import annotations

import base64
import contextlib
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.support.strange_folder import NAMES, write_modules

from ..integration.conftest import STARTER, TINY, finish, wait_for
from ..integration.starting import Started
from .payloads import CANARY, Calls

pytestmark = pytest.mark.nightly

ENDLESS = ("world_size=2", "trainer.max_steps=5000", "trainer.validate_every=5000", "trainer.save_every=5000")


@contextlib.contextmanager
def training(run_dir: Path, *more: str) -> Iterator[Started]:
    """A run of two ranks, after its first update."""
    process = STARTER.start([*TINY, *ENDLESS, *more, f"run_dir={run_dir}"], dict(os.environ))
    try:
        log = run_dir / "metrics.jsonl"
        wait_for(lambda: log.exists() and '"event": "train"' in log.read_text(), process)
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(15)
            finish(process)


def listening(pid: int) -> dict[tuple[str, int], bool]:
    """Return the address and port of each listener of a run, and whether it is torchrun's store.

    The ranks listen too, where gloo awaits its pairs: a client of a store waits there for ever.
    """
    process = psutil.Process(pid)
    found = {}
    for one in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            is_store = "speechtrain.launch.agent" in one.cmdline()
            sockets = [s for s in one.net_connections("inet") if s.status == psutil.CONN_LISTEN]
            found |= {(s.laddr.ip.removeprefix("::ffff:"), s.laddr.port): is_store for s in sockets}
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("restarts", [pytest.param(0, marks=pytest.mark.ci_share), 2])
def test_nothing_of_a_neighbour_is_unpickled(restarts: int, tmp_path: Path) -> None:
    """He adds and replaces keys of torchrun, and writes to the ranks. The run may end, and runs nothing."""
    canary = tmp_path / CANARY
    content = pickle.dumps(Calls(os.system, f"touch {canary}"))
    with training(tmp_path / "run", "launcher=torchrun", f"launcher.max_restarts={restarts}") as process:
        found = listening(process.pid)
        assert all(ip_address(address).is_loopback for address, _ in found), found
        stores = [port for (_, port), is_store in found.items() if is_store]
        assert len(stores) == 1, found
        assert len(found) == 3, found
        for _, port in found:
            if port not in stores:
                with socket.create_connection(("127.0.0.1", port), timeout=30) as rank:
                    rank.sendall(content)
        patience = timedelta(seconds=60)
        store = TCPStore("127.0.0.1", stores[0], is_master=False, wait_for_workers=False, timeout=patience)
        for key in [*store.list_keys(), "torch.rendezvous.none", "torch.rendezvous.", "torchelastic/x"]:
            store.set(key, base64.b64encode(content))
        begun = time.monotonic()
        while process.poll() is None and time.monotonic() - begun < 10:
            assert not canary.exists()
            time.sleep(0.1)
    assert not canary.exists()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("scheduler", ["joblib", "submitit_local"])
def test_jobs_import_nothing_from_the_present_folder(scheduler: str, tmp_path: Path) -> None:
    """A corpus, unpacked and entered, has modules of a stranger."""
    strange = tmp_path / "strange"
    strange.mkdir()
    write_modules(strange, (*NAMES, "hydra_plugins", "sitecustomize", "joblib", "cloudpickle", "pickle"))
    line = [str(Path(sys.executable).with_name("speechtrain-train")), "-m", f"hydra/launcher={scheduler}"]
    line += [*TINY, "trainer.max_steps=1", "seed=1,2"]
    line += ["hydra.sweep.dir=../jobs", "hydra.sweep.subdir=${hydra.job.num}"]
    done = subprocess.run(line, cwd=strange, capture_output=True, text=True, timeout=500, check=False)
    assert not (strange / "ran").exists(), (strange / "ran").read_text()
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(tmp_path.glob("jobs/*/result.json"))) == 2

"""For every test: one thread, none of the user's settings, a cache of the session's own."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

USERS = ("DATASET_DIR", "OUTPUT_DIR", "NUM_STEPS", "SPEECHTRAIN_ALLOW_TARGETS", "HYDRA_FULL_ERROR")


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "a choice of device; tests/device trains on it; without, on the CPU"
    parser.addoption("--device", help=help)


def pytest_configure(config: pytest.Config) -> None:
    # before torch is imported, in children too: results at a fixed number of threads, and no
    # threads that spin while they wait for a core which another test has
    os.environ["OMP_NUM_THREADS"] = "1"
    # a folder for temporary files of each process's own: what another test leaves there is not this one's
    tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="speechtrain-tests-")
    # at exit, after multiprocessing's own clean-up of its folder in it, which is registered later
    atexit.register(shutil.rmtree, os.environ["TMPDIR"], ignore_errors=True)
    os.environ["SPEECHTRAIN_CACHE"] = os.path.join(os.environ["TMPDIR"], "cache")
    for name in USERS:
        os.environ.pop(name, None)


SLOW = (
    "integration",
    "device",
    "test_packaging.py",
    "test_sharding.py",
    "test_train_fuzz.py",
    "test_worker.py",
)
"""Folders and files that `make test-fast` leaves out."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if set(SLOW) & set(item.path.parts):
            item.add_marker(pytest.mark.slow)


# the same examples every time: a suite that passed passes again
settings.register_profile("suite", derandomize=True, deadline=None)
settings.load_profile("suite")


KEPT_PROCESSES = ("starting.py", "pretraining.py", "multiprocessing", "torch/_inductor", "/usr/sbin/sshd")
"""In the command lines of processes that serve all tests: what runs are forked from, Python's own helpers."""
KEPT_FILES = ("cache", "pytest-of-", "started-", "pymp-", "torchinductor_", "torchelastic_", "ompi.")
"""The last two are those of torchrun and Open MPI, which leave them there."""
SET_BY_OTHERS = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "PATH")
"""Environment variables that libraries set once; PATH by audioread, which lhotse tries last."""
PATIENCE_SECONDS = 10.0


def _children() -> set[int]:
    """Processes below this one that are still running, those that serve all tests left out."""
    found = set()
    for child in psutil.Process().children(recursive=True):
        try:
            line = " ".join(child.cmdline())
            if child.status() != psutil.STATUS_ZOMBIE and not any(name in line for name in KEPT_PROCESSES):
                found.add(child.pid)
        except psutil.NoSuchProcess:
            continue
    return found


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.daemon}


def _files() -> set[str]:
    return {p.name for p in Path(tempfile.gettempdir()).iterdir() if not p.name.startswith(KEPT_FILES)}


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail a test that leaves a process, a thread, an environment variable or a temporary file behind."""
    environment, processes, threads, files = dict(os.environ), _children(), _threads(), _files()
    yield
    changed = {
        name
        for name in environment.keys() | os.environ.keys()
        if name not in SET_BY_OTHERS and environment.get(name) != os.environ.get(name)
    }
    os.environ.clear()
    os.environ.update(environment)
    assert not changed, f"environment variables left changed: {sorted(changed)}"
    begun = time.monotonic()
    while left := [*(_children() - processes), *(_threads() - threads)]:
        assert time.monotonic() - begun < PATIENCE_SECONDS, f"processes or threads left behind: {left}"
        time.sleep(0.05)
    assert not (left_files := _files() - files), f"temporary files left behind: {sorted(left_files)}"

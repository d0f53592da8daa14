"""For every test: one thread, none of the user's settings, a cache of the session's own."""

from __future__ import annotations

import atexit
import compileall
import gc
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import settings

from tests.support import parsed_once

ROOT = Path(__file__).resolve().parents[1]
DONT_WRITE_BYTECODE = sys.dont_write_bytecode
SLOW_FOLDERS = ("attacks", "contract", "device", "integration", "unit/interop", "unit/tools")
"""Below tests/: all tests in them are slow."""
USERS = ("DATASET_DIR", "OUTPUT_DIR", "NUM_STEPS", "SPEECHTRAIN_ALLOW_TARGETS", "HYDRA_FULL_ERROR")


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "a choice of device; tests/device trains on it; without, on the CPU"
    parser.addoption("--device", help=help)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return the number of processes for ``-n auto``: three for two cores.

    Tests of real runs wait for logins, restarts and limits, while another process computes. A test of
    ``test_deadlock.py`` takes 27 s, of which the processor works 15 s.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(2, cores * 3 // 2)


def pytest_configure(config: pytest.Config) -> None:
    # A child process under PYTHONDONTWRITEBYTECODE would compile the package again, which takes 0.2 s.
    if not hasattr(config, "workerinput"):
        for folder in ("speechtrain", "launchers"):
            compileall.compile_dir(ROOT / folder, quiet=2)
    # The same holds for the test modules, whose assertions pytest rewrites in 9 s for each of its processes.
    sys.dont_write_bytecode = False
    gc.disable()  # Until the end of the collection, in which nearly all objects stay.
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
    os.environ["SPEECHTRAIN_DEVICE"] = "cpu"  # of every command of the suite that chooses no device


parsed_once.install()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the slow folders, and mix files that wait with files that compute."""
    for item in items:
        if any(item.path.is_relative_to(ROOT / "tests" / name) for name in SLOW_FOLDERS):
            item.add_marker(pytest.mark.slow)
    _mix(items)


def _mix(items: list[pytest.Item]) -> None:
    """Put four CPU-bound files after each file of tests/integration.

    The tests of these files wait half of their time. If they ran one after another, all processes would wait.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    cpu_paths = [path for path in files if path.parent.name != "integration"]
    order = []
    for path in files:
        if path.parent.name == "integration":
            order += [path, *cpu_paths[:4]]
            del cpu_paths[:4]
    items.clear()
    for path in [*order, *cpu_paths]:
        items += files[path]


def pytest_collection_finish() -> None:
    """Exempt modules and collected tests from garbage collection, since they live as long as the process."""
    sys.dont_write_bytecode = DONT_WRITE_BYTECODE
    gc.collect()
    gc.freeze()
    gc.enable()


# the same examples every time: a suite that passed passes again
settings.register_profile("suite", derandomize=True, deadline=None)
settings.load_profile("suite")


class Disk:
    """A file system of its own that a test fills, by bytes or by the number of its files."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def mount(self, options: str) -> None:
        """Mount it, or mount it anew with other options. Raises OSError where that is not permitted."""
        line = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.path)]
        try:
            subprocess.run(line, check=True, capture_output=True, text=True)
        except subprocess.CalledProcessError as error:
            raise OSError(error.stderr.strip()) from None

    def fill(self, left: int) -> None:
        """Fill it but for ``left`` bytes; a second call changes how many are left."""
        self.free()
        free = os.statvfs(self.path)
        with (self.path / "filler").open("wb") as file:
            if (size := free.f_bavail * free.f_frsize - left) > 0:
                os.posix_fallocate(file.fileno(), 0, size)

    def free(self) -> None:
        """Give the space back."""
        (self.path / "filler").unlink(missing_ok=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A file system in memory, of 400 MiB; the test is skipped where mounting one is not permitted."""
    found = Disk(tmp_path / "disk")
    found.path.mkdir()
    try:
        found.mount("size=400m")
    except OSError as error:
        pytest.skip(f"a file system in memory cannot be mounted here: {error}")
    yield found
    subprocess.run(["umount", "--lazy", str(found.path)], check=True)


KEPT_PROCESSES = (
    "starting.py",
    "multiprocessing",
    "torch/_inductor",
    "/usr/sbin/sshd",
)
"""In the command lines of processes that serve all tests: what runs are forked from, Python's own helpers."""
KEPT_FILES = (
    "cache",
    "state",
    "speechtrain-cores-",
    "pytest-of-",
    "started-",
    "pymp-",
    "torchinductor_",
    "ompi.",
)
"""The last are those of Open MPI, which leaves them there."""
SET_BY_OTHERS = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "PATH")
"""Environment variables that libraries set once; PATH by audioread, which lhotse tries last."""
PATIENCE_SECONDS = 10.0


def _children() -> set[int]:
    """Processes below this one that are still running, those that serve all tests left out."""
    found: set[int] = set()
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return found  # At once: psutil reads a file of every process of the machine.
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
    names = set()
    for path in Path(tempfile.gettempdir()).iterdir():
        # Up to torch 2.8, an import of torch.distributed.nn makes a folder for the life of its process. The
        # compiler's processes outlive a test.
        is_of_torch = (path / "_remote_module_non_scriptable.py").exists()
        if not path.name.startswith(KEPT_FILES) and not is_of_torch:
            names.add(path.name)
    return names


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


@pytest.fixture(autouse=True)
def fp32_matmul() -> Iterator[None]:
    """Restore torch's precision of fp32 matmuls, which a run in this process sets (``device.matmul``)."""
    import torch  # after ``pytest_configure`` has set the number of threads

    precision, allow_tf32 = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = allow_tf32

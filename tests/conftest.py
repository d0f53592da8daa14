"""For every test: one thread, none of the user's settings, a cache of the session's own."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest
from hypothesis import settings

USERS = ("DATASET_DIR", "OUTPUT_DIR", "NUM_STEPS", "SPEECHTRAIN_ALLOW_TARGETS", "HYDRA_FULL_ERROR")


def pytest_addoption(parser: pytest.Parser) -> None:
    choices = ("cpu", "cuda", "hpu", "ipex", "lazy")
    parser.addoption("--device", choices=choices, help="tests/device trains on it; without, on the CPU")


def pytest_configure(config: pytest.Config) -> None:
    # before torch is imported, in children too: results at a fixed number of threads, and no
    # threads that spin while they wait for a core which another test has
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["SPEECHTRAIN_CACHE"] = tempfile.mkdtemp(prefix="speechtrain-tests-")
    for name in USERS:
        os.environ.pop(name, None)


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(os.environ["SPEECHTRAIN_CACHE"], ignore_errors=True)


# the same examples every time: a suite that passed passes again
settings.register_profile("suite", derandomize=True, deadline=None)
settings.load_profile("suite")

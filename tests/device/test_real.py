"""Both models on a device, against the CPU's golden losses: ``pytest --device NAME tests/device``.

Masks and noise are drawn on the host, dropout and augmentation are off, so the losses are comparable.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from speechtrain.devices.base import Device
from speechtrain.start.compose import compose
from speechtrain.start.run_config import part_of
from tests.support.parity import IN_BF16, RECIPES, STEPS, golden, losses

FP32 = 1e-4  # relative band of a step's loss against the CPU's in fp32
# of most steps and of each one: a chip's bf16 may choose another code for a frame, which moves that step
BF16_MEDIAN, BF16_WORST = 5e-3, 3e-2

_OPEN = """
import sys
from speechtrain.start.compose import compose
from speechtrain.errors import MachineError
from speechtrain.start.run_config import part_of
device = part_of(compose([f"device={sys.argv[1]}"], None), "device").build()
try:
    device.check(1)
    device.open(0)
except MachineError as error:
    print(error)
"""


@cache
def missing(name: str) -> str:
    """Why ``name`` cannot be had here; empty where it can.

    Asked in a process of its own, before whose Python the device's environment stands; it gives the
    chip back, which on some devices only one process may hold.
    """
    environment = {**device_of(name).environment(1), **os.environ}
    done = subprocess.run(
        [sys.executable, "-c", _OPEN, name],
        capture_output=True, text=True, timeout=300, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def device_of(name: str) -> Device:
    device: Device = part_of(compose([f"device={name}"], None), "device").build()
    return device


@pytest.fixture(scope="module")
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.config.getoption("--device") or "cpu"
    if reason := missing(name):
        pytest.skip(reason)
    return name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("real")


@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_equal_the_cpus(folder: Path, device: str, recipe: str) -> None:
    expected, got = golden(recipe), losses(folder, recipe, device, "fp32")
    assert len(set(expected["train"].values())) == STEPS  # it learns something in each
    assert got.keys() == expected.keys()
    for event, by_step in expected.items():
        assert got[event] == pytest.approx(by_step, rel=FP32), event


@pytest.mark.parametrize("recipe", RECIPES)
def test_bf16_stays_within_its_band(folder: Path, device: str, recipe: str) -> None:
    if not device_of(device).supports(torch.bfloat16):
        pytest.skip(f"device={device} does not train in bf16")
    if device not in IN_BF16 and (why := device_of(device).precision_fallback_reason(torch.bfloat16)):
        pytest.skip(f"device={device}: {why}")
    expected, got = golden(recipe)["train"], losses(folder, recipe, device, "bf16")["train"]
    assert got == pytest.approx(expected, rel=BF16_WORST)
    assert statistics.median(abs(got[step] / loss - 1) for step, loss in expected.items()) < BF16_MEDIAN
    assert got != pytest.approx(expected, rel=1e-7)  # bf16 it was

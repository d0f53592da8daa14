"""Both models on a device, against the CPU's golden losses: ``pytest --device NAME tests/device``.

Masks and noise are drawn on the host, dropout and augmentation are off, so the losses are comparable.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from speechtrain.config.build import build
from speechtrain.devices.base import Device
from speechtrain.runs.compose import compose

pytestmark = pytest.mark.slow

STEPS = 50
SHAPES = "data.shapes=1"  # devices with static shapes need it, and the CPU's batches must be the same
COMMON = [
    *("augment=none", "tracking=jsonl", "data.workers=0", "trainer.log_every=1", "schedule=constant"),
    *("trainer.max_epochs=null", f"trainer.max_steps={STEPS}", f"trainer.validate_every={STEPS}"),
    *("data.batch.count=2", "data.train.utterances=24", "data.valid.unheard.utterances=2"),
    *("data.max_seconds=4", SHAPES),
]
RECIPES = {
    "rnnt": [
        *("recipe=demo", "encoder.hidden=32", "encoder.features.mels=20", "model.prediction.hidden=32"),
        *("model.prediction.embedding=16", "model.joint.hidden=32", "decoder.max_symbols=30"),
        *("encoder.dropout=0", "model.prediction.dropout=0", "model.joint.dropout=0"),
        *("encoder.features.dither=0", "augment.warp=0", "schedule.warmup_steps=60"),
    ],
    "wav2vec2": [
        *("model=wav2vec2_small", "data=digits", "model.target_dropout=0", "model.host_noise=true"),
        *("model.fixed_width=true", "encoder.width=64", "encoder.layers=2", "encoder.feed_forward=128"),
        "schedule.warmup_steps=100",
        "encoder.conv_layers=[[16,10,5],[16,3,2],[32,3,2],[32,3,2],[32,3,2],[64,2,2],[64,2,2]]",
    ],
}
FP32 = 1e-4  # relative band of a step's loss against the CPU's in fp32
# of most steps and of each one: a chip's bf16 may choose another code for a frame, which moves that step
BF16_MEDIAN, BF16_WORST = 5e-3, 3e-2
IN_BF16 = {"cpu": ["device.bf16=software"]}  # whatever the chip
PLAIN = {"cpu": ["device.autotune=false"], "ipex": ["device.autotune=false"]}  # torch's own kernels
GOLDEN = Path(__file__).resolve().parents[1] / "golden"  # written by make.py beside them

_OPEN = """
import sys
from speechtrain.runs.compose import compose
from speechtrain.config.build import build
from speechtrain.errors import MachineError
device = build(compose([f"device={sys.argv[1]}"], None), "device")
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
    device: Device = build(compose([f"device={name}"], None), "device")
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


def losses(folder: Path, recipe: str, device: str, precision: str) -> dict[str, dict[int, float]]:
    """Of each step, and of the validation at the end, by event; the same run is made once."""
    run = folder / f"{recipe}-{device}-{precision}"
    if not run.exists():
        command = [sys.executable, "-m", "speechtrain.commands.train", *RECIPES[recipe], *COMMON]
        chosen = [*PLAIN.get(device, []), *(IN_BF16.get(device, []) if precision == "bf16" else [])]
        done = subprocess.run(
            [*command, f"device={device}", f"precision={precision}", *chosen, f"run_dir={run}"],
            capture_output=True, text=True, timeout=900, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    found: dict[str, dict[int, float]] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "loss" in record:
            found.setdefault(record["event"], {})[record["step"]] = record["loss"]
    return found


def golden(recipe: str) -> dict[str, dict[int, float]]:
    """The CPU's in fp32."""
    found: dict[str, dict[int, float]] = {}
    for line in (GOLDEN / f"parity_{recipe}.txt").read_text().splitlines()[1:]:
        event, step, loss = line.split()
        found.setdefault(event, {})[int(step)] = float(loss)
    return found


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

"""The device that ``pytest --device cuda|hpu|ipex`` names: it opens, trains, and agrees with the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from speechtrain.commands.composition import compose
from speechtrain.config import build
from speechtrain.devices.base import Device

SAME = [
    *(
        "recipe=demo",
        "augment=none",
        "tracking=jsonl",
        "data.workers=0",
        "data.shapes=2",
        "data.batch.count=4",
    ),
    *("data.train.utterances=24", "data.valid.unheard.utterances=4", "trainer.log_every=1"),
    *("trainer.max_epochs=null", "trainer.max_steps=8", "trainer.validate_every=8", "schedule=constant"),
    *("encoder.hidden=32", "encoder.dropout=0", "encoder.features.mels=20", "encoder.features.dither=0"),
    *("model.prediction_hidden=32", "model.prediction_embedding=16", "model.prediction_dropout=0"),
    *("model.joint_hidden=32", "model.joint_dropout=0", "model.max_symbols=30"),
]


@pytest.fixture
def choice(request: pytest.FixtureRequest) -> str:
    """What ``--device`` says; the tests are skipped without it."""
    named: str | None = request.config.getoption("--device")
    if named is None:
        pytest.skip("no --device cuda|hpu|ipex: nothing of a real one is tested")
    return named


def losses(choice: str, folder: Path, *overrides: str) -> list[float]:
    """Of every step of a run on a device, in ``folder``."""
    command = [sys.executable, "-m", "speechtrain.commands.train", f"device={choice}", *SAME, *overrides]
    done = subprocess.run(
        [*command, f"run_dir={folder}"], capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["event"] == "train"]


def test_it_opens_and_computes(choice: str) -> None:
    device: Device = build(compose([f"device={choice}"], None), "device")
    os.environ.update({k: v for k, v in device.environment(1).items() if k not in os.environ})
    device.check(1)
    device.open(0)
    weight = device.tensor(torch.ones(64, 64)).requires_grad_()
    (weight @ weight).sum().backward()
    device.mark()
    device.synchronize()
    assert weight.grad is not None
    assert weight.grad.cpu().eq(128).all()
    assert device.memory() > 0


@pytest.mark.parametrize(("precision", "within"), [("fp32", 1e-4), ("bf16", 0.05)])
def test_losses_are_those_of_the_cpu(choice: str, precision: str, within: float, tmp_path: Path) -> None:
    plain = losses("cpu", tmp_path / "cpu", "precision=fp32", "device.matmul=highest", "device.threads=1")
    found = losses(choice, tmp_path / choice, f"precision={precision}")
    assert len(found) == 8
    assert found == pytest.approx(plain, rel=within)

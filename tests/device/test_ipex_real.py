"""Intel's extension itself, where it is installed (``make test-ipex``): checkpoints go both ways."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from speechtrain.devices.ipex import IPEX
from speechtrain.errors import MachineError

try:
    IPEX().open(0)
except MachineError as error:
    pytest.skip(str(error), allow_module_level=True)


COMMON = [
    *("device.threads=1", "device.matmul=highest", "tracking=jsonl", "data.workers=0", "trainer.log_every=1"),
    *("trainer.max_epochs=null", "trainer.save_every=2", "schedule=constant", "data.batch.count=4"),
    *("data.train.utterances=24", "data.valid.unheard.utterances=4"),
]
RNNT = [
    *("recipe=demo", "encoder.hidden=32", "encoder.features.mels=20", "model.prediction.hidden=32"),
    *("model.prediction.embedding=16", "model.joint.hidden=32", "decoder.max_symbols=30"),
]
WAV2VEC2 = ["model=wav2vec2_small", "data=digits"]


class Run:
    """One run directory, continued on one device after the other."""

    def __init__(self, folder: Path, overrides: list[str]) -> None:
        self.folder = folder
        self.overrides = [*COMMON, *overrides, f"run_dir={folder}"]

    def train(self, device: str, steps: int) -> dict[int, float]:
        """Train up to ``steps`` on ``device``; the losses so far."""
        command = [sys.executable, "-m", "speechtrain.commands.train", *self.overrides]
        done = subprocess.run(
            [*command, f"device={device}", f"trainer.max_steps={steps}", f"trainer.validate_every={steps}"],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        records = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return {r["step"]: r["loss"] for r in records if r["event"] == "train"}


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert os.environ["SPEECHTRAIN_CACHE"]


@pytest.mark.parametrize("overrides", [RNNT, WAV2VEC2], ids=["rnnt", "wav2vec2"])
def test_a_model_trains_and_its_checkpoint_goes_both_ways(tmp_path: Path, overrides: list[str]) -> None:
    plain = Run(tmp_path / "plain", overrides).train("cpu", 6)
    mixed = Run(tmp_path / "mixed", overrides)
    mixed.train("ipex", 2)
    mixed.train("cpu", 4)
    losses = mixed.train("ipex", 6)
    assert losses.keys() == plain.keys()
    # a code of wav2vec 2.0 may turn on the last digit, so a wrong weight must show by more than that
    assert losses == pytest.approx(plain, rel=1e-2)


def test_weights_stay_plain_and_averages_work() -> None:
    device = IPEX()
    module = torch.nn.ModuleDict({"lstm": torch.nn.LSTM(8, 16), "linear": torch.nn.Linear(16, 16)})
    before = {name: value.clone() for name, value in module.state_dict().items()}
    optimizer = torch.optim.AdamW(module.parameters(), 1e-3)
    prepared, _ = device.prepare(module, optimizer)
    after = prepared.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert {p.dtype for p in prepared.parameters()} == {torch.float32}
    assert {n: p.data_ptr() for n, p in prepared.named_parameters()} == {
        n: v.data_ptr() for n, v in after.items()
    }

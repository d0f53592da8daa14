"""The whole step of each family of models on a device without kernels, by the policies of CUDA and Gaudi."""

from __future__ import annotations

from pathlib import Path

import pytest

from speechtrain.rank import fake_step
from tests.support.planted import ROOT, Fault, plant, run_module

if fake_step.absence():
    pytest.skip(fake_step.absence(), allow_module_level=True)
pytestmark = pytest.mark.slow

LINES = [
    "model=rnnt device=cuda encoder=fastconformer_large",
    "model=rnnt_mlperf device=hpu precision=bf16",
    "model=rnnt_small device=hpu precision=bf16 encoder=contextnet_small",
    "model=rnnt_small device=cuda precision=bf16",
    "model=ctc device=cuda encoder=quartznet_tiny",
    "model=wav2vec2 device=cuda",
    "model=wav2vec2_small device=hpu precision=bf16",
    "model=wav2vec2_large device=cuda",
]
FAULTS = [
    Fault(
        "a table of numpy in a device operation",
        "features/augment.py",
        "        is_valid = torch.arange(samples, device=audio.device) < lengths[:, None]\n",
        "        import numpy as np\n\n"
        "        is_valid = torch.from_numpy(np.arange(samples)) < lengths[:, None]  # planted\n",
    ),
    Fault(
        "a tensor that is no buffer",
        "encoders/wav2vec2.py",
        "        x = self.input_dropout(self.projection(features))\n",
        "        self.table = getattr(self, 'table', None)\n"
        "        self.table = torch.ones(self.width) if self.table is None else self.table\n"
        "        x = self.input_dropout(self.projection(features)) * self.table  # planted\n",
    ),
]


def test_run_the_whole_step_of_each_family() -> None:
    process = run_module(ROOT, "tests.support.fake_steps", *LINES)
    results = process.stdout.splitlines()
    assert results == ["ok"] * len(LINES), process.stderr[-2000:]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_run_names_the_line_of_a_host_tensor(fault: Fault, tmp_path: Path) -> None:
    folder, number = plant(fault, tmp_path)
    model = "wav2vec2_small" if "wav2vec2" in fault.file else "rnnt_small encoder=lstm_small"
    lines = [f"model={model} device={device}" for device in ("cuda", "hpu")]
    process = run_module(folder, "tests.support.fake_steps", *lines)
    results = process.stdout.splitlines()
    assert len(results) == 2, process.stderr[-2000:]
    for result in results:
        assert f"{fault.file}:{number}" in result

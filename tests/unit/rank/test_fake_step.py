"""The whole step of every model at full width on a device without kernels, by CUDA's and Gaudi's policy."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from speechtrain.rank import fake_step
from tests.support.planted import ROOT, Fault, plant, run_module

if fake_step.absence():
    pytest.skip(fake_step.absence(), allow_module_level=True)
pytestmark = pytest.mark.slow

CONF = ROOT / "conf"
DEVICES = ["cuda", "hpu"]
GROUPS = ("model", "encoder", "prediction")


def choices_of_recipe(name: str) -> dict[str, str]:
    """Return the choice of each group that a recipe or its bases override."""
    choices: dict[str, str] = {}
    for entry in (yaml.safe_load((CONF / f"recipe/{name}.yaml").read_text()) or {}).get("defaults", []):
        if isinstance(entry, dict):
            ((group, choice),) = entry.items()
            choices[group.removeprefix("override /")] = choice
        elif entry != "_self_":
            choices |= choices_of_recipe(entry)
    return choices


def networks() -> list[str]:
    """Return the choices of each model and of each recipe's network."""
    lines = {f"model={path.stem}" for path in CONF.glob("model/[!_]*.yaml")}
    lines.discard("model=rnnt_small")  # the second name of model=rnnt
    for path in CONF.glob("recipe/[!_]*.yaml"):
        choices = choices_of_recipe(path.stem)
        line = " ".join(f"{group}={choices[group]}" for group in GROUPS if group in choices)
        if line and "finetuned" not in line:  # It means the network of another run.
            lines.add(line)
    return sorted(lines)


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


def test_run_the_whole_step_of_every_model() -> None:
    lines = [f"{network} precision=bf16 device={device}" for network in networks() for device in DEVICES]
    assert len(lines) >= 24
    # These keys read lengths on devices without static shapes, and the fake device has no values.
    lines.append("model=rnnt_small encoder=lstm_small model.joint_rows=1 device=cuda")
    lines.append("model=rnnt_small encoder=lstm_small encoder.split_segments=true device=cuda")
    process = run_module(ROOT, "tests.support.fake_steps", *lines)
    results = process.stdout.splitlines()
    assert results == ["ok"] * len(lines), process.stderr[-2000:]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_run_names_the_line_of_a_host_tensor(fault: Fault, tmp_path: Path) -> None:
    folder, number = plant(fault, tmp_path)
    model = "wav2vec2_small" if "wav2vec2" in fault.file else "rnnt_small encoder=lstm_small"
    lines = [f"model={model} device={device}" for device in DEVICES]
    process = run_module(folder, "tests.support.fake_steps", *lines)
    results = process.stdout.splitlines()
    assert len(results) == 2, process.stderr[-2000:]
    for result in results:
        assert f"{fault.file}:{number}" in result

"""The whole step of every model at full width on a device without kernels, by CUDA's and Gaudi's policy."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.rehearsal import planted_faults
from tests.rehearsal.planted_faults import ROOT, Fault, plant, run_program

pytestmark = pytest.mark.nightly

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


FAULTS = [fault for fault in planted_faults.FAULTS if fault.name.startswith(("F6 ", "F7 "))]
"""The faults of tensors on the host."""


def test_run_the_whole_step_of_every_model() -> None:
    lines = [f"{network} precision=bf16 device={device}" for network in networks() for device in DEVICES]
    assert len(lines) >= 24
    # These keys read lengths on devices without static shapes, and the fake device has no values.
    lines.append("model=rnnt_small encoder=lstm_small model.joint_rows=1 device=cuda")
    lines.append("model=rnnt_small encoder=lstm_small encoder.split_segments=true device=cuda")
    process = run_program(ROOT, "tests/rehearsal/fake_steps.py", *lines)
    results = process.stdout.splitlines()
    assert results == ["ok"] * len(lines), process.stderr[-2000:]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_run_names_the_line_of_a_host_tensor(fault: Fault, tmp_path: Path) -> None:
    folder, number = plant(fault, tmp_path)
    model = "wav2vec2_small" if "wav2vec2" in fault.file else "rnnt_small encoder=lstm_small"
    lines = [f"model={model} device={device}" for device in DEVICES]
    process = run_program(folder, "tests/rehearsal/fake_steps.py", *lines)
    results = process.stdout.splitlines()
    assert len(results) == 2, process.stderr[-2000:]
    for result in results:
        assert f"{fault.file}:{number}" in result

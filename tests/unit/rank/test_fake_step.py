"""The whole step of every model at full width on a device without kernels, by CUDA's and Gaudi's policy."""

from __future__ import annotations

import pytest
import yaml

from speechtrain.rank import fake_step
from tests.support.planted import ROOT, run_module

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


def test_run_the_whole_step_of_every_model() -> None:
    lines = [f"{network} precision=bf16 device={device}" for network in networks() for device in DEVICES]
    assert len(lines) >= 24
    # These keys read lengths on devices without static shapes, and the fake device has no values.
    lines.append("model=rnnt_small encoder=lstm_small model.joint_rows=1 device=cuda")
    lines.append("model=rnnt_small encoder=lstm_small encoder.split_segments=true device=cuda")
    process = run_module(ROOT, "tests.support.fake_steps", *lines)
    results = process.stdout.splitlines()
    assert results == ["ok"] * len(lines), process.stderr[-2000:]

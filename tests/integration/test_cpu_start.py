"""What a run on the CPU chooses when it starts is said, kept, and taken up again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from speechtrain.compute_policy import ComputePolicy
from speechtrain.devices.cpu import CPU

from .conftest import Command
from .forked import Forks

NARROW = CPU().policy(torch.bfloat16)
has_bf16 = pytest.mark.skipif(
    bool(CPU().precision_fallback_reason(torch.bfloat16)), reason="this chip has no bf16 instructions"
)


def _precision() -> str:
    """The one that a run with precision=bf16 has here."""
    return "fp32" if CPU().precision_fallback_reason(torch.bfloat16) else "bf16"


@has_bf16
def test_the_policy_is_timed_once_and_kept_in_the_run(command: Callable[..., Command], forks: Forks) -> None:
    run = command("run", "device.autotune=true", "precision=bf16", "trainer.max_steps=2")
    assert forks.run(run.write()) == [0], run.result()
    file = run.run_dir / "device.json"
    kept = json.loads(file.read_text())
    assert ComputePolicy.from_record(kept["policy"]) is not None
    assert kept["chip"] == CPU().chip()
    assert run.events("device")[0]["chip"] == kept["chip"]
    # another choice than the timed one, and a sign that it was not timed again
    kept["policy"], kept["chip"] = replace(NARROW, lstm="layers").record(), "another chip"
    kept["computes"] = "bf16 lstm=layers"
    kept["milliseconds"] = {"fp32": 77.0}
    file.write_text(json.dumps(kept))
    run.arguments += ["trainer.max_steps=4", "device.matmul=auto"]
    assert forks.run(run.write()) == [0], run.result()
    assert json.loads(file.read_text()) == kept
    latest = run.events("device")[-1]
    assert (latest["computes"], latest["milliseconds"]) == ("bf16 lstm=layers", {"fp32": 77.0})
    assert run.result()["computes"] == "bf16 lstm=layers"
    assert any("chosen on another chip" in e["message"] for e in run.events("warning"))
    run.arguments += ["trainer.max_steps=5", "device.autotune=false"]
    assert forks.run(run.write()) == [0], run.result()
    assert json.loads(file.read_text())["policy"] != kept["policy"]


def test_the_first_command_of_the_readme_trains_in_its_precision(command: Callable[..., Command]) -> None:
    run = command("run")
    sizes = [key for key in run.arguments if key.startswith(("data.", "encoder.", "model.", "run_dir="))]
    run.arguments = ["model=rnnt", "device=cpu", "precision=bf16", "trainer.max_steps=2", *sizes]
    run.arguments.append("device.autotune=false")
    done = run.run_inline()
    assert done.returncode == 0, done.stderr
    assert run.result()["steps"] == 2
    (device,) = run.events("device")
    assert device["precision"] == _precision()


def test_bf16_is_fp32_with_one_warning_where_the_chip_has_none(
    command: Callable[..., Command], forks: Forks
) -> None:
    if not CPU().precision_fallback_reason(torch.bfloat16):
        pytest.skip("this chip computes bf16")
    runs = [command(name, f"precision={name}", "trainer.max_steps=2") for name in ("fp32", "bf16")]
    for run in runs:
        assert forks.run(run.write()) == [0], run.result()
    said = [[e["message"] for e in run.events("warning")] for run in runs]
    assert not said[0]
    assert len(said[1]) == 1
    assert said[1][0].startswith("precision=bf16: this chip has no bf16 instructions")
    assert runs[0].losses() == runs[1].losses()

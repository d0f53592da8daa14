"""What a run on the CPU chooses when it starts is said, kept, and taken up again."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from speechtrain.devices.cpu import CPU

from .conftest import Command
from .forked import Forks


def test_a_measured_choice_is_kept_in_the_run(command: Callable[..., Command], forks: Forks) -> None:
    run = command("run", "device.matmul=auto", "trainer.max_steps=2")
    assert forks.run(run.write()) == [0], run.result()
    kept = json.loads((run.run_dir / "device.json").read_text())
    assert kept["matmul"] in ("highest", "medium")
    assert run.events("device")[0].items() >= kept.items()
    kept["speedup"] = 77.0  # a sign that it was not measured again
    (run.run_dir / "device.json").write_text(json.dumps(kept))
    run.arguments.append("trainer.max_steps=4")
    assert forks.run(run.write()) == [0], run.result()
    assert run.events("device")[-1]["speedup"] == 77.0
    assert json.loads((run.run_dir / "device.json").read_text()) == kept


def test_bf16_is_fp32_with_one_warning_where_the_chip_has_none(
    command: Callable[..., Command], forks: Forks
) -> None:
    import torch

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


def test_the_forms_of_the_lstm_train_alike(command: Callable[..., Command], forks: Forks) -> None:
    runs = [command(form, f"device.lstm={form}", "trainer.max_steps=6") for form in ("fused", "loop")]
    for run in runs:
        assert forks.run(run.write()) == [0], run.result()
    fused, loop = (run.losses() for run in runs)
    assert len(fused) == 6
    assert loop == pytest.approx(fused, rel=1e-4)
    assert runs[0].weights() != runs[1].weights()  # it was another form

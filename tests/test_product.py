"""The product from end to end, by its commands: train, resume, sweep, transcribe and export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .integration.conftest import INLINE, STARTER, Command, environment, finish
from .support.digits import write_sample
from .support.tiny_run import TINY

__all__ = ["environment"]

KEYS = [
    *(key for key in TINY if not key.startswith(("encoder.", "trainer."))),
    *("encoder=fastconformer_tiny", "device.autotune=false", "tracking=jsonl", "schedule=constant"),
    *("trainer.max_epochs=null", "trainer.log_every=1", "trainer.validate_every=3"),
    "optimizer.lr=1e-4",  # With the default, a network of six updates writes no text.
]


def run_of(run_dir: Path, environment: dict[str, str]) -> Command:
    run = Command(run_dir, environment, [])
    run.arguments = [*KEYS, f"run_dir={run_dir}"]
    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Command:
    """Six updates of an RNN-T, whose rank is a process of its own."""
    run = run_of(tmp_path_factory.mktemp("trained") / "run", environment)
    command = run.run("trainer.max_steps=6")
    assert (command.returncode, command.stderr) == (0, "")
    return run


def test_a_run_trains_validates_and_saves(trained: Command) -> None:
    assert sorted(trained.losses()) == [1, 2, 3, 4, 5, 6]
    first, last = [event["loss"] for event in trained.events("valid")]
    assert last < 0.95 * first
    assert [path.name for path in trained.checkpoints()] == ["step-00000003", "step-00000006"]
    assert trained.result()["metrics"]["unheard/loss"] == last


def test_a_run_that_ends_early_continues_as_if_it_had_not(
    trained: Command, tmp_path: Path, environment: dict[str, str]
) -> None:
    run = run_of(tmp_path / "run", environment)
    assert run.run_inline("trainer.max_steps=4").returncode == 0
    command = run.run_inline("trainer.max_steps=6")
    assert command.returncode == 0, command.stderr
    assert len(run.events("resume")) == 1
    assert run.losses() == trained.losses()
    assert run.weights() == trained.weights()
    assert run.result()["metrics"] == trained.result()["metrics"]


def test_a_sweep_trains_each_job_and_names_those_that_fail(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    arguments = ["-m", *KEYS, "trainer.max_steps=1", "optimizer.lr=-1,1e-3,2e-3", *INLINE]
    command = finish(STARTER.start(arguments, {**environment, "OUTPUT_DIR": str(tmp_path)}))
    assert command.returncode == 2, command.stderr
    assert "1 of 3 jobs failed, first: optimizer.lr is -1" in command.stderr
    results = [json.loads(path.read_text()) for path in tmp_path.glob("*/result.json")]
    assert [result["steps"] for result in results] == [1, 1]
    assert "(best)" in command.stdout


def test_a_run_transcribes_a_recording(trained: Command, tmp_path: Path) -> None:
    write_sample(tmp_path / "a.wav")
    command = trained.tool("transcribe", str(trained.run_dir), str(tmp_path / "a.wav"), "--json")
    assert command.returncode == 0, command.stderr
    transcript = json.loads(command.stdout)
    (word,) = transcript["words"]
    assert word["word"] == transcript["text"]
    assert 0 <= word["start"] < word["end"] < transcript["seconds"] + 0.1


def test_a_run_is_exported_to_hugging_face(trained: Command, tmp_path: Path) -> None:
    """The command compares the outputs of both models."""
    pytest.importorskip("transformers")
    command = trained.tool(
        "export", str(trained.run_dir), "--to", "huggingface", "--out", str(tmp_path / "hf")
    )
    assert command.returncode == 0, command.stderr
    assert (tmp_path / "hf" / "model.safetensors").exists()

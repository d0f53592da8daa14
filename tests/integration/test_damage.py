"""Damaged checkpoints and a full disk.

A message names a damaged checkpoint, no rank loads it, and training continues from the last sound checkpoint.
"""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Command
from .forked import Forks


def truncate(folder: Path) -> None:
    path = folder / "state.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def flip(folder: Path) -> None:
    path = folder / "state.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def delete(folder: Path) -> None:
    (folder / "state.safetensors").unlink()


def half_write(folder: Path) -> None:
    """As a kill leaves it on a file system that reorders writes: the name is there, the content is not."""
    (folder / "state.safetensors").write_bytes(b"\0" * 4096)
    (folder / "checkpoint.json").write_text("{")


def test_each_damage_is_named_and_the_save_before_is_used(
    command: Callable[..., Command], forks: Forks
) -> None:
    run = command(
        "run", "trainer.max_steps=6", "trainer.save_every=2", "trainer.validate_every=6", "trainer.keep=3"
    )
    assert forks.run(run.write()) == [0], run.result()
    losses = run.losses()
    kept = run.run_dir.with_name("kept")
    shutil.copytree(run.run_dir, kept)
    for damage in (truncate, flip, delete, half_write):
        shutil.rmtree(run.run_dir)
        shutil.copytree(kept, run.run_dir)
        (run.run_dir / "result.json").unlink()
        damage(run.checkpoints()[-1])
        if damage is half_write:
            # A killed save also leaves its folder. No save of this run writes step 9, so only the cleaning of
            # leftovers removes this folder.
            (run.run_dir / "checkpoints" / ".writing-step-00000009").mkdir()
        log = run.run_dir / "stderr.log"
        log.unlink()
        assert forks.run(run.run_dir / "config.yaml") == [0], run.result()
        warnings = log.read_text()
        assert "checkpoint not loaded" in warnings
        assert "step-00000006" in warnings
        assert [e["step"] for e in run.events("resume")] == [4]
        assert run.losses() == losses, "a repeated update has another loss"
        assert run.result()["status"] == "finished"
        assert not list((run.run_dir / "checkpoints").glob(".*"))


def test_a_run_without_a_sound_checkpoint_begins_anew(command: Callable[..., Command], forks: Forks) -> None:
    settings = ["trainer.max_steps=2", "trainer.save_every=2", "trainer.validate_every=100"]
    earlier = command("earlier", *settings)
    assert forks.run(earlier.write()) == [0], earlier.result()
    run = command("run", *settings, "seed=5", f"init_from={earlier.run_dir}")
    config = run.write()
    assert forks.run(config) == [0], run.result()
    flip(run.checkpoints()[-1])
    assert forks.run(config) == [0], run.result()
    assert len(run.events("train")) == 4
    assert sorted(run.losses()) == [1, 2]
    assert [event["fresh"] for event in run.events("start")] == [0, 0]


@pytest.mark.parametrize("policy", ["continue", "stop"])
def test_a_disk_that_is_full_during_a_save(
    command: Callable[..., Command], forks: Forks, policy: str
) -> None:
    """A limit on the size of files replaces the full disk: a write fails after a part of the file."""
    run = command("run", "trainer.max_steps=2", "trainer.save_every=2", "trainer.validate_every=100")
    assert forks.run(run.write()) == [0], run.result()
    sound = run.weights()
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))\n"
        "from speechtrain.commands.train import run; from speechtrain.commands._cli import exit_code_of\n"
        "sys.exit(exit_code_of(lambda: run(sys.argv[1:])))"
    )
    assert (run.checkpoints()[0] / "model.safetensors").stat().st_size > 100_000
    line = [
        sys.executable,
        "-c",
        code,
        *run.arguments,
        "trainer.max_steps=4",
        f"trainer.on_save_error={policy}",
    ]
    done = subprocess.run(line, env=run.environment, capture_output=True, text=True, timeout=300)
    assert "checkpoint of step 4 could not be written" in done.stderr
    assert [c.name for c in run.checkpoints()] == ["step-00000002"]
    assert run.weights() == sound
    # The failure of the last save is an error with either policy.
    assert done.returncode == 4
    assert done.stderr.splitlines()[-1].startswith("speechtrain: error: checkpoint of step 4")
    assert (run.result()["status"], run.result()["exit_code"]) == ("failed", 4)
    assert run.result()["steps"] == 4
    assert run.events()[-1]["status"] == "failed"
    assert (run.run_dir / "error.log").exists()
    assert sorted(run.losses()) == [1, 2, 3, 4]
    # Without the limit, the same command continues the run.
    again = run.run_inline("trainer.max_steps=4")
    assert again.returncode == 0, again.stderr
    assert [c.name for c in run.checkpoints()][-1] == "step-00000004"
    # Only the other process had the limit. Otherwise other tests would fail in this process.
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_a_finished_run_without_its_last_checkpoint_continues(command: Callable[..., Command]) -> None:
    run = command("run", "trainer.max_steps=4", "trainer.save_every=2", "trainer.validate_every=100")
    assert run.run_inline().returncode == 0
    shutil.rmtree(run.checkpoints()[-1])
    done = run.run_inline()
    assert done.returncode == 0, done.stderr
    assert "is done" not in done.stdout
    assert [c.name for c in run.checkpoints()] == ["step-00000002", "step-00000004"]

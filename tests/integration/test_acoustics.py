"""Runs with recorded noise and rooms: killed and continued, on two ranks, and with a bad file."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile

from .conftest import RECORDED, Command, wait_for
from .forked import Forks


@pytest.fixture
def recorded(tmp_path: Path) -> list[str]:
    """The overrides of a run with three noises in two folders, one at another rate, and with a room."""
    rng = np.random.default_rng(0)
    for name, rate, count in (("a/1", 16_000, 4_000), ("a/2", 16_000, 90_000), ("b/3", 8_000, 60_000)):
        path = tmp_path / f"{name}.wav"
        path.parent.mkdir(exist_ok=True)
        soundfile.write(path, rng.normal(0.0, 0.1, count), rate)
    (tmp_path / "rooms").mkdir()
    response = rng.normal(0.0, 0.1, 2_000) * np.exp(-np.arange(2_000) / 400)
    response[50] = 1.0
    soundfile.write(tmp_path / "rooms/hall.wav", response, 16_000)
    noise = f"augment.noise=[{tmp_path / 'a'},{tmp_path / 'b'}]"
    return [noise, f"augment.rooms={tmp_path / 'rooms'}", "augment.recorded_probability=0.7"]


def kill_and_continue(run: Command, forks: Forks) -> None:
    """Kill a run after its fourth update, and continue it to its end."""
    config = run.write()
    forks.start(config)
    wait_for(lambda: any(event["step"] >= 4 for event in run.events("train")))
    os.kill(run.pid(), signal.SIGKILL)
    assert forks.wait() == [-signal.SIGKILL]
    assert forks.run(config) == [0], run.result()


def test_a_killed_run_and_two_ranks_have_the_same_audio(
    command: Callable[..., Command], forks: Forks, recorded: list[str]
) -> None:
    keys = [*RECORDED, *recorded, "trainer.max_steps=6", "trainer.validate_every=6"]
    undisturbed = command("undisturbed", *keys, "trainer.accumulate=2")
    assert forks.run(undisturbed.write()) == [0], undisturbed.result()
    assert {"noise", "rooms"} <= undisturbed.result()["data"].keys()

    killed = command("killed", *keys, "trainer.accumulate=2")
    kill_and_continue(killed, forks)
    assert killed.losses() == undisturbed.losses()
    assert killed.handed() == undisturbed.handed()
    assert killed.weights() == undisturbed.weights()

    ranks = command("ranks", *keys, "world_size=2")
    assert forks.run(ranks.write(), 2) == [0, 0], ranks.result()
    assert sorted(ranks.handed()) == sorted(undisturbed.handed())


def test_a_noise_that_cannot_be_read_ends_the_command_before_training(
    command: Callable[..., Command], tmp_path: Path, recorded: list[str]
) -> None:
    (tmp_path / "a/2.wav").write_bytes(b"RIFF")
    run = command("bad", *recorded)
    completed = run.run_inline()
    assert completed.returncode == 3, completed.stderr
    errors = [line for line in completed.stderr.splitlines() if "augment.noise" in line]
    assert len(errors) == 1
    assert f"augment.noise: unreadable: {tmp_path / 'a/2.wav'}: " in errors[0]
    assert "Repair or remove it" in errors[0]
    assert not run.events("train")

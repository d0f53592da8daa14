"""Runs with recorded noise and rooms: killed and continued, with workers and ranks, and with a bad folder."""

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

KEYS = [*RECORDED, "trainer.max_steps=8", "trainer.validate_every=4"]


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


@pytest.fixture
def undisturbed(command: Callable[..., Command], recorded: list[str]) -> Command:
    """A complete run with noise and rooms."""
    run = command("undisturbed", *KEYS, *recorded, "trainer.accumulate=2")
    completed = run.run_inline()
    assert completed.returncode == 0, completed.stderr
    return run


def test_a_killed_run_with_workers_and_two_ranks_have_the_same_audio(
    command: Callable[..., Command], forks: Forks, recorded: list[str], undisturbed: Command
) -> None:
    killed = command("killed", *KEYS, *recorded, "trainer.accumulate=2", "data.workers=1")
    config = killed.write()
    forks.start(config)
    wait_for(lambda: any(event["step"] >= 5 for event in killed.events("train")))
    os.kill(killed.pid(), signal.SIGKILL)
    assert forks.wait() == [-signal.SIGKILL]
    assert forks.run(config) == [0], killed.result()
    assert killed.losses() == undisturbed.losses()
    assert killed.handed() == undisturbed.handed()
    assert killed.weights() == undisturbed.weights()

    ranks = command("ranks", *KEYS, *recorded, "world_size=2")
    assert forks.run(ranks.write(), 2) == [0, 0], ranks.result()
    assert sorted(ranks.handed()) == sorted(undisturbed.handed())


def test_a_run_with_noise_and_rooms_says_so_in_its_result(
    command: Callable[..., Command], undisturbed: Command
) -> None:
    clean = command("clean", *KEYS, "trainer.accumulate=2")
    completed = clean.run_inline()
    assert completed.returncode == 0, completed.stderr
    equal_batches = 0
    for noisy_batch, clean_batch in zip(undisturbed.handed(), clean.handed(), strict=True):
        assert noisy_batch[:3] == clean_batch[:3]  # the address and the ids
        equal_batches += noisy_batch == clean_batch
    assert equal_batches < 4  # Without a room and noise for four recordings: 0.09^4.
    data = undisturbed.result()["data"]
    clean_data = clean.result()["data"]
    assert data.keys() - clean_data.keys() == {"noise", "rooms"}
    assert clean_data.items() <= data.items()


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

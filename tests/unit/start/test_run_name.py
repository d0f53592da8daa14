"""The name of a run's folder, and the run that a command finds in the folder of this name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from speechtrain.commands import train
from speechtrain.commands._cli import exit_code_of
from speechtrain.errors import RunError
from speechtrain.run_directory import RunLock, other_owner
from speechtrain.start.resolved import load
from speechtrain.start.run_name import run_name
from tests.support.tiny_run import TINY

CHOICES = {"model": "rnnt", "data": "manifest"}


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of runs."""
    monkeypatch.setenv("OUTPUT_DIR", str(tmp_path / "runs"))
    return tmp_path / "runs"


def test_run_name_is_that_of_the_same_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").touch()
    name = run_name(CHOICES, ["seed=1", "data.train=a.jsonl"], None)
    assert name.startswith("rnnt-manifest-")
    assert (
        run_name(CHOICES, [f"data.train={tmp_path}/a.jsonl", "trainer.max_steps=9", "seed=1"], None) == name
    )
    assert run_name(CHOICES, ["seed=2", "data.train=a.jsonl"], None) != name
    # The last value of a key counts.
    assert run_name(CHOICES, ["seed=1", "seed=2"], None) != run_name(CHOICES, ["seed=2", "seed=1"], None)


def test_run_name_depends_on_what_a_sweep_varies() -> None:
    overrides = ["trainer.max_steps=9"]
    assert run_name(CHOICES, overrides, None, ["trainer.max_steps"]) != run_name(CHOICES, overrides, None)


def test_run_name_depends_on_the_text_of_own_files(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    names = set()
    for text in ("a: 1", "a: 2"):
        (tmp_path / "model" / "mine.yaml").write_text(text)
        names.add(run_name({**CHOICES, "model": "mine"}, ["model=mine"], str(tmp_path)))
    assert len(names) == 2


def test_train_continues_the_folder_of_its_name(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [*TINY, "seed=3", "tracking=none"]
    assert train.run(command) == 0
    (run_dir,) = runs.iterdir()
    path = run_dir / "config.yaml"
    stored = path.read_text()
    _, _, content = stored.partition("\n")  # Without its digest, a file may be edited.
    path.write_text(content.replace("_target_: speechtrain.launchers.auto.Auto", "_target_: no.Launcher"))
    capsys.readouterr()
    assert train.run([*command, "trainer.max_steps=3"]) == 0
    output = capsys.readouterr()
    assert f"the same keys started {run_dir}, which continues. run_dir=NEW" in output.err
    assert f"{run_dir}: finished at step 3" in output.out
    assert load(path).launcher._target_ == "speechtrain.launchers.auto.Auto"
    assert [*runs.iterdir()] == [run_dir]
    run_dir.rename(runs / "other")
    assert train.run([*command, "dry_run=true"]) == 0
    assert f"mkdir -p {run_dir}" in capsys.readouterr().out  # A renamed run needs run_dir=.


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a file to another user")
def test_train_refuses_the_config_of_another_user(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [*TINY, "seed=4", "tracking=none"]
    assert train.run(command) == 0
    (run_dir,) = runs.iterdir()
    os.chown(run_dir / "config.yaml", 65534, 65534)
    assert exit_code_of(lambda: train.run([*command, "trainer.max_steps=3"])) == RunError.exit_code
    error = capsys.readouterr().err
    assert f"{run_dir} was started by user 65534: run_dir={run_dir} continues it" in error
    assert train.run([f"run_dir={run_dir}", "trainer.max_steps=3"]) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a folder to another user")
def test_a_folder_of_another_user_needs_an_explicit_run_dir(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    acquire = RunLock.acquire

    def acquire_of_another_user(self: RunLock) -> RunLock:
        """Another user makes the folder between the check and the start."""
        os.chown(self.path.parent, 65534, 65534)
        return acquire(self)

    assert other_owner(tmp_path) is None
    monkeypatch.setattr(RunLock, "acquire", acquire_of_another_user)
    assert exit_code_of(lambda: train.run([*TINY])) == RunError.exit_code
    assert "belongs to user 65534, who can change what it executes. run_dir=" in capsys.readouterr().err
    (run_dir,) = runs.iterdir()
    assert [path.name for path in run_dir.iterdir()] == ["lock"]
    command = [*TINY, f"run_dir={run_dir}", "launcher=local", "launcher.inline=true"]
    assert exit_code_of(lambda: train.run(command)) == 0
    assert f"{run_dir} belongs to user 65534" in capsys.readouterr().out

"""Tests that a command continues a run which it finds by its keys only if this user started the run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from speechtrain.commands import train
from speechtrain.commands._cli import exit_code_of
from speechtrain.config.resolved import dump
from speechtrain.errors import RunError
from speechtrain.run_directory import RunLock, other_owner
from speechtrain.runs.compose import compose
from speechtrain.runs.started_runs import remember, require_started, start_id, state_folder
from tests.support.tiny_run import TINY

DRY = ("recipe=demo", "seed=7", "dry_run=true")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state folder of this test, and an empty folder of runs."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("OUTPUT_DIR", str(tmp_path / "runs"))
    return tmp_path / "state" / "speechtrain"


def make_own_run(run_dir: Path) -> Path:
    """Make a run directory that this user has started, and return it."""
    run_dir.mkdir(parents=True)
    identifier = start_id(run_dir)
    (run_dir / "run.json").write_text(json.dumps({"overrides": [], "start_id": identifier}))
    remember(run_dir)
    return run_dir


def make_received_run(run_dir: Path, overrides: Sequence[str]) -> Path:
    """Make a run directory that another user has started and sent, and return it."""
    run_dir.mkdir(parents=True)
    config = compose(list(overrides))
    config.run_dir = str(run_dir)
    (run_dir / "config.yaml").write_text(dump(config))
    stored = {"argv": list(overrides), "overrides": list(overrides), "start_id": "0" * 32}
    (run_dir / "run.json").write_text(json.dumps(stored))
    return run_dir


def content_of(folder: Path) -> dict[str, bytes]:
    """Return the bytes of each file below ``folder`` by its path."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_require_started_accepts_a_run_of_this_user(tmp_path: Path, state: Path) -> None:
    run_dir = make_own_run(tmp_path / "run")
    require_started(run_dir)
    assert start_id(run_dir) == json.loads((run_dir / "run.json").read_text())["start_id"]
    assert state_folder() == state
    assert state.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in state.iterdir()] == [0o600]


@pytest.mark.parametrize("about", ["{}", "{", "[]", '{"start_id": null}', '{"start_id": "%s"}' % ("0" * 32)])
def test_require_started_refuses_another_id(tmp_path: Path, about: str) -> None:
    run_dir = make_own_run(tmp_path / "run")
    identifier = start_id(run_dir)
    (run_dir / "run.json").write_text(about)
    with pytest.raises(RunError, match=rf"^{run_dir} was started .*: run_dir={run_dir} continues it"):
        require_started(run_dir)
    assert start_id(run_dir) != identifier


def test_require_started_refuses_a_copy(tmp_path: Path) -> None:
    run_dir = make_own_run(tmp_path / "run")
    shutil.copytree(run_dir, tmp_path / "copy")
    require_started(run_dir)
    with pytest.raises(RunError, match=f"run_dir={tmp_path}/copy continues it"):
        require_started(tmp_path / "copy")


def test_remember_removes_the_files_of_runs_that_are_gone(tmp_path: Path, state: Path) -> None:
    for number in range(5):
        shutil.rmtree(make_own_run(tmp_path / f"run {number}"))
        assert len(list(state.iterdir())) == 1
    for _ in range(2):
        run_dir = make_own_run(tmp_path / "again")
        assert len(list(state.iterdir())) == 1
        require_started(run_dir)
        shutil.rmtree(run_dir)


def test_remember_says_how_to_continue_if_the_folder_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "state").write_text("a file in its place")
    run_dir = make_own_run(tmp_path / "run")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith(f": only run_dir={run_dir} continues this run")
    with pytest.raises(RunError):
        require_started(run_dir)


@pytest.mark.parametrize("has_default_name", [True, False])
@pytest.mark.parametrize("options", [(), ("resume=never",), ("hydra.job.name=x",), ("-m",)], ids=" ".join)
def test_start_jobs_refuses_a_received_run(
    options: tuple[str, ...], has_default_name: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.run([*DRY, *options]) == 0
    capsys.readouterr()
    name = run_name_of(options) if has_default_name else "any"
    run_dir = make_received_run(tmp_path / "runs" / name, DRY)
    content = content_of(tmp_path / "runs")
    assert exit_code_of(lambda: train.run([*DRY, *options])) == RunError.exit_code
    output = capsys.readouterr()
    assert output.err.count("\n") == (2 if "-m" in options else 1)  # a sweep adds a line for all its jobs
    assert f"run_dir={run_dir} continues it" in output.err
    assert "train_rank" not in output.out
    assert content_of(tmp_path / "runs") == content
    assert train.run([*DRY, f"run_dir={run_dir}"]) == 0


def run_name_of(options: tuple[str, ...]) -> str:
    """Return the name of the folder of a new run with the overrides among ``options``."""
    from speechtrain.runs.run_name import RunNames

    overrides = [*DRY, *(text for text in options if text == "resume=never")]
    return RunNames(None).name({"model": "rnnt_small", "data": "digits"}, overrides)


def test_train_continues_a_run_that_the_user_has_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*TINY, "seed=3", "tracking=none"]
    assert train.run(command) == 0
    (run_dir,) = (tmp_path / "runs").iterdir()
    capsys.readouterr()
    assert train.run(command) == 0
    assert f"{run_dir} is done" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "state")
    assert exit_code_of(lambda: train.run(command)) == RunError.exit_code
    assert train.run([f"run_dir={run_dir}", "trainer.max_steps=3"]) == 0
    capsys.readouterr()
    assert train.run(command) == 0
    assert f"{run_dir} is done: finished at step 3" in capsys.readouterr().out


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a folder to another user")
def test_a_folder_of_another_user_needs_an_explicit_run_dir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert [path.name for path in run_dir.iterdir()] == ["lock"]
    assert other_owner(run_dir) == 65534
    assert (
        exit_code_of(
            lambda: train.run([*TINY, f"run_dir={run_dir}", "launcher=local", "launcher.inline=true"])
        )
        == 0
    )
    assert f"{run_dir} belongs to user 65534" in capsys.readouterr().out

"""Tests of commands that start a run again. Numbers such as U3 are reports of users who were misled."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from speechtrain.commands import train
from speechtrain.errors import ConfigError, DataError, RunError
from speechtrain.overrides import override_with_absolute_paths
from speechtrain.run_directory import CONFIG
from speechtrain.start.command_line import read_command
from speechtrain.start.compose import compose
from speechtrain.start.resolved import dump, load
from speechtrain.start.run_name import identifying_overrides
from speechtrain.start.stored_config import set_key
from tests.support.small_training import SMALL_TRAINING, write_recordings


@pytest.fixture
def project(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with ten recordings and a shared folder of runs."""
    monkeypatch.setenv("OUTPUT_DIR", str(tmp_path / "out"))
    (tmp_path / "one").mkdir()
    monkeypatch.chdir(tmp_path / "one")
    write_recordings(Path("rec"), 10)
    return tmp_path


def start(*overrides: str) -> int:
    """Train on the recordings in ``rec``, and return the exit code."""
    return train.run([*SMALL_TRAINING, "data.train=rec", *overrides])


@pytest.mark.slow
def test_a_repeated_command_compares_recordings_limits_and_paths(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Several reports are tested with one run, because each run takes seconds."""
    schedule = Path("conf/schedule")
    schedule.mkdir(parents=True)
    (schedule / "mine.yaml").write_text("defaults: [cosine]\npeak: ${optimizer.lr}\n")
    own_schedule = ("--config-dir", "conf", "schedule=mine")
    assert start(*own_schedule) == 0
    (run_dir,) = (project / "out").iterdir()

    # U1: the user's YAML file refers to a key of another group.
    assert start(*own_schedule) == 0
    output, note = capsys.readouterr()
    assert f"{run_dir} is done: finished at step 2" in output
    assert f"the same keys started {run_dir}, which continues. run_dir=NEW starts another" in note

    # U28: resume=never for a run with checkpoints.
    with pytest.raises(RunError, match=r"resume=never, but .* holds [12] checkpoints"):
        start(*own_schedule, "resume=never")

    # U43: a limit below the updates so far.
    assert train.run([f"run_dir={run_dir}", "--config-dir", "conf", "trainer.max_steps=1"]) == 0
    assert "is done with 2 updates, so trainer.max_steps=1 adds none" in capsys.readouterr().out

    # U3: the folder has more recordings than at the end of the run.
    write_recordings(Path("rec"), 12)
    with pytest.raises(DataError, match=r"10 recordings then, 12 now.*data\.train=rec.* run_dir=NEW"):
        start(*own_schedule)

    # U4: the same command in another working folder is another run. With the same recordings, the run
    # continues there if the user names it.
    other_project = project / "two"
    write_recordings(other_project / "rec", 10)
    monkeypatch.chdir(other_project)
    assert start("dry_run=true") == 0
    assert str(run_dir) not in capsys.readouterr().out
    assert train.run([f"run_dir={run_dir}", "data.train=rec"]) == 0
    (other_project / "rec/0.txt").write_text("no")
    with pytest.raises(DataError, match=r"1 of 10 recordings differ"):
        train.run([f"run_dir={run_dir}", "data.train=rec"])


@pytest.mark.parametrize(
    ("override", "absolute"),
    [
        ("data.train=rec", "data.train=/P/rec"),
        ("data.train=./rec/", "data.train=/P/rec"),
        ("data.train=/P/rec", "data.train=/P/rec"),
        ("init_from=rec", "init_from=/P/rec"),
        ("++data.valid.dev=['rec','other']", "++data.valid.dev=['/P/rec','other']"),
        ("data.train={a: {path: rec, weight: 3}}", "data.train={a: {path: /P/rec, weight: 3}}"),
        ("recipe=rec", "recipe=rec"),
        ("data.train=other", "data.train=other"),
    ],
)
def test_paths_of_existing_files_become_absolute(override: str, absolute: str, tmp_path: Path) -> None:
    (tmp_path / "rec").mkdir()
    override, absolute = (text.replace("/P", str(tmp_path)) for text in (override, absolute))
    assert override_with_absolute_paths(override, str(tmp_path)) == absolute
    assert override_with_absolute_paths(override, "") == override


@pytest.mark.parametrize("overrides", [[], ["resume=must"], ["trainer.max_steps=9000", "dry_run=true"]])
def test_a_directory_without_a_run_is_not_continued(overrides: list[str], tmp_path: Path) -> None:
    """U6: a misspelt run_dir started a new run on the default data."""
    with pytest.raises(RunError, match=r"run holds no run .*recipe=demo"):
        train.run([f"run_dir={tmp_path / 'run'}", *overrides])
    assert list(tmp_path.iterdir()) == []


def test_a_refused_start_leaves_no_directory(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"resume=must, but .* holds 0 checkpoints"):
        train.run(["recipe=demo", f"run_dir={tmp_path / 'run'}", "resume=must"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("symbols", ["abc", "آب\u200c"])
def test_the_lines_of_a_dry_run_write_the_config_of_the_ranks(
    symbols: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """U11: the printed command named a config file that did not exist."""
    run_dir = tmp_path / "a run"
    overrides = ["tokenizer=characters", f"tokenizer.alphabet='{symbols}'", "dry_run=true"]
    assert train.run(["recipe=demo", *overrides, f"run_dir='{run_dir}'"]) == 0
    assert not run_dir.exists()
    *lines, command = capsys.readouterr().out.splitlines()
    assert command.endswith(f"-m speechtrain.rank '{run_dir / CONFIG}'")
    subprocess.run(["bash", "-ec", "\n".join(lines)], check=True)
    config = load(run_dir / CONFIG)
    assert (config.tokenizer.alphabet, config.dry_run) == (symbols, False)
    assert train.run([f"run_dir='{run_dir}'", "dry_run=true"]) == 0
    assert capsys.readouterr().out.count("\n") == 1


def test_no_two_commands_of_the_readme_have_one_run() -> None:
    """U15: the second command was refused, because it continued the run of the first."""
    line_by_identity = {}
    for line in Path(__file__).parents[3].joinpath("README.md").read_text().splitlines():
        if "speechtrain train" not in line or not line.startswith("    "):
            continue
        words = shlex.split(line.partition("speechtrain train")[2], comments=True)
        command = read_command([word for word in words if not word.startswith("allow_targets=")])
        if command.is_sweep or command.run_dir is not None or not command.overrides:
            continue
        identity = tuple(identifying_overrides(command.overrides))
        assert identity not in line_by_identity, (
            f"{line.strip()} continues the run of {line_by_identity[identity]}"
        )
        line_by_identity[identity] = line.strip()
    assert len(line_by_identity) >= 2


@pytest.mark.parametrize(
    ("override", "advice"),
    [
        ("optimizer.lr=1e-4", "starts from its weights"),
        ("augment=none", "starts from its weights"),
        ("encoder.hidden=9", "starts a new run"),
    ],
)
def test_a_refusal_has_the_command_of_another_run(override: str, advice: str, tmp_path: Path) -> None:
    """U5: the advised command for another learning rate started a run on the default data."""
    config = compose(["recipe=demo", "seed=3"])
    config.run_dir = str(tmp_path)
    (tmp_path / CONFIG).write_text(dump(config))
    about = {"argv": ["--config-dir", "conf", "recipe=demo"], "overrides": ["recipe=demo", "seed=3"]}
    (tmp_path / "run.json").write_text(json.dumps(about))
    line = f"speechtrain train --config-dir conf recipe=demo seed=3 run_dir=NEW {override}"
    expected = f"this command {advice}: {line}"
    if "weights" in advice:
        expected += f" init_from={tmp_path}"
    with pytest.raises(RunError, match=re.escape(expected) + "$"):
        train.run([f"run_dir={tmp_path}", override])


def test_set_key_sets_a_key_of_a_launcher_without_value() -> None:
    config = compose(["launcher=kubernetes"])
    set_key(config, "launcher.image", "registry.example/speechtrain:1")
    assert config.launcher.image == "registry.example/speechtrain:1"
    with pytest.raises(ConfigError, match=r"launcher\.imag: the run's config has no such key"):
        set_key(config, "launcher.imag", "x")

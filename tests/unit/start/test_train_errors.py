"""Tests of wrong commands: an error of one line with key and fix, the exit code, and no file is left."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from speechtrain.commands import train
from speechtrain.commands._cli import exit_code_of
from speechtrain.run_directory import RunLock
from speechtrain.start import start as launching
from speechtrain.start.targets import ALLOW_TARGETS

from ...integration.conftest import INLINE, STARTER, finish

CONFIG, DATA, MACHINE, RUN = 2, 3, 4, 5
DRY = "dry_run=true"


@pytest.fixture(autouse=True)
def _empty_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (ALLOW_TARGETS, "NUM_STEPS", "OUTPUT_DIR", "DATASET_DIR"):
        # The two calls make monkeypatch restore the variable, even if the command sets it.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def _run(*argv: str) -> int:
    """Return the exit code of a training command."""
    return exit_code_of(lambda: train.run(list(argv)))


def _error(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    """Return the exit code of a training command and the text of its error, which must be one line."""
    capsys.readouterr()
    code = _run(*argv)
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    assert error.startswith("speechtrain: error: ")
    return code, error.removeprefix("speechtrain: error: ").strip()


# Arguments of a command, its exit code, and texts in its error.
WRONG_COMMANDS = [
    # keys
    (["dryrun=true"], CONFIG, ["dryrun", "did you mean 'dry_run'"]),
    (["trainer.max_stpes=5"], CONFIG, ["trainer.max_stpes", "'trainer.max_steps'"]),
    (["optimizer.lrr=3"], CONFIG, ["optimizer.lrr", "'optimizer.lr'"]),
    (["trainer.devices=2"], CONFIG, ["trainer.devices", "'world_size'"]),
    (["++encoder.features.melz=3"], CONFIG, ["encoder.features.melz", "LogMel", "'mels'"]),
    (["+foo=1"], CONFIG, ["foo", "--cfg job"]),
    (["+model.joint.hidden=3"], CONFIG, ["without the +"]),
    (["~optimizer.lr"], CONFIG, ["schedule.peak", "optimizer.lr"]),
    (["~model._target_"], CONFIG, ["model=NAME"]),
    (["hydra.foo=1"], CONFIG, ["hydra.foo"]),
    # groups and choices
    (["model=rnntt"], CONFIG, ["model=rnntt", "did you mean 'rnnt'", "rnnt_small"]),
    (["modl=rnnt"], CONFIG, ["modl", "'model'"]),
    (["+model=rnnt_small"], CONFIG, ["model", "without a +"]),
    (["precision=16"], CONFIG, ["precision=16: a group takes a name: auto, bf16, fp16, fp32"]),
    (["model={a: 1}"], CONFIG, ["model is a group"]),
    # a base YAML is not a choice
    (
        ["model=_rnnt"],
        CONFIG,
        ["model=_rnnt: a base YAML is not a choice", "choose bestrq, ctc, rnnt, "],
    ),
    (["-m", "model=ctc,_rnnt"], CONFIG, ["model=_rnnt: a base YAML", "ctc, rnnt, "]),
    (["+recipe@data='_mine'"], CONFIG, ["recipe=_mine: a base YAML", "demo"]),
    (["-m", "hydra/launcher=nosuch"], CONFIG, ["hydra/launcher=nosuch", "basic"]),
    (["hydra/launcher=joblib"], CONFIG, ["hydra/launcher=joblib", "Add -m"]),
    # values
    (["trainer.max_steps=abc"], CONFIG, ["trainer.max_steps", "'abc'", "is not an integer"]),
    (["trainer.max_epochs=null"], CONFIG, ["nothing ends this run"]),
    (["trainer.ema=1"], CONFIG, ["trainer.ema"]),
    (["trainer.clip=many"], CONFIG, ["trainer.clip: 'many' is not a number"]),
    (["--max_steps", "5"], CONFIG, ["unknown option --max_steps: write trainer.max_steps=VALUE"]),
    (
        ["launcher=slurm", "launcher.time=12h", "run_dir=r"],
        CONFIG,
        ["launcher.time=12h: write it"],
    ),
    (["trainer.clip=-1"], CONFIG, ["trainer.clip"]),
    (["trainer.profile=5:2"], CONFIG, ["trainer.profile", "A:B"]),
    (["world_size=0"], CONFIG, ["world_size=0"]),
    (["world_size=2", "launcher=local"], CONFIG, ["world_size=2", "launcher=torchrun"]),
    (["seed=1,2"], CONFIG, ["seed=1,2", "-m"]),
    (["seed=${foo}"], CONFIG, ["seed", "foo"]),
    (["seed=${oc.env:NOPE}"], CONFIG, ["seed", "NOPE"]),
    (["resume=perhaps"], CONFIG, ["auto, never or must"]),
    (["model.joint.hidden=-5"], CONFIG, ["model"]),
    (["optimizer.betas=[0.9]"], CONFIG, ["optimizer", "two numbers"]),
    (["optimizer.lr=nan"], CONFIG, ["optimizer.lr", "finite"]),
    # what must be given, and what must exist
    (["data.train=a.jsonl", "data.valid.dev=b.jsonl"], CONFIG, ["data=digits validates on", "data=manifest"]),
    (["tokenizer=huggingface"], CONFIG, ["tokenizer.model is not set", "tokenizer.model="]),
    (
        ["tokenizer=sentencepiece", "tokenizer.model=/no/x.model"],
        DATA,
        ["/no/x.model", "speechtrain prepare"],
    ),
    (["device=hpu", "data.shapes=0", DRY], CONFIG, ["data.shapes=0", "Set data.shapes=8"]),
    (["precision=fp16", "device=cpu"], MACHINE, ["precision=fp16", "precision=bf16"]),
    (["--config-dir", "/no/such"], CONFIG, ["/no/such"]),
    # syntax and options
    (["trainer.max_steps"], CONFIG, ["trainer.max_steps=VALUE"]),
    (["=3"], CONFIG, ["=3"]),
    ([""], CONFIG, ["KEY=VALUE"]),
    (["model='rnnt"], CONFIG, ["model='rnnt"]),
    (["--multirunn"], CONFIG, ["'--multirun'"]),
    (["--config-name", "x"], CONFIG, ["--config-name", "--config-dir DIR recipe=NAME"]),
    (["--experimental-rerun", "x"], CONFIG, ["--experimental-rerun", "speechtrain train RUN continues"]),
    (["--hydra-help"], CONFIG, ["--hydra-help", "--cfg hydra"]),
    (["hydra.verbose=true"], CONFIG, ["hydra.verbose", "--info=all"]),
    (["device=gpu"], CONFIG, ["device=gpu", "did you mean 'cuda'"]),
    (["optimizer.learning_rate=1"], CONFIG, ["did you mean 'optimizer.lr'"]),
    (["--cfg", "foo"], CONFIG, ["foo", "job"]),
    # classes
    (["model._target_=os.system"], CONFIG, ["model._target_", "os.system", "allow_targets=os"]),
    (["optimizer._target_=torch.optim.optimizer.torch.nn.Linear"], CONFIG, ["torch.nn", "not allowed"]),
    (["model._target_=speechtrain.errors.nearest"], CONFIG, ["is not a class"]),
    (["model._target_=speechtrain.devices.cpu.CPU"], CONFIG, ["CPU does not implement Task"]),
    (["model._target_=speechtrain.models.rnnt.RNNTT"], CONFIG, ["did you mean 'RNNT'"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "code", "texts"), WRONG_COMMANDS, ids=[" ".join(w[0]) or "empty" for w in WRONG_COMMANDS]
)
def test_a_wrong_command_has_one_line_and_leaves_no_file(
    argv: list[str], code: int, texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not argv[-1].startswith("--"):  # An override cannot follow an option that may need a value.
        argv = [*argv, DRY]  # If the command is accepted by mistake, nothing is trained.
    exit_code, error = _error(capsys, *argv)
    assert exit_code == code, error
    for text in texts:
        assert text in error
    assert list(tmp_path.iterdir()) == []


def test_a_bad_file_in_the_config_dir(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "mine" / "model"
    folder.mkdir(parents=True)
    (folder / "broken.yaml").write_text("_target_: [unclosed")
    (folder / "typo.yaml").write_text("_target_: speechtrain.models.rnnt.RNNT\nfastemt: 3\n")
    (folder / "stranger.yaml").write_text("_target_: stranger.Model\n")
    (folder / "allowing.yaml").write_text(
        "# @package _global_\nallow_targets: stranger\nmodel:\n  _target_: stranger.Model\n"
    )
    for choice, said in (
        ("broken", "broken.yaml"),
        ("typo", "did you mean 'fastemit'"),
        ("stranger", "allow_targets=stranger"),
        ("allowing", "allow_targets"),
    ):
        code, error = _error(capsys, "--config-dir", str(tmp_path / "mine"), f"model={choice}", DRY)
        assert (code, said in error) == (CONFIG, True), error
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_start_jobs_believes_a_config_dir(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "mine" / "recipe"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /launcher: mpi\n  - override /hydra/launcher: joblib\n"
        "launcher:\n  program: mpirun.own\nhydra:\n  sweep:\n    dir: sweeps\n"
        "  sweeper:\n    params: {seed: '1,2'}\n"
    )
    own = ("--config-dir", str(tmp_path / "mine"), "recipe=mine")
    assert _run(*own, "hydra.launcher.n_jobs=1", "--cfg", "job") == 0
    assert "program: mpirun.own" in capsys.readouterr().out


def test_a_base_yaml_is_not_listed_as_a_choice(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _run("--help") == 0
    listed = capsys.readouterr().out
    monkeypatch.setenv("COMP_LINE", "speechtrain-train model=")
    assert _run("-sc", "query=bash") == 0
    listed += capsys.readouterr().out
    listed += _error(capsys, "model=rnntt")[1] + _error(capsys, "model=")[1]
    listed += _error(capsys, "model=_rnnt")[1].removeprefix("model=_rnnt")
    assert listed.count("rnnt_small") == 5
    assert not re.search(r"(?<!\w)_(rnnt|wav2vec2)", listed)


def test_targets_are_allowed_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_schedules.py").write_text(
        "from speechtrain.optim.schedules import Constant\n\n\nclass Flat(Constant):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    target = "schedule._target_=own_schedules.Flat"
    assert _error(capsys, "schedule=constant", target, DRY)[0] == CONFIG
    assert _run("schedule=constant", target, DRY, "allow_targets=own_schedules") == 0


# --- folders --------------------------------------------------------------------------------------


def test_a_folder_with_other_files_is_refused_as_run_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "command.log").touch()
    assert _run("recipe=demo", DRY, "run_dir=run") == 0
    (tmp_path / "run" / "thesis.pdf").touch()
    code, error = _error(capsys, "recipe=demo", DRY, "run_dir=run")
    assert (code, "holds other files (thesis.pdf, …)" in error) == (RUN, True)
    (tmp_path / "run" / "checkpoints").mkdir()  # a run whose config.yaml was deleted
    assert _run("recipe=demo", DRY, "run_dir=run") == 0


@pytest.mark.slow
@pytest.mark.parametrize("arguments", ["recipe=demo dry_run=true", "--cfg job", "--help"])
def test_a_full_disk_below_stdout_is_one_line(arguments: str) -> None:
    done = finish(STARTER.start(arguments.split(), os.environ, out="/dev/full"))
    assert (done.returncode, done.stderr) == (
        MACHINE,
        "speechtrain: error: stdout: No space left on device\n",
    )


@pytest.mark.slow
def test_too_little_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free = SimpleNamespace(f_bavail=10, f_bfree=10, f_blocks=2000, f_frsize=2**20)
    monkeypatch.setattr(launching.os, "statvfs", lambda path: free)
    code, error = _error(capsys, DRY)
    assert (code, "10 MiB free" in error) == (MACHINE, True)
    monkeypatch.setattr(free, "f_bavail", 1000)
    assert _run(DRY) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_run_of_another_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    assert _run("--cfg", "job", "--resolve", f"run_dir={run}") == 0
    (run / "config.yaml").write_text("format: 3\n" + capsys.readouterr().out)
    code, error = _error(capsys, f"run_dir={run}", "optimizer.lr=0.5", "seed=7", DRY)
    assert code == RUN
    assert "optimizer.lr: 0.002 in the run, 0.5 now" in error
    assert "seed: 1 in the run, 7 now" in error
    # what may change
    assert _run(f"run_dir={run}", "trainer.max_steps=9", "device.threads=1", "tracking=none", DRY) == 0


def test_a_run_in_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    lock = RunLock(tmp_path / "run").acquire()
    try:
        code, error = _error(capsys, "recipe=demo", f"run_dir={tmp_path}/run")
    finally:
        lock.release()
    assert (code, f"pid {os.getpid()} on " in error) == (RUN, True)


def test_a_run_that_another_command_has_just_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its rank 0 has not acquired the lock yet. It must read the config of its own command."""
    acquire = RunLock.acquire

    def acquire_after_the_other(self: RunLock) -> RunLock:
        (self.path.parent / "config.yaml").write_text("of the other command")
        return acquire(self)

    monkeypatch.setattr(RunLock, "acquire", acquire_after_the_other)
    code, error = _error(capsys, "recipe=demo", f"run_dir={tmp_path}/run")
    assert (code, f"another command has just started {tmp_path}/run. Wait" in error) == (RUN, True)
    assert (tmp_path / "run" / "config.yaml").read_text() == "of the other command"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_a_working_folder_that_is_gone_is_one_line(command: str) -> None:
    """The libraries of torch would abort the process."""
    shell = (
        f"mkdir gone; cd gone; rmdir ../gone; exec {sys.executable} -m speechtrain.commands.{command} run=a"
    )
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=60, check=False)
    said = "speechtrain: error: the working folder was deleted. Change to a folder that exists\n"
    assert (done.returncode, done.stderr) == (MACHINE, said)


@pytest.mark.slow
def test_a_command_without_standard_streams_starts_its_rank(tmp_path: Path) -> None:
    """Else the run's lock gets the number of a stream, which the rank inherits: in use by itself."""
    line = f"{sys.executable} -m speechtrain.commands.train recipe=demo data=manifest data.train=no.jsonl"
    shell = f"exec {line} encoder=lstm_small run_dir={tmp_path / 'run'} <&- >&- 2>&-"
    done = subprocess.run(["sh", "-c", shell], timeout=120, check=False)
    assert done.returncode == DATA


# --- what works -----------------------------------------------------------------------------------


def test_environment_names(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OUTPUT_DIR", "results")
    monkeypatch.setenv("NUM_STEPS", "7")
    monkeypatch.setenv("DATASET_DIR", "/audio")
    assert _run(DRY) == 0
    assert "/results/rnnt-digits-" in capsys.readouterr().out
    assert _run("--cfg", "job", "--resolve", "data=fsdd") == 0
    shown = capsys.readouterr().out
    assert "max_steps: 7" in shown
    assert "/audio" in shown
    monkeypatch.setenv("NUM_STEPS", "many")
    code, error = _error(capsys, DRY)
    assert (code, "NUM_STEPS" in error, "'many'" in error) == (CONFIG, True, True)
    assert _run(DRY, "trainer.max_steps=3") == 0


def test_a_list_of_manifests_as_typed_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        _run("data=manifest", "data.train=a b.jsonl,b.jsonl", "--cfg", "job", "data.valid.dev=c.jsonl") == 0
    )
    shown = capsys.readouterr().out
    assert "- a b.jsonl\n" in shown
    assert "- b.jsonl\n" in shown
    assert "dev: c.jsonl" in shown
    sets = ["data.train={a: {path: a.jsonl, weight: 3}, b: b.jsonl}", "data.valid={x: c.jsonl, z: d.jsonl}"]
    assert _run("data=manifest", *sets, "--cfg", "job") == 0
    shown = capsys.readouterr().out
    assert "weight: 3\n" in shown
    assert "x: c.jsonl\n" in shown
    assert "z: d.jsonl\n" in shown


@pytest.mark.parametrize("given", [[], ["run_dir=sweep"]], ids=["default", "run_dir"])
def test_a_sweep_is_two_runs(given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("-m", "optimizer.lr=1e-3,4e-3", "trainer.keep=3", DRY, *given) == 0
    output = capsys.readouterr().out.splitlines()
    first, second, *table = [line for line in output if line.startswith("job")]
    lines = [line.split()[-1] for line in output if "speechtrain.rank" in line]
    assert (first, second) == ("job 1: optimizer.lr=0.001", "job 2: optimizer.lr=0.004")
    assert table[0].split() == ["job", "metric", "status", "overrides"]
    assert table[2].split() == ["job", "2", "-", "dry", "run", "optimizer.lr=0.004"]
    assert len(set(lines)) == 2
    base = tmp_path / ("sweep" if given else "runs")
    assert {Path(line).parents[1] for line in lines} == {base}
    assert not base.exists()  # Hydra's multirun.yaml is removed, too


def test_a_failed_job_of_a_sweep_does_not_stop_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("-m", "optimizer.lr=-1,1e-3", DRY) == CONFIG
    captured = capsys.readouterr()
    assert captured.out.count("speechtrain.rank") == 1
    assert "job 1 (optimizer.lr=-1" in captured.err
    assert "1 of 2 jobs failed" in captured.err
    assert captured.out.splitlines()[-2].split() == ["job", "1", "-", "ConfigError", "optimizer.lr=-1"]


@pytest.mark.slow
def test_secrets_are_not_stored_in_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A true run that fails on its data: its config was written, its trace and code are the rank's."""
    monkeypatch.setenv("DATASET_DIR", "/secret/place")
    run = tmp_path / "run"
    run.mkdir()
    (run / "kept.txt").write_text("")  # a folder with something else in it is not removed
    manifests = ["data.train=${oc.env:DATASET_DIR}/a.jsonl", "data.valid.dev=ü/../b.jsonl"]
    command = ["model=rnnt_small", "data=manifest", *manifests, f"run_dir={run}"]
    done = finish(STARTER.start(command, os.environ))
    assert done.returncode == DATA, done.stderr
    assert "/secret/place/a.jsonl does not exist" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    written = (run / "config.yaml").read_text()
    assert "${oc.env:DATASET_DIR}/a.jsonl" in written
    assert "/secret" not in written
    assert f"dev: {tmp_path}/b.jsonl\n" in written  # the run works from another folder
    assert json.loads((run / "result.json").read_text())["exit_code"] == DATA


@pytest.mark.slow
def test_a_refused_run_leaves_no_folder(tmp_path: Path) -> None:
    command = ["model=rnnt_small", "data=manifest", "data.train=no.jsonl", "device.threads=1", *INLINE]
    done = finish(STARTER.start(command, os.environ))
    assert done.returncode == DATA, done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []

"""Tests of ``start_run`` and of continued runs: dry runs, refused starts, failures, and changed keys."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import DictConfig

from speechtrain.commands import train
from speechtrain.commands._cli import exit_code_of
from speechtrain.devices import preload
from speechtrain.devices.cpu import CPU
from speechtrain.errors import ConfigError, MachineError, RunError
from speechtrain.optim import adamw8bit
from speechtrain.run_directory import RunResult, rank_folder, read_failure
from speechtrain.start import job, on_host
from speechtrain.start.command_line import Command, read_command
from speechtrain.start.compose import compose
from speechtrain.start.on_host import host_environment
from speechtrain.start.resolved import dump, load
from speechtrain.start.resume import config_to_continue
from speechtrain.start.start import _conclude, start_run

from ...conftest import Disk

DRY = ["recipe=demo", "dry_run=true"]


def write_run(run_dir: Path, *overrides: str) -> None:
    """Write the config.yaml and the run.json of a run that these overrides have started."""
    config = compose([*DRY, *overrides])
    config.run_dir = str(run_dir)
    (run_dir / "config.yaml").write_text(dump(config))
    (run_dir / "run.json").write_text(json.dumps({"overrides": [*DRY, *overrides]}))


def continued_batch(run_dir: Path, *overrides: str) -> tuple[int, int | None, int]:
    """Continue the run with these overrides, and store its config.

    Return its world size, ``simulate_world`` and ``accumulate``.
    """
    command = read_command([*DRY, *overrides])
    config = config_to_continue(run_dir, command)
    assert start_run(command, config, {}).status == "dry run"
    (run_dir / "config.yaml").write_text(dump(config))
    return config.world_size, config.trainer.simulate_world, config.trainer.accumulate


LAUNCHER_KEYS = {
    "ssh": ["launcher.hostfile=hosts", "run_dir=run"],
    "mpi": ["launcher.hostfile=hosts"],
    "slurm": ["launcher.nodes=2"],
    "kubernetes": ["launcher.image=i", "launcher.nodes=2", "launcher.volumes={a: /}"],
}


PROGRAMS = {"ssh": "ssh", "mpi": "mpirun", "slurm": "sbatch", "kubernetes": "kubectl"}


@pytest.mark.parametrize("launcher", ["local", "torchrun", *PROGRAMS])
def test_render_names_the_run_directory(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks get the path of their config, so a job or its restart never searches for a run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("a\nb\n")
    size = "world_size=1" if launcher == "local" else "world_size=4"
    line = [*DRY, f"launcher={launcher}", size, *LAUNCHER_KEYS.get(launcher, []), "device.oversubscribe=true"]
    assert train.run([*line, f"run_dir={tmp_path / 'run'}"]) == 0
    rendered = capsys.readouterr().out
    assert "speechtrain.rank" in rendered
    assert f"{tmp_path / 'run' / 'config.yaml'}" in rendered
    assert "speechtrain.commands.train" not in rendered


@pytest.mark.parametrize(("launcher", "program"), list(PROGRAMS.items()))
def test_a_dry_run_needs_no_program_and_no_cores_of_this_host(
    launcher: str,
    program: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The case of a laptop on which a user prepares a job of a cluster. Each host counts its own cores."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS")
    (tmp_path / "hosts").write_text("a\nb\n")
    line = [*DRY, f"launcher={launcher}", "world_size=64", "device.comm_cores=1", *LAUNCHER_KEYS[launcher]]
    assert train.run(line) == 0
    printed, warned = capsys.readouterr()
    shown = printed.partition("END_OF_TEXT\n")[2]
    assert "speechtrain.start.on_host" in shown
    assert not re.search("OMP_|LD_PRELOAD|MALLOC|KMP_|I_MPI_PIN_DOMAIN|CCL_|ONEDNN", shown)
    assert warned.startswith(
        f"speechtrain: warning: launcher={launcher}: there is no {program} on this machine. "
    )
    assert warned.count("\n") == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert train.run(line) == 0
    shown = capsys.readouterr().out.partition("END_OF_TEXT\n")[2]
    assert ("OMP_NUM_THREADS" in shown) == (launcher != "slurm")  # which passes it by itself


def test_too_many_ranks_are_refused_or_in_a_dry_run_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["recipe=demo", "world_size=64", f"run_dir={tmp_path / 'run'}"]
    with pytest.raises(MachineError, match=r"64 ranks would share .*device\.oversubscribe=true"):
        train.run(line)
    assert not (tmp_path / "run").exists()
    with pytest.raises(
        MachineError, match=r"1 x .* GiB each .* do not fit into .*device\.oversubscribe=true"
    ):
        train.run([*line, "world_size=1", "model.joint.hidden=40000", "model.prediction.hidden=40000"])
    capsys.readouterr()
    assert train.run([*line, "dry_run=true"]) == 0
    assert "warning: " in capsys.readouterr().err
    assert train.run([*line, "dry_run=true", "device.oversubscribe=true"]) == 0
    assert capsys.readouterr().err == ""
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    device = CPU()
    assert "OMP_NUM_THREADS" in host_environment(device, 64, 0, run_dir=tmp_path)
    assert "64 ranks would share" in capsys.readouterr().err


def test_on_host_writes_its_failure_into_the_run_directory(tmp_path: Path) -> None:
    write_run(tmp_path, "world_size=64")
    assert on_host.main([str(tmp_path / "config.yaml"), "64", "true"]) == MachineError.exit_code
    failure = read_failure(tmp_path)
    assert failure is not None
    assert "64 ranks would share" in str(failure.error)
    assert failure.exit_code == MachineError.exit_code


def replace_slurm(folder: Path, monkeypatch: pytest.MonkeyPatch, sbatch: str) -> None:
    """Replace sbatch by a script with the shell line ``sbatch``. Slurm's other programs print nothing."""
    monkeypatch.chdir(folder)
    programs = folder / "bin"
    programs.mkdir()
    for name in ("sbatch", "squeue", "scancel", "scontrol"):
        line = sbatch if name == "sbatch" else "true"
        (programs / name).write_text(f"#!/bin/sh\n{line}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")


def test_a_rejected_job_of_slurm_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_slurm(tmp_path, monkeypatch, "echo invalid partition >&2; exit 1")
    with pytest.raises(MachineError, match=r"sbatch failed: invalid partition"):
        train.run(["recipe=demo", "launcher=slurm"])
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


COUNT_SHARING_RANKS = """
import os, pathlib, sys, time
from speechtrain.start.external_launch import _ranks_on_these_cpus
from speechtrain.distributed.world import World
world = World.from_environment(os.environ)
os.sched_setaffinity(0, {int(cpu) for cpu in sys.argv[1].split(",")})
pathlib.Path(f"bound-{world.rank}").touch()
while not all(pathlib.Path(f"bound-{rank}").exists() for rank in range(world.size)):
    time.sleep(0.01)
print(_ranks_on_these_cpus(world), flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("is_bound", "shared"), [(False, ["3", "3", "3"]), (True, ["2", "2", "1"])])
def test_ranks_on_these_cpus_counts_the_ranks_that_share_cpus(
    is_bound: bool, shared: list[str], tmp_path: Path
) -> None:
    cpus = sorted(map(str, os.sched_getaffinity(0)))
    cpus_by_rank = [",".join(cpus)] * 3
    if is_bound:
        cpus_by_rank = [cpus[0], cpus[0], cpus[-1]]
    size = len(cpus_by_rank)
    processes = []
    for rank, rank_cpus in enumerate(cpus_by_rank):
        world = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
        environment = os.environ | {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in world.items()}
        line, pipe = [sys.executable, "-c", COUNT_SHARING_RANKS, rank_cpus], subprocess.PIPE
        processes.append(
            subprocess.Popen(line, env=environment, cwd=tmp_path, stdin=pipe, stdout=pipe, text=True)
        )
    counts = [process.stdout.readline().strip() for process in processes if process.stdout]
    for process in processes:
        process.communicate()
    assert counts == (shared if len(cpus) > 1 else ["3", "3", "3"])


def test_another_world_size_does_not_change_the_global_batch(tmp_path: Path) -> None:
    write_run(tmp_path, "world_size=4")
    assert continued_batch(tmp_path, "world_size=4") == (4, None, 1)
    assert continued_batch(tmp_path, "world_size=2") == (2, 4, 2)
    assert continued_batch(tmp_path) == (2, 4, 2)  # Without an override, the stored values stay.
    assert continued_batch(tmp_path, "world_size=1") == (1, 4, 4)
    assert continued_batch(tmp_path, "world_size=1") == (1, 4, 4)  # A repeated command changes nothing.
    with pytest.raises(ConfigError, match="4 micro-batches per update, which world_size=3 does not divide"):
        continued_batch(tmp_path, "world_size=3")
    for wrong in ("world_size=0", "world_size=two", "trainer.accumulate=two"):
        with pytest.raises(ConfigError, match=wrong.partition("=")[0]):
            continued_batch(tmp_path, wrong)
    assert load(tmp_path / "config.yaml").world_size == 1


def test_keys_that_change_the_global_batch_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path, "trainer.accumulate=2")
    # The number of micro-batches stays 2, on two ranks.
    assert continued_batch(tmp_path, "trainer.accumulate=1", "world_size=2") == (2, 2, 1)
    with pytest.raises(RunError, match=r"trainer\.accumulate: 1 in the run, 3 now"):
        continued_batch(tmp_path, "trainer.accumulate=3")
    with pytest.raises(RunError, match=r"trainer\.simulate_world: 2 in the run, 8 now"):
        continued_batch(tmp_path, "trainer.simulate_world=8")


def test_changed_keys_in_the_users_yaml_are_applied_or_refused(tmp_path: Path) -> None:
    folder, run_dir = tmp_path / "conf", tmp_path / "run"
    (folder / "schedule").mkdir(parents=True)
    run_dir.mkdir()
    mine = folder / "schedule" / "mine.yaml"
    first_text = "# @package _global_\ntrainer:\n  max_steps: 5\nschedule:\n  warmup_steps: 3\n"
    mine.write_text(first_text)
    write_run(run_dir)
    about = {"overrides": DRY, "written": {"schedule/mine": first_text}}
    (run_dir / "run.json").write_text(json.dumps(about))
    stored = load(run_dir / "config.yaml").trainer.max_steps
    command = read_command([*DRY, "--config-dir", str(folder)])
    assert config_to_continue(run_dir, command).trainer.max_steps == stored
    mine.write_text(first_text.replace("max_steps: 5", "max_steps: 7"))  # This key may change.
    assert config_to_continue(run_dir, command).trainer.max_steps == 7
    mine.write_text(first_text.replace("warmup_steps: 3", "warmup_steps: 4"))
    with pytest.raises(RunError, match=r"schedule\.warmup_steps: None in the run, 4 now"):
        config_to_continue(run_dir, command)


def test_continuing_a_run_does_not_compose_its_stored_overrides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "modules" / "imported_by_hydra"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "modules")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    write_run(run_dir)
    stored = {"argv": [], "overrides": ["hydra.searchpath=[pkg://imported_by_hydra]"]}
    (run_dir / "run.json").write_text(json.dumps(stored))
    assert train.run([f"run_dir={run_dir}", "dry_run=true"]) == 0
    assert "imported_by_hydra" not in sys.modules
    compose(stored["overrides"])  # An override of the command itself would import the package.
    assert "imported_by_hydra" in sys.modules


def test_a_continued_run_uses_its_stored_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path, "launcher=mpi", "launcher.program=mpirun.own", "launcher.options=[--verbose]")
    assert train.run([f"run_dir={tmp_path}", "dry_run=true"]) == 0
    rendered = capsys.readouterr().out
    assert "mpirun.own" in rendered
    assert "--verbose" in rendered


@pytest.mark.parametrize("damaged", ["{", "[]", '{"argv": [], "ovErrides": []}'])
def test_a_damaged_run_json_is_reported(tmp_path: Path, damaged: str) -> None:
    write_run(tmp_path)
    (tmp_path / "run.json").write_text(damaged)
    with pytest.raises(
        RunError, match=r"run\.json is damaged or missing\. run_dir=.* alone continues the run"
    ):
        config_to_continue(tmp_path, read_command(DRY))
    assert config_to_continue(tmp_path, read_command([f"run_dir={tmp_path}"])).seed == 1


def test_read_failure_returns_the_first_failure_that_is_a_cause(tmp_path: Path) -> None:
    assert read_failure(tmp_path) is None
    outcomes = {0: (2.0, False), 1: (3.0, True), 2: (4.0, True)}
    for rank, (when, is_cause) in outcomes.items():
        rank_folder(tmp_path, rank).mkdir(parents=True, exist_ok=True)
        outcome = {"status": "failed", "rank": rank, "failed_at": when, "is_cause": is_cause}
        (rank_folder(tmp_path, rank) / "result.json").write_text(json.dumps(outcome))
    failure = read_failure(tmp_path)
    assert failure is not None
    assert failure.rank == 1


def test_a_full_disk_at_the_start_is_a_machine_error(disk: Disk, capsys: pytest.CaptureFixture[str]) -> None:
    for files in range(1, 5):  # the run's folder, its lock, run.json, config.yaml
        disk.mount(f"remount,nr_inodes={files}")
        assert exit_code_of(lambda: train.run([*DRY[:1], f"run_dir={disk.path / 'run'}"])) == 4
        assert "No space left on device" in capsys.readouterr().err
        assert not (disk.path / "run" / "config.yaml").exists()
    disk.mount("remount,nr_inodes=100")
    assert exit_code_of(lambda: train.run([*DRY, f"run_dir={disk.path / 'run'}"])) == 0


def test_waiting_ranks_get_the_exit_code_of_a_refused_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the exit code, they would wait for minutes for a rank 0 that has exited."""
    write_run(tmp_path, "world_size=2")
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    for run_dir, wrong, error in (
        (tmp_path, "seed=7", RunError),
        (tmp_path, "--sed", ConfigError),
        (tmp_path / "new", "sed=7", ConfigError),
        (tmp_path / "other", "optimizer.lr=-7", ConfigError),
    ):
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(error, match=wrong.strip("-")[:3]):
            train.run([f"run_dir={run_dir}", wrong])
        monkeypatch.setenv("RANK", "1")
        assert train.run([f"run_dir={run_dir}", wrong]) == error.exit_code


def test_a_finished_run_has_a_report_and_the_next_command(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "</html>" in (run_dir / "report.html").read_text()
    (run_dir / "report.html").unlink()
    command = read_command(["model=rnnt", "precision=bf16", "data.train.utterances=16", f"run_dir={run_dir}"])
    _conclude(load(run_dir / "config.yaml"), command, RunResult("finished"))
    report, line = capsys.readouterr().out.splitlines()
    assert report == f"report: {run_dir / 'report.html'}"
    overrides = "recipe=scratch data.train=FOLDER_OR_MANIFEST trainer.max_hours=0.5"
    assert line.endswith(f": speechtrain train {overrides} precision=bf16")
    config = load(run_dir / "config.yaml")
    for own_files in (
        ["a.jsonl", "b.jsonl"],
        "a.jsonl",
        {"path": "a.csv", "text": "said"},
        [{"path": "a.csv"}],
    ):
        config.data.train = own_files
        _conclude(config, command, RunResult("finished"))
        assert capsys.readouterr().out.startswith("report: ")


@pytest.mark.parametrize(
    ("package", "overrides", "fix"),
    [
        ("bitsandbytes.functional", ["optimizer=adamw8bit"], "pip install -e '.[memory]'"),
        ("kenlm", ["decoder=beam", "decoder.lm=lm.bin"], "pip install kenlm"),
        (
            "huggingface_hub",
            ["recipe=finetune", "data=digits", "init_from=hf:a/b"],
            "pip install -e '.[interop]'",
        ),
        ("", ["device.allocator=jemalloc"], "apt-get install libjemalloc2"),
        ("", ["device.openmp=intel"], "pip install intel-openmp"),
    ],
)
def test_a_missing_package_is_a_warning_in_a_dry_run_only(
    package: str, overrides: list[str], fix: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package or "unused", None)
    monkeypatch.setattr(preload, "library_folders", lambda environ: [])
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")  # as the hub's reader sets it
    adamw8bit._library.cache_clear()
    (tmp_path / "lm.bin").write_bytes(b"mmap lm http://kheafield.com/code format version 5\n\0" + bytes(64))
    assert train.run([*DRY, *overrides, "device=cpu"]) == 0
    output, warnings = capsys.readouterr()
    assert "speechtrain.rank" in output
    assert [fix in line for line in warnings.splitlines()] == [True]
    assert warnings.startswith("speechtrain: warning: ")
    with pytest.raises(MachineError, match=re.escape(fix)):
        train.run(["recipe=demo", *overrides, "device=cpu"])
    adamw8bit._library.cache_clear()


@pytest.mark.parametrize(
    ("overrides", "hours", "steps"),
    [
        (["trainer.max_steps=7"], None, 7),
        (["trainer.max_epochs=2"], None, None),
        ([], 0.5, None),
        (["trainer.max_steps=null"], 0.5, None),
        (["trainer.max_steps=7", "trainer.max_hours=2"], 2.0, 7),
    ],
)
def test_explicit_steps_replace_the_hours_of_a_recipe(
    overrides: list[str],
    hours: float | None,
    steps: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    configs = []

    def record(job: Command, config: DictConfig, user_files: dict[str, str]) -> RunResult:
        configs.append(config)
        return RunResult("recorded")

    monkeypatch.setattr(job, "start_run", record)
    fixed = ["recipe=scratch", "from_data=null", "tokenizer=characters", "data.train=a.jsonl"]
    assert train.run([*fixed, *overrides]) == 0
    (config,) = configs
    assert (config.trainer.max_hours, config.trainer.max_steps) == (hours, steps)
    assert ("replaces the recipe's trainer.max_hours=0.5" in capsys.readouterr().out) == (hours is None)


@pytest.mark.parametrize(("first", "hours"), [([], None), (["trainer.max_hours=0.5"], 0.5)])
def test_a_continued_run_keeps_explicit_hours_of_its_first_start(
    first: list[str], hours: float | None, tmp_path: Path
) -> None:
    write_run(tmp_path, "trainer.max_hours=0.5")
    (tmp_path / "run.json").write_text(json.dumps({"overrides": [*DRY, *first]}))
    config = config_to_continue(tmp_path, read_command([f"run_dir={tmp_path}", "trainer.max_steps=9000"]))
    assert (config.trainer.max_hours, config.trainer.max_steps) == (hours, 9000)
    config = config_to_continue(tmp_path, read_command([f"run_dir={tmp_path}", "trainer.log_every=3"]))
    assert config.trainer.max_hours == 0.5


def test_an_unused_dataset_dir_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATASET_DIR", "/corpora/")
    assert train.run(DRY) == 0
    warnings = capsys.readouterr().err
    assert warnings.count("\n") == 1
    assert "DATASET_DIR=/corpora is set" in warnings
    assert "data=manifest data.train=/corpora" in warnings
    files = ["data.train=/corpora/a.jsonl", "data.valid.dev=/corpora/b.jsonl"]
    assert train.run(["dry_run=true", "data=manifest", *files]) == 0
    assert train.run(["dry_run=true", "data=manifest", "data.train=/corpora", files[1]]) == 0
    monkeypatch.setenv("DATASET_DIR", "")
    assert train.run(DRY) == 0
    assert capsys.readouterr().err == ""

"""Names with shell characters in what launchers render, lists of hosts, and variables of other starters."""

from __future__ import annotations

import os
import subprocess
from itertools import pairwise, takewhile
from pathlib import Path

import pytest
import yaml

from .forks import Ended, Forks, faults

SMALL = [
    "model=rnnt_small",
    "device.threads=1",
    "data.train.utterances=20",
    "data.valid.unheard.utterances=4",
]
PROGRAMS = ("sbatch", "squeue", "scancel", "scontrol", "srun", "kubectl", "ssh")


@pytest.fixture
def programs(tmp_path: Path) -> dict[str, str]:
    """The environment with stand-ins of the engines' programs; that of ssh notes its arguments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    texts = dict.fromkeys(PROGRAMS, "exit 1") | {"mpirun": "echo 'mpirun (Open MPI) 5.0'"}
    texts["ssh"] = f'printf "%s\\n" "$@" ---- >> {tmp_path / "ssh.log"}; exit 255'
    for name, text in texts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "OMPI_ALLOW_RUN_AS_ROOT": "1"}


def quoted(text: str) -> str:
    """For Hydra's grammar."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def shell_faults(script: str, folder: Path) -> list[str]:
    """What a shell, and Slurm's reader of directives, would find in a script."""
    done = subprocess.run(["sh", "-n"], input=script, text=True, capture_output=True, cwd=folder, check=False)
    head = takewhile(lambda line: not line.strip() or line.startswith("#"), script.splitlines())
    directives = [line for line in head if line.startswith("#SBATCH")]  # sbatch reads none after a command
    found = [f"sh: {done.stderr}"] if done.returncode else []
    return found + [line for line in directives if "--wrap" in line.split("=")[0] or len(directives) > 12]


def kubernetes_faults(script: str) -> list[str]:
    body = script.split("\n", 1)[1].rsplit("\nEND", 1)[0]
    kinds = [document["kind"] for document in yaml.safe_load_all(body)]
    return [] if sorted(kinds) == ["Job", "Service"] else [f"documents {kinds}"]


NAMES = {
    "a semicolon": "a;touch CANARY",
    "a dollar": "a$(touch CANARY)",
    "a backtick": "a`touch CANARY`",
    "a quote": "a'b",
    "a double quote": 'a"b',
    "a space": "a b",
    "a line break": "a\nb",
    "a directive": "a\n#SBATCH --wrap=x",
    "a carriage return": "a\r#SBATCH --wrap=x",
    "two dollars": "a$$b${x}",
    "a macro": "a$(RANK)${local_rank}",
    "a percent": "a%j",
    "an option": "-rf",
    "a mapping": "a: {b: [c]}",
    "a comment": "a #b",
    "an escape": "a\x1b[31mb",
    "a line of Unicode": "a\u2028b\x85c",
    "turned round": "a\u202eb",
    "an end": "END",
    "a document": 'x"\n---\napiVersion: v1\nkind: Pod\nmetadata: {name: evil}\n#',
    "a backslash": "a\\",
    "a glob": "a*?[b]",
    "a tilde": "~root",
    "an interpolation": "a${oc.env:HOME}",
    "long": "a" * 200,
}
LAUNCHERS: dict[str, list[str]] = {
    "torchrun": ["launcher=torchrun", "world_size=2"],
    "slurm": ["launcher=slurm"],
    "kubernetes": ["launcher=kubernetes", "launcher.image=x"],
    "mpi": ["launcher=mpi"],
}


def judged(ended: Ended, launcher: str, folder: Path) -> list[str]:
    found = faults(ended, canaries=[folder / "CANARY"])
    if ended.code or not ended.out.strip():
        return found
    return [
        *found,
        *(kubernetes_faults(ended.out) if launcher == "kubernetes" else shell_faults(ended.out, folder)),
    ]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_run_directory_of_any_name(
    launcher: str, programs: dict[str, str], forks: Forks, tmp_path: Path
) -> None:
    told = {}
    for name, text in NAMES.items():
        line = [*SMALL, *LAUNCHERS[launcher], "dry_run=true", f"run_dir={quoted(f'{tmp_path}/n/{text}')}"]
        line += [f"launcher.volumes={{a: {tmp_path}}}"] if launcher == "kubernetes" else []
        if found := judged(forks.run("train", *line, cwd=tmp_path, environment=programs), launcher, tmp_path):
            told[name] = found
    assert not told, "\n".join(f"{name}: {found}" for name, found in told.items())


KEYS = {
    "slurm": ("name", "partition", "account", "time"),
    "kubernetes": ("image", "service_account", "namespace", "memory", "python", "name"),
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("launcher", KEYS)
def test_a_key_of_any_text(launcher: str, programs: dict[str, str], forks: Forks, tmp_path: Path) -> None:
    told = {}
    for number, (name, text) in enumerate(NAMES.items()):
        for key in KEYS[launcher][number % 2 :: 2]:
            line = [*SMALL, *LAUNCHERS[launcher], "dry_run=true", f"run_dir={tmp_path}/run"]
            line += [f"launcher.volumes={{a: {tmp_path}}}"] if launcher == "kubernetes" else []
            line.append(f"launcher.{key}={quoted(text)}")
            ended = forks.run("train", *line, cwd=tmp_path, environment=programs)
            if found := judged(ended, launcher, tmp_path):
                told[f"{key} {name}"] = found
    assert not told, "\n".join(f"{name}: {found}" for name, found in told.items())


HOSTS: dict[str, bytes] = {
    "an option": b"-oProxyCommand=touch${IFS}CANARY",
    "a short option": b"-lroot",
    "a space": b"a b",
    "a semicolon": b"a;touch${IFS}CANARY",
    "a dollar": b"$(touch${IFS}CANARY)",
    "a backtick": b"`touch${IFS}CANARY`",
    "an option of a user": b"root@-oProxyCommand=x",
    "a scheme": b"ssh://-oProxyCommand=x",
    "an escape": b"a\x1b]0;x\x07",
    "NUL": b"a\0b",
    "a line of Unicode": "a\u2028-oX".encode(),
    "10^6 letters": b"a" * 10**6,
    "10^6 lines": b"a\n" * 10**6,
    "nothing": b"",
    "comments": b"# a\n" * 1000,
    "a comma": b"a,b",
    "an address": b"[::1]",
    "no UTF-8": b"\xff",
    "slots": b"a slots=10000000000",
    "quotes": b"'a' \"b\"",
    "a percent": b"a%h%p",
    "a slash": b"../../a",
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("launcher", ["ssh", "mpi"])
def test_a_list_of_hosts(launcher: str, programs: dict[str, str], forks: Forks, tmp_path: Path) -> None:
    told = {}
    for name, text in HOSTS.items():
        (tmp_path / "hosts").write_bytes(text + b"\n")
        line = [
            *SMALL,
            f"launcher={launcher}",
            f"launcher.hostfile={tmp_path / 'hosts'}",
            f"run_dir={tmp_path}/run",
        ]
        line += ["dry_run=true"] if launcher == "mpi" else []
        ended = forks.run("train", *line, cwd=tmp_path, environment=programs)
        found = faults(ended, refuses=None if launcher == "mpi" else True, canaries=[tmp_path / "CANARY"])
        log = tmp_path / "ssh.log"
        words = log.read_text(errors="replace").splitlines() if log.exists() else []
        hosts = [word for before, word in pairwise(words) if before == "--"]
        if found or any(word.startswith("-") for word in hosts):
            told[name] = found or hosts
        log.unlink(missing_ok=True)
    assert not told, "\n".join(f"{name}: {found}" for name, found in told.items())


VARIABLES: list[dict[str, str]] = [
    *(
        {"NNODES": text}
        for text in ("__import__('os')", "9" * 5_000, "-1", "[1]", "${oc.env:HOME}", "a", "1e9")
    ),
    *(
        {"NUM_STEPS": text}
        for text in ("os.system('x')", "9" * 5_000, "1e999", "nan", "-1", "[1]", "{a: 1}", "")
    ),
    *({"RANK": text, "WORLD_SIZE": "2"} for text in ("x", "-1", "²", "9" * 5_000, "", "1.5", "\x1b[2J", "5")),
    *({"RANK": "0", "WORLD_SIZE": text} for text in ("1000000000", "0", "-2", "x")),
    {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "$(touch CANARY)", "MASTER_PORT": "9" * 50},
    {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x999999)" * 100},
    {"OMPI_COMM_WORLD_RANK": "0"},
    {"OUTPUT_DIR": "a\x1b[2J"},
    {"OUTPUT_DIR": "/dev/null"},
    {"SPEECHTRAIN_CACHE": "/dev/null/x"},
    {"DATASET_DIR": "\x1b[2J"},
    {"SPEECHTRAIN_ALLOW_TARGETS": ",,..,os,\x1b"},
    {"HOSTFILE": "/dev/zero"},
]


@pytest.mark.timeout(900)
def test_variables_of_anything(programs: dict[str, str], forks: Forks, tmp_path: Path) -> None:
    told = {}
    (tmp_path / "hosts").write_text("127.0.0.1\n")
    for number, variables in enumerate(VARIABLES):
        place = [] if "OUTPUT_DIR" in variables else [f"run_dir={tmp_path}/{number}"]
        line = [*SMALL, "dry_run=true", *place]
        more = ["launcher=ssh"] if {"NNODES", "HOSTFILE"} & variables.keys() else []
        environment = {**programs, "HOSTFILE": str(tmp_path / "hosts"), **variables}
        ended = forks.run("train", *line, *more, cwd=tmp_path, environment=environment)
        if found := faults(ended, canaries=[tmp_path / "CANARY"]):
            told[str(variables)[:80]] = found
    assert not told, "\n".join(f"{name}: {found}" for name, found in told.items())

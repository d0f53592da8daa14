"""Attacks on launchers: hostile names in rendered scripts, hostile lists of hosts, and hostile variables.

The variables are those by which other programs, such as Slurm, start a run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from itertools import pairwise, takewhile
from pathlib import Path

import pytest

from .forks import Ended, Forks, faults

SMALL = [
    "model=rnnt_small",
    "device.threads=1",
    "data.train.utterances=20",
    "data.valid.unheard.utterances=4",
]
MOST_DIRECTIVES = 12  # of a rendered script
PROGRAMS = ("sbatch", "squeue", "scancel", "scontrol", "srun", "kubectl", "ssh")


@pytest.fixture
def programs(tmp_path: Path) -> dict[str, str]:
    """Return an environment with replacements of PROGRAMS. The replacement of ssh logs its arguments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    texts = dict.fromkeys(PROGRAMS, "exit 1") | {"mpirun": "echo 'mpirun (Open MPI) 5.0'"}
    texts["ssh"] = f'printf "%s\\n" "$@" ---- >> {tmp_path / "ssh.log"}; exit 255'
    for name, text in texts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "OMPI_ALLOW_RUN_AS_ROOT": "1"}


def quoted(text: str) -> str:
    """Quote ``text`` for Hydra's grammar."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def submitted_text(script: str) -> str:
    """Return the here-document that a script gives to sbatch or kubectl, or "" without one."""
    match = re.search(r" <<'(END_OF_TEXT_*)'\n(.*?)^\1$", script, re.DOTALL | re.MULTILINE)
    return match[2] if match else ""


def shell_faults(script: str, folder: Path) -> list[str]:
    """Return the errors of a shell and the injected directives of Slurm in a script."""
    job_script = submitted_text(script)
    found = []
    check = ["sh", "-n"]
    for text in (script, job_script):
        done = subprocess.run(check, input=text, text=True, capture_output=True, cwd=folder, check=False)
        if done.returncode:
            found.append(f"sh: {done.stderr}")
    # sbatch reads no directive after the first command.
    head = takewhile(lambda line: not line.strip() or line.startswith("#"), job_script.splitlines())
    directives = [line for line in head if line.startswith("#SBATCH")]
    if len(directives) > MOST_DIRECTIVES:
        found.append(f"{len(directives)} directives: {directives}")
    return found + [line for line in directives if "--wrap" in line.split("=")[0]]


def kubernetes_faults(script: str) -> list[str]:
    # Each document ends with a line "}".
    documents = submitted_text(script).split("\n}\n")[:-1]
    kinds = [json.loads(document + "}")["kind"] for document in documents]
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
    "a right-to-left override": "a\u202eb",
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


def faults_of_dry_run(ended: Ended, launcher: str, folder: Path) -> list[str]:
    """Return the faults of a dry run, and of the script that it printed."""
    found = faults(ended, canaries=[folder / "CANARY"])
    if ended.code or not ended.out.strip():
        return found
    if launcher == "kubernetes":
        return found + kubernetes_faults(ended.out)
    return found + shell_faults(ended.out, folder)


def message_of(faults_by_name: dict[str, list[str]]) -> str:
    return "\n".join(f"{name}: {found}" for name, found in faults_by_name.items())


@pytest.mark.timeout(900)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_run_directory_of_any_name(
    launcher: str, programs: dict[str, str], forks: Forks, tmp_path: Path
) -> None:
    faults_by_name = {}
    for name, text in NAMES.items():
        line = [*SMALL, *LAUNCHERS[launcher], "dry_run=true", f"run_dir={quoted(f'{tmp_path}/n/{text}')}"]
        line += [f"launcher.volumes={{a: {tmp_path}}}"] if launcher == "kubernetes" else []
        ended = forks.run("train", *line, cwd=tmp_path, environment=programs)
        found = faults_of_dry_run(ended, launcher, tmp_path)
        if found:
            faults_by_name[name] = found
    assert not faults_by_name, message_of(faults_by_name)


KEYS = {
    "slurm": ("name", "partition", "account", "time"),
    "kubernetes": ("image", "service_account", "namespace", "memory", "python", "name"),
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("launcher", KEYS)
def test_a_key_of_any_text(launcher: str, programs: dict[str, str], forks: Forks, tmp_path: Path) -> None:
    faults_by_name = {}
    for number, (name, text) in enumerate(NAMES.items()):
        # To save time, a text is tried with every second key, and the next text with the other keys.
        first_key = number % 2
        for key in KEYS[launcher][first_key::2]:
            line = [*SMALL, *LAUNCHERS[launcher], "dry_run=true", f"run_dir={tmp_path}/run"]
            line += [f"launcher.volumes={{a: {tmp_path}}}"] if launcher == "kubernetes" else []
            line.append(f"launcher.{key}={quoted(text)}")
            ended = forks.run("train", *line, cwd=tmp_path, environment=programs)
            found = faults_of_dry_run(ended, launcher, tmp_path)
            if found:
                faults_by_name[f"{key} {name}"] = found
    assert not faults_by_name, message_of(faults_by_name)


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
    faults_by_name = {}
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
        # ssh always fails here, so its run is refused. A dry run of mpi may succeed or be refused.
        refuses = None if launcher == "mpi" else True
        found = faults(ended, refuses=refuses, canaries=[tmp_path / "CANARY"])
        log = tmp_path / "ssh.log"
        words = log.read_text(errors="replace").splitlines() if log.exists() else []
        hosts = [word for before, word in pairwise(words) if before == "--"]
        if found or any(word.startswith("-") for word in hosts):
            faults_by_name[name] = found or hosts
        log.unlink(missing_ok=True)
    assert not faults_by_name, message_of(faults_by_name)


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
    faults_by_name = {}
    (tmp_path / "hosts").write_text("127.0.0.1\n")
    for number, variables in enumerate(VARIABLES):
        line = [*SMALL, "dry_run=true"]
        if "OUTPUT_DIR" not in variables:
            line.append(f"run_dir={tmp_path}/{number}")
        if {"NNODES", "HOSTFILE"} & variables.keys():
            line.append("launcher=ssh")
        environment = {**programs, "HOSTFILE": str(tmp_path / "hosts"), **variables}
        ended = forks.run("train", *line, cwd=tmp_path, environment=environment)
        found = faults(ended, canaries=[tmp_path / "CANARY"])
        if found:
            faults_by_name[str(variables)[:80]] = found
    assert not faults_by_name, message_of(faults_by_name)

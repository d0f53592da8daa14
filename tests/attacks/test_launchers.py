"""Names, lists of hosts and variables of strangers: what launchers render and run is one word for each."""

from __future__ import annotations

import json
import os
import re
import subprocess
from itertools import pairwise, takewhile
from pathlib import Path

import pytest

from .payloads import RUN
from .runner import faults, run

pytestmark = pytest.mark.nightly

SMALL = ("recipe=demo", "device.threads=1", "data.train.utterances=20", "data.valid.unheard.utterances=4")
LAUNCHERS = {
    "torchrun": ("launcher=torchrun", "world_size=2"),
    "slurm": ("launcher=slurm",),
    "kubernetes": ("launcher=kubernetes", "launcher.image=x", "launcher.volumes={a: /}"),
    "mpi": ("launcher=mpi",),
}
NAMES = {
    "a shell": f"a;{RUN};$({RUN})`{RUN}`'\"",
    "a directive of Slurm": "a\n#SBATCH --wrap=x",
    "a document of YAML": 'x"\n---\napiVersion: v1\nkind: Pod\nmetadata: {name: evil}\n#',
    "a macro": "a$$b${x}$(RANK)%j",
    "an escape": "a\x1b[31mb\u202e\u2028",
    "an option": "-rf",
}
KEYS = {"slurm": "partition", "kubernetes": "memory"}
HOSTS = {
    "an option": b"-oProxyCommand=touch${IFS}CANARY\n",
    "a command": b"a;touch${IFS}CANARY\n",
    "an option of a user": b"root@-oProxyCommand=x\n",
    "10^6 lines": b"a\n" * 10**6,
    "an escape": b"a\x1b]0;x\x07\n",
}
VARIABLES = (
    {"NUM_STEPS": "9" * 5_000},
    {"RANK": "0", "WORLD_SIZE": "1000000000"},
    {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": f"$({RUN})", "MASTER_PORT": "9" * 50},
    {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x999999)" * 100},
    {"SPEECHTRAIN_ALLOW_TARGETS": ",,..,os,\x1b"},
    {"HOSTFILE": "/dev/zero", "NNODES": "2"},
)


@pytest.fixture
def programs(tmp_path: Path) -> dict[str, str]:
    """An environment with replacements of the programs of clusters. ssh logs its arguments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    texts = dict.fromkeys(("sbatch", "squeue", "scancel", "scontrol", "srun", "kubectl"), "exit 1")
    texts["mpirun"] = "echo 'mpirun (Open MPI) 5.0'"
    texts["ssh"] = f'printf "%s\\n" "$@" ---- >> {tmp_path / "ssh.log"}; exit 255'
    for name, text in texts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "OMPI_ALLOW_RUN_AS_ROOT": "1"}


def quoted(text: str) -> str:
    """Quote ``text`` for Hydra's grammar."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def faults_of_script(script: str, launcher: str, folder: Path) -> list[str]:
    """Return the errors of a shell, the injected directives of Slurm, and the injected documents."""
    match = re.search(r" <<'(END_OF_TEXT_*)'\n(.*?)^\1$", script, re.DOTALL | re.MULTILINE)
    submitted = match[2] if match else ""
    if launcher == "kubernetes":
        documents = submitted.split("\n}\n")[:-1]
        kinds = sorted(json.loads(document + "}")["kind"] for document in documents)
        return [] if kinds == ["Job", "Service"] else [f"documents {kinds}"]
    found = []
    for text in (script, submitted):
        done = subprocess.run(
            ["sh", "-n"], input=text, text=True, capture_output=True, cwd=folder, check=False
        )
        found += [f"sh: {done.stderr}"] if done.returncode else []
    # sbatch reads no directive after the first command.
    head = takewhile(lambda line: not line.strip() or line.startswith("#"), submitted.splitlines())
    return found + [line for line in head if line.startswith("#SBATCH --wrap")]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_name_is_one_word(launcher: str, programs: dict[str, str], tmp_path: Path) -> None:
    told = {}
    for name, text in NAMES.items():
        keys = [*SMALL, *LAUNCHERS[launcher], "dry_run=true", f"run_dir={quoted(f'{tmp_path}/n/{text}')}"]
        if launcher in KEYS:
            keys.append(f"launcher.{KEYS[launcher]}={quoted(text)}")
        ended = run(tmp_path, "train", *keys, environment=programs)
        told[name] = faults(ended, tmp_path)
        if ended.code == 0:
            told[name] += faults_of_script(ended.out, launcher, tmp_path)
    assert {name: found for name, found in told.items() if found} == {}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("launcher", [pytest.param("ssh", marks=pytest.mark.ci_share), "mpi"])
def test_a_host_is_one_word(launcher: str, programs: dict[str, str], tmp_path: Path) -> None:
    hosts, log = tmp_path / "hosts", tmp_path / "ssh.log"
    for name, text in HOSTS.items():
        hosts.write_bytes(text)
        keys = [*SMALL, f"launcher={launcher}", f"launcher.hostfile={hosts}", f"run_dir={tmp_path}/run"]
        keys += ["dry_run=true"] if launcher == "mpi" else []
        ended = run(tmp_path, "train", *keys, environment=programs)
        # ssh always fails here, so its run is refused. A dry run of mpi may succeed or be refused.
        assert faults(ended, tmp_path, None if launcher == "mpi" else True) == [], name
        words = log.read_text(errors="replace").splitlines() if log.exists() else []
        called = [word for before, word in pairwise(words) if before == "--"]
        assert not any(word.startswith("-") for word in called), name
        log.unlink(missing_ok=True)


@pytest.mark.timeout(900)
def test_a_variable_is_a_value(programs: dict[str, str], tmp_path: Path) -> None:
    for variables in VARIABLES:
        keys = [*SMALL, "dry_run=true", f"run_dir={tmp_path}/run"]
        keys += ["launcher=ssh"] if "NNODES" in variables else []
        ended = run(tmp_path, "train", *keys, environment={**programs, **variables})
        assert faults(ended, tmp_path) == [], variables

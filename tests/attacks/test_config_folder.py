"""A stranger's folder for --config-dir, and a launcher that his run names: neither runs anything of his."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from .forks import Ended, Forks, faults
from .test_config_run import put

SMALL = [
    *("model=rnnt_small", "device.threads=1", "device.autotune=false", "data.workers=0", "tracking=none"),
    *("data.train.utterances=20", "data.valid.unheard.utterances=4", "trainer.max_steps=1"),
]
OWN = "the user's own text\n"


class Place:
    """A stranger's folder, the file that his code would write, and a file of the user's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.canary, self.victim = folder / "canary", folder / "victim"
        self.victim.write_text(OWN)
        (folder / "hosts").write_text("127.0.0.1\n")
        (folder / "modules").mkdir()
        ran = f"open({str(self.canary)!r}, 'w')\n"
        part = "from speechtrain.features.augment import Augment\nclass Own(Augment):\n    pass\n"
        for name, text in {"sitecustomize": ran, "usercustomize": ran, "strange": ran + part}.items():
            (folder / "modules" / f"{name}.py").write_text(text)
        self.script = self.executable("script", "echo 'mpirun (Open MPI) 5.0'")

    def executable(self, name: str, more: str = "") -> Path:
        path = self.folder / name
        path.write_text(f"#!/bin/sh\ntouch {self.canary}\n{more}\n")
        path.chmod(0o755)
        return path

    def fill(self, text: str) -> str:
        """``text`` with the places in it."""
        places = {"CANARY": self.canary, "VICTIM": self.victim, "SCRIPT": self.script, "HERE": self.folder}
        for name, path in places.items():
            text = text.replace(name, str(path))
        return text

    def written(self, files: dict[str, str]) -> Path:
        conf = self.folder / "conf"
        for name, text in files.items():
            (conf / name).parent.mkdir(parents=True, exist_ok=True)
            (conf / name).write_text(self.fill(text))
        return conf

    def faults(self, ended: Ended, refuses: bool | None = True) -> list[str]:
        changed = [] if self.victim.read_text() == OWN else ["the user's file has changed"]
        return [*faults(ended, refuses=refuses, canaries=[self.canary]), *changed]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def node(text: str) -> dict[str, str]:
    """A recipe that sets keys anywhere."""
    return {"recipe/strange.yaml": f"# @package _global_\n{text}"}


def handler(text: str) -> dict[str, str]:
    root = "root: {level: DEBUG, handlers: [x]}"
    return node(f"hydra:\n  job_logging:\n    version: 1\n    {root}\n    handlers: {{x: {{{text}}}}}\n")


def environment(text: str) -> dict[str, str]:
    return node(f"hydra:\n  job:\n    env_set:\n      {text}\n")


def launcher(name: str, text: str) -> dict[str, str]:
    return node(f"defaults:\n  - override /launcher: {name}\nlauncher:\n  {text}\n")


POPEN = "{_target_: subprocess.Popen, args: [touch, CANARY]}"
REFUSED: dict[str, dict[str, str]] = {
    "a program of mpi": launcher("mpi", "program: SCRIPT"),
    "a program of mpi by another key": launcher("mpi", "program: ${launcher.name}\n  name: SCRIPT"),
    "a program in a list": launcher("mpi", "program: [SCRIPT]"),
    "options of mpi": launcher("mpi", "options: [--mca, plm_rsh_agent, SCRIPT]"),
    "options of ssh": launcher("ssh", "hostfile: HERE/hosts\n  options: ['-oProxyCommand=touch CANARY']"),
    "options of ssh by another key": launcher(
        "ssh", "hostfile: HERE/hosts\n  options: ['-oProxyCommand=${seed}']"
    ),
    "a python of ssh": launcher("ssh", "hostfile: HERE/hosts\n  python: '$(touch CANARY)'"),
    "a python that is SCRIPT": launcher("ssh", "hostfile: HERE/hosts\n  python: SCRIPT"),
    "options of kubectl": launcher("kubernetes", "image: x\n  options: ['--kubeconfig=HERE/kube']"),
    "options of sbatch": launcher("slurm", "options: ['--wrap=touch CANARY']"),
    "hosts": launcher("ssh", "hostfile: HERE/hosts"),
    "hosts of mpi": launcher("mpi", "hostfile: HERE/hosts"),
    "an image": launcher("kubernetes", "image: evil/image\n  volumes: {a: HERE}"),
    "rights": launcher("kubernetes", "service_account: admin"),
    "secrets": launcher("kubernetes", "env_from_secrets: [keys]"),
    "a pod": launcher("kubernetes", "image: x\n  pod: {spec: {hostPID: true}}"),
    "a launcher of his own": {
        "launcher/mine.yaml": "_target_: speechtrain.launchers.mpi.Mpi\nprogram: SCRIPT\n",
        **node("defaults:\n  - override /launcher: mine\n"),
    },
    "our launcher replaced": {
        "launcher/auto.yaml": "_target_: speechtrain.launchers.mpi.Mpi\nprogram: SCRIPT\n",
        "launcher/mpi.yaml": "_target_: launchers.mpi.Mpi\nprogram: SCRIPT\n",
        **node("defaults:\n  - override /launcher: mpi\n"),
    },
    "allowed targets": environment("SPEECHTRAIN_ALLOW_TARGETS: subprocess")
    | {"data/x.yaml": f"valid: {{x: {POPEN}}}\n"},
    "a preloaded library": environment("LD_PRELOAD: HERE/x.so"),
    "a path of modules": environment("PYTHONPATH: HERE/modules"),
    "a path of programs": environment("PATH: HERE"),
    "copied variables": node("hydra:\n  job:\n    env_copy: [HOME]\n"),
    "a handler that is a program": handler("class: subprocess.Popen, args: [touch, CANARY]"),
    "a handler by a factory": handler("(): os.system, command: touch CANARY"),
    "a handler that runs a file": handler("(): runpy.run_path, path_name: HERE/modules/strange.py"),
    "a handler that empties a file": handler("class: logging.FileHandler, filename: VICTIM, mode: w"),
    "a handler that writes a file": handler("class: logging.FileHandler, filename: CANARY"),
    "a handler that listens": handler("class: logging.handlers.SysLogHandler"),
    "Hydra's own logging": node(
        "hydra:\n  hydra_logging:\n    version: 1\n    root: {level: DEBUG, handlers: [x]}\n"
        "    handlers: {x: {class: logging.FileHandler, filename: VICTIM, mode: w}}\n"
    ),
    "a logging choice of his": {
        "hydra/job_logging/mine.yaml": "version: 1\nhandlers: {x: {class: logging.FileHandler, "
        "filename: VICTIM, mode: w}}\nroot: {handlers: [x]}\n",
        **node("defaults:\n  - override /hydra/job_logging: mine\n"),
    },
    "our logging replaced": {
        "hydra/job_logging/none.yaml": "version: 1\nhandlers: {x: {class: logging.FileHandler, "
        "filename: VICTIM, mode: w}}\nroot: {handlers: [x]}\n",
        "hydra/job_logging/default.yaml": "version: 1\nhandlers: {x: {class: logging.FileHandler, "
        "filename: VICTIM, mode: w}}\nroot: {handlers: [x]}\n",
        "hydra/job_logging/disabled.yaml": "version: 1\nhandlers: {x: {class: logging.FileHandler, "
        "filename: VICTIM, mode: w}}\nroot: {handlers: [x]}\n",
        **node("defaults:\n  - override /hydra/job_logging: default\n"),
    },
    "verbose": node("hydra:\n  verbose: true\n"),
    "callbacks": node(f"hydra:\n  callbacks:\n    x: {POPEN}\n"),
    "a group of callbacks": {
        "hydra/callbacks/mine.yaml": f"x: {POPEN}\n",
        **node("defaults:\n  - /hydra/callbacks: mine\n"),
    },
    "a search path": node("hydra:\n  searchpath: ['file://HERE/modules']\n"),
    "a search path of modules": node("hydra:\n  searchpath: [pkg://strange]\n"),
    "a sweeper": node(f"hydra:\n  sweeper: {POPEN}\n"),
    "a launcher of a sweep": node(f"hydra:\n  launcher: {POPEN}\n"),
    "a part of the launcher of a sweep": node(f"hydra:\n  launcher:\n    x: {POPEN}\n"),
    "a mode": node("hydra:\n  mode: MULTIRUN\n"),
    "an output folder elsewhere": node("hydra:\n  output_subdir: ../../elsewhere\n"),
    "a change of folder": node("hydra:\n  job:\n    chdir: true\n"),
    "a class beside the config": node("augment:\n  _target_: strange.Own\n"),
    "a class of the system": node("augment:\n  _target_: os.system\n  command: touch CANARY\n"),
    "a class in a class": node(f"data:\n  valid:\n    x: {POPEN}\n"),
    "a class in a list": node(f"encoder:\n  features:\n    f_max: [{POPEN}]\n"),
    "a key that allows": node("allow_targets: strange\naugment:\n  _target_: strange.Own\n"),
    "an object in YAML": node("seed: !!python/object/apply:os.system ['touch CANARY']\n"),
    "lists of lists": node(
        "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10))
    ),
    "500 levels": node("a: " + "{b: " * 500 + "1" + "}" * 500),
    "values tenfold": node(
        "model:\n" + "".join(f"  z{i}: '{f'${{model.z{i - 1}}}' * 10 if i else 'xy'}'\n" for i in range(10))
    ),
    "defaults in a circle": {
        "recipe/strange.yaml": "defaults:\n  - /recipe: other\n",
        "recipe/other.yaml": "defaults:\n  - /recipe: strange\n",
    },
    "defaults by a value": node("defaults:\n  - override /launcher: ${oc.env:HOME}\n"),
    "defaults of another place": node("defaults:\n  - /../../../../etc/passwd@x: y\n"),
    "a package elsewhere": {"recipe/strange.yaml": "# @package hydra.job.env_set\nLD_PRELOAD: HERE/x.so\n"},
    "a package of callbacks": {"recipe/strange.yaml": f"# @package hydra.callbacks.x\n{POPEN}\n"},
    "a package of a launcher": {"recipe/strange.yaml": "# @package launcher\nprogram: SCRIPT\n"},
    "a package by the defaults": {
        "recipe/strange.yaml": "defaults:\n  - env@hydra.job.env_set: x\n",
        "recipe/env/x.yaml": "LD_PRELOAD: HERE/x.so\n",
    },
    "the primary config": {"config.yaml": "hydra:\n  job:\n    env_set: {LD_PRELOAD: HERE/x.so}\n"}
    | environment("X: y"),
    "no UTF-8": {"recipe/strange.yaml": "# @package _global_\nseed: \udcff\n"},
    "an escape": node('seed: "\\e[31m\\u202e"\n'),
}

UNUSED = ("a logging choice of his", "our logging replaced", "a mode")
"""Hydra takes its own instead, so there is nothing to refuse."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", REFUSED)
def test_a_folder_sets_nothing_that_runs(name: str, place: Place, forks: Forks) -> None:
    files = {f: t.encode("utf-8", "replace").decode() for f, t in REFUSED[name].items()}
    conf = place.written(files)
    (place.folder / "kube").write_text(kubeconfig(place.executable("kube.sh")))
    line = ["--config-dir", conf, *SMALL, "recipe=strange", f"run_dir={place.folder / 'run'}"]
    assert place.faults(forks.run("train", *line, "dry_run=true", cwd=place.folder), None) == []
    refuses = None if name in UNUSED else True
    assert place.faults(forks.run("train", *line, cwd=place.folder), refuses) == []
    ended = forks.run("train", *line, "-m", "seed=1,2", "dry_run=true", cwd=place.folder)
    told = ended.err.replace("speechtrain: error: job ", "job ")  # a line for each, and one for all
    assert place.faults(replace(ended, err=told), None) == []


def kubeconfig(script: Path) -> str:
    user = {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": str(script)}}
    context = {"name": "a", "context": {"cluster": "a", "user": "a"}}
    cluster = {"name": "a", "cluster": {"server": "https://127.0.0.1:1"}}
    users = {"current-context": "a", "contexts": [context], "clusters": [cluster]}
    return json.dumps({"apiVersion": "v1", "kind": "Config", **users, "users": [{"name": "a", "user": user}]})


HARMLESS: dict[str, dict[str, str]] = {
    "a run directory": node("run_dir: HERE/elsewhere\n"),
    "a folder of Hydra's": node("hydra:\n  run:\n    dir: HERE/elsewhere\n"),
    "a folder of a sweep": node("hydra:\n  sweep:\n    dir: HERE/elsewhere\n    subdir: x\n"),
    "values of a sweep": node("hydra:\n  sweeper:\n    params: {seed: '1,2'}\n"),
    "a name": launcher("mpi", "forward: [HOME]"),
    "an empty file": {"recipe/strange.yaml": "# @package _global_\n"},
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", HARMLESS)
def test_a_folder_may_say_where(name: str, place: Place, forks: Forks) -> None:
    conf = place.written(HARMLESS[name])
    ended = forks.run(
        "train", "--config-dir", conf, *SMALL, "recipe=strange", "dry_run=true", cwd=place.folder
    )
    assert place.faults(ended, None if name == "a name" else False) == []


# --- a launcher that a run names ----------------------------------------------------------------

PROGRAMS: dict[str, Callable[[Place], dict[str, Any]]] = {
    "mpi": lambda place: {"_target_": "speechtrain.launchers.mpi.Mpi", "program": str(place.script)},
    "mpi's options": lambda place: {
        "_target_": "speechtrain.launchers.mpi.Mpi",
        "options": ["--launch-agent", str(place.script)],
    },
    "ssh": lambda place: {
        "_target_": "speechtrain.launchers.ssh.SSH",
        "hostfile": str(place.folder / "hosts"),
        "options": [f"-oProxyCommand=touch {place.canary}"],
    },
    "ssh's python": lambda place: {
        "_target_": "speechtrain.launchers.ssh.SSH",
        "hostfile": str(place.folder / "hosts"),
        "python": f"$(touch {place.canary})",
    },
    "hosts": lambda place: {
        "_target_": "speechtrain.launchers.ssh.SSH",
        "hostfile": str(place.folder / "run" / "hosts"),
    },
    "an image": lambda place: {
        "_target_": "speechtrain.launchers.kubernetes.Kubernetes",
        "image": "evil/image",
        "volumes": {"a": str(place.folder)},
    },
    "kubernetes": lambda place: {
        "_target_": "speechtrain.launchers.kubernetes.Kubernetes",
        "image": "x",
        "volumes": {"a": "/"},
        "options": [f"--kubeconfig={place.folder / 'kube'}"],
    },
    "slurm": lambda place: {
        "_target_": "speechtrain.launchers.slurm.Slurm",
        "options": [f"--wrap=touch {place.canary}"],
    },
    "a class in it": lambda place: {
        "_target_": "speechtrain.launchers.local.Local",
        "options": {"_target_": "subprocess.Popen", "args": ["touch", str(place.canary)]},
    },
    "an interpolated one": lambda place: {
        "_target_": "speechtrain.launchers.mpi.Mpi",
        "program": "${launcher.forward.0}",
        "forward": [str(place.script)],
    },
}
TYPED: list[list[str]] = [[], ["launcher=mpi"], ["launcher.program=mpirun"], ["launcher.options=[]"]]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_run_names_no_program(name: str, place: Place, forks: Forks, good: Path) -> None:
    """Also where its run.json says that the user has typed it."""
    run_dir = place.folder / "run"
    shutil.copytree(good, run_dir)
    (place.folder / "kube").write_text(kubeconfig(place.executable("kube.sh")))
    content = yaml.safe_load((run_dir / "config.yaml").read_text())
    stranger = PROGRAMS[name](place)
    put("launcher", with_classes(stranger))(content)
    put("run_dir", str(run_dir))(content)
    (run_dir / "config.yaml").write_text(yaml.safe_dump(content))
    told = [f"launcher.{key}={value}" for key, value in stranger.items()]
    for typed in TYPED:
        overrides = [*told, *typed, *(f"launcher.{k}={json.dumps(v)}" for k, v in stranger.items())]
        (run_dir / "run.json").write_text(json.dumps({"argv": overrides, "overrides": overrides}))
        for more in (["dry_run=true"], []):
            line = [f"run_dir={run_dir}", *typed, *more]
            ended = forks.run("train", *line, cwd=place.folder, environment={"SSH_AUTH_SOCK": ""})
            assert place.faults(ended, True if not typed else None) == [], (typed, more)


def with_classes(stranger: dict[str, Any]) -> dict[str, Any]:
    """The launcher's node with the name that its class has here."""
    import importlib
    import inspect

    module = str(stranger["_target_"]).rpartition(".")[0]
    found = importlib.import_module(module)
    classes = [n for n, c in vars(found).items() if inspect.isclass(c) and c.__module__ == module]
    name = next(n for n in classes if n.lower() == str(stranger["_target_"]).rpartition(".")[2].lower())
    return {**stranger, "_target_": f"{module}.{name}"}


def test_what_the_user_types_is_run(place: Place, forks: Forks) -> None:
    """The attacks above would work if they were the user's words."""
    line = [*SMALL, "launcher=mpi", f"launcher.program={place.script}", f"run_dir={place.folder / 'run'}"]
    forks.run("train", *line, "dry_run=true", cwd=place.folder, environment={"OMPI_ALLOW_RUN_AS_ROOT": "1"})
    assert os.path.lexists(place.canary)

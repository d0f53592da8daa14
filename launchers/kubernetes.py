"""Launcher for a Kubernetes Indexed Job: renders and submits it, and waits for it."""

from __future__ import annotations

import json
import shlex
import zlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from string import Template
from typing import Any

from speechtrain.errors import ConfigError, RunError, print_notice
from speechtrain.files import write_text
from speechtrain.launch.client import ask_client, call_client
from speechtrain.launch.launcher import (
    Job,
    Launcher,
    LaunchResult,
    forwarded_environment,
    here_document,
)
from speechtrain.launch.node_agent import node_command
from speechtrain.launch.rendezvous import rendezvous_port
from speechtrain.launch.supervise import wait_for_job

MANIFEST = "kubernetes.json"
"""File in the run directory: the submitted manifest."""

_TEMPLATE = Path(__file__).parent / "templates" / "kubernetes.json"
_INSTANCE_LABEL = "app.kubernetes.io/instance"
_INDEX_LABEL = "batch.kubernetes.io/job-completion-index"  # a pod's number in its Job, from 0
_TITLE = "launcher=kubernetes: kubectl"  # begins the messages on failed calls


@dataclass(eq=False)
class Kubernetes(Launcher):
    """Run ``world_size`` ranks in ``nodes`` pods of ``image``. Torchrun starts the ranks of each pod.

    One of the paths in ``volumes`` contains the run directory, and this machine has it at the same path. An
    evicted pod has ``grace_seconds`` to save. All pods then start again and continue the run. After other
    failures the Job restarts up to ``restarts`` times.

    With ``wait`` the command waits until the run is over. Its first signal makes the ranks save and ends the
    pods, and the second ends them at once.
    """

    files = (*Launcher.files, MANIFEST)
    programs = ("kubectl",)
    image: str
    nodes: int = 1
    python: str = "python"
    cpus: int | float | str | None = None
    memory: str | None = None
    resources: dict[str, Any] | None = None
    volumes: dict[str, str] | None = None
    env_from_secrets: list[str] | None = None
    forward: list[str] | None = None
    pod: dict[str, Any] | None = None
    restarts: int = 3
    grace_seconds: int = 300
    shutdown_seconds: int = 60
    wait: bool = True
    poll_seconds: float = 5.0
    options: list[str] | None = None

    def __post_init__(self) -> None:
        self.check_minimum(1, "nodes", "grace_seconds", "shutdown_seconds")
        self.check_minimum(0, "restarts")
        self.check_minimum(0.01, "poll_seconds")
        self._mount_paths: dict[str, str] = self.volumes or {}
        self._kubectl = ["kubectl", *(self.options or [])]

    def check(self, job: Job) -> None:
        job.ranks_per_node(self.nodes)
        if self._is_mounted(job.run_dir):
            return
        paths = ", ".join(self._mount_paths.values()) or "nothing"
        raise ConfigError(
            f"run_dir={job.run_dir}: the pods do not see it (mounted: {paths}). Mount its claim at the "
            "same path, as in 'launcher.volumes={CLAIM: /shared}', and set run_dir below that path"
        )

    def launch(self, job: Job) -> LaunchResult:
        name = _name(job)
        manifest = self.manifest(job)
        delete = [*self._kubectl, "delete", *_job_and_service(name)]
        earlier_job = call_client([*self._kubectl, *_get_job(name)], f"{_TITLE} get")
        if earlier_job and _failure(earlier_job) is None:
            raise RunError(
                f"job.batch/{name} is still in the cluster. Wait for it, or `{shlex.join(delete)}`"
            )
        call_client([*delete, "--ignore-not-found", "--cascade=foreground"], f"{_TITLE} delete")
        call_client([*self._kubectl, "apply", "--filename=-"], f"{_TITLE} apply", manifest)
        write_text(job.run_dir / MANIFEST, manifest)
        first_pod = f"--selector={_INSTANCE_LABEL}={name},{_INDEX_LABEL}=0"
        follow = shlex.join([*self._kubectl, "logs", "--follow", "--tail=-1", first_pod])
        print(f"submitted job.batch/{name}; to follow its log: {follow}", flush=True)
        if not self.wait:
            stop = shlex.join(delete)
            return LaunchResult(0, f"`{stop}` saves the run and ends it; the same command continues")
        code = wait_for_job(partial(self._exit_code, name), partial(self._stop, name), self.poll_seconds)
        ask_client([*self._kubectl, "delete", f"service/{name}", "--ignore-not-found", "--wait=false"])
        return LaunchResult(code)

    def render(self, job: Job) -> str:
        return here_document(shlex.join([*self._kubectl, "apply", "--filename=-"]), self.manifest(job))

    def manifest(self, job: Job) -> str:
        """Return the objects to submit: the Service that gives the pods host names, and the Indexed Job.

        The text is JSON, because readers of YAML disagree about values such as ``1e3``. A run needs all its
        pods, so they fail together and start again together. Pods that exit because of a signal or a drained
        node do not count as failures. An error of the user ends the Job.
        """
        resources = {"cpu": self.cpus, "memory": self.memory, **(self.resources or {})}
        working_dir = ""  # the image's own working directory
        if self._is_mounted(Path.cwd()):
            working_dir = str(Path.cwd())
        texts = {
            "name": json.dumps(_name(job)),
            "port": rendezvous_port(job.run_dir),
            "nodes": self.nodes,
            "failures": self.restarts * self.nodes,  # Kubernetes counts the failures of pods.
            "grace_seconds": self.grace_seconds,
            "image": json.dumps(self.image),
            "command": json.dumps(self._command(job)),
            "working_dir": json.dumps(working_dir),
            "shutdown_seconds": json.dumps(str(self.shutdown_seconds)),
            "quantities": json.dumps({name: str(n) for name, n in resources.items() if n is not None}),
        }
        service, pods = json.loads(Template(_TEMPLATE.read_text()).substitute(texts))
        pod = pods["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        for name, text in forwarded_environment(job, self.forward).items():
            container["env"].append({"name": name, "value": _escape(text)})
        for name in self.env_from_secrets or ():
            container["envFrom"].append({"secretRef": {"name": name}})
        for number, (claim, path) in enumerate(self._mount_paths.items()):
            volume = f"volume-{number}"  # The name of a claim may be too long for a volume.
            pod["volumes"].append({"name": volume, "persistentVolumeClaim": {"claimName": claim}})
            container["volumeMounts"].append({"name": volume, "mountPath": path})
        pod.update(self.pod or {})
        return "".join(json.dumps(document, indent=2) + "\n" for document in (service, pods))

    def _command(self, job: Job) -> list[str]:
        """Return the container's command. It uses no shell, so that its first process handles SIGTERM."""
        node, address = "$(JOB_COMPLETION_INDEX)", "$(POD_IP)"
        name = _name(job)
        command = node_command(
            job,
            self.nodes,
            self.python,
            f"--outcome={job.run_dir}",
            node=node,
            address=address,
            master=f"{name}-0.{name}",
            port=rendezvous_port(job.run_dir),
        )
        expanded = (f"--node={node}", f"--address={address}")
        return [word if word in expanded else _escape(word) for word in command]

    def _is_mounted(self, path: Path) -> bool:
        """Return whether a volume contains ``path``."""
        return any(path.is_relative_to(mount_path) for mount_path in self._mount_paths.values())

    def _exit_code(self, name: str) -> int | None:
        """Return 0 for a Job that has succeeded or is deleted, and 1 for one that has failed.

        Returns None while the Job runs or the cluster does not answer.
        """
        content = ask_client([*self._kubectl, *_get_job(name)])
        if content is None:
            return None
        failure = _failure(content) if content else ""
        if failure:
            print_notice(f"job.batch/{name}: {failure}")
        return None if failure is None else int(failure != "")

    def _stop(self, name: str, signals: int) -> bool:
        """Delete a Job and its pods, which get SIGTERM and the grace period to save.

        A second signal ends the pods at once. Returns whether the cluster has accepted the requests.
        """
        delete = [*self._kubectl, "delete", "--wait=false", "--ignore-not-found"]
        is_accepted = ask_client([*delete, *_job_and_service(name), "--cascade=foreground"]) is not None
        if is_accepted and signals > 1:
            pods = ["pods", f"--selector={_INSTANCE_LABEL}={name}", "--now"]
            is_accepted = ask_client([*delete, *pods]) is not None
        return is_accepted


def _failure(content: str) -> str | None:
    """Return why the Job of kubectl's JSON ``content`` failed, "" if it succeeded, or None if it runs."""
    for condition in json.loads(content).get("status", {}).get("conditions") or []:
        if condition.get("status") == "True" and condition.get("type") == "Complete":
            return ""
        if condition.get("status") == "True" and condition.get("type") == "Failed":
            return f"{condition.get('reason')}: {condition.get('message')}"
    return None


def _name(job: Job) -> str:
    """Return the name of a run's Job and Service, so that only one command can train the run at a time."""
    return f"speechtrain-{zlib.crc32(str(job.run_dir).encode()):08x}"


def _escape(text: str) -> str:
    """Return ``text`` escaped for Kubernetes, which expands ``$(NAME)`` and turns ``$$`` into ``$``."""
    return text.replace("$", "$$")


def _job_and_service(name: str) -> list[str]:
    """Return the names of a run's Job and Service, as kubectl's arguments."""
    return [f"job.batch/{name}", f"service/{name}"]


def _get_job(name: str) -> list[str]:
    """Return kubectl's arguments that print a Job as JSON, or nothing if it does not exist."""
    return ["get", f"job.batch/{name}", "--output=json", "--ignore-not-found"]

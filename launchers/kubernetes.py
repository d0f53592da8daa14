"""Launcher for a Kubernetes Indexed Job: renders and submits it, and waits for it."""

from __future__ import annotations

import json
import re
import shlex
import zlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from speechtrain.errors import EXIT_PREEMPTED, ConfigError, DataError, Diverged, RunError, print_notice
from speechtrain.files import write_text
from speechtrain.launcher import (
    AGENT,
    Job,
    Launcher,
    LaunchResult,
    escape_for_torchrun,
    forwarded_environment,
    here_document,
)
from speechtrain.supervision.client import ask_client, call_client
from speechtrain.supervision.node_agent import MODULE
from speechtrain.supervision.rendezvous import agent_command, rendezvous_port
from speechtrain.supervision.supervise import wait_for_job

MANIFEST = "kubernetes.json"
"""File in the run directory: the submitted manifest."""

_INSTANCE = "app.kubernetes.io/instance"
_INDEX = "batch.kubernetes.io/job-completion-index"
_CONTAINER = "pytorch"
_MEMORY = "shared-memory"
_WAIT_SECONDS = 24 * 3600  # for peers. Pods may wait in a queue for hours.
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?")  # of a Service. Pods append their number.
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


@dataclass(eq=False)
class Kubernetes(Launcher):
    """Run ``world_size`` ranks in ``nodes`` pods of ``image``. Torchrun starts the ranks of each pod.

    The pods belong to an Indexed Job, and a Service gives them names. ``volumes`` maps claims to their
    mount paths. One claim, mounted at the same path on this machine, must hold the run directory. An
    evicted pod has ``grace_seconds`` to save. All pods then start again and continue the run. After other
    failures the Job restarts up to ``restarts`` times.

    ``resources`` (``nvidia.com/gpu: 8``) adds to the ``cpus`` and ``memory`` of each pod, ``pod`` adds
    fields to the pods' spec, and ``options`` adds options to kubectl. ``wait`` waits until the run is
    over. The first signal then makes the ranks save and ends the pods, and the second ends them at once.
    """

    files = (*Launcher.files, MANIFEST)
    programs = ("kubectl",)
    image: str
    nodes: int = 1
    namespace: str | None = None
    name: str | None = None
    python: str = "python"
    cpus: int | float | str | None = None
    memory: str | None = None
    resources: dict[str, Any] | None = None
    volumes: dict[str, Any] | None = None
    shared_memory: str | None = "8Gi"
    node_selector: dict[str, Any] | None = None
    service_account: str | None = None
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
        if self.poll_seconds <= 0:
            raise ValueError(f"poll_seconds={self.poll_seconds}: it must be above 0")
        if self.namespace is not None and not _NAMESPACE.fullmatch(self.namespace):
            raise ValueError(f"namespace={self.namespace!r}: small letters, digits and -, at most 63")
        if self.name is not None and not _NAME.fullmatch(self.name):
            raise ValueError(f"name={self.name!r}: use 1 to 50 of a-z, 0-9 and -, a letter first, no - last")
        self._mounts = {claim: str(path) for claim, path in (self.volumes or {}).items()}
        for claim, path in self._mounts.items():
            if not PurePosixPath(path).is_absolute():
                raise ValueError(f"volumes.{claim}={path}: it must be an absolute path")
        self._kubectl = ["kubectl", *(self.options or [])]
        if self.namespace is not None:
            self._kubectl.append(f"--namespace={self.namespace}")

    def check(self, job: Job) -> None:
        job.ranks_per_node(self.nodes)
        if self._is_mounted(job.run_dir):
            return
        mounted = ", ".join(self._mounts.values()) or "nothing"
        raise ConfigError(
            f"run_dir={job.run_dir}: the pods do not see it (mounted: {mounted}). Mount its claim at the "
            "same path, as in 'launcher.volumes={CLAIM: /shared}', and set run_dir below that path"
        )

    def launch(self, job: Job) -> LaunchResult:
        name, manifest = self._name(job), self.manifest(job)
        self._clear(name)
        self._call("apply", "--filename=-", text=manifest)
        write_text(job.run_dir / MANIFEST, manifest)
        first_pod = f"--selector={_INSTANCE}={name},{_INDEX}=0"
        log = shlex.join([*self._kubectl, "logs", "--follow", "--tail=-1", first_pod])
        print(f"submitted job.batch/{name}; to follow its log: {log}", flush=True)
        if not self.wait:
            delete = shlex.join([*self._kubectl, "delete", *_objects(name)])
            return LaunchResult(0, f"`{delete}` saves the run and ends it; the same command continues")
        code = wait_for_job(partial(self._exit_code, name), partial(self._stop, name), self.poll_seconds)
        self._ask("delete", f"service/{name}", "--ignore-not-found", "--wait=false")
        return LaunchResult(code)

    def render(self, job: Job) -> str:
        return here_document([*self._kubectl, "apply", "--filename=-"], self.manifest(job))

    def manifest(self, job: Job) -> str:
        """Return the objects to submit, as JSON. Readers of YAML disagree about texts such as ``1e3``."""
        return "".join(f"{json.dumps(document, indent=2)}\n" for document in self.documents(job))

    def documents(self, job: Job) -> list[dict[str, Any]]:
        """Return an Indexed Job, and the Service that gives its pods names. The ranks meet in pod 0.

        A run needs all its pods, so they fail together and start again together. Pods that exit because
        of a signal or a drained node do not count as failures. An error of the user ends the Job.
        """
        name = self._name(job)
        labels = {_INSTANCE: name}
        port = rendezvous_port(job.run_dir)
        pod = {"restartPolicy": "Never", "subdomain": name, **self._pod(job, port)}
        final_codes = sorted({ConfigError.exit_code, DataError.exit_code, Diverged.exit_code})
        rules = [
            {"action": "FailJob", "onExitCodes": _codes_in(final_codes)},
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {"action": "Ignore", "onExitCodes": _codes_in([EXIT_PREEMPTED])},
        ]
        ports = [{"name": "rendezvous", "port": port}]
        service = {"clusterIP": "None", "selector": labels, "ports": ports, "publishNotReadyAddresses": True}
        spec = {
            "completionMode": "Indexed",
            "completions": self.nodes,
            "parallelism": self.nodes,
            "backoffLimit": self.restarts * self.nodes,  # Kubernetes counts pods.
            "podFailurePolicy": {"rules": rules},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        }
        return [_document("v1", "Service", name, spec=service), _document("batch/v1", "Job", name, spec=spec)]

    def _container(self, job: Job, port: int) -> dict[str, Any]:
        """Return the only container of a pod."""
        amounts = {"cpu": self.cpus, "memory": self.memory, **(self.resources or {})}
        quantities = {name: str(amount) for name, amount in amounts.items() if amount is not None}
        # An empty text means the folder of the image.
        folder = str(Path.cwd()) if self._is_mounted(Path.cwd()) else ""
        return {
            "name": _CONTAINER,
            "image": self.image,
            "command": self._command(job, port),
            "workingDir": folder,
            "envFrom": [{"secretRef": {"name": name}} for name in self.env_from_secrets or ()],
            "resources": {"requests": quantities, "limits": quantities},
            "env": self._variables(job),
            "volumeMounts": self._volume_mounts(),
        }

    def _variables(self, job: Job) -> list[dict[str, Any]]:
        """Return the environment variables of the container."""
        environment = {
            **forwarded_environment(job, self.forward),
            "PYTHONUNBUFFERED": "1",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(self.shutdown_seconds),
        }
        fields = {"JOB_COMPLETION_INDEX": f"metadata.annotations['{_INDEX}']", "POD_IP": "status.podIP"}
        variables: list[dict[str, Any]] = []
        for name, path in fields.items():
            variables.append({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}})
        for name, text in environment.items():
            variables.append({"name": name, "value": _literal(text)})
        return variables

    def _volume_mounts(self) -> list[dict[str, str]]:
        """Return the container's mounts. Volumes have numbers, because a claim's name may be too long."""
        mounts = [{"name": f"volume-{n}", "mountPath": path} for n, path in enumerate(self._mounts.values())]
        if self.shared_memory is not None:
            mounts.append({"name": _MEMORY, "mountPath": "/dev/shm"})
        return mounts

    def _command(self, job: Job, port: int) -> list[str]:
        """Return the container's command, without a shell, so that its first process handles SIGTERM."""
        name, node = self._name(job), "$(JOB_COMPLETION_INDEX)"
        run_dir, ranks = _literal(str(job.run_dir)), job.ranks_per_node(self.nodes)
        python, *on_host = map(_literal, job.on_host([], ranks, self.python))
        address = ["--address=$(POD_IP)"] if self.nodes > 1 else []
        rendezvous = [f"--node-rank={node}", f"--master-addr={name}-0.{name}", f"--master-port={port}"]
        rendezvous.append(f"--rdzv-conf=timeout={_WAIT_SECONDS}")
        return [
            *(python, "-P", "-m", MODULE, "run", *address, f"--node={node}"),
            *(f"--outcome={run_dir}", _literal(str(job.run_dir / AGENT)), "--", python, *on_host),
            *agent_command(python, ranks, self.nodes, *rendezvous),
            *(python, *(_literal(word) for word in escape_for_torchrun(job.command[1:]))),
        ]

    def _pod(self, job: Job, port: int) -> dict[str, Any]:
        volumes: list[dict[str, Any]] = [
            {"name": f"volume-{n}", "persistentVolumeClaim": {"claimName": claim}}
            for n, claim in enumerate(self._mounts)
        ]
        if self.shared_memory is not None:  # The runtime's 64 MiB are too small for loaders and collectives.
            memory = {"medium": "Memory", "sizeLimit": self.shared_memory}
            volumes.append({"name": _MEMORY, "emptyDir": memory})
        labels = {key: str(value) for key, value in (self.node_selector or {}).items()}
        return {
            "terminationGracePeriodSeconds": self.grace_seconds,
            "nodeSelector": labels,
            "serviceAccountName": self.service_account or "",
            "containers": [self._container(job, port)],
            "volumes": volumes,
            **(self.pod or {}),
        }

    def _call(self, *arguments: str, text: str = "") -> str:
        """Return the output of kubectl. Raises MachineError with the cluster's own message if it fails."""
        return call_client([*self._kubectl, *arguments], f"launcher=kubernetes: kubectl {arguments[0]}", text)

    def _ask(self, *arguments: str) -> str | None:
        """Return the output of kubectl, or None if it fails."""
        return ask_client([*self._kubectl, *arguments])

    def _is_mounted(self, path: Path) -> bool:
        return any(path.is_relative_to(mount) for mount in self._mounts.values())

    def _name(self, job: Job) -> str:
        """Return the objects' name. It is the same for all commands on a run, so that only one trains it."""
        checksum = zlib.crc32(str(job.run_dir).encode())
        return self.name or f"speechtrain-{checksum:08x}"

    def _clear(self, name: str) -> None:
        """Remove the objects of an earlier command. Raises RunError if they are still at work."""
        content = self._call(*_get(name))
        if not content.strip():
            return
        if _end(json.loads(content)) is None:
            delete = shlex.join([*self._kubectl, "delete", *_objects(name)])
            raise RunError(f"job.batch/{name} is still in the cluster. Wait for it, or `{delete}`")
        self._call("delete", *_objects(name), "--ignore-not-found", "--cascade=foreground")

    def _exit_code(self, name: str) -> int | None:
        """Return 0 for a Job that has succeeded or is deleted, and 1 for one that has failed.

        Returns None while the Job is at work or the cluster does not answer.
        """
        content = self._ask(*_get(name))
        if content is None:
            return None
        if not content.strip():
            return 0
        end = _end(json.loads(content))
        if end is None:
            return None
        has_succeeded, reason = end
        if has_succeeded:
            return 0
        print_notice(f"job.batch/{name}: {reason}")
        return 1

    def _stop(self, name: str, signals: int) -> bool:
        """Delete a Job after its pods (SIGTERM, grace period). Returns True if the cluster accepts."""
        targets = [[*_objects(name), "--cascade=foreground"]]
        if signals > 1:
            targets.append(["pods", f"--selector={_INSTANCE}={name}", "--now"])
        outputs = [self._ask("delete", *target, "--wait=false", "--ignore-not-found") for target in targets]
        return None not in outputs


def _document(version: str, kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": "speechtrain", _INSTANCE: name}
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": labels}, "spec": spec}


def _codes_in(codes: list[int]) -> dict[str, Any]:
    return {"containerName": _CONTAINER, "operator": "In", "values": codes}


def _literal(text: str) -> str:
    """Return ``text`` escaped for Kubernetes, which expands ``$(NAME)`` and turns ``$$`` into ``$``."""
    return text.replace("$", "$$")


def _objects(name: str) -> list[str]:
    """Return the names of a run's Job and Service, as kubectl's arguments."""
    return [f"job.batch/{name}", f"service/{name}"]


def _get(name: str) -> list[str]:
    return ["get", f"job.batch/{name}", "--output=json", "--ignore-not-found"]


def _end(content: dict[str, Any]) -> tuple[bool, str] | None:
    """Return whether a Job has succeeded, with the reason and message, or None while it is at work."""
    for condition in content.get("status", {}).get("conditions") or []:
        if condition.get("status") == "True" and condition.get("type") in ("Complete", "Failed"):
            texts = [condition.get("reason"), condition.get("message")]
            return condition["type"] == "Complete", ": ".join(filter(None, texts))
    return None

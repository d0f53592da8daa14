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

_INSTANCE_LABEL = "app.kubernetes.io/instance"
_INDEX_LABEL = "batch.kubernetes.io/job-completion-index"  # a pod's number in its Job, from 0
_CONTAINER = "pytorch"
_MEMORY_VOLUME = "shared-memory"
_JOIN_SECONDS = 24 * 3600  # the time limit for all pods to join. Pods may wait in a queue for hours.
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?")  # a Service's name, to which pods append their number
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


@dataclass(eq=False)
class Kubernetes(Launcher):
    """Run ``world_size`` ranks in ``nodes`` pods of ``image``. Torchrun starts the ranks of each pod.

    The pods belong to an Indexed Job, and a Service gives them host names. ``volumes`` maps the names of
    persistent volume claims to their mount paths. One of these paths must contain the run directory, and must
    be mounted at the same path on this machine.

    An evicted pod has ``grace_seconds`` to save. All pods then start again and continue the run. After other
    failures the Job restarts up to ``restarts`` times.

    Each pod requests ``cpus``, ``memory`` and ``resources``, such as ``nvidia.com/gpu: 8``. ``pod`` adds
    fields to the pods' spec, and ``options`` adds options to kubectl.

    With ``wait`` the command waits until the run is over. Its first signal makes the ranks save and ends the
    pods, and the second ends them at once.
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
        self._mount_paths = {claim: str(path) for claim, path in (self.volumes or {}).items()}
        for claim, path in self._mount_paths.items():
            if not PurePosixPath(path).is_absolute():
                raise ValueError(f"volumes.{claim}={path}: it must be an absolute path")
        self._kubectl = ["kubectl", *(self.options or [])]
        if self.namespace is not None:
            self._kubectl.append(f"--namespace={self.namespace}")

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
        name = self._name(job)
        manifest = self.manifest(job)
        self._delete_earlier_job(name)
        self._call_kubectl("apply", "--filename=-", text=manifest)
        write_text(job.run_dir / MANIFEST, manifest)
        first_pod = f"--selector={_INSTANCE_LABEL}={name},{_INDEX_LABEL}=0"
        follow = shlex.join([*self._kubectl, "logs", "--follow", "--tail=-1", first_pod])
        print(f"submitted job.batch/{name}; to follow its log: {follow}", flush=True)
        if not self.wait:
            delete = shlex.join([*self._kubectl, "delete", *_job_and_service(name)])
            return LaunchResult(0, f"`{delete}` saves the run and ends it; the same command continues")
        code = wait_for_job(partial(self._exit_code, name), partial(self._stop, name), self.poll_seconds)
        self._ask_kubectl("delete", f"service/{name}", "--ignore-not-found", "--wait=false")
        return LaunchResult(code)

    def render(self, job: Job) -> str:
        return here_document([*self._kubectl, "apply", "--filename=-"], self.manifest(job))

    def manifest(self, job: Job) -> str:
        """Return the objects to submit, as JSON. Readers of YAML disagree about values such as ``1e3``."""
        texts = [json.dumps(document, indent=2) + "\n" for document in self.documents(job)]
        return "".join(texts)

    def documents(self, job: Job) -> list[dict[str, Any]]:
        """Return the Service that gives the pods host names, and the Indexed Job. The ranks meet in pod 0.

        A run needs all its pods, so they fail together and start again together. Pods that exit because
        of a signal or a drained node do not count as failures. An error of the user ends the Job.
        """
        name = self._name(job)
        labels = {_INSTANCE_LABEL: name}
        port = rendezvous_port(job.run_dir)
        pod_spec = {"restartPolicy": "Never", "subdomain": name, **self._pod_spec(job, port)}
        # The same command would fail again with these codes.
        final_codes = sorted({ConfigError.exit_code, DataError.exit_code, Diverged.exit_code})
        failure_rules = [
            {"action": "FailJob", "onExitCodes": _match_exit_codes(final_codes)},
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {"action": "Ignore", "onExitCodes": _match_exit_codes([EXIT_PREEMPTED])},
        ]
        service_spec = {
            "clusterIP": "None",
            "selector": labels,
            "ports": [{"name": "rendezvous", "port": port}],
            "publishNotReadyAddresses": True,
        }
        job_spec = {
            "completionMode": "Indexed",
            "completions": self.nodes,
            "parallelism": self.nodes,
            "backoffLimit": self.restarts * self.nodes,  # Kubernetes counts the failures of pods.
            "podFailurePolicy": {"rules": failure_rules},
            "template": {"metadata": {"labels": labels}, "spec": pod_spec},
        }
        return [
            _document("v1", "Service", name, spec=service_spec),
            _document("batch/v1", "Job", name, spec=job_spec),
        ]

    def _pod_spec(self, job: Job, port: int) -> dict[str, Any]:
        """Return the pods' spec, to which the user's ``pod`` adds fields."""
        # Volumes have numbers as names, because the name of a claim may be too long for a volume.
        volumes: list[dict[str, Any]] = [
            {"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}}
            for number, claim in enumerate(self._mount_paths)
        ]
        if self.shared_memory is not None:
            # The default size of /dev/shm is 64 MiB, too small for data loaders and collectives.
            memory = {"medium": "Memory", "sizeLimit": self.shared_memory}
            volumes.append({"name": _MEMORY_VOLUME, "emptyDir": memory})
        node_labels = {key: str(value) for key, value in (self.node_selector or {}).items()}
        return {
            "terminationGracePeriodSeconds": self.grace_seconds,
            "nodeSelector": node_labels,
            "serviceAccountName": self.service_account or "",
            "containers": [self._container(job, port)],
            "volumes": volumes,
            **(self.pod or {}),
        }

    def _container(self, job: Job, port: int) -> dict[str, Any]:
        """Return the only container of a pod."""
        resources = {"cpu": self.cpus, "memory": self.memory, **(self.resources or {})}
        quantities = {name: str(amount) for name, amount in resources.items() if amount is not None}
        working_dir = ""  # the image's own working directory
        if self._is_mounted(Path.cwd()):
            working_dir = str(Path.cwd())
        return {
            "name": _CONTAINER,
            "image": self.image,
            "command": self._command(job, port),
            "workingDir": working_dir,
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
        pod_fields = {
            "JOB_COMPLETION_INDEX": f"metadata.annotations['{_INDEX_LABEL}']",
            "POD_IP": "status.podIP",
        }
        variables: list[dict[str, Any]] = []
        for name, path in pod_fields.items():
            variables.append({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}})
        for name, text in environment.items():
            variables.append({"name": name, "value": _escape(text)})
        return variables

    def _volume_mounts(self) -> list[dict[str, str]]:
        """Return the container's mounts, with the same names as the volumes of ``_pod_spec``."""
        mounts = []
        for number, path in enumerate(self._mount_paths.values()):
            mounts.append({"name": f"volume-{number}", "mountPath": path})
        if self.shared_memory is not None:
            mounts.append({"name": _MEMORY_VOLUME, "mountPath": "/dev/shm"})
        return mounts

    def _command(self, job: Job, port: int) -> list[str]:
        """Return the container's command. It uses no shell, so that its first process handles SIGTERM.

        The first process is the node agent. It starts ``job.on_host``, which sets the device's variables and
        becomes torchrun's agent. That agent starts the ranks.
        """
        name = self._name(job)
        ranks = job.ranks_per_node(self.nodes)
        pod_number = "$(JOB_COMPLETION_INDEX)"
        python, *on_host = [_escape(word) for word in job.on_host([], ranks, self.python)]
        node_agent = [python, "-P", "-m", MODULE, "run"]
        if self.nodes > 1:
            node_agent.append("--address=$(POD_IP)")
        node_agent.append(f"--node={pod_number}")
        node_agent.append(f"--outcome={_escape(str(job.run_dir))}")
        node_agent.append(_escape(str(job.run_dir / AGENT)))
        agent = agent_command(
            python,
            ranks,
            self.nodes,
            f"--node-rank={pod_number}",
            f"--master-addr={name}-0.{name}",
            f"--master-port={port}",
            f"--rdzv-conf=timeout={_JOIN_SECONDS}",
        )
        rank_arguments = [_escape(word) for word in escape_for_torchrun(job.command[1:])]
        return [*node_agent, "--", python, *on_host, *agent, python, *rank_arguments]

    def _call_kubectl(self, *arguments: str, text: str = "") -> str:
        """Return the output of kubectl. Raises MachineError with the cluster's own message if it fails."""
        return call_client([*self._kubectl, *arguments], f"launcher=kubernetes: kubectl {arguments[0]}", text)

    def _ask_kubectl(self, *arguments: str) -> str | None:
        """Return the output of kubectl, or None if it fails."""
        return ask_client([*self._kubectl, *arguments])

    def _is_mounted(self, path: Path) -> bool:
        """Return whether a volume contains ``path``."""
        return any(path.is_relative_to(mount_path) for mount_path in self._mount_paths.values())

    def _name(self, job: Job) -> str:
        """Return the name of the Job and the Service.

        All commands on a run use the same name, so that only one of them can train it at a time.
        """
        checksum = zlib.crc32(str(job.run_dir).encode())
        return self.name or f"speechtrain-{checksum:08x}"

    def _delete_earlier_job(self, name: str) -> None:
        """Delete the Job and Service of an earlier command. Raises RunError if the Job still runs."""
        content = self._call_kubectl(*_get_job(name))
        if not content.strip():
            return
        if _JobEnd.read(content) is None:
            delete = shlex.join([*self._kubectl, "delete", *_job_and_service(name)])
            raise RunError(f"job.batch/{name} is still in the cluster. Wait for it, or `{delete}`")
        self._call_kubectl("delete", *_job_and_service(name), "--ignore-not-found", "--cascade=foreground")

    def _exit_code(self, name: str) -> int | None:
        """Return 0 for a Job that has succeeded or is deleted, and 1 for one that has failed.

        Returns None while the Job runs or the cluster does not answer.
        """
        content = self._ask_kubectl(*_get_job(name))
        if content is None:
            return None
        if not content.strip():  # The Job is deleted.
            return 0
        end = _JobEnd.read(content)
        if end is None:
            return None
        if end.is_success:
            return 0
        print_notice(f"job.batch/{name}: {end.reason}")
        return 1

    def _stop(self, name: str, signals: int) -> bool:
        """Delete a Job and its pods, which get SIGTERM and the grace period to save.

        A second signal ends the pods at once. Returns whether the cluster has accepted the requests.
        """
        deletions = [[*_job_and_service(name), "--cascade=foreground"]]
        if signals > 1:
            deletions.append(["pods", f"--selector={_INSTANCE_LABEL}={name}", "--now"])
        are_accepted = True
        for deletion in deletions:
            output = self._ask_kubectl("delete", *deletion, "--wait=false", "--ignore-not-found")
            if output is None:
                are_accepted = False
        return are_accepted


@dataclass(frozen=True)
class _JobEnd:
    """The end of a Job."""

    is_success: bool
    reason: str

    @classmethod
    def read(cls, content: str) -> _JobEnd | None:
        """Return the end of the Job that kubectl describes in ``content`` (JSON), or None if it runs."""
        status = json.loads(content).get("status", {})
        for condition in status.get("conditions") or []:
            if condition.get("status") == "True" and condition.get("type") in ("Complete", "Failed"):
                texts = [condition.get("reason"), condition.get("message")]
                reason = ": ".join([text for text in texts if text])
                return cls(is_success=condition["type"] == "Complete", reason=reason)
        return None


def _document(version: str, kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": "speechtrain", _INSTANCE_LABEL: name}
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": labels}, "spec": spec}


def _match_exit_codes(codes: list[int]) -> dict[str, Any]:
    """Return the condition of a failure rule that the container exits with one of ``codes``."""
    return {"containerName": _CONTAINER, "operator": "In", "values": codes}


def _escape(text: str) -> str:
    """Return ``text`` escaped for Kubernetes, which expands ``$(NAME)`` and turns ``$$`` into ``$``."""
    return text.replace("$", "$$")


def _job_and_service(name: str) -> list[str]:
    """Return the names of a run's Job and Service, as kubectl's arguments."""
    return [f"job.batch/{name}", f"service/{name}"]


def _get_job(name: str) -> list[str]:
    """Return kubectl's arguments that print a Job as JSON, or nothing if it does not exist."""
    return ["get", f"job.batch/{name}", "--output=json", "--ignore-not-found"]

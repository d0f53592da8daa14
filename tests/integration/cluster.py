"""As much of a cluster as kubectl needs: an API server whose pods are processes of this machine.

It stores what is applied, runs the containers' commands with Kubernetes' own expansion of ``$(NAME)``,
starts pods again by the rules of Indexed Jobs, and ends them with SIGTERM first.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

INDEX = "batch.kubernetes.io/job-completion-index"
KINDS = {
    "services": ("v1", "Service"),
    "pods": ("v1", "Pod"),
    "jobs": ("batch/v1", "Job"),
}
_PLACES = {("apis/" if "/" in version else "api/") + version: version for version, _ in KINDS.values()}
KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: test
clusters: [{{name: test, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
contexts: [{{name: test, context: {{cluster: test, user: test}}}}]
users: [{{name: test, user: {{}}}}]
"""


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """``$(NAME)`` replaced where there is such a variable, ``$$`` by ``$``."""

    def value(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else variables.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", value, text)


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f000Z")


@dataclass
class Pod:
    """One container's process and what it has printed."""

    content: dict[str, Any]
    process: subprocess.Popen[str]
    number: int
    """Of its node in the run."""
    is_evicted: bool = False
    lines: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.content["metadata"]["name"])

    def read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                self.lines.append(line)


class Cluster:
    """The objects, by resource and name, and the pods that have been started for them."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.pods: list[Pod] = []
        self.lock = threading.RLock()
        self.is_over = threading.Event()

    # --- what the controllers and the kubelet do ------------------------------------------------

    def reconcile(self) -> None:
        while not self.is_over.wait(0.05):
            with self.lock:
                for (resource, name), content in list(self.objects.items()):
                    if resource == "jobs":
                        self._reconcile(name, content)

    def _reconcile(self, name: str, content: dict[str, Any]) -> None:
        ours = [pod for pod in self.pods if pod.content["metadata"]["labels"]["owner"] == name]
        for pod in ours:
            if pod.process.poll() is not None and pod.content["status"]["phase"] == "Running":
                self._ended(content, pod)
        running = [pod for pod in ours if pod.process.poll() is None]
        if "deletionTimestamp" in content["metadata"]:
            if not running:
                del self.objects["jobs", name]
                self.pods = [pod for pod in self.pods if pod not in ours]
            return
        if self._conditions(content):
            for pod in running:
                pod.process.terminate()
            return
        kept = {pod.number: pod for pod in ours if pod.content["status"]["phase"] != "Failed"}
        for number in range(content["spec"]["completions"]):
            if number not in kept:
                self._start(name, number, content["spec"]["template"])
        succeeded = [pod.number for pod in kept.values() if pod.content["status"]["phase"] == "Succeeded"]
        if len(succeeded) == content["spec"]["completions"]:
            self._condition(content, "Complete", "CompletionsReached")

    def _ended(self, content: dict[str, Any], pod: Pod) -> None:
        code = pod.process.returncode if pod.process.returncode >= 0 else 128 - pod.process.returncode
        pod.content["status"]["phase"] = "Failed" if code else "Succeeded"
        pod.content["status"]["code"] = code
        if not code or pod.is_evicted:
            return
        for rule in content["spec"]["podFailurePolicy"]["rules"]:
            if code in rule.get("onExitCodes", {}).get("values", []):
                if rule["action"] == "FailJob":
                    self._condition(content, "Failed", "PodFailurePolicy")
                return
        content["status"]["failed"] = content["status"].get("failed", 0) + 1
        if content["status"]["failed"] > content["spec"]["backoffLimit"]:
            self._condition(content, "Failed", "BackoffLimitExceeded")

    def _conditions(self, content: dict[str, Any]) -> list[dict[str, str]]:
        found: list[dict[str, str]] = content["status"].setdefault("conditions", [])
        return found

    def _condition(self, content: dict[str, Any], kind: str, reason: str) -> None:
        self._conditions(content).append(
            {"type": kind, "status": "True", "reason": reason, "message": "so it is"}
        )

    def _start(self, owner: str, number: int, template: dict[str, Any]) -> None:
        (container,) = template["spec"]["containers"]
        variables: dict[str, str] = {}
        fields = {"status.podIP": "127.0.0.1", f"metadata.annotations['{INDEX}']": str(number)}
        for entry in container["env"]:
            source = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            variables[entry["name"]] = fields[source] if source else expanded(entry["value"], variables)
        address = f"{owner}-0.{template['spec'].get('subdomain')}"  # the cluster's names
        command = [expanded(word, variables).replace(address, "127.0.0.1") for word in container["command"]]
        process = subprocess.Popen(
            command,
            env={**self.environment, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        metadata = {
            "name": f"{owner}-{number}-{len(self.pods)}",
            "namespace": "default",
            "labels": {**template["metadata"]["labels"], "owner": owner, INDEX: str(number)},
            "annotations": {INDEX: str(number)},
            "creationTimestamp": now(),
        }
        content = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        content["status"] = {"phase": "Running"}
        pod = Pod(content, process, number)
        self.pods.append(pod)
        threading.Thread(target=pod.read, daemon=True).start()

    def evict(self, number: int) -> None:
        """What a drained node does to the pod of this number."""
        with self.lock:
            pod = [pod for pod in self.pods if pod.number == number][-1]
            pod.is_evicted = True
            pod.process.send_signal(signal.SIGTERM)

    # --- what the API server does ---------------------------------------------------------------

    def listed(self, resource: str, selector: str, name: str = "") -> list[dict[str, Any]]:
        with self.lock:
            found = [pod.content for pod in self.pods if resource == "pods"]
            found += [content for (kind, _), content in self.objects.items() if kind == resource]
            wanted = dict(part.split("=", 1) for part in selector.split(",") if part)
            return [
                content
                for content in found
                if wanted.items() <= content["metadata"].get("labels", {}).items()
                and name in ("", content["metadata"]["name"])
            ]

    def create(self, resource: str, content: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            content["metadata"].update(namespace="default", uid=f"uid-{now()}", creationTimestamp=now())
            content["status"] = {}
            self.objects[resource, content["metadata"]["name"]] = content
            return content

    def delete(self, resource: str, name: str, grace: int | None) -> None:
        with self.lock:
            number = signal.SIGKILL if grace is not None and grace <= 1 else signal.SIGTERM
            if resource == "services":
                del self.objects[resource, name]
                return
            if resource != "pods":
                self.objects[resource, name]["metadata"]["deletionTimestamp"] = now()
            for pod in self.pods:
                if (resource != "pods" and pod.content["metadata"]["labels"]["owner"] == name) or (
                    resource == "pods" and pod.name == name
                ):
                    pod.is_evicted = True
                    if pod.process.poll() is None:
                        pod.process.send_signal(number)


class _Handler(BaseHTTPRequestHandler):
    cluster: Cluster

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, content: Any, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _missing(self) -> None:
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound"}
        self._answer({**status, "message": f"{self.path} not found", "code": 404}, 404)

    def _discovered(self, path: str) -> Any:
        groups = {"batch": "batch/v1"}
        if path == "/version":
            return {"major": "1", "minor": "32", "gitVersion": "v1.32.0"}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            versions = {n: {"groupVersion": v, "version": "v1"} for n, v in groups.items()}
            named = [{"name": n, "versions": [v], "preferredVersion": v} for n, v in versions.items()]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": named}
        if path == "/openapi/v3":
            return {"paths": {at: {"serverRelativeURL": f"/openapi/v3/{at}"} for at in _PLACES}}
        if path.startswith("/openapi/v3/"):
            return self._described(_PLACES.get(path.removeprefix("/openapi/v3/"), ""))
        version = path.removeprefix("/apis/").removeprefix("/api/")
        verbs = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
        resources = [
            {"name": n, "singularName": k.lower(), "namespaced": True, "kind": k, "verbs": verbs}
            for n, (v, k) in KINDS.items()
            if v == version
        ]
        if not resources:
            return None
        return {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": version,
            "resources": resources,
        }

    def _described(self, version: str) -> Any:
        """That this server validates fields itself, which kubectl would else do with a schema."""
        paths = {}
        for name, (of, kind) in KINDS.items():
            group, _, number = of.rpartition("/")
            named = {"group": group, "version": number, "kind": kind}
            parameters = [{"name": "fieldValidation", "in": "query"}]
            patch = {"parameters": parameters, "x-kubernetes-group-version-kind": named, "responses": {}}
            if of == version:
                paths[f"/{version}/{name}"] = {"patch": patch}
        return {"openapi": "3.0.0", "info": {"title": "test", "version": "1"}, "paths": paths}

    def _place(self) -> tuple[str, str, str, dict[str, str]]:
        """Resource, name, what is wanted of it, and the query."""
        url = urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(url.query).items()}
        found = re.search(r"/namespaces/[^/]+/(\w+)(?:/([^/]+))?(?:/(\w+))?$", url.path)
        return (found[1], found[2] or "", found[3] or "", query) if found else ("", "", "", query)

    def do_GET(self) -> None:
        resource, name, part, query = self._place()
        if not resource:
            content = self._discovered(urlsplit(self.path).path)
            return self._missing() if content is None else self._answer(content)
        if part == "log":
            return self._log(name)
        if name:
            found = self.cluster.listed(resource, "", name)
            return self._answer(found[0]) if found else self._missing()
        name = query.get("fieldSelector", "").removeprefix("metadata.name=")
        found = self.cluster.listed(resource, query.get("labelSelector", ""), name)
        version, kind = KINDS[resource]
        metadata = {"resourceVersion": "1"}
        return self._answer(
            {"kind": f"{kind}List", "apiVersion": version, "metadata": metadata, "items": found}
        )

    def _log(self, name: str) -> None:
        (pod,) = [pod for pod in self.cluster.pods if pod.name == name]
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.end_headers()
        said = 0
        while True:
            is_last = pod.process.poll() is not None
            for line in pod.lines[said:]:
                said += 1
                self.wfile.write(line.encode())
                self.wfile.flush()
            if is_last:
                return
            time.sleep(0.05)

    def do_POST(self) -> None:
        resource, *_ = self._place()
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._answer(self.cluster.create(resource, content), 201)

    def do_DELETE(self) -> None:
        resource, name, *_ = self._place()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        options = json.loads(body) if body else {}
        found = self.cluster.listed(resource, "", name)
        if not found:
            return self._missing()
        self.cluster.delete(resource, name, options.get("gracePeriodSeconds"))
        return self._answer(found[0])


@contextmanager
def started(folder: Path, environment: Mapping[str, str]) -> Iterator[tuple[Cluster, dict[str, str]]]:
    """A cluster, and the environment in which kubectl speaks to it."""
    cluster = Cluster(environment)
    handler = type("Handler", (_Handler,), {"cluster": cluster})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threads = [threading.Thread(target=work) for work in (server.serve_forever, cluster.reconcile)]
    for thread in threads:
        thread.start()
    config = folder / "kubeconfig"
    config.write_text(KUBECONFIG.format(port=server.server_port))
    try:
        yield cluster, {**environment, "KUBECONFIG": str(config), "HOME": str(folder)}
    finally:
        server.shutdown()
        cluster.is_over.set()
        for thread in threads:
            thread.join()
        server.server_close()
        for pod in cluster.pods:
            if pod.process.poll() is None:
                pod.process.kill()
            pod.process.wait()

"""The manifests: Kubernetes' own models take them whole, and nothing in them is expanded."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from speechtrain.launchers.kubernetes import Kubernetes
from torch.distributed.elastic.utils import macros

from speechtrain.errors import EXIT_PREEMPTED, ConfigError, DataError, Diverged, MachineError
from speechtrain.launch.launcher import Job

AWKWARD = "a b'c\"d $(HOME) $$(HOME) $ $$ $( `id` $(id) \\ ; # {x}: [1]\n\tend é"
NUMBERS = ("1", "1e3", "0x1f", "0o7", "1_000", "1:30", "on", "y", "null", "~", "true", "-", "--", ".inf", "")


def job(run_dir: Path, world_size: int = 4, **environment: str) -> Job:
    return Job(run_dir / "config.yaml", run_dir, world_size, environment)


def launcher(**keys: Any) -> Kubernetes:
    given: dict[str, Any] = {
        "image": "registry.example/speechtrain:1",
        "nodes": 2,
        "volumes": {"shared": "/shared", "corpora": "/data sets"},
        "cpus": 8,
        "memory": "64Gi",
        "resources": {"habana.ai/gaudi": 2},
        "env_from_secrets": ["wandb"],
        "pod": {"nodeSelector": {"pool": "training"}, "serviceAccountName": "trainer"},
    }
    return Kubernetes(**{**given, **keys})


def documents(text: str) -> list[dict[str, Any]]:
    """Return the objects of a manifest, one JSON document after the other."""
    objects, start = [], 0
    while start < len(text):
        content, end = json.JSONDecoder().raw_decode(text, start)
        objects.append(content)
        start = end + 1  # the line break
    return objects


def pod_of(document: dict[str, Any]) -> dict[str, Any]:
    """Return the spec of a Job's pods."""
    pod: dict[str, Any] = document["spec"]["template"]["spec"]
    return pod


def expanded(text: str, variables: dict[str, str]) -> str:
    """Kubernetes' rule for command, args and values: ``$(NAME)`` where there is one, ``$$`` for ``$``."""
    found, rest = "", text
    while rest:
        name = re.match(r"\$\(([^)]*)\)", rest)
        if rest.startswith("$$"):
            found, rest = found + "$", rest[2:]
        elif name and name[1] in variables:
            found, rest = found + variables[name[1]], rest[name.end() :]
        else:
            found, rest = found + rest[0], rest[1:]
    return found


def modelled(document: dict[str, Any]) -> Any:
    """The document as its client's model gives it back."""
    client = pytest.importorskip("kubernetes.client.api_client")
    model = f"V1{document['kind']}"
    with client.ApiClient() as api:
        return api.sanitize_for_serialization(
            api.deserialize(json.dumps(document), model, "application/json")
        )


@pytest.mark.parametrize("is_bare", [False, True])
def test_the_clients_models_know_every_key(is_bare: bool) -> None:
    bare = Kubernetes("image", volumes={"shared": "/shared"})
    text = (bare if is_bare else launcher()).manifest(job(Path("/shared/run"), A=AWKWARD))
    for document in documents(text):
        assert modelled(document) == document
    assert [d["kind"] for d in documents(text)] == ["Service", "Job"]


def test_the_models_would_show_a_key_that_is_none() -> None:
    document = documents(launcher().manifest(job(Path("/shared/run"))))[-1]
    document["spec"]["template"]["spec"]["graceSeconds"] = 1
    assert modelled(document) != document


def test_values_arrive_as_they_are_and_secrets_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", AWKWARD)
    monkeypatch.setenv("HF_TOKEN", "hush")
    run_dir = Path("/shared") / AWKWARD
    numbers = {f"N{index}": value for index, value in enumerate(NUMBERS)}
    text = launcher(forward=["HF_*"], python=AWKWARD).render(
        job(run_dir, AWKWARD=AWKWARD, MY_SECRET="hush", **numbers)
    )
    assert "hush" not in text
    line, manifest, end = text.split("\n", 1)[0], text.split("\n", 1)[1], "END_OF_TEXT\n"
    assert shlex.split(line) == ["kubectl", "apply", "--filename=-", f"<<{end.strip()}"]
    (*_, document) = documents(manifest.removesuffix(end))
    plenty = {"HOME": "expanded", "id": "expanded", "POD_IP": "10.0.0.7", "JOB_COMPLETION_INDEX": "1"}
    (container,) = pod_of(document)["containers"]
    reached = {e["name"]: expanded(e["value"], plenty) for e in container["env"] if "value" in e}
    assert {"AWKWARD": AWKWARD, "HF_HOME": AWKWARD, **numbers}.items() <= reached.items()
    command = [expanded(word, plenty) for word in container["command"]]
    worker = macros.substitute(command[-4:], "0")  # what torchrun does to its arguments
    assert worker == ["-P", "-m", "speechtrain.rank", str(run_dir / "config.yaml")]
    assert {f"--outcome={run_dir}", str(run_dir / "agent.log"), "--address=10.0.0.7"} < set(command)
    assert command.count(AWKWARD) == 4  # the interpreter
    assert {"--node=1", "--nnodes=2", "--nproc-per-node=2"} < set(command)
    assert {"name": "PET_RDZV_CONF", "value": "timeout=86400"} in container["env"]
    assert container["envFrom"] == [{"secretRef": {"name": "wandb"}}]


def test_the_ranks_of_a_single_pod_meet_on_its_loopback_address() -> None:
    (*_, document) = documents(launcher(nodes=1).manifest(job(Path("/shared/run"))))
    words = pod_of(document)["containers"][0]["command"]
    assert "--rdzv-backend=loopback" in words
    assert not [w for w in words if w.startswith(("--address", "--master"))]


def test_every_text_that_some_reader_takes_for_something_else_is_quoted() -> None:
    text = launcher().manifest(job(Path("/shared/run"), **{f"N{i}": v for i, v in enumerate(NUMBERS)}))
    for value in NUMBERS:
        assert f'"value": {json.dumps(value)}\n' in text


def test_a_job_starts_evicted_pods_again_and_does_not_count_them() -> None:
    service, document = documents(launcher(grace_seconds=99).manifest(job(Path("/shared/run"))))
    spec = document["spec"]
    counts = {key: spec[key] for key in ("completionMode", "completions", "parallelism", "backoffLimit")}
    assert counts == {"completionMode": "Indexed", "completions": 2, "parallelism": 2, "backoffLimit": 6}
    rules = spec["podFailurePolicy"]["rules"]
    codes = [(rule["action"], rule.get("onExitCodes", {}).get("values")) for rule in rules]
    final = [error.exit_code for error in (ConfigError, DataError, Diverged)]
    assert codes == [("FailJob", final), ("Ignore", None), ("Ignore", [EXIT_PREEMPTED])]
    pod = spec["template"]["spec"]
    assert (pod["restartPolicy"], pod["terminationGracePeriodSeconds"]) == ("Never", 99)
    # pod 0 has a name: its index as host, the Service as domain
    name = service["metadata"]["name"]
    assert pod["subdomain"] == name
    assert f"--master-addr={name}-0.{name}" in pod["containers"][0]["command"]
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)


def test_pods_get_what_they_are_given() -> None:
    pod = pod_of(documents(launcher().manifest(job(Path("/shared/run"))))[-1])
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"cpu": "8", "memory": "64Gi", "habana.ai/gaudi": "2"}
    assert container["resources"]["requests"] == container["resources"]["limits"]
    claims = {
        v["name"]: v["persistentVolumeClaim"]["claimName"]
        for v in pod["volumes"]
        if "persistentVolumeClaim" in v
    }
    mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
    assert claims[mounts["/shared"]] == "shared"
    assert claims[mounts["/data sets"]] == "corpora"
    assert {"name": mounts["/dev/shm"], "emptyDir": {"medium": "Memory"}} in pod["volumes"]
    assert (pod["nodeSelector"], pod["serviceAccountName"]) == ({"pool": "training"}, "trainer")


def test_two_runs_have_two_names_and_one_run_has_one() -> None:
    names = [
        documents(launcher().manifest(job(Path("/shared") / run)))[0]["metadata"]["name"] for run in "aba"
    ]
    assert names[0] == names[2] != names[1]


@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_are_shared_evenly(world_size: int) -> None:
    with pytest.raises(ConfigError, match=f"world_size={world_size}"):
        launcher().check(job(Path("/shared/run"), world_size))


@pytest.mark.parametrize("run_dir", ["/elsewhere/run", "/shared-not/run"])
def test_a_run_directory_that_no_pod_sees_is_refused(run_dir: str) -> None:
    with pytest.raises(ConfigError, match=f"run_dir={run_dir}: .*launcher.volumes"):
        launcher().check(job(Path(run_dir)))
    launcher().check(job(Path("/shared/run")))


@pytest.mark.parametrize(
    "settings",
    [
        *({"nodes": 0}, {"restarts": -1}, {"grace_seconds": 0}, {"shutdown_seconds": 0}, {"poll_seconds": 0}),
    ],
)
def test_what_cannot_be_meant_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        launcher(**settings)


def test_without_kubectl_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    said = launcher().missing_program()
    assert said.startswith("launcher=kubernetes: there is no kubectl on this machine. Install it")


def test_a_cluster_that_refuses_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = tmp_path / "kubectl"
    client.write_text("#!/bin/sh\necho 'E1121 noise' >&2\necho 'error: You must\nlog in' >&2\nexit 1\n")
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(MachineError) as caught:
        launcher(volumes={"shared": str(tmp_path)}).launch(job(tmp_path))
    assert str(caught.value) == "launcher=kubernetes: kubectl get failed: error: You must log in"

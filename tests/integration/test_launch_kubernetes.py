"""kubectl and the manifests' own commands: two pods, processes of this machine, are evicted and stopped."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from speechtrain.launchers.kubernetes import Kubernetes

from speechtrain.launch.launcher import Job

from . import cluster as kubernetes
from .cluster import Cluster, Pod
from .conftest import DEADLINE, Command, finish, wait_for
from .engines import SIZES, STEPS, assert_same, processes_of, skip_without

skip_without("kubectl")

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]
) -> Iterator[tuple[Cluster, dict[str, str]]]:
    with kubernetes.started(tmp_path_factory.mktemp("cluster"), environment) as found:
        yield found


def two_pods(folder: Path, environment: dict[str, str]) -> Command:
    """Two ranks in two pods, in a folder whose name Kubernetes would expand."""
    launcher = ["launcher=kubernetes", "launcher.image=none", "launcher.nodes=2"]
    settings = [f"launcher.python={sys.executable}", f"launcher.volumes={{shared: {folder}}}"]
    world = ["launcher.poll_seconds=0.3", "world_size=2", "trainer.simulate_world=2"]
    run = Command(folder / "a $(RANK) $$ run", environment, [*SIZES, *launcher, *settings, *world])
    run.arguments[-1] = f"run_dir='{run.run_dir}'"
    return run


@pytest.fixture(scope="module")
def run(cluster: tuple[Cluster, dict[str, str]], tmp_path_factory: pytest.TempPathFactory) -> Command:
    return two_pods(tmp_path_factory.mktemp("job"), cluster[1])


def test_kubectl_takes_the_manifest(cluster: tuple[Cluster, dict[str, str]]) -> None:
    """As it would without a cluster; only the kinds it knows are asked of the server."""
    manifest = Kubernetes("image", nodes=2).manifest(
        Job(Path("/shared/run/config.yaml"), Path("/shared/run"), 2, {"A": "$(id) é\n"})
    )
    line = ["kubectl", "create", "--dry-run=client", "--validate=false", "--filename=-"]
    done = subprocess.run(
        line, input=manifest, env=cluster[1], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    kinds = [line.partition("/")[0] for line in done.stdout.splitlines()]
    assert kinds == ["service", "job.batch"]


@pytest.mark.ci_share
def test_two_pods_train_what_one_process_does(
    run: Command, cluster: tuple[Cluster, dict[str, str]], alone: Command
) -> None:
    done = run.run(f"trainer.max_steps={STEPS}")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "submitted job.batch/speechtrain-" in done.stdout
    assert done.stdout.count("finished at step") == 1
    assert_same(run, alone)
    assert (run.run_dir / "kubernetes.json").exists()
    assert [kind for kind, _ in cluster[0].objects] == ["jobs"]  # the Service has gone


def test_an_evicted_pod_continues_and_a_signal_ends_the_run(
    run: Command, cluster: tuple[Cluster, dict[str, str]]
) -> None:
    process = run.start("trainer.max_steps=5000")
    wait_for(lambda: len(run.events("train")) >= STEPS + 2, process)
    before = len(run.events("resume"))
    cluster[0].evict(1)
    wait_for(lambda: len(run.events("resume")) > before, process)
    saved = run.events("resume")[-1]["step"]
    wait_for(lambda: run.events("train")[-1]["step"] > saved, process)
    ((_, content),) = [item for item in cluster[0].objects.items() if item[0][0] == "jobs"]
    assert "failed" not in content["status"]  # neither pod counts
    left = [pod.content["status"]["code"] for pod in cluster[0].pods if pod.process.poll() is not None]
    assert left == [75, 75]

    process.send_signal(signal.SIGTERM)
    ended = finish(process)
    assert ended.returncode == 75, ended.stderr
    assert run.checkpoints()[-1].name == f"step-{run.result()['steps']:08d}"
    assert processes_of(run) == []
    assert [kind for kind, _ in cluster[0].objects] == []


DEAF = "#!/bin/sh\ntrap '' TERM\necho begun $JOB_COMPLETION_INDEX\nwhile :; do sleep 0.1; done\n"
LAUNCH = """
import pathlib, sys
from speechtrain.launch.launcher import Job
from speechtrain.launchers.kubernetes import Kubernetes
python, folder = sys.argv[1], pathlib.Path(sys.argv[2])
launcher = Kubernetes("image", nodes=2, python=python, volumes={"shared": str(folder)}, poll_seconds=0.2)
launcher.launch(Job(folder / "config.yaml", folder, world_size=2))
"""


def pods_that_print(world: Cluster) -> list[Pod]:
    return [pod for pod in world.pods if pod.lines]


def start_log(
    process: subprocess.Popen[str], world: Cluster, environment: dict[str, str]
) -> subprocess.Popen[str]:
    """Start the command that the launcher names for following the log, and read its first line."""
    assert process.stdout is not None
    submitted = process.stdout.readline()
    assert submitted.startswith("submitted job.batch/")
    wait_for(lambda: len(pods_that_print(world)) == 2, process)
    command = shlex.split(submitted.partition("to follow its log: ")[2])
    log = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert log.stdout is not None
    assert log.stdout.readline() == "begun 0\n"
    return log


def test_a_second_signal_ends_what_does_not_leave(
    cluster: tuple[Cluster, dict[str, str]], tmp_path: Path
) -> None:
    world, environment = cluster
    deaf = tmp_path / "python"
    deaf.write_text(DEAF)
    deaf.chmod(0o755)
    pipe = subprocess.PIPE
    line = [sys.executable, "-c", LAUNCH, str(deaf), str(tmp_path)]
    process = subprocess.Popen(line, env=environment, stdout=pipe, stderr=pipe, text=True)
    try:
        log = start_log(process, world, environment)
        process.send_signal(signal.SIGINT)
        wait_for(lambda: any("deletionTimestamp" in o["metadata"] for o in world.objects.values()))
        again = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=DEADLINE)
        assert "is still in the cluster. Wait for it" in again.stderr
        process.send_signal(signal.SIGINT)
        ended = finish(process)
    finally:
        process.kill()
    assert "KeyboardInterrupt" in ended.stderr
    assert ended.stdout == ""
    assert log.communicate(timeout=DEADLINE)[0] == ""  # only of the first pod, and it ends with it
    assert not [name for kind, name in world.objects if kind == "jobs"]

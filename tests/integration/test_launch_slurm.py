"""Slurm itself, with two nodes that are daemons on this machine: two ranks, requeued and stopped."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import STARTER, Command, finish, wait_for
from .engines import SIZES, STEPS, assert_same, processes_of, skip_without

skip_without("slurmctld", "slurmd", "sbatch", "munged", "runuser", is_root=True)

pytestmark = pytest.mark.nightly

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={first}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=5
RebootProgram=/bin/false
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=1 RealMemory=1000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={third} CPUs=1 RealMemory=1000
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def _free_ports(count: int) -> list[int]:
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports


def _ask(slurm: dict[str, str], *command: str) -> str:
    done = subprocess.run(command, env=slurm, capture_output=True, text=True, timeout=60)
    return done.stdout


@pytest.fixture(scope="module")
def slurm(environment: dict[str, str]) -> Iterator[dict[str, str]]:
    """The environment in which its commands speak to a controller of the test's own."""
    folder = Path("/tmp") / f"slurm-{os.getpid()}"  # short: a socket's path has a limit
    folder.mkdir()
    folder.chmod(0o755)
    ports = _free_ports(3)
    host = socket.gethostname().partition(".")[0]
    (folder / "slurm.conf").write_text(
        CONF.format(host=host, folder=folder, first=ports[0], second=ports[1], third=ports[2])
    )
    for name in ("state", "munge"):
        (folder / name).mkdir()
    key = folder / "munge" / "key"
    key.write_bytes(os.urandom(64))
    key.chmod(0o600)
    for path in (folder / "munge", key):
        shutil.chown(path, "munge", "munge")
    (folder / "munge").chmod(0o755)
    hosts = Path("/etc/hosts")
    known = hosts.read_text()
    if " n1 " not in known:
        hosts.write_text(known.rstrip("\n") + "\n127.0.0.1 n1 n2 # of a test\n")
    ours = {**environment, "SLURM_CONF": str(folder / "slurm.conf")}
    daemons: list[subprocess.Popen[bytes]] = []
    lines = [
        [
            *("runuser", "-u", "munge", "--", "munged", "--foreground", "--force", f"--key-file={key}"),
            *(f"--socket={folder}/munge/socket", f"--pid-file={folder}/munge/pid"),
            *(f"--log-file={folder}/munge/log", f"--seed-file={folder}/munge/seed"),
        ],
        ["slurmctld", "-D", "-c"],
        ["slurmd", "-D", "-N", "n1"],
        ["slurmd", "-D", "-N", "n2"],
    ]
    conf = folder / "slurm.conf"
    conf.write_text(conf.read_text().replace("munge.socket", "munge/socket"))
    try:
        for line in lines:
            quiet = subprocess.DEVNULL
            daemons.append(subprocess.Popen(line, env=ours, stdout=quiet, stderr=quiet))
            if line[0] == "runuser":
                wait_for((folder / "munge" / "socket").exists)
        wait_for(lambda: _ask(ours, "sinfo", "-h", "-o", "%t %D").split() == ["idle", "2"])
        yield ours
    finally:
        subprocess.run(["scancel", "--state=RUNNING", "--state=PENDING", "--user=root"], env=ours, timeout=60)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
        hosts.write_text(known)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def run(slurm: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Command:
    """Two ranks on two nodes."""
    job = ["launcher=slurm", "launcher.nodes=2", "launcher.poll_seconds=0.5", "world_size=2"]
    options = ["launcher.time=0-01", "launcher.partition=main", "trainer.simulate_world=2"]
    return Command(tmp_path_factory.mktemp("slurm") / "run", slurm, [*SIZES, *job, *options])


@pytest.mark.ci_share
def test_two_nodes_train_what_one_process_does(run: Command, alone: Command) -> None:
    done = run.run(f"trainer.max_steps={STEPS}")
    assert (done.returncode, done.stderr) == (0, ""), (run.run_dir / "slurm.log").read_text()
    assert f"to follow its log: tail -F {run.run_dir}/slurm.log" in done.stdout
    assert done.stdout.count("finished at step") == 1
    assert_same(run, alone)
    assert "#SBATCH --nodes=2" in (run.run_dir / "slurm.sh").read_text()


def test_a_run_that_is_named_goes_to_its_own_launcher(run: Command, slurm: dict[str, str]) -> None:
    own_parts = [argument for argument in run.arguments if argument.startswith("allow_targets=")]
    longer = [f"run_dir={run.run_dir}", f"trainer.max_steps={STEPS + 2}", *own_parts]
    done = finish(STARTER.start(longer, slurm))
    assert (done.returncode, done.stderr) == (0, "")
    assert f"to follow its log: tail -F {run.run_dir}/slurm.log" in done.stdout
    assert run.result()["steps"] == STEPS + 2


def test_a_warned_job_goes_back_and_continues_and_a_signal_ends_it(
    run: Command, slurm: dict[str, str]
) -> None:
    process = run.start("trainer.max_steps=5000")
    ranks = f" {sys.executable} -P -m speechtrain.rank"
    wait_for(lambda: sum(ranks in line and "srun" not in line for line in processes_of(run)) == 2, process)
    (number,) = _ask(slurm, "squeue", "-h", "-o", "%A").split()
    # what Slurm itself does before the limit; here while the ranks import their libraries
    _ask(slurm, "scancel", "--signal=TERM", number)

    def is_pending() -> bool:
        return _ask(slurm, "squeue", "-h", "-o", "%T").split() == ["PENDING"]

    wait_for(is_pending, process)
    saved = run.result()["steps"]
    assert run.result()["status"] == "preempted"
    _ask(slurm, "scontrol", "update", f"JobId={number}", "StartTime=now")  # it would wait for two minutes
    wait_for(lambda: any(e["step"] > saved for e in run.events("train")), process)
    assert [e["step"] for e in run.events("resume")][-1] == saved

    process.send_signal(signal.SIGTERM)
    ended = finish(process)
    assert ended.returncode == 75, ended.stderr
    assert run.checkpoints()[-1].name == f"step-{run.result()['steps']:08d}"
    wait_for(lambda: not _ask(slurm, "squeue", "-h").strip())

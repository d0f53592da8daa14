"""Two hosts of which each has a network, a name and an sshd of its own: namespaces of this machine."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from speechtrain.devices.cpu import CPU
from speechtrain.launch.node_agent import MODULE
from speechtrain.launch.process_tree import children_of, descendants_of

from .conftest import DEADLINE, Command, finish, wait_for
from .engines import ENGINES, SIZES, STEPS, assert_same, prepared, processes_of, skip_without

skip_without("ip", "unshare", "ssh", "ssh-keygen", "/usr/sbin/sshd", is_root=True)

pytestmark = pytest.mark.nightly

ADDRESSES = ("10.77.0.1", "10.77.0.2")

SSHD = """
Port 22
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
"""


@dataclass(frozen=True)
class Hosts:
    """The two: how to run something in the first, and what an ssh client needs to know."""

    inside: list[str]
    options: list[str]
    hostfile: Path
    lines: list[list[str]]
    daemons: list[subprocess.Popen[bytes]]

    def lose(self, index: int) -> None:
        """Kill a host's sshd and all that it has started, as a power cut would."""
        daemon = self.daemons[index]
        for pid in (*descendants_of(daemon.pid), daemon.pid):
            os.kill(pid, signal.SIGKILL)
        daemon.wait()

    def bring_back(self, index: int) -> None:
        self.daemons[index] = subprocess.Popen(self.lines[index], stderr=subprocess.DEVNULL)

    def wait_for_login(self, address: str) -> None:
        line = [*self.inside, "ssh", *self.options, "-oBatchMode=yes", address, "true"]
        wait_for(lambda: not subprocess.run(line, capture_output=True, timeout=60).returncode)


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("hosts")
    names = [f"speech{os.getpid()}-{index}" for index in (1, 2)]
    links = [f"v{os.getpid()}-{index}" for index in (1, 2)]
    daemons: list[subprocess.Popen[bytes]] = []
    lines: list[list[str]] = []
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("key", "host_key"):
        _do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
    try:
        try:
            for name in names:
                _do("ip", "netns", "add", name)
            peer = ("peer", links[1], "netns", names[1])
            _do("ip", "link", "add", links[0], "netns", names[0], "type", "veth", *peer)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        for name, link, address in zip(names, links, ADDRESSES, strict=True):
            _do("ip", "-n", name, "addr", "add", f"{address}/24", "dev", link)
            for device in (link, "lo"):
                _do("ip", "-n", name, "link", "set", device, "up")
            etc = Path("/etc/netns") / name
            etc.mkdir(parents=True)
            table = [f"{a} {n}" for a, n in zip(ADDRESSES, names, strict=True)]
            (etc / "hosts").write_text("\n".join(["127.0.0.1 localhost", *table, ""]))
            config = folder / f"{name}.conf"
            config.write_text(SSHD.format(address=address, folder=folder))
            line = f"hostname {name}; exec /usr/sbin/sshd -D -e -f {config}"
            lines.append(["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", line])
            daemons.append(subprocess.Popen(lines[-1], stderr=subprocess.DEVNULL))
        inside = ["ip", "netns", "exec", names[0], "unshare", "--uts", "sh", "-c"]
        inside += [f'hostname {names[0]}; exec "$@"', "-"]
        options = ["-F", "/dev/null", "-i", str(folder / "key"), "-oStrictHostKeyChecking=no"]
        options += [f"-oUserKnownHostsFile={folder / 'known'}", "-oLogLevel=ERROR"]
        hostfile = folder / "hosts"
        hostfile.write_text(
            "# two hosts\n\n" + "\n".join(f"{address}   # a comment" for address in ADDRESSES) + "\n"
        )
        hosts = Hosts(inside, options, hostfile, lines, daemons)
        for address in ADDRESSES:
            hosts.wait_for_login(address)
        yield hosts
    finally:
        for daemon in daemons:
            daemon.kill()
            daemon.wait()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


def quoted(text: str) -> str:
    """``text`` as a string of the command line's own grammar."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def listed(options: list[str]) -> str:
    """``options`` as a list in that grammar."""
    return "[" + ",".join(map(quoted, options)) + "]"


class FromTheFirst(Command):
    """``speechtrain train`` with two ranks, given on the first host; by default over ssh."""

    def __init__(
        self, run_dir: Path, environment: dict[str, str], hosts: Hosts, *overrides: str, launcher: str = "ssh"
    ) -> None:
        super().__init__(run_dir, {**environment, "HOSTFILE": str(hosts.hostfile)}, [*SIZES, *overrides])
        self.hosts = hosts
        self.arguments.pop()  # the run directory, which may need quotes
        self.arguments += [f"run_dir={quoted(str(run_dir))}", f"launcher={launcher}", "world_size=2"]
        if launcher == "ssh":
            self.arguments.append(f"launcher.options={listed(hosts.options)}")

    def start(self, *extra: str) -> subprocess.Popen[str]:
        line = [sys.executable, "-m", "speechtrain.commands.train", *self.arguments, *extra]
        return self._popen([*self.hosts.inside, *line])


@pytest.fixture(scope="module")
def run(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> FromTheFirst:
    """Twenty updates on the two hosts, in a folder whose name a shell would take apart."""
    run_dir = tmp_path_factory.mktemp("both") / "a $(touch pwned) 'run'"
    return FromTheFirst(run_dir, environment, hosts, "trainer.simulate_world=2")


@pytest.mark.ci_share
def test_two_hosts_train_what_one_process_does(run: FromTheFirst, alone: Command) -> None:
    done = run.run(f"trainer.max_steps={STEPS}")
    assert (done.returncode, done.stderr) == (0, "")
    assert_same(run, alone)
    assert (run.run_dir / "agent.log").exists() or not list(run.run_dir.glob("agent*"))
    assert not list(run.run_dir.glob(".seen*"))
    assert processes_of(run) == []


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_num_steps_limits_two_hosts_in_each_precision(
    precision: str, hosts: Hosts, tmp_path: Path, environment: dict[str, str]
) -> None:
    run = FromTheFirst(tmp_path / "run", {**environment, "NUM_STEPS": "3"}, hosts, f"precision={precision}")
    run.arguments = [text for text in run.arguments if not text.startswith("trainer.max_steps=")]
    done = run.run()
    assert done.returncode == 0, done.stderr
    assert [e["step"] for e in run.events("train")] == [1, 2, 3]
    assert [e["ranks"] for e in run.events("start")] == [2]
    assert f"precision.{precision.upper()}" in (run.run_dir / "config.yaml").read_text()


def test_a_dead_rank_ends_all_and_none_outlives_the_command(run: FromTheFirst) -> None:
    first = len(run.events("train"))
    process = run.start("trainer.max_steps=5000", "trainer.save_every=1")
    wait_for(lambda: len(run.events("train")) >= first + 3, process)
    (far,) = [
        int(p.split()[0])
        for p in processes_of(run)
        if psutil.Process(int(p.split()[0])).cmdline()[3:6] == [MODULE, "run", "--node=1"]
    ]
    (agent,) = children_of(far)
    (rank,) = children_of(agent)
    os.kill(rank, signal.SIGKILL)
    ended = finish(process)
    assert ended.returncode not in (0, 75), ended.stdout
    wait_for(lambda: not processes_of(run))

    before = len(run.events("train"))
    process = run.start("trainer.max_steps=5000", "trainer.save_every=5000")
    wait_for(lambda: len(run.events("train")) >= before + 3, process)
    process.kill()  # nobody is left to ask
    process.communicate(timeout=DEADLINE)
    wait_for(lambda: not processes_of(run))


def test_a_lost_host_ends_the_run_and_is_named(
    hosts: Hosts, tmp_path: Path, environment: dict[str, str]
) -> None:
    run = FromTheFirst(tmp_path / "run", environment, hosts)
    process = run.start("trainer.max_steps=5000", "trainer.save_every=1")
    wait_for(lambda: len(run.events("train")) >= 3, process)
    hosts.lose(1)
    ended = finish(process)
    hosts.bring_back(1)
    hosts.wait_for_login(ADDRESSES[1])
    says = f"{ADDRESSES[1]} is lost: the connection broke; the run ends, and the same command continues it"
    assert ended.returncode == 4
    assert ended.stderr.splitlines()[-1] == f"speechtrain: error: {says}"
    wait_for(lambda: not processes_of(run))
    last = max(run.losses()) + 2
    done = run.run(f"trainer.max_steps={last}", "resume=must")
    assert done.returncode == 0, done.stderr
    assert sorted(run.losses()) == list(range(1, last + 1))  # each update once, and equal where made twice


@pytest.fixture
def narrow(hosts: Hosts) -> Iterator[None]:
    """The second host has one CPU."""
    before = os.sched_getaffinity(hosts.daemons[1].pid)
    os.sched_setaffinity(hosts.daemons[1].pid, {min(before)})
    yield
    os.sched_setaffinity(hosts.daemons[1].pid, before)


@pytest.mark.usefixtures("narrow")
def test_each_host_computes_its_own_threads(
    hosts: Hosts, tmp_path: Path, environment: dict[str, str]
) -> None:
    free = {name: value for name, value in environment.items() if name != "OMP_NUM_THREADS"}
    run = FromTheFirst(tmp_path / "run", free, hosts, "device.threads=0")

    def threads() -> list[str]:
        found = {}
        for pid in {int(line.split()[0]) for line in processes_of(run)}:
            with contextlib.suppress(psutil.Error):
                if psutil.Process(pid).cmdline()[1:4] == ["-P", "-m", "speechtrain.rank"]:
                    variables = psutil.Process(pid).environ()
                    found[variables["RANK"]] = variables["OMP_NUM_THREADS"]
        return [found[rank] for rank in sorted(found)]

    process = run.start("trainer.max_steps=5000")
    wait_for(lambda: len(threads()) == 2, process)
    assert threads() == [CPU().environment(1)["OMP_NUM_THREADS"], "1"]
    wait_for(lambda: len(run.events("train")) >= 2, process)
    process.send_signal(signal.SIGTERM)
    ended = finish(process)
    assert ended.returncode == 75, ended.stderr
    assert run.checkpoints()[-1].name == f"step-{run.result()['steps']:08d}"
    assert processes_of(run) == []


@pytest.mark.parametrize("engine", ENGINES)
def test_mpirun_reaches_both_hosts(
    engine: str, hosts: Hosts, tmp_path: Path, environment: dict[str, str], alone: Command
) -> None:
    """The hosts' own network, a login through ssh, and no variable that travels but on the command line."""
    environment = prepared(engine, environment)
    ssh = shlex.join(hosts.options)
    network = ADDRESSES[0].rpartition(".")[0] + ".0/24"
    options = list(ENGINES[engine])
    if engine == "openmpi":
        options += ["--mca", "plm_rsh_args", ssh]
        options += ["--mca", "oob_tcp_if_include", network, "--mca", "btl_tcp_if_include", network]
    else:
        wrapper = tmp_path / "ssh"
        wrapper.write_text(f'#!/bin/sh\nexec ssh {ssh} "$@"\n')
        wrapper.chmod(0o755)
        words = ("-bootstrap", "-bootstrap-exec") if engine == "intel" else ("-launcher", "-launcher-exec")
        options += [words[0], "ssh", words[1], str(wrapper)]
    hostfile = tmp_path / "hosts"
    form = "{} slots=1\n" if engine == "openmpi" else "{}:1\n"
    hostfile.write_text("".join(map(form.format, ADDRESSES)))
    mpi = [
        f"launcher.engine={engine}",
        f"launcher.hostfile={hostfile}",
        f"launcher.options={listed(options)}",
    ]
    run = FromTheFirst(tmp_path / "run", environment, hosts, "trainer.simulate_world=2", *mpi, launcher="mpi")
    done = run.run(f"trainer.max_steps={STEPS}")
    assert done.returncode == 0, done.stderr + done.stdout
    assert_same(run, alone)
    wait_for(lambda: not processes_of(run))


def test_what_a_host_lacks_is_told_before_anything_starts(
    hosts: Hosts, tmp_path: Path, environment: dict[str, str]
) -> None:
    run = FromTheFirst(tmp_path / "run", environment, hosts)
    far = tmp_path / "hosts"
    far.write_text("10.77.0.1\n10.77.0.3\n10.77.0.4\n")
    done = run.run(f"launcher.hostfile={far}", "world_size=3", "launcher.login_seconds=2")
    assert done.returncode == 4
    *complaints, last = done.stderr.splitlines()
    assert last == "speechtrain: error: 2 of 3 hosts cannot take part. See the lines above"
    assert [line.split(":")[1].strip() for line in complaints] == ["10.77.0.3", "10.77.0.4"]
    assert all("cannot log in without a password" in line for line in complaints)
    assert not run.run_dir.exists() or not list(run.run_dir.iterdir())

    done = run.run("launcher.python=/bin/false")
    assert done.returncode == 4
    assert "10.77.0.2: speechtrain does not run there with /bin/false" in done.stderr

"""Two hosts of which each has a network, a name and an sshd of its own: namespaces of this machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from speechtrain.processes import children_of

from .conftest import DEADLINE, Command, finish, wait_for
from .engines import SIZES, STEPS, assert_same, processes_of, run_alone, skip_without

skip_without("ip", "unshare", "ssh", "ssh-keygen", "/usr/sbin/sshd", is_root=True)

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


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("hosts")
    names = [f"speech{os.getpid()}-{index}" for index in (1, 2)]
    links = [f"v{os.getpid()}-{index}" for index in (1, 2)]
    daemons: list[subprocess.Popen[bytes]] = []
    Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("key", "host_key"):
        _do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
    try:
        try:
            for name in names:
                _do("ip", "netns", "add", name)
            _do(
                "ip",
                "link",
                "add",
                links[0],
                "netns",
                names[0],
                "type",
                "veth",
                "peer",
                links[1],
                "netns",
                names[1],
            )
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        for name, link, address in zip(names, links, ADDRESSES, strict=True):
            for command in (
                ["addr", "add", f"{address}/24", "dev", link],
                ["link", "set", link, "up"],
                ["link", "set", "lo", "up"],
            ):
                _do("ip", "-n", name, *command)
            etc = Path("/etc/netns") / name
            etc.mkdir(parents=True)
            table = [f"{a} {n}" for a, n in zip(ADDRESSES, names, strict=True)]
            (etc / "hosts").write_text("\n".join(["127.0.0.1 localhost", *table, ""]))
            config = folder / f"{name}.conf"
            config.write_text(SSHD.format(address=address, folder=folder))
            line = f"hostname {name}; exec /usr/sbin/sshd -D -e -f {config}"
            daemons.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", line],
                    stderr=subprocess.DEVNULL,
                )
            )
        inside = [
            "ip",
            "netns",
            "exec",
            names[0],
            "unshare",
            "--uts",
            "sh",
            "-c",
            f'hostname {names[0]}; exec "$@"',
            "-",
        ]
        options = [
            "-F",
            "/dev/null",
            "-i",
            str(folder / "key"),
            "-oStrictHostKeyChecking=no",
            f"-oUserKnownHostsFile={folder / 'known'}",
            "-oLogLevel=ERROR",
        ]
        hostfile = folder / "hosts"
        hostfile.write_text(
            "# two hosts\n\n" + "\n".join(f"{address}   # a comment" for address in ADDRESSES) + "\n"
        )
        for address in ADDRESSES:
            wait_for(
                lambda a=address: (
                    not subprocess.run(
                        [*inside, "ssh", *options, "-oBatchMode=yes", a, "true"],
                        capture_output=True,
                        timeout=60,
                    ).returncode
                )
            )
        yield Hosts(inside, options, hostfile)
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


class FromTheFirst(Command):
    """``speechtrain-train launcher=ssh``, given on the first host."""

    def __init__(self, run_dir: Path, environment: dict[str, str], hosts: Hosts, *overrides: str) -> None:
        super().__init__(run_dir, {**environment, "HOSTFILE": str(hosts.hostfile)}, [*SIZES, *overrides])
        self.hosts = hosts
        self.arguments.pop()  # the run directory, which may need quotes
        options = ",".join(quoted(option) for option in hosts.options)
        self.arguments += [
            f"run_dir={quoted(str(run_dir))}",
            "launcher=ssh",
            "world_size=2",
            f"launcher.options=[{options}]",
        ]

    def start(self, *extra: str) -> subprocess.Popen[str]:
        line = [sys.executable, "-m", "speechtrain.commands.train", *self.arguments, *extra]
        return self._popen([*self.hosts.inside, *line])


@pytest.fixture(scope="module")
def run(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> FromTheFirst:
    """Twenty updates on the two hosts, in a folder whose name a shell would take apart."""
    run_dir = tmp_path_factory.mktemp("both") / "a $(touch pwned) 'run'"
    return FromTheFirst(run_dir, environment, hosts, "trainer.simulate_world=2")


def test_two_hosts_train_what_one_process_does(
    run: FromTheFirst, tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]
) -> None:
    done = run.run(f"trainer.max_steps={STEPS}")
    assert (done.returncode, done.stderr) == (0, "")
    assert_same(run, run_alone(tmp_path_factory.mktemp("alone"), environment))
    assert (run.run_dir / "agent.log").exists() or not list(run.run_dir.glob("agent*"))
    assert not list(run.run_dir.glob(".seen*"))
    assert processes_of(run) == []


def test_a_rank_that_dies_ends_all_a_signal_saves_and_nothing_outlives_the_command(run: FromTheFirst) -> None:
    first = len(run.events("train"))
    process = run.start("trainer.max_steps=5000", "trainer.save_every=1")
    wait_for(lambda: len(run.events("train")) >= first + 3, process)
    far, *_ = [
        int(p.split()[0])
        for p in processes_of(run)
        if "-m torch.distributed.run" in p and "agent-1.log" not in p and "--node-rank=1" in p
    ]
    (rank,) = children_of(far)
    os.kill(rank, signal.SIGKILL)
    ended = finish(process)
    assert ended.returncode not in (0, 75), ended.stdout
    wait_for(lambda: not processes_of(run))

    before = len(run.events("train"))
    process = run.start("trainer.max_steps=5000", "trainer.save_every=5000")
    wait_for(lambda: len(run.events("train")) >= before + 3, process)
    process.send_signal(signal.SIGTERM)
    ended = finish(process)
    assert ended.returncode == 75, ended.stderr
    assert run.checkpoints()[-1].name == f"step-{run.result()['steps']:08d}"
    assert processes_of(run) == []

    before = len(run.events("train"))
    process = run.start("trainer.max_steps=5000", "trainer.save_every=5000")
    wait_for(lambda: len(run.events("train")) >= before + 3, process)
    process.kill()  # nobody is left to ask
    process.communicate(timeout=DEADLINE)
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
    assert last == "speechtrain: error: 2 of 3 hosts cannot take part; see the lines above"
    assert [line.split(":")[1].strip() for line in complaints] == ["10.77.0.3", "10.77.0.4"]
    assert all("cannot log in without a password" in line for line in complaints)
    assert not run.run_dir.exists() or not list(run.run_dir.iterdir())

    done = run.run("launcher.python=/bin/false")
    assert done.returncode == 4
    assert "10.77.0.2: speechtrain does not run there as /bin/false" in done.stderr

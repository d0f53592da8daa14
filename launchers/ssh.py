"""Launcher for torchrun on every host of a list, over ssh."""

from __future__ import annotations

import json
import secrets
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

from speechtrain.errors import ConfigError, MachineError, print_notice
from speechtrain.files import write_text
from speechtrain.launcher import (
    AGENT,
    Job,
    Launcher,
    Result,
    escape_for_torchrun,
    forwarded_environment,
    host_lines,
    is_number,
)
from speechtrain.supervision.node_agent import ALIVE, KILL, MODULE, STOP, versions
from speechtrain.supervision.rendezvous import RESTARTABLE, agent_command, rendezvous_port
from speechtrain.supervision.supervise import stop_signals

_ALIVE_SECONDS = 5.0
_POLL_SECONDS = 0.1
_LOOK_AGAIN_SECONDS = 2.0
_KILLED = 128  # a higher exit code: the agent was killed, or (255) the connection was lost
_LOST = 255  # ssh's own exit code
_SSH = ("-T", "-oBatchMode=yes", "-oServerAliveInterval=15", "-oServerAliveCountMax=4")


@dataclass(eq=False)
class Ssh(Launcher):
    """Start ``world_size`` ranks, divided evenly among the hosts that ``hostfile`` names.

    The file has one address per line; blank lines and text after ``#`` are ignored. ``nodes`` limits the
    run to the first hosts of the file. The ranks meet on the first host, at ``port`` (default: derived
    from the run directory). Every host needs a login without a password, this interpreter at the same
    path (or ``python``), the same versions, and the run directory: all that is checked before the start.
    The hosts get the variables whose names match ``forward``, but never secrets.

    With ``max_restarts`` the agents start all ranks again, up to that many times, after one has failed. A
    lost host can join again within ``rejoin_seconds``, except the first host, which keeps the agents'
    common store. The ranks are then numbered by their hosts' addresses.

    The remote command reads stop requests, and notices a lost connection, on its standard input:
    a terminal there (``ssh -tt``) would merge its outputs and change their bytes.
    """

    programs = ("ssh",)
    hostfile: str
    nodes: int | str | None = None  # digits from NNODES of the environment
    port: int | None = None
    python: str | None = None
    options: list[str] | None = None
    forward: list[str] | None = None
    login_seconds: int = 20
    shutdown_seconds: int = 60
    max_restarts: int = 0
    rejoin_seconds: int = 600

    def __post_init__(self) -> None:
        if isinstance(self.nodes, str):
            if not is_number(self.nodes):
                raise ConfigError(f"launcher.nodes={self.nodes}: it must be a number of hosts")
            self.nodes = int(self.nodes)
        self.check_minimum(1, "login_seconds", "shutdown_seconds", "rejoin_seconds", "nodes")
        self.check_minimum(0, "max_restarts")
        self._python = self.python or sys.executable

    def check(self, job: Job) -> None:
        job.ranks_per_node(len(self._hosts()))

    def launch(self, job: Job) -> Result:
        hosts = self._hosts()
        clients = list(map(_Client, hosts, self._commands(job, hosts)))
        self._check_hosts(job, hosts)

        def lacks(host: str) -> str:
            return self._lacking(job, [host], port=0).get(host, "")

        connections = _Connections(
            clients, self.shutdown_seconds, self.max_restarts, rejoin_seconds=self.rejoin_seconds, lacks=lacks
        )
        return Result(connections.run(), cause=connections.cause)

    def render(self, job: Job) -> str:
        lines = [shlex.join(command) for command in self._commands(job, self._hosts())]
        return "\n".join(["# start all at the same time, each with its standard input open", *lines])

    def host_count(self) -> int:
        return len(self._hosts())

    def _hosts(self) -> list[str]:
        hosts = host_lines(self.hostfile)
        for host in hosts:
            if host.startswith("-") or len(host.split()) > 1 or len(host) > 255 or not host.isprintable():
                shown = f"{host[:80]!r} is not an address"
                raise ConfigError(f"{self.hostfile}: {shown}; write one address per line, nothing else")
        wanted = len(hosts) if self.nodes is None else int(self.nodes)
        if not hosts or wanted > len(hosts):
            raise ConfigError(
                f"{self.hostfile} names {len(hosts)} hosts, but launcher.nodes={max(wanted, 1)} needs more; "
                "add hosts, or set launcher.nodes or NNODES"
            )
        if len(set(hosts[:wanted])) < wanted:
            raise ConfigError(f"{self.hostfile} names a host twice; write one line per host")
        return hosts[:wanted]

    def _port(self, job: Job) -> int:
        return rendezvous_port(job.run_dir) if self.port is None else self.port

    def _remote(self, host: str, command: str) -> list[str]:
        options = [*_SSH, f"-oConnectTimeout={self.login_seconds}", *(self.options or ())]
        return ["ssh", *options, "--", host, command]

    def _commands(self, job: Job, hosts: list[str]) -> list[list[str]]:
        """The ssh command of each host: change to this folder, then run one command with its environment."""
        ranks = job.ranks_per_node(len(hosts))
        environment = {
            **forwarded_environment(job, self.forward),
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(self.shutdown_seconds),
            **(RESTARTABLE if self.max_restarts else {}),
        }
        assignments = [f"{name}={value}" for name, value in environment.items()]
        commands = []
        for index, host in enumerate(hosts):
            log = job.run_dir / (f"agent-{index}.log" if index else AGENT)
            meeting = self._meeting(job, hosts, index)
            agent = agent_command(self._python, ranks, len(hosts), *meeting, restarts=self.max_restarts)
            agent += [self._python, *escape_for_torchrun(job.command[1:])]
            node = [self._python, "-P", "-m", MODULE, "run", f"--attached={self.shutdown_seconds}"]
            node += [f"--address={host}"] if len(hosts) > 1 else []
            node += [str(log), "--", *job.on_host(agent, ranks, self._python)]
            line = f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(['env', *assignments, *node])}"
            commands.append(self._remote(host, line))
        return commands

    def _meeting(self, job: Job, hosts: list[str], index: int) -> list[str]:
        """torchrun's options for the rendezvous of the hosts.

        With a fixed address no host can join later; with a store on the first host, a host can, but the
        agents unpickle what the store holds.
        """
        if not self.max_restarts:
            where = [f"--master-addr={hosts[0]}", f"--master-port={self._port(job)}"]
            return [f"--node-rank={index}", *where]
        settings = f"is_host={int(index == 0)},join_timeout={self.rejoin_seconds}"
        return [
            *(
                f"--nnodes={len(hosts)}",
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint={hosts[0]}:{self._port(job)}",
            ),
            *("--rdzv-id=speechtrain", f"--rdzv-conf={settings}", f"--local-addr={hosts[index]}"),
        ]

    def _check_hosts(self, job: Job, hosts: list[str]) -> None:
        """Raise MachineError if hosts cannot take part; if several cannot, print a line for each first."""
        lacking = self._lacking(job, hosts, self._port(job))
        faults = [f"{host}: {lack}" for host, lack in lacking.items()]
        if len(faults) == 1:
            raise MachineError(faults[0])
        for fault in faults:
            print_notice(fault)
        if faults:
            raise MachineError(f"{len(faults)} of {len(hosts)} hosts cannot take part; see the lines above")

    def _lacking(self, job: Job, hosts: list[str], port: int) -> dict[str, str]:
        """The hosts that cannot take part, with the reason; ``port`` must be free on the first host."""
        token = secrets.token_hex(16)
        path = job.run_dir / f".seen-{token[:8]}"
        write_text(path, token)
        ports = [port] + [0] * (len(hosts) - 1)
        try:
            with ThreadPoolExecutor(len(hosts)) as pool:
                found = pool.map(partial(self._lacks, path=path, token=token, job=job), hosts, ports)
                return {host: lack for host, lack in zip(hosts, found, strict=True) if lack}
        finally:
            path.unlink(missing_ok=True)

    def _lacks(self, host: str, port: int, path: Path, token: str, job: Job) -> str:
        """What ``host`` lacks, with the fix; empty if nothing is missing. Port 0 is always free."""
        probe = [self._python, "-P", "-m", MODULE, "look", str(path), str(port), host if port else ""]
        # among them PYTHONPATH, if it is forwarded
        kept = forwarded_environment(Job(job.config, job.run_dir), self.forward)
        environment = ["env", *(f"{name}={value}" for name, value in kept.items())]
        folder = shlex.quote(str(Path.cwd()))
        try:
            login = subprocess.run(
                self._remote(host, f"cd {folder} && {shlex.join([*environment, *probe])}"),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=3 * self.login_seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"no answer within {3 * self.login_seconds} s; raise launcher.login_seconds if it is slow"
        words = login.stderr.strip().splitlines()[-1:] or [f"exit code {login.returncode}"]
        if login.returncode == 255:
            return f"cannot log in without a password ({words[0]}); try `ssh -oBatchMode=yes {host} true`"
        try:
            seen = json.loads(login.stdout.strip().splitlines()[-1])
        except (IndexError, ValueError):
            cause = f"speechtrain does not run there with {self._python} ({words[0]})"
            return f"{cause}; install it there, or set launcher.python"
        if seen["token"] != token:
            return f"does not see {job.run_dir}; set run_dir to a folder that all hosts share"
        there = seen["versions"]
        differ = [f"{n} {there.get(n)} there, {v} here" for n, v in versions().items() if there.get(n) != v]
        if differ:
            return f"has other versions: {'; '.join(differ)}; install the same versions on all hosts"
        if seen["port_error"]:
            return f"port {port} cannot be used ({seen['port_error']}); set launcher.port to a free port"
        return ""


@dataclass(eq=False)
class _Client:
    """The ssh client of one host, and its state."""

    host: str
    command: list[str]
    is_over: bool = False
    """The client has ended, and its host is not waited for."""
    lost_at: float | None = None
    """When its host was lost and is waited for, in seconds of the monotonic clock; else None."""
    is_back: threading.Event = field(default_factory=threading.Event)
    starts: int = 0
    process: subprocess.Popen[bytes] | None = None
    readers: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        """Connect, and print the output, each line with the host in front."""
        pipe = subprocess.PIPE
        self.process = process = subprocess.Popen(
            self.command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        self.starts += 1
        self.lost_at = None
        self.is_back.clear()
        for stream, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            reader = threading.Thread(target=_copy, args=(stream, target, self.host), daemon=True)
            reader.start()
            self.readers.append(reader)

    @property
    def code(self) -> int | None:
        """The exit code; None while the client runs, 0 before its start."""
        return self.process.poll() if self.process else 0

    def say(self, word: bytes) -> None:
        if self.process is not None and self.process.stdin is not None:
            with suppress(OSError, ValueError):  # it has ended
                self.process.stdin.write(word)
                self.process.stdin.flush()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def join(self, seconds: float) -> None:
        """Wait until all output is printed, ``seconds`` at most for each stream."""
        for reader in self.readers:
            reader.join(seconds)


@dataclass(eq=False)
class _Connections:
    """The running ssh clients, one per host.

    The first signal asks all ranks to save and exit, the second kills. When one host ends, the others
    must end, too: their ranks notice it, else they are asked to stop, and at last they are killed. If
    the agents restart ranks, a lost host is waited for: ``lacks`` returns what it still lacks.
    """

    clients: list[_Client]
    grace: float
    max_restarts: int
    rejoin_seconds: float
    lacks: Callable[[str], str]
    cause: str = ""
    """The lost host that has ended the run, in one line."""
    received: int = 0

    def run(self) -> int:
        """Wait for all clients; return the highest exit code. Raises KeyboardInterrupt after two signals."""
        with stop_signals(self._receive):
            for client in self.clients:
                client.start()
            if self.received:
                self._say(STOP)  # the signal came between two starts
            try:
                self._wait()
            finally:
                for client in self.clients:
                    client.is_over = True
                    client.kill()
        for client in self.clients:
            client.join(self.grace)
        if self.received > 1:
            raise KeyboardInterrupt
        return max(abs(client.code or 0) for client in self.clients)

    def _wait(self) -> None:
        said, first_end, asked = time.monotonic(), None, False
        while not all(client.is_over for client in self.clients):
            now = time.monotonic()
            for client in self.clients:
                if not client.is_over and client.code is not None:
                    self._ended(client, now)
            if now - said > _ALIVE_SECONDS:
                said = now
                self._say(ALIVE)
            if first_end is None and any(client.is_over for client in self.clients):
                first_end = now
            if first_end is not None and not asked and now - first_end > self.grace / 2:
                asked = True
                self._say(STOP)
            if first_end is not None and now - first_end > self.grace:
                self._say(KILL)
                first_end = now
            time.sleep(_POLL_SECONDS)

    def _ended(self, client: _Client, now: float) -> None:
        """Decide about a client that does not run: it is over, is waited for, or starts again."""
        is_leaving = bool(self.received) or any(other.is_over for other in self.clients)
        if client.lost_at is None:
            if is_leaving or (client.code or 0) <= _KILLED:
                client.is_over = True
            elif client is self.clients[0] or client.starts > self.max_restarts:
                role = ", where the ranks meet," if client is self.clients[0] else ""
                self._end_with(client, f"{client.host}{role} is lost: {self._how(client)}")
            else:
                print_notice(f"{client.host} is lost ({self._how(client)}); it joins again once it is back")
                client.lost_at = now
                threading.Thread(target=self._watch_for, args=(client,), daemon=True).start()
        elif is_leaving:
            client.is_over = True
            self._say(KILL)  # the others cannot save without this host
        elif client.is_back.is_set():
            print_notice(f"{client.host} is back and joins again")
            client.start()
        elif now - client.lost_at > self.rejoin_seconds:
            self._end_with(client, f"{client.host} is lost for more than {self.rejoin_seconds:g} s")
            self._say(KILL)

    def _watch_for(self, client: _Client) -> None:
        """Check a lost host until it can take part again; runs in a thread of its own."""
        while not client.is_over:
            if not self.lacks(client.host):
                client.is_back.set()
                return
            time.sleep(_LOOK_AGAIN_SECONDS)

    def _how(self, client: _Client) -> str:
        return "the connection broke" if client.code == _LOST else f"its agent ended with {client.code}"

    def _end_with(self, client: _Client, cause: str) -> None:
        client.is_over = True
        self.cause = f"{cause}; the run ends, and the same command continues it"

    def _say(self, word: bytes) -> None:
        for client in self.clients:
            client.say(word)

    def _receive(self) -> None:
        self.received += 1
        self._say(STOP if self.received == 1 else KILL)


def _copy(stream: IO[bytes], target: IO[str], host: str) -> None:
    with stream:
        for line in stream:
            target.write(f"{host}: {line.decode(errors='backslashreplace').rstrip()}\n")
            target.flush()

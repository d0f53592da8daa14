"""Launcher for torchrun on every host of a list, over ssh."""

from __future__ import annotations

import json
import secrets
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess
from typing import IO

from speechtrain.errors import ConfigError, MachineError, print_notice
from speechtrain.files import write_text
from speechtrain.launcher import (
    AGENT,
    Job,
    Launcher,
    LaunchResult,
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
_MAX_EXIT_CODE = 128  # With a higher code, the agent was killed, or the connection was lost (255).
_LOST = 255  # the exit code of ssh itself
_SSH = ("-T", "-oBatchMode=yes", "-oServerAliveInterval=15", "-oServerAliveCountMax=4")


@dataclass(eq=False)
class Ssh(Launcher):
    """Start ``world_size`` ranks, divided evenly among the hosts that ``hostfile`` names.

    The file has one address per line. Blank lines and text after ``#`` are ignored. ``nodes`` limits the
    run to the first hosts of the file. The ranks meet on the first host, at ``port`` (default: derived
    from the run directory). Every host needs a login without a password, this interpreter at the same
    path (or ``python``), the same versions, and the run directory. All of this is checked before the start.
    The hosts get the variables whose names match ``forward``, but never secrets.

    With ``max_restarts`` the agents start all ranks again after a rank has failed, up to that many times. A
    lost host can join again within ``rejoin_seconds``. The first host cannot, because it keeps the agents'
    common store. The ranks are then numbered by their hosts' addresses.

    The remote command reads stop requests on its standard input, and by its end notices a lost connection.
    A terminal there (``ssh -tt``) would merge the command's outputs and change their bytes.
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

    def launch(self, job: Job) -> LaunchResult:
        hosts = self._hosts()
        clients = list(map(_Client, hosts, self._commands(job, hosts)))
        self._check_hosts(job, hosts)

        def fault_of(host: str) -> str:
            return self._faults(job, [host], port=0).get(host, "")

        connections = _Connections(
            clients, self.shutdown_seconds, self.max_restarts, self.rejoin_seconds, fault_of
        )
        return LaunchResult(connections.run(), cause=connections.cause)

    def render(self, job: Job) -> str:
        lines = [shlex.join(command) for command in self._commands(job, self._hosts())]
        return "\n".join(["# start all at the same time, each with its standard input open", *lines])

    def host_count(self) -> int:
        return len(self._hosts())

    def _hosts(self) -> list[str]:
        hosts = host_lines(self.hostfile)
        for host in hosts:
            is_address = host.isprintable() and len(host.split()) == 1 and len(host) <= 255
            if not is_address or host.startswith("-"):
                cause = f"{self.hostfile}: {host[:80]!r} is not an address"
                raise ConfigError(f"{cause}. Write one address per line, nothing else")
        count = len(hosts) if self.nodes is None else int(self.nodes)
        if not hosts or count > len(hosts):
            raise ConfigError(
                f"{self.hostfile} names {len(hosts)} hosts, but launcher.nodes={max(count, 1)} needs more. "
                "Add hosts, or set launcher.nodes or NNODES"
            )
        hosts = hosts[:count]
        if len(set(hosts)) < count:
            raise ConfigError(f"{self.hostfile} names a host twice. Write one line per host")
        return hosts

    def _port(self, job: Job) -> int:
        return rendezvous_port(job.run_dir) if self.port is None else self.port

    def _remote(self, host: str, environment: Mapping[str, str], command: list[str]) -> list[str]:
        """Return the ssh command that runs ``command`` with its environment on ``host``, in this folder."""
        options = [*_SSH, f"-oConnectTimeout={self.login_seconds}", *(self.options or ())]
        assignments = [f"{name}={value}" for name, value in environment.items()]
        folder = shlex.quote(str(Path.cwd()))
        line = f"cd {folder} && exec {shlex.join(['env', *assignments, *command])}"
        return ["ssh", *options, "--", host, line]

    def _commands(self, job: Job, hosts: list[str]) -> list[list[str]]:
        """Return the ssh command of each host."""
        environment = {
            **forwarded_environment(job, self.forward),
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(self.shutdown_seconds),
        }
        if self.max_restarts:
            environment |= RESTARTABLE
        commands = []
        for index, host in enumerate(hosts):
            commands.append(self._remote(host, environment, self._node_command(job, hosts, index)))
        return commands

    def _node_command(self, job: Job, hosts: list[str], index: int) -> list[str]:
        """Return the command of host ``index``, which starts torchrun's agent with the host's ranks."""
        ranks = job.ranks_per_node(len(hosts))
        rendezvous = self._rendezvous(job, hosts, index)
        agent = agent_command(self._python, ranks, len(hosts), *rendezvous, restarts=self.max_restarts)
        agent += [self._python, *escape_for_torchrun(job.command[1:])]
        node = [self._python, "-P", "-m", MODULE, "run", f"--attached={self.shutdown_seconds}"]
        if len(hosts) > 1:
            node.append(f"--address={hosts[index]}")
        log = f"agent-{index}.log" if index else AGENT
        return [*node, str(job.run_dir / log), "--", *job.on_host(agent, ranks, self._python)]

    def _rendezvous(self, job: Job, hosts: list[str], index: int) -> list[str]:
        """Return torchrun's options for the rendezvous of the hosts.

        With a fixed address no host can join later. With a store on the first host it can, but the agents
        unpickle the content of the store.
        """
        port = self._port(job)
        if not self.max_restarts:
            return [f"--node-rank={index}", f"--master-addr={hosts[0]}", f"--master-port={port}"]
        settings = f"is_host={int(index == 0)},join_timeout={self.rejoin_seconds}"
        return [
            *(f"--nnodes={len(hosts)}", "--rdzv-backend=c10d", f"--rdzv-endpoint={hosts[0]}:{port}"),
            *("--rdzv-id=speechtrain", f"--rdzv-conf={settings}", f"--local-addr={hosts[index]}"),
        ]

    def _check_hosts(self, job: Job, hosts: list[str]) -> None:
        """Raise MachineError if hosts cannot take part. If there are several, print a line for each first."""
        faults = self._faults(job, hosts, self._port(job))
        lines = [f"{host}: {fault}" for host, fault in faults.items()]
        if len(lines) == 1:
            raise MachineError(lines[0])
        for line in lines:
            print_notice(line)
        if lines:
            raise MachineError(f"{len(lines)} of {len(hosts)} hosts cannot take part. See the lines above")

    def _faults(self, job: Job, hosts: list[str], port: int) -> dict[str, str]:
        """Return the hosts that cannot take part, each with the reason.

        ``port`` must be free on the first host.
        """
        token = secrets.token_hex(16)
        path = job.run_dir / f".seen-{token[:8]}"
        write_text(path, token)
        ports = [port] + [0] * (len(hosts) - 1)
        fault_of = partial(self._fault_of, path=path, token=token, job=job)
        try:
            with ThreadPoolExecutor(len(hosts)) as pool:
                faults = pool.map(fault_of, hosts, ports)
                return {host: fault for host, fault in zip(hosts, faults, strict=True) if fault}
        finally:
            path.unlink(missing_ok=True)

    def _look(self, host: str, port: int, path: Path, job: Job, seconds: int) -> CompletedProcess[str]:
        """Run ``node_agent.check_host`` on ``host``."""
        # The variables include PYTHONPATH if it is forwarded.
        environment = forwarded_environment(Job(job.config, job.run_dir), self.forward)
        address = host if port else ""
        command = [self._python, "-P", "-m", MODULE, "look", str(path), str(port), address]
        return subprocess.run(
            self._remote(host, environment, command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )

    def _fault_of(self, host: str, port: int, path: Path, token: str, job: Job) -> str:
        """Return the reason why ``host`` cannot take part, with the fix, or "". Port 0 is always free."""
        seconds = 3 * self.login_seconds
        try:
            login = self._look(host, port, path, job, seconds)
        except subprocess.TimeoutExpired:
            return f"no answer within {seconds} s; raise launcher.login_seconds if it is slow"
        (message,) = login.stderr.strip().splitlines()[-1:] or [f"exit code {login.returncode}"]
        if login.returncode == _LOST:
            return f"cannot log in without a password ({message}); try `ssh -oBatchMode=yes {host} true`"
        try:
            facts = json.loads(login.stdout.strip().splitlines()[-1])
        except (IndexError, ValueError):
            cause = f"speechtrain does not run there with {self._python} ({message})"
            return f"{cause}; install it there, or set launcher.python"
        if facts["token"] != token:
            return f"does not see {job.run_dir}; set run_dir to a folder that all hosts share"
        differences = _version_differences(facts["versions"])
        if differences:
            return f"has other versions: {differences}; install the same versions on all hosts"
        if facts["port_error"]:
            return f"port {port} cannot be used ({facts['port_error']}); set launcher.port to a free port"
        return ""


def _version_differences(remote_versions: Mapping[str, str]) -> str:
    differences = []
    for name, version in versions().items():
        remote_version = remote_versions.get(name)
        if remote_version != version:
            differences.append(f"{name} {remote_version} there, {version} here")
    return "; ".join(differences)


@dataclass(eq=False)
class _Client:
    """The ssh client of one host, and its state."""

    host: str
    command: list[str]
    is_over: bool = False
    """The client has ended, and the run does not wait for its host."""
    lost_time: float | None = None
    """The time at which its host was lost, by the monotonic clock. None if the host is not waited for."""
    is_back: threading.Event = field(default_factory=threading.Event)
    starts: int = 0
    process: subprocess.Popen[bytes] | None = None
    readers: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        """Connect, and print the output. Each line begins with the host."""
        pipe = subprocess.PIPE
        self.process = process = subprocess.Popen(
            self.command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        self.starts += 1
        self.lost_time = None
        self.is_back.clear()
        for stream, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            reader = threading.Thread(target=_copy, args=(stream, target, self.host), daemon=True)
            reader.start()
            self.readers.append(reader)

    @property
    def code(self) -> int | None:
        """The exit code. It is None while the client runs, and 0 before its start."""
        return self.process.poll() if self.process else 0

    def send(self, request: bytes) -> None:
        if self.process is not None and self.process.stdin is not None:
            with suppress(OSError, ValueError):  # The client has ended.
                self.process.stdin.write(request)
                self.process.stdin.flush()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def join(self, seconds: float) -> None:
        """Wait until all output is printed, at most ``seconds`` for each stream."""
        for reader in self.readers:
            reader.join(seconds)


@dataclass(eq=False)
class _Connections:
    """The running ssh clients, one per host.

    The first signal asks all ranks to save and exit. The second kills them. When one host ends, the others
    must end, too. Their ranks notice it, otherwise they are asked to stop, and at last they are killed. If
    the agents restart ranks, the run waits for a lost host until ``fault_of`` returns no fault of it.
    """

    clients: list[_Client]
    grace: float
    max_restarts: int
    rejoin_seconds: float
    fault_of: Callable[[str], str]
    cause: str = ""
    """The lost host that has ended the run, in one line."""
    signals: int = 0

    def run(self) -> int:
        """Wait for all clients and return the highest exit code.

        Raises KeyboardInterrupt after two signals.
        """
        with stop_signals(self._receive):
            for client in self.clients:
                client.start()
            if self.signals:
                self._send(STOP)  # The signal came between two starts.
            try:
                self._wait()
            finally:
                for client in self.clients:
                    client.is_over = True
                    client.kill()
        for client in self.clients:
            client.join(self.grace)
        if self.signals > 1:
            raise KeyboardInterrupt
        return max(abs(client.code or 0) for client in self.clients)

    def _wait(self) -> None:
        """Wait until all clients are over."""
        alive_time = time.monotonic()
        end_time: float | None = None  # of the first client, or of the latest request to kill
        has_asked = False
        while not all(client.is_over for client in self.clients):
            loop_time = time.monotonic()
            for client in self.clients:
                if not client.is_over and client.code is not None:
                    self._handle_end(client, loop_time)
            if loop_time - alive_time > _ALIVE_SECONDS:
                alive_time = loop_time
                self._send(ALIVE)
            if end_time is not None:
                seconds = loop_time - end_time
                if not has_asked and seconds > self.grace / 2:
                    has_asked = True
                    self._send(STOP)
                if seconds > self.grace:
                    self._send(KILL)
                    end_time = loop_time
            elif any(client.is_over for client in self.clients):
                end_time = loop_time
            time.sleep(_POLL_SECONDS)

    def _handle_end(self, client: _Client, loop_time: float) -> None:
        """Decide about a client that does not run. It is over, is waited for, or starts again."""
        is_leaving = bool(self.signals) or any(peer.is_over for peer in self.clients)
        if client.lost_time is None:
            if is_leaving or (client.code or 0) <= _MAX_EXIT_CODE:
                client.is_over = True
            elif client is self.clients[0]:
                self._end_run(client, f"{client.host}, where the ranks meet, is lost: {_cause_of(client)}")
            elif client.starts > self.max_restarts:
                self._end_run(client, f"{client.host} is lost: {_cause_of(client)}")
            else:
                print_notice(f"{client.host} is lost ({_cause_of(client)}); it joins again once it is back")
                client.lost_time = loop_time
                threading.Thread(target=self._watch_for, args=(client,), daemon=True).start()
        elif is_leaving:
            client.is_over = True
            self._send(KILL)  # The other hosts cannot save without this host.
        elif client.is_back.is_set():
            print_notice(f"{client.host} is back and joins again")
            client.start()
        elif loop_time - client.lost_time > self.rejoin_seconds:
            self._end_run(client, f"{client.host} is lost for more than {self.rejoin_seconds:g} s")
            self._send(KILL)

    def _watch_for(self, client: _Client) -> None:
        """Check a lost host until it can take part again. This runs in its own thread."""
        while not client.is_over:
            if not self.fault_of(client.host):
                client.is_back.set()
                return
            time.sleep(_LOOK_AGAIN_SECONDS)

    def _end_run(self, client: _Client, cause: str) -> None:
        client.is_over = True
        self.cause = f"{cause}; the run ends, and the same command continues it"

    def _send(self, request: bytes) -> None:
        for client in self.clients:
            client.send(request)

    def _receive(self) -> None:
        self.signals += 1
        request = STOP if self.signals == 1 else KILL
        self._send(request)


def _cause_of(client: _Client) -> str:
    return "the connection broke" if client.code == _LOST else f"its agent ended with {client.code}"


def _copy(stream: IO[bytes], target: IO[str], host: str) -> None:
    with stream:
        for line in stream:
            target.write(f"{host}: {line.decode(errors='backslashreplace').rstrip()}\n")
            target.flush()

"""Launcher for torchrun on every host of a list, over ssh."""

from __future__ import annotations

import json
import secrets
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess
from typing import IO

from speechtrain.distributed.world import is_number
from speechtrain.errors import ConfigError, MachineError, print_notice
from speechtrain.files import write_text
from speechtrain.launch.launcher import (
    AGENT,
    Job,
    Launcher,
    LaunchResult,
    escape_for_torchrun,
    forwarded_environment,
    host_lines,
)
from speechtrain.launch.node_agent import ALIVE, KILL, MODULE, STOP, versions
from speechtrain.launch.rendezvous import agent_command, rendezvous_port
from speechtrain.launch.supervise import stop_signals

_ALIVE_SECONDS = 5.0  # the time between two messages to the hosts that this process still runs
_POLL_SECONDS = 0.1
_MAX_EXIT_CODE = 128  # With a higher code, the agent was killed or the connection was lost.
_CONNECTION_LOST = 255  # ssh exits with this code if it cannot connect, or loses the connection.
_SSH_OPTIONS = ("-T", "-oBatchMode=yes", "-oServerAliveInterval=15", "-oServerAliveCountMax=4")


@dataclass(eq=False)
class Ssh(Launcher):
    """Start ``world_size`` ranks, divided evenly among the hosts that ``hostfile`` lists.

    The file has one address per line. Blank lines and text after ``#`` are ignored. ``nodes`` limits the
    run to the first hosts of the file. The ranks meet on the first host, at ``port`` (default: derived
    from the run directory).

    Every host needs a login without a password, this interpreter at the same path (or ``python``), the same
    versions, and the run directory. All of this is checked before the start. The hosts get the variables
    whose names match ``forward``, but never secrets.

    If a host is lost, the run ends, and the same command continues it.

    The remote command reads stop requests on its standard input. The end of this input means that the
    connection is lost. A remote terminal (``ssh -tt``) would merge the command's two outputs and change their
    bytes.
    """

    programs = ("ssh",)
    hostfile: str
    nodes: int | str | None = None  # A value from the environment variable NNODES is a text of digits.
    port: int | None = None
    python: str | None = None
    options: list[str] | None = None
    forward: list[str] | None = None
    login_seconds: int = 20
    shutdown_seconds: int = 60

    def __post_init__(self) -> None:
        if isinstance(self.nodes, str):
            if not is_number(self.nodes):
                raise ConfigError(f"launcher.nodes={self.nodes}: it must be a number of hosts")
            self.nodes = int(self.nodes)
        self.check_minimum(1, "login_seconds", "shutdown_seconds", "nodes")
        self._python = self.python or sys.executable

    def check(self, job: Job) -> None:
        job.ranks_per_node(len(self._hosts()))

    def launch(self, job: Job) -> LaunchResult:
        hosts = self._hosts()
        self._check_hosts(job, hosts)
        clients = []
        for host, command in zip(hosts, self._commands(job, hosts), strict=True):
            clients.append(_Client(host, command))
        connections = _Connections(clients, self.shutdown_seconds)
        code = connections.run()
        return LaunchResult(code, cause=connections.cause)

    def render(self, job: Job) -> str:
        lines = [shlex.join(command) for command in self._commands(job, self._hosts())]
        return "\n".join(["# start all at the same time, each with its standard input open", *lines])

    def host_count(self) -> int:
        return len(self._hosts())

    def _hosts(self) -> list[str]:
        """Return the addresses of the run's hosts. Raises ConfigError if the list is not usable."""
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
        """Return the port of the first host at which the ranks meet."""
        return rendezvous_port(job.run_dir) if self.port is None else self.port

    def _ssh_command(self, host: str, environment: Mapping[str, str], command: list[str]) -> list[str]:
        """Return the ssh command that runs ``command`` with ``environment`` on ``host``.

        The command runs in a folder with the same path as this process's current folder.
        """
        options = [*_SSH_OPTIONS, f"-oConnectTimeout={self.login_seconds}", *(self.options or ())]
        assignments = [f"{name}={value}" for name, value in environment.items()]
        folder = shlex.quote(str(Path.cwd()))
        shell_code = f"cd {folder} && exec {shlex.join(['env', *assignments, *command])}"
        return ["ssh", *options, "--", host, shell_code]

    def _commands(self, job: Job, hosts: list[str]) -> list[list[str]]:
        """Return the ssh command of each host, in the order of ``hosts``."""
        environment = {
            **forwarded_environment(job, self.forward),
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(self.shutdown_seconds),
        }
        commands = []
        for index, host in enumerate(hosts):
            node_command = self._node_command(job, hosts, index)
            commands.append(self._ssh_command(host, environment, node_command))
        return commands

    def _node_command(self, job: Job, hosts: list[str], index: int) -> list[str]:
        """Return the command that runs on ``hosts[index]``.

        The command starts the node agent. The node agent starts ``job.on_host``, which sets the device's
        variables and becomes torchrun's agent. That agent starts the ranks.
        """
        ranks = job.ranks_per_node(len(hosts))
        agent = agent_command(
            self._python,
            ranks,
            len(hosts),
            f"--node-rank={index}",
            f"--master-addr={hosts[0]}",
            f"--master-port={self._port(job)}",
        )
        agent += [self._python, *escape_for_torchrun(job.command[1:])]
        node = [self._python, "-P", "-m", MODULE, "run", f"--attached={self.shutdown_seconds}"]
        if len(hosts) > 1:
            node.append(f"--address={hosts[index]}")
        log = f"agent-{index}.log" if index else AGENT
        return [*node, str(job.run_dir / log), "--", *job.on_host(agent, ranks, self._python)]

    def _check_hosts(self, job: Job, hosts: list[str]) -> None:
        """Raise MachineError if a host cannot run ranks. If several cannot, print a line for each.

        All hosts are checked at the same time.
        """
        token = secrets.token_hex(16)
        token_file = job.run_dir / f".seen-{token[:8]}"
        write_text(token_file, token)
        ports = [0] * len(hosts)  # 0 means any port.
        ports[0] = self._port(job)
        fault_at_port = partial(self._fault_of, token_file=token_file, token=token, job=job)
        lines = []
        try:
            with ThreadPoolExecutor(len(hosts)) as pool:
                for host, fault in zip(hosts, pool.map(fault_at_port, hosts, ports), strict=True):
                    if fault:
                        lines.append(f"{host}: {fault}")
        finally:
            token_file.unlink(missing_ok=True)
        if len(lines) == 1:
            raise MachineError(lines[0])
        for line in lines:
            print_notice(line)
        if lines:
            raise MachineError(f"{len(lines)} of {len(hosts)} hosts cannot take part. See the lines above")

    def _fault_of(self, host: str, port: int, token_file: Path, token: str, job: Job) -> str:
        """Return the reason why ``host`` cannot run ranks of ``job``, with the fix, or an empty text.

        The host must see ``token_file``, a file with the text ``token`` in the run directory.
        """
        seconds = 3 * self.login_seconds
        try:
            check = self._run_check(host, port, token_file, job, seconds)
        except subprocess.TimeoutExpired:
            return f"no answer within {seconds} s; raise launcher.login_seconds if it is slow"
        error_lines = check.stderr.strip().splitlines()
        message = error_lines[-1] if error_lines else f"exit code {check.returncode}"
        if check.returncode == _CONNECTION_LOST:
            return f"cannot log in without a password ({message}); try `ssh -oBatchMode=yes {host} true`"
        try:
            # The facts are the last line. The host's login scripts may print lines before it.
            facts = json.loads(check.stdout.strip().splitlines()[-1])
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

    def _run_check(
        self, host: str, port: int, token_file: Path, job: Job, seconds: int
    ) -> CompletedProcess[str]:
        """Run ``node_agent.check_host`` on ``host``, for at most ``seconds``.

        It is the subcommand ``look`` of the node agent.
        """
        # The check needs only the variables that match ``forward``, such as PYTHONPATH. So the passed job has
        # neither ``environment`` nor ``forwarded_variables``.
        environment = forwarded_environment(Job(job.config, job.run_dir), self.forward)
        address = host if port else ""
        command = [self._python, "-P", "-m", MODULE, "look", str(token_file), str(port), address]
        return subprocess.run(
            self._ssh_command(host, environment, command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )


def _version_differences(remote_versions: Mapping[str, str]) -> str:
    """Return a text with the packages whose versions differ on another host, empty if there are none."""
    differences = []
    for name, version in versions().items():
        remote_version = remote_versions.get(name)
        if remote_version != version:
            differences.append(f"{name} {remote_version} there, {version} here")
    return "; ".join(differences)


@dataclass(eq=False)
class _Client:
    """The ssh client process of one host."""

    host: str
    command: list[str]
    process: subprocess.Popen[bytes] | None = None
    readers: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        """Connect to the host, and print its output in threads. Each line begins with the host."""
        process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.process = process
        for stream, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            reader = threading.Thread(target=_copy_lines, args=(stream, target, self.host), daemon=True)
            reader.start()
            self.readers.append(reader)

    @property
    def code(self) -> int | None:
        """The exit code. It is None while the client runs, and 0 before its start."""
        return self.process.poll() if self.process else 0

    def send(self, request: bytes) -> None:
        """Send a request (``STOP``, ``KILL`` or ``ALIVE``) to the node agent on the host."""
        if self.process is not None and self.process.stdin is not None:
            with suppress(OSError, ValueError):  # The client has ended.
                self.process.stdin.write(request)
                self.process.stdin.flush()

    def kill(self) -> None:
        """Kill the client on this machine, and wait for its end."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def wait_for_output(self, seconds: float) -> None:
        """Wait until all output is printed, at most ``seconds`` for each stream."""
        for reader in self.readers:
            reader.join(seconds)


@dataclass(eq=False)
class _Connections:
    """The running ssh clients, one per host. The first client's host is the meeting point of the ranks.

    - The first SIGINT or SIGTERM asks all ranks to save and exit. The second kills them.
    - When one host ends, the others must end. Usually their ranks notice it. Otherwise they are asked to stop
      after ``grace / 2`` seconds, and are killed after ``grace`` seconds.
    """

    clients: list[_Client]
    grace: float
    cause: str = ""
    """One line about the lost host that has ended the run. Empty if no lost host did."""
    signals: int = 0
    """The number of SIGINT and SIGTERM so far."""
    _alive_time: float = field(init=False, default_factory=time.monotonic)
    """The time (monotonic clock) of the latest request ``ALIVE``."""

    def run(self) -> int:
        """Wait for all clients and return the highest exit code.

        Raises KeyboardInterrupt after two signals.
        """
        with stop_signals(self._receive):
            for client in self.clients:
                client.start()
            if self.signals:
                # A signal that came between two starts has not reached the clients that started after it.
                self._send(STOP)
            try:
                self._wait_for_first_end()
                self._wait_for_others()
            finally:
                for client in self.clients:
                    client.kill()
        for client in self.clients:
            client.wait_for_output(self.grace)
        if self.signals > 1:
            raise KeyboardInterrupt
        # The code of a process that was killed by a signal is negative.
        return max(abs(client.code or 0) for client in self.clients)

    def _wait_for_first_end(self) -> None:
        """Wait until a client has ended. Set ``cause`` if it has lost its host."""
        while all(client.code is None for client in self.clients):
            self._pause()
        first = next(client for client in self.clients if client.code is not None)
        if not self.signals and (first.code or 0) > _MAX_EXIT_CODE:
            cause = f"its agent ended with {first.code}"
            if first.code == _CONNECTION_LOST:
                cause = "the connection broke"
            self.cause = f"{first.host} is lost: {cause}; the run ends, and the same command continues it"

    def _wait_for_others(self) -> None:
        """Wait until all clients have ended, and make them end after a time of grace."""
        start = time.monotonic()
        has_sent_stop = False
        while any(client.code is None for client in self.clients):
            self._pause()
            seconds = time.monotonic() - start
            if not has_sent_stop and seconds > self.grace / 2:
                has_sent_stop = True
                self._send(STOP)
            if seconds > self.grace:
                self._send(KILL)
                start = time.monotonic()  # The request is repeated every ``grace`` seconds.

    def _pause(self) -> None:
        """Wait for the next look at the clients, and tell the hosts that this process still runs."""
        time.sleep(_POLL_SECONDS)
        if time.monotonic() - self._alive_time > _ALIVE_SECONDS:
            self._alive_time = time.monotonic()
            self._send(ALIVE)

    def _send(self, request: bytes) -> None:
        """Send a request to all hosts."""
        for client in self.clients:
            client.send(request)

    def _receive(self) -> None:
        """Handle a signal to this process."""
        self.signals += 1
        request = STOP if self.signals == 1 else KILL
        self._send(request)


def _copy_lines(stream: IO[bytes], target: IO[str], host: str) -> None:
    """Write all lines of ``stream`` to ``target``, each after the name of its host."""
    with stream:
        for line in stream:
            target.write(f"{host}: {line.decode(errors='backslashreplace').rstrip()}\n")
            target.flush()

"""Launcher for torchrun on every host of a list, over ssh."""

from __future__ import annotations

import secrets
import shlex
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from speechtrain.distributed.world import is_number
from speechtrain.errors import ConfigError, MachineError, print_notice
from speechtrain.files import write_text
from speechtrain.launch.launcher import (
    SHUTDOWN_SECONDS,
    Job,
    Launcher,
    LaunchResult,
    forwarded_environment,
    host_lines,
)
from speechtrain.launch.node_agent import ALIVE, KILL, MODULE, STOP, node_command, versions
from speechtrain.launch.rendezvous import rendezvous_port
from speechtrain.launch.supervise import wait_for_job

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
        connections = _Connections(self._commands(job, hosts), self.shutdown_seconds)
        code = connections.run()
        return LaunchResult(code, cause=connections.cause)

    def render(self, job: Job) -> str:
        lines = [shlex.join(command) for _, command in self._commands(job, self._hosts())]
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

    def _ssh_command(self, job: Job, host: str, command: list[str]) -> list[str]:
        """Return the ssh command that runs ``command`` with the environment of ``job`` on ``host``.

        The command runs in a folder with the same path as this process's current folder.
        """
        options = [*_SSH_OPTIONS, f"-oConnectTimeout={self.login_seconds}", *(self.options or ())]
        assignments = [f"{name}={value}" for name, value in forwarded_environment(job, self.forward).items()]
        assignments.append(f"{SHUTDOWN_SECONDS}={self.shutdown_seconds}")
        folder = shlex.quote(str(Path.cwd()))
        shell_code = f"cd {folder} && exec {shlex.join(['env', *assignments, *command])}"
        return ["ssh", *options, "--", host, shell_code]

    def _commands(self, job: Job, hosts: list[str]) -> list[tuple[str, list[str]]]:
        """Return the address of each host with its ssh command."""
        commands = []
        for index, host in enumerate(hosts):
            command = node_command(
                job,
                len(hosts),
                self._python,
                f"--attached={self.shutdown_seconds}",
                node=str(index),
                address=host,
                master=hosts[0],
                port=self._port(job),
            )
            commands.append((host, self._ssh_command(job, host, command)))
        return commands

    def _check_hosts(self, job: Job, hosts: list[str]) -> None:
        """Raise MachineError if a host cannot run ranks. If several cannot, print a line for each.

        All hosts are checked at the same time, by the subcommand ``look`` of the node agent.
        """
        token = secrets.token_hex(16)
        token_file = job.run_dir / f".seen-{token[:8]}"
        write_text(token_file, token)
        look = [self._python, "-P", "-m", MODULE, "look", str(token_file), token, versions()]
        ports = ["0"] * len(hosts)  # 0: the host need not listen
        ports[0] = str(self._port(job))
        lines = []
        try:
            with ThreadPoolExecutor(len(hosts)) as pool:
                faults = pool.map(
                    lambda host, port: self._fault_of(job, host, [*look, host, port]), hosts, ports
                )
                for host, fault in zip(hosts, faults, strict=True):
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

    def _fault_of(self, job: Job, host: str, look: list[str]) -> str:
        """Run the command ``look`` on ``host``.

        Return the reason why the host cannot run ranks of ``job``, with the fix, or an empty text.
        """
        seconds = 3 * self.login_seconds
        try:
            check = subprocess.run(
                self._ssh_command(job, host, look),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"no answer within {seconds} s; raise launcher.login_seconds if it is slow"
        _, _, message = f"exit code {check.returncode}\n{check.stderr}".strip().rpartition("\n")
        if check.returncode == _CONNECTION_LOST:
            return f"cannot log in without a password ({message}); try `ssh -oBatchMode=yes {host} true`"
        if check.returncode or not check.stdout:
            cause = f"speechtrain does not run there with {self._python} ({message})"
            return f"{cause}; install it there, or set launcher.python"
        # The fault is the last line. The host's login scripts may print lines before it.
        return check.stdout.splitlines()[-1]


class _Client:
    """The ssh client process of one host. Threads print its output, each line after the host."""

    def __init__(self, host: str, command: list[str]) -> None:
        self.host = host
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.readers: list[threading.Thread] = []
        for stream, target in ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr)):
            reader = threading.Thread(target=_copy_lines, args=(stream, target, host), daemon=True)
            reader.start()
            self.readers.append(reader)

    def send(self, request: bytes) -> None:
        """Send a request (``STOP``, ``KILL`` or ``ALIVE``) to the node agent on the host."""
        if self.process.stdin is not None:
            with suppress(OSError, ValueError):  # The client has ended.
                self.process.stdin.write(request)
                self.process.stdin.flush()


@dataclass(eq=False)
class _Connections:
    """The ssh clients, one per host. The first client's host is the meeting point of the ranks.

    - The first SIGINT or SIGTERM asks all ranks to save and exit. The second kills them.
    - When one host ends, the others must end. Usually their ranks notice it. Otherwise they are asked to stop
      after ``grace / 2`` seconds, and are killed after ``grace`` seconds.
    """

    commands: list[tuple[str, list[str]]]  # the addresses of the hosts with their ssh commands
    grace: float
    cause: str = ""
    """One line about the lost host that has ended the run. Empty if no lost host did."""
    clients: list[_Client] = field(default_factory=list)
    has_signal: bool = False  # whether this process has got a SIGINT or SIGTERM
    requests: list[tuple[float, bytes]] | None = None
    """After the first host has ended: the requests to the others, each with its time (monotonic clock)."""
    alive_time: float = 0.0  # the time of the latest request ``ALIVE``

    def run(self) -> int:
        """Connect to all hosts, wait for their ends and return the highest exit code.

        Raises KeyboardInterrupt after two signals.
        """
        try:
            return wait_for_job(self._poll, self._stop, _POLL_SECONDS, start=self._connect)
        finally:
            for client in self.clients:
                client.process.kill()
                client.process.wait()
                for reader in client.readers:
                    reader.join(self.grace)

    def _connect(self) -> None:
        """Start the clients."""
        for host, command in self.commands:
            self.clients.append(_Client(host, command))

    def _poll(self) -> int | None:
        """Send the requests that are due. Return the clients' highest exit code, or None while one runs."""
        current_time = time.monotonic()
        ended = [client for client in self.clients if client.process.poll() is not None]
        if ended and self.requests is None:
            self.requests = [(current_time + self.grace / 2, STOP), (current_time + self.grace, KILL)]
            self._set_cause(ended[0].host, ended[0].process.returncode)
        if len(ended) == len(self.clients):
            # The code of a process that was killed by a signal is negative.
            return max(abs(int(client.process.returncode)) for client in ended)
        if self.requests and current_time > self.requests[0][0]:
            _, request = self.requests.pop(0)
            self._send(request)
        if current_time > self.alive_time + _ALIVE_SECONDS:
            self.alive_time = current_time
            self._send(ALIVE)
        return None

    def _set_cause(self, host: str, code: int) -> None:
        """Set ``cause`` if ``host``, whose client has ended first, is lost."""
        if self.has_signal or code <= _MAX_EXIT_CODE:
            return
        cause = "the connection broke" if code == _CONNECTION_LOST else f"its agent ended with {code}"
        self.cause = f"{host} is lost: {cause}; the run ends, and the same command continues it"

    def _stop(self, signals: int) -> bool:
        """Ask all ranks to save and exit, or after a second signal kill them. Return True."""
        self.has_signal = True
        self._send(STOP if signals == 1 else KILL)
        return True

    def _send(self, request: bytes) -> None:
        """Send a request to all hosts."""
        for client in self.clients:
            client.send(request)


def _copy_lines(stream: IO[bytes], target: IO[str], host: str) -> None:
    """Write all lines of ``stream`` to ``target``, each after the name of its host."""
    with stream:
        for line in stream:
            target.write(f"{host}: {line.decode(errors='backslashreplace').rstrip()}\n")
            target.flush()

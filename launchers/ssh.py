"""Torchrun on every host of a list, over ssh."""

from __future__ import annotations

import json
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO

from speechtrain.errors import ConfigError, MachineError
from speechtrain.launch import (
    AGENT,
    STOP_SIGNALS,
    Job,
    Launcher,
    Result,
    rendezvous_port,
    travelling,
    unexpanded,
)
from speechtrain.node import ALIVE, KILL, STOP, versions

_ALIVE_SECONDS = 5.0
_POLL_SECONDS = 0.1
_SSH = ("-T", "-oBatchMode=yes", "-oServerAliveInterval=15", "-oServerAliveCountMax=4")


class Ssh(Launcher):
    """Start ``world_size`` ranks, shared evenly by the hosts that ``hostfile`` names.

    One address a line; blank lines and what follows ``#`` do not count. ``nodes`` takes the first so
    many of them. The first host is where the ranks meet, at ``port`` (by default one of the run's
    own). Every host needs a login without a password, this interpreter at the same path (or
    ``python``), the same versions, and the run directory: all that is tried before anything starts.
    The variables whose names match ``forward`` go along, secrets never.

    A stop is asked for, and its connection's end noticed, on the remote command's standard input:
    a terminal there (``ssh -tt``) would join its outputs and change their bytes.
    """

    def __init__(
        self,
        hostfile: str,
        nodes: int | None = None,
        port: int | None = None,
        python: str | None = None,
        options: list[str] | None = None,
        forward: list[str] | None = None,
        login_seconds: int = 20,
        shutdown_seconds: int = 60,
    ) -> None:
        for name, value in {"login_seconds": login_seconds, "shutdown_seconds": shutdown_seconds}.items():
            if value < 1:
                raise ValueError(f"{name}={value}: it must be at least 1")
        if nodes is not None and nodes < 1:
            raise ValueError(f"nodes={nodes}: it must be at least 1")
        self.hostfile = Path(hostfile)
        self.nodes = nodes
        self.port = port
        self.python = python or sys.executable
        self.options = options or []
        self.forward = forward or []
        self.login_seconds = login_seconds
        self.shutdown_seconds = shutdown_seconds

    def check(self, job: Job) -> None:
        self._ranks_per_host(job, self._hosts())

    def launch(self, job: Job) -> Result:
        hosts = self._hosts()
        commands = self._commands(job, hosts)
        self._look(job, hosts)
        return Result(_Connections(hosts, commands, self.shutdown_seconds).run())

    def render(self, job: Job) -> str:
        lines = [shlex.join(command) for command in self._commands(job, self._hosts())]
        return "\n".join(["# all at the same time, each with its standard input kept open", *lines])

    def _hosts(self) -> list[str]:
        try:
            lines = self.hostfile.read_text().splitlines()
        except OSError as error:
            raise ConfigError(
                f"launcher.hostfile={self.hostfile}: {error.strerror}; name a file with one address a line"
            ) from None
        hosts = [address for line in lines if (address := line.partition("#")[0].strip())]
        for host in hosts:
            if host.startswith("-") or len(host.split()) > 1:
                raise ConfigError(
                    f"{self.hostfile}: {host!r} is no address; write one a line and nothing else"
                )
        wanted = len(hosts) if self.nodes is None else self.nodes
        if not hosts or wanted > len(hosts):
            raise ConfigError(
                f"{self.hostfile} names {len(hosts)} hosts, launcher.nodes={max(wanted, 1)} needs as many; "
                "add them, or set launcher.nodes or NNODES"
            )
        if len(set(hosts[:wanted])) < wanted:
            raise ConfigError(f"{self.hostfile} names a host twice; every host has one line")
        return hosts[:wanted]

    def _ranks_per_host(self, job: Job, hosts: list[str]) -> int:
        ranks, left = divmod(job.world_size, len(hosts))
        if left or not ranks:
            raise ConfigError(
                f"world_size={job.world_size}: launcher=ssh shares the ranks evenly by {len(hosts)} hosts "
                f"({self.hostfile}); set a multiple, or launcher.nodes"
            )
        return ranks

    def _port(self, job: Job) -> int:
        return rendezvous_port(job.run_dir) if self.port is None else self.port

    def _remote(self, host: str, command: str) -> list[str]:
        return ["ssh", *_SSH, f"-oConnectTimeout={self.login_seconds}", *self.options, "--", host, command]

    def _commands(self, job: Job, hosts: list[str]) -> list[list[str]]:
        """What reaches each host's shell: go to this folder, then one command with its environment."""
        ranks = self._ranks_per_host(job, hosts)
        environment = {
            **travelling(job, self.forward),
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(self.shutdown_seconds),
        }
        assignments = [f"{name}={value}" for name, value in environment.items()]
        commands = []
        for index, host in enumerate(hosts):
            log = job.run_dir / (f"agent-{index}.log" if index else AGENT)
            agent = [
                *(self.python, "-m", "torch.distributed.run", f"--nnodes={len(hosts)}"),
                *(f"--nproc-per-node={ranks}", f"--node-rank={index}"),
                *(f"--master-addr={hosts[0]}", f"--master-port={self._port(job)}"),
                *("--no-python", self.python, *unexpanded(job.command[1:])),
            ]
            node = [self.python, "-m", "speechtrain.node", "run", f"--attached={self.shutdown_seconds}"]
            node += [f"--address={host}", str(log), "--", *agent]
            line = f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join(['env', *assignments, *node])}"
            commands.append(self._remote(host, line))
        return commands

    def _look(self, job: Job, hosts: list[str]) -> None:
        """Try from each host what a run needs. Raises MachineError after a line for each that lacks it."""
        token = secrets.token_hex(16)
        path = job.run_dir / f".seen-{token[:8]}"
        path.write_text(token)
        try:
            with ThreadPoolExecutor(len(hosts)) as pool:
                is_first = [True] + [False] * (len(hosts) - 1)
                found = pool.map(
                    lambda host, first: self._lacks(host, first, path, token, job), hosts, is_first
                )
                complaints = [f"{host}: {lack}" for host, lack in zip(hosts, found, strict=True) if lack]
        finally:
            path.unlink(missing_ok=True)
        if len(complaints) == 1:
            raise MachineError(complaints[0])
        for complaint in complaints:
            print(f"speechtrain: {complaint}", file=sys.stderr)
        if complaints:
            raise MachineError(
                f"{len(complaints)} of {len(hosts)} hosts cannot take part; see the lines above"
            )

    def _lacks(self, host: str, is_first: bool, path: Path, token: str, job: Job) -> str:
        """What ``host`` lacks, with the way out; empty where nothing is missing."""
        port = self._port(job) if is_first else 0
        probe = [
            self.python,
            "-m",
            "speechtrain.node",
            "look",
            str(path),
            str(port),
            host if is_first else "",
        ]
        kept = travelling(Job(job.config, job.run_dir), self.forward)  # PYTHONPATH, where it is forwarded
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
        except FileNotFoundError:
            return "there is no ssh on this machine; install an OpenSSH client"
        except subprocess.TimeoutExpired:
            return f"no answer within {3 * self.login_seconds} s; raise launcher.login_seconds if it is slow"
        words = login.stderr.strip().splitlines()[-1:] or [f"exit code {login.returncode}"]
        if login.returncode == 255:
            return f"cannot log in without a password ({words[0]}); try `ssh -oBatchMode=yes {host} true`"
        try:
            seen = json.loads(login.stdout.strip().splitlines()[-1])
        except (IndexError, ValueError):
            cause = f"speechtrain does not run there as {self.python} ({words[0]})"
            return f"{cause}; install it, or set launcher.python"
        if seen["token"] != token:
            return f"does not see {job.run_dir}; set run_dir to a folder that all hosts share"
        differ = [
            f"{n} {seen['versions'].get(n)} there, {v} here"
            for n, v in versions().items()
            if seen["versions"].get(n) != v
        ]
        if differ:
            return f"has other versions: {'; '.join(differ)}; install the same on all hosts"
        if seen["taken"]:
            return f"port {port} cannot be used ({seen['taken']}); set launcher.port to one that is free"
        return ""


class _Connections:
    """Running ssh clients, one a host: their output as it comes, with the host before each line.

    The first signal asks all ranks to save and leave, the second kills. When one host ends the
    others follow: by themselves where their ranks notice, else asked, and last by force.
    """

    def __init__(self, hosts: list[str], commands: list[list[str]], grace: float) -> None:
        self._hosts = hosts
        self._commands = commands
        self._grace = grace
        self._received = 0
        self._clients: list[subprocess.Popen[bytes]] = []

    def run(self) -> int:
        """The highest of their exit codes. Raises KeyboardInterrupt after a second signal."""
        readers: list[threading.Thread] = []
        with self._handlers():
            for host, command in zip(self._hosts, self._commands, strict=True):
                pipe = subprocess.PIPE
                client = subprocess.Popen(
                    command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
                )
                self._clients.append(client)
                for stream, target in ((client.stdout, sys.stdout), (client.stderr, sys.stderr)):
                    readers.append(threading.Thread(target=_copy, args=(stream, target, host), daemon=True))
                    readers[-1].start()
            if self._received:
                self._say(STOP)  # it came between two starts
            try:
                self._wait()
            finally:
                for client in self._clients:
                    client.kill()
        for reader in readers:
            reader.join(self._grace)
        if self._received > 1:
            raise KeyboardInterrupt
        return max(abs(client.wait()) for client in self._clients)

    def _wait(self) -> None:
        said, first_end, asked = time.monotonic(), None, False
        while any(client.poll() is None for client in self._clients):
            now = time.monotonic()
            if now - said > _ALIVE_SECONDS:
                said = now
                self._say(ALIVE)
            if first_end is None and any(client.poll() is not None for client in self._clients):
                first_end = now
            if first_end is not None and not asked and now - first_end > self._grace / 2:
                asked = True
                self._say(STOP)
            if first_end is not None and now - first_end > self._grace:
                self._say(KILL)
                first_end = now
            time.sleep(_POLL_SECONDS)

    def _say(self, word: bytes) -> None:
        for client in self._clients:
            assert client.stdin is not None
            with suppress(OSError, ValueError):  # ended since
                client.stdin.write(word)
                client.stdin.flush()

    @contextmanager
    def _handlers(self) -> Iterator[None]:
        def receive(number: int, frame: FrameType | None) -> None:
            self._received += 1
            self._say(STOP if self._received == 1 else KILL)

        previous = {number: signal.signal(number, receive) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _copy(stream: IO[bytes], target: IO[str], host: str) -> None:
    with stream:
        for line in stream:
            target.write(f"{host}: {line.decode(errors='backslashreplace').rstrip()}\n")
            target.flush()

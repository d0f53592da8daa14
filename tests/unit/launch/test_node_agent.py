"""The node agent of one host stops its ranks on a request, and when its connection to the command ends."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from speechtrain.launch import node_agent as node
from speechtrain.launch.node_agent import MODULE
from speechtrain.launch.process_tree import children_of, is_running
from speechtrain.run_directory import RESULT, rank_folder

RANK_STARTER = """
import pathlib, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
sys.exit(child.wait())
"""
RANK_TEMPLATE = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda number, frame: {answer})
signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
pathlib.Path({ready!r}).write_text(str(__import__("os").getpid()))
time.sleep(60)
"""


def start(tmp_path: Path, answer: str, *options: str) -> tuple[subprocess.Popen[bytes], int]:
    """Start a node agent with one rank that is ready. Return the agent and the rank's pid.

    The agent starts RANK_STARTER, which starts the rank. The rank evaluates ``answer`` on SIGTERM.
    """
    ready = tmp_path / "ready"
    rank = RANK_TEMPLATE.format(answer=answer, ready=str(ready))
    line = [
        sys.executable,
        "-m",
        MODULE,
        "run",
        *options,
        str(tmp_path / "agent.log"),
    ]
    process = subprocess.Popen([*line, sys.executable, "-c", RANK_STARTER, rank], stdin=subprocess.PIPE)
    while not ready.exists() or not ready.read_text():
        assert process.poll() is None
    return process, int(ready.read_text())


@pytest.mark.parametrize("requests", [node.ALIVE + node.STOP, node.STOP + node.STOP, b""])
def test_a_request_or_the_end_of_the_input_stops_the_rank(tmp_path: Path, requests: bytes) -> None:
    process, rank = start(tmp_path, "sys.exit(7)", "--attached=60")
    process.communicate(requests, timeout=60)  # communicate() also closes the standard input.
    assert process.returncode == 7
    assert not is_running(rank)


def test_a_node_that_is_stopped_without_ranks_is_preempted(tmp_path: Path) -> None:
    """A pod that waits for its peers must exit. Otherwise Kubernetes kills it after the grace period."""
    options = [f"--outcome={tmp_path}", str(tmp_path / "agent.log")]
    waiting = [sys.executable, "-c", "import time; time.sleep(60)"]
    process = subprocess.Popen([sys.executable, "-m", MODULE, "run", *options, *waiting])
    while not children_of(process.pid):
        assert process.poll() is None
    process.terminate()
    assert process.wait(30) == 75


@pytest.mark.parametrize("requests", [node.KILL, b""])
def test_what_does_not_stop_is_killed(tmp_path: Path, requests: bytes) -> None:
    ignore_sigterm = "None"  # The handler of the rank evaluates this expression and does not exit.
    process, rank = start(tmp_path, ignore_sigterm, "--attached=0.5")
    process.communicate(requests, timeout=60)
    assert process.returncode == 130
    while is_running(rank):
        pass


def test_silence_is_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "SILENCE_SECONDS", 0.1)
    sent: list[int] = []
    monkeypatch.setattr(node.os, "kill", lambda pid, number: sent.append(number))
    monkeypatch.setattr(node.select, "select", lambda *_: ([], [], []))
    node._handle_input(0.0)
    # The first SIGTERM asks the ranks to stop. The second, after the grace period, kills them.
    assert sent == [node.signal.SIGTERM] * 2


def test_look_names_the_first_reason_why_a_host_cannot_run_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("1234")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        line = [
            sys.executable,
            "-m",
            MODULE,
            "look",
            str(tmp_path / "token"),
            "1234",
            node.versions(),
            "127.0.0.1",
            port,
        ]
        look = subprocess.run(line, capture_output=True, text=True, check=True, timeout=60)
    assert look.stdout.startswith(f"port {port} cannot be used (Address already in use")
    facts = [str(tmp_path / "token"), "1234", node.versions(), "host.invalid", "0"]
    assert node.fault_of_host(*facts) == ""
    facts[2] = "python 2.7"
    assert f"has other versions: {node.versions()} there, python 2.7 here" in node.fault_of_host(*facts)
    monkeypatch.setattr(node, "_POLLS", 1)
    facts[1] = "5678"  # the file of another start
    assert node.fault_of_host(*facts).startswith(f"does not see {tmp_path}; set run_dir")
    assert node.fault_of_host("/nowhere/token", *facts[1:]).startswith("does not see /nowhere")


@pytest.mark.parametrize(
    ("result", "code"),
    [({"status": "preempted"}, 75), ({"status": "finished"}, 0), ({"status": "failed", "exit_code": 3}, 3)],
)
def test_the_outcome_of_a_run(tmp_path: Path, result: dict[str, object], code: int) -> None:
    assert node.exit_code_of_run(tmp_path) == 1
    (tmp_path / "result.json").write_text(json.dumps(result))
    assert node.main(["outcome", str(tmp_path)]) == code


@pytest.mark.parametrize(
    ("rank", "result", "code"),
    [
        (0, {"status": "finished"}, 0),
        (0, {"status": "preempted"}, 75),
        (1, {"status": "failed", "exit_code": 2}, 2),
        (1, {"status": "failed", "exit_code": 4, "is_cause": False}, 4),
    ],
)
def test_one_of_several_nodes_leaves_with_the_code_of_the_run(
    tmp_path: Path, rank: int, result: dict[str, object], code: int
) -> None:
    """The result comes after the end of the ranks. Rank 0 is on another node, and rank 1 is on this node."""
    folder = rank_folder(tmp_path, rank)
    late = (
        "import json, pathlib, sys, time; time.sleep(0.5); pathlib.Path(sys.argv[1]).write_text(sys.argv[2])"
    )
    folder.mkdir(parents=True, exist_ok=True)
    writer = subprocess.Popen([sys.executable, "-c", late, str(folder / RESULT), json.dumps(result)])
    options = [f"--outcome={tmp_path}", "--node=1", str(tmp_path / "agent.log")]
    words = "import os, sys; print('words of', os.environ['PET_NODE_RANK'], file=sys.stderr)"
    assert node.main(["run", *options, sys.executable, "-c", words]) == code
    assert writer.wait(60) == 0
    assert (tmp_path / "agent-1.log").read_text() == "words of 1\n"


def test_a_node_that_comes_back_after_the_end_starts_nothing(tmp_path: Path) -> None:
    (tmp_path / RESULT).write_text('{"status": "finished"}')
    line = ["run", f"--outcome={tmp_path}", str(tmp_path / "agent.log"), "/nowhere"]
    assert node.main(line) == 0


def test_unattached_it_leaves_its_standard_input_alone(tmp_path: Path) -> None:
    process, rank = start(tmp_path, "sys.exit(7)")
    assert process.stdin is not None
    process.stdin.close()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.terminate()
    assert process.wait(60) == 7
    assert not is_running(rank)


def test_an_address_has_its_interface() -> None:
    assert node.interface_of("127.0.0.1") == "lo"
    assert node.interface_of("192.0.2.1") == ""  # RFC 5737 reserves this address, so no host has it.

"""The hostfile, what is refused of it, and what would reach each host."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from speechtrain.launchers.ssh import Ssh

from speechtrain.commands import train
from speechtrain.errors import ConfigError
from speechtrain.launch.launcher import Job


def launcher(folder: Path, text: str, **keys: object) -> Ssh:
    (folder / "hosts").write_text(text)
    return Ssh(str(folder / "hosts"), **keys)  # type: ignore[arg-type]


def job(folder: Path, world_size: int = 2, **environment: str) -> Job:
    return Job(folder / "config.yaml", folder, world_size, environment)


@pytest.mark.parametrize(
    ("text", "nodes", "world_size", "complaint"),
    [
        ("", None, 1, "names 0 hosts, but launcher.nodes=1 needs more"),
        ("# a\n\n", None, 1, "names 0 hosts"),
        ("a\nb\n", 3, 3, "names 2 hosts, but launcher.nodes=3"),
        ("a\na\n", None, 2, "names a host twice"),
        ("a slots=2\n", None, 1, "'a slots=2' is not an address"),
        ("-oProxyCommand=touch\n", None, 1, "is not an address"),
        ("a\nb\n", None, 3, "world_size=3 must be a multiple of 2, the number of hosts"),
        ("a\nb\n", None, 1, "world_size=1"),
    ],
)
def test_what_cannot_be_shared_is_refused(
    text: str, nodes: int | None, world_size: int, complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        launcher(tmp_path, text, nodes=nodes).check(job(tmp_path, world_size))


def test_the_number_of_nodes_may_be_text_of_the_environment(tmp_path: Path) -> None:
    launcher(tmp_path, "a\nb\n", nodes="2").check(job(tmp_path, 2))
    with pytest.raises(ConfigError, match="names 2 hosts"):
        launcher(tmp_path, "a\nb\n", nodes="3").check(job(tmp_path, 3))
    with pytest.raises(ConfigError, match="nodes=two: it must be a number of hosts"):
        launcher(tmp_path, "a\nb\n", nodes="two")


def test_each_host_has_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", "/a place")
    monkeypatch.setenv("HF_TOKEN", "hush")
    rendered = launcher(
        tmp_path, "  a # first\n\n#c\nb\nnever\n", nodes=2, port=1234, options=["-p", "22"], forward=["HF_*"]
    ).render(job(tmp_path, 4, THREADS="$(id)", MY_PASSWORD="hush"))
    comment, *lines = rendered.splitlines()
    assert comment.startswith("#")
    assert "hush" not in rendered
    for index, (line, host) in enumerate(zip(lines, "ab", strict=True)):
        client = shlex.split(line)
        assert client[-2] == host
        assert {"-oBatchMode=yes", "-p"} < set(client)
        remote = shlex.split(client[-1])
        assert {
            "THREADS=$(id)",
            "HF_HOME=/a place",
            f"--node={index}",
            f"--address={host}",
            "--nnodes=2",
        } < set(remote)
        assert {"--nproc-per-node=2", "--master-addr=a", "--master-port=1234"} < set(remote)
        assert not [word for word in remote if "rdzv" in word], (
            "torchrun's default, static, unpickles nothing"
        )


def test_a_variable_that_the_config_reads_goes_to_each_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hosts").write_text("a\nb\n")
    monkeypatch.setenv("NUM_STEPS", "7")
    monkeypatch.setenv("MY_NOISE", "noises.jsonl")
    command = [
        "recipe=demo",
        "device=cpu",
        "augment.noise=${oc.env:MY_NOISE}",
        "world_size=2",
        "dry_run=true",
    ]
    keys = ["launcher=ssh", f"launcher.hostfile={tmp_path / 'hosts'}", f"run_dir={tmp_path / 'run'}"]
    assert train.run([*command, *keys]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("ssh ")]
    assert len(lines) == 2
    for line in lines:
        words = shlex.split(shlex.split(line)[-1])
        assert {"NUM_STEPS=7", "MY_NOISE=noises.jsonl"} < set(words)


def test_the_ranks_of_a_single_host_meet_on_its_loopback_address(tmp_path: Path) -> None:
    text = launcher(tmp_path, "a\n").render(job(tmp_path))
    remote = shlex.split(shlex.split(text.splitlines()[1])[-1])
    assert "--rdzv-backend=loopback" in remote
    assert not [word for word in remote if word.startswith(("--address", "--master"))]


def test_no_process_of_a_host_imports_from_its_folder(tmp_path: Path) -> None:
    for line in launcher(tmp_path, "a\nb\n").render(job(tmp_path)).splitlines()[1:]:
        remote = shlex.split(shlex.split(line)[-1])
        before = [remote[i - 1] for i, word in enumerate(remote) if word == "-m"]
        assert before == ["-P"] * 4, "the node's agent, the check of the host, torchrun, the ranks"


def test_a_run_meets_at_a_port_of_its_own(tmp_path: Path) -> None:
    ports = set()
    for name in ("a", "b", "a"):
        rendered = launcher(tmp_path, "x\ny\n").render(job(tmp_path / name))
        ports.add(rendered.partition("--master-port=")[2].split()[0])
    assert len(ports) == 2

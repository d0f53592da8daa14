"""The real packages wandb and trackio without a network or a key, each in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from speechtrain.errors import MachineError, RunError
from speechtrain.tracking.wandb import WandB

PROGRAM = """
import sys
from speechtrain.tracking.group import Trackers
from speechtrain.tracking.wandb import WandB

module, run_dir, first = sys.argv[1], sys.argv[2], int(sys.argv[3])
trackers = Trackers({"wandb": WandB(run_dir, module)})
trackers.log("start", {"steps": 4, "parameters": 12345})
if first > 1:
    trackers.log("resume", {"step": first - 1})
for step in (first, first + 1):
    trackers.log("train", {"step": step, "loss": 0.5 / step, "lr": None, "note": "text"})
trackers.log("valid", {"step": first + 1, "set": "dev", "wer": 0.25, "seconds": 1.0})
trackers.log("end", {"status": "finished"})
trackers.close()
"""


def needs(module: str) -> pytest.MarkDecorator:
    is_missing = importlib.util.find_spec(module) is None
    return pytest.mark.skipif(is_missing, reason=f"pip install {module}")


def _track(module: str, run_dir: Path, first: int = 1) -> subprocess.CompletedProcess[str]:
    """Track two updates in a new process, with a terminal as stdin and without the user's keys."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    home = str(run_dir.parent)
    environment |= {"HOME": home, "NETRC": f"{home}/none", "TRACKIO_DIR": f"{home}/trackio"}
    controller, terminal = os.openpty()
    try:
        return subprocess.run(
            [sys.executable, "-c", PROGRAM, module, str(run_dir), str(first)],
            stdin=terminal,
            capture_output=True,
            text=True,
            env=environment,
            timeout=120,
            check=True,
        )
    finally:
        os.close(controller)
        os.close(terminal)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "a-run"
    folder.mkdir()
    (folder / "config.yaml").write_text("seed: 17\ntracking: {_target_: x}\n")
    return folder


@needs("wandb")
def test_without_a_key_a_run_is_written_below_its_folder(run_dir: Path) -> None:
    ended = _track("wandb", run_dir)
    assert (ended.stdout, ended.stderr) == ("", "")
    (record,) = run_dir.glob("wandb/offline-run-*/*.wandb")
    content = record.read_bytes()
    for name in (b"train/loss", b"valid/dev/wer", b"a-run", b"parameters", b"12345"):
        assert name in content
    assert b"train/lr" not in content
    assert b"train/note" not in content


@pytest.mark.slow
@needs("wandb")
def test_a_resumed_run_keeps_its_id_and_a_new_one_does_not(run_dir: Path) -> None:
    ids = []
    for first in (1, 3, 1):
        _track("wandb", run_dir, first)
        latest = (run_dir / "wandb" / "latest-run").resolve().name
        ids.append(latest.split("-")[3])  # offline-run-TIME-ID, with -1 behind it within the same second
    assert ids[0] == ids[1] != ids[2]


@needs("wandb")
def test_the_service_does_not_get_a_config_with_a_secret(run_dir: Path) -> None:
    (run_dir / "config.yaml").write_text("seed: 17\napi_key: 0123456789abcdef\n")
    assert _track("wandb", run_dir).stderr == ""
    (record,) = run_dir.glob("wandb/offline-run-*/*.wandb")
    content = record.read_bytes()
    assert b"12345" in content
    assert b"0123456789abcdef" not in content


def test_a_folder_that_is_a_link_is_refused(run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "wandb").symlink_to(tmp_path)
    with pytest.raises(RunError, match=r"wandb is a link\. Remove it"):
        WandB(str(run_dir)).log("train", {"step": 1, "loss": 0.5})


@needs("trackio")
def test_trackio_has_the_same_interface(run_dir: Path) -> None:
    assert _track("trackio", run_dir).stderr == ""
    databases = list((run_dir.parent / "trackio").glob("*.db"))
    assert databases
    content = b"".join(path.read_bytes() for path in (run_dir.parent / "trackio").glob("*.db*"))
    for name in (b"train/loss", b"valid/dev/wer", b"a-run"):
        assert name in content


@pytest.mark.skipif(importlib.util.find_spec("trackio") is not None, reason="trackio is installed")
def test_a_missing_package_is_reported_at_the_start() -> None:
    with pytest.raises(MachineError, match="pip install trackio"):
        WandB("run", "trackio").log("start", {})

"""TensorBoard files, read back by TensorBoard itself."""

from __future__ import annotations

import math
import resource
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from speechtrain.tracking.group import Trackers
from speechtrain.tracking.tensorboard import TensorBoard


def _read(run_dir: Path) -> EventAccumulator:
    return EventAccumulator(str(run_dir / "tensorboard")).Reload()


def _steps(accumulator: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(e.step, e.value) for e in accumulator.Scalars(tag)]


def test_scalars_and_texts(tmp_path: Path) -> None:
    tracker = TensorBoard(str(tmp_path), examples=1)
    tracker.log("start", {"parameters": 12})
    tracker.log("train", {"step": 1, "epoch": 0, "loss": 2.5, "lr": None, "accuracy": 0.5})
    tracker.log("train", {"step": 2, "epoch": 0, "loss": float("nan")})
    tracker.log("valid", {"step": 2, "set": "test", "wer": 0.25, "seconds": 1.0})
    rows = [{"id": str(i), "reference": "a|b", "hypothesis": "a"} for i in range(3)]
    tracker.log("examples", {"step": 2, "set": "test", "rows": rows})
    tracker.log("warning", {"message": "slow"})
    tracker.log("unknown", {})
    tracker.log("end", {"status": "finished", "step": 2})
    tracker.close()
    read = _read(tmp_path)
    assert _steps(read, "valid/test/wer") == [(2, 0.25)]
    assert _steps(read, "train/accuracy") == [(1, 0.5)]
    (first, second) = _steps(read, "train/loss")
    assert first == (1, 2.5)
    assert math.isnan(second[1])
    assert set(read.Tags()["scalars"]) == {"train/epoch", "train/loss", "train/accuracy", "valid/test/wer"}
    texts = {tag: read.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in read.Tags()["tensors"]}
    assert texts["examples/test/text_summary"].count("\n") == 2
    assert r"| a\|b | a |" in texts["examples/test/text_summary"]
    assert texts["warnings/text_summary"] == "slow"


def _attempt(run_dir: Path, resumed: int | None, losses: dict[int, float]) -> None:
    tracker = TensorBoard(str(run_dir))
    tracker.log("start", {"steps": 9})
    tracker.log("warning", {"message": "before anything has a step"})
    if resumed is not None:
        tracker.log("resume", {"step": resumed})
    for step, loss in losses.items():
        tracker.log("train", {"step": step, "loss": loss})
    tracker.close()
    # Event files are read in the order of their names: the second, then a number without leading zeros.
    second = int(time.time())
    while int(time.time()) == second:
        time.sleep(0.05)


def test_resume_purges_the_steps_beyond_the_resumed_one(tmp_path: Path) -> None:
    _attempt(tmp_path, None, {1: 9.0, 2: 8.0, 3: 7.0})
    _attempt(tmp_path, 2, {3: 1.0, 4: 0.5})
    assert _steps(_read(tmp_path), "train/loss") == [(1, 9.0), (2, 8.0), (3, 1.0), (4, 0.5)]


def test_a_run_that_began_again_purges_everything(tmp_path: Path) -> None:
    _attempt(tmp_path, None, {1: 9.0, 2: 8.0})
    _attempt(tmp_path, None, {1: 7.0})
    assert _steps(_read(tmp_path), "train/loss") == [(1, 7.0)]


def _group_in_this_thread(run_dir: Path) -> Trackers:
    """A test's changes to the disk must come between two events."""
    tracker = TensorBoard(str(run_dir))
    tracker.background = False
    return Trackers({"tensorboard": tracker})


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_it_writes_again_after_a_disk_was_full_for_a_while(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    group = _group_in_this_thread(tmp_path)
    group.log("start", {"steps": 9})
    group.log("valid", {"step": 1, "set": "a", "wer": 0.5})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        group.log("valid", {"step": 2, "set": "a", "wer": 0.4})
        group.log("valid", {"step": 3, "set": "a", "wer": 0.3})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    time.sleep(1.1)  # event files are named by the second; readers take them in the order of their names
    group.log("valid", {"step": 4, "set": "a", "wer": 0.2})
    group.log("end", {"status": "finished"})
    group.close()
    steps = [step for step, _ in _steps(_read(tmp_path), "valid/a/wer")]
    assert steps[0] == 1
    assert steps[-1] == 4
    err = capsys.readouterr().err
    assert err.count("tracker tensorboard failed") == 1
    assert "records dropped: tensorboard 2" in err


def test_the_class_is_importable_without_the_package() -> None:
    import subprocess
    import sys

    code = "import sys, speechtrain.tracking.tensorboard; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

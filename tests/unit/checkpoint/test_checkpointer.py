"""Tests of ``Checkpointer``: saving, retention, and that damaged checkpoints are reported and not loaded."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from speechtrain.checkpoint.checkpointer import FORMAT, Checkpointer, read_state, validation_metrics
from speechtrain.errors import RunError
from speechtrain.files import read_json
from speechtrain.run_directory import read_manifest, write_manifest
from tests.support.checkpoints import restore

from ...conftest import Disk


class Value:
    """A part of a run whose state is one tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor = state["tensor"]


def save_checkpoints(
    root: Path, steps: tuple[int, ...], keep: int = 10, metrics: tuple[float, ...] = ()
) -> Checkpointer:
    """Save a checkpoint at each of ``steps``, with the metric of its validation, and return the Checkpointer.

    The tensor of the state is filled with the step, and the weight with the step plus 0.5.
    """
    checkpointer = Checkpointer(root, keep=keep)
    for index, step in enumerate(steps):
        tensor = torch.full((100,), float(step))
        checkpointer.save(step, {"value": Value(tensor)}, {"weight": tensor + 0.5})
        if metrics:
            checkpointer.add_validation(step, metrics[index], {"wer": metrics[index]})
    return checkpointer


def truncate(folder: Path) -> None:
    path = folder / "state.safetensors"
    path.write_bytes(path.read_bytes()[:-200])


def flip_a_bit(folder: Path) -> None:
    path = folder / "state.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def delete_the_state(folder: Path) -> None:
    (folder / "state.safetensors").unlink()


def delete_the_manifest(folder: Path) -> None:
    (folder / "checkpoint.json").unlink()


def halve_the_manifest(folder: Path) -> None:
    path = folder / "checkpoint.json"
    path.write_text(path.read_text()[:40])


def flip_a_weight(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def empty_the_state(folder: Path) -> None:
    (folder / "state.safetensors").write_bytes(b"")


DAMAGES = [
    truncate,
    flip_a_bit,
    delete_the_state,
    delete_the_manifest,
    halve_the_manifest,
    flip_a_weight,
    empty_the_state,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_restore_reports_damage_and_loads_the_previous_one(
    tmp_path: Path, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    save_checkpoints(tmp_path, (10, 20))
    damage(tmp_path / "checkpoints" / "step-00000020")
    value = Value(torch.zeros(100))
    assert restore(Checkpointer(tmp_path), {"value": value}) == 10
    assert torch.equal(value.tensor, torch.full((100,), 10.0))
    assert "checkpoint not loaded" in caplog.messages[-1]
    assert all("step-00000020" in message for message in caplog.messages)
    count = len(caplog.messages)
    # A second start does not load the damaged checkpoint, and does not report it again.
    assert restore(Checkpointer(tmp_path), {"value": value}) == 10
    assert len(caplog.messages) == count


def test_an_incomplete_checkpoint_is_not_loaded_and_is_removed(tmp_path: Path) -> None:
    save_checkpoints(tmp_path, (10,))
    incomplete = tmp_path / "checkpoints" / ".writing-step-00000020"
    shutil.copytree(tmp_path / "checkpoints" / "step-00000010", incomplete)
    assert restore(Checkpointer(tmp_path), {"value": Value(torch.zeros(1))}) == 10
    assert not incomplete.exists()
    incomplete.mkdir()
    save_checkpoints(tmp_path, (30,))
    assert not incomplete.exists()


def test_restore_removes_incomplete_files_of_a_killed_process(tmp_path: Path) -> None:
    save_checkpoints(tmp_path, (10,))
    root = tmp_path / "checkpoints"
    before = sorted(root.rglob("*"))
    shutil.copytree(root / "step-00000010", root / ".removing-step-00000005")
    for path in (
        root / ".best.json.0123456789abcdef",
        root / "step-00000010/.checkpoint.json.0123456789abcdef",
    ):
        path.touch()
    assert restore(Checkpointer(tmp_path), {"value": Value(torch.zeros(1))}) == 10
    assert sorted(root.rglob("*")) == before


def test_restore_refuses_a_checkpoint_with_other_parts(tmp_path: Path) -> None:
    save_checkpoints(tmp_path, (10,))
    with pytest.raises(RunError, match="other"):
        restore(Checkpointer(tmp_path), {"other": Value(torch.zeros(1))})


def test_retention_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    save_checkpoints(tmp_path, (1, 2, 3, 4, 5), keep=2, metrics=(0.5, 0.1, 0.3, 0.2, 0.4))
    assert [p.name[-1] for p in Checkpointer(tmp_path).folders()] == ["2", "4", "5"]
    folder, weights = Checkpointer(tmp_path).weights("best")
    assert folder.name == "step-00000002"
    assert torch.equal(weights["weight"], torch.full((100,), 2.5))
    assert Checkpointer(tmp_path).weights("last")[0].name == "step-00000005"
    with pytest.raises(RunError):
        Checkpointer(tmp_path).weights("step-00000099")


def test_a_checkpoint_whose_metric_is_nan_is_not_the_best(tmp_path: Path) -> None:
    checkpointer = save_checkpoints(tmp_path, (1, 2), metrics=(0.5, float("nan")))
    assert checkpointer.best()[0] == tmp_path / "checkpoints" / "step-00000001"


def test_best_compares_equal_metrics_by_loss_and_then_by_step(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, keep=10)
    for step, loss in ((1, None), (2, 0.4), (3, 0.1), (4, 0.1), (5, math.inf)):
        metrics = {} if loss is None else {"wer": 0.0, "loss": loss, "dev/wer": 0.0}
        checkpointer.save(step, {"value": Value(torch.zeros(1))}, {"w": torch.zeros(1)})
        checkpointer.add_validation(step, 0.0, metrics)
    best, least = Checkpointer(tmp_path).best()
    assert best is not None
    assert (best.name, least) == ("step-00000003", 0.0)
    assert validation_metrics(best) == {"wer": 0.0, "loss": 0.1, "dev/wer": 0.0}
    assert (
        validation_metrics(tmp_path / "checkpoints" / "step-00000001") == {}
    )  # as older checkpoints have it
    for step in (2, 3, 4, 5):
        shutil.rmtree(tmp_path / "checkpoints" / f"step-{step:08d}")
    save_checkpoints(tmp_path, (6, 7), metrics=(0.0, 0.0))
    assert Checkpointer(tmp_path).best()[0] == tmp_path / "checkpoints" / "step-00000001"


def test_best_compares_wer_above_90_percent_by_cer_and_then_loss(tmp_path: Path) -> None:
    """A row is step, WER, CER, loss, and the step of the best checkpoint so far.

    The first three rows are from a real run. By WER alone, the second would be the best. It was the worst.
    """
    rows = [
        (304, 0.9891, 0.9151, 140.2, 304),
        (418, 0.9674, 0.9660, 138.9, 304),
        (617, 1.0, 0.9214, 135.5, 304),
        (700, 1.0, 0.9151, 137.0, 700),
        (800, 0.9, 0.99, 150.0, 800),
        (900, 0.89, 0.99, 200.0, 900),
    ]
    checkpointer = Checkpointer(tmp_path, keep=10)
    for step, wer, cer, loss, best in rows:
        checkpointer.save(step, {"value": Value(torch.zeros(1))}, {"w": torch.zeros(1)})
        checkpointer.add_validation(step, wer, {"wer": wer, "cer": cer, "loss": loss})
        name = f"step-00000{best}"
        assert checkpointer.best()[0] == checkpointer.root / name
        assert read_json(checkpointer.root / "best.json")["name"] == name
    assert checkpointer.best()[1] == 0.89


def test_a_loss_above_0_9_is_not_treated_as_a_high_wer(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, keep=10)
    for step, loss, cer in ((1, 2.0, 0.5), (2, 3.0, 0.1)):
        checkpointer.save(step, {"value": Value(torch.zeros(1))}, {"w": torch.zeros(1)})
        checkpointer.add_validation(step, loss, {"loss": loss, "cer": cer})
    assert checkpointer.best() == (checkpointer.root / "step-00000001", 2.0)


@pytest.mark.parametrize(("states", "weights"), [(100_000, 10), (10, 100_000)])
def test_a_failed_save_leaves_the_earlier_checkpoint(tmp_path: Path, states: int, weights: int) -> None:
    """Torch and safetensors raise different errors for a full disk."""
    checkpointer = save_checkpoints(tmp_path, (10,))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A write beyond the limit fails, as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match=r"step 20 could not be written .* MiB free\)"):
            checkpointer.save(20, {"value": Value(torch.zeros(states))}, {"weight": torch.zeros(weights)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000010"]
    value = Value(torch.zeros(100))
    assert restore(Checkpointer(tmp_path), {"value": value}) == 10


def limit_free_space(disk: Disk, measure: str, room: int) -> None:
    """Fill a disk until only ``room`` pages or files are free. ``measure`` is ``pages`` or ``files``."""
    used = os.statvfs(disk.path)
    if measure == "pages":
        disk.fill(room * used.f_frsize)
    else:
        disk.mount(f"remount,nr_inodes={used.f_files - used.f_ffree + room}")


@pytest.mark.parametrize("measure", ["pages", "files"])
def test_a_disk_that_is_full_at_any_file_loses_no_checkpoint(disk: Disk, measure: str) -> None:
    """The free space grows from 0 to enough, so each file in turn is the first that does not fit."""
    states, weights = {"value": Value(torch.zeros(3000))}, {"weight": torch.zeros(3000)}
    outcomes = []
    disk.mount("remount,size=1m")
    for room in range(15):
        shutil.rmtree(disk.path / "run", ignore_errors=True)
        checkpointer = save_checkpoints(disk.path / "run", (1, 2), keep=1, metrics=(0.25, 0.5))
        limit_free_space(disk, measure, room)
        outcomes.append("lost")
        with contextlib.suppress(OSError):
            checkpointer.save(3, states, weights)
            outcomes[-1] = "saved"
            limit_free_space(disk, measure, room % 2)  # The save has removed older checkpoints.
            checkpointer.add_validation(3, 0.125, {"wer": 0.125})
            outcomes[-1] = "validated"
        best, metric = checkpointer.best()
        assert best is not None
        assert metric <= 0.25
        for folder in checkpointer.folders():
            checkpointer.verify(folder)
        assert checkpointer.folders()[-1].name[-1] == ("2" if outcomes[-1] == "lost" else "3")
        disk.free()
        disk.mount("remount,nr_inodes=1000")
        checkpointer.save(4, states, weights)  # there is room again
        checkpointer.add_validation(4, 0.5, {})
        assert read_json(checkpointer.root / "best.json")["name"] == checkpointer.best()[0].name
    assert set(outcomes) == {"lost", "saved", "validated"}


def test_a_flipped_bit_in_best_json_has_no_effect(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpointer = save_checkpoints(tmp_path, (1, 2, 3), keep=1, metrics=(0.5, 0.25, 0.75))
    path = tmp_path / "checkpoints" / "best.json"
    undamaged = path.read_bytes()
    for bit in range(8 * len(undamaged)):
        damaged = bytearray(undamaged)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        assert checkpointer.best() == (tmp_path / "checkpoints" / "step-00000002", 0.25)
    checkpointer.save(4, {"value": Value(torch.zeros(1))}, {"weight": torch.zeros(1)})
    checkpointer.add_validation(4, 0.9, {})
    assert [folder.name for folder in checkpointer.folders()] == ["step-00000002", "step-00000004"]
    assert path.read_bytes() == undamaged


def test_a_validation_is_stored_only_if_its_checkpoint_exists(tmp_path: Path) -> None:
    checkpointer = save_checkpoints(tmp_path, (1, 2), keep=1, metrics=(0.5, 0.25))
    assert checkpointer.read_validation(2) == {"metrics": {"wer": 0.25}, "wall_s": 0.0}
    checkpointer.add_validation(7, 0.1, {})  # its checkpoint could not be written
    assert [folder.name for folder in checkpointer.folders()] == ["step-00000002"]
    assert checkpointer.read_validation(7) == {}
    assert restore(checkpointer, {"value": Value(torch.zeros(100))}) == 2


def test_save_after_a_kill_in_a_removal_leaves_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(folder: Path, ignore_errors: bool = False) -> None:
        (folder / "checkpoint.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoints(tmp_path, (1, 2), keep=1)
    checkpointer = save_checkpoints(tmp_path, (3, 4), keep=1)
    assert [folder.name for folder in checkpointer.folders()] == ["step-00000004"]
    assert sorted(path.name for path in checkpointer.root.iterdir()) == ["step-00000004"]


def test_save_refuses_a_run_directory_that_was_moved(tmp_path: Path) -> None:
    checkpointer = save_checkpoints(tmp_path / "run", (10,))
    (tmp_path / "run").rename(tmp_path / "moved")
    states, weights = {"value": Value(torch.zeros(1))}, {"weight": torch.zeros(1)}
    with pytest.raises(OSError, match=r"run was moved or removed while the run went on"):
        checkpointer.save(20, states, weights)
    assert [path.name for path in tmp_path.iterdir()] == ["moved"]
    (tmp_path / "moved").rename(tmp_path / "run")
    assert checkpointer.save(20, states, weights).is_dir()


def set_format(folder: Path, number: int, files: dict[str, str]) -> None:
    """Change a checkpoint to the format of another version."""
    manifest = read_manifest(folder)
    assert manifest is not None
    write_manifest(folder, replace(manifest, format=number, files=manifest.files | files))


def test_a_checkpoint_of_a_later_format_is_refused_and_not_renamed(tmp_path: Path) -> None:
    """An older version must not remove or overwrite the checkpoints of a newer version."""
    save_checkpoints(tmp_path, (10, 20))
    folder = tmp_path / "checkpoints" / "step-00000020"
    set_format(folder, FORMAT + 1, {})
    refusal = rf"format {FORMAT + 1}, not {FORMAT}\. Update speechtrain"
    with pytest.raises(RunError, match=refusal):
        restore(Checkpointer(tmp_path), {"value": Value(torch.zeros(100))})
    with pytest.raises(RunError, match=refusal):
        Checkpointer(tmp_path).weights("last")
    assert folder.exists()


@pytest.mark.parametrize("number", [1, 2])
def test_a_checkpoint_of_an_earlier_format_has_only_weights(tmp_path: Path, number: int) -> None:
    save_checkpoints(tmp_path, (10,))
    folder = tmp_path / "checkpoints" / "step-00000010"
    (folder / "state.safetensors").rename(folder / "state.pt")
    set_format(folder, number, {"state.pt": "0" * 64})
    refusal = (
        rf"format {number}, not {FORMAT}, so it cannot be continued\. Train again .*init_from={tmp_path}$"
    )
    for read in (Checkpointer(tmp_path).newest, lambda: read_state(folder)):
        with pytest.raises(RunError, match=refusal):
            read()
    assert folder.exists()
    _, weights = Checkpointer(tmp_path).weights()
    assert torch.equal(weights["weight"], torch.full((100,), 10.5))


WRONG_MANIFESTS = ["[]", '{"files": 3}', f'{{"files": {{}}, "format": {FORMAT}, "step": 10}}', '"\\ud800']


@pytest.mark.parametrize("content", WRONG_MANIFESTS)
def test_a_wrong_manifest_is_reported_as_damage(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_checkpoints(tmp_path, (10,))
    (tmp_path / "checkpoints" / "step-00000010" / "checkpoint.json").write_text(content)
    assert restore(Checkpointer(tmp_path), {"value": Value(torch.zeros(100))}) is None
    assert "training starts at step 0" in caplog.text

"""Checkpoints are whole or absent: damage of any kind is named, never loaded, and the one before is used."""

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

from speechtrain.checkpoint.whole import SHARDED, Checkpointer, validation_metrics
from speechtrain.errors import RunError
from speechtrain.files import read_json
from speechtrain.run_directory import read_manifest, write_manifest

from ...conftest import Disk


class Value:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor = state["tensor"]


def saved(
    root: Path, steps: tuple[int, ...], keep: int = 10, metrics: tuple[float, ...] = ()
) -> Checkpointer:
    checkpointer = Checkpointer(root, keep=keep)
    for index, step in enumerate(steps):
        tensor = torch.full((100,), float(step))
        checkpointer.save(step, {"value": Value(tensor)}, {"weight": tensor + 0.5})
        if metrics:
            checkpointer.add_validation(step, metrics[index], {"wer": metrics[index]})
    return checkpointer


def test_restores_the_newest(tmp_path: Path) -> None:
    saved(tmp_path, (10, 20))
    value = Value(torch.zeros(100))
    assert Checkpointer(tmp_path).restore({"value": value}) == 20
    assert torch.equal(value.tensor, torch.full((100,), 20.0))


def test_an_empty_run_restores_nothing(tmp_path: Path) -> None:
    assert Checkpointer(tmp_path).restore({"value": Value(torch.zeros(1))}) is None


def truncate(folder: Path) -> None:
    path = folder / "state.pt"
    path.write_bytes(path.read_bytes()[:-200])


def flip_a_bit(folder: Path) -> None:
    path = folder / "state.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def delete_the_state(folder: Path) -> None:
    (folder / "state.pt").unlink()


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
    (folder / "state.pt").write_bytes(b"")


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
def test_damage_is_named_and_the_one_before_is_loaded(
    tmp_path: Path, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, (10, 20))
    damage(tmp_path / "checkpoints" / "step-00000020")
    value = Value(torch.zeros(100))
    assert Checkpointer(tmp_path).restore({"value": value}) == 10
    assert torch.equal(value.tensor, torch.full((100,), 10.0))
    assert "checkpoint not loaded" in caplog.messages[-1]
    assert all("step-00000020" in message for message in caplog.messages)
    count = len(caplog.messages)
    # a second start neither trips over it nor loads it
    assert Checkpointer(tmp_path).restore({"value": value}) == 10
    assert len(caplog.messages) == count


def test_all_damaged_means_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(tmp_path, (10, 20))
    for folder in (tmp_path / "checkpoints").glob("step-*"):
        truncate(folder)
    assert Checkpointer(tmp_path).restore({"value": Value(torch.zeros(1))}) is None
    assert len(caplog.messages) == 2


def test_a_half_written_checkpoint_is_invisible_and_swept_up(tmp_path: Path) -> None:
    saved(tmp_path, (10,))
    left = tmp_path / "checkpoints" / ".writing-step-00000020"
    shutil.copytree(tmp_path / "checkpoints" / "step-00000010", left)
    assert Checkpointer(tmp_path).restore({"value": Value(torch.zeros(1))}) == 10
    assert not left.exists()
    left.mkdir()
    saved(tmp_path, (30,))
    assert not left.exists()


def test_what_a_kill_left_at_the_last_save_is_removed_by_the_next_start(tmp_path: Path) -> None:
    saved(tmp_path, (10,))
    root = tmp_path / "checkpoints"
    before = sorted(root.rglob("*"))
    shutil.copytree(root / "step-00000010", root / ".removing-step-00000005")
    for path in (
        root / ".best.json.0123456789abcdef",
        root / "step-00000010/.checkpoint.json.0123456789abcdef",
    ):
        path.touch()
    assert Checkpointer(tmp_path).restore({"value": Value(torch.zeros(1))}) == 10
    assert sorted(root.rglob("*")) == before


def of_the_next_format(folder: Path) -> None:
    """Change a checkpoint to what a later version might write."""
    manifest = read_manifest(folder)
    assert manifest is not None
    write_manifest(folder, replace(manifest, format=SHARDED + 1))


def test_another_format_is_refused_by_name(tmp_path: Path) -> None:
    saved(tmp_path, (10,))
    folder = tmp_path / "checkpoints" / "step-00000010"
    of_the_next_format(folder)
    with pytest.raises(RunError, match=f"format {SHARDED + 1}"):
        Checkpointer(tmp_path).verify(folder)


def test_states_that_do_not_fit_are_an_error_and_not_skipped(tmp_path: Path) -> None:
    saved(tmp_path, (10,))
    with pytest.raises(RunError, match="other"):
        Checkpointer(tmp_path).restore({"other": Value(torch.zeros(1))})


def test_pickled_code_is_not_executed(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (exec, ("raise SystemExit('executed')",))

    checkpointer = Checkpointer(tmp_path)
    value = Value(torch.zeros(1))
    value.state_dict = lambda: {"tensor": Evil()}  # type: ignore[method-assign]
    checkpointer.save(1, {"value": value}, {})
    with pytest.raises(Exception, match=r"state\.pt cannot be read"):
        checkpointer.restore({"value": Value(torch.zeros(1))})


def test_retention_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    saved(tmp_path, (1, 2, 3, 4, 5), keep=2, metrics=(0.5, 0.1, 0.3, 0.2, 0.4))
    assert [p.name[-1] for p in Checkpointer(tmp_path).folders()] == ["2", "4", "5"]
    folder, weights = Checkpointer(tmp_path).weights("best")
    assert folder.name == "step-00000002"
    assert torch.equal(weights["weight"], torch.full((100,), 2.5))
    assert Checkpointer(tmp_path).weights("last")[0].name == "step-00000005"
    with pytest.raises(RunError):
        Checkpointer(tmp_path).weights("step-00000099")


def test_best_survives_a_metric_that_is_no_number(tmp_path: Path) -> None:
    checkpointer = saved(tmp_path, (1, 2), metrics=(0.5, float("nan")))
    assert checkpointer.best()[0] == tmp_path / "checkpoints" / "step-00000001"


def test_of_equal_metrics_the_lower_loss_is_the_best_and_then_the_first(tmp_path: Path) -> None:
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
    saved(tmp_path, (6, 7), metrics=(0.0, 0.0))
    assert Checkpointer(tmp_path).best()[0] == tmp_path / "checkpoints" / "step-00000001"


def test_above_a_wer_of_90_percent_the_cer_and_then_the_loss_choose(tmp_path: Path) -> None:
    """The first three rows are of a run whose lucky WER kept its worst checkpoint."""
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


def test_a_loss_above_one_is_no_word_error_rate(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, keep=10)
    for step, loss, cer in ((1, 2.0, 0.5), (2, 3.0, 0.1)):
        checkpointer.save(step, {"value": Value(torch.zeros(1))}, {"w": torch.zeros(1)})
        checkpointer.add_validation(step, loss, {"loss": loss, "cer": cer})
    assert checkpointer.best() == (checkpointer.root / "step-00000001", 2.0)


def test_a_full_disk_leaves_the_last_good_checkpoint(tmp_path: Path) -> None:
    checkpointer = saved(tmp_path, (10,))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # writing more fails, as on a full disk
    try:
        with pytest.raises(OSError, match="step 20"):
            checkpointer.save(20, {"value": Value(torch.zeros(100_000))}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000010"]
    value = Value(torch.zeros(100))
    assert Checkpointer(tmp_path).restore({"value": value}) == 10


def test_a_disk_that_fills_under_the_weights_is_the_same_error(tmp_path: Path) -> None:
    """Safetensors has an error of its own for it, torch another one."""
    checkpointer = saved(tmp_path, (10,))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match=r"step 20 could not be written .* MiB free\)"):
            checkpointer.save(20, {"value": Value(torch.zeros(10))}, {"weight": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000010"]


def leave(disk: Disk, measure: str, room: int) -> None:
    """Fill a disk but for so many pages, or so many files."""
    used = os.statvfs(disk.path)
    if measure == "pages":
        disk.fill(room * used.f_frsize)
    else:
        disk.mount(f"remount,nr_inodes={used.f_files - used.f_ffree + room}")


@pytest.mark.parametrize("measure", ["pages", "files"])
def test_a_disk_that_fills_at_each_file_in_turn_loses_no_checkpoint(disk: Disk, measure: str) -> None:
    """From no room at all to enough: at ``state.pt``, the weights, ``checkpoint.json``, ``best.json``."""
    states, weights = {"value": Value(torch.zeros(3000))}, {"weight": torch.zeros(3000)}
    outcomes = []
    disk.mount("remount,size=1m")
    for room in range(15):
        shutil.rmtree(disk.path / "run", ignore_errors=True)
        checkpointer = saved(disk.path / "run", (1, 2), keep=1, metrics=(0.25, 0.5))
        leave(disk, measure, room)
        outcomes.append("lost")
        with contextlib.suppress(OSError):
            checkpointer.save(3, states, weights)
            outcomes[-1] = "saved"
            leave(disk, measure, room % 2)  # the save has made room: older checkpoints are removed
            checkpointer.add_validation(3, 0.125, {"wer": 0.125})
            outcomes[-1] = "noted"
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
    assert set(outcomes) == {"lost", "saved", "noted"}


def test_every_file_has_the_mode_that_the_umask_gives(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        saved(tmp_path, (10,))
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o644}


def test_each_flipped_bit_of_the_note_on_the_best_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = saved(tmp_path, (1, 2, 3), keep=1, metrics=(0.5, 0.25, 0.75))
    note = tmp_path / "checkpoints" / "best.json"
    sound = note.read_bytes()
    for place in range(8 * len(sound)):
        damaged = bytearray(sound)
        damaged[place // 8] ^= 1 << place % 8
        note.write_bytes(damaged)
        assert checkpointer.best() == (tmp_path / "checkpoints" / "step-00000002", 0.25)
    checkpointer.save(4, {"value": Value(torch.zeros(1))}, {"weight": torch.zeros(1)})
    checkpointer.add_validation(4, 0.9, {})
    assert [folder.name for folder in checkpointer.folders()] == ["step-00000002", "step-00000004"]
    assert note.read_bytes() == sound


@pytest.mark.slow
def test_no_flipped_bit_of_a_manifest_loses_the_best_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A changed metric must not let another one win, and the best be removed."""
    checkpointer = saved(tmp_path, (1, 2, 3), keep=1, metrics=(0.5, 0.25, 0.75))
    best = tmp_path / "checkpoints" / "step-00000002"
    manifest = best / "checkpoint.json"
    sound, unchanged = manifest.read_bytes(), 0
    places = range(0, 8 * len(sound), 3)  # bits of every byte. `make test-faults` flips more of them
    for place in places:
        damaged = bytearray(sound)
        damaged[place // 8] ^= 1 << place % 8
        manifest.write_bytes(damaged)
        found, metric = checkpointer.best()
        is_best = found == best and metric == 0.25  # white space, or the name of the digest itself
        unchanged += is_best
        if not is_best:
            with pytest.raises(RunError, match=r"no readable checkpoint\.json"):
                checkpointer.verify(best)
        checkpointer._prune()
        assert best.is_dir()
    assert unchanged < 0.2 * len(places)
    manifest.write_bytes(sound.replace(b"0.25", b"0.95"))
    assert Checkpointer(tmp_path).weights("best")[0].name == "step-00000003"
    assert f"{manifest} is damaged and not used (it does not match its own sha256)" in caplog.messages


def test_a_validation_is_noted_where_its_checkpoint_is(tmp_path: Path) -> None:
    checkpointer = saved(tmp_path, (1, 2), keep=1, metrics=(0.5, 0.25))
    assert checkpointer.read_validation(2) == {"metrics": {"wer": 0.25}, "wall_s": 0.0}
    checkpointer.add_validation(7, 0.1, {})  # its checkpoint could not be written
    assert [folder.name for folder in checkpointer.folders()] == ["step-00000002"]
    assert checkpointer.read_validation(7) == {}
    assert checkpointer.restore({"value": Value(torch.zeros(100))}) == 2


def test_a_kill_while_an_old_one_is_removed_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(folder: Path, ignore_errors: bool = False) -> None:
        (folder / "checkpoint.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            saved(tmp_path, (1, 2), keep=1)
    checkpointer = saved(tmp_path, (3, 4), keep=1)
    assert [folder.name for folder in checkpointer.folders()] == ["step-00000004"]
    assert sorted(path.name for path in checkpointer.root.iterdir()) == ["step-00000004"]


def test_a_run_directory_that_moves_away_is_noticed_and_not_made_again(tmp_path: Path) -> None:
    checkpointer = saved(tmp_path / "run", (10,))
    (tmp_path / "run").rename(tmp_path / "moved")
    states, weights = {"value": Value(torch.zeros(1))}, {"weight": torch.zeros(1)}
    with pytest.raises(OSError, match=r"run was moved or removed while the run went on"):
        checkpointer.save(20, states, weights)
    assert [path.name for path in tmp_path.iterdir()] == ["moved"]
    (tmp_path / "moved").rename(tmp_path / "run")
    assert checkpointer.save(20, states, weights).is_dir()


def test_another_format_is_never_set_aside(tmp_path: Path) -> None:
    """A newer version's checkpoints must not be thrown away by an older one, nor trained over."""
    saved(tmp_path, (10, 20))
    path = tmp_path / "checkpoints" / "step-00000020" / "checkpoint.json"
    of_the_next_format(path.parent)
    with pytest.raises(RunError, match=f"format {SHARDED + 1}"):
        Checkpointer(tmp_path).restore({"value": Value(torch.zeros(100))})
    assert path.exists()


NO_MANIFESTS = ["[]", '{"files": 3}', '{"files": {}, "format": 1, "step": 10}', '"\\ud800']


@pytest.mark.parametrize("content", NO_MANIFESTS)
def test_a_manifest_that_is_no_manifest_is_damage(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, (10,))
    (tmp_path / "checkpoints" / "step-00000010" / "checkpoint.json").write_text(content)
    assert Checkpointer(tmp_path).restore({"value": Value(torch.zeros(100))}) is None
    assert "training starts at step 0" in caplog.text

"""The loop on a task small enough to check by hand: sums and weights, resume, stops, bad updates."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from speechtrain.batch import Batch, Skip
from speechtrain.checkpoint.checkpointer import Checkpointer
from speechtrain.checkpoint.state_file import read_state
from speechtrain.devices.cpu import CPU
from speechtrain.distributed.group import SingleProcess
from speechtrain.errors import ConfigError, DataError, Diverged, MachineError, Preempted
from speechtrain.optim.ema import NoEMA
from speechtrain.optim.schedules import Constant
from speechtrain.precision import FP16
from speechtrain.task import Loss
from speechtrain.trainer_config import TrainerConfig, planned_steps
from speechtrain.training.trainer import Trainer
from tests.support.small_trainer import Counted, Line, NormalisedLine, Recorder, Rig


def test_a_reader_of_fit_is_soon_at_the_step_of_the_optimizer(tmp_path: Path) -> None:
    """``fit``, the update of the trainer, the update of the device, the precision, and the step."""
    functions: list[str] = []

    class Noted(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            frames = [frame for frame in inspect.stack() if "/torch/" not in frame.filename]
            functions.extend(frame.function for frame in frames)

    task = Line()
    settings = TrainerConfig(max_steps=1, log_every=1, ema=0.0)
    trainer = Trainer(settings, CPU(), tmp_path, Recorder())
    trainer.fit(task, Counted(), Noted(task.parameters(), lr=0.0), Constant(peak=0.0), NoEMA())
    assert functions.index("fit") + 1 <= 5


def test_ranks_sum_their_gradients_in_the_last_micro_batch_only(tmp_path: Path) -> None:
    """The gradients of the others are only added up on their rank."""
    backwards: list[str] = []

    class Ranks(SingleProcess):
        @contextmanager
        def no_sync(self, module: nn.Module) -> Iterator[None]:
            backwards.append("alone")
            yield
            backwards.append("end")

    class Watched(Line):
        def forward(self, batch: Batch) -> Loss:
            backwards.append("forward")
            return super().forward(batch)

    task = Watched()
    settings = TrainerConfig(max_steps=2, accumulate=3, log_every=1, ema=0.0, validate_every=None)
    trainer = Trainer(settings, CPU(), tmp_path, Recorder(), group=Ranks())
    optimizer = torch.optim.SGD(task.parameters(), lr=0.0)
    trainer.fit(task, Counted(), optimizer, Constant(peak=0.0), NoEMA())
    update = [*["alone", "forward", "end"] * 2, "forward"]
    assert backwards[: 2 * len(update)] == update * 2


def test_draws_on_the_host_have_an_address_of_their_own(tmp_path: Path) -> None:
    whole = Rig(tmp_path / "whole", max_steps=6, accumulate=2)
    Rig(tmp_path / "parted", max_steps=6, accumulate=2, stop_at=3)
    rest = Rig(tmp_path / "parted", max_steps=6, accumulate=2)
    evaluated = len(whole.task.host_seeds) - 12
    assert whole.task.seen == whole.task.host_seeds, "what prepare drew arrives with the batch"
    assert len(set(whole.task.host_seeds)) == 12 + 2
    assert evaluated == 2
    assert rest.task.host_seeds == whole.task.host_seeds[6:], "a resumed run draws the same"
    assert len(set(whole.task.update_seeds)) == 6
    assert rest.task.update_seeds == whole.task.update_seeds[3:]


def test_latest_is_the_batch_of_an_evaluation(tmp_path: Path) -> None:
    """What a lack of memory is explained by."""
    rig = Rig(tmp_path, max_steps=2)
    assert rig.trainer.latest_batch is not None
    assert rig.trainer.latest_batch.ids == rig.data.at(1001).ids


def test_each_epoch_logs_an_event(tmp_path: Path) -> None:
    """An epoch has seven micro-batches of 2, 3, 4, 2, 3, 4 and 2 rows, then 3, 4, …"""
    rig = Rig(tmp_path, max_steps=16, log_every=5, validate_every=6)
    events = rig.recorder.of("epoch")
    assert [(event["step"], event["epoch"]) for event in events] == [(7, 1), (14, 2)]
    for event, utterances in zip(events, (20, 21), strict=True):
        assert event["utterances_per_s"] * event["seconds"] == pytest.approx(utterances)
    assert [row["step"] for row in rig.recorder.of("train")] == [5, 6, 10, 12, 15, 16], "it adds no log line"
    progress = rig.trainer.progress
    assert (progress.utterances, progress.audio_s) == (47, 16.0)
    assert progress.epochs == pytest.approx(16 / 7)
    assert sum(event["seconds"] for event in events) < progress.train_s < progress.wall_s
    assert progress.speed()["epoch_s"] == pytest.approx(progress.train_s * 7 / 16)


def test_an_epoch_that_was_interrupted_counts_all_its_updates(tmp_path: Path) -> None:
    Rig(tmp_path, max_steps=20, stop_at=4)
    rig = Rig(tmp_path, max_steps=20)
    event, _ = rig.recorder.of("epoch")
    assert event["utterances_per_s"] * event["seconds"] == pytest.approx(20)
    names = [name for name, _ in rig.recorder.events]
    assert names.index("resume") < names.index("epoch")


def test_a_collapse_that_the_task_sees_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(Diverged, match=r"the line has collapsed; lower optimizer.lr .*since step 5"):
        Rig(tmp_path, max_steps=10, alarms=[6])
    warned = Rig(tmp_path / "warned", max_steps=10, alarms=[6], on_collapse="warn")
    assert warned.status == "finished"
    assert [w["step"] for w in warned.recorder.of("warning")] == [6]


def test_a_run_ends_at_its_limit_and_learns(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_steps=80)
    assert rig.status == "finished"
    assert rig.trainer.progress.step == 80
    first, last = list(rig.losses.values())[:8], list(rig.losses.values())[-8:]
    assert sum(last) < 0.5 * sum(first)
    assert rig.task.advanced == list(range(80))


@pytest.mark.parametrize("kill_at", [1, 5, 6, 13])
def test_resume_is_bit_equal(tmp_path: Path, kill_at: int) -> None:
    whole = Rig(tmp_path / "a", max_steps=20, save_every=3, accumulate=2)
    Rig(tmp_path / "b", stop_at=kill_at, max_steps=20, save_every=3, accumulate=2)
    continued = Rig(tmp_path / "b", max_steps=20, save_every=3, accumulate=2)
    assert continued.recorder.of("resume") == [{"step": kill_at}]
    assert continued.losses == {s: v for s, v in whole.losses.items() if s > kill_at}
    for a, b in zip(whole.task.parameters(), continued.task.parameters(), strict=True):
        assert torch.equal(a, b)


def test_an_update_is_the_mean_over_everything_it_covers(tmp_path: Path) -> None:
    """Ragged micro-batches: the gradient is of Σ loss / Σ weight, not of a mean of means."""
    rig = Rig(tmp_path, max_steps=1, accumulate=5, clip=0.0, ema=0.0)
    task = Line()
    task.dropout.p = 0.0
    total, weight = torch.zeros(()), torch.zeros(())
    for number in range(5):
        loss = task(rig.data.at(number))
        total, weight = total + loss.total, weight + loss.weight
    (total / weight).backward()
    reference = torch.cat([p.grad.flatten() for p in task.parameters() if p.grad is not None])
    captured: list[torch.Tensor] = []

    class Capture(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            captured.append(torch.cat([p.grad.flatten() for p in task.parameters() if p.grad is not None]))

    task.zero_grad()
    trainer = Trainer(
        TrainerConfig(max_steps=1, accumulate=5, clip=0.0, ema=0.0), CPU(), tmp_path, Recorder(),
        checkpointer=Checkpointer(tmp_path / "c"),
    )  # fmt: skip
    trainer.fit(task, Counted(), Capture(task.parameters(), lr=1.0), Constant(peak=1.0), NoEMA())
    torch.testing.assert_close(captured[0], reference, rtol=1e-6, atol=0)


@pytest.mark.parametrize("clip", [1e-3, 0.5, 1e6])
def test_clipping_is_torchs(tmp_path: Path, clip: float) -> None:
    def stepped(name: str, bound: float) -> tuple[list[torch.Tensor], float]:
        captured: list[torch.Tensor] = []

        class Capture(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:
                captured.extend(p.grad.clone() for p in task.parameters() if p.grad is not None)

        task, recorder = Line(), Recorder()
        settings = TrainerConfig(max_steps=1, log_every=1, clip=bound, ema=0.0)
        checkpointer = Checkpointer(tmp_path / name)
        trainer = Trainer(settings, CPU(), tmp_path, recorder, checkpointer=checkpointer)
        trainer.fit(task, Counted(), Capture(task.parameters(), lr=0.0), Constant(peak=0.0), NoEMA())
        return captured, recorder.of("train")[0]["grad_norm"]

    plain, norm = stepped("plain", 0.0)  # 0: no clipping
    clipped, logged = stepped("clipped", clip)
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in plain]
    for parameter, gradient in zip(parameters, plain, strict=True):
        parameter.grad = gradient.clone()
    total = torch.nn.utils.clip_grad_norm_(parameters, clip)
    assert logged == norm == pytest.approx(float(total), rel=1e-6)  # the norm before clipping is logged
    for parameter, gradient in zip(parameters, clipped, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-5, atol=1e-9)


def test_a_non_finite_micro_batch_skips_and_counts_as_a_step(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_steps=6, poison={3})
    clean = Rig(tmp_path / "clean", max_steps=3)
    assert rig.status == "finished"
    assert rig.trainer.progress.skipped_updates == 1
    assert len(rig.recorder.of("warning")) == 1
    assert "update 4" in rig.recorder.of("warning")[0]["message"]
    assert math.isnan(rig.losses[4])
    assert rig.losses[3] == clean.losses[3]
    assert all(math.isfinite(rig.losses[s]) for s in (5, 6))


def test_an_infinite_loss_with_finite_gradients_is_a_bad_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An impossible label has such a loss: its gradients are zero."""
    monkeypatch.setattr(Line, "damage", lambda task, total: total + torch.inf)
    rig = Rig(tmp_path, max_steps=6, poison={3})
    assert rig.trainer.progress.skipped_updates == 1
    assert "update 4" in rig.recorder.of("warning")[0]["message"]
    assert rig.losses[4] == math.inf
    assert all(math.isfinite(rig.losses[step]) for step in (3, 5, 6))


def test_many_in_a_row_stop_the_run_with_a_replay_bundle(tmp_path: Path) -> None:
    advice = "4 non-finite updates in a row up to step 6: lower optimizer.lr or trainer.clip, or look"
    with pytest.raises(Diverged, match=advice):
        Rig(tmp_path, max_steps=50, poison={2, 3, 4, 5}, max_bad_updates=4)
    bundle = read_state(tmp_path / "replay.safetensors")
    assert bundle["step"] == 6
    assert bundle["batches"][0]["ids"][0].startswith("5-")
    assert isinstance(bundle["batches"][0]["audio"], torch.Tensor)


def without_recordings(monkeypatch: pytest.MonkeyPatch, numbers: set[int]) -> None:
    """Replace the rows of these micro-batches by padding rows, as for recordings that cannot be used."""
    usual = Counted.at

    def at(data: Counted, number: int) -> Batch:
        batch = usual(data, number)
        if number not in numbers:
            return batch
        skips = tuple(Skip(name, "missing", f"{name}.wav") for name in batch.ids)
        return replace(batch, weight=0 * batch.weight, ids=("",) * len(batch.ids), skipped=skips)

    monkeypatch.setattr(Counted, "at", at)


def test_an_update_without_a_recording_changes_no_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_recordings(monkeypatch, {2, 3})
    rig = Rig(tmp_path / "whole", max_steps=5)
    (state, _) = rig.optimizer.state.values()
    assert (state["step"], rig.trainer.progress.step, rig.trainer.progress.skipped_updates) == (3, 5, 2)
    messages = [row["message"] for row in rig.recorder.of("warning")]
    assert "update 3 skipped: no usable recording: '2-0' (missing: 2-0.wav)" in messages[0]
    Rig(tmp_path / "parted", max_steps=5, stop_at=3)
    rest = Rig(tmp_path / "parted", max_steps=5)
    assert torch.equal(rest.task.linear.weight, rig.task.linear.weight)
    part = Rig(tmp_path / "part", max_steps=2, accumulate=3)  # Other micro-batches have recordings.
    assert part.trainer.progress.skipped_updates == 0
    before, after = Rig(tmp_path / "two", max_steps=2), Rig(tmp_path / "three", max_steps=3)
    assert torch.equal(before.task.linear.weight, after.task.linear.weight)


def test_updates_without_a_recording_end_with_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_recordings(monkeypatch, set(range(100)))
    with pytest.raises(
        DataError, match=r"4 skipped updates in a row, 4, had no usable recording: '3-0'.*3-0\.wav"
    ):
        Rig(tmp_path / "many", max_steps=50, max_bad_updates=4)
    with pytest.raises(DataError, match=r"nothing was learnt in 3 updates.*2-0\.wav"):
        Rig(tmp_path / "few", max_steps=3)


def test_the_defaults_of_an_update() -> None:
    """Adam hides the scale of gradients, so no loss of a test depends on ``clip``."""
    defaults = TrainerConfig()
    assert (defaults.clip, defaults.ema, defaults.accumulate, defaults.max_bad_updates) == (1.0, 0.999, 1, 10)


def test_target_stops_at_the_validation_that_reaches_it(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_steps=500, validate_every=10, target=0.5)
    assert rig.status == "target"
    assert rig.trainer.progress.step % 10 == 0
    assert rig.trainer.progress.metrics["loss"] <= 0.5
    assert rig.trainer.progress.metrics["dev/loss"] == rig.trainer.progress.metrics["loss"]


def test_a_stop_request_saves_and_ends(tmp_path: Path) -> None:
    rig = Rig(tmp_path, stop_at=4, max_steps=50)
    assert rig.status == "preempted"
    assert [p.name for p in Checkpointer(tmp_path).folders()] == ["step-00000004"]
    assert rig.recorder.of("valid") == []  # leaving must not wait for a validation


def test_a_checkpoint_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".writing-step-00000002").write_text("a file where the folder should be")
    rig = Rig(tmp_path, max_steps=4, save_every=2)
    assert rig.status == "finished"
    assert any("on_save_error=continue" in w["message"] for w in rig.recorder.of("warning"))
    for step, settings in ((2, {"on_save_error": "stop"}), (4, {})):  # the last save is never a mere warning
        folder = tmp_path / str(step)
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "checkpoints" / f".writing-step-{step:08d}").write_text("")
        with pytest.raises(MachineError, match="last good checkpoint is intact"):
            Rig(folder, max_steps=4, save_every=2, **settings)


def test_rescued_does_not_save_a_step_again_that_was_just_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a save that failed nor the one before a validation that fails is repeated."""
    save, steps = Checkpointer.save, list[int]()

    def counted(checkpointer: Checkpointer, step: int, *states: Any) -> Path:
        steps.append(step)
        return save(checkpointer, step, *states)

    monkeypatch.setattr(Checkpointer, "save", counted)
    (tmp_path / "full" / "checkpoints").mkdir(parents=True)
    (tmp_path / "full" / "checkpoints" / ".writing-step-00000002").write_text("")
    with pytest.raises(MachineError):
        Rig(tmp_path / "full", max_steps=4, save_every=2, on_save_error="stop")
    assert steps == [2]
    steps.clear()
    with pytest.raises(DataError):
        Rig(tmp_path / "run", max_steps=4, validate_every=3, fails={"valid": DataError("vanished")})
    assert steps == [3]


def test_profile_writes_the_steps_asked_for(tmp_path: Path) -> None:
    Rig(tmp_path, max_steps=4, profile="2:3")
    trace = json.loads((tmp_path / "profile-2-3.json").read_text())
    assert trace["traceEvents"]
    Rig(tmp_path / "b", max_steps=2, profile="2:9")  # the run ends first: the trace is written all the same
    assert (tmp_path / "b" / "profile-2-9.json").exists()
    with pytest.raises(ConfigError, match="A:B"):
        Rig(tmp_path / "c", max_steps=2, profile="3")


def test_validation_sees_the_average_and_changes_no_weight(tmp_path: Path) -> None:
    with_validation = Rig(tmp_path / "a", max_steps=12, validate_every=3)
    without = Rig(tmp_path / "b", max_steps=12)
    assert with_validation.losses == without.losses
    assert len(with_validation.recorder.of("valid")) == 4


def test_a_validation_that_was_left_is_made_up_for(tmp_path: Path) -> None:
    """A stop during it saves without figures; the continued run evaluates the same weights first."""
    whole = Rig(tmp_path / "a", max_steps=6, validate_every=3)
    left = Rig(tmp_path / "b", max_steps=6, validate_every=3, stop_in_validation=True)
    assert (left.status, left.trainer.progress.step) == ("preempted", 3)
    assert left.recorder.of("valid") == []
    continued = Rig(tmp_path / "b", max_steps=6, validate_every=3)
    assert continued.status == "finished"
    figures = [{k: v for k, v in row.items() if k != "seconds"} for row in continued.recorder.of("valid")]
    assert [row["step"] for row in figures] == [3, 6]
    assert figures == [{k: v for k, v in row.items() if k != "seconds"} for row in whole.recorder.of("valid")]
    assert not list((tmp_path / "b" / "checkpoints").glob(".*"))


@pytest.mark.parametrize("line", [Line, NormalisedLine])
@pytest.mark.parametrize("place", ["valid", "9", "11"])
def test_an_error_of_data_loses_no_update(tmp_path: Path, place: str, line: type[Line]) -> None:
    """In a validation, at the first or at a later micro-batch of an update: a run goes on there."""
    settings: dict[str, Any] = {"max_steps": 8, "validate_every": 4, "save_every": 100, "accumulate": 2}
    settings["line"] = line
    whole = Rig(tmp_path / "whole", **settings)
    with pytest.raises(DataError, match="the file vanished"):
        Rig(tmp_path / "run", fails={place: DataError("the file vanished")}, **settings)
    done = 4 if place == "valid" else int(place) // 2
    assert Checkpointer(tmp_path / "run").folders()[-1].name == f"step-{done:08d}"
    again = Rig(tmp_path / "run", **settings)
    assert again.recorder.of("resume") == [{"step": done}]
    assert again.losses == {step: loss for step, loss in whole.losses.items() if step > done}
    torch.testing.assert_close(again.task.state_dict(), whole.task.state_dict(), rtol=0, atol=0)
    assert [row["step"] for row in again.recorder.of("valid")] == ([4, 8] if place == "valid" else [8])


def test_a_batch_that_never_came_before_a_stop_is_a_stop(tmp_path: Path) -> None:
    rig = Rig(tmp_path, fails={"5": Preempted("no answer")}, max_steps=8)
    assert (rig.status, rig.trainer.progress.step) == ("preempted", 5)
    assert Rig(tmp_path, max_steps=8).losses.keys() == {6, 7, 8}


def test_an_error_in_the_midst_of_an_update_saves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some weights may have moved and others not."""
    step = torch.optim.AdamW.step
    calls: list[int] = []

    def broken(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:
            raise RuntimeError("in the midst")
        return step(*arguments, **options)

    monkeypatch.setattr(torch.optim.AdamW, "step", broken)
    with pytest.raises(RuntimeError, match="in the midst"):
        Rig(tmp_path, max_steps=8, save_every=3)
    assert [folder.name for folder in Checkpointer(tmp_path).folders()] == ["step-00000003"]


def test_diverged_weights_take_no_place_of_older_ones(tmp_path: Path) -> None:
    with pytest.raises(Diverged):
        Rig(tmp_path, max_steps=10, save_every=3, alarms=[5])
    assert [folder.name for folder in Checkpointer(tmp_path).folders()] == ["step-00000003"]


def test_a_loss_that_was_never_finite_is_no_success(tmp_path: Path) -> None:
    with pytest.raises(Diverged, match="none of 4 updates had a finite loss"):
        Rig(tmp_path, max_steps=4, poison=set(range(9)), max_bad_updates=100)
    assert Rig(tmp_path / "one", max_steps=4, poison={0, 1, 2}, max_bad_updates=100).status == "finished"


def test_a_validation_is_saved_without_being_repeated(tmp_path: Path) -> None:
    """It is noted in the checkpoint, which is written before."""
    first = Rig(tmp_path, max_steps=6, validate_every=3)
    events = [name for name, _ in first.recorder.events if name in ("checkpoint", "valid")]
    assert events == ["checkpoint", "valid", "checkpoint", "valid"]
    again = Rig(tmp_path, max_steps=6, validate_every=3)
    assert again.recorder.of("valid") == []
    assert again.trainer.progress.metrics == first.trainer.progress.metrics
    assert again.trainer.progress.validated == 6
    assert Checkpointer(tmp_path).best()[1] == min(row["loss"] for row in first.recorder.of("valid"))


def test_a_run_out_of_time_says_so_and_does_no_more(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_steps=500, max_hours=1e-12)
    assert rig.status == "time"
    assert rig.trainer.progress.step <= 1
    assert len(rig.recorder.of("valid")) == rig.trainer.progress.step
    assert Rig(tmp_path, max_steps=500, max_hours=1e-12).recorder.of("train") == []


def test_a_lowered_loss_scale_is_counted_apart_and_resumes(tmp_path: Path) -> None:
    """An overflow by the scale alone: halved until it fits, never counted as the recipe's fault."""

    rig = Rig(tmp_path, max_steps=8, precision=FP16(initial_scale=2.0**127, floor=1.0), max_bad_updates=1)
    assert rig.status == "finished"
    assert rig.trainer.progress.scale_skips > 0
    assert rig.trainer.progress.skipped_updates == 0
    lowered = rig.trainer.precision.state_dict()["scale"]
    assert lowered == 2.0 ** (127 - rig.trainer.progress.scale_skips)
    again = Rig(tmp_path, max_steps=9, precision=FP16(initial_scale=2.0**127, floor=1.0))
    assert again.trainer.precision.state_dict()["scale"] == 2.0 ** (127 - again.trainer.progress.scale_skips)
    assert again.trainer.progress.scale_skips in (127 - math.log2(lowered), 128 - math.log2(lowered))
    with pytest.raises(Diverged):  # nothing left to lower
        Rig(tmp_path / "floor", max_steps=8, precision=FP16(2.0**127, floor=2.0**127), max_bad_updates=1)


def test_planned_steps() -> None:
    assert planned_steps(TrainerConfig(max_steps=10, max_epochs=2.0), 7.0) == 10
    assert planned_steps(TrainerConfig(max_steps=100, max_epochs=2.0), 3.5) == 7
    assert planned_steps(TrainerConfig(), 3.5) is None

"""The lines of mlperf.log: keys in the reference's order, values of the run, resumed and failed runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from speechtrain.start.resolved import dump, load
from speechtrain.start.run_config import part_of
from speechtrain.tracking.base import Tracker
from tests.support.composed import composed
from tests.support.mllog import MLLog, golden_keys

REFERENCE = [
    "recipe=mlperf",
    "tokenizer.model=l.model",
    "data.train=a.jsonl",
    "data.valid.dev-clean=d.jsonl",
]
INIT = "tracking.trackers.mlperf.init"
SUBMISSION = [f"{INIT}.submission_org=Acme", f"{INIT}.submission_platform=CPU"]
DATA = {"train_samples": 278_528, "eval_samples": 2703, "updates_per_epoch": 4}
DATE = r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [AP]M)"
EVALUATION = ["eval_start", "eval_accuracy", "eval_stop"]


def tracker_of(run_dir: Path, *overrides: str) -> Tracker:
    """The mlperf tracker of a run, whose stored config is as the command writes it."""
    config = composed(*overrides, *SUBMISSION, "tracking=mlperf", "run_dir=.")
    config.run_dir = str(run_dir)
    run_dir.mkdir(exist_ok=True)
    path = run_dir / "config.yaml"
    path.write_text(dump(config))
    node = load(path).tracking.trackers.mlperf
    tracker = part_of(OmegaConf.create({"tracking": node}), "tracking").build()
    assert isinstance(tracker, Tracker)
    return tracker


def begin(tracker: Tracker, target: float | None = 0.058) -> None:
    tracker.log("environment", {"host": "node-7"})
    tracker.log("data", DATA)
    tracker.log("start", {"steps": 8, "ranks": 8, "accumulate": 8, "target": target})


def end_epoch(tracker: Tracker, number: int) -> None:
    values = {"step": 4 * number, "epoch": number, "seconds": 2.0, "utterances_per_s": 512.5}
    tracker.log("epoch", values)


def validate(tracker: Tracker, step: int, wer: float | None = 0.5, name: str = "dev-clean") -> None:
    values = {"step": step, "set": name, "seconds": 0.5}
    tracker.log("valid", values if wer is None else {**values, "wer": wer})


def epoch(tracker: Tracker, number: int, wer: float | None) -> None:
    """Two log lines, the end and the validations of an epoch of four updates."""
    final = 4 * number
    for step in (final - 2, final):
        tracker.log("train", {"step": step, "epoch": step / 4, "loss": 1.0})
    end_epoch(tracker, number)
    for name in ("dev-clean", "final/dev-clean", "other"):
        validate(tracker, final, wer, name)


def test_the_keys_have_the_order_of_the_reference(tmp_path: Path) -> None:
    tracker = tracker_of(tmp_path, *REFERENCE)
    begin(tracker)
    epoch(tracker, 1, 20.48)
    epoch(tracker, 2, 0.05)
    tracker.log("end", {"status": "target", "steps": 8})
    tracker.close()
    assert MLLog.read(tmp_path).keys == golden_keys()


def test_the_values_are_those_of_the_run(tmp_path: Path) -> None:
    tracker = tracker_of(tmp_path, *REFERENCE, "seed=2021", "optimizer.lr=7e-3")
    begin(tracker)
    epoch(tracker, 1, 20.48)
    expected = {
        "seed": 2021,
        "gradient_accumulation_steps": 8,
        "submission_benchmark": "rnnt",
        "submission_org": "Acme",
        "submission_platform": "CPU",
        "model_weights_initialization_scale": 0.5,
        "eval_max_prediction_symbols": 300,
        "model_eval_ema_factor": 0.999,
        "data_train_max_duration": 16.7,
        "data_speed_perturbaton_max": 1.15,
        "data_speed_perturbaton_min": 0.85,
        "data_spec_augment_freq_n": 2,
        "data_spec_augment_freq_max": 20,
        "data_spec_augment_time_n": 10,
        "data_spec_augment_time_max": 0.03,
        "global_batch_size": 16 * 8 * 8,
        "data_train_num_buckets": 0,
        "train_samples": 278_528,
        "eval_samples": 2703,
        "opt_name": "lamb",
        "opt_base_learning_rate": 7e-3,
        "opt_lamb_epsilon": 1e-9,
        "opt_lamb_learning_rate_decay_poly_power": 0.935,
        "opt_learning_rate_warmup_epochs": 6,
        "opt_lamb_learning_rate_hold_epochs": 40,
        "opt_lamb_beta_1": 0.9,
        "opt_lamb_beta_2": 0.999,
        "opt_gradient_clip_norm": 1.0,
        "opt_learning_rate_alt_decay_func": True,
        "opt_learning_rate_alt_warmup_func": True,
        "opt_lamb_learning_rate_min": 1e-5,
        "opt_weight_decay": 1e-3,
        "throughput": 512.5,
        "eval_accuracy": 20.48,
    }
    values = MLLog.read(tmp_path).last_values
    assert {key: values[key] for key in expected} == expected


def test_the_form_of_the_lines(tmp_path: Path) -> None:
    tracker = tracker_of(tmp_path, *REFERENCE)
    begin(tracker)
    epoch(tracker, 1, 0.5)
    log = MLLog.read(tmp_path)
    kinds = {"start": "INTERVAL_START", "stop": "INTERVAL_END"}
    for line in log.lines:
        assert line.keys() == {"namespace", "time_ms", "event_type", "key", "value", "metadata"}
        assert line["namespace"] == ""
        assert line["metadata"].keys() >= {"file", "lineno"}
        assert type(line["time_ms"]) is int
        kind = line["key"].rpartition("_")[2]
        assert line["event_type"] == kinds.get(kind, "POINT_IN_TIME")
    times = [line["time_ms"] for line in log.lines]
    assert times == sorted(times), "a block begins when the one before has ended"
    assert log.metadata("block_start", "first_epoch_num") == [1]
    assert log.metadata("block_start", "epoch_count") == [1]


def test_the_lines_with_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracker = tracker_of(tmp_path, *REFERENCE)
    begin(tracker)
    tracker.log("end", {"status": "target", "steps": 4})
    start, end, result = MLLog.read(tmp_path).times
    match = re.fullmatch(f"STARTING TIMING RUN AT {DATE}", start)
    assert match
    assert re.fullmatch(f"ENDING TIMING RUN AT {DATE}", end)
    assert re.fullmatch(rf"RESULT,RNN_SPEECH_RECOGNITION,,\d+,Acme,{match[1]}", result)
    assert capsys.readouterr().out.splitlines() == [start, end, result]


@pytest.mark.parametrize(
    ("status", "target", "expected"),
    [
        ("target", 0.5, "success"),
        ("finished", 0.5, "aborted"),
        ("time", 0.5, "aborted"),
        ("finished", None, "success"),
        ("time", None, "success"),
        ("failed", None, "aborted"),
    ],
)
def test_how_a_run_stops(tmp_path: Path, status: str, target: float | None, expected: str) -> None:
    tracker = tracker_of(tmp_path, *REFERENCE)
    begin(tracker, target)
    tracker.log("end", {"status": status, "steps": 0})
    assert MLLog.read(tmp_path).metadata("run_stop", "status") == [expected]


def test_a_run_that_continues_begins_once(tmp_path: Path) -> None:
    """A stop in epoch 2 after the checkpoint of epoch 1: the log says where the run goes on."""
    tracker = tracker_of(tmp_path, *REFERENCE)
    begin(tracker)
    epoch(tracker, 1, 0.9)
    tracker.log("train", {"step": 6, "epoch": 1.5})
    tracker.log("end", {"status": "preempted", "steps": 6})
    later = tracker_of(tmp_path, *REFERENCE)
    begin(later)
    later.log("resume", {"step": 4})
    epoch(later, 2, 0.05)
    later.log("end", {"status": "target", "steps": 8})
    log = MLLog.read(tmp_path)
    for key in ("init_start", "init_stop", "run_start", "run_stop", "seed", "opt_name", "restart"):
        assert log.keys.count(key) == 1
    assert log.values("resume") == [4]
    assert log.metadata("epoch_start") == [1, 2, 2], "the first block 2 is void"
    assert log.metadata("epoch_stop") == [1, 2]
    start, _, result = log.times
    assert result.endswith(start.removeprefix("STARTING TIMING RUN AT "))


def test_a_run_that_was_killed_before_its_first_checkpoint_restarts(tmp_path: Path) -> None:
    tracker = tracker_of(tmp_path, *REFERENCE)
    begin(tracker)
    tracker.log("train", {"step": 2, "epoch": 0.5})
    later = tracker_of(tmp_path, *REFERENCE)
    begin(later)
    epoch(later, 1, 0.9)
    log = MLLog.read(tmp_path)
    counts = [log.keys.count(key) for key in ("run_start", "restart", "resume")]
    assert counts == [1, 1, 0]
    assert log.metadata("epoch_start") == [1, 1]


def test_the_seconds_of_a_resumed_run_are_those_between_its_dates(tmp_path: Path) -> None:
    (tmp_path / "mlperf.log").write_text("STARTING TIMING RUN AT 2026-11-24 11:59:58 PM\n")
    tracker = tracker_of(tmp_path, *REFERENCE)
    begin(tracker)
    tracker.log("end", {"status": "finished", "steps": 0})
    result = MLLog.read(tmp_path).times[-1].split(",")
    assert int(result[3]) > 3600
    assert result[5] == "2026-11-24 11:59:58 PM"


def test_an_evaluation_of_the_resumed_step_ends_its_block(tmp_path: Path) -> None:
    """A kill in a validation: the continued run makes up for it before its first update."""
    tracker = tracker_of(tmp_path, *REFERENCE)
    begin(tracker)
    tracker.log("train", {"step": 4, "epoch": 1.0})
    end_epoch(tracker, 1)
    later = tracker_of(tmp_path, *REFERENCE)
    begin(later)
    later.log("resume", {"step": 4})
    validate(later, 4)
    epoch(later, 2, 0.5)
    log = MLLog.read(tmp_path)
    assert log.metadata("epoch_start") == [1, 2]
    assert log.metadata("eval_accuracy") == [1, 2]
    assert log.metadata("block_stop", "first_epoch_num") == [1, 2]


def test_validations_within_an_epoch_are_in_its_block(tmp_path: Path) -> None:
    tracker = tracker_of(tmp_path, *REFERENCE)
    begin(tracker)
    for step in range(1, 7):
        tracker.log("train", {"step": step, "epoch": step / 4})
        if step == 4:
            end_epoch(tracker, 1)
        if step % 3 == 0:
            validate(tracker, step)
    tracker.log("end", {"status": "finished", "steps": 6})
    log = MLLog.read(tmp_path)
    first = log.keys.index("block_start")
    assert log.keys[first:] == [
        *("block_start", "epoch_start", *EVALUATION, "epoch_stop", "throughput", "block_stop"),
        *("block_start", "epoch_start", *EVALUATION, "block_stop", "run_stop"),
    ]
    assert log.metadata("eval_accuracy") == [1, 2]


def test_keys_of_the_references_parts_are_logged_only_if_the_run_has_these_parts(tmp_path: Path) -> None:
    """The run has another optimizer, schedule and network than the reference, and no speed perturbation."""
    choices = ["model=ctc", "encoder=fastconformer_tiny", "optimizer=adamw", "data=digits", "augment=none"]
    tracker = tracker_of(tmp_path, *choices, "data.speed=null")
    begin(tracker)
    epoch(tracker, 1, None)
    log = MLLog.read(tmp_path)
    assert log.values("submission_benchmark") == ["ctc"]
    assert log.values("opt_name") == ["adamw"]
    assert log.values("data_spec_augment_freq_n") == [0]
    absent = ("weights_initialization", "opt_lamb", "data_speed", "opt_learning_rate_alt", "eval_accuracy")
    assert not [key for key in log.keys if key.startswith(absent)]


def test_pretraining_has_no_recogniser(tmp_path: Path) -> None:
    tracker = tracker_of(tmp_path, "model=wav2vec2_small", "data=manifest", "data.train=a.jsonl")
    begin(tracker)
    log = MLLog.read(tmp_path)
    assert log.values("submission_benchmark") == ["wav2vec2"]
    absent = ("weights_initialization", "eval_max_prediction_symbols", "opt_lamb")
    assert not [key for key in log.keys if key.startswith(absent)]


def test_a_figure_that_is_not_finite_is_null(tmp_path: Path) -> None:
    tracker = tracker_of(tmp_path, *REFERENCE)
    begin(tracker)
    epoch(tracker, 1, float("inf"))
    assert MLLog.read(tmp_path).values("eval_accuracy") == [None]

"""The lines of mlperf.log: keys in the reference's order, values of the run, resumed and failed runs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from speechtrain.commands._hydra_app import compose
from speechtrain.config.build import build
from speechtrain.config.resolved import dump, load
from speechtrain.tracking.base import Tracker

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "mlperf_keys.txt"
REFERENCE = [
    "recipe=mlperf",
    "tokenizer.model=l.model",
    "data.train=a.jsonl",
    "+data.valid.dev-clean=d.jsonl",
]
SUBMISSION = [
    "tracking.trackers.mlperf.init.submission_org=Acme",
    "tracking.trackers.mlperf.init.submission_platform=CPU",
]
DATA = {"train_samples": 278_528, "eval_samples": 2703, "updates_per_epoch": 4}
START = {"steps": 8, "ranks": 8, "accumulate": 8}


def tracker_of(run_dir: Path, *overrides: str) -> Tracker:
    """The mlperf tracker of a run, whose stored config is as the command writes it."""
    config = compose([*overrides, *SUBMISSION, "tracking=mlperf", f"run_dir={run_dir}"])
    run_dir.mkdir(exist_ok=True)
    (run_dir / "config.yaml").write_text(dump(config))
    stored = load(run_dir / "config.yaml")
    tracker = build(OmegaConf.create({"tracking": stored.tracking.trackers.mlperf}), "tracking")
    assert isinstance(tracker, Tracker)
    return tracker


def begin(tracker: Tracker, target: float | None = 0.058) -> None:
    tracker.log("environment", {"host": "node-7"})
    tracker.log("data", DATA)
    tracker.log("start", {**START, "target": target})


def epoch(tracker: Tracker, number: int, wer: float | None) -> None:
    """Two log lines, the end and the validation of an epoch of four updates."""
    last = 4 * number
    for step in (last - 2, last):
        tracker.log("train", {"step": step, "epoch": step / 4, "loss": 1.0})
    tracker.log("epoch", {"step": last, "epoch": number, "seconds": 2.0, "utterances_per_s": 512.5})
    for name in ("dev-clean", "final/dev-clean", "other"):
        tracker.log("valid", {"step": last, "set": name, "seconds": 0.5, "wer": wer})


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    """The content of each ``:::MLLOG`` line."""
    lines = (run_dir / "mlperf.log").read_text().splitlines()
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in lines if line.startswith(":::MLLOG ")]


def keys_of(run_dir: Path) -> list[str]:
    keys = []
    for line in lines_of(run_dir):
        keys.append(" ".join([line["key"], *filter(None, [line["metadata"].get("tensor")])]))
    return keys


def values_of(run_dir: Path) -> dict[str, Any]:
    return {line["key"]: line["value"] for line in lines_of(run_dir)}


def numbers_of(run_dir: Path, key: str) -> list[int]:
    return [line["metadata"]["epoch_num"] for line in lines_of(run_dir) if line["key"] == key]


def test_the_keys_have_the_order_of_the_reference(tmp_path: Path) -> None:
    tracker = tracker_of(tmp_path, *REFERENCE)
    begin(tracker)
    epoch(tracker, 1, 20.48)
    epoch(tracker, 2, 0.05)
    tracker.log("end", {"status": "target", "steps": 8})
    tracker.close()
    assert keys_of(tmp_path) == GOLDEN.read_text().split("\n")[:-1]


def test_the_values_are_those_of_the_run(tmp_path: Path) -> None:
    tracker = tracker_of(tmp_path, *REFERENCE, "seed=2021", "optimizer.lr=7e-3")
    begin(tracker)
    epoch(tracker, 1, 20.48)
    tracker.log("end", {"status": "target", "steps": 8})
    values = values_of(tmp_path)
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
    assert {key: values[key] for key in expected} == expected


def test_the_form_of_the_lines(tmp_path: Path) -> None:
    tracker = tracker_of(tmp_path, *REFERENCE)
    begin(tracker)
    epoch(tracker, 1, 0.5)
    tracker.log("end", {"status": "target", "steps": 4})
    types, times = {}, []
    for line in lines_of(tmp_path):
        assert line.keys() == {"namespace", "time_ms", "event_type", "key", "value", "metadata"}
        assert line["namespace"] == ""
        assert line["metadata"].keys() >= {"file", "lineno"}
        types[line["key"]] = line["event_type"]
        times.append(line["time_ms"])
    assert all(type(time) is int for time in times)
    assert times == sorted(times), "a block begins when the one before has ended"
    kinds = {"start": "INTERVAL_START", "stop": "INTERVAL_END"}
    for key, kind in types.items():
        assert kind == kinds.get(key.rpartition("_")[2], "POINT_IN_TIME")
    text = (tmp_path / "mlperf.log").read_text().splitlines()
    date = r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [AP]M)"
    start = re.fullmatch(f"STARTING TIMING RUN AT {date}", text[0])
    assert start
    assert re.fullmatch(f"ENDING TIMING RUN AT {date}", text[-2])
    assert re.fullmatch(rf"RESULT,RNN_SPEECH_RECOGNITION,,\d+,Acme,{start[1]}", text[-1])
    block = next(line for line in lines_of(tmp_path) if line["key"] == "block_start")
    assert (block["metadata"]["first_epoch_num"], block["metadata"]["epoch_count"]) == (1, 1)


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
    stop = lines_of(tmp_path)[-1]
    assert (stop["key"], stop["metadata"]["status"]) == ("run_stop", expected)


def test_a_run_that_continues_begins_once(tmp_path: Path) -> None:
    """A stop in epoch 2 after the checkpoint of epoch 1: the log says where the run goes on."""
    tracker = tracker_of(tmp_path, *REFERENCE)
    begin(tracker)
    epoch(tracker, 1, 0.9)
    tracker.log("train", {"step": 6, "epoch": 1.5})
    tracker.log("end", {"status": "preempted", "steps": 6})
    tracker.close()
    later = tracker_of(tmp_path, *REFERENCE)
    begin(later)
    later.log("resume", {"step": 4})
    epoch(later, 2, 0.05)
    later.log("end", {"status": "target", "steps": 8})
    keys = keys_of(tmp_path)
    for key in ("init_start", "init_stop", "run_start", "run_stop", "seed", "opt_name"):
        assert keys.count(key) == 1
    assert keys.count("restart") == 1
    assert [line["value"] for line in lines_of(tmp_path) if line["key"] == "resume"] == [4]
    assert numbers_of(tmp_path, "epoch_start") == [1, 2, 2], "the first block 2 is void"
    assert numbers_of(tmp_path, "epoch_stop") == [1, 2]
    text = (tmp_path / "mlperf.log").read_text()
    assert text.count("STARTING TIMING RUN AT") == 1
    assert text.splitlines()[-1].endswith(text.splitlines()[0].removeprefix("STARTING TIMING RUN AT "))


def test_a_run_that_was_killed_before_its_first_checkpoint_restarts(tmp_path: Path) -> None:
    tracker = tracker_of(tmp_path, *REFERENCE)
    begin(tracker)
    tracker.log("train", {"step": 2, "epoch": 0.5})
    later = tracker_of(tmp_path, *REFERENCE)
    begin(later)
    epoch(later, 1, 0.9)
    keys = keys_of(tmp_path)
    assert (keys.count("run_start"), keys.count("restart"), keys.count("resume")) == (1, 1, 0)
    assert numbers_of(tmp_path, "epoch_start") == [1, 1]


def test_the_seconds_of_a_resumed_run_are_those_between_its_dates(tmp_path: Path) -> None:
    (tmp_path / "mlperf.log").write_text("STARTING TIMING RUN AT 2026-11-24 11:59:58 PM\n")
    tracker = tracker_of(tmp_path, *REFERENCE)
    begin(tracker)
    tracker.log("end", {"status": "finished", "steps": 0})
    _, end, result = (tmp_path / "mlperf.log").read_text().splitlines()[-3:]
    seconds = int(result.split(",")[3])
    assert result.endswith(",2026-11-24 11:59:58 PM")
    assert end.startswith("ENDING TIMING RUN AT 2")
    assert seconds > 3600


def test_an_evaluation_of_the_resumed_step_ends_its_block(tmp_path: Path) -> None:
    """A kill in a validation: the continued run makes up for it before its first update."""
    tracker = tracker_of(tmp_path, *REFERENCE)
    begin(tracker)
    tracker.log("train", {"step": 4, "epoch": 1.0})
    tracker.log("epoch", {"step": 4, "epoch": 1, "seconds": 2.0, "utterances_per_s": 1.0})
    later = tracker_of(tmp_path, *REFERENCE)
    begin(later)
    later.log("resume", {"step": 4})
    later.log("valid", {"step": 4, "set": "dev-clean", "seconds": 0.5, "wer": 0.5})
    epoch(later, 2, 0.5)
    later.log("end", {"status": "finished", "steps": 8})
    assert numbers_of(tmp_path, "epoch_start") == [1, 2]
    assert numbers_of(tmp_path, "eval_accuracy") == [1, 2]
    stops = [l["metadata"]["first_epoch_num"] for l in lines_of(tmp_path) if l["key"] == "block_stop"]  # noqa: E741
    assert stops == [1, 2]


def test_validations_within_an_epoch_are_in_its_block(tmp_path: Path) -> None:
    tracker = tracker_of(tmp_path, *REFERENCE)
    begin(tracker)
    for step in range(1, 7):
        tracker.log("train", {"step": step, "epoch": step / 4})
        if step == 4:
            tracker.log("epoch", {"step": 4, "epoch": 1, "seconds": 2.0, "utterances_per_s": 1.0})
        if step % 3 == 0:
            tracker.log("valid", {"step": step, "set": "dev-clean", "seconds": 0.5, "wer": 0.5})
    tracker.log("end", {"status": "finished", "steps": 6})
    keys = keys_of(tmp_path)
    block = keys[keys.index("block_start") :]
    evaluation = ["eval_start", "eval_accuracy", "eval_stop"]
    assert block == [
        *("block_start", "epoch_start", *evaluation, "epoch_stop", "throughput", "block_stop"),
        *("block_start", "epoch_start", *evaluation, "block_stop", "run_stop"),
    ]
    assert numbers_of(tmp_path, "eval_accuracy") == [1, 2]


def test_a_run_lacks_the_keys_of_what_it_lacks(tmp_path: Path) -> None:
    """Neither LAMB nor MLPerf's schedule, nor speed perturbation, nor the reference's network."""
    choices = ["model=ctc", "encoder=fastconformer_tiny", "optimizer=adamw", "data=digits", "augment=none"]
    tracker = tracker_of(tmp_path, *choices, "data.speed=null")
    begin(tracker)
    epoch(tracker, 1, None)
    keys, values = keys_of(tmp_path), values_of(tmp_path)
    assert values["submission_benchmark"] == "ctc"
    assert values["opt_name"] == "adamw"
    assert values["data_spec_augment_freq_n"] == 0
    absent = ["weights_initialization", "opt_lamb", "data_speed", "opt_learning_rate_alt", "eval_accuracy"]
    assert not [key for key in keys if key.startswith(tuple(absent))]


def test_pretraining_has_no_recogniser(tmp_path: Path) -> None:
    tracker = tracker_of(tmp_path, "model=wav2vec2_small", "data=manifest", "data.train=a.jsonl")
    begin(tracker)
    epoch(tracker, 1, None)
    keys, values = keys_of(tmp_path), values_of(tmp_path)
    assert values["submission_benchmark"] == "wav2vec2"
    absent = ["weights_initialization", "eval_max_prediction_symbols", "opt_lamb"]
    assert not [key for key in keys if key.startswith(tuple(absent))]


def test_a_figure_that_is_not_finite_is_null(tmp_path: Path) -> None:
    tracker = tracker_of(tmp_path, *REFERENCE)
    begin(tracker)
    epoch(tracker, 1, float("inf"))
    assert values_of(tmp_path)["eval_accuracy"] is None

"""Real runs: their speed and environment, and mlperf.log of a whole, a killed and a failed one."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.mllog import MLLog, golden_keys

from .conftest import INLINE, Command

UPDATES = 12  # of an epoch: 48 utterances in batches of 4
REFERENCE = {
    "optimizer": "lamb",
    "schedule": "mlperf",
    "augment": "specaugment",
    "decoder.max_symbols": "300",
    "trainer.validate_every": "null",
    "trainer.max_steps": str(2 * UPDATES),
    "tracking": "mlperf",
    "tracking.trackers.mlperf.init.submission_division": "closed",
}
DATE = r"DLL \d{4}-\d\d-\d\d \d\d:\d\d:\d\d - epoch    "
ITERATION = r"iter ( +\d+)/12 \| loss +[\d.]+ \| utts/s +\d+ \| took +[\d.]+ s \| lrate \S+e-\d\d$"
SPEED = r"[\d.e+]+ utt/s, [\d.e+]+ audio-s/s, [\d.e+]+ s/epoch, [\d.e+]+ ms/audio-s$"
DATA = ["train_samples 48", "sample_rate 16000", "n_fft 512", "mels 20", "dither 1e-05", "preemphasis 0.97"]
ENVIRONMENT = {"MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "threads", "cpus"}
CHECKER = os.environ.get("SPEECHTRAIN_MLPERF_PYTHON", "")
RULES = "training_3.0.0/closed_rnnt.yaml"


def as_reference(run: Command, *overrides: str) -> Command:
    """Give a run the keys with which the reference trains, with ``tracking=mlperf``."""
    values = dict(text.split("=", 1) for text in run.arguments)
    del values["schedule.warmup_steps"]
    values |= REFERENCE
    values |= dict(text.split("=", 1) for text in overrides)
    run.arguments = ["=".join(pair) for pair in values.items()]
    return run


@pytest.fixture
def logged(command: Callable[..., Command]) -> Callable[..., Command]:
    """``logged(name, KEY=VALUE, …)``: the tiny recipe as the reference trains."""
    return lambda name, *overrides: as_reference(command(name), *overrides)


@pytest.fixture(scope="module")
def reference_run(
    tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]
) -> tuple[Command, str]:
    """A run and its output. No test changes either."""
    run = as_reference(
        Command(tmp_path_factory.mktemp("mlperf") / "whole", environment, []),
        "tracking.trackers.console.form=full",
    )
    return run, succeed(run, *INLINE)


def succeed(run: Command, *extra: str) -> str:
    """Run the command, and return its output."""
    process = run.run(*extra)
    assert process.returncode == 0, process.stderr
    return process.stdout


def stored_environment(run: Command) -> dict[str, str]:
    about = json.loads((run.run_dir / "run.json").read_text())
    assert about["overrides"], "the rest of the file stays"
    (environment,) = about["hosts"].values()
    assert isinstance(environment, dict)
    return environment


def test_a_run_logs_the_keys_of_the_reference(reference_run: tuple[Command, str]) -> None:
    run, _ = reference_run
    log = MLLog.read(run.run_dir)
    assert log.keys == golden_keys()
    values = log.last_values
    assert (values["train_samples"], values["eval_samples"], values["global_batch_size"]) == (48, 6, 4)
    assert log.metadata("run_stop", "status") == ["success"]


def test_the_speed_of_a_run(reference_run: tuple[Command, str]) -> None:
    run, output = reference_run
    epochs = run.events("epoch")
    assert [(event["epoch"], event["step"]) for event in epochs] == [(1, UPDATES), (2, 2 * UPDATES)]
    train_s = 0.0
    for event in epochs:
        assert event["utterances_per_s"] == pytest.approx(48 / event["seconds"])
        train_s += event["seconds"]
    result = run.result()
    speed = result["speed"]
    assert speed["utterances_per_s"] == pytest.approx(96 / train_s)
    assert speed["epoch_s"] == pytest.approx(train_s / 2)
    assert train_s <= result["wall_s"]
    assert speed["decode_ms_per_audio_s"] > 0
    assert re.search(f"^end .*{SPEED}", output, re.M)
    assert re.search(f"finished at step {2 * UPDATES}, .*{SPEED}", output, re.M)


def test_the_lines_of_dll(logged: Callable[..., Command]) -> None:
    run = logged("dll", "tracking.trackers.console.form=dll")
    output = succeed(run, *INLINE)
    iterations = re.findall(rf"^{DATE}(\d) \| {ITERATION}", output, re.M)
    places = [(int(number), int(update)) for number, update in iterations]
    assert places == [(1 + step // UPDATES, 1 + step % UPDATES) for step in range(2 * UPDATES)]
    averages = re.findall(rf"^{DATE}(\d) \| avg train utts/s +\d+ \| took +[\d.]+ s$", output, re.M)
    evaluations = re.findall(rf"^{DATE}(\d) \| dev ema wer +([\d.]+) \| took +[\d.]+ s$", output, re.M)
    assert averages == [epoch for epoch, _ in evaluations] == ["1", "2"]
    percents = [100 * wer for wer in MLLog.read(run.run_dir).values("eval_accuracy")]
    assert [float(percent) for _, percent in evaluations] == pytest.approx(percents, abs=0.005)


def test_the_start_prints_the_environment_and_the_data(reference_run: tuple[Command, str]) -> None:
    _, output = reference_run
    assert re.search(r"^environment: host .*OMP_NUM_THREADS \d+.*threads 1, cpus \d+$", output, re.M)
    (line,) = re.findall("^data: .*$", output, re.M)
    for fact in (*DATA, "freq_masks 2", "speed [0.85, 1.15]"):
        assert fact in line


def test_the_first_rank_of_a_host_stores_its_environment(logged: Callable[..., Command]) -> None:
    run = logged("both", "world_size=2", "trainer.max_steps=2", "trainer.simulate_world=2")
    succeed(run)
    environment = stored_environment(run)
    assert environment.keys() >= ENVIRONMENT
    assert environment["OMP_NUM_THREADS"] == environment["threads"]
    assert int(environment["cpus"]) > 0
    assert not (run.run_dir / "ranks" / "1" / "run.json").exists(), "the second rank is on the same host"


def test_no_secret_of_the_environment_is_stored(
    logged: Callable[..., Command], environment: dict[str, str]
) -> None:
    run = logged("secret", "trainer.max_steps=1")
    run.environment = {**environment, "CCL_API_TOKEN": "hunter2", "CCL_LOG_LEVEL": "warn"}
    succeed(run)
    for path in filter(Path.is_file, run.run_dir.rglob("*")):
        assert b"hunter2" not in path.read_bytes(), path
    assert stored_environment(run)["CCL_LOG_LEVEL"] == "warn"


@pytest.mark.nightly
@pytest.mark.skipif(not CHECKER, reason="`make test-nightly` names a Python that has mlperf-logging")
def test_the_checker_of_mlperf_finds_only_what_a_tiny_run_lacks(
    logged: Callable[..., Command], tmp_path: Path
) -> None:
    """No cache was cleared, and the run knows neither LibriSpeech's evaluation set nor its target."""
    program = "import mlperf_logging.compliance_checker as package; print(package.__path__[0])"
    folder = subprocess.check_output([CHECKER, "-c", program], text=True).strip()
    if not Path(folder, RULES).is_file():
        pytest.skip(f"the wheel of mlperf-logging has no {RULES}")
    run = logged("checked")
    succeed(run)
    options = ["--usage", "training", "--ruleset", "3.0.0", "--log_output", str(tmp_path / "checker.log")]
    path = str(run.run_dir / "mlperf.log")
    line = [CHECKER, "-m", "mlperf_logging.compliance_checker", path, *options]
    process = subprocess.run(line, capture_output=True, text=True)
    report = process.stdout + process.stderr
    keys = re.findall(r"(?:occurrence of|CHECK for|Failed checks for) '?(\w+)", report)
    assert set(keys) == {"cache_clear", "eval_samples", "eval_accuracy"}, report

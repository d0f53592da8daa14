"""The parts of the package in ``examples/plugin`` train, evaluate and decode beside this project's parts.

No file of this project except this test names that package.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile

from tests.support.digits import write_sample

from .conftest import INLINE, STARTER, finish

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = ROOT / "examples" / "plugin"
QUICK = [
    "tracking=jsonl",
    "data.workers=0",
    "trainer.max_epochs=null",
    "trainer.max_steps=4",
    "trainer.validate_every=2",
    "trainer.save_every=2",
    "schedule=constant",
    "optimizer=adamw",
]
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the package by pip into a new folder."""
    source, site = tmp_path_factory.mktemp("source") / "plugin", tmp_path_factory.mktemp("site")
    shutil.copytree(PLUGIN, source)  # pip leaves a build folder in the source.
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    line = [*pip, "--no-build-isolation", "--target", str(site), str(source)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return site


@pytest.fixture
def run(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """``run("train", ...)``: a command in an environment that has the package and some recordings."""
    random = np.random.default_rng(0)
    for name in (
        "train/one_a_0",
        "train/two_a_1",
        "train/one_b_2",
        "train/two_b_3",
        "dev/one_c_0",
        "dev/two_c_1",
    ):
        path = tmp_path / "recordings" / f"{name}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(path, 0.1 * random.standard_normal(8000), 16_000)
    environment = {**os.environ, "PYTHONPATH": str(site), "DATASET_DIR": str(tmp_path / "recordings")}
    environment["SPEECHTRAIN_ALLOW_TARGETS"] = "speechtrain_example"
    monkeypatch.chdir(tmp_path)
    return lambda command, *arguments: finish(STARTER.start([*arguments], environment, command))


def test_a_model_a_device_and_a_source_of_another_package_train(run: Run, tmp_path: Path) -> None:
    chosen = ["model=linear_prediction", "device=plain_cpu", "data=named_files", "run_dir=run"]
    done = run("train", "--config-dir", str(PLUGIN / "conf"), *chosen, *QUICK)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("finished", 4)
    scored = run("evaluate", "run", "--json")
    assert scored.returncode == 0, scored.stderr
    assert json.loads(scored.stdout)["metrics"]["dev"]["loss"] == result["metrics"]["loss"]


def test_a_decoder_of_another_package_reads_a_run_of_ours(run: Run, tmp_path: Path) -> None:
    small = ["encoder=lstm_small", "encoder.hidden=16", "encoder.features.mels=8", "device.threads=1"]
    folder = ["--config-dir", str(PLUGIN / "conf")]
    done = run("train", *folder, "model=ctc", "data=named_files", *small, *QUICK, *INLINE, "run_dir=run")
    assert done.returncode == 0, done.stderr
    penalty = ["decoder=blank_penalty", "decoder.penalty=50"]
    # The same run continues for two updates with the decoder of the package.
    done = run("train", *folder, "run_dir=run", *penalty, "trainer.max_steps=6", *INLINE)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    examples = [event["rows"] for event in events if event["event"] == "examples"]
    assert all(row["hypothesis"] for row in examples[-1]), "without blanks, every frame has a label"
    write_sample(tmp_path / "a.wav")
    text = run("transcribe", "run", str(tmp_path / "a.wav"), *folder, *penalty)
    assert text.returncode == 0, text.stderr
    assert text.stdout.rpartition("\t")[2].strip()


def test_nothing_of_ours_names_the_package() -> None:
    folders = [ROOT / name for name in ("speechtrain", "conf", "launchers", "tests")]
    files = [p for folder in folders for p in folder.rglob("*") if p.suffix in (".py", ".yaml")]
    named = {p.name for p in files if "speechtrain_example" in p.read_text()}
    assert named == {Path(__file__).name}

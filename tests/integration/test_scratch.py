"""recipe=scratch: one line from a folder of recordings to a recogniser, interrupted or not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
from omegaconf import OmegaConf

from speechtrain.compute_policy import usable_cpus

from .conftest import Command, finish, wait_for

SMALL = (
    *("recipe=scratch", "device.threads=1", "device.autotune=false", "data.workers=0"),
    *("encoder.width=16", "encoder.layers=1", "encoder.feed_forward=16", "encoder.channels=8"),
    *("model.prediction.hidden=16", "model.prediction.embedding=8", "model.joint.hidden=16"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Tones in a language of two words, of which one recording has no transcript."""
    found = tmp_path / "speech"
    found.mkdir()
    for number in range(12):
        high = number % 2
        times = np.arange(8000) / 16_000
        soundfile.write(found / f"{number}.wav", 0.2 * np.sin(2 * np.pi * (300 + 900 * high) * times), 16_000)
        if number:
            (found / f"{number}.txt").write_text("ñandú" if high else "Été!")
    return found


@pytest.fixture
def scratch(folder: Path, tmp_path: Path, environment: dict[str, str]) -> Command:
    made = Command(tmp_path / "run", environment, [])
    made.arguments = [
        *SMALL,
        f"data.train={folder}",
        f"run_dir={tmp_path / 'run'}",
        "trainer.max_hours=0.001",
    ]
    return made


def test_one_line_trains_on_a_folder(scratch: Command, folder: Path) -> None:
    done = scratch.run_inline()
    assert done.returncode == 0, done.stderr
    assert "speechtrain: error" not in done.stderr
    config = OmegaConf.load(scratch.run_dir / "config.yaml")
    assert config.tokenizer.alphabet == "adntéñú"
    assert (config.data.batch.count, config.data.hold_out) == (4, 0.1)
    (start,) = scratch.events("start")
    (data,) = scratch.events("data")
    assert "encoder.subsampling=" in start["from data"]
    assert data["report"]["held out"].startswith("1 recordings")
    assert data["report"]["untranscribed"] == 1
    plan = json.loads((scratch.run_dir / "plan.json").read_text())
    assert plan["updates"] >= scratch.result()["steps"]
    last = max(scratch.events("valid"), key=lambda event: event["step"])
    assert (last["set"], last["step"]) == ("held_out", scratch.result()["steps"])
    evaluated = scratch.tool("evaluate", str(scratch.run_dir), "--json")
    assert list(json.loads(evaluated.stdout)["metrics"]) == ["held_out"]
    assert "held_out" not in evaluated.stderr
    for path in list(folder.iterdir()):
        path.rename(folder / f"other-{path.name}")
    evaluated = scratch.tool("evaluate", str(scratch.run_dir))
    assert "warning: held_out differs from the set that the run held out" in evaluated.stderr


def test_a_killed_run_keeps_its_plan(scratch: Command) -> None:
    scratch.arguments[-1] = "trainer.max_hours=0.01"
    running = scratch.start("trainer.save_every=1", "trainer.log_every=1")
    wait_for(scratch.checkpoints, running)
    running.send_signal(2)
    assert finish(running).returncode == 75
    plan = json.loads((scratch.run_dir / "plan.json").read_text())
    scratch.arguments[-1] = "trainer.max_hours=0.001"
    done = scratch.run_inline("trainer.save_every=1", "trainer.log_every=1")
    assert done.returncode == 0, done.stderr
    again = json.loads((scratch.run_dir / "plan.json").read_text())
    assert again["hours"] == 0.001
    assert again["revisions"][: len(plan["revisions"])] == plan["revisions"]
    assert "a new run would differ" not in done.stdout


@pytest.mark.skipif(len(usable_cpus()) < 2, reason="one core has one rank")
def test_two_cores_have_two_ranks(scratch: Command, folder: Path, tmp_path: Path) -> None:
    """The recipe chooses two ranks of eight recordings. One rank continues the run."""
    table = tmp_path / "thousand.jsonl"
    rows = [json.dumps({"audio_filepath": str(path), "text": "été"}) + "\n" for path in folder.glob("*.wav")]
    table.write_text("".join(rows * 84))
    skipped = ("device.threads=", "data.train=", "trainer.max_hours=")
    scratch.arguments = [key for key in scratch.arguments if not key.startswith(skipped)]
    scratch.arguments += [f"data.train={table}", "trainer.max_steps=3", "trainer.max_hours=null"]
    stopped = scratch.run()
    assert stopped.returncode == 0, stopped.stderr
    config = OmegaConf.load(scratch.run_dir / "config.yaml")
    assert (config.world_size, config.data.batch.ranks, config.data.batch.count) == (2, 2, 8)
    finished = scratch.run("world_size=1", "trainer.max_steps=6")
    assert finished.returncode == 0, finished.stderr
    for data in scratch.events("data"):
        assert data["report"]["decoded audio"] == "kept in memory"
    assert scratch.result()["steps"] == 6


def write_steps(folder: Path, count: int, with_texts: bool) -> None:
    """Write tones that rise, for the text "i", and that fall, for "o"."""
    folder.mkdir()
    for number in range(count):
        rises = number % 2
        times = np.arange(16_000 + 40 * number) / 16_000
        hertz = np.where((times < 0.5) == rises, 300, 1800)
        samples = 0.2 * np.sin(2 * np.pi * np.cumsum(hertz) / 16_000)
        soundfile.write(folder / f"{folder.name}{number}.wav", samples, 16_000)
        if with_texts:
            (folder / f"{folder.name}{number}.txt").write_text("i" if rises else "o")


def test_a_teacher_writes_texts_for_untranscribed_recordings(scratch: Command, tmp_path: Path) -> None:
    write_steps(tmp_path / "a", 24, with_texts=True)
    write_steps(tmp_path / "b", 6, with_texts=False)
    (tmp_path / "b" / "damaged.wav").write_bytes(b"RIFF")
    skipped = ("data.train=", "trainer.max_hours=")
    scratch.arguments = [key for key in scratch.arguments if not key.startswith(skipped)]
    scratch.arguments += [f"data.train={tmp_path / 'a'}", "data.hold_out=0.3", "augment=none"]
    scratch.arguments += [
        "optimizer.lr=5e-3",
        "trainer.max_steps=250",
        "trainer.validate_every=125",
        "trainer.max_hours=0.1",
    ]
    untranscribed = f"data.untranscribed={tmp_path / 'a'},{tmp_path / 'b'}"
    done = scratch.run(untranscribed)  # It starts two runs, and a rank in this process would end it.
    assert done.returncode == 0, done.stderr
    assert "damaged.wav" in done.stderr
    ledger = [json.loads(line) for line in (scratch.run_dir / "untranscribed.jsonl").read_text().splitlines()]
    assert len(ledger) == round(0.75 * 6)
    assert {Path(row["audio_filepath"]).parent.name for row in ledger} == {"b"}
    scores = [row["score"] for row in ledger]
    assert scores == sorted(scores, reverse=True)
    config = OmegaConf.load(scratch.run_dir / "config.yaml")
    assert config.data.train.untranscribed.hold_out is False
    assert config.init_from == str(scratch.run_dir / "teacher")
    assert config.trainer.max_hours < 0.1
    teacher = OmegaConf.load(scratch.run_dir / "teacher" / "config.yaml")
    assert (teacher.trainer.max_hours, teacher.data.untranscribed) == (0.025, None)
    assert "of the teacher" in done.stdout
    again = scratch.run(untranscribed)
    assert "is done" in again.stdout


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("from_data=null", "data.untranscribed is of recipe=scratch and recipe=streaming"),
        ("trainer.max_hours=null", "data.untranscribed divides trainer.max_hours"),
        ("init_from=x", "data.untranscribed begins with the weights of its teacher"),
        ("launcher=slurm", "data.untranscribed trains two runs"),
    ],
)
def test_a_config_without_a_teacher_is_refused(
    scratch: Command, folder: Path, override: str, message: str
) -> None:
    refused = scratch.run(f"data.untranscribed={folder}", override)
    assert refused.returncode == 2
    assert message in refused.stderr
    assert not scratch.run_dir.exists()

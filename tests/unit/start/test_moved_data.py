"""A run continues where its data has moved, and refuses other data in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from speechtrain.commands import evaluate, train
from speechtrain.data.sources import with_former_paths
from speechtrain.errors import DataError
from speechtrain.start.stored import read_config
from tests.support.small_training import SMALL_TRAINING, write_recordings

STEPS = 4


@pytest.fixture
def project(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with recordings in ``rec`` and ``dev``."""
    monkeypatch.chdir(tmp_path)
    write_recordings(Path("rec"), 12)
    write_recordings(Path("dev"), 3)
    return tmp_path


def start(run_dir: str, steps: int, *overrides: str) -> int:
    """Start a run on ``rec``."""
    # With autotune, two runs may choose kernels that round differently.
    exact = ("device.autotune=false", "data.batch.count=2", f"trainer.max_steps={steps}", "schedule.steps=9")
    return train.run(
        [*SMALL_TRAINING, "tracking=jsonl", "data.train=rec", *exact, f"run_dir={run_dir}", *overrides]
    )


def resume(run_dir: str, *overrides: str) -> int:
    return train.run([run_dir, f"trainer.max_steps={STEPS}", *overrides])


def outcome(run_dir: str) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Return the losses and metrics of the steps after the second one, and the last weights."""
    rows = []
    for line in Path(run_dir, "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row.get("step", 0) > 2:
            rows.append({key: row[key] for key in ("step", "loss", "wer", "cer") if key in row})
    (*_, last) = sorted(Path(run_dir, "checkpoints").glob("*/model.safetensors"))
    return rows, load_file(last)


def assert_equal(first: str, second: str) -> None:
    (losses, weights), (other_losses, other_weights) = outcome(first), outcome(second)
    assert weights.keys() == other_weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, other_weights[name]), name
    assert losses == other_losses
    assert len(losses) >= STEPS - 2


@pytest.mark.slow
def test_a_run_continues_bit_exactly_where_its_data_has_moved(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start("undisturbed", STEPS) == 0
    assert start("moving", 2) == 0
    new_place = project / "scratch disk (2)" / "corpus-copy"
    shutil.copytree("rec", new_place)
    shutil.copytree("moving", "other")
    assert resume("moving", f"data.train={new_place}") == 0  # The old place exists.
    assert_equal("undisturbed", "moving")
    shutil.rmtree("rec")
    capsys.readouterr()
    with pytest.raises(DataError, match=r"rec does not exist.* data\.train=NEW_PLACE"):
        resume("other")
    assert resume("other", f"data.train={new_place}") == 0  # The old place is gone.
    assert_equal("undisturbed", "other")

    # The ids and the held-out recordings stay, also after another move.
    source = {"path": str(new_place), "moved_from": str(project / "rec")}
    assert read_config(Path("other")).data.train == source
    utterances = evaluated("other")
    assert all(utterance["id"].startswith("rec/") for utterance in utterances)
    shutil.move(new_place, "third")
    assert evaluated("undisturbed", "data.train=third") == utterances

    # The place of the first start counts again if the data is back.
    shutil.move("third", "rec")
    assert start("other", STEPS + 1) == 0
    assert read_config(Path("other")).data.train == str(project / "rec")


def evaluated(run_dir: str, *overrides: str) -> list[Any]:
    """Return the utterances of an evaluation of a run on the recordings that it holds out."""
    assert evaluate.run([run_dir, "--checkpoint", "last", "--out", "utterances", *overrides]) == 0
    files = sorted(Path("utterances").rglob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


MOVED = {"path": "/b", "moved_from": "/a"}


@pytest.mark.parametrize(
    ("spec", "former", "moved"),
    [
        ("/b", "/a", MOVED),
        ("/a", MOVED, "/a"),
        (
            "/c",
            {"path": "/b", "moved_from": "/a", "text": "t"},
            {"path": "/c", "moved_from": "/a", "text": "t"},
        ),
        ("/b,/d", "/a,/c", [MOVED, {"path": "/d", "moved_from": "/c"}]),
        (
            {"x": "/b", "y": "/c"},
            {"x": "/a", "y": "/c"},
            {"x": {"path": "/b", "moved_from": "/a"}, "y": "/c"},
        ),
        ({"path": "/b", "text": "t"}, "/a", None),
        ("/b", {"_target_": "speechtrain.data.corpora.digits.Digits"}, None),
    ],
)
def test_data_has_moved_if_only_paths_differ(spec: Any, former: Any, moved: Any) -> None:
    assert with_former_paths(spec, former) == moved

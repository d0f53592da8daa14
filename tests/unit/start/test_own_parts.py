"""Mistakes in a user's own parts end a run before its first update, with the file, line and class first."""

from __future__ import annotations

import copy
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from speechtrain.commands import train
from speechtrain.commands._cli import exit_code_of
from speechtrain.errors import ConfigError
from speechtrain.rank.build import build_task
from speechtrain.rank.contract import check_contract
from speechtrain.run_directory import RunResult, git_output
from speechtrain.start.build import build_data
from speechtrain.start.run_config import run_config
from speechtrain.start.targets import ALLOW_TARGETS
from speechtrain.study.objectives import Objective, check_direction
from tests.support.composed import composed
from tests.support.small_training import SMALL_TRAINING, write_recordings

Capsys = pytest.CaptureFixture[str]
Train = Callable[..., str]
_UNUSED = ("model=rnnt", "encoder.hidden", "model.", "decoder.")
_TRAINING = [override for override in SMALL_TRAINING if not override.startswith(_UNUSED)]

_MODULE = """
import itertools

import numpy as np
import torch
from torch import nn

from speechtrain.encoders.base import Encoder, LogMelEncoder
from speechtrain.models.ctc import CTC
from speechtrain.task import Evaluation


COSINES = itertools.count()


class Tiny(LogMelEncoder):
    def __init__(self, features, augment, width: int = 16) -> None:
        super().__init__(features, augment)
        self.width = width
        self.layer = nn.Linear(features.features, width)

    def forward(self, batch):
        frames, lengths = self.augmented(batch)
        frames = self.layer(frames)
        return frames, lengths

    def frames(self, samples):
        return self.features.frames(samples)

    def activation_bytes(self):
        return 1e4


class Own(CTC):
    def losses(self, encoded, lengths, batch):
        loss, terms = super().losses(encoded, lengths, batch)
        return loss, terms

    def evaluate(self, batch, decoder):
        evaluation = super().evaluate(batch, decoder)
        evaluation.metrics["cosine"] = (torch.tensor(float(next(COSINES))), torch.tensor(1.0))
        return evaluation
"""
_RETURN = "return frames, lengths"
_LOSSES = "return loss, terms"
_EVALUATION = "return evaluation"
MISTAKES = {
    "syntax": ("evaluation = super()", "evaluation = super(.", ":40: SyntaxError: "),
    "no super().__init__": ("super().__init__(features, augment)", "pass", " in Tiny.__init__: "),
    "width": ("self.width = width", "self.width = width + 1", " in Tiny: "),
    "lengths halved": (_RETURN, "return frames, lengths // 2", " in Tiny: "),
    "no new lengths": (_RETURN, "return frames[:, ::2], lengths", " in Tiny: "),
    "float lengths": (_RETURN, "return frames, lengths.float()", " in Tiny: "),
    "nothing returned": (_RETURN, "pass", " in Tiny: "),
    "error in evaluate": (_EVALUATION, "return batch.ids[99]", ":42 in Own.evaluate: IndexError: "),
    "float metric": (_LOSSES, "return loss, {'mine': 0.5}", " in Own: "),
    "detached": (_LOSSES, "return loss.detach(), terms", " in Own: "),
    "numpy noise": (_LOSSES, "return loss * np.random.rand(), terms", " in Own: "),
    "labels changed": (_LOSSES, "batch.labels.add_(1); return loss, terms", " in Own: "),
    "direction": ("class Own(CTC):", "class Own(CTC):\n    metric = 'cosine'\n", " in Own: "),
    "no such metric": ("class Own(CTC):", "class Own(CTC):\n    metric = 'mine'\n", " in Own: "),
}
"""The text of the module, its replacement, and a part of the error after ``tiny.py`` and the line."""


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recordings")
    write_recordings(folder, 8)
    return folder


_CHOICES = {
    "encoder/tiny.yaml": "defaults: [_logmel, _self_]\n_target_: mine.tiny.Tiny\nwidth: 16\n",
    "model/own.yaml": "_target_: mine.tiny.Own\ndropout: 0.1\n",
}


@pytest.fixture
def train_own(tmp_path: Path, recordings: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> Train:
    """Return ``train_own(source, *overrides)``, which trains two updates with the parts in ``source``.

    It returns the line of the error, or "" if the run ends normally.
    """
    monkeypatch.setenv(ALLOW_TARGETS, "mine")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # The trace of an error may be there.

    def train_own(source: str, *overrides: str) -> str:
        for name, text in {**_CHOICES, "mine/__init__.py": "", "mine/tiny.py": source}.items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        for name in ("mine", "mine.tiny"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        arguments = ["--config-dir", str(tmp_path), "model=own", "encoder=tiny", f"data.train={recordings}"]
        arguments += ["device.autotune=false", f"run_dir={tmp_path / 'run'}", *_TRAINING, *overrides]
        code = exit_code_of(lambda: train.run(arguments))
        lines = capsys.readouterr().err.splitlines()
        assert bool(code) == any("error: " in line for line in lines), lines
        return lines[-1].partition("error: ")[2] if code else ""

    return train_own


def test_right_own_parts_train(train_own: Train) -> None:
    assert train_own(_MODULE) == ""


@pytest.mark.parametrize("mode", ["min", "max"])
def test_an_own_metric_chooses_the_best_checkpoint(mode: str, train_own: Train, tmp_path: Path) -> None:
    head = f"class Own(CTC):\n    metric, metric_mode = 'cosine', '{mode}'\n"
    overrides = ["trainer.max_steps=3", "trainer.validate_every=1", "trainer.save_every=1"]
    assert train_own(_MODULE.replace("class Own(CTC):\n", head), *overrides) == ""
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["checkpoint"] == ("step-00000003" if mode == "max" else "step-00000001")
    assert result["metric_mode"] == mode


def test_an_unused_parameter_of_several_ranks_is_named(tmp_path: Path) -> None:
    write_recordings(tmp_path, 8)
    config = composed("model=ctc", f"data.train={tmp_path}", *_TRAINING, "tokenizer=characters")
    config.run_dir = str(tmp_path)
    task, tokenizer = build_task(run_config(config))
    data = build_data(run_config(config), tokenizer, task)
    check_contract(task, data, lambda batch: batch, ranks=2)
    assert all(parameter.grad is None for parameter in task.parameters())
    task.encoder.spare = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=r"encoder.spare.bias\. .*skips_parameters = True"):
        check_contract(task, data, lambda batch: batch, ranks=2)
    task.skips_parameters = True
    check_contract(task, data, lambda batch: batch, ranks=2)


def test_the_losses_are_the_same_without_the_check(
    train_own: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ["trainer.max_steps=4", "trainer.validate_every=2", "tracking=jsonl"]
    losses = []
    for name in ("checked", "unchecked"):
        assert train_own(_MODULE, *overrides, f"run_dir={tmp_path / name}") == ""
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        losses.append([row["loss"] for row in rows if row["event"] in ("train", "valid")])
        monkeypatch.setattr("speechtrain.rank.main.check_contract", lambda *arguments: None)
    assert len(losses[0]) == 6
    assert losses[0] == losses[1]


def test_a_skipped_update_names_the_recording_and_the_term(
    train_own: Train, tmp_path: Path, recordings: Path
) -> None:
    mistake = """
        for row, name in enumerate(batch.ids):
            if name.endswith("3") and self.training and loss.requires_grad:
                loss = loss + torch.where(torch.arange(len(loss)) == row, torch.nan, 0.0)
        return loss, {"mine": (loss.sum(), batch.weight.sum())}"""
    source = _MODULE.replace(f"        {_LOSSES}", mistake)
    train_own(source, "data.hold_out=0", "data.valid={}", "data.batch.count=8", "tracking=jsonl")
    log = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert re.search(r"skipped: non-finite loss or gradient: the term mine, the loss of '[^']*3'\"", log), log


def test_check_direction_refuses_to_minimise_an_accuracy() -> None:
    result = RunResult("finished", 0.5, {"accuracy": 0.5}, metric_mode="max")
    check_direction([Objective("metric", "maximize"), Objective("wall_s")], result)
    with pytest.raises(ConfigError, match="Set direction: maximize"):
        check_direction([Objective("metric")], result)


def test_a_class_without_the_interface_is_shown_what_it_lacks(train_own: Train) -> None:
    error = train_own(_MODULE.replace("class Tiny(LogMelEncoder)", "class Tiny(nn.Module)"))
    fix = "Inherit from speechtrain.encoders.base.Encoder and write activation_bytes, forward, frames"
    assert f"mine.tiny.Tiny does not implement Encoder. {fix}" in error
    error = train_own(_MODULE.replace("def frames(", "def frame_count("))
    assert "mine.tiny.Tiny is abstract. It lacks frames." in error


def test_options_of_a_constructor_are_the_keys_of_its_parent(train_own: Train, tmp_path: Path) -> None:
    head = """class Own(CTC):
    def __init__(self, factor: float = 1.0, **options):
        super().__init__(**options)
        assert self.encoder_lr_scale == 0.5
"""
    source = _MODULE.replace("class Own(CTC):\n", head)
    assert train_own(source, "+model.dropuot=1").startswith(
        "model.dropuot: Own takes no 'dropuot'; did you mean 'dropout'?"
    )
    mode = _MODULE.replace("class Own(CTC):\n", head.replace("factor: float = 1.0", "mode='a'"))
    assert train_own(mode, "+model.encoder_lr_scale=0.5", "+model.mode=nan").startswith(
        "model.mode: nan is no value that a run stores"
    )
    assert "model.dropout: 'x' is not a finite number" in train_own(source, "model.dropout=x")
    assert train_own(source, "+model.encoder_lr_scale=0.5", "+model.factor=2") == ""


def test_check_contract_leaves_weights_and_generators(tmp_path: Path) -> None:
    write_recordings(tmp_path, 8)
    overrides = ["model=ctc", "encoder=fastconformer_tiny", f"data.train={tmp_path}", *_TRAINING]
    config = composed(*overrides, "tokenizer=characters")
    config.run_dir = str(tmp_path)
    task, tokenizer = build_task(run_config(config))
    data = build_data(run_config(config), tokenizer, task)
    state = copy.deepcopy({**task.state_dict(), "generator": torch.get_rng_state()})
    data_state = copy.deepcopy(data.state_dict())
    assert any("running_mean" in name for name in state)
    check_contract(task, data, move=lambda batch: batch)
    for name, tensor in {**task.state_dict(), "generator": torch.get_rng_state()}.items():
        assert torch.equal(tensor, state[name]), name
    assert all(parameter.grad is None for parameter in task.parameters())
    assert str(data.state_dict()) == str(data_state)


def test_a_run_stores_its_own_code_and_refuses_changed_code(train_own: Train, tmp_path: Path) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/tiny.py").write_text("# The first commit\n")
    for arguments in (["init", "-q"], ["add", "mine"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *arguments], cwd=tmp_path, check=True)
    assert train_own(_MODULE) == ""
    about = json.loads((tmp_path / "run/run.json").read_text())
    part = about["parts"]["mine.tiny"]
    assert part["file"] == str(tmp_path / "mine/tiny.py")
    assert part["sha256"] == hashlib.sha256(_MODULE.encode()).hexdigest()
    assert part["dirty"]
    assert "-# The first commit" in part["diff"]
    assert part["commit"] == about["folder_commit"] == git_output(tmp_path, "rev-parse", "HEAD")
    assert about["versions"]["pytest"] == pytest.__version__
    (copy,) = (tmp_path / "run/parts").iterdir()
    assert copy.read_text() == _MODULE

    changed = _MODULE.replace("return loss, terms", "return 3 * loss, terms")
    error = train_own(changed, "trainer.max_steps=3")
    assert error.startswith(f"{tmp_path / 'mine/tiny.py'} has changed since {tmp_path / 'run'} started")
    assert "accept_code=true" in error
    assert train_own(_MODULE, "trainer.max_steps=3") == ""
    assert train_own(changed, "trainer.max_steps=4", "accept_code=true") == ""
    assert train_own(changed, "trainer.max_steps=5") == ""
    assert len(list((tmp_path / "run/parts").iterdir())) == 2


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_an_own_part_names_its_file_line_and_class(name: str, train_own: Train) -> None:
    correct, mistake, expected = MISTAKES[name]
    assert _MODULE.count(correct) == 1
    error = train_own(_MODULE.replace(correct, mistake))
    assert error.startswith("mine/tiny.py:")
    assert expected in error

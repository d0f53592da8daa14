"""Mistakes in a user's own parts end a run with the file, line and class first."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from speechtrain.commands import train
from speechtrain.commands._cli import exit_code_of
from speechtrain.config.targets import ALLOW_TARGETS
from tests.support.small_training import SMALL_TRAINING, write_recordings

Capsys = pytest.CaptureFixture[str]
Train = Callable[..., str]
_UNUSED = ("model=rnnt", "encoder.hidden", "model.", "decoder.")
_TRAINING = [override for override in SMALL_TRAINING if not override.startswith(_UNUSED)]

_MODULE = """
from torch import nn

from speechtrain.encoders.base import LogMelEncoder
from speechtrain.models.ctc import CTC


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

    def evaluate(self, batch):
        evaluation = super().evaluate(batch)
        return evaluation
"""
_EVALUATION = "return evaluation"
MISTAKES = {
    "syntax": ("evaluation = super()", "evaluation = super(.", ":32: SyntaxError: "),
    "no super().__init__": ("super().__init__(features, augment)", "pass", " in Tiny.__init__: "),
    "shape": ("nn.Linear(features.features, ", "nn.Linear(1 + features.features, ", " in Tiny.forward: "),
    "error in evaluate": (_EVALUATION, "return batch.ids[99]", ":33 in Own.evaluate: IndexError: "),
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


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_an_own_part_names_its_file_line_and_class(name: str, train_own: Train) -> None:
    correct, mistake, expected = MISTAKES[name]
    assert _MODULE.count(correct) == 1
    error = train_own(_MODULE.replace(correct, mistake))
    assert error.startswith("mine/tiny.py:")
    assert expected in error

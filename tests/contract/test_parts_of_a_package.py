"""The contract suite over a package outside this repository: it passes a right encoder and no wrong one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

_MODULE = """
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from speechtrain.encoders.base import LogMelEncoder


class Bidirectional(LogMelEncoder):
    def __init__(self, features, augment, width: int = 48, packed: bool = True, factor: int = 1) -> None:
        super().__init__(features, augment)
        self.gru = nn.GRU(features.features, width // 2, bidirectional=True, batch_first=True)
        self.width, self.packed, self.factor = width, packed, factor

    def forward(self, batch):
        frames, lengths = self.augmented(batch)
        if self.packed:
            frames = pack_padded_sequence(frames, lengths.cpu(), batch_first=True, enforce_sorted=False)
        frames, _ = self.gru(frames)
        return (pad_packed_sequence(frames, batch_first=True)[0] if self.packed else frames), lengths

    def frames(self, samples: int) -> int:
        return self.factor * self.features.frames(samples)

    def activation_bytes(self) -> float:
        return 1e6
"""
_CHOICE = """
defaults: [_logmel, _self_]
_target_: outside.Bidirectional
width: 48
packed: {packed}
factor: {factor}
"""
_SUITE = Path(__file__).with_name("test_every_choice.py")


def test_an_encoder_of_another_package_that_reads_padding_or_doubles_frames_fails(tmp_path: Path) -> None:
    folder = tmp_path / "conf" / "encoder"
    folder.mkdir(parents=True)
    (tmp_path / "outside.py").write_text(_MODULE)
    for choice, packed, factor in (("right", "true", 1), ("padding", "false", 1), ("doubled", "true", 2)):
        (folder / f"{choice}.yaml").write_text(_CHOICE.format(packed=packed, factor=factor))
    process = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rpf", "-p", "no:cacheprovider", str(_SUITE)],
        cwd=tmp_path,
        env={**os.environ, "SPEECHTRAIN_PARTS": "conf"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    verdicts = re.findall(r"^(PASSED|FAILED) \S*::(\w+)\[(?:encoder-)?(\w+)\]", process.stdout, re.MULTILINE)
    failed = {(name, choice) for verdict, name, choice in verdicts if verdict == "FAILED"}
    name = "test_an_encoder_reads_no_padding_and_predicts_its_frames"
    # CTC gets the frames of ``Encoder.frames``, so it refuses the frames of the doubled encoder, too.
    expected = {(name, "padding"), (name, "doubled"), ("test_network_learns_and_evaluates", "doubled")}
    assert failed == expected, process.stdout
    assert {choice for verdict, test, choice in verdicts if test == name} == {"right", "padding", "doubled"}
    assert "the frames of a row depend on its padding" in process.stdout
    assert "but frames() says" in process.stdout

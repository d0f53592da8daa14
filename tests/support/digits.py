"""Writes the embedded corpus as files, for tests of manifests and of recordings."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import soundfile

from speechtrain.commands.prepare import convert_to_files
from speechtrain.data.corpora.connected import SAMPLE_RATE
from speechtrain.data.corpora.digits import Digits


def write_digits(folder: Path, train: int, valid: int) -> None:
    """Write ``train.jsonl`` and ``valid.jsonl`` with that many utterances, and their recordings."""
    options = Namespace(out=folder, format="wav", rate=SAMPLE_RATE, jobs=2)
    for split, utterances in (("train", train), ("valid", valid)):
        assert convert_to_files(Digits(split, utterances), options) == 0
        (folder / "cuts.jsonl").rename(folder / f"{split}.jsonl")


def write_sample(path: Path) -> str:
    """Write the first utterance of the validation set as WAV and return its transcript."""
    source = Digits("valid", 1)
    utterance = source.all_utterances()[0]
    soundfile.write(path, utterance.audio(source.clips), SAMPLE_RATE, subtype="PCM_16")
    return utterance.text

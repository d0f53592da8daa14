"""speechtrain-prepare corpus=NAME: each corpus as it lies on the disk, to manifests, to a WER."""

from __future__ import annotations

import gzip
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import yaml

from speechtrain.commands import evaluate, prepare, train
from speechtrain.commands._cli import guarded
from speechtrain.data.corpora.recipes import confined
from speechtrain.errors import ConfigError, DataError

from .corpora import CORPORA, librilight, librispeech, mini_librispeech, said, switchboard, write

CONF = Path(__file__).resolve().parents[3] / "conf" / "corpus"
MORE = {"librilight": ["parts=small"]}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DATASET_DIR", raising=False)


def cuts(path: Path | str) -> dict[str, dict]:
    read = [json.loads(line) for line in gzip.decompress(Path(path).read_bytes()).splitlines()]
    found = {cut["id"]: cut for cut in read}
    assert len(found) == len(read)
    return found


def test_every_corpus_has_a_test() -> None:
    assert {path.stem for path in CONF.glob("*.yaml")} == set(CORPORA)


@pytest.mark.parametrize("name", CORPORA)
def test_a_corpus_as_it_lies_on_the_disk_is_scored(
    name: str, run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = CORPORA[name](tmp_path / "root")
    assert prepare.run([f"corpus={name}", "root=root", "out=out", *MORE.get(name, [])]) == 0
    command = capsys.readouterr().out.splitlines()[-1]
    for part, texts in expected.items():
        found = cuts(f"out/{part}.jsonl.gz")
        assert {key: cut["supervisions"][0].get("text", "") for key, cut in found.items()} == texts
        for cut in found.values():
            assert Path(cut["recording"]["sources"][0]["source"]).is_absolute()
            assert 0.2 < cut["duration"] < 4
    assert sorted(path.name for path in Path("out").glob("*.gz")) == sorted(
        f"{part}.jsonl.gz" for part in expected
    )
    trained = [
        part for part in yaml.safe_load((CONF / f"{name}.yaml").read_text())["train"] if part in expected
    ]
    typed = shlex.split(command.removeprefix("train with: speechtrain-train "))
    assert "data.train=" + ",".join(str(tmp_path / f"out/{part}.jsonl.gz") for part in trained) in typed
    assert train.run([*typed, "--cfg", "job"]) == 0  # what it says can be typed
    capsys.readouterr()
    sets = [f"--set={part}={tmp_path}/out/{part}.jsonl.gz" for part in expected]
    assert evaluate.run([str(run_dir), "device.threads=1", "--json", *sets]) == 0
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    for part in expected:
        assert metrics[part]["utterances"] == len(expected[part]) if "utterances" in metrics[part] else True
        assert "wer" in metrics[part]

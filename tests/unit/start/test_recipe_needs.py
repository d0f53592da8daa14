"""Tests of the lines about a missing corpus or tokenizer, with its size and the command that makes it."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest

from speechtrain.commands import prepare, train
from speechtrain.commands._cli import exit_code_of
from speechtrain.start.build import build_data, dry_build
from speechtrain.start.compose import compose
from speechtrain.start.recipe_needs import config_for_plan, needs_of
from speechtrain.start.run_config import part_of, run_config
from tests.support.corpora import librispeech

pytestmark = pytest.mark.slow

DRY = "dry_run=true"
PREPARE = "speechtrain prepare corpus=librispeech download=true parts="
PARTS = ("train-clean-100", "train-clean-360", "train-other-500", "dev-clean")
SIZES = "train-clean-100 (6.4 GB), train-clean-360 (23.1 GB), train-other-500 (30.6 GB), dev-clean (0.4 GB)"
UNSET = "in DATASET_DIR, which is not set (export DATASET_DIR=FOLDER)"
SUBWORDS = "tokenizers.tokenizer.model={kind: unigram, size: 18}"  # The corpus is too small for more pieces.
SMALL_TRAINING = (
    *("device.threads=1", "device.autotune=false", "data.workers=0", "augment=none", "world_size=1"),
    *("encoder.hidden=16", "encoder.pre_layers=1", "encoder.post_layers=1"),
    *("model.prediction.hidden=16", "model.prediction.embedding=8", "model.joint.hidden=16"),
    *("trainer.max_steps=1", "trainer.simulate_world=1", "trainer.max_epochs=null", "data.batch.count=2"),
    "decoder.max_symbols=20",
)


@pytest.fixture(autouse=True)
def _empty_working_folder(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DATASET_DIR", raising=False)


def start(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, list[str]]:
    """Return the exit code of a training command, its output, and its lines on stderr.

    The lines about micro-batches and replaced sets, which have tests of their own, are left out.
    """
    code = exit_code_of(lambda: train.run(list(argv)))
    out, err = capsys.readouterr()
    others = (
        "speechtrain: trainer.simulate_world=",
        "speechtrain: the sets of this command replace data.valid",
    )
    return code, out, [line for line in err.splitlines() if not line.startswith(others)]


def test_a_plan_without_data_names_the_corpus_and_the_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, plan, lines = start(capsys, "recipe=mlperf", DRY)
    command = PREPARE + ",".join(PARTS)
    corpus = f"speechtrain: needs LibriSpeech {SIZES} {UNSET}: {command}"
    tokenizer = f"speechtrain: needs the tokenizer manifests/librispeech/tokenizer.model {UNSET}: {command}"
    assert (code, lines) == (0, [corpus, tokenizer])
    assert "model: ${oc.env:DATASET_DIR,''}/manifests/librispeech/tokenizer.model\n" in plan
    assert "speechtrain.rank" in plan
    code, plan, lines = start(capsys, "recipe=mlperf")
    assert (code, plan, lines[:2]) == (3, "", [corpus, tokenizer])
    assert lines[2].startswith("speechtrain: error: ")
    assert list(tmp_path.iterdir()) == []


def test_a_plan_has_the_size_of_the_network_with_its_tokenizer() -> None:
    config = compose(["recipe=mlperf", "run_dir=r", DRY])
    assert part_of(config_for_plan(config), "tokenizer").build().size == 1024
    assert dry_build(run_config(config_for_plan(config))).rank_bytes > 49_000_000 * 4 * 4


def test_parts_that_are_unpacked_are_not_downloaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATASET_DIR", str(tmp_path))
    librispeech(tmp_path)
    path = tmp_path / "manifests" / "librispeech" / "dev-clean.jsonl.gz"
    _, _, lines = start(capsys, "data=manifest", f"data.train={path}", DRY)
    command = "speechtrain prepare corpus=librispeech parts=dev-clean"
    assert lines == [f"speechtrain: needs LibriSpeech dev-clean (0.4 GB) in DATASET_DIR: {command}"]


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["recipe=scratch"], ["recordings: add data.train=FOLDER_OR_MANIFEST (docs/data.md)"]),
        (
            ["recipe=finetune"],
            [
                "recordings: add data.train=FOLDER_OR_MANIFEST (docs/data.md)",
                "weights to begin with: add init_from=RUN or init_from=hf:NAME",
            ],
        ),
        (
            ["tokenizer=sentencepiece"],
            [
                "a tokenizer: speechtrain prepare tokenizer SOURCE --kind unigram --size 1023 --normaliser "
                "lower --out FILE.model, then add tokenizer.model=FILE.model"
            ],
        ),
    ],
)
def test_a_key_without_a_value_has_a_line_with_the_fix(
    argv: list[str], parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"speechtrain: needs {part}" for part in parts]
    code, plan, shown = start(capsys, *argv, DRY)
    assert (code, shown) == (0, lines)
    placeholder = "model: FILE.model" if "tokenizer" in argv[0] else "train: FOLDER_OR_MANIFEST"
    assert placeholder in plan
    code, plan, shown = start(capsys, *argv)
    # If the recordings are missing, a start does not check init_from. Its last line is the error.
    assert (code, plan, shown[:-1]) == (3, "", lines[:1])
    assert list(tmp_path.iterdir()) == []


def test_explicit_recordings_replace_the_corpus_of_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    files = ["data.train=a.jsonl", "data.valid=b.jsonl", "tokenizer=characters"]
    code, _, lines = start(capsys, "recipe=mlperf", *files, DRY)
    assert (code, lines) == (0, [])
    code, _, lines = start(capsys, "recipe=mlperf", "data=digits", "tokenizer=characters", DRY)
    assert (code, lines) == (0, [])
    _, _, lines = start(capsys, "recipe=mlperf", *files[:2], DRY)
    assert f"tokenizer {os.getcwd()}/a.jsonl --kind unigram --size 1023 --normaliser english" in lines[0]
    assert lines[0].endswith("--out FILE.model, then add tokenizer.model=FILE.model")
    config = compose(["recipe=wav2vec2", "run_dir=r"])
    assert build_data(run_config(config), part_of(config, "tokenizer").build()).training_set.hold_out == 0.01
    config = compose(["recipe=wav2vec2", "run_dir=r", "data.train=a.tsv", "++data.valid.dev=b.tsv"])
    assert build_data(run_config(config), part_of(config, "tokenizer").build()).training_set.hold_out == 0.0
    assert needs_of(config) == []


def test_the_printed_command_makes_the_missing_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The corpus is unpacked. The command writes manifests and tokenizer where the recipe reads them."""
    monkeypatch.setenv("DATASET_DIR", str(tmp_path / "corpora"))
    librispeech(tmp_path / "corpora", PARTS)
    _, _, lines = start(capsys, "recipe=mlperf", DRY)
    program, command, *words = shlex.split(lines[0].rpartition(": ")[2])
    assert (program, command, "download=true" in words) == ("speechtrain", "prepare", False)
    assert prepare.run([*words, SUBWORDS]) == 0
    out = capsys.readouterr().out
    folder = tmp_path / "corpora" / "manifests" / "librispeech"
    assert f"{folder}/bpe1024.model is not written: tokenizer: 1024 pieces are too many" in out
    assert out.splitlines()[-1].startswith("train with: speechtrain train recipe=scratch data.train=")
    config = compose(["recipe=mlperf", "run_dir=r"])
    assert part_of(config, "tokenizer").build().size == 19
    assert needs_of(config) == []
    code, _, lines = start(capsys, "recipe=mlperf", DRY)
    assert (code, lines) == (0, [])
    assert prepare.run([*words, SUBWORDS]) == 0
    out = capsys.readouterr().out
    assert f"{folder}/tokenizer.model is there already. Delete it to train it again" in out


def test_a_prepared_recipe_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATASET_DIR", str(tmp_path / "corpora"))
    librispeech(tmp_path / "corpora", PARTS)
    assert prepare.run(["corpus=librispeech", SUBWORDS]) == 0
    assert train.run(["recipe=mlperf", *SMALL_TRAINING, "run_dir=run"]) == 0
    result = json.loads(Path("run/result.json").read_text())
    assert result["metrics"]["dev-clean/wer"] >= 0

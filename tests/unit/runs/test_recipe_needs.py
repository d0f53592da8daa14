"""Tests of the lines about a missing corpus or tokenizer, with its size and the command that makes it."""

from __future__ import annotations

import gzip
import json
import os
import shlex
from pathlib import Path

import pytest

from speechtrain.commands import doctor, prepare, train
from speechtrain.commands._cli import exit_code_of
from speechtrain.config.build import build_data, build_tokenizer, dry_build
from speechtrain.runs.compose import compose
from speechtrain.runs.recipe_needs import config_for_plan, needs_of
from tests.support.corpora import common_voice, librispeech, said

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
    assert "speechtrain.train_rank" in plan
    code, plan, lines = start(capsys, "recipe=mlperf")
    assert (code, plan, lines[:2]) == (3, "", [corpus, tokenizer])
    assert lines[2].startswith("speechtrain: error: ")
    assert list(tmp_path.iterdir()) == []


def test_a_line_has_no_hint_to_set_dataset_dir_if_it_is_set(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATASET_DIR", "corpora")
    code, _, lines = start(capsys, "recipe=wav2vec2", DRY)
    sizes, parts = SIZES.rpartition(", ")[0], ",".join(PARTS[:3])
    assert (code, lines) == (0, [f"speechtrain: needs LibriSpeech {sizes} in DATASET_DIR: {PREPARE}{parts}"])


def test_a_plan_has_the_size_of_the_network_with_its_tokenizer() -> None:
    config = compose(["recipe=mlperf", "run_dir=r", DRY])
    assert build_tokenizer(config_for_plan(config)).size == 1024
    assert dry_build(config_for_plan(config)) > 49_000_000 * 4 * 4


def test_parts_that_are_unpacked_are_not_downloaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATASET_DIR", str(tmp_path))
    librispeech(tmp_path)
    path = tmp_path / "manifests" / "librispeech" / "dev-clean.jsonl.gz"
    _, _, lines = start(capsys, "data=manifest", f"data.train={path}", DRY)
    command = "speechtrain prepare corpus=librispeech parts=dev-clean"
    assert lines == [f"speechtrain: needs LibriSpeech dev-clean (0.4 GB) in DATASET_DIR: {command}"]


def test_a_corpus_without_a_download_names_its_page(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATASET_DIR", "/corpora")
    folder = "/corpora/manifests/common_voice"
    files = [f"data.train={folder}/train.jsonl.gz", f"data.valid={folder}/dev.jsonl.gz"]
    model = f"tokenizer.model={folder}/tokenizer.model"
    code, _, lines = start(capsys, "data=manifest", *files, "tokenizer=sentencepiece", model, DRY)
    command = "speechtrain prepare corpus=common_voice parts=train,dev"
    page = "https://commonvoice.mozilla.org/datasets"
    assert (code, lines) == (
        0,
        [
            f"speechtrain: needs Common Voice train, dev in DATASET_DIR, from {page}: {command}",
            "speechtrain: needs the tokenizer manifests/common_voice/tokenizer.model in DATASET_DIR: "
            + command,
        ],
    )


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


def test_an_explicit_length_replaces_the_hours_in_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    code, plan, _ = start(capsys, "recipe=scratch", "trainer.max_steps=7", DRY)
    assert (code, "max_hours: null" in plan) == (0, True)


def test_fine_tuning_without_weights_is_planned_and_not_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text("")
    argv = ["recipe=finetune", f"data.train={tmp_path / 'a.jsonl'}"]
    code, _, lines = start(capsys, *argv, DRY)
    assert (code, lines) == (
        0,
        ["speechtrain: needs weights to begin with: add init_from=RUN or init_from=hf:NAME"],
    )
    code, _, lines = start(capsys, *argv)
    assert (code, len(lines), "add init_from=RUN" in lines[0]) == (2, 1, True)


@pytest.mark.parametrize("recipe", ["fsdd", "wav2vec2_fsdd"])
def test_a_corpus_of_its_own_class_is_named_in_a_plan(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, plan, lines = start(capsys, f"recipe={recipe}", DRY)
    assert (code, len(lines)) == (0, 1)
    assert lines[0].startswith(f"speechtrain: needs recordings: {os.getcwd()}/fsdd has no recordings")
    assert "set root or DATASET_DIR to that folder" in lines[0]
    assert "_target_: speechtrain.data.corpora.fsdd.Fsdd" in plan
    code, _, lines = start(capsys, f"recipe={recipe}")
    assert (code, len(lines)) == (3, 1)


def test_the_hosts_of_a_cluster_may_have_a_corpus_but_not_the_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATASET_DIR", "/lustre")
    monkeypatch.setenv("PATH", str(tmp_path))
    code, plan, lines = start(capsys, "recipe=mlperf", "launcher=slurm", DRY)
    assert (code, "sbatch" in plan) == (0, True)
    assert lines[0].startswith("speechtrain: warning: needs LibriSpeech train-clean-100 (6.4 GB)")
    assert lines[1].startswith("speechtrain: needs the tokenizer manifests/librispeech/tokenizer.model in")
    code, _, lines = start(capsys, "recipe=mlperf", "launcher=slurm")
    assert (code, "error: the lines above" in lines[-1]) == (3, True)
    code, _, lines = start(capsys, "recipe=wav2vec2", "launcher=slurm")
    assert lines[0].startswith("speechtrain: warning: needs LibriSpeech")
    # The missing corpus does not stop the run, so the next error is about sbatch.
    assert (code, "there is no sbatch" in lines[1]) == (4, True)


@pytest.mark.parametrize("path", ["/elsewhere/manifests/librispeech/dev-clean.jsonl.gz", "a.jsonl"])
def test_another_path_keeps_its_error(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, lines = start(capsys, "recipe=scratch", f"data.train={path}")
    assert (code, len(lines)) == (3, 1)
    assert "does not exist. Give a manifest or a folder" in lines[0]


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
    assert build_data(config, build_tokenizer(config)).training_set.hold_out == 0.01
    config = compose(["recipe=wav2vec2", "run_dir=r", "data.train=a.tsv", "++data.valid.dev=b.tsv"])
    assert build_data(config, build_tokenizer(config)).training_set.hold_out == 0.0
    assert needs_of(config) == []


def test_each_job_of_a_sweep_prints_its_missing_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, lines = start(capsys, "-m", "recipe=wav2vec2", "seed=1,2", DRY)
    assert (code, sum("needs LibriSpeech" in line for line in lines)) == (0, 2)
    code, _, lines = start(capsys, "-m", "recipe=wav2vec2", "seed=1,2")
    assert (code, sum("needs LibriSpeech" in line for line in lines)) == (3, 2)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["multirun.yaml"]  # Hydra writes it.


def test_the_doctor_has_the_same_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(["recipe=mlperf"]) == 3
    (red,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("red")]
    assert f"needs LibriSpeech {SIZES} {UNSET}: {PREPARE}" in red
    assert "needs the tokenizer manifests/librispeech/tokenizer.model" in red


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
    assert build_tokenizer(config).size == 19
    assert needs_of(config) == []
    code, _, lines = start(capsys, "recipe=mlperf", DRY)
    assert (code, lines) == (0, [])
    assert prepare.run([*words, SUBWORDS]) == 0
    out = capsys.readouterr().out
    assert f"{folder}/tokenizer.model is there already. Delete it to train it again" in out


def test_a_tokenizer_alone_has_the_command_that_makes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATASET_DIR", str(tmp_path))
    folder = tmp_path / "manifests" / "librispeech"
    folder.mkdir(parents=True)
    for part in PARTS:
        (folder / f"{part}.jsonl.gz").write_text("")
    _, _, lines = start(capsys, "recipe=mlperf", DRY)
    sources = " ".join(f"{folder}/{part}.jsonl.gz" for part in PARTS[:3])
    assert lines == [
        "speechtrain: needs the tokenizer manifests/librispeech/tokenizer.model in DATASET_DIR: "
        f"speechtrain prepare tokenizer {sources} --kind unigram --size 1023 --normaliser english "
        f"--out {folder}/tokenizer.model"
    ]


@pytest.mark.parametrize("key", ["dry_run", "world_size"])
def test_a_removed_key_keeps_its_error(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, lines = start(capsys, "recipe=mlperf", f"~{key}")
    assert (code, len(lines)) == (2, 1)
    assert lines[0].startswith(f"speechtrain: error: {key} ")


def test_a_prepared_recipe_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATASET_DIR", str(tmp_path / "corpora"))
    librispeech(tmp_path / "corpora", PARTS)
    assert prepare.run(["corpus=librispeech", SUBWORDS]) == 0
    assert train.run(["recipe=mlperf", *SMALL_TRAINING, "run_dir=run"]) == 0
    result = json.loads(Path("run/result.json").read_text())
    assert result["metrics"]["dev-clean/wer"] >= 0


def test_out_is_below_root_without_dataset_dir(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common_voice(tmp_path / "root")
    size = "tokenizers.tokenizer.model={kind: bpe, size: 16}"
    assert prepare.run(["corpus=common_voice", "root=root", size]) == 0
    folder = tmp_path / "root" / "manifests" / "common_voice"
    assert (folder / "tokenizer.model").is_file()
    cut = json.loads(gzip.decompress((folder / "train.jsonl.gz").read_bytes()))
    _, text = said(0)
    assert cut["supervisions"][0]["text"] == text
    assert f"data.train={folder}/train.jsonl.gz" in capsys.readouterr().out.splitlines()[-1]
    Path("dev").mkdir()
    assert prepare.run(["corpus=common_voice", "root=root", "out=dev", "parts=dev", size]) == 0
    assert not list(Path("dev").glob("*.model"))  # A tokenizer learns from training parts only.

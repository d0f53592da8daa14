"""speechtrain evaluate: the figures of training, on any set, of a run wherever it lies."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import soundfile
import yaml

from speechtrain.commands import evaluate
from speechtrain.commands._cli import exit_code_of
from speechtrain.data.hold_out import NO_SIDES, write_sides
from speechtrain.data.index import open_index
from speechtrain.data.sources import open_source
from speechtrain.errors import ConfigError, DataError, MachineError, RunError
from speechtrain.inference.loaded_run import LoadedRun, load
from speechtrain.run_directory import RunLock
from speechtrain.task import Example
from tests.support.digits import write_digits
from tests.support.tiny_run import TINY, small_encoder, untrained

ONE = "device.threads=1"
LINE = (
    r"unheard: cer [\d.]+ % .*, loss [\d.]+, wer ([\d.]+) % \((\d+) of (\d+)\), "
    r"real-time factor [\d.e-]+"
)


@pytest.fixture(scope="module")
def dev(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    write_digits(folder, train=3, valid=4)
    return folder


def printed(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_figures_are_those_of_training(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.run([str(run_dir), ONE, "--json"]) == 0
    metrics = printed(capsys)["metrics"]["unheard"]
    trained = json.loads((run_dir / "result.json").read_text())["metrics"]
    assert metrics
    assert {f"unheard/{name}": value for name, value in metrics.items()}.items() <= trained.items()


def test_a_model_is_shared_without_the_state_of_its_training(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = Path(shutil.copytree(run_dir, tmp_path / "shared"))
    (folder,) = (shared / "checkpoints").glob("step-*")
    (folder / "state.safetensors").unlink()
    for run in (run_dir, shared):
        assert evaluate.run([str(run), ONE, "--json"]) == 0
    first, second = (json.loads(line)["metrics"] for line in capsys.readouterr().out.splitlines()[-2:])
    assert first == second
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1] + b"x")
    with pytest.raises(RunError, match=r"model\.safetensors does not match its sha256"):
        evaluate.run([str(shared), ONE])


def test_recordings_of_the_training_are_a_warning(
    run_dir: Path, dev: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(run_dir, tmp_path / "run"))
    source = str(dev / "valid.jsonl")
    argv = [str(run), ONE, "--json", "--set", f"mine={source}"]
    assert evaluate.run(argv) == 0
    said = capsys.readouterr()
    assert "trained on" not in said.err
    assert json.loads(said.out)["warnings"] == {"mine": []}
    keys = open_index(open_source(source)).recordings
    (run / "recordings.bin").unlink(missing_ok=True)
    write_sides(str(run), NO_SIDES.with_more(keys[:2], keys[2:]))
    assert evaluate.run(argv) == 0
    said = capsys.readouterr()
    (warning,) = json.loads(said.out)["warnings"]["mine"]
    assert warning.startswith("the run was trained on 2 of 4 recordings, such as ")
    assert f"warning: mine: {warning}" in said.err


def test_rates_are_in_percent_with_their_counts(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.run([str(run_dir), ONE]) == 0
    line, kinds, frequent, *told = capsys.readouterr().out.splitlines()[1:]
    found = re.fullmatch(LINE, line)
    assert found
    assert float(found[1]) == pytest.approx(100 * int(found[2]) / int(found[3]), abs=0.01)
    counted = re.match(
        rf"  {found[3]} words in 4 utterances: (\d+) substituted, (\d+) deleted, (\d+) ins", kinds
    )
    assert counted, kinds
    assert sum(map(int, counted.groups())) == int(found[2])
    low, high = map(float, re.findall(r"WER ([\d.]+) to ([\d.]+) %", kinds)[0])
    assert low <= float(found[1]) <= high
    assert frequent.startswith("  most frequent: ")
    assert len(told) == 3 * 4
    assert evaluate.run([str(run_dir), ONE, "--worst", "1", "--json"]) == 0
    of_set = printed(capsys)["mistakes"]["unheard"]
    assert len(of_set["worst"]) == 1
    assert told[:3] == [f"  worst: {of_set['worst'][0]['id']}"] + [
        f"    {key}  {of_set['worst'][0][name]}"
        for key, name in (("ref", "reference"), ("hyp", "hypothesis"))
    ]


def test_figures_do_not_depend_on_the_batch(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates, wrong = [], []
    for count in (1, 4):
        assert evaluate.run([str(run_dir), ONE, f"data.valid_batch.count={count}", "--json"]) == 0
        found = printed(capsys)
        rates.append(found["metrics"]["unheard"]["cer"])
        wrong.append(found["mistakes"])
    assert rates[0] == rates[1]
    assert wrong[0] == wrong[1]


def test_the_rates_of_other_texts_have_a_normaliser(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = load(run_dir, ONE).evaluate()["unheard"]
    assert outcome.with_normaliser(str) == outcome
    texts = Example("a", "seventeen horizons", "17 horizons"), Example("b", "three gettin", "four")
    outcome = replace(outcome, examples=texts)
    monkeypatch.setattr(LoadedRun, "evaluate", lambda run, sets: {"dev": outcome})
    out = tmp_path / "texts.jsonl"
    command = [str(run_dir), ONE, "normaliser=whisper_english"]
    assert evaluate.run([*command, "--json", "--out", str(out)]) == 0
    streams = capsys.readouterr()
    summary = json.loads(streams.out)
    assert summary["normaliser"] == "whisper_english"
    assert summary["metrics"]["dev"] == outcome.metrics | {"wer": 2 / 4, "cer": 8 / 19}
    assert summary["mistakes"]["dev"]["words"] == 4
    assert "cannot be spelled" not in streams.err
    assert [json.loads(line)["reference"] for line in out.read_text().splitlines()] == [
        "17 horizons",
        "3 gettin",
    ]
    assert evaluate.run(command) == 0
    assert "\nnormaliser whisper_english\ndev: " in capsys.readouterr().out


def test_a_moved_run_in_use_scores_other_sets(
    run_dir: Path, dev: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = Path(shutil.copytree(run_dir, tmp_path / "elsewhere"))
    before = {path: path.read_bytes() for path in moved.rglob("*") if path.is_file()}
    out = tmp_path / "hypotheses.jsonl"
    lock = RunLock(moved).acquire()
    try:
        before[moved / "lock"] = (moved / "lock").read_bytes()
        argv = [str(moved), "--set", f"dev={dev / 'valid.jsonl'}", "--set", f"both={dev / 'audio'}"]
        assert evaluate.run([*argv, ONE, "--json", "--out", str(out), "--checkpoint", "last"]) == 0
    finally:
        lock.release()
    assert set(printed(capsys)["metrics"]) == {"dev", "both"}
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["set"] for line in written] == ["dev"] * 4 + ["both"] * 7
    assert set(written[0]) == {"set", "id", "reference", "hypothesis", "errors"}
    assert {path: path.read_bytes() for path in moved.rglob("*") if path.is_file()} == before


def cut_off(dev: Path, folder: Path, shares: dict[int, float]) -> str:
    """A manifest of the four recordings, each cut off at a share of its bytes if it is named."""
    shutil.copytree(dev, folder)
    lines = (folder / "valid.jsonl").read_text().splitlines()
    for number, share in shares.items():
        (source,) = json.loads(lines[number])["recording"]["sources"]
        path = folder / source["source"].removeprefix(f"{dev}/")
        path.write_bytes(path.read_bytes()[: round(share * path.stat().st_size)])
    (folder / "valid.jsonl").write_text("\n".join(lines).replace(str(dev), str(folder)))
    return f"cut={folder / 'valid.jsonl'}"


def test_evaluate_reads_short_recordings_and_drops_half_ones(
    run_dir: Path, dev: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    some = cut_off(dev, tmp_path / "some", {0: 0.99, 1: 0.95, 2: 0.5})
    argv = [str(run_dir), ONE, "--set"]
    assert evaluate.run([*argv, some]) == 0
    captured = capsys.readouterr()
    assert "words in 3 utterances" in captured.out
    assert ", dropped 1, real-time factor" in captured.out
    dropped, used = captured.err.splitlines()
    assert "cut: 1 of 4 recordings are unusable, and are in no figure, such as" in dropped
    assert "bytes of audio, and" in dropped
    assert "cut: 2 of 4 recordings have the fault other_length, and are used, such as" in used
    assert evaluate.run([*argv, some, "--json"]) == 0
    assert printed(capsys)["metrics"]["cut"]["dropped"] == 1
    with pytest.raises(DataError, match=r"1 of 4 recordings of the set cut are unusable.*data\.max_bad=0"):
        evaluate.run([*argv, some, "data.max_bad=0"])
    none = cut_off(dev, tmp_path / "none", dict.fromkeys(range(4), 0.5))
    with pytest.raises(DataError, match="4 of 4 recordings of the set cut are unusable"):
        evaluate.run([*argv, none])


@pytest.mark.parametrize(
    ("argv", "error", "match"),
    [
        (["device.threds=1"], ConfigError, "did you mean 'device.threads'"),
        (["data=fsdd"], ConfigError, "a trained run keeps its data"),
        (["device.threads"], ConfigError, "not KEY=VALUE"),
        (["decoder=beam", "decoder.hotwords=[yes,12]"], ConfigError, "item 2: 12 is not a string, quote it"),
        (
            ["decoder=beam", "decoder.hotwords=[one,well_known,Q9]"],
            ConfigError,
            r"decoder.hotwords: 2 of 3 have .*: 'well_known' \('_' 'k' 'l'\), 'Q9' \('9' 'q'\). Remove them",
        ),
        (["precision=fp16"], MachineError, "precision=bf16"),
        (["--set", "dev"], ConfigError, "NAME=FILE"),
        (["--set", "dev=nowhere.jsonl"], DataError, "nowhere.jsonl does not exist"),
        (["--checkpoint", "step-00000009"], RunError, "choose best, last, step-00000002"),
    ],
)
def test_errors_are_told_in_one_line(
    run_dir: Path, argv: list[str], error: type[Exception], match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(error, match=match):
        evaluate.run([str(run_dir), *argv])
    assert exit_code_of(lambda: evaluate.run([str(run_dir), *argv])) == error.exit_code  # type: ignore[attr-defined]
    assert capsys.readouterr().err.count("\n") == 1


def test_no_run_and_no_checkpoint(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"nothing has no config\.yaml"):
        evaluate.run([str(tmp_path / "nothing")])
    started = tmp_path / "started"
    started.mkdir()
    shutil.copy(run_dir / "config.yaml", started)
    shutil.copy(run_dir / "tokenizer.model", started)
    with pytest.raises(RunError, match="holds no checkpoint"):
        evaluate.run([str(started)])


def test_a_stored_config_does_not_choose_where_evaluation_writes(
    run_dir: Path, dev: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache of the stored config would make folders elsewhere, and put the environment into their names."""
    monkeypatch.setenv("TOKEN", "secret")
    run = Path(shutil.copytree(run_dir, tmp_path / "run"))
    content = yaml.safe_load((run / "config.yaml").read_text())
    content["data"] |= dict.fromkeys(("cache", "run_dir"), f"{tmp_path}/far/${{oc.env:TOKEN}}")
    (run / "config.yaml").write_text(yaml.safe_dump(content))
    loaded = load(run, ONE)
    assert [loaded.opened.run.data.node[key] for key in ("cache", "run_dir")] == [None, str(run)]
    loaded.evaluate({"dev": f"{dev}/valid.jsonl"})
    assert not (tmp_path / "far").exists()
    (run / "config.yaml").write_text(yaml.safe_dump(content))
    load(run, ONE, f"data.cache={tmp_path}/near").evaluate({"dev": f"{dev}/valid.jsonl"})
    assert (tmp_path / "near" / "index").is_dir()


def test_transcripts_of_another_alphabet_are_counted(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in {"a": "one two", "b": "éжщ"}.items():
        soundfile.write(tmp_path / f"{name}.wav", [0.01, -0.01] * 8000, 16000)
        (tmp_path / f"{name}.txt").write_text(text)
    assert evaluate.run([str(run_dir), ONE, "--set", f"dev={tmp_path}"]) == 0
    warning = "dev: 1 of 2 transcripts cannot be spelled by the run's labels ('é' 'ж' 'щ')"
    assert f"speechtrain: warning: {warning}" in capsys.readouterr().err


def test_training_data_is_not_looked_for(run_dir: Path, dev: Path, tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    moved = Path(shutil.copytree(run_dir, tmp_path / "elsewhere"))
    config = OmegaConf.load(moved / "config.yaml")
    config.data.train.root = "/nowhere"
    OmegaConf.save(config, moved / "config.yaml")
    assert evaluate.run([str(moved), ONE, "--set", f"dev={dev / 'valid.jsonl'}"]) == 0


def test_each_context_of_streams_has_a_line(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [key for key in TINY if not key.startswith("encoder.")] + small_encoder("fastconformer_tiny")
    streaming = ["encoder.causal=true", "encoder.features.normalise=none", "encoder.contexts=[[8,4,0],null]"]
    run = untrained(tmp_path / "run", *keys, *streaming)
    metrics = []
    for override in ("encoder.context=null", "encoder.context=[8,4,0]", "encoder.contexts=[[8,1,0],[8,2,0]]"):
        assert evaluate.run([str(run), ONE, override, "--json"]) == 0
        metrics.append(printed(capsys)["metrics"]["unheard"])
    streamed = ("cer_120ms", "delay_120ms", "delay_120ms_90", "wer_120ms")
    assert sorted(metrics[0]) == sorted(["cer", "loss", "wer", *streamed])
    assert metrics[1]["cer"] == metrics[1]["cer_120ms"] == metrics[0]["cer_120ms"]
    assert {"wer_0ms", "wer_40ms"} < set(metrics[2])
    assert evaluate.run([str(run), ONE, "encoder.contexts=[[8,1,0],[8,2,0]]"]) == 0
    _, offline, *streams = capsys.readouterr().out.splitlines()[:4]
    assert "ms" not in offline
    assert [line.split("  cer")[0] for line in streams] == ["  stream   0 ms", "  stream   40 ms"]

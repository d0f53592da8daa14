"""speechtrain prepare corpus=NAME: each corpus as it lies on the disk, to manifests, to a WER."""

from __future__ import annotations

import gzip
import io
import json
import shlex
import shutil
from pathlib import Path

import pytest
import soundfile
import yaml

from speechtrain.commands import evaluate, prepare, train
from speechtrain.commands._cli import exit_code_of
from speechtrain.errors import ConfigError, DataError
from tests.support.corpora import CORPORA, librispeech, mini_librispeech, said, switchboard, write

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


@pytest.mark.slow
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
    typed = shlex.split(command.removeprefix("train with: speechtrain train "))
    assert "data.train=" + ",".join(str(tmp_path / f"out/{part}.jsonl.gz") for part in trained) in typed
    assert train.run([*typed, "--cfg", "job"]) == 0  # what it says can be typed
    capsys.readouterr()
    sets = [f"--set={part}={tmp_path}/out/{part}.jsonl.gz" for part in expected]
    assert evaluate.run([str(run_dir), "device.threads=1", "--json", *sets]) == 0
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    for part, texts in expected.items():
        assert (metrics[part]["wer"] is not None) == any(texts.values())


def test_a_half_prepared_folder_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = librispeech(tmp_path / "root")
    argv = ["corpus=librispeech", "root=root", "out=out"]
    assert prepare.run(argv) == 0
    kept = Path("out/train-clean-100.jsonl.gz").stat()
    Path("out/dev-clean.jsonl.gz").unlink()
    shutil.rmtree("root/LibriSpeech/train-clean-100/103")
    capsys.readouterr()
    assert prepare.run(argv) == 0
    assert "train-clean-100.jsonl.gz is there already" in capsys.readouterr().out
    assert Path("out/train-clean-100.jsonl.gz").stat().st_mtime_ns == kept.st_mtime_ns
    assert set(cuts("out/dev-clean.jsonl.gz")) == set(expected["dev-clean"])
    mini_librispeech(tmp_path / "root")
    with pytest.raises(ConfigError, match=r"holds manifests with corpus=librispeech; use another out="):
        prepare.run(["corpus=mini_librispeech", "root=root", "out=out"])


def test_any_recipe_of_lhotse_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(60):  # it counts them
        write(tmp_path / "waves_yesno" / f"{'_'.join(f'{number:08b}')}.wav", said(0)[0][::2], 8_000)
    assert prepare.run(["corpus=yesno", "root=waves_yesno", "out=out"]) == 0
    assert "data.train=" in capsys.readouterr().out.splitlines()[-1]
    found = [cut for path in Path("out").glob("*.jsonl.gz") for cut in cuts(path).values()]
    assert {cut["supervisions"][0]["text"] for cut in found} >= {"NO NO YES YES YES NO YES YES"}


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["corpus=librispech"], "did you mean 'librispeech'"),
        (["corpus=librispeech", "prats=dev-clean"], "did you mean 'parts'"),
        (["corpus=librispeech", "root=root", "jobs=two"], "jobs: 'two' is not an integer"),
        (["corpus=librispeech", "root=root", "arguments.dataset_prats=x"], "did you mean 'dataset_parts'"),
        (["corpus=librispeech"], "root is not set"),
        (["corpus=huggingface"], "HuggingFace needs 'name'"),
    ],
)
def test_what_is_typed_wrongly_is_one_line(
    argv: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    librispeech(tmp_path / "root")
    assert exit_code_of(lambda: prepare.run([*argv, "out=out"])) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert told in error


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["corpus=librispeech", "root=nowhere"], "nowhere is not a folder. Set root=DIR, or download=true"),
        (["corpus=librispeech", "root=root", "parts=test-other"], "test-other does not exist"),
        (["corpus=switchboard", "root=root", "download=true"], "at https://catalog.ldc.upenn.edu/LDC97S62"),
        (["corpus=yesno", "root=root", "download=true"], "lhotse download yesno"),
        (["corpus=timit", "root=root"], "is not as lhotse's recipe timit expects it"),
    ],
)
def test_what_is_not_there_is_one_line(
    argv: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    librispeech(tmp_path / "root")
    assert exit_code_of(lambda: prepare.run([*argv, "out=out"])) == 3
    *before, error = capsys.readouterr().err.splitlines()
    assert told in error
    assert not [line for line in before if line and "it/s" not in line]  # bars of lhotse


@pytest.mark.parametrize(
    "node",
    [
        {"recipe": "os.system", "arguments": {"command": "touch hacked"}},
        {"recipe": "table", "arguments": {"file": "/etc/passwd"}},
        {"_target_": "os.system"},
        {"recipe": "librispeech", "arguments": {"corpus_dir": "root/LibriSpeech", "output_dir": "."}},
        {"recipe": "librispeech", "arguments": {"corpus_dir": {"_target_": "os.system"}}},
    ],
)
def test_prepare_corpus_refuses_a_wrong_yaml_in_one_line(
    node: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    switchboard(tmp_path / "root")
    librispeech(tmp_path / "root")
    (tmp_path / "conf" / "corpus").mkdir(parents=True)
    (tmp_path / "conf" / "corpus" / "wrong.yaml").write_text(yaml.safe_dump(node))
    exit_code = exit_code_of(
        lambda: prepare.run(["corpus=wrong", "root=root", "out=out", "--config-dir=conf"])
    )
    assert exit_code in (2, 3)
    assert capsys.readouterr().err.count("\n") == 1


def speech(number: int, kind: str = "WAV") -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, said(number)[0], 16_000, format=kind)
    return buffer.getvalue()


def test_a_data_set_of_hugging_face(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra huggingface is not installed")
    sounds = [{"bytes": speech(0), "path": None}, {"bytes": speech(1, "FLAC"), "path": None}]
    sounds += [{"bytes": b"no sound", "path": None}]
    rows = {
        "audio": sounds,
        "sentence": [said(0)[1], said(1)[1], "x"],
        "speaker_id": [7, 8, 9],
        "n": [1, 2, 3],
    }
    datasets.Dataset.from_dict(rows).to_parquet("set.parquet")
    argv = ["corpus=huggingface", "name=set.parquet", "split=train", "out=out"]
    assert prepare.run(argv) == 3
    told = capsys.readouterr().out
    assert "bad: train-00000002\tunreadable" in told
    assert f"data.train={tmp_path}/out/train.jsonl.gz" in told
    found = cuts("out/train.jsonl.gz")
    assert [cut["supervisions"][0]["text"] for cut in found.values()] == [said(0)[1], said(1)[1]]
    assert [cut["supervisions"][0]["speaker"] for cut in found.values()] == ["7", "8"]
    files = [Path(cut["recording"]["sources"][0]["source"]) for cut in found.values()]
    assert (soundfile.read(files[0], dtype="int16")[0] == said(0)[0]).all()
    Path("out/train.jsonl.gz").unlink()
    files[1].unlink()
    kept = files[0].stat().st_mtime_ns
    assert prepare.run(argv) == 3  # what was written stays, the rest is written
    assert files[0].stat().st_mtime_ns == kept
    assert cuts("out/train.jsonl.gz") == found
    for wrong, error in (
        ("text=said", "no column 'said'"),
        ("audio=n_", "no column 'n_'"),
        ("name=conf", "conf"),
    ):
        Path("conf").mkdir(exist_ok=True)
        with pytest.raises(DataError, match=error):
            prepare.run([*argv, wrong])


def test_hugging_face_reads_tables_of_its_folder_only(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra huggingface is not installed")
    folder = tmp_path / "set"
    folder.mkdir()
    table = folder / "train.parquet"
    datasets.Dataset.from_dict({"audio": [1], "text": ["one"]}).to_parquet(tmp_path / "keys.parquet")
    table.symlink_to("../keys.parquet")
    with pytest.raises(DataError, match=r"parquet lies outside of .*/set"):
        prepare.run(["corpus=huggingface", f"name={folder}", "out=out"])
    (tmp_path / "keys.parquet").rename(table)
    with pytest.raises(DataError, match="'audio' has no recordings"):
        prepare.run(["corpus=huggingface", f"name={folder}", "out=out"])
    table.unlink()
    nested = folder / "train.jsonl"  # pyarrow ends the process for more
    nested.write_text('{"audio":[[]]}\n')
    for name in (folder, nested):
        with pytest.raises(DataError, match=r"jsonl is not Parquet or Arrow"):
            prepare.run(["corpus=huggingface", f"name={name}", "out=out"])


def test_a_refused_corpus_leaves_its_folder_free(tmp_path: Path) -> None:
    (tmp_path / "wrong/LibriSpeech/dev-clean").mkdir(parents=True)
    with pytest.raises(DataError):
        prepare.run(["corpus=librispeech", "root=wrong", "out=out"])
    expected = librispeech(tmp_path / "root")
    assert prepare.run(["corpus=librispeech", "root=root", "out=out", "parts=dev-clean"]) == 0
    assert set(cuts("out/dev-clean.jsonl.gz")) == set(expected["dev-clean"])

"""speechtrain prepare: each subcommand in this process, on a folder of its own."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import soundfile

from speechtrain.commands import prepare
from speechtrain.data.corpora.digits import Digits
from speechtrain.errors import ConfigError, DataError, MachineError
from speechtrain.text.vocabulary import SentencePiece
from tests.support.digits import write_digits
from tests.support.recordings import json_lines, write_tone


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPEECHTRAIN_CACHE", str(tmp_path / "cache"))


def nemo(path: Path, *entries: tuple[str, float, str]) -> Path:
    lines = [json.dumps({"audio_filepath": a, "duration": d, "text": t}) for a, d, t in entries]
    path.write_text("\n".join(lines) + "\n")
    return path


# --- tokenizer ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_a_tokenizer_spells_its_transcripts(kind: str, capsys: pytest.CaptureFixture[str]) -> None:

    texts = ["One two three", "two two FOUR", "three four one", "five"]
    source = nemo(Path("a.jsonl"), *((f"{i}.wav", 1.0, text) for i, text in enumerate(texts)))
    assert prepare.run(["tokenizer", str(source), "--out", "t.model", "--kind", kind, "--size", "18"]) == 0
    made = SentencePiece("t.model")
    assert made.size == 19
    assert made.decode(made.encode("one four")) == "one four"
    told = capsys.readouterr().out
    assert f"tokenizer=sentencepiece tokenizer.model={Path('t.model').absolute()}" in told


def test_a_tokenizer_does_not_depend_on_the_format_of_its_texts() -> None:
    nemo(Path("a.jsonl"), *((f"{i}.wav", 1.0, t) for i, t in enumerate(["one two", "two three one"])))
    assert prepare.run(["manifest", "a.jsonl", "--out", "b.jsonl.gz"]) == 0
    for name in ("a.jsonl", "b.jsonl.gz"):
        assert prepare.run(["tokenizer", name, "--out", f"{name}.model", "--size", "12"]) == 0
    assert Path("a.jsonl.model").read_bytes() == Path("b.jsonl.gz.model").read_bytes()


def test_a_tokenizer_too_large_names_the_largest_size() -> None:
    nemo(Path("a.jsonl"), ("a.wav", 1.0, "one two"))
    with pytest.raises(DataError, match="The largest possible size is"):
        prepare.run(["tokenizer", "a.jsonl", "--out", "t.model", "--size", "500"])
    with pytest.raises(ConfigError, match="did you mean 'lower'"):
        prepare.run(["tokenizer", "a.jsonl", "--out", "t.model", "--normaliser", "lowr"])


def test_a_language_model_reads_normalised_transcripts(capsys: pytest.CaptureFixture[str]) -> None:
    from speechtrain.text.ngram import NGram

    nemo(Path("a.jsonl"), *((f"{i}.wav", 1.0, t) for i, t in enumerate(["One two", "two THREE one"])))
    assert prepare.run(["lm", "a.jsonl", "--out", "lm.arpa", "--order", "2"]) == 0
    model = NGram("lm.arpa")
    assert model.score(("one",), "two") > model.score(("one",), "three")
    told = capsys.readouterr().out
    assert f"decoder.lm={Path('lm.arpa').absolute()}" in told
    with pytest.raises(ConfigError, match=r"--order 9: it must be 1 to 6"):
        prepare.run(["lm", "a.jsonl", "--out", "lm.arpa", "--order", "9"])
    (Path("folder") / "lm.arpa").mkdir(parents=True)
    with pytest.raises(MachineError, match=r"folder.*cannot be written.*use another --out"):
        prepare.run(["lm", "a.jsonl", "--out", "folder/lm.arpa"])


def test_the_embedded_corpus_needs_no_manifest() -> None:
    assert prepare.run(["tokenizer", "--corpus", "digits", "--out", "t.model", "--size", "20"]) == 0
    with pytest.raises(ConfigError, match="SOURCE"):
        prepare.run(["tokenizer", "x", "--corpus", "digits", "--out", "t.model"])


# --- stats and split ----------------------------------------------------------------------------


def speech(path: Path, seconds: float, gain: float = 0.1) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = np.random.default_rng(len(path.name)).standard_normal(round(seconds * 8_000)) * gain
    soundfile.write(path, np.clip(samples, -1.0, 1.0), 8_000)
    return str(path)


def test_stats_tell_what_a_source_holds_and_what_is_likely_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [(f"{'x' * i}.wav", 1.0 + i / 10, 0.1, "ten letters", f"s{i % 2}") for i in range(1, 8)]
    rows += [
        ("fast.wav", 1.03, 0.1, "z" * 60, "s1"),
        ("slow.wav", 5.0, 0.1, "é", ""),
        ("mute.wav", 1.0, 0.0, "one two thr", "s1"),
    ]
    rows += [("loud.wav", 1.04, 3.0, "eleven lett", "s1"), ("unsaid.wav", 1.05, 0.1, "", "s1")]
    table = ["path,text,speaker"]
    for name, seconds, gain, text, speaker in rows:
        speech(Path(name), seconds, gain)
        table.append(f"{name},{text},{speaker}")
    Path("copy.wav").write_bytes(Path("x.wav").read_bytes())
    Path("t.csv").write_text("\n".join([*table, "copy.wav,ten letters,s1"]) + "\n")
    assert prepare.run(["stats", "t.csv", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["recordings"], told["speakers"], told["without_speaker"]) == (13, 2, 1)
    assert told["hours"] == pytest.approx(sum(row[1] for row in rows + rows[:1]) / 3600, abs=1e-4)
    assert (told["seconds"]["shortest"], told["seconds"]["longest"]) == (1.0, 5.0)
    assert (told["characters"]["z"], told["characters"]["é"]) == (60, 1)
    short = {kind: [name.partition(":")[2] for name in ids] for kind, ids in told["likely_errors"].items()}
    assert short == {
        "no_transcript": ["13:unsaid"],
        "silent": ["11:mute"],
        "clipped": ["12:loud"],
        "too_fast": ["9:fast"],
        "too_slow": ["10:slow"],
        "duplicates": ["2:x", "14:copy"],
    }
    assert prepare.run(["stats", "t.csv"]) == 0
    shown = capsys.readouterr().out
    for words in (
        "recordings  13",
        "speakers    2 (1 recordings without one)",
        "'z' 60",
        "too fast               1  t:9:fast",
    ):
        assert words in shown
    Path("x.wav").write_bytes(b"")
    assert prepare.run(["stats", "t.csv", "--json", "--no-audio"]) == 0
    assert "silent" not in json.loads(capsys.readouterr().out)["likely_errors"]
    assert prepare.run(["stats", "t.csv", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["likely_errors"]["empty_file"] == ["t:2:x"]


def test_stats_describe_the_faults_of_files(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("half.wav", "zero.wav"):
        speech(Path(name), 1.0)
        content = bytearray(Path(name).read_bytes())
        content[40:44] = (8_000 if name == "half.wav" else 0).to_bytes(4, "little")
        Path(name).write_bytes(content)
    voice = np.random.default_rng(0).normal(size=8_000) / 10
    soundfile.write("opposed.wav", np.stack([voice, -0.99 * voice], 1), 8_000)
    soundfile.write("dead.wav", np.stack([voice, 0 * voice], 1), 8_000)
    names = ("half", "zero", "opposed", "dead")
    Path("t.csv").write_text("path,text\n" + "".join(f"{name}.wav,one\n" for name in names))
    assert prepare.run(["stats", "t.csv"]) == 3
    shown = capsys.readouterr().out
    assert "half.wav: its header explains 8044 of 16044 bytes" in shown
    assert "zero.wav: its header explains 44 of 16044 bytes" in shown
    assert re.search(r"opposed channels +1  t:4:opposed", shown)
    assert re.search(r"silent channel +1  t:5:dead", shown)
    assert "opposed.wav: its channels cancel each other. Set data.channel=0" in shown


def test_stats_list_brackets_and_labels_that_are_no_letters(capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["[laughter] Ngá (unclear).", "<i>Kyéma</i> [laughter]", "(he said) xxx = 5", "d'a, é"]
    nemo(Path("t.jsonl"), *(("a.wav", 1.0, text) for text in texts))
    assert prepare.run(["stats", "t.jsonl", "--no-audio", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["no_letters"] == (
        {"[laughter]": 2, "<": 2, ">": 2}
        | dict.fromkeys(["(unclear)", "<i>", "</i>", "(he said)", "xxx", "=", "5"], 1)
    )
    assert prepare.run(["stats", "t.jsonl", "--no-audio"]) == 0
    assert "no letters  10 signs and strings in brackets: '[laughter]' 2  '<' 2" in capsys.readouterr().out


def test_a_split_keeps_whole_speakers_apart(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{i}.wav,{1 + i % 3},speaker-{i % 20},word {i}" for i in range(200)]
    Path("t.csv").write_text("\n".join(["path,duration,speaker,text", *rows]) + "\n")
    assert prepare.run(["split", "t.csv", "--out", "d", "--share", "0.1"]) == 0
    train, valid = json_lines(Path("d/train.jsonl")), json_lines(Path("d/valid.jsonl"))
    assert sorted(cut["id"] for cut in train + valid) == sorted(f"t:{i + 2}:{i}" for i in range(200))
    spoken = [{cut["supervisions"][0]["speaker"] for cut in part} for part in (train, valid)]
    assert not spoken[0] & spoken[1]
    assert 0.08 < sum(cut["duration"] for cut in valid) / 400 < 0.16
    assert f"held out: {len(spoken[1])} of 20 speakers" in capsys.readouterr().out
    assert prepare.run(["split", "t.csv", "--out", "e", "--by", "recording"]) == 0
    assert "of 200 recordings" in capsys.readouterr().out


# --- manifest -----------------------------------------------------------------------------------


def test_a_folder_becomes_cuts_that_lhotse_reads(capsys: pytest.CaptureFixture[str]) -> None:
    from lhotse import CutSet

    write_tone(Path("data/a.wav")).with_suffix(".txt").write_text("one\n")
    write_tone(Path("data/b.flac"), 1.0, 8_000).with_suffix(".txt").write_text("two two\n")
    assert prepare.run(["manifest", "data", "--out", "cuts.jsonl.gz", "--check"]) == 0
    cuts = CutSet.from_file("cuts.jsonl.gz")
    assert [c.supervisions[0].text for c in cuts] == ["one", "two two"]
    assert [c.load_audio().shape for c in cuts] == [(1, 8_000), (1, 8_000)]
    assert "2 utterances, 0.00 h, 10 characters" in capsys.readouterr().out


def test_a_set_tells_its_language_and_its_normaliser() -> None:
    write_tone(Path("told/a.wav")).with_suffix(".txt").write_text("ONE, two")
    assert (
        prepare.run(["manifest", "{en: {path: told, language: en, normaliser: english}}", "--out", "c.jsonl"])
        == 0
    )
    (cut,) = map(json.loads, Path("c.jsonl").read_text().splitlines())
    assert [(one["text"], one["language"]) for one in cut["supervisions"]] == [("one two", "en")]


def test_bad_recordings_are_listed_and_dropped_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    write_tone(Path("good.wav"))
    Path("empty.wav").touch()
    nemo(Path("a.jsonl"), ("good.wav", 0.5, "one"), ("empty.wav", 1.0, "two"), ("none.wav", 1.0, "three"))
    assert prepare.run(["manifest", "a.jsonl", "--out", "all.jsonl", "--check"]) == 3
    assert len(json_lines(Path("all.jsonl"))) == 3
    told = capsys.readouterr().out
    assert "\tempty_file\t" in told
    assert "\tmissing\t" in told
    assert "bad: 1 empty_file, 1 missing" in told
    assert prepare.run(["manifest", "a.jsonl", "--out", "good.jsonl", "--drop-bad"]) == 0
    assert [cut["supervisions"][0]["text"] for cut in json_lines(Path("good.jsonl"))] == ["one"]


def test_a_failure_leaves_the_old_manifest() -> None:
    nemo(Path("a.jsonl"), ("a.wav", 1.0, "one"))
    assert prepare.run(["manifest", "a.jsonl", "--out", "out.jsonl"]) == 0
    before = Path("out.jsonl").read_bytes()
    cut = json_lines(Path("out.jsonl"))[0]
    Path("twice.jsonl").write_text(f"{json.dumps(cut)}\n{json.dumps(cut)}\n")
    with pytest.raises(DataError, match=r"twice\.jsonl:2: cut id .* is repeated"):
        prepare.run(["manifest", "twice.jsonl", "--out", "out.jsonl"])
    with pytest.raises(DataError, match="no recording is usable"):
        prepare.run(["manifest", "a.jsonl", "--out", "out.jsonl", "--drop-bad"])
    assert Path("out.jsonl").read_bytes() == before
    assert not list(Path().glob(".out*"))


# --- fairseq ------------------------------------------------------------------------------------


def split_of(folder: str) -> dict[str, list[str]]:
    found = {p.stem: p.read_text().splitlines() for p in Path(folder).glob("*.tsv")}
    roots = {text.pop(0) for text in found.values()}
    assert roots == {str(Path("data").absolute())}
    return found


def test_a_tsv_is_split_by_fairseqs_rule(capsys: pytest.CaptureFixture[str]) -> None:
    import random

    names = [f"{'abc'[n % 3]}/{n:02d}.flac" for n in range(40)]
    for n, name in enumerate(names):
        write_tone(Path("data") / name, 0.1 + n / 100, 8_000 if n % 2 else 16_000)
    write_tone(Path("data/other.wav"))
    write_tone(Path("data/.hidden/x.flac"))
    argv = ["tsv", "data", "--out", "m", "--valid-percent", "0.25"]
    assert prepare.run(argv) == 0
    rand = random.Random(42)
    expected: dict[str, list[str]] = {"train": [], "valid": []}
    for name in sorted(names):
        line = f"{name}\t{soundfile.info(f'data/{name}').frames}"
        expected["train" if rand.random() > 0.25 else "valid"].append(line)
    assert split_of("m") == expected
    told = capsys.readouterr().out
    assert f"m/train.tsv: {len(expected['train'])} recordings, " in told
    for more in (["--jobs", "1"], ["--ext", ".FLAC"]):
        assert prepare.run([*argv, *more]) == 0
        assert split_of("m") == expected
    assert prepare.run([*argv, "--seed", "1"]) == 0
    assert split_of("m") != expected
    assert prepare.run(["tsv", "data", "--out", "w", "--ext", "wav", "--valid-percent", "0"]) == 0
    assert split_of("w") == {"train": ["other.wav\t8000"]}


def test_bad_recordings_are_in_no_tsv_and_move_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    for n in range(20):
        write_tone(Path(f"data/{n:02d}.wav"), 0.1)
    argv = ["tsv", "data", "--ext", "wav", "--valid-percent", "0.3", "--out"]
    assert prepare.run([*argv, "before"]) == 0
    Path("data/03.wav").write_bytes(b"damaged")
    Path("data/04.wav").write_bytes(b"")
    soundfile.write("data/05.wav", np.zeros(0), 16_000)
    Path("data/06.wav").unlink()
    Path("data/06.wav").symlink_to("nowhere.wav")
    Path("data/07.wav").rename("data/07\t.wav")
    capsys.readouterr()
    assert prepare.run([*argv, "after"]) == 3
    before, after = split_of("before"), split_of("after")
    gone = [f"{n:02d}.wav\t1600" for n in range(3, 8)]
    assert after == {name: [line for line in lines if line not in gone] for name, lines in before.items()}
    told = capsys.readouterr().out
    reasons = ["unreadable", "empty_file", "no_samples", "missing", "unreadable"]
    assert [line.split("\t")[1] for line in told.splitlines() if line.startswith("bad: ")] == reasons
    assert "bad: '07\\t.wav'\tunreadable\ta TSV cannot contain its name" in told
    assert "5 of 20 recordings are bad and are in neither file" in told


# --- convert, digits, sample --------------------------------------------------------------------


@pytest.mark.parametrize(("format_", "subtype"), [("wav", "PCM_16"), ("flac", "PCM_16")])
def test_conversion_decodes_once_and_resumes(format_: str, subtype: str) -> None:
    write_tone(Path("data/a b.wav"), 0.5, 44_100, channels=2).with_suffix(".txt").write_text("one")
    write_tone(Path("data/c.wav"), 1.0, 8_000).with_suffix(".txt").write_text("two")
    argv = ["convert", "data", "--out", "out", "--format", format_]
    assert prepare.run(argv) == 0
    cuts = json_lines(Path("out/cuts.jsonl"))
    files = [Path(cut["recording"]["sources"][0]["source"]) for cut in cuts]
    infos = [soundfile.info(str(file)) for file in files]
    assert [(i.samplerate, i.channels, i.frames, i.subtype) for i in infos] == [
        (16_000, 1, 8_000, subtype),
        (16_000, 1, 16_000, subtype),
    ]
    assert [cut["supervisions"][0]["text"] for cut in cuts] == ["one", "two"]
    times = [file.stat().st_mtime_ns for file in files]
    files[1].unlink()
    assert prepare.run(argv) == 0
    assert files[0].stat().st_mtime_ns == times[0]
    assert files[1].exists()
    assert json_lines(Path("out/cuts.jsonl")) == cuts
    assert prepare.run(["manifest", "out/cuts.jsonl", "--out", "again.jsonl", "--check"]) == 0


def test_convert_writes_the_samples_that_training_hears() -> None:
    write_digits(Path("d"), train=3, valid=2)
    cuts = json_lines(Path("d/valid.jsonl"))
    source = Digits("valid", 2)
    assert [c["supervisions"][0]["text"] for c in cuts] == [u.text for u in source.all_utterances()]
    samples, _ = soundfile.read(cuts[1]["recording"]["sources"][0]["source"], dtype="int16")
    assert np.array_equal(samples, source.all_utterances()[1].audio(source.clips))
    assert len(json_lines(Path("d/train.jsonl"))) == 3


def test_stats_name_damaged_text_and_invisible_characters(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [("a", "wo\ufffdrd"), ("b", "\u200fword\u200b"), ("c", "می\u200cروم"), ("d", "word")]
    nemo(Path("t.jsonl"), *((f"{name}.wav", 1.0, text) for name, text in rows))
    assert prepare.run(["stats", "t.jsonl", "--no-audio"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^damaged text +1  \S+a$", shown, re.M)
    assert re.search(r"^invisible +1  \S+b$", shown, re.M)


def test_stats_count_recordings_that_a_run_does_not_use(capsys: pytest.CaptureFixture[str]) -> None:
    speech(Path("long.wav"), 60.5)
    speech(Path("short.wav"), 60.0)
    Path("t.csv").write_text("path,text\nlong.wav,one\nshort.wav,two\n")
    assert prepare.run(["stats", "t.csv", "--no-audio"]) == 0
    assert "1 recordings (0.02 h) are too long for recipe=scratch (above 60 s)" in capsys.readouterr().out


def test_conversion_says_what_it_needs_first(monkeypatch: pytest.MonkeyPatch) -> None:
    write_tone(Path("data/a.wav"), 5.0)
    full = shutil._ntuple_diskusage(10, 10, 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(MachineError, match="needs up to 0 MB, 0 MB are free"):
        prepare.run(["convert", "data", "--out", "out"])
    assert not Path("out").exists()

"""speechtrain transcribe: text of any audio file, whatever lies beside it."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from speechtrain.commands import transcribe
from speechtrain.commands._results import Input, result_paths
from speechtrain.data.pieces import Recording
from speechtrain.decoding.base import Hypothesis
from speechtrain.errors import ConfigError, DataError
from speechtrain.inference.transcript import Segment, Transcript, format_transcript
from speechtrain.text.vocabulary import Characters
from tests.support.digits import write_sample

ONE = "device.threads=1"


@pytest.fixture(scope="module")
def folder(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same utterance at two rates, in one and two channels, and an empty file."""
    made = tmp_path_factory.mktemp("audio")
    write_sample(made / "a.wav")
    samples, rate = soundfile.read(made / "a.wav")
    soundfile.write(made / "stereo.flac", np.stack([samples, samples], axis=1), rate)
    soundfile.write(made / "b=c.wav", samples[::2], rate // 2)
    (made / "empty.wav").touch()
    (made / "not.wav").write_text("no audio at all")
    return made


def test_files_are_transcribed_in_order(
    run_dir: Path, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.delenv("DATASET_DIR", raising=False)
    assert transcribe.run([str(run_dir), "stereo.flac", "b=c.wav", ONE, "a.wav", "--batch", "2"]) == 0
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [name for name, _ in lines] == ["stereo.flac", "b=c.wav", "a.wav"]
    assert transcribe.run([str(run_dir), "a.wav", ONE, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["audio"], found["text"]) == ("a.wav", lines[2][1])
    assert "".join(found["text"].split()) == "".join(word["word"] for word in found["words"]).replace(" ", "")
    assert 0 <= found["words"][0]["start"] < found["words"][-1]["end"] < found["seconds"] + 0.1
    assert all(0 < word["confidence"] <= 1 and word["start"] < word["end"] for word in found["words"])


def test_a_file_that_cannot_be_used_stops_no_other(
    run_dir: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(folder / name) for name in ("empty.wav", "a.wav", "none.wav", "not.wav")]
    assert transcribe.run([str(run_dir), *files, ONE]) == 3
    told = capsys.readouterr()
    assert told.out.count("\n") == 1
    assert told.out.startswith(f"{files[1]}\t")
    assert "empty.wav: the file is empty" in told.err
    assert "none.wav: the file does not exist" in told.err
    assert "not.wav: its format is not read. Convert a recording to WAV or FLAC" in told.err
    assert told.err.count("\n") == 4
    assert "3 of 4 recordings failed" in told.err
    assert "Backend" not in told.err


def test_a_channel_is_transcribed(
    run_dir: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples, rate = soundfile.read(folder / "a.wav")
    two = tmp_path / "two.wav"
    noise = np.random.default_rng(0).normal(size=len(samples)) / 9
    soundfile.write(two, np.stack([noise, samples], 1), rate, subtype="FLOAT")
    assert transcribe.run([str(run_dir), str(folder / "a.wav"), ONE]) == 0
    assert transcribe.run([str(run_dir), str(two), ONE, "--channel", "1"]) == 0
    one, second = [line.split("\t")[1] for line in capsys.readouterr().out.splitlines()]
    assert one == second
    assert transcribe.run([str(run_dir), str(two), ONE, "--channel", "2"]) == 3
    assert "two.wav: it has 2 channels, and channel 2 counts from 0" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--channel -1"):
        transcribe.run([str(run_dir), str(two), "--channel", "-1"])


def long_recording(folder: Path, path: Path, times: int) -> Path:
    """The utterance of ``folder`` several times, with pauses."""
    samples, rate = soundfile.read(folder / "a.wav")
    soundfile.write(path, np.tile(np.concatenate([samples, np.zeros(rate // 2)]), times), rate)
    return path


def test_a_long_recording_does_not_depend_on_the_batch(
    run_dir: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = long_recording(folder, tmp_path / "long.flac", 8)
    seconds = soundfile.info(path).duration
    found = []
    for batch in ("1", "7", "32"):
        files = [str(path), str(folder / "a.wav")]
        more = ["--piece-seconds", "6", "--json", "--batch", batch]
        assert transcribe.run([str(run_dir), *files, ONE, *more]) == 0
        found.append([json.loads(line) for line in capsys.readouterr().out.splitlines()])
    texts = [[(one["text"], [word["word"] for word in one["words"]]) for one in each] for each in found]
    assert texts[0] == texts[1] == texts[2]
    whole, short = found[0]
    assert whole["seconds"] == round(seconds, 3)
    starts = [word["start"] for word in whole["words"]]
    assert starts == sorted(starts)
    assert starts[-1] > 0.8 * seconds
    assert len(whole["words"]) > 4 * len(short["words"])


FORM = {
    "srt": r"1\n00:00:\d\d,\d{3} --> 00:00:\d\d,\d{3}\n(\S.*\n){1,2}\n",
    "vtt": r"WEBVTT\n\n00:00:\d\d\.\d{3} --> 00:00:\d\d\.\d{3}\n(\S.*\n){1,2}\n",
    "ctm": r"a 1 \d+\.\d{3} \d+\.\d{3} \S+ [01]\.\d{3}\n",
    "text": r".*a\.wav\t\S.*\n",
    "json": r"\{.*\}\n",
}


@pytest.mark.parametrize("form", FORM)
def test_each_form_is_printed_and_written(
    run_dir: Path, folder: Path, tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    one = [str(run_dir), str(folder / "a.wav"), ONE, "--format", form]
    assert transcribe.run(one) == 0
    printed = capsys.readouterr().out
    assert re.match(FORM[form], printed)
    (tmp_path / "in").mkdir()
    shutil.copy(folder / "a.wav", tmp_path / "in")
    (tmp_path / "in" / "sub").mkdir()
    shutil.copy(folder / "a.wav", tmp_path / "in" / "sub" / "b.wav")
    (tmp_path / "in" / "bad.wav").touch()
    out = tmp_path / "out" / "deep"
    assert transcribe.run([str(run_dir), str(tmp_path / "in"), ONE, "--format", form, "--out", str(out)]) == 3
    told = capsys.readouterr()
    assert ("bad.wav" in told.out) == (form == "json")
    assert told.err.count("\n") == 2
    assert "1 of 3 recordings failed" in told.err
    suffix = "txt" if form == "text" else form
    results = {str(path.relative_to(out)) for path in out.rglob(f"*.{suffix}")}
    assert results == {f"a.{suffix}", f"sub/b.{suffix}"}
    assert re.match(FORM[form], (out / f"a.{suffix}").read_text())


def test_captions_have_two_lines_and_end_at_pauses() -> None:
    tokenizer = Characters()
    text = "seven " * 40
    labels = tuple(tokenizer.encode(text.strip()))
    times = tuple(0.1 * number + (5.0 if number > 100 else 0.0) for number in range(len(labels)))
    hypothesis = Hypothesis(
        labels=labels,
        text=text.strip(),
        score=-1.0,
        times=times,
        ends=tuple(time + 0.1 for time in times),
        confidences=(0.5,) * len(labels),
        tokenizer=tokenizer,
    )
    transcript = Transcript("a b.wav", "a b.wav", 40.0, (Segment(1.0, 40.0, hypothesis),))
    captions = list(transcript.captions())
    assert " ".join(caption for *_, caption in captions) == text.strip()
    assert all(len(caption) <= 84 and end - start <= 7.0 for start, end, caption in captions)
    assert not [1 for start, end, _ in captions if start < 11.5 < end]
    assert captions[0][0] == pytest.approx(1.0)  # the start of the segment
    assert format_transcript(transcript, "ctm").splitlines()[0] == "a_b 1 1.000 0.500 seven 0.500"


def test_a_manifest_is_transcribed_by_its_ids(
    run_dir: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"audio_filepath": str(folder / "a.wav"), "text": "one"}, {"audio_filepath": "none.wav"}]
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert transcribe.run([str(run_dir), str(tmp_path / "m.jsonl"), ONE, "--json"]) == 3
    told = capsys.readouterr()
    found, failed = map(json.loads, told.out.splitlines())
    assert failed["audio"].endswith("none.wav")
    assert failed["error"].endswith("none.wav: the file does not exist")
    assert found["audio"] == str(folder / "a.wav")
    assert found["id"] != found["audio"]
    assert "none.wav: the file does not exist" in told.err


def test_out_never_replaces_a_file_of_another_origin(run_dir: Path, batch: Path) -> None:
    (batch / "d1/x.srt").write_text("by hand")
    with pytest.raises(ConfigError, match=r"--out: .*x\.srt exists\. Name another folder"):
        transcribe.run([str(run_dir), "d1", ONE, "--format", "srt", "--out", "d1"])
    assert (batch / "d1/x.srt").read_text() == "by hand"


@pytest.fixture
def batch(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with three recordings in two folders. Two of them have the same name."""
    for name in ("d1/x.wav", "d2/x.wav", "d2/deep/y.wav"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / "a.wav", tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def results_in(out: Path, pattern: str = "*.txt") -> list[str]:
    return sorted(str(path.relative_to(out)) for path in out.rglob(pattern))


def test_results_keep_their_folders_and_names_after_failures(run_dir: Path, batch: Path) -> None:
    command = [str(run_dir), "d1", "d2", ONE, "--out", "out"]
    assert transcribe.run(command) == 0
    assert results_in(batch / "out") == ["d1/x.txt", "d2/deep/y.txt", "d2/x.txt"]
    (batch / "d1/x.wav").write_bytes(b"")
    assert transcribe.run(command) == 3
    assert results_in(batch / "out") == ["d2/deep/y.txt", "d2/x.txt"]
    assert transcribe.run([*command[:-1], "fresh"]) == 3
    assert results_in(batch / "fresh") == ["d2/deep/y.txt", "d2/x.txt"]


def test_ids_become_names_of_files_below_the_folder() -> None:
    ids = ["a/../../b", "a%2Fb", "a/b", "…" * 200, "…" * 201, "Wort 1.5", ".hidden", ""]
    paths = result_paths([Input("m.jsonl", name, "x.wav") for name in ids], ".txt")
    names = list(paths.values())
    assert len(set(names)) == len(ids)
    assert not any("/" in name or name.startswith(".") for name in names)
    assert names[5] == "Wort 1.5.txt"
    assert max(len(name.encode()) for name in names) <= 255


def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the name of each recording is added that is read."""
    names = list[str]()
    pieces = Recording.pieces

    def watched(self: Recording, max_seconds: float) -> Any:
        names.append(self.name)
        return pieces(self, max_seconds)

    monkeypatch.setattr(Recording, "pieces", watched)
    return names


def test_the_same_command_continues(
    run_dir: Path, folder: Path, batch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("names").write_text("d1/x.wav\nd2/x.wav\n\nd2/deep/y.wav\n")
    command = [str(run_dir), ONE, "--list", "names", "--out", "out"]
    names = decoded(monkeypatch)
    assert transcribe.run([*command, "--batch", "1"]) == 0
    assert names == ["d1/x.wav", "d2/x.wav", "d2/deep/y.wav"]
    (batch / "out/d2/x.txt").unlink()
    shutil.copyfile(folder / "stereo.flac", "d1/x.wav")
    names.clear()
    assert transcribe.run(command) == 0
    assert names == ["d1/x.wav", "d2/x.wav"]
    names.clear()
    assert transcribe.run([*command, "--piece-seconds", "5"]) == 0
    assert len(names) == 3


def test_a_killed_command_decodes_each_recording_once(run_dir: Path, batch: Path) -> None:
    for number in range(30):
        shutil.copy("d1/x.wav", f"d1/{number}.wav")
    program = Path(sys.executable).parent / "speechtrain-transcribe"
    command = [program, run_dir, "d1", ONE, "--batch", "1", "--out", "out"]
    process = subprocess.Popen(command)
    while len(results_in(batch / "out")) < 5:
        time.sleep(0.01)
    process.kill()
    process.wait()
    times = {name: os.stat(f"out/{name}").st_mtime_ns for name in results_in(batch / "out")}
    assert 5 <= len(times) < 31
    subprocess.run(command, check=True)
    assert len(results_in(batch / "out")) == 31
    assert all(os.stat(f"out/{name}").st_mtime_ns == value for name, value in times.items())


def test_a_list_comes_from_standard_input(
    run_dir: Path, batch: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    latin_name = b"d2/caf\xe9.wav"
    shutil.copy("d1/x.wav", os.fsdecode(latin_name))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"d2/x.wav\n" + latin_name)))
    assert transcribe.run([str(run_dir), "d1/x.wav", ONE, "--list", "-"]) == 0
    names = [line.split("\t")[0] for line in capsys.readouterr().out.splitlines()]
    assert names[:2] == ["d1/x.wav", "d2/x.wav"]
    assert len(names) == 3
    with pytest.raises(DataError, match="--list missing: No such file"):
        transcribe.run([str(run_dir), ONE, "--list", "missing"])


@pytest.mark.parametrize("seconds", [1.5, 2.05])
def test_words_stay_in_their_recording(seconds: float) -> None:
    """The last frame of a recording may end after its last sample."""
    hypothesis = Hypothesis(
        (1,), "a", -1.0, times=(1.0,), ends=(1.1,), confidences=(0.5,), tokenizer=Characters()
    )
    (word,) = Transcript("a", "a", seconds, (Segment(1.0, seconds, hypothesis),)).words
    assert (word.start, word.end) == (min(2.0, seconds), seconds)


def test_results_of_one_stem_keep_their_suffixes(run_dir: Path, folder: Path, batch: Path) -> None:
    shutil.copy(folder / "stereo.flac", "d1/x.flac")
    assert transcribe.run([str(run_dir), "d1/x.wav", "d1/x.flac", ONE, "--out", "out"]) == 0
    assert results_in(batch / "out") == ["x.flac.txt", "x.wav.txt"]


def test_recordings_of_one_name_in_ctm_are_refused(run_dir: Path, batch: Path) -> None:
    with pytest.raises(ConfigError, match=r"d1/x\.wav and .*d2/x\.wav would both be x"):
        transcribe.run([str(run_dir), "d1", "d2", ONE, "--format", "ctm"])

"""Real digits: the split, the dealing of recordings into utterances, and the audio of the result."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from speechtrain.data.corpora.fsdd import WORDS, Fsdd, find_takes
from speechtrain.errors import DataError
from tests.support.cuts import lhotse_cuts

REAL = Path(__file__).resolve().parents[5] / "shared/data/fsdd"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEECHTRAIN_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three speakers, eight takes of each digit: noise below 3 kHz, each of its own length."""
    folder = tmp_path_factory.mktemp("fsdd") / "recordings"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for speaker in ("ann", "bo_b", "cleo"):
        for digit in range(10):
            for index in range(8):
                noise = rng.normal(0, 3000, rng.integers(800, 2400))
                spectrum = np.fft.rfft(noise)
                spectrum[len(spectrum) * 3 // 4 :] = 0
                noise = np.fft.irfft(spectrum, len(noise))
                path = folder / f"{digit}_{speaker}_{index}.wav"
                soundfile.write(path, noise.astype(np.int16), 8000)
    (folder / "notes.txt").write_text("not a recording")
    return folder.parent


def names(source: Fsdd) -> list[str]:
    """The file of every clip of every utterance, in order."""
    return [source.takes[clip].path.name for row in source.all_utterances() for clip in row.clips]


def test_no_test_recording_is_in_training_and_each_is_used_once(corpus: Path) -> None:
    train, test = names(Fsdd(str(corpus), "train")), names(Fsdd(str(corpus), "test"))
    assert {int(name.split("_")[-1][:-4]) for name in train} == {5, 6, 7}
    assert {int(name.split("_")[-1][:-4]) for name in test} == {0, 1, 2, 3, 4}
    assert sorted(train + test) == sorted(p.name for p in (corpus / "recordings").glob("*.wav"))


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    words=st.tuples(st.integers(1, 9), st.integers(0, 6)),
    seed=st.integers(0, 2**31),
    split=st.sampled_from(["train", "test"]),
    utterances=st.integers(0, 90),
)
def test_utterances_keep_their_bounds(
    corpus: Path, words: tuple[int, int], seed: int, split: str, utterances: int
) -> None:
    low, high = words[0], words[0] + words[1]
    source = Fsdd(str(corpus), split, utterances, low, high, seed=seed)
    plan = source.all_utterances()
    assert len({row.id for row in plan}) == len(plan)
    if utterances:
        assert len(plan) == utterances
    else:
        assert sorted(clip for row in plan for clip in row.clips) == list(range(len(source.takes)))
    short = Counter(row.speaker for row in plan if len(row.clips) < low)
    for row in plan:
        takes = [source.takes[clip] for clip in row.clips]
        assert len(row.clips) <= high
        assert len(row.gaps) == len(row.clips) - 1
        assert all(320 <= gap <= 1920 for gap in row.gaps)
        assert {take.speaker for take in takes} == {row.speaker}
        assert [WORDS[take.digit] for take in takes] == row.text.split()
    each_pass = len(plan) // 3 + 1 if utterances else 1
    assert all(count <= each_pass for count in short.values())


def test_only_a_last_group_is_short_and_only_where_it_must(corpus: Path) -> None:
    for seed in range(20):
        sizes = [len(row.clips) for row in Fsdd(str(corpus), "test", seed=seed).all_utterances()]
        assert min(sizes) >= 3
        assert max(sizes) <= 7
    fixed = [len(row.clips) for row in Fsdd(str(corpus), "test", min_words=7, max_words=7).all_utterances()]
    assert Counter(fixed) == {7: 21, 1: 3}  # 50 recordings a speaker


def test_the_audio_is_the_resampled_recordings_with_silence_between(corpus: Path) -> None:
    source = Fsdd(str(corpus), "test", seed=2)
    for cut, row in zip(lhotse_cuts(source), source.all_utterances(), strict=True):
        audio = cut.load_audio()
        assert cut.sampling_rate == 16000
        assert audio.shape == (1, cut.num_samples)
        assert [s.text for s in cut.supervisions] == [row.text]
        position = 0
        for clip, gap in zip(row.clips, [*row.gaps, 0], strict=True):
            original, rate = soundfile.read(source.takes[clip].path, dtype="float32")
            assert rate == 8000
            length = 2 * len(original)
            spoken = audio[0, position : position + length]
            spectrum = np.fft.rfft(original)  # band-limited, so padding the spectrum interpolates exactly
            padded = np.concatenate([spectrum, np.zeros(length // 2 + 1 - len(spectrum))])
            ideal = 2 * np.fft.irfft(padded, length)
            error = np.abs(spoken - ideal)[100:-100].max()
            assert error < 0.02 * np.abs(ideal).max()
            position += length
            assert not audio[0, position : position + gap].any()
            position += gap
        assert position == audio.shape[1]


def test_other_rates_and_channels_are_converted(tmp_path: Path) -> None:
    time = np.arange(48000) / 48000
    tone = 0.5 * np.sin(2 * np.pi * 440 * time)
    soundfile.write(tmp_path / "3_dee_5.wav", np.stack([tone, 0 * tone], 1), 48000)
    soundfile.write(tmp_path / "4_dee_5.wav", tone[:16000], 16000)
    clips = Fsdd(str(tmp_path), "train").clips
    assert list(clips.lengths) == [16000, 16000]
    expected = 0.25 * np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)
    assert np.abs(clips.read(0)[300:-300] / 32768 - expected[300:-300]).max() < 0.002
    assert np.array_equal(clips.read(1), soundfile.read(tmp_path / "4_dee_5.wav", dtype="int16")[0])


def test_speakers_are_chosen(corpus: Path) -> None:
    source = Fsdd(str(corpus), "train", exclude_speakers=["ann"])
    assert source.all_speakers == ["ann", "bo_b", "cleo"]
    assert source.speakers == ["bo_b", "cleo"]
    assert {row.speaker for row in source.all_utterances()} == {"bo_b", "cleo"}
    alone = Fsdd(str(corpus), "train", only_speakers=["bo_b"])
    assert {row.speaker for row in alone.all_utterances()} == {"bo_b"}
    # a speaker's utterances do not depend on who else is there
    mixed = [row.text for row in Fsdd(str(corpus), "train").all_utterances() if row.speaker == "bo_b"]
    assert [row.text for row in alone.all_utterances()] == mixed


def test_passes_differ_and_speakers_take_turns(corpus: Path) -> None:
    plan = Fsdd(str(corpus), "test", utterances=60).all_utterances()
    assert [row.speaker for row in plan[:6]] == ["ann", "bo_b", "cleo"] * 2
    counts = Counter(name for row in plan for name in row.clips)
    assert max(counts.values()) - min(counts.values()) <= 1  # 60 utterances: the second pass is not complete
    first = Fsdd(str(corpus), "test").all_utterances()
    assert plan[: len(first)] == first
    assert plan[len(first)].clips != first[0].clips


def test_the_fingerprint_follows_content_and_arguments(corpus: Path, tmp_path: Path) -> None:
    shutil.copytree(corpus, tmp_path / "copy")
    copy = str(tmp_path / "copy")
    original = Fsdd(str(corpus), "train").fingerprint()
    assert Fsdd(copy, "train").fingerprint() == original
    assert Fsdd(copy + "/recordings", "train").fingerprint() == original
    others = [
        Fsdd(copy, "test"),
        Fsdd(copy, "train", 5),
        Fsdd(copy, "train", min_words=4),
        Fsdd(copy, "train", max_words=6),
        Fsdd(copy, "train", gap_seconds=[0.0, 0.12]),
        Fsdd(copy, "train", seed=1),
        Fsdd(copy, "train", exclude_speakers=["ann"]),
    ]
    assert len({original, *(source.fingerprint() for source in others)}) == 8
    path = tmp_path / "copy/recordings/3_ann_6.wav"
    path.write_bytes(path.read_bytes()[:-2] + b"\1\2")
    assert Fsdd(copy, "train").fingerprint() != original


def test_missing_and_unreadable_recordings_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere.*no recordings.*git clone"):
        Fsdd(str(tmp_path / "nowhere"), "train")
    for name, content in (("1_eve_9.wav", b""), ("1_eve_9.wav", b"RIFF____WAVEjunk")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=r"1_eve_9.wav: cannot be read as audio"):
            next(lhotse_cuts(Fsdd(str(tmp_path), "train")))
    soundfile.write(tmp_path / "1_eve_9.wav", np.zeros(0), 8000)
    with pytest.raises(DataError, match=r"1_eve_9.wav: cannot be read as audio \(no_samples"):
        next(lhotse_cuts(Fsdd(str(tmp_path), "train")))


def _write_pipe(path: Path) -> None:
    os.mkfifo(path)


def _write_long_flac(path: Path) -> None:
    soundfile.write(path, np.zeros(8000 * 100, np.int16), 8000, format="FLAC")


@pytest.mark.parametrize("write", [_write_pipe, _write_long_flac])
def test_fsdd_refuses_a_hostile_recording_in_one_line(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path / "1_eve_9.wav")
    with pytest.raises(DataError, match=r"1_eve_9.wav: cannot be read as audio"):
        next(lhotse_cuts(Fsdd(str(tmp_path), "train")))


def test_find_takes_leaves_out_names_that_nobody_can_print(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "1_eve_9.wav", np.zeros(800), 8000)
    (tmp_path / "1_\udcff_9.wav").touch()
    (tmp_path / "1_\x1b[2J_9.wav").touch()
    assert [take.speaker for take in find_takes(str(tmp_path))] == ["eve"]


def test_the_real_recordings() -> None:
    if not (REAL / "recordings").is_dir():
        pytest.skip(f"no recordings at {REAL}")
    train, test = Fsdd(str(REAL), "train"), Fsdd(str(REAL), "test")
    assert train.speakers == ["george", "jackson", "lucas", "nicolas", "yweweler"]
    assert (len(train.takes), len(test.takes)) == (2250, 250)
    assert 420 < len(train.all_utterances()) < 490
    cuts = list(lhotse_cuts(test))
    assert sum(len(cut.supervisions[0].text.split()) for cut in cuts) == 250
    assert all(np.abs(cut.load_audio()).max() > 0.01 for cut in cuts)
    code = f"from speechtrain.data.corpora.fsdd import Fsdd; print(Fsdd({str(REAL)!r}, 'test').fingerprint())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == test.fingerprint()

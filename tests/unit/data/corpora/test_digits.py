"""The embedded digits: what is shipped, how it is joined, and the cache that holds the joined audio."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from speechtrain.data.corpora import connected
from speechtrain.data.corpora.digits import EMBEDDED, Digits
from speechtrain.errors import DataError, MachineError
from tests.support.cuts import lhotse_cuts

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPEECHTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def index() -> dict:
    return json.loads((EMBEDDED / "index.json").read_text())


def test_the_package_data_is_what_was_recorded() -> None:
    rows = [line.split("  ") for line in (EMBEDDED / "SHA256SUMS").read_text().splitlines()]
    assert sorted(name for _, name in rows) == ["index.json", "train.flac", "valid.flac"]
    for digest, name in rows:
        assert hashlib.sha256((EMBEDDED / name).read_bytes()).hexdigest() == digest, name
    assert sum((EMBEDDED / name).stat().st_size for _, name in rows) <= 6e6


@pytest.mark.parametrize(("split", "voices"), [("train", 57), ("valid", 15)])
def test_every_voice_says_every_digit_once(split: str, voices: int) -> None:
    part = index()["splits"][split]
    info = soundfile.info(EMBEDDED / part["file"])
    assert (info.samplerate, info.channels, info.subtype) == (16000, 1, "PCM_16")
    lengths = [n for voice in part["voices"] for n in voice["samples"]]
    assert info.frames == sum(lengths)
    assert len(part["voices"]) == voices
    assert len(lengths) == 10 * voices
    assert index()["words"] == WORDS
    seconds = np.array(lengths) / 16000
    assert seconds.min() > 0.15
    assert seconds.max() < 1.5


def test_no_validation_voice_is_in_training() -> None:
    train, valid = ({v["variant"] for v in index()["splits"][s]["voices"]} for s in ("train", "valid"))
    assert len(train) == 57
    assert len(valid) == 15
    assert not train & valid
    heard = {cut.supervisions[0].speaker for cut in lhotse_cuts(Digits("train", 100))}
    unheard = {cut.supervisions[0].speaker for cut in lhotse_cuts(Digits("valid", 100))}
    assert len(heard) == 57
    assert len(unheard) == 15
    assert not heard & unheard


def test_the_audio_is_the_clips_with_silence_between() -> None:
    source = Digits("valid", 40, seed=3)
    part = index()["splits"]["valid"]
    whole, _ = soundfile.read(EMBEDDED / "valid.flac", dtype="float32")
    lengths = [n for voice in part["voices"] for n in voice["samples"]]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    voices = [voice["id"] for voice in part["voices"]]
    for cut, row in zip(lhotse_cuts(source), source.all_utterances(), strict=True):
        audio = cut.load_audio()
        supervision = cut.supervisions[0]
        words = supervision.text.split()
        assert audio.shape == (1, cut.num_samples)
        assert cut.sampling_rate == 16000
        assert len(cut.supervisions) == 1
        position = 0
        for word, gap in zip(words, [*row.gaps, 0], strict=True):
            clip = 10 * voices.index(supervision.speaker) + WORDS.index(word)
            spoken = whole[starts[clip] : starts[clip] + lengths[clip]]
            assert np.array_equal(audio[0, position : position + len(spoken)], spoken)
            position += len(spoken)
            assert not audio[0, position : position + gap].any()
            position += gap
        assert position == audio.shape[1]


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    utterances=st.integers(1, 60),
    words=st.tuples(st.integers(1, 6), st.integers(0, 4)),
    gaps=st.tuples(st.floats(0, 0.2), st.floats(0, 0.3)),
    seed=st.integers(0, 2**31),
    split=st.sampled_from(["train", "valid"]),
)
def test_plans_keep_their_bounds(
    utterances: int, words: tuple[int, int], gaps: tuple[float, float], seed: int, split: str
) -> None:
    low, high = words[0], words[0] + words[1]
    shortest, longest = gaps[0], gaps[0] + gaps[1]
    source = Digits(split, utterances, low, high, [shortest, longest], seed)
    plan = source.all_utterances()
    assert len(plan) == len({row.id for row in plan}) == utterances
    for row in plan:
        assert low <= len(row.clips) <= high
        assert len(row.gaps) == len(row.clips) - 1
        assert all(round(shortest * 16000) <= gap <= round(longest * 16000) for gap in row.gaps)
        assert [WORDS[clip % 10] for clip in row.clips] == row.text.split()
        assert {source.clips.voices[clip // 10] for clip in row.clips} == {row.speaker}
    other = Digits(split, utterances, low, high, [shortest, longest], seed)
    assert source.all_utterances() == other.all_utterances()


@pytest.mark.slow
def test_a_new_process_makes_the_same_cuts(tmp_path: Path) -> None:
    code = (
        "from speechtrain.data.corpora.digits import Digits; import hashlib\n"
        "source = Digits('valid', 20, seed=5)\n"
        "print(source.fingerprint())\n"
        "from speechtrain.data.audio import read_cut\n"
        "print(hashlib.sha256(b''.join(read_cut(cut, 16000).tobytes() for cut in source.cuts())).hexdigest())"
    )
    here = Digits("valid", 20, seed=5)
    audio = hashlib.sha256(b"".join(cut.load_audio().tobytes() for cut in lhotse_cuts(here))).hexdigest()
    environment = {**os.environ, "SPEECHTRAIN_CACHE": str(tmp_path / "other"), "PYTHONHASHSEED": "7"}
    out = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert out.stdout.split() == [here.fingerprint(), audio]


def test_every_argument_and_the_words_change_the_fingerprint(tmp_path: Path) -> None:
    shutil.copytree(EMBEDDED, tmp_path / "renamed")
    text = (tmp_path / "renamed/index.json").read_text()
    (tmp_path / "renamed/index.json").write_text(text.replace('"nine"', '"niner"'))
    shutil.copytree(EMBEDDED, tmp_path / "copy")
    sources = [
        Digits("valid"),
        Digits("train"),
        Digits("valid", 1999),
        Digits("valid", min_words=2),
        Digits("valid", max_words=8),
        Digits("valid", gap_seconds=[0.02, 0.13]),
        Digits("valid", seed=1),
        Digits("valid", root=str(tmp_path / "renamed")),
    ]
    assert len({source.fingerprint() for source in sources}) == len(sources)
    assert Digits("valid", root=str(tmp_path / "copy")).fingerprint() == Digits("valid").fingerprint()


def test_the_cache_is_used_again_and_a_cut_short_file_is_written_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = next(lhotse_cuts(Digits("valid", 30))).load_audio()
    (path,) = (cache / "connected").iterdir()
    whole = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(connected, "_write_wav", None)  # a second source may not write
        assert np.array_equal(next(lhotse_cuts(Digits("valid", 30))).load_audio(), first)
    path.write_bytes(whole[: len(whole) // 2])
    next(lhotse_cuts(Digits("valid", 30)))
    assert path.read_bytes() == whole


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPEECHTRAIN_CACHE", str(tmp_path / "file"))
    with pytest.raises(MachineError, match=r"Not a directory.*SPEECHTRAIN_CACHE") as caught:
        next(lhotse_cuts(Digits("valid", 10)))
    assert "\n" not in str(caught.value)


def test_too_little_room_is_said_before_writing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(cache.parent)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(MachineError, match=r"0 MB free.*SPEECHTRAIN_CACHE"):
        next(lhotse_cuts(Digits("valid", 10)))


def test_damaged_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere/index.json: No such file.*make_digits"):
        Digits("valid", root=str(tmp_path / "nowhere"))
    (tmp_path / "index.json").write_text("{")
    with pytest.raises(DataError, match="damaged"):
        Digits("valid", root=str(tmp_path))
    shutil.copy(EMBEDDED / "index.json", tmp_path)
    with pytest.raises(DataError, match=r"valid.flac: cannot be decoded"):
        next(lhotse_cuts(Digits("valid", root=str(tmp_path))))
    samples, rate = soundfile.read(EMBEDDED / "valid.flac", dtype="int16")
    samples[1000] += 1
    soundfile.write(tmp_path / "valid.flac", samples, rate)
    with pytest.raises(DataError, match="its audio differs from the hash"):
        next(lhotse_cuts(Digits("valid", root=str(tmp_path))))


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", '{"splits": {"valid": {"voices": [{"id": 5}]}}}'])
def test_word_clips_refuse_a_hostile_index_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(DataError, match=r"index.json: damaged"):
        Digits("valid", root=str(tmp_path))


def test_word_clips_refuse_an_index_that_is_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "index.json")
    with pytest.raises(DataError, match="not a regular file"):
        Digits("valid", root=str(tmp_path))


def test_a_source_is_made_without_importing_lhotse_or_torch() -> None:
    code = (
        "import sys; from speechtrain.data.corpora.digits import Digits; Digits('train').fingerprint()\n"
        "assert 'lhotse' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

"""Bad recordings of a data set: nothing crashes, nothing hangs, all is counted."""

from __future__ import annotations

import json
import os
import struct
import wave
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from speechtrain.batch import Skip
from speechtrain.data.audio import Unusable, read_cut, read_with_faults
from speechtrain.data.formats.manifests import simple_cut
from speechtrain.data.module import SpeechData
from speechtrain.data.pieces import Recording, recordings
from speechtrain.data.recordings import read_header
from speechtrain.data.sampler import BatchLimits
from speechtrain.data.skips import SkipLog, most_bad
from speechtrain.data.training_set import sample_rows
from speechtrain.errors import DataError
from speechtrain.text.vocabulary import Characters

RATE = 16_000
HOURS = 3 * 3600

Bad = tuple[Callable[[Path], None], dict[str, Any], str]


def tone(seconds: float = 1.0) -> Any:
    return 0.2 * np.sin(np.arange(round(seconds * RATE)) / 5).astype(np.float32)


def plain(path: Path, seconds: float = 1.0) -> None:
    soundfile.write(path, tone(seconds), RATE)


def header_only(path: Path) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)


def three_hours(path: Path) -> None:
    """A sparse file: a tone of two seconds, then zeros."""
    size = HOURS * RATE * 2
    header = (
        b"RIFF"
        + struct.pack("<I", size + 36)
        + b"WAVEfmt "
        + struct.pack("<IHHIIHH", 16, 1, 1, RATE, 32_000, 2, 16)
    )
    data = (tone(2.0) * 32767).astype("<i2").tobytes()
    with path.open("wb") as file:
        file.write(header + b"data" + struct.pack("<I", size) + data)
        file.truncate(size + 44)


def truncated_flac(path: Path) -> None:
    soundfile.write(path, np.random.default_rng(0).normal(size=4 * RATE) / 10, RATE, format="FLAC")
    path.write_bytes(path.read_bytes()[:20_000])


def truncated_wav(path: Path) -> None:
    """The file has the length of the manifest, its header that of three seconds."""
    soundfile.write(path, tone(3.0), RATE)
    path.write_bytes(path.read_bytes()[: 44 + 2 * RATE])


def streamed_wav(path: Path) -> None:
    """A program that writes to a pipe does not know the length, and sets the largest."""
    soundfile.write(path, tone(), RATE)
    content = bytearray(path.read_bytes())
    content[40:44] = b"\xff\xff\xff\xff"
    path.write_bytes(content)


def strange_rate(path: Path) -> None:
    soundfile.write(path, tone(), RATE)
    content = bytearray(path.read_bytes())
    content[24:28] = struct.pack("<I", 2_000_000_000)
    path.write_bytes(content)


def nan(path: Path) -> None:
    samples = tone()
    samples[100] = np.nan
    soundfile.write(path, samples, RATE, subtype="FLOAT")


def infinite(path: Path) -> None:
    samples = tone()
    samples[100] = -np.inf
    soundfile.write(path, samples, RATE, subtype="FLOAT")


# what is written, what the manifest says besides, and the reason that is counted
BAD_AUDIO: dict[str, Bad] = {
    "empty": (lambda path: path.write_bytes(b"") and None, {}, "empty_file"),
    "header-only": (header_only, {}, "no_samples"),
    "half-a-header": (lambda path: path.write_bytes(b"RIFF\0\0\0\0WAVE") and None, {}, "unreadable"),
    "zeros": (lambda path: soundfile.write(path, np.zeros(RATE), RATE), {}, "silent"),
    "opposed-channels": (
        lambda path: soundfile.write(path, np.stack([tone(), -tone() + 2e-5], 1), RATE, subtype="FLOAT"),
        {},
        "silent",
    ),
    "nan": (nan, {}, "not_finite"),
    "infinite": (infinite, {}, "not_finite"),
    "shorter-than-said": (partial(plain, seconds=0.5), {}, "wrong_length"),
    "longer-than-said": (partial(plain, seconds=4.0), {}, "wrong_length"),
    "three-hours-said-to-be-one-second": (three_hours, {}, "wrong_length"),
    "begins-behind-its-end": (
        lambda path: soundfile.write(path, tone(), RATE),
        {"offset": 9.0},
        "wrong_length",
    ),
    "ends-behind-its-end": (
        lambda path: soundfile.write(path, tone(), RATE),
        {"offset": 0.5},
        "wrong_length",
    ),
    "text": (lambda path: path.write_text("no audio at all") and None, {}, "unreadable"),
    "noise": (lambda path: path.write_bytes(np.random.default_rng(1).bytes(5000)) and None, {}, "unreadable"),
    "truncated-flac": (truncated_flac, {"duration": 4.0}, "unreadable"),
    "truncated-wav": (truncated_wav, {}, "wrong_length"),
    "strange-rate": (strange_rate, {}, "unreadable"),
    "missing": (lambda path: None, {}, "missing"),
    "pipe": (lambda path: os.mkfifo(path), {}, "unreadable"),
    "folder": (lambda path: path.mkdir(), {}, "unreadable"),
}
BAD_TEXT: dict[str, Bad] = {
    "transcript-longer-than-frames": (
        lambda path: soundfile.write(path, tone(), RATE),
        {"text": "a" * 51},
        "long_transcript",
    ),
    "empty-transcript": (plain, {"text": " "}, "empty_transcript"),
    "unknown-symbol": (plain, {"text": "naïve"}, "unknown_symbol"),
}
BAD_LENGTH: dict[str, Bad] = {
    "three-hours": (three_hours, {"duration": float(HOURS)}, "too_long"),
    "a-blink": (partial(plain, seconds=0.05), {"duration": 0.05}, "too_short"),
    "no-length": (plain, {"duration": 0}, "too_short"),
}
FINE: dict[str, tuple[Callable[[Path], None], dict[str, Any]]] = {
    "plain": (plain, {}),
    "streamed-wav": (streamed_wav, {}),
    "mp3-named-wav": (lambda path: soundfile.write(path, tone(), RATE, format="MP3"), {}),
    "stereo": (lambda path: soundfile.write(path, np.stack([tone(), tone()], 1), RATE), {}),
    "eight-channels": (lambda path: soundfile.write(path, np.stack([tone()] * 8, 1), RATE), {}),
    "8-khz": (lambda path: soundfile.write(path, tone()[::2], 8000), {}),
    "44.1-khz": (lambda path: soundfile.write(path, np.resize(tone(), 44_100), 44_100), {}),
    "24-bit": (lambda path: soundfile.write(path, tone(), RATE, subtype="PCM_24"), {}),
    "mu-law": (lambda path: soundfile.write(path, tone(), RATE, subtype="ULAW"), {}),
    "a-little-short": (partial(plain, seconds=0.95), {}),
    "a-part": (partial(plain, seconds=5.0), {"offset": 2.0}),
    "fifty-labels": (plain, {"text": "a" * 50}),
}


def manifest(folder: Path, kinds: dict[str, Any], name: str = "m") -> str:
    """A NeMo manifest of recordings of those kinds, one second each unless the kind says otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for kind, (make, says, *_) in kinds.items():
        make(folder / f"{kind}.wav")
        lines.append({"audio_filepath": f"{kind}.wav", "duration": 1.0, "text": "one two", **says})
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def make_data(train: Any, valid: Any = None, **options: Any) -> SpeechData:
    options = {"workers": 0, "max_bad": 1000, "batch": BatchLimits(count=4), **options}
    return SpeechData(train, valid or {}, Characters(), **options)


def kind_of(identifier: str) -> str:
    return identifier.rpartition(":")[2]


def test_every_kind_of_bad_recording_is_skipped_counted_and_listed(cache: Path, tmp_path: Path) -> None:
    bad = {**BAD_AUDIO, **BAD_TEXT, **BAD_LENGTH}
    path = manifest(tmp_path / "d", {**bad, **FINE})
    data = make_data(path, run_dir=str(tmp_path / "run"), speed=[0.9, 1.1])
    batches = list(islice(data.train(), 2 * data.micro_batches_per_epoch))
    skips = {kind_of(skip.id): skip for batch in batches for skip in batch.skipped}
    assert {kind: skip.reason for kind, skip in skips.items()} == {
        kind: reason for kind, (_, _, reason) in {**BAD_AUDIO, **BAD_TEXT}.items()
    }
    for kind in BAD_AUDIO:
        assert f"{kind}.wav" in skips[kind].detail  # the file is named
    assert {kind_of(name) for batch in batches for name in batch.ids if name} == set(FINE)
    for batch in batches:
        for name, weight, length, labels, audio in zip(
            batch.ids, batch.weight, batch.audio_lengths, batch.label_lengths, batch.audio, strict=True
        ):
            assert bool(name) == bool(weight) == bool(labels) == bool(audio.any())
            assert length > 0.8 * RATE  # a lost row keeps its planned length

    expected: dict[str, int] = {}
    for _, _, reason in bad.values():
        expected[reason] = expected.get(reason, 0) + 1
    assert data.report() == expected
    listed = [json.loads(line) for line in (tmp_path / "run/skipped.jsonl").read_text().splitlines()]
    assert {kind_of(row["id"]) for row in listed} == {*BAD_AUDIO, *BAD_TEXT}
    assert len(listed) == len(BAD_AUDIO) + len(BAD_TEXT)  # once, in two epochs
    filtered = [json.loads(line) for line in (tmp_path / "run/filtered.jsonl").read_text().splitlines()]
    found = {kind_of(row["id"]): row["reason"] for row in filtered}
    assert found == {kind: reason for kind, (_, _, reason) in BAD_LENGTH.items()}


@pytest.mark.parametrize("kind", sorted(BAD_AUDIO.keys() - {"zeros", "opposed-channels"}))
def test_an_evaluation_set_drops_what_cannot_be_read(cache: Path, tmp_path: Path, kind: str) -> None:
    path = manifest(tmp_path / "d", {"plain": FINE["plain"], kind: BAD_AUDIO[kind]})
    (batch,) = make_data("unused", {"dev": path}, max_bad=1).valid()["dev"]
    assert [kind_of(name) for name in batch.ids if name] == ["plain"]
    (skip,) = batch.unusable
    assert (kind_of(skip.id), skip.reason) == (kind, BAD_AUDIO[kind][2])
    with pytest.raises(DataError, match=rf"{kind}\.wav.*1 of 2 recordings.*data\.max_bad=0") as caught:
        list(make_data("unused", {"dev": path}, max_bad=0).valid()["dev"])
    assert "\n" not in str(caught.value)


def test_a_claim_of_days_costs_an_evaluation_nothing(cache: Path, tmp_path: Path) -> None:
    kinds = {"days": (plain, {"duration": 9e5}, "too_long"), "plain": FINE["plain"]}
    for shapes in (0, 1):
        data = make_data(
            "unused", {"dev": manifest(tmp_path / "d", kinds)}, max_decoded_seconds=10, shapes=shapes
        )
        batches = list(data.valid()["dev"])
        assert [skip.reason for batch in batches for skip in batch.unusable] == ["too_long"]
        assert max(batch.audio.shape[1] for batch in batches) <= (12 * RATE if shapes else RATE)


# --- recordings with a little less or more audio than promised -----------------------------------


def cut_off(path: Path, share: float, seconds: float = 4.0, form: str = "WAV") -> None:
    """A recording whose file was cut off at this share of its bytes."""
    soundfile.write(path, np.random.default_rng(0).normal(size=round(seconds * RATE)) / 10, RATE, format=form)
    path.write_bytes(path.read_bytes()[: round(share * path.stat().st_size)])


NEARLY: dict[str, Bad] = {
    "wav-of-99-%": (partial(cut_off, share=0.99), {"duration": 4.0}, "other_length"),
    "wav-of-91-%": (partial(cut_off, share=0.91), {"duration": 4.0}, "other_length"),
    "aiff-of-95-%": (partial(cut_off, share=0.95, form="AIFF"), {"duration": 4.0}, "other_length"),
    "flac-of-98-%": (
        partial(cut_off, share=0.98, seconds=20, form="FLAC"),
        {"duration": 20.0},
        "other_length",
    ),
    "mp3-of-95-%": (partial(cut_off, share=0.95, form="MP3"), {"duration": 4.0}, "other_length"),
    "said-to-be-longer": (partial(plain, seconds=1.85), {"duration": 2.15}, "other_length"),
    "said-to-be-shorter": (partial(plain, seconds=2.15), {"duration": 1.85}, "other_length"),
    "ends-behind-its-end": (partial(plain, seconds=1.85), {"offset": 1.0, "duration": 1.15}, "other_length"),
}


def test_a_recording_of_nearly_the_promised_length_is_read_and_counted(
    cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = manifest(tmp_path / "d", {**NEARLY, "plain": FINE["plain"]})
    data = make_data(path, {"dev": path}, max_bad=0, run_dir=str(tmp_path / "run"))
    for batches in (data.valid()["dev"], islice(data.train(), data.micro_batches_per_epoch)):
        batches = list(batches)
        assert {kind_of(name) for batch in batches for name in batch.ids} == {*NEARLY, "plain"}
        skips = [skip for batch in batches for skip in batch.skipped]
        assert {kind_of(skip.id): skip.reason for skip in skips} == dict.fromkeys(NEARLY, "other_length")
    assert data.report() == {"other_length": len(NEARLY)}
    data.close()
    assert sum("used" in record.message for record in caplog.records) == 2  # the first one, and the count
    assert f"{len(NEARLY)} other_length" in caplog.text


# --- channels, and bytes that no header explains ---------------------------------------------------


def channels(path: Path, *rows: np.ndarray) -> Path:
    soundfile.write(path, np.stack(rows, 1), RATE, subtype="FLOAT")
    return path


def test_a_channel_is_read_unless_the_manifest_names_one(cache: Path, tmp_path: Path) -> None:
    left, right = tone().astype(np.float32), 0.3 * tone()[::-1].astype(np.float32)
    path = channels(tmp_path / "two.wav", left, right)
    cut = simple_cut("a", str(path), 0.0, 1.0, "")
    for channel, expected in ((None, (left + right) / 2), (0, left), (1, right)):
        samples, faults = read_with_faults(cut, RATE, channel=channel)
        np.testing.assert_allclose(samples, expected, atol=1e-6)
        (recording,) = recordings(str(path), RATE, 60.0, channel)
        assert isinstance(recording, Recording)
        ((_, piece),) = recording.pieces(20.0)
        np.testing.assert_array_equal(piece, samples)
        assert faults == []
    with pytest.raises(
        Unusable, match=r"no_channel: .*two\.wav: it has 2 channels, and channel 2 counts from 0"
    ):
        read_with_faults(cut, RATE, channel=2)
    cut["recording"]["sources"][0]["channels"] = [0, 1]
    np.testing.assert_allclose(read_with_faults({**cut, "channel": 1}, RATE, channel=0)[0], right, atol=1e-6)
    folder = manifest(tmp_path / "d", {"two": (lambda other: channels(other, left, right) and None, {})})
    batch = next(make_data(folder, channel=1).train())
    np.testing.assert_allclose(batch.audio[0], right, atol=1e-6)
    with pytest.raises(ValueError, match="channel=-1"):
        make_data(folder, channel=-1)


def test_channels_that_cancel_or_say_nothing_are_faults_with_a_cure(cache: Path, tmp_path: Path) -> None:
    voice, noise = tone(), np.random.default_rng(0).normal(size=RATE) / 10
    pairs = {
        "opposed": (voice, -0.95 * voice),
        "dead": (voice, 0 * voice),
        "two": (voice, noise),
        "one": (voice,),
    }
    found = {}
    for name, rows in pairs.items():
        cut = simple_cut(name, str(channels(tmp_path / f"{name}.wav", *rows)), 0.0, 1.0, "")
        found[name] = [
            (fault.reason, "data.channel=" in fault.detail) for fault in read_with_faults(cut, RATE)[1]
        ]
    assert found["opposed"] == [("opposed_channels", True)]
    assert found["dead"] == [("silent_channel", True)]
    assert found["two"] == found["one"] == []
    exactly = {"a": (lambda path: channels(path, voice, -voice) and None, {})}
    with pytest.raises(DataError, match=r"silent: .*Set data\.channel=0"):
        next(make_data(manifest(tmp_path / "d", exactly)).train())


@pytest.mark.parametrize(("share", "reason"), [(0.5, "unexplained_bytes"), (0.0, "no_samples")])
def test_bytes_that_the_header_does_not_explain_are_named(tmp_path: Path, share: float, reason: str) -> None:
    path = tmp_path / "half.wav"
    soundfile.write(path, np.random.default_rng(0).normal(size=RATE) / 10, RATE)
    content = bytearray(path.read_bytes())
    content[40:44] = struct.pack("<I", round(share * 2 * RATE))
    path.write_bytes(content)
    cut = simple_cut("a", str(path), 0.0, max(share, 0.1), "")
    text = f"half.wav: its header explains {44 + round(share * 2 * RATE)} of {len(content)} bytes"
    if share:
        (fault,) = read_with_faults(cut, RATE)[1]
        assert (fault.reason, fault.detail.endswith(text)) == (reason, True)
    else:
        with pytest.raises(Unusable, match=f"{reason}: .*{text}"):
            read_cut(cut, RATE)
        with pytest.raises(Unusable, match=text):
            read_header(str(path))


def test_the_duration_of_the_file_counts(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    for seconds, duration in ((1.85, 2.15), (2.15, 1.85), (1.0, 1.005)):
        plain(path, seconds=seconds)
        samples = read_cut(simple_cut("a", str(path), 0.0, duration, ""), RATE)
        assert len(samples) == round(seconds * RATE)
    with pytest.raises(Unusable, match=r"1\.00 s from 0\.00 s, 1\.50 s in the manifest.*or remove it"):
        read_cut(simple_cut("a", str(path), 0.0, 1.5, ""), RATE)


def test_a_manifest_without_durations_is_the_way_out(cache: Path, tmp_path: Path) -> None:
    path = manifest(tmp_path / "d", {"a": (plain, {"duration": 3.0}), "b": (plain, {"duration": 9.0})})
    with pytest.raises(DataError, match="or remove it"):
        make_data(path).check()
    Path(path).write_text(
        Path(path).read_text().replace('"duration": 3.0, ', "").replace('"duration": 9.0, ', "")
    )
    assert next(make_data(path).train()).utterances == 2


def test_an_evaluation_set_keeps_everything_else(cache: Path, tmp_path: Path) -> None:
    kinds = {**FINE, **BAD_TEXT, "zeros": BAD_AUDIO["zeros"], "a-blink": BAD_LENGTH["a-blink"]}
    data = make_data("unused", {"dev": manifest(tmp_path / "d", kinds)}, max_seconds=0.5)
    rows = {
        kind_of(name): (text, float(weight), int(labels), int(length))
        for batch in data.valid()["dev"]
        for name, text, weight, labels, length in zip(
            batch.ids, batch.texts, batch.weight, batch.label_lengths, batch.audio_lengths, strict=True
        )
    }
    assert rows.keys() == kinds.keys()
    assert rows["unknown-symbol"][:3] == ("naïve", 0.0, 0)  # counts in the error rate, not in the loss
    assert rows["empty-transcript"][1] == 1.0
    assert rows["transcript-longer-than-frames"][:3] == ("a" * 51, 1.0, 51)
    assert rows["a-blink"][3] == 1600


def test_durations_at_the_limits_are_kept(cache: Path, recordings: Any) -> None:
    records = [{"audio_filepath": "a.wav", "duration": d, "text": "a"} for d in (0.0999, 0.1, 16.7, 16.701)]
    data = make_data(recordings.nemo("m.jsonl", records), max_seconds=16.7)
    assert data.training_set.rows.tolist() == [1, 2]
    with pytest.raises(DataError, match=r"none of 4 recordings is between 17 and 18 s"):
        make_data(recordings.nemo("m.jsonl", records), min_seconds=17.0, max_seconds=18.0).train()


# --- the budget ---------------------------------------------------------------------------------


def test_more_bad_recordings_than_the_budget_end_the_run(cache: Path, tmp_path: Path) -> None:
    gone = {f"gone-{i}": BAD_AUDIO["missing"] for i in range(4)}
    path = manifest(tmp_path / "d", {**gone, "plain": FINE["plain"]})
    data = make_data(path, max_bad=3, run_dir=str(tmp_path / "run"))
    with pytest.raises(DataError, match=r"4 of 5 training recordings are unusable.*skipped\.jsonl") as caught:
        list(islice(data.train(), 4))
    assert "\n" not in str(caught.value)
    assert len((tmp_path / "run/skipped.jsonl").read_text().splitlines()) == 4
    within = make_data(path, max_bad=4)
    assert sum(batch.utterances for batch in islice(within.train(), 4)) == 2


KNOWN_BEFORE = {
    kind: BAD_AUDIO[kind]
    for kind in ("missing", "empty", "text", "header-only", "begins-behind-its-end", "shorter-than-said")
}


@pytest.mark.parametrize("share", [0.01, 0.05])
def test_known_bad_recordings_are_left_out_before_the_first_update(
    cache: Path, tmp_path: Path, share: float
) -> None:
    """They are counted and listed, and the run ends only if more than a tenth of its recordings is bad."""
    long_text = BAD_TEXT["transcript-longer-than-frames"]
    kinds = [*KNOWN_BEFORE.values(), long_text]
    bad = {f"bad-{i}": kinds[i % len(kinds)] for i in range(round(share * 260))}
    good = {f"good-{i}": FINE["plain"] for i in range(260 - len(bad))}
    path = manifest(tmp_path / "d", {**good, **bad})
    limits = {"max_bad": None, "run_dir": str(tmp_path / "run")}
    data = make_data(path, **limits)
    data.check()
    (line,) = [line for line in data.warnings() if "cannot be used" in line]
    assert line.startswith(f"data.train: {len(bad)} of 260 recordings (0.00 of 0.07 h) cannot be used")
    assert line.count("'m:") == min(3, len(bad))
    next(data.train())
    listed = [json.loads(line) for line in (tmp_path / "run/skipped.jsonl").read_text().splitlines()]
    assert {kind_of(row["id"]): row["reason"] for row in listed} == {
        kind: reason for kind, (_, _, reason) in bad.items()
    }
    resumed = make_data(path, **limits)
    resumed.load_state_dict(data.state_dict())
    assert resumed.report() == data.report()
    skipped = {kind_of(skip.id) for batch in islice(resumed.train(), 64) for skip in batch.skipped}
    assert skipped <= set(bad)
    with pytest.raises(DataError, match="of 260 "):
        make_data(path, max_bad=0).check()


def test_the_budget_of_a_user_replaces_that_of_the_defaults() -> None:
    assert most_bad(None, None, total=50) == 10
    assert most_bad(None, None, total=1269) == 126.9
    assert most_bad(0, None, total=1269) == 0
    assert most_bad(None, 0.5, total=10) == 5
    assert most_bad(10, 0.001, total=1269) == 10


def test_the_budget_is_exceeded_only_by_number_and_share(tmp_path: Path) -> None:
    log = SkipLog("", max_bad=10, max_bad_share=0.001)
    for i in range(10):
        log.add(Skip(f"a{i}", "missing"), total=20)
    with pytest.raises(DataError, match="11 of 20"):
        log.add(Skip("a10", "missing"), total=20)


def test_skips_are_counted_once_over_ranks_and_resumes(tmp_path: Path) -> None:
    first, second = (SkipLog(str(tmp_path), 10, 0.001) for _ in range(2))
    first.add(Skip("a", "missing", "a.wav"), 100)
    second.add(Skip("b", "silent"), 100)
    second.add(Skip("a", "missing"), 100)
    first.add(Skip("c", "missing"), 100)
    assert first.counts == {"missing": 2, "silent": 1}
    with (tmp_path / "skipped.jsonl").open("a") as file:
        file.write('{"id": "torn')  # killed while writing
    third = SkipLog(str(tmp_path), 10, 0.001)
    third.add(Skip("b", "silent"), 100)
    third.add(Skip("d", "missing"), 100)
    fresh = SkipLog(str(tmp_path), 10, 0.001)
    fresh.refresh()
    assert fresh.counts == {"missing": 3, "silent": 1}


def test_a_list_that_cannot_be_written_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run").write_text("a file where the folder should be")
    log = SkipLog(str(tmp_path / "run"), 10, 0.001)
    for i in range(3):
        log.add(Skip(f"a{i}", "missing"), 100)
    assert log.counts == {"missing": 3}
    assert sum("cannot be written" in record.message for record in caplog.records) == 1


# --- before training ----------------------------------------------------------------------------


def test_recordings_that_are_not_there_are_named_before_training(cache: Path, recordings: Any) -> None:
    records = [{"audio_filepath": f"wrong/{i}.wav", "duration": 1.0, "text": "a"} for i in range(30)]
    path = recordings.nemo("m.jsonl", records)
    with pytest.raises(DataError, match=r"data\.train: 30 of 30 .*30 missing.*wrong/0\.wav") as caught:
        make_data(path, max_bad=10).check()
    assert "\n" not in str(caught.value)
    good = recordings.corpus("good", 2)
    message = r"wrong/0\.wav does not exist: 30 of 30 checked recordings of data\.valid\.dev"
    with pytest.raises(DataError, match=message):
        make_data(good, {"dev": path}).check()
    make_data(good, {"dev": good}).check()


def test_a_small_set_without_a_usable_recording_is_refused_before_training(
    cache: Path, recordings: Any
) -> None:
    """The budget alone would let up to ten be lost, all of them."""
    recordings.corpus("good", 6)
    lines = [json.loads(line) for line in (recordings.folder / "good.jsonl").read_text().splitlines()]
    doubled = [{**line, "duration": 2 * line["duration"]} for line in lines]
    path = recordings.nemo("doubled.jsonl", doubled)
    with pytest.raises(DataError, match=r"train: 6 of 6 .*\(6 wrong_length; "):
        make_data(path, max_bad=10).check()
    make_data(recordings.nemo("few.jsonl", [*doubled[:2], *lines[2:]]), max_bad=10).check()


def test_a_large_set_is_sampled(cache: Path, recordings: Any) -> None:
    audio = str(recordings.tone("a.wav"))
    path = recordings.nemo("m.jsonl", [{"audio_filepath": audio, "duration": 1.0, "text": "a"}] * 3000)
    data = make_data(path)
    looked = sample_rows(data.training_set.rows, 1000, seed=1)
    assert len(looked) == len(set(looked.tolist())) == 1000
    assert looked.max() > 2000 > 1000 > looked.min()
    data.check()

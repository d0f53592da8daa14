"""Recordings and cuts of a stranger: nothing that they name is run, followed or read without bound."""

from __future__ import annotations

import copy
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from speechtrain.data.audio import read_cut, read_file
from speechtrain.data.formats.lhotse_cuts import MOST_SAMPLES, UnknownPart, known_cut
from speechtrain.data.recordings import Unusable, read_header

RATE = 16_000
TONE = (0.1 * np.sin(np.arange(2 * RATE) * 0.1)).astype(np.float32)
Record = dict[str, Any]


def recording(source: object, kind: str = "file", **more: object) -> Record:
    sources = [{"type": kind, "channels": [0], "source": source}]
    known = {"id": "r", "sources": sources, "sampling_rate": RATE, "num_samples": 2 * RATE, "duration": 2.0}
    return {**known, "channel_ids": [0], **more}


def mono(held: Record, **more: object) -> Record:
    cut = {"id": "c", "start": 0.0, "duration": 2.0, "channel": 0, "supervisions": [], "recording": held}
    return {**cut, "type": "MonoCut", **more}


def track(held: Record, **more: object) -> Record:
    inner = {key: value for key, value in mono(held).items() if key != "type"}
    return {"type": "MonoCut", "offset": 0.0, "cut": inner, **more}


def reverb(rir: Record) -> Record:
    return {"name": "ReverbWithImpulseResponse", "kwargs": {"rir": rir, "rir_channels": [0]}}


def mixed(*tracks: Record, **more: object) -> Record:
    return {"id": "m", "type": "MixedCut", "tracks": list(tracks), **more}


EVIL: dict[str, Callable[[str, str], Record]] = {
    "a command": lambda wav, run: mono(recording(run, "command")),
    "a URL": lambda wav, run: mono(recording(f"pipe:{run}", "url")),
    "memory": lambda wav, run: mono(recording("UklGRg==", "memory")),
    "two sources, one a command": lambda wav, run: mono(
        {**recording(wav), "sources": recording(wav)["sources"] + recording(run, "command")["sources"]}
    ),
    "an impulse response": lambda wav, run: mono(
        recording(wav, transforms=[reverb(recording(run, "command"))])
    ),
    "an impulse response by URL": lambda wav, run: mono(
        recording(wav, transforms=[reverb(recording(f"pipe:{run}", "url"))])
    ),
    "an impulse response that is a cut": lambda wav, run: mono(
        recording(wav, transforms=[reverb(mono(recording(run, "command")))])
    ),
    "a track": lambda wav, run: mixed(track(recording(wav)), track(recording(run, "command"), snr=10.0)),
    "the reference of a mixture": lambda wav, run: mixed(
        track(recording(wav)), snr_reference=track(recording(run, "command"))
    ),
    "a mixture's own transforms": lambda wav, run: mixed(
        track(recording(wav)), transforms=[reverb(recording(run, "command"))]
    ),
    "a track of two types": lambda wav, run: mixed(
        {**track(recording(wav)), "cut": mono(recording(run, "command"), type="PaddingCut")}
    ),
    "a mixture in a mixture": lambda wav, run: mixed(
        {"type": "MixedCut", "offset": 0.0, "cut": mixed(track(recording(run, "command")))}
    ),
}


@pytest.mark.parametrize("kind", EVIL)
def test_no_part_of_a_cut_runs_a_command(tmp_path: Path, kind: str) -> None:
    wav, canary = tmp_path / "ok.wav", tmp_path / "canary"
    soundfile.write(wav, TONE, RATE)
    run = f"touch {shlex.quote(str(canary))}; cat {shlex.quote(str(wav))}"
    with pytest.raises(Unusable):
        read_cut(EVIL[kind](str(wav), run), RATE)
    assert not canary.exists()


NAMES = ["x;touch CANARY;", "x$(touch CANARY)", "x`touch CANARY`", "x&touch CANARY&", "x|touch CANARY|"]


@pytest.mark.parametrize("suffix", [".sph", ".SPH", ".opus", ".m4a", ".mp4"])
@pytest.mark.parametrize("name", [*NAMES, "x\ntouch CANARY\n", "x>CANARY ", "pipe:touch CANARY", "-x"])
def test_no_name_of_a_recording_is_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, suffix: str
) -> None:
    """No fallback follows where libsndfile cannot read a file; those ran a shell."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LHOTSE_LEGACY_OPUS_LOADING", "1")
    path = tmp_path / f"{name}{suffix}"
    path.write_bytes(b"NIST_1A\n   1024\n" + b"x" * 2000)
    for read in (lambda: read_cut(mono(recording(str(path))), RATE), lambda: read_file(str(path), RATE)):
        with pytest.raises(Unusable):
            read()
    assert os.listdir(tmp_path) == [path.name]


def test_a_sound_file_of_a_strange_name_is_read(tmp_path: Path) -> None:
    for name in [*NAMES, "pipe:x", "http:x"]:
        path = tmp_path / f"{name}.sph"
        soundfile.write(str(path), TONE, RATE, format="NIST", subtype="PCM_16")
        assert len(read_file(str(path), RATE)) == 2 * RATE


def test_a_file_compressed_by_shorten_names_its_conversion(tmp_path: Path) -> None:
    """LDC's Switchboard is; libsndfile has no decoder for it."""
    header = (
        "NIST_1A\n   1024\nconversation_id -s4 4362\nchannel_count -i 2\nsample_rate -i 8000\n"
        "sample_coding -s27 ulaw,embedded-shorten-v2.00\nend_head\n"
    )
    path = tmp_path / "sw 04362.sph"
    path.write_bytes(header.encode().ljust(1024) + b"ajkg\x02" + bytes(500))
    with pytest.raises(
        Unusable, match=r"compressed by Shorten\. Convert it \(sph2pipe -f wav '/.*sph' OUT.wav\)"
    ):
        read_file(str(path), 8000)


@pytest.mark.parametrize(("format", "subtype", "suffix"), [
    ("NIST", "ULAW", "sph"), ("NIST", "PCM_16", "sph"), ("OGG", "OPUS", "opus"), ("OGG", "VORBIS", "ogg"),
    ("MP3", "MPEG_LAYER_III", "mp3"), ("FLAC", "PCM_16", "flac"), ("AIFF", "PCM_16", "aiff"),
])  # fmt: skip
def test_formats_are_read_as_before(tmp_path: Path, format: str, subtype: str, suffix: str) -> None:
    """Whole and in part; two channels at 8 kHz, as LDC's telephone speech has them."""
    path = tmp_path / f"a.{suffix}"
    stereo = np.stack([TONE, -0.5 * TONE], 1)
    soundfile.write(path, stereo, 8000, format=format, subtype=subtype)
    expected, rate = soundfile.read(path, dtype="float32")
    assert rate == 8000
    np.testing.assert_allclose(read_file(str(path), 8000), expected.mean(1), atol=1e-6)
    held = recording(str(path), sampling_rate=8000, num_samples=len(expected), duration=len(expected) / 8000)
    part = read_cut(mono(held, start=1.0, duration=0.5), 8000)
    expected_part, _ = soundfile.read(path, dtype="float32", start=8000, frames=4000)
    np.testing.assert_allclose(part, expected_part.mean(1), atol=1e-6)
    assert read_header(str(path)).frames == len(expected)


def test_mixtures_made_by_lhotse_are_read_as_before(tmp_path: Path) -> None:
    from lhotse import Recording

    rng = np.random.default_rng(0)
    for name, rate in (("a", RATE), ("b", RATE), ("c", 8000)):
        soundfile.write(tmp_path / f"{name}.wav", 0.1 * rng.normal(size=2 * rate), rate, subtype="FLOAT")
    first, second, other = (Recording.from_file(tmp_path / f"{n}.wav").to_cut() for n in "abc")
    noisy = first.mix(second, snr=10, offset_other_by=0.25)
    made = [
        noisy,
        noisy.perturb_volume(0.5),
        noisy.perturb_speed(1.1),
        first.perturb_speed(0.9).append(second.perturb_volume(2.0)).pad(6.0),
        first.mix(other.resample(RATE), snr=5),
        first.append(second, snr=3).truncate(offset=0.5, duration=2.5),
    ]
    for number, cut in enumerate(made):
        record = copy.deepcopy(cut.to_dict())
        expected = np.atleast_2d(cut.load_audio()).mean(0)
        np.testing.assert_allclose(read_cut(record, RATE), expected, atol=1e-6, err_msg=str(number))
        assert record == cut.to_dict(), "reading changes no manifest"


def test_several_channels_are_read_as_before(tmp_path: Path) -> None:
    """Of one file, of a file for each channel, of some channels, mixed, padded, and at another speed."""
    from lhotse import Recording
    from lhotse.audio import AudioSource

    rng, rate = np.random.default_rng(0), 44_100
    audio = (0.1 * rng.normal(size=(2 * rate, 4))).astype(np.float32)
    soundfile.write(tmp_path / "four.wav", audio, rate, subtype="FLOAT")
    for channel in range(4):
        soundfile.write(tmp_path / f"{channel}.wav", audio[:, channel], rate, subtype="FLOAT")
    one = Recording.from_file(tmp_path / "four.wav", recording_id="one")
    sources = [AudioSource("file", [channel], str(tmp_path / f"{channel}.wav")) for channel in range(4)]
    several = Recording("several", sources, rate, 2 * rate, 2.0, channel_ids=[0, 1, 2, 3])
    whole, array = one.to_cut(), several.to_cut()
    made = [
        (whole, audio.mean(1)),
        (array, audio.mean(1)),
        (array.with_channels([1, 3]), audio[:, [1, 3]].mean(1)),
        (whole.with_channels([2]), audio[:, 2]),
        (array.with_channels(2).truncate(offset=0.5, duration=1.0), audio[rate // 2 : 3 * rate // 2, 2]),
        (whole.pad(3.0), None),
        (whole.mix(array, offset_other_by=0.5, snr=5), None),
        (array.perturb_speed(0.9), None),
        (whole.perturb_speed(1.1).perturb_volume(0.5).truncate(duration=1.0), None),
        (whole.resample(RATE), None),
        (whole.with_channels([1]).mix(array, snr=3).perturb_volume(2.0), None),
        (whole.mix(whole.perturb_speed(1.1), snr=10).append(array.perturb_speed(1.1)), None),
    ]
    for number, (cut, known) in enumerate(made):
        # lhotse's own, before and after it was made to read with ours
        expected = np.atleast_2d(cut.load_audio()).mean(0)
        if known is not None:
            np.testing.assert_allclose(expected, known, atol=1e-6, err_msg=str(number))
        np.testing.assert_allclose(
            read_cut(cut.to_dict(), int(cut.sampling_rate)), expected, atol=1e-6, err_msg=str(number)
        )
        np.testing.assert_allclose(np.atleast_2d(cut.load_audio()).mean(0), expected, atol=1e-6)


def test_a_speed_of_any_rate_is_read(tmp_path: Path) -> None:
    """Rates without a common divisor go by another filter, which is as near as hearing."""
    from lhotse import Recording

    soundfile.write(tmp_path / "a.wav", TONE, RATE, subtype="FLOAT")
    for factor in (0.9137, 1.0001, 1.1):
        cut = Recording.from_file(tmp_path / "a.wav").to_cut().perturb_speed(factor)
        found = read_cut(cut.to_dict(), RATE)
        assert len(found) == cut.num_samples
        times = np.arange(len(found)) * (round(RATE * factor) / RATE)
        np.testing.assert_allclose(found[100:-100], 0.1 * np.sin(times * 0.1)[100:-100], atol=2e-3)


def test_numbers_have_bounds(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", TONE, RATE)
    held = recording(str(tmp_path / "a.wav"))
    assert known_cut(mixed(track(held)))["tracks"][0]["cut"]["recording"]["sources"] == held["sources"]
    silence = {"id": "p", "type": "PaddingCut", "duration": 1.0, "sampling_rate": RATE, "feat_value": 0.0}
    speed = {"name": "Speed", "kwargs": {"factor": 1e-6}}
    wrong: list[tuple[Record, str]] = [
        (mixed(track(held), {"offset": 0.0, "cut": {**silence, "duration": 1e12}}), "'duration'"),
        (mixed(track(held), {"offset": 0.0, "cut": {**silence, "duration": 1e5}}), "s of silence"),
        (mixed(track(held, offset=1e9)), "'offset'"),
        (mixed(track(held, offset=float("nan"))), "'offset'"),
        (mixed(track(held, snr="loud")), "'snr'"),
        (mixed({**track(held), "type": float("nan")}), "a cut of type 'nan'"),
        (mixed(*[track({**held, "duration": 2.0})] * 1001), "'tracks' is not a list of 1 to 1000"),
        (mixed(*[{"offset": 0.0, "cut": {**silence, "duration": 1e4}}] * 4), "samples, the most are"),
        (mono({**held, "transforms": [speed]}), "'factor' is '1e-06'"),
        (mono({**held, "transforms": [{"name": "Compress", "kwargs": {}}]}), "the transform 'Compress'"),
        (mono({**held, "transforms": [{"name": ["Speed"], "kwargs": {}}]}), "the transform"),
        (mono({**held, "sampling_rate": 1e12}), "'sampling_rate'"),
        (mono({**held, "channel_ids": [10**9]}), "the channels are"),
        (mono(held, start=True), "'start'"),
        (mono(held, channel=[]), "'channels' is not a list"),
    ]
    for cut, told in wrong:
        with pytest.raises(UnknownPart, match=told):
            known_cut(cut)


def test_a_header_is_believed_only_within_bounds(tmp_path: Path) -> None:
    """A FLAC of a hundred hours has 1 MB; the size of what is decoded is known from its header."""
    path = tmp_path / "long.wav"
    with path.open("wb") as file:  # sparse: a header, then nothing
        soundfile.write(file, TONE, RATE, format="WAV", subtype="PCM_16")
    frames = MOST_SAMPLES + 1
    content = bytearray(path.read_bytes()[:44])
    content[4:8], content[40:44] = (36 + 2 * frames).to_bytes(4, "little"), (2 * frames).to_bytes(4, "little")
    path.write_bytes(content)
    os.truncate(path, 44 + 2 * frames)
    with pytest.raises(Unusable, match=r"too much to read at once[.] Cut it"):
        read_file(str(path), RATE)
    held = recording(str(path), num_samples=frames, duration=frames / RATE)
    assert len(read_cut(mono(held, start=3.0, duration=1.0), RATE)) == RATE


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "socket"])
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.wav"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        import socket

        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    with pytest.raises(Unusable, match=r"unreadable: .*(regular|No such device)"):
        read_file(str(path), RATE)


def test_lhotse_reads_as_before_for_others(tmp_path: Path) -> None:
    """In a notebook that has read one of our mixtures: recordings in memory, which we refuse."""
    from lhotse import Recording

    soundfile.write(tmp_path / "a.wav", TONE, RATE)
    held = recording(str(tmp_path / "a.wav"))
    read_cut(mixed(track(held)), RATE)
    inside = Recording.from_bytes((tmp_path / "a.wav").read_bytes(), "a")
    assert inside.load_audio().shape == (1, len(TONE))

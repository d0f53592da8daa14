"""Changes of rate and speed: lengths, the band that passes, and aliases."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import soundfile

from speechtrain.data.audio import change_rate, read_cut
from speechtrain.data.recordings import Unusable, read_header
from speechtrain.data.speed import change_speed
from speechtrain.data.voice_activity import is_silent
from tests.support.audio_files import read_file

RATE = 16_000
TONE = (0.1 * np.sin(np.arange(2 * RATE) * 0.1)).astype(np.float32)


def level_of(frequency: float, rate: int) -> float:
    """Return the level in dB of a full-scale tone after the change to 16 kHz, without the edges."""
    seconds = np.arange(2 * rate) / rate
    tone = np.sin(2 * np.pi * frequency * seconds).astype(np.float32)
    changed = change_rate(tone, rate, 16_000)[2_000:-2_000].astype(np.float64)
    power = 2 * np.square(changed).mean()
    return float(10 * np.log10(power + 1e-15))


@pytest.mark.parametrize("rate", [22_050, 24_000, 32_000, 44_100, 48_000, 96_000, 16_661])
def test_change_rate_passes_the_band_and_suppresses_aliases(rate: int) -> None:
    for frequency in (100, 1_000, 4_000, 6_000, 7_000):
        assert level_of(frequency, rate) == pytest.approx(0.0, abs=0.05)
    for frequency in (8_300, 9_000, 12_000, 15_000):
        if frequency < rate / 2:
            assert level_of(frequency, rate) < -60.0


@pytest.mark.parametrize("rate", [8_000, 11_025, 44_100, 48_000, 16_001])
@pytest.mark.parametrize("samples", [1, 2, 441, 10_007])
def test_change_rate_has_the_length_of_the_new_rate(rate: int, samples: int) -> None:
    audio = np.ones(samples, np.float32)
    assert len(change_rate(audio, rate, 16_000)) == -(-samples * 16_000 // rate)
    assert len(change_speed(audio, 110, 16_000)) == -(-samples * 100 // 110)


def test_change_rate_does_not_depend_on_the_length_of_the_audio() -> None:
    audio = np.random.default_rng(0).normal(0, 0.1, 48_000).astype(np.float32)
    changed = change_rate(audio, 48_000, 16_000)
    beginning = change_rate(audio[:24_000], 48_000, 16_000)
    np.testing.assert_allclose(changed[:7_900], beginning[:7_900], atol=1e-6)


def test_change_rate_of_a_rate_without_a_common_divisor() -> None:
    """767,999 and 16,000 have no common divisor, so an exact filter would have 52 million coefficients."""
    angular_frequency = 2 * np.pi * 440
    phase = angular_frequency * np.linspace(0, 1, 767_999, endpoint=False)
    samples = np.float32(np.sin(phase))
    resampled = change_rate(samples, 767_999, 16_000)
    expected = np.sin(angular_frequency * np.linspace(0, 1, 16_000, endpoint=False))
    assert resampled.shape == expected.shape
    middle = slice(100, -100)
    np.testing.assert_allclose(resampled[middle], expected[middle], atol=5e-3)


def test_silence_is_what_no_voice_reaches() -> None:
    """Zeros, dither, an offset and the rest of opposed channels are silent. Quiet speech is not."""
    generator = np.random.default_rng(0)
    noise = generator.normal(size=16_000).astype(np.float32)
    speech = noise * np.hanning(16_000).astype(np.float32)
    quiet_speech = speech / np.sqrt(np.square(speech).mean()) * 10 ** (-50 / 20)
    silent = [np.zeros(0), np.zeros(16_000), np.full(16_000, 0.1), noise * 2**-15, noise * 1.5e-5 + 0.1]
    assert all(is_silent(samples.astype(np.float32)) for samples in silent)
    one_word_in_an_hour = np.zeros(1_600_000, np.float32)
    one_word_in_an_hour[:16_000] = quiet_speech
    for samples in (quiet_speech, -quiet_speech, quiet_speech + 0.1, one_word_in_an_hour):
        assert not is_silent(samples)


def test_read_file_names_the_conversion_of_shorten(tmp_path: Path) -> None:
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
def test_read_cut_reads_a_part_of_each_format(tmp_path: Path, format: str, subtype: str, suffix: str) -> None:
    """Whole and in part; two channels at 8 kHz, as LDC's telephone speech has them."""
    from lhotse import Recording
    from lhotse.audio import AudioSource

    path = tmp_path / f"a.{suffix}"
    stereo = np.stack([TONE, -0.5 * TONE], 1)
    soundfile.write(path, stereo, 8000, format=format, subtype=subtype)
    expected, rate = soundfile.read(path, dtype="float32")
    assert rate == 8000
    np.testing.assert_allclose(read_file(str(path), 8000), expected.mean(1), atol=1e-6)
    source = AudioSource("file", [0, 1], str(path))
    held = Recording("a", [source], 8000, len(expected), len(expected) / 8000, channel_ids=[0, 1])
    part = read_cut(held.to_cut().truncate(offset=1.0, duration=0.5).to_dict(), 8000)
    expected_part, _ = soundfile.read(path, dtype="float32", start=8000, frames=4000)
    np.testing.assert_allclose(part, expected_part.mean(1), atol=1e-6)
    assert read_header(str(path)).frames == len(expected)


def test_read_cut_reads_mixtures_as_lhotse(tmp_path: Path) -> None:
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


def test_read_cut_reads_several_channels_as_lhotse(tmp_path: Path) -> None:
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


def test_read_cut_changes_to_any_speed(tmp_path: Path) -> None:
    """Rates without a common divisor go by another filter, which is as near as hearing."""
    from lhotse import Recording

    soundfile.write(tmp_path / "a.wav", TONE, RATE, subtype="FLOAT")
    for factor in (0.9137, 1.0001, 1.1):
        cut = Recording.from_file(tmp_path / "a.wav").to_cut().perturb_speed(factor)
        found = read_cut(cut.to_dict(), RATE)
        assert len(found) == cut.num_samples
        times = np.arange(len(found)) * (round(RATE * factor) / RATE)
        np.testing.assert_allclose(found[100:-100], 0.1 * np.sin(times * 0.1)[100:-100], atol=2e-3)


def test_read_cut_leaves_lhotse_to_others(tmp_path: Path) -> None:
    """In a notebook that has read one of our mixtures: recordings in memory, which we refuse."""
    from lhotse import Recording

    soundfile.write(tmp_path / "a.wav", TONE, RATE)
    cut = Recording.from_file(tmp_path / "a.wav").to_cut()
    read_cut(cut.mix(cut, snr=10).to_dict(), RATE)
    inside = Recording.from_bytes((tmp_path / "a.wav").read_bytes(), "a")
    assert inside.load_audio().shape == (1, len(TONE))

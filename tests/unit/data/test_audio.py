"""Changes of rate and speed: lengths, the band that passes, and aliases."""

from __future__ import annotations

import numpy as np
import pytest

from speechtrain.data.audio import change_rate, is_silent
from speechtrain.data.speed import change_speed


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

"""Finds the parts of a recording in which somebody speaks. The exports contain a copy of this file.

A model is trained on utterances. From silence, hiss and hum it invents words, and their frames move the
statistics of its features. So pauses are shortened before a model hears a recording, in training, evaluation,
transcription and exports alike.

Nobody speaks in a silent recording (``is_silent``). Noise and hum do not change, but speech changes several
times in a second. A frame belongs to speech if

- the 0.1 s around it are above -70 dBFS, and at most 30 dB below the loud frames,
- it is 4 dB above the level that the recording exceeds in nine of ten audible frames, as the mean over 16
  bands, unless the recording has less than a second of sound,
- the bands change by 4 dB within 0.5 s around it, as the mean over 16 bands.

Measured: white, pink and brown noise of any level change by at most 3 dB, and the loud frames of four corpora
of speech by 5.3 dB or more. With white noise 5 dB below the speech, 99 % of them change by 4.2 dB or more.
"""

import itertools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

# The peak of silence, -60 dBFS, which is 33 of 16 bits. A muted microphone with dither has -80 dBFS, and the
# mean of opposed channels has -96 dBFS. The peaks of speech are 10 to 20 dB above its RMS. So even speech of
# -65 dBFS RMS is not silent, and speech that is recorded with care has -30 to -20 dBFS.
_SILENT_PEAK = 1e-3
_FRAME_SECONDS = 0.025
_HOP_SECONDS = 0.01
_BANDS = 16  # from 100 Hz to 8 kHz, equally wide on the mel scale
_SMOOTHED_HOPS = 10
_AUDIBLE_POWER = 1e-7  # -70 dBFS
_QUIET_SHARE = 10  # percent of the audible frames
_COMPARABLE_HOPS = 100  # A single word has fewer, and no quiet frames that it could be compared with.
_LEAST_EXCESS_DB = 4.0
_CHANGE_HOPS = 51
_LEAST_CHANGE_DB = 4.0
_LEAST_SPEECH_HOPS = 15  # A click has fewer, because the smoothing widens it.
_LOUD_PERCENTILE = 90  # of the power of speech. A click may be much louder than the speech.
_FAINT = 1e-3  # -30 dB, relative to the power at this percentile. The room of a recording is below.
_WEAK = 3e-3  # -25 dB, relative to the power at this percentile
_PAUSE_HOPS = 25  # The smoothing shortens pauses by 0.1 s, so a pause of 0.35 s has as many.
_SHORTEST_SECONDS = 0.1
_WHOLE_SECONDS = 0.5  # A shorter recording has too few frames to compare, and is one word at most.


def is_silent(samples: Array) -> bool:
    """Return whether samples (S,) are silent: none differs from their mean by 0.001, -60 dBFS, or more.

    A constant offset is silent. The whole recording counts, so one quiet word in an hour is not silent.
    """
    if not len(samples):
        return True
    mean = float(samples.mean(dtype=np.float64))
    return max(float(samples.max()) - mean, mean - float(samples.min())) < _SILENT_PEAK


def speech_spans(samples: Array, sample_rate: int, longest_pause: float) -> list[tuple[int, int]]:
    """Return the spans of samples (S,) with speech, as (start, end) in samples, in order.

    Before and after speech, a span has half of ``longest_pause`` seconds if the recording has so much. So
    the pauses between spans are longer than ``longest_pause``. Without speech, there are no spans.
    """
    seconds = len(samples) / sample_rate
    if seconds < _SHORTEST_SECONDS or is_silent(samples):
        return []
    powers = _windows(_band_powers(samples, sample_rate), _SMOOTHED_HOPS).mean(-1)  # (T, bands)
    power = powers.sum(1)
    is_audible = power > _AUDIBLE_POWER
    if not is_audible.any():
        return []
    is_audible &= power > _FAINT * np.percentile(power[is_audible], _LOUD_PERCENTILE)
    if seconds < _WHOLE_SECONDS:
        return [(0, len(samples))]
    levels = 10.0 * np.log10(np.maximum(powers, _AUDIBLE_POWER / _BANDS))
    is_loud = is_audible
    if is_audible.sum() >= _COMPARABLE_HOPS:
        quiet_levels = np.percentile(levels[is_audible], _QUIET_SHARE, axis=0)
        excess = np.maximum(levels - quiet_levels, 0.0).mean(1)
        is_loud = is_audible & (excess > _LEAST_EXCESS_DB)
    neighbourhoods = _windows(levels, _CHANGE_HOPS)
    change = (neighbourhoods.max(-1) - neighbourhoods.min(-1)).mean(1)
    is_changing = change > _LEAST_CHANGE_DB
    margin = max(1, round(longest_pause / 2 / _HOP_SECONDS))
    # Each loud run gets the margin at both ends. Then shorter gaps than the margin are filled.
    is_near_loud = np.zeros_like(is_loud)
    for start, end in _runs(is_loud):
        is_near_loud[max(0, start - margin) : end + margin] = True
    is_kept = is_near_loud & is_changing
    for (_, gap_start), (gap_end, _) in itertools.pairwise(_runs(is_kept)):
        if gap_end - gap_start < margin:
            is_kept[gap_start:gap_end] = True
    hop = round(_HOP_SECONDS * sample_rate)
    spans = []
    for first, end in _runs(is_kept):
        if (is_loud & is_changing)[first:end].sum() < _LEAST_SPEECH_HOPS:
            continue
        is_last_frame = end == len(is_kept)
        spans.append((int(first * hop), len(samples) if is_last_frame else int(end * hop)))
    return spans


def pause_middles(samples: Array, sample_rate: int) -> list[float]:
    """Return the middle of each pause of 0.35 s or more between two parts of speech (S,), in seconds."""
    hop = round(_HOP_SECONDS * sample_rate)
    powers = np.square(samples[: len(samples) // hop * hop]).reshape(-1, hop).mean(1)
    if len(powers) < _SMOOTHED_HOPS:
        return []
    powers = np.convolve(powers, np.full(_SMOOTHED_HOPS, 1.0 / _SMOOTHED_HOPS), "same")
    is_strong = powers > _WEAK * np.percentile(powers, _LOUD_PERCENTILE)
    middles = []
    for (_, pause_start), (pause_end, _) in itertools.pairwise(_runs(is_strong)):
        if pause_end - pause_start >= _PAUSE_HOPS:
            middles.append((pause_start + pause_end) / 2 * _HOP_SECONDS)
    return middles


def shorten_pauses(samples: Array, sample_rate: int, longest_pause: float) -> Array:
    """Return samples (S,) with pauses of at most ``longest_pause`` seconds. Without speech, none are left."""
    spans = speech_spans(samples, sample_rate, longest_pause)
    if spans == [(0, len(samples))]:
        return samples
    return np.concatenate([samples[:0], *[samples[start:end] for start, end in spans]])


def _band_powers(samples: Array, sample_rate: int) -> Array:
    """Return the power (T, bands) of frames of samples (S,), at least one. A full-scale square wave has
    the power 1 in all bands together.
    """
    width, hop = round(_FRAME_SECONDS * sample_rate), round(_HOP_SECONDS * sample_rate)
    samples = np.pad(samples, (0, max(0, width - len(samples))))
    frames = np.lib.stride_tricks.sliding_window_view(samples, width)[::hop]
    window = np.hanning(width).astype(np.float32)
    fourier_size = 2 ** math.ceil(math.log2(width))
    spectrum = np.fft.rfft(frames * window, fourier_size)
    powers = (spectrum.real**2 + spectrum.imag**2) * (2.0 / fourier_size / np.square(window).sum())
    lowest, highest = _mel(100.0), _mel(min(8000.0, sample_rate / 2))
    edges = 700.0 * (10.0 ** (np.linspace(lowest, highest, _BANDS + 1) / 2595.0) - 1.0)  # in Hz
    first_bins = np.searchsorted(np.arange(powers.shape[1]) * sample_rate / fourier_size, edges[:-1])
    band_powers: Array = np.add.reduceat(powers, first_bins, axis=1)
    return band_powers


def _mel(hertz: float) -> float:
    return 2595.0 * math.log10(1.0 + hertz / 700.0)


def _windows(values: Array, hops: int) -> Array:
    """Return the windows (T, bands, hops) around each row of values (T, bands). The ends are repeated."""
    padded = np.pad(values, ((hops // 2, (hops - 1) // 2), (0, 0)), mode="edge")
    return np.lib.stride_tricks.sliding_window_view(padded, hops, axis=0)


def _runs(mask: Array) -> list[tuple[int, int]]:
    """Return the start and the end of each run of true elements of a mask (T,)."""
    steps = np.diff(mask.astype(np.int8), prepend=0, append=0)
    return list(zip(np.flatnonzero(steps > 0).tolist(), np.flatnonzero(steps < 0).tolist(), strict=True))

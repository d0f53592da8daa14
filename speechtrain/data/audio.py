"""Reading of one cut's audio from an untrusted file: samples, or the reason why it is unusable.

Only the length in the manifest is decoded, so a recording that is longer than in its manifest costs
no more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from speechtrain.data.formats.lhotse_cuts import MOST_SAMPLES, Samples, is_simple
from speechtrain.data.formats.manifests import SEGMENT, seconds_of
from speechtrain.data.recordings import Unusable, open_recording, or_unusable

_LARGEST_BANK = 2**20  # coefficients, 4 MiB: 11,025 to 16,000 Hz needs 282,240; 16,001 would need a gigabyte
_ZEROS, _ROLLOFF, _BETA = 32, 0.94, 6.5  # zero crossings on each side, edge of the new band, Kaiser's beta
_BLOCK = 2**24  # values that a filter reads at once, 64 MiB
_LOUDEST = 1e4  # largest sample of float files; full scale is 1
_EPSILON = 1e-5  # added to the variance, as in the layer norm that wav2vec 2.0 applies to the samples


DECODED_SECONDS = 3600.0
"""Default of ``data.max_decoded_seconds``."""


def read_cut(cut: Mapping[str, Any], sample_rate: int, most_seconds: float = math.inf) -> Samples:
    """Return a cut's audio (S,): mono, float32, at ``sample_rate``, with the cut's duration.

    ``cut`` is in lhotse's JSON format. Its channels are averaged; if its manifest lists one only, all
    channels of the file are. Raises Unusable with ``missing``, ``empty_file``, ``unreadable``,
    ``no_samples``, ``wrong_length`` (different by more than 0.1 s and 1 %), ``not_finite``, and ``too_long``
    for more than ``most_seconds``, of which nothing is decoded.
    """
    with or_unusable(next(iter(files_of(cut)), "")):
        check_seconds(seconds_of(cut), most_seconds, next(iter(files_of(cut)), ""))
        return _read_file(cut, sample_rate) if is_simple(cut) else _read_mixed(cut, sample_rate)


def read_file(path: str, sample_rate: int, start: float = 0.0, seconds: float | None = None) -> Samples:
    """Return an audio file (S,) or a part of it, mono, at ``sample_rate``.

    Raises Unusable, as ``read_cut`` does.
    """
    samples, rate = _decode(path, start, seconds)
    return _finish(samples.mean(axis=0, dtype=np.float32), rate, sample_rate, path=path)


def change_rate(samples: Samples, rate: int, wanted: int) -> Samples:
    """Resample, band-limited, to ``ceil(S × wanted / rate)`` samples.

    Of a higher rate, frequencies from 1.04 times the new Nyquist frequency on fold back at −60 dB or less.
    """
    return resample(samples, rate, wanted, is_steep=True)


def resample(samples: Samples, rate: int, new_rate: int, is_steep: bool) -> Samples:
    """Resample to ``ceil(S × new_rate / rate)`` samples. A filter that is not steep is shorter and faster."""
    if rate == new_rate:
        return samples
    common = math.gcd(rate, new_rate)
    rate, new_rate = rate // common, new_rate // common
    if rate * new_rate > _LARGEST_BANK:  # almost no common divisor: lhotse's filters grow with both
        from scipy.signal import resample_poly

        window = _long_filter(max(rate, new_rate))
        return cast("Samples", resample_poly(samples, new_rate, rate, window=window).astype(np.float32))
    changed = _filtered(samples, _bank(rate, new_rate, is_steep))
    return cast("Samples", changed[: -(-new_rate * len(samples) // rate)].numpy())


def _as_lhotse(samples: Samples, rate: int, new_rate: int) -> Samples:
    """Resample by the filter that lhotse applies to the transforms of its cuts."""
    return resample(samples, rate, new_rate, is_steep=False)


def _filtered(samples: Samples, bank: _Bank) -> torch.Tensor:
    """Return the samples at the new rate, with some beyond the end.

    lhotse's convolution is one matrix product here: 0.26 ms instead of 0.7 to 1.2 for 2.4 s, because oneDNN
    prepares a convolution again for each new length.
    """
    padded = torch.nn.functional.pad(torch.from_numpy(samples), (bank.width, bank.width + bank.hop))
    frames = padded.unfold(0, len(bank.kernel), bank.hop)
    changed = torch.empty(len(frames), bank.kernel.shape[1])
    rows = max(1, _BLOCK // len(bank.kernel) // 1024) * 1024  # by others, BLAS adds in another order
    for first in range(0, len(frames), rows):  # the product copies its frames: 13 times the audio, or more
        torch.matmul(frames[first : first + rows], bank.kernel, out=changed[first : first + rows])
    return changed.reshape(-1)


class _Bank(NamedTuple):
    """The filters of a change of rate: a frame of samples gives the next ``kernel.shape[1]`` samples."""

    kernel: torch.Tensor  # (samples of a frame, new samples)
    width: int  # samples before the audio that the first frame has
    hop: int  # samples from a frame to the next one


@lru_cache(maxsize=64)  # of up to 4 MiB each: a stranger's corpus may have a rate for each recording
def _bank(rate: int, new_rate: int, is_steep: bool) -> _Bank:
    from lhotse.augmentation.resample import Resample

    if not is_steep:
        short = Resample(rate, new_rate)
        return _Bank(short.kernel[:, 0].T, short.width, rate)
    steep = Resample(rate, new_rate, "sinc_interp_kaiser", _ZEROS, _ROLLOFF, _BETA)
    filters = steep.kernel[:, 0]
    # Frames that advance by fewer samples than they have are copied again and again: 48 to 16 kHz would take
    # ten times as long. Several frames as one have few samples in common with the next.
    frames = max(1, filters.shape[1] // rate)
    kernel = filters.new_zeros(frames * new_rate, filters.shape[1] + (frames - 1) * rate)
    for frame in range(frames):
        rows = slice(frame * new_rate, (frame + 1) * new_rate)
        kernel[rows, frame * rate : frame * rate + filters.shape[1]] = filters
    return _Bank(kernel.T, steep.width, frames * rate)


@lru_cache(maxsize=4)  # of 8 MB for 16,001 Hz
def _long_filter(factor: int) -> Samples:
    """Return the taps of the same low-pass filter for rates with almost no common divisor."""
    from scipy.signal import firwin

    half = math.ceil(_ZEROS * factor / _ROLLOFF)
    return cast("Samples", firwin(2 * half + 1, _ROLLOFF / factor, window=("kaiser", _BETA)))


def check_seconds(found: float, most: float, path: str) -> None:
    """Raise Unusable for a recording of more than ``most`` seconds."""
    if found > most:
        raise Unusable("too_long", f"{path}: {found:.0f} s, data.max_decoded_seconds={most:g}")


def standardise(samples: Samples) -> Samples:
    """Scale samples (S,) to zero mean and unit variance; silence stays silence."""
    centred = samples - samples.mean(dtype=np.float64)
    scaled: Samples = (centred / np.sqrt(np.square(centred).mean() + _EPSILON)).astype(np.float32)
    return scaled


def files_of(cut: Mapping[str, Any]) -> list[str]:
    """Return the audio files of a cut."""
    if cut.get("type") == "MixedCut":
        return [path for track in cut["tracks"] for path in files_of(track["cut"])]
    return [source["source"] for source in (cut.get("recording") or {}).get("sources", ())]


def recording_of(cut: Mapping[str, Any]) -> str:
    """Return what a cut is a part of: its first file's name and folder, whatever holds the corpus."""
    return "/".join(next(iter(files_of(cut)), str(cut["id"])).split("/")[-2:])


def _read_file(cut: Mapping[str, Any], sample_rate: int) -> Samples:
    recording = cut["recording"]
    source = recording["sources"][0]
    path = source["source"]
    start, seconds = float(cut["start"]), seconds_of(cut)
    if not 0 < seconds < math.inf or not 0 <= start < math.inf:
        raise Unusable("wrong_length", f"{path}: {cut['duration']} s from {cut['start']} s in the manifest")
    tolerance = max(0.1, 0.01 * seconds)
    # a little more than in the manifest, to detect a longer recording
    is_segment = (cut.get("custom") or {}).get(SEGMENT)
    is_whole = not is_segment and start + seconds >= float(recording["duration"]) - 0.01 and start == 0.0
    samples, rate = _decode(path, start, seconds + (2 * tolerance if is_whole else 0.0))
    found = samples.shape[1] / rate
    if found < seconds - tolerance or (is_whole and found > seconds + tolerance):
        more = "more than " if found > seconds else ""
        at = f" from {start:.2f} s" if start else ""
        raise Unusable("wrong_length", f"{path}: {more}{found:.2f} s{at}, {seconds:.2f} s in the manifest")
    samples = samples[:, : max(1, round(seconds * rate))]
    return _finish(_mono(samples, source.get("channels"), cut.get("channel")), rate, sample_rate, path=path)


def _decode(path: str, start: float, seconds: float | None) -> tuple[Samples, int]:
    """Return samples (C, S) and their rate; at most MOST_SAMPLES, which are all that is ever held."""
    from lhotse.utils import compute_num_samples

    with open_recording(path) as recording:
        rate, frames, channels = recording.samplerate, recording.frames, recording.channels
        first = compute_num_samples(start, rate)
        if 0 < frames <= first:
            told = f"{frames / rate:.2f} s, from {start:.2f} s in the manifest"
            raise Unusable("wrong_length", f"{path}: {told}")
        wanted = (
            frames - first if seconds is None else min(compute_num_samples(seconds, rate), frames - first)
        )
        if wanted * channels > MOST_SAMPLES:
            told = f"{wanted / rate:.0f} s of {channels} channels are too much to read at once"
            raise Unusable("wrong_length", f"{path}: {told}; cut it")
        if first:
            recording.seek(first)
        samples = recording.read(max(0, wanted), dtype="float32", always_2d=True).T
    if samples.shape[1] == 0:
        raise Unusable("no_samples", path)
    return samples, int(rate)


def _mono(samples: Samples, known: Any, wanted: Any) -> Samples:
    """Average the channels that the cut names, or all if its manifest does not list the file's channels."""
    if isinstance(known, list) and len(known) == len(samples) > 1 and wanted is not None:
        names = wanted if isinstance(wanted, list) else [wanted]
        samples = samples[[known.index(name) for name in names]]
    mono: Samples = samples.mean(axis=0, dtype=np.float32)
    return mono


def _read_mixed(cut: Mapping[str, Any], sample_rate: int) -> Samples:
    """Read a cut of several files, tracks or transforms with lhotse."""
    from speechtrain.data.lhotse_audio import load_audio

    _check_lengths(cut)
    samples, rate = load_audio(cut, _decode, _as_lhotse)
    where = files_of(cut)[0] if files_of(cut) else str(cut["id"])
    if samples.shape[1] == 0:
        raise Unusable("no_samples", where)
    return _finish(samples.mean(axis=0, dtype=np.float32), rate, sample_rate, path=where)


def _check_lengths(cut: Mapping[str, Any]) -> None:
    """Refuse files that are far longer than in their manifest: lhotse would read them to the end."""
    if cut["type"] == "MixedCut":
        for track in cut["tracks"]:
            _check_lengths({"type": track.get("type"), **track["cut"]})
        return
    recording = cut.get("recording") or {}
    for source in recording.get("sources", ()):
        with open_recording(source["source"]) as file:
            found = file.frames / file.samplerate
        if found > 2.0 * float(recording["duration"]) + 1.0:  # speed and tempo change lengths by up to 2
            detail = f"{source['source']}: {found:.2f} s, {recording['duration']} s in the manifest"
            raise Unusable("wrong_length", detail)


def _finish(mono: Samples, rate: int, sample_rate: int, path: str) -> Samples:
    """Check the values and convert the rate."""
    if len(mono) * sample_rate > MOST_SAMPLES * rate:
        raise Unusable("wrong_length", f"{path}: {len(mono) / rate:.0f} s are too much to convert; cut it")
    peak = max(float(mono.max()), -float(mono.min()))
    if not peak <= _LOUDEST:  # a comparison with NaN is false
        raise Unusable("not_finite", f"{path}: its peak is {peak:.3g}")
    return change_rate(mono, rate, sample_rate)

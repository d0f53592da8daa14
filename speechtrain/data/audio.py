"""Reading of one cut's audio from an untrusted file: samples, or the reason why it is unusable.

Only the length in the manifest is decoded, so a recording that is longer than its manifest says costs no
more.
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

# The most coefficients of a filter bank, 4 MiB. 11,025 to 16,000 Hz needs 282,240, 16,001 Hz a gigabyte.
_LARGEST_BANK = 2**20
_ZEROS = 32  # zero crossings on each side of a filter
_ROLLOFF = 0.94  # edge of the passed band, relative to the lower Nyquist frequency
_BETA = 6.5  # the shape of the Kaiser window
_BLOCK = 2**24  # values that a filter reads at once, 64 MiB
_LOUDEST = 1e4  # the largest sample of float files. Full scale is 1.
_EPSILON = 1e-5  # added to the variance, as in the layer norm that wav2vec 2.0 applies to the samples

DECODED_SECONDS = 3600.0
"""Default of ``data.max_decoded_seconds``."""


def read_cut(cut: Mapping[str, Any], sample_rate: int, max_seconds: float = math.inf) -> Samples:
    """Return a cut's audio (S,): mono, float32, at ``sample_rate``, with the cut's duration.

    ``cut`` is in lhotse's JSON format. Its channels are averaged. If its manifest lists only one channel, all
    channels of the file are averaged.

    Raises Unusable with ``missing``, ``empty_file``, ``unreadable``, ``no_samples``, ``wrong_length``
    (different by more than 0.1 s and 1 %), ``not_finite``, and ``too_long``. A cut of more than
    ``max_seconds`` is too long, and is not decoded.
    """
    path = next(iter(files_of(cut)), "")
    with or_unusable(path):
        check_seconds(seconds_of(cut), max_seconds, path)
        return _read_file(cut, sample_rate) if is_simple(cut) else _read_mixed(cut, sample_rate)


def read_file(path: str, sample_rate: int, start: float = 0.0, seconds: float | None = None) -> Samples:
    """Return an audio file (S,) or a part of it, mono, at ``sample_rate``.

    Raises Unusable, as ``read_cut`` does.
    """
    samples, rate = _decode(path, start, seconds)
    return _finish(samples.mean(axis=0, dtype=np.float32), rate, sample_rate, path=path)


def change_rate(samples: Samples, rate: int, new_rate: int) -> Samples:
    """Resample, band-limited, to ``ceil(S × new_rate / rate)`` samples.

    Frequencies of at least 1.04 times the new Nyquist frequency fold back at −60 dB or less.
    """
    return resample(samples, rate, new_rate, is_steep=True)


def resample(samples: Samples, rate: int, new_rate: int, is_steep: bool) -> Samples:
    """Resample to ``ceil(S × new_rate / rate)`` samples. A filter that is not steep is shorter and faster."""
    if rate == new_rate:
        return samples
    common = math.gcd(rate, new_rate)
    rate, new_rate = rate // common, new_rate // common
    # The rates have almost no common divisor. lhotse's filters grow with the product of both.
    if rate * new_rate > _LARGEST_BANK:
        from scipy.signal import resample_poly

        window = _long_filter(max(rate, new_rate))
        resampled = resample_poly(samples, new_rate, rate, window=window).astype(np.float32)
    else:
        new_length = -(-new_rate * len(samples) // rate)
        resampled = _apply_bank(samples, _bank(rate, new_rate, is_steep))[:new_length].numpy()
    return cast("Samples", resampled)


def _as_lhotse(samples: Samples, rate: int, new_rate: int) -> Samples:
    """Resample by the filter that lhotse applies to the transforms of its cuts."""
    return resample(samples, rate, new_rate, is_steep=False)


def _apply_bank(samples: Samples, bank: _Bank) -> torch.Tensor:
    """Return the samples at the new rate, with some beyond the end.

    One matmul replaces lhotse's convolution: 0.26 ms instead of 0.7 to 1.2 for 2.4 s, because oneDNN
    prepares a convolution again for each new length.
    """
    padded = torch.nn.functional.pad(torch.from_numpy(samples), (bank.width, bank.width + bank.hop))
    frames = padded.unfold(0, len(bank.kernel), bank.hop)
    resampled = torch.empty(len(frames), bank.kernel.shape[1])
    # The matmul copies its frames, 13 times the audio or more, so it reads a block of them at once. Blocks of
    # 1,024 × n frames do not change the order in which BLAS adds.
    kilorows = _BLOCK // len(bank.kernel) // 1024
    block_rows = max(1, kilorows) * 1024
    for start in range(0, len(frames), block_rows):
        block = slice(start, start + block_rows)
        torch.matmul(frames[block], bank.kernel, out=resampled[block])
    return resampled.reshape(-1)


class _Bank(NamedTuple):
    """The filters of a change of rate. Each frame gives the next ``kernel.shape[1]`` new samples."""

    kernel: torch.Tensor  # (samples of a frame, new samples)
    width: int  # samples of the first frame before the start of the audio
    hop: int  # samples from the start of a frame to the start of the next frame


@lru_cache(maxsize=64)  # A bank has up to 4 MiB. A corpus may have a rate for each recording.
def _bank(rate: int, new_rate: int, is_steep: bool) -> _Bank:
    from lhotse.augmentation.resample import Resample

    if not is_steep:
        short = Resample(rate, new_rate)
        return _Bank(short.kernel[:, 0].T, short.width, rate)
    steep = Resample(rate, new_rate, "sinc_interp_kaiser", _ZEROS, _ROLLOFF, _BETA)
    filters = steep.kernel[:, 0]
    filter_length = filters.shape[1]
    # Frames overlap if they are longer than the hop. Each sample is then copied several times, and 48 to
    # 16 kHz would take ten times as long. So one long frame replaces several frames, with less overlap.
    frames = max(1, filter_length // rate)
    kernel = filters.new_zeros(frames * new_rate, filter_length + (frames - 1) * rate)
    for frame in range(frames):
        rows = slice(frame * new_rate, (frame + 1) * new_rate)
        kernel[rows, frame * rate : frame * rate + filter_length] = filters
    return _Bank(kernel.T, steep.width, frames * rate)


@lru_cache(maxsize=4)  # The filter for 16,001 Hz has 8 MB.
def _long_filter(factor: int) -> Samples:
    """Return the coefficients of the steep low-pass filter for rates with almost no common divisor."""
    from scipy.signal import firwin

    half = math.ceil(_ZEROS * factor / _ROLLOFF)
    return cast("Samples", firwin(2 * half + 1, _ROLLOFF / factor, window=("kaiser", _BETA)))


def check_seconds(seconds: float, max_seconds: float, path: str) -> None:
    """Raise Unusable for a recording of more than ``max_seconds``."""
    if seconds > max_seconds:
        raise Unusable("too_long", f"{path}: {seconds:.0f} s, data.max_decoded_seconds={max_seconds:g}")


def standardise(samples: Samples) -> Samples:
    """Scale samples (S,) to zero mean and unit variance. Silence stays silence."""
    centred = samples - samples.mean(dtype=np.float64)
    deviation = np.sqrt(np.square(centred).mean() + _EPSILON)
    scaled: Samples = (centred / deviation).astype(np.float32)
    return scaled


def files_of(cut: Mapping[str, Any]) -> list[str]:
    """Return the audio files of a cut."""
    if cut.get("type") != "MixedCut":
        recording = cut.get("recording") or {}
        return [source["source"] for source in recording.get("sources", ())]
    files = []
    for track in cut["tracks"]:
        files += files_of(track["cut"])
    return files


def recording_of(cut: Mapping[str, Any]) -> str:
    """Return the name of a cut's recording: its first file with one folder, wherever the corpus lies."""
    path = next(iter(files_of(cut)), str(cut["id"]))
    return "/".join(path.split("/")[-2:])


def _read_file(cut: Mapping[str, Any], sample_rate: int) -> Samples:
    """Read a cut of one file."""
    source = cut["recording"]["sources"][0]
    path = source["source"]
    start, seconds = float(cut["start"]), seconds_of(cut)
    if not 0 < seconds < math.inf or not 0 <= start < math.inf:
        raise _wrong_length(path, f"{cut['duration']} s from {cut['start']} s in the manifest")
    tolerance = max(0.1, 0.01 * seconds)
    # A little more of a whole file is decoded, to detect a file that is longer than in the manifest.
    excess = 2 * tolerance if _is_whole_file(cut) else 0.0
    samples, rate = _decode(path, start, seconds + excess)
    decoded_seconds = samples.shape[1] / rate
    if not seconds - tolerance <= decoded_seconds <= seconds + tolerance:
        comparison = "more than " if decoded_seconds > seconds else ""
        lengths = f"{decoded_seconds:.2f} s from {start:.2f} s, {seconds:.2f} s in the manifest"
        raise _wrong_length(path, comparison + lengths)
    length = max(1, round(seconds * rate))
    mono = _mono(samples[:, :length], source.get("channels"), cut.get("channel"))
    return _finish(mono, rate, sample_rate, path=path)


def _is_whole_file(cut: Mapping[str, Any]) -> bool:
    """Return whether a cut is its whole file, by the manifest."""
    if (cut.get("custom") or {}).get(SEGMENT):
        return False
    file_seconds = float(cut["recording"]["duration"])
    return seconds_of(cut) >= file_seconds - 0.01 and float(cut["start"]) == 0.0


def _wrong_length(path: str, detail: str) -> Unusable:
    return Unusable("wrong_length", f"{path}: {detail}")


def _decode(path: str, start: float, seconds: float | None) -> tuple[Samples, int]:
    """Return samples (C, S) and their rate. Memory holds at most MOST_SAMPLES."""
    from lhotse.utils import compute_num_samples

    with open_recording(path) as recording:
        rate, frames, channels = recording.samplerate, recording.frames, recording.channels
        first_frame = compute_num_samples(start, rate)
        if 0 < frames <= first_frame:
            detail = f"{frames / rate:.2f} s, but its cut starts at {start:.2f} s in the manifest"
            raise _wrong_length(path, detail)
        count = frames - first_frame
        if seconds is not None:
            count = min(count, compute_num_samples(seconds, rate))
        if count * channels > MOST_SAMPLES:
            detail = f"{count / rate:.0f} s of {channels} channels are too much to read at once. Cut it"
            raise _wrong_length(path, detail)
        if first_frame:
            recording.seek(first_frame)
        samples = recording.read(max(0, count), dtype="float32", always_2d=True).T
    if samples.shape[1] == 0:
        raise Unusable("no_samples", path)
    return samples, int(rate)


def _mono(samples: Samples, file_channels: Any, cut_channels: Any) -> Samples:
    """Average the channels of the cut, or all if its manifest does not list the channels of the file."""
    is_listed = isinstance(file_channels, list) and len(file_channels) == len(samples) > 1
    if is_listed and cut_channels is not None:
        if not isinstance(cut_channels, list):
            cut_channels = [cut_channels]
        samples = samples[[file_channels.index(channel) for channel in cut_channels]]
    mono: Samples = samples.mean(axis=0, dtype=np.float32)
    return mono


def _read_mixed(cut: Mapping[str, Any], sample_rate: int) -> Samples:
    """Read a cut of several files, tracks or transforms with lhotse."""
    from speechtrain.data.lhotse_audio import load_audio

    _check_lengths(cut)
    samples, rate = load_audio(cut, _decode, _as_lhotse)
    path = next(iter(files_of(cut)), str(cut["id"]))
    if samples.shape[1] == 0:
        raise Unusable("no_samples", path)
    return _finish(samples.mean(axis=0, dtype=np.float32), rate, sample_rate, path=path)


def _check_lengths(cut: Mapping[str, Any]) -> None:
    """Refuse files that are far longer than in their manifest, because lhotse would read them to the end."""
    if cut["type"] == "MixedCut":
        for track in cut["tracks"]:
            _check_lengths({"type": track.get("type"), **track["cut"]})
        return
    recording = cut.get("recording") or {}
    for source in recording.get("sources", ()):
        with open_recording(source["source"]) as file:
            file_seconds = file.frames / file.samplerate
        # The manifest's length is after changes of speed and tempo, by a factor of up to 2.
        limit = 2.0 * float(recording["duration"]) + 1.0
        if file_seconds > limit:
            detail = f"{file_seconds:.2f} s, {recording['duration']} s in the manifest"
            raise _wrong_length(source["source"], detail)


def _finish(mono: Samples, rate: int, sample_rate: int, path: str) -> Samples:
    """Check the samples and resample them."""
    if len(mono) * sample_rate > MOST_SAMPLES * rate:
        raise _wrong_length(path, f"{len(mono) / rate:.0f} s are too much to resample. Cut it")
    peak = max(float(mono.max()), -float(mono.min()))
    if not peak <= _LOUDEST:  # A comparison with NaN is false.
        raise Unusable("not_finite", f"{path}: its peak is {peak:.3g}")
    return change_rate(mono, rate, sample_rate)

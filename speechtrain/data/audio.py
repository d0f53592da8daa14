"""Reads the audio of one cut from an untrusted file. ``Unusable`` says why a cut cannot be read.

At most little more than the duration in the manifest is decoded. So a file that is much longer than its
manifest says costs neither time nor memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch

from speechtrain.data.formats.lhotse_cuts import MOST_SAMPLES, Samples, is_simple
from speechtrain.data.formats.manifests import SEGMENT, seconds_of, single_cuts
from speechtrain.data.lhotse_import import import_lhotse
from speechtrain.data.recordings import (
    LEAST_SHARE,
    RATES,
    Fault,
    Unusable,
    header_faults,
    no_samples,
    open_recording,
    or_unusable,
    read_header,
    tolerated_seconds,
)
from speechtrain.data.voice_activity import is_silent

if TYPE_CHECKING:
    from soundfile import SoundFile

# The most float32 coefficients of a filter bank: 4 MiB. The bank for 11,025 to 16,000 Hz has 282,240
# coefficients. The bank for 16,001 to 16,000 Hz would need a gigabyte.
_LARGEST_BANK = 2**20
_LARGEST_TERM = 2**18  # of the ratio of two rates. Its long filter has 17.8 million coefficients: 143 MB.
_ZERO_CROSSINGS = 32  # zero crossings of the sinc on each side of a steep filter
_ROLLOFF = 0.94  # cutoff frequency of a steep filter, relative to the lower Nyquist frequency
_BETA = 6.5  # shape parameter of the Kaiser window
_BLOCK_VALUES = 2**24  # float32 values that one matmul of the resampler reads: 64 MiB
_HIGHEST_PEAK = 1e4  # the largest absolute sample of a float file that is accepted. Full scale is 1.
_EPSILON = 1e-5  # added to the variance, as in the layer norm that wav2vec 2.0 applies to the samples

DECODED_SECONDS = 3600.0
"""Default of ``data.max_decoded_seconds``."""


def read_cut(cut: Mapping[str, Any], sample_rate: int, max_seconds: float = math.inf) -> Samples:
    """Return the samples (S,) of ``read_with_faults``, without the faults."""
    samples, _ = read_with_faults(cut, sample_rate, max_seconds)
    return samples


def read_with_faults(
    cut: Mapping[str, Any], sample_rate: int, max_seconds: float = math.inf, channel: int | None = None
) -> tuple[Samples, list[Fault]]:
    """Return a cut's audio (S,): mono, float32, at ``sample_rate``. Return its faults, too.

    ``cut`` is in lhotse's JSON format. If it names some of the file's channels, they are averaged. Otherwise
    only ``channel`` is read, counted from 0. None is the mean of all channels. A cut of several files or
    with transforms has the channels that it names. If the duration of a whole file is a little different
    from the manifest's, the file's duration counts.

    The reason of a Fault is one of these:

    - ``other_length``: the duration differs from the manifest by more than 0.1 s and more than 1 %, or the
      file has at least 90 % of the audio that its header promises,
    - ``unexplained_bytes``: the header does not explain 1 % of the file or more,
    - ``opposed_channels``: the mean of the channels is much quieter than they are,
    - ``silent_channel``: one of the channels is silent, and another one is not.

    Raises Unusable with one of these reasons:

    - ``missing``, ``empty_file``, ``unreadable``, ``no_samples``,
    - ``wrong_length``: the duration differs from the manifest by 0.5 s or half of it, and by 10 %, or the
      file has less than 90 % of the audio that its header promises,
    - ``no_channel``: the file has no ``channel``,
    - ``not_finite``: a sample is NaN, infinite or far beyond full scale,
    - ``too_long``: the cut has more than ``max_seconds``. Such a cut is not decoded.
    """
    path = first_file(cut)
    with or_unusable(path):
        check_seconds(seconds_of(cut), max_seconds, path)
        if is_simple(cut):
            return _read_simple(cut, sample_rate, channel)
        return _read_mixed(cut, sample_rate), []


def change_rate(samples: Samples, rate: int, new_rate: int) -> Samples:
    """Return samples (S,) at ``new_rate``, as ``ceil(S × new_rate / rate)`` samples.

    Frequencies of at least 1.04 times the new Nyquist frequency alias at −60 dB or less.
    """
    return _resample(samples, rate, new_rate, _steep_bank)


def change_rate_fast(samples: Samples, rate: int, new_rate: int) -> Samples:
    """Return the same as ``change_rate`` by a shorter and faster filter, as in torchaudio."""
    return _resample(samples, rate, new_rate, _short_bank)


def _resample(
    samples: Samples, rate: int, new_rate: int, filter_bank: Callable[[int, int], _FilterBank]
) -> Samples:
    """Return samples (S,) at ``new_rate`` by a filter bank for the two rates without common divisor."""
    if rate == new_rate:
        return samples
    divisor = math.gcd(rate, new_rate)
    rate, new_rate = rate // divisor, new_rate // divisor
    # The size of a filter bank grows with this product. It is large for rates with a small common divisor.
    if rate * new_rate > _LARGEST_BANK:
        from scipy.signal import resample_poly

        rate, new_rate = _smaller_terms(rate, new_rate)
        low_pass = _long_filter(max(rate, new_rate))
        resampled = resample_poly(samples, new_rate, rate, window=low_pass).astype(np.float32)
    else:
        new_length = -(-new_rate * len(samples) // rate)  # rounded up
        resampled = _apply_bank(samples, filter_bank(rate, new_rate))[:new_length].numpy()
    return cast("Samples", resampled)


def _smaller_terms(rate: int, new_rate: int) -> tuple[int, int]:
    """Return two numbers of at most ``_LARGEST_TERM`` whose ratio is nearly ``rate`` to ``new_rate``.

    The length of the long filter grows with the larger number. The relative error of the ratio is
    below 4e-6, which is less than the error of a sound card's clock.
    """
    if max(rate, new_rate) <= _LARGEST_TERM:
        return rate, new_rate
    if rate < new_rate:
        ratio = Fraction(rate, new_rate).limit_denominator(_LARGEST_TERM)
        return ratio.numerator, ratio.denominator
    ratio = Fraction(new_rate, rate).limit_denominator(_LARGEST_TERM)
    return ratio.denominator, ratio.numerator


class _FilterBank(NamedTuple):
    """The filters of one pair of rates. A frame of audio gives the next ``kernel.shape[1]`` new samples."""

    kernel: torch.Tensor  # (samples of a frame, new samples)
    padding: int  # zeros before the first sample in the first frame
    hop: int  # samples from the start of a frame to the start of the next frame


@lru_cache(maxsize=64)  # A bank has up to 4 MiB. Each recording of a corpus may have another rate.
def _short_bank(rate: int, new_rate: int) -> _FilterBank:
    import_lhotse()
    from lhotse.augmentation.resample import Resample

    # The kernel of lhotse's Resample has the shape (new_rate, 1, filter length).
    short = Resample(rate, new_rate)
    return _FilterBank(short.kernel[:, 0].T, short.width, rate)


@lru_cache(maxsize=64)
def _steep_bank(rate: int, new_rate: int) -> _FilterBank:
    import_lhotse()
    from lhotse.augmentation.resample import Resample

    steep = Resample(rate, new_rate, "sinc_interp_kaiser", _ZERO_CROSSINGS, _ROLLOFF, _BETA)
    filters = steep.kernel[:, 0]
    filter_length = filters.shape[1]
    # Frames overlap if they are longer than the hop. Each sample is then copied several times, and 48 to
    # 16 kHz would take ten times as long. So one long frame joins several frames, and has less overlap.
    joined_frames = max(1, filter_length // rate)
    kernel = filters.new_zeros(joined_frames * new_rate, filter_length + (joined_frames - 1) * rate)
    for frame in range(joined_frames):
        rows = slice(frame * new_rate, (frame + 1) * new_rate)
        columns = slice(frame * rate, frame * rate + filter_length)
        kernel[rows, columns] = filters
    return _FilterBank(kernel.T, steep.width, joined_frames * rate)


def _apply_bank(samples: Samples, bank: _FilterBank) -> torch.Tensor:
    """Return the samples at the new rate. The last ones are beyond the end of the audio.

    With other settings of torch, sums may be rounded differently (``data.workers``).

    A matmul replaces lhotse's convolution. For 2.4 s of audio it takes 0.26 ms instead of 0.7 to 1.2 ms,
    because oneDNN prepares a convolution again for each new length.
    """
    padded = torch.nn.functional.pad(torch.from_numpy(samples), (bank.padding, bank.padding + bank.hop))
    frame_length, new_length = bank.kernel.shape
    frames = padded.unfold(0, frame_length, bank.hop)
    resampled = torch.empty(len(frames), new_length)
    # A matmul copies its overlapping frames, which are at least 13 times as large as the audio. So each
    # matmul reads a block of frames. The size of a block is a multiple of 1,024 frames, because BLAS then
    # adds in the same order as without blocks.
    block_frames = max(1, _BLOCK_VALUES // frame_length // 1024) * 1024
    for start in range(0, len(frames), block_frames):
        block = slice(start, start + block_frames)
        torch.matmul(frames[block], bank.kernel, out=resampled[block])
    return resampled.reshape(-1)


@lru_cache(maxsize=4)  # The filter for 16,001 to 16,000 Hz has 8 MB.
def _long_filter(larger_rate: int) -> Samples:
    """Return the coefficients of a steep low-pass filter.

    ``larger_rate`` is the larger one of the two rates, divided by their greatest common divisor.
    """
    from scipy.signal import firwin

    half_length = math.ceil(_ZERO_CROSSINGS * larger_rate / _ROLLOFF)
    cutoff = _ROLLOFF / larger_rate
    return cast("Samples", firwin(2 * half_length + 1, cutoff, window=("kaiser", _BETA)))


def check_seconds(seconds: float, max_seconds: float, path: str) -> None:
    """Raise Unusable if ``seconds``, the duration of the recording ``path``, is above ``max_seconds``."""
    if seconds > max_seconds:
        raise Unusable("too_long", f"{path}: {seconds:.0f} s, data.max_decoded_seconds={max_seconds:g}")


def standardise(samples: Samples) -> Samples:
    """Return samples (S,) with zero mean and unit variance. Silence becomes zeros."""
    centred = samples - samples.mean(dtype=np.float64)
    deviation = np.sqrt(np.square(centred).mean() + _EPSILON)
    scaled: Samples = (centred / deviation).astype(np.float32)
    return scaled


def files_of(cut: Mapping[str, Any]) -> list[str]:
    """Return the paths of a cut's audio files."""
    files = []
    for single_cut in single_cuts(cut):
        recording = single_cut.get("recording") or {}
        files += [source["source"] for source in recording.get("sources", ())]
    return files


def first_file(cut: Mapping[str, Any], default: str = "") -> str:
    """Return the path of a cut's first audio file, or ``default`` if it has no file."""
    return next(iter(files_of(cut)), default)


def recording_of(cut: Mapping[str, Any], former: Callable[[str], str] = str) -> str:
    """Return the name of a cut's recording, ``FOLDER/FILE`` of the former path of its first audio file.

    The name does not depend on the folder in which the corpus is.
    """
    path = former(first_file(cut, default=str(cut["id"])))
    return "/".join(path.split("/")[-2:])


def _read_simple(
    cut: Mapping[str, Any], sample_rate: int, channel: int | None
) -> tuple[Samples, list[Fault]]:
    """Read a cut of one file without transforms (see ``is_simple``)."""
    source = cut["recording"]["sources"][0]
    path = source["source"]
    max_decoded_seconds = _seconds_to_decode(cut, path)
    samples, rate, faults = _decode(path, float(cut["start"]), max_decoded_seconds)
    length_faults = _length_faults(cut, path, samples.shape[1] / rate)
    faults = faults or length_faults
    # If the manifest lists all channels of the file, the cut may name some of them.
    file_channels, cut_channels = source.get("channels"), cut.get("channel")
    all_are_listed = isinstance(file_channels, list) and len(file_channels) == len(samples)
    if all_are_listed and len(samples) > 1 and cut_channels is not None:
        names = cut_channels if isinstance(cut_channels, list) else [cut_channels]
        samples = samples[[file_channels.index(name) for name in names]]
        if len(names) < len(file_channels):
            channel = None
    mono, channel_faults = _to_mono(samples, path, channel)
    return check_and_resample(mono, rate, sample_rate, path=path), faults + channel_faults


def check_headers(cut: Mapping[str, Any]) -> None:
    """Raise Unusable if the headers of a cut's files show that ``read_with_faults`` would raise it."""
    path = first_file(cut)
    with or_unusable(path):
        if not is_simple(cut):
            _check_file_lengths(cut)
            return
        max_seconds = _seconds_to_decode(cut, path)
        rest_seconds = max(0.0, read_header(path).duration - float(cut["start"]))
        _length_faults(cut, path, min(max_seconds, rest_seconds))


def _seconds_to_decode(cut: Mapping[str, Any], path: str) -> float:
    """Return the most seconds of a cut's file to decode. Raises Unusable for an impossible place."""
    start, seconds = float(cut["start"]), seconds_of(cut)
    if not 0 < seconds < math.inf or not 0 <= start < math.inf:
        raise _wrong_length(path, f"{cut['duration']} s from {cut['start']} s in the manifest")
    is_segment = (cut.get("custom") or {}).get(SEGMENT)
    if not is_segment and start == 0.0 and seconds >= float(cut["recording"]["duration"]) - 0.01:
        # The cut is its whole file, by the manifest. This detects a file that is longer than in the manifest.
        return seconds + 2 * tolerated_seconds(seconds)
    return seconds


def _length_faults(cut: Mapping[str, Any], path: str, decoded_seconds: float) -> list[Fault]:
    """Return the fault of a cut whose file has a little more or less audio than the manifest says.

    Raises Unusable if the difference is large.
    """
    seconds = seconds_of(cut)
    difference = abs(decoded_seconds - seconds)
    lengths = f"{decoded_seconds:.2f} s from {float(cut['start']):.2f} s, {seconds:.2f} s in the manifest"
    if difference >= tolerated_seconds(seconds):
        # A file that is too long is not decoded to its end, so only a lower bound of its length is known.
        bound = "more than " if decoded_seconds > seconds else ""
        fix = "Correct the duration in the manifest, or remove it, so that the file's duration counts"
        raise _wrong_length(path, f"{bound}{lengths}. {fix}")
    is_other_length = difference > max(0.1, 0.01 * seconds)
    return [Fault("other_length", f"{path}: {lengths}")] if is_other_length else []


def _wrong_length(path: str, detail: str) -> Unusable:
    return Unusable("wrong_length", f"{path}: {detail}")


def _decode(path: str, start: float, seconds: float | None) -> tuple[Samples, int, list[Fault]]:
    """Return the samples (C, S) of a file from ``start`` on, their rate and the faults of the file.

    If ``seconds`` is None, they last to the end. Raises Unusable. More than MOST_SAMPLES are not decoded,
    because they could fill the memory.
    """
    import_lhotse()
    from lhotse.utils import compute_num_samples

    with open_recording(path) as recording:
        rate, file_length, channels = recording.samplerate, recording.frames, recording.channels
        first_sample = compute_num_samples(start, rate)
        if 0 < file_length <= first_sample:
            detail = f"{file_length / rate:.2f} s, but its cut starts at {start:.2f} s in the manifest"
            raise _wrong_length(path, detail)
        count = file_length - first_sample  # samples of each channel to decode
        if seconds is not None:
            count = min(count, compute_num_samples(seconds, rate))
        if count * channels > MOST_SAMPLES:
            detail = f"{count / rate:.0f} s of {channels} channels are too much to read at once. Cut it"
            raise _wrong_length(path, detail)
        if first_sample:
            recording.seek(first_sample)
        samples = _read_or_shorten(recording, max(0, count)).T
        faults = header_faults(recording, path)
        if samples.shape[1] == 0:
            raise no_samples(recording, path)
    decoded_share = samples.shape[1] / count
    if decoded_share < 0.99:
        lengths = f"{samples.shape[1] / rate:.2f} of {count / rate:.2f} s can be decoded. Copy it again"
        if decoded_share < LEAST_SHARE:
            raise _wrong_length(path, lengths)
        faults.append(Fault("other_length", f"{path}: {lengths}"))
    return samples, int(rate), faults


def _read_or_shorten(recording: SoundFile, count: int) -> Samples:
    """Return ``count`` samples (S, C) from the position of a file on. An error at the end shortens them.

    A FLAC file that is cut off causes such an error. Raises it if less than LEAST_SHARE can be decoded.
    """
    from soundfile import LibsndfileError

    first_sample = recording.tell()
    samples = np.zeros((count, recording.channels), np.float32)
    try:
        return cast("Samples", recording.read(out=samples))
    except LibsndfileError:
        decoded_count = recording.tell() - first_sample
        if decoded_count < LEAST_SHARE * count:
            raise
        return samples[:decoded_count]


def _to_mono(samples: Samples, path: str, channel: int | None) -> tuple[Samples, list[Fault]]:
    """Return a channel (S,) of ``samples`` (C, S), or their mean for None. Return the faults, too."""
    if channel is not None:
        if channel >= len(samples):
            detail = f"{path}: it has {len(samples)} channels, and channel {channel} counts from 0"
            raise Unusable("no_channel", detail)
        return np.ascontiguousarray(samples[channel]), []
    mono = _average(samples)
    silent = [number for number, row in enumerate(samples) if len(samples) > 1 and is_silent(row)]
    if len(silent) == len(samples) or len(samples) == 1:
        return mono, []
    faults = []
    if silent:
        channels = f"channel {silent[0]} of 0 to {len(samples) - 1} is silent"
        faults.append(Fault("silent_channel", f"{path}: {channels}. data.channel=NUMBER uses one channel"))
    # Independent channels leave 1/C of their mean power. Opposed channels leave less than a tenth of that.
    power = sum(float(np.square(row).mean()) for row in samples) / len(samples)
    if 10 * len(samples) * float(np.square(mono).mean()) < power:
        cure = "Set data.channel=0, or --channel 0, to use only the first"
        detail = f"{path}: its channels cancel each other. {cure}"
        faults.append(Fault("opposed_channels", detail))
    return mono, faults


def refuse_opposed_channels(faults: Iterable[Fault]) -> None:
    """Raise Unusable for opposed channels, because their mean has no speech, and so no text."""
    for fault in faults:
        if fault.reason == "opposed_channels":
            raise Unusable(fault.reason, fault.detail)


def _average(samples: Samples) -> Samples:
    """Return the mean (S,) of channels (C, S). A single channel is not copied, because it may have 1 GiB."""
    if len(samples) == 1:
        return cast("Samples", samples[0])
    return cast("Samples", samples.mean(axis=0, dtype=np.float32))


def _read_mixed(cut: Mapping[str, Any], sample_rate: int) -> Samples:
    """Read a cut of several files, tracks or transforms with lhotse."""
    from speechtrain.data.lhotse_audio import load_audio

    _check_file_lengths(cut)
    samples, rate = load_audio(cut, lambda *place: _decode(*place)[0], change_rate_fast)
    path = first_file(cut, default=str(cut["id"]))
    if samples.shape[1] == 0:
        raise Unusable("no_samples", path)
    return check_and_resample(_average(samples), rate, sample_rate, path=path)


def _check_file_lengths(cut: Mapping[str, Any]) -> None:
    """Raise Unusable for a file that is far longer than in the manifest. lhotse would read it to the end."""
    recordings = [single_cut.get("recording") or {} for single_cut in single_cuts(cut)]
    for recording in recordings:
        # The manifest has the duration after changes of speed and tempo, which halve it at most.
        max_file_seconds = 2.0 * float(recording.get("duration", 0.0)) + 1.0
        for source in recording.get("sources", ()):
            with open_recording(source["source"]) as file:
                file_seconds = file.frames / file.samplerate
            if file_seconds > max_file_seconds:
                detail = f"{file_seconds:.2f} s, {recording['duration']} s in the manifest"
                raise _wrong_length(source["source"], detail)


def check_and_resample(mono: Samples, rate: int, sample_rate: int, path: str) -> Samples:
    """Return the samples (S,) at ``sample_rate``. Raises Unusable for NaN, impossible values and rates."""
    if not RATES[0] <= rate <= RATES[1]:
        raise Unusable("unreadable", f"{path}: a rate of {rate} Hz. Give {RATES[0]} to {RATES[1]} Hz")
    if len(mono) * sample_rate > MOST_SAMPLES * rate:
        raise _wrong_length(path, f"{len(mono) / rate:.0f} s are too much to resample. Cut it")
    peak = max(float(mono.max()), -float(mono.min()))
    if not peak <= _HIGHEST_PEAK:  # This also refuses NaN, because every comparison with NaN is false.
        raise Unusable("not_finite", f"{path}: its peak is {peak:.3g}")
    return change_rate(mono, rate, sample_rate)

"""Reading of one cut's audio from an untrusted file: samples, or the reason why it is unusable.

Only the length in the manifest is decoded, so a recording that is longer than in its manifest costs
no more.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import stat
from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from speechtrain.data.manifests import SEGMENT, seconds_of
from speechtrain.errors import one_line

Samples = NDArray[np.float32]

_RATES = (1_000, 768_000)  # Hz; a header with any other rate is damaged, and a filter for it is too large
_LARGEST_BANK = 2**20  # coefficients, 4 MiB: 11,025 to 16,000 Hz needs 282,240; 16,001 would need a gigabyte
_LOUDEST = 1e4  # largest sample of float files; full scale is 1
_EPSILON = 1e-5  # added to the variance, as in the layer norm that wav2vec 2.0 applies to the samples


class Unusable(Exception):
    """Audio that cannot be used; ``reason`` is a key of ``data.batches.REASONS``."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


def read_cut(cut: Mapping[str, Any], sample_rate: int) -> Samples:
    """Return a cut's audio (S,): mono, float32, at ``sample_rate``, with the cut's duration.

    ``cut`` is in lhotse's JSON format. Its channels are averaged; if its manifest lists one only, all
    channels of the file are. Raises Unusable with ``missing``, ``empty_file``, ``unreadable``,
    ``no_samples``, ``wrong_length`` (different by more than 0.1 s and 1 %) or ``not_finite``.
    """
    with _or_unusable(next(iter(files_of(cut)), "")):
        return _read_file(cut, sample_rate) if _is_simple(cut) else _read_mixed(cut, sample_rate)


def read_file(path: str, sample_rate: int) -> Samples:
    """Return a whole audio file (S,), mono, at ``sample_rate``. Raises Unusable."""
    check_file(path)
    with _or_unusable(path):
        samples, rate = _decode(path, 0.0, None)
    return _finish(samples.mean(axis=0, dtype=np.float32), rate, sample_rate, path=path)


def change_speed(samples: Samples, percent: int, sample_rate: int) -> Samples:
    """Change the speed by the factor ``percent`` / 100, to ``ceil(S × 100 / percent)`` samples."""
    return change_rate(samples, round(sample_rate * percent / 100), sample_rate)


def change_rate(samples: Samples, rate: int, wanted: int) -> Samples:
    """Resample, band-limited, to ``ceil(S × wanted / rate)`` samples."""
    if rate == wanted:
        return samples
    common = math.gcd(rate, wanted)
    taken, given = rate // common, wanted // common
    if taken * given > _LARGEST_BANK:  # almost no common divisor: lhotse's filters grow with both
        from scipy.signal import resample_poly

        return cast("Samples", resample_poly(samples, given, taken).astype(np.float32))
    from lhotse.augmentation.torchaudio import get_or_create_resampler

    bank = get_or_create_resampler(taken, given)
    padded = torch.nn.functional.pad(torch.from_numpy(samples), (bank.width, bank.width + taken))
    # lhotse's filters, with its convolution as one matrix product: 0.26 ms instead of 0.7 to 1.2 for 2.4 s,
    # because oneDNN prepares a convolution again for each new length
    frames = padded.unfold(0, bank.kernel.shape[-1], taken)
    changed = (frames @ bank.kernel[:, 0].T).reshape(-1)[: -(-given * len(samples) // taken)]
    return cast("Samples", changed.numpy())


def standardise(samples: Samples) -> Samples:
    """Scale samples (S,) to zero mean and unit variance; silence stays silence."""
    centred = samples - samples.mean(dtype=np.float64)
    scaled: Samples = (centred / np.sqrt(np.square(centred).mean() + _EPSILON)).astype(np.float32)
    return scaled


def check_file(path: str) -> None:
    """Raise Unusable unless ``path`` is a regular file that is not empty (a pipe would block)."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise Unusable("missing", path) from None
    except (OSError, ValueError) as error:
        raise Unusable("unreadable", f"{path}: {one_line(str(error), 300)}") from None
    if not stat.S_ISREG(status.st_mode):
        raise Unusable("unreadable", f"{path}: not a regular file")
    if status.st_size == 0:
        raise Unusable("empty_file", path)


def files_of(cut: Mapping[str, Any]) -> list[str]:
    """Return the audio files of a cut."""
    if cut.get("type") == "MixedCut":
        return [path for track in cut["tracks"] for path in files_of(track["cut"])]
    return [source["source"] for source in (cut.get("recording") or {}).get("sources", ())]


@contextlib.contextmanager
def _or_unusable(path: str) -> Iterator[None]:
    """Convert any other error to Unusable: lhotse and libsndfile raise many kinds for a damaged file."""
    try:
        yield
    except Unusable:
        raise
    except Exception as error:
        message = one_line(str(error), 300) or type(error).__name__
        raise Unusable("unreadable", message if path in message else f"{path}: {message}") from None


def _is_simple(cut: Mapping[str, Any]) -> bool:
    """Whether a cut is a part of one file, as nearly all are; it needs no lhotse objects (50 µs)."""
    is_one_file = cut["type"] in ("MonoCut", "MultiCut") and len(cut["recording"]["sources"]) == 1
    return is_one_file and not cut["recording"].get("transforms")


def _read_file(cut: Mapping[str, Any], sample_rate: int) -> Samples:
    recording = cut["recording"]
    source = recording["sources"][0]
    path = source["source"]
    check_file(path)
    start, seconds = float(cut["start"]), seconds_of(cut)
    if not 0 < seconds < math.inf or not 0 <= start < math.inf:
        raise Unusable("wrong_length", f"{path}: {cut['duration']} s from {cut['start']} s in the manifest")
    tolerance = max(0.1, 0.01 * seconds)
    # a little more than in the manifest, to detect a longer recording
    is_segment = (cut.get("custom") or {}).get(SEGMENT)
    is_whole = not is_segment and start + seconds >= float(recording["duration"]) - 0.01 and start == 0.0
    try:
        samples, rate = _decode(path, start, seconds + (2 * tolerance if is_whole else 0.0))
    except Exception:
        _check_start(path, start)
        raise
    found = samples.shape[1] / rate
    if found < seconds - tolerance or (is_whole and found > seconds + tolerance):
        more = "more than " if found > seconds else ""
        at = f" from {start:.2f} s" if start else ""
        raise Unusable("wrong_length", f"{path}: {more}{found:.2f} s{at}, {seconds:.2f} s in the manifest")
    samples = samples[:, : max(1, round(seconds * rate))]
    return _finish(_mono(samples, source.get("channels"), cut.get("channel")), rate, sample_rate, path=path)


def _check_start(path: str, start: float) -> None:
    """Raise Unusable if a cut starts after its recording's end; else the file is damaged."""
    import soundfile

    info = soundfile.info(path)
    if 0 < info.duration <= start:
        raise Unusable("wrong_length", f"{path}: {info.duration:.2f} s, from {start:.2f} s in the manifest")


def _decode(path: str, start: float, seconds: float | None) -> tuple[Samples, int]:
    """Return samples (C, S) and their rate."""
    from lhotse.audio.backend import LibsndfileBackend, read_audio

    try:  # this backend nearly always succeeds; calling it directly saves 0.4 ms
        samples, rate = LibsndfileBackend().read_audio(path, offset=start, duration=seconds)
    except Exception:
        samples, rate = read_audio(path, offset=start, duration=seconds)
    samples = np.atleast_2d(samples)
    if not _RATES[0] <= rate <= _RATES[1]:
        raise Unusable("unreadable", f"{path}: its sampling rate is {rate} Hz")
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
    from lhotse.cut.set import deserialize_cut

    for path in files_of(cut):
        check_file(path)
    _check_lengths(cut)
    loaded = deserialize_cut(copy.deepcopy(dict(cut)))
    samples = np.atleast_2d(loaded.load_audio())
    where = files_of(cut)[0] if files_of(cut) else str(cut["id"])
    if samples.shape[1] == 0:
        raise Unusable("no_samples", where)
    return _finish(samples.mean(axis=0, dtype=np.float32), int(loaded.sampling_rate), sample_rate, path=where)


def _check_lengths(cut: Mapping[str, Any]) -> None:
    """Refuse files that are far longer than in their manifest: lhotse would read them to the end."""
    import soundfile

    if cut["type"] == "MixedCut":
        for track in cut["tracks"]:
            _check_lengths({"type": track.get("type"), **track["cut"]})
        return
    recording = cut.get("recording") or {}
    for source in recording.get("sources", ()):
        found = soundfile.info(source["source"]).duration
        if found > 2.0 * float(recording["duration"]) + 1.0:  # speed and tempo change lengths by up to 2
            detail = f"{source['source']}: {found:.2f} s, {recording['duration']} s in the manifest"
            raise Unusable("wrong_length", detail)


def _finish(mono: Samples, rate: int, sample_rate: int, path: str) -> Samples:
    """Check the values and convert the rate."""
    peak = float(np.abs(mono).max())
    if not peak <= _LOUDEST:  # a comparison with NaN is false
        raise Unusable("not_finite", f"{path}: its peak is {peak:.3g}")
    return change_rate(mono, rate, sample_rate)

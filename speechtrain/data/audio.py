"""Reading one cut's audio, whatever its file turns out to be: samples, or a reason why not.

Nothing read here is trusted. No more is decoded than the manifest announces, so a recording that
is longer than its manifest says costs no more than one that is not.
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

_RATES = (1_000, 768_000)  # Hz; a header beyond them is damaged, and a filter for it would not fit
_LARGEST_BANK = 2**20  # coefficients, 4 MiB: 11,025 to 16,000 Hz needs 282,240; 16,001 would need a gigabyte
_LOUDEST = 1e4  # of float files, full scale being 1
_EPSILON = 1e-5  # added to the variance: torch's layer norm, which wav2vec 2.0 applies to the samples


class Unusable(Exception):
    """Audio that cannot be used, and why: ``reason`` is one of the fixed words of a ``Skip``."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


def read_cut(cut: Mapping[str, Any], sample_rate: int) -> Samples:
    """A cut's audio (S,): mono, float32, at ``sample_rate``, as long as the cut says.

    ``cut`` is in lhotse's JSON form. Channels are averaged: those that the cut names, or all where
    its manifest knows of one only. Raises Unusable with ``missing``, ``empty_file``, ``unreadable``,
    ``no_samples``, ``wrong_length`` (further off than 0.1 s and 1 %) or ``not_finite``.
    """
    with _or_unusable(next(iter(files_of(cut)), "")):
        return _read_file(cut, sample_rate) if _is_simple(cut) else _read_mixed(cut, sample_rate)


def read_file(path: str, sample_rate: int) -> Samples:
    """A whole audio file (S,), mono, at ``sample_rate``. Raises Unusable."""
    check_file(path)
    with _or_unusable(path):
        samples, rate = _decode(path, 0.0, None)
    return _finish(samples.mean(axis=0, dtype=np.float32), rate, sample_rate, path)


def change_speed(samples: Samples, percent: int, sample_rate: int) -> Samples:
    """Play ``samples`` faster by ``percent`` / 100: ``ceil(S × 100 / percent)`` of them are left."""
    return change_rate(samples, round(sample_rate * percent / 100), sample_rate)


def change_rate(samples: Samples, rate: int, wanted: int) -> Samples:
    """Band-limited resampling to ``ceil(S × wanted / rate)`` samples."""
    if rate == wanted:
        return samples
    common = math.gcd(rate, wanted)
    taken, given = rate // common, wanted // common
    if taken * given > _LARGEST_BANK:  # rates with little in common: lhotse's filters grow with both
        from scipy.signal import resample_poly

        return cast("Samples", resample_poly(samples, given, taken).astype(np.float32))
    from lhotse.augmentation.torchaudio import get_or_create_resampler

    bank = get_or_create_resampler(taken, given)
    padded = torch.nn.functional.pad(torch.from_numpy(samples), (bank.width, bank.width + taken))
    # lhotse's filters, its convolution as one product: 0.26 ms instead of 0.7 to 1.2 for 2.4 s, as
    # oneDNN prepares each new length of a convolution
    frames = padded.unfold(0, bank.kernel.shape[-1], taken)
    changed = (frames @ bank.kernel[:, 0].T).reshape(-1)[: -(-given * len(samples) // taken)]
    return cast("Samples", changed.numpy())


def standardise(samples: Samples) -> Samples:
    """The same samples (S,) with zero mean and unit variance; silence stays silence."""
    centred = samples - samples.mean(dtype=np.float64)
    scaled: Samples = (centred / np.sqrt(np.square(centred).mean() + _EPSILON)).astype(np.float32)
    return scaled


def check_file(path: str) -> None:
    """Raise Unusable unless ``path`` is a regular file with bytes in it (a pipe would wait for ever)."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise Unusable("missing", path) from None
    except (OSError, ValueError) as error:
        raise Unusable("unreadable", f"{path}: {one_line(str(error), 300)}") from None
    if not stat.S_ISREG(status.st_mode):
        raise Unusable("unreadable", f"{path}: no regular file")
    if status.st_size == 0:
        raise Unusable("empty_file", path)


def files_of(cut: Mapping[str, Any]) -> list[str]:
    """The audio files that a cut needs."""
    if cut.get("type") == "MixedCut":
        return [path for track in cut["tracks"] for path in files_of(track["cut"])]
    return [source["source"] for source in (cut.get("recording") or {}).get("sources", ())]


@contextlib.contextmanager
def _or_unusable(path: str) -> Iterator[None]:
    """Makes Unusable of any other error: lhotse and libsndfile raise whatever a damaged file leads to."""
    try:
        yield
    except Unusable:
        raise
    except Exception as error:
        message = one_line(str(error), 300) or type(error).__name__
        raise Unusable("unreadable", message if path in message else f"{path}: {message}") from None


def _is_simple(cut: Mapping[str, Any]) -> bool:
    """Whether a cut is a stretch of one file, as nearly all are: read without lhotse's objects (50 µs)."""
    if cut["type"] not in ("MonoCut", "MultiCut"):
        return False
    recording = cut["recording"]
    return len(recording["sources"]) == 1 and not recording.get("transforms")


def _read_file(cut: Mapping[str, Any], sample_rate: int) -> Samples:
    recording = cut["recording"]
    source = recording["sources"][0]
    path = source["source"]
    check_file(path)
    start, seconds = float(cut["start"]), seconds_of(cut)
    if not 0 < seconds < math.inf or not 0 <= start < math.inf:
        raise Unusable("wrong_length", f"{path}: the manifest says {cut['duration']} s from {cut['start']} s")
    tolerance = max(0.1, 0.01 * seconds)
    # a little more than announced, to see whether the recording goes on
    is_whole = not (cut.get("custom") or {}).get(SEGMENT) and (
        start + seconds >= float(recording["duration"]) - 0.01 and start == 0.0
    )
    try:
        samples, rate = _decode(path, start, seconds + (2 * tolerance if is_whole else 0.0))
    except Exception:
        _check_start(path, start)
        raise
    found = samples.shape[1] / rate
    if found < seconds - tolerance or (is_whole and found > seconds + tolerance):
        more = "more than " if found > seconds else ""
        at = f" from {start:.2f} s" if start else ""
        raise Unusable("wrong_length", f"{path}: {more}{found:.2f} s{at}, the manifest says {seconds:.2f} s")
    samples = samples[:, : max(1, round(seconds * rate))]
    return _finish(_mono(samples, source.get("channels"), cut.get("channel")), rate, sample_rate, path)


def _check_start(path: str, start: float) -> None:
    """Tell a cut that begins behind its recording's end from a damaged file."""
    import soundfile

    info = soundfile.info(path)
    if 0 < info.duration <= start:
        raise Unusable("wrong_length", f"{path}: {info.duration:.2f} s, the manifest says from {start:.2f} s")


def _decode(path: str, start: float, seconds: float | None) -> tuple[Samples, int]:
    """Samples (C, S) and their rate."""
    from lhotse.audio.backend import LibsndfileBackend, read_audio

    try:  # the one that nearly always succeeds: asking for it by name saves 0.4 ms
        samples, rate = LibsndfileBackend().read_audio(path, offset=start, duration=seconds)
    except Exception:
        samples, rate = read_audio(path, offset=start, duration=seconds)
    samples = np.atleast_2d(samples)
    if not _RATES[0] <= rate <= _RATES[1]:
        raise Unusable("unreadable", f"{path}: a sampling rate of {rate} Hz")
    if samples.shape[1] == 0:
        raise Unusable("no_samples", path)
    return samples, int(rate)


def _mono(samples: Samples, known: Any, wanted: Any) -> Samples:
    """Mean over the channels that the cut names; over all where its manifest did not know the file's."""
    if isinstance(known, list) and len(known) == len(samples) > 1 and wanted is not None:
        names = wanted if isinstance(wanted, list) else [wanted]
        samples = samples[[known.index(name) for name in names]]
    mono: Samples = samples.mean(axis=0, dtype=np.float32)
    return mono


def _read_mixed(cut: Mapping[str, Any], sample_rate: int) -> Samples:
    """Cuts of several files, tracks or transforms, by lhotse itself."""
    from lhotse.cut.set import deserialize_cut

    for path in files_of(cut):
        check_file(path)
    _check_lengths(cut)
    loaded = deserialize_cut(copy.deepcopy(dict(cut)))
    samples = np.atleast_2d(loaded.load_audio())
    where = files_of(cut)[0] if files_of(cut) else str(cut["id"])
    if samples.shape[1] == 0:
        raise Unusable("no_samples", where)
    return _finish(samples.mean(axis=0, dtype=np.float32), int(loaded.sampling_rate), sample_rate, where)


def _check_lengths(cut: Mapping[str, Any]) -> None:
    """Refuse files that are far longer than their manifest says: lhotse would read them to the end."""
    import soundfile

    if cut["type"] == "MixedCut":
        for track in cut["tracks"]:
            _check_lengths({"type": track.get("type"), **track["cut"]})
        return
    recording = cut.get("recording") or {}
    for source in recording.get("sources", ()):
        # speed and tempo transforms change lengths by up to 2
        said = 2.0 * float(recording["duration"]) + 1.0
        found = soundfile.info(source["source"]).duration
        if found > said:
            raise Unusable(
                "wrong_length",
                f"{source['source']}: {found:.2f} s, the manifest says {recording['duration']} s",
            )


def _finish(mono: Samples, rate: int, sample_rate: int, path: str) -> Samples:
    """Check the values and convert the rate."""
    peak = float(np.abs(mono).max())
    if not peak <= _LOUDEST:  # a comparison with NaN is false
        raise Unusable("not_finite", f"{path}: a peak of {peak:.3g}")
    return change_rate(mono, rate, sample_rate)

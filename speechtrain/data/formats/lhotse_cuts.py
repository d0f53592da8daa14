"""Checks cuts of an untrusted manifest before lhotse reads their audio.

lhotse reads the audio of cuts with several files, tracks or transforms. It runs the shell commands and opens
the URLs and impulse responses that a manifest names. So lhotse gets a copy of the cut that has only the keys
listed here, with numbers within bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from speechtrain.data.recordings import MOST_CHANNELS, RATES

Samples = NDArray[np.float32]

MOST_SAMPLES = 2**28
"""The most decoded samples of a cut, over all channels: 1 GiB, 4.6 hours of one channel at 16 kHz."""

_SECONDS_BOUNDS = (0.0, 1e6)
_SNR_BOUNDS = (-300.0, 300.0)  # dB
_FACTOR_BOUNDS = (0.1, 10.0)
_TYPES = ("MonoCut", "MultiCut", "PaddingCut", "MixedCut")
_MAX_TRACKS = 1_000
_MAX_TRANSFORMS = 16
# the known transforms, each with the bounds of its arguments
_TRANSFORMS: dict[str, dict[str, tuple[float, float]]] = {
    "Speed": {"factor": _FACTOR_BOUNDS},
    "Tempo": {"factor": _FACTOR_BOUNDS},
    "Volume": {"factor": (-1e3, 1e3)},
    "Resample": {"source_sampling_rate": RATES, "target_sampling_rate": RATES},
}


class UnknownField(ValueError):
    """A cut has an unknown field, or a number out of bounds."""


def is_simple(cut: Mapping[str, Any]) -> bool:
    """Return whether a cut is a part of one file without transforms, as nearly all cuts are.

    Such a cut is read without lhotse, whose objects take 50 µs to make.
    """
    if cut["type"] not in ("MonoCut", "MultiCut"):
        return False
    recording = cut["recording"]
    return len(recording["sources"]) == 1 and not recording.get("transforms")


def known_cut(cut: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a cut in lhotse's JSON format, with only the keys that are needed to read its audio.

    Raises UnknownField with the first field that is unknown or whose number is out of bounds.
    """
    if cut.get("type") != "MixedCut":
        return _known_single_cut(cut, cut.get("type"))
    tracks = [_known_track(track) for track in _checked_list(cut, "tracks", _MAX_TRACKS)]
    mixed_cut = {"id": str(cut.get("id")), "type": "MixedCut", "tracks": tracks, **_known_transforms(cut)}
    cuts = [track["cut"] for track in tracks]
    if cut.get("snr_reference") is not None:
        snr_reference = _known_track(cut["snr_reference"])
        mixed_cut["snr_reference"] = snr_reference
        cuts.append(snr_reference["cut"])
    seconds = max(track["offset"] + track["cut"]["duration"] for track in tracks)
    cut_samples, max_rate, max_channels = 0.0, 0, 1
    for track_cut in cuts:
        recording = track_cut.get("recording", track_cut)  # Silence has no recording. It has a rate itself.
        rate = recording["sampling_rate"]
        cut_samples += track_cut["duration"] * rate
        max_rate = max(max_rate, rate)
        channel = track_cut.get("channel")
        if isinstance(channel, list):
            max_channels = max(max_channels, len(channel))
    # The mixture has the highest rate and the largest number of channels among the cuts.
    mixture_samples = seconds * largest_growth(mixed_cut) * max_rate * max_channels
    samples = max(cut_samples, mixture_samples)
    if samples > MOST_SAMPLES:
        raise UnknownField(f"its tracks have {samples:.0f} samples, the most are {MOST_SAMPLES}")
    return mixed_cut


def _known_track(track: object) -> dict[str, Any]:
    """Return the known parts of a track. Its cut has one recording or is silence."""
    if not isinstance(track, Mapping) or not isinstance(track.get("cut"), Mapping):
        raise UnknownField("a track has no 'cut'")
    # The type is a key of the track, of its cut, or of both. A hostile file can have NaN as the type, which
    # is not equal to itself, so the types are compared as strings.
    track_type = str(track.get("type", track["cut"].get("type")))
    cut_type = str(track["cut"].get("type", track_type))
    if cut_type != track_type:
        raise UnknownField(f"a track of the two types {track_type[:40]!r}, {cut_type[:40]!r}")
    cut = _known_single_cut(track["cut"], track_type)
    known_track = {
        "type": cut.pop("type"),
        "cut": cut,
        "offset": _number(track, "offset", _SECONDS_BOUNDS, default=0.0),
    }
    if track.get("snr") is not None:
        known_track["snr"] = _number(track, "snr", _SNR_BOUNDS)
    for key in ("is_snr_reference", "mute"):
        known_track[key] = track.get(key) is True
    return known_track


def _known_single_cut(cut: Mapping[str, Any], cut_type: object) -> dict[str, Any]:
    """Return the known parts of a cut with one recording, or of silence."""
    if cut_type not in _TYPES:
        raise UnknownField(f"'type' is {str(cut_type)[:40]!r}. A lhotse cut has one of {', '.join(_TYPES)}")
    if not isinstance(cut.get("supervisions") or [], list):
        raise UnknownField("'supervisions' is not a list of objects")
    seconds = _number(cut, "duration", _SECONDS_BOUNDS)
    known_parts: dict[str, Any] = {"id": str(cut.get("id")), "duration": seconds, "type": cut_type}
    if cut_type == "PaddingCut":
        rate = int(_number(cut, "sampling_rate", RATES))
        if seconds * rate > MOST_SAMPLES:
            raise UnknownField(f"{seconds:g} s of silence")
        return known_parts | {"sampling_rate": rate, "feat_value": 0.0, "num_samples": round(seconds * rate)}
    recording = cut.get("recording")
    if not isinstance(recording, Mapping):
        raise UnknownField("has no 'recording' (a cut with features only has no audio)")
    channel = cut.get("channel", 0)
    known_parts["channel"] = _channels(channel) if isinstance(channel, list) else _channels([channel])[0]
    known_parts["start"] = _number(cut, "start", _SECONDS_BOUNDS)
    known_parts["supervisions"] = []
    known_parts["recording"] = _known_recording(recording)
    return known_parts


def _known_recording(recording: Mapping[str, Any]) -> dict[str, Any]:
    """Return the known parts of a recording. Raises UnknownField for audio that is not in files."""
    sources = []
    for source in _checked_list(recording, "sources", MOST_CHANNELS):
        if not isinstance(source, Mapping):
            raise UnknownField("'sources' is not a list of objects")
        if source.get("type") != "file":
            kind = str(source.get("type"))[:40]
            raise UnknownField(f"the audio has the type {kind!r}. Save it as files (lhotse: save_audios)")
        path = source.get("source")
        if not isinstance(path, str) or not path:
            raise UnknownField("the audio has no 'source' that is a path")
        sources.append({"type": "file", "channels": _channels(source.get("channels")), "source": path})
    seconds = _number(recording, "duration", _SECONDS_BOUNDS)
    rate = int(_number(recording, "sampling_rate", RATES))
    known_parts: dict[str, Any] = {
        "id": str(recording.get("id")),
        "sources": sources,
        "duration": seconds,
        "sampling_rate": rate,
        "num_samples": round(seconds * rate),
    }
    if recording.get("channel_ids") is not None:
        known_parts["channel_ids"] = _channels(recording["channel_ids"])
    return known_parts | _known_transforms(recording)


def _known_transforms(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``{"transforms": […]}`` of a cut or a recording, or ``{}`` if it has no transforms."""
    if not part.get("transforms"):
        return {}
    transforms = []
    for transform in _checked_list(part, "transforms", _MAX_TRANSFORMS):
        name = arguments = None
        if isinstance(transform, Mapping):
            name, arguments = transform.get("name"), transform.get("kwargs")
        bounds = _TRANSFORMS.get(name) if isinstance(name, str) else None
        if bounds is None or not isinstance(arguments, Mapping):
            raise UnknownField(f"the transform {str(name)[:40]!r}. Known are {', '.join(_TRANSFORMS)}")
        numbers = {key: _number(arguments, key, bounds[key]) for key in bounds}
        transforms.append({"name": name, "kwargs": numbers})
    return {"transforms": transforms}


def largest_growth(part: Mapping[str, Any]) -> float:
    """Return the length of the longest audio in the transforms of a cut or recording, relative to its input.

    The transforms must be known. They are applied one after another, so an intermediate result can be longer
    than the last one.
    """
    factor = largest_factor = 1.0
    for transform in part.get("transforms", ()):
        arguments = transform["kwargs"]
        if transform["name"] == "Resample":
            factor *= arguments["target_sampling_rate"] / arguments["source_sampling_rate"]
        elif transform["name"] != "Volume":
            factor /= arguments["factor"]
        largest_factor = max(largest_factor, factor)
    return largest_factor


def _checked_list(part: Mapping[str, Any], key: str, max_length: int) -> list[Any]:
    """Return ``part[key]``. Raises UnknownField unless it is a list of 1 to ``max_length`` elements."""
    elements = part.get(key)
    if not isinstance(elements, list) or not 0 < len(elements) <= max_length:
        raise UnknownField(f"{key!r} is not a list of 1 to {max_length}")
    return elements


def _number(part: Mapping[str, Any], key: str, bounds: tuple[float, float], default: object = None) -> float:
    """Return ``part[key]`` or the default. Raises UnknownField unless it is a number within ``bounds``."""
    number = part.get(key, default)
    if number is None:
        raise UnknownField(f"has no {key!r}")
    low, high = bounds
    if isinstance(number, bool) or not isinstance(number, int | float) or not low <= number <= high:
        raise UnknownField(f"{key!r} is {str(number)[:40]}, not a number from {low:g} to {high:g}")
    return number


def _channels(channels: object) -> list[int]:
    """Return ``channels``. Raises UnknownField unless it is a list of channel numbers."""
    numbers = _checked_list({"channels": channels}, "channels", MOST_CHANNELS)
    if not all(isinstance(channel, int) and 0 <= channel < MOST_CHANNELS for channel in numbers):
        raise UnknownField(f"the channels are {str(channels)[:40]!r}")
    return cast("list[int]", numbers)

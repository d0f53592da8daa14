"""Checks of the cuts in an untrusted manifest: lhotse gets known keys only, with bounded numbers.

lhotse reads the audio of cuts with several files, tracks or transforms. It runs shell commands and opens URLs
and impulse responses that a manifest names. So it gets only the parts of a cut that this module lists.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from speechtrain.data.recordings import MOST_CHANNELS, RATES

Samples = NDArray[np.float32]

MOST_SAMPLES = 2**28
"""The most decoded samples of a cut, over all channels: 1 GiB, 4.6 hours of one channel at 16 kHz."""
_SECONDS = (0.0, 1e6)
_MAX_TRACKS = 1_000
_MAX_TRANSFORMS = 16
_FACTOR = {"factor": (0.1, 10.0)}
_TRANSFORMS: dict[str, dict[str, tuple[float, float]]] = {
    "Speed": _FACTOR,
    "Tempo": _FACTOR,
    "Volume": {"factor": (-1e3, 1e3)},
    "Resample": {"source_sampling_rate": RATES, "target_sampling_rate": RATES},
}


class UnknownPart(ValueError):
    """A cut has an unknown part, or a number out of its bounds."""


def is_simple(cut: Mapping[str, Any]) -> bool:
    """Return whether a cut is a part of one file, as nearly all cuts are.

    A simple cut is read without lhotse, whose objects take 50 µs.
    """
    if cut["type"] not in ("MonoCut", "MultiCut"):
        return False
    recording = cut["recording"]
    return len(recording["sources"]) == 1 and not recording.get("transforms")


def known_cut(cut: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a cut in lhotse's JSON format, with only the keys that are needed to read its audio.

    Raises UnknownPart with the first part that is unknown or whose number is out of bounds.
    """
    if cut.get("type") != "MixedCut":
        return _cut_of_one_recording(cut, cut.get("type"))
    tracks = [_track(track) for track in _checked_list(cut, "tracks", _MAX_TRACKS)]
    mixed_cut = {"id": str(cut.get("id")), "type": "MixedCut", "tracks": tracks, **_transforms(cut)}
    cuts = [track["cut"] for track in tracks]
    if cut.get("snr_reference") is not None:
        mixed_cut["snr_reference"] = _track(cut["snr_reference"])
        cuts.append(mixed_cut["snr_reference"]["cut"])
    seconds = max(track["offset"] + track["cut"]["duration"] for track in tracks)
    samples = _samples(cuts, seconds * largest_growth(mixed_cut))
    if samples > MOST_SAMPLES:
        raise UnknownPart(f"its tracks have {samples:.0f} samples, the most are {MOST_SAMPLES}")
    return mixed_cut


def _samples(cuts: Sequence[Mapping[str, Any]], seconds: float) -> float:
    """Return the larger number of samples: all cuts, or their mixture of ``seconds`` over all channels."""
    samples, max_rate, max_channels = 0.0, 0, 1
    for cut in cuts:
        rate = cut.get("recording", cut)["sampling_rate"]
        samples += cut["duration"] * rate
        max_rate = max(max_rate, rate)
        channel = cut.get("channel")
        if isinstance(channel, list):
            max_channels = max(max_channels, len(channel))
    return max(samples, seconds * max_rate * max_channels)


def _track(track: object) -> dict[str, Any]:
    """Return the known parts of a track. Its cut has one recording or is silence."""
    if not isinstance(track, Mapping) or not isinstance(track.get("cut"), Mapping):
        raise UnknownPart("a track has no 'cut'")
    kind = str(track.get("type", track["cut"].get("type")))  # a string, because NaN is not equal to itself
    kind_of_cut = str(track["cut"].get("type", kind))
    if kind_of_cut != kind:
        raise UnknownPart(f"a track of the two types {kind[:40]!r}, {kind_of_cut[:40]!r}")
    cut = _cut_of_one_recording(track["cut"], kind)
    known_track = {"type": cut.pop("type"), "cut": cut, "offset": _number(track, "offset", _SECONDS, 0.0)}
    if track.get("snr") is not None:
        known_track["snr"] = _number(track, "snr", (-300.0, 300.0))
    for key in ("is_snr_reference", "mute"):
        known_track[key] = track.get(key) is True
    return known_track


def _cut_of_one_recording(cut: Mapping[str, Any], kind: object) -> dict[str, Any]:
    """Return the known parts of a cut with one recording, or of silence."""
    seconds = _number(cut, "duration", _SECONDS)
    known_parts: dict[str, Any] = {"id": str(cut.get("id")), "duration": seconds, "type": kind}
    if kind == "PaddingCut":
        rate = int(_number(cut, "sampling_rate", RATES))
        if seconds * rate > MOST_SAMPLES:
            raise UnknownPart(f"{seconds:g} s of silence")
        return known_parts | {"sampling_rate": rate, "feat_value": 0.0, "num_samples": round(seconds * rate)}
    recording = cut.get("recording")
    if kind not in ("MonoCut", "MultiCut") or not isinstance(recording, Mapping):
        raise UnknownPart(f"a cut of type {kind!r} with {type(recording).__name__} as its recording")
    channel = cut.get("channel", 0)
    channel = _channels(channel) if isinstance(channel, list) else _channels([channel])[0]
    known_parts |= {"start": _number(cut, "start", _SECONDS), "channel": channel, "supervisions": []}
    return known_parts | {"recording": _recording(recording)}


def _recording(recording: Mapping[str, Any]) -> dict[str, Any]:
    """Return the known parts of a recording. Raises UnknownPart for audio that is not in files."""
    sources = []
    for source in _checked_list(recording, "sources", MOST_CHANNELS):
        if not isinstance(source, Mapping) or source.get("type") != "file":
            raise UnknownPart("its audio is not a file")
        path = source.get("source")
        if not isinstance(path, str):
            raise UnknownPart("its audio is not a file")
        sources.append({"type": "file", "channels": _channels(source.get("channels")), "source": path})
    seconds = _number(recording, "duration", _SECONDS)
    rate = int(_number(recording, "sampling_rate", RATES))
    known_parts: dict[str, Any] = {"id": str(recording.get("id")), "sources": sources}
    known_parts |= {"duration": seconds, "sampling_rate": rate}
    if recording.get("channel_ids") is not None:
        known_parts["channel_ids"] = _channels(recording["channel_ids"])
    return known_parts | {"num_samples": round(seconds * rate)} | _transforms(recording)


def _transforms(holder: Mapping[str, Any]) -> dict[str, Any]:
    """Return the key ``transforms`` of a cut or recording, or no key if it has no transforms."""
    if not holder.get("transforms"):
        return {}
    transforms = []
    for transform in _checked_list(holder, "transforms", _MAX_TRANSFORMS):
        name = arguments = None
        if isinstance(transform, Mapping):
            name, arguments = transform.get("name"), transform.get("kwargs")
        bounds = _TRANSFORMS.get(name) if isinstance(name, str) else None
        if bounds is None or not isinstance(arguments, Mapping):
            raise UnknownPart(f"the transform {str(name)[:40]!r}. Known are {', '.join(_TRANSFORMS)}")
        numbers = {key: _number(arguments, key, bounds[key]) for key in bounds}
        transforms.append({"name": name, "kwargs": numbers})
    return {"transforms": transforms}


def largest_growth(holder: Mapping[str, Any]) -> float:
    """Return the largest factor by which a chain of known transforms lengthens audio on the way."""
    factor = largest = 1.0
    for transform in holder.get("transforms", ()):
        arguments = transform["kwargs"]
        if transform["name"] == "Resample":
            factor *= arguments["target_sampling_rate"] / arguments["source_sampling_rate"]
        elif transform["name"] != "Volume":
            factor /= arguments["factor"]
        largest = max(largest, factor)
    return largest


def _checked_list(holder: Mapping[str, Any], key: str, max_length: int) -> list[Any]:
    elements = holder.get(key)
    if not isinstance(elements, list) or not 0 < len(elements) <= max_length:
        raise UnknownPart(f"{key!r} is not a list of 1 to {max_length}")
    return elements


def _number(
    holder: Mapping[str, Any], key: str, bounds: tuple[float, float], default: object = None
) -> float:
    number, (low, high) = holder.get(key, default), bounds
    if isinstance(number, bool) or not isinstance(number, int | float) or not low <= number <= high:
        raise UnknownPart(f"{key!r} is {str(number)[:40]!r}, not a number from {low:g} to {high:g}")
    return number


def _channels(channels: object) -> list[int]:
    numbers = _checked_list({"channels": channels}, "channels", MOST_CHANNELS)
    if not all(isinstance(channel, int) and 0 <= channel < MOST_CHANNELS for channel in numbers):
        raise UnknownPart(f"the channels are {str(channels)[:40]!r}")
    return cast("list[int]", numbers)

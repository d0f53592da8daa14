"""What lhotse may build from a stranger's manifest: known keys only, with bounded numbers.

Cuts of several files, tracks or transforms are lhotse's to read. Its readers follow what a manifest names:
shell commands, URLs, impulse responses from any source. So nothing reaches them that is not listed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from speechtrain.data.recordings import MOST_CHANNELS, RATES

Samples = NDArray[np.float32]

MOST_SAMPLES = 2**28
"""Most decoded samples of a cut, over all channels: 1 GiB, 4.6 hours of one channel at 16 kHz."""
_SECONDS = (0.0, 1e6)
_MOST_TRACKS = 1_000
_MOST_TRANSFORMS = 16
_FACTOR = {"factor": (0.1, 10.0)}
_TRANSFORMS: dict[str, dict[str, tuple[float, float]]] = {
    "Speed": _FACTOR,
    "Tempo": _FACTOR,
    "Volume": {"factor": (-1e3, 1e3)},
    "Resample": {"source_sampling_rate": RATES, "target_sampling_rate": RATES},
}


class UnknownPart(ValueError):
    """A part of a cut that is not known, or a number out of its bounds."""


def is_simple(cut: Mapping[str, Any]) -> bool:
    """Whether a cut is a part of one file, as nearly all are; it needs no lhotse objects (50 µs)."""
    is_one_file = cut["type"] in ("MonoCut", "MultiCut") and len(cut["recording"]["sources"]) == 1
    return is_one_file and not cut["recording"].get("transforms")


def known_cut(cut: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a cut in lhotse's JSON format with the keys that are needed to read its audio.

    Raises UnknownPart that names the first part which is not known, or whose number is out of bounds.
    """
    if cut.get("type") != "MixedCut":
        return _part(cut, cut.get("type"))
    tracks = [_track(track) for track in _listed(cut, "tracks", _MOST_TRACKS)]
    hidden = [_track(cut["snr_reference"])] if cut.get("snr_reference") is not None else []
    known = {"id": str(cut.get("id")), "type": "MixedCut", "tracks": tracks, **_transforms(cut)}
    parts = [track["cut"] for track in (*tracks, *hidden)]
    rates = [part.get("recording", part)["sampling_rate"] for part in parts]
    ends = max(track["offset"] + track["cut"]["duration"] for track in tracks)
    channels = max(len(part["channel"]) if isinstance(part.get("channel"), list) else 1 for part in parts)
    mixture = ends * max(rates) * channels * growth(known)
    samples = max(mixture, sum(part["duration"] * rate for part, rate in zip(parts, rates, strict=True)))
    if samples > MOST_SAMPLES:
        raise UnknownPart(f"its tracks have {samples:.0f} samples, the most are {MOST_SAMPLES}")
    return {**known, "snr_reference": hidden[0]} if hidden else known


def _track(track: object) -> dict[str, Any]:
    if not isinstance(track, Mapping) or not isinstance(track.get("cut"), Mapping):
        raise UnknownPart("a track has no 'cut'")
    kind = str(track.get("type", track["cut"].get("type")))  # a string, since NaN differs from itself
    if (other := str(track["cut"].get("type", kind))) != kind:
        raise UnknownPart(f"a track of the two types {kind[:40]!r}, {other[:40]!r}")
    part = _part(track["cut"], kind)
    known = {"type": part.pop("type"), "cut": part, "offset": _number(track, "offset", _SECONDS, 0.0)}
    if track.get("snr") is not None:
        known["snr"] = _number(track, "snr", (-300.0, 300.0))
    return known | {key: track.get(key) is True for key in ("is_snr_reference", "mute")}


def _part(cut: Mapping[str, Any], kind: object) -> dict[str, Any]:
    """A cut of one recording, or of silence."""
    seconds = _number(cut, "duration", _SECONDS)
    known: dict[str, Any] = {"id": str(cut.get("id")), "duration": seconds, "type": kind}
    if kind == "PaddingCut":
        rate = int(_number(cut, "sampling_rate", RATES))
        if seconds * rate > MOST_SAMPLES:
            raise UnknownPart(f"{seconds:g} s of silence")
        return known | {"sampling_rate": rate, "feat_value": 0.0, "num_samples": round(seconds * rate)}
    recording = cut.get("recording")
    if kind not in ("MonoCut", "MultiCut") or not isinstance(recording, Mapping):
        raise UnknownPart(f"a cut of type {kind!r} with {type(recording).__name__} as its recording")
    channel = cut.get("channel", 0)
    channel = _channels(channel) if isinstance(channel, list) else _channels([channel])[0]
    known |= {"start": _number(cut, "start", _SECONDS), "channel": channel, "supervisions": []}
    return known | {"recording": _recording(recording)}


def _recording(recording: Mapping[str, Any]) -> dict[str, Any]:
    sources = []
    for source in _listed(recording, "sources", MOST_CHANNELS):
        path = source.get("source") if isinstance(source, Mapping) and source.get("type") == "file" else None
        if not isinstance(path, str):
            raise UnknownPart("its audio is not a file")
        sources.append({"type": "file", "channels": _channels(source.get("channels")), "source": path})
    seconds, rate = _number(recording, "duration", _SECONDS), int(_number(recording, "sampling_rate", RATES))
    known = {"id": str(recording.get("id")), "sources": sources, "duration": seconds, "sampling_rate": rate}
    if recording.get("channel_ids") is not None:
        known["channel_ids"] = _channels(recording["channel_ids"])
    return known | {"num_samples": round(seconds * rate)} | _transforms(recording)


def _transforms(holder: Mapping[str, Any]) -> dict[str, Any]:
    known = []
    for transform in _listed(holder, "transforms", _MOST_TRANSFORMS) if holder.get("transforms") else []:
        name = transform.get("name") if isinstance(transform, Mapping) else None
        bounds, given = _TRANSFORMS.get(str(name)), isinstance(name, str) and transform.get("kwargs")
        if bounds is None or not isinstance(given, Mapping):
            raise UnknownPart(f"the transform {str(name)[:40]!r}; known are {', '.join(_TRANSFORMS)}")
        known.append({"name": name, "kwargs": {key: _number(given, key, bounds[key]) for key in bounds}})
    return {"transforms": known} if known else {}


def growth(holder: Mapping[str, Any]) -> float:
    """By how much a chain of known transforms lengthens audio, where it is longest."""
    growth = longest = 1.0
    for transform in holder.get("transforms", ()):
        given = transform["kwargs"]
        if transform["name"] == "Resample":
            growth *= given["target_sampling_rate"] / given["source_sampling_rate"]
        elif transform["name"] != "Volume":
            growth /= given["factor"]
        longest = max(longest, growth)
    return longest


def _listed(holder: Mapping[str, Any], key: str, most: int) -> list[Any]:
    found = holder.get(key)
    if not isinstance(found, list) or not 0 < len(found) <= most:
        raise UnknownPart(f"{key!r} is not a list of 1 to {most}")
    return found


def _number(
    holder: Mapping[str, Any], key: str, bounds: tuple[float, float], default: object = None
) -> float:
    value, (low, high) = holder.get(key, default), bounds
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise UnknownPart(f"{key!r} is {str(value)[:40]!r}, not a number from {low:g} to {high:g}")
    return value


def _channels(value: object) -> list[int]:
    found = _listed({"channels": value}, "channels", MOST_CHANNELS)
    if not all(isinstance(channel, int) and 0 <= channel < MOST_CHANNELS for channel in found):
        raise UnknownPart(f"the channels are {str(value)[:40]!r}")
    return cast("list[int]", found)

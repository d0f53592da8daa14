"""Decides which cuts of a set are held out for validation, by their speakers, recordings, ids and seconds."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from speechtrain.counter_rng import RunStream, key_of, uniform_at
from speechtrain.data.audio import recording_of
from speechtrain.data.formats.manifests import Record, speaker_of

GROUPS = ("speaker", "recording", "cut")
"""The kinds of groups. All cuts of a group are on the same side."""

_FEWEST_SPEAKERS = 10  # With fewer speakers, training would lack the voice of each held-out speaker.
_TOLERANCE = 1.5  # Held-out speakers, or large groups, may differ by this factor from the share.
_TOO_LARGE = 2.0  # Speakers who share recordings are separated if they exceed the share by this factor.
# Each group is drawn alone if the share has this number of groups, and if the drawn seconds are within this
# factor of the share.
_INDEPENDENT_GROUPS, _INDEPENDENT_FACTOR = 5, 2.0
_LOG = logging.getLogger(__name__)

_Keys = NDArray[np.int64]
_Seconds = NDArray[np.float32]


def groups_of(cut: Record) -> tuple[int, int, int]:
    """Return the ``key_of`` of a cut's speaker (-1 if it names none), recording and id, as in GROUPS."""
    speaker = speaker_of(cut)
    speaker_key = key_of(speaker) if speaker else -1
    return speaker_key, key_of(recording_of(cut)), key_of(str(cut["id"]))


def held_out(
    groups: Mapping[str, _Keys], seconds: _Seconds, share: float, by: str = ""
) -> tuple[NDArray[np.bool_], str]:
    """Return whether each cut is held out, and the kind of groups that are held out.

    ``groups`` maps each kind in GROUPS to the key of each cut's group. Without ``by``, the kind is

    - speaker, if each cut names a speaker, there are ten or more, and the drawn speakers are about the share,
    - otherwise recording, if there are several,
    - otherwise cut.

    A single group is held out. Speakers who share a recording are one group, so no recording is on both
    sides. If such a group exceeds twice the share, recordings are held out instead, and a warning says so.
    """
    all_have_speakers = groups["speaker"].min(initial=0) >= 0
    if by == "speaker" or (not by and all_have_speakers):
        speakers = _connected_speakers(groups)
        if _is_too_large(speakers, groups["speaker"], seconds, share):
            _LOG.warning("whole speakers cannot be held out, because too many of them share recordings")
            by = "recording"
        else:
            is_drawn = _draw_groups(speakers, seconds, share)
            fraction = seconds[is_drawn].sum() / max(seconds.sum(), 1e-9)
            is_near_share = share / _TOLERANCE <= fraction <= share * _TOLERANCE
            count = len(np.unique(speakers))
            if by or (is_near_share and count >= _FEWEST_SPEAKERS):
                return is_drawn, "speaker"
    if not by:
        by = "recording" if len(np.unique(groups["recording"])) > 1 else "cut"
    return _draw_groups(groups[by], seconds, share), by


def _connected_speakers(groups: Mapping[str, _Keys]) -> _Keys:
    """Return each cut's group of speakers: the smallest key of the speakers that recordings connect.

    A speaker who shares no recording is a group with the speaker's key, so the draw is the same as without
    groups.
    """
    speakers, speaker_numbers = np.unique(groups["speaker"], return_inverse=True)
    recordings, recording_numbers = np.unique(groups["recording"], return_inverse=True)
    nodes = len(speakers) + len(recordings)
    edges = (speaker_numbers, len(speakers) + recording_numbers)
    graph = coo_array((np.ones(len(speaker_numbers), bool), edges), shape=(nodes, nodes))
    count, components = connected_components(graph, directed=False)
    keys = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(keys, components[: len(speakers)], speakers)
    connected: _Keys = keys[components[speaker_numbers]]
    return connected


def _is_too_large(connected: _Keys, speakers: _Keys, seconds: _Seconds, share: float) -> bool:
    """Return whether a group of several speakers exceeds twice the share of the seconds."""
    _, numbers = np.unique(connected, return_inverse=True)
    groups_of_several = numbers[connected != speakers]
    rows = np.isin(numbers, groups_of_several)
    group_seconds = np.bincount(numbers[rows], seconds[rows])
    return bool(group_seconds.max(initial=0.0) > _TOO_LARGE * share * seconds.sum())


def _draw_groups(groups: _Keys, seconds: _Seconds, share: float) -> NDArray[np.bool_]:
    """Return whether the group of each cut is drawn. The draw depends on the group's key, and on no seed.

    Each group is drawn independently, so new recordings do not move the others to another side. If there are
    few groups, or if the drawn seconds are far from the share, groups are drawn until they fill the share.
    """
    keys, numbers = np.unique(groups, return_inverse=True)
    if len(keys) < 2:
        return np.ones(len(groups), bool)
    group_seconds = np.bincount(numbers, seconds)
    draws = uniform_at(0, RunStream.HOLD_OUT, keys)
    is_drawn = draws < share
    target = share * group_seconds.sum()
    drawn_seconds = group_seconds[is_drawn].sum()
    is_near = target / _INDEPENDENT_FACTOR <= drawn_seconds <= target * _INDEPENDENT_FACTOR
    if share * len(keys) < _INDEPENDENT_GROUPS or not is_near:
        is_drawn = _fill_share(draws, group_seconds, target)
    # Neither side may be empty.
    if not is_drawn.any():
        is_drawn[np.argmin(group_seconds)] = True
    if is_drawn.all():
        is_drawn[np.argmax(group_seconds)] = False
    return is_drawn[numbers]


def _fill_share(draws: NDArray[np.float64], group_seconds: NDArray[Any], target: float) -> NDArray[np.bool_]:
    """Take groups in the order of their draws up to ``target`` seconds, without groups that are too large."""
    is_drawn = np.zeros(len(draws), bool)
    total = 0.0
    for group in np.argsort(draws).tolist():
        total_with_group = total + group_seconds[group]
        if total < target and total_with_group <= _TOLERANCE * target:
            is_drawn[group] = True
            total = total_with_group
    return is_drawn

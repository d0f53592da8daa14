"""What of a set is held out for validation: a pure function of its speakers, recordings, cuts and seconds."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from speechtrain.counter_rng import RunStream, key_of, uniform_at
from speechtrain.data.audio import recording_of
from speechtrain.data.formats.manifests import Record, speaker_of

GROUPS = ("speaker", "recording", "cut")
"""What may be held out whole."""

_FEWEST_SPEAKERS = 10  # of fewer, one who is held out would be missing in training
_OVER = 1.5  # large groups may be so much more than the share, and speakers so much less
_TOO_LARGE = 2.0  # times the share: a group of speakers who share recordings
_LOG = logging.getLogger(__name__)
_MANY, _FAR = 5, 2.0  # groups that a share must have to draw each alone, and may be so much more or less


def groups_of(cut: Record) -> tuple[int, int, int]:
    """Return the ``key_of`` of a cut's speaker (-1 if it names none), recording and id, as in GROUPS."""
    speaker = speaker_of(cut)
    return key_of(speaker) if speaker else -1, key_of(recording_of(cut)), key_of(str(cut["id"]))


def held_out(
    groups: Mapping[str, NDArray[np.int64]], seconds: NDArray[np.float32], share: float, by: str = ""
) -> tuple[NDArray[np.bool_], str]:
    """Return which cuts are held out, and by which of the GROUPS; ``groups`` has the key of each cut's.

    Without ``by``, whole speakers are held out where each cut names one, there are ten or more and some are
    about the share; else whole recordings; of a single recording, cuts. A single group is held out.

    Speakers who share a recording are one group, so that no recording is on both sides. If such a group
    exceeds twice the share, recordings alone decide, and a warning says so.
    """
    names = groups["speaker"]
    if by == "speaker" or (not by and names.min(initial=0) >= 0):
        names = _connected_speakers(groups)
        if _is_too_large(names, groups["speaker"], seconds, share):
            _LOG.warning("whole speakers cannot be held out, because too many of them share recordings")
            by = "recording"
        elif not by:
            held = _drawn(names, seconds, share)
            is_about = share / _OVER <= seconds[held].sum() / max(seconds.sum(), 1e-9) <= share * _OVER
            if len(np.unique(names)) >= _FEWEST_SPEAKERS and is_about:
                by = "speaker"
    if by == "speaker":
        return _drawn(names, seconds, share), by
    if not by:
        by = "recording" if len(np.unique(groups["recording"])) > 1 else "cut"
    return _drawn(groups[by], seconds, share), by


def _connected_speakers(groups: Mapping[str, NDArray[np.int64]]) -> NDArray[np.int64]:
    """Return the group of each cut: the smallest key among the speakers that recordings connect to its own.

    A speaker who shares no recording has its own key, and therefore the same draw as without groups.
    """
    speakers, speaker_numbers = np.unique(groups["speaker"], return_inverse=True)
    recordings, recording_numbers = np.unique(groups["recording"], return_inverse=True)
    nodes = len(speakers) + len(recordings)
    edges = (speaker_numbers, len(speakers) + recording_numbers)
    graph = coo_array((np.ones(len(speaker_numbers), bool), edges), shape=(nodes, nodes))
    count, components = connected_components(graph, directed=False)
    keys = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(keys, components[: len(speakers)], speakers)
    connected: NDArray[np.int64] = keys[components[speaker_numbers]]
    return connected


def _is_too_large(
    names: NDArray[np.int64], speakers: NDArray[np.int64], seconds: NDArray[np.float32], share: float
) -> bool:
    """Return whether a group of several speakers exceeds twice the share of the seconds."""
    _, numbers = np.unique(names, return_inverse=True)
    joined = np.zeros(len(names), bool)
    joined[np.isin(numbers, numbers[names != speakers])] = True
    spoken = np.bincount(numbers[joined], seconds[joined])
    return bool(spoken.max(initial=0.0) > _TOO_LARGE * share * seconds.sum())


def _drawn(names: NDArray[np.int64], seconds: NDArray[np.float32], share: float) -> NDArray[np.bool_]:
    """Return which cuts are of a drawn group, by the hashes of ``names``: neither run nor seed matters.

    Each group is drawn alone, so that none changes sides when others are added, unless few or large groups
    miss the share by far: then as many as fit it, in the order of their hashes.
    """
    found, numbers = np.unique(names, return_inverse=True)
    if len(found) < 2:
        return np.ones(len(names), bool)
    spoken, draws = np.bincount(numbers, seconds), uniform_at(0, RunStream.HOLD_OUT, found)
    wanted, chosen = share * spoken.sum(), draws < share
    if share * len(found) < _MANY or not wanted / _FAR <= spoken[chosen].sum() <= wanted * _FAR:
        chosen[:], held = False, 0.0
        for group in np.argsort(draws).tolist():
            if held < wanted and held + spoken[group] <= _OVER * wanted:
                chosen[group], held = True, held + spoken[group]
    chosen[np.argmin(spoken)] |= not chosen.any()
    chosen[np.argmax(spoken)] &= not chosen.all()
    return chosen[numbers]

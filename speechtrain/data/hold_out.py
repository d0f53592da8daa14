"""Decides which cuts of a set are held out for validation.

Cuts are held out in groups, such as all cuts of a speaker. Groups are sampled at random until they contain
about the requested share of the audio.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from speechtrain.counter_rng import RunStream, key_of, uniform_at
from speechtrain.data.audio import recording_of
from speechtrain.data.formats.manifests import Record, speaker_of
from speechtrain.files import MOST_LOG_BYTES, atomic, open_regular
from speechtrain.run_directory import SIDES

_FEWEST_SPEAKERS = 10  # With fewer speakers, training would lack too many of the voices.
_TOLERANCE = 1.5  # The seconds of held-out speakers may differ from the requested seconds by this factor.
_TOO_LARGE = 2.0  # Speakers who are connected by recordings may have this multiple of the requested seconds.
# Independent sampling needs this expected number of held-out groups, and seconds within this factor of the
# requested seconds. Otherwise groups are held out one after the other.
_INDEPENDENT_GROUPS, _INDEPENDENT_FACTOR = 5, 2.0
_KEPT, _TRAINED = -1.0, 2.0  # in place of the random number of a group that stays held out, or trained on
_LOG = logging.getLogger(__name__)

_Keys = NDArray[np.int64]
_Seconds = NDArray[np.float32]


class Sides(NamedTuple):
    """The recordings whose side earlier runs or a split have decided, as keys (see ``groups_of``)."""

    trained: _Keys = np.zeros(0, np.int64)
    held_out: _Keys = np.zeros(0, np.int64)

    def with_more(self, trained: _Keys, held_out: _Keys) -> Sides:
        """Return these sides and more recordings. A recording that was once trained on stays trained on."""
        all_trained = np.union1d(self.trained, trained)
        return Sides(all_trained, np.setdiff1d(np.union1d(self.held_out, held_out), all_trained))


NO_SIDES = Sides()


def read_sides(run_dir: str) -> Sides | None:
    """Return the sides of a run's recordings, or None if the run has no intact list of them.

    The file contains the number of the recordings that were trained on, and then the keys of all, as int64.
    """
    if not run_dir:
        return None
    try:
        with open_regular(Path(run_dir, SIDES), MOST_LOG_BYTES, follow=False) as file:
            count, *_ = values = np.frombuffer(file.read(), "<i8")
    except (OSError, ValueError):
        return None
    return Sides(values[1 : 1 + count], values[1 + count :]) if count >= 0 else None


def write_sides(run_dir: str, sides: Sides) -> None:
    """Write the sides of a run's recordings, unless an earlier start of the run has done so."""
    path = Path(run_dir, SIDES)
    if path.exists():
        return
    try:
        with atomic(path) as temporary:
            np.concatenate([[len(sides.trained)], *sides]).astype("<i8").tofile(temporary)
    except OSError as error:
        _LOG.warning("%s cannot be written (%s). A later run may hold out other recordings", path, error)


def groups_of(cut: Record, former: Callable[[str], str] = str) -> tuple[int, int, int]:
    """Return the keys (``key_of``) of a cut's speaker, recording and id.

    The key of the speaker is -1 if the cut names none. ``former`` maps the path of the recording to the path
    that it had when the run started, so that moved recordings stay in their groups.
    """
    speaker = speaker_of(cut)
    speaker_key = key_of(speaker) if speaker else -1
    return speaker_key, key_of(recording_of(cut, former)), key_of(str(cut["id"]))


def held_out(
    groups: Mapping[str, _Keys],
    seconds: _Seconds,
    share: float,
    by: str = "",
    former: Sides = NO_SIDES,
) -> tuple[NDArray[np.bool_], str]:
    """Return a mask (N,) of the held-out cuts, and the kind of the groups that were sampled.

    ``groups`` maps each kind (speaker, recording and cut) to the key of each cut's group (N,). All cuts of a
    group are either held out or trained on. ``share`` is the requested share of the ``seconds`` (N,) of all
    cuts. ``by`` is the kind. If it is empty, the kind is

    - speaker, if each cut names a speaker, there are ten groups of speakers or more, and the sampled speakers
      have about the requested seconds,
    - otherwise recording, if there are several recordings,
    - otherwise cut.

    If there is only one group, all cuts are held out. Speakers who are in the same recording are one group,
    so that a recording is either held out or trained on. If such a group has more than twice the requested
    seconds, recordings are the groups instead, and a warning is logged.

    A recording of ``former`` stays on its side, unless all were trained on. Others of its group follow it.
    """
    decided = np.isin(groups["recording"], former.held_out).astype(np.int8)
    decided[np.isin(groups["recording"], former.trained)] = -1
    if decided.max(initial=-1) < 0:  # Nothing is left to hold out, so all are sampled again.
        decided[:] = 0
    all_have_speakers = groups["speaker"].min(initial=0) >= 0  # The key of a missing speaker is -1.
    if by == "speaker" or (not by and all_have_speakers):
        speakers = _connected_speakers(groups)
        group_keys, group_numbers = np.unique(speakers, return_inverse=True)
        # A group of several speakers has the key of one of them. So another speaker's key differs from it.
        of_several = np.isin(group_numbers, group_numbers[speakers != groups["speaker"]])
        group_seconds = np.bincount(group_numbers[of_several], seconds[of_several])
        if group_seconds.max(initial=0.0) > _TOO_LARGE * share * seconds.sum():
            _LOG.warning("whole speakers cannot be held out, because too many of them share recordings")
            by = "recording"
        else:
            is_sampled = _sample_groups(speakers, seconds, share, decided)
            fraction = seconds[is_sampled].sum() / max(seconds.sum(), 1e-9)
            is_near_share = share / _TOLERANCE <= fraction <= share * _TOLERANCE
            if by or (is_near_share and len(group_keys) >= _FEWEST_SPEAKERS):
                return is_sampled, "speaker"
    if not by:
        has_several_recordings = len(np.unique(groups["recording"])) > 1
        by = "recording" if has_several_recordings else "cut"
    if by == "cut":
        decided[:] = 0
    return _sample_groups(groups[by], seconds, share, decided), by


def _connected_speakers(groups: Mapping[str, _Keys]) -> _Keys:
    """Return the key (N,) of each cut's group of speakers: the smallest key among these speakers.

    Recordings connect the speakers of a group. The key of a group with one speaker is the speaker's key.
    """
    speakers, speaker_numbers = np.unique(groups["speaker"], return_inverse=True)
    recordings, recording_numbers = np.unique(groups["recording"], return_inverse=True)
    # The nodes of the graph are all speakers, then all recordings. Each cut connects two nodes.
    nodes = len(speakers) + len(recordings)
    edges = (speaker_numbers, len(speakers) + recording_numbers)
    graph = coo_array((np.ones(len(speaker_numbers), bool), edges), shape=(nodes, nodes))
    count, components = connected_components(graph, directed=False)
    component_keys = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(component_keys, components[: len(speakers)], speakers)
    group_keys: _Keys = component_keys[components[speaker_numbers]]
    return group_keys


def _sample_groups(
    groups: _Keys, seconds: _Seconds, share: float, decided: NDArray[np.int8]
) -> NDArray[np.bool_]:
    """Return a mask (N,) of the cuts whose groups are sampled. ``groups`` (N,) are the keys of the groups.

    ``decided`` (N,) is 1 for a cut that stays held out, -1 for one that stays trained on, and otherwise 0.

    The sample depends on the keys of the groups and on the share, but not on the run's seed. Each group is
    sampled independently, so that new recordings do not change which of the others are held out. If there are
    few groups, or if the sampled seconds are far from the share, groups are added until they fill the share.
    """
    keys, group_numbers = np.unique(groups, return_inverse=True)
    if len(keys) < 2:
        return np.ones(len(groups), bool)
    group_seconds = np.bincount(group_numbers, seconds)
    numbers = uniform_at(0, RunStream.HOLD_OUT, keys)
    numbers[group_numbers[decided > 0]] = _KEPT
    numbers[group_numbers[decided < 0]] = _TRAINED
    is_sampled = numbers < share  # for each group
    target_seconds = share * group_seconds.sum()
    sampled_seconds = group_seconds[is_sampled].sum()
    lowest, highest = target_seconds / _INDEPENDENT_FACTOR, target_seconds * _INDEPENDENT_FACTOR
    if share * len(keys) < _INDEPENDENT_GROUPS or not lowest <= sampled_seconds <= highest:
        is_sampled = _fill_share(numbers, group_seconds, target_seconds)
    # Both training and validation need a group.
    if not is_sampled.any():
        is_sampled[np.argmin(numbers)] = True
    if is_sampled.all():
        is_sampled[np.argmax(group_seconds)] = False
        decided = np.zeros_like(decided)
    # A group may have recordings of both sides, such as a speaker whom another rule has divided.
    is_held_out: NDArray[np.bool_] = np.where(decided, decided > 0, is_sampled[group_numbers])
    return is_held_out


def _fill_share(
    numbers: NDArray[np.float64], group_seconds: NDArray[Any], target_seconds: float
) -> NDArray[np.bool_]:
    """Return a mask of the groups that are added, in the order of their numbers, up to ``target_seconds``.

    A group that would exceed the target by more than the tolerance is left out, unless the groups are then
    still shorter than the median group. So the shortest of long recordings, which may be new and incomplete,
    is not preferred.
    """
    is_sampled: NDArray[np.bool_] = numbers == _KEPT
    total = float(group_seconds[is_sampled].sum())
    most_seconds = max(_TOLERANCE * target_seconds, float(np.median(group_seconds)))
    for group in np.argsort(numbers).tolist():
        total_with_group = total + group_seconds[group]
        is_free = _KEPT < numbers[group] < _TRAINED
        if is_free and total < target_seconds and total_with_group <= most_seconds:
            is_sampled[group] = True
            total = total_with_group
    return is_sampled

"""Decides which cuts of a set are held out for validation.

The rule, in the order in which it is decided:

1. A recording that an earlier run or split has held out stays held out, and one that it has trained on stays
   trained on. If all recordings were trained on, nothing would be left to hold out, so nothing is decided.
2. Cuts are held out in groups. The groups are speakers, if each cut names one. Speakers who are in the same
   recording are one group, so that the recording is on one side. The only recording has cuts on both sides.
3. The groups are recordings instead, with a warning, if such a group of several speakers has more than twice
   the requested seconds.
4. The groups are recordings instead, if there are fewer than ten groups of speakers, or if the held-out
   speakers have less than 1 / 1.5 or more than 1.5 times the requested seconds.
5. The groups are single cuts instead of recordings, if there is only one. Rule 1 says nothing about cuts.
6. A random number of each group's key decides whether the group is held out (see ``_sample``). Its other cuts
   follow the recordings that rule 1 has decided.

A user may ask for speakers (then rule 4 does not apply) or for recordings (then rules 2 to 5 do not apply).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from speechtrain.counter_rng import RunStream, key_of, uniform_at
from speechtrain.data.audio import recording_of
from speechtrain.data.formats.manifests import Record, speaker_of
from speechtrain.files import MOST_LOG_BYTES, atomic, open_regular
from speechtrain.run_directory import SIDES

_TOO_MANY_SHARED = 2.0  # rule 3: the most seconds of a group of several speakers, per requested second
_FEWEST_SPEAKERS = 10  # rule 4: With fewer groups, training would lack too many of the voices.
_TOLERANCE = 1.5  # rule 4: the factor by which held-out seconds may differ from the requested seconds
_LOG = logging.getLogger(__name__)

_Keys = NDArray[np.int64]
_Seconds = NDArray[np.float32]
_Mask = NDArray[np.bool_]


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


class _Decided(NamedTuple):
    """Masks (N,) of the cuts whose side an earlier run or split has decided."""

    trained: _Mask
    held_out: _Mask


def held_out(
    groups: Mapping[str, _Keys], seconds: _Seconds, share: float, former: Sides = NO_SIDES
) -> tuple[_Mask, str]:
    """Return a mask (N,) of the held-out cuts, and the kind of their groups, by the rule of this module.

    ``groups`` maps each kind (speaker, recording and cut) to the key of each cut's group (N,). The key of a
    missing speaker is -1. ``share`` is the requested share of the ``seconds`` (N,) of all cuts. If there is
    only one group, all cuts are held out.
    """
    all_have_speakers = groups["speaker"].min(initial=0) >= 0
    if all_have_speakers:
        speakers = _groups_of_speakers(groups, seconds, share)
        if speakers is None:
            return held_out_recordings(groups, seconds, share, former)
        is_held_out = _sample(speakers, seconds, share, _decided(groups, former))
        fraction = seconds[is_held_out].sum() / max(seconds.sum(), 1e-9)
        is_near_share = share / _TOLERANCE <= fraction <= share * _TOLERANCE
        has_many_groups = len(np.unique(speakers)) >= _FEWEST_SPEAKERS
        if is_near_share and has_many_groups:
            return is_held_out, "speaker"
    has_several_recordings = len(np.unique(groups["recording"])) > 1
    if has_several_recordings:
        return held_out_recordings(groups, seconds, share, former)
    is_undecided = np.zeros(len(seconds), bool)
    return _sample(groups["cut"], seconds, share, _Decided(is_undecided, is_undecided)), "cut"


def held_out_speakers(
    groups: Mapping[str, _Keys], seconds: _Seconds, share: float, former: Sides = NO_SIDES
) -> tuple[_Mask, str]:
    """Return the same as ``held_out``, where the groups are speakers, or recordings by rule 3."""
    speakers = _groups_of_speakers(groups, seconds, share)
    if speakers is None:
        return held_out_recordings(groups, seconds, share, former)
    return _sample(speakers, seconds, share, _decided(groups, former)), "speaker"


def held_out_recordings(
    groups: Mapping[str, _Keys], seconds: _Seconds, share: float, former: Sides = NO_SIDES
) -> tuple[_Mask, str]:
    """Return the same as ``held_out``, where the groups are recordings."""
    return _sample(groups["recording"], seconds, share, _decided(groups, former)), "recording"


def _decided(groups: Mapping[str, _Keys], former: Sides) -> _Decided:
    """Return the cuts whose side ``former`` decides by their recording (rule 1)."""
    is_trained = np.isin(groups["recording"], former.trained)
    is_held_out = np.isin(groups["recording"], former.held_out) & ~is_trained
    if is_trained.all():
        is_trained = np.zeros_like(is_trained)
    return _Decided(is_trained, is_held_out)


def _groups_of_speakers(groups: Mapping[str, _Keys], seconds: _Seconds, share: float) -> _Keys | None:
    """Return the key (N,) of each cut's group of speakers (rule 2), or None by rule 3.

    A recording, or a chain of them, connects the speakers of a group. The key of the group is the smallest
    key of its speakers. So a speaker who is alone has the same random number in each set.
    """
    if len(np.unique(groups["recording"])) == 1:
        return groups["speaker"]

    from scipy.sparse import (
        coo_array,
    )  # The import takes 0.2 s, and only speakers who share recordings need it.
    from scipy.sparse.csgraph import connected_components

    speaker_keys, speaker_of_cut = np.unique(groups["speaker"], return_inverse=True)
    recording_keys, recording_of_cut = np.unique(groups["recording"], return_inverse=True)
    # The nodes of a graph are all speakers, then all recordings. Each cut connects its two.
    first_recording = len(speaker_keys)
    node_count = first_recording + len(recording_keys)
    edges = (speaker_of_cut, first_recording + recording_of_cut)
    is_edge = np.ones(len(speaker_of_cut), bool)
    graph = coo_array((is_edge, edges), shape=(node_count, node_count))
    _, group_of_node = connected_components(graph, directed=False)
    group_of_speaker = group_of_node[:first_recording]
    group_of_cut = group_of_speaker[speaker_of_cut]

    # Each group has a speaker, so ``group_numbers`` are 0, 1, 2 and so on. The keys of speakers ascend.
    group_numbers, smallest_speaker, speaker_counts = np.unique(
        group_of_speaker, return_index=True, return_counts=True
    )
    group_seconds = np.bincount(group_of_cut, seconds, minlength=len(group_numbers))
    shared_seconds = group_seconds[speaker_counts > 1]
    if shared_seconds.max(initial=0.0) > _TOO_MANY_SHARED * share * seconds.sum():
        _LOG.warning("whole speakers cannot be held out, because too many of them share recordings")
        return None
    group_keys = speaker_keys[smallest_speaker]
    key_of_cut: _Keys = group_keys[group_of_cut]
    return key_of_cut


def _sample(groups: _Keys, seconds: _Seconds, share: float, decided: _Decided) -> _Mask:
    """Return a mask (N,) of the cuts whose groups are sampled. ``groups`` (N,) are the keys of the groups.

    The sample depends on the keys of the groups and on the share, but not on the run's seed. Each group is
    sampled independently, so that new recordings do not change which of the others are held out. If fewer
    than five groups are expected, or if the sampled seconds are less than half or more than twice the
    requested seconds, groups are added one after the other (see ``_fill_share``).
    """
    keys, group_numbers = np.unique(groups, return_inverse=True)
    if len(keys) < 2:
        return np.ones(len(groups), bool)
    group_seconds = np.bincount(group_numbers, seconds)
    target_seconds = share * group_seconds.sum()
    is_trained = np.zeros(len(keys), bool)
    is_trained[group_numbers[decided.trained]] = True
    is_kept = np.zeros(len(keys), bool)
    is_kept[group_numbers[decided.held_out]] = True
    is_kept &= ~is_trained
    numbers = uniform_at(0, RunStream.HOLD_OUT, keys)
    numbers[is_trained] = 2.0  # above each random number, so that any other group is sampled before these

    is_sampled: _Mask = is_kept | (numbers < share)
    sampled_seconds = group_seconds[is_sampled].sum()
    is_far = not target_seconds / 2 <= sampled_seconds <= target_seconds * 2
    if share * len(keys) < 5 or is_far:
        is_free = ~(is_kept | is_trained)
        order = [group for group in np.argsort(numbers).tolist() if is_free[group]]
        is_sampled = _fill_share(is_kept, order, group_seconds, target_seconds)

    # Both training and validation need a group.
    if not is_sampled.any():
        is_sampled[np.argmin(numbers)] = True
    is_held_out: _Mask
    if is_sampled.all():
        is_sampled[np.argmax(group_seconds)] = False
        is_held_out = is_sampled[group_numbers]
        return is_held_out
    # A group may have recordings of both sides, such as a speaker whom another rule has divided.
    is_held_out = is_sampled[group_numbers] | decided.held_out
    return is_held_out & ~decided.trained


def _fill_share(
    is_kept: _Mask, order: list[int], group_seconds: NDArray[Any], target_seconds: float
) -> _Mask:
    """Return a mask of the kept groups and of those that are added in ``order``, up to ``target_seconds``.

    A group that would exceed the target by more than the tolerance is left out, unless the groups are then
    still shorter than the median group. So the shortest of long recordings, which may be new and incomplete,
    is not preferred.
    """
    is_sampled = is_kept.copy()
    total = float(group_seconds[is_sampled].sum())
    most_seconds = max(_TOLERANCE * target_seconds, float(np.median(group_seconds)))
    for group in order:
        total_with_group = total + group_seconds[group]
        if total < target_seconds and total_with_group <= most_seconds:
            is_sampled[group] = True
            total = total_with_group
    return is_sampled

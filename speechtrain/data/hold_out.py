"""Decides which cuts of a set are held out for validation.

The cuts are held out in groups: all cuts of a speaker, all cuts of a recording, or single cuts. The rules, in
the order in which they are applied:

1. A recording that an earlier run or split trained on stays trained on, and one that it held out stays held
   out. The rule does not apply if it would leave all recordings on one side.
2. The groups are speakers if each cut names its speaker, otherwise recordings. Speakers who share a recording
   are one group, so that no recording is divided. But if the set is a single recording, each of its speakers
   is a group.
3. If a group of several speakers has more than twice the requested seconds, the groups are recordings, with
   a warning.
4. If there are fewer than ten groups of speakers, the groups are recordings. They are also recordings if the
   seconds of the held-out speakers are less than 1 / 1.5 or more than 1.5 times the requested seconds.
5. If the groups are recordings by the rules 2 and 4, but the set is a single recording, the groups are its
   cuts. Then rule 1 does not apply, because the recording is on both sides.
6. A random number for the key of each group decides whether the group is held out (see ``_sample``). But if
   rule 1 has decided a recording of a group, the undecided recordings of the group are on its side. If it has
   decided recordings for both sides, they are trained on.
7. If rule 6 would hold out no group, or all of several groups, a group with undecided recordings changes
   sides. Decided recordings never do.

A user may ask for speakers (then rules 4 and 5 do not apply), or for recordings (then rules 2 to 5 do not).
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

_MOST_SHARED_RATIO = 2.0  # rule 3: seconds of a group of several speakers, divided by the requested seconds
_FEWEST_SPEAKERS = 10  # rule 4: With fewer groups, training would lack too many of the voices.
_TOLERANCE = 1.5  # rules 4 and 6: the factor by which held-out seconds may differ from the requested seconds
_FEWEST_EXPECTED = 5  # rule 6: With fewer expected groups, independent samples are often far from the share.
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
            values = np.frombuffer(file.read(), "<i8")
    except (OSError, ValueError):  # ValueError: The size of the file is not a multiple of 8 bytes.
        return None
    if len(values) == 0 or values[0] < 0:
        return None
    trained_count = int(values[0])
    keys = values[1:]
    return Sides(trained=keys[:trained_count], held_out=keys[trained_count:])


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


def groups_of(cut: Record, former_path: Callable[[str], str] = str) -> tuple[int, int, int]:
    """Return the keys (``key_of``) of a cut's speaker, recording and id.

    The key of the speaker is -1 if the cut names none. ``former_path`` maps the path of the recording to the
    path that it had when the run started, so that moved recordings stay in their groups.
    """
    speaker = speaker_of(cut)
    speaker_key = key_of(speaker) if speaker else -1
    recording_key = key_of(recording_of(cut, former_path))
    return speaker_key, recording_key, key_of(str(cut["id"]))


class _Decided(NamedTuple):
    """Masks (N,) of the cuts whose recordings stay on their former side (rule 1)."""

    trained: _Mask
    held_out: _Mask


def held_out(
    groups: Mapping[str, _Keys], seconds: _Seconds, share: float, former_sides: Sides = NO_SIDES
) -> tuple[_Mask, str]:
    """Return a mask (N,) of the held-out cuts, and the kind of their groups, by the rules of this module.

    ``groups`` maps each kind (speaker, recording and cut) to the key of each cut's group (N,). The key of a
    missing speaker is -1. ``share`` is the requested share of the ``seconds`` (N,) of all cuts. If there is
    only one group, all cuts are held out.
    """
    each_cut_has_speaker = groups["speaker"].min(initial=0) >= 0
    if each_cut_has_speaker:
        speaker_groups = _groups_of_speakers(groups, seconds, share)
        if speaker_groups is None:
            return held_out_recordings(groups, seconds, share, former_sides)
        is_held_out = _sample(speaker_groups, seconds, share, _decided(groups, former_sides))
        held_out_share = seconds[is_held_out].sum() / max(seconds.sum(), 1e-9)
        is_near_share = share / _TOLERANCE <= held_out_share <= share * _TOLERANCE
        has_many_groups = len(np.unique(speaker_groups)) >= _FEWEST_SPEAKERS
        if is_near_share and has_many_groups:
            return is_held_out, "speaker"
    has_several_recordings = len(np.unique(groups["recording"])) > 1
    if has_several_recordings:
        return held_out_recordings(groups, seconds, share, former_sides)
    return _sample(groups["cut"], seconds, share, _nothing_decided(len(seconds))), "cut"


def held_out_speakers(
    groups: Mapping[str, _Keys], seconds: _Seconds, share: float, former_sides: Sides = NO_SIDES
) -> tuple[_Mask, str]:
    """Return the same as ``held_out``, where the groups are speakers, or recordings by rule 3."""
    speaker_groups = _groups_of_speakers(groups, seconds, share)
    if speaker_groups is None:
        return held_out_recordings(groups, seconds, share, former_sides)
    return _sample(speaker_groups, seconds, share, _decided(groups, former_sides)), "speaker"


def held_out_recordings(
    groups: Mapping[str, _Keys], seconds: _Seconds, share: float, former_sides: Sides = NO_SIDES
) -> tuple[_Mask, str]:
    """Return the same as ``held_out``, where the groups are recordings."""
    return _sample(groups["recording"], seconds, share, _decided(groups, former_sides)), "recording"


def _decided(groups: Mapping[str, _Keys], former_sides: Sides) -> _Decided:
    """Return the cuts whose recordings stay on their former side (rule 1)."""
    is_trained = np.isin(groups["recording"], former_sides.trained)
    is_held_out = np.isin(groups["recording"], former_sides.held_out) & ~is_trained
    if is_trained.all() or is_held_out.all():
        return _nothing_decided(len(is_trained))
    return _Decided(is_trained, is_held_out)


def _nothing_decided(cut_count: int) -> _Decided:
    no_cuts = np.zeros(cut_count, bool)
    return _Decided(trained=no_cuts, held_out=no_cuts)


def _groups_of_speakers(groups: Mapping[str, _Keys], seconds: _Seconds, share: float) -> _Keys | None:
    """Return the key (N,) of each cut's group of speakers (rule 2), or None by rule 3.

    A recording, or a chain of them, connects the speakers of a group. The key of the group is the smallest
    key of its speakers. So a speaker who is alone has the same random number in each set.
    """
    speaker_keys, speaker_of_cut = np.unique(groups["speaker"], return_inverse=True)
    recording_keys, recording_of_cut = np.unique(groups["recording"], return_inverse=True)
    # A pair of a speaker and a recording is one number. A shared recording is in several pairs.
    pairs = np.unique(speaker_of_cut * len(recording_keys) + recording_of_cut)
    is_any_shared = len(pairs) > len(recording_keys)
    if len(recording_keys) == 1 or not is_any_shared:
        return groups["speaker"]

    from scipy.sparse import coo_array  # The import takes 0.2 s.
    from scipy.sparse.csgraph import connected_components

    # The nodes of a graph are all speakers, then all recordings. Each cut connects its two.
    first_recording = len(speaker_keys)
    node_count = first_recording + len(recording_keys)
    edges = (speaker_of_cut, first_recording + recording_of_cut)
    is_edge = np.ones(len(speaker_of_cut), bool)
    graph = coo_array((is_edge, edges), shape=(node_count, node_count))
    _, group_of_node = connected_components(graph, directed=False)
    group_of_speaker = group_of_node[:first_recording]
    group_of_cut = group_of_speaker[speaker_of_cut]

    # Each group has a speaker, so the groups that ``unique`` finds are 0, 1, 2 and so on. The first speaker
    # of a group has its smallest key, because ``speaker_keys`` ascend.
    group_ids, first_speakers, speaker_counts = np.unique(
        group_of_speaker, return_index=True, return_counts=True
    )
    group_seconds = np.bincount(group_of_cut, seconds, minlength=len(group_ids))
    seconds_of_several = group_seconds[speaker_counts > 1]
    requested_seconds = share * seconds.sum()
    if seconds_of_several.max(initial=0.0) > _MOST_SHARED_RATIO * requested_seconds:
        _LOG.warning("whole speakers cannot be held out, because too many of them share recordings")
        return None
    group_keys = speaker_keys[first_speakers]
    key_of_cut: _Keys = group_keys[group_of_cut]
    return key_of_cut


def _sample(groups: _Keys, seconds: _Seconds, share: float, decided: _Decided) -> _Mask:
    """Return a mask (N,) of the held-out cuts by the rules 6 and 7.

    ``groups`` (N,) are the keys of the cuts' groups. If all cuts are in one group, all are held out.

    The result depends on the keys of the groups and on the share, but not on the run's seed. Each group is
    sampled independently, so that new recordings do not change which of the others are held out. If fewer
    than five groups are expected, or if the sampled seconds are less than half or more than twice the
    requested seconds, groups are added one after the other (see ``_fill_share``).
    """
    group_keys, group_of_cut = np.unique(groups, return_inverse=True)
    if len(group_keys) < 2:
        # A single group cannot be divided. The caller decides whether it is also trained on.
        return np.ones(len(groups), bool)
    group_seconds = np.bincount(group_of_cut, seconds)
    requested_seconds = share * group_seconds.sum()

    stays_trained = np.zeros(len(group_keys), bool)
    stays_trained[group_of_cut[decided.trained]] = True
    stays_held_out = np.zeros(len(group_keys), bool)
    stays_held_out[group_of_cut[decided.held_out]] = True
    stays_held_out &= ~stays_trained

    random_numbers = uniform_at(0, RunStream.HOLD_OUT, group_keys)
    # Random numbers are below 1, so groups that stay trained on come after all others.
    random_numbers[stays_trained] = 2.0
    is_sampled: _Mask = stays_held_out | (random_numbers < share)
    sampled_seconds = group_seconds[is_sampled].sum()
    few_are_expected = share * len(group_keys) < _FEWEST_EXPECTED
    is_near = requested_seconds / 2 <= sampled_seconds <= requested_seconds * 2
    if few_are_expected or not is_near:
        is_undecided = ~(stays_held_out | stays_trained)
        order = [group for group in np.argsort(random_numbers).tolist() if is_undecided[group]]
        is_sampled = _fill_share(stays_held_out, order, group_seconds, requested_seconds)

    # Rule 7: validation gets one of the groups, and training another.
    is_undecided_cut = ~(decided.trained | decided.held_out)
    has_undecided = np.zeros(len(group_keys), bool)
    has_undecided[group_of_cut[is_undecided_cut]] = True
    if not is_sampled.any():
        numbers_of_undecided = np.where(has_undecided, random_numbers, np.inf)
        is_sampled[np.argmin(numbers_of_undecided)] = True
    if is_sampled.all():
        seconds_of_undecided = np.where(has_undecided, group_seconds, -1.0)
        is_sampled[np.argmax(seconds_of_undecided)] = False
    # A group may have recordings on both sides: a speaker, if an earlier run held out by recording.
    is_held_out: _Mask = is_sampled[group_of_cut] | decided.held_out
    return is_held_out & ~decided.trained


def _fill_share(
    stays_held_out: _Mask, order: list[int], group_seconds: NDArray[Any], requested_seconds: float
) -> _Mask:
    """Return a mask of the groups that stay held out and of those that are added to them in ``order``.

    A group is added while less than ``requested_seconds`` are held out, if the sum is then within a limit.
    The limit is 1.5 times the requested seconds, or the seconds of the median group if these are more.
    Without the median, only the shortest of long recordings would be within the limit, and it may be new and
    incomplete.
    """
    is_sampled = stays_held_out.copy()
    total = float(group_seconds[is_sampled].sum())
    most_seconds = max(_TOLERANCE * requested_seconds, float(np.median(group_seconds)))
    for group in order:
        total_with_group = total + group_seconds[group]
        if total < requested_seconds and total_with_group <= most_seconds:
            is_sampled[group] = True
            total = total_with_group
    return is_sampled

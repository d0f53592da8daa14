"""The part of a training set that is held out for validation: a pure function of its index."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from speechtrain.counter_rng import RunStream, uniform_at
from speechtrain.data.index import Index

_FEWEST_SPEAKERS = 10  # of fewer, one who is held out would be missing in training
_OVER = 1.5  # whole speakers may be so much more than the share


def held_out(index: Index, rows: NDArray[np.int32], share: float) -> NDArray[np.int32]:
    """Return the held out ones of ascending ``rows``: ``share`` of them, at least one; all if there is one.

    Whole speakers are, if each recording names one and ten or more do; else each recording by the hash of
    its id. So neither the run's seed nor recordings that are added later change which.
    """
    if len(rows) < 2:
        return rows
    speakers = _speakers(index.speakers[rows], index.seconds[rows], share)
    draws = uniform_at(0, RunStream.HOLD_OUT, index.keys[rows])
    drawn = (draws < max(share, draws.min() + 1e-12)) & (draws < draws.max())
    held: NDArray[np.int32] = rows[np.isin(index.speakers[rows], speakers) if len(speakers) else drawn]
    return held


def _speakers(who: NDArray[np.int64], seconds: NDArray[np.float32], share: float) -> NDArray[np.int64]:
    """Return the speakers who are held out, in the order of their hashes; empty if none fit the share."""
    names, numbers = np.unique(who, return_inverse=True)
    if names[0] < 0 or len(names) < _FEWEST_SPEAKERS:
        return names[:0]
    spoken, chosen, held = np.bincount(numbers, seconds), [], 0.0
    wanted = share * float(spoken.sum())
    for number in np.argsort(uniform_at(0, RunStream.HOLD_OUT, names)).tolist():
        if held < wanted and held + spoken[number] <= _OVER * wanted:
            chosen.append(number)
            held += float(spoken[number])
    return names[chosen] if held >= wanted / _OVER else names[:0]

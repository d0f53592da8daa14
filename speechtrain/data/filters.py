"""The filters of ``data.train``: recordings that are too short, too long or without a transcript."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from speechtrain.data.index import Index
from speechtrain.data.planned_lengths import Integers


@dataclass(frozen=True)
class Filters:
    """The filters of a training set. A filtered recording is not used at all.

    Durations are before the speed change. ``skip_empty`` filters recordings without a transcript. Raises
    ValueError for limits that exclude each other.
    """

    min_seconds: float
    max_seconds: float
    skip_empty: bool

    def __post_init__(self) -> None:
        if not 0 <= self.min_seconds < self.max_seconds:
            raise ValueError(
                f"min_seconds={self.min_seconds}, max_seconds={self.max_seconds}: need 0 <= min < max"
            )

    def describe_seconds(self) -> str:
        """Return the allowed durations as words, such as ``between 0.1 and 20 s``."""
        return f"between {self.min_seconds:g} and {self.max_seconds:g} s"

    def is_too_long(self, index: Index) -> np.ndarray:
        """Return a mask of the recordings in ``index`` that are longer than ``max_seconds``."""
        return index.seconds > np.float32(self.max_seconds)  # Durations in the index are float32.

    def filtered_rows(self, index: Index) -> dict[str, Integers]:
        """Return the rows of ``index`` that are filtered, ascending, by the reason."""
        is_long = self.is_too_long(index)
        is_short = index.seconds < np.float32(self.min_seconds)
        is_empty = (index.characters == 0) & ~is_long & ~is_short & self.skip_empty
        masks = {"too_long": is_long, "too_short": is_short, "untranscribed": is_empty}
        return {reason: np.flatnonzero(mask) for reason, mask in masks.items()}

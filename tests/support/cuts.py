"""The cuts of a source as objects of lhotse."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from speechtrain.data.source import Source


def lhotse_cuts(source: Source) -> Iterator[Any]:
    """Yield each cut as lhotse reads it."""
    from lhotse.cut.set import deserialize_cut

    for cut in source.cuts():
        yield deserialize_cut(copy.deepcopy(cut))  # lhotse changes the dictionary

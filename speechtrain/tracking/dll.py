"""The lines of the logger that the RNN-T reference trains with, NVIDIA's DLLogger."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

_FORMS = {
    "train": "iter {update:4d}/{updates} | loss {loss:7.2f} | utts/s {utterances_per_s:5.0f}"
    " | took {seconds:5.2f} s | lrate {lr:3.2e}",
    "epoch": "avg train utts/s {utterances_per_s:6.0f} | took {seconds:5.2f} s",
    "valid": "{name} ema wer {percent:6.2f} | took {seconds:5.2f} s",
}


class DLLines:
    """Formats the events ``train``, ``epoch`` and ``valid``. Epochs and their updates are numbered from 1.

        DLL 2026-11-25 10:00:00 - epoch    1 | iter   10/250 | loss   12.35 | utts/s    41 | took  1.95 s | …
        DLL 2026-11-25 10:00:40 - epoch    1 | avg train utts/s     42 | took 47.61 s
        DLL 2026-11-25 10:00:43 - epoch    1 | dev ema wer  20.48 | took  3.20 s

    The first evaluation set is called dev, and each other set has its name.
    """

    def __init__(self) -> None:
        self._updates = 1  # updates of an epoch
        self._first_set = ""

    def line(self, event: str, values: Mapping[str, Any]) -> str:
        """Return the line of an event, or an empty text for another event."""
        self._updates = values.get("updates_per_epoch", self._updates)
        if event not in _FORMS:
            return ""
        epoch, update = divmod(values["step"] - 1, self._updates)
        name = values.get("set", "")
        self._first_set = self._first_set or name
        if name == self._first_set:
            name = "dev"
        line = _FORMS[event].format(
            **values,
            update=update + 1,
            updates=self._updates,
            name=name,
            percent=100 * values.get("wer", math.nan),
        )
        return f"DLL {time.strftime('%Y-%m-%d %H:%M:%S')} - epoch {epoch + 1:4d} | {line}"

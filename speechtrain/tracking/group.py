"""A run's trackers as one: each is told every event, and none can stop training."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any, final

from speechtrain.errors import one_line
from speechtrain.tracking.base import Tracker


@final
class Trackers(Tracker):
    """Forwards events to its members; ``Trackers()`` has none and does nothing.

    A member that raises is reported once, on stderr. After an ``OSError`` it is told the next
    event all the same, since a full disk gets room again; after any other error it is left out for
    the rest of the run. The events that it missed are counted and reported on close.
    """

    def __init__(self, trackers: dict[str, Tracker | None] | list[Tracker] | None = None) -> None:
        """``trackers``: by the name that reports use (None stands for no tracker), or a plain list."""
        if isinstance(trackers, Mapping):
            members = {name: tracker for name, tracker in trackers.items() if tracker is not None}
        else:
            members = {f"{i} ({type(t).__name__})": t for i, t in enumerate(trackers or [], 1)}
        self._members = [_Guarded(name, tracker) for name, tracker in members.items() if tracker.enabled]
        self.visible = any(member.tracker.visible for member in self._members)

    def log(self, event: str, values: Mapping[str, Any]) -> None:
        """Tell every member; never raises."""
        for member in self._members:
            member.log(event, values)
        if event == "warning" and not self.visible:
            _report("warning: " + one_line(str(values.get("message", ""))))

    def close(self) -> None:
        """Close every member; never raises."""
        for member in self._members:
            member.close()


class _Guarded:
    """One member, its failures, and what they cost."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name = name
        self.tracker = tracker
        self.active = True
        self.failures = 0

    def log(self, event: str, values: Mapping[str, Any]) -> None:
        if not self.active:
            self.failures += 1
            return
        try:
            self.tracker.log(event, values)
        except OSError as error:
            self._failed(error, "it tries again at each event")
        except Exception as error:
            self.active = False
            self._failed(error, "it is left out from here on")

    def close(self) -> None:
        missed = self.failures
        try:
            self.tracker.close()
        except Exception as error:
            self._failed(error, "its last events may be lost")
        if missed:
            _report(f"warning: tracker {self.name} missed {missed} event{'s' * (missed != 1)}")

    def _failed(self, error: Exception, consequence: str) -> None:
        self.failures += 1
        if self.failures == 1:
            cause = " ".join(f"{type(error).__name__}: {error}".split())
            _report(f"warning: tracker {self.name} failed ({cause}); training goes on, {consequence}")


def _report(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # stderr is gone, or closed: no one is left to tell
        print(f"speechtrain: {line}", file=sys.stderr, flush=True)

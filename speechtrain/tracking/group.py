"""A run's trackers as one tracker: each receives every event, and none can stop training."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from speechtrain.errors import one_line
from speechtrain.tracking.base import Tracker


@final
class Trackers(Tracker):
    """Forwards events to its members; ``Trackers()`` has none and does nothing.

    A member that raises is reported once, on stderr. After an ``OSError`` it still receives the next
    event, since a full disk may get free space again; after any other error it is not used for the
    rest of the run. The missed events are counted and reported on close.
    """

    def __init__(self, trackers: dict[str, Tracker | None] | list[Tracker] | None = None) -> None:
        """``trackers``: by the name for reports (None: no tracker), or a plain list."""
        if isinstance(trackers, Mapping):
            members = {name: tracker for name, tracker in trackers.items() if tracker is not None}
        else:
            members = {f"{i} ({type(t).__name__})": t for i, t in enumerate(trackers or [], 1)}
        self._members = [_Guarded(name, tracker) for name, tracker in members.items() if tracker.enabled]
        self.visible = any(member.tracker.visible for member in self._members)

    def log(self, event: str, values: Mapping[str, Any]) -> None:
        """Send the event to every member; never raises."""
        for member in self._members:
            member.log(event, values)
        if event == "warning" and not self.visible:
            _report("warning: " + one_line(str(values.get("message", ""))))

    def close(self) -> None:
        """Close every member; never raises."""
        for member in self._members:
            member.close()


@dataclass(eq=False)
class _Guarded:
    """One member with its state, and the number of events it missed."""

    name: str
    tracker: Tracker
    active: bool = True
    failures: int = 0

    def log(self, event: str, values: Mapping[str, Any]) -> None:
        if not self.active:
            self.failures += 1
            return
        try:
            self.tracker.log(event, values)
        except OSError as error:
            self._failed(error, "the tracker tries again at each event")
        except Exception as error:
            self.active = False
            self._failed(error, "the tracker is off from now on")

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
            cause = one_line(f"{type(error).__name__}: {error}")
            _report(f"warning: tracker {self.name} failed ({cause}); training continues, {consequence}")


def _report(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # stderr is closed: the line cannot be reported
        print(one_line(f"speechtrain: {line}"), file=sys.stderr, flush=True)

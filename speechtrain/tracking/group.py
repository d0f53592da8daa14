"""A run's trackers as one tracker. Each tracker receives every event, and no tracker can stop training."""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from queue import SimpleQueue
from typing import Any, final

from speechtrain.errors import one_line
from speechtrain.tracking.base import Tracker

_MAX_RECORDS = 10_000  # the most records in a queue: about 10 MB
_CLOSING_SECONDS = 8.0  # The process must end within 10 s of its last step.
_THREAD = "tracker "  # the start of the names of the trackers' threads
_Record = tuple[str, Mapping[str, Any]]
"""An event and its values."""


def is_hanging() -> bool:
    """Return whether a tracker's thread still runs. At the end of a process, such a thread hangs."""
    return any(thread.name.startswith(_THREAD) for thread in threading.enumerate())


@final
class Trackers(Tracker):
    """Forwards events to its members. ``Trackers()`` has no members and does nothing.

    A member with ``background`` has a queue and a daemon thread. A full queue drops records. The event
    ``end`` closes these members, and waits at most 8 s for all of them.

    The first failure of a member is reported on stderr. After an ``OSError`` the member still receives the
    next event, because a full disk may get free space again. After any other error it is not used for the
    rest of the run.

    Members that are not in the background receive the event ``end`` with two more values:
    ``tracker_seconds``, the time that ``log`` has taken, and ``dropped``, the number of lost records of each
    member.
    """

    background = False

    def __init__(self, trackers: dict[str, Tracker | None] | None = None) -> None:
        """``trackers`` are by their names in messages. A name with None has no tracker."""
        self._queued: list[_Member] = []
        self._direct: list[_Member] = []
        self._seconds = 0.0
        for name, tracker in (trackers or {}).items():
            self.add(name, tracker)

    def add(self, name: str, tracker: Tracker | None) -> None:
        """Add a member if there is one and it is enabled."""
        if tracker is not None and tracker.enabled:
            members = self._queued if tracker.background else self._direct
            members.append(_Member(name, tracker))
            self.visible |= tracker.visible

    def log(self, event: str, values: Mapping[str, Any]) -> None:
        """Send the event to every member. It never raises."""
        start_time = time.perf_counter()
        for member in self._queued:
            member.log(event, values)
        dropped: dict[str, int] = {}
        if event == "end":
            dropped = self._close_queued()
            values = {**values, "tracker_seconds": round(self._seconds, 3), "dropped": dropped}
        for member in self._direct:
            member.log(event, values)
        if dropped:
            counts = ", ".join(f"{name} {count}" for name, count in dropped.items())
            _report(f"warning: records dropped: {counts}")
        if event == "warning" and not self.visible:
            message = one_line(str(values.get("message", "")))
            _report(f"warning: {message}")
        self._seconds += time.perf_counter() - start_time

    def close(self) -> None:
        """Close every member. It never raises."""
        self._close_queued()
        for member in self._direct:
            member.close()

    def _close_queued(self) -> dict[str, int]:
        """Close the members in the background. Return the number of dropped records by member."""
        members, self._queued = self._queued, []
        for member in members:
            member.put(None)
        deadline = time.monotonic() + _CLOSING_SECONDS
        for member in members:
            member.join(deadline)
        return {
            member.name: member.dropped_events for member in members + self._direct if member.dropped_events
        }


class _Member:
    """One tracker, with the queue and the thread of a tracker in the background."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name = name
        self.tracker = tracker
        self._events = self._records = 0
        self._is_off = self._has_warned = False
        self._queue: SimpleQueue[_Record | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=_THREAD + name, daemon=True)

    @property
    def dropped_events(self) -> int:
        """The number of events that the tracker has not recorded."""
        return self._events - self._records

    def log(self, event: str, values: Mapping[str, Any]) -> None:
        """Record an event, or put a copy of it into the queue."""
        self._events += 1
        if not self.tracker.background:
            self._record(event, values)
        elif self._queue.qsize() < _MAX_RECORDS:
            self.put((event, dict(values)))
        else:
            self._warn(f"has {_MAX_RECORDS} records to write; training continues, further ones are dropped")

    def put(self, record: _Record | None) -> None:
        """Put a copy of a record into the thread's queue. None ends the thread."""
        with self._guard():
            self._queue.put(copy.deepcopy(record))
            if self._thread.ident is None:
                self._thread.start()

    def join(self, deadline: float) -> None:
        """Wait for the thread until ``deadline``, in seconds of ``time.monotonic``."""
        if self._thread.is_alive():
            self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._warn(f"has not ended {_CLOSING_SECONDS:g} s after training; its last records are lost")

    def close(self) -> None:
        with self._guard():
            self.tracker.close()

    def _work(self) -> None:
        while (record := self._queue.get()) is not None:
            self._record(*record)
        self.close()

    def _record(self, event: str, values: Mapping[str, Any]) -> None:
        if not self._is_off:
            with self._guard():
                self.tracker.log(event, values)
                self._records += 1

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Return a context that reports an error of the tracker instead of raising it."""
        consequence = "some of its records are lost"
        try:
            yield
        except (Exception, SystemExit) as error:
            if not isinstance(error, OSError):
                self._is_off = True
                consequence = "the tracker is off from now on"
            cause = one_line(f"{type(error).__name__}: {error}")
            self._warn(f"failed ({cause}); training continues, {consequence}")

    def _warn(self, problem: str) -> None:
        """Report the first problem of the tracker, and no other one."""
        if not self._has_warned:
            self._has_warned = True
            _report(f"warning: tracker {self.name} {problem}")


def _report(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # A closed stderr gets no reports.
        text = one_line(f"speechtrain: {line}")
        print(f"{text}\n", end="", file=sys.stderr, flush=True)  # one write, because threads share stderr

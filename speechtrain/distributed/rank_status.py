"""The step and phase of a rank, which its watchdog checks. This module imports no torch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class RankStatus:
    """The step and phase of a rank, for its watchdog. A change takes 0.2 µs, without input or output."""

    def __init__(self) -> None:
        self.step = 0  # 0 before the first update
        self.phase = "start"
        # The number of phases so far. All ranks go through the same phases, so a lower count is behind.
        self.phase_count = 0
        self.collective_phases: set[str] = set()  # phases in which a collective has completed
        self._collectives_started = 0
        self._collectives_completed = 0
        self._lock = threading.Lock()  # Threads of a backend also call ``end_collective``.

    def begin_phase(self, step: int, phase: str) -> None:
        """Record that the rank starts ``phase`` of ``step``, or the next part of a long phase."""
        self.step = step
        self.phase = phase
        self.phase_count += 1

    def begin_collective(self) -> None:
        """Record that a collective starts."""
        with self._lock:
            self._collectives_started += 1

    def end_collective(self) -> None:
        """Record that a collective has completed."""
        with self._lock:
            self._collectives_completed += 1
        self.collective_phases.add(self.phase)

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Return a context for calls that wait for all peers. If they raise, they have not completed."""
        self.begin_collective()
        yield
        self.end_collective()

    @property
    def is_waiting(self) -> bool:
        """Whether a collective has started and not completed."""
        return self._collectives_started > self._collectives_completed

    @property
    def counts(self) -> tuple[int, int, int]:
        """The numbers of phases, of started and of completed collectives.

        At least one of them changes when the rank makes progress.
        """
        return self.phase_count, self._collectives_started, self._collectives_completed

    def __str__(self) -> str:
        return f"step {self.step}, {self.phase}"

"""The log of recordings that a run cannot use. Each recording counts once, and too many end the run."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from speechtrain.batch import FAULTS, Skip
from speechtrain.errors import DataError
from speechtrain.files import MOST_LOG_BYTES, append_line, atomic, json_lines, open_regular

_log = logging.getLogger(__name__)

FILE = "skipped.jsonl"
"""The unusable recordings of a run."""
FILTERED_FILE = "filtered.jsonl"
"""The recordings that the filters of data.train exclude, by their durations and transcripts."""
ACOUSTIC_REASONS = {"noise": "bad_noise", "rooms": "bad_room"}
"""The ``Skip.reason`` of an unusable recording of ``augment.noise`` and of ``augment.rooms``."""

_MOST_BAD, _LARGEST_BAD_SHARE = 10, 0.1  # the limits of bad recordings if the user sets none


class SkipLog:
    """The recordings that a run has skipped or that have FAULTS, over all its ranks and starts.

    Each recording is a line of ``<run_dir>/skipped.jsonl`` with ``id``, ``reason`` and ``detail``. All ranks
    append to the file and read it, so each rank knows the count over all ranks. If ``run_dir`` is empty,
    nothing is written. ``add`` raises DataError if all recordings are bad, or more than ``most_bad``. Noises
    and rooms count on their own, and half of them may be bad.
    """

    def __init__(self, run_dir: str, max_bad: int | None, max_bad_share: float | None) -> None:
        self.run_dir = run_dir
        self.path = Path(run_dir) / FILE if run_dir else None
        self.max_bad = max_bad
        self.max_bad_share = max_bad_share
        self.reasons: dict[str, str] = {}
        """The reason of each skipped recording, by its id."""
        self._read_bytes = 0  # bytes of the file that have been read
        self._has_warned = False

    @property
    def counts(self) -> dict[str, int]:
        """The number of recordings by reason."""
        counts = Counter(self.reasons.values())
        return dict(sorted(counts.items()))

    def allows(self, bad: int, total: int) -> bool:
        """Return whether the run may continue with ``bad`` bad recordings among ``total``."""
        return not bad or (bad <= self.most_bad(total) and bad < total)

    def most_bad(self, total: int) -> float:
        return most_bad(self.max_bad, self.max_bad_share, total)

    def restore(self, reasons: Mapping[str, str]) -> None:
        """Add the recordings of a checkpoint, each with its reason."""
        for recording_id, reason in reasons.items():
            self.reasons[str(recording_id)] = str(reason)

    def refresh(self) -> None:
        """Read the recordings that other ranks or earlier starts of the run have listed."""
        if self.path is None:
            return
        try:
            with open_regular(self.path, MOST_LOG_BYTES, follow=False) as file:
                file.seek(self._read_bytes)
                new_content = file.read()
        except OSError:
            return
        # Another rank may be writing the last line. The next call reads it.
        complete_lines = new_content[: new_content.rfind(b"\n") + 1]
        self._read_bytes += len(complete_lines)
        for record in json_lines(complete_lines.splitlines()):
            if "id" in record and "reason" in record:
                self.reasons.setdefault(str(record["id"]), str(record["reason"]))

    def add(self, skip: Skip, total: int) -> None:
        """Add a recording to the log, unless it is there. Raises DataError if the limits are exceeded.

        ``total`` is the number of recordings in the set, or of noises or rooms. The first recording of each
        reason is a warning.
        """
        if skip.id in self.reasons:
            return
        self.refresh()
        if skip.id not in self.reasons:
            if skip.reason not in self.reasons.values():
                verb = "used" if skip.reason in FAULTS else "skipped"
                _log.warning("%s %s: %s (%s)", verb, skip.id, skip.reason, skip.detail)
            self.reasons[skip.id] = skip.reason
            self._append(skip)
        if skip.reason in FAULTS:
            return
        is_acoustic = skip.reason in ACOUSTIC_REASONS.values()
        counts = Counter(self.reasons.values())
        bad = counts[skip.reason]
        if not is_acoustic:
            others = FAULTS.union(ACOUSTIC_REASONS.values())
            bad = sum(count for reason, count in counts.items() if reason not in others)
        latest = f"the latest {skip.id!r} ({skip.reason}: {skip.detail})"
        list_hint = f"{self.path} lists all" if self.path else "Set run_dir to list them"
        fix = f"{list_hint}. Repair or remove them"
        if is_acoustic:
            if 2 * bad > total:
                name = skip.id.partition(":")[0]
                raise DataError(f"{bad} of {total} recordings of {name} are unusable, {latest}. {fix}")
        elif not self.allows(bad, total):
            raise DataError(
                f"{bad} of {total} training recordings are unusable, {latest}. {fix}, or raise "
                f"data.max_bad={self.most_bad(total):.0f}"
            )

    def list_filtered(self, skips: Iterable[Skip]) -> None:
        """Write the filtered recordings to FILTERED_FILE, unless an earlier start of the run has done so."""
        if self.path is None:
            return
        path = self.path.with_name(FILTERED_FILE)
        if path.exists():
            return
        try:
            with atomic(path) as temporary, temporary.open("wb") as file:
                for skip in skips:
                    file.write(_line(skip) + b"\n")
        except OSError as error:
            _log.warning("%s cannot be written (%s). Filtered recordings are only counted", path, error)

    def warn(self) -> None:
        """Log the number of recordings by reason as a warning, unless there are none."""
        counts = dict(self.counts)
        faults = {reason: counts.pop(reason) for reason in FAULTS & counts.keys()}
        for verb, numbers in (("skipped", counts), ("used", faults)):
            text = ", ".join(f"{count} {reason}" for reason, count in numbers.items())
            if text:
                _log.warning("%s recordings: %s. %s lists them", verb, text, self.path)

    def _append(self, skip: Skip) -> None:
        if self.path is None:
            return
        try:
            append_line(self.path, _line(skip))
        except OSError as error:
            if not self._has_warned:
                _log.warning(
                    "%s cannot be written (%s). Skipped recordings are only counted", self.path, error
                )
            self._has_warned = True


def most_bad(max_bad: int | None, max_bad_share: float | None, total: int) -> float:
    """Return how many of ``total`` recordings may be bad: ``max_bad``, or the share if that is more.

    Without both limits it is a tenth, and ten recordings of a small set.
    """
    if max_bad is None and max_bad_share is None:
        max_bad, max_bad_share = _MOST_BAD, _LARGEST_BAD_SHARE
    return max(max_bad or 0, (max_bad_share or 0.0) * total)


def _line(skip: Skip) -> bytes:
    """Return the JSON line of a skip, without its line break."""
    return json.dumps(vars(skip), ensure_ascii=False).encode("utf-8", "backslashreplace")

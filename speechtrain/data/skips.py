"""The list of unusable recordings. Each counts once, and too many of them end the run."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from speechtrain.batch import Skip
from speechtrain.errors import DataError
from speechtrain.files import MOST_LOG_BYTES, append_line, atomic, json_lines, open_regular

_log = logging.getLogger(__name__)

FILE = "skipped.jsonl"
FILTERED_FILE = "filtered.jsonl"


class SkipLog:
    """The training recordings that a run has skipped, in all its starts.

    Each is a line of ``<run_dir>/skipped.jsonl`` (``id``, ``reason``, ``detail``). All ranks append to the
    file and read it, so the count is over all ranks. An empty ``run_dir`` keeps the list in memory only.
    ``add`` raises DataError if all recordings are bad, or if more than ``max_bad`` *and* more than the share
    ``max_bad_share`` are bad.
    """

    def __init__(self, run_dir: str, max_bad: int, max_bad_share: float) -> None:
        self.path = Path(run_dir) / FILE if run_dir else None
        self.max_bad = max_bad
        self.max_bad_share = max_bad_share
        self.reasons: dict[str, str] = {}
        """Reason by id."""
        self._read_bytes = 0  # bytes of the file that have been read
        self._has_warned = False

    @property
    def counts(self) -> dict[str, int]:
        """Number of recordings by reason."""
        counts = Counter(self.reasons.values())
        return dict(sorted(counts.items()))

    def allows(self, bad: int, total: int) -> bool:
        """Return whether the limits allow ``bad`` of ``total`` recordings."""
        if not bad:
            return True
        is_below_limits = bad <= self.max_bad or bad <= self.max_bad_share * total
        return is_below_limits and bad < total

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
        # An incomplete line is read by the next call.
        complete_lines = new_content[: new_content.rfind(b"\n") + 1]
        self._read_bytes += len(complete_lines)
        for record in json_lines(complete_lines.splitlines()):
            if "id" in record and "reason" in record:
                self.reasons.setdefault(str(record["id"]), str(record["reason"]))

    def add(self, skip: Skip, total: int) -> None:
        """Count and list a recording, unless it is listed. Raises DataError above the limits."""
        if skip.id in self.reasons:
            return
        self.refresh()
        if skip.id not in self.reasons:
            if skip.reason not in self.reasons.values():
                _log.warning("skipped %s: %s (%s)", skip.id, skip.reason, skip.detail)
            self.reasons[skip.id] = skip.reason
            self._append(skip)
        if not self.allows(len(self.reasons), total):
            where_listed = f"{self.path} lists all" if self.path else "Set run_dir to list them"
            raise DataError(
                f"{len(self.reasons)} of {total} training recordings are unusable, the latest {skip.id!r} "
                f"({skip.reason}: {skip.detail}). {where_listed}. Repair or remove them, or raise "
                f"data.max_bad={self.max_bad} and data.max_bad_share={self.max_bad_share}"
            )

    def list_filtered(self, skips: Iterable[Skip]) -> None:
        """Write the list of filtered recordings, once in a run."""
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
        """Log a warning with the number of skipped recordings by reason, if any are skipped."""
        counts = ", ".join(f"{count} {reason}" for reason, count in self.counts.items())
        if counts:
            _log.warning("skipped recordings: %s. %s lists them", counts, self.path)

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


def _line(skip: Skip) -> bytes:
    return json.dumps(vars(skip), ensure_ascii=False).encode("utf-8", "backslashreplace")

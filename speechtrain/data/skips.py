"""The list of unusable recordings: each is counted once, and too many of them end the run."""

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
    """The training recordings that a run has skipped, by id, including those before a resume.

    Each is a line of ``<run_dir>/skipped.jsonl`` (``id``, ``reason``, ``detail``). All ranks append to
    the file and read it, so the count is over all ranks. An empty ``run_dir`` keeps the list in memory
    only. If there are more than ``max_bad`` recordings *and* more than ``max_bad_share`` of ``total``, or
    all of ``total``, ``add`` raises DataError.
    """

    def __init__(self, run_dir: str, max_bad: int, max_bad_share: float) -> None:
        self.path = Path(run_dir) / FILE if run_dir else None
        self.max_bad = max_bad
        self.max_bad_share = max_bad_share
        self.reasons: dict[str, str] = {}
        """Reason by id."""
        self._read = 0  # bytes of the file that have been read
        self._is_told = False

    @property
    def counts(self) -> dict[str, int]:
        """Number of recordings by reason."""
        return dict(sorted(Counter(self.reasons.values()).items()))

    def allows(self, bad: int, total: int) -> bool:
        """Whether ``bad`` of ``total`` recordings are within the budget, and not all of them."""
        return not bad or (bad < total and (bad <= self.max_bad or bad <= self.max_bad_share * total))

    def refresh(self) -> None:
        """Read what other ranks, or this run before a resume, have listed."""
        if self.path is None:
            return
        try:
            with open_regular(self.path, MOST_LOG_BYTES, follow=False) as file:
                file.seek(self._read)
                new = file.read()
        except OSError:
            return
        whole = new[: new.rfind(b"\n") + 1]  # an incomplete line is read next time
        self._read += len(whole)
        for record in json_lines(whole.splitlines()):
            if "id" in record and "reason" in record:
                self.reasons.setdefault(str(record["id"]), str(record["reason"]))

    def add(self, skip: Skip, total: int) -> None:
        """Count and list one skip, unless it is known. Raises DataError above the limits."""
        if skip.id in self.reasons:
            return
        self.refresh()
        if skip.id not in self.reasons:
            if skip.reason not in self.reasons.values():
                _log.warning("skipped %s: %s (%s)", skip.id, skip.reason, skip.detail)
            self.reasons[skip.id] = skip.reason
            self._append(skip)
        if not self.allows(len(self.reasons), total):
            listed = f"{self.path} lists all" if self.path else "set run_dir to list them"
            raise DataError(
                f"{len(self.reasons)} of {total} training recordings are unusable, the latest {skip.id!r} "
                f"({skip.reason}: {skip.detail}); {listed}; repair or remove them, or raise data.max_bad="
                f"{self.max_bad} and data.max_bad_share={self.max_bad_share}"
            )

    def list_filtered(self, skips: Iterable[Skip]) -> None:
        """List the recordings that are filtered, once per run."""
        if self.path is None or (path := self.path.with_name(FILTERED_FILE)).exists():
            return
        try:
            with atomic(path) as temporary, temporary.open("wb") as file:
                for skip in skips:
                    file.write(_line(skip) + b"\n")
        except OSError as error:
            _log.warning("%s cannot be written (%s); filtered recordings are only counted", path, error)

    def warn(self) -> None:
        """Warn of the number of recordings by reason, if there are any."""
        counts = ", ".join(f"{count} {reason}" for reason, count in self.counts.items())
        if counts:
            _log.warning("skipped recordings: %s; %s lists them", counts, self.path)

    def _append(self, skip: Skip) -> None:
        if self.path is None:
            return
        try:
            append_line(self.path, _line(skip))
        except OSError as error:
            if not self._is_told:
                _log.warning(
                    "%s cannot be written (%s); skipped recordings are only counted", self.path, error
                )
            self._is_told = True


def _line(skip: Skip) -> bytes:
    return json.dumps(vars(skip), ensure_ascii=False).encode("utf-8", "backslashreplace")

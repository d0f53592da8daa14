"""The interface of a source: where cuts come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # lhotse takes seconds to import: sources import it where they first need it
    from lhotse.cut import Cut


class Source(ABC):
    """Where cuts come from: the data layer sees lhotse cuts, whatever lies on the disk."""

    @abstractmethod
    def cuts(self) -> Iterator[Cut]:
        """Every cut, in the same order in every process; ids are unique within the source.

        Each cut has exactly one supervision, whose text is the transcript in lower case.
        Raises DataError for what cannot be read, MachineError where the machine has no room for it.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """A short hash of arguments and content, equal on every machine: it changes when the cuts would."""

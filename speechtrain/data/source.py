"""The interface of a source of cuts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Facts:
    """The optional settings of a set in ``data.train`` or ``data.valid``."""

    name: str = ""
    normaliser: str = ""  # the name of a normaliser that replaces the tokenizer's for these transcripts
    weight: float | None = None  # the weight of the set relative to the other sets, 1 if another has one
    language: str = ""
    hold_out: bool = True  # whether the share ``data.hold_out`` is also taken from this set


class Source(ABC):
    """A source of cuts. It reads one format and converts it to lhotse cuts."""

    facts = Facts()
    is_example: bool = False
    """Whether this is example data. It shows that training works, but not how good a model is."""

    @abstractmethod
    def cuts(self) -> Iterator[dict[str, Any]]:
        """Yield every cut in lhotse's JSON format (``Cut.to_dict``), in the same order in every process.

        Ids are unique within the source. A cut's transcript is the texts of its supervisions in order. Raises
        DataError if a file cannot be read, MachineError if the disk is full.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a short hash of the arguments and the content. It is equal on every machine."""

    def warnings(self) -> Iterator[str]:
        """Yield a line on files that are left out, and one if the place of the transcripts is a guess."""
        return iter(())

    def text_hint(self) -> str:
        """Return a hint where the transcripts may be, for an error that there are none, or ""."""
        return ""

"""The interface of a source of cuts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # lhotse takes seconds to import: sources import it at first use
    from lhotse.cut import Cut


@dataclass(frozen=True)
class Facts:
    """The settings of a set in data.train or data.valid. Each of them is optional."""

    name: str = ""  # the name of the set
    normaliser: str = ""  # the normaliser of its transcripts, instead of the tokenizer's
    weight: float | None = None  # the weight relative to the other sets
    language: str = ""  # the language of its transcripts


class Source(ABC):
    """A source of cuts: any format on the disk becomes lhotse cuts."""

    facts = Facts()
    is_example: bool = False
    """Whether it shows that training works, and not how well."""

    @abstractmethod
    def cuts(self) -> Iterator[Cut]:
        """Yield every cut, in the same order in every process. Ids are unique within the source.

        A cut's transcript is the texts of its supervisions in order.
        Raises DataError if a file cannot be read, MachineError if the disk is full.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a short hash of arguments and content, equal on every machine. Other cuts change it."""

    def warnings(self) -> Iterator[str]:
        """Yield a line for files that seem to be recordings and are not read."""
        return iter(())

    def text_hint(self) -> str:
        """Return where transcripts may lie that are not read. It is empty if nobody knows."""
        return ""

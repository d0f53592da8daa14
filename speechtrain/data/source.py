"""The interface of a source of cuts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # The import of lhotse takes seconds, so sources import it at first use.
    from lhotse.cut import Cut


@dataclass(frozen=True)
class Facts:
    """The settings of a set in ``data.train`` or ``data.valid``. Each of them is optional."""

    name: str = ""
    normaliser: str = ""  # the name of the transcripts' normaliser. Without it, the tokenizer normalises them
    weight: float | None = None  # the weight relative to the other sets
    language: str = ""


class Source(ABC):
    """A source of cuts. It reads one format and converts it to lhotse cuts."""

    facts = Facts()
    is_example: bool = False
    """Whether this is example data, which shows that training works, and not how well a model is."""

    @abstractmethod
    def cuts(self) -> Iterator[Cut]:
        """Yield every cut, in the same order in every process. Ids are unique within the source.

        A cut's transcript is the texts of its supervisions in order.
        Raises DataError if a file cannot be read, MachineError if the disk is full.
        """

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a short hash of the arguments and the content. It is equal on every machine."""

    def warnings(self) -> Iterator[str]:
        """Yield a line on files that seem to be recordings and are not read."""
        return iter(())

    def text_hint(self) -> str:
        """Return where the transcripts may be, if none was read, or an empty text if that is unknown."""
        return ""

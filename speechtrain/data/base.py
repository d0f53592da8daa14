"""The interface of a data module: what the trainer asks of data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

from speechtrain.batch import Batch


class DataModule(ABC):
    """Training batches without end, validation sets by name, and a state of two integers.

    The state is the address (epoch, position) of the next micro-batch in *global* order, so resume
    costs nothing, and any number of ranks and workers sees the same order.
    """

    @property
    @abstractmethod
    def micro_batches_per_epoch(self) -> int:
        """Micro-batches in epoch 0, over all ranks."""

    @abstractmethod
    def train(self, rank: int = 0, world_size: int = 1, accumulate: int = 1) -> Iterator[Batch]:
        """This rank's micro-batches from the current state on, without end.

        A global batch is ``world_size × accumulate`` consecutive micro-batches; rank r takes those
        at ``a × world_size + r``. An epoch's remainder begins the next global batch. Yielding the
        last micro-batch of a global batch moves the state to the next global batch.
        """

    @abstractmethod
    def valid(self, rank: int = 0, world_size: int = 1) -> dict[str, Iterable[Batch]]:
        """Each named evaluation set, every utterance once over all ranks, equal batch counts per rank."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def check(self) -> None:  # noqa: B027 - nothing is a sensible default
        """Look for what would stop a run later: missing recordings, transcripts that cannot be spelled.

        Raises DataError, one line that names the file or symbol and the fix.
        """

    def shapes(self) -> list[tuple[int, int, int]]:
        """The (batch, samples, labels) shapes of training, where they are a fixed set; else empty."""
        return []

    def evaluation_shapes(self) -> list[tuple[int, int, int]]:
        """Those of all evaluation sets, where they are fixed; else empty."""
        return []

    def report(self) -> dict[str, float]:
        """Recordings skipped so far in this run, by reason; what shares of audio a plan pads or cuts off."""
        return {}

    def close(self) -> None:  # noqa: B027 - nothing is a sensible default
        """Stop worker processes."""

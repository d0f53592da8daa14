"""The interface between the trainer and a data module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from speechtrain.batch import Batch


class DataModule(ABC):
    """Endless training batches, named validation sets, and a state of two integers.

    The state is the address (epoch, position) of the next micro-batch in *global* order. So resume costs
    nothing, and the order is the same for any number of ranks and workers.
    """

    train_is_optional: bool = False
    """Whether named evaluation sets need no training data, so that ``train`` may be empty."""

    @property
    @abstractmethod
    def micro_batches_per_epoch(self) -> int:
        """Number of micro-batches in epoch 0, over all ranks."""

    @abstractmethod
    def train(self, rank: int = 0, world_size: int = 1, accumulate: int = 1) -> Iterator[Batch]:
        """Yield this rank's micro-batches from the current state, endlessly.

        A global batch is ``world_size × accumulate`` consecutive micro-batches. Rank r gets the micro-batches
        at ``a × world_size + r``. The micro-batches that are left at the end of an epoch begin the next
        global batch. The state moves on when the last micro-batch of a global batch is yielded.
        """

    @abstractmethod
    def valid(self, rank: int = 0, world_size: int = 1) -> dict[str, Iterable[Batch]]:
        """Return this rank's part of each named evaluation set.

        Each utterance is on one rank, and all ranks have equal numbers of batches.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def check(self) -> None:  # noqa: B027 - empty by default
        """Check for problems that would stop a run later: missing recordings, unknown symbols.

        Raises DataError with one line that names the file or symbol and the fix.
        """

    def warnings(self) -> Iterator[str]:
        """Yield a line for each fact that the user may not expect, such as recordings that are not used."""
        return iter(())

    def crowded_transcripts(self, frames: Callable[[int], int]) -> str:
        """Return a line on training transcripts with more labels than encoder frames, or an empty one.

        ``frames`` maps samples to encoder frames.
        """
        return ""

    def shapes(self) -> list[tuple[int, int, int]]:
        """Return the (batch, samples, labels) shapes of training if they are fixed, else an empty list."""
        return []

    def evaluation_shapes(self) -> list[tuple[int, int, int]]:
        """Return the shapes of all evaluation sets if they are fixed, else an empty list."""
        return []

    def sample(self) -> Batch | None:
        """Return a training batch of median size, to time steps, or None if no recording is left.

        The state does not move, and skipped recordings are not counted.
        """
        return None

    def recordings(self, normalise: Callable[[str], str]) -> Iterator[tuple[float, str]]:
        """Yield the seconds and the transcript of each training recording.

        ``normalise`` normalises the transcripts, except in sets that name a normaliser.
        """
        return iter(())

    def content(self) -> dict[str, str | float]:
        """Return the number of training recordings as ``recordings``, and a digest of them as ``digest``.

        ``hours`` and ``speakers`` of the recordings are optional.

        Another digest shows that the training set has changed. A module that knows neither returns nothing.
        """
        return {}

    def counts(self) -> dict[str, int]:
        """Return the numbers of recordings: ``train_samples``, and ``eval_samples`` of the first set.

        A module that does not know them returns nothing.
        """
        return {}

    def report(self) -> dict[str, Any]:
        """Return facts to log: skipped recordings, padded and cropped shares, held-out part."""
        return {}

    def set_stop_check(self, stop_requested: Callable[[], bool]) -> None:  # noqa: B027 - empty by default
        """Raise Preempted in a long wait for a batch if ``stop_requested`` returns true."""

    def close(self) -> None:  # noqa: B027 - empty by default
        """Stop worker processes."""

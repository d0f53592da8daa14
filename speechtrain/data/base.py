"""The interface between the trainer and a data module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from speechtrain.batch import Batch


class DataModule(ABC):
    """Endless training batches, named validation sets, and a state of two integers.

    The state is the address (epoch, position) of the next micro-batch in *global* order, so resume
    costs nothing, and the order is the same for any number of ranks and workers.
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

        A global batch is ``world_size × accumulate`` consecutive micro-batches. Rank r takes the
        ones at ``a × world_size + r``. An epoch's remainder starts the next global batch. Yielding the
        last micro-batch of a global batch moves the state to the next global batch.
        """

    @abstractmethod
    def valid(self, rank: int = 0, world_size: int = 1) -> dict[str, Iterable[Batch]]:
        """Return the named evaluation sets: each utterance is on one rank, batch counts are equal."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def check(self) -> None:  # noqa: B027 - empty by default
        """Check for problems that would stop a run later: missing recordings, unknown symbols.

        Raises DataError: one line that names the file or symbol and the fix.
        """

    def warnings(self) -> Iterator[str]:
        """Yield a line for each fact that the user may not expect: recordings that are not used."""
        return iter(())

    def crowded(self, frames: Callable[[int], int]) -> str:
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
        """Return a training batch of median size, to time steps with, or None if none is left.

        It moves no state and counts no skipped recording.
        """
        return None

    def recordings(self, normalise: Callable[[str], str]) -> Iterator[tuple[float, str]]:
        """Yield the seconds and the transcript of each training recording.

        Transcripts go through ``normalise``, or a normaliser of their own set's.
        """
        return iter(())

    def content(self) -> dict[str, str | int]:
        """Return ``recordings``, a count, and a digest, by which a change of the training set is noticed.

        Empty for a module that does not know them.
        """
        return {}

    def counts(self) -> dict[str, int]:
        """Return ``train_samples`` and ``eval_samples``, the recordings of training and of the first set.

        Empty for a module that does not know them.
        """
        return {}

    def report(self) -> dict[str, Any]:
        """Return the skipped recordings by reason, shares of padded and cropped audio, the held-out part."""
        return {}

    def obey(self, stop_requested: Callable[[], bool]) -> None:  # noqa: B027 - empty by default
        """Let a stop request end a long wait for a batch, with Preempted."""

    def close(self) -> None:  # noqa: B027 - empty by default
        """Stop worker processes."""

"""The interface between the trainer and a data module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from speechtrain.batch import Batch


class DataModule(ABC):
    """Provides the training batches, which never end, and the batches of named evaluation sets.

    The state is the address (epoch, position) of the next micro-batch in the global order, over all ranks.
    So a resumed run reads nothing again, and the order is the same for any number of ranks and workers.
    """

    train_is_optional: bool = False
    """Whether ``train`` may be empty for an evaluation on named sets."""

    @property
    @abstractmethod
    def micro_batches_per_epoch(self) -> int:
        """Number of micro-batches in epoch 0, over all ranks."""

    @abstractmethod
    def train(self, rank: int = 0, world_size: int = 1, accumulate: int = 1) -> Iterator[Batch]:
        """Yield this rank's micro-batches from the current state, endlessly.

        A global batch is ``world_size × accumulate`` consecutive micro-batches. Of these, rank r gets number
        ``a × world_size + r`` for each a from 0 to ``accumulate - 1``. If an epoch ends within a global
        batch, the next epoch completes it. The state changes when the last micro-batch of a global batch is
        yielded.
        """

    @abstractmethod
    def valid(self, rank: int = 0, world_size: int = 1) -> dict[str, Iterable[Batch]]:
        """Return this rank's batches of each evaluation set, by the name of the set.

        Each utterance is on one rank, and all ranks have equal numbers of batches.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the state of a checkpoint."""

    def check(self) -> None:  # noqa: B027 - empty by default
        """Check for problems that would stop a run later: missing recordings, unknown symbols.

        Raises DataError with one line that names the file or symbol and the fix.
        """

    def warnings(self) -> Iterator[str]:
        """Yield a line for each fact that the user may not expect, such as recordings that are not used."""
        return iter(())

    def crowded_transcripts(self, frames: Callable[[int], int]) -> str:
        """Return a warning about training transcripts with more labels than encoder frames, or "".

        ``frames`` maps a number of samples to its number of encoder frames.
        """
        return ""

    def shapes(self) -> list[tuple[int, int, int]]:
        """Return the fixed (rows, samples, labels) of training batches. Without fixed shapes it is empty."""
        return []

    def evaluation_shapes(self) -> list[tuple[int, int, int]]:
        """Return the fixed (rows, samples, labels) of all evaluation batches, or an empty list."""
        return []

    def sample(self) -> Batch | None:
        """Return a training batch of median size, or None if no recording is left. It serves to time a step.

        The state does not change, and skipped recordings are not counted.
        """
        return None

    def recordings(self, normalise_text: Callable[[str], str]) -> Iterator[tuple[float, str]]:
        """Yield the seconds and the transcript of each training recording.

        ``normalise_text`` normalises the transcripts, except in sets whose specification names a normaliser.
        """
        return iter(())

    def content(self) -> dict[str, str | float]:
        """Return the number of training recordings as ``recordings``, and a digest of them as ``digest``.

        ``hours`` and ``speakers`` of the recordings are optional.

        Another digest shows that the training set has changed. The default is an empty mapping.
        """
        return {}

    def counts(self) -> dict[str, int]:
        """Return the numbers of recordings: ``train_samples``, and ``eval_samples`` of the first set.

        The default is an empty mapping.
        """
        return {}

    def report(self) -> dict[str, Any]:
        """Return entries of the log, such as skipped recordings, padded shares and held-out hours."""
        return {}

    def close(self) -> None:  # noqa: B027 - empty by default
        """Stop worker processes."""

"""The text of speech while somebody speaks: ``speechtrain.load("RUN").stream()``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from speechtrain.errors import ConfigError
from speechtrain.inference.samples import scale_to_one

if TYPE_CHECKING:
    from speechtrain.decoding.base import Decoder, SearchStream, Word
    from speechtrain.inference.open_run import OpenedRun

_STEP_SECONDS = 1.0  # A longer piece of samples is recognised in steps, so its first text comes earlier.
_FRAMES_PER_CHECK = 8  # The endpoint is looked for at each multiple, so it does not depend on the pieces.
# The search stores the frames of an utterance. So it begins anew after 10 s without a label, and ends an
# utterance that has no endpoint after 60 s.
_LONGEST_SILENCE, _LONGEST_UTTERANCE = 10.0, 60.0


@dataclass(frozen=True)
class StreamEvent:
    """The text of an utterance so far, or its final text."""

    text: str
    is_final: bool  # A final text does not change, and the next event is of another utterance.
    words: tuple[Word, ...]  # with times in seconds of the stream
    settled: int  # the number of first words that cannot change. The last of them may become longer


class RecognitionStream:
    """Recognises one endless recording, whose samples arrive in pieces. Its memory does not grow.

    ``computing`` returns the context in which the model computes.
    """

    def __init__(
        self,
        opened: OpenedRun,
        computing: Callable[[], AbstractContextManager[None]],
        context: Sequence[int] | None,
        decoder: Decoder,
    ) -> None:
        if opened.policy.static_shapes:
            name = opened.device.name
            raise ConfigError(f"device={name} has static shapes, and a stream has not. Add device=cpu")
        self.sample_rate = opened.task.sample_rate
        self._opened, self._computing = opened, computing
        self._stream = opened.task.stream(context, decoder)
        self._search: SearchStream = self._stream.search
        self._first_frame = 0  # of the present utterance
        self._has_samples = False
        self._last_text = ""  # of the last event, if it was not final
        self._has_ended = False

    def __enter__(self) -> RecognitionStream:
        return self

    def __exit__(self, *error: object) -> None:
        self._has_ended = True

    def feed(self, samples: Any) -> Iterator[StreamEvent]:
        """Append samples (S,) at ``sample_rate``, and yield the events that they cause.

        Samples are floats in [-1, 1], or integers of 8, 16 or 32 bits. Infinite and undefined samples count
        as 0. Events must be read before the next call. Raises ConfigError for other samples and after the
        end of the stream.
        """
        if self._has_ended:
            raise ConfigError("the stream has ended. Begin another one with stream()")
        waveform = self._waveform(samples)
        self._has_samples = self._has_samples or waveform.shape[1] > 0
        for piece in torch.split(waveform, int(_STEP_SECONDS * self.sample_rate), dim=1):
            yield from self._events(partial(self._stream.step, piece))

    def finish(self) -> Iterator[StreamEvent]:
        """End the stream, and yield its last events."""
        if self._has_ended:
            return
        self._has_ended = True
        if self._has_samples:  # The frames of an encoder end with one that only reads padding.
            yield from self._events(self._stream.finish)
            yield from self._ended_utterance()

    def _waveform(self, samples: Any) -> Tensor:
        """Return samples (1, S) on the device."""
        try:
            waveform = scale_to_one(samples)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{error}. Feed floats in [-1, 1] or integers of 8, 16 or 32 bits") from None
        if waveform.ndim != 1:
            raise ConfigError(f"samples of shape {waveform.shape}. Feed the shape (S,)")
        finite = np.where(np.isfinite(waveform), waveform, np.float32(0.0))
        return self._opened.device.tensor(torch.from_numpy(finite)[None])

    def _events(self, next_frames: Callable[[], Tensor]) -> Iterator[StreamEvent]:
        """Yield the events of the next frames (1, T, ·) of the search."""
        with self._inference():
            frames = next_frames()
        if not frames.shape[1]:
            return
        while frames.shape[1]:
            count = _FRAMES_PER_CHECK - self._search.frame % _FRAMES_PER_CHECK
            with self._inference():
                self._search.step(frames[:, :count])
                has_ended = self._search.frame % _FRAMES_PER_CHECK == 0 and self._utterance_has_ended()
            frames = frames[:, count:]
            if has_ended:
                yield from self._ended_utterance()
        hypothesis = self._search.hypothesis
        if hypothesis.text != self._last_text:
            self._last_text = hypothesis.text
            settled = hypothesis.part(0, self._search.final_labels)
            yield StreamEvent(hypothesis.text, False, hypothesis.words, len(settled.words))

    def _utterance_has_ended(self) -> bool:
        """Return whether the search has found an endpoint, or has waited too long for one."""
        search = self._search
        seconds = (search.frame - self._first_frame) * search.scorer.frame_seconds
        longest = _LONGEST_UTTERANCE if search.hypothesis.labels else _LONGEST_SILENCE
        return search.is_ended or seconds >= longest

    @contextlib.contextmanager
    def _inference(self) -> Iterator[None]:
        """Return a context in which the model computes without gradients."""
        opened = self._opened
        with self._computing(), torch.no_grad(), opened.policy.autocast(opened.device.name):
            yield

    def _ended_utterance(self) -> Iterator[StreamEvent]:
        """Yield the final text of the present utterance, if it has one."""
        with self._inference():
            hypothesis = self._search.finish()
        self._first_frame = self._search.frame
        self._last_text = ""
        if hypothesis.text.strip():
            yield StreamEvent(hypothesis.text, True, hypothesis.words, len(hypothesis.words))

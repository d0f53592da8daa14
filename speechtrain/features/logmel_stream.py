"""Log-mel features of recordings that arrive in pieces.

Legend: B rows, S samples, C columns, M mel bins, T output frames, F features of an output frame.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from speechtrain.errors import NeedsWholeRecordings
from speechtrain.features.logmel import LogMel
from speechtrain.features.statistics import OF_COLUMNS


class LogMelStream:
    """Computes the frames of ``rows`` recordings of the same length, which arrive in pieces.

    The frames of all pieces are those of one pass of ``log_mel`` in evaluation with ``keys`` (B,), without
    warp and mask. By default, all keys are 0. Between the pieces, the stream stores the samples of about two
    windows and two frames.

    Raises NeedsWholeRecordings, a ConfigError, for settings of ``log_mel`` that need the whole recording.
    """

    def __init__(self, log_mel: LogMel, rows: int = 1, keys: Tensor | None = None) -> None:
        if log_mel.normalise not in OF_COLUMNS:
            raise NeedsWholeRecordings(
                f"encoder.features.normalise={log_mel.normalise} needs the whole recording. "
                "A stream needs encoder.features.normalise=fixed, or none"
            )
        if log_mel.trim_silence_db is not None:
            raise NeedsWholeRecordings(
                f"encoder.features.trim_silence_db={log_mel.trim_silence_db} needs the whole recording. "
                "A stream needs encoder.features.trim_silence_db=null"
            )
        self.log_mel = log_mel
        self.keys = log_mel.window.new_zeros(rows, dtype=torch.int64) if keys is None else keys
        self.hop = log_mel.hop * log_mel.splice  # samples from one frame to the next
        self.audio = log_mel.window.new_zeros(rows, 0)  # (B, S) the stored samples, which begin with a frame
        self.departed = 0  # frames of the stored samples that have left

    def step(self, samples: Tensor) -> Tensor:
        """Append samples (B, S) and return the new frames (B, T, F), which no further sample changes.

        S may be any number, and T may be 0.
        """
        self.audio = torch.cat([self.audio, samples.float()], dim=1)
        stored = self.audio.shape[1]
        front_end = self.log_mel.front_end
        if stored <= front_end.left:
            return self._frames_before(0)  # The reflection before the first sample has further samples.
        complete_windows = (stored + front_end.left - front_end.width) // front_end.hop + 1
        columns = min(complete_windows, front_end.columns(stored))
        return self._frames_before(columns // self.log_mel.splice)

    def finish(self) -> Tensor:
        """Return the last frames (B, T, F). The stream has then ended."""
        stored = self.audio.shape[1]
        columns = self.log_mel.front_end.columns(stored) if stored else 0
        return self._frames_before(math.ceil(columns / self.log_mel.splice))

    def _frames_before(self, end: int) -> Tensor:
        """Return the frames (B, T, F) from the first that has not left to before frame ``end``.

        The stored samples are converted as if they were recordings. Only windows at the ends read the
        extension, and these frames are returned only where the recordings begin and end.
        """
        rows, stored = self.audio.shape
        if end <= self.departed:
            return self.audio.new_zeros(rows, 0, self.log_mel.features)
        lengths = torch.full((rows,), stored, device=self.audio.device)
        frames, _ = self.log_mel(self.audio, lengths, keys=self.keys)
        new_frames: Tensor = frames[:, self.departed : end]
        # The samples that the next window and the reflection at the end need. Pre-emphasis reads the sample
        # before, and the reflection omits the last one.
        needed = self.log_mel.width + 2
        dropped = max(0, min(end * self.hop, stored) - needed) // self.hop
        self.departed = end - dropped
        start = dropped * self.hop
        self.audio = self.audio[:, start:].clone()  # A view would keep the memory of all samples.
        self.keys = self.keys + start  # The dither of a sample depends on its position.
        return new_frames

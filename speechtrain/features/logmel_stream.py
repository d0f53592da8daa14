"""Log-mel features of recordings that arrive in pieces.

Legend: B rows, S samples, C columns, M mel bins, T output frames, F features of an output frame.
"""

from __future__ import annotations

import torch
from torch import Tensor

from speechtrain.errors import NeedsWholeRecordings
from speechtrain.features.logmel import LogMel
from speechtrain.features.statistics import OF_COLUMNS
from speechtrain.nn.full_precision import full_precision


class LogMelStream:
    """Computes the frames of ``rows`` recordings of the same length, which arrive in pieces.

    The frames of all pieces are those of one pass of ``log_mel`` in evaluation with ``keys`` (B,), without
    warp and mask. Between the pieces, the stream stores about two windows and a hop of samples, and the
    columns of an incomplete frame.

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
        self.keys = keys
        self.samples = 0  # received samples of a row
        self.columns = 0  # computed columns of a row
        self.start = 0  # position of the first stored sample in its recording, a multiple of the hop
        self.audio = log_mel.window.new_zeros(rows, 0)  # (B, S) the stored samples
        # (B, C, M) the columns of the next frame, which is not complete
        self.incomplete = log_mel.window.new_zeros(rows, 0, log_mel.mels)

    def step(self, samples: Tensor) -> Tensor:
        """Append samples (B, S) and return the new frames (B, T, F), which no further sample changes.

        S may be any number, and T may be 0.
        """
        samples = self.log_mel.with_fixed_dither(samples.float(), self.keys, self.samples)
        self.audio = torch.cat([self.audio, samples], dim=1)
        self.samples += samples.shape[1]
        columns = self._columns_before(self._final_columns())
        complete = columns.shape[1] // self.log_mel.splice * self.log_mel.splice
        self.incomplete = columns[:, complete:].clone()  # A view would keep the memory of all columns.
        return self.log_mel.spliced(columns[:, :complete])

    def finish(self) -> Tensor:
        """Return the last frames (B, T, F). The stream has then ended."""
        columns = self.log_mel.front_end.columns(self.samples) if self.samples else 0
        return self.log_mel.spliced(self._columns_before(columns))

    def _final_columns(self) -> int:
        """Return the number of columns that no further sample changes."""
        front_end = self.log_mel.front_end
        if self.samples <= front_end.left:
            return 0  # The reflection before the first sample has further samples.
        complete_windows = (self.samples + front_end.left - front_end.width) // front_end.hop + 1
        return min(complete_windows, front_end.columns(self.samples))

    def _columns_before(self, end: int) -> Tensor:
        """Return the columns (B, C, M) from the first of the next frame to before column ``end``.

        The stored samples are extended as if they were recordings. Only windows at the ends read the
        extension, and they are computed only where the recordings begin and end.
        """
        count = end - self.columns
        if count <= 0:
            return self.incomplete
        front_end = self.log_mel.front_end
        lengths = torch.full((self.audio.shape[0],), self.audio.shape[1], device=self.audio.device)
        with full_precision(self.audio.device):
            signal = front_end.signal(self.audio, lengths)[:, self.columns * front_end.hop - self.start :]
            new_columns = self.log_mel.normalised_columns(self.log_mel.log_mel_columns(signal, count))
        self.columns = end
        self._drop_samples()
        return torch.cat([self.incomplete, new_columns], dim=1)

    def _drop_samples(self) -> None:
        """Drop the samples that neither the next window nor the reflection at the end will read."""
        front_end = self.log_mel.front_end
        next_window = self.columns * front_end.hop - front_end.left
        reflection = self.samples - front_end.width
        # The reflection omits the last sample, and pre-emphasis reads the sample before.
        first_needed = max(0, min(next_window, reflection) - 2)
        start = first_needed // front_end.hop * front_end.hop
        self.audio = self.audio[:, start - self.start :].clone()
        self.start = start

"""A run for use from Python: ``speechtrain.load("RUN").transcribe(["a.wav"])``."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor

from speechtrain.checkpoint.whole import read_state
from speechtrain.config.build import build, build_data
from speechtrain.config.check import part_class
from speechtrain.counter_rng import seed_at
from speechtrain.data.audio import change_rate
from speechtrain.data.formats.lhotse_cuts import Samples
from speechtrain.data.loader import audio_row, collate
from speechtrain.data.module import SpeechData
from speechtrain.data.pieces import Recording, recordings
from speechtrain.distributed.group import SingleProcess
from speechtrain.errors import ConfigError, DataError, RunError
from speechtrain.inference.open_run import OpenedRun, open_run
from speechtrain.inference.transcript import Segment, Transcript
from speechtrain.runs.stored_config import set_group, set_key
from speechtrain.training.evaluation import Outcome, evaluate

if TYPE_CHECKING:
    from speechtrain.batch import Batch
    from speechtrain.encoders.base import Encoder

_LOG = logging.getLogger(__name__)

_HELD_OUT_WARNING = (
    "speechtrain: warning: held_out differs from the set that the run held out, so the run may have trained "
    "on some of it. data.train has changed, or another release wrote the run. Name a set by --set NAME=FILE"
)

PIECE_SECONDS = 20.0
"""Longest piece of a recording: few utterances of speech corpora are longer."""

LONGEST_SECONDS = 86_400.0
"""Longest recording, unless data.max_decoded_seconds is set: a small file may claim years."""

Audio = str | Path | Tensor | np.ndarray | tuple[Any, int]
"""A file, a folder or a manifest, or samples (S,) at the run's rate, or a tuple of samples and rate in Hz."""


@dataclass
class _PendingTranscript:
    """The segments of a recording so far, until all its pieces are decoded."""

    recording: Recording
    segments: list[Segment] = field(default_factory=list)
    undecoded: int = 0  # pieces that are read and not decoded
    is_read: bool = False
    error: DataError | None = None

    def result(self) -> Transcript | DataError:
        """Return the transcript, or the error if the recording could not be read."""
        if self.error is not None:
            return self.error
        recording = self.recording
        return Transcript(recording.name, recording.audio, recording.seconds, tuple(self.segments))


@dataclass(frozen=True)
class _Piece:
    """A part of a recording, to be decoded."""

    transcript: _PendingTranscript
    start: float  # in seconds of the recording
    samples: Samples


class TranscriptionError(DataError):
    """Some recordings could not be read.

    ``results`` has the Transcript or the DataError of each recording, in the order of the input.
    """

    def __init__(self, results: Sequence[Transcript | DataError]) -> None:
        self.results = tuple(results)
        errors = [result for result in results if isinstance(result, DataError)]
        message = str(errors[0])
        if len(results) > 1:
            message += f" ({len(errors)} of {len(results)} recordings failed, .results has the others)"
        super().__init__(message)


class LoadedRun:
    """A run's model with the weights of one checkpoint, ready for use. It neither prints nor writes.

    ``transcribe``, ``features`` and ``evaluate`` raise a SpeechtrainError that names the file or the key.
    """

    def __init__(self, opened: OpenedRun, most_seconds: float = LONGEST_SECONDS) -> None:
        self.opened = opened
        self.checkpoint = opened.checkpoint
        self.sample_rate = opened.task.sample_rate
        self._most_seconds = most_seconds

    def __repr__(self) -> str:
        opened = self.opened
        return (
            f"<LoadedRun {opened.config.run_dir} {self.checkpoint.name}: {type(opened.task).__name__}, "
            f"{self.sample_rate} Hz, {opened.device.name}>"
        )

    def transcribe(
        self,
        audio: Audio | Iterable[Audio],
        decoder: str = "",
        batch: int = 4,
        piece_seconds: float = PIECE_SECONDS,
        timestamps: bool = False,
        **options: Any,
    ) -> list[Transcript]:
        """Return the transcript of each recording.

        ``decoder`` is a choice of the config group ``decoder``, and ``options`` are its keys, as in
        ``transcribe(["a.wav"], decoder="beam", width=8)``. By default, the decoder of the run searches.
        Recordings are cut at pauses into pieces of at most ``piece_seconds``. Batches of ``batch`` pieces
        are decoded together. The texts do not depend on ``batch``.

        A transcript has ``words`` with times if the decoder gives times. With ``timestamps``, a decoder
        without times raises ConfigError.

        Raises TranscriptionError, a DataError, if a recording cannot be read. All other recordings are
        transcribed first, and the error has their transcripts.
        """
        task = self.opened.task
        run_decoder = task.decoder
        task.decoder = self._decoder(decoder, options)
        try:
            results = list(self.transcripts(self.recordings(audio), batch, piece_seconds))
            if timestamps:
                _check_times(results, task.decoder)
        finally:
            task.decoder = run_decoder
        if any(isinstance(result, DataError) for result in results):
            raise TranscriptionError(results)
        return cast("list[Transcript]", results)

    def features(self, audio: Audio | Iterable[Audio]) -> list[np.ndarray]:
        """Return the encoder's frames (T, W) of each recording, fp32. One frame is ``frame_seconds`` long.

        A recording is encoded whole. Raises ConfigError for a model without an encoder, and DataError for a
        recording that cannot be read.
        """
        encoder = self._encoder()
        features = []
        for recording in self.recordings(audio):
            if isinstance(recording, DataError):
                raise recording
            for _, samples in recording.pieces(recording.seconds):
                batch = self._batch([samples])
                with torch.no_grad(), self.opened.policy.autocast(self.opened.device.name):
                    frames, lengths = encoder.encode(batch)
                frame_count = int(lengths[0])
                recording_frames = frames[0, :frame_count].float().cpu()
                features.append(recording_frames.numpy())
        return features

    @property
    def frame_seconds(self) -> float:
        """Seconds from one frame of ``features`` to the next."""
        return float(100 / self._encoder().frames(100 * self.sample_rate))

    def evaluate(self, sets: Mapping[str, str] | None = None) -> dict[str, Outcome]:
        """Evaluate on the run's evaluation sets, or on ``sets``: manifests or folders by name.

        An outcome has ``metrics``, such as ``wer`` (a fraction), and ``examples``, the decoded utterances.
        """
        opened, config = self.opened, copy.deepcopy(self.opened.config)
        is_optional = part_class("data", config.data).train_is_optional
        _choose_sets(config, sets or {})
        if is_optional and config.data.valid:
            config.data.train = ""  # Evaluation does not use the training set, so it is not opened.
        data = build_data(config, opened.tokenizer, opened.task)
        try:
            if isinstance(data, SpeechData) and data.training_set.hold_out:
                _warn_of_another_held_out_set(self.checkpoint, data)
            return evaluate(
                opened.task,
                data.valid(),
                opened.device,
                policy=opened.policy,
                group=SingleProcess(),
                examples=None,
            )
        finally:
            data.close()

    def _decoder(self, choice: str, options: Mapping[str, Any]) -> Any:
        if not choice and not options:
            return self.opened.task.decoder
        config = copy.deepcopy(self.opened.config)
        if choice:
            set_group(config, "decoder", choice, None)
        for key, value in options.items():
            set_key(config, f"decoder.{key}", value)
        return build(config, "decoder")

    def recordings(self, audio: Audio | Iterable[Audio]) -> Iterator[Recording | DataError]:
        """Yield the recordings of ``audio``. Each is opened when the caller asks for it."""
        if isinstance(audio, (str, Path, Tensor, np.ndarray, tuple)):
            audio = [audio]
        for number, source in enumerate(audio, 1):
            if isinstance(source, str | Path):
                yield from recordings(str(source), self.sample_rate, self._most_seconds)
            else:
                yield self._of_samples(source, f"recording {number}")

    def _of_samples(self, samples: Any, name: str) -> Recording:
        """Return a recording of ``samples`` (S,) or of a tuple of samples and rate. Raises DataError."""
        rate = self.sample_rate
        if isinstance(samples, tuple):
            samples, rate = samples
        waveform = _in_full_scale(np.asarray(samples), name)
        if waveform.ndim != 1 or not len(waveform) or not np.isfinite(waveform).all():
            raise DataError(f"{name}: samples of shape {waveform.shape}. Give finite samples of shape (S,)")
        waveform = change_rate(waveform, int(rate), self.sample_rate)

        def part(start: float, seconds: float) -> Samples:
            begin = round(start * self.sample_rate)
            return waveform[begin : begin + round(seconds * self.sample_rate)]

        return Recording(name, "", len(waveform) / self.sample_rate, part, self.sample_rate)

    def transcripts(
        self,
        recordings: Iterable[Recording | DataError],
        batch: int = 4,
        piece_seconds: float = PIECE_SECONDS,
    ) -> Iterator[Transcript | DataError]:
        """Yield the transcript or the error of each recording, in order and as early as possible."""
        queue: deque[_PendingTranscript | DataError] = deque()
        pieces: list[_Piece] = []
        for recording in recordings:
            if isinstance(recording, DataError):
                queue.append(recording)
                continue
            transcript = _PendingTranscript(recording)
            queue.append(transcript)
            try:
                for start, samples in recording.pieces(piece_seconds):
                    pieces.append(_Piece(transcript, start, samples))
                    transcript.undecoded += 1
                    if len(pieces) == batch:
                        self._decode(pieces)
                        yield from _take_complete(queue)
            except DataError as error:
                transcript.error = error
            transcript.is_read = True
        self._decode(pieces)
        yield from _take_complete(queue)

    def _decode(self, pieces: list[_Piece]) -> None:
        """Add a segment for each piece to its transcript, and empty ``pieces``."""
        if not pieces:
            return
        batch = self._batch([piece.samples for piece in pieces])
        opened = self.opened
        with torch.no_grad(), opened.policy.autocast(opened.device.name):
            hypotheses = opened.task.transcribe(batch)
        opened.device.mark_step()
        for piece, hypothesis in zip(pieces, hypotheses, strict=True):
            end = piece.start + len(piece.samples) / self.sample_rate
            piece.transcript.segments.append(Segment(piece.start, end, hypothesis))
            piece.transcript.undecoded -= 1
        pieces.clear()

    def _batch(self, pieces: Sequence[Samples]) -> Batch:
        """Collate pieces (S,) to a batch on the device."""
        rate, normalise = self.sample_rate, self.opened.task.normalise_audio
        batch = collate([audio_row("piece", piece, rate, normalise) for piece in pieces], rate)
        batch = self.opened.task.prepare(batch, seed_at(*batch.keys.tolist()))
        return self.opened.device.move(batch)

    def _encoder(self) -> Encoder:
        encoder = getattr(self.opened.task, "encoder", None)
        if encoder is None:
            raise ConfigError(f"{type(self.opened.task).__name__} has no encoder, and so no features")
        return cast("Encoder", encoder)


def _in_full_scale(samples: np.ndarray, name: str) -> Samples:
    """Return samples in fp32, and integers scaled to [-1, 1] by the range of their type.

    The middle of an unsigned range becomes 0. Raises DataError for other types, and for integers of 64 bits,
    since the type of sums and lists says nothing about their full scale.
    """
    kind, bits = samples.dtype.kind, 8 * samples.dtype.itemsize
    if kind == "f":
        return samples.astype(np.float32, copy=False)
    if kind not in "iu" or bits == 64:
        types = "floats in [-1, 1], or integers of 8, 16 or 32 bits"
        raise DataError(f"{name}: samples of type {samples.dtype}. Give {types}")
    full_scale = 2.0 ** (bits - 1)
    middle = full_scale if kind == "u" else 0.0
    return ((samples - middle) / full_scale).astype(np.float32)


def load(
    run: str | Path, *overrides: str, checkpoint: str = "best", config_dir: str | None = None
) -> LoadedRun:
    """Load a run: the directory that speechtrain train printed.

    ``overrides`` are KEY=VALUE pairs for the run's config, such as ``"device.threads=1"`` or
    ``"device=cuda"``. ``checkpoint`` is ``best``, ``last`` or a folder's name. ``config_dir`` is a folder of
    the caller's own choices. Raises RunError without a run or a usable checkpoint, and ConfigError for a key
    that the run lacks.
    """
    opened = open_run(Path(run), checkpoint, overrides, config_dir)
    most_seconds = LONGEST_SECONDS
    if any(override.startswith("data.max_decoded_seconds=") for override in overrides):
        most_seconds = float(opened.config.data.max_decoded_seconds)
    return LoadedRun(opened, most_seconds)


def _check_times(results: Iterable[Transcript | DataError], decoder: Any) -> None:
    """Raise ConfigError for a transcript with text and without the times of its words."""
    for result in results:
        if isinstance(result, Transcript) and result.text and not result.words:
            name = type(decoder).__name__
            raise ConfigError(f"timestamps: {name} gives no times of words. Choose another decoder")


def _take_complete(queue: deque[_PendingTranscript | DataError]) -> Iterator[Transcript | DataError]:
    """Remove complete transcripts and errors from the head of ``queue``, and yield them."""
    while queue:
        head = queue[0]
        if isinstance(head, DataError):
            result: Transcript | DataError = head
        elif head.is_read and not head.undecoded:
            result = head.result()
        else:
            return
        queue.popleft()
        yield result


def _choose_sets(config: DictConfig, sets: Mapping[str, str]) -> None:
    """Replace the run's evaluation sets by ``sets``, if any. Raises ConfigError if no set remains."""
    if sets:
        if "valid" not in config.data:
            raise ConfigError(f"--set: {config.data._target_} takes no evaluation set. Remove --set")
        config.data.valid = dict(sets)
    if "valid" in config.data and not (config.data.valid or config.data.get("hold_out")):
        raise ConfigError(f"{config.run_dir} has no evaluation set. Give one with --set NAME=FILE")


def _warn_of_another_held_out_set(checkpoint: Path, data: SpeechData) -> None:
    """Warn if the set ``held_out`` is not the set that the run held out."""
    with contextlib.suppress(RunError):  # The weights are intact. A damaged state only loses the warning.
        training_state = read_state(checkpoint).get("data")
        if not isinstance(training_state, dict):
            return
        if training_state.get("held_out") != data.training_set.held_out_digest:
            _LOG.warning(_HELD_OUT_WARNING)

"""A run for use from Python: ``speechtrain.load("RUN").transcribe(["a.wav"])``."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from speechtrain.checkpoint.checkpointer import read_state
from speechtrain.compute_policy import TorchSettings, unchanged_torch
from speechtrain.counter_rng import seed_at
from speechtrain.data.audio import check_and_resample, check_seconds
from speechtrain.data.formats.lhotse_cuts import Samples
from speechtrain.data.loader import audio_row, collate
from speechtrain.data.module import SpeechData
from speechtrain.data.pieces import Recording, recording_error, recordings
from speechtrain.data.recordings import Unusable
from speechtrain.data.voice_activity import pause_middles, speech_spans
from speechtrain.distributed.group import SingleProcess
from speechtrain.errors import ConfigError, DataError, MachineError, RunError, first_line, require_least
from speechtrain.inference.open_run import OpenedRun, open_run
from speechtrain.inference.samples import scale_to_one
from speechtrain.inference.stream import RecognitionStream
from speechtrain.inference.transcript import Segment, Transcript
from speechtrain.start.compose import process_lock
from speechtrain.training.evaluation import Outcome, evaluate

if TYPE_CHECKING:
    from speechtrain.batch import Batch
    from speechtrain.decoding.base import Decoder
    from speechtrain.encoders.base import Encoder

_Item = TypeVar("_Item")
_LOG = logging.getLogger(__name__)

_HELD_OUT_WARNING = (
    "speechtrain: warning: held_out differs from the set that the run held out, so the run may have trained "
    "on some of it. data.train has changed, or another release wrote the run. Name a set by --set NAME=FILE"
)

LONGEST_PAUSE = 0.6
"""The pauses that stay in a piece, in seconds, unless data.longest_pause is set."""

PIECE_SECONDS = 20.0
"""The default maximum of a piece of a recording. Few utterances of speech corpora are longer."""

LONGEST_SECONDS = 86_400.0
"""The maximum of a recording, unless data.max_decoded_seconds is set. A small file may claim many years."""

_LOADERS: set[int] = set()
"""The id of each process that has loaded a run: this one, and those whose fork it is."""

_ONE_RECORDING = (
    *(str, Path, Tensor, np.ndarray, tuple),
    *(bytes, bytearray, memoryview, io.IOBase, Mapping),  # They have an error of one recording.
)
_AUDIO_ADVICE = (
    "Give the path of a file, or samples: floats in [-1, 1] or integers of 8, 16 or 32 bits, alone or as "
    "(samples, rate in Hz)"
)
_FORK_ADVICE = "Call speechtrain.load in the new processes only, or start them with spawn"

Audio = str | Path | Tensor | np.ndarray | tuple[Any, int]
"""The path of a file, folder or manifest, or samples (S,) at the run's rate, or (samples, rate in Hz)."""


@dataclass
class _PendingTranscript:
    """The segments of a recording so far, until all its pieces are decoded."""

    recording: Recording
    segments: list[Segment] = field(default_factory=list)
    undecoded: int = 0  # the number of pieces that have been read but not decoded
    is_read: bool = False  # whether all pieces have been read
    error: DataError | None = None  # the reason why a piece could not be read

    def result(self) -> Transcript | DataError:
        """Return the transcript, or the error if the recording could not be read."""
        if self.error is not None:
            return self.error
        recording = self.recording
        segments = tuple(self.segments)
        return Transcript(recording.name, recording.audio, recording.seconds, segments, recording.start)


@dataclass(frozen=True)
class _Piece:
    """A part of a recording that is not decoded yet."""

    transcript: _PendingTranscript
    start: float  # in seconds of the recording
    samples: Samples  # (S,)


class TranscriptionError(DataError):
    """Some recordings could not be read.

    ``results`` contains the Transcript or the DataError of each recording, in the order of the input.
    """

    def __init__(self, results: Sequence[Transcript | DataError]) -> None:
        self.results = tuple(results)
        errors = [result for result in results if isinstance(result, DataError)]
        message = str(errors[0])
        if len(results) > 1:
            message += f" ({len(errors)} of {len(results)} recordings failed, .results has the others)"
        super().__init__(message)


class LoadedRun:
    """A run's model with the weights of one checkpoint, ready for use. It neither prints nor writes files.

    ``transcribe``, ``features`` and ``evaluate`` raise a SpeechtrainError whose message begins with the file
    or the key. Recordings longer than ``max_seconds`` are refused.
    """

    def __init__(
        self, opened: OpenedRun, settings: TorchSettings, max_seconds: float = LONGEST_SECONDS
    ) -> None:
        self.opened = opened
        self._settings = settings
        self.checkpoint = opened.checkpoint
        self.sample_rate = opened.task.sample_rate
        self._max_seconds = max_seconds
        self.longest_pause = opened.used.longest_pause or LONGEST_PAUSE
        self._channel = opened.used.channel

    def __repr__(self) -> str:
        opened = self.opened
        return (
            f"<LoadedRun {opened.run.run_dir} {self.checkpoint.name}: {type(opened.task).__name__}, "
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
        ``transcribe(["a.wav"], decoder="beam", width=8)``. The default is the decoder of the run.
        Recordings are cut at pauses into pieces of at most ``piece_seconds``. A piece in which nobody speaks
        has no text. Batches of ``batch`` pieces are decoded together. The texts do not depend on ``batch``.

        A transcript has ``words`` with times if the decoder computes times. With ``timestamps``, a decoder
        without times raises ConfigError.

        Raises TranscriptionError, a DataError, if a recording cannot be read. All other recordings are
        transcribed first, and the error contains their transcripts.
        """
        opened = self.opened
        call_decoder = opened.used.decoder(decoder, options) if decoder or options else opened.task.decoder
        results = list(self.transcripts(self.recordings(audio), batch, piece_seconds, call_decoder))
        transcripts = [result for result in results if isinstance(result, Transcript)]
        for transcript in transcripts:
            if timestamps and transcript.text and not transcript.words:
                name = type(call_decoder).__name__
                raise ConfigError(f"timestamps: {name} gives no times of words. Choose another decoder")
        if len(transcripts) < len(results):
            raise TranscriptionError(results)
        return transcripts

    def stream(
        self, context: Sequence[int] | None = None, decoder: str = "", **options: Any
    ) -> RecognitionStream:
        """Return a stream, which recognises speech whose samples arrive in pieces.

        ``context`` is [left, chunk, right] in frames of the encoder. The default is ``encoder.context``, or
        the largest one for which the run was trained. ``decoder`` and ``options`` are those of
        ``transcribe``.

        Raises ConfigError for a run whose model needs whole recordings.
        """
        opened = self.opened
        call_decoder = opened.used.decoder(decoder, options) if decoder or options else opened.task.decoder
        return RecognitionStream(opened, self._computing, context, call_decoder)

    def features(self, audio: Audio | Iterable[Audio]) -> list[np.ndarray]:
        """Return the encoder's output (T, W) for each recording: T frames of width W, fp32.

        The frames of a recording begin ``frame_seconds`` apart. A recording is encoded as one piece. Raises
        ConfigError for a model without an encoder, and DataError for a recording that cannot be read.
        """
        encoder = self._encoder()
        features = []
        for recording in self.recordings(audio):
            if isinstance(recording, DataError):
                raise recording
            for _, samples in self._reading(recording.pieces(recording.seconds)):  # one piece
                with self._computing():
                    batch = self._batch([samples])
                    with torch.no_grad(), self.opened.policy.autocast(self.opened.device.name):
                        frames, lengths = encoder.encode(batch)
                frame_count = int(lengths[0])
                recording_frames = frames[0, :frame_count].float().cpu()
                features.append(recording_frames.numpy())
        return features

    @property
    def frame_seconds(self) -> float:
        """Seconds from the start of one frame of ``features`` to the start of the next, a mean over 100 s."""
        seconds = 100
        frame_count = self._encoder().frames(seconds * self.sample_rate)
        return float(seconds / frame_count)

    def evaluate(self, sets: Mapping[str, str] | None = None) -> dict[str, Outcome]:
        """Return the outcome on each of the run's evaluation sets, by the name of the set.

        ``sets`` replaces the run's sets: paths of manifests or folders, by name. An outcome has ``metrics``,
        such as ``wer`` (a fraction), and ``examples``, the decoded utterances.
        """
        opened = self.opened
        data = opened.used.evaluation_data(sets or {}, opened.tokenizer, opened.task)
        try:
            if isinstance(data, SpeechData) and data.training_set.hold_out:
                _check_held_out_set(self.checkpoint, data)
            with self._computing():
                outcomes = evaluate(
                    opened.task,
                    data.valid(),
                    opened.device,
                    policy=opened.policy,
                    group=SingleProcess(),
                    examples=None,
                )
            if isinstance(data, SpeechData):
                for name, count in data.trained_counts(data.training_set.former_sides).items():
                    warning = f"the run was trained on {count}, so the error rates are too low"
                    outcomes[name].warnings["trained"] = warning
            return outcomes
        finally:
            data.close()

    @contextlib.contextmanager
    def _computing(self, **changes: Any) -> Iterator[None]:
        """Return a context with the run's settings of torch. Its end restores those of the process.

        ``changes`` are other values of TorchSettings. Raises MachineError on an accelerator after a fork.
        """
        if _is_forked():
            changes["threads"] = 1  # A forked process lacks the other threads, and torch would wait for them.
            device = self.opened.device
            if not device.on_host:
                raise MachineError(f"device={device.name} cannot be used after a fork. {_FORK_ADVICE}")
        with process_lock(), unchanged_torch():
            self._settings._replace(**changes).apply()
            yield

    def _reading(self, items: Iterator[_Item]) -> Iterator[_Item]:
        """Yield ``items``, which are computed with exact matmuls, because audio is resampled by a matmul."""
        while True:
            with self._computing(fp32_matmul="highest"):
                item = next(items, None)
            if item is None:
                return
            yield item

    def recordings(
        self, audio: Audio | Iterable[Audio], channel: int | None = None
    ) -> Iterator[Recording | DataError]:
        """Yield the recordings of ``audio``, or a DataError for a file that cannot be opened.

        ``channel`` of files with several is read, counted from 0. With None, it is the run's data.channel, or
        the mean of all channels. Each file is opened when the iterator reaches it.
        """
        channel = self._channel if channel is None else channel
        sources: Iterable[Any] = [audio]
        if isinstance(audio, Iterable) and not isinstance(audio, _ONE_RECORDING):
            sources = audio
        for number, source in enumerate(sources, 1):
            if isinstance(source, str | Path):
                yield from recordings(str(source), self.sample_rate, self._max_seconds, channel)
                continue
            name = f"recording {number}"
            try:
                yield self._recording_of_samples(source, name)
            except Unusable as problem:
                yield recording_error(problem, name, audio="")

    def _recording_of_samples(self, source: Any, name: str) -> Recording:
        """Return a recording of samples (S,) or of (samples, rate in Hz). Raises Unusable."""
        try:
            samples, rate = source if isinstance(source, tuple) else (source, self.sample_rate)
            waveform, rate = scale_to_one(samples), int(rate)
        except Exception as error:  # The objects of a program may raise any error.
            raise Unusable("unreadable", f"{name}: {first_line(error)}. {_AUDIO_ADVICE}") from None
        if waveform.ndim != 1 or not len(waveform):
            raise Unusable("unreadable", f"{name}: samples of shape {waveform.shape}. Give the shape (S,)")
        check_seconds(len(waveform) / max(rate, 1), self._max_seconds, name)
        with self._computing(fp32_matmul="highest"):
            waveform = check_and_resample(waveform, rate, self.sample_rate, name)

        def read(start_seconds: float, seconds: float) -> Samples:
            start = round(start_seconds * self.sample_rate)
            end = start + round(seconds * self.sample_rate)
            return waveform[start:end]

        return Recording(
            name,
            audio="",  # The samples are not from a file.
            seconds=len(waveform) / self.sample_rate,
            read=read,
            sample_rate=self.sample_rate,
        )

    def transcripts(
        self,
        recordings: Iterable[Recording | DataError],
        batch: int = 4,
        piece_seconds: float = PIECE_SECONDS,
        decoder: Decoder | None = None,
    ) -> Iterator[Transcript | DataError]:
        """Yield the transcript or the error of each recording, in order and as early as possible.

        ``decoder`` writes the texts. None is the decoder of the run.
        A batch of ``batch`` pieces may contain pieces of several recordings.
        """
        try:
            require_least(1, batch=batch, piece_seconds=piece_seconds)
        except (TypeError, ValueError) as error:
            raise ConfigError(str(error)) from None
        decoder = decoder or self.opened.task.decoder
        queue: deque[_PendingTranscript | DataError] = deque()  # the recordings that are not yielded yet
        pieces: list[_Piece] = []  # the next batch
        for recording in recordings:
            if isinstance(recording, DataError):
                queue.append(recording)
                continue
            transcript = _PendingTranscript(recording)
            queue.append(transcript)
            try:
                for piece in self._reading(self._spoken_pieces(transcript, piece_seconds)):
                    pieces.append(piece)
                    transcript.undecoded += 1
                    if len(pieces) >= batch:
                        self._decode(pieces, decoder)
                        yield from _take_complete(queue)
            except DataError as error:
                transcript.error = error
            transcript.is_read = True
        self._decode(pieces, decoder)
        yield from _take_complete(queue)

    def _spoken_pieces(self, transcript: _PendingTranscript, piece_seconds: float) -> Iterator[_Piece]:
        """Yield the stretches of a recording in which somebody speaks, at most ``piece_seconds`` long."""
        for piece_start, samples in transcript.recording.pieces(piece_seconds):
            for start, end in speech_spans(samples, self.sample_rate, self.longest_pause):
                yield _Piece(transcript, piece_start + start / self.sample_rate, samples[start:end])

    def _decode(self, pieces: list[_Piece], decoder: Decoder) -> None:
        """Decode ``pieces`` as one batch, add a segment for each to its transcript, and clear the list."""
        if not pieces:
            return
        opened = self.opened
        with self._computing():
            batch = self._batch([piece.samples for piece in pieces])
            with torch.no_grad(), opened.policy.autocast(opened.device.name):
                hypotheses = opened.task.transcribe(batch, decoder)
            opened.device.mark_step()
        for piece, hypothesis in zip(pieces, hypotheses, strict=True):
            end = piece.start + len(piece.samples) / self.sample_rate
            middles = pause_middles(piece.samples, self.sample_rate)
            pauses = tuple(piece.start + middle for middle in middles)
            piece.transcript.segments.append(Segment(piece.start, end, hypothesis, pauses))
            piece.transcript.undecoded -= 1
        pieces.clear()

    def _batch(self, pieces: Sequence[Samples]) -> Batch:
        """Collate pieces (S,) to a batch on the device."""
        task = self.opened.task
        rows = [audio_row("piece", piece, self.sample_rate, task.normalise_audio) for piece in pieces]
        batch = collate(rows, self.sample_rate)
        seed = seed_at(*batch.keys.tolist())  # It depends on the samples only, as in every evaluation.
        batch = task.prepare(batch, seed)
        return self.opened.device.move(batch)

    def _encoder(self) -> Encoder:
        """Return the task's encoder. Raises ConfigError for a task without one."""
        encoder = getattr(self.opened.task, "encoder", None)
        if encoder is None:
            raise ConfigError(f"{type(self.opened.task).__name__} has no encoder, and so no features")
        return cast("Encoder", encoder)


def _is_forked() -> bool:
    """Return whether this process is a fork of a process that has loaded a run."""
    return bool(_LOADERS - {os.getpid()})


def load(
    run: str | Path, *overrides: str, checkpoint: str = "best", config_dir: str | None = None
) -> LoadedRun:
    """Load the run in the directory ``run``, which speechtrain train printed.

    - ``overrides`` are KEY=VALUE pairs for the run's config, such as ``"device.threads=1"`` or
      ``"device=cuda"``.
    - ``checkpoint`` is ``best``, ``last`` or the name of a checkpoint's folder.
    - ``config_dir`` is a folder with further choices of config groups, as for ``--config-dir``.

    Raises RunError without a run or a usable checkpoint, ConfigError for a key that the run lacks, and
    MachineError in a fork of a process that has loaded a run.
    """
    if _is_forked():
        raise MachineError(f"{run}: a process that has loaded a run was forked. {_FORK_ADVICE}")
    _LOADERS.add(os.getpid())
    with process_lock(), unchanged_torch():
        opened = open_run(Path(run), checkpoint, overrides, config_dir)
        settings = TorchSettings.current()
    return LoadedRun(opened, settings, opened.used.max_decoded_seconds or LONGEST_SECONDS)


def _take_complete(queue: deque[_PendingTranscript | DataError]) -> Iterator[Transcript | DataError]:
    """Remove complete transcripts and errors from the head of ``queue``, and yield them.

    Stop at the first transcript that is not complete, because the order of the recordings must be kept.
    """
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


def _check_held_out_set(checkpoint: Path, data: SpeechData) -> None:
    """Warn if the set ``held_out`` of ``data`` differs from the set that the run held out in training."""
    # A damaged training state raises RunError. The weights are intact, so only the warning is left out.
    with contextlib.suppress(RunError):
        training_state = read_state(checkpoint).get("data")
        if not isinstance(training_state, dict):
            return
        if training_state.get("held_out") != data.training_set.held_out_digest:
            _LOG.warning(_HELD_OUT_WARNING)

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
from speechtrain.runs.stored_config import choose, set_key
from speechtrain.training.evaluation import Outcome, evaluate

if TYPE_CHECKING:
    from speechtrain.batch import Batch
    from speechtrain.encoders.base import Encoder

_log = logging.getLogger(__name__)

_OTHER_SIDES = (
    "speechtrain: warning: held_out is not what the run held out, so it may have trained on some of it: "
    "data.train has changed, or the run is of another release; --set NAME=FILE names a set"
)

PIECE_SECONDS = 20.0
"""Longest piece of a recording: few utterances of speech corpora are longer."""

LONGEST_SECONDS = 86_400.0
"""Longest recording, unless data.max_decoded_seconds is set: a small file may claim years."""

Audio = str | Path | Tensor | np.ndarray | tuple[Any, int]
"""A file, a folder or a manifest; or samples (S,) at the run's rate, or with their rate in Hz."""


@dataclass
class _Pending:
    """A recording some of whose pieces are not decoded yet."""

    recording: Recording
    segments: list[Segment] = field(default_factory=list)
    waiting: int = 1  # pieces, and one while there are more to read
    error: DataError | None = None


class TranscriptionError(DataError):
    """Some recordings could not be read.

    ``results`` has a Transcript for each recording in the order given, or its DataError.
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
        **options: Any,
    ) -> list[Transcript]:
        """Return the transcript of each recording.

        ``decoder`` is a choice of the group of this name, and ``options`` are its keys, as in
        ``transcribe(["a.wav"], decoder="beam", width=8)``. By default the run's own decoder searches.
        Recordings are cut at pauses into pieces of at most ``piece_seconds``, of which ``batch`` are
        decoded together. The texts do not depend on it. Raises TranscriptionError, a DataError, if a
        recording cannot be read. It comes after the others are transcribed, and has their transcripts.
        """
        task = self.opened.task
        before, task.decoder = task.decoder, self._decoder(decoder, options)
        try:
            results = list(self.transcripts(self.recordings(audio), batch, piece_seconds))
        finally:
            task.decoder = before
        if any(isinstance(result, DataError) for result in results):
            raise TranscriptionError(results)
        return cast("list[Transcript]", results)

    def features(self, audio: Audio | Iterable[Audio]) -> list[np.ndarray]:
        """Return the encoder's frames (T, W) of each recording, fp32. One frame is ``frame_seconds`` long.

        A recording is encoded whole. Raises ConfigError for a model without an encoder.
        """
        encoder = self._encoder()
        found = []
        for recording in self.recordings(audio):
            if isinstance(recording, DataError):
                raise recording
            for _, samples in recording.pieces(recording.seconds):
                batch = self._batch([samples])
                with torch.no_grad(), self.opened.policy.autocast(self.opened.device.name):
                    frames, lengths = encoder.encode(batch)
                found.append(frames[0, : int(lengths[0])].float().cpu().numpy())
        return found

    @property
    def frame_seconds(self) -> float:
        """Seconds from one frame of ``features`` to the next."""
        return float(100 / self._encoder().frames(100 * self.sample_rate))

    def evaluate(self, sets: Mapping[str, str] | None = None) -> dict[str, Outcome]:
        """Score the run's evaluation sets, or ``sets`` of manifests and folders by name.

        An outcome has ``metrics``, such as ``wer`` (a fraction), and ``examples``, all that was decoded.
        """
        opened, config = self.opened, copy.deepcopy(self.opened.config)
        is_optional = part_class("data", config.data).train_is_optional
        _choose_sets(config, sets or {})
        if is_optional and config.data.valid:
            config.data.train = ""  # A corpus there would be opened, and is not used.
        data = build_data(config, opened.tokenizer, opened.task)
        try:
            if isinstance(data, SpeechData) and data.training_set.hold_out:
                _warn_of_other_sides(self.checkpoint, data)
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
            choose(config, "decoder", choice, None)
        for key, value in options.items():
            set_key(config, f"decoder.{key}", value)
        return build(config, "decoder")

    def recordings(self, audio: Audio | Iterable[Audio]) -> Iterator[Recording | DataError]:
        """The recordings that are named or given, each opened when it is asked for."""
        is_one = isinstance(audio, str | Path | Tensor | np.ndarray | tuple)
        for place, given in enumerate([audio] if is_one else audio):  # type: ignore[arg-type]
            if isinstance(given, str | Path):
                yield from recordings(str(given), self.sample_rate, self._most_seconds)
            else:
                yield self._of_samples(given, f"recording {place + 1}")

    def _of_samples(self, given: Any, name: str) -> Recording:
        samples, rate = given if isinstance(given, tuple) else (given, self.sample_rate)
        samples = _in_full_scale(np.asarray(samples), name)
        if samples.ndim != 1 or not len(samples) or not np.isfinite(samples).all():
            raise DataError(f"{name}: samples of shape {samples.shape}; give finite ones of shape (S,)")
        samples = change_rate(samples, int(rate), self.sample_rate)

        def part(start: float, seconds: float) -> Samples:
            first = round(start * self.sample_rate)
            return samples[first : first + round(seconds * self.sample_rate)]

        return Recording(name, "", len(samples) / self.sample_rate, part, self.sample_rate)

    def transcripts(
        self,
        found: Iterable[Recording | DataError],
        batch: int = 4,
        piece_seconds: float = PIECE_SECONDS,
    ) -> Iterator[Transcript | DataError]:
        """Yield the transcript of each recording in order, or why there is none, as soon as it is known."""
        queue, rows = deque[_Pending | DataError](), list[tuple[_Pending, float, Samples]]()
        for recording in found:
            if isinstance(recording, DataError):
                queue.append(recording)
                continue
            queue.append(one := _Pending(recording))
            try:
                for start, samples in recording.pieces(piece_seconds):
                    rows.append((one, start, samples))
                    one.waiting += 1
                    if len(rows) == batch:
                        self._decode(rows)
                        yield from _ready(queue)
            except DataError as error:
                one.error = error
            one.waiting -= 1
        self._decode(rows)
        yield from _ready(queue)

    def _decode(self, rows: list[tuple[_Pending, float, Samples]]) -> None:
        """Add a segment for each row to its recording, and empty ``rows``."""
        if not rows:
            return
        batch = self._batch([samples for _, _, samples in rows])
        opened = self.opened
        with torch.no_grad(), opened.policy.autocast(opened.device.name):
            hypotheses = opened.task.transcribe(batch)
        opened.device.mark_step()
        for (one, start, samples), hypothesis in zip(rows, hypotheses, strict=True):
            one.segments.append(Segment(start, start + len(samples) / self.sample_rate, hypothesis))
            one.waiting -= 1
        rows.clear()

    def _batch(self, pieces: Sequence[Samples]) -> Batch:
        """Pieces (S,) as a batch on the device."""
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
    """Return samples in fp32, of which integers are divided by the range of their type.

    0 is the middle of an unsigned range. Raises DataError for integers of 64 bits, since sums and lists have
    this type whatever their full scale is, and for other types.
    """
    kind, bits = samples.dtype.kind, 8 * samples.dtype.itemsize
    if kind == "f":
        return samples.astype(np.float32, copy=False)
    if kind not in "iu" or bits == 64:
        types = "floats in [-1, 1], or integers of 8, 16 or 32 bits"
        raise DataError(f"{name}: samples of type {samples.dtype}: give {types}")
    full_scale = 2.0 ** (bits - 1)
    middle = full_scale if kind == "u" else 0.0
    return ((samples - middle) / full_scale).astype(np.float32)


def load(
    run: str | Path, *overrides: str, checkpoint: str = "best", config_dir: str | None = None
) -> LoadedRun:
    """Load a run: the directory that speechtrain train printed.

    ``overrides`` are KEY=VALUE on the run's config, such as ``"device.threads=1"`` or ``"device=cuda"``.
    ``checkpoint`` is ``best``, ``last`` or a folder's name, and ``config_dir`` a folder of one's own
    choices. Raises RunError without a run or a usable checkpoint, ConfigError for a key that the
    run lacks.
    """
    opened = open_run(Path(run), checkpoint, overrides, config_dir)
    is_set = any(override.startswith("data.max_decoded_seconds=") for override in overrides)
    return LoadedRun(opened, float(opened.config.data.max_decoded_seconds) if is_set else LONGEST_SECONDS)


def _ready(queue: deque[_Pending | DataError]) -> Iterator[Transcript | DataError]:
    """Take what is complete from the head of ``queue``."""
    while queue and (isinstance(one := queue[0], DataError) or not one.waiting):
        queue.popleft()
        if isinstance(one, DataError):
            yield one
        elif one.error:
            yield one.error
        else:
            found = one.recording
            yield Transcript(found.name, found.audio, found.seconds, tuple(one.segments))


def _choose_sets(config: DictConfig, named: Mapping[str, str]) -> None:
    """Replace the run's evaluation sets by ``named``, if any."""
    if named:
        if "valid" not in config.data:
            raise ConfigError(f"--set: {config.data._target_} takes no evaluation set; remove --set")
        config.data.valid = dict(named)
    if "valid" in config.data and not (config.data.valid or config.data.get("hold_out")):
        raise ConfigError(f"{config.run_dir} has no evaluation set; give one with --set NAME=FILE")


def _warn_of_other_sides(checkpoint: Path, data: SpeechData) -> None:
    """Warn where the set ``held_out`` is not the one that the run held out."""
    with contextlib.suppress(RunError):  # the weights are whole, and a damaged state tells nothing
        trained = read_state(checkpoint).get("data")
        if isinstance(trained, dict) and trained.get("held_out") != data.training_set.held_out_digest:
            _log.warning(_OTHER_SIDES)

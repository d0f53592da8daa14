"""SpeechData, the data module of speech tasks. It makes its parts from the keys of the config."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from speechtrain.batch import Footprint
from speechtrain.data.acoustics import Acoustics
from speechtrain.data.audio import DECODED_SECONDS
from speechtrain.data.evaluation_sets import EvaluationSet, named_sets
from speechtrain.data.filters import Filters
from speechtrain.data.loader import EvaluationLoader, TrainingLoader, check_audio
from speechtrain.data.preflight import CheckedBatches
from speechtrain.data.sampler import BatchLimits, BatchSize
from speechtrain.data.skips import SkipLog
from speechtrain.data.source import Source
from speechtrain.data.training_set import TrainingSet, hours
from speechtrain.data.workers import open_workers
from speechtrain.files import FilePath
from speechtrain.text.vocabulary import Tokenizer

_Spec = FilePath | dict[str, Any] | list[FilePath | dict[str, Any]]
"""A source as the user writes it: a path, a mapping with a path, a mapping of named sets, or a list."""


class SpeechData(CheckedBatches):
    """Endless training batches and named evaluation sets, from manifests, folders or corpora.

    - ``train`` is the source of the training recordings: a ``Source``, or what ``open_source`` reads. If it
      is a mapping of named sets of which one has a weight, the recordings of an epoch are divided among the
      sets by weight (1 by default). It is opened at first use, so evaluation needs no training data.
    - ``valid`` is a mapping of named evaluation sets. Each set is a source, as ``train`` is. A single source
      without a name is the set ``valid``.
    - ``tokenizer`` converts transcripts to labels.
    - ``seed`` determines the order, the speeds and the crops of training.
    - ``batch`` limits the batches of training, and ``valid_batch`` the batches of evaluation.
    - ``speed`` is the lowest and highest speed factor of training recordings. Null means no change of speed.
    - ``acoustics`` adds recorded rooms and noise to training recordings. Null means none.
    - ``sample_rate`` is the rate in Hz to which all recordings are converted.
    - ``channel`` is the channel that is read of recordings with several, counted from 0. Null is their mean.
      A manifest that names channels has the priority.
    - ``min_seconds`` and ``max_seconds`` are the shortest and longest training recording, before the speed
      change. Evaluation sets are never filtered.
    - ``max_labels_per_second``: a training recording with more labels is bad (people speak 15 to 25
      characters per second, and RNN-T itself has no limit).
    - ``max_decoded_seconds``: a longer recording of an evaluation set is bad.
    - ``allow_empty`` trains also on recordings without a transcript, and ``skip_empty`` filters them. If both
      are false, such a recording is bad.
    - ``hold_out``: if ``valid`` is empty, this share of the training recordings is the set ``held_out``.
    - ``shapes`` is the largest number of fixed tensor shapes. 0 means that shapes vary.
    - ``crop_seconds`` is the longest training recording after a crop at a random position. Null means no
      crop. If shapes vary, a crop also shortens each recording to the shortest of its batch. Evaluation
      recordings are not cropped.
    - ``longest_pause`` is the number of seconds that longer pauses are shortened to, in training and in
      evaluation (``data.voice_activity``). Null keeps all recordings as they are.
    - ``workers`` is the number of processes that load batches ahead. -1 is one fewer than the cores of this
      rank, but at most 8. With 0, this process loads.
    - ``timeout_seconds``: a worker that has not answered for this time is an error.
    - ``decoded_gib``: a rank keeps the decoded training recordings in memory if they need at most these GiB.
      A rank of ``speechtrain train`` replaces ``auto`` by a share of the free memory. In a program, ``auto``
      is 0.
    - ``cache`` is the folder of the indices (see ``open_index``).
    - ``max_bad`` and ``max_bad_share``: a bad recording becomes a padding row. The run ends if more
      recordings of a set are bad than ``skips.most_bad`` allows.
    - ``run_dir`` is the folder of the run. It gets the lists of bad, of filtered and of held-out recordings.
      Null writes no list.
    - ``footprint`` is the memory that the model predicts for a batch.
    - ``normalise``, set by the task, gives each recording zero mean and unit variance.
    - ``initial_run`` is the run whose weights this one starts with. What it held out stays held out.
    - ``untranscribed`` are recordings for which ``start.untranscribed`` writes texts before a run starts. It
      is not read here.
    - ``stop_requested``: if it returns true, a long wait for a batch raises Preempted.

    Raises ValueError for invalid arguments, DataError for unusable data.
    """

    train_is_optional = True  # ``speechtrain evaluate`` reads this (see ``DataModule``).

    def __init__(
        self,
        train: Source | _Spec,
        valid: FilePath | list[FilePath | dict[str, Any]] | dict[str, Source | _Spec],
        tokenizer: Tokenizer,
        seed: int = 1,
        batch: BatchLimits | None = None,
        valid_batch: BatchLimits | None = None,
        speed: list[float] | None = None,
        acoustics: Acoustics | None = None,
        sample_rate: int = 16_000,
        channel: int | None = None,
        min_seconds: float = 0.1,
        max_seconds: float = 20.0,
        max_labels_per_second: float = 50.0,
        max_decoded_seconds: float = DECODED_SECONDS,
        allow_empty: bool = False,
        skip_empty: bool = False,
        hold_out: float = 0.0,
        shapes: int = 0,
        crop_seconds: float | None = None,
        longest_pause: float | None = None,
        workers: int = -1,
        timeout_seconds: float = 600.0,
        decoded_gib: float | str = "auto",
        cache: FilePath | None = None,
        max_bad: int | None = None,
        max_bad_share: float | None = None,
        run_dir: str | None = None,
        footprint: Footprint | None = None,
        normalise: bool = False,
        initial_run: str = "",
        untranscribed: FilePath | list[FilePath] | None = None,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        check_audio(sample_rate, channel, crop_seconds, tokenizer)
        footprint = footprint or Footprint(0.0)
        # Both kinds of loader lack the index until their set is opened, at first use.
        loader_arguments: dict[str, Any] = {
            "tokenizer": tokenizer,
            "max_labels_per_second": max_labels_per_second,
            "sample_rate": sample_rate,
            "normalise": normalise,
            "longest_pause": longest_pause,
            "channel": channel,
        }
        new_training_loader = partial(
            TrainingLoader,
            allow_empty=allow_empty,
            crop_seconds=crop_seconds,
            seed=seed,
            acoustics=acoustics or Acoustics(),
            **loader_arguments,
        )
        new_evaluation_loader = partial(
            EvaluationLoader,
            max_decoded_seconds=max_decoded_seconds,
            **loader_arguments,
        )
        cache_folder = cache or ""
        hold_out_share = 0.0 if valid else hold_out
        training_set = TrainingSet(
            spec=train,
            cache=cache_folder,
            filters=Filters(min_seconds, max_seconds, skip_empty),
            hold_out=hold_out_share,
            needs_text=tokenizer.reads_text and not allow_empty,
            run_dir=run_dir or "",
            initial_run=initial_run,
        )
        recording_sets = named_sets(valid, cache_folder) or training_set.held_out_sets()
        evaluation_size = BatchSize(valid_batch or BatchLimits(count=16), footprint, shapes)
        training_size = BatchSize(batch or BatchLimits(), footprint, shapes)
        data_workers = open_workers(workers, timeout_seconds, stop_requested)
        skips = SkipLog(run_dir or "", max_bad, max_bad_share)
        evaluation_sets = {
            name: EvaluationSet(
                name=name,
                recordings=recordings,
                new_loader=new_evaluation_loader,
                size=evaluation_size,
                workers=data_workers,
                skips=skips,
            )
            for name, recordings in recording_sets.items()
        }
        super().__init__(
            training_set=training_set,
            evaluation_sets=evaluation_sets,
            workers=data_workers,
            skips=skips,
            new_loader=new_training_loader,
            size=training_size,
            speed=speed or (1.0, 1.0),
            decoded_gib=decoded_gib,
        )
        self.sample_rate = sample_rate

    def recordings(self, normalise_text: Callable[[str], str]) -> Iterator[tuple[float, str]]:
        index = self.training_set.index
        for row in self.training_set.usable.tolist():
            yield float(index.seconds[row]), index.text(row, normalise_text)

    def content(self) -> dict[str, str | float]:
        return {**self.training_set.content(), **self.loader.acoustics.content()}

    def counts(self) -> dict[str, int]:
        samples = {"train_samples": len(self.training_set.rows)}
        first_set = next(iter(self.evaluation_sets.values()), None)
        if first_set is not None:
            samples["eval_samples"] = len(first_set.recordings.rows)
        return samples

    def report(self) -> dict[str, Any]:
        """Return the entries of the report by their names.

        The entries are the number of unused recordings for each reason, the padded share (only with fixed
        shapes), the cropped share (only with crops), whether decoded audio is kept, the held-out recordings,
        and a description of each named set.
        """
        training_set, sampler = self.training_set, self.sampler
        self.skips.refresh()
        filtered = training_set.filtered
        entries: dict[str, Any] = {reason: len(rows) for reason, rows in filtered.items() if len(rows)}
        entries |= self.skips.counts
        is_cropped = math.isfinite(sampler.lengths.crop_seconds)
        if sampler.shapes or is_cropped:
            padded_share, cropped_share = sampler.waste(epoch=0)
            if sampler.shapes:
                entries["padding_share"] = round(padded_share, 4)
            if is_cropped:
                entries["cropped_share"] = round(cropped_share, 4)
        if self.loader.keeps_decoded:
            entries["decoded audio"] = "kept in memory"
        if training_set.hold_out:
            entries["held out"] = training_set.describe_held_out()
        weighted_sets = sampler.random_cuts.sets  # in the order of the sets, or empty if none has a weight
        for set_number, (settings, positions) in enumerate(training_set.sets):
            if not settings.name:
                continue
            rows = training_set.rows[positions]
            seconds = training_set.index.seconds[rows]
            description = [f"{len(rows)} recordings", f"{hours(seconds):.2f} h"]
            if weighted_sets:
                share_of_epoch = weighted_sets[set_number].count / len(sampler.random_cuts)
                description.append(f"{share_of_epoch:.1%} of an epoch")
            if settings.normaliser:
                description.append(settings.normaliser)
            if settings.language:
                description.append(settings.language)
            entries[f"set {settings.name}"] = ", ".join(description)
        return entries

    def close(self) -> None:
        self.skips.warn()
        self.workers.close()

"""SpeechData, the data module of speech tasks. It makes its parts from the keys of the config."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
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

_Set = FilePath | dict[str, Any] | list[FilePath | dict[str, Any]]


class SpeechData(CheckedBatches):
    """Endless training batches and named evaluation sets, from manifests, folders or corpora.

    ``train`` and each set of ``valid`` are one of the sources that ``open_source`` reads: a ``Source``, a
    path, a mapping of a path, columns and facts, a list of these, or a mapping of named sets. If a set of
    ``train`` has a weight, the recordings of an epoch are divided among the sets by weight (1 by default). A
    ``valid`` without names is the set ``valid``. Sets are opened at first use, so evaluation needs no
    training data.

    - ``seed`` determines the order, the speeds and the crops of training.
    - ``batch`` limits the batches of training, and ``valid_batch`` the batches of evaluation.
    - ``speed`` is the lowest and highest speed factor of training recordings. Null means no change of speed.
    - ``acoustics`` adds recorded rooms and noise to training recordings. Null means none.
    - ``longest_pause`` is the number of seconds that longer pauses are shortened to, in training and in
      evaluation (``data.voice_activity``). Null keeps all recordings as they are.
    - ``channel`` is the channel that is read of recordings with several, counted from 0. Null is their mean.
      A manifest that names channels has the priority.
    - ``min_seconds`` and ``max_seconds`` are the shortest and longest training recording, before the speed
      change. ``skip_empty`` filters training recordings without a transcript, and ``allow_empty`` trains on
      them. Evaluation sets are never filtered.
    - ``max_labels_per_second``: a training recording with more labels is bad (people speak 15 to 25
      characters per second, and RNN-T itself has no limit).
    - ``max_decoded_seconds``: a longer recording of an evaluation set is bad.
    - ``hold_out``: without ``valid``, this share of the training recordings is the set ``held_out``.
    - ``shapes`` is the largest number of fixed tensor shapes. 0 means that shapes vary.
    - ``crop_seconds`` crops training recordings at random, to the shortest of their batch or, with
      ``shapes``, to ``crop_seconds``. Null means no crop. Evaluation is not cropped.
    - ``workers`` is the number of processes that load batches ahead. -1 is one fewer than the cores of this
      rank, but at most 8. With 0, this process loads.
    - ``timeout_seconds``: a worker that has not answered for this time is an error.
    - ``decoded_gib``: a rank keeps the decoded training recordings in memory if they need at most these GiB.
      The rank replaces ``auto`` by a share of the free memory. Otherwise ``auto`` counts as 0.
    - ``cache`` is the folder of the indices (see ``open_index``).
    - ``max_bad`` and ``max_bad_share``: a bad recording becomes a padding row, and one of training is listed
      in ``run_dir``. The run ends if more recordings of a set are bad than ``skips.most_bad`` allows.
    - ``footprint`` is the memory that the model predicts for a batch.
    - ``initial_run`` is the run whose weights this one starts with. What it held out stays held out.
    - ``normalise``, set by the task, gives each recording zero mean and unit variance.
    - ``stop_requested``: if it returns true, a long wait for a batch raises Preempted.

    Raises ValueError for invalid arguments, DataError for unusable data.
    """

    train_is_optional = True

    def __init__(
        self,
        train: Source | _Set,
        valid: FilePath | list[FilePath | dict[str, Any]] | dict[str, Source | _Set],
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
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        check_audio(sample_rate, channel, crop_seconds, tokenizer)
        footprint = footprint or Footprint(0.0)
        # The functions that make a loader get the index later, because sets are opened at first use.
        shared: dict[str, Any] = {
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
            **shared,
        )
        new_evaluation_loader = partial(EvaluationLoader, max_decoded_seconds=max_decoded_seconds, **shared)
        training_set = TrainingSet(
            train,
            cache or "",
            Filters(min_seconds, max_seconds, skip_empty),
            0.0 if valid else hold_out,
            needs_text=tokenizer.reads_text and not allow_empty,
            run_dir=run_dir or "",
            initial_run=initial_run,
        )
        recording_sets = named_sets(valid, cache or "") or training_set.held_out_sets()
        valid_size = BatchSize(valid_batch or BatchLimits(count=16), footprint, shapes)
        data_workers = open_workers(workers, timeout_seconds, stop_requested)
        skips = SkipLog(run_dir or "", max_bad, max_bad_share)
        evaluation_sets = {
            name: EvaluationSet(name, recordings, new_evaluation_loader, valid_size, data_workers, skips)
            for name, recordings in recording_sets.items()
        }
        super().__init__(
            training_set,
            evaluation_sets,
            data_workers,
            skips,
            new_training_loader,
            BatchSize(batch or BatchLimits(), footprint, shapes),
            speed or (1.0, 1.0),
            decoded_gib,
        )
        self.sample_rate = sample_rate

    def recordings(self, normalise: Callable[[str], str]) -> Iterator[tuple[float, str]]:
        index = self.training_set.index
        for row in self.training_set.usable.tolist():
            yield float(index.seconds[row]), index.text(row, normalise)

    def content(self) -> dict[str, str | float]:
        return {**self.training_set.content(), **self.loader.acoustics.content()}

    def counts(self) -> dict[str, int]:
        samples = {"train_samples": len(self.training_set.rows)}
        for evaluation_set in islice(self.evaluation_sets.values(), 1):
            samples["eval_samples"] = len(evaluation_set.recordings.rows)
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
        for number, (facts, positions) in enumerate(training_set.sets):
            if facts.name:
                seconds = training_set.index.seconds[training_set.rows[positions]]
                description = [f"{len(seconds)} recordings", f"{hours(seconds):.2f} h"]
                if sampler.random_cuts.sets:
                    share = sampler.random_cuts.sets[number].count / len(sampler.random_cuts)
                    description.append(f"{share:.1%} of an epoch")
                description += filter(None, (facts.normaliser, facts.language))
                entries[f"set {facts.name}"] = ", ".join(description)
        return entries

    def close(self) -> None:
        self.skips.warn()
        self.workers.close()

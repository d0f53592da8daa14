"""SpeechData, the data module of speech tasks: from manifests to batches."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from speechtrain.batch import Batch, Footprint
from speechtrain.compute_policy import usable_cpus
from speechtrain.counter_rng import RunStream, uniform_at
from speechtrain.data.audio import DECODED_SECONDS, files_of
from speechtrain.data.base import DataModule
from speechtrain.data.batches import REASONS, BatchLoader, collate
from speechtrain.data.equal_content import equal_files
from speechtrain.data.hold_out import GROUPS, held_out
from speechtrain.data.index import Index, crowded, label_count, open_index
from speechtrain.data.manifests import digest
from speechtrain.data.recordings import header
from speechtrain.data.sampler import (
    BatchLimits,
    MicroBatch,
    Plan,
    Sampler,
    Shape,
    evaluation_plan,
    speed_grid,
)
from speechtrain.data.skips import SkipLog
from speechtrain.data.source import Source
from speechtrain.data.sources import open_source, problem_of
from speechtrain.data.stage import AHEAD, Stager
from speechtrain.data.tars import file_of
from speechtrain.data.workers import InProcess, Processes, Workers
from speechtrain.errors import DataError
from speechtrain.files import FilePath, atomic
from speechtrain.launcher import is_number
from speechtrain.text.vocabulary import Tokenizer

_LOG = logging.getLogger(__name__)
_SAMPLED_RECORDINGS = 1_000  # most recordings of a set that are checked for existence before training
_ALL_TRANSCRIPTS = 100_000  # most transcripts that are all checked (2 s); of more, only the following number
_SAMPLED_HEADERS = 20  # a file on a slow disk takes 10 ms to open
_CROWDED_SHARE = 0.01  # of transcripts with more labels than frames, which a run has without a warning
_SAMPLED_TRANSCRIPTS = 10_000
_MOST_COMPARED = 100_000  # recordings among which copies are looked for: 30 µs each for the manifest's line
_WHERE_TRANSCRIPTS_ARE = (
    "a folder has it in a.txt beside a.wav, in *.trans.txt or in metadata.csv, a manifest in the recording's "
    "text, a table in a column ({path: FILE, text: COLUMN} names it)"
)
_FILTERS = ("", "too_long", "too_short", "untranscribed")  # reasons why a training recording is not used
_, _TOO_LONG, _TOO_SHORT, _UNTRANSCRIBED = range(len(_FILTERS))
_HELD_OUT = "held_out"  # the evaluation set of what is held out
_SMALL_SECONDS = 600  # a smaller part of an evaluation set is loaded here faster than workers start


class SpeechData(DataModule):
    """Endless training batches and named evaluation sets, from manifests, folders or corpora.

    ``train`` and each of ``valid`` are a ``Source``, a path, a mapping of a path, columns and facts, a list
    of them, or a mapping of named sets (see ``open_source``). If one of these has a weight, each set has its
    share of the recordings of an epoch, by weight (1 by default). A ``valid`` without names
    is the set ``valid``.
    They are opened at first use, so evaluation needs no training data. Without ``valid``, the share
    ``hold_out`` of the training recordings is the evaluation set ``held_out``. ``batch`` limits the batches
    of training, ``valid_batch`` those of evaluation. ``speed`` is the lowest and highest factor, null for
    none. ``min_seconds`` and ``max_seconds`` filter training recordings, before the speed change, and
    ``skip_empty`` filters those without a transcript;
    evaluation sets are never filtered, and a recording there of more than ``max_decoded_seconds`` is an
    error. A transcript with more than ``max_labels_per_second`` is taken as wrong (people speak 15 to 25
    characters per second; RNN-T itself has no limit). ``shapes`` above 0
    is the largest number of fixed tensor shapes. ``crop_seconds`` (null: no crop) crops training
    recordings at random, to the shortest of their batch or, with ``shapes``, to ``crop_seconds``;
    evaluation is not cropped. ``normalise``, set by the task, gives each recording zero mean and unit
    variance. ``workers`` decode ahead: -1 is one fewer than the cores of this rank, at most 8; 0 decodes
    in this process. ``stage`` is a folder for copies of the recordings, made ahead of their use (see
    ``data.stage``). A bad recording becomes a padding row and is listed in ``run_dir``; more than
    ``max_bad`` *and* more than ``max_bad_share`` of the set end the run.

    Raises ValueError for invalid arguments, DataError for unusable data.
    """

    def __init__(
        self,
        train: Source | FilePath | dict[str, Any] | list[FilePath | dict[str, Any]],
        valid: FilePath
        | list[FilePath | dict[str, Any]]
        | dict[str, Source | FilePath | dict[str, Any] | list[FilePath | dict[str, Any]]],
        tokenizer: Tokenizer,
        seed: int = 1,
        batch: BatchLimits | None = None,
        valid_batch: BatchLimits | None = None,
        speed: list[float] | None = None,
        sample_rate: int = 16_000,
        min_seconds: float = 0.1,
        max_seconds: float = 20.0,
        max_labels_per_second: float = 50.0,
        max_decoded_seconds: float = DECODED_SECONDS,
        allow_empty: bool = False,
        skip_empty: bool = False,
        hold_out: float = 0.0,
        shapes: int = 0,
        crop_seconds: float | None = None,
        workers: int = -1,
        timeout_seconds: float = 600.0,
        cache: FilePath | None = None,
        stage: FilePath | None = None,
        max_bad: int = 10,
        max_bad_share: float = 0.001,
        run_dir: str | None = None,
        footprint: Footprint | None = None,
        normalise: bool = False,
    ) -> None:
        if not 0 <= min_seconds < max_seconds:
            raise ValueError(f"min_seconds={min_seconds}, max_seconds={max_seconds}: need 0 <= min < max")
        if not 0 <= hold_out < 1:
            raise ValueError(f"hold_out={hold_out}: it must be a share of at least 0 and below 1")
        for name, value in {"sample_rate": sample_rate, "timeout_seconds": timeout_seconds}.items():
            if value <= 0:
                raise ValueError(f"{name}={value}: it must be above 0")
        _check_counts(workers, shapes)
        sets = _named_sets(valid)
        _check_crop(crop_seconds, tokenizer)
        _check_sources(train, sets)
        speed_grid(speed or (1.0, 1.0))
        self.tokenizer, self.seed = tokenizer, seed
        self.batch = batch or BatchLimits()
        self.valid_batch = valid_batch or BatchLimits(count=16)
        self.speed = speed or [1.0, 1.0]
        self.sample_rate = sample_rate
        self.limits = (min_seconds, max_seconds)
        self.max_labels_per_second, self.max_decoded_seconds = max_labels_per_second, max_decoded_seconds
        self.allow_empty, self.skip_empty = allow_empty, skip_empty
        self.hold_out = 0.0 if sets else hold_out
        self.static_shapes, self.crop_seconds, self.normalise = shapes, crop_seconds, normalise
        self.cache, self.stage, self.run_dir = cache or "", stage or "", run_dir or ""
        self._staging = ExitStack()
        self.footprint = footprint
        self.skips = SkipLog(self.run_dir, max_bad, max_bad_share)
        count = automatic_workers() if workers < 0 else workers
        self.workers: Workers = Processes(count, timeout_seconds) if count else InProcess()
        self._train, self._valid = train, sets
        self._sets: dict[str, EvaluationSet] = {}
        self._position = (0, 0)

    # --- training -------------------------------------------------------------------------------

    @cached_property
    def _source(self) -> Source:
        return open_source(self._train)

    @cached_property
    def index(self) -> Index:
        """The training cuts."""
        return open_index(self._source, self.cache)

    @cached_property
    def _filters(self) -> NDArray[np.int8]:
        """The place in _FILTERS of the reason why a row of the index is not used, or 0."""
        low, high = np.float32(self.limits[0]), np.float32(self.limits[1])
        filters = np.zeros(len(self.index), np.int8)
        if self.skip_empty:
            filters[self.index.characters == 0] = _UNTRANSCRIBED
        filters[self.index.seconds > high] = _TOO_LONG
        filters[self.index.seconds < low] = _TOO_SHORT
        return filters

    @cached_property
    def _usable(self) -> NDArray[np.int32]:
        """Rows of the index that are not filtered. Raises DataError if there are none."""
        rows = np.flatnonzero(self._filters == 0).astype(np.int32)
        if len(rows):
            return rows
        if _UNTRANSCRIBED in self._filters:
            raise DataError(f"data.train: no recording has a transcript; {_where_texts_are(self._source)}")
        low, high = self.limits
        raise DataError(
            f"data.train: none of {len(self.index)} recordings is between {low:g} and {high:g} s long; "
            "change data.min_seconds or data.max_seconds, or check the manifest's durations"
        )

    @cached_property
    def _held(self) -> NDArray[np.int32]:
        """Rows of the index that are held out, each with a transcript if transcripts are used."""
        rows = self._usable
        if self.tokenizer.reads_text and not self.allow_empty:
            rows = rows[self.index.characters[rows] > 0]
        if not self.hold_out:
            return rows[:0]
        keys = (self.index.speakers[rows], self.index.recordings[rows], self.index.keys[rows])
        held, _ = held_out(dict(zip(GROUPS, keys, strict=True)), self.index.seconds[rows], self.hold_out)
        return rows[held]

    @cached_property
    def sides(self) -> str:
        """A digest of what is held out."""
        return digest(self.index.keys[self._held].tolist())

    @cached_property
    def _kept(self) -> NDArray[np.int32]:
        """Rows of the index that are trained on; a single recording is, and is held out, too."""
        if len(self._usable) < 2 or not len(self._held):  # the difference sorts a million rows, 0.2 s
            return self._usable
        return np.setdiff1d(self._usable, self._held, assume_unique=True)

    @property
    def training_rows(self) -> NDArray[np.int32]:
        """The rows of ``index`` that are trained on."""
        return self._kept

    @cached_property
    def sampler(self) -> Sampler:
        """The order of training."""
        seconds = self.index.seconds[self._kept]
        if (labels := self._labels(self.index, self.batch)) is not None:
            labels = labels[self._kept]
            # these become padding rows: they must not widen a shape
            labels = np.where(labels > self.max_labels_per_second * seconds, 0, labels)
        return Sampler(
            seconds=seconds,
            keys=self.index.keys[self._kept],
            seed=self.seed,
            packing=self.batch,
            speed=self.speed,
            rows=self._kept,
            labels=labels,
            footprint=self.footprint,
            shapes=self.static_shapes,
            sample_rate=self.sample_rate,
            crop_seconds=self.crop_seconds,
            **self._shares(),
        )

    def _shares(self) -> dict[str, Any]:
        """The sampler's ``sets`` and ``weights``; nothing if no set has a weight."""
        facts = self.index.facts
        if all(one.weight is None for one in facts):
            return {}
        weights = {one.name: 1.0 if one.weight is None else one.weight for one in facts}
        numbers = np.array([list(weights).index(one.name) for one in facts])
        sets = numbers[self.index.parts[self._kept]]
        if unused := [name for number, name in enumerate(weights) if number not in sets]:
            raise DataError(f"data.train.{unused[0]}: no recording is left to train on; remove the set")
        return {"sets": sets, "weights": list(weights.values())}

    @cached_property
    def loader(self) -> BatchLoader:
        """The loader of training batches."""
        limits = {"max_labels_per_second": self.max_labels_per_second, "allow_empty": self.allow_empty}
        return self._loader(self.index, **limits, crop_seconds=self.crop_seconds, seed=self.seed)

    def _loader(self, index: Index, **options: Any) -> BatchLoader:
        options |= {"normalise": self.normalise, "stage": self.stage}
        return BatchLoader(index, self.tokenizer, self.sample_rate, **options)

    def _labels(self, index: Index, batch: BatchLimits) -> NDArray[np.int32] | None:
        """The label counts of all cuts, if batches depend on them."""
        is_needed = self.tokenizer.reads_text and (self.static_shapes or batch.memory_gib is not None)
        return index.labels(self.tokenizer) if is_needed else None

    @property
    def micro_batches_per_epoch(self) -> int:
        return self.sampler.length(0)

    def train(self, rank: int = 0, world_size: int = 1, accumulate: int = 1) -> Iterator[Batch]:
        if not 0 <= rank < world_size or accumulate < 1:
            raise ValueError(f"rank {rank} of {world_size}, accumulate {accumulate}")
        if rank == 0:
            self._list_filtered()
        self.skips.refresh()
        return self._batches(rank, world_size, accumulate)

    def _batches(self, rank: int, world_size: int, accumulate: int) -> Iterator[Batch]:
        planned = self.sampler.micro_batches(*self._position)
        own: Iterator[MicroBatch] = islice(planned, rank, None, world_size)
        if self.stage:
            own = self._staged(own, rank, world_size)
        for number, batch in enumerate(self.workers.map(self.loader, own), 1):
            for skip in batch.skipped:
                self.skips.add(skip, len(self._kept))
            if number % accumulate == 0:  # updated when the batch is yielded, not when loaded
                self._position = self.sampler.advance(*self._position, world_size * accumulate)
            yield batch

    def _staged(self, own: Iterator[MicroBatch], rank: int, world_size: int) -> Iterator[MicroBatch]:
        """``own``, whose recordings are copied ahead of time, as are this rank's of the evaluation sets."""
        self._staging.close()
        sets = [(_reader(self._set(name).loader), self._set(name).plan) for name in self._names]
        ranges = ((loader, plan, range(rank, len(plan), world_size)) for loader, plan in sets)
        later = (partial(loader.files, plan[i]) for loader, plan, numbers in ranges for i in numbers)
        most = min(AHEAD, self.sampler.length(self._position[0]) // world_size)  # plans of two epochs at most
        stager = Stager(self.stage, later)
        self._staging.callback(stager.close)
        return stager.ahead(own, _reader(self.loader).files, max(1, most))

    def shapes(self) -> list[tuple[int, int, int]]:
        return [(shape.rows, shape.samples, shape.labels) for shape in self.sampler.shapes]

    def sample(self) -> Batch | None:
        order = self.sampler.sizes(0).argsort()
        return self.loader(self.sampler.plan(0)[int(order[len(order) // 2])])

    def recordings(self, normalise: Callable[[str], str]) -> Iterator[tuple[float, str]]:
        for row in self._usable.tolist():
            yield float(self.index.seconds[row]), self.index.text(row, self.index.cut(row), normalise)

    def _list_filtered(self) -> None:
        """List the recordings that are filtered, once per run."""
        path = Path(self.run_dir) / "filtered.jsonl"
        if len(self._usable) == len(self.index) or not self.run_dir or path.exists():
            return
        try:
            with atomic(path) as temporary, temporary.open("wb") as file:
                for row in np.flatnonzero(self._filters).tolist():
                    reason, detail = _FILTERS[self._filters[row]], f"{self.index.seconds[row]:.2f} s"
                    entry = {"id": self.index.cut(row)["id"], "reason": reason, "detail": detail}
                    line = json.dumps(entry, ensure_ascii=False) + "\n"
                    file.write(line.encode("utf-8", "backslashreplace"))
        except OSError as error:
            _LOG.warning("%s cannot be written (%s); filtered recordings are only counted", path, error)

    # --- evaluation -----------------------------------------------------------------------------

    def valid(self, rank: int = 0, world_size: int = 1) -> dict[str, Iterable[Batch]]:
        return {
            name: EvaluationBatches(self._set(name), self.workers, rank, world_size=world_size)
            for name in self._names
        }

    @property
    def _names(self) -> list[str]:
        return [_HELD_OUT] if self.hold_out else list(self._valid)

    def _set(self, name: str) -> EvaluationSet:
        if name not in self._sets:
            own = bool(self.hold_out)
            index = self.index if own else open_index(open_source(self._valid[name]), self.cache)
            rows = self._held if own else np.arange(len(index), dtype=np.int32)
            labels = self._labels(index, self.valid_batch)
            plan = evaluation_plan(
                index.seconds[rows],
                None if labels is None else labels[rows],
                self.valid_batch,
                footprint=self.footprint,
                shapes=self.static_shapes,
                sample_rate=self.sample_rate,
            )
            plan = replace(plan, rows=rows[plan.rows])
            limits = {"max_decoded_seconds": self.max_decoded_seconds, "is_evaluation": True}
            loader = self._loader(index, **limits, is_strict=not own)
            self._sets[name] = EvaluationSet(index, plan, loader, self.skips)
        return self._sets[name]

    def evaluation_shapes(self) -> list[tuple[int, int, int]]:
        """Return the (batch, samples, labels) shapes of all evaluation sets if fixed, else an empty list."""
        found = {(s.rows, s.samples, s.labels) for name in self._names for s in self._set(name).plan.shapes}
        return sorted(found)

    # --- before training ------------------------------------------------------------------------

    def check(self) -> None:
        """Check 1,000 recordings of each set and 10,000 transcripts (or all, if there are up to 100,000).

        Raises DataError if more training recordings are missing or have no transcript, or more transcripts
        cannot be encoded, than ``max_bad`` and ``max_bad_share`` allow, or half of them (of up to ``max_bad``
        recordings, all are decoded and must be usable in the same way); also if any checked
        recording of an evaluation set is missing, or none has a transcript. An evaluation transcript may
        have unknown symbols.
        """
        self._check_files("train", self.index, self._kept, is_evaluation=False)
        if self.tokenizer.reads_text:
            self._check_transcripts()
        self._check_all_if_few()
        for name in self._names:
            index, rows = self._set(name).index, np.sort(self._set(name).plan.rows)
            key = "train" if self.hold_out else f"valid.{name}"
            self._check_files(key, index, rows, is_evaluation=not self.hold_out)
            normalise = self.tokenizer.normalise
            texts = (index.text(row, index.cut(row), normalise) for row in rows.tolist())
            if self.tokenizer.reads_text and len(rows) and not any(text.strip() for text in texts):
                place = _where_texts_are(open_source(self._valid.get(name, self._train)))
                raise DataError(
                    f"none of {len(rows)} recordings of data.valid.{name} has a transcript, so there is no "
                    f"error rate to select a checkpoint by; {place}"
                )

    def _check_files(self, key: str, index: Index, rows: NDArray[np.int32], is_evaluation: bool) -> None:
        looked = self._sample(rows, _SAMPLED_RECORDINGS)
        firsts = (path for row in looked.tolist() for path in files_of(index.cut(row))[:1])
        missing = [path for path in firsts if not os.path.exists(file_of(path))]
        if missing and (is_evaluation or self._is_too_many(len(missing), len(looked))):
            raise DataError(
                f"{missing[0]} does not exist: {len(missing)} of {len(looked)} checked recordings of "
                f"data.{key} are missing; correct the paths, or mount the folder"
            )

    def _check_all_if_few(self) -> None:
        """Decode every recording if there are so few that ``max_bad`` would allow to lose them all."""
        total = len(self._kept)
        if total > self.skips.max_bad:
            return
        skips: list[Any] = []
        for row in self._kept.reshape(-1, 1):
            skips += self.loader(MicroBatch(row, np.array([100], np.int16))).skipped
        if self._is_too_many(len(skips), total):
            raise DataError(
                f"{len(skips)} of {total} recordings of data.train are unusable, such as {skips[0].id!r} "
                f"({skips[0].detail}: {REASONS[skips[0].reason]}). Repair or remove them"
            )

    def warnings(self) -> Iterator[str]:
        yield from self._source.warnings()
        low, high = self.limits
        too_long = f"are longer than data.max_seconds={high:g}"
        facts = (too_long, f"are shorter than data.min_seconds={low:g}", "have no transcript")
        for number, fact in enumerate(facts, 1):
            yield from _share("train", self.index, self._filters == number, f"{fact}, so they are not used")
        for name, spec in self._valid.items():
            yield from open_source(spec).warnings()
            index = self._set(name).index
            fact = f"{too_long}, as no training recording is"
            yield from _share(f"valid.{name}", index, index.seconds > np.float32(high), fact)
        yield from self._narrow_recordings()
        yield from self._copies()

    def crowded(self, frames: Callable[[int], int]) -> str:
        if not self.tokenizer.reads_text:
            return ""
        rows = self._sample(self._kept, _SAMPLED_TRANSCRIPTS).tolist()
        line = crowded(self.index, rows, self.tokenizer, frames, self.sample_rate, _CROWDED_SHARE)
        return f"data.train: {line}" if line else ""

    def _narrow_recordings(self) -> Iterator[str]:
        """Yield a line if all recordings have a lower rate than ``sample_rate``, so high bands are empty."""
        paths = set[str]()
        for row in self._sample(self._kept, _SAMPLED_HEADERS).tolist():
            paths.update(files_of(self.index.cut(row)))
        rates = [info.samplerate for info in map(header, paths) if info]
        if rates and max(rates) < self.sample_rate:
            yield (
                f"data.train: all of {len(rates)} recordings that were read have at most {max(rates)} Hz, "
                f"and data.sample_rate={self.sample_rate} leaves the upper bands empty. Equal rates "
                "cost less, if the encoder's sample_rate follows"
            )

    def _copies(self) -> Iterator[str]:
        """Yield a line if recordings are copies of others: one may be held out, the other trained on."""
        if not self.hold_out or len(self._usable) > _MOST_COMPARED:
            return
        paths = set()
        for row in self._usable.tolist():
            paths.update(files_of(self.index.cut(row)))
        groups = equal_files(paths)
        if groups:
            count = sum(len(group) - 1 for group in groups)
            yield (
                f"data.train: {count} recordings are copies of others, such as {groups[0][0]} and "
                f"{groups[0][1]}. A copy may be held out while the other is trained on. "
                "speechtrain prepare stats lists them"
            )

    def _check_transcripts(self) -> None:
        is_small = len(self._kept) <= _ALL_TRANSCRIPTS
        looked = self._kept if is_small else self._sample(self._kept, _SAMPLED_TRANSCRIPTS)
        bad, symbols, first = 0, set[str](), ""
        unsaid: list[str] = []
        for row in looked.tolist():
            cut = self.index.cut(row)
            text = self.index.text(row, cut, self.tokenizer.normalise)
            if not text.strip() and not self.allow_empty:
                unsaid.append(cut["id"])
            if label_count(text, self.tokenizer) < 0:
                bad += 1
                symbols |= self.tokenizer.unknown(text)
                first = first or cut["id"]
        if self._is_too_many(len(unsaid), len(looked)):
            raise DataError(
                f"{len(unsaid)} of {len(looked)} recordings of data.train have no transcript, such as "
                f"{unsaid[0]!r}; {_where_texts_are(self._source)}"
            )
        if self._is_too_many(bad, len(looked)):
            shown = " ".join(map(repr, sorted(symbols)[:10])) + (" …" if len(symbols) > 10 else "")
            raise DataError(
                f"the tokenizer cannot encode {bad} of {len(looked)} transcripts of data.train, such as "
                f"{first!r}: unknown symbols {shown}; set tokenizer=auto, or its normaliser or alphabet"
            )

    def _is_too_many(self, bad: int, looked: int) -> bool:
        return bad > 0 and (2 * bad >= looked or not self.skips.allows(bad, looked))

    def _sample(self, rows: NDArray[np.int32], count: int) -> NDArray[np.int32]:
        """Return ``count`` rows, drawn by the seed, ascending; all rows if there are no more."""
        if len(rows) <= count:
            return rows
        draws = uniform_at(self.seed, RunStream.CHECKS, np.arange(len(rows)))
        return np.sort(rows[np.argpartition(draws, count)[:count]])

    # --- state ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        epoch, position = self._position
        return {
            "epoch": epoch,
            "position": position,
            "content": self.index.content,
            "texts": self.index.texts,
            "cuts": len(self.index),
            "held_out": self.sides,
            "skipped": dict(self.skips.reasons),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the state's address. Raises DataError if the training cuts or transcripts differ."""
        if state["content"] != self.index.content:
            raise DataError(
                f"data.train has changed since the checkpoint ({state['cuts']} cuts then, {len(self.index)} "
                "now); restore it, or use another run_dir"
            )
        if state["texts"] != self.index.texts:
            changed = "the transcripts of data.train have changed since the checkpoint"
            raise DataError(f"{changed}; restore them, or use another run_dir")
        if self.hold_out and state.get("held_out") != self.sides:
            other = "the run was begun by a release that holds out other recordings"
            raise DataError(f"{other}, so it would validate on what it has trained on; use another run_dir")
        self._position = (int(state["epoch"]), int(state["position"]))
        self.skips.reasons.update({str(name): str(reason) for name, reason in state["skipped"].items()})

    def content(self) -> dict[str, str | int]:
        index = self.index
        return {"recordings": len(index), "digest": digest(index.content, index.texts)}

    def counts(self) -> dict[str, int]:
        counts = {"train_samples": len(self._kept)}
        for name in self._names[:1]:
            counts["eval_samples"] = len(self._set(name).plan.rows)
        return counts

    def report(self) -> dict[str, Any]:
        """Return recordings not used by reason, the shares of padded (fixed shapes) and cropped audio, what
        is held out, and the facts of each named set.
        """
        self.skips.refresh()
        counts = np.bincount(self._filters, minlength=len(_FILTERS)).tolist()
        filtered = {_FILTERS[number]: count for number, count in enumerate(counts) if number and count}
        skipped = {**filtered, **self.skips.counts}
        shares: dict[str, float] = {}
        if self.static_shapes or self.crop_seconds is not None:
            padding, cropped = self.sampler.waste(0)
            shares |= {"padding_share": round(padding, 4)} if self.static_shapes else {}
            shares |= {"cropped_share": round(cropped, 4)} if self.crop_seconds is not None else {}
        held = {"held out": self._held_out()} if self.hold_out else {}
        return skipped | shares | held | {f"set {name}": told for name, told in self._told_of_sets()}

    def _told_of_sets(self) -> Iterator[tuple[str, str]]:
        facts, parts = self.index.facts, self.index.parts[self._kept]
        drawn = self.sampler.shares
        for place, name in enumerate(dict.fromkeys(one.name for one in facts if one.name)):
            own = [number for number, one in enumerate(facts) if one.name == name]
            rows = self._kept[np.isin(parts, own)]
            told = [f"{len(rows)} recordings, {_hours(self.index.seconds[rows]):.2f} h"]
            told += [f"{drawn[place]:.1%} of an epoch"] if drawn else []
            yield name, ", ".join([*told, *filter(None, (facts[own[0]].normaliser, facts[own[0]].language))])

    def _held_out(self) -> str:
        if len(self._usable) == 1:
            return "nothing: the only recording is also what validates it"
        rows, speakers = self._held, self.index.speakers
        is_one = len(np.unique(self.index.recordings[self._usable])) == 1
        what = "parts of the only recording" if is_one else "recordings"
        found = f"{len(rows)} {what}, {_hours(self.index.seconds[rows]):.2f} h"
        whole = set(speakers[rows].tolist()).isdisjoint(speakers[self._kept].tolist())
        return f"{found}, {len(set(speakers[rows].tolist()))} speakers" if whole else found

    def obey(self, stop_requested: Callable[[], bool]) -> None:
        self.workers.stop_requested = stop_requested

    def close(self) -> None:
        if counts := ", ".join(f"{count} {reason}" for reason, count in self.skips.counts.items()):
            _LOG.warning("skipped recordings: %s; %s lists them", counts, self.skips.path)
        self._staging.close()
        self.workers.close()


@dataclass(frozen=True)
class EvaluationSet:
    """One evaluation set: its cuts, its plan of batches, and its loader."""

    index: Index
    plan: Plan
    loader: BatchLoader
    skips: SkipLog


class EvaluationBatches(Iterable[Batch]):
    """A rank's part of an evaluation set; can be iterated again.

    Batch i is for rank i modulo the number of ranks. A rank that would have one batch fewer gets a
    batch of padding rows, because all ranks must take part in the same collectives.
    """

    def __init__(self, chosen: EvaluationSet, workers: Workers, rank: int, world_size: int) -> None:
        self.chosen = chosen
        self.rank = rank
        self.world_size = world_size
        self.seconds = float(chosen.index.seconds[chosen.plan.rows].sum(dtype=np.float64)) / world_size
        self.workers = InProcess() if self.seconds < _SMALL_SECONDS else workers

    def __len__(self) -> int:
        return math.ceil(len(self.chosen.plan) / self.world_size)

    def __iter__(self) -> Iterator[Batch]:
        plan, loader = self.chosen.plan, self.chosen.loader
        own = range(self.rank, len(plan), self.world_size)
        for batch in self.workers.map(loader, (plan[i] for i in own)):
            for skip in batch.skipped:  # only of recordings that are held out: others raise
                self.chosen.skips.add(skip, len(self.chosen.index))
            yield batch
        if len(own) < len(self):
            width = int(loader.tokenizer.reads_text)
            last = plan[len(plan) - 1].shape or Shape(1, round(loader.sample_rate * 0.1), width)
            yield collate([], loader.sample_rate, last)


def _share(key: str, index: Index, mask: NDArray[np.bool_], fact: str) -> Iterator[str]:
    """Yield a line with the number and hours of the cuts in ``mask``, if there are any."""
    if mask.any():
        share = f"{_hours(index.seconds[mask]):.2f} of {_hours(index.seconds):.2f} h"
        yield f"data.{key}: {mask.sum()} of {len(index)} recordings ({share}) {fact}"


def _hours(seconds: NDArray[np.float32]) -> float:
    return float(seconds.sum(dtype=np.float64)) / 3600


def _reader(loader: BatchLoader) -> BatchLoader:
    """The loader for another thread: an index has open files, each at one position."""
    return replace(loader, index=copy(loader.index))


def _where_texts_are(source: Source) -> str:
    return source.text_hint() or _WHERE_TRANSCRIPTS_ARE


def _named_sets(valid: Any) -> dict[str, Any]:
    """The evaluation sets by name. A set without a name is ``valid``."""
    is_set = valid and (not isinstance(valid, dict) or "path" in valid)
    return {"valid": valid} if is_set else valid or {}


def _check_sources(train: object, valid: dict[str, Any]) -> None:
    for name, spec in {"train": train, **{f"valid: {name}": spec for name, spec in valid.items()}}.items():
        if not isinstance(spec, Source) and (problem := problem_of(spec, is_valid=name != "train")):
            raise ValueError(f"{name}: {problem}")


def _check_counts(workers: int, shapes: int) -> None:
    if not -1 <= workers <= 256 or shapes < 0:  # Each worker is a process of 200 MB.
        raise ValueError(f"workers={workers}, shapes={shapes}: need -1 <= workers <= 256, shapes >= 0")


def _check_crop(seconds: float | None, tokenizer: Tokenizer) -> None:
    if seconds is not None and seconds <= 0:
        raise ValueError(f"crop_seconds={seconds}: it must be above 0, or null for no cropping")
    if seconds is not None and tokenizer.reads_text:
        raise ValueError(
            f"crop_seconds={seconds}: a part of a recording does not match its transcript; "
            "use tokenizer=none to train on audio alone, or crop_seconds=null"
        )


def automatic_workers() -> int:
    """Return one fewer than this rank's share of the usable cores, at most 8 (see LOCAL_WORLD_SIZE)."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(0, min(8, len(usable_cpus()) // max(1, int(ranks) if is_number(ranks) else 1) - 1))

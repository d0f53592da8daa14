"""Checks recordings and transcripts before a run, for problems that would end or waste the run."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from speechtrain.batch import Skip
from speechtrain.data.audio import files_of, first_file, read_cut
from speechtrain.data.batches import MOST_CHECKED, SpeechBatches
from speechtrain.data.equal_content import equal_files
from speechtrain.data.evaluation_sets import EvaluationSet
from speechtrain.data.formats.manifests import text_of
from speechtrain.data.index import Index, label_count
from speechtrain.data.loader import REASONS
from speechtrain.data.planned_lengths import Integers
from speechtrain.data.recordings import Unusable, header_or_none, path_on_disk
from speechtrain.data.sampler import MicroBatch
from speechtrain.data.tar_members import file_of
from speechtrain.data.training_set import hours, sample_rows, where_transcripts_are
from speechtrain.data.voice_activity import is_silent
from speechtrain.errors import DataError, one_line
from speechtrain.text.normalise import DAMAGED, REMARK, invisible

_SAMPLED_RECORDINGS = 1_000  # recordings of each evaluation set whose files must exist
_SAMPLED_ACOUSTICS = 200  # noises and room responses that are read. The noises of MUSAN take 2 s.
_SAMPLED_AUDIO = 20  # recordings of data.train that are decoded, and whose rate is read
_CROWDED_SHARE = 0.01  # A smaller share of transcripts with more labels than frames causes no warning.
_MOST_COMPARED = 100_000  # A larger set is not searched for copies, because reading a cut takes 30 µs.


class CheckedBatches(SpeechBatches):
    """Batches whose recordings and transcripts can be checked before a run."""

    def check(self) -> None:
        """Check recordings and transcripts of each set before the run starts. Raises DataError if

        - too many training recordings are known to be unusable (see ``SpeechBatches.unusable``),
        - a checked noise or room response cannot be read or is silent,
        - too many of some training recordings cannot be loaded,
        - too many of 1,000 recordings of an evaluation set are missing,
        - no recording of an evaluation set has a transcript.

        Too many means half of the checked ones, or more than ``most_bad`` of the SkipLog. An evaluation
        transcript may have unknown symbols.
        """
        loader, training_set = self.loader, self.training_set
        checked = min(len(training_set.rows), MOST_CHECKED)
        if self._is_too_many(len(self.unusable), checked):
            advice = {
                "missing": "Correct the paths, or mount the folder",
                "empty_transcript": f"Places of transcripts: {where_transcripts_are(training_set.source)}. "
                "data.allow_empty=true trains without them",
                "unknown_symbol": "Set tokenizer=auto, or its normaliser or alphabet",
            }
            (most_frequent, _), *_ = self._reasons().most_common()
            repair = f"Repair or remove them, or raise data.max_bad={self.skips.most_bad(checked):.0f}"
            raise DataError(f"{next(self._unusable_warning())}. {advice.get(most_frequent, repair)}")
        for name, index in loader.acoustics.indices.items():
            for row in sample_rows(np.arange(len(index)), _SAMPLED_ACOUSTICS, loader.seed).tolist():
                cut = index.cut(row)
                try:
                    if is_silent(read_cut(cut, loader.sample_rate)):
                        raise Unusable("silent", first_file(cut))
                except Unusable as problem:
                    raise DataError(f"augment.{name}: {problem}. Repair or remove it") from None
        # The limits of bad recordings would allow each of the first ones to be skipped, and so updates
        # without a recording. So some recordings are loaded.
        rows = sample_rows(training_set.rows, _SAMPLED_AUDIO, loader.seed)
        skips: list[Skip] = []
        for row in rows.tolist():
            single_recording = MicroBatch(np.array([row]), percents=np.array([100], np.int16))
            batch = loader(single_recording)
            if not batch.utterances:  # An unusable noise or room leaves the recording itself.
                skips += batch.skipped
        is_half = 2 * len(skips) >= len(rows)
        if skips and (is_half or not self.skips.allows(len(skips), len(training_set.rows))):
            raise DataError(
                f"{len(skips)} of {len(rows)} recordings of data.train are unusable, such as {skips[0].id!r} "
                f"({skips[0].detail}: {REASONS[skips[0].reason]}). Repair or remove them"
            )
        tokenizer = loader.tokenizer
        for name, evaluation_set in self.evaluation_sets.items():
            index, rows = evaluation_set.recordings.index, evaluation_set.recordings.rows
            sample = sample_rows(rows, _SAMPLED_RECORDINGS, loader.seed)
            paths = [first_file(index.cut(row)) for row in sample.tolist()]
            missing = [path for path in paths if path and not os.path.exists(path_on_disk(file_of(path)))]
            if self._is_too_many(len(missing), len(sample)):
                raise DataError(
                    f"{missing[0]} does not exist: {len(missing)} of {len(sample)} checked recordings of "
                    f"data.valid.{name} are missing. Correct the paths, or mount the folder"
                )
            texts = (index.text(row, tokenizer.normalise) for row in rows.tolist())
            if tokenizer.reads_text and len(rows) and not any(text.strip() for text in texts):
                raise DataError(
                    f"none of {len(rows)} recordings of data.valid.{name} has a transcript, and the error "
                    f"rate selects the checkpoint: {where_transcripts_are(evaluation_set.recordings.source)}"
                )

    def _reasons(self) -> Counter[str]:
        """Return the number of training recordings that are known to be unusable, by reason."""
        return Counter(skip.reason for skip in self.unusable.values())

    def _unusable_warning(self) -> Iterator[str]:
        """Yield a line with the number, the hours, the reasons and the three longest unusable recordings."""
        index, unusable = self.training_set.index, self.unusable
        rows = np.array(sorted(unusable, key=lambda row: -index.seconds[row]), np.int32)
        skips = [unusable[row] for row in rows[:3].tolist()]
        longest = ", ".join(f"{skip.id!r} ({skip.reason}: {skip.detail})" for skip in skips)
        checked = min(len(self.training_set.rows), MOST_CHECKED)
        reasons = ", ".join(f"{count} {reason}" for reason, count in self._reasons().most_common())
        problem = f"cannot be used ({reasons}; {checked} were checked), the longest are {longest}"
        yield from _describe_rows("train", index, rows, problem)

    def _is_too_many(self, bad: int, total: int) -> bool:
        """Return whether the run should not start with ``bad`` of ``total`` checked recordings."""
        return bad > 0 and (2 * bad >= total or not self.skips.allows(bad, total))

    def warnings(self) -> Iterator[str]:
        """Yield a line for each problem of the recordings that the user may not expect."""
        training_set, index = self.training_set, self.training_set.index
        filters = training_set.filters
        yield from training_set.source.warnings()
        problems = {
            "too_long": f"are longer than data.max_seconds={filters.max_seconds:g}",
            "too_short": f"are shorter than data.min_seconds={filters.min_seconds:g}",
            "untranscribed": "have no transcript",
        }
        for reason, problem in problems.items():
            rows = training_set.filtered[reason]
            yield from _describe_rows("train", index, rows, f"{problem}, so they are not used")
        yield from self._unusable_warning()
        for name, evaluation_set in self.valid_sets.items():
            yield from self._valid_warnings(name, evaluation_set)
        yield from _name_warnings("train", index, training_set.rows)
        for name, count in self.trained_counts(training_set.initial_sides).items():
            yield f"{name}: the weights of init_from were trained on {count}, so its error rates are too low"
        rates = []
        for path in _paths(index, sample_rows(training_set.rows, _SAMPLED_AUDIO, self.loader.seed)):
            header = header_or_none(path)
            if header:
                rates.append(header.samplerate)
        if rates and max(rates) < self.loader.sample_rate:
            yield (
                f"data.train: all of {len(rates)} recordings that were read have at most {max(rates)} Hz, "
                f"and data.sample_rate={self.loader.sample_rate} leaves the upper bands empty. Equal rates "
                "cost less, if the encoder's sample_rate follows"
            )
        if training_set.hold_out and len(training_set.usable) <= _MOST_COMPARED:
            groups = equal_files(_paths(index, training_set.usable))
            copies = sum(len(group) - 1 for group in groups)
            if copies:
                original, copy = groups[0][:2]
                yield (
                    f"data.train: {copies} recordings are copies of others, such as {original} and {copy}. "
                    "A copy may be held out while the other is trained on. speechtrain prepare stats lists "
                    "them"
                )
        if self.loader.tokenizer.reads_text:
            yield from self._text_warnings()

    def _valid_warnings(self, name: str, evaluation_set: EvaluationSet) -> Iterator[str]:
        """Yield a line for each problem of the set ``data.valid.NAME``."""
        index, tokenizer = evaluation_set.recordings.index, self.loader.tokenizer
        yield from evaluation_set.recordings.source.warnings()
        filters = self.training_set.filters
        problem = f"are longer than data.max_seconds={filters.max_seconds:g}, as no training recording is"
        yield from _describe_rows(f"valid.{name}", index, np.flatnonzero(filters.is_too_long(index)), problem)
        rows = sample_rows(evaluation_set.recordings.rows, MOST_CHECKED, self.loader.seed)
        symbols = []  # the unknown ones of each transcript
        for row in rows.tolist():
            symbols.append(tokenizer.unknown(index.text(row, tokenizer.normalise)))
        unknown_count = sum(map(bool, symbols))
        if unknown_count and tokenizer.reads_text:
            listed_symbols = one_line(" ".join(map(repr, sorted(set().union(*symbols)))), 80)
            yield (
                f"data.valid.{name}: {unknown_count} of {len(rows)} transcripts have symbols without a label "
                f"({listed_symbols}). They count as errors, and have no loss"
            )
        yield from _name_warnings(f"valid.{name}", index, evaluation_set.recordings.rows)

    def _text_warnings(self) -> Iterator[str]:
        """Yield lines on training transcripts that change, or have remarks or damaged characters."""
        loader, tokenizer = self.loader, self.loader.tokenizer
        rows = sample_rows(self.training_set.rows, MOST_CHECKED, loader.seed)
        dropped_count = 0
        dropped, damaged, changed = list[str](), list[str](), list[str]()  # an example for each transcript
        for row in rows.tolist():
            cut = loader.index.cut(row)
            text = loader.index.text(row, tokenizer.normalise, cut)
            parts = REMARK.findall(text_of(cut)) + invisible(text_of(cut))
            dropped_parts = [part for part in parts if not tokenizer.normalise(part)]
            if dropped_parts:
                dropped_count += len(dropped_parts)
                dropped.append(f"{one_line(ascii(dropped_parts[0]), 80)} in {cut['id']!r}")
            if DAMAGED in text:
                damaged.append(repr(cut["id"]))
            if row in self.unusable:  # Its text may have unknown symbols, and the run does not use it.
                continue
            decoded_text = tokenizer.decode(tokenizer.encode(text))
            if decoded_text != text:
                change = one_line(f"{text!r} becomes {decoded_text!r}", 200)
                changed.append(f"{cut['id']!r} ({change})")
        problems = {
            f"{dropped_count} remarks, tags and invisible characters were dropped from {{}}": dropped,
            "{} have U+FFFD, which stands for damaged text": damaged,
            "{} would not come back from their labels": changed,
        }
        for problem, examples in problems.items():
            if examples:
                share = f"{len(examples)} of {len(rows)} transcripts"
                yield f"data.train: {problem.format(share)}, such as {examples[0]}"

    def crowded_transcripts(self, frames: Callable[[int], int]) -> str:
        """Return a warning about training transcripts with more labels than encoder frames, or "".

        ``frames`` maps a number of samples to its number of encoder frames. A share of 1 % causes no warning.
        """
        loader, tokenizer = self.loader, self.loader.tokenizer
        if not tokenizer.reads_text:
            return ""
        rows = sample_rows(self.training_set.rows, MOST_CHECKED, loader.seed).tolist()
        crowded = []  # a description of each
        for row in rows:
            labels = label_count(loader.index.text(row, tokenizer.normalise), tokenizer)
            row_frames = frames(round(float(loader.index.seconds[row]) * loader.sample_rate))
            if labels > row_frames:
                name = loader.index.cut(row)["id"]
                crowded.append(f"{name!r} has {labels} labels and {row_frames} frames")
        if len(crowded) <= _CROWDED_SHARE * len(rows):
            return ""
        return (
            f"data.train: {len(crowded)} of {len(rows)} transcripts have more labels than encoder frames "
            f"({crowded[0]}), which is hard to learn, and impossible for CTC. Use shorter frames "
            "(encoder.stack_time, another encoder), or larger subwords (speechtrain prepare tokenizer)"
        )


def _describe_rows(key: str, index: Index, rows: Integers, problem: str) -> Iterator[str]:
    """Yield a line that ``rows`` have the problem, with their number and hours, unless there are none."""
    if len(rows):
        share = f"{hours(index.seconds[rows]):.2f} of {hours(index.seconds):.2f} h"
        yield f"data.{key}: {len(rows)} of {len(index)} recordings ({share}) {problem}"


def _name_warnings(key: str, index: Index, rows: Integers) -> Iterator[str]:
    """Yield a line if files have names in another Unicode form than in the manifest."""
    paths = [file_of(path) for path in sorted(_paths(index, sample_rows(rows, _SAMPLED_RECORDINGS, 0)))]
    others = [path for path in paths if path_on_disk(path) != path]
    if others:
        yield (
            f"data.{key}: {len(others)} of {len(paths)} checked files have names in another Unicode form "
            f"on the disk, such as {path_on_disk(others[0])}. They are used"
        )


def _paths(index: Index, rows: Integers) -> set[str]:
    """Return the paths of the audio files of ``rows``."""
    paths = set[str]()
    for row in rows.tolist():
        paths.update(files_of(index.cut(row)))
    return paths

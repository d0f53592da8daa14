"""Checks recordings and transcripts before a run, for problems that would end or waste the run."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator

import numpy as np

from speechtrain.batch import Skip
from speechtrain.data.audio import files_of, first_file, read_cut
from speechtrain.data.equal_content import equal_files
from speechtrain.data.formats.manifests import Record, text_of
from speechtrain.data.index import Index, crowded_transcripts_line, label_count
from speechtrain.data.loader import REASONS
from speechtrain.data.planned_lengths import Integers
from speechtrain.data.recordings import Unusable, header_or_none, path_on_disk
from speechtrain.data.sampler import MicroBatch
from speechtrain.data.tar_members import file_of
from speechtrain.data.training_set import (
    FILTERS,
    TrainingSet,
    hours,
    sample_rows,
    where_transcripts_are,
)
from speechtrain.data.training_stream import MOST_CHECKED, TrainingStream
from speechtrain.errors import DataError, one_line
from speechtrain.text.normalise import DAMAGED, REMARK, invisible
from speechtrain.text.vocabulary import Tokenizer

_LOG = logging.getLogger(__name__)
_SAMPLED_RECORDINGS = 1_000  # recordings of each set whose files must exist
_SAMPLED_ACOUSTICS = 200  # noises and room responses that are read. The noises of MUSAN take 2 s.
_ALL_TRANSCRIPTS = 100_000  # All transcripts of a set of up to this size are checked, which takes 2 s.
_SAMPLED_TRANSCRIPTS = 10_000  # transcripts of a larger set that are checked
_SAMPLED_AUDIO = 20  # recordings of data.train that are decoded, and whose rate is read
_CROWDED_SHARE = 0.01  # A smaller share of transcripts with more labels than frames causes no warning.
_MOST_COMPARED = 100_000  # A larger set is not searched for copies, because reading a cut takes 30 µs.


def check(stream: TrainingStream) -> None:
    """Check recordings of each set and transcripts of the training set, before the run starts.

    Of each set, 1,000 recordings are checked. Of a training set with more than 100,000 cuts, 10,000
    transcripts are checked, of a smaller one all. Raises DataError if

    - too many recordings of a set are missing,
    - too many training recordings have no transcript,
    - too many training transcripts cannot be encoded,
    - too many of some training recordings cannot be loaded,
    - too many training recordings are known to be unusable (see ``TrainingStream.unusable``),
    - a checked noise or room response cannot be read or is silent,
    - no recording of an evaluation set has a transcript.

    Too many means half of the checked ones, or more than ``most_bad`` of the SkipLog. An evaluation
    transcript may have unknown symbols.
    """
    training_set, tokenizer = stream.training_set, stream.loader.tokenizer
    _check_files(stream, "train", training_set.index, training_set.rows)
    if tokenizer.reads_text:
        _check_transcripts(stream)
    _check_acoustics(stream)
    _load_some(stream)
    _check_unusable(stream)
    sets = stream.evaluation_sets
    for name in sets.names:
        loader, plan = sets[name]
        index, rows = loader.index, np.sort(plan.rows)
        key = f"valid.{name}" if sets.specs else "train"
        _check_files(stream, key, index, rows)
        texts = (index.text(row, tokenizer.normalise) for row in rows.tolist())
        if tokenizer.reads_text and len(rows) and not any(text.strip() for text in texts):
            raise DataError(
                f"none of {len(rows)} recordings of data.valid.{name} has a transcript, and the error rate "
                f"selects the checkpoint: {where_transcripts_are(sets.source(name))}"
            )


def _check_files(stream: TrainingStream, key: str, index: Index, rows: Integers) -> None:
    """Raise DataError if too many recordings of the set ``key`` are missing."""
    sample = sample_rows(rows, _SAMPLED_RECORDINGS, stream.loader.seed)
    missing = []
    for row in sample.tolist():
        path = first_file(index.cut(row))
        if path and not os.path.exists(path_on_disk(file_of(path))):
            missing.append(path)
    if _is_too_many(stream, len(missing), len(sample)):
        raise DataError(
            f"{missing[0]} does not exist: {len(missing)} of {len(sample)} checked recordings of "
            f"data.{key} are missing. Correct the paths, or mount the folder"
        )


def _check_transcripts(stream: TrainingStream) -> None:
    """Raise DataError if too many training transcripts are empty or cannot be encoded."""
    loader, rows = stream.loader, stream.training_set.rows
    if len(rows) > _ALL_TRANSCRIPTS:
        rows = sample_rows(rows, _SAMPLED_TRANSCRIPTS, loader.seed)
    empty_cuts, unencodable_ids, unknown_symbols = list[Record](), list[str](), set[str]()
    for row in rows.tolist():
        cut = loader.index.cut(row)
        text = loader.index.text(row, loader.tokenizer.normalise, cut)
        if not text.strip() and not loader.allow_empty:
            empty_cuts.append(cut)
        if label_count(text, loader.tokenizer) < 0:
            unencodable_ids.append(cut["id"])
            unknown_symbols |= loader.tokenizer.unknown(text)
    if _is_too_many(stream, len(empty_cuts), len(rows)):
        example = text_of(empty_cuts[0])
        advice = where_transcripts_are(stream.training_set.source)
        if example.strip():
            advice = f"no word is left of {example[:40]!r}. Remove them, or set data.allow_empty=true"
        raise DataError(
            f"{len(empty_cuts)} of {len(rows)} recordings of data.train have no transcript, such as "
            f"{empty_cuts[0]['id']!r}: {advice}"
        )
    if not unencodable_ids:
        return
    listed_symbols = one_line(" ".join(map(repr, sorted(unknown_symbols))), 80)
    if _is_too_many(stream, len(unencodable_ids), len(rows)):
        raise DataError(
            f"the tokenizer cannot encode {len(unencodable_ids)} of {len(rows)} transcripts of data.train, "
            f"such as {unencodable_ids[0]!r}: unknown symbols {listed_symbols}. Set tokenizer=auto, or its "
            "normaliser or alphabet"
        )
    _LOG.warning(
        f"data.train: {len(unencodable_ids)} of {len(rows)} transcripts would not come back from their "
        f"labels and are skipped, such as {unencodable_ids[0]!r}: the tokenizer has no labels for "
        f"{listed_symbols}. If these symbols are not rare, set tokenizer=auto, or its normaliser or alphabet"
    )


def _check_acoustics(stream: TrainingStream) -> None:
    """Raise DataError for a noise or a room response that cannot be read or is silent."""
    loader = stream.loader
    for name, index in loader.acoustics.indices.items():
        for row in sample_rows(np.arange(len(index)), _SAMPLED_ACOUSTICS, loader.seed).tolist():
            cut = index.cut(row)
            try:
                if not read_cut(cut, loader.sample_rate).any():
                    raise Unusable("silent", first_file(cut))
            except Unusable as problem:
                raise DataError(f"augment.{name}: {problem}. Repair or remove it") from None


def _load_some(stream: TrainingStream) -> None:
    """Load a sample of the training recordings.

    The limits of bad recordings would allow each of the first ones to be skipped, and so updates without a
    recording. Raises DataError if half of the sample, or more than the whole set allows, is skipped.
    """
    all_rows = stream.training_set.rows
    rows = sample_rows(all_rows, _SAMPLED_AUDIO, stream.loader.seed)
    skips: list[Skip] = []
    for row in rows.reshape(-1, 1):
        single_recording = MicroBatch(row, percents=np.array([100], np.int16))
        batch = stream.loader(single_recording)
        if not batch.utterances:  # An unusable noise or room leaves the recording itself.
            skips += batch.skipped
    if skips and (2 * len(skips) >= len(rows) or not stream.skips.allows(len(skips), len(all_rows))):
        raise DataError(
            f"{len(skips)} of {len(rows)} recordings of data.train are unusable, such as {skips[0].id!r} "
            f"({skips[0].detail}: {REASONS[skips[0].reason]}). Repair or remove them"
        )


def _check_unusable(stream: TrainingStream) -> None:
    """Raise DataError if too many training recordings are known to be unusable."""
    checked = min(len(stream.training_set.rows), MOST_CHECKED)
    if _is_too_many(stream, len(stream.unusable), checked):
        raise DataError(
            f"{next(_unusable_warning(stream))}. Repair or remove them, or raise "
            f"data.max_bad={stream.skips.most_bad(checked):.0f}"
        )


def _unusable_warning(stream: TrainingStream) -> Iterator[str]:
    """Yield a line with the number, the hours and the three longest of the unusable training recordings."""
    index, unusable = stream.training_set.index, stream.unusable
    rows = np.array(sorted(unusable, key=lambda row: -index.seconds[row]), np.int32)
    skips = [unusable[row] for row in rows[:3].tolist()]
    longest = ", ".join(f"{skip.id!r} ({skip.reason}: {skip.detail})" for skip in skips)
    checked = min(len(stream.training_set.rows), MOST_CHECKED)
    fact = f"cannot be used and are left out ({checked} were checked), the longest are {longest}"
    yield from _describe_rows("train", index, rows, fact)


def _is_too_many(stream: TrainingStream, bad: int, total: int) -> bool:
    """Return whether the run should not start with ``bad`` of ``total`` checked recordings."""
    return bad > 0 and (2 * bad >= total or not stream.skips.allows(bad, total))


def warnings(stream: TrainingStream) -> Iterator[str]:
    """Yield a line for each fact of the recordings that the user may not expect."""
    training_set, sets = stream.training_set, stream.evaluation_sets
    yield from training_set.source.warnings()
    too_long = f"are longer than data.max_seconds={training_set.max_seconds:g}"
    too_short = f"are shorter than data.min_seconds={training_set.min_seconds:g}"
    facts = {"too_long": too_long, "too_short": too_short, "untranscribed": "have no transcript"}
    for reason, fact in facts.items():
        rows = np.flatnonzero(training_set.filter_numbers == FILTERS.index(reason))
        yield from _describe_rows("train", training_set.index, rows, f"{fact}, so they are not used")
    yield from _unusable_warning(stream)
    for name in sets.specs:
        yield from sets.source(name).warnings()
        index = sets[name].loader.index
        rows = np.flatnonzero(index.seconds > np.float32(training_set.max_seconds))
        yield from _describe_rows(f"valid.{name}", index, rows, f"{too_long}, as no training recording is")
    yield from _name_warnings("train", training_set.index, training_set.rows)
    for name in sets.specs:
        loader, plan = sets[name]
        yield from _name_warnings(f"valid.{name}", loader.index, np.sort(plan.rows))
    for name, counts in sets.heard(training_set.initial_sides).items():
        yield f"{name}: the weights of init_from were trained on {counts}, so its error rates are too low"
    yield from _low_rate_warning(stream)
    yield from _copies_warning(training_set)
    if stream.loader.tokenizer.reads_text:
        yield from _text_warnings(stream)


def _text_warnings(stream: TrainingStream) -> Iterator[str]:
    """Yield lines on training transcripts with remarks, invisible or damaged characters, or that change."""
    loader, tokenizer = stream.loader, stream.loader.tokenizer
    rows = sample_rows(stream.training_set.rows, _SAMPLED_TRANSCRIPTS, loader.seed)
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
        change = _change_of(text, tokenizer)
        if change:
            changed.append(f"{cut['id']!r} ({one_line(change, 200)})")
    facts = {
        f"{dropped_count} remarks, tags and invisible characters were dropped from {{}}": dropped,
        "{} have U+FFFD, which stands for damaged text": damaged,
        "{} would not come back from their labels": changed,
    }
    for fact, examples in facts.items():
        if examples:
            share = f"{len(examples)} of {len(rows)} transcripts"
            yield f"data.train: {fact.format(share)}, such as {examples[0]}"


def _change_of(text: str, tokenizer: Tokenizer) -> str:
    """Return how the labels of a normalised text change it, or "" if they give it back or there are none."""
    if label_count(text, tokenizer) < 0:
        return ""  # ``_check_transcripts`` counts it.
    decoded_text = tokenizer.decode(tokenizer.encode(text))
    return "" if decoded_text == text else f"{text!r} becomes {decoded_text!r}"


def _describe_rows(key: str, index: Index, rows: Integers, fact: str) -> Iterator[str]:
    """Yield a line that ``fact`` is true of ``rows``, with their number and hours, unless there are none."""
    if len(rows):
        share = f"{hours(index.seconds[rows]):.2f} of {hours(index.seconds):.2f} h"
        yield f"data.{key}: {len(rows)} of {len(index)} recordings ({share}) {fact}"


def _name_warnings(key: str, index: Index, rows: Integers) -> Iterator[str]:
    """Yield a line if files have names in another Unicode form than in the manifest."""
    paths = [file_of(path) for path in sorted(_paths(index, sample_rows(rows, _SAMPLED_RECORDINGS, 0)))]
    others = [path for path in paths if path_on_disk(path) != path]
    if others:
        yield (
            f"data.{key}: {len(others)} of {len(paths)} checked files have names in another Unicode form "
            f"on the disk, such as {path_on_disk(others[0])}. They are used"
        )


def _low_rate_warning(stream: TrainingStream) -> Iterator[str]:
    """Yield a line if all sampled recordings have a lower rate than ``sample_rate``."""
    loader = stream.loader
    rows = sample_rows(stream.training_set.rows, _SAMPLED_AUDIO, loader.seed)
    rates = []
    for path in _paths(loader.index, rows):
        header = header_or_none(path)
        if header is not None:
            rates.append(header.samplerate)
    if rates and max(rates) < loader.sample_rate:
        yield (
            f"data.train: all of {len(rates)} recordings that were read have at most {max(rates)} Hz, "
            f"and data.sample_rate={loader.sample_rate} leaves the upper bands empty. Equal rates "
            "cost less, if the encoder's sample_rate follows"
        )


def _copies_warning(training_set: TrainingSet) -> Iterator[str]:
    """Yield a line if files have equal content, because a held-out file may then also be trained on."""
    if not training_set.hold_out or len(training_set.usable) > _MOST_COMPARED:
        return
    groups = equal_files(_paths(training_set.index, training_set.usable))
    if groups:
        copies = sum(len(group) - 1 for group in groups)
        original, copy = groups[0][:2]
        yield (
            f"data.train: {copies} recordings are copies of others, such as {original} and {copy}. "
            "A copy may be held out while the other is trained on. speechtrain prepare stats lists them"
        )


def _paths(index: Index, rows: Integers) -> set[str]:
    """Return the paths of the audio files of ``rows``."""
    paths = set[str]()
    for row in rows.tolist():
        paths.update(files_of(index.cut(row)))
    return paths


def crowded_transcripts(stream: TrainingStream, frames: Callable[[int], int]) -> str:
    """Return a warning about training transcripts with more labels than encoder frames, or "".

    ``frames`` maps a number of samples to its number of encoder frames.
    """
    loader = stream.loader
    if not loader.tokenizer.reads_text:
        return ""
    rows = sample_rows(stream.training_set.rows, _SAMPLED_TRANSCRIPTS, loader.seed).tolist()
    line = crowded_transcripts_line(
        loader.index, rows, loader.tokenizer, frames, loader.sample_rate, _CROWDED_SHARE
    )
    return f"data.train: {line}" if line else ""

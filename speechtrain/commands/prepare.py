"""speechtrain prepare: tokenizers, manifests and converted recordings. Its ``--help`` imports no torch."""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import soundfile
from numpy.typing import NDArray

from speechtrain.commands._cli import Parser, add_command, console
from speechtrain.counter_rng import key_of
from speechtrain.data.corpora.digits import Digits
from speechtrain.data.formats.folder import files_below
from speechtrain.data.formats.manifests import Record, seconds_of, simple_cut, text_of
from speechtrain.data.prepare.cut_files import (
    Totals,
    check_room,
    cuts_of,
    line_of,
    map_in_threads,
    normalised_texts,
    open_output,
    refuse_empty,
    write_cuts,
)
from speechtrain.data.prepare.stats_table import AudioCheck, Statistics, check_audio_of, table_lines
from speechtrain.data.recordings import Header, Unusable, header_or_none, read_header
from speechtrain.data.source import Source
from speechtrain.data.sources import open_source
from speechtrain.data.tar_members import file_of
from speechtrain.errors import ConfigError, DataError, escape_controls, print_notice
from speechtrain.files import absolute_path, atomic, writing
from speechtrain.text.ngram import write_ngram

_FLAC_RATIO = 0.7  # largest size of FLAC, as a fraction of the size of PCM. Speech has about half the size.
_MAX_ORDER = 6  # words of an n-gram
_EXAMPLES = (
    "speechtrain prepare stats FOLDER",
    "speechtrain prepare tokenizer FOLDER --size 500 --out pieces.model",
    "speechtrain prepare corpus=librispeech download=true",
)


def parser() -> Parser:
    parser = Parser(
        prog="speechtrain prepare",
        description="Prepare data for training. A SOURCE is anything that data.train accepts: a lhotse, "
        "NeMo, MLPerf or fairseq manifest, a CSV or TSV with a header, a Kaldi directory, or a folder of "
        "recordings with transcripts. Several SOURCEs are read one after the other. "
        "'{path: FILE, audio: COLUMN, text: COLUMN}' names columns. In place of a COMMAND, "
        "corpus=NAME writes a public corpus below DATASET_DIR as manifests (corpus=NAME --help lists them).",
        examples=_EXAMPLES,
        exit_codes="0 done, 2 usage, 3 data (also: done, but some recordings are bad), 4 disk",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)

    tokenizer = add_command(
        commands,
        "tokenizer",
        "train a SentencePiece model on transcripts",
        "FOLDER_OR_MANIFEST --out tokenizer.model --size 1023",
    )
    _add_sources(tokenizer)
    tokenizer.add_argument("--out", type=Path, required=True, metavar="FILE.model")
    tokenizer.add_argument("--kind", choices=("unigram", "bpe"), default="unigram")
    tokenizer.add_argument("--size", type=int, default=1023, metavar="N", help="pieces, without blank (1023)")
    tokenizer.add_argument("--character-coverage", type=float, default=1.0, metavar="X", help="a share (1.0)")
    tokenizer.add_argument("--normaliser", default="lower", help="equal to tokenizer.normaliser (lower)")
    tokenizer.set_defaults(function=train_tokenizer)

    manifest = add_command(
        commands,
        "manifest",
        "write any source as a lhotse cut manifest",
        "FOLDER_OR_MANIFEST --out cuts.jsonl.gz --check",
    )
    _add_sources(manifest)
    manifest.add_argument("--out", type=Path, required=True, metavar="CUTS.jsonl[.gz]")
    manifest.add_argument("--check", action="store_true", help="decode all recordings, list the bad ones")
    manifest.add_argument("--drop-bad", action="store_true", help="check, and omit bad recordings")
    _add_jobs(manifest)
    manifest.set_defaults(function=write_manifest)

    convert = add_command(
        commands,
        "convert",
        "decode any source to WAV or FLAC, with a manifest",
        "FOLDER_OR_MANIFEST --out DIR --format flac",
    )
    _add_files(convert)
    convert.set_defaults(function=lambda arguments: convert_to_files(named_source(arguments), arguments))
    perturb = add_command(
        commands,
        "perturb",
        "write copies of any source at other speeds, with a manifest",
        "FOLDER_OR_MANIFEST --out DIR --speeds 0.9,1.1",
    )
    _add_files(perturb)
    perturb.add_argument("--speeds", default="0.9,1.1", metavar="X,Y", help="factors, 0.5 to 2 (0.9,1.1)")
    perturb.set_defaults(function=perturb_speed)

    split = add_command(
        commands,
        "split",
        "write any source as two manifests, one of them held out",
        "FOLDER_OR_MANIFEST --out DIR --share 0.1",
    )
    _add_sources(split)
    split.add_argument("--out", type=Path, required=True, metavar="DIR", help="for train.jsonl, valid.jsonl")
    split.add_argument("--share", type=float, default=0.05, metavar="X", help="held out, 0 to 1 (0.05)")
    unit = "the unit that is held out (speaker, if each recording names one of ten or more)"
    split.add_argument("--by", choices=("speaker", "recording"), help=unit)
    split.set_defaults(function=write_split)

    stats = add_command(
        commands, "stats", "print the sizes of any source, with its likely errors", "FOLDER_OR_MANIFEST"
    )
    _add_sources(stats)
    stats.add_argument("--json", action="store_true", help="print JSON, with the id of each likely error")
    stats.add_argument(
        "--no-audio",
        action="store_true",
        help="decode nothing, so report no silent, clipped or bad recordings",
    )
    _add_jobs(stats)
    stats.set_defaults(function=write_stats)

    lm = add_command(
        commands,
        "lm",
        "make a language model of transcripts, for decoder.lm",
        "FOLDER_OR_MANIFEST --out lm.arpa",
    )
    _add_sources(lm)
    lm.add_argument("--out", type=Path, required=True, metavar="FILE.arpa")
    lm.add_argument("--order", type=int, default=3, metavar="N", help="words of an n-gram, 1 to 6 (3)")
    lm.add_argument("--normaliser", default="lower", help="equal to tokenizer.normaliser (lower)")
    lm.set_defaults(function=train_lm)

    tsv = add_command(
        commands,
        "tsv",
        "write fairseq's train.tsv and valid.tsv of a folder's recordings",
        "FOLDER --out DIR",
    )
    tsv.add_argument("folder", type=Path, metavar="FOLDER", help="recordings, at any depth")
    tsv.add_argument("--out", type=Path, required=True, metavar="DIR")
    tsv.add_argument("--valid-percent", type=float, default=0.01, metavar="X", help="a share, 0 to 1 (0.01)")
    tsv.add_argument("--seed", type=int, default=42, metavar="N", help="seed of the split (42)")
    tsv.add_argument("--ext", default="flac", help="suffix of the recordings (flac)")
    _add_jobs(tsv)
    tsv.set_defaults(function=write_tsv)

    return parser


def _add_files(parser: argparse.ArgumentParser) -> None:
    _add_sources(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--format", choices=("wav", "flac"), default="wav", help="16 bits per sample (wav)")
    parser.add_argument("--rate", type=int, default=16_000, metavar="HZ", help="sample rate (16000)")
    _add_jobs(parser)


def _add_sources(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sources", nargs="*", metavar="SOURCE", help="manifest or folder of recordings")
    parser.add_argument("--corpus", choices=("digits",), help="the embedded corpus instead")


def _add_jobs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="recordings decoded in parallel (2)")


def run(argv: list[str]) -> int:
    """Run a subcommand and return its exit code. Raises a SpeechtrainError."""
    if any(argument.startswith("corpus=") for argument in argv):
        from speechtrain.commands.prepare_corpus import prepare_corpus

        return prepare_corpus(argv)
    arguments = parser().parse_args(argv)
    for name in ("jobs", "size"):
        if getattr(arguments, name, 1) < 1:
            raise ConfigError(f"--{name} {getattr(arguments, name)}: it must be at least 1")
    return cast("int", arguments.function(arguments))


def train_tokenizer(arguments: argparse.Namespace) -> int:
    """Train SentencePiece on the normalised transcripts of the sources, and return the exit code."""
    from speechtrain.data.prepare.subwords import Subwords

    names = ("kind", "size", "normaliser", "character_coverage")
    subwords = Subwords(**{name: getattr(arguments, name) for name in names})
    subwords.train(cuts_of(named_source(arguments)), arguments.out)
    return 0


def train_lm(arguments: argparse.Namespace) -> int:
    """Train an n-gram language model on the normalised transcripts, and return the exit code."""
    out, order = arguments.out, arguments.order
    if not 1 <= order <= _MAX_ORDER:
        raise ConfigError(f"--order {order}: it must be 1 to {_MAX_ORDER}")
    texts = normalised_texts(cuts_of(named_source(arguments)), arguments.normaliser)
    with writing(out, "use another --out"):
        count, sizes = write_ngram(texts, out, order)
    print(f"{out}: {count} transcripts, n-grams of 1 to {len(sizes)} words: {', '.join(map(str, sizes))}")
    print(f"use it with: decoder=beam (ctc_beam for CTC) decoder.lm={out.absolute()}")
    return 0


def named_source(arguments: argparse.Namespace) -> Source:
    """Open the SOURCEs or the embedded corpus of the arguments, and print the warnings of the source.

    Raises ConfigError if the arguments have both, or neither.
    """
    if bool(arguments.sources) == bool(arguments.corpus):
        raise ConfigError("give one or more SOURCEs, or --corpus digits")
    if arguments.corpus:
        return Digits("train", 2000)
    source = open_source(arguments.sources)
    for warning in source.warnings():
        print_notice(f"warning: {warning}")
    return source


def write_manifest(arguments: argparse.Namespace) -> int:
    """Write the cuts of the sources as a manifest. Return 3 if --check finds a bad recording, otherwise 0."""
    cuts = cuts_of(named_source(arguments))
    if arguments.check or arguments.drop_bad:
        checked_cuts = map_in_threads(_decode, cuts, arguments.jobs)
    else:
        checked_cuts = ((cut, cut) for cut in cuts)  # The second of the two is the result of the check.
    bad_count = write_cuts(arguments.out, checked_cuts, keeps_bad=not arguments.drop_bad)
    return DataError.exit_code if bad_count and not arguments.drop_bad else 0


def _decode(cut: Record) -> Record:
    """Return the cut after a test that its audio can be decoded. Raises Unusable if not."""
    from speechtrain.data.audio import read_cut

    read_cut(cut, 16_000)
    return cut


def write_stats(arguments: argparse.Namespace) -> int:
    """Print the statistics of the sources. Return 3 if a recording is bad, otherwise 0."""
    cuts = cuts_of(named_source(arguments))
    checked_cuts: Iterable[tuple[Record, AudioCheck | Unusable | None]]
    if arguments.no_audio:
        checked_cuts = ((cut, None) for cut in cuts)
    else:
        checked_cuts = map_in_threads(check_audio_of, cuts, arguments.jobs)
    statistics = Statistics()
    has_bad = False
    for cut, audio_check in checked_cuts:
        statistics.add(cut, audio_check)
        has_bad = has_bad or isinstance(audio_check, Unusable)
    summary = statistics.as_json()
    if arguments.json:
        print(json.dumps(summary, indent=1))
    else:
        print("\n".join(map(escape_controls, table_lines(summary))))
    return DataError.exit_code if has_bad else 0


def write_split(arguments: argparse.Namespace) -> int:
    """Write the cuts of the sources to ``train.jsonl`` and ``valid.jsonl``, and return the exit code.

    All cuts of a speaker, or of a recording, are in the same file.
    """
    from speechtrain.data.hold_out import (  # imports torch
        NO_SIDES,
        held_out,
        held_out_recordings,
        held_out_speakers,
    )
    from speechtrain.data.index import open_index

    if not 0 < arguments.share < 1:
        raise ConfigError(f"--share {arguments.share}: it must be above 0 and below 1")
    source = named_source(arguments)
    index = open_index(source)
    without_speaker = int((index.speakers < 0).sum())
    if without_speaker and arguments.by == "speaker":
        counts = f"{without_speaker} of {len(index)} cuts"
        raise DataError(f"--by speaker: {counts} name no speaker. Use --by recording")
    paths = {split: arguments.out / f"{split}.jsonl" for split in ("train", "valid")}
    former_trained, former_held_out = _recordings(paths["train"]), _recordings(paths["valid"])
    former = NO_SIDES.with_more(former_trained, former_held_out)
    if len(former_trained):
        counts = f"{len(former.trained)} recordings for training and {len(former.held_out)} held out"
        print(f"{arguments.out} has an earlier split, which stays: {counts}")
    groups = index.groups(np.arange(len(index)))
    rules = {None: held_out, "speaker": held_out_speakers, "recording": held_out_recordings}
    rule = rules[arguments.by]
    is_held_out, unit = rule(groups, index.seconds, arguments.share, former)
    if is_held_out.all():
        raise DataError(f"the sources have only one {unit}, which cannot be split. Give more")
    totals = {split: Totals() for split in paths}
    with contextlib.ExitStack() as stack:
        files = {split: stack.enter_context(open_output(path)) for split, path in paths.items()}
        for cut, is_valid in zip(cuts_of(source), is_held_out.tolist(), strict=True):
            split = "valid" if is_valid else "train"
            totals[split].add(cut)
            files[split].write(line_of(cut))
    for split, path in paths.items():
        print(f"{path}: {totals[split].describe()}")
    keys = groups[unit]
    print(f"held out: {len(np.unique(keys[is_held_out]))} of {len(np.unique(keys))} {unit}s")
    return 0


def _recordings(path: Path) -> NDArray[np.int64]:
    """Return the keys of the recordings in a file of cuts, which are none if it does not exist."""
    from speechtrain.data.index import open_index

    return open_index(open_source(str(path))).recordings if path.exists() else np.zeros(0, np.int64)


def write_tsv(arguments: argparse.Namespace) -> int:
    """Write ``train.tsv`` and ``valid.tsv`` by fairseq's rule. Return 3 if a recording is bad, otherwise 0.

    The rule: for each file in sorted order, a number is drawn from a uniform distribution over [0, 1). The
    file is for training if the number is above ``valid_percent``. A number is also drawn for a bad file, so
    that the split of the other files does not depend on it.
    """
    share = arguments.valid_percent
    if not 0 <= share <= 1:
        raise ConfigError(f"--valid-percent {share}: it must be a share from 0 to 1")
    folder = absolute_path(arguments.folder).resolve()
    if not _fits_tsv(str(folder)):
        raise DataError(f"{str(folder)!a}: a TSV cannot contain this path. Rename the folder")
    suffix = f".{arguments.ext.lstrip('.')}"
    names = files_below(folder, (suffix.lower(),))
    if not names:
        raise DataError(f"{folder} contains no *{suffix} file. Set another suffix with --ext")

    def header_of(name: str) -> Header:
        if not _fits_tsv(name):
            raise Unusable("unreadable", "a TSV cannot contain its name. Rename it")
        return read_header(str(folder / name))

    draw_uniform = random.Random(arguments.seed).random
    headers: dict[str, dict[str, Header]] = {"train": {}, "valid": {}}
    totals = Totals()
    for name, header_or_problem in map_in_threads(header_of, names, arguments.jobs):
        split = "train" if draw_uniform() > share else "valid"
        if isinstance(header_or_problem, Unusable):
            printed_name = name if _fits_tsv(name) else ascii(name)
            totals.refuse(printed_name, header_or_problem)
        else:
            headers[split][name] = header_or_problem
            totals.utterances += 1
    refuse_empty(totals, arguments.out)
    for split, headers_by_name in headers.items():
        if split == "train" or share > 0:
            _write_tsv_file(arguments.out / f"{split}.tsv", folder, headers_by_name)
    if totals.bad:
        print(f"{totals.bad.total()} of {len(names)} recordings are bad and are in neither file")
    return DataError.exit_code if totals.bad else 0


def _write_tsv_file(path: Path, folder: Path, headers: dict[str, Header]) -> None:
    """Write fairseq's manifest of recordings in ``folder``, and print its size.

    ``headers`` has the header of each recording by its path relative to ``folder``.
    """
    seconds = 0.0
    with open_output(path) as file:
        file.write(f"{folder}\n".encode())
        for name, recording in headers.items():
            file.write(f"{name}\t{recording.frames}\n".encode())
            seconds += recording.duration
    line = f"{path}: {len(headers)} recordings, {seconds / 3600:.2f} h"
    if not headers:
        line += ". Training refuses an empty set: change --valid-percent or --seed"
    print(line)


def _fits_tsv(name: str) -> bool:
    """Return whether a TSV can contain a path: it has no tab, no line break, and only bytes of UTF-8."""
    try:
        return not any(byte in b"\t\r\n" for byte in name.encode())
    except UnicodeEncodeError:
        return False


@dataclass(frozen=True)
class Converter:
    """A function that decodes a cut and writes it as a mono file of 16 bits below ``folder``.

    A complete file of an earlier call is reused. If ``percent`` is not 100, the speed is changed as in
    training, and the id of the copy ends with the factor.
    """

    folder: Path
    format: str  # wav or flac
    rate: int  # sample rate of the file in Hz
    percent: int = 100  # speed of the copy in percent of the original speed

    def name(self, cut: Record) -> str:
        """Return the id of the cut's copy, such as ``a_sp0.9``."""
        if self.percent == 100:
            return str(cut["id"])
        return f"{cut['id']}_sp{self.percent / 100:g}"

    def path(self, cut: Record) -> Path:
        """Return the path of the copy. The file has the name of the id.

        If a file name cannot contain the id, other characters replace some, and a hash of the id is added.
        """
        name = self.name(cut)
        safe_name = re.sub(r"[^\w.-]|^\.", "_", name)[:120]
        if safe_name != name:
            safe_name += f"-{key_of(name) & 0xFFFFFFFF:08x}"
        # The files are distributed over 256 folders, because a folder with a million files is slow.
        subfolder = f"{key_of(name) & 0xFF:02x}"
        return self.folder / "audio" / subfolder / f"{safe_name}.{self.format}"

    def bytes(self, seconds: float) -> float:
        """Return the largest possible size of the file of a cut of ``seconds``."""
        samples = seconds * self.rate * 100 / self.percent
        file_bytes = samples * 2
        if self.format == "flac":
            file_bytes *= _FLAC_RATIO
        return file_bytes + 4096  # header, and the rounding to blocks of the disk

    def __call__(self, cut: Record) -> Record:
        """Write the file of a cut, and return the cut of the copy.

        Raises Unusable for bad audio, and OSError if the file cannot be written.
        """
        from speechtrain.data.audio import read_cut
        from speechtrain.data.speed import change_speed

        path = self.path(cut)
        samples = self._existing_samples(cut, path)
        if samples is None:
            audio = change_speed(read_cut(cut, self.rate), self.percent, self.rate)
            pcm = np.clip(np.rint(audio * 32768.0), -32768, 32767).astype(np.int16)
            # The bytes are first written to memory, because libsndfile does not report a full disk.
            buffer = io.BytesIO()
            soundfile.write(buffer, pcm, self.rate, format=self.format.upper(), subtype="PCM_16")
            # A flush of each file to the disk would take hours for a million files.
            with atomic(path, durable=False) as temporary:
                temporary.write_bytes(buffer.getvalue())
            samples = len(pcm)
        supervisions = cut.get("supervisions") or [{}]
        labels = {key: supervisions[0].get(key) for key in ("speaker", "language")}
        seconds = samples / self.rate
        return simple_cut(
            self.name(cut), str(path.absolute()), 0.0, seconds, text_of(cut), rate=self.rate, **labels
        )

    def _existing_samples(self, cut: Record, path: Path) -> int | None:
        """Return the number of samples in the file of an earlier call, or None if it cannot be reused.

        It can be reused if it is newer than the audio files of the cut, and has the right rate and one
        channel.
        """
        from speechtrain.data.audio import files_of

        try:
            written_at = path.stat().st_mtime_ns
            for source in files_of(cut):
                if Path(file_of(source)).stat().st_mtime_ns > written_at:
                    return None
        except OSError:
            return None
        stored = header_or_none(str(path))
        if stored is None or (stored.samplerate, stored.channels) != (self.rate, 1):
            return None
        return stored.frames


def perturb_speed(arguments: argparse.Namespace) -> int:
    """Write a copy of the sources at each of the speeds. Return 3 if a recording is bad, otherwise 0."""
    texts = arguments.speeds.split(",")
    # A text that is not a valid factor, or equal to another one, makes ``percents`` smaller than ``texts``.
    factors = [float(text) for text in texts if re.fullmatch(r"\d(\.\d\d?)?", text)]
    percents = {round(factor * 100) for factor in factors if 0.5 <= factor <= 2 and factor != 1}
    if len(percents) < len(texts):
        fix = "give different factors from 0.5 to 2 with at most two decimals, such as 0.9,1.1"
        raise ConfigError(f"--speeds {arguments.speeds}: {fix}")
    return convert_to_files(named_source(arguments), arguments, sorted(percents))


def convert_to_files(source: Source, arguments: argparse.Namespace, percents: Sequence[int] = (100,)) -> int:
    """Write the recordings of a source at each speed, and ``cuts.jsonl`` with all copies.

    ``percents`` are the speeds in percent. The source is read twice, first to predict the size of the files.
    Return 3 if a recording is bad, otherwise 0. Raises MachineError if the disk has too little space.
    """
    if not 1_000 <= arguments.rate <= 768_000:
        raise ConfigError(f"--rate {arguments.rate}: it must be 1000 to 768000 Hz, such as 16000")
    original = Converter(arguments.out, arguments.format, arguments.rate)
    converters = [replace(original, percent=percent) for percent in percents]
    needed_bytes = 0.0
    for cut in cuts_of(source):
        seconds = seconds_of(cut)
        for converter in converters:
            if not converter.path(cut).exists():
                needed_bytes += converter.bytes(seconds)
    fix = "use another --out, or use --format flac"
    print(check_room(arguments.out, needed_bytes, "up to ", fix), flush=True)
    copies = (map_in_threads(converter, cuts_of(source), arguments.jobs) for converter in converters)
    bad_count = write_cuts(arguments.out / "cuts.jsonl", itertools.chain.from_iterable(copies))
    return DataError.exit_code if bad_count else 0


main = console(run)

if __name__ == "__main__":
    main()

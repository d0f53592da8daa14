"""speechtrain prepare: tokenizers, manifests and converted recordings; `--help` does not import torch."""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import soundfile

from speechtrain.commands._cli import Parser, add_command, console
from speechtrain.commands.prepare_lm import add_lm
from speechtrain.counter_rng import key_of
from speechtrain.data.corpora.digits import Digits
from speechtrain.data.formats.folder import files_below
from speechtrain.data.formats.lhotse_cuts import Samples
from speechtrain.data.formats.manifests import Record, seconds_of, simple_cut, text_of
from speechtrain.data.prepare.cut_files import (
    Totals,
    check_room,
    cuts_of,
    line_of,
    opened,
    parallel,
    refuse_empty,
    write_cuts,
)
from speechtrain.data.prepare.stats_table import Statistics, hear, table
from speechtrain.data.recordings import Header, Unusable, header, read_header
from speechtrain.data.source import Source
from speechtrain.data.sources import open_source
from speechtrain.data.tar_members import file_of
from speechtrain.errors import ConfigError, DataError, print_notice, printable
from speechtrain.files import atomic, whole_path

_FLAC_SHARE = 0.7  # most of PCM's size that FLAC takes; speech takes about half
_EXAMPLES = (
    "speechtrain prepare stats FOLDER",
    "speechtrain prepare tokenizer FOLDER --size 500 --out pieces.model",
    "speechtrain prepare corpus=librispeech download=true",
)


def parser() -> Parser:
    build = Parser(
        prog="speechtrain prepare",
        description="Prepare data for training. A SOURCE is anything that data.train accepts: a lhotse, "
        "NeMo, MLPerf or fairseq manifest, a CSV or TSV with a header, a Kaldi directory, or a folder of "
        "recordings with transcripts. Several SOURCEs are read one after the other; "
        "'{path: FILE, audio: COLUMN, text: COLUMN}' names columns. In place of a COMMAND, "
        "corpus=NAME writes a public corpus below DATASET_DIR as manifests; corpus=NAME --help lists them.",
        examples=_EXAMPLES,
        exit_codes="0 done, 2 usage, 3 data (also: done, but some recordings are bad), 4 disk",
    )
    commands = build.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)

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
    tokenizer.set_defaults(act=train_tokenizer)

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
    manifest.set_defaults(act=write_manifest)

    _add_convert(commands)

    _add_split(commands)

    stats = add_command(
        commands, "stats", "tell what any source holds, with its likely errors", "FOLDER_OR_MANIFEST"
    )
    _add_sources(stats)
    stats.add_argument("--json", action="store_true", help="print JSON, with the id of each likely error")
    stats.add_argument(
        "--no-audio", action="store_true", help="decode nothing, so find no silent, clipped or bad ones"
    )
    _add_jobs(stats)
    stats.set_defaults(act=write_stats)

    add_lm(commands, _add_sources, lambda given: map(text_of, cuts_of(named_source(given))))
    _add_tsv(commands)
    return build


def _add_split(commands: Any) -> None:
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
    split.set_defaults(act=write_split)


def _add_convert(commands: Any) -> None:
    convert = add_command(
        commands,
        "convert",
        "decode any source to WAV or FLAC, with a manifest",
        "FOLDER_OR_MANIFEST --out DIR --format flac",
    )
    _add_files(convert)
    convert.set_defaults(act=lambda given: convert_to_files(named_source(given), given))
    perturb = add_command(
        commands,
        "perturb",
        "write copies of any source at other speeds, with a manifest",
        "FOLDER_OR_MANIFEST --out DIR --speeds 0.9,1.1",
    )
    _add_files(perturb)
    perturb.add_argument("--speeds", default="0.9,1.1", metavar="X,Y", help="factors, 0.5 to 2 (0.9,1.1)")
    perturb.set_defaults(act=perturb_speed)


def _add_files(build: argparse.ArgumentParser) -> None:
    _add_sources(build)
    build.add_argument("--out", type=Path, required=True, metavar="DIR")
    build.add_argument("--format", choices=("wav", "flac"), default="wav", help="16 bits per sample (wav)")
    build.add_argument("--rate", type=int, default=16_000, metavar="HZ", help="sample rate (16000)")
    _add_jobs(build)


def _add_tsv(commands: Any) -> None:
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
    tsv.set_defaults(act=write_tsv)


def _add_sources(build: argparse.ArgumentParser) -> None:
    build.add_argument("sources", nargs="*", metavar="SOURCE", help="manifest or folder of recordings")
    build.add_argument("--corpus", choices=("digits",), help="the embedded corpus instead")


def _add_jobs(build: argparse.ArgumentParser) -> None:
    build.add_argument("--jobs", type=int, default=2, metavar="N", help="recordings decoded in parallel (2)")


def run(argv: list[str]) -> int:
    """Run one subcommand and return its exit code. Raises a SpeechtrainError if it fails."""
    if any(argument.startswith("corpus=") for argument in argv):
        from speechtrain.commands.prepare_corpus import prepare_corpus

        return prepare_corpus(argv)
    arguments = parser().parse_args(argv)
    for name in ("jobs", "size"):
        if getattr(arguments, name, 1) < 1:
            raise ConfigError(f"--{name} {getattr(arguments, name)}: it must be at least 1")
    return cast("int", arguments.act(arguments))


def train_tokenizer(arguments: argparse.Namespace) -> int:
    """Train SentencePiece on the normalised transcripts of the sources."""
    from speechtrain.data.prepare.subwords import Subwords

    names = ("kind", "size", "normaliser", "character_coverage")
    subwords = Subwords(**{name: getattr(arguments, name) for name in names})
    subwords.train(cuts_of(named_source(arguments)), arguments.out)
    return 0


def named_source(arguments: argparse.Namespace) -> Source:
    """Open the SOURCEs or the embedded corpus. Raises ConfigError for neither or both."""
    if bool(arguments.sources) == bool(arguments.corpus):
        raise ConfigError("give one or more SOURCEs, or --corpus digits")
    if arguments.corpus:
        return Digits("train", 2000)
    source = open_source(arguments.sources)
    for warning in source.warnings():
        print_notice(f"warning: {warning}")
    return source


def write_manifest(arguments: argparse.Namespace) -> int:
    """Write the sources' cuts; return 3 if --check finds a bad recording, else 0."""
    cuts = cuts_of(named_source(arguments))
    looks = arguments.check or arguments.drop_bad
    checked = parallel(_checked, cuts, arguments.jobs) if looks else ((cut, cut) for cut in cuts)
    bad = write_cuts(arguments.out, checked, keeps_bad=not arguments.drop_bad)
    return DataError.exit_code if bad and not arguments.drop_bad else 0


def _checked(cut: Record) -> Record:
    """Return the cut. Raises Unusable."""
    from speechtrain.data.audio import read_cut

    read_cut(cut, 16_000)
    return cut


def write_stats(arguments: argparse.Namespace) -> int:
    """Print what the sources hold; return 3 if a recording is bad, else 0."""
    cuts = cuts_of(named_source(arguments))
    found = ((cut, None) for cut in cuts) if arguments.no_audio else parallel(hear, cuts, arguments.jobs)
    statistics, bad = Statistics(), 0
    for cut, heard in found:
        statistics.add(cut, heard)
        bad += isinstance(heard, Unusable)
    result = statistics.result() | statistics.long()
    print(json.dumps(result, indent=1) if arguments.json else "\n".join(map(printable, table(result))))
    return DataError.exit_code if bad else 0


def write_split(arguments: argparse.Namespace) -> int:
    """Write the sources' cuts to ``train.jsonl`` and ``valid.jsonl``, each speaker or recording to one."""
    from speechtrain.data.hold_out import GROUPS, groups_of, held_out  # torch

    if not 0 < arguments.share < 1:
        raise ConfigError(f"--share {arguments.share}: it must be above 0 and below 1")
    source = named_source(arguments)
    columns = np.dtype([*((by, "i8") for by in GROUPS), ("seconds", "f4")])
    facts = np.fromiter(((*groups_of(cut), seconds_of(cut)) for cut in cuts_of(source)), columns)
    if arguments.by == "speaker" and (unnamed := int((facts["speaker"] < 0).sum())):
        raise DataError(f"--by speaker: {unnamed} of {len(facts)} cuts name no speaker; use --by recording")
    groups = {by: facts[by] for by in GROUPS}
    held, by = held_out(groups, facts["seconds"], arguments.share, by=arguments.by or "")
    if held.all():
        raise DataError(f"there is one {by} only, which cannot be split; give more")
    with contextlib.ExitStack() as stack:
        names = ("train", "valid")
        files = {name: stack.enter_context(opened(arguments.out / f"{name}.jsonl")) for name in names}
        totals = {name: Totals() for name in names}
        for cut, is_held in zip(cuts_of(source), held.tolist(), strict=True):
            name = names[is_held]
            totals[name].add(cut)
            files[name].write(line_of(cut))
    for name in names:
        print(f"{arguments.out / name}.jsonl: {totals[name].describe()}")
    print(f"held out: {len(np.unique(groups[by][held]))} of {len(np.unique(groups[by]))} {by}s")
    return 0


def write_tsv(arguments: argparse.Namespace) -> int:
    """Write ``train.tsv`` and ``valid.tsv`` by fairseq's rule; return 3 if a recording is bad, else 0.

    Each file, in sorted order, gets a uniform draw and is for training if it is above
    ``valid_percent``. A bad file uses its draw too, so the split of the other files is the same.
    """
    share = arguments.valid_percent
    if not 0 <= share <= 1:
        raise ConfigError(f"--valid-percent {share}: it must be a share from 0 to 1")
    folder = whole_path(arguments.folder).resolve()
    if not _fits_tsv(str(folder)):
        raise DataError(f"{str(folder)!a}: a TSV cannot contain this path; rename the folder")
    suffix = f".{arguments.ext.lstrip('.')}"
    names = files_below(folder, (suffix.lower(),))
    if not names:
        raise DataError(f"{folder} contains no *{suffix} file; set another suffix with --ext")
    draw = random.Random(arguments.seed).random
    splits: dict[str, list[tuple[str, Any]]] = {"train": [], "valid": []}
    totals = Totals()
    for name, found in parallel(lambda name: _header_of(folder, name), names, arguments.jobs):
        split = "train" if draw() > share else "valid"
        if isinstance(found, Unusable):
            totals.refuse(name if _fits_tsv(name) else ascii(name), found)
        else:
            splits[split].append((name, found))
    totals.utterances = sum(map(len, splits.values()))
    refuse_empty(totals, arguments.out)
    for split, chosen in splits.items():
        if split == "train" or share > 0:
            _write_split(arguments.out / f"{split}.tsv", folder, chosen)
    if totals.bad:
        print(f"{totals.bad.total()} of {len(names)} recordings are bad and are in neither file")
    return DataError.exit_code if totals.bad else 0


def _write_split(path: Path, folder: Path, chosen: list[tuple[str, Any]]) -> None:
    with opened(path) as file:
        file.write(f"{folder}\n".encode())
        for name, info in chosen:
            file.write(f"{name}\t{info.frames}\n".encode())
    hours = sum(info.frames / info.samplerate for _, info in chosen) / 3600
    more = "" if chosen else "; training refuses an empty set: change --valid-percent or --seed"
    print(f"{path}: {len(chosen)} recordings, {hours:.2f} h{more}")


def _fits_tsv(name: str) -> bool:
    """Whether a TSV in UTF-8 can hold a path: no tab, no line break, no bytes of another encoding."""
    try:
        return not any(byte in b"\t\r\n" for byte in name.encode())
    except UnicodeEncodeError:
        return False


def _header_of(folder: Path, name: str) -> Header:
    """Return a recording's header. Raises Unusable if it cannot be in a TSV."""
    if not _fits_tsv(name):
        raise Unusable("unreadable", "a TSV cannot contain its name; rename it")
    return read_header(str(folder / name))


@dataclass(frozen=True)
class Converter:
    """Decodes cuts to mono 16-bit files below ``folder``. Complete files that exist are kept.

    A ``percent`` other than 100 changes the speed as in training. Ids then end with the factor.
    """

    folder: Path
    format: str
    rate: int
    percent: int = 100

    def name(self, cut: Record) -> str:
        """Return the id of a cut's copy."""
        if self.percent == 100:
            return str(cut["id"])
        return f"{cut['id']}_sp{self.percent / 100:g}"

    def path(self, cut: Record) -> Path:
        """Return the path of a cut's audio: its id, with a hash if a file name cannot contain the id."""
        name = self.name(cut)
        safe = re.sub(r"[^\w.-]|^\.", "_", name)[:120]
        if safe != name:
            safe += f"-{key_of(name) & 0xFFFFFFFF:08x}"
        # a folder of a million files is slow everywhere
        return self.folder / "audio" / f"{key_of(name) & 0xFF:02x}" / f"{safe}.{self.format}"

    def bytes(self, seconds: float) -> float:
        """Return the largest size of a file."""
        share = _FLAC_SHARE if self.format == "flac" else 1.0
        samples = seconds * self.rate * 100 / self.percent
        return samples * 2 * share + 4096

    def __call__(self, cut: Record) -> Record:
        """Write one file; return its cut. Raises Unusable for its audio, OSError if it cannot write."""
        from speechtrain.data.audio import read_cut
        from speechtrain.data.speed import change_speed

        path = self.path(cut)
        samples = self._done(cut, path)
        if samples is None:
            audio = change_speed(read_cut(cut, self.rate), self.percent, self.rate)
            samples = self._write(audio, path)
        first = (cut.get("supervisions") or [{}])[0]
        told = {"speaker": first.get("speaker"), "language": first.get("language"), "text": text_of(cut)}
        seconds = samples / self.rate
        return simple_cut(self.name(cut), str(path.absolute()), 0.0, duration=seconds, rate=self.rate, **told)

    def _write(self, audio: Samples, path: Path) -> int:
        """Write audio (S,) to a file. Return S."""
        pcm = np.clip(np.rint(audio * 32768.0), -32768, 32767).astype(np.int16)
        buffer = io.BytesIO()  # libsndfile does not report a full disk
        soundfile.write(buffer, pcm, self.rate, format=self.format.upper(), subtype="PCM_16")
        with atomic(path, durable=False) as temporary:  # a sync for each of a million files takes hours
            temporary.write_bytes(buffer.getvalue())
        return len(pcm)

    def _done(self, cut: Record, path: Path) -> int | None:
        """Return the samples of a file from an earlier call, if it is newer than its sources."""
        from speechtrain.data.audio import files_of

        try:
            written = path.stat().st_mtime_ns
            if any(os.stat(file_of(path)).st_mtime_ns > written for path in files_of(cut)):
                return None
        except OSError:
            return None
        info = header(str(path))
        return int(info.frames) if info and (info.samplerate, info.channels) == (self.rate, 1) else None


def perturb_speed(arguments: argparse.Namespace) -> int:
    """Write a copy of the sources at each of the speeds; return 3 if a recording is bad, else 0."""
    texts = arguments.speeds.split(",")
    factors = [float(text) for text in texts if re.fullmatch(r"\d(\.\d\d?)?", text)]
    percents = {round(factor * 100) for factor in factors if 0.5 <= factor <= 2 and factor != 1}
    if len(percents) < len(texts):
        fix = "give different factors from 0.5 to 2 with at most two decimals, such as 0.9,1.1"
        raise ConfigError(f"--speeds {arguments.speeds}: {fix}")
    return convert_to_files(named_source(arguments), arguments, sorted(percents))


def convert_to_files(source: Source, arguments: argparse.Namespace, percents: Sequence[int] = (100,)) -> int:
    """Convert a source at each speed (read twice: first for its size) and write ``cuts.jsonl``.

    Returns 3 if a recording is bad, else 0.
    """
    if not 1_000 <= arguments.rate <= 768_000:
        raise ConfigError(f"--rate {arguments.rate}: it must be 1000 to 768000 Hz, such as 16000")
    original = Converter(arguments.out, arguments.format, arguments.rate)
    converters = [replace(original, percent=percent) for percent in percents]
    _check_room(converters, source)
    copies = (parallel(converter, cuts_of(source), arguments.jobs) for converter in converters)
    bad = write_cuts(arguments.out / "cuts.jsonl", itertools.chain.from_iterable(copies))
    return DataError.exit_code if bad else 0


def _check_room(converters: Sequence[Converter], source: Source) -> None:
    """Print the disk space that the conversion needs. Raises MachineError if less is free."""
    need = 0.0
    for cut in cuts_of(source):
        seconds = seconds_of(cut)
        for converter in converters:
            if not converter.path(cut).exists():
                need += converter.bytes(seconds)
    fix = "use another --out, or use --format flac"
    print(check_room(converters[0].folder, need, "up to ", fix), flush=True)


main = console(run)

if __name__ == "__main__":
    main()

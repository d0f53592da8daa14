"""speechtrain prepare corpus=NAME: a public corpus on the disk as manifests that data.train reads."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from speechtrain.commands._cli import Parser
from speechtrain.data.corpora.downloads import Archive, fetch
from speechtrain.data.corpora.huggingface import HuggingFace
from speechtrain.data.corpora.recipes import Set, cuts_by_part, filled
from speechtrain.data.formats.manifests import Record
from speechtrain.data.prepare.cut_files import cuts_of, write_cuts
from speechtrain.data.prepare.subwords import Subwords
from speechtrain.data.sources import open_source
from speechtrain.errors import ConfigError, DataError, nearest
from speechtrain.files import read_json, say, whole_path, write_json, writing
from speechtrain.runs.choices import corpora
from speechtrain.runs.named_corpus import MANIFESTS, Corpus, build_part, corpus_by_name, with_pairs

_KEPT = "corpus.json"
_FIX = "use another out="


def prepare_corpus(argv: list[str]) -> int:
    """Write a manifest for each part, after a download if asked; returns the exit code."""
    given = _parser().parse_intermixed_args(argv)
    pairs = dict(_pair(text) for text in given.pairs)
    name = pairs["corpus"]
    if name == "huggingface":
        return build_part(HuggingFace, with_pairs({}, pairs, HuggingFace)).write()
    corpus = corpus_by_name(pairs, given.config_dir)
    if corpus.jobs < 1:
        raise ConfigError(f"jobs={corpus.jobs}: it must be at least 1")
    if not (named := corpus.root or os.environ.get("DATASET_DIR", "")):
        raise ConfigError("root is not set; set root=DIR, or the variable DATASET_DIR")
    root = whole_path(named)
    if corpus.download:
        _download(corpus, root)
    folder = root / corpus.folder if (root / corpus.folder).is_dir() else root
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder; set root=DIR, or download=true")
    names = {"root": str(root), "folder": str(folder), "language": corpus.language}
    sets = _wanted(corpus, names)
    out = whole_path(corpus.out or f"{os.environ.get('DATASET_DIR') or root}/{MANIFESTS}/{name}")
    origin = {"corpus": name, **names, "arguments": corpus.arguments}
    _check_origin(out, origin)
    left = {part: one for part, one in sets.items() if not part or not _manifest(out, part).exists()}
    for part in sets.keys() - left.keys():
        say(f"{_manifest(out, part)} is there already; delete it to write it again")
    for part, cuts in cuts_by_part(left, names, corpus.jobs):
        _write_part(_manifest(out, part), iter(cuts), origin, is_optional="" in sets)
    _train_tokenizers(corpus, out)
    say(_command(corpus, out, sets))
    return 0


def _parser() -> Parser:
    build = Parser(
        prog="speechtrain prepare corpus=NAME",
        description=f"Write a public corpus as manifests. NAME is one of {', '.join(corpora(None))}, "
        "huggingface (name=… split=…), or a recipe of lhotse. Keys: root (else DATASET_DIR), "
        f"out (else DATASET_DIR/{MANIFESTS}/NAME), "
        "download=true, parts=A,B, jobs, language, url (a mirror), arguments.KEY (of the recipe).",
        examples=[
            "speechtrain prepare corpus=librispeech download=true parts=dev-clean",
            "speechtrain prepare corpus=common_voice root=FOLDER language=en",
        ],
        exit_codes="0 done, 2 usage, 3 data, 4 disk",
    )
    build.add_argument("pairs", nargs="*", metavar="KEY=VALUE", help="as in conf/corpus/NAME.yaml")
    build.add_argument("--config-dir", metavar="DIR", help="a folder with your own corpus/NAME.yaml")
    return build


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{text!r} is not KEY=VALUE, as in root=DIR")
    return key, value


def _download(corpus: Corpus, root: Path) -> None:
    if not corpus.archives:
        if not corpus.sets:
            told = f"lhotse download {corpus.corpus} {shlex.quote(str(root))} may know how"
            raise DataError(f"download: corpus={corpus.corpus} has no archives; {told}")
        raise DataError(
            f"download: {corpus.corpus} is given to those who accept its licence, at {corpus.page}; "
            f"unpack it below {root}, and type the command without download=true"
        )
    parts = _known(corpus.parts or [*corpus.sets], corpus.sets)
    made_of = {name: build_part(Archive, node, f"archives.{name}") for name, node in corpus.archives.items()}
    wanted = {name: archive for name, archive in made_of.items() if {*archive.parts} & {*parts}}
    fetch(root, corpus.url, wanted, corpus.folder)


def _known(parts: Sequence[str], sets: Iterable[str]) -> list[str]:
    for part in parts:
        if part not in sets:
            near = nearest(part, sets) or f"; there are {', '.join(sets)}"
            raise ConfigError(f"parts: there is no {part!r}{near}")
    return [*parts]


def _wanted(corpus: Corpus, names: Mapping[str, str]) -> dict[str, Set]:
    """The parts to write. Raises DataError for one that is asked for and not in the folder, or if none is."""
    if not corpus.sets:
        return {"": Set(corpus.recipe, corpus.arguments)}
    common = {"recipe": corpus.recipe, "arguments": corpus.arguments, "place": corpus.place}
    sets = {
        part: build_part(Set, common | (node or {}), f"sets.{part}") for part, node in corpus.sets.items()
    }
    parts = _known(corpus.parts or [*sets], sets)
    places = {
        part: Path(names["folder"], filled(sets[part].place, {**names, "part": part})) for part in parts
    }
    there = [part for part in parts if places[part].exists()]
    if not there or (corpus.parts and len(there) < len(parts)):
        lost = next(place for part, place in places.items() if part not in there)
        more = ", or download=true" if corpus.archives else f"; the corpus is at {corpus.page}"
        raise DataError(f"{lost} does not exist; set root=DIR{more}")
    return {part: sets[part] for part in there}


def _write_part(path: Path, cuts: Iterator[Record], origin: dict[str, Any], *, is_optional: bool) -> None:
    """Write a manifest and then its origin, so that a refused corpus leaves no file."""
    first = next(cuts, None)
    if first is None and is_optional:
        return
    write_cuts(path, ((cut, cut) for cut in chain([first] if first else [], cuts)))
    with writing(path.parent, _FIX):
        write_json(path.parent / _KEPT, origin)


def _train_tokenizers(corpus: Corpus, out: Path) -> None:
    """Train the corpus's tokenizers on the training parts in ``out``. A tokenizer that exists stays."""
    manifests = [_manifest(out, part) for part in corpus.train]
    sources = [str(manifest) for manifest in manifests if manifest.exists()]
    for name, options in corpus.tokenizers.items():
        path = out / name
        subwords = build_part(Subwords, {**options, "normaliser": corpus.normaliser}, f"tokenizers.{name}")
        if path.exists():
            say(f"{path} is there already; delete it to make it again")
        elif sources:
            try:
                subwords.train(cuts_of(open_source(sources)), path)
            except DataError as error:  # The manifests of a small corpus are of use without it.
                say(f"{path} is not made: {error}")


def _check_origin(out: Path, origin: dict[str, Any]) -> None:
    """Raise ConfigError if ``out`` holds manifests of another corpus, or of other arguments."""
    stored = read_json(out / _KEPT)
    if stored and stored != origin:
        key = next(key for key in {**stored, **origin} if stored.get(key) != origin.get(key))
        raise ConfigError(f"out={out}: it holds manifests with {key}={stored.get(key)}; {_FIX}")


def _manifest(out: Path, part: str) -> Path:
    if Path(part).name != part or not part.isprintable():
        raise ConfigError(f"sets.{part}: a set needs a name that a file can have")
    return out / f"{part}.jsonl.gz"


def _command(corpus: Corpus, out: Path, sets: Mapping[str, Set]) -> str:
    """The command to type next."""
    files = {path.name.removesuffix(".jsonl.gz"): path for path in sorted(out.glob("*.jsonl.gz"))}
    train = [p for p in corpus.train if p in files]
    valid = [p for p in corpus.valid if p in files]
    if "" in sets:
        train = [part for part in files if "train" in part] or [*files]
        valid = [part for part in files if part not in train and re.fullmatch(r"[\w-]+", part)]
    if not train:
        typed = ["speechtrain evaluate RUN", *(f"--set {shlex.quote(f'{p}={files[p]}')}" for p in files)]
        return " ".join(["score a run with:", *typed])
    pairs = [f"recipe={corpus.training}", "data.train=" + ",".join(str(files[part]) for part in train)]
    pairs += [f"data.valid.{part}={files[part]}" for part in valid]
    pairs += [f"tokenizer.normaliser={corpus.normaliser}"] if corpus.normaliser else []
    return " ".join(["train with: speechtrain train", *map(shlex.quote, pairs)])

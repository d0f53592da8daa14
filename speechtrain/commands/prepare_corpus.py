"""speechtrain prepare corpus=NAME: writes a public corpus as manifests, which data.train reads."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

from speechtrain.commands._cli import Parser
from speechtrain.data.corpora.downloads import Archive, fetch
from speechtrain.data.corpora.huggingface import HuggingFace
from speechtrain.data.corpora.recipes import Set, cuts_by_part, fill_names
from speechtrain.data.formats.manifests import Record
from speechtrain.data.prepare.cut_files import cuts_of, write_cuts
from speechtrain.data.prepare.subwords import Subwords
from speechtrain.data.sources import open_source
from speechtrain.errors import ConfigError, DataError, nearest
from speechtrain.files import absolute_path, print_line, read_json, write_json, writing
from speechtrain.runs.choices import corpora
from speechtrain.runs.named_corpus import MANIFESTS, Corpus, build_part, corpus_by_name, with_pairs

_ORIGIN = "corpus.json"
_FIX = "use another out="


def prepare_corpus(argv: list[str]) -> int:
    """Write a manifest for each part, after a download if asked. Return the exit code."""
    arguments = _parser().parse_intermixed_args(argv)
    pairs = dict(_pair(text) for text in arguments.pairs)
    name = pairs["corpus"]
    if name == "huggingface":
        return build_part(HuggingFace, with_pairs({}, pairs, HuggingFace)).write()
    corpus = corpus_by_name(pairs, arguments.config_dir)
    if corpus.jobs < 1:
        raise ConfigError(f"jobs={corpus.jobs}: it must be at least 1")
    named_root = corpus.root or os.environ.get("DATASET_DIR", "")
    if not named_root:
        raise ConfigError("root is not set. Set root=DIR, or the variable DATASET_DIR")
    root = absolute_path(named_root)
    if corpus.download:
        _download(corpus, root)
    folder = root / corpus.folder
    if not folder.is_dir():
        folder = root
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder. Set root=DIR, or download=true")
    _write_manifests(corpus, {"root": str(root), "folder": str(folder), "language": corpus.language})
    return 0


def _write_manifests(corpus: Corpus, names: Mapping[str, str]) -> None:
    """Write the manifests that are missing and the tokenizers, and print the next command.

    ``names`` are the root, folder and language, which replace the placeholders of the recipe.
    """
    parent = f"{os.environ.get('DATASET_DIR') or names['root']}/{MANIFESTS}"
    out = absolute_path(corpus.out or f"{parent}/{corpus.corpus}")
    origin = {"corpus": corpus.corpus, **names, "arguments": corpus.arguments}
    sets = _sets_to_write(corpus, names)
    _check_origin(out, origin)
    missing_sets = {}
    for part, part_set in sets.items():
        # A recipe without parts in the YAML names its parts when it runs.
        path = _manifest(out, part)
        if part and path.exists():
            print_line(f"{path} is there already. Delete it to write it again")
        else:
            missing_sets[part] = part_set
    for part, cuts in cuts_by_part(missing_sets, names, corpus.jobs):
        _write_part(_manifest(out, part), iter(cuts), origin, is_optional="" in sets)
    _train_tokenizers(corpus, out)
    print_line(_next_command(corpus, out, has_named_parts="" not in sets))


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
    """Download and unpack the archives of the parts. Raises DataError if the corpus has no archives."""
    if not corpus.archives:
        if not corpus.sets:
            command = f"lhotse download {corpus.corpus} {shlex.quote(str(root))}"
            raise DataError(f"download: corpus={corpus.corpus} has no archives. Try {command}")
        raise DataError(
            f"download: {corpus.corpus} is given to those who accept its licence, at {corpus.page}. "
            f"Unpack it below {root}, and type the command without download=true"
        )
    parts = _parts(corpus)
    archives = {}
    for name, node in corpus.archives.items():
        archive = build_part(Archive, node, f"archives.{name}")
        if any(part in parts for part in archive.parts):
            archives[name] = archive
    fetch(root, corpus.url, archives, corpus.folder)


def _parts(corpus: Corpus) -> Collection[str]:
    """Return the names of the parts to write. Raises ConfigError for an unknown part."""
    for part in corpus.parts or ():
        if part not in corpus.sets:
            hint = nearest(part, corpus.sets) or f". The parts are {', '.join(corpus.sets)}"
            raise ConfigError(f"parts: there is no {part!r}{hint}")
    return corpus.parts or corpus.sets.keys()


def _sets_to_write(corpus: Corpus, names: Mapping[str, str]) -> dict[str, Set]:
    """Return the parts that the folder has, or only the key "" if the YAML names no parts.

    Raises DataError if the folder has none of the parts, or lacks one that the command asks for.
    """
    if not corpus.sets:
        return {"": Set(corpus.recipe, corpus.arguments)}
    defaults = {"recipe": corpus.recipe, "arguments": corpus.arguments, "place": corpus.place}
    known_sets = {}
    for part, node in corpus.sets.items():
        known_sets[part] = build_part(Set, {**defaults, **(node or {})}, f"sets.{part}")
    sets, missing_paths = {}, []
    for part in _parts(corpus):
        path = Path(names["folder"], fill_names(known_sets[part].place, {**names, "part": part}))
        if path.exists():
            sets[part] = known_sets[part]
        else:
            missing_paths.append(path)
    if missing_paths and (corpus.parts or not sets):
        other_fix = f". The corpus is at {corpus.page}"
        if corpus.archives:
            other_fix = ", or download=true"
        raise DataError(f"{missing_paths[0]} does not exist. Set root=DIR{other_fix}")
    return sets


def _write_part(path: Path, cuts: Iterator[Record], origin: dict[str, Any], *, is_optional: bool) -> None:
    """Write a manifest and then its origin, so that a refused corpus leaves no file.

    A part without cuts is skipped if it ``is_optional``, and is otherwise an error.
    """
    first_cuts = list(islice(cuts, 1))
    if not first_cuts and is_optional:
        return
    write_cuts(path, ((cut, cut) for cut in chain(first_cuts, cuts)))
    with writing(path.parent, _FIX):
        write_json(path.parent / _ORIGIN, origin)


def _train_tokenizers(corpus: Corpus, out: Path) -> None:
    """Train the tokenizers of the corpus on the training parts in ``out``. A tokenizer that exists stays."""
    manifests = [_manifest(out, part) for part in corpus.train]
    sources = [str(manifest) for manifest in manifests if manifest.exists()]
    for name, options in corpus.tokenizers.items():
        path = out / name
        subwords = build_part(Subwords, {**options, "normaliser": corpus.normaliser}, f"tokenizers.{name}")
        if path.exists():
            print_line(f"{path} is there already. Delete it to train it again")
        elif sources:
            try:
                subwords.train(cuts_of(open_source(sources)), path)
            except DataError as error:  # The manifests of a small corpus are useful without a tokenizer.
                print_line(f"{path} is not written: {error}")


def _check_origin(out: Path, origin: dict[str, Any]) -> None:
    """Raise ConfigError if ``out`` holds manifests of another corpus, or of other arguments."""
    stored = read_json(out / _ORIGIN)
    if stored and stored != origin:
        different_keys = [key for key in {**stored, **origin} if stored.get(key) != origin.get(key)]
        key = different_keys[0]
        raise ConfigError(f"out={out}: it holds manifests with {key}={stored.get(key)}; {_FIX}")


def _manifest(out: Path, part: str) -> Path:
    if Path(part).name != part or not part.isprintable():
        raise ConfigError(f"sets.{part}: the name must be usable as the name of a file")
    return out / f"{part}.jsonl.gz"


def _next_command(corpus: Corpus, out: Path, *, has_named_parts: bool) -> str:
    """Return a line with the command that trains on the manifests in ``out``, or else scores a run on them.

    If the YAML names no parts, a part with "train" in its name trains, or else all parts do.
    """
    files = {path.name.removesuffix(".jsonl.gz"): path for path in sorted(out.glob("*.jsonl.gz"))}
    if has_named_parts:
        train = [part for part in corpus.train if part in files]
        valid = [part for part in corpus.valid if part in files]
    else:
        train = [part for part in files if "train" in part] or [*files]
        valid = [part for part in files if part not in train and re.fullmatch(r"[\w-]+", part)]
    if not train:
        words = ["speechtrain", "evaluate", "RUN"]
        for part, path in files.items():
            words += ["--set", f"{part}={path}"]
        return f"score a run with: {shlex.join(words)}"
    words = ["speechtrain", "train", f"recipe={corpus.training}"]
    train_files = ",".join(str(files[part]) for part in train)
    words.append(f"data.train={train_files}")
    words += [f"data.valid.{part}={files[part]}" for part in valid]
    if corpus.normaliser:
        words.append(f"tokenizer.normaliser={corpus.normaliser}")
    return f"train with: {shlex.join(words)}"

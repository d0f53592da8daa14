"""speechtrain prepare corpus=NAME: write a public corpus as manifests, which ``data.train`` reads."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Mapping
from itertools import chain, islice
from pathlib import Path

from speechtrain.commands._cli import Parser
from speechtrain.data.corpora.downloads import Archive, fetch
from speechtrain.data.corpora.huggingface import HuggingFace
from speechtrain.data.corpora.recipes import Set, cuts_by_part, fill_names
from speechtrain.data.prepare.cut_files import cuts_of, write_cuts
from speechtrain.data.prepare.subwords import Subwords
from speechtrain.data.sources import open_source
from speechtrain.errors import ConfigError, DataError, nearest
from speechtrain.files import absolute_path, print_line, read_json, write_json, writing
from speechtrain.start.choices import corpora
from speechtrain.start.named_corpus import MANIFESTS, Corpus, build_part, corpus_by_name, with_pairs

_ORIGIN = "corpus.json"
"""Name of the file beside the manifests that says from which corpus and folders they were written."""
_OUT_FIX = "use another out="


def prepare_corpus(argv: list[str]) -> int:
    """Write the missing manifests and tokenizers of a corpus, and print the command that uses them.

    With ``download=true``, the archives of the corpus are downloaded first. Return the exit code. Raises a
    SpeechtrainError. If it is about a part without cuts, that part has no file.
    """
    arguments = parser().parse_intermixed_args(argv)
    pairs = {}
    for text in arguments.pairs:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConfigError(f"{text!r} is not KEY=VALUE, as in root=DIR")
        pairs[key] = value
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
    # Their values replace the placeholders in the corpus's YAML file.
    names = {"root": str(root), "folder": str(folder), "language": corpus.language}
    sets = _sets_to_write(corpus, names)
    has_named_parts = "" not in sets  # Otherwise the recipe names the parts when it runs.

    parent = f"{os.environ.get('DATASET_DIR') or root}/{MANIFESTS}"
    out = absolute_path(corpus.out or f"{parent}/{corpus.corpus}")
    origin = {"corpus": corpus.corpus, **names, "arguments": corpus.arguments}
    stored_origin = read_json(out / _ORIGIN) or origin
    for key in {**stored_origin, **origin}:
        stored_value = stored_origin.get(key)
        if stored_value != origin.get(key):
            raise ConfigError(f"out={out}: it holds manifests with {key}={stored_value}; {_OUT_FIX}")

    missing_sets = {}
    for part, part_set in sets.items():
        path = _manifest_path(out, part)
        if part and path.exists():
            print_line(f"{path} is there already. Delete it to write it again")
        else:
            missing_sets[part] = part_set
    for part, cuts in cuts_by_part(missing_sets, names, corpus.jobs):
        path = _manifest_path(out, part)
        remaining_cuts = iter(cuts)
        first_cuts = list(islice(remaining_cuts, 1))
        if not first_cuts and not has_named_parts:
            continue  # A recipe may name parts that the folder does not have.
        all_cuts = chain(first_cuts, remaining_cuts)
        write_cuts(path, ((cut, cut) for cut in all_cuts))
        with writing(out, _OUT_FIX):
            write_json(out / _ORIGIN, origin)
    _train_tokenizers(corpus, out)
    print_line(_next_command(corpus, out, has_named_parts=has_named_parts))
    return 0


def parser() -> Parser:
    parser = Parser(
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
    parser.add_argument("pairs", nargs="*", metavar="KEY=VALUE", help="as in conf/corpus/NAME.yaml")
    parser.add_argument("--config-dir", metavar="DIR", help="a folder with your own corpus/NAME.yaml")
    return parser


def _download(corpus: Corpus, root: Path) -> None:
    """Download the archives of the parts to ``root`` and unpack them.

    Raises DataError if the corpus cannot be downloaded.
    """
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
    fetch(root, corpus.url, archives)


def _parts(corpus: Corpus) -> Collection[str]:
    """Return the names of the parts to write. Raises ConfigError for an unknown part."""
    for part in corpus.parts or ():
        if part not in corpus.sets:
            hint = nearest(part, corpus.sets) or f". The parts are {', '.join(corpus.sets)}"
            raise ConfigError(f"parts: there is no {part!r}{hint}")
    return corpus.parts or corpus.sets.keys()


def _sets_to_write(corpus: Corpus, names: Mapping[str, str]) -> dict[str, Set]:
    """Return the parts of the corpus that are in its folder, by name.

    If the corpus's YAML file names no parts, the result has a single entry with the name "". Raises DataError
    if the folder has none of the parts, or lacks a part in the command's ``parts=``.
    """
    if not corpus.sets:
        return {"": Set(corpus.recipe, corpus.arguments)}
    defaults = {"recipe": corpus.recipe, "arguments": corpus.arguments, "place": corpus.place}
    all_sets = {}
    for part, node in corpus.sets.items():
        all_sets[part] = build_part(Set, {**defaults, **(node or {})}, f"sets.{part}")
    sets, missing_paths = {}, []
    for part in _parts(corpus):
        path = Path(names["folder"], fill_names(all_sets[part].place, {**names, "part": part}))
        if path.exists():
            sets[part] = all_sets[part]
        else:
            missing_paths.append(path)
    if missing_paths and (corpus.parts or not sets):
        other_fix = f". The corpus is at {corpus.page}"
        if corpus.archives:
            other_fix = ", or download=true"
        raise DataError(f"{missing_paths[0]} does not exist. Set root=DIR{other_fix}")
    return sets


def _train_tokenizers(corpus: Corpus, out: Path) -> None:
    """Train the missing tokenizers of the corpus on the training parts in ``out``."""
    manifests = [_manifest_path(out, part) for part in corpus.train]
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


def _manifest_path(out: Path, part: str) -> Path:
    """Return the path of the manifest of a part. Raises ConfigError for a name that is not a file name."""
    if Path(part).name != part or not part.isprintable():
        raise ConfigError(f"sets.{part}: the name must be usable as the name of a file")
    return out / f"{part}.jsonl.gz"


def _next_command(corpus: Corpus, out: Path, *, has_named_parts: bool) -> str:
    """Return a line with the command that trains on the manifests in ``out``.

    If no part is for training, the command scores a run instead. With ``has_named_parts``, the corpus's YAML
    file says which parts are for training and validation. Otherwise parts with "train" in their names are for
    training, or all parts if no name has it.
    """
    files = {path.name.removesuffix(".jsonl.gz"): path for path in sorted(out.glob("*.jsonl.gz"))}
    if has_named_parts:
        train = [part for part in corpus.train if part in files]
        valid = [part for part in corpus.valid if part in files]
    else:
        train = [part for part in files if "train" in part] or [*files]
        valid = [part for part in files if part not in train and re.fullmatch(r"[\w-]+", part)]
    if not train:
        command = ["speechtrain", "evaluate", "RUN"]
        for part, path in files.items():
            command += ["--set", f"{part}={path}"]
        return f"score a run with: {shlex.join(command)}"
    command = ["speechtrain", "train", f"recipe={corpus.training}"]
    train_files = ",".join(str(files[part]) for part in train)
    command.append(f"data.train={train_files}")
    command += [f"data.valid.{part}={files[part]}" for part in valid]
    if corpus.normaliser:
        command.append(f"tokenizer.normaliser={corpus.normaliser}")
    return f"train with: {shlex.join(command)}"

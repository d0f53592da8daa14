"""The needs of a run that are missing: corpora and tokenizers below DATASET_DIR, and keys without a value."""

from __future__ import annotations

import copy
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from speechtrain.config.build import build, build_launcher
from speechtrain.config.check import part_class
from speechtrain.data.corpora.recipes import fill_names
from speechtrain.errors import MALFORMED, DataError, print_notice
from speechtrain.files import absolute_path
from speechtrain.launcher import Job
from speechtrain.runs.choices import corpora
from speechtrain.runs.named_corpus import MANIFESTS, Corpus, corpus_by_name
from speechtrain.text.vocabulary import NoText

_RECORDINGS, _MODEL = "FOLDER_OR_MANIFEST", "FILE.model"  # placeholders in a plan
_UNSET = "???"
_SUBWORDS = {"kind": "unigram", "size": 1023}  # defaults of speechtrain prepare tokenizer


@dataclass(frozen=True)
class Need:
    """A missing part of a run, with the fix. Other hosts may have a corpus that this host lacks."""

    part: str
    fix: str
    is_corpus: bool = False

    def __str__(self) -> str:
        return f"needs {self.part}: {self.fix}"


def settle_needs(config: DictConfig) -> bool:
    """Print the missing parts of ``config``. Return True if a dry run has some, and prints only a plan.

    Keys without a value get a placeholder. Raises DataError for a run that cannot start.
    """
    needs = needs_of(config)
    if not needs:
        return False
    job = Job(Path(), Path(), world_size=config.world_size)
    is_here = build_launcher(config).is_here(job)
    missing = [need for need in needs if is_here or not need.is_corpus]
    for need in needs:
        warning = "" if need in missing else "warning: "
        print_notice(f"{warning}{need}")
    if missing and not config.dry_run:
        raise DataError("the lines above name the missing parts. Get them, and start the command again")
    return bool(config.dry_run)


def needs_of(config: DictConfig) -> list[Need]:
    """Return the missing parts of ``config``, and set its keys without a value to placeholders."""
    try:
        values: Any = OmegaConf.to_container(config, resolve=True)
        data, tokenizer = dict(values["data"]), dict(values["tokenizer"])
        is_dry, _ = values["dry_run"], values["world_size"]
    except (OmegaConfBaseException, KeyError, *MALFORMED):  # A key is missing or wrong. check() names it.
        return []
    needs = []
    if data.get("train") == _UNSET:
        config.data.train = data["train"] = _RECORDINGS
        needs.append(Need("recordings", f"add data.train={_RECORDINGS} (docs/data.md)"))
    elif reason := _data_error(config):
        needs.append(Need("recordings", reason))
    corpus_needs = _corpus_needs(data)
    needs += corpus_needs.values()
    if _missing_subwords(tokenizer):
        sources = list(_paths(data.get("train")))
        needs.append(_tokenizer_need(tokenizer, sources, corpus_needs))
        if tokenizer["model"] == _UNSET:
            config.tokenizer.model = _MODEL
    if is_dry and values.get("from_data") == "finetune" and not values.get("init_from"):
        needs.append(Need("weights to begin with", "add init_from=RUN or init_from=hf:NAME"))
    return needs


def config_for_plan(config: DictConfig) -> DictConfig:
    """Return a copy of ``config`` that can be built without the missing parts.

    A missing tokenizer is replaced by one of the same size, and the missing data of a plan by a placeholder.
    """
    plan = copy.deepcopy(config)
    subwords = _missing_subwords(config.tokenizer)
    if subwords:
        alphabet = "".join(map(chr, range(subwords["size"])))
        characters = {"_target_": "speechtrain.text.vocabulary.Characters", "alphabet": alphabet}
        plan.tokenizer = OmegaConf.create(characters)
    if _data_error(config):
        plan.data.train, plan.data.valid = _RECORDINGS, {}
    return plan


def _data_error(config: DictConfig) -> str:
    """Return the reason why the corpus of a dry run, if it is a class, cannot be opened, or an empty text."""
    if config.dry_run and isinstance(config.data.get("train"), DictConfig):
        try:
            build(config, "data", tokenizer=NoText())
        except DataError as error:
            return str(error)
    return ""


def _paths(spec: Any) -> Iterator[str]:
    """Yield the paths of data.train or data.valid. A corpus that is a class has no paths."""
    if isinstance(spec, str):
        yield from spec.split(",")
    elif isinstance(spec, list):
        for part in spec:
            yield from _paths(part)
    elif isinstance(spec, dict) and "_target_" not in spec:
        yield from _paths(spec.get("path", list(spec.values())))


def _corpus_needs(data: dict[str, Any]) -> dict[str, Need]:
    """Return the corpora whose manifests are missing, by name."""
    files: dict[str, list[str]] = {}
    for path in _paths([data.get("train"), data.get("valid")]):
        if name := _corpus_of(path):
            files.setdefault(name, []).append(Path(path).name)
    needs = {}
    for name, missing in files.items():
        corpus = corpus_by_name({"corpus": name})
        parts = [part for part in corpus.sets if f"{part}.jsonl.gz" in missing]
        sizes = []
        for archive in corpus.archives.values():
            archived = [part for part in parts if part in archive["parts"]]
            if archived:
                sizes.append(f"{', '.join(archived)} ({archive['gb']:g} GB)")
        page = "" if corpus.archives else f", from {corpus.page}"
        contents = f"{corpus.title} {', '.join(sizes or parts)} in {_folder()}{page}"
        if parts:
            needs[name] = Need(contents, _command(corpus, parts), is_corpus=True)
    return needs


def _corpus_of(path: str) -> str:
    """Return the name of the corpus whose command writes ``path``, or an empty text if the file exists.

    It is also empty if no corpus has the file.
    """
    file = absolute_path(path)
    name = file.parent.name
    folder = absolute_path(f"{os.environ.get('DATASET_DIR', '')}/{MANIFESTS}/{name}")
    if file.parent == folder and name in corpora(None) and not os.path.exists(file):
        return name
    return ""


def _folder() -> str:
    if os.environ.get("DATASET_DIR"):
        return "DATASET_DIR"
    return "DATASET_DIR, which is not set (export DATASET_DIR=FOLDER)"


def _command(corpus: Corpus, parts: list[str]) -> str:
    """Return the command that writes the manifests of ``parts``. It downloads them if one is missing."""
    folder = Path(os.environ.get("DATASET_DIR", ""), corpus.folder)
    paths = [fill_names(corpus.place, {"part": part}) for part in parts]
    is_unpacked = all(Path(folder, path).exists() for path in paths)
    download = " download=true" if corpus.archives and not is_unpacked else ""
    return f"speechtrain prepare corpus={corpus.corpus}{download} parts={','.join(parts)}"


def _missing_subwords(tokenizer: Any) -> dict[str, Any]:
    """Return the kind and size of a SentencePiece model that does not exist, or an empty mapping."""
    model = str(tokenizer.get("model"))
    if model in (_UNSET, _MODEL) and part_class("tokenizer", tokenizer).is_preparable:
        return _SUBWORDS
    name = _corpus_of(model)
    if not name:
        return {}
    return corpus_by_name({"corpus": name}).tokenizers.get(Path(model).name, {})


def _tokenizer_need(tokenizer: dict[str, Any], sources: list[str], corpus_needs: dict[str, Need]) -> Need:
    """Return the need of a tokenizer. If its corpus is missing, too, the command of the corpus makes both."""
    model = absolute_path(tokenizer["model"])
    name = _corpus_of(str(model))
    is_of_corpus = name and {absolute_path(source).parent for source in sources} == {model.parent}
    subwords = {**_missing_subwords(tokenizer), "normaliser": tokenizer.get("normaliser")}
    options = " ".join(f"--{key} {value}" for key, value in subwords.items())
    command = f"speechtrain prepare tokenizer {shlex.join(sources) or 'SOURCE'} {options} --out "
    if not is_of_corpus:
        return Need("a tokenizer", f"{command}{_MODEL}, then add tokenizer.model={_MODEL}")
    if name in corpus_needs:
        command = corpus_needs[name].fix
    else:
        command += shlex.quote(str(model))
    return Need(f"the tokenizer {MANIFESTS}/{name}/{model.name} in {_folder()}", command)

"""The missing parts of a run: corpora and tokenizers below DATASET_DIR, and keys without a value.

A run with missing parts cannot start. A dry run prints a plan in which placeholders replace the parts.
"""

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

from speechtrain.data.corpora.recipes import fill_names
from speechtrain.errors import MALFORMED, DataError, print_notice
from speechtrain.files import absolute_path
from speechtrain.start.check_keys import part_class
from speechtrain.start.choices import corpora
from speechtrain.start.named_corpus import MANIFESTS, Corpus, corpus_by_name
from speechtrain.start.run_config import part_of
from speechtrain.text.vocabulary import NoText

_RECORDINGS, _MODEL = "FOLDER_OR_MANIFEST", "FILE.model"  # placeholders in a plan
_UNSET = "???"  # OmegaConf's value of a key that the user must set
_DEFAULT_SUBWORDS = {"kind": "unigram", "size": 1023}  # the defaults of ``speechtrain prepare tokenizer``


@dataclass(frozen=True)
class Need:
    """A missing part of a run, with the fix."""

    part: str  # a noun phrase for the part
    fix: str  # a command or an advice
    is_corpus: bool = False  # true: other hosts, on which the ranks start, may have the part

    def __str__(self) -> str:
        return f"needs {self.part}: {self.fix}"


def settle_needs(config: DictConfig) -> bool:
    """Print the missing parts of ``config``. Return True for a dry run that lacks parts and prints a plan.

    Keys without a value are set to placeholders. Raises DataError if a run that is not dry lacks a part. A
    missing corpus is only a warning if the ranks start on other hosts.
    """
    needs = needs_of(config)
    if not needs:
        return False
    is_on_this_host = part_of(config, "launcher").build().is_here
    blocking_needs = [need for need in needs if is_on_this_host or not need.is_corpus]
    for need in needs:
        prefix = "" if need in blocking_needs else "warning: "
        print_notice(f"{prefix}{need}")
    if blocking_needs and not config.dry_run:
        raise DataError("the lines above name the missing parts. Get them, and start the command again")
    return bool(config.dry_run)


def needs_of(config: DictConfig) -> list[Need]:
    """Return the missing parts of ``config``, and set its keys without a value to placeholders."""
    try:
        values: Any = OmegaConf.to_container(config, resolve=True)
        data, tokenizer = dict(values["data"]), dict(values["tokenizer"])
        is_dry_run = values["dry_run"]
        values["world_size"]  # Raises KeyError if it is missing.
    except (OmegaConfBaseException, KeyError, *MALFORMED):  # A key is missing or wrong. check() reports it.
        return []
    needs = []
    data_error = "" if data.get("train") == _UNSET else _data_error(config)
    if data.get("train") == _UNSET:
        config.data.train = data["train"] = _RECORDINGS
        needs.append(Need("recordings", f"add data.train={_RECORDINGS} (docs/data.md)"))
    elif data_error:
        needs.append(Need("recordings", data_error))
    corpus_needs = _corpus_needs(data)
    needs += corpus_needs.values()
    if _missing_subwords(tokenizer):
        sources = list(_paths(data.get("train")))
        needs.append(_tokenizer_need(tokenizer, sources, corpus_needs))
        if tokenizer["model"] == _UNSET:
            config.tokenizer.model = _MODEL
    if is_dry_run and values.get("from_data") == "finetune" and not values.get("init_from"):
        needs.append(Need("weights to begin with", "add init_from=RUN or init_from=hf:NAME"))
    return needs


def config_for_plan(config: DictConfig) -> DictConfig:
    """Return a copy of ``config`` that can be built without the missing parts.

    A missing SentencePiece model is replaced by a tokenizer of characters with as many labels, because the
    number of labels decides the shapes of weights. Missing data is replaced by a placeholder.
    """
    plan = copy.deepcopy(config)
    subwords = _missing_subwords(config.tokenizer)
    if subwords:
        any_characters = "".join(map(chr, range(subwords["size"])))
        characters_node = {"_target_": "speechtrain.text.vocabulary.Characters", "alphabet": any_characters}
        plan.tokenizer = OmegaConf.create(characters_node)
    if _data_error(config):
        plan.data.train, plan.data.valid = _RECORDINGS, {}
    return plan


def _data_error(config: DictConfig) -> str:
    """Return the error of opening the data of a dry run, or an empty text if there is none.

    Only a corpus that is a class (``data.train._target_``) is opened. Paths are checked elsewhere.
    """
    if config.dry_run and isinstance(config.data.get("train"), DictConfig):
        try:
            part_of(config, "data").build(tokenizer=NoText())
        except DataError as error:
            return str(error)
    return ""


def _paths(spec: Any) -> Iterator[str]:
    """Yield the paths of ``spec``, which is ``data.train`` or ``data.valid``, or an element of them.

    A corpus that is a class has no paths.
    """
    if isinstance(spec, str):
        yield from spec.split(",")
    elif isinstance(spec, list):
        for part in spec:
            yield from _paths(part)
    elif isinstance(spec, dict) and "_target_" not in spec:
        yield from _paths(spec.get("path", list(spec.values())))


def _corpus_needs(data: dict[str, Any]) -> dict[str, Need]:
    """Return a need for each corpus whose manifests are missing, by the name of the corpus.

    ``data`` is the resolved group ``data`` of the config.
    """
    missing_files: dict[str, list[str]] = {}  # names of manifests by the name of the corpus
    for path in _paths([data.get("train"), data.get("valid")]):
        name = _corpus_of_missing(path)
        if name:
            missing_files.setdefault(name, []).append(Path(path).name)
    needs = {}
    for name, file_names in missing_files.items():
        corpus = corpus_by_name({"corpus": name})
        parts = [part for part in corpus.sets if f"{part}.jsonl.gz" in file_names]
        parts_with_sizes = []
        for archive in corpus.archives.values():
            archived_parts = [part for part in parts if part in archive["parts"]]
            if archived_parts:
                parts_with_sizes.append(f"{', '.join(archived_parts)} ({archive['gb']:g} GB)")
        page = "" if corpus.archives else f", from {corpus.page}"
        contents = f"{corpus.title} {', '.join(parts_with_sizes or parts)} in {_dataset_folder_text()}{page}"
        if parts:
            needs[name] = Need(contents, _corpus_command(corpus, parts), is_corpus=True)
    return needs


def _corpus_of_missing(path: str) -> str:
    """Return the name of the corpus whose command writes the missing file ``path``.

    It is an empty text if the file exists, or if no corpus writes it.
    """
    file = absolute_path(path)
    name = file.parent.name
    folder = absolute_path(f"{os.environ.get('DATASET_DIR', '')}/{MANIFESTS}/{name}")
    if file.parent == folder and name in corpora(None) and not os.path.exists(file):
        return name
    return ""


def _dataset_folder_text() -> str:
    if os.environ.get("DATASET_DIR"):
        return "DATASET_DIR"
    return "DATASET_DIR, which is not set (export DATASET_DIR=FOLDER)"


def _corpus_command(corpus: Corpus, parts: list[str]) -> str:
    """Return the command that writes the manifests of ``parts``.

    If recordings of a part are missing and the corpus has archives, the command downloads them first.
    """
    folder = Path(os.environ.get("DATASET_DIR", ""), corpus.folder)
    paths = [fill_names(corpus.place, {"part": part}) for part in parts]
    is_unpacked = all(Path(folder, path).exists() for path in paths)
    download = " download=true" if corpus.archives and not is_unpacked else ""
    return f"speechtrain prepare corpus={corpus.corpus}{download} parts={','.join(parts)}"


def _missing_subwords(tokenizer: Any) -> dict[str, Any]:
    """Return the kind and size of a SentencePiece model that does not exist.

    The mapping is empty if the model exists, or if the tokenizer has no model.
    """
    model = str(tokenizer.get("model"))
    if model in (_UNSET, _MODEL) and part_class("tokenizer", tokenizer).is_preparable:
        return _DEFAULT_SUBWORDS
    name = _corpus_of_missing(model)
    if not name:
        return {}
    return corpus_by_name({"corpus": name}).tokenizers.get(Path(model).name, {})


def _tokenizer_need(tokenizer: dict[str, Any], sources: list[str], corpus_needs: dict[str, Need]) -> Need:
    """Return the need of a missing tokenizer, which is trained on the transcripts of ``sources``.

    If its corpus is also missing, the command of the corpus writes manifests and tokenizer.
    """
    model = absolute_path(tokenizer["model"])
    name = _corpus_of_missing(str(model))
    source_folders = {absolute_path(source).parent for source in sources}
    is_of_corpus = name and source_folders == {model.parent}
    settings = {**_missing_subwords(tokenizer), "normaliser": tokenizer.get("normaliser")}
    options = " ".join(f"--{key} {value}" for key, value in settings.items())
    command = f"speechtrain prepare tokenizer {shlex.join(sources) or 'SOURCE'} {options} --out "
    if not is_of_corpus:
        return Need("a tokenizer", f"{command}{_MODEL}, then add tokenizer.model={_MODEL}")
    if name in corpus_needs:
        command = corpus_needs[name].fix
    else:
        command += shlex.quote(str(model))
    return Need(f"the tokenizer {MANIFESTS}/{name}/{model.name} in {_dataset_folder_text()}", command)

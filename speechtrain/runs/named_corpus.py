"""The corpora of conf/corpus: the keys of each YAML file, and the keys that a command sets."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import yaml

from speechtrain.config.check import check_node
from speechtrain.data.corpora.recipes import recipe_names
from speechtrain.errors import ConfigError, nearest, one_line
from speechtrain.files import small_yaml, yaml_text
from speechtrain.runs.choices import corpora

Node = TypeVar("Node")
MANIFESTS = "manifests"
"""Folder of DATASET_DIR that has a folder of manifests for each corpus."""


@dataclass
class Corpus:
    """A corpus by name: the keys of conf/corpus/NAME.yaml, and the keys that a command sets."""

    corpus: str  # name of the corpus
    out: str = ""  # folder of the manifests. Empty: DATASET_DIR/manifests/CORPUS
    root: str = ""  # folder of the recordings and archives. Empty: DATASET_DIR
    download: bool = False  # true: download the archives that are missing
    jobs: int = 2  # processes of a recipe
    parts: list[str] | None = None  # parts to write. null: the parts in root, or all if download=true
    title: str = ""  # name of the corpus, for messages
    page: str = ""  # web page of the corpus
    language: str = ""  # language of a corpus with several
    folder: str = ""  # folder of the corpus below root, unless root is that folder
    recipe: str = ""  # a recipe of lhotse, or table, stm or voice_activity of this project
    arguments: dict[str, Any] = field(default_factory=dict)  # arguments of the recipe
    place: str = ""  # file or folder that a part must have, below the folder
    # parts by name, each with its own recipe, arguments and place if they differ from the corpus's
    sets: dict[str, dict[str, Any]] = field(default_factory=dict)
    train: list[str] = field(default_factory=list)  # parts that train
    valid: list[str] = field(default_factory=list)  # parts that validate
    training: str = "scratch"  # recipe of the command that the last line shows
    normaliser: str = "unicode"  # normaliser of the transcripts, for the tokenizers
    # SentencePiece models of the training parts by file name, each with kind and size
    tokenizers: dict[str, dict[str, Any]] = field(default_factory=dict)
    url: str = ""  # address of the archives. A mirror can replace it
    # archives to download by file name, with the keys of an archive
    archives: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.archives and not self.folder:
            self.folder = self.corpus


def corpus_by_name(pairs: Mapping[str, str], folder: str | None = None) -> Corpus:
    """Return the corpus whose name is ``pairs["corpus"]``, with the other keys of ``pairs``.

    Its YAML file is in the package or in ``folder``. Raises ConfigError for an unknown corpus or key.
    """
    return build_part(Corpus, with_pairs(_yaml_keys(pairs["corpus"], folder), pairs, Corpus))


def _yaml_keys(name: str, folder: str | None) -> dict[str, Any]:
    """Return the keys of the corpus's YAML file. Without a file, ``name`` must be a recipe of lhotse."""
    paths = corpora(folder)
    if name not in paths:
        recipes = recipe_names()
        if name in recipes:
            return {"recipe": name}
        hint = nearest(name, [*paths, "huggingface", *recipes])
        if not hint:
            hint = f". The corpora are {', '.join(paths)}, huggingface, and lhotse's recipes"
        raise ConfigError(f"corpus={name}: the corpus is unknown{hint}")
    try:
        node = yaml.safe_load(yaml_text(paths[name]))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{paths[name]} cannot be read: {one_line(str(error), 300)}") from None
    if not isinstance(node, dict):
        raise ConfigError(f"{paths[name]} has no keys")
    return node


def with_pairs(node: Mapping[str, Any], pairs: Mapping[str, str], kind: type) -> dict[str, Any]:
    """Return ``node`` with the KEY=VALUE ``pairs``. The types of ``kind``'s fields say how a value is read.

    Texts and lists need no quotes. ``OUTER.INNER=VALUE`` sets one key of a mapping. Raises ConfigError for a
    value that YAML cannot read.
    """
    types = typing.get_type_hints(kind)
    keys = dict(node)
    for key, text in pairs.items():
        value: Any = text
        if types.get(key) not in (str, None) or "." in key:
            value = _yaml_value(key, text)
        if "list" in str(types.get(key)) and isinstance(value, str):
            value = [part.strip() for part in text.split(",")]
        outer, _, inner = key.partition(".")
        if inner:
            value = {**(keys.get(outer) or {}), inner: value}
        keys[outer] = value
    return keys


def _yaml_value(key: str, text: str) -> Any:
    try:
        return yaml.safe_load(small_yaml(text))
    except (ValueError, yaml.YAMLError):
        raise ConfigError(f"{key}={text[:200]} cannot be read. Put its text in quotes") from None


def build_part(kind: type[Node], node: Mapping[str, Any], key: str = "corpus") -> Node:
    """Return an object of ``kind`` from its keys.

    Raises ConfigError, which begins with ``key``, for a key that is unknown, missing or of another type.
    """
    if "_target_" in node:
        raise ConfigError(f"{key}._target_: a corpus names no class. Remove it")
    check_node(key, {**node, "_target_": f"{kind.__module__}.{kind.__qualname__}"})
    return kind(**node)

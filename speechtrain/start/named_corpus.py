"""The corpora of ``speechtrain prepare corpus=NAME``. conf/corpus has a YAML file for each corpus."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import yaml

from speechtrain.data.corpora.recipes import recipe_names
from speechtrain.errors import ConfigError, nearest, one_line
from speechtrain.files import small_yaml, yaml_text
from speechtrain.start.check_keys import check_node
from speechtrain.start.choices import corpora

Node = TypeVar("Node")
MANIFESTS = "manifests"
"""Name of the folder in DATASET_DIR that has a subfolder of manifests for each corpus."""


@dataclass
class Corpus:
    """A corpus. The fields are the keys of conf/corpus/NAME.yaml and of ``speechtrain prepare corpus=NAME``.

    A command may set each of them, usually the first six.
    """

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
    recipe: str = ""  # the reader: a recipe of lhotse, or table, stm or voice_activity of this project
    arguments: dict[str, Any] = field(default_factory=dict)  # arguments of the recipe
    place: str = ""  # file or folder that a part must have, below the folder
    # parts by name, each with its own recipe, arguments and place if they differ from the corpus's
    sets: dict[str, dict[str, Any]] = field(default_factory=dict)
    train: list[str] = field(default_factory=list)  # parts of the training set
    valid: list[str] = field(default_factory=list)  # parts for validation
    training: str = "scratch"  # recipe=NAME in the training command that is printed at the end
    normaliser: str = "unicode"  # normaliser of the transcripts, for the tokenizers
    # SentencePiece models of the training parts by file name, each with kind and size
    tokenizers: dict[str, dict[str, Any]] = field(default_factory=dict)
    url: str = ""  # address of the archives. A mirror can replace it
    # archives to download by file name, with the keys of an archive
    archives: dict[str, dict[str, Any]] = field(default_factory=dict)


def corpus_by_name(pairs: Mapping[str, str], folder: str | None = None) -> Corpus:
    """Return the corpus whose name is ``pairs["corpus"]``.

    Its keys come from its YAML file, which is in the package or in ``folder``, the user's config folder. The
    other ``pairs`` replace keys. Raises ConfigError for an unknown corpus or key.
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
    """Return ``node`` with the ``KEY=VALUE`` pairs of a command, parsed by the field types of ``kind``.

    A value of a text field is used as it is. Any other value is YAML, but a list may also be written as
    ``A,B``. ``OUTER.INNER=VALUE`` sets one key of the mapping ``OUTER``. Raises ConfigError for a value that
    is not YAML.
    """
    types = typing.get_type_hints(kind)
    values = dict(node)
    for key, text in pairs.items():
        field_type = types.get(key)
        # An unknown key has no type. ``build_part`` refuses it later.
        is_text = field_type in (str, None) and "." not in key
        value: Any = text if is_text else _yaml_value(key, text)
        accepts_list = "list" in str(field_type)  # also in a union such as ``list[str] | None``
        if accepts_list and isinstance(value, str):
            value = [part.strip() for part in text.split(",")]
        outer_key, _, inner_key = key.partition(".")
        if inner_key:
            mapping = values.get(outer_key) or {}
            value = {**mapping, inner_key: value}
        values[outer_key] = value
    return values


def _yaml_value(key: str, text: str) -> Any:
    try:
        return yaml.safe_load(small_yaml(text))
    except (ValueError, yaml.YAMLError):
        raise ConfigError(f"{key}={text[:200]} cannot be read. Put its text in quotes") from None


def build_part(kind: type[Node], node: Mapping[str, Any], key: str = "corpus") -> Node:
    """Return an object of the dataclass ``kind`` with the values in ``node``.

    ``kind`` is ``Corpus``, ``HuggingFace``, or the class of a part of a corpus: a set, an archive or a
    tokenizer.

    Raises ConfigError for a key that is unknown, missing or of another type. The message starts with ``key``.
    """
    if "_target_" in node:
        raise ConfigError(f"{key}._target_: a corpus names no class. Remove it")
    check_node(key, {**node, "_target_": f"{kind.__module__}.{kind.__qualname__}"})
    return kind(**node)

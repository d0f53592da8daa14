"""Each key has a comment with its meaning, since the files of ``conf/`` are the reference of the keys."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import yaml

from speechtrain.data.corpora.downloads import Archive
from speechtrain.data.corpora.huggingface import HuggingFace
from speechtrain.start.named_corpus import Corpus
from speechtrain.start.schema import INTERFACES, NESTED_GROUPS, Config
from speechtrain.trainer_config import TrainerConfig

from .conftest import CONF

GROUPS = sorted({path.parent.name for path in CONF.glob("*/*.yaml")} - {"recipe", "corpus"})
NAMED_BY_USERS = ("data.valid", "tracking.trackers")
"""Mappings whose keys are names, each with a class of its own."""


@dataclass
class Key:
    """A key of a YAML file."""

    path: str  # from the root of the config
    of_class: str  # the class of its node, a dot and the key. Empty if the file does not name the class
    has_comment: bool


def keys_below(text: str, node: yaml.Node, parent: str) -> Iterator[Key]:
    """Yield the keys of a mapping and of the mappings in it. A comment is beside its key or above it."""
    lines = text.split("\n")
    classes = [value.value for key, value in node.value if key.value == "_target_"]
    for key, value in node.value:
        name, number = key.value, key.start_mark.line
        if name in ("_target_", "defaults"):
            continue
        path = f"{parent}.{name}".lstrip(".")
        of_class = "".join(f"{target}.{name}" for target in classes)
        yield Key(path, of_class, " #" in lines[number] or lines[number - 1].lstrip().startswith("#"))
        if isinstance(value, yaml.MappingNode) and not value.flow_style:
            yield from keys_below(text, value, path)


def keys_without_comment(folder: Path) -> list[str]:
    """Return the keys of a group that have no comment in any of its files."""
    root = NESTED_GROUPS.get(folder.name, folder.name)
    keys: list[Key] = []
    for file in sorted(folder.glob("*.yaml")):
        text = file.read_text(encoding="utf-8")
        node = yaml.compose(text)
        if node is not None:
            keys += keys_below(text, node, "" if "# @package _global_" in text else root)
    described = {name for key in keys if key.has_comment for name in (key.path, key.of_class)}
    missing = []
    for key in keys:
        is_name = key.path.rpartition(".")[0] in NAMED_BY_USERS
        is_of_group = key.path.startswith(f"{root}.")
        if is_of_group and not is_name and not described & {key.path, key.of_class or key.path}:
            missing.append(key.path)
    return missing


def fields_without_comment(record: type) -> list[str]:
    """Return the fields of a dataclass that have no comment beside them or above them."""
    lines = inspect.getsource(record).split("\n")
    missing = []
    for number, line in enumerate(lines):
        field = re.match(r"    (\w+): ", line)
        if field and " #" not in line and not lines[number - 1].startswith("    #"):
            missing.append(field[1])
    return missing


@pytest.mark.parametrize("group", GROUPS)
def test_each_key_of_a_group_has_a_comment(group: str) -> None:
    assert keys_without_comment(CONF / group) == []


@pytest.mark.parametrize("record", [TrainerConfig, Corpus, Archive, HuggingFace])
def test_each_key_of_a_dataclass_has_a_comment(record: type) -> None:
    assert fields_without_comment(record) == []


def test_each_key_of_the_root_has_a_comment() -> None:
    text = (CONF / "config.yaml").read_text(encoding="utf-8")
    keys = {key.path: key for key in keys_below(text, yaml.compose(text), "")}
    own = {field.name for field in fields(Config)} - {*INTERFACES, "trainer"}
    assert [name for name in own if not keys[name].has_comment] == []


def test_each_choice_begins_with_its_meaning() -> None:
    files = [file for file in CONF.glob("*/*.yaml") if file.parent.name != "hydra"]
    pattern = re.compile(r"(# @package \S+\n)?# \w")
    assert [file for file in files if not pattern.match(file.read_text(encoding="utf-8"))] == []


def test_a_key_without_a_comment_is_reported(tmp_path: Path) -> None:
    folder = tmp_path / "device"
    folder.mkdir()
    (folder / "a.yaml").write_text(
        "_target_: a.A\none: 1  # one\ntwo: {}\n# three\nthree: 3\nfour:\n  five: 5\n"
    )
    (folder / "b.yaml").write_text("one: 2\nfour:  # four\n  six: 6  # six\n")
    assert keys_without_comment(folder) == ["device.two", "device.four.five"]

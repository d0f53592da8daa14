"""Reads the YAML files of ``conf/`` with their comments, and composes each choice with its bases.

Interpolations stay as they are, and no class is imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

CONF = Path(__file__).resolve().parents[1] / "conf"
LONGEST_VALUE = 60
"""Longer values are not shown, nor are lists of several lines."""
CONTINUATION = re.compile(r"\s*#\s{6,}")


@dataclass(frozen=True)
class Entry:
    """One key of a YAML file. The text of a mapping is empty."""

    text: str
    comment: str
    file: str
    is_mapping: bool = False


@dataclass
class ConfigFile:
    """The content of a YAML file. A path in ``entries`` is absolute, with the package of the file."""

    description: str
    package: str
    entries: dict[str, Entry] = field(default_factory=dict)
    bases: list[tuple[str, str]] = field(default_factory=list)
    """Names of files of the same group, each with the node that gets its keys (empty: the group)."""
    selections: list[str] = field(default_factory=list)
    """Choices of other groups, as ``group=choice``."""


@dataclass
class Choice:
    """A choice of a group, composed with its bases."""

    name: str
    description: str
    entries: dict[str, Entry]
    first_entries: dict[str, Entry]
    """For each path the entry of the file that is composed first, usually a base."""
    selections: dict[str, str]
    """The choices of other groups."""

    def classes(self) -> dict[str, str]:
        """Return the class of each node that has one, by the path of the node."""
        classes = {}
        for path, entry in self.entries.items():
            node, _, key = path.rpartition(".")
            if key == "_target_":
                classes[node] = entry.text
        return classes


def package_of(text: str, group: str) -> str:
    package = re.search(r"^# @package (\S+)", text, re.MULTILINE)
    if package is None:
        return group
    return package[1].replace("_global_", "")


def description_of(text: str) -> str:
    """Return the comment at the top of a file, up to its first command, list or empty line."""
    lines = []
    for line in text.split("\n"):
        if line.startswith("# @package"):
            continue
        if not line.startswith("# ") or line.startswith("#   ") or re.match(r"# (Source|Data)\b.*: ", line):
            break
        lines.append(line[2:])
    return " ".join(lines).removesuffix(":")


def comment_of(lines: list[str], key: yaml.Node, value: yaml.Node) -> str:
    """Return the comment beside a key with its continuation lines, or the comment lines above the key."""
    number, column = key.start_mark.line, key.start_mark.column
    is_on_line = isinstance(value, yaml.ScalarNode) or value.end_mark.line == number
    end = value.end_mark if is_on_line else key.end_mark
    rest_of_line = lines[number][end.column :].strip()
    comment = rest_of_line.removeprefix(":").strip()
    if comment.startswith("#"):
        for line in lines[number + 1 :]:
            if not CONTINUATION.match(line):
                break
            comment += f" {line.strip(' #')}"
        return comment.lstrip("# ")
    block: list[str] = []
    for line in reversed(lines[:number]):
        if not line.startswith(" " * column + "# "):
            break
        block.insert(0, line.strip(" #"))
    if len(block) == number:  # It begins at the first line, so it describes the file.
        return ""
    return " ".join(block)


def source_of(text: str, value: yaml.Node) -> str:
    """Return the text of a value on one line. The text of a list of several lines is too long to show."""
    source = " ".join(text[value.start_mark.index : value.end_mark.index].split())
    if isinstance(value, yaml.SequenceNode) and not value.flow_style:
        source = source.ljust(LONGEST_VALUE + 1)
    return source


def read_mapping(text: str, file: str, mapping: yaml.Node, parent: str = "") -> Iterator[tuple[str, Entry]]:
    """Yield each key path below a mapping of a YAML file except ``defaults``."""
    lines = text.split("\n")
    for key, value in mapping.value:
        path = f"{parent}.{key.value}".lstrip(".")
        if path == "defaults":
            continue
        comment = comment_of(lines, key, value)
        if isinstance(value, yaml.MappingNode) and not value.flow_style:
            yield path, Entry("", comment, file, is_mapping=True)
            yield from read_mapping(text, file, value, path)
        else:
            yield path, Entry(source_of(text, value), comment, file)


def read_entries(text: str, file: str) -> Iterator[tuple[str, Entry]]:
    """Yield each key path of a YAML file, and ``+KEY`` for each comment line ``# +KEY: …``."""
    root = yaml.compose(text)
    if root is not None:
        yield from read_mapping(text, file, root)
    for name, comment in re.findall(r"^# \+(\w+): (.*)$", text, re.MULTILINE):
        yield f"+{name}", Entry("", comment, file)


def read_file(group: str, name: str) -> ConfigFile:
    """Read ``conf/GROUP/NAME.yaml``."""
    text = (CONF / group / f"{name}.yaml").read_text(encoding="utf-8")
    package = package_of(text, group)
    file = ConfigFile(description_of(text), package)
    for path, entry in read_entries(text, f"{group}/{name}.yaml"):
        file.entries[f"{package}.{path}".lstrip(".")] = entry
    content = yaml.safe_load(text) or {}
    for default in content.get("defaults", ()):
        if isinstance(default, dict):
            file.selections.append(selection_of(default))
        elif default != "_self_":
            base, _, node = default.partition("@")
            file.bases.append((base, node))
            comment = re.search(rf"{default}\s+# (.*)", text)
            if node and comment:
                file.entries[f"{package}.{node}"] = Entry("", comment[1], file=name, is_mapping=True)
    return file


def selection_of(default: dict[str, str]) -> str:
    """Return the default ``override /GROUP@NODE: CHOICE`` as ``NODE=CHOICE``, or as ``GROUP=CHOICE``."""
    ((key, choice),) = default.items()
    group, _, node = key.removeprefix("override ").strip("/").partition("@")
    return f"{node or group}={choice}"


def add(entries: dict[str, Entry], path: str, entry: Entry) -> None:
    """Add an entry. A value replaces a mapping with all of its keys."""
    if not entry.is_mapping:
        for child in list(entries):
            if child.startswith(f"{path}."):
                del entries[child]
    entries[path] = entry


def below(entries: dict[str, Entry], group: str, node: str) -> dict[str, Entry]:
    """Return the entries of a base with their paths below ``GROUP.NODE``."""
    return {path.replace(group, f"{group}.{node}", 1): entry for path, entry in entries.items()}


def compose(group: str, name: str) -> Choice:
    """Compose a choice with its bases, in the order of Hydra."""
    file = read_file(group, name)
    choice = Choice(name, file.description, {}, {}, {})
    for base_name, node in file.bases:
        base = compose(group, base_name)
        if node:
            base.entries = below(base.entries, group, node)
            base.first_entries = below(base.first_entries, group, node)
        for path, entry in base.entries.items():
            add(choice.entries, path, entry)
        choice.first_entries |= base.first_entries
        choice.selections |= base.selections
        choice.description = choice.description or base.description
    for path, entry in file.entries.items():
        add(choice.entries, path, entry)
        choice.first_entries.setdefault(path, entry)
    for selection in file.selections:
        key, _, value = selection.partition("=")
        choice.selections[key] = value
    return choice


def default_choice(group: str) -> tuple[str, str]:
    """Return the default choice of a group with the comment beside it, or two empty texts."""
    text = (CONF / "config.yaml").read_text(encoding="utf-8")
    match = re.search(rf"^  - {group}: (\w+) *(?:# (.*))?$", text, re.MULTILINE)
    if match is None:
        return "", ""
    return match[1], match[2] or ""


def choice_names(group: str) -> list[str]:
    """Return the choices of a group, the default one first."""
    names = sorted(path.stem for path in (CONF / group).glob("[!_]*.yaml"))
    default, _ = default_choice(group)
    if default in names:
        names.remove(default)
        names.insert(0, default)
    return names

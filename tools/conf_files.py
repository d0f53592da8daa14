"""Read the YAML files of ``conf/`` with their comments, and compose each choice with its base files.

Interpolations are not resolved, and no class is imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml

CONF = Path(__file__).resolve().parents[1] / "conf"
LONGEST_VALUE = 60
"""The pages do not show values with more characters, and lists of several lines."""
CONTINUATION = re.compile(r"\s*#\s{6,}")
"""A line that continues the comment beside a key."""


@dataclass(frozen=True)
class Entry:
    """One key of a YAML file."""

    text: str  # the value as in the file, empty for a mapping
    comment: str
    file: str  # GROUP/NAME.yaml
    is_mapping: bool = False


@dataclass
class ConfigFile:
    """The content of a YAML file."""

    description: str  # the comment at the top of the file
    package: str  # the path of the config node that gets the keys of the file
    entries: dict[str, Entry] = field(default_factory=dict)
    """The keys of the file, by their paths in the composed config."""
    bases: list[tuple[str, str]] = field(default_factory=list)
    """Names of files in the same group, each with the node that gets its keys (empty: the group's node)."""
    selections: list[str] = field(default_factory=list)
    """Choices of other groups, as ``group=choice``."""


@dataclass
class Choice:
    """A choice of a group, composed with its bases."""

    name: str
    description: str
    entries: dict[str, Entry]
    """The keys of the choice and its bases, by their paths in the composed config."""
    first_entries: dict[str, Entry]
    """The same keys, each as in the file that is composed first, usually a base."""
    selections: dict[str, str]
    """The choice of each other group that this choice selects."""

    def classes(self) -> dict[str, str]:
        """Return the class of each node that has one, by the path of the node."""
        classes = {}
        for path, entry in self.entries.items():
            node, _, key = path.rpartition(".")
            if key == "_target_":
                classes[node] = entry.text
        return classes


def package_of(text: str, group: str) -> str:
    """Return the package of a YAML file: the comment ``# @package`` or the group. ``_global_`` is empty."""
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
    row, column = key.start_mark.line, key.start_mark.column  # from 0
    value_ends_on_line = isinstance(value, yaml.ScalarNode) or value.end_mark.line == row
    end = value.end_mark if value_ends_on_line else key.end_mark
    rest_of_line = lines[row][end.column :].strip()
    comment = rest_of_line.removeprefix(":").strip()
    if comment.startswith("#"):
        for line in lines[row + 1 :]:
            if not CONTINUATION.match(line):
                break
            comment += f" {line.strip(' #')}"
        return comment.lstrip("# ")
    lines_above: list[str] = []
    for line in reversed(lines[:row]):
        if not line.startswith(" " * column + "# "):
            break
        lines_above.insert(0, line.strip(" #"))
    if len(lines_above) == row:  # The comment begins at the first line, so it describes the file.
        return ""
    return " ".join(lines_above)


def source_of(text: str, value: yaml.Node) -> str:
    """Return the text of a value on one line.

    A list of several lines is padded to more than ``LONGEST_VALUE`` characters, so that it is not shown.
    """
    value_text = text[value.start_mark.index : value.end_mark.index]
    source = " ".join(value_text.split())
    if isinstance(value, yaml.SequenceNode) and not value.flow_style:
        source = source.ljust(LONGEST_VALUE + 1)
    return source


def read_mapping(text: str, file: str, mapping: yaml.Node, parent: str = "") -> Iterator[tuple[str, Entry]]:
    """Yield the path and the entry of each key below ``mapping``, except ``defaults``.

    ``text`` is the text of the file, and ``parent`` the path of the mapping.
    """
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
    """Yield the path and the entry of each key in a YAML file.

    A comment line ``# +KEY: …`` describes a key that the file does not have. Its path is ``+KEY``.
    """
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
    """Return an entry ``override /GROUP@NODE: CHOICE`` of Hydra's defaults as ``NODE=CHOICE``.

    Without a node, return ``GROUP=CHOICE``.
    """
    ((key, choice),) = default.items()
    group, _, node = key.removeprefix("override ").strip("/").partition("@")
    return f"{node or group}={choice}"


def add(entries: dict[str, Entry], path: str, entry: Entry) -> None:
    """Set the entry at ``path``. If a value replaces a mapping, remove all keys of the mapping."""
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
    """Return the names of the choices of a group, the default first, then in alphabetical order."""
    names = sorted(path.stem for path in (CONF / group).glob("[!_]*.yaml"))
    default, _ = default_choice(group)
    if default in names:
        names.remove(default)
        names.insert(0, default)
    return names

"""The page of the config keys: each key of ``conf/`` with its type, its default and its meaning.

The meaning of a key is the comment beside it in the YAML file, or the comment lines above it. If only the
constructor has a key, its meaning is a comment line ``# +KEY: …`` in the YAML file. The meaning of a
dataclass's field is the comment in the source.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import textwrap
import tokenize
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import yaml
from conf_files import (
    CONF,
    LONGEST_VALUE,
    Choice,
    Entry,
    choice_names,
    compose,
    default_choice,
    read_entries,
    read_file,
)

from speechtrain.config.schema import INJECTED, INTERFACES, NESTED_GROUPS, Config
from speechtrain.config.targets import import_class, parameter_types
from speechtrain.data.corpora.downloads import Archive
from speechtrain.data.corpora.huggingface import HuggingFace
from speechtrain.runs.named_corpus import Corpus
from speechtrain.trainer_config import TrainerConfig

GROUPS = [*dict.fromkeys([*INTERFACES, *NESTED_GROUPS])]
FEWEST_SHARED_ROWS = 3
"""Classes that share at least this number of rows have a common table. Fewer stay in each class's table."""

LITERAL = re.compile(r"(?!empty)(?:[\d.e-]+|[a-z_]+)(?=: )")
"""A value at the start of a sentence before a colon, as in ``null: no limit``. It becomes code."""
FIRST_WORD = re.compile(r"[a-z-]+(?=[ ,:]|$)")
"""The first word of a sentence, which gets a capital letter."""
ALTERNATIVES = re.compile(r"\w+( \([^)]*\))? \|")
"""Values with bars between them, as in ``auto | never``. They keep their small letters."""


@dataclass(frozen=True)
class Row:
    """One row of a table: a key with its type, its default and its meaning, in Markdown."""

    key: str
    kind: str
    default: str
    meaning: str

    def __str__(self) -> str:
        return f"| {self.key} | {self.kind} | {self.default} | {self.meaning} |"


HEAD = "| key | type | default | meaning |\n|---|---|---|---|"


def code(text: str) -> str:
    """Return a text as code in Markdown. An empty text stays empty."""
    if not text:
        return ""
    return f"`{text}`".replace("|", "\\|")


def sentences(comment: str) -> str:
    """Return a comment as sentences in Markdown. A semicolon outside parentheses ends a sentence."""
    parts = []
    for part in re.split(r"; (?![^(]*\))|(?<=[a-z)\]\d])\. ", comment.strip().removesuffix(".")):
        literal = LITERAL.match(part)
        if literal is not None:
            part = f"`{literal.group()}`{part[literal.end() :]}"
        elif FIRST_WORD.match(part) and not ALTERNATIVES.match(part):
            part = part[0].upper() + part[1:]
        parts.append(part)
    text = ". ".join(part for part in parts if part)
    if not text:
        return ""
    return f"{text}.".replace("|", "\\|").replace("<", "\\<")


def type_name(annotation: Any) -> str:
    """Return the name of a type for users: ``null`` for None, ``int or null`` for a union."""
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_name(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(argument) for argument in arguments)
    if origin is not None:
        inner = ", ".join(type_name(argument) for argument in arguments if argument is not Ellipsis)
        return f"{origin.__name__}[{inner}]"
    names = {types.NoneType: "null", Any: "any", object: "any", inspect.Parameter.empty: "any"}
    return names.get(annotation) or getattr(annotation, "__name__", str(annotation))


@dataclass
class Keys:
    """The keys of one class in a group. A key is a path below the node of the class."""

    target: str  # the class, with its module
    group: str
    defaults: dict[str, Entry] = field(default_factory=dict)
    """The entry with the default of each key, by the absolute path."""
    comments: dict[str, str] = field(default_factory=dict)
    """The comment of each key."""
    paths: dict[str, list[str]] = field(default_factory=dict)
    """The absolute paths of each key, one for each node of the class."""

    @property
    def name(self) -> str:
        return self.target.rpartition(".")[2]

    def read(self, choice: Choice, node: str, inner_nodes: list[str]) -> None:
        """Add the keys of the config node ``node`` in ``choice``.

        ``inner_nodes`` are nodes below it with classes of their own. Their keys are left out.
        """
        for path, entry in choice.entries.items():
            key = path.removeprefix(f"{node}.")
            if not path.startswith(f"{node}.") or key == "_target_":
                continue
            if any(path.startswith(f"{inner}.") for inner in inner_nodes):
                continue
            first = choice.first_entries.get(path, entry)
            if not self.comments.get(key):
                self.comments[key] = first.comment
            # A key below a parameter that is a mapping gets a row if it has a comment, or if the file of the
            # parameter defines it. A choice may add keys of its own to such a mapping. They get no row.
            parameter = f"{node}.{key.partition('.')[0]}"
            is_parameter = path == parameter
            is_in_file_of_parameter = first.file == choice.first_entries.get(parameter, first).file
            if is_parameter or (is_in_file_of_parameter and not entry.is_mapping) or first.comment:
                self.paths.setdefault(key, [])
                if path not in self.paths[key]:
                    self.paths[key].append(path)
                    self.defaults[path] = first

    def rows(self) -> list[Row]:
        """Return a row for each key, and for each key that only the constructor has."""
        part = import_class(self.target, self.group)
        kinds = parameter_types(part)
        rows = []
        for key, paths in self.paths.items():
            if not key.startswith("+"):
                names = "<br>".join(code(path) for path in paths)
                defaults = dict.fromkeys(default_text(self.defaults[path]) for path in paths)
                meaning = sentences(self.comments[key])
                rows.append(Row(names, key_type(kinds, key), "<br>".join(defaults), meaning))
        return rows + self.constructor_rows(inspect.signature(part), kinds)

    def constructor_rows(self, signature: inspect.Signature, kinds: dict[str, Any]) -> list[Row]:
        """Return a row for each key that only the constructor has."""
        rows = []
        for name, parameter in signature.parameters.items():
            is_known = name in self.paths or name in INJECTED.get(self.group, ())
            is_node = f"{self.group}.{name}" in NESTED_GROUPS.values()
            if is_known or is_node or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            meaning = sentences(self.comments.get(f"+{name}", ""))
            default = code(yaml_text(parameter.default))
            rows.append(Row(code(f"+{self.group}.{name}"), key_type(kinds, name), default, meaning))
        return rows


def key_type(kinds: dict[str, Any], key: str) -> str:
    """Return the type of a key: of a constructor's parameter, or of the values of a mapping."""
    parameter, _, path_in_mapping = key.partition(".")
    kind = kinds.get(parameter, Any)
    if path_in_mapping:
        arguments = typing.get_args(kind)  # the types of the mapping's keys and values
        kind = arguments[-1] if arguments else Any
    return type_name(kind)


def yaml_text(value: Any) -> str:
    """Return a value as one line of YAML."""
    first_line, _, _ = str(yaml.safe_dump(value)).partition("\n")
    return first_line


def default_text(entry: Entry) -> str:
    """Return the default of a key in Markdown."""
    if entry.is_mapping:
        return "its keys"
    if entry.text == "???":
        return "the choice's"
    if len(entry.text) > LONGEST_VALUE:
        return f"in [{entry.file}](../../conf/{entry.file})"
    return code(entry.text)


def keys_of_group(group: str, choices: list[Choice]) -> dict[str, Keys]:
    """Return the keys of each class that the choices of a group use, by the name of the class."""
    root = NESTED_GROUPS.get(group, group)
    keys: dict[str, Keys] = {}
    for choice in choices:
        classes = choice.classes()
        for node, target in classes.items():
            if target == "???" or not f"{node}.".startswith(f"{root}."):
                continue
            inner_nodes = [path for path in classes if path.startswith(f"{node}.")]
            keys.setdefault(target, Keys(target, group)).read(choice, node, inner_nodes)
    return keys


def tables(keys: dict[str, Keys]) -> dict[tuple[str, ...], list[Row]]:
    """Return the rows of a group by the classes that have them.

    Rows that several classes share are in one table, unless they are few.
    """
    rows = {class_keys.name: class_keys.rows() for class_keys in keys.values()}
    owners: dict[Row, tuple[str, ...]] = {}  # the classes that have a row
    for name, rows_of_class in rows.items():
        for row in rows_of_class:
            owners[row] = (*owners.get(row, ()), name)
    sizes = Counter(owners.values())
    result: dict[tuple[str, ...], list[Row]] = {}
    for name, rows_of_class in rows.items():
        for row in rows_of_class:
            title = owners[row] if sizes[owners[row]] >= FEWEST_SHARED_ROWS else (name,)
            if row not in result.setdefault(title, []):
                result[title].append(row)
    return result


def defaults_of(choice: Choice, keys: dict[str, Keys]) -> dict[str, Entry]:
    """Return the default of each key of a choice's classes, by its path."""
    defaults: dict[str, Entry] = {}
    for node, target in choice.classes().items():
        if target in keys:
            for path, entry in keys[target].defaults.items():
                if path.startswith(f"{node}."):
                    defaults.setdefault(path, entry)
    return defaults


def differences(choice: Choice, keys: dict[str, Keys], group: str) -> list[str]:
    """Return the settings of a choice that differ from the defaults: values, classes, other choices."""
    root = NESTED_GROUPS.get(group, group)
    defaults = defaults_of(choice, keys)
    settings = [code(f"{key}={value}") for key, value in choice.selections.items()]
    for path, entry in choice.entries.items():
        node, _, key = path.rpartition(".")
        if key == "_target_":
            if node != root and choice.first_entries[path].file == f"{group}/{choice.name}.yaml":
                settings.append(f"{code(node)}: {code(entry.text.rpartition('.')[2])}")
            continue
        if entry.is_mapping or key.startswith("+"):
            continue
        if path not in defaults or defaults[path].text != entry.text:
            setting = f"{path}={entry.text}"
            if len(entry.text) > LONGEST_VALUE:
                setting = path
            settings.append(code(setting))
    return settings


def choice_table(group: str, choices: list[Choice], keys: dict[str, Keys]) -> str:
    """Return the table of a group's choices."""
    root = NESTED_GROUPS.get(group, group)
    lines = ["| choice | meaning | class | it sets |", "|---|---|---|---|"]
    default, comment = default_choice(group)
    if default and default not in [choice.name for choice in choices]:
        lines.append(f"| {code(default)} (default) | {sentences(comment)} | | |")
    for choice in choices:
        target = choice.classes().get(root, "").rpartition(".")[2]
        link = f"[`{choice.name}`](../../conf/{group}/{choice.name}.yaml)"
        if choice.name == default:
            link += " (default)"
        values = ", ".join(differences(choice, keys, group))
        lines.append(f"| {link} | {sentences(choice.description)} | {code(target)} | {values} |")
    return "\n".join(lines)


def group_section(group: str) -> str:
    """Return the section of a group: its choices, and the keys of their classes."""
    choices = [compose(group, name) for name in choice_names(group)]
    keys = keys_of_group(group, choices)
    parts = [f"## {group}", choice_table(group, choices, keys)]
    for names, rows in tables(keys).items():
        parts.append("### Keys of " + ", ".join(code(name) for name in names))
        parts.append("\n".join([HEAD, *map(str, rows)]))
    return "\n\n".join(parts)


def definition_of(record: type) -> ast.ClassDef:
    """Return the definition of a class in its source."""
    definition = ast.parse(textwrap.dedent(inspect.getsource(record))).body[0]
    assert isinstance(definition, ast.ClassDef)
    return definition


def comment_lines(source: str) -> tuple[dict[int, str], set[int]]:
    """Return the comments in a source by line number, and the numbers of lines without code."""
    texts = {}
    lines_without_code = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            number, _ = token.start
            texts[number] = token.string.lstrip("# ")
            if token.line.lstrip().startswith("#"):
                lines_without_code.add(number)
    return texts, lines_without_code


def field_comments(record: type) -> dict[str, str]:
    """Return the comment beside each field of a class, or the comment lines above the field."""
    texts, lines_without_code = comment_lines(textwrap.dedent(inspect.getsource(record)))
    comments = {}
    for statement in definition_of(record).body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            start = statement.lineno
            end = (statement.end_lineno or start) + 1
            has_comment_beside = any(number in texts for number in range(start, end))
            if not has_comment_beside:
                while start - 1 in lines_without_code:
                    start -= 1
            lines = [texts[number] for number in range(start, end) if number in texts]
            comments[statement.target.id] = " ".join(lines)
    return comments


def field_rows(record: type, prefix: str, entries: dict[str, Entry]) -> list[Row]:
    """Return a row for each field of a dataclass.

    ``entries`` are the keys of a YAML file, whose values and comments replace those in the source. ``prefix``
    is the path of the dataclass's node with a dot, or empty.
    """
    kinds = typing.get_type_hints(record)
    comments = field_comments(record)
    rows = []
    for record_field in fields(record):
        key = prefix + record_field.name
        entry = entries.get(key)
        default = "required"
        if entry is not None and not entry.is_mapping:
            default = default_text(entry)
        elif record_field.default is not MISSING:
            default = code(yaml_text(record_field.default))
        elif record_field.default_factory is not MISSING:
            default = code(str(record_field.default_factory()))
        comment = comments.get(record_field.name, "")
        if entry is not None and entry.comment:
            comment = entry.comment
        rows.append(Row(code(key), type_name(kinds[record_field.name]), default, sentences(comment)))
    return rows


def root_section() -> str:
    """Return the sections of the keys outside of groups: the root and the trainer."""
    text = (CONF / "config.yaml").read_text(encoding="utf-8")
    entries = dict(read_entries(text, "config.yaml"))
    rows = [
        row for row in field_rows(Config, "", entries) if row.key.strip("`") not in (*INTERFACES, "trainer")
    ]
    trainer = field_rows(TrainerConfig, "trainer.", entries)
    parts = ["## The root", "\n".join([HEAD, *map(str, rows)])]
    parts += ["## trainer", "A step is one optimizer update.", "\n".join([HEAD, *map(str, trainer)])]
    return "\n\n".join(parts)


def recipe_section() -> str:
    """Return the table of the recipes. A recipe sets keys of the other groups, and has no key itself."""
    lines = ["| recipe | meaning | it selects |", "|---|---|---|"]
    for name in sorted(choice_names("recipe")):
        choice = compose("recipe", name)
        selections = ", ".join(code(f"{key}={value}") for key, value in choice.selections.items())
        link = f"[`{name}`](../../conf/recipe/{name}.yaml)"
        lines.append(f"| {link} | {sentences(choice.description)} | {selections} |")
    return "## recipe\n\n{}\n\n{}".format(
        "A recipe selects choices of other groups and sets their keys. The values stand in its file.",
        "\n".join(lines),
    )


def corpus_section() -> str:
    """Return the corpora, and the keys of ``speechtrain prepare corpus=NAME``."""
    lines = ["| corpus | meaning |", "|---|---|"]
    for name in choice_names("corpus"):
        file = read_file("corpus", name)
        link = f"[`{name}`](../../conf/corpus/{name}.yaml)"
        lines.append(f"| {link} | {sentences(file.description)} |")
    parts = ["## corpus", "These are choices of `prepare corpus=NAME`, and no group of a run."]
    parts += ["\n".join(lines), "\n".join([HEAD, *map(str, field_rows(Corpus, "", {}))])]
    parts.append("### Keys of an archive, below `archives.FILE`")
    parts.append("\n".join([HEAD, *map(str, field_rows(Archive, "", {}))]))
    parts.append("### Keys of `corpus=huggingface`")
    parts.append("\n".join([HEAD, *map(str, field_rows(HuggingFace, "", {}))]))
    return "\n\n".join(parts)


INTRODUCTION = """# Config keys

Each key can be set on the command line, as in `optimizer.lr=1e-3`. `GROUP=CHOICE` selects a file of
`conf/GROUP/`, as in `model=ctc`. `--cfg job` prints the composed config of a command.

The default of a key is the value in its base file, or in the first choice that has it. The column "it sets"
lists other values of a choice. A default `${KEY}` is the value of another key. `${oc.env:NAME,VALUE}` is a
variable of the environment with its default. "The choice's" means that each choice sets the key. A key with
a `+` is not in the YAML file, so type it with the `+`. `final_decoder` has the choices and keys of `decoder`.
"""


def page() -> str:
    """Return the page of the config keys."""
    names = [
        "The root",
        "trainer",
        *[group for group in GROUPS if group != "final_decoder"],
        "recipe",
        "corpus",
    ]
    links = ", ".join(f"[{name}](#{name.lower().replace(' ', '-')})" for name in names)
    builders: dict[str, Callable[[], str]] = {"recipe": recipe_section, "corpus": corpus_section}
    parts = [INTRODUCTION + f"\nSections: {links}.", root_section()]
    for group in names[2:]:
        if group in builders:
            parts.append(builders[group]())
        else:
            parts.append(group_section(group))
    return "\n\n".join(parts) + "\n"


def rows_of(text: str) -> Iterator[list[str]]:
    """Yield the cells of each table row of a page that this module wrote, without the heads."""
    for line in text.split("\n"):
        if line.startswith("| ") and not line.startswith(
            ("| key |", "| choice |", "| recipe |", "| corpus |")
        ):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def keys_without_meaning(text: str) -> list[str]:
    """Return the keys and choices of a page that have no meaning."""
    missing = []
    for cells in rows_of(text):
        meaning = cells[1]
        if len(cells) == 4 and not cells[0].startswith("[") and "(default)" not in cells[0]:
            meaning = cells[3]
        if not meaning:
            missing.append(cells[0])
    return missing

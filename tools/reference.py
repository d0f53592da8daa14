"""Write pages of all keys, commands and Python classes: ``reference.py [FOLDER]``, else build/reference/."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import io
import itertools
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import config_reference
from config_reference import code, definition_of, field_comments, sentences

from speechtrain.commands.main import COMMANDS, run

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "build" / "reference"
NOTE = "<!-- `make docs-reference` writes this page. Edit its sources instead: {}. -->\n\n"
LONGEST_SIGNATURE = 100

SUBCOMMANDS = {
    "prepare": ("tokenizer", "manifest", "convert", "perturb", "split", "stats", "lm", "tsv", "corpus=NAME"),
    "study": ("ask", "tell", "status", "import"),
}

USE = (
    "speechtrain.load",
    "speechtrain.inference.loaded_run.LoadedRun",
    "speechtrain.inference.loaded_run.TranscriptionError",
    "speechtrain.inference.transcript.Transcript",
    "speechtrain.inference.transcript.Segment",
    "speechtrain.decoding.base.Hypothesis",
    "speechtrain.decoding.base.Word",
    "speechtrain.training.evaluation.Outcome",
    "speechtrain.task.Example",
    "speechtrain.transducer_loss",
)
"""The imports of a program that uses a trained run, or the loss."""

PARTS = (
    "speechtrain.task.Task",
    "speechtrain.task.Loss",
    "speechtrain.task.Evaluation",
    "speechtrain.task.Alarm",
    "speechtrain.batch.Batch",
    "speechtrain.batch.Footprint",
    "speechtrain.encoders.base.Encoder",
    "speechtrain.decoding.base.Decoder",
    "speechtrain.decoding.base.Scorer",
    "speechtrain.text.vocabulary.Tokenizer",
    "speechtrain.data.base.DataModule",
    "speechtrain.data.source.Source",
    "speechtrain.data.source.Facts",
    "speechtrain.devices.base.Device",
    "speechtrain.devices.base.DeviceFacts",
    "speechtrain.precision.Precision",
    "speechtrain.compute_policy.ComputePolicy",
    "speechtrain.compute_policy.PolicyAware",
    "speechtrain.launcher.Launcher",
    "speechtrain.launcher.Job",
    "speechtrain.launcher.LaunchResult",
    "speechtrain.optim.schedules.Schedule",
    "speechtrain.tracking.base.Tracker",
)
"""The interfaces that a part of your own implements, and the records that they exchange."""


def markdown(docstring: str | None) -> str:
    """Return a docstring as Markdown: examples as code, definitions as a list."""
    lines = inspect.cleandoc(docstring or "").replace("``", "`").split("\n")
    result: list[str] = []
    is_example = False
    for number, line in enumerate(lines):
        if line.startswith(">>>") and not is_example:
            result.append("```python")
            is_example = True
        elif is_example and not line:
            result.append("```")
            is_example = False
        following = lines[number + 1] if number + 1 < len(lines) else ""
        is_term = re.fullmatch(r"`[^`]+`", line) is not None and following.startswith("    ")
        if is_term:
            line = f"- {line}:"
        elif line.startswith("    ") and not is_example:
            line = f"  {line.strip()}"
        result.append(line)
    if is_example:
        result.append("```")
    return "\n".join(result)


class Source:
    """An annotation or a default that prints as its source."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __repr__(self) -> str:
        if isinstance(self.source, str):
            return self.source
        return inspect.formatannotation(self.source)


def annotated(annotation: Any) -> Any:
    """Return an annotation that prints as its source, or the marker of a missing one."""
    if annotation is inspect.Parameter.empty:
        return annotation
    return Source(annotation)


def default_sources(function: Callable[..., Any]) -> dict[str, Source]:
    """Return the source of each default of a function. A value may name a path of this machine."""
    definition = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(definition, ast.FunctionDef)
    arguments = definition.args
    sources = {}
    pairs = [*zip(reversed(arguments.args), reversed(arguments.defaults), strict=False)]
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    for argument, default in pairs:
        if default is not None:
            sources[argument.arg] = Source(ast.unparse(default))
    return sources


def signature(name: str, function: Callable[..., Any]) -> str:
    """Return ``name(parameters) -> result``, one parameter in each line if it is long."""
    described, defaults = inspect.signature(function), default_sources(function)
    parameters = []
    for parameter in described.parameters.values():
        default = defaults.get(parameter.name, parameter.empty)
        parameters.append(parameter.replace(annotation=annotated(parameter.annotation), default=default))
    result = annotated(described.return_annotation)
    line = f"{name}{described.replace(parameters=parameters, return_annotation=result)}"
    if len(line) > LONGEST_SIGNATURE:
        rows = "".join(f"    {parameter},\n" for parameter in parameters)
        line = f"{name}(\n{rows})" + line[line.rindex(")") + 1 :]
    return line


def attributes(record: type) -> Iterator[ast.AnnAssign]:
    """Yield the public attributes with a type in the body of a class."""
    for statement in definition_of(record).body:
        is_attribute = isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        if is_attribute and not statement.target.id.startswith("_"):
            yield statement


def attribute_docstrings(record: type) -> dict[int, str]:
    """Return the docstring below each attribute of a class, by the line of the attribute."""
    texts = {}
    body = definition_of(record).body
    for statement, next_statement in itertools.pairwise(body):
        is_text = isinstance(next_statement, ast.Expr) and isinstance(next_statement.value, ast.Constant)
        if is_text:
            texts[statement.lineno] = " ".join(next_statement.value.value.split()).replace("``", "`")
    return texts


def attribute_table(record: type) -> str:
    """Return the table of a class's attributes: type, default, and meaning if the source has one."""
    comments, docstrings = field_comments(record), attribute_docstrings(record)
    rows = []
    for attribute in attributes(record):
        name, default = attribute.target.id, ""
        if attribute.value is not None:
            default = code(ast.unparse(attribute.value))
        meaning = sentences(comments[name]).replace("``", "`") or docstrings.get(attribute.lineno, "")
        rows.append(f"| {code(name)} | {code(ast.unparse(attribute.annotation))} | {default} | {meaning} |")
    if not rows:
        return ""
    return "\n".join(["| attribute | type | default | meaning |", "|---|---|---|---|", *rows])


def methods(part: type) -> Iterator[str]:
    """Yield the public methods and properties of a class, each as a paragraph."""
    for name, member in vars(part).items():
        function = getattr(member, "__func__", member)
        if isinstance(member, property):
            function = member.fget
        elif isinstance(member, functools.cached_property):
            function = member.func
        if name.startswith("_") or not inspect.isfunction(function) or function.__name__ != name:
            continue  # A function of another name is the default of an attribute.
        line = signature(name, function)
        if isinstance(member, property | functools.cached_property):
            line = f"{name}: {Source(inspect.signature(function).return_annotation)}"
        text = markdown(function.__doc__)
        if getattr(member, "__isabstractmethod__", False):
            text += " You must implement it."
        yield f"#### {part.__name__}.{name}\n\n```python\n{line}\n```\n\n{text}".rstrip()


def python_entry(path: str) -> str:
    """Return the section of a class or a function."""
    module_name, _, name = path.rpartition(".")
    part = getattr(importlib.import_module(module_name), name)
    blocks = [f"### {name}", f"`from {module_name} import {name}`"]
    if not inspect.isclass(part):
        return "\n\n".join([*blocks, f"```python\n{signature(name, part)}\n```", markdown(part.__doc__)])
    if not (part.__doc__ or "").startswith(f"{name}("):  # Otherwise dataclasses have written it.
        blocks.append(markdown(part.__doc__))
    blocks += [attribute_table(part), *methods(part)]
    return "\n\n".join(block for block in blocks if block)


def python_page() -> str:
    """Return the page of the Python API."""
    introduction = """# Python API

[docs/python.md](../../docs/python.md) shows how a program uses a trained run. This page lists each class
and function. A letter in a shape such as (B, T) is explained in the docstring of its module."""
    parts = [introduction, "## Use a run", *map(python_entry, USE)]
    parts.append("## Parts of your own")
    parts.append(
        "A part is one class and one YAML file ([examples/plugin](../../examples/plugin/README.md)). Its"
        " class implements the interface of its group."
    )
    parts += map(python_entry, PARTS)
    return NOTE.format("the docstrings in speechtrain/") + "\n\n".join(parts) + "\n"


def help_text(arguments: list[str]) -> str:
    """Return the text that ``speechtrain`` prints for these arguments and ``--help``, 100 columns wide."""
    output = io.StringIO()
    columns = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "100"
    try:
        with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
            run([*arguments, "--help"])
    finally:
        del os.environ["COLUMNS"]
        if columns is not None:
            os.environ["COLUMNS"] = columns
    return output.getvalue().strip()


def commands_page() -> str:
    """Return the page of the command line."""
    commands: list[list[str]] = [[]]
    for name in COMMANDS:
        commands.append([name])
        for subcommand in SUBCOMMANDS.get(name, ()):
            commands.append([name, subcommand])
    parts = [
        "# Commands\n\nEach section is the text of `--help`."
        " The config keys of `KEY=VALUE` are in [config.md](config.md)."
    ]
    for command in commands:
        text = help_text([word.replace("NAME", "librispeech") for word in command])
        level = "#" * max(2, len(command) + 1)
        parts.append(f"{level} {' '.join(['speechtrain', *command])}\n\n```text\n{text}\n```")
    return NOTE.format("the parsers in speechtrain/commands/") + "\n\n".join(parts) + "\n"


def config_page() -> str:
    return NOTE.format("the comments in conf/, and the classes that it names") + config_reference.page()


BUILDERS: dict[str, Callable[[], str]] = {
    "config.md": config_page,
    "commands.md": commands_page,
    "python.md": python_page,
}


def main(arguments: list[str]) -> None:
    folder = Path(arguments[0]) if arguments else PAGES
    folder.mkdir(parents=True, exist_ok=True)
    for name, build in BUILDERS.items():
        path = folder / name
        path.write_text(build(), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main(sys.argv[1:])

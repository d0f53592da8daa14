"""Write the pages of docs/reference/ from the code, or check that they are up to date.

reference.py            write the pages
reference.py --check    exit with 1 and the names of the pages that are not up to date
"""

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

from speechtrain import errors, run_directory
from speechtrain.commands.main import COMMANDS, run
from speechtrain.tracking.base import Tracker
from speechtrain.training.time_budget import Revision, TimePlan

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "reference"
COMMANDS_PYTHON = (3, 11)
"""The Python that writes commands.md. ``argparse`` of other versions breaks its lines elsewhere."""
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

FILES = (
    (
        "config.yaml",
        "train",
        "the resolved config with its format number. The first line has its digest, which"
        " you remove if you edit the file. A value of the environment stands as `${oc.env:NAME,default}`",
    ),
    (
        "run.json",
        "train",
        "the command line, the versions and the host of the first and the latest start ([keys](#runjson))",
    ),
    ("result.json", "train", "how the run ended, with its metrics and its speed ([keys](#resultjson))"),
    ("metrics.jsonl", "train", "every event, one JSON object in each line ([events](#metricsjsonl))"),
    ("output.log", "train", "the lines of a plain console, with their time, for any `tracking`"),
    (
        "checkpoints/best.json",
        "train",
        "the name and the metric of the best checkpoint, for other programs ([keys](#checkpointsbestjson))",
    ),
    (
        "checkpoints/step-N/checkpoint.json",
        "train",
        "digests of the files, and metrics of the validation ([keys](#checkpointsstep-ncheckpointjson))",
    ),
    (
        "checkpoints/step-N/model.safetensors",
        "train",
        "the evaluated weights: their average, if there is one",
    ),
    (
        "checkpoints/step-N/state.pt",
        "train",
        "all that a continued run needs ([entries](../stored-names.md#statept))",
    ),
    ("checkpoints/step-N/shards/", "train", "the state of a sharded run ([sharding.md](../sharding.md))"),
    (
        "device.json",
        "train",
        "the compute policy, and the times if policies were timed ([keys](#devicejson))",
    ),
    ("plan.json", "train", "the plan of a run that is planned by time ([keys](#planjson))"),
    (
        "tokenizer.model",
        "train",
        "the model of a SentencePiece tokenizer",
    ),
    ("skipped.jsonl", "train", "bad training recordings: `id`, `reason`, `detail` ([data.md](../data.md))"),
    (
        "filtered.jsonl",
        "train",
        "training recordings that are too short or too long: `id`, `reason`, `detail`",
    ),
    ("tensorboard/", "train", "the events for TensorBoard"),
    ("wandb/", "train", "the records of `tracking=wandb` ([trackers.md](../trackers.md))"),
    (
        "mlperf.log",
        "train",
        "the lines of MLPerf's logger, with `tracking=mlperf` ([trackers.md](../trackers.md#mlperf))",
    ),
    ("profile-A-B.json", "train", "the profile of `trainer.profile=A:B`, for a Chrome trace viewer"),
    ("report.html", "report", "the page of the report. A run with `tracking=default` writes it when it ends"),
    ("error.log", "train", "the trace of a failure"),
    ("replay.pt", "train", "the batches of a divergence"),
    (
        "ranks/N/",
        "train",
        "files of each rank except the first: `output.log`, `result.json`, `error.log`. The"
        " first rank of another host also has `run.json`",
    ),
    ("stuck/TIME/", "train", "the phase and the stacks of each rank when a rank hung"),
    ("agent.log", "train", "the output of torchrun, and how a killed rank ended"),
    ("lock", "train", "the host and the process of a run in progress"),
)
"""The files of a run: path, the command that writes it, and content in Markdown."""

RECORDS = (
    ("run.json", run_directory.About),
    ("result.json", run_directory.RunResult),
    ("checkpoints/step-N/checkpoint.json", run_directory.CheckpointManifest),
    ("checkpoints/best.json", run_directory.BestCheckpoint),
    ("device.json", run_directory.DeviceRecord),
    ("plan.json", TimePlan),
    ("The values of a revision in plan.json", Revision),
)


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

[python.md](../python.md) shows how a program uses a trained run. This page lists each class and function.
A letter in a shape such as (B, T) is explained in the docstring of its module."""
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


def record_table(record: type) -> str:
    """Return the table of the keys of a JSON file."""
    rows = ["| key | type | meaning |", "|---|---|---|"]
    comments = field_comments(record)
    for name, annotation in record.__annotations__.items():
        rows.append(f"| {code(name)} | {code(annotation)} | {sentences(comments.get(name, ''))} |")
    return "\n".join(rows)


def run_files_page() -> str:
    """Return the page of the files of a run."""
    rows = ["| file | written by | content |", "|---|---|---|"]
    for path, program, content in FILES:
        rows.append(f"| {code(path)} | {program} | {content[0].upper() + content[1:]}. |")
    parts = [
        "# Files of a run",
        "[runs.md](../runs.md) says where a run directory is, and how a run continues."
        " [stored-names.md](../stored-names.md) lists each name that a run's files hold.",
        "\n".join(rows),
    ]
    for path, record in RECORDS:
        parts += [f"## {path}", record_table(record)]
    events = inspect.cleandoc(Tracker.__doc__ or "").partition("The list below")[2]
    text = f"Each line has `event` and `time`. {markdown('The list below' + events)}"
    parts += ["## metrics.jsonl", text]
    sources = "the records that it lists, speechtrain/tracking/base.py and tools/reference.py"
    return NOTE.format(sources) + "\n\n".join(parts) + "\n"


def exit_codes_page() -> str:
    """Return the page of the exit codes."""
    rows = ["| code | class | meaning | what to do |", "|---|---|---|---|"]
    rows.append("| 0 | | The work is done. A finished run returns its result again. | |")
    rows.append(
        "| 1 | | It is an internal error of speechtrain. | Report it, with the file that the line names. |"
    )
    classes = [
        error for error in errors.SpeechtrainError.__subclasses__() if error.__module__ == errors.__name__
    ]
    for error in sorted(classes, key=lambda error: error.exit_code):
        meaning, _, advice = inspect.cleandoc(error.__doc__ or "").replace("``", "`").partition("\n\n")
        cells = (code(error.__name__), " ".join(meaning.split()), " ".join(advice.split()))
        rows.append(f"| {error.exit_code} | {' | '.join(cells)} |")
    killed = "A second Ctrl-C killed the run."
    advice = "The same command continues from the last checkpoint."
    rows.append(f"| {errors.EXIT_KILLED} | | {killed} | {advice} |")
    text = """`speechtrain doctor` has the code of its first red line. An accelerator that the command names
and that is absent (`device=hpu`, `device=cuda`) is amber, because the recorder judges the recipe on the CPU.
A dry run (`dry_run=true`) warns of a device or program that is absent, names missing data, and exits with 0.

Every error is one line on stderr, `speechtrain: error: …`. Before it comes a line `speechtrain: needs …` for
each missing corpus, tokenizer and key of a run (code 3). A rank that fails writes its trace to `error.log` in
the run directory."""
    return NOTE.format("speechtrain/errors.py") + "# Exit codes\n\n" + "\n".join(rows) + f"\n\n{text}\n"


def config_page() -> str:
    return NOTE.format("the comments in conf/, and the classes that it names") + config_reference.page()


BUILDERS: dict[str, Callable[[], str]] = {
    "config.md": config_page,
    "commands.md": commands_page,
    "python.md": python_page,
    "run-files.md": run_files_page,
    "exit-codes.md": exit_codes_page,
}


def stale_pages() -> list[str]:
    """Return the names of the pages that differ from the code. Another Python skips commands.md."""
    stale = []
    for name, build in BUILDERS.items():
        if name == "commands.md" and sys.version_info[:2] != COMMANDS_PYTHON:
            continue
        path = PAGES / name
        if not path.exists() or path.read_text(encoding="utf-8") != build():
            stale.append(name)
    return stale


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        stale = stale_pages()
        if stale:
            print(f"not up to date: {', '.join(stale)}; run make docs-reference", file=sys.stderr)
        return bool(stale)
    PAGES.mkdir(exist_ok=True)
    for name, build in BUILDERS.items():
        (PAGES / name).write_text(build(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

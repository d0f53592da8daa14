"""Commands in the pages of the documentation: their words, and how the program of each parses them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from speechtrain.commands import doctor, evaluate, export, prepare, report, study, transcribe
from speechtrain.data.corpora.huggingface import HuggingFace
from speechtrain.start.auto_device import VARIABLE, check_launcher
from speechtrain.start.check_keys import check
from speechtrain.start.choices import choices, corpora
from speechtrain.start.command_line import translate_arguments
from speechtrain.start.compose import compose
from speechtrain.start.named_corpus import build_part, corpus_by_name, with_pairs
from speechtrain.study.space import distribution
from speechtrain.text.normalise import scoring_normaliser

PROGRAMS = ("train", "prepare", "evaluate", "transcribe", "export", "report", "doctor", "study")
COMMAND = re.compile(
    r"(?P<variables>(?:\b[A-Z_]+=\S+ +)*)(?:[\w./-]+/)?(?<!usage: )\bspeechtrain[- ]"
    rf"(?P<program>{'|'.join(PROGRAMS)})(?![\w=.-])(?P<rest>[^|;]*)"
)
_OPTIONAL = re.compile(r"\[(?=[A-Z-])([^\]=]*)\]")  # such as [RUN …] and [--json]
_ELLIPSES = ("…", "data=…")


@dataclass(frozen=True)
class Example:
    """A command in a page.

    ``source`` is its file and line. ``is_partial`` is true if the text omits arguments: it has an ellipsis,
    or names the command in a sentence.
    """

    source: str
    program: str
    words: tuple[str, ...]
    variables: tuple[tuple[str, str], ...]
    is_partial: bool


def commands_of(source: str, line: str, is_sentence: bool) -> Iterator[Example]:
    """Yield the command of a line, without ``"$()"`` around it and brackets around optional arguments."""
    match = COMMAND.search(re.sub(r'"\$\((.*)\)"', r"\1", line))
    if match is not None:
        words = shlex.split(_OPTIONAL.sub(r"\1", match["rest"]), comments=True)
        arguments = tuple(word for word in words if word not in _ELLIPSES)
        variables = [tuple(pair.split("=", 1)) for pair in match["variables"].split()]
        is_partial = is_sentence or len(arguments) < len(words)
        yield Example(source, match["program"], arguments, tuple(variables), is_partial)


def with_fixtures(words: Sequence[str], folder: Path) -> list[str]:
    """Return the words of a command with fixtures in place of the files that a dry run reads."""
    rules = (
        (r"^tokenizer\.model=.*", f"tokenizer.model={folder / 'tokenizer.model'}"),
        (r"(?<=[=:])( ?)/shared\b", rf"\1{folder / 'shared'}"),
        (r"^init_from=hf:.*", "init_from=RUN"),
        (r"\broot: FOLDER\b", f"root: {folder / 'corpus'}"),
        (r"^corpus=NAME$", f"corpus={min(corpora(None))}"),
        (r"^recipe=NAME$", f"recipe={min(choices(None)['recipe'])}"),
    )
    speech = str(folder / "speech" / "train.jsonl")
    replaced = []
    for word in words:
        for pattern, fixture in rules:
            word = re.sub(pattern, fixture, word)
        key, _, value = word.partition("=")
        if re.fullmatch(r"data\.(train|valid\.[\w-]+)", key) and value[0] not in "[{":
            files = [speech for _ in value.split(",")]
            word = f"{key}={','.join(files)}"
        replaced.append(word)
    return replaced


def first_job(overrides: Sequence[str]) -> list[str]:
    """Return the overrides of the first job of a sweep, or of a trial with the lowest values."""
    job = []
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        text = str(override.input_line)
        if override.is_sweep_override():
            parameter = distribution(override)
            values = getattr(parameter, "choices", None) or [parameter.low]
            text = f"{override.get_key_element()}={values[0]}"
        job.append(text)
    return job


def check_device(group_choices: Mapping[str, Any], config: DictConfig) -> None:
    """Raise ConfigError if a launcher of other hosts gets no device. The suite's variable does not count."""
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv(VARIABLE)
        check_launcher(group_choices, config)


def composed(overrides: Sequence[str]) -> None:
    """Compose a config with ``overrides`` and check it. Raises ConfigError.

    The run of a command that sets contexts has a FastConformer.
    """
    if any(override.startswith("encoder.context") for override in overrides):
        overrides = ["encoder=fastconformer_tiny", *overrides]
    config = compose(translate_arguments(overrides))
    config.run_dir = "run"
    check(config)


def parse(program: str, words: list[str]) -> None:
    """Parse a command by its own program, and compose the keys that it sets.

    Raises ConfigError, or SystemExit for ``--help``.
    """
    if words[0].startswith("corpus="):
        pairs = dict(word.split("=", 1) for word in words if "=" in word)
        if pairs["corpus"] == "huggingface":
            build_part(HuggingFace, with_pairs({}, pairs, HuggingFace))
        else:
            corpus_by_name(pairs)
    elif program == "prepare":
        prepare.parser().parse_args(words)
    elif program == "study":
        study.parser().parse_args(words)
    elif program == "report":
        report.parser().parse_with_run(words)
    elif program == "export":
        export.parser().parse_with_run(words)
    elif program == "transcribe":
        arguments = transcribe.parser().parse_with_run(words)
        composed([word for word in arguments.audio if "=" in word])
    elif program == "evaluate":
        arguments = evaluate.parser().parse_with_run(words)
        overrides, normaliser_name = evaluate.split_overrides(arguments.overrides)
        composed(overrides)
        scoring_normaliser(normaliser_name or "none")
    else:
        composed(doctor.parser().parse_intermixed_args(words).overrides)

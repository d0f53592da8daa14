"""The command line of speechtrain train, read once: options, overrides, run directory and rank."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speechtrain.config.resume_fields import swept_volatile
from speechtrain.errors import ConfigError, nearest
from speechtrain.run_directory import ABOUT
from speechtrain.runs.choices import config_dir
from speechtrain.runs.external_launch import ExternalLaunch, started_together

# Hydra's options: the values that may follow, none if any may; None for an option without a value
_FLAGS: dict[str, tuple[str, ...] | None] = {
    **dict.fromkeys(("--multirun", "-m", "--resolve", "--run", "-r", "--shell-completion", "-sc")),
    **dict.fromkeys(("--config-dir", "-cd", "--package", "-p"), ()),
    **dict.fromkeys(("--cfg", "-c"), ("job", "hydra", "all")),
    **dict.fromkeys(
        ("--info", "-i"), ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
    ),
}


@dataclass(frozen=True)
class Command:
    """What was typed, and whether the ranks were started together."""

    argv: list[str]  # as typed
    flags: list[str]  # Hydra's options with their values
    overrides: list[str]  # KEY=VALUE pairs in Hydra's syntax
    is_sweep: bool
    config_dir: str | None  # the last one if there are several
    run_dir: Path | None  # None for a sweep, which has several
    together: ExternalLaunch | None  # the ranks that run already, if no launcher is to start them
    swept: tuple[str, ...] = ()  # of a sweep's job: the keys that differ between the jobs

    def identity(self, user_files: Mapping[str, str]) -> dict[str, Any]:
        """Return the fields of ``run.json`` by which the same command finds its run."""
        texts = {"overrides": self.overrides, "folder": os.getcwd(), "swept": swept_volatile(self.swept)}
        return {**texts, "written": dict(user_files)}


def read(argv: Sequence[str]) -> Command:
    """Read the arguments and how this process was started; ``allow_targets=`` moves to the environment.

    Raises ConfigError if several ranks were started together and ``argv`` does not name the run directory.
    """
    flags, texts = split(rewrite(argv))
    overrides = [_with_run_dir(text) for text in texts]
    is_sweep = bool({"-m", "--multirun"} & {*flags})
    run_dir = None if is_sweep else _typed_run_dir(overrides)
    together = started_together(run_dir)
    return Command(
        argv=list(argv),
        flags=flags,
        overrides=overrides,
        is_sweep=is_sweep,
        config_dir=config_dir(flags),
        run_dir=run_dir,
        together=together,
    )


def _with_run_dir(text: str) -> str:
    """Return ``run_dir=RUN`` for a bare run directory, and each other text as it is.

    Raises ConfigError for another path.
    """
    if "=" in text or text.startswith("~"):
        return text
    if os.path.isfile(os.path.join(text, ABOUT)):  # Path raises an error for a name that is too long.
        return f"run_dir={_quoted(text)}"
    if os.sep in text:
        raise ConfigError(f"{text}: it is neither KEY=VALUE nor a run directory ({ABOUT} is missing)")
    return text


def _typed_run_dir(overrides: Sequence[str]) -> Path | None:
    named = [value for key, _, value in (o.partition("=") for o in overrides) if key == "run_dir"]
    if not named:
        return None
    return Path(unquoted(named[-1])).resolve()


def rewrite(argv: Sequence[str]) -> list[str]:
    """Translate arguments as users of other toolkits type them into Hydra's syntax.

    ``glob(*)`` leaves out base YAMLs. ``data.train=a.jsonl,b.jsonl`` becomes a list, because Hydra would
    read it as a sweep. ``data.valid.NAME=…`` and ``data.valid={NAME: …}`` may add names, and
    ``data.valid=FILE`` replaces the sets by one.
    ``final_decoder=`` chooses from the group of decoders.
    ``allow_targets=`` moves to the environment, so that no file can set it.
    """
    from speechtrain.config.schema import PLACES
    from speechtrain.config.targets import ALLOW_TARGETS

    rewritten = []
    for argument in argv:
        key, equals, value = argument.partition("=")
        if key == "allow_targets" and equals:
            os.environ[ALLOW_TARGETS] = value.strip("[]")
            continue
        if equals and re.fullmatch(r"\+{0,2}data\.(train|valid(\.[\w-]+)?)", key):
            if "," in value and not value.lstrip().startswith(("[", "{", "'", '"')):
                names = ",".join(_quoted(part) for part in value.split(","))
                # Hydra does not merge a list with the mapping of named sets.
                value = _quoted(value) if key.endswith("data.valid") else f"[{names}]"
            if key.startswith("data.valid") and value != "{}":
                key = "++" + key
            argument = f"{key}={value}"
        if re.fullmatch(r"glob\([^()]*\)", value) and "exclude" not in value:
            argument = f"{key}={value[:-1]},exclude=_*)"
        is_bare = not value.startswith(("[", "{", "'", '"')) and "${" not in value
        if is_bare and not value.isascii() and key[0] != "-":  # Hydra reads other letters in quotes only
            argument = f"{key}={','.join(_quoted(part) for part in value.split(','))}"
        if equals and key in PLACES:
            argument = f"{PLACES[key]}={value}"
        rewritten.append(argument)
    return rewritten


def unquoted(text: str) -> str:
    """Return a value without the quotes of Hydra's syntax around it."""
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        quote, text = text[0], text[1:-1]
        text = text.replace(f"\\{quote}", quote).replace("\\\\", "\\")
    return text


def _quoted(text: str) -> str:
    return "'" + text.strip().replace("\\", "\\\\").replace("'", "\\'") + "'"


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split arguments into Hydra's options with values, and overrides: its parser refuses a mixture."""
    found: tuple[list[str], list[str]] = ([], [])
    takes_next = False
    for argument in argv:
        is_option = takes_next or argument.startswith("-")
        found[not is_option].append(argument)
        takes_next = not takes_next and _FLAGS.get(argument) is not None
    return found


def check_flags(flags: Sequence[str]) -> None:
    """Refuse options for which Hydra would print its usage, or which replace the config."""
    remaining = iter(flags)
    for flag in remaining:
        name, equals, value = flag.partition("=")
        if name in ("--config-name", "-cn", "--config-path", "-cp"):
            raise ConfigError(f"{name}: write a recipe, DIR/recipe/NAME.yaml: --config-dir DIR recipe=NAME")
        if name not in _FLAGS:
            from speechtrain.runs.compose import key_for_option

            if key := key_for_option(name):
                raise ConfigError(f"unknown option {name}: write {key}={value or 'VALUE'}")
            hint = nearest(name, [*_FLAGS, "--help", "--version"])
            raise ConfigError(f"unknown option {name}{hint}; speechtrain train --help shows the usage")
        choices = _FLAGS[name]
        if choices is None:
            if equals:
                raise ConfigError(f"{flag}: {name} takes no value; write {name}")
            continue
        value = value if equals else next(remaining, "")
        listed = f"; it takes {', '.join(choices)}" if choices else ""
        if not value:
            raise ConfigError(f"{name} needs a value{listed}")
        if choices and value not in choices:
            raise ConfigError(f"{name} {value}: there is no such choice{listed}")

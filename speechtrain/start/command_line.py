"""The command line of speechtrain train: options, overrides, run directory and rank. It is read once."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from speechtrain.errors import ConfigError, nearest
from speechtrain.overrides import PLAIN, key_of_override, quoted, shell_word, unquoted
from speechtrain.run_directory import ABOUT
from speechtrain.start.choices import config_dir
from speechtrain.start.external_launch import ExternalLaunch, find_external_launch

_SWITCHES = ("--multirun", "-m", "--resolve", "--run", "-r", "--shell-completion", "-sc")
"""Hydra's options without a value."""
_CONFIGS = ("job", "hydra", "all")
_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
_VALUES: dict[str, tuple[str, ...]] = {
    "--config-dir": (),
    "-cd": (),
    "--package": (),
    "-p": (),
    "--cfg": _CONFIGS,
    "-c": _CONFIGS,
    "--info": _INFO,
    "-i": _INFO,
}
"""Hydra's options with a value, and the values that each accepts. An empty tuple means any value."""
_PRINTING_FLAGS = {"--cfg", "-c", "--info", "-i", "--shell-completion", "-sc"}
"""Options of Hydra with which a command prints something and starts no run."""
_RECIPE = "write a recipe, DIR/recipe/NAME.yaml: --config-dir DIR recipe=NAME"
_SUBSTITUTES = {
    **dict.fromkeys(("--config-name", "-cn", "--config-path", "-cp"), _RECIPE),
    "--experimental-rerun": "speechtrain train RUN continues a run, and RUN/config.yaml has its config",
    "--hydra-help": "speechtrain train --help shows the usage, --cfg hydra the settings of Hydra",
}
"""Options of Hydra that are refused, with what serves their purpose."""

_OPENING = ("[", "{", "'", '"')
"""First characters of lists, mappings and quoted texts in Hydra's syntax. In such a value, only words beyond
ASCII are rewritten. They are quoted."""
_SOURCES = re.compile(r"\+{0,2}(data\.(train|valid(\.[\w-]+)?)|augment\.(noise|rooms))")
"""The keys whose values are sources of recordings."""
_PATHS = re.compile(r".*\.(path|root|cache|model|lm|hostfile|recipe_cache)|\+{0,2}init_from|run_dir")
"""The other keys whose values are paths."""
_TOKEN = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[^]\[{},:'"]+|.""", re.DOTALL)
"""A part of a list or mapping in Hydra's syntax: a quoted text, an unquoted text, or a punctuation mark."""


@dataclass(frozen=True)
class Command:
    """The command that the user has given, and the ranks if another program has started them."""

    argv: list[str]  # the arguments as the user gave them
    flags: list[str]  # Hydra's options with their values
    overrides: list[str]  # KEY=VALUE pairs in Hydra's syntax
    is_sweep: bool  # The command has -m.
    config_dir: str | None  # the user's config folder, from the last --config-dir
    # The value of the last run_dir=. None without it, and for a sweep, whose jobs have a directory each.
    run_dir: Path | None
    external_launch: ExternalLaunch | None  # set if another program, such as mpirun, has started the ranks
    swept: tuple[str, ...] = ()  # the keys that differ between the jobs of a sweep

    @property
    def prints(self) -> bool:
        """Whether an option of the command prints something, and no run starts."""
        return any(flag.partition("=")[0] in _PRINTING_FLAGS for flag in self.flags)


def read_command(argv: Sequence[str]) -> Command:
    """Return the command of the arguments ``argv``.

    The rank of this process comes from the environment. ``allow_targets=`` becomes an environment variable.
    Raises ConfigError for an option that is refused, for a path that is no run directory, and if another
    program has started several ranks and ``argv`` has no ``run_dir=``.
    """
    argv = without_local_rank(argv)
    flags, texts = split_options(argv)
    check_flags(flags)  # It precedes the other texts, because the value of an unknown option is one of them.
    overrides = translate_arguments([_with_run_dir(text) for text in texts])
    is_sweep = "-m" in flags or "--multirun" in flags
    run_dir = None if is_sweep else _explicit_run_dir(overrides)
    return Command(
        argv=list(argv),
        flags=flags,
        overrides=overrides,
        is_sweep=is_sweep,
        config_dir=config_dir(flags),
        run_dir=run_dir,
        external_launch=find_external_launch(run_dir),
    )


def without_local_rank(argv: Sequence[str]) -> list[str]:
    """Return the arguments without the option ``--local-rank=N``, which ``torch.distributed.launch`` adds.

    It repeats the variable ``LOCAL_RANK``. Without this variable, the arguments stay as they are.
    """
    if "LOCAL_RANK" not in os.environ:
        return list(argv)
    others = []
    arguments = iter(argv)
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if name not in ("--local-rank", "--local_rank"):
            others.append(argument)
        elif not equals:
            next(arguments, None)  # The value is the next argument.
    return others


def _with_run_dir(text: str) -> str:
    """Return ``run_dir=RUN`` if ``text`` is a run directory, else ``text``.

    Raises ConfigError if ``text`` is another path.
    """
    path = _with_home(text)
    if os.path.isfile(os.path.join(path, ABOUT)):  # Path.is_file raises an error for a name that is too long.
        return f"run_dir={quoted(path)}"
    if "=" in text or path.startswith("~"):  # ``~KEY`` deletes a key in Hydra's syntax.
        return text
    if os.sep in path:
        raise ConfigError(
            f"{text}: it is neither KEY=VALUE nor a run directory ({ABOUT} is missing). Recordings are "
            f"data=manifest {shell_word('data.train', path)}, and a new run is {shell_word('run_dir', path)}"
        )
    return text


def _explicit_run_dir(overrides: Sequence[str]) -> Path | None:
    """Return the absolute path of the last ``run_dir=``, or None without it."""
    for override in reversed(overrides):
        key, _, value = override.partition("=")
        if key == "run_dir":
            return Path(unquoted(value)).resolve()
    return None


def translate_arguments(argv: Sequence[str]) -> list[str]:
    """Translate arguments in the syntax of other toolkits into Hydra's syntax.

    - The name of an existing file or folder is quoted, as is each value of ``run_dir``, and ``~/`` becomes
      the home folder. So a name may contain any signs of Hydra's syntax.
    - ``data.train=a.jsonl,b.jsonl`` becomes a list, because Hydra would read it as a sweep. So do
      ``augment.noise`` and ``augment.rooms``.
    - ``data.valid.NAME=…`` and ``data.valid={NAME: …}`` get ``++``, by which ``replaced_values.replace_sets``
      knows that they define sets.
    - Texts with letters beyond ASCII are quoted, because Hydra cannot read them otherwise.
    - ``glob(*)``, which sweeps all choices of a group, excludes the YAML files whose names start with ``_``.
    - ``final_decoder=`` chooses from the group of decoders.
    - ``allow_targets=`` becomes an environment variable, so that no file can set it.
    """
    from speechtrain.start.schema import BORROWED_GROUPS
    from speechtrain.start.targets import ALLOW_TARGETS

    rewritten = []
    for argument in argv:
        key, equals, value = argument.partition("=")
        if key == "allow_targets" and equals:
            os.environ[ALLOW_TARGETS] = value.strip("[]")
            continue
        if equals and not key.startswith("-"):
            key, value = _translate(key, value)
            key = BORROWED_GROUPS.get(key, key)
        rewritten.append(f"{key}{equals}{value}")
    return rewritten


def _translate(key: str, value: str) -> tuple[str, str]:
    """Return the key and the value of an override in Hydra's syntax."""
    value = _with_home(value)
    if _SOURCES.fullmatch(key) or _PATHS.fullmatch(key):
        value = _quoted_name(key, value)
    if _SOURCES.fullmatch(key):
        key, value = _rewrite_sources(key, value)
    if re.fullmatch(r"glob\([^()]*\)", value) and "exclude" not in value:
        return key, f"{value.removesuffix(')')},exclude=_*)"
    if value.isascii() or "${" in value:
        return key, value
    # Hydra reads letters beyond ASCII only in quotes.
    if value.startswith(_OPENING):
        return key, _TOKEN.sub(_quoted_token, value)
    return key, _quoted_parts(value)


def _with_home(value: str) -> str:
    """Return a value in which ``~/`` at the start is the home folder. Some shells expand only ``=~/``."""
    return os.path.expanduser(value) if value.startswith("~/") else value


def _quoted_name(key: str, value: str) -> str:
    """Return the value of a path's key, which is quoted if it is a name that Hydra would read otherwise.

    A list, a reference or a text that the user has quoted stays, unless a file has this name.
    """
    if PLAIN.fullmatch(value) or not value:
        return value
    is_text = unquoted(value) == value and "${" not in value and value != "null"
    # A run directory may not exist yet, so it is quoted without a look at the disk.
    is_run_dir = key == "run_dir" and is_text
    return quoted(value) if is_run_dir or os.path.lexists(value) else value


def _rewrite_sources(key: str, value: str) -> tuple[str, str]:
    """Return key and value of ``data.train=``, ``data.valid=`` or another source in Hydra's syntax."""
    if "," in value and not value.lstrip().startswith(_OPENING):
        # Hydra does not merge a list into data.valid, which is a mapping of named sets. So the paths stay one
        # text, which the reader of the sets splits.
        value = quoted(value) if key.endswith("data.valid") else f"[{_quoted_parts(value)}]"
    if key.startswith("data.valid") and value != "{}":  # ``{}`` removes all sets.
        key = f"++{key}"  # ``++`` allows a name that the default config lacks.
    return key, value


def _quoted_parts(value: str) -> str:
    """Return a value whose parts, which commas separate, are quoted one by one."""
    return ",".join(quoted(part.strip()) for part in value.split(","))


def _quoted_token(match: re.Match[str]) -> str:
    """Return a part of a list or mapping (``_TOKEN``). An unquoted text beyond ASCII is quoted."""
    token = match[0]
    return token if token.isascii() or token.startswith(_OPENING) else quoted(token.strip())


def split_options(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return two lists: Hydra's options with their values, and the overrides.

    Hydra's parser accepts options only before or after all overrides.
    """
    options = []
    overrides = []
    arguments = iter(argv)
    for argument in arguments:
        if not argument.startswith("-"):
            overrides.append(argument)
            continue
        options.append(argument)
        takes_value = argument in _VALUES
        if takes_value:
            options.extend(islice(arguments, 1))  # the value, if the argument is not the last one
    return options, overrides


def check_command(command: Command) -> None:
    """Raise ConfigError for a setting ``hydra…=`` that has no effect.

    These settings say how Hydra runs a sweep, so only a sweep has them.
    """
    for override in command.overrides:
        key = key_of_override(override)
        if key == "hydra.verbose":
            raise ConfigError(f"{key}: Hydra prints no log here. --info=all prints how it composes")
        is_of_hydra = key.startswith(("hydra.", "hydra/"))
        if is_of_hydra and not command.is_sweep and not command.prints:
            raise ConfigError(f"{override}: it is a setting of Hydra for a sweep. Add -m, or remove it")


def check_flags(flags: Sequence[str]) -> None:
    """Raise ConfigError for an unknown option, and for a value that the option does not accept.

    Hydra would print its usage for them. Options that replace the config itself are also refused.
    """
    remaining = iter(flags)
    for flag in remaining:
        name, equals, value = flag.partition("=")
        if name in _SUBSTITUTES:
            raise ConfigError(f"{name}: {_SUBSTITUTES[name]}")
        if name in _SWITCHES:
            if equals:
                raise ConfigError(f"{flag}: {name} takes no value. Write {name}")
            continue
        if name not in _VALUES:
            raise _unknown_option(name, value)
        if not equals:
            value = next(remaining, "")
        allowed_values = _VALUES[name]
        hint = f". It takes {', '.join(allowed_values)}" if allowed_values else ""
        if not value:
            raise ConfigError(f"{name} needs a value{hint}")
        if allowed_values and value not in allowed_values:
            raise ConfigError(f"{name} {value}: the value is unknown{hint}")


def _unknown_option(name: str, value: str) -> ConfigError:
    """Return the error of an option that Hydra lacks, with the key or the option that resembles it."""
    from speechtrain.start.compose import key_for_option

    key = key_for_option(name)
    if key:
        return ConfigError(f"unknown option {name}: write {key}={value or 'VALUE'}")
    hint = nearest(name, [*_SWITCHES, *_VALUES, "--help", "--version"])
    return ConfigError(f"unknown option {name}{hint}; speechtrain train --help shows the usage")

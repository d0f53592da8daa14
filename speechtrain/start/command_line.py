"""The command line of speechtrain train: options, overrides, run directory and rank. It is read once."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
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
    "--config-name": _RECIPE,
    "-cn": _RECIPE,
    "--config-path": _RECIPE,
    "-cp": _RECIPE,
    "--experimental-rerun": "speechtrain train RUN continues a run, and RUN/config.yaml has its config",
    "--hydra-help": "speechtrain train --help shows the usage, --cfg hydra the settings of Hydra",
}
"""Options of Hydra that are refused, with what serves their purpose."""

_OPENING = ("[", "{", "'", '"')
"""First characters of lists, mappings and quoted texts in Hydra's syntax. In such a value, only words beyond
ASCII are rewritten. They are quoted."""
_SOURCES = re.compile(r"\+{0,2}(data\.(train|untranscribed|valid(\.[\w-]+)?)|augment\.(noise|rooms))")
"""The keys whose values are sources of recordings. ``+`` and ``++`` add a key that the config lacks."""
_PATHS = re.compile(r"\+{0,2}(init_from|run_dir|.+\.(path|root|cache|model|lm|hostfile|recipe_cache))")
"""The other keys whose values are paths."""
_ALL_CHOICES = re.compile(r"glob\([^()]*\)")
"""A value that sweeps the choices of a group. Hydra has ``exclude`` as an option of it."""
_TOKEN = re.compile(
    r"""
      '(?:\\.|[^'\\])*'     # a text in single quotes, in which a backslash protects the next character
    | "(?:\\.|[^"\\])*"     # the same in double quotes
    | [^]\[{},:'"]+         # a text without quotes
    | .                     # a punctuation mark
    """,
    re.DOTALL | re.VERBOSE,
)
"""A part of a list or mapping in Hydra's syntax."""


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
    # In the command of one job of a sweep: the keys that differ between the jobs. ``sweep`` sets it.
    swept: tuple[str, ...] = ()

    @property
    def prints(self) -> bool:
        """Whether an option of the command prints something, and no run starts."""
        return any(flag.partition("=")[0] in _PRINTING_FLAGS for flag in self.flags)


def read_command(argv: Sequence[str]) -> Command:
    """Return the command of the arguments ``argv``.

    The rank of this process comes from the environment. ``allow_targets=`` becomes an environment variable.
    Raises ConfigError for a path that is no run directory, and if another program has started several ranks
    and ``argv`` has no ``run_dir=``.
    """
    argv = without_local_rank(argv)
    flags, texts = split_options(argv)
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
    """Return the arguments in Hydra's syntax. Arguments that are not KEY=VALUE stay as they are.

    ``allow_targets=`` is removed, and sets an environment variable. So no file can allow classes.
    """
    from speechtrain.start.schema import BORROWED_GROUPS
    from speechtrain.start.targets import ALLOW_TARGETS

    translated = []
    for argument in argv:
        key, equals, value = argument.partition("=")
        if not equals or key.startswith("-"):
            translated.append(argument)
        elif key == "allow_targets":
            os.environ[ALLOW_TARGETS] = value.strip("[]")
        else:
            key, value = _translate(key, value)
            key = BORROWED_GROUPS.get(key, key)  # ``final_decoder=`` chooses from the group of decoders.
            translated.append(f"{key}={value}")
    return translated


def _translate(key: str, value: str) -> tuple[str, str]:
    """Return the key and the value of an override in Hydra's syntax.

    The rules are applied in this order, because a later one must see the quotes of an earlier one:

    1. ``~/`` at the start of a value is the home folder.
    2. The name of a file or folder is quoted, because it may contain any sign of Hydra's syntax.
    3. Sources of recordings may be written with commas, and named sets may be new.
    4. ``glob(*)`` excludes the YAML files whose names start with ``_``, which are no choices.
    5. Texts beyond ASCII are quoted, because Hydra cannot read them otherwise.
    """
    value = _with_home(value)
    is_source = bool(_SOURCES.fullmatch(key))
    if is_source or _PATHS.fullmatch(key):
        value = _quoted_name(value, may_be_absent=key == "run_dir")
    if is_source:
        key, value = _translate_sources(key, value)
    if _ALL_CHOICES.fullmatch(value) and "exclude" not in value:
        return key, value.removesuffix(")") + ",exclude=_*)"
    return key, _quoted_beyond_ascii(value)


def _with_home(value: str) -> str:
    """Return a value in which ``~/`` at the start is the home folder. Some shells expand only ``=~/``."""
    return os.path.expanduser(value) if value.startswith("~/") else value


def _quoted_name(value: str, may_be_absent: bool) -> str:
    """Return the value of a path's key, which is quoted if it is a name that Hydra would read otherwise.

    The name of an existing file or folder is always quoted. With ``may_be_absent``, as for a new run
    directory, each text is quoted that is not null, a reference or quoted by the user.
    """
    if not value or PLAIN.fullmatch(value):
        return value
    if os.path.lexists(value):
        return quoted(value)
    is_quoted = unquoted(value) != value
    is_reference = "${" in value
    if not may_be_absent or is_quoted or is_reference or value == "null":
        return value
    return quoted(value)


def _translate_sources(key: str, value: str) -> tuple[str, str]:
    """Return the key and the value of sources of recordings in Hydra's syntax.

    Hydra would read ``a.jsonl,b.jsonl`` as a sweep. It becomes a list, or for ``data.valid``, which is a
    mapping of named sets, a quoted text, which the reader of the sets splits: Hydra merges no list into a
    mapping.

    ``data.valid=`` and ``data.valid.NAME=`` get ``++``, with which a set may be new. By it
    ``replaced_values.replace_sets`` knows that they define sets. ``data.valid={}``, which removes all sets,
    stays.
    """
    has_commas = "," in value and not value.lstrip().startswith(_OPENING)
    if has_commas and key.endswith("data.valid"):
        value = quoted(value)
    elif has_commas:
        value = f"[{_quoted_parts(value)}]"
    if key.startswith("data.valid") and value != "{}":
        key = f"++{key}"
    return key, value


def _quoted_beyond_ascii(value: str) -> str:
    """Return a value whose texts beyond ASCII are quoted. A value with a reference stays as it is."""
    if value.isascii() or "${" in value:
        return value
    if value.startswith(_OPENING):
        return _TOKEN.sub(_quoted_token, value)
    return _quoted_parts(value)


def _quoted_parts(value: str) -> str:
    """Return a value whose parts, which commas separate, are quoted one by one."""
    return ",".join(quoted(part.strip()) for part in value.split(","))


def _quoted_token(match: re.Match[str]) -> str:
    """Return a part of a list or mapping, a match of ``_TOKEN``. Only a text without quotes changes."""
    token = match[0]
    return token if token.isascii() or token.startswith(_OPENING) else quoted(token.strip())


def split_options(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return two lists: Hydra's options with their values, and the overrides.

    Hydra's parser accepts options only before or after all overrides. A word after an option that
    ``check_flags`` refuses is its value, so that no error about this word comes first.
    """
    options = []
    overrides = []
    may_be_value = False  # whether the option before is a refused one
    arguments = iter(argv)
    for argument in arguments:
        if argument.startswith("-"):
            options.append(argument)
            if argument in _VALUES:
                value = next(arguments, None)
                if value is not None:  # Otherwise the option is the last argument, which is refused.
                    options.append(value)
            may_be_value = argument.partition("=")[0] not in {*_VALUES, *_SWITCHES}
        elif may_be_value and "=" not in argument:
            may_be_value = False
            options.append(argument)
        else:
            may_be_value = False
            overrides.append(argument)
    return options, overrides


def check_command(command: Command) -> None:
    """Raise ConfigError for an unknown option, for a wrong value of one, and for a setting of Hydra.

    The settings ``hydra…=`` say how Hydra runs a sweep, so only a sweep has them.
    """
    check_flags(command.flags)
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

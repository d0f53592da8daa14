"""The run that a command continues, and its config with the changes of this start."""

from __future__ import annotations

import copy
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from speechtrain.config.resolved import whole_value
from speechtrain.config.resume_fields import PER_START, is_volatile, key_of, with_whole_paths
from speechtrain.config.schema import INTERFACES, NODES
from speechtrain.errors import ConfigError, RunError, first_line, print_notice
from speechtrain.files import say
from speechtrain.run_directory import ABOUT, CONFIG, About, read_about
from speechtrain.runs.auto_device import announce_auto
from speechtrain.runs.command_line import Command, split
from speechtrain.runs.compose import override_value
from speechtrain.runs.run_name import RunNames, folders_of
from speechtrain.runs.started_runs import require_started
from speechtrain.runs.stored_config import choose, config_at, set_key, stored_value
from speechtrain.runs.user_yaml import text_of, values_of

_ONLY_PRINTS = {"--cfg", "-c", "--info", "-i", "--shell-completion", "-sc"}
_GROUPS = (*INTERFACES, *NODES, "recipe")
_BATCH_KEYS = ("world_size", "trainer.accumulate", "trainer.simulate_world")
_WEIGHTS_FIT = {"optimizer", "schedule", "augment", "data", "trainer", "seed", "precision"}
"""Keys and groups of which another value leaves the shape of each tensor as it is."""
_LENGTHS = ("trainer.max_steps", "trainer.max_epochs")
_SHOWN = 3  # keys in a message


def run_to_continue(command: Command, names: RunNames) -> Path | None:
    """The existing run that a command continues; None for a new run, a sweep and for no training.

    Raises RunError for a run that the command finds by itself and that this user has not started, and if
    the command only names a directory without a run.
    """
    flags = {flag.partition("=")[0] for flag in command.flags}
    if command.is_sweep or flags & _ONLY_PRINTS or any(o[:5] == "hydra" for o in command.overrides):
        return None
    if command.run_dir is None:
        run_dir = names.existing_run(command.overrides)
        if run_dir is not None:
            require_started(run_dir)
            print_notice(f"the same keys started {run_dir}, which continues; run_dir=NEW starts another")
        return run_dir and run_dir.resolve()
    if (command.run_dir / CONFIG).is_file():
        return command.run_dir
    keys = {*map(key_of, command.overrides)} - {"run_dir", *PER_START}
    if all(key.startswith("trainer.") and is_volatile(key) for key in keys):
        raise RunError(
            f"{command.run_dir} holds no run ({CONFIG} is missing). Correct run_dir, or add the keys of a "
            "new run, such as recipe=demo"
        )
    return None


def continued(run_dir: Path, command: Command) -> DictConfig:
    """The config of the run in ``run_dir`` for this start, on as many ranks as were started together.

    An override with the same text in the run's ``run.json`` changes nothing: the stored value is used.
    Another override is applied if its key may change. Raises RunError, which names the key, if it may
    not, and ConfigError for a world size that does not divide the micro-batches of an update.
    """
    config, about = config_at(run_dir), read_about(run_dir)
    config.resume, config.dry_run = "auto", False
    new = _new_overrides(about, command)
    changes = dict([*_rewritten(command.config_dir, about.written), *_parsed(new)])
    changes.pop("run_dir", None)
    shares = {key: changes.pop(key) for key in _BATCH_KEYS if key in changes}
    if command.together:
        shares["world_size"] = command.together.world.size
    refused = _share_out(config, shares, run_dir)
    for key, value in changes.items():
        if key in _GROUPS:
            if is_volatile(key):
                choose(config, key, str(value), command.config_dir)
            else:
                refused.append(f"{key}={value} was not typed when the run started")
        elif is_volatile(key):
            set_key(config, key, value)
        elif (before := stored_value(config, key)) not in (value, whole_value(value)):
            refused.append(f"{key}: {before} in the run, {value} now")
    if refused:
        raise _refusal(run_dir, about, command, refused)
    announce_auto(changes, config, command.together)
    _settle_limits(config, command.overrides, about.overrides, new)
    return config


def _refusal(run_dir: Path, about: About, command: Command, refused: Sequence[str]) -> RunError:
    """Return the error of a command with keys that the run in ``run_dir`` cannot change."""
    if about == About([]) and "was not typed" in str(refused):
        return RunError(f"{run_dir / ABOUT} is damaged or missing; run_dir={run_dir} alone continues the run")
    advice = _other_run(run_dir, about, command)
    return RunError(f"{run_dir} belongs to another config ({_shown(refused)}); {advice}")


def _new_overrides(about: About, command: Command) -> list[str]:
    """Return the overrides that the first start did not have, and those that apply to one start."""
    first_folder, current_folder = folders_of(about)
    first_texts = {with_whole_paths(text, first_folder) for text in about.overrides}
    overrides = []
    for text in command.overrides:
        if key_of(text) in PER_START or with_whole_paths(text, current_folder) not in first_texts:
            overrides.append(text)
    return overrides


def new_run_line(about: About, command: Command, *overrides: str) -> str:
    """Return the command of a new run with all overrides of a run, of ``command`` and ``overrides``."""
    by_key = {}
    for text in (*about.overrides, *command.overrides, "run_dir=NEW", *overrides):
        if key_of(text) not in PER_START:
            by_key[key_of(text)] = text
    flags = command.flags or split(about.argv or [])[0]
    return shlex.join(["speechtrain", "train", *flags, *by_key.values()])


def _other_run(run_dir: Path, about: About, command: Command) -> str:
    """Return the advice on a run with other values, which begins with the weights of this run if they fit."""
    if about.argv is None:
        return "set another run_dir"
    groups = {key_of(text).partition(".")[0] for text in command.overrides if text not in about.overrides}
    if groups - {"run_dir"} <= _WEIGHTS_FIT:
        return f"this begins with its weights: {new_run_line(about, command, f'init_from={run_dir}')}"
    return f"this is a new run: {new_run_line(about, command)}"


def drop_recipe_hours(config: DictConfig, keys: Collection[str]) -> None:
    """Set a recipe's ``trainer.max_hours`` to null if the user's ``keys`` set another length of the run."""
    lengths = [key for key in _LENGTHS if key in keys and OmegaConf.select(config, key) is not None]
    hours = OmegaConf.select(config, "trainer.max_hours")
    if lengths and hours is not None and "trainer.max_hours" not in keys:
        config.trainer.max_hours = None
        say(f"{lengths[0]} replaces the recipe's trainer.max_hours={hours}; type both to have both")


def _shown(items: Sequence[str]) -> str:
    return "; ".join(items[:_SHOWN]) + (f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else "")


def _parsed(overrides: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Key and value of each KEY=VALUE. Raises ConfigError."""
    for text in overrides:
        yield key_of(text), override_value(text)


def _rewritten(folder: str | None, before: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """The keys whose values the user has changed in his own YAML files since the run started."""
    for name, old in before.items():
        new = text_of(folder, name) or old
        try:
            was, now = (values_of(name, text) for text in (old, new))
        except ValueError as error:
            raise ConfigError(f"{name}.yaml cannot be read: {first_line(error)}") from None
        yield from ((key, now.get(key)) for key in {**was, **now} if was.get(key) != now.get(key))


def _share_out(config: DictConfig, changes: Mapping[str, Any], run_dir: Path) -> list[str]:
    """Keep the micro-batches per update on another world size; returns the typed keys that contradict."""
    typed_config = copy.deepcopy(config)
    for key, value in changes.items():
        set_key(typed_config, key, value)  # raises ConfigError for a value of another type
    trainer, world = config.trainer, typed_config.world_size
    if world < 1:
        raise ConfigError(f"world_size={world}: it must be at least 1")
    total = int(trainer.simulate_world or config.world_size * trainer.accumulate)
    typed = {key: value for key, value in changes.items() if key != "world_size"}
    wanted = typed.get("trainer.simulate_world") or world * typed.get("trainer.accumulate", 0)
    if typed and wanted != total:
        return [f"{key}: {stored_value(config, key)} in the run, {value} now" for key, value in typed.items()]
    if total % world:
        raise ConfigError(
            f"{run_dir} has {total} micro-batches per update, which world_size={world} does not divide; "
            "set another world_size or run_dir"
        )
    if world != config.world_size:
        config.world_size, trainer.simulate_world, trainer.accumulate = world, total, total // world
    return []


def _settle_limits(
    config: DictConfig, overrides: Sequence[str], first: Sequence[str], new: Sequence[str]
) -> None:
    """Let a length among ``new`` replace a recipe's hours, unless the ``first`` start has typed hours.

    Print one line if a limit of the first start is repeated, and a later start has changed it since.
    """
    if "trainer.max_hours" not in map(key_of, first):
        drop_recipe_hours(config, {*map(key_of, new)})
    changed = []
    for key, value in _parsed(text for text in overrides if text not in new):
        if key.startswith("trainer.") and is_volatile(key):
            stored = stored_value(config, key)
            if stored != value:
                changed.append(f"{key}={stored}")
    if changed:
        say(f"{config.run_dir}: the run keeps its {_shown(changed)}")

"""The run that a command continues, and the config of the run with the changes that the command makes."""

from __future__ import annotations

import copy
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from speechtrain.errors import ConfigError, RunError, first_line, print_notice
from speechtrain.files import print_line, small_yaml
from speechtrain.overrides import key_of_override, override_with_absolute_paths
from speechtrain.run_directory import ABOUT, CONFIG, About, other_owner, read_about
from speechtrain.start.auto_device import announce_auto
from speechtrain.start.changeable_keys import PER_START, may_change
from speechtrain.start.command_line import Command, split_options
from speechtrain.start.compose import override_value
from speechtrain.start.resolved import with_absolute_path, with_absolute_paths
from speechtrain.start.run_name import folders_of
from speechtrain.start.schema import INTERFACES, NESTED_GROUPS
from speechtrain.start.stored_config import config_at, move_sources, set_group, set_key, stored_value
from speechtrain.start.user_yaml import text_of, values_of

_GROUPS = (*INTERFACES, *NESTED_GROUPS, "recipe")
BATCH_KEYS = ("world_size", "trainer.accumulate", "trainer.simulate_world")
"""Keys that together decide the number of micro-batches per update."""
_SHAPE_PRESERVING = {"optimizer", "schedule", "augment", "data", "trainer", "seed", "precision"}
"""Keys and groups whose values do not change the shape of a weight."""
_SOURCES = ("data.train", "data.valid")
_OF_THE_COMMAND = ("launcher", "tracking", "data.cache")
"""The keys of a run found by its name that the present command decides."""
_LENGTH_KEYS = ("trainer.max_steps", "trainer.max_epochs")
_MAX_SHOWN = 3
"""Keys that a message lists. The rest is counted."""


def run_to_continue(command: Command) -> Path | None:
    """Return the directory of the run that a command names by ``run_dir=``, or None if a new run starts.

    Raises RunError if ``run_dir`` has no run and the command has no key of a new run.
    """
    if command.run_dir is None:
        return None
    if (command.run_dir / CONFIG).is_file():
        return command.run_dir
    keys = {*map(key_of_override, command.overrides)} - {"run_dir", *PER_START}
    # Keys of the trainer only extend or limit a run, so the user has meant a run that exists.
    if all(key.startswith("trainer.") and may_change(key) for key in keys):
        raise RunError(
            f"{command.run_dir} holds no run ({CONFIG} is missing). Correct run_dir, or add the keys of a "
            "new run, such as recipe=demo"
        )
    return None


def continue_own_run(run_dir: Path, command: Command, composed: DictConfig) -> DictConfig:
    """Return the stored config of the run that a command has found by its name.

    ``composed`` is the config of this command. Its launcher, trackers and folders of the host replace the
    stored ones, because nobody has named the folder that stores them. Raises RunError if another user owns
    the stored config.
    """
    owner = other_owner(run_dir / CONFIG)
    if owner is not None:
        raise RunError(
            f"{run_dir} was started by user {owner}: run_dir={run_dir} continues it, and executes the "
            "command that it stores"
        )
    print_notice(f"the same keys started {run_dir}, which continues. run_dir=NEW starts another run")
    config = config_to_continue(run_dir, command)
    for key in _OF_THE_COMMAND:
        if OmegaConf.select(config, key) is not None:
            value = OmegaConf.select(composed, key)
            OmegaConf.update(config, key, value, merge=False)
    return with_absolute_paths(config)


def config_to_continue(run_dir: Path, command: Command) -> DictConfig:
    """Return the stored config of the run in ``run_dir`` with the changes that ``command`` makes.

    An override that the first start had with the same text changes nothing, so the stored value is used. A
    new override is applied if the key may change during a run. Data may move to another place.
    If another program has started the ranks, their number is the world size.

    Raises RunError if another key would change, and ConfigError for a world size that does not divide the
    micro-batches of an update.
    """
    config = config_at(run_dir)
    about = read_about(run_dir)
    config.resume, config.dry_run, config.accept_code = "auto", False, False
    new_overrides = _new_overrides(about, command)
    user_files = about.written  # the texts of the user's YAML files at the first start
    changes = {**_file_changes(command.config_dir, user_files), **_parse(new_overrides)}
    changes.pop("run_dir", None)
    batch_changes = {key: changes.pop(key) for key in BATCH_KEYS if key in changes}
    if command.external_launch:
        batch_changes["world_size"] = command.external_launch.world.size
    conflicts = _apply_batch_changes(config, batch_changes, run_dir)
    _apply_moves(config, changes, command.overrides)
    conflicts += _apply_changes(config, changes, command.config_dir)
    fixed_groups = [key for key in changes if key in _GROUPS and not may_change(key)]
    is_about_missing = about == About([])  # ``read_about`` returns this if it cannot read run.json.
    if fixed_groups and is_about_missing:
        # Without run.json, each override of the first start seems to be new and would be reported wrongly.
        raise RunError(f"{run_dir / ABOUT} is damaged or missing. run_dir={run_dir} alone continues the run")
    if conflicts:
        advice = _advice_for_conflicts(run_dir, about, command)
        raise RunError(f"{run_dir} belongs to another config ({_abridged(conflicts)}), {advice}")
    announce_auto(
        changes, config, command.external_launch
    )  # If ``changes`` has device=auto, print the device.
    _settle_limits(config, command.overrides, about.overrides, new_overrides)
    return config


def _apply_moves(config: DictConfig, changes: dict[str, Any], overrides: Sequence[str]) -> None:
    """Set the sources of data that differ only in their paths, and remove their keys from ``changes``.

    A later start may have moved the data, so an override that the first start had counts, too.
    """
    for source in _SOURCES:
        moved = {key: value for key, value in changes.items() if _is_below(key, source)}
        if "moved_from" in str(OmegaConf.select(config, source)):
            moved = _parse(text for text in overrides if _is_below(key_of_override(text), source))
        if moved and move_sources(config, source, moved):
            for key in moved:
                changes.pop(key, None)


def _is_below(key: str, parent: str) -> bool:
    """Return whether ``key`` is ``parent`` or a key below it."""
    return f"{key}.".startswith(f"{parent}.")


def _apply_changes(config: DictConfig, changes: Mapping[str, Any], config_dir: str | None) -> list[str]:
    """Set the keys and groups of ``changes`` that may change. Return a message for each other value."""
    conflicts = []
    for key, value in changes.items():
        if key in _GROUPS and may_change(key):
            set_group(config, key, str(value), config_dir)
        elif key in _GROUPS:
            conflicts.append(f"{key}={value} was not an override when the run started")
        elif may_change(key):
            set_key(config, key, value)
        elif stored_value(config, key) not in (value, with_absolute_path(value)):
            conflicts.append(_conflict(config, key, value))
    return conflicts


def _conflict(config: DictConfig, key: str, value: Any) -> str:
    """Return a message for a key whose stored value differs from ``value``, the one of this command."""
    return f"{key}: {stored_value(config, key)} in the run, {value} now"


def _new_overrides(about: About, command: Command) -> list[str]:
    """Return the overrides of ``command`` that the first start did not have.

    Overrides of ``PER_START``, such as ``resume=``, are included even if the first start had them.
    """
    first_folder, current_folder = folders_of(about)
    first_texts = {override_with_absolute_paths(text, first_folder) for text in about.overrides}
    overrides = []
    for text in command.overrides:
        is_repeated = override_with_absolute_paths(text, current_folder) in first_texts
        if key_of_override(text) in PER_START or not is_repeated:
            overrides.append(text)
    return overrides


def new_run_line(about: About, command: Command, *overrides: str) -> str:
    """Return a shell line that starts a new run like an existing one.

    It has the overrides of the first start in ``about``, then those in ``command``, then ``overrides``. If a
    key occurs several times, the last override is used.
    """
    override_by_key = {}
    for text in (*about.overrides, *command.overrides, "run_dir=NEW", *overrides):
        key = key_of_override(text)
        if key not in PER_START:
            override_by_key[key] = text
    first_flags, _ = split_options(about.argv or [])
    flags = command.flags or first_flags
    return shlex.join(["speechtrain", "train", *flags, *override_by_key.values()])


def _advice_for_conflicts(run_dir: Path, about: About, command: Command) -> str:
    """Return the advice to start a new run, with the weights of this run if their shapes stay."""
    if about.argv is None:  # run.json is damaged or missing.
        return "set another run_dir"
    changed_groups = set()
    for text in command.overrides:
        if text not in about.overrides:
            changed_groups.add(key_of_override(text).partition(".")[0])
    if changed_groups - {"run_dir"} <= _SHAPE_PRESERVING:
        return f"this command starts from its weights: {new_run_line(about, command, f'init_from={run_dir}')}"
    return f"this command starts a new run: {new_run_line(about, command)}"


def drop_recipe_hours(config: DictConfig, keys: Collection[str]) -> None:
    """Set a recipe's ``trainer.max_hours`` to null if the user limits the number of steps or epochs.

    ``keys`` are the keys that the user sets. If ``trainer.max_hours`` is among them, its value stays.
    """
    length_keys = []
    for key in _LENGTH_KEYS:
        if key in keys and OmegaConf.select(config, key) is not None:
            length_keys.append(key)
    hours = OmegaConf.select(config, "trainer.max_hours")
    if length_keys and hours is not None and "trainer.max_hours" not in keys:
        config.trainer.max_hours = None
        print_line(f"{length_keys[0]} replaces the recipe's trainer.max_hours={hours}. Set both to keep both")


def _abridged(texts: Sequence[str]) -> str:
    """Return the first texts in one line, and the number of the others."""
    joined = "; ".join(texts[:_MAX_SHOWN])
    omitted = len(texts) - _MAX_SHOWN
    if omitted > 0:
        joined += f" and {omitted} more"
    return joined


def _parse(overrides: Iterable[str]) -> dict[str, Any]:
    """Return the values of KEY=VALUE texts by key. Raises ConfigError."""
    return {key_of_override(text): override_value(text) for text in overrides}


def _file_changes(config_dir: str | None, user_files: Mapping[str, str]) -> dict[str, Any]:
    """Return the keys that the user has changed in own YAML files since the run started.

    The result has the new value of each key, which is None for a key that the user has removed.
    ``user_files`` holds the texts of these files at the first start by ``group/choice``.
    """
    changes = {}
    for name, first_text in user_files.items():
        text = text_of(config_dir, name)
        if text in ("", first_text):
            continue
        try:
            first_values = values_of(name, small_yaml(first_text))
            values = values_of(name, text)
        except (ValueError, YAMLError) as error:
            raise ConfigError(f"{name}.yaml cannot be read: {first_line(error)}") from None
        for key in {**first_values, **values}:
            if first_values.get(key) != values.get(key):
                changes[key] = values.get(key)
    return changes


def _apply_batch_changes(config: DictConfig, changes: Mapping[str, Any], run_dir: Path) -> list[str]:
    """Set the world size of ``config`` if ``changes`` has it. The micro-batches per update stay the same.

    ``changes`` holds new values of ``BATCH_KEYS``. If its keys of the trainer would give another number of
    micro-batches, nothing is set, and a message for each of these keys is returned.
    """
    changed_config = copy.deepcopy(config)
    for key, value in changes.items():
        set_key(changed_config, key, value)  # Raises ConfigError for a value of another type.
    trainer, world_size = config.trainer, changed_config.world_size
    if world_size < 1:
        raise ConfigError(f"world_size={world_size}: it must be at least 1")
    micro_batches = config.world_size * trainer.accumulate  # per update, in the stored config
    if trainer.simulate_world:
        micro_batches = int(trainer.simulate_world)
    trainer_changes = {key: value for key, value in changes.items() if key != "world_size"}
    if trainer_changes and _micro_batches(trainer_changes, world_size) != micro_batches:
        return [_conflict(config, key, value) for key, value in trainer_changes.items()]
    if micro_batches % world_size:
        problem = f"{micro_batches} micro-batches per update, which world_size={world_size} does not divide"
        raise ConfigError(f"{run_dir} has {problem}. Set another world_size or run_dir")
    if world_size != config.world_size:
        config.world_size, trainer.simulate_world = world_size, micro_batches
        trainer.accumulate = micro_batches // world_size
    return []


def _micro_batches(trainer_changes: Mapping[str, Any], world_size: int) -> int:
    """Return the micro-batches per update with the new keys of the trainer.

    The result is 0 if the only new key is ``trainer.simulate_world=null``. No run has 0 micro-batches per
    update, so this command is refused.
    """
    simulate_world: int | None = trainer_changes.get("trainer.simulate_world")
    if simulate_world:
        return simulate_world
    accumulate: int = trainer_changes.get("trainer.accumulate", 0)
    return world_size * accumulate


def _settle_limits(
    config: DictConfig, overrides: Sequence[str], first_overrides: Sequence[str], new_overrides: Sequence[str]
) -> None:
    """Settle the limits of a run that continues.

    A recipe's ``trainer.max_hours`` is removed if ``new_overrides`` set the number of steps or epochs. It
    stays if the user set ``trainer.max_hours`` at the first start.

    If the command repeats a ``trainer`` key of the first start, but a later start has changed the value, the
    later value stays, and a line says so.
    """
    if "trainer.max_hours" not in map(key_of_override, first_overrides):
        drop_recipe_hours(config, {*map(key_of_override, new_overrides)})
    repeated_overrides = [text for text in overrides if text not in new_overrides]
    later_values = []
    for key, value in _parse(repeated_overrides).items():
        if key.startswith("trainer.") and may_change(key):
            stored = stored_value(config, key)
            if stored != value:
                later_values.append(f"{key}={stored}")
    if later_values:
        print_line(f"{config.run_dir}: the run keeps its {_abridged(later_values)}")

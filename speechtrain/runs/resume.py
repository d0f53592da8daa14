"""The run that a command continues, and the config of that run with the changes of this start."""

from __future__ import annotations

import copy
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from speechtrain.config.resolved import with_absolute_path
from speechtrain.config.resume_fields import PER_START, is_volatile, key_of_override, with_absolute_paths
from speechtrain.config.schema import INTERFACES, NESTED_GROUPS
from speechtrain.errors import ConfigError, RunError, first_line, print_notice
from speechtrain.files import print_line
from speechtrain.run_directory import ABOUT, CONFIG, About, read_about
from speechtrain.runs.auto_device import announce_auto
from speechtrain.runs.command_line import Command, split_options
from speechtrain.runs.compose import override_value
from speechtrain.runs.run_name import RunNames, folders_of
from speechtrain.runs.started_runs import require_started
from speechtrain.runs.stored_config import config_at, set_group, set_key, stored_value
from speechtrain.runs.user_yaml import text_of, values_of

_ONLY_PRINTS = {"--cfg", "-c", "--info", "-i", "--shell-completion", "-sc"}
_GROUPS = (*INTERFACES, *NESTED_GROUPS, "recipe")
_BATCH_KEYS = ("world_size", "trainer.accumulate", "trainer.simulate_world")
_WEIGHTS_FIT = {"optimizer", "schedule", "augment", "data", "trainer", "seed", "precision"}
"""Keys and groups whose values do not change the shape of a tensor."""
_LENGTH_KEYS = ("trainer.max_steps", "trainer.max_epochs")
_SHOWN = 3  # keys in a message


def run_to_continue(command: Command, names: RunNames) -> Path | None:
    """Return the run that a command continues.

    It is None for a command that starts a new run, starts a sweep, or only prints.

    Raises RunError if ``run_dir`` holds no run and the command has no key of a new run. Also raises RunError
    if another user has started the run with the same keys.
    """
    flags = {flag.partition("=")[0] for flag in command.flags}
    sets_hydra = any(override.startswith("hydra") for override in command.overrides)
    if command.is_sweep or flags & _ONLY_PRINTS or sets_hydra:
        return None
    if command.run_dir is None:
        run_dir = names.existing_run(command.overrides)
        if run_dir is None:
            return None
        require_started(run_dir)
        print_notice(f"the same keys started {run_dir}, which continues. run_dir=NEW starts another run")
        return run_dir.resolve()
    if (command.run_dir / CONFIG).is_file():
        return command.run_dir
    keys = {*map(key_of_override, command.overrides)} - {"run_dir", *PER_START}
    # Such keys only extend or limit a run, so the user has meant a run that exists.
    if all(key.startswith("trainer.") and is_volatile(key) for key in keys):
        raise RunError(
            f"{command.run_dir} holds no run ({CONFIG} is missing). Correct run_dir, or add the keys of a "
            "new run, such as recipe=demo"
        )
    return None


def config_to_continue(run_dir: Path, command: Command) -> DictConfig:
    """Return the config of the run in ``run_dir`` with the changes of this start.

    An override with the same text in the run's ``run.json`` changes nothing, so the stored value is used.
    Another override is applied if its key may change. If another program has started the ranks, their number
    is the world size. Raises RunError if a key may not change, and ConfigError for a world size that does not
    divide the micro-batches of an update.
    """
    config = config_at(run_dir)
    about = read_about(run_dir)
    config.resume, config.dry_run = "auto", False
    new_overrides = _new_overrides(about, command)
    user_files = about.written  # the texts of the user's YAML files at the first start
    changes = {**_file_changes(command.config_dir, user_files), **_parse(new_overrides)}
    changes.pop("run_dir", None)
    batch_changes = {key: changes.pop(key) for key in _BATCH_KEYS if key in changes}
    if command.external_launch:
        batch_changes["world_size"] = command.external_launch.world.size
    conflicts = _apply_batch_changes(config, batch_changes, run_dir)
    conflicts += _apply_changes(config, changes, command.config_dir)
    fixed_groups = [key for key in changes if key in _GROUPS and not is_volatile(key)]
    if fixed_groups and about == About([]):  # Without run.json, the overrides of the start seem to be new.
        raise RunError(f"{run_dir / ABOUT} is damaged or missing. run_dir={run_dir} alone continues the run")
    if conflicts:
        advice = _other_run(run_dir, about, command)
        raise RunError(f"{run_dir} belongs to another config ({_abridged(conflicts)}), {advice}")
    announce_auto(changes, config, command.external_launch)  # It prints the device that device=auto means.
    _settle_limits(config, command.overrides, about.overrides, new_overrides)
    return config


def _apply_changes(config: DictConfig, changes: Mapping[str, Any], config_dir: str | None) -> list[str]:
    """Set the changed keys and groups that a run can change. Return one text for each other change."""
    conflicts = []
    for key, value in changes.items():
        if key in _GROUPS and is_volatile(key):
            set_group(config, key, str(value), config_dir)
        elif key in _GROUPS:
            conflicts.append(f"{key}={value} was not an override when the run started")
        elif is_volatile(key):
            set_key(config, key, value)
        elif stored_value(config, key) not in (value, with_absolute_path(value)):
            conflicts.append(_conflict(config, key, value))
    return conflicts


def _conflict(config: DictConfig, key: str, value: Any) -> str:
    return f"{key}: {stored_value(config, key)} in the run, {value} now"


def _new_overrides(about: About, command: Command) -> list[str]:
    """Return the overrides that the first start did not have, and those that apply to one start."""
    first_folder, current_folder = folders_of(about)
    first_texts = {with_absolute_paths(text, first_folder) for text in about.overrides}
    overrides = []
    for text in command.overrides:
        if key_of_override(text) in PER_START or with_absolute_paths(text, current_folder) not in first_texts:
            overrides.append(text)
    return overrides


def new_run_line(about: About, command: Command, *overrides: str) -> str:
    """Return the line that starts a new run with the overrides of a run, of ``command``, and ``overrides``.

    The last override of a key counts.
    """
    texts = {}
    for text in (*about.overrides, *command.overrides, "run_dir=NEW", *overrides):
        if key_of_override(text) not in PER_START:
            texts[key_of_override(text)] = text
    flags = command.flags or split_options(about.argv or [])[0]
    return shlex.join(["speechtrain", "train", *flags, *texts.values()])


def _other_run(run_dir: Path, about: About, command: Command) -> str:
    """Return the advice to start another run. It starts from the weights of this run if they fit."""
    if about.argv is None:
        return "set another run_dir"
    groups = {
        key_of_override(text).partition(".")[0] for text in command.overrides if text not in about.overrides
    }
    if groups - {"run_dir"} <= _WEIGHTS_FIT:
        return f"this command starts from its weights: {new_run_line(about, command, f'init_from={run_dir}')}"
    return f"this command starts a new run: {new_run_line(about, command)}"


def drop_recipe_hours(config: DictConfig, keys: Collection[str]) -> None:
    """Set a recipe's ``trainer.max_hours`` to null if ``keys`` set the number of steps or epochs.

    ``keys`` are those that the user sets. If ``trainer.max_hours`` is among them, it stays.
    """
    length_keys = [key for key in _LENGTH_KEYS if key in keys and OmegaConf.select(config, key) is not None]
    hours = OmegaConf.select(config, "trainer.max_hours")
    if length_keys and hours is not None and "trainer.max_hours" not in keys:
        config.trainer.max_hours = None
        print_line(f"{length_keys[0]} replaces the recipe's trainer.max_hours={hours}. Set both to keep both")


def _abridged(texts: Sequence[str]) -> str:
    """Join texts, and count those that do not fit into a message."""
    joined = "; ".join(texts[:_SHOWN])
    if len(texts) > _SHOWN:
        joined += f" and {len(texts) - _SHOWN} more"
    return joined


def _parse(overrides: Iterable[str]) -> dict[str, Any]:
    """Return the values of KEY=VALUE texts by key. Raises ConfigError."""
    return {key_of_override(text): override_value(text) for text in overrides}


def _file_changes(config_dir: str | None, user_files: Mapping[str, str]) -> dict[str, Any]:
    """Return the keys that the user has changed in YAML files since the run started, with the new values.

    ``user_files`` holds the texts of these files at the start.
    """
    changes = {}
    for name, first_text in user_files.items():
        try:
            first_values = values_of(name, first_text)
            values = values_of(name, text_of(config_dir, name) or first_text)
        except ValueError as error:
            raise ConfigError(f"{name}.yaml cannot be read: {first_line(error)}") from None
        for key in {**first_values, **values}:
            if first_values.get(key) != values.get(key):
                changes[key] = values.get(key)
    return changes


def _apply_batch_changes(config: DictConfig, changes: Mapping[str, Any], run_dir: Path) -> list[str]:
    """Set the world size in ``changes``. An update keeps its number of micro-batches.

    If the other keys in ``changes`` would give another number, return one text for each of them.
    """
    changed_config = copy.deepcopy(config)
    for key, value in changes.items():
        set_key(changed_config, key, value)  # This checks the type of the value.
    trainer, world_size = config.trainer, changed_config.world_size
    if world_size < 1:
        raise ConfigError(f"world_size={world_size}: it must be at least 1")
    micro_batches = int(trainer.simulate_world or config.world_size * trainer.accumulate)
    requests = {key: value for key, value in changes.items() if key != "world_size"}
    if requests and _requested_micro_batches(requests, world_size) != micro_batches:
        return [_conflict(config, key, value) for key, value in requests.items()]
    if micro_batches % world_size:
        problem = f"{micro_batches} micro-batches per update, which world_size={world_size} does not divide"
        raise ConfigError(f"{run_dir} has {problem}. Set another world_size or run_dir")
    if world_size != config.world_size:
        config.world_size, trainer.simulate_world = world_size, micro_batches
        trainer.accumulate = micro_batches // world_size
    return []


def _requested_micro_batches(requests: Mapping[str, Any], world_size: int) -> int:
    """Return the micro-batches per update that new trainer keys ask for. It is 0 if they give no number."""
    simulate_world: int | None = requests.get("trainer.simulate_world")
    if simulate_world:
        return simulate_world
    accumulate: int = requests.get("trainer.accumulate", 0)  # 0 for trainer.simulate_world=null alone
    return world_size * accumulate


def _settle_limits(
    config: DictConfig, overrides: Sequence[str], first_overrides: Sequence[str], new_overrides: Sequence[str]
) -> None:
    """Remove a recipe's ``trainer.max_hours`` if new overrides set the number of steps or epochs.

    It stays if the user has set it at the first start. If the command repeats a ``trainer`` key of the first
    start that a later start has changed, print that the run keeps the later value.
    """
    if "trainer.max_hours" not in map(key_of_override, first_overrides):
        drop_recipe_hours(config, {*map(key_of_override, new_overrides)})
    repeated_overrides = [text for text in overrides if text not in new_overrides]
    later_values = []
    for key, value in _parse(repeated_overrides).items():
        if key.startswith("trainer.") and is_volatile(key):
            stored = stored_value(config, key)
            if stored != value:
                later_values.append(f"{key}={stored}")
    if later_values:
        print_line(f"{config.run_dir}: the run keeps its {_abridged(later_values)}")

"""The values of a recipe that a command replaces: those of another choice of a group, and validation sets.

Hydra merges the values of a recipe over each choice. So ``recipe=intel_rnnt optimizer=lamb`` would have the
learning rate of Intel's AdamW, and a key that LAMB does not take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict

from speechtrain.overrides import key_of_override
from speechtrain.run_directory import flat
from speechtrain.start.schema import BORROWED_GROUPS, INTERFACES, NESTED_GROUPS

_NODES = {BORROWED_GROUPS.get(group, group): group for group in INTERFACES} | NESTED_GROUPS
"""The key in the config of each group, by the name that Hydra has for the group."""
_SOURCES = ("data.train", "data.valid")
"""The keys that ``data=`` replaces. The batches and limits of a recipe stay, whatever the recordings are."""


def replace_choices(
    config: DictConfig,
    choices: Mapping[str, Any],
    overrides: Sequence[str],
    compose: Callable[[list[str]], tuple[DictConfig, dict[str, Any]]],
) -> list[str]:
    """Give each group the values of its own YAML if the command has replaced the recipe's choice of it.

    ``choices`` has the choice of each group, and ``compose`` returns the config and the choices of other
    overrides. Values of the command line stay. Returns a line for each group that changes. Raises the errors
    of ``compose``, such as that of a typed key that the choice lacks.
    """
    recipe = choices.get("recipe")
    typed_keys = {*map(key_of_override, overrides)} - {"recipe"}
    if recipe in (None, "none") or not typed_keys & {*INTERFACES, *NESTED_GROUPS}:
        return []
    _, recipe_choices = compose([f"recipe={recipe}"])
    groups = []
    for group in _NODES:
        if choices.get(group) not in (None, recipe_choices.get(group)):
            groups.append(group)
    nodes = {group: [_NODES[group]] for group in groups}
    if "data" in nodes:
        nodes["data"] = [*_SOURCES]
    plain_overrides = ["recipe=none"]
    plain_overrides += [f"{group}={choices[group]}" for group in _NODES if choices.get(group)]
    for text in overrides:
        key = f"{key_of_override(text)}."
        if any(key.startswith(f"{node}.") for group in groups for node in nodes[group]):
            plain_overrides.append(text)
    plain_config, _ = compose(plain_overrides)
    lines = []
    for group in groups:
        keys = [key for node in nodes[group] for key in _replace(config, plain_config, node)]
        if keys:
            name = _NODES[group].rpartition(".")[2]
            replaced = f"{', '.join(keys)} of recipe={recipe} for {name}={recipe_choices.get(group)}"
            lines.append(f"{name}={choices.get(group)} has its own values, which replace {replaced}")
    return lines


def _replace(config: DictConfig, plain_config: DictConfig, node: str) -> list[str]:
    """Set a node to its value without the recipe. Return the keys in it whose values have changed."""
    recipe_values = flat({node: _plain(config, node)})
    plain_values = flat({node: _plain(plain_config, node)})
    OmegaConf.update(config, node, _plain(plain_config, node), merge=False, force_add=True)
    keys = []
    for key, value in recipe_values.items():
        if key not in plain_values or plain_values[key] != value:
            keys.append(key)
    return keys


def _plain(config: DictConfig, node: str) -> Any:
    """Return the value of a key as plain containers. Interpolations and ``???`` stay as texts."""
    value: Any = OmegaConf.to_container(config, resolve=False)
    for part in node.split("."):
        value = value.get(part)
    return value


def replace_sets(config: DictConfig, overrides: Sequence[str]) -> list[str]:
    """Remove the validation sets of a recipe or of the data if the command defines sets.

    ``data.valid.NAME=`` and ``data.valid={NAME: …}`` define sets. ``+data.valid.NAME=`` adds a set to the
    others, and ``data.valid.NAME.KEY=`` changes a set. Returns a line if sets are removed.
    """
    sets = config.data.get("valid")
    names = set()  # of all sets that the command names
    is_replacing = False
    for override in OverridesParser.create().parse_overrides([*overrides]):
        keys = (override.key_or_group or "").split(".")
        if keys[:2] != ["data", "valid"]:
            continue
        is_definition = override.is_force_add() and len(keys) < 4  # ++ is in read_command's translation
        value: Any = override.value()
        if len(keys) > 2:
            names.add(keys[2])
        elif isinstance(value, dict):
            names |= value.keys()
        is_replacing |= is_definition
    if not is_replacing or not isinstance(sets, DictConfig):
        return []
    removed_names = [str(name) for name in sets if name not in names]
    with open_dict(sets):
        for name in removed_names:
            del sets[name]
    if not removed_names:
        return []
    return [f"the sets of this command replace data.valid: {', '.join(removed_names)}"]

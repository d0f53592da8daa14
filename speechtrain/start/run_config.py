"""The config of a run as typed values. Everybody below ``start/`` receives it instead of Hydra's config."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from speechtrain.errors import ConfigError, SpeechtrainError, first_line
from speechtrain.start.check_keys import check_part, part_class
from speechtrain.start.schema import INTERFACES
from speechtrain.start.targets import parameters_of, place_of_error, target_class
from speechtrain.trainer_config import TrainerConfig

if TYPE_CHECKING:  # A command that builds nothing must not import torch.
    from torch.optim import Optimizer

    from speechtrain.data.base import DataModule
    from speechtrain.decoding.base import Decoder
    from speechtrain.devices.base import Device
    from speechtrain.encoders.base import Encoder
    from speechtrain.features.augment import Augment
    from speechtrain.launch.launcher import Launcher
    from speechtrain.optim.schedules import Schedule
    from speechtrain.precision import Precision
    from speechtrain.task import Task
    from speechtrain.text.vocabulary import Tokenizer
    from speechtrain.tracking.base import Tracker

_Built = TypeVar("_Built")


@dataclass(frozen=True)
class Part(Generic[_Built]):
    """A part of a run before it is built: its class, and the arguments of the constructor."""

    group: str  # the config group, such as ``model``
    node: Mapping[str, Any]  # the values of the group. ``_target_`` names the class

    @property
    def part_class(self) -> type[_Built]:
        """Return the class. Raises ConfigError if it does not implement the interface of the group."""
        return part_class(self.group, self.node)

    def build(self, **objects: Any) -> _Built:
        """Return the part.

        ``objects``, such as modules and parameters, are injected: an object replaces the config's value if
        the constructor has a parameter of this name. Raises the SpeechtrainError of the part, or ConfigError
        if its constructor refuses a value.

        Unlike ``hydra.utils.instantiate``, this checks every level of the config, also in the ranks, and
        never reads injected objects as configuration.
        """
        check_part(self.group, self.node)
        return cast("_Built", _construct(self.group, self.node, objects))


@dataclass(frozen=True)
class RunConfig:
    """The config of a run: a value for each key at the root, and a part for each group."""

    run_dir: Path
    world_size: int  # the number of ranks
    seed: int
    resume: str  # auto | never | must
    init_from: str | None  # the path or name of initial weights
    from_data: str | None  # the keys that follow from the data, with their values, as a text
    trainer: TrainerConfig
    model: Part[Task]
    encoder: Part[Encoder]
    tokenizer: Part[Tokenizer]
    data: Part[DataModule]
    augment: Part[Augment]
    device: Part[Device]
    precision: Part[Precision]
    launcher: Part[Launcher]
    optimizer: Part[Optimizer]
    schedule: Part[Schedule]
    tracking: Part[Tracker]
    decoder: Part[Decoder]
    final_decoder: Part[Decoder]

    def with_data(self, **values: Any) -> RunConfig:
        """Return a copy with other values of the group ``data``. A key that the data lacks is ignored."""
        known_values = {key: value for key, value in values.items() if key in self.data.node}
        return replace(self, data=Part("data", {**self.data.node, **known_values}))

    def preparation(self) -> dict[str, Any]:
        """Return the settings of the front end and of the augmentation."""
        settings = {**self.encoder.node.get("features", {}), **self.augment.node}
        del settings["_target_"]  # The class of the augmentation has replaced the class of the features.
        return settings


def run_config(config: DictConfig) -> RunConfig:
    """Return the typed values of ``config``. Raises ConfigError for a value that cannot be resolved."""
    return RunConfig(
        run_dir=Path(config.run_dir or ""),
        world_size=config.world_size,
        seed=config.seed,
        resume=config.resume,
        init_from=config.init_from,
        from_data=config.from_data,
        trainer=TrainerConfig(**_values(config, "trainer")),
        **{group: part_of(config, group) for group in INTERFACES},
    )


def part_of(config: DictConfig, group: str) -> Part[Any]:
    """Return the part of ``group``. Raises ConfigError for a value that cannot be resolved."""
    return Part(group, _values(config, group))


def _values(config: DictConfig, group: str) -> Any:
    """Return the values of a group as plain containers, without interpolations."""
    try:
        node = config[group]
        return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key or group}: {first_line(error)}") from None


def _construct(path: str, node: Mapping[str, Any], objects: Mapping[str, Any]) -> Any:
    """Return the part of the ``_target_`` node at the config key ``path``, with its nested parts."""
    part_class = target_class(str(node["_target_"]), path)
    arguments = {}
    for key, value in node.items():
        if key != "_target_":
            arguments[key] = _construct_nested(f"{path}.{key}", value)
    parameters = parameters_of(part_class)
    injected_objects = {name: value for name, value in objects.items() if name in parameters}
    try:
        return part_class(**{**arguments, **injected_objects})
    except SpeechtrainError as error:
        raise type(error)(_with_path(path, str(error), arguments)) from error
    except (ValueError, TypeError, OverflowError, MemoryError) as error:
        message = _with_path(path, first_line(error), arguments)
        message = message if message.startswith(path) else f"{path}: {message}"
        raise ConfigError(f"{place_of_error(error)}{message}") from error


def _with_path(path: str, message: str, keys: Container[str]) -> str:
    """Return ``message`` with the full config key if it begins with one of ``keys``.

    The message comes from the constructor of a class, which does not know ``path``, its position in the
    config.
    """
    first_word = re.split(r"[ =:\[]", message)[0]
    return f"{path}.{message}" if first_word in keys else message


def _construct_nested(path: str, value: Any) -> Any:
    """Return a value of the config with its ``_target_`` nodes replaced by parts."""
    if isinstance(value, dict):
        if "_target_" in value:
            return _construct(path, value, {})
        return {key: _construct_nested(f"{path}.{key}", inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_construct_nested(f"{path}[{index}]", inner) for index, inner in enumerate(value)]
    return value

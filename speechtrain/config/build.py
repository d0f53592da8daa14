"""Builds the parts of a checked config, each by a function with its interface as return type."""

from __future__ import annotations

import inspect
import re
from collections.abc import Container, Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from speechtrain.config.check import check_part
from speechtrain.config.targets import target_class
from speechtrain.errors import ConfigError, SpeechtrainError, first_line

if TYPE_CHECKING:  # a command that builds nothing must not import torch
    from torch.optim import Optimizer

    from speechtrain.data.base import DataModule
    from speechtrain.devices.base import Device
    from speechtrain.encoders.base import Encoder
    from speechtrain.launcher import Launcher
    from speechtrain.optim.schedules import Schedule
    from speechtrain.precision import Precision
    from speechtrain.task import Task
    from speechtrain.text.vocabulary import Tokenizer


def build_device(config: DictConfig) -> Device:
    return cast("Device", build(config, "device"))


def build_precision(config: DictConfig) -> Precision:
    return cast("Precision", build(config, "precision"))


def build_launcher(config: DictConfig) -> Launcher:
    return cast("Launcher", build(config, "launcher"))


def build_tokenizer(config: DictConfig) -> Tokenizer:
    return cast("Tokenizer", build(config, "tokenizer"))


def build_encoder(config: DictConfig) -> Encoder:
    return cast("Encoder", build(config, "encoder", augment=build(config, "augment")))


def build_model(config: DictConfig, tokenizer: Tokenizer, encoder: Encoder) -> Task:
    """The model with its decoders. Raises ConfigError for a model that writes text but has no decoder."""
    task = cast("Task", build(config, "model", tokenizer=tokenizer, encoder=encoder))
    task.decoder, task.final_decoder = build(config, "decoder"), build(config, "final_decoder")
    if task.writes_text and not task.decoder.searches:
        raise ConfigError("decoder=none: this model writes text; set decoder=greedy")
    for name in ("decoder", "final_decoder"):
        if task.writes_text and not task.beam and getattr(getattr(task, name), "sums_paths", False):
            raise ConfigError(f"{name}: this model has no beam search; set {name}=greedy")
    return task


def build_data(config: DictConfig, tokenizer: Tokenizer, task: Task | None = None) -> DataModule:
    """The data module; ``task`` tells it what memory a batch needs and whether to normalise audio."""
    offers = {} if task is None else {"footprint": task.footprint(), "normalise": task.normalise_audio}
    return cast("DataModule", build(config, "data", tokenizer=tokenizer, **offers))


def build_optimizer(config: DictConfig, groups: Iterable[dict[str, Any]], **flags: Any) -> Optimizer:
    """The optimizer of parameter ``groups``; a device's ``flags`` replace keys that the config has."""
    taken = {name: value for name, value in flags.items() if name in config.optimizer}
    return cast("Optimizer", build(config, "optimizer", params=list(groups), **taken))


def build_schedule(config: DictConfig, steps_per_epoch: int, planned_steps: int | None) -> Schedule:
    offers = {"steps_per_epoch": steps_per_epoch, "planned_steps": planned_steps}
    return cast("Schedule", build(config, "schedule", **offers))


def build(config: DictConfig, group: str, **offers: Any) -> Any:
    """Construct the part of ``group``; those of ``offers`` that its constructor takes replace config values.

    Not ``hydra.utils.instantiate``: every level is checked by ``check_part``, in the ranks too, and
    ``offers`` (modules, parameters) are passed unchanged, never read as configuration.
    Raises the part's own SpeechtrainError, or ConfigError if its constructor refuses a value.
    """
    try:
        part = config[group]
        node = OmegaConf.to_container(part, resolve=True) if OmegaConf.is_config(part) else part
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key or group}: {first_line(error)}") from None
    check_part(group, node)
    return _construct(group, cast("dict[str, Any]", node), offers)


def _construct(path: str, node: Mapping[str, Any], offers: Mapping[str, Any]) -> Any:
    found = target_class(str(node["_target_"]), path)
    arguments = {key: _construct_nested(f"{path}.{key}", v) for key, v in node.items() if key != "_target_"}
    taken = {name: offer for name, offer in offers.items() if name in inspect.signature(found).parameters}
    try:
        return found(**{**arguments, **taken})
    except SpeechtrainError as error:
        raise type(error)(_with_path(path, str(error), arguments)) from error
    except (ValueError, TypeError, OverflowError, MemoryError) as error:
        message = _with_path(path, first_line(error), arguments)
        raise ConfigError(message if message.startswith(path) else f"{path}: {message}") from error


def _with_path(path: str, message: str, keys: Container[str]) -> str:
    """``message``, after the config path if it begins with a key: a class names its parameter only."""
    return f"{path}.{message}" if re.split(r"[ =:\[]", message)[0] in keys else message


def _construct_nested(path: str, value: Any) -> Any:
    if isinstance(value, dict):
        if "_target_" in value:
            return _construct(path, value, {})
        return {key: _construct_nested(f"{path}.{key}", inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_construct_nested(f"{path}[{index}]", inner) for index, inner in enumerate(value)]
    return value


def dry_build(config: DictConfig) -> int:
    """Build every part that is cheap to build: a constructor's error is known before a process starts.

    Networks are built on torch's meta device, without values; only the ranks build a network that
    fails there, and trackers, which open files. Returns ``rank_bytes``; 0 for a network that fails. Raises
    what ``build`` raises.
    """
    tokenizer = build_tokenizer(config)
    rank_bytes(config, 0)  # the optimizer's error comes before the schedule's, which has its learning rate
    build_schedule(config, steps_per_epoch=1, planned_steps=1)
    data = build_data(config, tokenizer)
    rate, values = size_of_network(config, tokenizer)
    if rate and (given := getattr(data, "sample_rate", None)) and given != rate:
        raise ConfigError(f"data.sample_rate={given}: the encoder expects {rate} Hz; set both to one rate")
    return rank_bytes(config, values)


def rank_bytes(config: DictConfig, values: int) -> int:
    """The bytes of a rank's weights, gradients, optimizer state and average, of so many weights in fp32."""
    import torch

    probe = torch.nn.Parameter(torch.zeros(64, 64))  # of a size whose state an optimizer may narrow
    probe.grad = torch.zeros(64, 64)
    optimizer = build_optimizer(config, [{"params": [probe]}])
    optimizer.step()  # makes its state
    state = [value.nbytes for value in optimizer.state[probe].values() if isinstance(value, torch.Tensor)]
    copies = 2 + sum(state) / probe.nbytes + bool(config.trainer.ema)
    shards = 1 if config.trainer.shard == "none" else config.world_size
    return int(copies * values * 4) // int(shards)


def size_of_network(config: DictConfig, tokenizer: Tokenizer) -> tuple[int, int]:
    """The encoder's sample rate and the model's number of weights, of a network that has no values.

    Zeros for one that cannot be built so. Raises ConfigError for one that no machine can hold.
    """
    import torch

    try:
        with torch.device("meta"):
            encoder = build_encoder(config)
            model = build_model(config, tokenizer, encoder)
        return getattr(encoder, "sample_rate", None) or 0, sum(p.numel() for p in model.parameters())
    except NotImplementedError:
        return 0, 0
    except RuntimeError as error:
        if "meta" not in str(error):
            raise ConfigError(f"model or encoder: {first_line(error)}") from error
        return 0, 0

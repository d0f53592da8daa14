"""Constructs the parts of a config, such as device, model and data, from their ``_target_`` nodes."""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from speechtrain.errors import ConfigError, SpeechtrainError, first_line
from speechtrain.files import absolute_path
from speechtrain.run_directory import run_of
from speechtrain.start.check import check_part
from speechtrain.start.targets import parameters_of, place_of_error, target_class

if TYPE_CHECKING:  # A command that builds nothing must not import torch.
    from torch.optim import Optimizer

    from speechtrain.data.base import DataModule
    from speechtrain.devices.base import Device
    from speechtrain.encoders.base import Encoder
    from speechtrain.launch.launcher import Launcher
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
    """Return the model with its decoders.

    Raises ConfigError if the model writes text and ``decoder`` does not search, or if a decoder is a beam
    search that the model does not have.
    """
    task = cast("Task", build(config, "model", tokenizer=tokenizer, encoder=encoder))
    task.decoder = build(config, "decoder")
    task.final_decoder = build(config, "final_decoder")
    if not task.writes_text:
        return task
    if not task.decoder.searches:
        raise ConfigError("decoder=none: this model writes text. Set decoder=greedy")
    for name, decoder in {"decoder": task.decoder, "final_decoder": task.final_decoder}.items():
        if not task.beam and getattr(decoder, "sums_paths", False):
            raise ConfigError(f"{name}: this model has no beam search. Set {name}=greedy")
    return task


def build_data(config: DictConfig, tokenizer: Tokenizer, task: Task | None = None) -> DataModule:
    """Return the data module.

    ``task`` decides the predicted memory of a batch, and whether audio is normalised.
    """
    objects: dict[str, Any] = {"tokenizer": tokenizer, "initial_run": str(initial_run(config) or "")}
    if task is not None:
        objects |= {"footprint": task.footprint(), "normalise": task.normalise_audio}
    return cast("DataModule", build(config, "data", **objects))


def initial_run(config: DictConfig) -> Path | None:
    """Return the directory of the run at ``init_from``, or None if that is no run."""
    path = config.get("init_from") or "hf:"
    # Path.resolve would raise RuntimeError for a link to itself.
    return None if path.startswith("hf:") else run_of(Path(os.path.realpath(absolute_path(path))))


def build_optimizer(config: DictConfig, groups: Iterable[dict[str, Any]], **flags: Any) -> Optimizer:
    """Return the optimizer of the parameter ``groups``.

    ``flags`` are the device's values for settings of optimizers. They are used if the config has the setting.
    Raises ConfigError if the optimizer has no kernels for the device.
    """
    known_flags = {name: flag for name, flag in flags.items() if name in config.optimizer}
    optimizer = cast("Optimizer", build(config, "optimizer", params=list(groups), **known_flags))
    check_device = getattr(optimizer, "check_device", None)
    if check_device:
        check_device(build_device(config).name)
    return optimizer


def build_schedule(config: DictConfig, steps_per_epoch: int, planned_steps: int | None) -> Schedule:
    schedule = build(config, "schedule", steps_per_epoch=steps_per_epoch, planned_steps=planned_steps)
    return cast("Schedule", schedule)


def build(config: DictConfig, group: str, **objects: Any) -> Any:
    """Return the part of ``group``, constructed from ``config[group]``.

    ``objects``, such as modules and parameters, are injected: an object replaces the config's value if the
    constructor has a parameter of this name. Raises the SpeechtrainError of the part, or ConfigError if its
    constructor refuses a value.

    Unlike ``hydra.utils.instantiate``, this checks every level of the config, also in the ranks, and never
    reads injected objects as configuration.
    """
    try:
        node = config[group]
        if OmegaConf.is_config(node):
            node = OmegaConf.to_container(node, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key or group}: {first_line(error)}") from None
    check_part(group, node)
    return _construct(group, cast("dict[str, Any]", node), objects)


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


def dry_build(config: DictConfig) -> int:
    """Construct the parts of a run for their errors, before a process starts. Return ``rank_bytes``.

    Networks are constructed on torch's meta device, without values. Two kinds of parts are constructed by the
    ranks only: a network that fails on the meta device, for which 0 is returned, and trackers, which open
    files. Raises the errors of ``build``.
    """
    tokenizer = build_tokenizer(config)
    # This constructs the optimizer. The schedule refers to its learning rate, so the optimizer's error about
    # a wrong rate must come first.
    rank_bytes(config, 0)
    build_schedule(config, steps_per_epoch=1, planned_steps=1)
    data = build_data(config, tokenizer)
    encoder_rate, weights = size_of_network(config, tokenizer)
    data_rate = getattr(data, "sample_rate", None)
    if encoder_rate and data_rate and data_rate != encoder_rate:
        raise ConfigError(
            f"data.sample_rate={data_rate}: the encoder expects {encoder_rate} Hz. Set both to one rate"
        )
    return rank_bytes(config, weights)


def rank_bytes(config: DictConfig, weights: int) -> int:
    """Return the bytes of a rank's weights, gradients, optimizer state and weight average.

    ``weights`` is the number of weights, which are fp32.
    """
    import torch

    # The state of a small parameter has the same bytes per weight as the state of the model. The parameter
    # has 4096 weights, because an 8-bit optimizer stores the state of smaller ones in fp32.
    probe = torch.nn.Parameter(torch.zeros(64, 64))
    probe.grad = torch.zeros(64, 64)
    optimizer = build_optimizer(config, [{"params": [probe]}])
    optimizer.step()  # The first step allocates the state.
    state = [tensor.nbytes for tensor in optimizer.state[probe].values() if isinstance(tensor, torch.Tensor)]
    average_copies = 1 if config.trainer.ema else 0
    copies = 2 + sum(state) / probe.nbytes + average_copies  # 2: weights and gradients
    shards = 1 if config.trainer.shard == "none" else config.world_size
    return int(copies * weights * 4) // int(shards)


def size_of_network(config: DictConfig, tokenizer: Tokenizer) -> tuple[int, int]:
    """Return the encoder's sample rate in Hz and the model's number of weights.

    The weights are not allocated. Both numbers are 0 for a network that cannot be built on the meta device.
    Raises ConfigError if its shapes are impossible.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    class WithoutDraws(TorchFunctionMode):
        """Skips initial draws. On the meta device they would import torch's compiler, in 1 s."""

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            keywords = kwargs or {}
            if function in (torch.Tensor.normal_, torch.nn.init.normal_):
                return args[0] if args else keywords["tensor"]
            return function(*args, **keywords)

    try:
        with torch.device("meta"), WithoutDraws():
            encoder = build_encoder(config)
            model = build_model(config, tokenizer, encoder)
        return getattr(encoder, "sample_rate", None) or 0, sum(p.numel() for p in model.parameters())
    except NotImplementedError:
        return 0, 0
    except RuntimeError as error:
        if "meta" not in str(error):
            problem = f"{place_of_error(error)}model or encoder: {first_line(error)}"
            raise ConfigError(problem) from error
        return 0, 0

"""Builds the objects of a checked config."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from speechtrain.config.targets import target_class
from speechtrain.errors import ConfigError, first_line


def build(config: DictConfig, group: str, **offers: Any) -> Any:
    """Construct the part of ``group``; those of ``offers`` that its constructor takes replace config values.

    Not ``hydra.utils.instantiate``: every level is checked by ``target_class``, in the ranks too, and
    ``offers`` (modules, parameters) are passed unchanged, never read as configuration.
    Raises the part's own SpeechtrainError, or ConfigError if its constructor refuses a value.
    """
    node = OmegaConf.to_container(config[group], resolve=True)
    assert isinstance(node, dict)
    return _construct(group, typing.cast("dict[str, Any]", node), offers)


def _construct(path: str, node: Mapping[str, Any], offers: Mapping[str, Any]) -> Any:
    found = target_class(str(node["_target_"]), path)
    arguments = {key: _construct_nested(f"{path}.{key}", v) for key, v in node.items() if key != "_target_"}
    taken = {name: offer for name, offer in offers.items() if name in inspect.signature(found).parameters}
    try:
        return found(**{**arguments, **taken})
    except (ValueError, TypeError, OverflowError) as error:
        message = first_line(error)
        raise ConfigError(message if message.startswith(path) else f"{path}: {message}") from error


def _construct_nested(path: str, value: Any) -> Any:
    if isinstance(value, dict):
        if "_target_" in value:
            return _construct(path, value, {})
        return {key: _construct_nested(f"{path}.{key}", inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_construct_nested(f"{path}[{index}]", inner) for index, inner in enumerate(value)]
    return value


def dry_build(config: DictConfig) -> None:
    """Build every part that is cheap to build: a constructor's error is known before a process starts.

    Networks are built on torch's meta device, without values; only the ranks build a network that
    fails there, and trackers, which open files. Raises what ``build`` raises.
    """
    import torch  # only here: --cfg job and dry checks of the root need none

    tokenizer = build(config, "tokenizer")
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    build(config, "optimizer", params=[{"params": [weight]}])
    build(config, "schedule", steps_per_epoch=1, planned_steps=1)
    data = build(config, "data", tokenizer=tokenizer)
    try:
        with torch.device("meta"):
            encoder = build(config, "encoder", augment=build(config, "augment"))
            build(config, "model", tokenizer=tokenizer, encoder=encoder)
        given, wanted = getattr(data, "sample_rate", None), getattr(encoder, "sample_rate", None)
        if given and wanted and given != wanted:
            raise ConfigError(
                f"data.sample_rate={given}: the encoder expects {wanted} Hz; set both to one rate"
            )
    except NotImplementedError:
        return
    except RuntimeError as error:
        if "meta" not in str(error):
            raise ConfigError(f"model or encoder: {first_line(error)}") from error

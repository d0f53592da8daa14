"""Migrates configs of earlier releases to this one: one function for each format number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from speechtrain.errors import ConfigError
from speechtrain.trainer_config import TrainerConfig

FORMAT = 3
"""The number that ``config.yaml`` begins with. Release 0.1.0 wrote none, which counts as 1."""

_MOVED_1_TO_2 = {
    "speechtrain.nn.encoder.LSTMEncoder": "speechtrain.encoders.lstm.LSTMEncoder",
    "speechtrain.nn.wav2vec2.Wav2Vec2Encoder": "speechtrain.encoders.wav2vec2.Wav2Vec2Encoder",
    "speechtrain.nn.features.LogMel": "speechtrain.features.logmel.LogMel",
    "speechtrain.nn.augment.Augment": "speechtrain.features.augment.Augment",
    "speechtrain.data.sampler.Packing": "speechtrain.data.sampler.BatchLimits",
}


def migrate_1_to_2(plain: dict[str, Any]) -> None:
    """Migrate moved classes, the roll-back after a collapse, and two keys of the CPU's core pinning."""
    _move(plain, _MOVED_1_TO_2)
    trainer = plain.get("trainer")
    if isinstance(trainer, dict) and trainer.get("on_collapse") == "rollback":
        trainer["on_collapse"] = "stop"
    _move_keys(plain, {"device.bind": "device.pin", "device.reserve": "device.comm_cores"})


_KEYS_2_TO_3 = {
    **dict.fromkeys(("device.lstm", "encoder.conv_form", "encoder.attention"), ""),
    **dict.fromkeys(("encoder.features.fourier", "encoder.features.block_frames"), ""),
    **{f"model.{key}": f"decoder.{key}" for key in ("max_symbols_per_step", "max_symbols")},
}
_KEYS_OF_RNNT_2_TO_3 = {
    **{f"model.joint_{key}": f"model.joint.{key}" for key in ("hidden", "dropout", "bias")},
    **{
        f"model.prediction_{k}": f"model.prediction.{k}" for k in ("embedding", "hidden", "layers", "dropout")
    },
    "model.prediction_norm": "model.prediction.layer_norm",
    **{f"model.{key}": f"model.prediction.{key}" for key in ("forget_gate_bias", "init_scale")},
}


def migrate_2_to_3(plain: dict[str, Any]) -> None:
    """Remove the keys that selected kernels; give RNN-T its nodes and every model its decoder.

    The names of weights change likewise, in ``checkpoint.migrations``.
    """
    model = plain.get("model")
    if isinstance(model, dict):
        writes_text = model.get("_target_") != "speechtrain.models.wav2vec2.Wav2Vec2"
        search = "greedy.Greedy" if writes_text else "base.NoDecoder"
        plain["decoder"] = {"_target_": f"speechtrain.decoding.{search}"}
        plain["final_decoder"] = {"_target_": "speechtrain.decoding.base.NoDecoder"}
        if model.get("_target_") == "speechtrain.models.rnnt.RNNT":
            model["prediction"] = {"_target_": "speechtrain.nn.prediction.LSTMPrediction"}
            model["joint"] = {"_target_": "speechtrain.nn.joint.Joint"}
            _move_keys(plain, _KEYS_OF_RNNT_2_TO_3)
    _move_keys(plain, _KEYS_2_TO_3)


_STEPS: tuple[Callable[[dict[str, Any]], None], ...] = (migrate_1_to_2, migrate_2_to_3)


def migrate(plain: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The content of a config file in the current format, without its format number.

    Raises ConfigError, naming ``source``, for a number that this release does not know.
    """
    migrated = {str(key): value for key, value in plain.items()}
    number = migrated.pop("format", 1)
    if not isinstance(number, int) or not 1 <= number <= FORMAT:
        raise ConfigError(f"{source}: format {number!r} is not 1 to {FORMAT}; use a newer release")
    for step in _STEPS[number - 1 :]:
        step(migrated)
    return migrated


def migrate_limits(limits: Any) -> Any:
    """The ``trainer`` node of an earlier release's ``result.json``, in the current format.

    A key that it lacks is one that was added since, and has its default.
    """
    if not isinstance(limits, dict):
        return limits
    usual = {one.name: one.default for one in fields(TrainerConfig)}
    return usual | migrate({"trainer": dict(limits)}, "result.json")["trainer"]


def _move(node: Any, moved: Mapping[str, str]) -> None:
    """Replace the ``_target_`` of moved classes, everywhere below ``node``."""
    children = list(node.values()) if isinstance(node, dict) else node if isinstance(node, list) else []
    if isinstance(node, dict) and str(node.get("_target_")) in moved:
        node["_target_"] = moved[node["_target_"]]
    for child in children:
        _move(child, moved)


def _move_keys(plain: dict[str, Any], names: Mapping[str, str]) -> None:
    """Give dotted keys their new places, in nodes that exist; remove those without one."""
    for old, new in names.items():
        (node, leaf), (target, name) = _node_of(plain, old), _node_of(plain, new)
        if isinstance(node, dict) and leaf in node:
            value = node.pop(leaf)
            if new:
                target[name] = value


def _node_of(plain: dict[str, Any], key: str) -> tuple[Any, str]:
    """The node of a dotted key, or None, and the key's last part."""
    *path, leaf = key.split(".")
    node: Any = plain
    for name in path:
        node = node.get(name) if isinstance(node, dict) else None
    return node, leaf

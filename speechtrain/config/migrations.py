"""Migrates configs of earlier releases to this one: one function for each format number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from speechtrain.errors import ConfigError

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
    _rename(plain.get("device"), {"bind": "pin", "reserve": "comm_cores"})


_PREDICTION = {
    "prediction_embedding": "embedding",
    "prediction_hidden": "hidden",
    "prediction_layers": "layers",
    "prediction_dropout": "dropout",
    "prediction_norm": "layer_norm",
    "forget_gate_bias": "forget_gate_bias",
    "init_scale": "init_scale",
}
_JOINT = {"joint_hidden": "hidden", "joint_dropout": "dropout", "joint_bias": "bias"}
_GREEDY = {"max_symbols_per_step": "max_symbols_per_step", "max_symbols": "max_symbols"}


_KEYS_2_TO_3 = {
    **{f"model.{old}": f"model.prediction.{new}" for old, new in _PREDICTION.items()},
    **{f"model.{old}": f"model.joint.{new}" for old, new in _JOINT.items()},
    **{f"model.{old}": f"decoder.{new}" for old, new in _GREEDY.items()},
    **dict.fromkeys(("device.lstm", "encoder.conv_form", "encoder.attention"), ""),
    **dict.fromkeys(("encoder.features.fourier", "encoder.features.block_frames"), ""),
}


def migrate_overrides(overrides: Sequence[str]) -> list[str]:
    """KEY=VALUE pairs as typed for an earlier release, with the present keys; removed keys are left out."""
    pairs = [text.partition("=") for text in overrides]
    named = [(_KEYS_2_TO_3.get(key, key), equals, value) for key, equals, value in pairs]
    return [key + equals + value for key, equals, value in named if key]


def migrate_2_to_3(plain: dict[str, Any]) -> None:
    """Remove the keys that selected kernels; give RNN-T its nodes and every model its decoder.

    The names of weights change likewise, in ``checkpoint.migrations``.
    """
    encoder, model = plain.get("encoder"), plain.get("model")
    search = "decoding.greedy.Greedy"
    if isinstance(model, dict):
        node = _take(model, _GREEDY)
        if model.get("_target_") == "speechtrain.models.rnnt.RNNT":
            model["prediction"] = _part("nn.prediction.LSTMPrediction", _take(model, _PREDICTION))
            model["joint"] = _part("nn.joint.Joint", _take(model, _JOINT))
        elif model.get("_target_") == "speechtrain.models.wav2vec2.Wav2Vec2":
            search = "decoding.base.NoDecoder"
        plain["decoder"] = _part(search, node)
        plain["final_decoder"] = _part("decoding.base.NoDecoder", {})
    features = encoder.get("features") if isinstance(encoder, dict) else None
    _remove(plain.get("device"), "lstm")
    _remove(encoder, "conv_form", "attention")
    _remove(features, "fourier", "block_frames")


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
    """The ``trainer`` node of an earlier release's ``result.json``, in the current format."""
    return (
        migrate({"trainer": dict(limits)}, "result.json")["trainer"] if isinstance(limits, dict) else limits
    )


def _move(node: Any, moved: Mapping[str, str]) -> None:
    """Replace the ``_target_`` of moved classes, everywhere below ``node``."""
    children = list(node.values()) if isinstance(node, dict) else node if isinstance(node, list) else []
    if isinstance(node, dict) and node.get("_target_") in moved:
        node["_target_"] = moved[node["_target_"]]
    for child in children:
        _move(child, moved)


def _part(name: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    return {"_target_": f"speechtrain.{name}", **keys}


def _take(node: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Move the keys of ``names`` out of one node, under their new names."""
    return {new: node.pop(old) for old, new in names.items() if old in node}


def _remove(node: Any, *names: str) -> None:
    """Remove keys of one node."""
    for name in names if isinstance(node, dict) else ():
        node.pop(name, None)


def _rename(node: Any, names: Mapping[str, str]) -> None:
    """Give keys of one node their new names, in place and in order."""
    if isinstance(node, dict):
        items = [(names.get(key, key), value) for key, value in node.items()]
        node.clear()
        node.update(items)

"""Migrates configs of earlier releases to this one: one function for each format number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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


def migrate_2_to_3(plain: dict[str, Any]) -> None:
    """Remove the keys that selected kernels; the compute policy selects them now."""
    encoder = plain.get("encoder")
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

"""What of a config a resume may not change."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from speechtrain.config.schema import Config

_VOLATILE = (
    *("world_size", "run_dir", "resume", "dry_run", "launcher", "tracking", "device"),
    *("data.workers", "data.cache", "data.timeout_seconds", "data.max_bad", "data.max_bad_share"),
)
_VOLATILE_LIMITS = (
    *("max_steps", "max_epochs", "max_hours", "target", "log_every", "validate_every", "save_every"),
    *("keep", "on_save_error", "on_collapse", "max_bad_updates", "timeout_seconds", "profile", "shard"),
)


# --- identity -----------------------------------------------------------------------------------


def identity(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The flat keys and values that make a run what it is: all that a resume may not change."""
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping) and value:
            for key in value:
                walk(f"{prefix}.{key}" if prefix else str(key), value[key])
        else:
            flat[prefix] = value

    walk("", {key: value for key, value in plain.items() if key in Config.__dataclass_fields__})
    volatile = (*_VOLATILE, *(f"trainer.{key}" for key in _VOLATILE_LIMITS))
    # the run directory is repeated where a part writes files of its own
    return {
        key: value
        for key, value in flat.items()
        if not key.endswith(".run_dir") and not any(key == v or key.startswith(v + ".") for v in volatile)
    }


def fingerprint(plain: Mapping[str, Any]) -> str:
    """Eight hexadecimal digits of the identity."""
    text = json.dumps(identity(plain), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]

"""What of a config may change while a run goes on, and what makes it another run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

PER_START = ("resume", "dry_run")
"""Keys that belong to one start of a run, never to the run."""

_VOLATILE = (
    *("world_size", "run_dir", "launcher", "tracking", "device", *PER_START),
    *("data.workers", "data.cache", "data.timeout_seconds", "data.max_bad", "data.max_bad_share"),
)
_VOLATILE_LIMITS = (
    *("max_steps", "max_epochs", "max_hours", "target", "log_every", "validate_every", "save_every"),
    *("keep", "on_save_error", "on_collapse", "max_bad_updates", "timeout_seconds", "profile", "shard"),
)
_ALL_VOLATILE = (*_VOLATILE, *(f"trainer.{key}" for key in _VOLATILE_LIMITS))


def is_volatile(key: str) -> bool:
    """True where ``key``, dotted, may change while a run goes on."""
    # the run directory is repeated where a part writes files of its own
    return key.endswith(".run_dir") or any(key == v or key.startswith(v + ".") for v in _ALL_VOLATILE)


def flat(plain: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one of dotted keys; an empty mapping is a value."""
    found: dict[str, Any] = {}
    for key, value in plain.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def resume_fields(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The flat keys and values that a resume may not change."""
    return {key: value for key, value in flat(plain).items() if not is_volatile(key)}


def key_of(override: str) -> str:
    """The key of a KEY=VALUE as typed, without Hydra's +, ++ and ~ and without a package."""
    return override.partition("=")[0].lstrip("+~").partition("@")[0]


def typed_fields(overrides: Sequence[str]) -> list[str]:
    """The overrides that make a run what it is, in an order of their keys: those of one key stay as typed."""
    kept = [override for override in overrides if not is_volatile(key_of(override))]
    return sorted(kept, key=key_of)


def fingerprint(overrides: Sequence[str], written: Mapping[str, str]) -> str:
    """Eight hexadecimal digits of what the user typed and of the YAML files that he wrote."""
    text = json.dumps([typed_fields(overrides), written], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]

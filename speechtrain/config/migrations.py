"""Migrates configs of earlier formats to this one: one function for each format number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from speechtrain.errors import ConfigError
from speechtrain.trainer_config import TrainerConfig

FORMAT = 3
"""The number that ``config.yaml`` begins with."""

_FIRST = 3
"""The format of release 0.1.0. No later release reads formats before it."""

_STEPS: tuple[Callable[[dict[str, Any]], None], ...] = ()
"""One function for each format from ``_FIRST`` on, which changes a config to the next format in place."""


def migrate(plain: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the content of a config file in the current format, without its format number.

    Raises ConfigError, which names ``source``, for a format that this release does not read.
    """
    migrated = {str(key): value for key, value in plain.items()}
    number = migrated.pop("format", None)
    if isinstance(number, int) and number > FORMAT:
        raise ConfigError(f"{source} has a format above {FORMAT}. Use the later release that wrote it")
    if not isinstance(number, int) or number < _FIRST:
        raise ConfigError(
            f"{source} has format {number!r:.40}. Runs made before 0.1.0 are not read. "
            "Finish such a run with the commit that git in its run.json names"
        )
    for step in _STEPS[number - _FIRST :]:
        step(migrated)
    return migrated


def migrate_limits(limits: Any) -> Any:
    """Return the ``trainer`` node of a ``result.json``, with the default of each key added since then."""
    if not isinstance(limits, dict):
        return limits
    return {field.name: field.default for field in fields(TrainerConfig)} | limits

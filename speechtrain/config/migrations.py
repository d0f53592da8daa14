"""Migrates configs of earlier formats to the current format, one format number at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from speechtrain.errors import ConfigError

FORMAT = 3
"""The current format, the first number in ``config.yaml``."""

_STEPS: tuple[Callable[[dict[str, Any]], None], ...] = ()
"""Each function changes a config in place from one format to the next. The last function makes ``FORMAT``."""


def migrate(content: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return the content of a config file in the current format, without its format number.

    Raises ConfigError for a later format, and for an earlier format that no function can migrate. ``source``
    is the name of the file for the message.
    """
    migrated = {str(key): value for key, value in content.items()}
    number = migrated.pop("format", None)
    formats = range(FORMAT - len(_STEPS), FORMAT + 1)
    if type(number) is not int or number not in formats:
        raise ConfigError(
            f"{source} has format {number!r:.40}, which this version does not read. "
            "Use the version that run.json names, or make the run again with run_dir=NEW"
        )
    for step in _STEPS[number - formats.start :]:
        step(migrated)
    return migrated

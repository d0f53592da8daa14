"""``speechtrain.compose``: the config of a run, for Python programs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from speechtrain.errors import ConfigError
from speechtrain.start.check_keys import check
from speechtrain.start.command_line import translate_arguments
from speechtrain.start.compose import compose_with_choices
from speechtrain.start.resolved import with_absolute_paths
from speechtrain.start.run_name import base_folder, run_name
from speechtrain.start.targets import ALLOW_TARGETS


def compose(overrides: Sequence[str] = (), config_dir: str | Path | None = None) -> dict[str, Any]:
    """Return the config of a new run as ``speechtrain train`` computes it from the same arguments.

    ``overrides`` are arguments such as ``recipe=demo`` and ``optimizer.lr=1e-3``, and ``config_dir`` is a
    folder of your own choices. The result has plain dicts, lists and values. Interpolations are resolved,
    paths are absolute, and each key is checked against the constructor of its class. No data is read, so keys
    that follow from recordings (``recipe=scratch``) have their defaults.

    Nothing is started or written. Hydra's global state stays as it is. Raises a SpeechtrainError with a
    message of one line.
    """
    for text in overrides:
        if text.startswith("-"):
            raise ConfigError(f"{text}: compose takes KEY=VALUE, and a config folder as config_dir=")
    folder = str(config_dir) if config_dir else None
    allowed_modules = os.environ.get(ALLOW_TARGETS)
    try:
        arguments = translate_arguments(overrides)  # allow_targets= becomes the environment variable.
        config, group_choices, _ = compose_with_choices(arguments, folder)
        if config.run_dir is None:
            config.run_dir = str(base_folder() / run_name(group_choices, arguments, folder))
        config.run_dir = str(Path(config.run_dir).resolve())
        return check(with_absolute_paths(config))
    finally:
        os.environ.pop(ALLOW_TARGETS, None)
        if allowed_modules is not None:
            os.environ[ALLOW_TARGETS] = allowed_modules

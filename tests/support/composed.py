"""Configs that all tests of a process compose once. A composition takes thirty times as long as a copy."""

from __future__ import annotations

import copy
import os
from functools import cache

from omegaconf import DictConfig

from speechtrain.start.auto_device import VARIABLE
from speechtrain.start.compose import compose


@cache
def _compose_once(overrides: tuple[str, ...], config_dir: str | None, device: str | None) -> DictConfig:
    return compose(list(overrides), config_dir)


def composed(*overrides: str, config_dir: str | None = None) -> DictConfig:
    """Return a config that the caller may change. Raises ConfigError.

    ``init_from`` and the files of ``config_dir`` that a test changes need ``compose`` itself.
    """
    config = _compose_once(overrides, config_dir, os.environ.get(VARIABLE))
    return copy.deepcopy(config)

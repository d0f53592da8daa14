"""Loads the config that a run stores."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from omegaconf import DictConfig

from speechtrain.run_directory import CONFIG
from speechtrain.start.check import part_class
from speechtrain.start.resolved import load

if TYPE_CHECKING:
    from speechtrain.text.vocabulary import Tokenizer


def read_config(run_dir: Path) -> DictConfig:
    """Return the config of the run in ``run_dir``. Its tokenizer is the copy in the run directory.

    Raises ConfigError if the config is missing, RunError if it is damaged.
    """
    config = load(run_dir / CONFIG)
    tokenizer_class = cast("type[Tokenizer]", part_class("tokenizer", config.tokenizer))
    config.tokenizer.update(tokenizer_class.saved_arguments(str(run_dir.resolve())))
    return config

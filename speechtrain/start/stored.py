"""Loads the config that a run stores."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from speechtrain.run_directory import CONFIG
from speechtrain.start.resolved import load
from speechtrain.start.run_config import part_of

if TYPE_CHECKING:
    from speechtrain.text.vocabulary import Tokenizer


def read_config(run_dir: Path) -> DictConfig:
    """Return the config of the run in ``run_dir``. Its tokenizer is the copy in the run directory.

    Raises ConfigError if the config is missing, RunError if it is damaged.
    """
    config = load(run_dir / CONFIG)
    tokenizer_class: type[Tokenizer] = part_of(config, "tokenizer").part_class
    config.tokenizer.update(tokenizer_class.saved_arguments(str(run_dir.resolve())))
    return config


def read_tokenizer(run_dir: Path) -> Tokenizer:
    """Return the tokenizer of the run in ``run_dir``. Raises the errors of ``read_config``."""
    tokenizer: Tokenizer = part_of(read_config(run_dir), "tokenizer").build()
    return tokenizer

"""Published recognisers of transformers with eight letters, and their tasks in this project."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from speechtrain.interop.weights import initialise, read_nodes, read_weights
from speechtrain.start.build import build_encoder, build_model
from speechtrain.start.compose import compose
from speechtrain.start.run_config import part_of, run_config
from speechtrain.task import Task

LETTERS = " abcdefg"
BLANK = len(LETTERS)


def letters_tokenizer() -> Any:
    """Return transformers' tokenizer of the letters, in which the blank pads."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    vocabulary = {symbol: label for label, symbol in enumerate(LETTERS)}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    library.decoder = tokenizers.decoders.Fuse()
    return transformers.ParakeetTokenizer(tokenizer_object=library, pad_token="<blank>")


def config_at(folder: Path) -> DictConfig:
    config = compose(["model=rnnt", "data=digits"])
    for group, node in read_nodes(folder).items():
        config[group] = OmegaConf.create(node)
    return config


def task_of(folder: Path) -> Task:
    """Return the published model in ``folder`` as a task of this project."""
    config = config_at(folder)
    task = build_model(
        run_config(config), part_of(config, "tokenizer").build(), build_encoder(run_config(config))
    )
    report = initialise(task, read_weights(f"hf:{folder}"), str(folder))
    assert not report.fresh
    return task.eval()

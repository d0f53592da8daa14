"""Tensor names of earlier releases and their present names.

Optimizer state is stored by the parameter's number and needs no renaming: the order has not changed.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import TypeVar

_Value = TypeVar("_Value")

_RENAMED_2_TO_3 = {
    r"\bprediction\.embed\.": "prediction.embedding.",
    r"\bprediction\.dec_rnn\.": "prediction.rnn.",
    r"\bjoint_enc\.": "joint.encoder.",
    r"\bjoint_pred\.": "joint.prediction.",
    r"\bjoint_net\.": "joint.output.",
}
"""RNN-T's prediction network and joint became nodes with format 3 of ``config.yaml``."""


def migrate_2_to_3(name: str) -> str:
    """The present name of a tensor, or of a path that ends in it."""
    for before, now in _RENAMED_2_TO_3.items():
        name = re.sub(before, now, name)
    return name


def migrate_names(saved: Mapping[str, _Value], known: Container[str]) -> dict[str, _Value]:
    """Rename each tensor that the model does not know, if the model knows its present name."""
    names = {name: migrate_2_to_3(name) for name in saved if name not in known}
    return {names[name] if names.get(name) in known else name: value for name, value in saved.items()}

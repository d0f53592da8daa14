"""Names of tensors in checkpoints of earlier releases; optimizers count by their order, which is the same."""

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
"""RNN-T's prediction network and joint became nodes of their own."""


def migrate_2_to_3(name: str) -> str:
    """The present name of a tensor, or of a path that ends in it."""
    for before, now in _RENAMED_2_TO_3.items():
        name = re.sub(before, now, name)
    return name


def migrate_names(saved: Mapping[str, _Value], known: Container[str]) -> dict[str, _Value]:
    """``saved`` in its order, with the names that the model knows: a name that it has is kept."""
    names = {name: migrate_2_to_3(name) for name in saved if name not in known}
    return {names[name] if names.get(name) in known else name: value for name, value in saved.items()}

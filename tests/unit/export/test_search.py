from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from speechtrain.export.search import Search

MODEL = {
    "kind": "ctc",
    "labels": ["a", "b"],
    "blank": 2,
    "states": {},
    "sample_rate": 8000,
    "longest_pause": 0.6,
}


class _Scores:
    """A session whose output is constant: scores of a, b and the blank for each frame."""

    def __init__(self, *rows: tuple[float, float, float]) -> None:
        self.scores = np.array([rows], dtype=np.float32)

    def get_inputs(self) -> list[Any]:
        return []

    def get_outputs(self) -> list[Any]:
        return [SimpleNamespace(name="scores")]

    def run(self, names: None, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        return [self.scores]


def search(*rows: tuple[float, float, float]) -> Search:
    result = Search(MODEL, {"encoder": _Scores((0, 0, 0)), "ctc": _Scores(*rows)})
    result.text(np.resize(np.array([1, 0], np.float32), 3200))  # short enough to be one span of speech
    return result


def test_search_margin_is_that_of_the_first_decision_that_differs() -> None:
    reference = search((1.00001, 1, 0), (0, 2.0, 1.5), (0, 1.00001, 1))
    export = search((1.00001, 1, 0), (0, 1.5, 2.0), (0, 1, 1.00001))
    assert export.margin(reference, "a") == pytest.approx(0.5)
    assert export.margin(export, "a") == math.inf


@pytest.mark.parametrize(
    ("text", "margin"),
    [("aa", 1.0), ("a", 1.0), ("bb", 0.25), ("", 0.25)],
    ids=["second label", "end", "first label", "start"],
)
def test_search_margin_before_is_that_of_the_decisions_after_the_common_text(
    text: str, margin: float
) -> None:
    reference = search((2, 1.75, 0), (0, 0, 3), (0, 2, 1), (0.1, 0.1, 0.1))
    assert reference.margin_before(text) == pytest.approx(margin)

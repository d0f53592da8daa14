"""The comparison of an export's texts with PyTorch's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from speechtrain.errors import DataError
from speechtrain.export import held_out


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run with 200 recordings, whose text is their number."""
    recordings = [held_out.Utterance(f"r{n}", np.array([n]), "a reference") for n in range(200)]
    monkeypatch.setattr(held_out, "utterances", lambda loaded: iter(recordings))
    return None


def text_except(count: int) -> held_out.TextOf:
    """A recogniser with other texts for the first ``count`` recordings."""
    return lambda samples: "another text" if samples[0] < count else str(samples[0])


def test_check_lists_a_hundredth_of_other_texts(loaded: Any) -> None:
    result = held_out.check(
        loaded, {"pytorch": text_except(0), "fp32": text_except(2), "int8": text_except(150)}
    )
    assert [difference["id"] for difference in result["differences"]] == ["r0", "r1"]
    assert held_out.lines(result)[1] == "r0: 'another text', and PyTorch has '0'"


def test_check_refuses_more_other_texts_in_fp32(loaded: Any) -> None:
    with pytest.raises(DataError, match=r"^r0: .* 3 of 200 recordings differ, so nothing is written"):
        held_out.check(loaded, {"pytorch": text_except(0), "fp32": text_except(3)})

"""Advice on results: the limit, the held-out loss, WER and CER, and the amount of speech."""

from __future__ import annotations

from typing import Any

import pytest

from speechtrain.report.advice import advice, limit_of, worse_searches
from speechtrain.run_directory import RunResult

LIMITS = {"max_steps": None, "max_epochs": None, "max_hours": 0.5}


def lines_of(wer: float, cer: float, *losses: float, **limits: Any) -> str:
    events: list[dict[str, Any]] = [{"event": "start", "from data": "573 recordings, 1.67 h: lr=1"}]
    for number, loss in enumerate(losses):
        events.append({"event": "valid", "set": "held_out", "step": number, "loss": loss})
        events.append({"event": "valid", "set": "other", "step": number, "loss": 1.0})
    metrics = {"wer": wer, "cer": cer, "held_out/wer": wer, "held_out/cer": cer}
    result = RunResult("finished", wer, metrics, None, metrics, steps=4, limits={**LIMITS, **limits})
    return "\n".join(advice(result, events))


NO_TREND = "It ended with trainer.max_hours=0.5. Raise it"
RISES = "The loss of held_out was 140.7 and ended at 302.2, so more time would not help"
FLAT = "more time would give little (it ended with trainer.max_hours=0.5)"
ROWS: list[tuple[float, tuple[float, ...], dict[str, Any], str]] = [
    (0.97, (10.0, 9.0, 8.0), {"max_steps": 4}, "raise trainer.max_steps=4"),
    (0.97, (10.0, 9.0, 8.0), {}, "raise trainer.max_hours=0.5"),
    (0.97, (200.0, 140.7, 302.2), {}, RISES),
    (0.97, (9.0, 9.0, 9.0), {}, FLAT),
    (0.97, (101.1,), {}, NO_TREND),
    (0.97, (101.1, 101.1), {}, NO_TREND),
    (0.97, (101.1, 150.0), {}, NO_TREND),
    (0.97, (101.1, 90.0), {}, NO_TREND),
    (0.8615, (9.0,), {}, "most words have an error: wer 100.00 %, cer 86.15 %. It ended with"),
    (0.95, (9.0,), {}, "it does not write what was said yet: wer 100.00 %, cer 95.00 %. It ended with"),
    (0.95, (9.0,), {}, "it heard 573 recordings, 1.67 h. docs/scratch.md"),
]


@pytest.mark.parametrize(("cer", "losses", "limits", "words"), ROWS)
def test_advice_of_a_wer_of_100_percent(
    cer: float, losses: tuple[float, ...], limits: dict[str, Any], words: str
) -> None:
    lines = lines_of(1.0, cer, *losses, **limits)
    assert words in lines
    assert ("The loss" in lines) == (words in (RISES, FLAT) or len(losses) > 2)
    assert lines_of(0.1, 0.03, *losses, **limits) == "", "a good result gets no advice"


def test_limit_of_is_the_limit_that_the_run_had() -> None:
    ended = {"status": "finished", "limits": {**LIMITS, "max_epochs": 2.0, "max_steps": 99}, "steps": 4}
    assert limit_of(RunResult(**ended)) == "trainer.max_epochs=2.0"
    assert limit_of(RunResult("time", limits={**LIMITS, "max_steps": 9}, steps=4)) == "trainer.max_hours=0.5"
    (line,) = advice(RunResult("time", limits=LIMITS, steps=0), [])
    assert line == "it made no update: raise trainer.max_hours=0.5"


def test_a_step_that_was_evaluated_twice_counts_once() -> None:
    event = {"event": "valid", "set": "held_out", "loss": 101.1}
    events = [{**event, "step": step} for step in (1, 1, 2)]
    result = RunResult("finished", 1.0, {"wer": 1.0}, None, {"wer": 1.0}, steps=2, limits=LIMITS)
    assert "The loss" not in "\n".join(advice(result, events))


def test_a_search_that_is_worse_says_so() -> None:
    metrics = {"held_out/wer": 0.0458, "final/held_out/wer": 0.1292, "held_out/cer": 0.1}
    result = RunResult("finished", 0.0458, {"wer": 0.0458}, None, metrics, steps=4)
    (line,) = advice(result, [])
    assert line.startswith("final/held_out/wer: wer 12.92 %, but wer 4.58 % with the decoder of training")
    assert "docs/decoding.md" in line
    assert list(worse_searches({"a/wer": 0.2}, {"a/wer": 0.2})) == []
    assert list(worse_searches({"a/wer": 0.2}, {"b/wer": 0.3})) == []
    assert len(list(worse_searches({"a/wer": 0.2}, {"a/wer": 0.3}))) == 1

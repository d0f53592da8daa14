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


def test_a_good_result_gets_no_advice() -> None:
    assert lines_of(0.1, 0.03, 3.0, 9.0) == ""


def test_the_limit_is_the_one_that_the_run_had() -> None:
    """U9a: a run of four updates was advised to raise a time that did not limit it."""
    assert "raise trainer.max_steps=4" in lines_of(1.0, 0.97, 10.0, 9.0, 8.0, max_steps=4)
    assert "raise trainer.max_hours=0.5" in lines_of(1.0, 0.97, 10.0, 9.0, 8.0)
    ended = {"status": "finished", "limits": {**LIMITS, "max_epochs": 2.0, "max_steps": 99}, "steps": 4}
    assert limit_of(RunResult(**ended)) == "trainer.max_epochs=2.0"
    assert limit_of(RunResult("time", limits={**LIMITS, "max_steps": 9}, steps=4)) == "trainer.max_hours=0.5"
    (line,) = advice(RunResult("time", limits=LIMITS, steps=0), [])
    assert line == "it made no update: raise trainer.max_hours=0.5"


def test_a_held_out_loss_that_rises_speaks_against_more_time() -> None:
    """U9b."""
    lines = lines_of(1.0, 0.97, 200.0, 140.7, 302.2)
    assert "The loss of held_out was 140.7 and ended at 302.2, so more time would not help" in lines
    assert "raise" not in lines
    assert "more time would give little (it ended with trainer.max_hours=0.5)" in lines_of(
        1.0, 0.97, 9.0, 9.0, 9.0
    )


@pytest.mark.parametrize("losses", [(101.1,), (101.1, 101.1), (101.1, 150.0), (101.1, 90.0)])
def test_fewer_than_three_losses_are_no_trend(losses: tuple[float, ...]) -> None:
    lines = lines_of(1.0, 0.97, *losses)
    assert "It ended with trainer.max_hours=0.5. Raise it" in lines
    assert "The loss" not in lines


def test_a_step_that_was_evaluated_twice_counts_once() -> None:
    event = {"event": "valid", "set": "held_out", "loss": 101.1}
    events = [{**event, "step": step} for step in (1, 1, 2)]
    result = RunResult("finished", 1.0, {"wer": 1.0}, None, {"wer": 1.0}, steps=2, limits=LIMITS)
    assert "The loss" not in "\n".join(advice(result, events))


@pytest.mark.parametrize(
    ("cer", "state"), [(0.8615, "most words have an error"), (0.95, "it does not write what was said yet")]
)
def test_the_wer_decides_and_the_cer_says_more(cer: float, state: str) -> None:
    """U9c: a WER of 100 % got no advice, because its CER was below 90 %."""
    lines = lines_of(1.0, cer, 9.0)
    assert lines.startswith(f"{state}: wer 100.00 %, cer {100 * cer:.2f} %. It ended with trainer.max_hours")
    assert "it heard 573 recordings, 1.67 h. docs/scratch.md" in lines
    assert "run_dir=NEW" in lines


def test_a_search_that_is_worse_says_so() -> None:
    """U25."""
    metrics = {"held_out/wer": 0.0458, "final/held_out/wer": 0.1292, "held_out/cer": 0.1}
    result = RunResult("finished", 0.0458, {"wer": 0.0458}, None, metrics, steps=4)
    (line,) = advice(result, [])
    assert line.startswith("final/held_out/wer: wer 12.92 %, but wer 4.58 % with the decoder of training")
    assert "docs/decoding.md" in line
    assert list(worse_searches({"a/wer": 0.2}, {"a/wer": 0.2})) == []
    assert list(worse_searches({"a/wer": 0.2}, {"b/wer": 0.3})) == []
    assert len(list(worse_searches({"a/wer": 0.2}, {"a/wer": 0.3}))) == 1

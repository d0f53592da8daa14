"""Advice on a result: why it is bad, and what more time or more recordings would give.

The end of a run and its report print the same lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from speechtrain.run_directory import RunResult, finite_number, metric_text

_POOR_WER = 0.5  # A run with at least this WER gets advice.
_SILENT_CER = 0.9  # With at least this CER, the hypotheses have almost nothing of the references.
_RISE = 1.1  # The loss has risen if the last one is above this multiple of the lowest one.
_FALL = 0.99  # The loss still falls if the last one is below this multiple of the one before it.
_FEWEST_LOSSES = 3  # Two losses may differ by chance.

Event = Mapping[str, Any]


def advice(result: RunResult, events: Sequence[Event]) -> Iterator[str]:
    """Yield lines of advice on the ``result`` of a run that has ended. A good result has no lines.

    ``events`` are the rows of ``metrics.jsonl``. The losses are read from the events ``valid``, and the
    amount of speech from ``start``.
    """
    metrics = result.last_metrics or {}
    yield from worse_searches(metrics, metrics, "final/")
    best = result.metrics or {}
    wer, cer = finite_number(best.get("wer")), finite_number(best.get("cer"))
    if result.steps == 0:
        yield f"it made no update: raise {limit_of(result)}"
    elif wer is not None and wer >= _POOR_WER:
        problem = "it does not write what was said yet"
        if cer is not None and cer < _SILENT_CER:
            problem = "most words have an error"
        rates = f"{metric_text('wer', wer)}, {metric_text('cer', cer)}"
        yield f"{problem}: {rates}. {_time_advice(limit_of(result), events)}"
        for event in events:
            if event.get("from data"):
                amount = str(event["from data"]).partition(":")[0]
                yield f"it heard {amount}. docs/scratch.md has the error rates of other amounts"
                yield "docs/wer.md has the causes of a high error rate"
                yield "with recordings that you add, begin a new run: run_dir=NEW"
                break


def limit_of(result: RunResult) -> str:
    """Return the limit that ended a run, as KEY=VALUE."""
    limits = result.limits or {}
    key = "max_hours"
    if result.status == "finished" and limits.get("max_steps") == result.steps:
        key = "max_steps"
    elif result.status == "finished" and limits.get("max_epochs") is not None:
        key = "max_epochs"
    return f"trainer.{key}={limits.get(key)}"


def worse_searches(usual: Event, searched: Event, prefix: str = "") -> Iterator[str]:
    """Yield a line for each set whose WER in ``searched`` is higher than in ``usual``.

    ``usual`` has the metrics with the decoder of training, and ``searched`` the metrics with another decoder.
    The names in ``searched`` begin with ``prefix``.
    """
    for name, usual_rate in usual.items():
        if not name.endswith("/wer"):
            continue
        search_rate = finite_number(searched.get(prefix + name))
        if search_rate is not None and search_rate > (finite_number(usual_rate) or 0.0):
            rates = f"{metric_text('wer', search_rate)}, but {metric_text('wer', usual_rate)}"
            yield (
                f"{prefix}{name}: {rates} with the decoder of training, which is better here "
                "(docs/decoding.md)"
            )


def _time_advice(limit: str, events: Sequence[Event]) -> str:
    """Return a sentence on whether more time helps, from the losses of the first evaluation set."""
    validations = [
        event for event in events if event.get("event") == "valid" and finite_number(event.get("loss"))
    ]
    first_set = [event for event in validations if event.get("set") == validations[0].get("set")]
    # A run that was started again may have evaluated the same step twice.
    losses = list({event.get("step"): event["loss"] for event in first_set}.values())
    if len(losses) < _FEWEST_LOSSES:
        return f"It ended with {limit}. Raise it"
    last_loss, lowest_loss = losses[-1], min(losses)
    course = f"The loss of {validations[0].get('set')} was {lowest_loss:.4g} and ended at {last_loss:.4g}"
    if last_loss > _RISE * lowest_loss:
        return f"{course}, so more time would not help, and more recordings would"
    if last_loss < _FALL * losses[-2]:
        return f"{course}, still falling: raise {limit}"
    return f"{course}, so more time would give little (it ended with {limit}), and more recordings would help"

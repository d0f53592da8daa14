"""Builds the report's HTML page of one or several runs, from the outcome down to the config.

``page.html`` is the template.
"""

from __future__ import annotations

import shlex
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, zip_longest
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from rapidfuzz.distance import Levenshtein

from speechtrain import __version__
from speechtrain.report.chart import DASHES, PALETTE, Chart, Line, short, smoothed
from speechtrain.report.run import Curve, Run, different_keys, names_of
from speechtrain.run_directory import is_error_rate, number
from speechtrain.tracking.console import duration

KINDS = {"replace": "substituted", "delete": "deleted", "insert": "inserted"}
"""The kinds of word errors that ``align`` distinguishes, with the words for them on the page."""

_TRAIN_CHARTS = {  # The title and the unit of the chart of each metric.
    "lr": ("Learning rate", ""),
    "grad_norm": ("Gradient norm", ""),
    "utterances_per_s": ("Throughput", "utt/s"),
    "audio_s_per_s": ("Throughput", "audio s/s"),
    "data_wait": ("Waiting for data", "%"),
    "memory_mib": ("Memory", "MiB"),
}
_SMOOTHED_FROM = 10  # A shorter curve is not smoothed.
_MOST_CHARTS = 200  # A task has up to 30. Each takes 5 ms.
_CODE = Markup("<code>{}</code>")


class WordPair(NamedTuple):
    """A word of the reference and the word of the hypothesis at its place. One of them may be empty."""

    kind: str  # equal, replace, delete or insert
    reference: str
    hypothesis: str


def page(runs: Sequence[Run]) -> str:
    """Return the HTML document of one run, or of several runs that share their charts."""
    environment = Environment(
        loader=PackageLoader("speechtrain.report", ""), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    filters = (_count, _date, _facts, _figure, _heading, _headline, _median, _setting, _three, _verdict)
    environment.filters |= {function.__name__[1:]: function for function in filters}
    environment.filters |= {"duration": duration, "number": number, "short": short}
    names, metric = names_of(runs), _headline(runs)
    return environment.get_template("page.html").render(
        runs=runs,
        names=names,
        charts=_charts(runs, names),
        metric=metric,
        scores=_scores(runs, metric),
        differences=different_keys(runs),
        palette=PALETTE,
        dashes=DASHES,
        align=align,
        version=__version__,
        now=time.time(),
    )


def _headline(runs: Sequence[Run]) -> str:
    """Return the most important metric that a run has: word error rate, character error rate or loss."""
    for metric in ("wer", "cer", "loss"):
        if any(metric in run.valid for run in runs):
            return metric
    return ""


def _scores(runs: Sequence[Run], metric: str) -> dict[str, list[float | None]]:
    """Return the metric of each run's best checkpoint, by the set."""
    curves_of_runs = [run.valid.get(metric, {}) for run in runs]
    scores = {}
    for name in _distinct_names(curves_of_runs):
        curves = [curves.get(name, Curve()) for curves in curves_of_runs]
        scores[name] = [curve.value_at(run.best_step) for curve, run in zip(curves, runs, strict=True)]
    return scores


def _distinct_names(mappings: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the keys of all mappings in the order of their first appearance."""
    names: dict[str, None] = {}
    for mapping in mappings:
        names |= dict.fromkeys(mapping)
    return list(names)


def _charts(runs: Sequence[Run], names: Sequence[str]) -> list[Chart]:
    """Return the charts that have a finite value."""
    steps = max(run.steps or 0 for run in runs)
    last_step = max(1.0, 1.012 * steps)  # The last point of a curve needs some room.
    marks = runs[0].numbers("step", "resume") if len(runs) == 1 else []
    charts = (replace(chart, last_step=last_step, marks=marks) for chart in _all_charts(runs, names))
    return list(islice((chart for chart in charts if chart.drawable), _MOST_CHARTS))


def _all_charts(runs: Sequence[Run], names: Sequence[str]) -> Iterator[Chart]:
    """Yield the charts of the loss, of the validation metrics, and of the training metrics."""
    losses = _train_lines(runs, names, "loss", smooth=True) + _valid_lines(runs, names, "loss")
    yield Chart("Loss", losses, maybe_log=True)
    valid_metrics = _distinct_names(run.valid for run in runs)
    for metric in sorted(valid_metrics, key=lambda metric: (not is_error_rate(metric), metric != "wer")):
        if metric != "loss":
            rate = is_error_rate(metric)
            lines = _valid_lines(runs, names, metric)
            yield Chart(_heading(metric), lines, _unit(metric), from_zero=rate, maybe_log=rate)
    yield from _train_charts(runs, names)


def _train_charts(runs: Sequence[Run], names: Sequence[str]) -> Iterator[Chart]:
    for metric, (title, unit) in _TRAIN_CHARTS.items():
        is_noisy = metric == "grad_norm"
        lines = _train_lines(runs, names, metric, smooth=is_noisy)
        yield Chart(title, lines, unit, from_zero=True, maybe_log=is_noisy)
    for metric in _distinct_names(run.train for run in runs):
        if metric != "loss" and metric not in _TRAIN_CHARTS:
            lines = _train_lines(runs, names, metric, smooth=True)
            yield Chart(f"{_heading(metric)} in training", lines, _unit(metric))


def _unit(metric: str) -> str:
    return "%" if is_error_rate(metric) else ""


def _train_lines(runs: Sequence[Run], names: Sequence[str], metric: str, smooth: bool) -> list[Line]:
    """Return a line with a colour of its own for each run. A single run also has the raw curve."""
    lines = []
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        label = "train" if len(runs) == 1 else name
        line = Line(label, run.train.get(metric, Curve()), index)
        if smooth and len(line.curve.x) >= _SMOOTHED_FROM:
            if len(runs) == 1:
                lines.append(replace(line, is_faint=True))
            line = replace(line, curve=smoothed(line.curve))
        lines.append(line)
    return lines


def _valid_lines(runs: Sequence[Run], names: Sequence[str], metric: str) -> list[Line]:
    """Return a line for each run and set.

    The colours distinguish the sets of a single run. If there are several runs, the colours distinguish
    the runs, and the dashes distinguish the sets.
    """
    all_curves: list[Mapping[str, Curve]] = []
    for run in runs:
        all_curves += run.valid.values()
    sets = _distinct_names(all_curves)
    first_dash = 1 if metric == "loss" else 0  # The training loss, in the same chart, has the first dash.
    lines = []
    for index, (run, run_name) in enumerate(zip(runs, names, strict=True)):
        for name, curve in run.valid.get(metric, {}).items():
            set_index = sets.index(name)
            line = Line(f"{run_name}, {name}", curve, index, dash=first_dash + set_index)
            if len(runs) == 1:
                line = Line(name, curve, set_index + 1)
            lines.append(line)
    return lines


def align(reference: str, hypothesis: str) -> list[WordPair]:
    """Align two texts word by word, with the fewest errors, as the word error rate counts them.

    >>> [tuple(pair) for pair in align("the cat sat", "cat sit")]
    [('delete', 'the', ''), ('equal', 'cat', 'cat'), ('replace', 'sat', 'sit')]
    """
    references, hypotheses = reference.split(), hypothesis.split()
    pairs = []
    for step in Levenshtein.opcodes(references, hypotheses):
        left = references[step.src_start : step.src_end]
        right = hypotheses[step.dest_start : step.dest_end]
        pairs += [WordPair(step.tag, *words) for words in zip_longest(left, right, fillvalue="")]
    return pairs


def _verdict(pairs: Sequence[WordPair]) -> tuple[int, int, str]:
    """Return the numbers of errors and of words in the reference, and the kinds of the errors in words."""
    counts = Counter(pair.kind for pair in pairs)
    kinds = ", ".join(f"{counts[kind]} {name}" for kind, name in KINDS.items() if counts[kind])
    return len(pairs) - counts["equal"], len(pairs) - counts["insert"], kinds or "all right"


def _facts(run: Run) -> dict[str, str]:
    """Return the facts on the origin of a run, by name. An empty fact is not shown.

    ``Markup`` escapes the texts that it formats.
    """
    about = run.about
    facts = _command(run)
    seed = run.config.get("seed") if about.seed is None else about.seed
    facts["seed"] = "" if seed is None else str(seed)
    commit = str(about.git.get("commit", ""))
    if about.git.get("dirty"):
        commit += " with uncommitted changes"
    facts["commit"] = _CODE.format(commit) if commit else ""
    facts["versions"] = ", ".join(f"{name} {version}" for name, version in about.versions.items())
    facts["platform"] = about.platform
    metrics = []
    if run.result and run.result.metrics:
        for name, value in run.result.metrics.items():
            metrics.append(Markup("{} <b>{}</b>").format(name, _figure(value, name)))
    facts["result"] = Markup(", ").join(metrics)
    facts["directory"] = _CODE.format(run.folder)
    return facts


def _command(run: Run) -> dict[str, str]:
    """Return the command of a run, and its overrides if the command does not show them."""
    argv, overrides = run.about.argv, run.about.overrides or []
    command = "" if argv is None else _CODE.format(f"speechtrain train {shlex.join(argv)}")
    shown_overrides = "" if overrides == argv else Markup(" ").join(map(_CODE.format, overrides))
    return {"command": command, "overrides": shown_overrides}


def _heading(metric: str) -> str:
    return metric.upper() if is_error_rate(metric) else metric.replace("_", " ").capitalize()


def _figure(value: Any, metric: str) -> str:
    """Return the value of a metric for the page."""
    finite = number(value)
    if finite is None:
        return "not finite" if value is None else str(value)
    return f"{100 * finite:.2f} %" if is_error_rate(metric) else short(finite)


def _three(value: float) -> str:
    """Return three significant digits. A throughput is not more precise."""
    return short(float(f"{value:.3g}"))


def _setting(value: Any) -> str:
    """Return the value of a config key as in YAML."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _count(value: int) -> str:
    if value < 10_000:
        return f"{value:,}"
    return f"{value / 1e6:.1f} M" if value >= 1_000_000 else f"{value / 1e3:.0f} k"


def _median(run: Run, name: str) -> float | None:
    values = [y for y in run.train.get(name, Curve()).y if y is not None]
    return statistics.median(values) if values else None


def _date(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
    except (OverflowError, OSError, ValueError):  # The C library cannot represent this time.
        return "at an unknown time"

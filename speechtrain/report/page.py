"""The page of one run or several, from the outcome down to the config. ``page.html`` is its layout."""

from __future__ import annotations

import shlex
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, islice, zip_longest
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from rapidfuzz.distance import Levenshtein

from speechtrain import __version__
from speechtrain.report.chart import DASHES, PALETTE, Chart, Line, short_number, smooth_curve
from speechtrain.report.run import Curve, Run, differing_keys, names_of
from speechtrain.run_directory import finite_number, is_error_rate
from speechtrain.tracking.console import duration

KINDS = {"replace": "substituted", "delete": "deleted", "insert": "inserted"}
"""The kinds of word errors in an alignment, and the word for each on the page."""

_TRAIN_CHARTS = {  # title and unit of each metric
    "lr": ("Learning rate", ""),
    "grad_norm": ("Gradient norm", ""),
    "utterances_per_s": ("Throughput", "utt/s"),
    "audio_s_per_s": ("Throughput", "audio s/s"),
    "data_wait": ("Waiting for data", "%"),
    "memory_mib": ("Memory", "MiB"),
}
_NOISY = ("grad_norm",)  # the metrics in ``_TRAIN_CHARTS`` that are smoothed
_MIN_SMOOTHED = 10  # the fewest values of a curve that is smoothed
_MAX_CHARTS = 200  # A task has up to 30, and each takes 5 ms.
_PACKAGES = ("python", "speechtrain", "torch", "numpy", "hydra-core", "omegaconf", "lhotse", "soundfile")
_CODE = Markup("<code>{}</code>")


def page(runs: Sequence[Run]) -> str:
    """Return the HTML document of one run, or of several runs with common charts."""
    environment = Environment(
        loader=PackageLoader("speechtrain.report", ""), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "count": _count,
        "date": _date,
        "duration": duration,
        "figure": _figure,
        "heading": _heading,
        "headline": _headline,
        "median": _median,
        "number": finite_number,
        "origin": _origin,
        "setting": _setting,
        "short": short_number,
        "three": _three,
        "verdict": _verdict,
    }
    names, metric = names_of(runs), _headline(runs)
    # The metric of each run's best checkpoint, by set
    sets = _union(run.valid.get(metric, {}) for run in runs)
    scores: dict[str, list[float | None]] = {name: [] for name in sets}
    for run in runs:
        for name, values in scores.items():
            curve = run.valid.get(metric, {}).get(name, Curve())
            values.append(curve.value_at(run.best_step))
    steps = max(run.steps[0] or 0 for run in runs)
    last_step = max(1.0, 1.012 * steps)  # leaves room for the last dot
    marks = runs[0].numbers("step", "resume") if len(runs) == 1 else []
    charts = []
    visible_charts = (chart for chart in _charts(runs, names) if chart.visible)
    for chart in islice(visible_charts, _MAX_CHARTS):
        charts.append(replace(chart, last_step=last_step, marks=marks))
    return environment.get_template("page.html").render(
        runs=runs,
        names=names,
        charts=charts,
        metric=metric,
        scores=scores,
        differences=differing_keys(runs),
        palette=PALETTE,
        dashes=DASHES,
        align=align,
        version=__version__,
        now=time.time(),
    )


def _headline(runs: Sequence[Run]) -> str:
    """Return the most important metric that a run has: WER, otherwise CER, otherwise the loss."""
    for metric in ("wer", "cer", "loss"):
        if any(metric in run.valid for run in runs):
            return metric
    return ""


def _union(groups: Iterable[Iterable[str]]) -> list[str]:
    """Return the distinct names of all groups, in the order of their first appearance."""
    return list(dict.fromkeys(chain.from_iterable(groups)))


def _charts(runs: Sequence[Run], names: Sequence[str]) -> Iterable[Chart]:
    losses = _smooth_train_lines(runs, names, "loss") + _valid_lines(runs, names, "loss")
    yield Chart("Loss", losses, maybe_log=True)
    # WER, then other error rates, then the other metrics of validation
    valid_metrics = _union(run.valid for run in runs)
    for metric in sorted(valid_metrics, key=lambda metric: (not is_error_rate(metric), metric != "wer")):
        if metric != "loss":
            is_rate = is_error_rate(metric)
            lines = _valid_lines(runs, names, metric)
            yield Chart(_heading(metric), lines, _unit(metric), from_zero=is_rate, maybe_log=is_rate)
    for metric, (title, unit) in _TRAIN_CHARTS.items():
        lines_of = _smooth_train_lines if metric in _NOISY else _train_lines
        lines = lines_of(runs, names, metric)
        yield Chart(title, lines, unit, from_zero=True, maybe_log=metric in _NOISY)
    for metric in _union(run.train for run in runs):
        if metric != "loss" and metric not in _TRAIN_CHARTS:
            lines = _smooth_train_lines(runs, names, metric)
            yield Chart(f"{_heading(metric)} in training", lines, _unit(metric))


def _unit(metric: str) -> str:
    return "%" if is_error_rate(metric) else ""


def _train_lines(runs: Sequence[Run], names: Sequence[str], metric: str) -> list[Line]:
    """Return a line of another colour for each run."""
    lines = []
    labels = ["train"] if len(runs) == 1 else names
    for index, (run, label) in enumerate(zip(runs, labels, strict=True)):
        lines.append(Line(label, run.train.get(metric, Curve()), index))
    return lines


def _smooth_train_lines(runs: Sequence[Run], names: Sequence[str], metric: str) -> list[Line]:
    """Return a smoothed line for each run. One run alone also has its curve before smoothing."""
    lines = []
    for line in _train_lines(runs, names, metric):
        if len(line.curve.x) < _MIN_SMOOTHED:
            lines.append(line)
            continue
        if len(runs) == 1:
            lines.append(replace(line, is_faint=True))
        lines.append(replace(line, curve=smooth_curve(line.curve)))
    return lines


def _valid_lines(runs: Sequence[Run], names: Sequence[str], metric: str) -> list[Line]:
    """Return a line for each run and set.

    The lines of one run have a colour for each set. The lines of several runs have the colour of the run and
    a pattern for each set.
    """
    sets = _union(_union(run.valid.values()) for run in runs)
    first_dash = 1 if metric == "loss" else 0  # the loss of training has pattern 0
    lines = []
    for index, run in enumerate(runs):
        for name, curve in run.valid.get(metric, {}).items():
            if len(runs) == 1:
                lines.append(Line(name, curve, 1 + sets.index(name)))
            else:
                dash = first_dash + sets.index(name)
                lines.append(Line(f"{names[index]}, {name}", curve, index, dash=dash))
    return lines


def align(reference: str, hypothesis: str) -> list[tuple[str, str, str]]:
    """Return the word alignment with the fewest errors, as the word error rate counts them.

    A row is the kind (equal, replace, delete or insert), the reference's word and the hypothesis's word.

    >>> align("the cat sat", "cat sit")
    [('delete', 'the', ''), ('equal', 'cat', 'cat'), ('replace', 'sat', 'sit')]
    """
    reference_words, hypothesis_words = reference.split(), hypothesis.split()
    pairs: list[tuple[str, str, str]] = []
    for step in Levenshtein.opcodes(reference_words, hypothesis_words):
        left = reference_words[step.src_start : step.src_end]
        right = hypothesis_words[step.dest_start : step.dest_end]
        pairs += [(step.tag, *words) for words in zip_longest(left, right, fillvalue="")]
    return pairs


def _verdict(pairs: Sequence[tuple[str, str, str]]) -> tuple[int, int, str]:
    """Return the number of errors, the number of words of the reference, and the kinds of errors in words."""
    counts = Counter(tag for tag, _, _ in pairs)
    detail = ", ".join(f"{counts[tag]} {name}" for tag, name in KINDS.items() if counts[tag])
    return len(pairs) - counts["equal"], len(pairs) - counts["insert"], detail or "all right"


def _origin(run: Run) -> dict[str, str]:
    """Return the entries on how the run was made, by name. ``Markup`` escapes the values that it formats."""
    about = run.about
    entries: dict[str, str] = {}
    if about.argv is not None:
        entries["command"] = _CODE.format(f"speechtrain train {shlex.join(about.argv)}")
    if about.overrides and about.overrides != about.argv:
        entries["overrides"] = Markup(" ").join(map(_CODE.format, about.overrides))
    seed = run.config.get("seed") if about.seed is None else about.seed
    if seed is not None:
        entries["seed"] = str(seed)
    commit = str(about.git.get("commit", ""))
    if about.git.get("dirty"):
        commit += " with uncommitted changes"
    if commit:
        entries["commit"] = _CODE.format(commit)
    entries["folder's commit"] = about.folder_commit
    entries["own code"] = ", ".join(f"{name} {part.get('sha256')}" for name, part in about.parts.items())
    versions = [f"{name} {about.versions[name]}" for name in _PACKAGES if name in about.versions]
    entries["versions"] = ", ".join(versions)
    entries["platform"] = about.platform
    if run.result and run.result.metrics:
        figures = []
        for name, value in run.result.metrics.items():
            figures.append(Markup("{} <b>{}</b>").format(name, _figure(value, name)))
        entries["result"] = Markup(", ").join(figures)
    entries["directory"] = _CODE.format(run.folder)
    return entries


def _heading(metric: str) -> str:
    text = metric.replace("_", " ")
    return text.upper() if is_error_rate(metric) else text.capitalize()


def _figure(value: Any, metric: str) -> str:
    finite = finite_number(value)
    if finite is None:
        return "not finite" if value is None else str(value)
    return f"{100 * finite:.2f} %" if is_error_rate(metric) else short_number(finite)


def _three(value: float) -> str:
    """Return a throughput, which is known to three significant digits."""
    return short_number(float(f"{value:.3g}"))


def _setting(value: Any) -> str:
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
    except (OverflowError, OSError, ValueError):  # outside the range of the C library
        return "at an unknown time"

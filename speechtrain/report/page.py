"""The page: what a reader asks of a run, from its outcome down to its config. ``page.html`` lays it out."""

from __future__ import annotations

import shlex
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice, zip_longest
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from rapidfuzz.distance import Levenshtein

from speechtrain import __version__
from speechtrain.report.chart import DASHES, PALETTE, Chart, Line, short, smoothed
from speechtrain.report.run import Curve, Run, differing, names_of
from speechtrain.run_directory import is_error_rate, number
from speechtrain.tracking.console import duration

KINDS = {"replace": "substituted", "delete": "deleted", "insert": "inserted"}
"""The kinds of word errors that ``align`` finds, and what is said of such a word."""

_TRAIN_CHARTS = {  # title, unit
    "lr": ("Learning rate", ""),
    "grad_norm": ("Gradient norm", ""),
    "utterances_per_s": ("Throughput", "utt/s"),
    "audio_s_per_s": ("Throughput", "audio s/s"),
    "data_wait": ("Waiting for data", "%"),
    "memory_mib": ("Memory", "MiB"),
}
_SMOOTHED_FROM = 10  # values
_MOST_CHARTS = 200  # a task has up to 30; each takes 5 ms
_CODE = Markup("<code>{}</code>")


def page(runs: Sequence[Run]) -> str:
    """The whole HTML document of one run, or of several that share their charts."""
    environment = Environment(
        loader=PackageLoader("speechtrain.report", ""), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    filters = (_count, _date, _facts, _figure, _heading, _headline, _median, _setting, _three, _verdict)
    environment.filters |= {filter_.__name__[1:]: filter_ for filter_ in filters}
    environment.filters |= {"duration": duration, "number": number, "short": short}
    names, metric = names_of(runs), _headline(runs)
    sets = dict.fromkeys(name for run in runs for name in run.valid.get(metric, {}))
    return environment.get_template("page.html").render(
        runs=runs,
        names=names,
        charts=_charts(runs, names),
        metric=metric,
        scores={s: [run.valid.get(metric, {}).get(s, Curve()).at(run.kept) for run in runs] for s in sets},
        differences=differing(runs),
        palette=PALETTE,
        dashes=DASHES,
        align=align,
        version=__version__,
        now=time.time(),
    )


def _headline(runs: Sequence[Run]) -> str:
    """The metric that matters: the word error rate where there is one, else the loss."""
    return next((name for name in ("wer", "cer", "loss") if any(name in run.valid for run in runs)), "")


def _charts(runs: Sequence[Run], names: Sequence[str]) -> list[Chart]:
    """The charts that hold a finite value."""
    last = max(1.0, 1.012 * max(run.steps[0] or 0 for run in runs))  # room for the last dot
    marks = runs[0].numbers("step", "resume") if len(runs) == 1 else []
    charts = (replace(chart, last=last, marks=marks) for chart in _all_charts(runs, names))
    return list(islice((chart for chart in charts if chart.drawn), _MOST_CHARTS))


def _all_charts(runs: Sequence[Run], names: Sequence[str]) -> Iterable[Chart]:
    losses = _train_lines(runs, names, "loss", smooth=True) + _valid_lines(runs, names, "loss")
    yield Chart("Loss", losses, maybe_log=True)
    metrics = dict.fromkeys(name for run in runs for name in run.valid if name != "loss")
    for name in sorted(metrics, key=lambda name: (not is_error_rate(name), name != "wer")):
        rate = is_error_rate(name)
        lines = _valid_lines(runs, names, name)
        yield Chart(_heading(name), lines, "%" * rate, from_zero=rate, maybe_log=rate)
    for name, (title, unit) in _TRAIN_CHARTS.items():
        is_noisy = name == "grad_norm"
        lines = _train_lines(runs, names, name, smooth=is_noisy)
        yield Chart(title, lines, unit, from_zero=True, maybe_log=is_noisy)
    for name in dict.fromkeys(name for run in runs for name in run.train):
        if name != "loss" and name not in _TRAIN_CHARTS:
            lines = _train_lines(runs, names, name, smooth=True)
            yield Chart(f"{_heading(name)} in training", lines, "%" * is_error_rate(name))


def _train_lines(runs: Sequence[Run], names: Sequence[str], figure: str, smooth: bool) -> list[Line]:
    """A colour for each run; of one run, the raw curve below the smoothed one."""
    lines = []
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        line = Line("train" if len(runs) == 1 else name, run.train.get(figure, Curve()), index)
        if smooth and len(line.curve.x) >= _SMOOTHED_FROM:
            if len(runs) == 1:
                lines.append(replace(line, is_faint=True))
            line = replace(line, curve=smoothed(line.curve))
        lines.append(line)
    return lines


def _valid_lines(runs: Sequence[Run], names: Sequence[str], metric: str) -> list[Line]:
    """Of one run, a colour for each set; of several, the run's colour and a pattern for each set."""
    sets = list(dict.fromkeys(name for run in runs for curves in run.valid.values() for name in curves))
    found = [
        (i, name, curve) for i, run in enumerate(runs) for name, curve in run.valid.get(metric, {}).items()
    ]
    if len(runs) == 1:
        return [Line(name, curve, sets.index(name) + 1) for _, name, curve in found]
    beside_training = metric == "loss"
    return [
        Line(f"{names[i]}, {name}", curve, i, dash=sets.index(name) + beside_training)
        for i, name, curve in found
    ]


def align(reference: str, hypothesis: str) -> list[tuple[str, str, str]]:
    """Word by word: (equal, replace, delete or insert; the reference's word; the hypothesis's word).

    The alignment has the fewest errors, as the word error rate counts them.

    >>> align("the cat sat", "cat sit")
    [('delete', 'the', ''), ('equal', 'cat', 'cat'), ('replace', 'sat', 'sit')]
    """
    said, heard = reference.split(), hypothesis.split()
    pairs: list[tuple[str, str, str]] = []
    for step in Levenshtein.opcodes(said, heard):
        left, right = said[step.src_start : step.src_end], heard[step.dest_start : step.dest_end]
        pairs += [(step.tag, *words) for words in zip_longest(left, right, fillvalue="")]
    return pairs


def _verdict(pairs: Sequence[tuple[str, str, str]]) -> tuple[int, int, str]:
    """Errors, words of the reference, and the kinds of the errors."""
    counts = Counter(tag for tag, _, _ in pairs)
    detail = ", ".join(f"{counts[tag]} {name}" for tag, name in KINDS.items() if counts[tag])
    return len(pairs) - counts["equal"], len(pairs) - counts["insert"], detail or "all right"


def _facts(run: Run) -> dict[str, str]:
    """How the run was made, by name; ``Markup`` escapes what it formats."""
    about = run.about
    argv, overrides = about.argv, about.overrides or []
    commit = str(about.git.get("commit", "")) + (
        " with uncommitted changes" if about.git.get("dirty") else ""
    )
    seed = run.config.get("seed") if about.seed is None else about.seed
    metrics = ((run.result and run.result.metrics) or {}).items()
    return {
        "command": _CODE.format(f"speechtrain train {shlex.join(argv)}") if argv is not None else "",
        "overrides": "" if overrides == argv else Markup(" ").join(map(_CODE.format, overrides)),
        "seed": "" if seed is None else str(seed),
        "commit": _CODE.format(commit) if commit else "",
        "versions": ", ".join(f"{name} {version}" for name, version in about.versions.items()),
        "platform": about.platform,
        "result": Markup(", ").join(Markup("{} <b>{}</b>").format(k, _figure(v, k)) for k, v in metrics),
        "directory": _CODE.format(run.folder),
    }


def _heading(metric: str) -> str:
    return metric.upper() if is_error_rate(metric) else metric.replace("_", " ").capitalize()


def _figure(value: Any, metric: str) -> str:
    finite = number(value)
    if finite is None:
        return "not finite" if value is None else str(value)
    return f"{100 * finite:.2f} %" if is_error_rate(metric) else short(finite)


def _three(value: float) -> str:
    """Three significant digits: what a throughput is worth."""
    return short(float(f"{value:.3g}"))


def _setting(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


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
    except (OverflowError, OSError, ValueError):  # beyond what the C library can count
        return "at an unknown time"

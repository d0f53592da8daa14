"""The page: what a reader asks of a run, from its outcome down to its config. Everything is escaped."""

from __future__ import annotations

import base64
import hashlib
import shlex
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import Any

from rapidfuzz.distance import Levenshtein

from speechtrain import __version__
from speechtrain.report.assets import SCRIPT, STYLE
from speechtrain.report.chart import Chart, Line, draw, short, smoothed, swatch
from speechtrain.report.run import SKIPPED, Curve, Run, differing, listing, mapping, names_of, number
from speechtrain.tracking.console import duration, is_error_rate

_STATUS = {  # of result.json, and of a run without one: what a reader is told, and its colour
    "finished": ("finished", "good"),
    "target": ("target reached", "good"),
    "time": ("time limit reached", "good"),
    "running": ("in progress", "busy"),
    "preempted": ("preempted; the same command continues it", "warn"),
    "unfinished": ("no result yet: in progress or stopped", "warn"),
    "killed": ("stopped without a result; the same command continues it", "bad"),
    "failed": ("failed", "bad"),
}
_TRAIN_CHARTS = (  # name, title, unit, scale, from zero, logarithmic where that reads better, smoothed
    ("lr", "Learning rate", "", 1.0, True, False, False),
    ("grad_norm", "Gradient norm", "", 1.0, True, True, True),
    ("utterances_per_s", "Throughput", "utt/s", 1.0, True, False, False),
    ("audio_s_per_s", "Throughput", "audio s/s", 1.0, True, False, False),
    ("data_wait", "Waiting for data", "%", 100.0, True, False, False),
    ("memory_mib", "Memory", "MiB", 1.0, True, False, False),
)
_MOST_EXAMPLES = 30  # of one validation set
_MOST_SKIPPED = 5  # named for each reason


def page(runs: Sequence[Run]) -> str:
    """The whole HTML document of one run, or of several that share their charts."""
    names = names_of(runs)
    title = names[0] if len(runs) == 1 else f"{len(runs)} runs"
    body = _single(runs[0], names[0]) if len(runs) == 1 else _several(runs, names)
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    # nothing may be loaded, and no script but ours may run, whatever a transcript says
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)} · speechtrain</title><style>{STYLE}</style></head>"
        f"<body><main>{body}</main><footer>speechtrain {__version__}, {_date(time.time())}</footer>"
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def _single(run: Run, name: str) -> str:
    return "".join(
        [
            f"<header><h1>{escape(name)}</h1>{_status(run)}{_subtitle(run)}</header>",
            _error(run),
            _cards(run),
            _charts([run], [name]),
            _examples(run),
            _problems(run),
            _origin(run),
        ]
    )


def _several(runs: Sequence[Run], names: Sequence[str]) -> str:
    parts = [
        f"<header><h1>{len(runs)} runs compared</h1></header>",
        _comparison(runs, names),
        _charts(runs, names),
    ]
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        parts.append(
            f'<details class="run"><summary>{swatch(index)}{escape(name)} {_status(run)}'
            f"</summary>{_subtitle(run)}{_error(run)}{_cards(run)}{_examples(run)}{_problems(run)}{_origin(run)}</details>"
        )
    return "".join(parts)


# --- the outcome --------------------------------------------------------------------------------


def _status(run: Run) -> str:
    words, colour = _STATUS.get(run.status, (run.status, "warn"))
    return f'<span class="status {colour}">{escape(words)}</span>'


def _subtitle(run: Run) -> str:
    facts = []
    if run.started is not None:
        facts.append(f"started {_date(run.started)}")
    if run.status in ("running", "unfinished", "killed") and run.latest is not None:
        facts.append(f"last heard of {_date(run.latest)}")
    if run.resumed:
        facts.append("continued after step " + ", ".join(f"{step:,.0f}" for step in run.resumed[-5:]))
    return f'<p class="sub">{escape(" · ".join(facts))}</p>' if facts else ""


def _error(run: Run) -> str:
    message = run.result.get("error")
    return f'<p class="error"><b>Error</b> {escape(str(message))}</p>' if message else ""


def _cards(run: Run) -> str:
    cards = [_metric_card(name, metric, curve) for metric, name, curve in _headline(run)]
    done, planned = run.steps
    if done is not None:
        cards.append(_card("steps", f"{done:,}", f"of {planned:,}" if planned and planned != done else ""))
    if run.wall_s is not None:
        left = [v for values in run.of("train")[-1:] if (v := number(values.get("eta_s")))]
        remaining = f"{duration(left[0])} to go" if left and run.status == "running" else ""
        cards.append(_card("wall time", duration(run.wall_s), remaining))
    speed, audio = _median(run.train.get("utterances_per_s")), _median(run.train.get("audio_s_per_s"))
    if speed is not None:
        cards.append(
            _card(
                "throughput",
                f"{_three(speed)} utt/s",
                f"{_three(audio)} audio s/s" if audio else "",
            )
        )
    if run.parameters is not None:
        cards.append(_card("parameters", _count(run.parameters), f"{run.parameters:,}"))
    if run.device:
        cards.append(_card("device", run.device, str(run.about.get("host") or "")))
    return f'<section class="cards">{"".join(cards)}</section>' if cards else ""


def _headline(run: Run) -> Sequence[tuple[str, str, Curve | float]]:
    """The metric that matters, for each set: the word error rate where there is one, else the loss."""
    metric = next((name for name in ("wer", "cer", "loss") if name in run.valid), "")
    if metric:
        return [(metric, name, curve) for name, curve in run.valid[metric].items()][:6]
    value = number(run.result.get("metric"))
    return [("metric", "", value)] if value is not None else []


def _metric_card(name: str, metric: str, curve: Curve | float) -> str:
    title = f"{_title(metric)} {name}".strip()
    if not isinstance(curve, Curve):
        return _card(title, f"{curve:.4g}", "", "main")
    best = curve.best
    if curve.last is None or best is None:
        return _card(title, "not finite", "", "main")
    note = f"best {_figure(metric, best[1])} at step {best[0]:,.0f}" if best[1] < curve.last else ""
    return _card(title, _figure(metric, curve.last), note or f"at step {curve.x[-1]:,.0f}", "main")


def _card(title: str, value: str, note: str = "", kind: str = "") -> str:
    content = f"<h2>{escape(title)}</h2><p>{escape(value)}</p><small>{escape(note)}</small>"
    return f'<div class="card {kind}">{content}</div>'


def _comparison(runs: Sequence[Run], names: Sequence[str]) -> str:
    metric = next((name for name in ("wer", "cer", "loss") if any(name in run.valid for run in runs)), "")
    sets = list(dict.fromkeys(name for run in runs for name in run.valid.get(metric, {})))
    differences = differing(runs)
    columns = [f"{_title(metric)} {name}" for name in sets]
    head = ["run", *columns, "steps", "wall time", "utterances/s", "parameters", "device", *differences]
    best = {
        name: min((v for run in runs if (v := _last(run, metric, name)) is not None), default=None)
        for name in sets
    }
    rows = []
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        cells = [f'<th scope="row">{swatch(index)}{escape(name)} {_status(run)}</th>']
        for one in sets:
            value = _last(run, metric, one)
            shown = "–" if value is None else _figure(metric, value)
            is_best = value is not None and value == best[one]
            cells.append(f'<td class="num">{f"<b>{shown}</b>" if is_best else shown}</td>')
        done, wall, speed = run.steps[0], run.wall_s, _median(run.train.get("utterances_per_s"))
        facts = [
            f"{done:,}" if done is not None else "–",
            duration(wall) if wall is not None else "–",
            _three(speed) if speed is not None else "–",
            _count(run.parameters) if run.parameters is not None else "–",
        ]
        cells += [f'<td class="num">{escape(fact)}</td>' for fact in facts]
        cells.append(f"<td>{escape(run.device)}</td>")
        cells += [f"<td><code>{escape(_value(values[index]))}</code></td>" for values in differences.values()]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f"<section>{_table(head, rows, range(1, len(sets) + 5))}</section>"


# --- the charts ---------------------------------------------------------------------------------


def _charts(runs: Sequence[Run], names: Sequence[str]) -> str:
    last = 1.012 * max(run.steps[0] or 0 for run in runs)  # room for the last dot
    drawn = draw(replace(chart, span=(0, last)) for chart in _all_charts(runs, names))
    if not drawn:
        return '<section><p class="sub">No curves yet: metrics.jsonl holds no figures.</p></section>'
    return f'<section class="charts" aria-label="Charts">{drawn}</section>'


def _all_charts(runs: Sequence[Run], names: Sequence[str]) -> Iterable[Chart]:
    marks = runs[0].resumed if len(runs) == 1 else []
    losses = _train_lines(runs, names, "loss", smooth=True) + _valid_lines(runs, names, "loss")
    yield Chart("Loss", losses, maybe_log=True, marks=marks)
    metrics = list(dict.fromkeys(name for run in runs for name in run.valid if name != "loss"))
    for name in sorted(metrics, key=lambda name: (not is_error_rate(name), name != "wer")):
        rate = is_error_rate(name)
        lines = _valid_lines(runs, names, name)
        yield Chart(_title(name), lines, "%" if rate else "", 100.0 if rate else 1.0, rate, rate, marks)
    for name, title, unit, scale, from_zero, maybe_log, smooth in _TRAIN_CHARTS:
        yield Chart(title, _train_lines(runs, names, name, smooth), unit, scale, from_zero, maybe_log, marks)
    known = {"loss", *(chart[0] for chart in _TRAIN_CHARTS)}
    for name in dict.fromkeys(name for run in runs for name in run.train if name not in known):
        rate = is_error_rate(name)
        lines = _train_lines(runs, names, name, smooth=True)
        yield Chart(
            f"{_title(name)} in training", lines, "%" if rate else "", 100.0 if rate else 1.0, marks=marks
        )


def _train_lines(runs: Sequence[Run], names: Sequence[str], figure: str, smooth: bool) -> list[Line]:
    lines = []
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        curve = run.train.get(figure)
        if curve is None:
            continue
        line = Line("train" if len(runs) == 1 else name, curve, index, family="train")
        if not smooth or len(curve.x) < 10:
            lines.append(line)
            continue
        if len(runs) == 1:
            lines.append(replace(line, is_faint=True))
        lines.append(replace(line, curve=smoothed(curve)))
    return lines


def _valid_lines(runs: Sequence[Run], names: Sequence[str], metric: str) -> list[Line]:
    """Of one run, a colour for each set; of several, the run's colour and a pattern for each set."""
    lines = []
    sets = list(dict.fromkeys(name for run in runs for name in run.sets))
    beside_training = metric == "loss"
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        for one, curve in run.valid.get(metric, {}).items():
            place = sets.index(one)
            if len(runs) == 1:
                lines.append(Line(one, curve, place + 1, has_dots=True))
                continue
            label = f"{name}, {one}" if len(sets) > 1 or beside_training else name
            dash = place + beside_training
            lines.append(Line(label, curve, index, dash, has_dots=True, family=one))
    return lines


# --- transcripts --------------------------------------------------------------------------------


def align(reference: str, hypothesis: str) -> list[tuple[str, str, str]]:
    """Word by word: (equal, replace, delete or insert; the reference's word; the hypothesis's word).

    The alignment has the fewest errors, as the word error rate counts them.

    >>> align("one two", "one too three")
    [('equal', 'one', 'one'), ('replace', 'two', 'too'), ('insert', '', 'three')]
    """
    theirs, ours = reference.split(), hypothesis.split()
    pairs = []
    for step in Levenshtein.opcodes(theirs, ours):
        left, right = theirs[step.src_start : step.src_end], ours[step.dest_start : step.dest_end]
        size = max(len(left), len(right))
        left, right = left + [""] * (size - len(left)), right + [""] * (size - len(right))
        pairs += [(step.tag, a, b) for a, b in zip(left, right, strict=True)]
    return pairs


def _examples(run: Run) -> str:
    parts = [_examples_of(name, step, rows) for name, (step, rows) in run.examples.items() if rows]
    if not parts:
        return ""
    key = (
        '<p class="key"><span class="word replace"><span>was</span><span>heard as</span></span>'
        '<span class="word delete"><span>missed</span><span>·</span></span>'
        '<span class="word insert"><span>·</span><span>added</span></span></p>'
    )
    return f"<section><h2>Reference against hypothesis</h2>{key}{''.join(parts)}</section>"


def _examples_of(name: str, step: Any, rows: Sequence[Mapping[str, Any]]) -> str:
    items = []
    for row in rows[:_MOST_EXAMPLES]:
        pairs = align(str(row.get("reference", "")), str(row.get("hypothesis", "")))
        name_of_row = escape(str(row.get("id", "")))
        items.append(f"<li>{_verdict(pairs)}{_words(pairs)}<small>{name_of_row}</small></li>")
    more = f", {_MOST_EXAMPLES} of {len(rows)} shown" if len(rows) > _MOST_EXAMPLES else ""
    when = f"step {step:,}" if isinstance(step, int) else ""
    title = f"<h3>{escape(name)} <small>{escape(when + more)}</small></h3>"
    return f'{title}<ol class="examples">{"".join(items)}</ol>'


def _verdict(pairs: Sequence[tuple[str, str, str]]) -> str:
    counts = Counter(tag for tag, _, _ in pairs)
    words = sum(counts.values()) - counts["insert"]
    errors = counts["replace"] + counts["delete"] + counts["insert"]
    kinds = (("replace", "substituted"), ("delete", "deleted"), ("insert", "inserted"))
    detail = ", ".join(f"{counts[tag]} {name}" for tag, name in kinds if counts[tag])
    of = f"of {words} word{'s' * (words != 1)}"
    colour = "bad" if errors else "good"
    return f'<span class="verdict {colour}" title="{detail or "all right"}"><b>{errors}</b> {of}</span>'


def _words(pairs: Sequence[tuple[str, str, str]]) -> str:
    """Columns of two words, the reference's above; equal ones are said once."""
    parts = []
    for tag, left, right in pairs:
        if tag == "equal":
            parts.append(f'<span class="word"><span dir="auto">{escape(left)}</span></span>')
        else:
            parts.append(
                f'<span class="word {tag}"><span dir="auto">{escape(left) or "·"}</span>'
                f'<span dir="auto">{escape(right) or "·"}</span></span>'
            )
    return f'<p class="words">{"".join(parts) or "<i>empty</i>"}</p>'


# --- what went wrong, and how it was made -------------------------------------------------------


def _problems(run: Run) -> str:
    parts = []
    if run.warnings:
        items = [
            f"<li>{escape(message)}{f' <b>× {count}</b>' if count > 1 else ''}</li>"
            for message, count in run.warnings[-20:]
        ]
        more = f" <small>last 20 of {len(run.warnings)}</small>" if len(run.warnings) > 20 else ""
        parts.append(f'<section><h2>Warnings{more}</h2><ul class="warnings">{"".join(items)}</ul></section>')
    if run.skipped:
        parts.append(_skipped(run))
    return "".join(parts)


def _skipped(run: Run) -> str:
    reasons: dict[str, list[dict[str, Any]]] = {}
    for row in run.skipped:
        reasons.setdefault(str(row.get("reason", "")), []).append(row)
    body = []
    for reason, rows in sorted(reasons.items(), key=lambda item: -len(item[1])):
        shown = [
            f"<code>{escape(str(row.get('id', '')))}</code> {escape(str(row.get('detail', '')))}"
            for row in rows
        ]
        more = [f"and {len(rows) - _MOST_SKIPPED:,} more in {SKIPPED}"] if len(rows) > _MOST_SKIPPED else []
        lines = "<br>".join([*shown[:_MOST_SKIPPED], *more])
        count = f'<td class="num">{len(rows):,}</td>'
        body.append(f'<tr><th scope="row">{escape(reason)}</th>{count}<td>{lines}</td></tr>')
    title = f"<h2>Skipped recordings <small>{len(run.skipped):,} in all</small></h2>"
    return f"<section>{title}{_table(('reason', 'recordings', 'which'), body, range(1, 2))}</section>"


def _origin(run: Run) -> str:
    about = run.about
    argv = [str(word) for word in listing(about.get("argv"))]
    overrides = [str(word) for word in listing(about.get("overrides"))]
    command = shlex.join(["speechtrain-train", *argv])
    git = mapping(about.get("git"))
    commit = str(git.get("commit", "")) + (" with uncommitted changes" if git.get("dirty") else "")
    seed = about.get("seed", run.config.get("seed"))
    facts = {
        "command": f"<code>{escape(command)}</code>" if about else "",
        "overrides": "" if overrides == argv else " ".join(f"<code>{escape(o)}</code>" for o in overrides),
        "seed": escape("" if seed is None else str(seed)),
        "commit": f"<code>{escape(commit)}</code>" if commit else "",
        "versions": escape(
            ", ".join(f"{name} {version}" for name, version in mapping(about.get("versions")).items())
        ),
        "platform": escape(str(about.get("platform") or "")),
        "result": _result(run),
        "directory": f"<code>{escape(str(run.folder))}</code>",
    }
    rows = "".join(
        f'<tr><th scope="row">{name}</th><td>{fact}</td></tr>' for name, fact in facts.items() if fact
    )
    config = (
        f"<details><summary>Config</summary><pre>{escape(run.config_text)}</pre></details>"
        if run.config_text.strip()
        else ""
    )
    return f'<section><h2>How it was made</h2><table class="facts">{rows}</table>{config}</section>'


def _result(run: Run) -> str:
    metrics = run.result.get("metrics")
    if not isinstance(metrics, dict):
        return ""
    return ", ".join(
        f"{escape(str(name))} <b>{_figure(str(name), value)}</b>" for name, value in metrics.items()
    )


# --- words and numbers --------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Sequence[str], numeric: range) -> str:
    cells = ((' class="num"' if place in numeric else "", escape(text)) for place, text in enumerate(head))
    header = "".join(f'<th scope="col"{style}>{text}</th>' for style, text in cells)
    body = f"<thead><tr>{header}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f'<div class="scroll"><table>{body}</table></div>'


def _title(metric: str) -> str:
    return metric.upper() if is_error_rate(metric) else metric.replace("_", " ").capitalize()


def _figure(metric: str, value: Any) -> str:
    finite = number(value)
    if finite is None:
        return escape("not finite" if value is None else str(value))
    return f"{100 * finite:.2f} %" if is_error_rate(metric) else short(finite)


def _three(value: float) -> str:
    """Three significant digits: what a throughput is worth."""
    return short(float(f"{value:.3g}"))


def _value(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _count(value: int) -> str:
    return (
        f"{value / 1e6:.1f} M"
        if value >= 1_000_000
        else f"{value:,}"
        if value < 10_000
        else f"{value / 1e3:.0f} k"
    )


def _median(curve: Curve | None) -> float | None:
    values = [y for y in curve.y if y is not None] if curve else []
    return statistics.median(values) if values else None


def _last(run: Run, metric: str, name: str) -> float | None:
    curve = run.valid.get(metric, {}).get(name)
    return curve.last if curve else None


def _date(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
    except (OverflowError, OSError, ValueError):  # beyond what the C library can count
        return "at an unknown time"

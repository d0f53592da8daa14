"""Line charts as inline SVG that stretches to its box, with labels as HTML so that they keep their size."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from speechtrain.report.run import Curve

_SIZE = 1000  # of the drawing's square; CSS stretches it
_MOST_POINTS = 400  # of one line: more than a chart has pixels to show
_LOG_FROM = 20.0  # ratio of the largest to the smallest value from which a logarithmic axis reads better
_MOST_NAMED = 9  # lines in a legend
COLOURS = 8
DASHES = 4


@dataclass(frozen=True)
class Line:
    """One curve of a chart; ``colour`` and ``dash`` count through the page's palette and patterns.

    Lines of one ``family`` share the meaning of their pattern, for charts with too many lines to name.
    """

    label: str
    curve: Curve
    colour: int = 0
    dash: int = 0
    is_faint: bool = False
    has_dots: bool = False
    family: str = ""


@dataclass(frozen=True)
class Chart:
    """Lines that share their axes; ``unit`` follows each value, which is first multiplied by ``scale``."""

    title: str
    lines: Sequence[Line]
    unit: str = ""
    scale: float = 1.0
    from_zero: bool = False
    maybe_log: bool = False
    marks: Sequence[float] = field(default_factory=list)  # steps to mark by a vertical line
    span: tuple[float, float] | None = None  # of the steps, so that charts side by side line up


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    is_log: bool = False

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high end."""
        if self.is_log:
            value = max(value, self.low * 1e-3)
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        return _log_ticks(self.low, self.high) if self.is_log else _ticks(self.low, self.high)


def draw(charts: Iterable[Chart]) -> str:
    """The charts as ``<figure>`` elements in full rows; those without a finite value are left out."""
    shown = [chart for chart in charts if any(line.curve.last is not None for line in chart.lines)]
    return "".join(_figure(chart, width) for chart, width in zip(shown, _widths(len(shown)), strict=True))


def _widths(count: int) -> list[int]:
    """Twelfths of the page for each chart, the first ones the widest."""
    if count <= 4:
        return [4] * 3 if count == 3 else [6] * count
    halves, quarters = 2, (0, 4, 8)[(count - 2) % 3]
    if halves + quarters > count:
        halves, quarters = 4, 0
    return [6] * halves + [4] * (count - halves - quarters) + [3] * quarters


def _figure(chart: Chart, width: int) -> str:
    lines = [_prepared(line, chart.scale) for line in chart.lines if line.curve.last is not None]
    x, y = _x_axis(lines, chart), _y_axis(lines, chart)
    notes = [note for note in (chart.unit, "log" if y.is_log else "", _not_drawn(chart)) if note]
    title = f"<h3>{html.escape(chart.title)} <small>{html.escape(', '.join(notes))}</small></h3>"
    y_labels = "".join(
        f'<span style="bottom:{100 * y.place(tick):.2f}%">{html.escape(short(tick))}</span>'
        for tick in y.ticks()
    )
    x_labels = "".join(
        f'<span style="left:{100 * x.place(tick):.2f}%">{html.escape(short(tick))}</span>'
        for tick in x.ticks()
    )
    return (
        f'<figure class="chart w{width}"><figcaption>{title}{_legend(lines, chart)}</figcaption>'
        f'<div class="frame"><div class="ys" aria-hidden="true">{y_labels}</div>'
        f'<div class="area" tabindex="0">{_drawing(lines, x, y, chart)}</div>'
        f'<div class="step" aria-hidden="true">step</div><div class="xs" aria-hidden="true">{x_labels}</div>'
        f"</div>{_data(lines, x, y, chart)}</figure>"
    )


def smoothed(curve: Curve) -> Curve:
    """An exponential average over about a fiftieth of the curve, unbiased at its beginning."""
    decay = 1 - 1 / max(1.0, len(curve.x) / 50)
    total = weight = 0.0
    result = Curve()
    for x, y in zip(curve.x, curve.y, strict=True):
        if y is not None:
            total, weight = decay * total + (1 - decay) * y, decay * weight + (1 - decay)
        result.append(x, total / weight if weight else None)
    return result


def thinned(curve: Curve, limit: int = _MOST_POINTS) -> Curve:
    """At most about ``limit`` points: each bucket's lowest and highest, so that no peak is lost."""
    if len(curve.x) <= limit:
        return curve
    size = math.ceil(2 * len(curve.x) / limit)
    result = Curve()
    for begin in range(0, len(curve.x), size):
        bucket = range(begin, min(begin + size, len(curve.x)))
        finite = [i for i in bucket if curve.y[i] is not None]
        ends = (
            {min(finite, key=lambda i: curve.y[i] or 0.0), max(finite, key=lambda i: curve.y[i] or 0.0)}
            if finite
            else {begin}
        )
        # the run's newest point is always shown
        for i in sorted(ends | ({bucket[-1]} if bucket[-1] == len(curve.x) - 1 else set())):
            result.append(curve.x[i], curve.y[i])
    return result


def short(value: float) -> str:
    """A number for an axis or a legend: ``1.2k``, ``3.4M``, ``0.05``, ``2e-05``."""
    size = abs(value)
    if size >= 10_000:
        for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if size >= factor:
                return f"{value / factor:.4g}{letter}"
    if 0 < size < 1e-4:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:.4g}"


def swatch(colour: int, dash: int = 0) -> str:
    """A short sample of a line."""
    style = _style(colour, dash)
    return f'<svg class="swatch {style}" viewBox="0 0 20 8" aria-hidden="true"><path d="M0 4H20"/></svg>'


def _style(colour: int, dash: int, is_faint: bool = False) -> str:
    # when the palette has been gone through, it comes again in pale
    turn = " pale" if colour // COLOURS % 2 else ""
    return f"c{colour % COLOURS} d{dash % DASHES}{turn}{' faint' if is_faint else ''}"


def _prepared(line: Line, scale: float) -> Line:
    curve = thinned(line.curve)
    return replace(line, curve=Curve(curve.x, [None if y is None else y * scale for y in curve.y]))


def _x_axis(lines: Sequence[Line], chart: Chart) -> _Axis:
    low, high = chart.span or (
        min(line.curve.x[0] for line in lines),
        max(line.curve.x[-1] for line in lines),
    )
    return _Axis(low, high) if high > low else _Axis(low - 1, high + 1)


def _y_axis(lines: Sequence[Line], chart: Chart) -> _Axis:
    values: list[float] = []
    for line in lines:
        finite = sorted(y for y in line.curve.y if y is not None)
        cut = len(finite) // 50 if line.is_faint else 0  # a raw curve's rare peaks must not flatten the rest
        values += finite[cut : len(finite) - cut]
    low, high = min(values), max(values)
    if chart.maybe_log and low > 0 and high / low >= _LOG_FROM:
        low = max(low, high * 1e-30)  # further down no axis can be read, and its arithmetic ends
        margin = (high / low) ** 0.04
        return _Axis(low / margin, high * margin, is_log=True)
    if chart.from_zero and low >= 0:
        return _Axis(0.0, high * 1.06 or 1.0)
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return _Axis(low - margin, high + margin)


def _ticks(low: float, high: float, about: int = 5) -> list[float]:
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    decades = math.log10(high / low)
    multiples = (1, 2, 5) if decades < 2.5 else (1,)
    stride = max(1, round(decades / 6))
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1, stride)
    ticks = [m * 10.0**p for p in powers for m in multiples]
    return [tick for tick in ticks if low <= tick <= high]


def _drawing(lines: Sequence[Line], x: _Axis, y: _Axis, chart: Chart) -> str:
    grid = "".join(f"M0 {_down(y, tick)}H{_SIZE}" for tick in y.ticks())
    marks = "".join(f"M{_SIZE * x.place(s):.1f} 0V{_SIZE}" for s in chart.marks if x.low < s < x.high)
    paths = []
    for line in sorted(lines, key=lambda line: not line.is_faint):
        style = _style(line.colour, line.dash, line.is_faint)
        paths.append(f'<path class="line {style}" d="{_path(line.curve, x, y)}"/>')
        if line.has_dots or len(line.curve.x) == 1:
            paths.append(f'<path class="dots {style}" d="{_dots(line.curve, x, y)}"/>')
    label = f"{chart.title} against the step: " + "; ".join(
        _summary(line, chart.unit) for line in lines if not line.is_faint
    )
    box = f'viewBox="0 0 {_SIZE} {_SIZE}" preserveAspectRatio="none"'
    return (
        f'<svg {box} role="img" aria-label="{html.escape(label)}">'
        f'<path class="grid" d="{grid}"/><path class="mark" d="{marks}"/>{"".join(paths)}</svg>'
    )


def _path(curve: Curve, x: _Axis, y: _Axis) -> str:
    parts, command = [], "M"
    for at, value in zip(curve.x, curve.y, strict=True):
        if value is None:
            command = "M"
        else:
            parts.append(f"{command}{_SIZE * x.place(at):.1f} {_down(y, value)}")
            command = "L"
    return "".join(parts)


def _dots(curve: Curve, x: _Axis, y: _Axis) -> str:
    # a line of no length with round ends is a circle, however the drawing is stretched
    points = [(at, value) for at, value in zip(curve.x, curve.y, strict=True) if value is not None]
    return "".join(f"M{_SIZE * x.place(at):.1f} {_down(y, value)}h.01" for at, value in points)


def _down(y: _Axis, value: float) -> str:
    # far outside is cut off by the frame; the bound keeps the numbers small
    return f"{_SIZE * (1 - min(max(y.place(value), -1.0), 2.0)):.1f}"


def _summary(line: Line, unit: str) -> str:
    values = [value for value in line.curve.y if value is not None]
    first, last, lowest = short(values[0]), short(values[-1]), short(min(values))
    return f"{line.label} from {first} to {last}{_spaced(unit)}, lowest {lowest}"


def _legend(lines: Sequence[Line], chart: Chart) -> str:
    """Each line's sample, name and last value; a line that is alone needs no sample.

    Of very many lines only the patterns are named: the colours are those of the page's table.
    """
    shown = [line for line in lines if not line.is_faint]
    items = []
    for line in shown:
        last = line.curve.last or 0.0
        value = f"{last:.2f} %" if chart.unit == "%" else short(float(f"{last:.3g}"))
        name = f"{swatch(line.colour, line.dash)}{html.escape(line.label)}" if len(shown) > 1 else "last"
        items.append(f"<li>{name} <b>{html.escape(value)}</b></li>")
    if len(shown) > _MOST_NAMED:
        families = {line.family: line.dash for line in reversed(shown) if line.family}
        patterns = reversed(families.items()) if len(families) > 1 else ()
        items = [f"<li>{swatch(6, dash)}{html.escape(family)}</li>" for family, dash in patterns]
    return f'<ul class="legend">{"".join(items)}</ul>'


def _spaced(unit: str) -> str:
    return f" {unit}" if unit else ""


def _not_drawn(chart: Chart) -> str:
    missing = sum(
        y is None for line in chart.lines if not line.has_dots and line.is_faint for y in line.curve.y
    )
    return f"{missing} value{'s' * (missing > 1)} not finite" if missing else ""


def _data(lines: Sequence[Line], x: _Axis, y: _Axis, chart: Chart) -> str:
    """The values for the pointer's read-out; ``<`` is escaped, or a label could end the element."""
    content = {
        "x": [x.low, x.high],
        "y": [y.low, y.high, y.is_log],
        "unit": chart.unit,
        "lines": [
            {
                "label": line.label + (" (raw)" if line.is_faint else ""),
                "style": _style(line.colour, line.dash, line.is_faint),
                "x": [round(at) if at == round(at) else at for at in line.curve.x],
                "y": [None if value is None else float(f"{value:.4g}") for value in line.curve.y],
            }
            for line in lines
        ],
    }
    text = json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json">{text}</script>'

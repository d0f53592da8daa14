"""Draws line charts as inline SVG. A drawing has no text of a run: titles and labels are in the page."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from speechtrain.report.run import Curve

PALETTE = ("#1d5fc4", "#c2470a", "#0a7a5c", "#8a3ea6", "#8a6a00", "#c0266d", "#4d5966", "#0b7285")
DASHES: tuple[tuple[int, ...], ...] = ((), (7, 4), (2, 4), (9, 3, 2, 3))

_INCHES = (440 / 72, 260 / 72)  # A unit of the SVG is 1/72 of an inch. CSS scales the drawing to its box.
_GREY = "#5a6675"
_STYLE: dict[str, Any] = {
    "font.size": 15,
    "svg.fonttype": "none",
    "svg.hashsalt": "speechtrain",  # The same run gives the same bytes.
    "path.simplify_threshold": 0.5,  # Peaks stay. A curve of 10,000 points takes 55 kB.
    "lines.scale_dashes": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#dde2e8",
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _GREY),
}
# The head of the file, names without a reference, the font (the page has one), and digits without effect.
_SUPERFLUOUS = re.compile(
    r"^.*?(?=<svg)|<metadata>.*?</metadata>|<defs>\s*<style.*?</defs>|(?<=<g) id=\"[^\"]*\""
    r"|font-family: [^;]*; |(?<=\.\d\d)\d+(?=[\s\"])",
    re.DOTALL,
)
_STEPS = (1, 2, 5, 10)  # The ticks of an axis are multiples of these.
_LOG_FROM = 20.0  # From this ratio of the largest to the smallest value on, an axis may be logarithmic.
_MOST_DOTS = 30  # The points of a line are marked if the line has at most this many.
_FARTHEST = 1e100  # Values beyond this are drawn at it, because the arithmetic of an axis overflows.


@dataclass(frozen=True)
class Line:
    """One curve of a chart. ``colour`` and ``dash`` count through ``PALETTE`` and ``DASHES``.

    A faint line is a raw curve below its smoothed one. The legend does not name it.
    """

    label: str
    curve: Curve
    colour: int = 0
    dash: int = 0
    is_faint: bool = False


@dataclass(frozen=True)
class LegendEntry:
    """A line, and the first, last and lowest of its finite values."""

    line: Line
    first_value: float
    last_value: float
    lowest_value: float


@dataclass(frozen=True)
class Chart:
    """Lines that share their axes. Their values are in ``unit``, but fractions are shown in percent."""

    title: str
    lines: Sequence[Line]
    unit: str = ""
    from_zero: bool = False
    maybe_log: bool = False
    marks: Sequence[float] = ()  # the steps that a vertical line marks
    last_step: float = 1.0  # the end of the x axis, so that charts side by side line up

    @cached_property
    def drawable(self) -> list[tuple[Line, np.ndarray]]:
        """The lines with a finite value, each with its values in the chart's unit. A missing value is NaN."""
        scale = 100.0 if self.unit == "%" else 1.0
        lines = [(line, scale * _array(line.curve.y)) for line in self.lines]
        return [(line, values) for line, values in lines if np.isfinite(values).any()]

    @property
    def legend(self) -> list[LegendEntry]:
        """The entries of all lines that are not faint."""
        entries = []
        for line, values in self.drawable:
            if not line.is_faint:
                finite = values[np.isfinite(values)]
                entries.append(LegendEntry(line, finite[0], finite[-1], finite.min()))
        return entries

    @property
    def notes(self) -> str:
        """The text after the title: the unit, the kind of axis, and the number of missing raw values."""
        notes = [self.unit, "log"] if self._is_log else [self.unit]
        missing = sum(line.curve.y.count(None) for line in self.lines if line.is_faint)
        if missing:
            noun = "value" if missing == 1 else "values"
            notes.append(f"{missing} {noun} not finite")
        return ", ".join(filter(None, notes))

    @property
    def svg(self) -> str:
        text = io.StringIO()
        with matplotlib.style.context(["default", _STYLE]):
            figure = Figure(_INCHES, layout="constrained")
            self._draw(figure.add_subplot())
            nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
            figure.savefig(text, format="svg", transparent=True, metadata=nothing)
        return _SUPERFLUOUS.sub("", text.getvalue())

    def _draw(self, axes: Axes) -> None:
        """Draw the lines, the faint ones first, then the marks and the axes."""
        for line, values in sorted(self.drawable, key=lambda pair: not pair[0].is_faint):
            _draw_line(axes, line, values)
        for step in self.marks:
            axes.axvline(step, color=_GREY, linewidth=1, dashes=(2, 4))
        axes.set(xlabel="step", xlim=(0, min(self.last_step, _FARTHEST)))
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=_STEPS, integer=True))
        axes.xaxis.set_major_formatter(lambda value, _: short(value))
        self._set_y_axis(axes)

    def _set_y_axis(self, axes: Axes) -> None:
        low, high = self._limits
        if self._is_log:
            low = max(low, high * 1e-30)  # An axis with a larger range cannot be read.
            margin = (high / low) ** 0.04
            ticks = (1, 2, 5) if high / low < 300 else (1,)
            axes.set(yscale="log", ylim=(low / margin, high * margin))
            axes.yaxis.set_major_locator(LogLocator(subs=ticks))
            axes.yaxis.set_minor_locator(LogLocator(subs=()))
        else:
            at_zero = self.from_zero and low >= 0
            if at_zero:
                low = 0.0
            margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
            bottom = low if at_zero else low - margin
            axes.set_ylim(bottom, high + margin)
            axes.yaxis.set_major_locator(MaxNLocator(5, steps=_STEPS))
        axes.yaxis.set_major_formatter(lambda value, _: short(value))

    @cached_property
    def _limits(self) -> tuple[float, float]:
        """The lowest and the highest value to show. The rare peaks of a raw curve do not count."""
        limits = []
        for line, values in self.drawable:
            percentiles = (2, 98) if line.is_faint else (0, 100)
            limits.append(np.nanpercentile(values, percentiles))
        return float(np.min(limits)), float(np.max(limits))

    @property
    def _is_log(self) -> bool:
        low, high = self._limits
        return self.maybe_log and low > 0 and high / low >= _LOG_FROM


def _draw_line(axes: Axes, line: Line, values: np.ndarray) -> None:
    alpha, width = 1.0, 2.0
    marker = "o" if len(values) <= _MOST_DOTS else ""
    if line.colour // len(PALETTE) % 2:  # The second round through the palette is pale.
        alpha = 0.55
    if line.is_faint:
        alpha, width, marker = 0.3, 1.2, ""
    axes.plot(
        _array(line.curve.x),
        values,
        color=PALETTE[line.colour % len(PALETTE)],
        linestyle=(0, DASHES[line.dash % len(DASHES)]),
        alpha=alpha,
        linewidth=width,
        marker=marker,
    )


def smoothed(curve: Curve) -> Curve:
    """Return an exponential average over about a fiftieth of the curve. It is unbiased at the beginning."""
    decay = 1 - 1 / max(1.0, len(curve.x) / 50)
    total = weight = 0.0
    average = Curve()
    for x, y in zip(curve.x, curve.y, strict=True):
        if y is not None:
            total = decay * total + (1 - decay) * y
            weight = decay * weight + (1 - decay)
        mean = total / weight if weight else None
        average.append(x, mean)
    return average


def short(value: float) -> str:
    """Return a number for an axis or a legend: ``1.2k``, ``3.4M``, ``0.05``, ``2e-5``."""
    size = abs(value)
    if size >= 10_000:
        for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if size >= factor:
                return f"{value / factor:.4g}{letter}"
    if 0 < size < 1e-4:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:.4g}"


def _array(values: Sequence[float | None]) -> np.ndarray:
    return np.clip(np.array(values, dtype=np.float64), -_FARTHEST, _FARTHEST)

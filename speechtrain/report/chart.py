"""Line charts as inline SVG. A drawing has no text of a run: the page has its titles and labels."""

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
    "svg.hashsalt": "speechtrain",  # the same run gives the same bytes
    "path.simplify_threshold": 0.5,  # a curve of 10,000 points takes 55 kB, and its peaks remain
    "lines.scale_dashes": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#dde2e8",
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _GREY),
}
_SUPERFLUOUS = re.compile(  # the head, names without a reference, the font of the page, invisible digits
    r"^.*?(?=<svg)|<metadata>.*?</metadata>|<defs>\s*<style.*?</defs>|(?<=<g) id=\"[^\"]*\""
    r"|font-family: [^;]*; |(?<=\.\d\d)\d+(?=[\s\"])",
    re.DOTALL,
)
_TICK_STEPS = (1, 2, 5, 10)
_MIN_LOG_RATIO = 20.0  # the ratio of the largest to the smallest value that makes an axis logarithmic
_MAX_DOTS = 30  # the most points of a line whose points are marked
_LARGEST = 1e100  # the largest value in a drawing, since the arithmetic of an axis overflows beyond


@dataclass(frozen=True)
class Line:
    """One curve of a chart. ``colour`` and ``dash`` are numbers in ``PALETTE`` and ``DASHES``, which repeat.

    A faint line is a curve behind its smoothed curve. It is not in the legend.
    """

    label: str
    curve: Curve
    colour: int = 0
    dash: int = 0
    is_faint: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines that share their axes, with values in ``unit``. If it is ``%``, the lines have fractions."""

    title: str
    lines: Sequence[Line]
    unit: str = ""
    from_zero: bool = False
    maybe_log: bool = False
    marks: Sequence[float] = ()  # steps with a vertical line
    last_step: float = 1.0  # the end of the axis, which is the same for all charts of a page

    @cached_property
    def visible(self) -> list[tuple[Line, np.ndarray]]:
        """The lines with a finite value, each with its values in the chart's unit. NaN is a missing value."""
        scale = 100.0 if self.unit == "%" else 1.0
        values = [(line, scale * _array(line.curve.y)) for line in self.lines]
        return [(line, y) for line, y in values if np.isfinite(y).any()]

    @property
    def legend(self) -> list[tuple[Line, float, float, float]]:
        """The lines that are not faint, each with its first, last and lowest value."""
        finite = [(line, y[np.isfinite(y)]) for line, y in self.visible if not line.is_faint]
        return [(line, y[0], y[-1], y.min()) for line, y in finite]

    @property
    def notes(self) -> str:
        """The words after the title: unit, type of axis, and the number of values that are missing."""
        notes = [self.unit] if self.unit else []
        if self._is_log:
            notes.append("log")
        missing = sum(line.curve.y.count(None) for line in self.lines if line.is_faint)
        if missing:
            noun = "value" if missing == 1 else "values"
            notes.append(f"{missing} {noun} not finite")
        return ", ".join(notes)

    @property
    def svg(self) -> str:
        text = io.StringIO()
        with matplotlib.style.context(["default", _STYLE]):
            figure = Figure(_INCHES, layout="constrained")
            self._draw(figure.add_subplot())
            no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
            figure.savefig(text, format="svg", transparent=True, metadata=no_metadata)
        return _SUPERFLUOUS.sub("", text.getvalue())

    def _draw(self, axes: Axes) -> None:
        for line, y in sorted(self.visible, key=lambda pair: not pair[0].is_faint):
            _draw_line(axes, line, y)
        for step in self.marks:
            axes.axvline(step, color=_GREY, linewidth=1, dashes=(2, 4))
        axes.set(xlabel="step", xlim=(0, min(self.last_step, _LARGEST)))
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=_TICK_STEPS, integer=True))
        axes.xaxis.set_major_formatter(lambda value, _: short_number(value))
        if self._is_log:
            self._set_log_axis(axes)
        else:
            self._set_linear_axis(axes)
        axes.yaxis.set_major_formatter(lambda value, _: short_number(value))

    def _set_log_axis(self, axes: Axes) -> None:
        low, high = self._limits
        low = max(low, high * 1e-30)  # A reader cannot use an axis over a larger range.
        margin = (high / low) ** 0.04
        axes.set(yscale="log", ylim=(low / margin, high * margin))
        subs = (1, 2, 5) if high / low < 300 else (1,)
        axes.yaxis.set_major_locator(LogLocator(subs=subs))
        axes.yaxis.set_minor_locator(LogLocator(subs=()))

    def _set_linear_axis(self, axes: Axes) -> None:
        low, high = self._limits
        begins_at_zero = self.from_zero and low >= 0
        span = high if begins_at_zero else high - low
        margin = 0.06 * span or 0.1 * abs(high) or 1.0
        bottom = 0 if begins_at_zero else low - margin
        axes.set_ylim(bottom, high + margin)
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=_TICK_STEPS))

    @cached_property
    def _limits(self) -> tuple[float, float]:
        """The lowest and the highest value to show. Rare peaks of a faint line are cut off."""
        limits = []
        for line, y in self.visible:
            percentiles = (2, 98) if line.is_faint else (0, 100)
            limits.append(np.nanpercentile(y, percentiles))
        return float(np.min(limits)), float(np.max(limits))

    @property
    def _is_log(self) -> bool:
        low, high = self._limits
        return self.maybe_log and low > 0 and high / low >= _MIN_LOG_RATIO


def _draw_line(axes: Axes, line: Line, y: np.ndarray) -> None:
    width, marker, alpha = 2.0, "", 1.0
    if line.is_faint:
        width, alpha = 1.2, 0.3
    else:
        if len(y) <= _MAX_DOTS:
            marker = "o"
        if line.colour // len(PALETTE) % 2:
            alpha = 0.55  # The palette is repeated in pale colours.
    axes.plot(
        _array(line.curve.x),
        y,
        color=PALETTE[line.colour % len(PALETTE)],
        linestyle=(0, DASHES[line.dash % len(DASHES)]),
        alpha=alpha,
        linewidth=width,
        marker=marker,
    )


def smooth_curve(curve: Curve) -> Curve:
    """Return an exponential average over about a fiftieth of the curve, unbiased at its beginning."""
    decay = 1 - 1 / max(1.0, len(curve.x) / 50)
    total = weight = 0.0
    average = Curve()
    for x, y in zip(curve.x, curve.y, strict=True):
        if y is not None:
            total = decay * total + (1 - decay) * y
            weight = decay * weight + (1 - decay)
        average.append(x, total / weight if weight else None)
    return average


def short_number(value: float) -> str:
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
    return np.clip(np.array(values, dtype=np.float64), -_LARGEST, _LARGEST)

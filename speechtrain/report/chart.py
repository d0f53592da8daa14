"""Line charts as inline SVG. Titles and labels are in the page, so a drawing contains no text of a run."""

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

_INCHES = (440 / 72, 260 / 72)  # width and height. A unit of the SVG is 1/72 inch, and CSS scales it.
_GREY = "#5a6675"
_STYLE: dict[str, Any] = {
    "font.size": 15,
    "svg.fonttype": "none",
    "svg.hashsalt": "speechtrain",  # With a fixed salt, equal runs give equal bytes.
    "path.simplify_threshold": 0.5,  # A curve of 10,000 points then has 55 kB, and its peaks remain.
    "lines.scale_dashes": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#dde2e8",
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _GREY),
}
# The parts of an SVG that a page does not need: the text before <svg>, metadata, styles, unused ids, the
# font, and decimals after the second one.
_NEEDLESS_PARTS = re.compile(
    r"^.*?(?=<svg)|<metadata>.*?</metadata>|<defs>\s*<style.*?</defs>|(?<=<g) id=\"[^\"]*\""
    r"|font-family: [^;]*; |(?<=\.\d\d)\d+(?=[\s\"])",
    re.DOTALL,
)
_TICK_STEPS = (1, 2, 5, 10)
_MIN_LOG_RATIO = 20.0  # An axis is logarithmic from this ratio of the largest to the smallest value on.
_MAX_DOTS = 30  # the most points of a line on which each point has a dot
_LARGEST = 1e100  # Larger values are clipped, because the arithmetic of an axis would overflow.


@dataclass(frozen=True)
class Line:
    """One curve of a chart.

    ``colour`` and ``dash`` are positions in ``PALETTE`` and ``DASHES``, modulo their lengths. A faint line is
    the unsmoothed curve behind a smoothed one. It is not in the legend.
    """

    label: str
    curve: Curve
    colour: int = 0
    dash: int = 0
    is_faint: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines with common axes. If ``unit`` is ``%``, the values of the lines are fractions."""

    title: str
    lines: Sequence[Line]
    unit: str = ""
    from_zero: bool = False  # whether the axis begins at 0, unless a value is negative
    maybe_log: bool = False  # whether the axis is logarithmic for a large ratio of values
    marks: Sequence[float] = ()  # steps with a vertical line
    last_step: float = 1.0  # the end of the axis, which is the same for all charts of a page

    @cached_property
    def visible(self) -> list[tuple[Line, np.ndarray]]:
        """The lines with a finite value, each with its values (N,) in the chart's unit.

        NaN is a value that was not finite.
        """
        scale = 100.0 if self.unit == "%" else 1.0
        visible = []
        for line in self.lines:
            y = scale * _array(line.curve.y)
            if np.isfinite(y).any():
                visible.append((line, y))
        return visible

    @property
    def legend(self) -> list[tuple[Line, float, float, float]]:
        """The lines that are not faint, each with its first, last and lowest value."""
        entries = []
        for line, y in self.visible:
            if not line.is_faint:
                finite_y = y[np.isfinite(y)]
                entries.append((line, finite_y[0], finite_y[-1], finite_y.min()))
        return entries

    @property
    def notes(self) -> str:
        """The text after the title: unit, type of axis, and the number of values that were not finite."""
        notes = [self.unit] if self.unit else []
        if self._is_log:
            notes.append("log")
        # A smoothed curve hides these values, and a faint line is behind each smoothed curve.
        not_finite = sum(line.curve.y.count(None) for line in self.lines if line.is_faint)
        if not_finite:
            noun = "value" if not_finite == 1 else "values"
            notes.append(f"{not_finite} {noun} not finite")
        return ", ".join(notes)

    @property
    def svg(self) -> str:
        """The drawing, without title and legend."""
        text = io.StringIO()
        with matplotlib.style.context(["default", _STYLE]):
            figure = Figure(_INCHES, layout="constrained")
            axes = figure.add_subplot()
            # Faint lines are drawn first, behind the others.
            for line, y in sorted(self.visible, key=lambda visible_line: not visible_line[0].is_faint):
                _draw_line(axes, line, y)
            for step in self.marks:
                axes.axvline(step, color=_GREY, linewidth=1, dashes=(2, 4))
            axes.set(xlabel="step", xlim=(0, min(self.last_step, _LARGEST)))
            axes.xaxis.set_major_locator(MaxNLocator(5, steps=_TICK_STEPS, integer=True))
            axes.xaxis.set_major_formatter(lambda value, _: short_number(value))
            low, high = self._limits
            if self._is_log:
                low = max(low, high * 1e-30)  # An axis over a larger range would show nothing.
                margin_factor = (high / low) ** 0.04
                axes.set(yscale="log", ylim=(low / margin_factor, high * margin_factor))
                ticks_in_decade = (1, 2, 5) if high / low < 300 else (1,)
                axes.yaxis.set_major_locator(LogLocator(subs=ticks_in_decade))
                axes.yaxis.set_minor_locator(LogLocator(subs=()))
            else:
                begins_at_zero = self.from_zero and low >= 0
                span = high if begins_at_zero else high - low
                # A constant curve has no span, and 0 has no height.
                margin = 0.06 * span or 0.1 * abs(high) or 1.0
                bottom = 0 if begins_at_zero else low - margin
                axes.set_ylim(bottom, high + margin)
                axes.yaxis.set_major_locator(MaxNLocator(5, steps=_TICK_STEPS))
            axes.yaxis.set_major_formatter(lambda value, _: short_number(value))
            no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
            figure.savefig(text, format="svg", transparent=True, metadata=no_metadata)
        return _NEEDLESS_PARTS.sub("", text.getvalue())

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
    """Return an exponential moving average over about a fiftieth of the curve, with bias correction.

    Values that are not finite do not change the average.
    """
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
    magnitude = abs(value)
    if magnitude >= 10_000:
        for factor, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
            if magnitude >= factor:
                return f"{value / factor:.4g}{letter}"
    if 0 < magnitude < 1e-4:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:.4g}"


def _array(values: Sequence[float | None]) -> np.ndarray:
    """Return values (N,) as float64, with NaN for None, and clipped to a range that an axis can show."""
    return np.clip(np.array(values, dtype=np.float64), -_LARGEST, _LARGEST)

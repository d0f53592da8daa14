"""Line charts as inline SVG. Titles and labels stay with the page: no text of a run enters a drawing."""

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

_INCHES = (440 / 72, 260 / 72)  # a unit of the SVG is 1/72 of an inch; CSS scales the drawing to its box
_GREY = "#5a6675"
_STYLE: dict[str, Any] = {
    "font.size": 15,
    "svg.fonttype": "none",
    "svg.hashsalt": "speechtrain",  # the same run gives the same bytes
    "path.simplify_threshold": 0.5,  # peaks stay; a curve of 10,000 points takes 55 kB
    "lines.scale_dashes": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#dde2e8",
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _GREY),
}
_SUPERFLUOUS = re.compile(  # the head, names that nothing refers to, the page's own font, invisible digits
    r"^.*?(?=<svg)|<metadata>.*?</metadata>|<defs>\s*<style.*?</defs>|(?<=<g) id=\"[^\"]*\""
    r"|font-family: [^;]*; |(?<=\.\d\d)\d+(?=[\s\"])",
    re.DOTALL,
)
_STEPS = (1, 2, 5, 10)  # of the ticks
_LOG_FROM = 20.0  # ratio of the largest to the smallest value from which a logarithmic axis reads better
_MOST_DOTS = 30  # of a line whose points are marked
_FARTHEST = 1e100  # drawn; further out the arithmetic of an axis overflows


@dataclass(frozen=True)
class Line:
    """One curve of a chart; ``colour`` and ``dash`` count through ``PALETTE`` and ``DASHES``.

    A faint line is a raw curve below its smoothed one; the legend does not name it.
    """

    label: str
    curve: Curve
    colour: int = 0
    dash: int = 0
    is_faint: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines that share their axes, with values in ``unit``; fractions are given, and shown in percent."""

    title: str
    lines: Sequence[Line]
    unit: str = ""
    from_zero: bool = False
    maybe_log: bool = False
    marks: Sequence[float] = ()  # steps to mark by a vertical line
    last: float = 1.0  # step, so that charts side by side line up

    @cached_property
    def drawn(self) -> list[tuple[Line, np.ndarray]]:
        """The lines with a finite value, each with its values in the chart's unit (NaN: missing)."""
        scale = 100.0 if self.unit == "%" else 1.0
        values = [(line, scale * _array(line.curve.y)) for line in self.lines]
        return [(line, y) for line, y in values if np.isfinite(y).any()]

    @property
    def legend(self) -> list[tuple[Line, float, float, float]]:
        """The named lines, each with its first, last and lowest value."""
        finite = [(line, y[np.isfinite(y)]) for line, y in self.drawn if not line.is_faint]
        return [(line, y[0], y[-1], y.min()) for line, y in finite]

    @property
    def notes(self) -> str:
        """What follows the title: unit, kind of axis, and how many values of raw curves are missing."""
        missing = sum(line.curve.y.count(None) for line in self.lines if line.is_faint)
        gaps = f"{missing} value{'s' * (missing > 1)} not finite" if missing else ""
        return ", ".join(note for note in (self.unit, "log" if self._is_log else "", gaps) if note)

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
        for line, y in sorted(self.drawn, key=lambda drawn: not drawn[0].is_faint):
            # a palette that has been gone through comes again in pale
            pale = 0.55 if line.colour // len(PALETTE) % 2 else 1.0
            axes.plot(
                _array(line.curve.x),
                y,
                color=PALETTE[line.colour % len(PALETTE)],
                linestyle=(0, DASHES[line.dash % len(DASHES)]),
                alpha=0.3 if line.is_faint else pale,
                linewidth=1.2 if line.is_faint else 2,
                marker="o" if len(y) <= _MOST_DOTS and not line.is_faint else "",
            )
        for step in self.marks:
            axes.axvline(step, color=_GREY, linewidth=1, dashes=(2, 4))
        axes.set(xlabel="step", xlim=(0, min(self.last, _FARTHEST)))
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=_STEPS, integer=True))
        axes.xaxis.set_major_formatter(lambda value, _: short(value))
        self._set_y_axis(axes)

    def _set_y_axis(self, axes: Axes) -> None:
        low, high = self._limits
        if self._is_log:
            low = max(low, high * 1e-30)  # further down no axis can be read
            margin = (high / low) ** 0.04
            axes.set(yscale="log", ylim=(low / margin, high * margin))
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 300 else (1,)))
            axes.yaxis.set_minor_locator(LogLocator(subs=()))
        else:
            at_zero = self.from_zero and low >= 0
            margin = 0.06 * (high - low * (not at_zero)) or 0.1 * abs(high) or 1.0
            axes.set_ylim(0 if at_zero else low - margin, high + margin)
            axes.yaxis.set_major_locator(MaxNLocator(5, steps=_STEPS))
        axes.yaxis.set_major_formatter(lambda value, _: short(value))

    @cached_property
    def _limits(self) -> tuple[float, float]:
        """The lowest and the highest value to show; a raw curve's rare peaks do not flatten the rest."""
        ends = [np.nanpercentile(y, (2, 98) if line.is_faint else (0, 100)) for line, y in self.drawn]
        return float(np.min(ends)), float(np.max(ends))

    @property
    def _is_log(self) -> bool:
        low, high = self._limits
        return self.maybe_log and low > 0 and high / low >= _LOG_FROM


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


def short(value: float) -> str:
    """A number for an axis or a legend: ``1.2k``, ``3.4M``, ``0.05``, ``2e-5``."""
    size = abs(value)
    if size >= 10_000:
        factor, letter = next(pair for pair in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if size >= pair[0])
        return f"{value / factor:.4g}{letter}"
    if 0 < size < 1e-4:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:.4g}"


def _array(values: Sequence[float | None]) -> np.ndarray:
    return np.clip(np.array(values, dtype=np.float64), -_FARTHEST, _FARTHEST)

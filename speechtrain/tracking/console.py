"""Progress for people: a live display on a terminal, plain aligned lines elsewhere."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from speechtrain.errors import FORMAT_CHARACTERS, ConfigError, escape_controls
from speechtrain.files import append_line
from speechtrain.run_directory import metric_text, result_text, stream_lines, without_streams
from speechtrain.tracking.base import Tracker, metrics_of
from speechtrain.tracking.dll import DLLines

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.console import RenderableType
    from rich.live import Live


_OF_NETWORK = ("parameters", "tensors taken over", "fresh", "labels kept")
"""The entries of the event ``start`` that are about the network. The others are about the plan."""


@final
class Console(Tracker):
    """Prints a run's progress to stdout. Warnings go to stderr, or above the live display.

    A plain run prints one line per ``train`` and ``valid`` event:

        step     1200/5000  epoch   3.25  loss 12.35  lr 1.00e-03  grad  3.21    512 utt/s    812 audio-s/s
        valid    1200  test  wer 3.21 %  loss 4.56  3.2 s
    """

    visible = True
    # Events are printed at once and not by a thread, so that a warning is between the right lines.
    background = False

    def __init__(
        self, mode: str = "auto", examples: int = 2, enabled: bool = True, form: str = "speechtrain"
    ) -> None:
        """``mode`` is live, plain, or auto (live on a terminal).

        The ``examples`` worst transcripts are shown per set. With the ``form`` full, the events of a start
        have all their values. With the ``form`` dll, the console is plain, and events that ``DLLines``
        formats, in the form of NVIDIA's DLLogger, are printed as its lines.
        """
        if mode not in ("auto", "live", "plain"):
            raise ConfigError(f"mode is {mode!r}, but it must be auto, live or plain")
        if form not in ("speechtrain", "full", "dll"):
            raise ConfigError(f"form is {form!r}, but it must be speechtrain, full or dll")
        self.mode = "plain" if form == "dll" else mode
        self.examples = examples
        self.enabled = enabled
        self._display: _Display | None = None
        self._dll = DLLines() if form == "dll" else None
        self._lines_of = full_lines_of if form == "full" else lines_of

    def log(self, event: str, values: Mapping[str, Any]) -> None:
        line = self._dll.line(event, values) if self._dll else ""
        if line:
            self._print(line)
            return
        if event == "start" and self._display is None:
            is_terminal = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
            if self.mode == "live" or (self.mode == "auto" and is_terminal):
                self._display = _Display(forced=self.mode == "live")
        if event == "end":
            self.close()  # The line of the end is printed below, when the display is gone.
        # The display shows the values of ``train`` in place of a line.
        is_line = event != "train" or self._display is None
        if is_line:
            for line in self._lines_of(event, values, self.examples):
                self._print(line, is_warning=event == "warning")
        if self._display is not None:
            self._display.show(event, values)

    def close(self) -> None:
        """Restore the terminal to its original state."""
        display, self._display = self._display, None
        if display is not None:
            display.close()

    def _print(self, text: str, is_warning: bool = False) -> None:
        if self._display is not None:
            self._display.print(text, is_warning)
        else:
            stream = sys.stderr if is_warning else sys.stdout
            print(_printable(text, stream.encoding), file=stream, flush=True)


@final
class TextLog(Tracker):
    """Appends the lines of a full console to ``<run_dir>/output.log``, each with its time (UTC)."""

    background = False

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir) / "output.log"

    def log(self, event: str, values: Mapping[str, Any]) -> None:
        """Append an event's lines. Raises ``OSError`` if the file cannot be written."""
        date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        for line in full_lines_of(event, values, examples=2):
            append_line(self.path, f"{date} {_printable(line, None)}".encode())


class _Display:
    """The block at the bottom of the terminal: progress bar, metrics, latest validation of each set."""

    def __init__(self, forced: bool) -> None:
        from rich.console import Console as RichConsole
        from rich.live import Live

        self._rich: RichConsole = RichConsole(
            file=sys.stdout, force_terminal=forced or None, highlight=False, markup=False, emoji=False
        )
        self._start: Mapping[str, Any] = {}
        self._train: Mapping[str, Any] = {}
        self._valid: dict[str, Mapping[str, Any]] = {}
        self._saved_step: int | None = None
        self._start_time = time.monotonic()
        self._train_time = self._start_time  # the time of the latest ``train`` event
        # Two refreshes a second keep the clocks moving, at no measurable cost for a training step.
        self._live: Live = Live(console=self._rich, refresh_per_second=2, get_renderable=self._render)
        self._live.start()

    def show(self, event: str, values: Mapping[str, Any]) -> None:
        if event in ("start", "resume", "plan"):
            self._start = {**self._start, **values}
        elif event == "train":
            self._train, self._train_time = values, time.monotonic()
        elif event == "valid":
            self._valid[str(values["set"])] = values
        elif event == "checkpoint":
            self._saved_step = values["step"]
        self._live.refresh()

    def print(self, text: str, is_warning: bool) -> None:
        from rich.text import Text

        style = "bold yellow" if is_warning else ""
        self._rich.print(Text(_printable(text, self._rich.encoding), style=style))

    def close(self) -> None:
        self._live.stop()

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        lines: list[RenderableType] = [self._bar()]
        if self._train:
            columns = [" ".join(column.split()) for column in train_columns(self._train)]
            lines.append(Text("  ".join(columns)))
        for validation in self._valid.values():
            lines += [Text(line, style="green") for line in valid_lines(validation)]
        if self._saved_step is not None:
            lines.append(Text(f"saved    {self._saved_step}", style="dim"))
        return Group(*lines)

    def _bar(self) -> RenderableType:
        """Return the step, the progress bar and the clocks."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        steps = self._start.get("steps")
        step = self._train.get("step", self._start.get("step", 0))
        title = f"step {step}/{steps}" if steps else f"step {step}"
        display_time = time.monotonic()
        clocks = f"{duration(display_time - self._start_time)} elapsed"
        if _is_finite(self._train.get("eta_s")):
            seconds_left = self._train["eta_s"] - (display_time - self._train_time)
            clocks += f", {duration(max(0.0, seconds_left))} to go"
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.add_row(
            Text(title, style="bold"),
            ProgressBar(total=steps, completed=step, pulse=not steps),
            Text(clocks, style="dim"),
        )
        return bar


def lines_of(event: str, values: Mapping[str, Any], examples: int) -> list[str]:
    """Return an event as plain lines for a person. An event that is not shown has no lines.

    At most ``examples`` different pairs of a reference and a hypothesis with errors are shown.
    """
    if event == "resume":
        return [f"resume   after step {values['step']}"]
    if event == "examples":
        pairs: list[tuple[str, str]] = []
        for row in values["rows"]:
            pair = f"worst    ref  {row['reference']}", f"         hyp  {row['hypothesis']}"
            if row.get("errors") != 0 and pair not in pairs:
                pairs.append(pair)
        return list(chain.from_iterable(pairs[:examples]))
    if event == "warning":
        return [f"warning  {values['message']}"]
    if event == "start":
        return start_lines(values)
    if event == "valid":
        return valid_lines(values)
    forms = {
        "device": device_line, "data": data_line, "plan": plan_line,
        "train": train_line, "end": end_line,
    }  # fmt: skip
    return [forms[event](values)] if event in forms else []


def full_lines_of(event: str, values: Mapping[str, Any], examples: int) -> list[str]:
    """Return an event as plain lines. The events of a start have all their values."""
    if event in ("environment", "device", "data", "start", "plan"):
        return [f"{event}: {_entries_text(values)}"]
    return lines_of(event, values, examples)


def _entries_text(values: Mapping[str, Any]) -> str:
    texts = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            texts.append(f"{name} ({_entries_text(value)})")
        elif value is not None:
            texts.append(f"{name} {value}")
    return ", ".join(texts)


def device_line(values: Mapping[str, Any]) -> str:
    """Return ``device   cpu (AMD EPYC), computes in fp32``."""
    computes, _, _ = str(values.get("computes")).partition(" ")  # The kernels follow.
    line = f"device   {values.get('device')} ({values.get('chip')}), computes in {computes}"
    if values.get("precision") != computes:
        line += f", chosen by precision={values.get('precision')}"
    return line


def data_line(values: Mapping[str, Any]) -> str:
    """Return ``data     1,900 recordings, 1.18 h, 57 speakers, 238 updates an epoch, left out 12 too_long``.

    The recordings and hours are those that are trained on.
    """
    texts = []
    forms = {"train_samples": "{:,} recordings", "hours": "{:,.2f} h", "speakers": "{:,} speakers"}
    forms |= {"eval_samples": "validation on {:,}", "updates_per_epoch": "{:,} updates an epoch"}
    for name, form in forms.items():
        if values.get(name) is not None:
            texts.append(form.format(values[name]))
    left_out, sets = [], []
    for name, value in values.get("report", {}).items():
        if isinstance(value, int):
            left_out.append(f"{value:,} {name}")
        elif name.endswith("_share"):
            texts.append(f"{100 * value:.1f} % {name.removesuffix('_share')}")
        elif name.startswith("set "):
            sets.append(name.removeprefix("set "))
    if left_out:
        texts.append(f"left out {' and '.join(left_out)}")
    if sets:
        texts.append(f"sets {' '.join(sets)}")
    return f"data     {', '.join(texts)}"


def plan_line(values: Mapping[str, Any]) -> str:
    """Return ``plan     1,204 steps in 0.5 h, 0.31 s a step, a validation of 3.2 s every 200 steps``."""
    line = f"plan     {values.get('steps'):,} steps in {values.get('hours'):g} h"
    line += f", {values.get('s_per_update'):.3g} s a step"
    validation = (
        f"a validation of {values.get('s_per_validation'):.3g} s every {values.get('validate_every')} steps"
    )
    return f"{line}, {validation}"


def start_lines(values: Mapping[str, Any]) -> list[str]:
    """Return ``network  RNNT, 480,029 parameters`` and ``plan     3,000 steps, 30 warm-up steps``.

    A line without texts is left out. The keys that follow from the data are in the full form only.
    """
    network, plan = [], []
    if values.get("model"):
        network.append(values["model"])
    if values.get("steps"):
        plan.append(f"{values['steps']:,} steps")
    ranks, accumulate = values.get("ranks", 1), values.get("accumulate", 1)
    if ranks * accumulate > 1:
        plan.append(f"{ranks} x {accumulate} micro-batches a step")
    if values.get("shapes"):
        plan.append(f"{len(values['shapes'])} fixed shapes")
    for name, value in values.items():
        if name not in ("model", "steps", "ranks", "accumulate", "target", "shapes", "from data"):
            fact = f"{name} {value}" if isinstance(value, str) else f"{value:,} {name}"
            (network if name in _OF_NETWORK else plan).append(fact)
    lines = {"network": network, "plan": plan}
    return [f"{title:<8} {', '.join(texts)}" for title, texts in lines.items() if texts]


def train_line(values: Mapping[str, Any]) -> str:
    """Return a ``train`` event as one line. Its columns are aligned from line to line."""
    steps = values.get("steps")
    width = len(str(steps)) if steps else 6
    step = f"step     {values.get('step', 0):>{width}}"
    if steps:
        step += f"/{steps}"
    columns = [step, *train_columns(values)]
    if _is_finite(values.get("eta_s")):
        columns.append(f"eta {duration(values['eta_s'])}")
    return "  ".join(columns)


def train_columns(values: Mapping[str, Any]) -> list[str]:
    """Return the values of a ``train`` event, each with its name or unit. Absent values are left out."""
    forms = (
        ("epoch", "epoch {:>6.2f}"),
        ("loss", "loss {:>8.4g}"),
        ("lr", "lr {:.2e}"),
        ("grad_norm", "grad {:>8.3g}"),
        ("utterances_per_s", "{:>6.1f} utt/s"),
        ("audio_s_per_s", "{:>6.1f} audio-s/s"),
        ("data_wait", "wait {:>4.0%}"),
        ("memory_mib", "mem {:>6,.0f} MiB"),
    )
    columns = [form.format(values[name]) for name, form in forms if values.get(name) is not None]
    return columns + [metric_text(name, value) for name, value in metrics_of(values).items()]


def valid_lines(values: Mapping[str, Any]) -> list[str]:
    """Return ``valid    1200  test  wer 3.21 %  loss 4.56  3.2 s`` and a line for each context of streams."""
    columns = [f"valid    {values.get('step', '')}", str(values.get("set", ""))]
    metrics = without_streams(metrics_of(values))
    columns += [metric_text(name, value) for name, value in metrics.items()]
    if _is_finite(values.get("seconds")):
        columns.append(f"{values['seconds']:.1f} s")
    return ["  ".join(columns), *stream_lines(values)]


def end_line(values: Mapping[str, Any]) -> str:
    """Return ``end      finished after 5000 steps, 0:12:34  best at step 4000: test/wer 3.21 %; last …``."""
    line = f"end      {values.get('status', '')}"
    if values.get("steps") is not None:
        line += f" after {values['steps']} steps"
    if _is_finite(values.get("wall_s")):
        line += f", {duration(values['wall_s'])}"
    results = result_text(
        values.get("metrics"), values.get("last_metrics"), values.get("checkpoint"), values.get("speed")
    )
    line = f"{line}  {results}".rstrip()
    if "error" in values:
        line += f": {values['error']}"
    return line


def duration(seconds: float) -> str:
    """Return ``0:12:34``, or from one day on ``3 d 01:12:34``."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days} d {hour:02}:{minute:02}:{second:02}" if days else f"{hour}:{minute:02}:{second:02}"


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _printable(text: str, encoding: str | None) -> str:
    """Return one line without terminal control characters, which a transcript may hold.

    Characters that ``encoding`` does not have are escaped.
    """
    text = escape_controls(" ".join(text.splitlines()), FORMAT_CHARACTERS)
    encoding = encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)

"""Events as TensorBoard scalars and texts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from speechtrain.files import write_text
from speechtrain.tracking.base import Tracker, scalars

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


@final
class TensorBoard(Tracker):
    """Writes event files to ``<run_dir>/tensorboard``.

    Tags are ``train/loss``, ``train/lr`` and so on, and ``valid/<set>/<metric>``. Example transcripts and
    warnings are texts. On resume, the steps after the resumed step are purged from the display.
    """

    def __init__(
        self, run_dir: str | Path, flush_s: int = 30, examples: int = 10, enabled: bool = True
    ) -> None:
        """Written events reach the disk after ``flush_s`` seconds.

        ``examples`` transcripts are shown per set.
        """
        self.folder = Path(run_dir) / "tensorboard"
        self.flush_s = flush_s
        self.examples = examples
        self.enabled = enabled
        self._purge_step: int | None = None
        self._waiting: list[tuple[str, dict[str, Any]]] = []  # events that are written with the next event
        self._writer: SummaryWriter | None = None

    def log(self, event: str, values: Mapping[str, Any]) -> None:
        """Write one event.

        Raises ``OSError`` if files cannot be written, ``ImportError`` if the package is missing.
        """
        if event == "start":  # The next event shows whether the run continues from a checkpoint.
            self.close()
            self._purge_step = 1
        elif event == "resume":
            self._purge_step = values["step"] + 1
        if self._writer is None and event in ("start", "resume", "warning"):
            self._waiting.append((event, dict(values)))
            return
        try:
            for waiting_event, waiting_values in self._waiting:
                self._write(self._open(), waiting_event, waiting_values)
            self._waiting = []
            self._write(self._open(), event, values)
        except Exception:
            # The writer's thread has ended after an error. Only a new writer, with a new file, can write.
            with contextlib.suppress(Exception):
                self.close()
            raise

    def _open(self) -> SummaryWriter:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # This import takes seconds.

            # On a full disk, the writer's thread would print a traceback at every attempt to write. This
            # raises OSError instead.
            probe = self.folder / ".probe"
            write_text(probe, " " * 4096, durable=False)
            probe.unlink()
            self._writer = SummaryWriter(
                str(self.folder), purge_step=self._purge_step, flush_secs=self.flush_s
            )
            self._purge_step = None
        return self._writer

    def _write(self, writer: Any, event: str, values: Mapping[str, Any]) -> None:
        step = values.get("step")
        if event in ("train", "valid"):
            for tag, value in scalars(event, values).items():
                writer.add_scalar(tag, value, step)
        elif event == "examples":
            rows = [(row["reference"], row["hypothesis"]) for row in values["rows"][: self.examples]]
            table = _table("| reference, worst first | hypothesis |", rows)
            writer.add_text(f"examples/{values['set']}", table, step)
        elif event == "warning":
            writer.add_text("warnings", _cell(values["message"]), step)
        elif event in ("start", "end"):
            writer.add_text(event, _table("| | |", values.items()), step)
        if event in ("start", "valid", "end"):
            writer.flush()

    def close(self) -> None:
        """Flush and close the file. A later event opens a new file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def _table(head: str, rows: Iterable[tuple[Any, Any]]) -> str:
    return "\n".join([head, "|---|---|", *(f"| {_cell(left)} | {_cell(right)} |" for left, right in rows)])


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")

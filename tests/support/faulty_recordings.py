"""Recordings that a program must name, each between usable ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import soundfile

MESSAGES = {
    "missing.wav": "No such file",
    "text.wav": "Format not recognised",
    "header.raw": "samplerate must be specified",
    "empty.wav": "no samples",
    "nan.wav": "not finite",
    "rate.wav": "10 Hz",
}
"""Files that are not usable, each with a part of the message that names it."""


class FaultyRecordings:
    """The files of ``MESSAGES`` in a folder, between ``first.wav`` and ``last.wav``, which are usable."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "text.wav").write_text("no audio")
        (folder / "header.raw").write_bytes(bytes(100))
        soundfile.write(folder / "empty.wav", np.zeros(0), 16000)
        soundfile.write(folder / "nan.wav", np.full(800, np.nan), 16000, subtype="FLOAT")
        soundfile.write(folder / "rate.wav", np.zeros(800), 10)
        soundfile.write(folder / "first.wav", np.zeros(1), 16000)
        soundfile.write(folder / "last.wav", np.random.default_rng(0).normal(0, 0.1, 16000), 16000)

    def paths(self) -> list[str]:
        return [str(self._folder / name) for name in ("first.wav", *MESSAGES, "last.wav")]

    def check(self, streams: tuple[str, str]) -> None:
        """Fail unless the output has the usable recordings, and the errors a line for each other file."""
        output, errors = streams
        first, *faulty, last = self.paths()
        assert [line.partition("\t")[0] for line in output.splitlines()] == [first, last]
        lines = zip(errors.splitlines(), faulty, MESSAGES.values(), strict=True)
        for line, path, message in lines:
            assert line.startswith(f"recognise.py: {path}: ")
            assert message in line

"""Compares the texts of an export with PyTorch's texts on the run's held-out recordings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from speechtrain.config.build import build
from speechtrain.errors import ConfigError, DataError
from speechtrain.export.recognise import open_export, transcribe
from speechtrain.inference.loaded_run import LONGEST_SECONDS, LoadedRun
from speechtrain.metrics import error_rates

TIE = 1e-4
"""Two best scores that differ by less may change places, because sums are rounded in another order."""


@dataclass(frozen=True)
class Utterance:
    """A recording of an evaluation set."""

    id: str
    samples: np.ndarray  # (S,) fp32, as in the file
    reference: str  # the transcript in the form in which error rates count it


class _MeasuredSession:
    """A session of ONNX Runtime that measures how clear its decisions are.

    ``margin`` is the smallest difference between the best and the second best score of a decision.
    """

    def __init__(self, session: Any, classes: int) -> None:
        self._session, self._classes = session, classes
        self.get_inputs, self.get_outputs = session.get_inputs, session.get_outputs
        self.margin = math.inf

    def run(self, names: None, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        outputs: list[np.ndarray] = self._session.run(names, inputs)
        scores = outputs[-1]
        for part in (scores[..., : self._classes], scores[..., self._classes :]):  # symbols, then durations
            if part.shape[-1] > 1:
                second_best, best = np.moveaxis(np.partition(part, -2, axis=-1)[..., -2:], -1, 0)
                margin = float(np.min(best - second_best, initial=math.inf))
                self.margin = min(self.margin, margin)
        return outputs


class _Export:
    """The export in a folder, in one precision."""

    def __init__(self, folder: Path, precision: str) -> None:
        self.model, self.sessions = open_export(folder, precision)  # type: ignore[no-untyped-call]
        name = "ctc" if self.model["kind"] == "ctc" else "joint"
        self.head = _MeasuredSession(self.sessions[name], self.model["blank"] + 1)
        self.sessions[name] = self.head

    def text(self, samples: np.ndarray) -> str:
        self.head.margin = math.inf
        return str(transcribe(self.model, self.sessions, samples))  # type: ignore[no-untyped-call]


def check(loaded: LoadedRun, folder: Path, precisions: Sequence[str]) -> dict[str, Any]:
    """Return the error rates of PyTorch and of each precision on the run's evaluation sets.

    If a tie makes the fp32 text differ from PyTorch's text, ``ties`` lists the recording. Raises DataError
    for the first recording whose fp32 text differs without a tie.
    """
    exports = {precision: _Export(folder, precision) for precision in precisions}
    pairs = {name: list[tuple[str, str]]() for name in ("pytorch", *precisions)}
    ties = []
    for utterance in utterances(loaded):
        torch_text = text_of(loaded, utterance.samples)
        pairs["pytorch"].append((utterance.reference, torch_text))
        for precision, export in exports.items():
            text = export.text(utterance.samples)
            pairs[precision].append((utterance.reference, text))
            if precision == "fp32" and text != torch_text:
                ties.append(_tie(utterance.id, text, torch_text, export.head.margin))
    if not pairs["pytorch"]:
        raise ConfigError(
            "--to onnx needs recordings for its check. Set data.valid or data.hold_out in a run"
        )
    rates = {}
    for name, texts in pairs.items():
        rates[name] = {
            metric: float(errors / units) for metric, (errors, units) in error_rates(texts).items()
        }
    return {"recordings": len(pairs["pytorch"]), "ties": ties, "error_rates": rates}


def _tie(recording: str, text: str, torch_text: str, margin: float) -> dict[str, str]:
    """Return the entry of a recording whose texts differ. Raises DataError if the margin is not a tie."""
    if margin >= TIE:
        texts = f"the text in ONNX is {text!r:.200}, and PyTorch's is {torch_text!r:.200}"
        raise DataError(f"{recording}: {texts}. Nothing is written. Report the encoder and this line")
    return {"id": recording, "onnx": text, "pytorch": torch_text}


def lines(result: dict[str, Any]) -> list[str]:
    """Return lines for the user on the result of ``check``."""
    count, ties = result["recordings"], result["ties"]
    text_lines = [f"checked on {count} recordings: fp32 has PyTorch's texts, except for {len(ties)} ties"]
    for name, rates in result["error_rates"].items():
        text_lines.append(f"{name}: wer {rates['wer']:.2%}, cer {rates['cer']:.2%}")
    return text_lines


def text_of(loaded: LoadedRun, samples: np.ndarray) -> str:
    """Return PyTorch's text of samples (S,), which are decoded as a single piece."""
    transcript = loaded.transcribe(samples, batch=1, piece_seconds=LONGEST_SECONDS)[0]
    return "".join([segment.hypothesis.text for segment in transcript.segments])


def utterances(loaded: LoadedRun) -> Iterator[Utterance]:
    """Yield the recordings of the run's evaluation sets. Raises DataError for one that cannot be read."""
    opened = loaded.opened
    data = build(
        opened.config,
        "data",
        tokenizer=opened.tokenizer,
        footprint=opened.task.footprint(),
        normalise=False,
    )
    try:
        for batches in data.valid().values():
            for batch in batches:
                yield from _rows(batch)
    finally:
        data.close()


def _rows(batch: Any) -> Iterator[Utterance]:
    for row, recording in enumerate(batch.ids):
        if recording:  # The id of a padding row is empty.
            samples = batch.audio[row, : int(batch.audio_lengths[row])]
            yield Utterance(recording, samples.numpy(), batch.texts[row])

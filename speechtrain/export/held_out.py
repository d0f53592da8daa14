"""Compares the texts of an export with PyTorch's texts on the run's held-out recordings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from speechtrain.config.build import build
from speechtrain.errors import ConfigError, DataError
from speechtrain.inference.loaded_run import LONGEST_SECONDS, LoadedRun
from speechtrain.metrics import error_rates

TIE = 1e-4
"""Two best scores that differ by less may change places, because sums are rounded in another order."""


@dataclass(frozen=True)
class Utterance:
    """A recording of an evaluation set."""

    id: str
    samples: np.ndarray  # (S,) fp32, as in the file
    reference: str  # the normalised transcript


def check(loaded: LoadedRun, folder: Path, precisions: Sequence[str]) -> dict[str, Any]:
    """Return the error rates of PyTorch and of each precision on the run's evaluation sets.

    The recordings with another text in fp32 because of a tie are listed under ``ties``. Raises DataError,
    which names the first recording, for another text without a tie.
    """
    from speechtrain.export.recognise import Recogniser

    class MeasuredRecogniser(Recogniser):
        """Stores the smallest difference of the two best scores of a recording."""

        margin = np.inf

        def best(self, scores: np.ndarray) -> int:
            if len(scores) > 1:
                second, first = np.partition(scores, -2)[-2:]
                self.margin = min(self.margin, float(first - second))
            return int(super().best(scores))

    recognisers = {precision: MeasuredRecogniser(folder, precision) for precision in precisions}
    pairs: dict[str, list[tuple[str, str]]] = {name: [] for name in ("pytorch", *precisions)}
    ties = []
    for utterance in utterances(loaded):
        torch_text = text_of(loaded, utterance.samples)
        pairs["pytorch"].append((utterance.reference, torch_text))
        for precision, recogniser in recognisers.items():
            recogniser.margin = np.inf
            text = recogniser.transcribe(utterance.samples)
            pairs[precision].append((utterance.reference, text))
            if precision == "fp32" and text != torch_text:
                if recogniser.margin >= TIE:
                    raise DataError(
                        f"{utterance.id}: the text in ONNX is {text!r:.200}, and PyTorch's is {torch_text!r:.200}. "
                        "Nothing is written"
                    )
                ties.append({"id": utterance.id, "onnx": text, "pytorch": torch_text})
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


def lines(result: dict[str, Any]) -> list[str]:
    """Return lines for the user on the result of ``check``."""
    count, ties = result["recordings"], result["ties"]
    text_lines = [f"checked on {count} recordings: fp32 has PyTorch's texts, except for {len(ties)} ties"]
    for name, rates in result["error_rates"].items():
        text_lines.append(f"{name}: wer {rates['wer']:.2%}, cer {rates['cer']:.2%}")
    return text_lines


def text_of(loaded: LoadedRun, samples: np.ndarray) -> str:
    """Return PyTorch's text of samples (S,), which are not cut."""
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
    for row, name in enumerate(batch.ids):
        if name:
            samples = batch.audio[row, : int(batch.audio_lengths[row])]
            yield Utterance(name, samples.numpy(), batch.texts[row])

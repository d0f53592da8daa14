"""Compares the texts of an export with PyTorch's texts on the run's held-out recordings."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from speechtrain.config.build import build
from speechtrain.errors import DataError
from speechtrain.export.search import Search, torch_search
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


class Export(Protocol):
    """An export in one precision."""

    def text(self, samples: np.ndarray) -> str:
        """Return the text of samples (S,)."""

    def margin(self, reference: Search, text: str) -> float:
        """Return how clear PyTorch's search is where the last text, ``text``, begins to differ from it."""


def check(loaded: LoadedRun, exports: Mapping[str, Export]) -> dict[str, Any]:
    """Return the error rates of PyTorch and of each precision on the run's evaluation sets.

    If a margin below 1e-4 makes the fp32 text differ from PyTorch's text, ``ties`` lists the recording.
    Raises DataError for the first recording whose fp32 text differs without a tie.
    """
    pairs = {name: list[tuple[str, str]]() for name in ("pytorch", *exports)}
    ties = []
    for utterance in utterances(loaded):
        torch_text = text_of(loaded, utterance.samples)
        pairs["pytorch"].append((utterance.reference, torch_text))
        for precision, export in exports.items():
            text = export.text(utterance.samples)
            pairs[precision].append((utterance.reference, text))
            if precision == "fp32" and text.strip() != torch_text.strip():
                _require_tie(loaded, export, utterance, (text, torch_text))
                ties.append({"id": utterance.id, "export": text, "pytorch": torch_text})
    rates = {name: _rates(texts) for name, texts in pairs.items()}
    return {"recordings": len(pairs["pytorch"]), "ties": ties, "error_rates": rates}


def _rates(pairs: list[tuple[str, str]]) -> dict[str, float]:
    return {metric: float(errors / units) for metric, (errors, units) in error_rates(pairs).items()}


def _require_tie(loaded: LoadedRun, export: Export, utterance: Utterance, texts: tuple[str, str]) -> None:
    """Raise DataError unless a tie explains the ``texts`` of the export and of PyTorch, which differ."""
    text, torch_text = texts
    reference = torch_search(loaded)
    is_same_search = reference.text(utterance.samples).strip() == torch_text.strip()
    if not is_same_search or export.margin(reference, text) >= TIE:
        pair = f"the text of the export is {text!r:.200}, and PyTorch's is {torch_text!r:.200}"
        raise DataError(f"{utterance.id}: {pair}. Nothing is written. Report the encoder and this line")


def lines(result: dict[str, Any]) -> list[str]:
    """Return lines for the user on the result of ``check``."""
    count, ties = result["recordings"], result["ties"]
    text_lines = [f"checked on {count} recordings: fp32 has PyTorch's texts, except for {len(ties)} ties"]
    for name, rates in result["error_rates"].items():
        text_lines.append(f"{name}: wer {rates['wer']:.2%}, cer {rates['cer']:.2%}")
    return text_lines


def text_of(loaded: LoadedRun, samples: np.ndarray) -> str:
    """Return PyTorch's text of samples (S,), which are decoded as a single piece.

    An export writes no spaces at pauses, because it has no times of labels.
    """
    (transcript,) = loaded.transcribe(samples, batch=1, piece_seconds=LONGEST_SECONDS)
    texts = [segment.hypothesis.text.strip() for segment in transcript.segments]
    return " ".join([text for text in texts if text])


def utterances(loaded: LoadedRun) -> Iterator[Utterance]:
    """Yield the recordings of the run's evaluation sets. Those that cannot be read are left out."""
    opened = loaded.opened
    config = copy.deepcopy(opened.config)
    config.data.longest_pause = None  # ``transcribe`` and the export shorten the pauses.
    data = build(
        config,
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

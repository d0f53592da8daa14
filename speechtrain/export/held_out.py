"""Compares the texts of an export with PyTorch's texts on the run's held-out recordings."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from speechtrain.data.loader import audio_row, collate
from speechtrain.decoding.greedy import Greedy
from speechtrain.errors import DataError
from speechtrain.files import write_json
from speechtrain.inference.loaded_run import LONGEST_SECONDS, LoadedRun
from speechtrain.metrics import error_rates
from speechtrain.nn.conformer import Context

PRECISIONS = ("fp32", "int8")
"""The precisions of the weights of an export."""

TextOf = Callable[[np.ndarray], str]
"""The text of samples (S,) by PyTorch, or by an export in one precision."""

_ROUNDED_SHARE = 0.01
"""Fraction of the recordings whose fp32 text may differ, because sums are rounded in another order."""


@dataclass(frozen=True)
class Utterance:
    """A recording of an evaluation set."""

    id: str
    samples: np.ndarray  # (S,) fp32, as in the file
    reference: str  # the transcript in the form in which error rates count it


def check(loaded: LoadedRun, recognisers: Mapping[str, TextOf]) -> dict[str, Any]:
    """Return the error rates of each recogniser on the run's evaluation sets.

    ``recognisers`` are pytorch and the precisions fp32 and int8 of the export. ``differences`` lists the
    recordings whose fp32 text differs from PyTorch's text. Two scores that are nearly equal can cause this.
    Raises DataError if more than one recording and more than a hundredth of them differ.
    """
    pairs = {name: list[tuple[str, str]]() for name in recognisers}
    differences = []
    for utterance in utterances(loaded):
        texts = {name: text_of(utterance.samples) for name, text_of in recognisers.items()}
        for name, text in texts.items():
            pairs[name].append((utterance.reference, text))
        if texts["fp32"].strip() != texts["pytorch"].strip():
            difference = {"id": utterance.id, "export": texts["fp32"], "pytorch": texts["pytorch"]}
            differences.append(difference)
    count = len(pairs["pytorch"])
    if len(differences) > max(1, _ROUNDED_SHARE * count):
        first = "{id}: the text of the export is {export!r:.200}, and PyTorch's is {pytorch!r:.200}"
        raise DataError(
            f"{first.format_map(differences[0])}. {len(differences)} of {count} recordings differ, "
            "so nothing is written. Report the encoder and this line"
        )
    rates = {}
    for name, text_pairs in pairs.items():
        counts = error_rates(text_pairs)
        rates[name] = {metric: float(errors / units) for metric, (errors, units) in counts.items()}
    return {"recordings": count, "differences": differences, "error_rates": rates}


def write_check(
    loaded: LoadedRun,
    folder: Path,
    text_of: TextOf,
    open_export: Callable[[Path, str], tuple[Any, Any]],
    transcribe: Callable[[Any, Any, np.ndarray], str],
) -> list[str]:
    """Write error_rates.json, the result of ``check``, into ``folder``. Return lines for the user.

    ``text_of`` is PyTorch's text. ``open_export`` returns the model.json and the recogniser of a precision,
    with which ``transcribe`` returns the text of the export.
    """
    recognisers = {"pytorch": text_of}
    for precision in PRECISIONS:
        recognisers[precision] = partial(transcribe, *open_export(folder, precision))
    result = check(loaded, recognisers)
    write_json(folder / "error_rates.json", result)
    return lines(result)


def lines(result: dict[str, Any]) -> list[str]:
    """Return lines for the user on the result of ``check``."""
    count, differences = result["recordings"], result["differences"]
    text_lines = [f"checked on {count} recordings: fp32 has PyTorch's texts, except for {len(differences)}"]
    for difference in differences:
        text_lines.append("{id}: {export!r}, and PyTorch has {pytorch!r}".format_map(difference))
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


@torch.no_grad()
def text_in_context(
    loaded: LoadedRun, context: Context, samples: np.ndarray, most_frames: int = sys.maxsize
) -> str:
    """Return PyTorch's text of samples (S,) in one pass, whose attention is limited to ``context``.

    At most ``most_frames`` frames are searched. As in a stream, the position selects the dither, and no limit
    of labels follows from the length of the recording.
    """
    task: Any = loaded.opened.task
    batch = collate([audio_row("", samples, task.sample_rate)], task.sample_rate)
    frames, lengths = task.encoder.encode(replace(batch, keys=torch.zeros_like(batch.keys)), context)
    settings = task.decoder
    decoder = Greedy(settings.max_symbols_per_step, settings.max_symbols or sys.maxsize)
    (hypothesis,) = task.hypotheses(frames, lengths.clamp(max=most_frames), decoder)
    return str(hypothesis.text)


def utterances(loaded: LoadedRun) -> Iterator[Utterance]:
    """Yield the recordings of the run's evaluation sets. Those that cannot be read are left out."""
    opened = loaded.opened
    # ``transcribe`` and the export shorten the pauses.
    run = opened.run.with_data(longest_pause=None)
    data = run.data.build(tokenizer=opened.tokenizer, footprint=opened.task.footprint(), normalise=False)
    try:
        for batch in chain.from_iterable(data.valid().values()):
            for row, recording in enumerate(batch.ids):
                if recording:  # The id of a padding row is empty.
                    samples = batch.audio[row, : int(batch.audio_lengths[row])]
                    yield Utterance(recording, samples.numpy(), batch.texts[row])
    finally:
        data.close()

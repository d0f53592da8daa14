"""Error rates of each decoder on the evaluation sets of a run, and the time of its search.

    python benchmarks/decoders.py sets RUN [RUN ...] --overrides device.threads=1
    DATASET_DIR=path/to/fsdd python benchmarks/decoders.py unheard --out DIR    # each speaker left out
    python benchmarks/decoders.py --smoke                                       # a model of few updates

The n-gram is estimated from the training transcripts of the run. Each half of a set is decoded with the
weight of the n-gram and the word bonus that have the lowest WER on the other half. The error rates are
therefore over the whole set, and no half chooses its own weights.

The times are of the search alone. The frames of a set are computed once. Then one decoder after the
other searches each batch, in --rounds rounds. The table has the medians of wall time and of processor time,
which depends less on other work on the machine.

The sets of a run include the recordings that it held out. `unheard` trains the runs that --out does not have
yet. Tables are Markdown.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import machine
from recipes import TRAIN, speakers, unheard
from torch import Tensor

from speechtrain.batch import Batch
from speechtrain.counter_rng import key_of, seed_at
from speechtrain.decoding.base import Decoder
from speechtrain.inference.loaded_run import LoadedRun, load
from speechtrain.metrics import character_errors, rate_interval, word_errors
from speechtrain.start.build import build_data
from speechtrain.task import examples_of
from speechtrain.text.ngram import write_ngram

COLUMNS = ("set", "decoder", "WER (95 % interval)", "CER", "ms for a second of audio", "processor ms")

DEMO = ("recipe=demo", "trainer.max_epochs=null", "trainer.max_steps=2")  # for --smoke


@dataclass
class Search:
    """A batch and its encoder frames."""

    batch: Batch
    frames: Tensor
    lengths: Tensor


@dataclass
class Bench:
    """A run and the encoded batches of one of its sets."""

    loaded: LoadedRun
    searches: list[Search]

    def errors(self, decoder: Decoder) -> np.ndarray:
        """Return the errors and counts (N, 4) of all utterances, first for words, then for characters."""
        counts = []
        for search in self.searches:
            for example in examples_of(search.batch, self.search(decoder, search)[0]):
                pair = (example.reference, example.hypothesis)
                counts.append((*word_errors(*pair), *character_errors(*pair)))
        return np.array(counts, dtype=float)

    @torch.no_grad()
    def search(self, decoder: Decoder, search: Search) -> tuple[Any, np.ndarray]:
        """Return the hypotheses of a batch, and the wall and processor seconds of its search."""
        opened = self.loaded.opened
        task: Any = opened.task
        task.decoder = decoder
        start = clocks()
        with opened.policy.autocast(opened.device.name):
            hypotheses = task.hypotheses(search.frames, search.lengths)
        return hypotheses, clocks() - start

    def times(self, decoders: dict[str, Decoder], rounds: int) -> dict[str, np.ndarray]:
        """Return the median wall and processor milliseconds of each decoder for a second of audio."""
        seconds = {name: np.zeros((rounds, 2)) for name in decoders}
        for number in range(rounds):
            for search in self.searches:
                for name, decoder in decoders.items():
                    seconds[name][number] += self.search(decoder, search)[1]
        audio = sum(search.batch.seconds for search in self.searches)
        return {name: 1000 * np.median(rows, axis=0) / audio for name, rows in seconds.items()}


def clocks() -> np.ndarray:
    """Return the wall and the processor time in seconds."""
    return np.array([time.perf_counter(), time.process_time()])


@torch.no_grad()
def encoded(loaded: LoadedRun, batches: Iterable[Batch]) -> Iterator[Search]:
    opened = loaded.opened
    task: Any = opened.task
    for batch in batches:
        ready = task.prepare(batch, seed_at(*(key_of(utterance) for utterance in batch.ids)))
        with opened.policy.autocast(opened.device.name):
            yield Search(batch, *task.encoder.encode(opened.device.move(ready)))


def tuned(bench: Bench, decoder: Any, grid: Sequence[tuple[float, float]]) -> tuple[np.ndarray, list[str]]:
    """Return the errors of each half with the best weights of the other half, and a text about each choice.

    The decoder keeps the weights of the second half.
    """
    grid_errors = []
    for decoder.fusion.weight, decoder.fusion.word_bonus in grid:
        grid_errors.append(bench.errors(decoder))
    ids: list[str] = []
    for search in bench.searches:
        ids += filter(None, search.batch.ids)
    half = np.array([key_of(utterance) % 2 == 0 for utterance in ids])
    errors, choices = np.zeros_like(grid_errors[0]), []
    for is_judged in (half, ~half):
        word_errors_of_other_half = [counts[~is_judged, 0].sum() for counts in grid_errors]
        best = int(np.argmin(word_errors_of_other_half))
        errors[is_judged] = grid_errors[best][is_judged]
        choices.append(f"weight {grid[best][0]:g}, bonus {grid[best][1]:g}")
    decoder.fusion.weight, decoder.fusion.word_bonus = grid[best]
    return errors, choices


def row(name: str, decoder: str, counts: np.ndarray, times: np.ndarray) -> str:
    totals = counts.sum(axis=0)
    wer, cer = totals[0] / totals[1], totals[2] / totals[3]
    low, high = rate_interval(counts[:, :2])
    rates = f"{100 * wer:.1f} % ({100 * low:.1f} to {100 * high:.1f}) | {100 * cer:.1f} %"
    return f"| {name} | {decoder} | {rates} | {times[0]:.1f} | {times[1]:.1f} |"


@dataclass
class Options:
    """The settings of all runs."""

    overrides: list[str]
    width: int
    order: int
    grid: list[tuple[float, float]]  # pairs of the n-gram's weight and the word bonus
    rounds: int


def measure(run: Path, options: Options, only: str = "") -> list[str]:
    """Print the rows of each set of a run, or of the set ``only``. Return a text about each set's weights."""
    loaded = load(run, *options.overrides)
    opened = loaded.opened
    data: Any = build_data(opened.run, opened.tokenizer, opened.task)
    with tempfile.TemporaryDirectory(prefix="speechtrain-bench-") as folder:
        lm = f"{folder}/lm.arpa"
        try:
            write_training_ngram(data, opened.tokenizer, Path(lm), options.order)
            sets = {name: list(encoded(loaded, batches)) for name, batches in data.valid().items()}
        finally:
            data.close()
        beam = opened.task.beam
        decoders = {
            "greedy": loaded.opened.used.decoder("greedy", {}),
            f"{beam} {options.width}": loaded.opened.used.decoder(beam, {"width": options.width}),
        }
        fused = loaded.opened.used.decoder(beam, {"width": options.width, "lm": lm})
    names = [only] if only else list(sets)
    return [
        compare(Bench(loaded, sets[name]), f"{run.name}, {name}", decoders, fused, options) for name in names
    ]


def write_training_ngram(data: Any, tokenizer: Any, path: Path, order: int) -> None:
    """Write an n-gram of the training transcripts."""
    rows = data.training_set.rows.tolist()
    write_ngram((data.training_set.index.text(row, tokenizer.normalise) for row in rows), path, order)


def compare(bench: Bench, title: str, decoders: dict[str, Decoder], fused: Decoder, options: Options) -> str:
    """Print a row for each decoder, and for the last one with an n-gram. Return a text about its weights."""
    errors = {name: bench.errors(decoder) for name, decoder in decoders.items()}
    fused_name = f"{list(decoders)[-1]} + n-gram"
    errors[fused_name], weights = tuned(bench, fused, options.grid)
    times = bench.times({**decoders, fused_name: fused}, options.rounds)
    for name, counts in errors.items():
        print(row(title, name, counts, times[name]), flush=True)
    return f"{title}: {'; '.join(weights)}"


def train(run_dir: Path, overrides: list[str]) -> None:
    """Train a run or continue it. A finished run stays as it is."""
    command = [str(TRAIN), *overrides, f"run_dir={run_dir}", "tracking=jsonl"]
    with (run_dir.parent / f"{run_dir.name}.txt").open("ab") as output:
        subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("sets", "unheard"), default="sets")
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, default=Path("runs/decoders"))
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--order", type=int, default=3, help="order of the n-gram")
    parser.add_argument("--weights", type=float, nargs="+", default=[0.1, 0.2, 0.4, 0.6])
    parser.add_argument("--bonuses", type=float, nargs="+", default=[0.0, 1.0, 2.0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--overrides", nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument("--smoke", action="store_true")
    return parser.parse_intermixed_args()


def smoke(options: Options) -> list[str]:
    """Train a transducer and a CTC model for two updates, and measure them."""
    options.grid, options.rounds = [(0.1, 0.0), (0.3, 1.0)], 1
    choices = []
    with tempfile.TemporaryDirectory(prefix="speechtrain-bench-") as folder:
        for model in ("rnnt", "ctc"):
            run = Path(folder, model)
            train(run, [*DEMO, f"model={model}"])
            choices += measure(run, options)
    return choices


def leave_speakers_out(out: Path, options: Options) -> list[str]:
    """Train a run without each speaker of FSDD, and measure it on that speaker."""
    root = os.environ.get("DATASET_DIR", "fsdd")
    out.mkdir(parents=True, exist_ok=True)
    choices = []
    for speaker in speakers(Path(root)):
        run = out / speaker
        train(run, ["recipe=fsdd", *unheard(speaker, root), *options.overrides])
        choices += measure(run, options, "unheard")
    return choices


def main() -> None:
    arguments = parse_arguments()
    grid = list(product(arguments.weights, arguments.bonuses))
    options = Options(arguments.overrides, arguments.width, arguments.order, grid, arguments.rounds)
    print(f"{machine()}\n")
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|", flush=True)
    choices = []
    if arguments.smoke:
        choices += smoke(options)
    elif arguments.what == "unheard":
        choices += leave_speakers_out(arguments.out, options)
    for run in arguments.runs:
        choices += measure(run, options)
    print("\nn-gram, by halves: " + ". ".join(choices))


if __name__ == "__main__":
    main()

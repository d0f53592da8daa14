"""What each decoder makes of a run's evaluation sets, and how long its search takes.

    python benchmarks/decoders.py sets RUN [RUN ...] --overrides device.threads=1
    DATASET_DIR=path/to/fsdd python benchmarks/decoders.py unheard --out DIR    # each speaker left out
    python benchmarks/decoders.py --smoke                                       # a model of few updates

The n-gram is of the transcripts that the run was trained on. Its weight and the word bonus are those of the
lowest WER on one half of a set, and are used on the other half, each half in turn: the figures are of the
whole set, and nothing is chosen on what it is judged by. Times are of the search alone: the frames of a set
are computed once, each batch is then searched by one decoder after the other, in --rounds rounds, of which
the table has the medians: by the clock, and processor time, which other work on the machine changes less.
Recordings that a run held out are its set. `unheard` trains first, or takes what
is in --out. Tables are Markdown.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from recipes import TRAIN, speakers, unheard
from torch import Tensor

from speechtrain.batch import Batch
from speechtrain.config.build import build_data
from speechtrain.counter_rng import key_of, seed_at
from speechtrain.decoding.base import Decoder
from speechtrain.inference.loaded_run import LoadedRun, load
from speechtrain.metrics import character_errors, rate_interval, word_errors
from speechtrain.task import examples_of
from speechtrain.text.ngram import write_ngram

COLUMNS = ("set", "decoder", "WER (95 % interval)", "CER", "ms for a second of audio", "processor ms")

DEMO = ("recipe=demo", "trainer.max_epochs=null", "trainer.max_steps=2")  # of --smoke


@dataclass
class Search:
    """A batch whose frames are computed."""

    batch: Batch
    frames: Tensor
    lengths: Tensor


@dataclass
class Bench:
    """A run, one of its sets, and the times of its searches."""

    loaded: LoadedRun
    searches: list[Search]

    def errors(self, decoder: Decoder) -> np.ndarray:
        """Errors and counts (N, 4), words then characters, of all utterances."""
        counts = []
        for search in self.searches:
            for one in examples_of(search.batch, self.search(decoder, search)[0]):
                pair = (one.reference, one.hypothesis)
                counts.append((*word_errors(*pair), *character_errors(*pair)))
        return np.array(counts, dtype=float)

    @torch.no_grad()
    def search(self, decoder: Decoder, search: Search) -> tuple[Any, np.ndarray]:
        """The hypotheses of a batch, and the seconds of the clock and of the processor."""
        opened = self.loaded.opened
        task: Any = opened.task
        task.decoder = decoder
        begun = np.array([time.perf_counter(), time.process_time()])
        with opened.policy.autocast(opened.device.name):
            found = task.hypotheses(search.frames, search.lengths)
        return found, np.array([time.perf_counter(), time.process_time()]) - begun

    def times(self, decoders: dict[str, Decoder], rounds: int) -> dict[str, np.ndarray]:
        """Median milliseconds for a second of audio, of the clock and of the processor."""
        taken = {name: np.zeros((rounds, 2)) for name in decoders}
        for number in range(rounds):
            for search in self.searches:
                for name, decoder in decoders.items():
                    taken[name][number] += self.search(decoder, search)[1]
        audio = sum(search.batch.seconds for search in self.searches)
        return {name: 1000 * np.median(each, axis=0) / audio for name, each in taken.items()}


@torch.no_grad()
def encoded(loaded: LoadedRun, batches: Iterable[Batch]) -> Iterator[Search]:
    opened = loaded.opened
    task: Any = opened.task
    for batch in batches:
        ready = task.prepare(batch, seed_at(*(key_of(utterance) for utterance in batch.ids)))
        with opened.policy.autocast(opened.device.name):
            yield Search(batch, *task.encoder.encode(opened.device.move(ready)))


def tuned(bench: Bench, decoder: Any, grid: Sequence[tuple[float, float]]) -> tuple[np.ndarray, list[str]]:
    """The errors of each half with the weights of the other half, and what these are."""
    results = []
    for decoder.fusion.weight, decoder.fusion.word_bonus in grid:
        results.append(bench.errors(decoder))
    names = [name for search in bench.searches for name in search.batch.ids if name]
    half = np.array([key_of(name) % 2 == 0 for name in names])
    errors, told = np.zeros_like(results[0]), []
    for judged in (half, ~half):
        best = min(range(len(grid)), key=lambda at: results[at][~judged, 0].sum())
        errors[judged] = results[best][judged]
        told.append(f"weight {grid[best][0]:g}, bonus {grid[best][1]:g}")
    decoder.fusion.weight, decoder.fusion.word_bonus = grid[best]
    return errors, told


def row(name: str, decoder: str, counts: np.ndarray, times: np.ndarray) -> str:
    words, characters = (counts[:, at].sum() / counts[:, at + 1].sum() for at in (0, 2))
    low, high = rate_interval(counts[:, :2])
    rates = f"{100 * words:.1f} % ({100 * low:.1f} to {100 * high:.1f}) | {100 * characters:.1f} %"
    return f"| {name} | {decoder} | {rates} | {times[0]:.1f} | {times[1]:.1f} |"


def measure(run: Path, given: argparse.Namespace, only: str = "") -> None:
    """The rows of each set of a run, or of the set ``only``."""
    loaded = load(run, *given.overrides)
    opened = loaded.opened
    task: Any = opened.task
    data: Any = build_data(opened.config, opened.tokenizer, opened.task)
    with tempfile.TemporaryDirectory(prefix="speechtrain-bench-") as folder:
        lm = Path(folder, "lm.arpa")
        try:
            index, rows = data.index, data.training_set.rows.tolist()
            write_ngram((index.text(at, opened.tokenizer.normalise) for at in rows), lm, given.order)
            sets = {name: list(encoded(loaded, batches)) for name, batches in data.valid().items()}
        finally:
            data.close()
        beam = f"{task.beam} {given.width}"
        greedy = loaded._decoder("greedy", {})
        plain = loaded._decoder(task.beam, {"width": given.width})
        fused = loaded._decoder(task.beam, {"width": given.width, "lm": str(lm)})
    for name, searches in sets.items():
        if only not in ("", name):
            continue
        bench = Bench(loaded, searches)
        errors = {"greedy": bench.errors(greedy), beam: bench.errors(plain)}
        errors[f"{beam} + n-gram"], weights = tuned(bench, fused, given.grid)
        times = bench.times(dict(zip(errors, (greedy, plain, fused), strict=True)), given.rounds)
        for decoder, counts in errors.items():
            print(row(f"{run.name}, {name}", decoder, counts, times[decoder]), flush=True)
        given.told.append(f"{run.name}, {name}: {'; '.join(weights)}")


def train(run_dir: Path, overrides: list[str]) -> None:
    """Train, or continue, or take what is there."""
    command = [str(TRAIN), *overrides, f"run_dir={run_dir}", "tracking=jsonl"]
    with (run_dir.parent / f"{run_dir.name}.txt").open("ab") as output:
        subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("sets", "unheard"), default="sets")
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, default=Path("runs/decoders"))
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--order", type=int, default=3, help="of the n-gram")
    parser.add_argument("--weights", type=float, nargs="+", default=[0.1, 0.2, 0.4, 0.6])
    parser.add_argument("--bonuses", type=float, nargs="+", default=[0.0, 1.0, 2.0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--overrides", nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_intermixed_args()
    given.grid, given.told = list(product(given.weights, given.bonuses)), []
    print(f"{date.today()}, torch {torch.__version__}, load average {os.getloadavg()[0]:.1f}\n")
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|", flush=True)
    if given.smoke:
        given.grid, given.rounds = [(0.1, 0.0), (0.3, 1.0)], 1
        with tempfile.TemporaryDirectory(prefix="speechtrain-bench-") as folder:
            for model in ("rnnt", "ctc"):
                run = Path(folder, model)
                train(run, [*DEMO, f"model={model}"])
                measure(run, given)
    elif given.what == "unheard":
        root = os.environ.get("DATASET_DIR", "fsdd")
        given.out.mkdir(parents=True, exist_ok=True)
        for speaker in speakers(Path(root)):
            run = given.out / speaker
            train(run, ["recipe=fsdd", *unheard(speaker, root), *given.overrides])
            measure(run, given, "unheard")
    for run in given.runs:
        measure(run, given)
    print("\nn-gram, by halves: " + ". ".join(given.told))


if __name__ == "__main__":
    main()

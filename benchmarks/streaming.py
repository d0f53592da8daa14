"""Proofs of streams: frames and texts, an hour on one core, and the delays of words in real time.

    python benchmarks/streaming.py equal RUN        # frames and texts of a stream, and of one pass
    python benchmarks/streaming.py hour RUN         # real-time factor and memory
    python benchmarks/streaming.py delays RUN       # from the end of a word to its final text
    python benchmarks/streaming.py words RUN --reference OTHER    # the same without computation

RUN is a run of `recipe=streaming`. The audio is its held-out recordings. `equal` feeds five recordings
sample by sample, 200 in random pieces, and 20 joined ones of three minutes each, for each context of
`encoder.contexts`. `hour` joins the recordings to one hour, and feeds it in pieces of 300 ms with one thread.
`delays` joins them to --minutes, with a second of their rooms' silence between them, and calls `speechtrain
transcribe --stream --realtime` on one core. `words` shows what FastEmit and a delay penalty bring: a word
ends where the run OTHER says with the whole recording, so a run that writes earlier has smaller delays.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import soundfile
import torch
from silence import rooms
from torch import Tensor

from speechtrain import load
from speechtrain.data.loader import audio_row, collate
from speechtrain.decoding.base import Hypothesis
from speechtrain.decoding.greedy import Greedy
from speechtrain.export.held_out import utterances
from speechtrain.inference.loaded_run import LoadedRun
from speechtrain.nn.conformer import Context

COMMAND = Path(sysconfig.get_path("scripts"), "speechtrain-transcribe")
JOINED_SECONDS = 180.0
PIECE_SECONDS = 0.3

Samples = np.ndarray
"""fp32 samples (S,)."""


@dataclass
class Difference:
    """The largest difference of frames, and the number of texts that differ."""

    recordings: int = 0
    frames: float = 0.0
    texts: int = 0

    def add(self, loaded: LoadedRun, context: Context, samples: Samples, sizes: list[int]) -> None:
        """Compare the stream of ``samples``, in pieces of ``sizes``, with one pass."""
        task = loaded.opened.task
        # No limit of labels may follow from the length of a recording, because a stream does not know it.
        decoder = Greedy(task.decoder.max_symbols_per_step, sys.maxsize)
        batch = collate([audio_row("", samples, task.sample_rate)], task.sample_rate)
        batch.keys.zero_()
        frames, lengths = task.encoder.encode(batch, context)
        (expected,) = task.hypotheses(frames, lengths, decoder)
        stream = task.stream(context, decoder)
        pieces = [stream.encoder.step(piece) for piece in torch.split(batch.audio, sizes, dim=1)]
        streamed = torch.cat([*pieces, stream.encoder.finish()], dim=1)
        for piece in torch.split(streamed, 8, dim=1):
            stream.search.step(task.search_frames(piece))
        text = stream.search.finish().text
        self.recordings += 1
        self.frames = max(self.frames, largest_difference(streamed, frames[:, : int(lengths[0])]))
        self.texts += text != expected.text


def largest_difference(streamed: Tensor, expected: Tensor) -> float:
    assert streamed.shape == expected.shape, (streamed.shape, expected.shape)
    return float((streamed - expected).abs().max())


@torch.no_grad()
def equal(options: argparse.Namespace) -> None:
    """Print the differences for each context and each way to divide recordings into pieces."""
    loaded = load(options.run, "device=cpu", "device.threads=1")
    recordings = [utterance.samples for utterance in utterances(loaded)]
    rate = loaded.sample_rate
    generator = np.random.default_rng(1)
    long = list(itertools.islice(joined(recordings, rate, JOINED_SECONDS), 20))
    ways: list[tuple[str, list[Samples], Callable[[int], list[int]]]] = [
        ("sample by sample", recordings[:5], lambda count: [1] * count),
        ("random pieces", recordings[:200], lambda count: random_sizes(generator, count, rate)),
        ("joined, random pieces", long, lambda count: random_sizes(generator, count, 20 * rate)),
    ]
    print("| context | pieces | recordings | minutes | largest difference of a frame | texts that differ |")
    print("|---|---|---|---|---|---|")
    for timing in loaded.opened.task.encoder.timings:
        for name, chosen, sizes in ways:
            difference = Difference()
            for samples in chosen:
                difference.add(loaded, timing.context, samples, sizes(len(samples)))
            minutes = sum(map(len, chosen)) / rate / 60
            cells = [list(timing.context), name, difference.recordings, f"{minutes:.1f}"]
            print_row(*cells, f"{difference.frames:.1e}", difference.texts)


def joined(recordings: list[Samples], rate: int, seconds: float) -> Iterator[Samples]:
    """Yield endless recordings of at least ``seconds``, each of several ``recordings``."""
    parts, size = list[Samples](), 0
    for recording in itertools.cycle(recordings):
        parts.append(recording)
        size += len(recording)
        if size >= seconds * rate:
            yield np.concatenate(parts)
            parts, size = [], 0


def random_sizes(generator: np.random.Generator, count: int, largest: int) -> list[int]:
    """Return sizes of pieces whose sum is ``count``, each from 1 to ``largest``."""
    sizes = list[int]()
    while count:
        sizes.append(min(count, int(generator.integers(1, largest + 1))))
        count -= sizes[-1]
    return sizes


def hour(options: argparse.Namespace) -> None:
    """Print the real-time factor by processor time, and the memory after two minutes and at the end."""
    loaded = load(options.run, "device=cpu", "device.threads=1")
    rate = loaded.sample_rate
    recordings = [utterance.samples for utterance in utterances(loaded)]
    samples = next(joined(recordings, rate, 3600))
    texts = 0
    size = round(PIECE_SECONDS * rate)
    process = psutil.Process()
    mebibytes = list[float]()
    start = time.process_time()
    with loaded.stream() as stream:
        for position in range(0, len(samples), size):
            texts += sum(event.is_final for event in stream.feed(samples[position : position + size]))
            if position // size == round(120 / PIECE_SECONDS):
                mebibytes.append(process.memory_info().rss / 2**20)
        texts += sum(event.is_final for event in stream.finish())
    seconds = time.process_time() - start
    mebibytes.append(process.memory_info().rss / 2**20)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        "| utterances | real-time factor | MiB after 2 minutes | MiB after 60 | peak |\n|---|---|---|---|---|"
    )
    factor = f"{seconds / (len(samples) / rate):.3f}"
    print_row(texts, factor, *[f"{each:.1f}" for each in mebibytes], f"{peak:.1f}")


def delays(options: argparse.Namespace) -> None:
    """Print the last lines of the command for each look-ahead, on one core."""
    loaded = load(options.run, "device=cpu")
    recordings = [utterance.samples for utterance in utterances(loaded)]
    spoken = []
    for recording, tone in zip(recordings, rooms(recordings), strict=True):
        spoken.append(np.concatenate([recording, np.resize(tone, loaded.sample_rate)]))
    samples = next(joined(spoken, loaded.sample_rate, 60 * options.minutes))
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print("| look-ahead | speed | delays |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "speech.wav")
        soundfile.write(path, samples, loaded.sample_rate)
        for timing in loaded.opened.task.encoder.timings:
            context = ",".join(map(str, timing.context))
            arguments = ["--stream", "--realtime", "--context", context, "device.threads=1"]
            command = [COMMAND, options.run, path, *arguments]
            process = subprocess.run(command, capture_output=True, text=True, check=True)
            print_row(f"{timing.milliseconds} ms", *process.stderr.splitlines()[-2:])


@torch.no_grad()
def words(options: argparse.Namespace) -> None:
    """Print the delays of words in audio time, without computation, for each look-ahead."""
    loaded, reference = load(options.run, "device=cpu"), load(options.reference, "device=cpu")
    task = loaded.opened.task
    recordings = [utterance.samples for utterance in utterances(loaded)]
    print("| look-ahead | words | mean | 90 % |\n|---|---|---|---|")
    for timing in task.encoder.timings:
        found = list[float]()
        for samples in recordings:
            whole = hypothesis(reference, samples, None)
            streamed = hypothesis(loaded, samples, timing.context)
            found += task.word_delays(whole, streamed, timing)
        mean, tail = np.mean(found), np.percentile(found, 90)
        print_row(f"{timing.milliseconds} ms", len(found), f"{mean:.3f} s", f"{tail:.2f} s")


def hypothesis(loaded: LoadedRun, samples: Samples, context: Context | None) -> Hypothesis:
    """Return the text of a recording by greedy search, with the attention of ``context``."""
    task = loaded.opened.task
    batch = collate([audio_row("", samples, task.sample_rate)], task.sample_rate)
    frames, lengths = task.encoder.encode(batch, context)
    (found,) = task.hypotheses(frames, lengths, Greedy())
    text: Hypothesis = found
    return text


def print_row(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    programs = {"equal": equal, "hour": hour, "delays": delays, "words": words}
    parser.add_argument("what", choices=tuple(programs))
    parser.add_argument("run", type=Path)
    parser.add_argument("--minutes", type=float, default=5.0, help="of speech (delays)")
    parser.add_argument("--reference", type=Path, help="the run that says where words end (words)")
    options = parser.parse_args()
    programs[options.what](options)


if __name__ == "__main__":
    main()

"""Counts the labels of held-out recordings that lie outside the stretches that transcription decodes.

    python benchmarks/cut_words.py RUN [--recordings N] [KEY=VALUE …]

The CTC output of the run, which has to have one, aligns the transcript of each recording with the whole
recording (the best path, Viterbi). A label outside the stretches of speech would be lost. A recording whose
first or last label is lost is counted, and the place is printed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

import speechtrain
from speechtrain.data.voice_activity import speech_spans
from speechtrain.export.held_out import utterances


def aligned(scores: NDArray[np.float32], labels: list[int], blank: int) -> list[int]:
    """Return the first frame of each label on the best path through ``scores`` (T, V), log-probabilities."""
    states = [blank]
    for label in labels:
        states += [label, blank]
    count = len(states)
    may_skip = [i > 1 and states[i] not in (blank, states[i - 2]) for i in range(count)]
    best = np.full(count, -np.inf)
    best[:2] = scores[0, states[:2]]
    steps = np.zeros((len(scores), count), np.int8)
    for frame in range(1, len(scores)):
        from_previous = np.concatenate([[-np.inf], best[:-1]])
        from_skip = np.where(may_skip, np.concatenate([[-np.inf] * 2, best[:-2]]), -np.inf)
        choices = np.stack([best, from_previous, from_skip])
        steps[frame] = choices.argmax(0)
        best = choices.max(0) + scores[frame, states]
    state = count - 1 if best[-1] >= best[-2] else count - 2
    frames = [0] * len(labels)
    for frame in range(len(scores) - 1, -1, -1):
        if state % 2:
            frames[state // 2] = frame
        state -= int(steps[frame, state])
    return frames


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("run", type=Path, metavar="RUN")
    parser.add_argument("--recordings", type=int, default=1000, help="the largest number of recordings")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    loaded = speechtrain.load(arguments.run, *arguments.overrides)
    task, rate = loaded.opened.task, loaded.sample_rate
    if getattr(task, "ctc", None) is None:
        parser.error(f"{arguments.run} has no CTC output. Train it with model.ctc_weight=1")
    tokenizer = loaded.opened.tokenizer
    seconds_per_frame = loaded.frame_seconds
    recordings = first_or_last = lost_labels = label_count = 0
    for utterance in list(utterances(loaded))[: arguments.recordings]:
        (features,) = loaded.features(utterance.samples)
        with torch.no_grad():
            scores = task.ctc(torch.from_numpy(features)).log_softmax(-1).numpy()
        labels = tokenizer.encode(utterance.reference)
        if not labels or len(labels) > len(scores):
            continue
        times = [frame * seconds_per_frame for frame in aligned(scores, labels, tokenizer.blank)]
        spans = speech_spans(utterance.samples, rate, loaded.longest_pause)
        lost = [
            not any(start / rate <= time + seconds_per_frame and time <= end / rate for start, end in spans)
            for time in times
        ]
        recordings += 1
        label_count += len(labels)
        lost_labels += sum(lost)
        if lost[0] or lost[-1]:
            first_or_last += 1
            stretches = ", ".join(f"{start / rate:.2f} to {end / rate:.2f}" for start, end in spans)
            print(f"{utterance.id}: labels from {times[0]:.2f} to {times[-1]:.2f} s, speech {stretches} s")
    print(
        f"{recordings} recordings, {label_count} labels: {lost_labels} labels outside the speech, "
        f"{first_or_last} recordings without their first or last label"
    )


if __name__ == "__main__":
    main()

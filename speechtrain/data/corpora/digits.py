"""The embedded corpus: spoken digits in 72 synthetic voices, joined into connected utterances.

It shows that training works, but results do not apply to real speech: the voices are espeak-ng's. The
clips are in ``digits_audio/`` next to this file (57 training and 15 validation voices, one take of each
word). ``tools/make_digits.py`` made them and can make folders of other words and more voices.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from speechtrain.counter_rng import DigitsStream, key_of, uniform_at
from speechtrain.data.corpora.connected import (
    FORMAT,
    GAP_SECONDS,
    SAMPLE_RATE,
    Clips,
    Connected,
    Joined,
    Samples,
)
from speechtrain.data.formats.lhotse_cuts import MOST_SAMPLES
from speechtrain.data.formats.manifests import digest
from speechtrain.data.recordings import Unusable, open_recording
from speechtrain.errors import MALFORMED, DataError
from speechtrain.files import FilePath, json_of, read_bytes, whole_path

EMBEDDED = Path(__file__).parent / "digits_audio"


@dataclass(eq=False)
class Digits(Connected):
    """Connected utterances of one voice each, drawn from isolated words.

    Utterance i is spoken by voice i modulo the number of voices; its number of words, the words
    (with repetition) and the silences between them are draws addressed by (seed, split, i). The
    training and validation voices share no speaker variant.

    ``split`` is ``train`` or ``valid``; ``gap_seconds`` are the shortest and the longest silence;
    ``root`` is a folder written by ``tools/make_digits.py --out``, empty for the embedded words.
    Raises ConfigError for impossible arguments, DataError for a folder that is missing or damaged.
    """

    corpus, splits, fewest = "digits", ("train", "valid"), 1
    is_example = True
    clips: WordClips = field(init=False)
    split: str
    utterances: int = 2000
    min_words: int = 3
    max_words: int = 7
    gap_seconds: tuple[float, ...] = GAP_SECONDS
    seed: int = 0
    root: FilePath = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.clips = WordClips(whole_path(self.root) if self.root else EMBEDDED, self.split)

    def plan(self) -> list[Joined]:
        clips, key = self.clips, key_of(self.split)
        rows, columns = np.arange(self.utterances)[:, None], np.arange(self.max_words)
        draws = uniform_at(self.seed, key, DigitsStream.SIZE, rows[:, 0])
        sizes = self.min_words + (draws * (self.max_words - self.min_words + 1)).astype(int)
        words = (uniform_at(self.seed, key, DigitsStream.WORD, rows, columns) * len(clips.words)).astype(int)
        gaps = self.gaps(uniform_at(self.seed, key, DigitsStream.GAP, rows, columns))
        plan = []
        for i, size in enumerate(sizes.tolist()):
            voice, chosen = i % len(clips.voices), words[i, :size].tolist()
            plan.append(
                Joined(
                    id=f"digits-{self.split}-{self.seed}-{i:06d}",
                    speaker=clips.voices[voice],
                    text=" ".join(clips.words[word] for word in chosen),
                    clips=tuple(voice * len(clips.words) + word for word in chosen),
                    gaps=tuple(gaps[i, : size - 1].tolist()),
                )
            )
        return plan

    def content(self) -> tuple[object, ...]:
        """Return a hash of the index, which contains the hashes of the audio; nothing is decoded."""
        return (self.clips.digest,)


class WordClips(Clips):
    """One split of a folder written by ``tools/make_digits.py``; clips are numbered voice × words + word.

    The first read decodes the whole FLAC file and compares its samples with the hash in
    ``index.json``. Raises DataError for a folder that is missing or damaged.
    """

    def __init__(self, folder: Path, split: str) -> None:
        path = folder / "index.json"
        try:
            index: Any = json_of(read_bytes(path, follow=True).decode())
            part = index["splits"][split]
            self.words = tuple(map(str, index["words"]))
            self.voices = tuple(str(voice["id"]) for voice in part["voices"])
            self._lengths = [int(samples) for voice in part["voices"] for samples in voice["samples"]]
            self.path = folder / part["file"]
            self._pcm_sha256 = part["pcm_sha256"]
            rate = index["sample_rate"]
        except (OSError, KeyError, TypeError, *MALFORMED) as error:
            problem = getattr(error, "strerror", None) or f"damaged ({type(error).__name__}: {error})"
            fix = "set root to a folder written by tools/make_digits.py --out"
            raise DataError(f"{path}: {problem}; {fix}") from None
        is_sound = len(self._lengths) == len(self.words) * len(self.voices) and rate == SAMPLE_RATE
        if not is_sound or not 0 < sum(self._lengths) <= MOST_SAMPLES:
            raise DataError(f"{path}: damaged (its counts differ); make the folder again")
        self._ends = np.cumsum(self._lengths)
        self.digest = digest(FORMAT, self.words, part)

    @property
    def lengths(self) -> Sequence[int]:
        """Samples of each clip."""
        return self._lengths

    def read(self, clip: int) -> Samples:
        """One word of one voice, a view into the decoded split."""
        end = int(self._ends[clip])
        return self._decoded[end - self.lengths[clip] : end]

    @cached_property
    def _decoded(self) -> Samples:
        try:
            with open_recording(str(self.path)) as file:
                samples: Samples = file.read(sum(self._lengths), dtype="int16")
        except Unusable as error:
            raise DataError(f"{error}: cannot be decoded; install or make it again") from None
        if hashlib.sha256(samples.astype("<i2", copy=False).tobytes()).hexdigest() != self._pcm_sha256:
            raise DataError(f"{self.path}: its audio differs from the hash in index.json; install it again")
        return samples

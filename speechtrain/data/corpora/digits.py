"""The embedded corpus: spoken digits in 72 synthetic voices, joined into connected utterances.

It shows that training works. Its results do not apply to real speech, because the voices are espeak-ng's. The
clips are in ``digits_audio/`` next to this file: 57 training and 15 validation voices, with one recording of
each word. ``tools/make_digits.py`` made them and can make folders of other words and more voices.
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
    Samples,
    Utterance,
)
from speechtrain.data.formats.lhotse_cuts import MOST_SAMPLES
from speechtrain.data.formats.manifests import digest
from speechtrain.data.recordings import Unusable, open_recording
from speechtrain.errors import MALFORMED, DataError
from speechtrain.files import FilePath, absolute_path, parse_json, read_bytes

EMBEDDED = Path(__file__).parent / "digits_audio"


@dataclass(eq=False)
class Digits(Connected):
    """Connected utterances of one voice each, drawn from isolated words.

    Utterance i is spoken by voice i modulo the number of voices. Its number of words, the words
    (with repetition) and the silences between them are random numbers of the address (seed, split, i). The
    training and validation voices share no speaker variant.

    ``split`` is ``train`` or ``valid``. ``gap_seconds`` are the shortest and the longest silence.
    ``root`` is a folder written by ``tools/make_digits.py --out``, or empty for the embedded words.
    Raises ConfigError for impossible arguments, DataError for a folder that is missing or damaged.
    """

    corpus, splits, min_utterances = "digits", ("train", "valid"), 1
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
        folder = absolute_path(self.root) if self.root else EMBEDDED
        self.clips = WordClips(folder, self.split)

    def all_utterances(self) -> list[Utterance]:
        key = key_of(self.split)
        rows = np.arange(self.utterances)[:, None]
        columns = np.arange(self.max_words)
        size_numbers = uniform_at(self.seed, key, DigitsStream.SIZE, rows[:, 0])
        possible_sizes = self.max_words - self.min_words + 1
        sizes = self.min_words + (size_numbers * possible_sizes).astype(int)
        word_numbers = uniform_at(self.seed, key, DigitsStream.WORD, rows, columns)
        words = (word_numbers * len(self.clips.words)).astype(int)
        gaps = self.gaps(uniform_at(self.seed, key, DigitsStream.GAP, rows, columns))
        utterances = []
        clips = self.clips
        for i, size in enumerate(sizes.tolist()):
            voice = i % len(clips.voices)
            utterance_words = words[i, :size].tolist()
            utterance = Utterance(
                id=f"digits-{self.split}-{self.seed}-{i:06d}",
                speaker=clips.voices[voice],
                text=" ".join(clips.words[word] for word in utterance_words),
                clips=tuple(voice * len(clips.words) + word for word in utterance_words),
                gaps=tuple(gaps[i, : size - 1].tolist()),
            )
            utterances.append(utterance)
        return utterances

    def content(self) -> tuple[object, ...]:
        """Return a hash of the index, which contains the hashes of the audio. Nothing is decoded."""
        return (self.clips.digest,)


class WordClips(Clips):
    """One split of a folder written by ``tools/make_digits.py``.

    The number of a clip is voice × words + word. The first read decodes the whole FLAC file and compares its
    samples with the hash in ``index.json``. Raises DataError for a folder that is missing or damaged.
    """

    def __init__(self, folder: Path, split: str) -> None:
        path = folder / "index.json"
        try:
            index: Any = parse_json(read_bytes(path, follow=True).decode())
            split_index = index["splits"][split]
            self.words = tuple(map(str, index["words"]))
            self.voices = tuple(str(voice["id"]) for voice in split_index["voices"])
            self._lengths: list[int] = []
            for voice in split_index["voices"]:
                self._lengths += map(int, voice["samples"])
            self.path = path.parent / split_index["file"]
            self._pcm_sha256 = split_index["pcm_sha256"]
            self.digest = digest(FORMAT, self.words, split_index)
            rate = index["sample_rate"]
        except (OSError, KeyError, TypeError, *MALFORMED) as error:
            problem = getattr(error, "strerror", None) or f"damaged ({type(error).__name__}: {error})"
            fix = "Set root to a folder written by tools/make_digits.py --out"
            raise DataError(f"{path}: {problem}. {fix}") from None
        is_complete = len(self._lengths) == len(self.words) * len(self.voices)
        if not is_complete or rate != SAMPLE_RATE or not 0 < sum(self._lengths) <= MOST_SAMPLES:
            raise DataError(f"{path}: damaged (its counts differ). Make the folder again")
        self._ends = np.cumsum(self._lengths)

    @property
    def lengths(self) -> Sequence[int]:
        """The samples of each clip."""
        return self._lengths

    def read(self, clip: int) -> Samples:
        """Return one word of one voice, as a view of the decoded split."""
        end = int(self._ends[clip])
        return self._samples[end - self.lengths[clip] : end]

    @cached_property
    def _samples(self) -> Samples:
        """The decoded split. Raises DataError if it is damaged."""
        try:
            with open_recording(str(self.path)) as file:
                samples: Samples = file.read(sum(self._lengths), dtype="int16")
        except Unusable as error:
            raise DataError(f"{error}: cannot be decoded. Install or make it again") from None
        pcm = samples.astype("<i2", copy=False).tobytes()
        if hashlib.sha256(pcm).hexdigest() != self._pcm_sha256:
            raise DataError(f"{self.path}: its audio differs from the hash in index.json. Install it again")
        return samples

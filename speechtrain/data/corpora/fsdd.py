"""The Free Spoken Digit Dataset: real recordings of single digits, joined into connected utterances.

Source: github.com/Jakobovski/free-spoken-digit-dataset, CC BY-SA 4.0. The files are
``{digit}_{speaker}_{index}.wav`` at 8 kHz. Index 0 to 4 of each digit and speaker is the test set of the
data set's authors.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice, zip_longest
from pathlib import Path

import numpy as np

from speechtrain.counter_rng import FsddStream, bits_at, key_of, uniform_at
from speechtrain.data.corpora.connected import GAP_SECONDS, SAMPLE_RATE, Clips, Connected, Samples, Utterance
from speechtrain.data.recordings import Unusable, open_recording, read_header
from speechtrain.errors import DataError, nearest
from speechtrain.files import FilePath, absolute_path, read_bytes

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEST_INDICES = range(5)
_NAME = re.compile(r"([0-9])_(.+)_([0-9]{1,9})\.wav")
_LONGEST_SECONDS = 60.0


@dataclass(frozen=True, order=True)
class Take:
    """One recording of one digit."""

    speaker: str
    digit: int
    index: int  # the number of the recording among those with the same speaker and digit
    path: Path


@dataclass(eq=False)
class Fsdd(Connected):
    """Connected digits of one speaker each, joined from real recordings.

    A round shuffles each speaker's recordings and divides them into groups of ``min_words`` to ``max_words``
    recordings. A speaker's last group may be shorter. So a round uses every recording once. Each group is an
    utterance, and the speakers alternate. ``utterances=0`` means exactly one round. Another number of
    utterances is taken from as many rounds as needed.

    - ``root`` contains ``recordings/`` or the WAV files themselves.
    - ``split`` is ``train`` or ``test`` (index 0 to 4, never in training).
    - ``only_speakers`` (empty: all) and ``exclude_speakers`` select the speakers.
    - ``gap_seconds`` are the shortest and the longest silence between words.

    Recordings of another rate than 16 kHz are resampled, and several channels are averaged. Raises
    ConfigError for impossible arguments. Raises DataError for a missing folder, unknown speakers, or (when
    the cuts are made) a recording that cannot be decoded.
    """

    corpus, splits, min_utterances = "fsdd", ("train", "test"), 0
    clips: Recordings = field(init=False)
    root: FilePath
    split: str
    utterances: int = 0
    min_words: int = 3
    max_words: int = 7
    gap_seconds: tuple[float, ...] = GAP_SECONDS
    seed: int = 0
    exclude_speakers: list[str] | None = None
    only_speakers: list[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        takes = find_takes(self.root)
        self.all_speakers = sorted({take.speaker for take in takes})
        included, excluded = self.only_speakers or self.all_speakers, self.exclude_speakers or []
        for name in [*included, *excluded]:
            if name not in self.all_speakers:
                raise DataError(
                    f"fsdd: the speaker {name!r} is unknown{nearest(name, self.all_speakers)}. "
                    f"Choose from {', '.join(self.all_speakers)}"
                )
        self.speakers = sorted(set(included) - set(excluded))
        is_test = self.split == "test"
        self.takes = []
        for take in sorted(takes):
            if take.speaker in self.speakers and (take.index in TEST_INDICES) == is_test:
                self.takes.append(take)
        if not self.takes:
            raise DataError(
                f"{self.root} has no {self.split} recordings of {', '.join(self.speakers) or 'any speaker'}. "
                "Check only_speakers and exclude_speakers"
            )
        self.clips = Recordings([take.path for take in self.takes])

    def all_utterances(self) -> list[Utterance]:
        rounds = (self._round(number) for number in range(self.utterances or 1))
        return list(islice(chain.from_iterable(rounds), self.utterances or None))

    def _round(self, number: int) -> Iterator[Utterance]:
        """Yield the utterances of one round, in which every recording is used once."""
        groups = [list(self._groups(speaker, number)) for speaker in self.speakers]
        for i, row in enumerate(zip_longest(*groups)):
            for speaker, group in zip(self.speakers, row, strict=True):
                if group is None:
                    continue
                address = (self.seed, key_of(speaker), number, i, np.arange(len(group) - 1))
                gaps = self.gaps(uniform_at(*address, FsddStream.GAP))
                digits = [self.takes[clip].digit for clip in group]
                yield Utterance(
                    id=f"fsdd-{self.split}-{self.seed}-{speaker}-{number:03d}-{i:06d}",
                    speaker=speaker,
                    text=" ".join(WORDS[digit] for digit in digits),
                    clips=group,
                    gaps=tuple(gaps.tolist()),
                )

    def _groups(self, speaker: str, round_number: int) -> Iterator[tuple[int, ...]]:
        """Yield the clips of each of a speaker's utterances in one round."""
        clips = np.array([clip for clip, take in enumerate(self.takes) if take.speaker == speaker])
        numbers, address = np.arange(len(clips)), (self.seed, key_of(speaker), round_number)
        order = np.argsort(bits_at(*address, numbers, FsddStream.ORDER), kind="stable")
        remaining = clips[order].tolist()
        for number in uniform_at(*address, numbers, FsddStream.SIZE):
            if len(remaining) <= self.max_words:
                break
            # If possible, enough clips remain for another group of ``min_words``.
            max_size = min(self.max_words, len(remaining) - self.min_words)
            max_size = max(self.min_words, max_size)
            possible_sizes = max_size - self.min_words + 1
            size = self.min_words + int(number * possible_sizes)
            yield tuple(remaining[:size])
            remaining = remaining[size:]
        if remaining:
            yield tuple(remaining)

    def content(self) -> tuple[object, ...]:
        """Return the names of the recordings and a hash of their bytes."""
        return [take.path.name for take in self.takes], self.clips.digest


def find_takes(root: str) -> list[Take]:
    """Return the recordings in ``root/recordings`` or ``root``. Raises DataError if there are none."""
    folder = absolute_path(root)
    if (folder / "recordings").is_dir():
        folder = folder / "recordings"
    takes = []
    if folder.is_dir():
        for path in folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and path.name.isprintable():
                digit, speaker, index = match.groups()
                takes.append(Take(speaker, int(digit), int(index), path))
    if not takes:
        raise DataError(
            f"{folder} has no recordings digit_speaker_index.wav. Get them with "
            "'git clone https://github.com/Jakobovski/free-spoken-digit-dataset' and set root or DATASET_DIR "
            "to that folder"
        )
    return takes


class Recordings(Clips):
    """Audio files as 16 kHz mono clips. All files are read when ``digest`` or ``lengths`` is first used.

    Reading 2,500 files of 7 kB takes a fraction of a second. The digest depends on the bytes of the files and
    not on their times, so it is equal on every machine. Raises DataError for a file that cannot be read.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths

    @property
    def digest(self) -> str:
        """SHA-256 of the files' SHA-256 hashes, in order."""
        return self._digest_and_lengths[0]

    @property
    def lengths(self) -> Sequence[int]:
        """The samples of each clip at 16 kHz."""
        return self._digest_and_lengths[1]

    @cached_property
    def _digest_and_lengths(self) -> tuple[str, list[int]]:
        sha256, lengths = hashlib.sha256(), []
        for path in self.paths:
            try:
                content = read_bytes(path, follow=True)
                header = read_header(str(path))
            except (OSError, Unusable) as error:
                raise _unreadable(path, error) from None
            if header.duration > _LONGEST_SECONDS:
                raise _unreadable(path, f"{header.duration:.0f} s are too long for a digit")
            sha256.update(hashlib.sha256(content).digest())
            lengths.append(_resampled_length(header.frames, header.samplerate))
        return sha256.hexdigest(), lengths

    def read(self, clip: int) -> Samples:
        """Return one recording, resampled by scipy's polyphase filter."""
        from scipy.signal import resample_poly

        path = self.paths[clip]
        try:
            with open_recording(str(path)) as file:
                samples, rate = file.read(dtype="int16", always_2d=True), file.samplerate
        except Unusable as error:
            raise _unreadable(path, error) from None
        if _resampled_length(len(samples), rate) != self.lengths[clip]:
            raise _unreadable(path, "it has changed during the run")
        divisor = math.gcd(SAMPLE_RATE, rate)
        mono = samples.astype(np.float64).mean(axis=1)
        resampled = resample_poly(mono, SAMPLE_RATE // divisor, rate // divisor)
        clipped: Samples = np.clip(np.rint(resampled), -32768, 32767).astype(np.int16)
        return clipped


def _resampled_length(frames: int, rate: int) -> int:
    """Return the number of samples at 16 kHz, rounded up."""
    return -(-frames * SAMPLE_RATE // rate)


def _unreadable(path: Path, cause: object) -> DataError:
    return DataError(f"{path}: cannot be read as audio ({cause}). Restore or remove it")

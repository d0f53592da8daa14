"""Manifests that are too large or too deep, of wrong numbers and types, and paths that are no recordings."""

# ruff: noqa: E501 - tables of cases

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from speechtrain.text.normalise import NORMALISERS

from .data import RATE, Place, Record, convert, evaluate, prepare, train
from .forks import Forks, faults

ESCAPES = "a\x1b]0;pwned\x07\x1b[31m\u202e\x9b\u2028z"


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "place")


def raw(place: Place, key: str, value: str, base: Record | None = None) -> Path:
    """A manifest whose ``key``, with dots for levels, has a value that Python's JSON would not write."""
    record = base or place.nemo()
    *outer, last = key.split(".")
    held: Any = record
    for part in outer:
        held = held[int(part)] if isinstance(held, list) else held[part]
    held[int(last) if isinstance(held, list) else last] = "@@"
    return place.file("m.jsonl", json.dumps(record).replace('"@@"', value) + "\n")


def reads(forks: Forks, place: Place, good: Path, source: object, refuses: bool | None) -> None:
    """What decodes a source and what plans with it hold; ``refuses`` says what ``prepare --check`` does."""
    assert faults(prepare(forks, place, source), refuses=refuses, canaries=[place.canary]) == []
    assert faults(evaluate(forks, place, good, source), canaries=[place.canary]) == []


NUMBERS = ("1e999", "-1e999", "NaN", "Infinity", "-Infinity", "-5", "9" * 400, "9" * 5_000, "1e300", "1e14",
           "1e9", '"2"', "null", "true", "[]", "{}", "1e-320", "0", "-0.0", "5e-324", "1e308")  # fmt: skip


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("key", ["duration", "offset", "orig_sample_rate"])
def test_numbers_of_nemo(forks: Forks, place: Place, good: Path, key: str, number: str) -> None:
    reads(forks, place, good, raw(place, key, number), None)


CUT_NUMBERS = (
    *("duration", "start", "channel", "id", "type", "supervisions", "custom", "recording", "features"),
    *("recording.duration", "recording.sampling_rate", "recording.num_samples", "recording.channel_ids"),
    *("recording.id", "recording.sources", "recording.transforms", "recording.sources.0"),
    *("recording.sources.0.channels", "recording.sources.0.source", "recording.sources.0.type"),
    *("supervisions.0", "supervisions.0.text", "supervisions.0.start", "supervisions.0.speaker"),
)
ODD = ("1e999", "NaN", "-5", "9" * 400, '"x"', "null", "true", "[]", "{}", "5", "[[]]", '["x"]', "[5]", "[1000000000]",
       "[null]", '{"a": 1}')  # fmt: skip


@pytest.mark.parametrize("value", ODD)
def test_values_of_a_cut(forks: Forks, place: Place, value: str) -> None:
    """Each key of a cut of one file, of a mixture's track and of a recording's transform."""
    speed = {"name": "Speed", "kwargs": {"factor": 1.1}}
    faulty = {}
    for key in CUT_NUMBERS:
        ended = prepare(forks, place, raw(place, key, value, place.cut()))
        faulty[key] = faults(ended, canaries=[place.canary])
    tracks = [f"tracks.1.cut.{key}" for key in CUT_NUMBERS]
    for key in ("id", "tracks", "tracks.1", "tracks.1.offset", "tracks.1.snr", "tracks.1.type", "tracks.1.cut",
                "snr_reference", "transforms", "supervisions", "duration", "custom", *tracks):  # fmt: skip
        base = place.mixed(place.track(), place.track(), transforms=[], supervisions=[], duration=1.0)
        base |= {"custom": {}, "id": "m", "snr_reference": None}
        base["tracks"][1]["cut"]["recording"]["transforms"] = [speed]
        faulty[key] = faults(prepare(forks, place, raw(place, key, value, base)), canaries=[place.canary])
    for key in ("name", "kwargs", "kwargs.factor"):
        base = place.cut(place.recording(transforms=[json.loads(json.dumps(speed))]))
        path = raw(place, f"recording.transforms.0.{key}", value, base)
        faulty[f"transform {key}"] = faults(prepare(forks, place, path), canaries=[place.canary])
    for key in ("duration", "sampling_rate", "num_samples", "feat_value", "supervisions", "custom", "id"):
        silence = {
            "id": "p",
            "type": "PaddingCut",
            "duration": 1.0,
            "sampling_rate": RATE,
            "num_samples": RATE,
        }
        silence |= {"feat_value": 0.0, "supervisions": [], "custom": {}}
        faulty[f"silence {key}"] = faults(prepare(forks, place, raw(place, key, value, silence)))
    assert {key: found for key, found in faulty.items() if found} == {}


@pytest.mark.parametrize("value", [*ODD, '"\\ud800"', '"a\\u0000b"', '"/"', '""'])
def test_values_of_other_formats(forks: Forks, place: Place, value: str) -> None:
    mlperf = {"transcript": "a", "files": [{"fname": str(place.ok), "duration": 2.0, "speed": 1}]}
    mlperf["original_duration"] = 2.0
    spoken = {"id": "s", "recording_id": "r", "start": 0, "duration": 2, "channel": 0, "text": "one"}
    faulty: dict[str, list[str]] = {}
    for key in ("audio_filepath", "text", "speaker", "lang", "text_filepath", "normalized_text"):
        base = {"audio_filepath": str(place.ok), "duration": 2.0}
        faulty[f"nemo {key}"] = faults(prepare(forks, place, raw(place, key, value, base)))
    for key in ("transcript", "files", "files.0", "files.0.fname", "files.0.duration", "files.0.speed",
                "original_duration", "files.0.sample_rate"):  # fmt: skip
        path = raw(place, key, value, json.loads(json.dumps(mlperf)))
        faulty[f"mlperf {key}"] = faults(prepare(forks, place, path))
    for key in ("id", "recording_id", "start", "duration", "channel", "text", "speaker"):
        recordings = place.lines(place.recording(), name="recordings.jsonl")
        ended = prepare(forks, place, recordings, raw(place, key, value, dict(spoken)))
        faulty[f"supervision {key}"] = faults(ended)
    for key in (
        "id",
        "sources",
        "sources.0",
        "sampling_rate",
        "num_samples",
        "duration",
        "channel_ids",
        "transforms",
    ):
        path = raw(place, key, value, place.recording())
        faulty[f"recording {key}"] = faults(prepare(forks, place, path))
        spoken_path = place.lines(spoken, name="supervisions.jsonl")
        faulty[f"pair's recording {key}"] = faults(prepare(forks, place, path, spoken_path))
    assert {key: found for key, found in faulty.items() if found} == {}


def nested_mixture(place: Place, depth: int) -> Record:
    deep: Record = place.cut()
    for number in range(depth):
        inner = {"type": deep["type"], "offset": 0.0, "cut": deep}
        deep = {"id": f"m{number}", "type": "MixedCut", "tracks": [inner]}
    return deep


def silence(seconds: float, rate: int = RATE, **more: object) -> Record:
    known = {"id": "p", "type": "PaddingCut", "duration": seconds, "sampling_rate": rate, "feat_value": 0.0}
    return {**known, "num_samples": round(seconds * rate), "supervisions": [], **more}


def transformed(place: Place, *transforms: Record, **more: object) -> Record:
    return place.cut(place.recording(transforms=list(transforms), **more), **more)


def resample(source: float, target: float) -> Record:
    return {"name": "Resample", "kwargs": {"source_sampling_rate": source, "target_sampling_rate": target}}


def speed(factor: float, name: str = "Speed") -> Record:
    return {"name": name, "kwargs": {"factor": factor}}


LARGE: dict[str, Callable[[Place], Record]] = {
    "400 mixtures in each other": lambda p: nested_mixture(p, 100),
    "silence of 10^10 samples": lambda p: silence(10.0, 10**9),
    "silence of 10^15 samples": lambda p: silence(1e6, 10**9),
    "silence of a day": lambda p: silence(86_400.0),
    "silence of a day at 1 kHz": lambda p: silence(86_400.0, 1_000),
    "silence of 4.6 hours": lambda p: silence(2**28 / RATE),
    "a track after 10^6 s": lambda p: p.mixed(p.track(), p.track(offset=1e6)),
    "a track after 20 hours": lambda p: p.mixed(p.track(), p.track(offset=72_000.0)),
    "the first track after 20 hours": lambda p: p.mixed(p.track(offset=72_000.0)),
    "a track after 4 hours of 64 channels": lambda p: p.mixed(
        {"type": "MultiCut", "offset": 0.0, "cut": {**p.cut(p.recording(channel_ids=[*range(64)])), "channel": [*range(64)]}},
        p.track(offset=14_400.0),
    ),
    "a track before the start": lambda p: p.mixed(p.track(), p.track(offset=-5.0)),
    "1,000 tracks of silence": lambda p: p.mixed(
        p.track(), *[{"type": "PaddingCut", "offset": 0.0, "cut": silence(16.0)}] * 999
    ),
    "1,000 tracks over a long one": lambda p: p.mixed(
        {"type": "PaddingCut", "offset": 0.0, "cut": silence(10_000.0)}, *[p.track(offset=9_000.0)] * 999
    ),
    "resampled from 1 to 10^9": lambda p: transformed(p, resample(1, 10**9)),
    "resampled 768 times": lambda p: transformed(p, resample(1_000, 768_000)),
    "resampled 768^2 times": lambda p: transformed(p, *[resample(1_000, 768_000)] * 2),
    "resampled 768^2 times and back": lambda p: transformed(
        p, *[resample(1_000, 768_000)] * 2, *[resample(768_000, 1_000)] * 2
    ),
    "resampled by co-prime rates": lambda p: transformed(p, resample(15_991, 16_001)),
    "resampled by large co-prime rates": lambda p: transformed(p, resample(767_999, 768_000)),
    "resampled by co-prime rates of 60 kHz": lambda p: transformed(p, resample(60_000, 60_001)),
    "at 1/10^9 of the speed": lambda p: transformed(p, speed(1e-9)),
    "at 1/10 of the speed, 4 times": lambda p: transformed(p, *[speed(0.1)] * 4),
    "at 1/10 of the speed, 16 times": lambda p: transformed(p, *[speed(0.1)] * 16),
    "at 10 times the speed, 16 times": lambda p: transformed(p, *[speed(10.0)] * 16),
    "at a speed of co-prime rates": lambda p: transformed(p, speed(1.0001)),
    "at a speed of large co-prime rates": lambda p: transformed(p, speed(1 + 1 / 48_000), sampling_rate=48_000),
    "at a speed of the largest co-prime rates": lambda p: transformed(
        p, speed(1 - 1 / 768_000), sampling_rate=768_000
    ),
    "at a tempo of 1/10, 16 times": lambda p: transformed(p, *[speed(0.1, "Tempo")] * 16),
    "louder 16 times": lambda p: transformed(p, *[speed(1e3, "Volume")] * 16),
    "a mixture resampled 768^2 times": lambda p: p.mixed(p.track(), transforms=[resample(1_000, 768_000)] * 2),
    "a mixture at 1/10 of the speed, 6 times": lambda p: p.mixed(p.track(), transforms=[speed(0.1)] * 6),
    "an unknown transform": lambda p: transformed(p, {"name": "X", "kwargs": {}}),
    "a transform that is a text": lambda p: p.cut(p.recording(transforms="x")),
    "a room of 10^9 samples": lambda p: transformed(
        p, {"name": "ReverbWithImpulseResponse", "kwargs": {"rir_generator": {"sr": 10**9, "rt60_range": [1e3, 1001]}}}
    ),
    "channels of 10^9": lambda p: p.cut(p.recording(channel_ids=[10**9])),
    "tracks that are no cuts": lambda p: p.mixed(5),
    "an id of 10^6 letters": lambda p: p.cut(id="a" * 10**6),
    "a text that is a list of 10^6": lambda p: p.cut(supervisions=[{"text": [1] * 10**6}]),
    "a type of 10^6 letters": lambda p: p.cut(type="a" * 10**6 + "Cut"),
    "a path of 10^6 letters": lambda p: p.cut(p.recording("a" * 10**6 + ".wav")),
    "a nemo duration that is a list of 10^6": lambda p: p.nemo(duration=[1] * 10**6),
    "a nemo text that is a list of 10^6": lambda p: p.nemo(text=[1] * 10**6),
    "a word of 10^6 letters": lambda p: p.nemo(text="a" * 10**6),
    "a word of 500,000 letters": lambda p: p.nemo(text="a" * 500_000),
    "10^5 words": lambda p: p.nemo(text="a " * 10**5),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_sizes_of_a_cut(forks: Forks, place: Place, good: Path, name: str) -> None:
    reads(forks, place, good, place.lines(LARGE[name](place)), None)


def test_training_reads_past_cuts_without_bound(forks: Forks, place: Place) -> None:
    """They are skipped, each with a reason, or are one line."""
    names = ("at 1/10 of the speed, 16 times", "resampled 768^2 times", "a track after 20 hours",
             "at a speed of large co-prime rates")  # fmt: skip
    for number, name in enumerate(names):
        bad = LARGE[name](place) | {"id": f"bad{number}"}
        path = place.lines(*[place.cut(id=str(i)) for i in range(4)], bad, name=f"{number}.jsonl")
        ended = train(forks, place, path)
        assert faults(ended, canaries=[place.canary]) == [], name
        shutil.rmtree(place.folder / "run", ignore_errors=True)


def members(path: Path, start: bytes, fill: bytes, count: int, end: bytes = b"") -> None:
    """A gzipped file of ``start``, ``count`` times 64 MiB of ``fill``, and ``end``."""
    packed = gzip.compress((fill * (2**26 // len(fill) + 1))[: 2**26 // len(fill) * len(fill)])
    with path.open("wb") as file:
        file.write(gzip.compress(start))
        for _ in range(count):
            file.write(packed)
        file.write(gzip.compress(end))


BOMBS: dict[str, tuple[str, bytes, bytes, bytes]] = {
    "a line of spaces": ("a.jsonl.gz", b" ", b" ", b""),
    "a string": ("a.jsonl.gz", b'{"audio_filepath": "', b"a", b""),
    "empty lines": ("a.jsonl.gz", b"", b"\n", b""),
    "lines of one space": ("a.jsonl.gz", b"", b" \n", b""),
    "empty lines behind a record": ("a.jsonl.gz", b'{"audio_filepath": "a", "duration": 1}\n', b"\n", b""),
    "an array of one string": ("a.json.gz", b'[{"transcript": "', b"a", b""),
    "an array of one string with an emoji": ("a.json.gz", '[{"transcript": "\U0001f600'.encode(), b"a", b""),
    "an array of commas": ("a.json.gz", b"[", b",", b""),
    "an array of spaces": ("a.json.gz", b"[", b" ", b""),
    "an array of lists": ("a.json.gz", b"[[", b"[],", b"[]]]"),
    "an array of one object of lists": ("a.json.gz", b'[{"transcript": "a", "files": [', b"[],", b"[]]}]"),
    "an array of lists in many lines": ("a.json.gz", b"[[", b"[],\n", b"[]]]"),
    "an array of objects": ("a.json.gz", b'[{"transcript": "a", "files": []}', b',{"transcript":"a","files":[{"fname":"x"}],"original_duration":1}', b"]"),
    "a TSV that ends in one line": ("a.tsv.gz", b"/tmp\nok.wav\t32000\n", b"\0", b""),
    "a TSV of one recording": ("a.tsv.gz", b"/tmp\n", b"a", b"\t100\n"),
}  # fmt: skip


@pytest.mark.parametrize("count", [7, 96])
@pytest.mark.parametrize("name", BOMBS)
def test_a_packed_bomb_is_one_line(forks: Forks, place: Place, name: str, count: int) -> None:
    """With 7 members, 448 MiB, it is below the limit of an array; with 96, it has 6 GiB."""
    file, start, fill, end = BOMBS[name]
    path = place.folder / file
    members(path, start, fill, count, end)
    assert faults(prepare(forks, place, path, check=False), refuses=True) == []


SIZES: dict[str, tuple[str, bytes]] = {
    "lists in lists": ("jsonl", b"[" * 100_000),
    "objects in objects": ("jsonl", b'{"a":' * 100_000),
    "lists in a line": ("jsonl", b'{"type":"MonoCut","id":"a","x":' + b"[" * 50_000 + b"]" * 50_000 + b"}\n"),
    "lists in an array": ("json", b'[{"transcript":"a","files":[],"x":' + b"[" * 50_000 + b"]" * 50_000 + b"}]"),
    "lists in an id": ("jsonl", b'{"type":"MonoCut","id":' + b"[" * 900 + b"]" * 900 + b',"duration":1}\n'),
    "a line of 10^7 characters": ("jsonl", b'{"audio_filepath":"x","duration":1,"text":"' + b"a " * 5_000_000 + b'"}\n'),
    "a line of 10^7 spaces": ("jsonl", b" " * 10**7 + b"\n"),
    "a line of 5 million lists": ("jsonl", b'{"audio_filepath":"x","duration":1,"x":[' + b"[]," * 5_000_000 + b"[]]}\n"),
    "a line of 2 million objects": ("jsonl", b'{"audio_filepath":"x","x":[' + b'{"":0},' * 2_000_000 + b"0]}\n"),
    "zero bytes": ("jsonl", b"\0" * 1_000),
    "a zero byte behind a brace": ("jsonl", b"{\0}"),
    "UTF-16": ("jsonl", '{"audio_filepath": "a"}'.encode("utf-16")),
    "UTF-32": ("jsonl", '{"audio_filepath": "a"}'.encode("utf-32")),
    "UTF-7": ("jsonl", b"+AHs-\n"),
    "no UTF-8": ("jsonl", b'{"audio_filepath": "\xff\xfe"}\n'),
    "no UTF-8 in an array": ("json", b'[{"transcript": "\xff\xfe", "files": []}]\n'),
    "overlong UTF-8": ("jsonl", b'{"audio_filepath": "\xc0\xaf"}\n'),
    "nothing": ("jsonl", b""),
    "only a byte order mark": ("jsonl", b"\xef\xbb\xbf"),
    "packed, nothing": ("jsonl.gz", gzip.compress(b"")),
    "packed, torn": ("jsonl.gz", gzip.compress(b'{"audio_filepath": "a"}\n' * 1_000)[:60]),
    "packed, of rubbish": ("jsonl.gz", b"\x1f\x8b" + bytes(range(100))),
    "packed twice": ("jsonl.gz", gzip.compress(gzip.compress(b"{}"))),
    "a key 10^6 times": ("jsonl", b"{" + b",".join([b'"audio_filepath":"x"'] * 700_000) + b"}"),
    "10^6 keys": ("jsonl", b"{" + b",".join(b'"k%d":1' % i for i in range(10**6)) + b"}"),
    "an array without end": ("json", b'[{"transcript":"a","files":[{"fname":"x"}],"original_duration":1},'),
    "an array of 10^7 commas": ("json", b"[" + b"," * 10**7 + b"]"),
    "an array of a string without end": ("json", b'[{"transcript":"' + b"a" * 3 * 10**7),
    "an array of numbers": ("json", b"[" + b"1," * 10**6 + b"1]"),
    "an array in an array": ("json", b'[[{"transcript":"a"}]]'),
    "a lone quote": ("jsonl", b'{"'),
    "a number of 10^6 digits": ("jsonl", b'{"audio_filepath":"x","duration":' + b"9" * 10**6 + b"}\n"),
    "escapes instead of JSON": ("jsonl", b"\x1b]0;pwned\x07\x1b[31m{}"),
    "escapes in a TSV": ("tsv", b"/tmp\na\x1b[31m\t5\nb\x1b[31m\n"),
    "escapes as a TSV's root": ("tsv", b"/tmp/\x1b[31m\nok.wav\t5\n"),
    "a TSV whose root has 10^6 letters": ("tsv", b"/" + b"a" * 10**6 + b"\nok.wav\t5\n"),
    "a TSV whose recording has 10^6 letters": ("tsv", b"/tmp\n" + b"a" * 10**6 + b"\t5\n"),
    "a TSV with a zero byte in its root": ("tsv", b"/tmp\0\nok.wav\t5\n"),
    "a TSV with a user as its root": ("tsv", b"~nobody-of-this-name/x\nok.wav\t5\n"),
    "a TSV of the root folder": ("tsv", b"/\netc/passwd\t10\n"),
    "a TSV of a folder above": ("tsv", b"../../../..\netc/passwd\t10\n"),
    "a TSV of 10^6 recordings that are not there": ("tsv", b"/tmp\n" + b"x.wav\t100\n" * 100_000),
    "a TSV of 400 digits": ("tsv", b"/tmp\nok.wav\t" + b"9" * 400 + b"\n"),
    "a TSV of 15 digits": ("tsv", b"/tmp\nok.wav\t" + b"9" * 15 + b"\n"),
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_what_is_no_manifest_is_one_line(forks: Forks, place: Place, name: str) -> None:
    suffix, content = SIZES[name]
    path = place.file(f"m.{suffix}", content)
    assert faults(prepare(forks, place, path)) == []


def test_sparse_files_are_one_line(forks: Forks, place: Place) -> None:
    for name, start in (
        ("a.jsonl", b""),
        ("a.tsv", f"{place.folder}\nok.wav\t32000\n".encode()),
        ("a.json", b"["),
    ):
        path = place.file(name, start)
        os.truncate(path, 10 * 2**30)
        assert faults(prepare(forks, place, path), refuses=True) == [], name


def test_surrogates_are_escapes(forks: Forks, place: Place, good: Path) -> None:
    for name, content in {
        "text": json.dumps(place.nemo(text="\ud800 a")),
        "path": json.dumps(place.nemo(audio_filepath="\ud800.wav")),
        "id": json.dumps(place.cut(id="\ud800")),
        "speaker": json.dumps(place.nemo(speaker="\ud800")),
        "key": json.dumps({**place.nemo(), "\ud800": 1}),
    }.items():
        path = place.file(f"{name}.jsonl", content + "\n")
        assert faults(prepare(forks, place, path)) == [], name
        assert faults(evaluate(forks, place, good, path)) == [], name
        assert faults(convert(forks, place, path)) == [], name


def no_files(place: Place) -> dict[str, str]:
    (place.folder / "out").mkdir()
    os.mkfifo(place.folder / "fifo")
    (place.folder / "sparse").touch()
    os.truncate(place.folder / "sparse", 10 * 2**30)
    with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(place.folder):  # its path has 107 bytes
        server.bind("socket")
    (place.folder / "loop").symlink_to("loop")
    return {
        **{name: str(place.folder / name) for name in ("fifo", "socket", "loop", "sparse", "none")},
        **{name: name for name in ("/dev/zero", "/dev/stdin", "/dev/full", "/proc/self/environ", "/proc/kcore")},
        **{name: name for name in ("/etc/shadow", "/proc/self/mem", "/dev/tty", "-", "", ".", "/", "~", "file:///etc/passwd")},
        "above": "../../../../../../../../../etc/passwd", "a folder": str(place.folder / "out"),
        "URL": "http://127.0.0.1:1/x.jsonl", "pipe:": f"pipe:touch {place.canary}", "a pipe": f"|touch {place.canary}",
        "a shell": f"$(touch {place.canary}).wav", "long": "a" * 10**5 + ".wav", "a long path": "a/" * 3_000 + "b.wav",
        "a long name": "a" * 300 + ".wav", "in a file": f"{place.ok}/ok.wav", "no user": "~nobody-of-this-name/x",
        "a comma": "a,b,,c", "escapes": f"{ESCAPES}.wav",
    }  # fmt: skip


def test_what_is_no_file_is_no_manifest(forks: Forks, place: Place, good: Path) -> None:
    faulty = {}
    for name, path in no_files(place).items():
        known = {"canaries": [place.canary], "private": ["root:x:", "hunter2"]}
        if name in ("/", ".", "~"):  # folders with recordings, perhaps
            continue
        secret = {"MY_TOKEN": "hunter2"}
        ended = prepare(forks, place, path, cwd=place.folder / "out", environment=secret)
        faulty[name] = faults(ended, refuses=True, **known)
        ended = evaluate(forks, place, good, path, cwd=place.folder / "out")
        faulty[f"evaluate {name}"] = faults(ended, refuses=True, **known)
    assert {name: found for name, found in faulty.items() if found} == {}


def test_what_is_no_file_is_no_recording(forks: Forks, place: Place, good: Path) -> None:
    faulty = {}
    for name, path in no_files(place).items():
        for kind, record in (
            ("nemo", place.nemo(audio_filepath=path)),
            ("nemo, measured", {"audio_filepath": path, "text": "a"}),
            ("cut", place.cut(place.recording(path))),
            ("mixture", place.mixed(place.track(place.recording(path)))),
        ):
            ended = prepare(forks, place, place.lines(record), environment={"MY_TOKEN": "hunter2"})
            faulty[f"{name}, {kind}"] = faults(
                ended, refuses=True, canaries=[place.canary], private=["root:x:", "hunter2"]
            )
        if path:
            ended = forks.run("transcribe", good, path)
            faulty[f"{name}, transcribe"] = faults(ended, refuses=True, private=["root:x:", "hunter2"])
    assert {name: found for name, found in faulty.items() if found} == {}


@pytest.mark.ci_share
def test_a_private_file_becomes_no_transcript(forks: Forks, place: Place) -> None:
    """Neither named, nor through a link, nor through a linked folder, in any format."""
    home = place.folder / "home"
    (home / "folder").mkdir(parents=True)
    for name in ("secret", "folder/x.txt", "folder/x.trans.txt"):
        (home / name).write_text("x hunter2\n")
    corpus = place.folder / "corpus"
    corpus.mkdir()
    (corpus / "inside").symlink_to(home)
    (corpus / "link.txt").symlink_to(home / "secret")
    (corpus / "hard.txt").write_text("fine\n")
    line = {"audio_filepath": str(place.ok), "duration": 2.0}
    faulty = {}
    named = {**no_files(place), "secret": str(home / "secret"), "a link": "link.txt", "a linked folder": "inside/secret",
             "above the corpus": "../home/secret", "a zero byte": "a\0b", "itself": "m.jsonl"}  # fmt: skip
    written = place.folder / "out" / "o.jsonl"
    for name, path in named.items():
        manifest = place.file("corpus/m.jsonl", json.dumps({**line, "text_filepath": path}) + "\n")
        secret = {"MY_TOKEN": "hunter2"}
        ended = prepare(forks, place, manifest, check=False, environment=secret)
        refuses = None if name in ("itself", "") else True
        faulty[name] = faults(ended, refuses=refuses, private=["hunter2", "root:x:"])
        if written.exists():
            assert not any(text in written.read_text() for text in ("hunter2", "root:x:")), name
            written.unlink()
    for name in ("x.txt", "x.trans.txt", "x.TXT"):
        for target in (
            home / "secret",
            Path("/dev/zero"),
            Path("/proc/self/environ"),
            Path("/etc/passwd"),
            "fifo",
        ):
            folder = place.folder / "texts"
            folder.mkdir()
            shutil.copy(place.ok, folder / "x.wav")
            os.mkfifo(folder / name) if target == "fifo" else (folder / name).symlink_to(target)
            ended = prepare(forks, place, folder, check=False)
            faulty[f"{name} -> {target}"] = faults(ended, refuses=True, private=["hunter2", "root:x:"])
            assert not written.exists()
            shutil.rmtree(folder)
    folder.mkdir()
    shutil.copy(place.ok, folder / "x.wav")
    (folder / "in").symlink_to(home / "folder")
    faulty["a linked folder of texts"] = faults(
        prepare(forks, place, folder, check=False), private=["hunter2"]
    )
    assert not written.exists() or "hunter2" not in written.read_text()
    written.unlink(missing_ok=True)
    for suffix in ("wrd", "ltr"):
        for target in (home / "secret", Path("/dev/zero"), Path("/etc/passwd")):
            manifest = place.file("corpus/t.tsv", f"{place.folder}\nok.wav\t32000\n")
            label = corpus / f"t.{suffix}"
            label.symlink_to(target)
            ended = prepare(forks, place, manifest, check=False)
            # a device is no file of labels; the manifest has no transcripts then
            refuses = None if target == Path("/dev/zero") else True
            faulty[f"{suffix} -> {target}"] = faults(ended, refuses=refuses, private=["hunter2", "root:x:"])
            assert not written.exists() or "hunter2" not in written.read_text()
            written.unlink(missing_ok=True)
            label.unlink()
    assert {name: found for name, found in faulty.items() if found} == {}


def folder(place: Place, name: str) -> Path:
    path = place.folder / name
    path.mkdir()
    shutil.copy(place.ok, path / "x.wav")
    return path


def loops(place: Place) -> Path:
    """Links to the folders above, of which each can be followed by each: 3^40 ways."""
    path = folder(place, "loops")
    (path / "a").mkdir()
    for name in "bcd":
        (path / "a" / name).symlink_to("..")
    return path


def strange_names(place: Place) -> Path:
    path = folder(place, "names")
    for name in (b"-o.wav", b"a" * 250 + b".wav", b"\xff\xfe.wav", b"%s%n.wav", b"{0.__class__}.wav", b"a\tb.wav",
                 b"a\nb.wav", b"${oc.env:HOME}.wav", b"data.x=1.wav", b"__import__('os').wav",
                 "\u202egpj.wav".encode()):  # fmt: skip
        shutil.copy(place.ok, os.fsencode(path) + b"/" + name)
    return path


def escapes(place: Place) -> Path:
    path = folder(place, "escapes")
    shutil.copy(place.ok, path / f"{ESCAPES}.wav")
    (path / f"b{ESCAPES}.wav").write_text("rubbish")
    (path / f"b{ESCAPES}.txt").write_text(ESCAPES)
    (path / f"{ESCAPES}.trans.txt").write_text(f"{ESCAPES} {ESCAPES}\n")
    return path


def strange_kinds(place: Place) -> Path:
    path = folder(place, "kinds")
    os.mkfifo(path / "f.wav")
    (path / "d.wav").mkdir()
    (path / "z.wav").symlink_to("/dev/zero")
    (path / "s.wav").symlink_to("s.wav")
    (path / "e.wav").symlink_to("/proc/self/environ")
    return path


def text_folder(place: Place) -> Path:
    path = folder(place, "texts")
    (path / "x.txt").mkdir()
    return path


def text_of(content: bytes, name: str = "x.txt") -> Callable[[Place], Path]:
    def make(place: Place) -> Path:
        path = folder(place, "text")
        (path / name).write_bytes(content)
        return path

    return make


FOLDERS: dict[str, tuple[Callable[[Place], Path], bool | None]] = {
    "links in a circle": (loops, False),
    "strange names": (strange_names, False),
    "names with escapes": (escapes, None),
    "recordings that are no files": (strange_kinds, True),
    "a transcript that is a folder": (text_folder, None),
    "a transcript that is no UTF-8": (text_of(b"\xff\xfe\x00"), True),
    "a transcript of 2 MB": (text_of(b"a " * 2**20), True),
    "a transcript of zero bytes": (text_of(b"\0" * 100), None),
    "a transcript of escapes": (text_of(ESCAPES.encode()), False),
    "a list of many lines": (text_of(b"a b\n" * 2**22, "x.trans.txt"), None),
    "a list of many ids": (text_of(b"".join(b"%d b\n" % i for i in range(100_000)), "x.trans.txt"), None),
    "a list of one line": (text_of(b"x " + b"a" * 2**24, "x.trans.txt"), None),
    "a list of paths": (text_of(b"../../../../etc/passwd a\n/etc/passwd b\n", "x.trans.txt"), True),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_a_stranger(forks: Forks, place: Place, good: Path, name: str) -> None:
    make, refuses = FOLDERS[name]
    reads(forks, place, good, make(place), refuses)


def test_a_list_of_30_million_ids_is_one_line(forks: Forks, place: Place) -> None:
    path = folder(place, "list")
    (path / "x.trans.txt").write_bytes(b"".join(b"%x\n" % i for i in range(30_000_000)))
    assert faults(prepare(forks, place, path, check=False), refuses=True) == []


def test_names_and_ids_are_printed_with_escapes(forks: Forks, place: Place, good: Path) -> None:
    twice = place.cut(id=ESCAPES)
    bad = place.cut(place.recording(f"/no{ESCAPES}"), id=ESCAPES)
    for number, records in enumerate(([twice, twice], [bad], [{**twice, "type": f"{ESCAPES}Cut"}], [place.nemo(duration=ESCAPES)],
                                      [place.nemo(text=ESCAPES, audio_filepath=ESCAPES)], [place.cut(supervisions=[{"text": [ESCAPES]}])],
                                      [transformed(place, {"name": ESCAPES, "kwargs": {}})], [{ESCAPES: ESCAPES}])):  # fmt: skip
        path = place.lines(*records, name=f"{number}{ESCAPES}.jsonl")
        for ended in (
            prepare(forks, place, path),
            evaluate(forks, place, good, path),
            convert(forks, place, path),
        ):
            assert faults(ended, refuses=True) == [], number
        if number < 2:
            assert faults(train(forks, place, path), refuses=True) == []
            shutil.rmtree(place.folder / "run", ignore_errors=True)


@pytest.mark.parametrize("normaliser", NORMALISERS)
def test_a_tokenizer_of_strange_transcripts(forks: Forks, place: Place, normaliser: str) -> None:
    texts = ["9" * 10**5, "1." * 10**5, "$1,000" * 30_000, "[" * 10**5, "-/" * 10**5, "<" * 10**5, '"' * 10**5,
             "a" + " " * 10**5 + "b", "<unk>" + " " * 10**5, "a" + "\u0301" * 10**5, "\ufdfa" * 10**5, ESCAPES * 10**4,
             "\ud800", "\U0001f600" * 10**5, "1/2" * 10**5, "\u0661" * 10**5, "²" * 10**5, "IX " * 10**5]  # fmt: skip
    for number, text in enumerate(texts):
        path = place.lines(
            place.nemo(text=text), place.nemo(text="one two three four"), name=f"{number}.jsonl"
        )
        out = place.folder / f"{number}.model"
        ended = forks.run(
            "prepare", "tokenizer", path, "--normaliser", normaliser, "--size", 12, "--out", out
        )
        assert faults(ended) == [], text[:20]

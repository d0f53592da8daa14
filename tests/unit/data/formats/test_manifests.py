"""Manifests of a stranger: numbers, lines, arrays and transcripts without bound are one line of error."""

from __future__ import annotations

import gc
import gzip
import io
import json
import os
import shutil
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from speechtrain.data import audio
from speechtrain.data.audio import change_rate, read_cut
from speechtrain.data.formats import manifests
from speechtrain.data.index import open_index
from speechtrain.data.loader import _MANY_LABELS, EvaluationLoader
from speechtrain.data.module import SpeechData
from speechtrain.data.pieces import Recording, recordings
from speechtrain.data.recordings import MOST_CHANNELS, Unusable
from speechtrain.data.sampler import MicroBatch
from speechtrain.data.sources import open_source
from speechtrain.errors import DataError
from speechtrain.inference.loaded_run import LONGEST_SECONDS as LONGEST
from speechtrain.text.normalise import NORMALISERS
from speechtrain.text.vocabulary import Characters
from tests.support.audio_files import read_file
from tests.support.cuts import lhotse_cuts

MIB = 2**20


def entries(path: Path) -> int:
    return sum(1 for part in [open_source(str(path))] for _ in part.entries())  # type: ignore[attr-defined]


def cut(**more: object) -> dict[str, Any]:
    recording = {
        "id": "r",
        "sources": [{"type": "file", "channels": [0], "source": "a.wav"}],
        "duration": 2.0,
    }
    recording |= {"sampling_rate": 16_000, "num_samples": 32_000, "channel_ids": [0]}
    known = {"id": "c", "start": 0.0, "duration": 2.0, "channel": 0, "supervisions": [], "type": "MonoCut"}
    return {**known, "recording": recording, **more}


@pytest.mark.parametrize("key", ["duration", "offset", "orig_sample_rate"])
@pytest.mark.parametrize("number", ["1e999", "NaN", "9" * 5_000])
def test_a_number_without_bound_names_file_and_line(tmp_path: Path, key: str, number: str) -> None:
    path = tmp_path / "m.jsonl"
    row = {"audio_filepath": "a.wav", "text": "a", "duration": 1.0, key: 1.0}
    path.write_text(json.dumps(row) + "\n" + json.dumps(row | {key: "X"}).replace('"X"', number) + "\n")
    with pytest.raises(DataError, match=r"m\.jsonl:2: ") as caught:
        entries(path)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("rate", ["x", None, [], {}, True, 0, -5, 10**18, 10**400, float("inf")])
def test_lhotse_cuts_refuse_an_unknown_rate(tmp_path: Path, rate: object) -> None:
    path = tmp_path / "m.jsonl"
    line = cut()
    line["recording"]["sampling_rate"] = rate
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(DataError, match=r"m\.jsonl:1: (has no )?'sampling_rate'"):
        entries(path)


@pytest.mark.parametrize("name", [".ssh/id_rsa", ".ssh/id.txt", "notes.pem", ".netrc.txt"])
def test_nemo_reads_visible_texts_only(tmp_path: Path, name: str) -> None:
    (tmp_path / ".ssh").mkdir()
    (tmp_path / name).write_text("secret")
    path = tmp_path / "m.jsonl"
    line = {"audio_filepath": "a.wav", "duration": 1.0, "text_filepath": name}
    path.write_text(json.dumps(line))
    with pytest.raises(DataError, match=r"(unless hidden|does not end in \.txt)"):
        entries(path)


def test_numbered_lines_refuse_a_file_that_is_packed_too_well(tmp_path: Path) -> None:
    line = b'{"audio_file": "a", "duration": 1}\n'
    path = tmp_path / "m.jsonl.gz"
    count = 20 * MIB // len(line)
    path.write_bytes(gzip.compress(line * count))
    with pytest.raises(DataError, match="more than 40 times its gzipped size"):
        entries(path)


@pytest.mark.parametrize(
    "content", [b'["' + b"a" * 1_000 + b'"]', b"[" + b"{}," * 10 + b"{}]", b"[" + b"[]," * 10]
)
def test_json_array_bounds_a_plain_file(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "LARGEST_ARRAY", 1_000)
    path = tmp_path / "m.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"m\.json:1: a JSON array has at most .* Write it as JSON lines"):
        list(manifests.records(path))


@pytest.mark.parametrize("content", ["[" * 100_000, "[" + "9" * 5_000 + "]", "[" + '{"a":' * 100_000])
def test_json_array_without_bound_is_one_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "m.json"
    path.write_text(content)
    gc.disable()  # A finaliser that runs at the limit of the recursion would fail the test.
    try:
        with pytest.raises(DataError, match=r"m\.json:1: bad JSON") as caught:
            entries(path)
    finally:
        gc.enable()
    assert len(str(caught.value)) < 500


def test_table_of_an_empty_list_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("[]")
    source = open_source({"path": str(path), "audio": "a", "text": "b"})
    with pytest.raises(DataError, match=r"a\.json"):
        next(iter(lhotse_cuts(source)))


def packed(path: Path, start: bytes, fill: bytes, count: int) -> Path:
    """A gzipped file of ``start`` and ``count`` times 1 MiB of ``fill``."""
    member = gzip.compress(fill * MIB)
    path.write_bytes(gzip.compress(start) + member * count)
    return path


BOMBS = {
    "spaces": ("a.jsonl.gz", b" ", b" "),
    "a string": ("a.jsonl.gz", b'{"audio_filepath": "', b"a"),
    "blank lines": ("a.jsonl.gz", b"", b"\n"),
    "a TSV that ends in one line": ("a.tsv.gz", b"/tmp\na.wav\t16000\n", b"\0"),
    "an array of one string": ("a.json.gz", b'[{"transcript": "', b"a"),
    "a CSV that ends in one line": ("a.csv.gz", b"path,text\na.wav,one\n", b"a"),
    "a CSV that ends in one cell": ("a.csv.gz", b'path,text\na.wav,"', b"a\n"),
    "a CSV that ends in one row": ("a.csv.gz", b'path,text\na.wav,"', b'a\n","b'),
    "a table that is one header": ("a.csv.gz", b"path,", b"a,"),
    "an array of empty arrays": ("a.json.gz", b"[", b"[],"),
    "blank lines in an array": ("a.json.gz", b"[", b"\n"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_gzipped_line_without_end_is_refused_in_little_memory(tmp_path: Path, name: str) -> None:
    file, start, fill = BOMBS[name]
    path = packed(tmp_path / file, start, fill, 200)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"a\..*:\d+: "):
            entries(path)
        assert tracemalloc.get_traced_memory()[1] < 150 * MIB
    finally:
        tracemalloc.stop()


def test_an_array_on_one_long_line_is_read(tmp_path: Path) -> None:
    row = {"transcript": "a" * 1_000, "files": [{"fname": "a.wav"}], "original_duration": 1.0}
    path = tmp_path / "m.json"
    path.write_text(json.dumps([row] * 20_000))
    assert path.stat().st_size > manifests.LONGEST_LINE
    assert entries(path) == 20_000


@pytest.mark.parametrize("name", ["m.jsonl", "m.tsv"])
def test_a_pipe_or_a_device_as_manifest_is_refused_at_once(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    for path in (tmp_path / name, Path("/dev/zero")):
        with pytest.raises(DataError, match=r"neither a file nor a folder|not a regular file"):
            entries(path)


@pytest.mark.parametrize("table", ["metadata.csv", "metadata.jsonl", "wav.scp"])
def test_a_list_of_a_folder_that_lies_elsewhere_is_not_read(tmp_path: Path, table: str) -> None:
    (tmp_path / "secret").write_text("path|password\nroot|x\n")
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / table).symlink_to(tmp_path / "secret")
    with pytest.raises(DataError, match="transcripts are read below") as caught:
        entries(tmp_path / "corpus")
    assert "password" not in str(caught.value)


@pytest.mark.parametrize("text", ["a", "a " * 10, "\ud800 a"])
def test_a_transcript_is_read_whole(text: str) -> None:
    said = manifests.text_of(cut(supervisions=[{"text": text}]))
    assert said == text.replace("\ud800", "?")
    said.encode()


def test_a_transcript_without_bound_is_one_line(tmp_path: Path) -> None:
    long = "a" * (manifests.LONGEST_TRANSCRIPT + 1)
    path = tmp_path / "m.jsonl"
    path.write_text(json.dumps({"audio_filepath": "a.wav", "duration": 1.0, "text": long}) + "\n")
    with pytest.raises(DataError, match="characters, the most are") as caught:
        open_index(open_source(str(path)), str(tmp_path / "cache"))
    assert len(str(caught.value)) < 500


def corpus(tmp_path: Path, seconds: float, text: str) -> Path:
    soundfile.write(tmp_path / "a.wav", np.zeros(round(seconds * 16_000), np.float32), 16_000)
    path = tmp_path / "m.jsonl"
    path.write_text(json.dumps({"audio_filepath": "a.wav", "duration": seconds, "text": text}) + "\n")
    return path


def test_an_evaluation_transcript_that_nobody_can_say_has_no_labels(tmp_path: Path) -> None:
    index = open_index(open_source(str(corpus(tmp_path, 1.0, "a" * (_MANY_LABELS + 1)))), str(tmp_path / "c"))
    loader = EvaluationLoader(index, Characters())
    batch = loader(MicroBatch(np.zeros(1, np.int32), np.array([100], np.int16)))
    assert batch.labels.shape[1] == 0
    assert float(batch.weight[0]) == 0.0
    assert len(batch.texts[0]) == _MANY_LABELS + 1  # it counts in the error rates


def test_an_evaluation_recording_above_the_key_is_not_decoded(tmp_path: Path) -> None:
    path = str(corpus(tmp_path, 3.0, "a"))
    known = {"train": path, "tokenizer": Characters(), "workers": 0, "cache": str(tmp_path / "cache")}
    data = SpeechData(**known, valid={"x": path}, max_decoded_seconds=2.0)
    with pytest.raises(DataError, match=r"a\.wav: 3 s, data\.max_decoded_seconds=2: longer than"):
        next(iter(data.valid()["x"]))
    assert next(iter(SpeechData(**known, valid={"x": path}).valid()["x"])).seconds == 3.0


def test_a_file_above_a_length_is_refused_by_its_header(tmp_path: Path) -> None:
    corpus(tmp_path, 3.0, "")
    (refused,) = recordings(str(tmp_path / "a.wav"), 16_000, 2.0)
    assert isinstance(refused, DataError)
    assert "data.max_decoded_seconds=2" in str(refused)
    (taken,) = recordings(str(tmp_path / "a.wav"), 16_000, 3.0)
    assert isinstance(taken, Recording)
    assert [len(samples) for _, samples in taken.pieces(20.0)] == [48_000]
    with pytest.raises(Unusable, match="too_long"):
        read_cut(cut(duration=1e9), 16_000, 3600.0)


@pytest.mark.parametrize(("rate", "seconds"), [(16_000, 65_000), (2 * 10**8, 20), (600_000, 3_599)])
def test_a_sparse_recording_is_refused_before_it_is_decoded(tmp_path: Path, rate: int, seconds: int) -> None:
    size, path = rate * seconds, tmp_path / "a.wav"
    form = struct.pack("<HHIIHH", 1, 1, rate, rate, 1, 8)
    start = b"RIFF" + struct.pack("<I", 36 + size & 0xFFFFFFFF) + b"WAVEfmt " + struct.pack("<I", 16) + form
    with path.open("wb") as file:
        file.write(start + b"data" + struct.pack("<I", size & 0xFFFFFFFF))
        file.truncate(44 + size)
    tracemalloc.start()
    try:
        with pytest.raises(Unusable):
            read_file(str(path), 16_000)
        for found in recordings(str(path), 16_000, LONGEST):
            assert isinstance(found, DataError) or len(next(found.pieces(20.0))[1]) <= 320_000
        assert tracemalloc.get_traced_memory()[1] < 100 * MIB
    finally:
        tracemalloc.stop()


def test_channels_are_judged_by_the_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    soundfile.write(tmp_path / "a.wav", np.zeros((16_000, 5), np.float32), 16_000)
    monkeypatch.setattr("speechtrain.data.recordings.MOST_CHANNELS", 4)
    with pytest.raises(Unusable, match="5 channels"):
        read_file(str(tmp_path / "a.wav"), 16_000)
    assert MOST_CHANNELS >= 64  # the largest arrays of microphones


@pytest.mark.parametrize(
    ("rate", "wanted"),
    [(8_000, 16_000), (44_100, 16_000), (48_000, 16_000), (11_025, 16_000), (16_000, 8_000)],
)
def test_a_long_recording_is_resampled_in_blocks_to_the_same_bits(
    rate: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = np.random.default_rng(0).standard_normal(61 * rate + 7).astype(np.float32)
    monkeypatch.setattr(audio, "_BLOCK_VALUES", 2**40)
    whole = change_rate(samples, rate, wanted)
    monkeypatch.setattr(audio, "_BLOCK_VALUES", 1)
    assert np.array_equal(change_rate(samples, rate, wanted), whole)


@pytest.mark.parametrize("name", NORMALISERS)
@pytest.mark.parametrize(
    "part",
    ["9", "1.", "$1,000", ",000", "[", "-/", "<", " ", "<unk>", '"', "\u0301b", "ﷺ", "'", "-", "_1", "mr."],
)
def test_no_normaliser_is_quadratic(name: str, part: str) -> None:
    """2^16 parts between what begins and ends a pattern take a second; quadratic, they take minutes."""
    for text in (part * 2**16, f"a{part * 2**16}b", f"1{part * 2**16}5", f"[{part * 2**16}"):
        NORMALISERS[name](text)


STORES = ["huggingface", "annex", "annex below", "dvc", "in a set of several"]


def linked(root: Path, store: str, files: dict[str, bytes]) -> Path:
    """A data set whose files are links into its store, as the tool of the store makes them."""
    folder, blobs = {
        "huggingface": (root / "datasets--a--b/snapshots/0f1e", root / "datasets--a--b/blobs"),
        "annex": (root / "set", root / "set/.git/annex/objects/F7/wx"),
        "annex below": (root / "set/train", root / "set/.git/annex/objects/F7/wx"),
        "dvc": (root / "set", root / "set/.dvc/cache/files/md5/3a"),
        "in a set of several": (root / "all/set", root / "all/set/.git/annex/objects/F7/wx"),
    }[store]
    blobs.mkdir(parents=True)
    for number, (name, content) in enumerate(files.items()):
        (blobs / f"3aa9{number}").write_bytes(content)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(os.path.relpath(blobs / f"3aa9{number}", (folder / name).parent))
    return root / "all" if store == "in a set of several" else folder


def wav() -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(8_000, np.float32), 16_000, format="WAV")
    return file.getvalue()


def texts(source: Path) -> list[str]:
    return [manifests.text_of(cut.to_dict()) for cut in lhotse_cuts(open_source(str(source)))]


@pytest.mark.parametrize("store", STORES)
def test_links_into_the_store_of_a_data_set_are_followed(tmp_path: Path, store: str) -> None:
    assert texts(linked(tmp_path / "1", store, {"a/b.wav": wav(), "a/b.txt": b"one two"})) == ["one two"]
    lists = {"x.flac": wav(), "c.trans.txt": b"x three\n"}
    assert texts(linked(tmp_path / "2", store, lists)) == ["three"]


@pytest.mark.parametrize("store", [store for store in STORES if store != "in a set of several"])
@pytest.mark.parametrize(
    "files",
    [
        {"metadata.csv": b"file_name,text\na.wav,one\n"},
        {"metadata.jsonl": b'{"file_name": "a.wav", "text": "one"}\n'},
        {"wav.scp": b"u a.wav\n", "text": b"u one\n"},
        {"m.jsonl": b'{"audio_filepath": "a.wav", "text_filepath": "t.txt"}\n', "t.txt": b"one"},
        {"m.tsv": b".\na.wav\t8000\n", "m.wrd": b"one\n"},
    ],
)
def test_lists_in_the_store_of_a_data_set_are_read(
    tmp_path: Path, store: str, files: dict[str, bytes]
) -> None:
    folder = linked(tmp_path, store, {"a.wav": wav(), **files})
    (manifest,) = [*folder.glob("m.*l"), *folder.glob("m.tsv")] or [folder]
    assert texts(manifest) == ["one"]


def test_a_store_is_no_way_to_other_files(tmp_path: Path) -> None:
    """The folders above a store, a store that is a link, and a linked folder with a store of its own."""
    home = linked(tmp_path / "home", "annex", {"note.txt": b"hunter2"})
    (home / ".git/config").write_text("hunter2")
    folder = linked(tmp_path / "corpus", "annex below", {"a.wav": wav()})
    attacks = [home / "note.txt", folder.parent / ".git/config"]
    (folder / "in").symlink_to(home)
    for target in attacks:
        (folder / "a.txt").unlink(missing_ok=True)
        (folder / "a.txt").symlink_to(target)
        target.exists() or (folder.parent / ".git/config").write_text("hunter2")
        with pytest.raises(DataError, match="transcripts are read below") as caught:
            texts(folder)
        assert "hunter2" not in str(caught.value)
    (folder / "a.txt").unlink()
    (folder / "in/note.wav").write_bytes(wav())
    with pytest.raises(DataError, match=r"in/note\.txt lies in"):
        texts(folder)


def test_a_text_that_a_manifest_names_elsewhere_is_read_from_its_copy(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.wav").write_bytes(wav())
    (tmp_path / "a.txt").write_text("one")
    manifest = tmp_path / "in/m.jsonl"
    manifest.write_text('{"audio_filepath": "a.wav", "text_filepath": "../a.txt"}\n')
    with pytest.raises(DataError, match=r"Copy this file there and name the copy$"):
        texts(manifest)
    shutil.copy(tmp_path / "a.txt", tmp_path / "in")
    manifest.write_text(manifest.read_text().replace("../", ""))
    assert texts(manifest) == ["one"]

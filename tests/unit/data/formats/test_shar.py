"""lhotse's Shar, as its own writer makes it, read where it lies."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from speechtrain.data.audio import files_of, read_cut, recording_of
from speechtrain.data.formats.shar import Shar
from speechtrain.data.index import open_index
from speechtrain.data.module import SpeechData
from speechtrain.data.recordings import Unusable, read_header
from speechtrain.data.sampler import BatchLimits
from speechtrain.data.sources import open_source
from speechtrain.data.tar_members import file_of
from speechtrain.errors import DataError
from speechtrain.text.vocabulary import Characters
from tests.support.audio_files import read_file
from tests.support.shar import RATE, write_shar


def theirs(shar: Path) -> dict[str, np.ndarray[Any, Any]]:
    """What lhotse reads of it."""
    from lhotse import CutSet

    return {cut.id: cut.load_audio() for cut in CutSet.from_shar(in_dir=shar)}


def records_of(spec: Any) -> list[dict[str, Any]]:
    return [*open_source(spec).cuts()]


def unpacked(path: Path) -> Path:
    """A gzipped file without its packing."""
    plain = path.with_suffix("")
    plain.write_bytes(gzip.decompress(path.read_bytes()))
    path.unlink()
    return plain


def refusal(spec: Any) -> str:
    with pytest.raises(DataError) as caught:
        records_of(spec)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["wav", "flac", "opus", "mp3", "original"])
def test_every_cut_has_the_audio_that_lhotse_reads(tmp_path: Path, cache: Path, kind: str) -> None:
    shar = write_shar(tmp_path, kind=kind)
    expected, index = theirs(shar), open_index(open_source(str(shar)))
    assert len(index) == len(expected) == 10
    for row in range(len(index)):
        cut = index.cut(row)
        found = read_cut(cut, RATE)
        whole = expected[cut["id"]][0]
        assert abs(len(found) - len(whole)) <= 1
        assert np.allclose(found, whole[: len(found)], atol=1e-6)
        assert (cut["supervisions"][0]["text"], cut["supervisions"][0]["speaker"]) == (
            "one two",
            f"s{row % 2}",
        )
        assert "custom" not in cut


def test_channels_names_and_plain_cuts(tmp_path: Path, cache: Path) -> None:
    """Two channels, names that a tar's header cannot hold, one shard without a number, cuts unpacked."""
    shar = write_shar(tmp_path, 3, channels=2, shard_size=None, name="ü/" + "long-" * 40 + "{}")
    unpacked(shar / "cuts.jsonl.gz")
    index, expected = open_index(open_source(str(shar))), theirs(shar)
    for row in range(3):
        cut = index.cut(row)
        assert np.allclose(read_cut(cut, RATE), expected[cut["id"]].mean(axis=0), atol=1e-6)


def test_other_fields_are_left_where_they_are(tmp_path: Path, cache: Path) -> None:
    shar = write_shar(tmp_path, recording="wav", mark="jsonl")
    assert (shar / "mark.000000.jsonl.gz").exists()
    (shar / "features.000000.tar").write_bytes(b"not read")
    assert len(open_index(open_source(str(shar)))) == 10


def test_the_tars_may_be_in_another_folder(tmp_path: Path, cache: Path) -> None:
    shar, other = write_shar(tmp_path), tmp_path / "audio"
    other.mkdir()
    for tar in shar.glob("*.tar"):
        tar.rename(other / tar.name)
    assert "audio: FOLDER" in refusal(str(shar))
    for place in ("../audio", str(other)):
        cuts = records_of({"path": str(shar), "audio": place})
        assert len(cuts) == 10
        assert read_header(files_of(cuts[0])[0]).samplerate == RATE
    assert "no column 'x'" in refusal({"path": str(shar), "text": "x"})


def make_data(shar: Path, **options: Any) -> SpeechData:
    options = {"batch": BatchLimits(count=3), "speed": [0.9, 1.1], "workers": 0, **options}
    return SpeechData(str(shar), {"dev": str(shar)}, Characters(), **options)


def test_only_the_recordings_of_a_batch_are_read(tmp_path: Path, cache: Path) -> None:
    """One damaged recording is one skip; the others of its tar are read."""
    shar = write_shar(tmp_path)
    index = open_index(open_source(str(shar)))
    path = files_of(index.cut(1))[0]
    offset = int(path.partition(".tar:")[2].partition("+")[0])
    with (shar / "recording.000000.tar").open("rb+") as file:
        file.seek(offset)
        file.write(b"x" * 1000)
    with pytest.raises(Unusable) as caught:
        read_cut(index.cut(1), RATE)
    assert caught.value.reason == "unreadable"
    assert path in caught.value.detail
    assert len(read_cut(index.cut(2), RATE))


def test_the_held_out_and_the_split_do_not_know_where_a_recording_lies(tmp_path: Path, cache: Path) -> None:
    few, many = (write_shar(tmp_path / str(n), n) for n in (4, 12))
    assert [recording_of(cut) for cut in records_of(str(few))] == [
        recording_of(cut) for cut in records_of(str(many))[:4]
    ]


@pytest.mark.parametrize("change", ["cuts", "tar"])
def test_changes_since_indexing_are_noticed(tmp_path: Path, cache: Path, change: str) -> None:
    shar = write_shar(tmp_path)
    index = open_index(open_source(str(shar)))
    state = make_data(shar).state_dict()
    other = write_shar(tmp_path / "other", name="new-{}")
    name = "cuts.000000.jsonl.gz" if change == "cuts" else "recording.000000.tar"
    for path in [shar / name] if change == "tar" else list(shar.iterdir()):
        shutil.copy(other / path.name, path)
    if change == "cuts":
        with pytest.raises(DataError, match="recordings differ"):
            make_data(shar).load_state_dict(state)
    else:  # also where the index is open already
        with pytest.raises(Unusable, match="has changed since it was indexed"):
            read_cut(index.cut(0), RATE)
        assert "cuts.000000.jsonl.gz:1: " in refusal(str(shar))


def test_a_repeated_id_names_the_files_and_lines(tmp_path: Path, cache: Path) -> None:
    shar = write_shar(tmp_path)
    for field in ("cuts", "recording"):
        for path in shar.glob(f"{field}.000000.*"):
            shutil.copy(path, path.with_name(path.name.replace("000000", "000009")))
    with pytest.raises(DataError) as caught:
        open_index(open_source(str(shar)))
    assert "cuts.000009.jsonl.gz:" in str(caught.value)
    assert "cuts.000000.jsonl.gz:" in str(caught.value)


# --- of strangers ---------------------------------------------------------------------------------


def tar_of(path: Path, *members: tuple[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def test_a_shar_without_audio_is_refused(tmp_path: Path) -> None:
    shar = write_shar(tmp_path)
    for tar in shar.glob("*.tar"):
        tar.rename(tar.with_name(tar.name.replace("recording", "features")))
    assert "3 files of cuts" in refusal(str(shar))
    shar = write_shar(tmp_path / "b", 1)
    tar_of(shar / "recording.000000.tar", ("cut-0.nodata", b""), ("cut-0.nometa", b""))
    assert "cuts.000000.jsonl.gz:1: " in refusal(str(shar))


def test_a_folder_with_a_manifest_names_the_manifest(tmp_path: Path) -> None:
    """``prepare convert`` writes such a folder."""
    (tmp_path / "cuts.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=r"has a manifest .* Give .*/cuts\.jsonl$"):
        list(Shar(tmp_path).entries())


@pytest.mark.parametrize(
    "fault", ["gzip", "other", "short", "extra", "cut off", "order", "text", "link", "odd"]
)
def test_a_damaged_tar_is_named(tmp_path: Path, fault: str) -> None:
    shar = write_shar(tmp_path, 4)
    tar = shar / "recording.000000.tar"
    with tarfile.open(tar) as file:
        held: list[tuple[str, bytes]] = [(m.name, file.extractfile(m).read()) for m in file]  # type: ignore[union-attr]
    if fault == "gzip":
        tar.with_name(tar.name + ".gz").write_bytes(gzip.compress(tar.read_bytes()))
        tar.unlink()
    elif fault == "other":
        tar.write_bytes(b"x" * 4096)
    elif fault == "cut off":
        tar.write_bytes(tar.read_bytes()[:3000])
    elif fault == "link":
        with tarfile.open(tar, "w") as file:
            info = tarfile.TarInfo("cut-0.flac")
            info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
            file.addfile(info)
    else:
        changed = {
            "short": held[:4],
            "extra": [*held, *held[:2]],
            "order": [*held[2:4], *held[:2], *held[4:]],
        }
        changed |= {"text": [held[0], ("cut-0.json", b"[]"), *held[2:]], "odd": held[:-1]}
        tar_of(tar, *changed[fault])
    told = refusal(str(shar))
    assert tar.name in told or "cuts.000000.jsonl.gz:" in told
    assert len(told) < 1000


def test_files_outside_of_the_folder_are_not_read(tmp_path: Path) -> None:
    shar, other = write_shar(tmp_path), write_shar(tmp_path / "other")
    for name in ("cuts.000000.jsonl.gz", "recording.000000.tar"):
        kept = (shar / name).read_bytes()
        (shar / name).unlink()
        (shar / name).symlink_to(other / name)
        assert "lies in" in refusal(str(shar))
        (shar / name).unlink()
        (shar / name).write_bytes(kept)
    (shar / "recording.000000.tar").unlink()
    os.mkfifo(shar / "recording.000000.tar")
    assert "not a regular file" in refusal(str(shar))


def test_a_place_that_is_no_member_is_unusable(tmp_path: Path) -> None:
    tar = tmp_path / "a.tar"
    tar_of(tar, ("a.wav", b"x" * 600))
    assert file_of(f"{tar}:512+600//a.wav") == str(tar)
    for place in (
        "512+600//b.wav",
        "0+600//a.wav",
        "512+6000//a.wav",
        f"512+{2**40}//a.wav",
        "9" * 15 + "+1//a",
    ):
        with pytest.raises(Unusable) as caught:
            read_header(f"{tar}:{place}")
        assert caught.value.reason == "unreadable"


@pytest.mark.parametrize("kind", ["WAV", "FLAC"])
def test_a_large_member_is_read_where_it_is(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wav = tmp_path / "a.wav"
    samples = np.random.default_rng(0).uniform(-0.5, 0.5, 200 * RATE)
    soundfile.write(wav, samples, RATE, format=kind, subtype="PCM_16")
    tar_of(tmp_path / "a.tar", ("a.wav", wav.read_bytes()))
    member = f"{tmp_path}/a.tar:512+{wav.stat().st_size}//a.wav"
    sizes = []
    pread = os.pread

    def counted(handle: int, count: int, offset: int) -> bytes:
        sizes.append(count)
        return pread(handle, count, offset)

    monkeypatch.setattr(os, "pread", counted)
    for start in (0.0, 12.3, 39.0):
        expected = read_file(str(wav), RATE, start, 0.5)
        sizes.clear()
        np.testing.assert_array_equal(read_file(member, RATE, start, 0.5), expected)
        assert sum(sizes) < wav.stat().st_size / 2


def test_a_header_of_a_million_records_takes_no_time(tmp_path: Path) -> None:
    shar = write_shar(tmp_path, 1)
    content = b"3 =" * 300_000
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, len(content)
    padded = content + bytes(-len(content) % 512)
    tar = shar / "recording.000000.tar"
    tar.write_bytes((header.tobuf() + padded) * 20 + tar.read_bytes())
    assert len(records_of(str(shar))) == 1
    assert isinstance(open_source(str(shar)), Shar)


def test_preparing_reads_it_like_any_other_source(tmp_path: Path, cache: Path) -> None:
    from speechtrain.commands import prepare

    shar, out = str(write_shar(tmp_path)), tmp_path / "out"
    assert prepare.run(["manifest", shar, "--out", f"{out}.jsonl", "--check"]) == 0
    expected = open_index(open_source(shar))
    written = open_index(open_source(f"{out}.jsonl"))
    assert np.array_equal(written.identity, expected.identity)
    assert prepare.run(["convert", shar, "--out", str(out), "--format", "wav"]) == 0
    for row in range(10):
        cuts = [open_index(open_source(str(out / "cuts.jsonl"))).cut(row), expected.cut(row)]
        assert np.allclose(*(read_cut(cut, RATE) for cut in cuts), atol=1e-4)

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from speechtrain.data.formats.manifests import json_array, seconds_of, text_of
from speechtrain.data.sources import open_source
from speechtrain.errors import DataError
from tests.support.cuts import lhotse_cuts


def write(path: Path, lines: list[Any], mode: str = "plain") -> str:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if mode == "gzip" else text.encode())
    return str(path)


def nemo_line(audio: str = "a.wav", **more: Any) -> dict[str, Any]:
    return {"audio_filepath": audio, "duration": 2.5, "text": "one two", **more}


def refusal(spec: Any) -> str:
    with pytest.raises(DataError) as caught:
        list(lhotse_cuts(open_source(spec)))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("mode", ["plain", "gzip"])
def test_lhotse_cuts_are_told_by_content_and_come_out_as_they_are(
    tmp_path: Path, lhotse_line: Any, mode: str
) -> None:
    path = write(tmp_path / "cuts", [lhotse_line("x"), lhotse_line("y", text="two")], mode)
    source = open_source(path)
    assert [cut.to_dict() for cut in lhotse_cuts(source)] == [lhotse_line("x"), lhotse_line("y", text="two")]


def test_a_nemo_line_without_a_duration_has_that_of_its_audio(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", np.zeros(12_000, np.float32), 8_000)
    lines = [nemo_line("a.wav", **more) for more in ({}, {"offset": 0.5}, {"duration": 1.25}, {"offset": 9})]
    for line in (lines[0], lines[1], lines[3]):
        line["duration"] = None
    del lines[0]["duration"]
    missing = {"audio_filepath": "none.wav", "text": "one"}  # kept: it is reported like any bad recording
    cuts = [*open_source(write(tmp_path / "m", [*lines, missing])).cuts()]
    assert [cut["duration"] for cut in cuts] == [1.5, 1.0, 1.25, 0.0, 1.0]


def test_any_manifest_without_a_duration_has_that_of_its_audio(tmp_path: Path, recordings: Any) -> None:
    recordings.tone("a.wav", 1.5, rate=8_000)
    recordings.tone("b.wav", 0.5, rate=16_000)
    files = [{"fname": "a.wav"}, {"fname": "a.wav", "duration": None}, {"fname": "a.wav", "duration": 1.25}]
    lines = [{"transcript": "a", "files": [file]} for file in files]
    (tmp_path / "m.tsv").write_text(".\na.wav\nb.wav\t8000\n")
    (tmp_path / "paths.tsv").write_text(".\nb.wav\na.wav\n")
    for path, seconds in (
        (write(tmp_path / "m.json", lines), [1.5, 1.5, 1.25]),
        (str(tmp_path / "m.tsv"), [1.5, 1.0]),  # frames are at the first recording's rate
        (str(tmp_path / "paths.tsv"), [0.5, 1.5]),
    ):
        assert [cut["duration"] for cut in open_source(path).cuts()] == seconds
    below = write(tmp_path / "n.json", [{"transcript": "a", "files": [{"fname": "a.wav", "duration": -1}]}])
    assert "n.json:1: 'duration' is -1, below 0" in refusal(below)


def test_a_transcript_beside_a_recording_may_differ_in_case(tmp_path: Path) -> None:
    for name, text in {"b.wav": "", "B.TXT": "upper", "c.WAV": "", "c.txt": "own", "C.TXT": "other"}.items():
        (tmp_path / name).write_text(text)
    cuts = [*open_source(str(tmp_path)).cuts()]
    assert [text_of(cut) for cut in cuts] == ["upper", "own"]


def test_nemo_lines_with_aliases_offsets_and_paths_beside_the_manifest(tmp_path: Path) -> None:
    (tmp_path / "said.txt").write_text("from a\nfile")
    lines = [
        nemo_line("wavs/a.wav", speaker="s1"),
        {"audio_file": "/abs/b.flac", "duration": 1, "normalized_text": "normal"},
        {"audio_filename": "c.wav", "duration": 1.5, "text_filepath": "said.txt", "offset": 3.0},
    ]
    cuts = list(lhotse_cuts(open_source(write(tmp_path / "m.json", lines))))
    assert [cut.recording.sources[0].source for cut in cuts] == [
        str(tmp_path / "wavs/a.wav"),
        "/abs/b.flac",
        str(tmp_path / "c.wav"),
    ]
    assert [cut.supervisions[0].text for cut in cuts] == ["one two", "normal", "from a file"]
    assert [(cut.start, cut.duration) for cut in cuts] == [(0.0, 2.5), (0.0, 1.0), (3.0, 1.5)]
    assert cuts[0].supervisions[0].speaker == "s1"


def test_a_tarred_set_of_nemo_is_refused_until_it_is_unpacked(tmp_path: Path, recordings: Any) -> None:
    path = write(tmp_path / "tarred_audio_manifest.json", [nemo_line("a.wav", shard_id=0)])
    assert "is of a tarred set" in refusal(path)
    assert "tar -xf" in refusal(path)
    recordings.tone("a.wav", 2.5)
    assert len(list(lhotse_cuts(open_source(path)))) == 1
    assert "has no 'audio_filepath' of one file" in refusal(
        write(tmp_path / "m", [{"audio_filepath": ["a.wav", "b.wav"], "duration": 1}])
    )


def test_nemos_name_of_several_manifests_is_their_union(tmp_path: Path) -> None:
    for number in range(12):
        write(tmp_path / f"m_{number}.json", [nemo_line()])
        write(tmp_path / f"p_{number:03d}.json", [nemo_line()])
    names = [cut.id for cut in lhotse_cuts(open_source(f"{tmp_path}/m__OP_0..11_CL_.json"))]
    assert names == [f"m_{number}:1:a" for number in range(12)]
    padded = f"{tmp_path}/p__OP_009..011_CL_.json"
    assert [cut.id for cut in lhotse_cuts(open_source([padded, f"{tmp_path}/m_1.json"]))] == [
        *("p_009:1:a", "p_010:1:a", "p_011:1:a", "m_1:1:a")
    ]
    assert "m_12.json does not exist" in refusal(f"{tmp_path}/m__OP_0..12_CL_.json")
    assert "no manifest is given" in refusal(f"{tmp_path}/m_OP_2..1_CL_.json")


def test_a_pattern_names_a_bounded_number_of_manifests(tmp_path: Path) -> None:
    """Twenty thousand patterns of ten thousand files each would take minutes."""
    pattern = f"{tmp_path}/m__OP_0..9999_CL_.json"
    assert "more than 10000 manifests are named" in refusal(",".join([pattern] * 20_000))
    assert "m_0.json does not exist" in refusal(pattern)


def test_mlperf_arrays_take_the_file_of_speed_one(tmp_path: Path) -> None:
    item = {
        "transcript": "hello there",
        "original_duration": 9.0,
        "files": [
            {"fname": "x/a-0.9.wav", "duration": 5.0, "sample_rate": 8000, "speed": 0.9},
            {"fname": "x/a.wav", "duration": 4.5, "sample_rate": 8000, "num_samples": 36000, "speed": 1},
        ],
    }
    bare = {"transcript": "b", "original_duration": 2.0, "files": [{"fname": "b.wav"}]}
    path = tmp_path / "train.json"
    path.write_text("\n" + json.dumps([item, bare], indent=2))
    first, second = lhotse_cuts(open_source(str(path)))
    assert first.recording.sources[0].source == str(tmp_path / "x/a.wav")
    assert (first.duration, first.recording.sampling_rate) == (4.5, 8000)
    assert first.supervisions[0].text == "hello there"
    assert second.duration == 2.0


def test_a_lhotse_recording_manifest_is_followed_by_its_supervisions(
    tmp_path: Path, lhotse_line: Any
) -> None:
    recording = lhotse_line("r", duration=10.0)["recording"]
    supervisions = [
        {
            "id": f"s{i}",
            "recording_id": "r",
            "start": float(i),
            "duration": 0.5,
            "channel": 0,
            "text": f"t{i}",
        }
        for i in range(3)
    ]
    pair = [write(tmp_path / "recordings.jsonl", [recording]), write(tmp_path / "sup.jsonl", supervisions)]
    cuts = list(lhotse_cuts(open_source(pair)))
    assert [(cut.id, cut.start, cut.duration, cut.supervisions[0].text) for cut in cuts] == [
        ("s0", 0.0, 0.5, "t0"),
        ("s1", 1.0, 0.5, "t1"),
        ("s2", 2.0, 0.5, "t2"),
    ]
    assert "needs its recording manifest before it" in refusal(pair[1])
    (whole,) = lhotse_cuts(open_source(pair[0]))
    assert (whole.id, whole.duration, whole.supervisions) == ("r", 10.0, [])
    stereo = write(tmp_path / "stereo.jsonl", [{**recording, "channel_ids": [0, 1]}])
    assert [cut.channel for cut in lhotse_cuts(open_source(stereo))] == [[0, 1]]
    assert "has no 'duration'" in refusal(write(tmp_path / "d.jsonl", [{**recording, "duration": None}]))
    union = open_source([pair[0], write(tmp_path / "m.jsonl", [nemo_line()])])
    assert [cut.id for cut in lhotse_cuts(union)] == ["r", "m:1:a"]
    assert "recording 'r' is not in" in refusal(
        [write(tmp_path / "o.jsonl", [{**recording, "id": "q"}]), pair[1]]
    )


@pytest.mark.parametrize("start", ["- id: a\n", "---\n- id: !!python/object/apply:os.system ['exit']\n"])
def test_yaml_is_refused_with_the_command_that_converts_it(tmp_path: Path, start: str) -> None:
    path = tmp_path / "cuts.yaml"
    path.write_text(start + "  x: [\n")
    message = f"{path}:1: YAML is not read. Convert it: lhotse copy cuts.yaml cuts.jsonl.gz"
    assert refusal(str(path)) == message
    assert refusal([str(path), write(tmp_path / "supervisions.jsonl", [{}])]) == message
    assert refusal({"path": str(path), "audio": "id"}) == message


def test_audio_without_transcripts_needs_no_key_for_them(tmp_path: Path) -> None:
    nemo = {"audio_filepath": "a.wav", "duration": 2.5}
    mlperf = {"original_duration": 2.0, "files": [{"fname": "b.wav"}]}
    for number, line in enumerate((nemo, mlperf)):
        (cut,) = lhotse_cuts(open_source(write(tmp_path / f"{number}.jsonl", [line])))
        assert cut.supervisions[0].text == ""


def test_several_files_are_their_union_in_order(tmp_path: Path, lhotse_line: Any) -> None:
    a = write(tmp_path / "a.jsonl", [lhotse_line("x"), lhotse_line("y")])
    b = write(tmp_path / "b.jsonl", [nemo_line()])
    for spec in ([a, b], f"{a},{b}", f"{a}, {b}"):
        assert [cut.id for cut in lhotse_cuts(open_source(spec))] == ["x", "y", "b:1:a"]
    assert open_source([b, a]).fingerprint() != open_source([a, b]).fingerprint()
    assert "is given twice" in refusal([a, a])


def test_manifests_of_the_same_name_give_different_ids(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "y").mkdir()
    files = [write(tmp_path / name / "train.jsonl", [nemo_line()]) for name in "xy"]
    assert [cut.id for cut in lhotse_cuts(open_source(files))] == ["x/train:1:a", "y/train:1:a"]


@pytest.mark.parametrize(
    ("content", "line", "words"),
    [
        (b"\n \n", None, "is empty"),
        (b"RIFF....WAVE", 1, "not a manifest"),
        (b'[{"transcript": "a",\n "files": [{"fname" "x"}]}]', 2, "bad JSON"),
        (b'[{"transcript": "a",\n "files": [{"fname": "x", "duration": 1}]},\n 5]', 2, "is a JSON int"),
        (b'{"audio_filepath": "a.wav", "duration": 1, "text": "a"}\n\n{"audio_file', 3, "bad JSON"),
        (b'{"audio_filepath": "a.wav", "duration": 1, "text": "a"}\n[]\n', 2, "is a JSON list"),
        (b'{"audio_filepath": "a.wav", "duration": 1, "text": "\xff"}\n', 1, "not UTF-8"),
        (b'[{"type": "MonoCut", "id": "a"}]', 1, "has no 'duration'"),
        (b'{"type": "fbank", "recording_id": "a", "start": 0, "storage_path": "f"}', 1, "format is unknown"),
        (b"\x1f\x8b\x08\x00broken", 1, "damaged"),
    ],
)
def test_a_malformed_manifest_is_refused_with_file_and_line(
    tmp_path: Path, content: bytes, line: int | None, words: str
) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(content)
    message = refusal(str(path))
    assert words in message
    assert f"{path}:{line}:" in message if line else str(path) in message


def test_what_a_file_that_is_no_manifest_holds_is_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "shadow"
    path.write_text("root:$6$secret:19000:0:99999:7:::\n")
    message = refusal(str(path))
    assert f"{path}:1: not a manifest" in message
    assert "secret" not in message


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(nemo_line()).encode())
    assert len(list(lhotse_cuts(open_source(str(path))))) == 1


def test_a_folder_of_recordings_with_texts_beside_them(tmp_path: Path, recordings: Any) -> None:
    recordings.tone("corpus/b.wav", 0.5)
    recordings.tone("corpus/deep/a.flac", 0.25, rate=8000)
    recordings.tone("corpus/silent.wav", 0.5)
    (tmp_path / "corpus/b.txt").write_text(" Hello\nWorld ")
    (tmp_path / "corpus/deep/a.txt").write_text("two")
    cuts = {cut.id: cut for cut in lhotse_cuts(open_source(str(tmp_path / "corpus")))}
    assert list(cuts) == ["corpus/b", "corpus/deep/a", "corpus/silent"]
    assert [cut.supervisions[0].text for cut in cuts.values()] == ["Hello World", "two", ""]
    assert (cuts["corpus/deep/a"].duration, cuts["corpus/deep/a"].recording.sampling_rate) == (0.25, 8000)


def test_a_folder_as_librispeech_has_it(tmp_path: Path, recordings: Any) -> None:
    for name in ("19-198-0000", "19-198-0001"):
        recordings.tone(f"dev/19/198/{name}.flac", 0.3)
    listed = "19-198-0000 CHAPTER ONE\n19-198-0001 TWO\n19-198-0002 NOT THERE\n"
    (tmp_path / "dev/19/198/19-198.trans.txt").write_text(listed)
    cuts = list(lhotse_cuts(open_source(str(tmp_path / "dev"))))
    assert [cut.supervisions[0].text for cut in cuts] == ["CHAPTER ONE", "TWO", "NOT THERE"]
    assert [cut.supervisions[0].speaker for cut in cuts] == ["19"] * 3
    assert cuts[2].recording.sources[0].source.endswith("19-198-0002.flac")  # met as a missing recording


def test_fingerprints_follow_content(tmp_path: Path, recordings: Any) -> None:
    path = tmp_path / "m.jsonl"
    before = open_source(write(path, [nemo_line()])).fingerprint()
    assert open_source(str(path)).fingerprint() == before
    assert open_source(write(path, [nemo_line(), nemo_line()])).fingerprint() != before
    recordings.tone("c/a.wav")
    folders = [open_source(str(tmp_path / "c")).fingerprint()]
    recordings.tone("c/b.wav")
    folders.append(open_source(str(tmp_path / "c")).fingerprint())
    (tmp_path / "c/b.txt").write_text("one")
    folders.append(open_source(str(tmp_path / "c")).fingerprint())
    assert len(set(folders)) == 3


def test_text_and_seconds_of_mixed_cuts(lhotse_line: Any) -> None:
    from lhotse import MonoCut

    first, second = (MonoCut.from_dict(lhotse_line(n, text=n)) for n in ("one", "two"))
    mixed = first.append(second).pad(5.0).to_dict()
    assert text_of(mixed) == "one two"
    assert seconds_of(mixed) == 5.0
    assert seconds_of({"type": "MonoCut", "duration": float("nan")}) == 0.0


objects = st.lists(
    st.dictionaries(
        st.text(max_size=4), st.one_of(st.text(max_size=8), st.integers(), st.lists(st.text(max_size=3)))
    ),
    max_size=6,
)


@settings(max_examples=100, deadline=None)
@given(items=objects, indent=st.sampled_from([None, 1]), ascii_only=st.booleans())
def test_an_array_is_read_as_json_does(
    tmp_path_factory: pytest.TempPathFactory, items: list[Any], indent: int | None, ascii_only: bool
) -> None:
    path = tmp_path_factory.mktemp("array") / "a.json"
    text = json.dumps(items, indent=indent, ensure_ascii=ascii_only)
    path.write_text(text)
    assert list(json_array(path)) == [*enumerate(items, 1)]

from __future__ import annotations

import json
import os
import pickle
import shutil
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from speechtrain.counter_rng import key_of
from speechtrain.data import index as module
from speechtrain.data.corpora.digits import Digits
from speechtrain.data.index import Index, open_index
from speechtrain.data.source import Source
from speechtrain.data.sources import open_source
from speechtrain.errors import DataError, MachineError
from speechtrain.text.vocabulary import Characters


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that grows by one at every build."""
    seen: list[str] = []
    build = module._build

    def counted(source: Source, folder: Path) -> None:
        seen.append(folder.name)
        build(source, folder)

    monkeypatch.setattr(module, "_build", counted)
    return seen


def lhotse_manifest(path: Path, lines: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def nemo_records(count: int) -> list[dict[str, Any]]:
    return [{"audio_filepath": f"{i}.wav", "duration": 1 + i / 4, "text": "a" * i} for i in range(count)]


def test_arrays_and_cuts_of_a_converted_manifest(cache: Path, recordings: Any) -> None:
    index = open_index(open_source(recordings.nemo("m.jsonl", nemo_records(5))))
    assert len(index) == 5
    assert index.seconds.tolist() == [1.0, 1.25, 1.5, 1.75, 2.0]
    assert index.keys.tolist() == [key_of(f"m:{i + 1}:{i}") for i in range(5)]
    assert [index.cut(row)["id"] for row in (4, 0, 2)] == ["m:5:4", "m:1:0", "m:3:2"]
    assert index.folder.parent == cache / "index"


def test_lhotse_lines_are_stored_as_they_are(cache: Path, tmp_path: Path, lhotse_line: Any) -> None:
    path = tmp_path / "cuts.jsonl"
    lines = [lhotse_line(f"ü{i}", text="é" * i) for i in range(4)]
    path.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines[:2]) + "\n\n")
    with path.open("a") as file:
        file.write("\n".join(json.dumps(line) for line in lines[2:]))  # no newline at the end
    index = open_index(open_source(str(path)))
    path.unlink()
    assert [index.cut(row) for row in range(4)] == lines


def test_an_index_is_built_once_and_again_when_the_manifest_changes(
    cache: Path, recordings: Any, builds: list[str]
) -> None:
    path = recordings.nemo("m.jsonl", nemo_records(3))
    first = open_index(open_source(path))
    assert open_index(open_source(path)).folder == first.folder
    assert len(builds) == 1
    recordings.nemo("m.jsonl", nemo_records(4))
    assert len(open_index(open_source(path))) == 4
    assert len(builds) == 2


def test_the_content_hash_knows_the_cuts_and_not_the_place(
    cache: Path, tmp_path: Path, recordings: Any
) -> None:
    first = open_index(open_source(recordings.nemo("x/m.jsonl", nemo_records(3))))
    moved = open_index(open_source(recordings.nemo("y/m.jsonl", nemo_records(3))))
    other = open_index(open_source(recordings.nemo("z/m.jsonl", nemo_records(4))))
    assert first.content == moved.content != other.content


@pytest.mark.parametrize("damage", ["truncate", "row", "cut", "delete"])
def test_a_damaged_index_is_built_again(cache: Path, recordings: Any, builds: list[str], damage: str) -> None:
    path = recordings.nemo("m.jsonl", nemo_records(3))
    folder = open_index(open_source(path)).folder
    if damage == "truncate":
        (folder / "rows.bin").write_bytes(b"1234")
    elif damage == "delete":
        (folder / "cuts.jsonl").unlink()
    else:  # The last row or the last cut is lost.
        path_of_loss = folder / {"row": "rows.bin", "cut": "cuts.jsonl"}[damage]
        content = path_of_loss.read_bytes()
        path_of_loss.write_bytes(
            content[: content.rfind(b"{")] if damage == "cut" else content[: -module._ROW.itemsize]
        )
    assert open_index(open_source(path)).cut(2)["id"] == "m:3:2"
    assert len(builds) == 2
    assert [entry.name for entry in folder.parent.iterdir() if entry.is_dir()] == [folder.name]


def test_repeated_ids_are_refused_with_both_places(cache: Path, tmp_path: Path, lhotse_line: Any) -> None:
    a = lhotse_manifest(tmp_path / "a.jsonl", [lhotse_line("x"), lhotse_line("y"), lhotse_line("x")])
    with pytest.raises(DataError, match=r"a\.jsonl:3: cut id 'x' is already at .*a\.jsonl:1"):
        open_index(open_source(a))
    b = lhotse_manifest(tmp_path / "b.jsonl", [lhotse_line("x"), lhotse_line("y")])
    c = lhotse_manifest(tmp_path / "c.jsonl", [lhotse_line("z"), lhotse_line("y")])
    with pytest.raises(DataError, match=r"c\.jsonl:2: cut id 'y' is already at .*b\.jsonl:2"):
        open_index(open_source([b, c]))
    assert not list((cache / "index").glob(".*"))


def test_cuts_that_change_under_an_open_index_are_noticed(cache: Path, recordings: Any) -> None:
    index = open_index(open_source(recordings.nemo("m.jsonl", nemo_records(2))))
    path = index.folder / "cuts.jsonl"
    path.write_text(path.read_text().replace("m:2", "m:3"))
    with pytest.raises(DataError, match="has changed since it was indexed"):
        index.cut(1)


def test_an_index_travels_as_its_folder(cache: Path, recordings: Any) -> None:
    index = open_index(open_source(recordings.nemo("m.jsonl", nemo_records(3))))
    index.cut(1)
    packed = pickle.dumps(index)
    assert len(packed) < 500
    assert pickle.loads(packed).cut(1) == index.cut(1)


def test_labels_are_counted_once_for_each_tokenizer(cache: Path, recordings: Any) -> None:
    records = [{"audio_filepath": "a.wav", "duration": 1, "text": text} for text in ("Abc", "", "ab3")]
    index = open_index(open_source(recordings.nemo("m.jsonl", records)))
    letters, digits = Characters(), Characters(alphabet="abc3")
    assert index.labels(letters).tolist() == [3, 0, -1]
    assert index.labels(digits).tolist() == [3, 0, 3]
    assert len(list(index.folder.glob("labels-*"))) == 2
    (index.folder / "cuts.jsonl").unlink()
    assert Index(index.folder, index.facts).labels(letters).tolist() == [3, 0, -1]


def test_a_corpus_gets_its_audio_back(
    cache: Path, builds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = Digits("valid", utterances=20)
    index = open_index(corpus)
    audio = Path(index.cut(0)["recording"]["sources"][0]["source"])
    shutil.rmtree(audio.parent)
    assert open_index(corpus).cut(3) == index.cut(3)
    assert audio.is_file()
    assert len(builds) == 1
    # the index is kept elsewhere than the audio, and the audio's folder moves
    own = cache.with_name("own")
    open_index(corpus, str(own))
    monkeypatch.setenv("SPEECHTRAIN_CACHE", str(cache.with_name("moved")))
    moved = open_index(corpus, str(own)).cut(0)["recording"]["sources"][0]["source"]
    assert moved.startswith(str(cache.with_name("moved")))


def test_audio_in_memory_cannot_be_indexed(cache: Path, recordings: Any) -> None:
    from lhotse import Recording

    class InMemory(Source):
        def cuts(self) -> Iterator[Any]:
            yield Recording.from_file(recordings.tone("a.wav")).to_cut().move_to_memory().to_dict()

        def fingerprint(self) -> str:
            return "memory"

    with pytest.raises(DataError, match="has audio in memory"):
        open_index(InMemory())


def test_a_cache_that_cannot_be_written_is_a_machine_error(tmp_path: Path, recordings: Any) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match=r"data\.cache or SPEECHTRAIN_CACHE"):
        open_index(open_source(recordings.nemo("m.jsonl", nemo_records(1))), str(tmp_path / "file"))


def test_builders_at_the_same_time_are_safe(
    cache: Path, recordings: Any, monkeypatch: pytest.MonkeyPatch, builds: list[str]
) -> None:
    path = recordings.nemo("m.jsonl", nemo_records(2000))
    found: list[Index] = []
    threads = [threading.Thread(target=lambda: found.append(open_index(open_source(path)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {index.content for index in found} == {open_index(open_source(path)).content}
    assert len(found) == 4
    assert len(builds) > 1


def test_the_slower_builder_takes_the_index_of_the_faster_one(
    cache: Path, recordings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index of another process may appear just before this process renames its own."""
    rename, raced = Path.rename, list[str]()

    def rename_too_late(path: Path, target: Path) -> Path:
        if path.suffix and not target.name.startswith("."):
            shutil.copytree(path, target)
            raced.append(target.name)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_too_late)
    assert len(open_index(open_source(recordings.nemo("m.jsonl", nemo_records(3))))) == 3
    assert len(raced) == 1
    assert [path.name for path in cache.rglob(f"*{raced[0]}*") if path.is_dir()] == raced


@pytest.mark.slow
def test_building_holds_no_more_than_a_chunk(
    cache: Path, recordings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def peak(count: int) -> int:
        source = open_source(recordings.nemo(f"{count}.jsonl", nemo_records(1) * count))
        tracemalloc.start()
        index = open_index(source)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(index) == count
        return most

    monkeypatch.setattr(module, "_CHUNK", 200)
    peak(100)  # imports
    assert peak(8000) - peak(1000) < 7000 * 64  # the check for repeated ids sorts 8 bytes a cut, and no more


def test_folders_of_interrupted_builds_are_removed_after_a_day(cache: Path, recordings: Any) -> None:
    old, new = cache / "index/.old", cache / "index/.new"
    for folder in (old, new):
        folder.mkdir(parents=True)
    os.utime(old, (0, 0))
    open_index(open_source(recordings.nemo("m.jsonl", nemo_records(1))))
    assert (old.exists(), new.exists()) == (False, True)

"""data.stage: copies of recordings on a local disk, on which no result depends."""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import os
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from speechtrain.data import stage
from speechtrain.data.module import SpeechData
from speechtrain.data.sampler import BatchLimits
from speechtrain.data.stage import Stager, open_staged, use_stage
from speechtrain.text.vocabulary import Characters
from tests.support.shar import write_shar


@pytest.fixture(autouse=True)
def small_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "_RESERVED_BYTES", 2**20)


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def copies(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*/*") if not path.name.startswith("."))


def staged(folder: Path, *paths: Path) -> Stager:
    """A stager that has seen these files."""
    seen: list[str] = []

    def files() -> Iterator[str]:
        yield from map(str, paths)
        seen.append("all")

    stager = Stager(str(folder), iter([files]))
    wait_for(lambda: seen or stager._ended.is_set())
    stager.close()
    return stager


def make_data(train: str, stage_in: Path | None, **options: Any) -> SpeechData:
    options = {"batch": BatchLimits(count=3), "speed": [0.9, 1.1], "workers": 0, **options}
    return SpeechData(train, {"dev": train}, Characters(), stage=stage_in and str(stage_in), **options)


@pytest.mark.parametrize("kind", ["files", "shar"])
@pytest.mark.parametrize("workers", [0, 1])
def test_no_result_depends_on_copies(
    tmp_path: Path, cache: Path, recordings: Any, kind: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = recordings.corpus("a", 20) if kind == "files" else str(write_shar(tmp_path, 20))
    expected = list(islice(make_data(train, None).train(), 16))
    expected += list(make_data(train, None).valid()["dev"])
    folder = tmp_path / "stage"
    data = make_data(train, folder, workers=workers)
    batches = data.train()
    found = [next(batches) for _ in range(8)]
    wait_for(lambda: len(copies(folder)) == (20 if kind == "files" else 5))
    opened: list[str] = []
    monkeypatch.setattr(
        stage, "open_regular", lambda path, **o: opened.append(str(path)) or original(path, **o)
    )
    found += [*(next(batches) for _ in range(8)), *data.valid()["dev"]]
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.ids, ours.index, ours.skipped) == (theirs.ids, theirs.index, theirs.skipped)
        assert torch.equal(ours.audio, theirs.audio)
    if not workers:
        assert opened
        assert all(path.startswith(str(folder)) for path in opened)
    data.close()
    assert {path.stat().st_mode & 0o777 for path in copies(folder)} == {0o600}
    assert not list(folder.glob("*/.*.*"))


original = stage.open_regular


def test_a_rank_copies_what_it_needs(tmp_path: Path, cache: Path, recordings: Any) -> None:
    train = recordings.corpus("a", 40)
    data = make_data(train, tmp_path / "stage", hold_out=0.0)
    data.evaluation_sets.specs = {}
    batches = data.train(rank=1, world_size=2)
    next(batches)
    wait_for(lambda: len(copies(tmp_path / "stage")) >= 17)  # its first batch is loaded without
    time.sleep(0.1)
    assert len(copies(tmp_path / "stage")) <= 20
    data.close()


def test_copies_are_kept_and_made_again_when_a_recording_changes(tmp_path: Path, recordings: Any) -> None:
    path, folder = recordings.tone("a.wav"), tmp_path / "stage"
    staged(folder, path, tmp_path / "missing.wav", tmp_path)
    (copy,) = copies(folder)
    before = copy.stat()
    assert (before.st_size, before.st_mtime_ns) == (path.stat().st_size, path.stat().st_mtime_ns)
    staged(folder, path)
    assert copy.stat().st_ino == before.st_ino
    recordings.tone("a.wav", 2.0)
    with use_stage(str(folder)), open_staged(str(path)) as file:
        assert file.read() == path.read_bytes()
    staged(folder, path)
    assert copy.read_bytes() == path.read_bytes()
    copy.unlink()
    copy.symlink_to(recordings.tone("b.wav"))
    os.utime(tmp_path / "b.wav", ns=(path.stat().st_atime_ns,) * 2)
    with use_stage(str(folder)), open_staged(str(path)) as file:
        assert file.read() == path.read_bytes()


def test_what_a_killed_process_left_is_removed(tmp_path: Path, recordings: Any) -> None:
    path, folder = recordings.tone("a.wav"), tmp_path / "stage"
    staged(folder, path)
    (copy,) = copies(folder)
    copy.rename(copy.with_name(f".{copy.name}.0123456789abcdef"))
    staged(folder, path)
    assert copy.read_bytes() == path.read_bytes()
    assert not list(folder.glob("*/.*.*"))


def test_who_copies_a_file_does_so_alone(tmp_path: Path, recordings: Any) -> None:
    path, folder = recordings.tone("a.wav"), tmp_path / "stage"
    staged(folder, path)
    (copy,) = copies(folder)
    copy.unlink()
    with (copy.parent / ".lock").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        staged(folder, path)
        assert not copies(folder)
    staged(folder, path)
    assert copies(folder) == [copy]


def test_a_recording_that_shrinks_under_the_copying_has_no_copy(
    tmp_path: Path, recordings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, folder = recordings.tone("a.wav"), tmp_path / "stage"

    def shrinking(name: str, **options: Any) -> Any:
        os.truncate(name, 1000)
        return original(name, **options)

    monkeypatch.setattr(stage, "open_regular", shrinking)
    staged(folder, path)
    assert not list(folder.glob("*/[!.]*"))
    assert not list(folder.glob("*/.*.*"))


def _copy_all(folder: Path, paths: list[Path]) -> None:
    stage._RESERVED_BYTES = 2**20
    staged(folder, *paths)


def test_processes_that_copy_at_once_agree(tmp_path: Path, recordings: Any) -> None:
    paths, folder = [recordings.tone(f"{i}.wav", 0.2) for i in range(100)], tmp_path / "stage"
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_copy_all, args=(folder, paths)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    staged(folder, *paths)  # a few may have been passed by all
    assert len(copies(folder)) == 100
    assert not list(folder.glob("*/.*.*"))
    with use_stage(str(folder)):
        for path in paths:
            with open_staged(str(path)) as file:
                assert file.read() == path.read_bytes()


@pytest.mark.parametrize("how", ["no room", "limit", "no folder"])
def test_a_full_disk_is_one_warning(
    tmp_path: Path, recordings: Any, how: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    folder = tmp_path / "stage"
    paths = [recordings.tone(f"{i}.wav") for i in range(3)]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if how == "no room":
        monkeypatch.setattr(stage, "_RESERVED_BYTES", shutil.disk_usage(tmp_path).total)
    elif how == "no folder":
        folder.write_text("")
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with caplog.at_level(logging.WARNING):
            staged(folder, *paths)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (told,) = caplog.messages
    assert told.startswith(f"data.stage: {folder} takes no more copies")
    with use_stage(str(folder)), open_staged(str(paths[0])) as file:
        assert file.read() == paths[0].read_bytes()
    assert not [path for path in folder.glob("*/*") if path.name != ".lock"]


def test_a_full_disk_ends_no_training(
    tmp_path: Path, cache: Path, recordings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = recordings.corpus("a", 10)
    monkeypatch.setattr(stage, "_RESERVED_BYTES", shutil.disk_usage(tmp_path).total)
    data = make_data(train, tmp_path / "stage")
    assert sum(batch.utterances for batch in islice(data.train(), 8)) == 20
    data.close()


def test_a_second_stream_ends_the_copying_of_the_first(tmp_path: Path, cache: Path, recordings: Any) -> None:
    def copying() -> int:
        return sum(thread.name == "stage" for thread in threading.enumerate())

    data = make_data(recordings.corpus("a", 10), tmp_path / "stage")
    first, second = data.train(), data.train()
    next(first)
    next(second)
    assert copying() == 1
    assert next(first).ids
    data.close()
    assert not copying()

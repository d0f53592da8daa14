"""What is held out where no evaluation set is given: a share by hashes, or whole speakers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from speechtrain.data.hold_out import held_out
from speechtrain.data.index import Index, open_index
from speechtrain.data.module import SpeechData
from speechtrain.data.sampler import BatchLimits
from speechtrain.data.sources import open_source
from speechtrain.errors import DataError
from speechtrain.text.vocabulary import Characters


def manifest(folder: Path, count: int, speakers: int = 0, name: str = "m", **fields: Any) -> str:
    """NeMo lines of recordings that need not exist, with speakers in turn."""
    path = folder / f"{name}.jsonl"
    lines: list[dict[str, Any]] = [
        {"audio_filepath": f"{i}.wav", "duration": 1.0, "text": "one", **fields} for i in range(count)
    ]
    for i, line in enumerate(lines):
        line |= {"speaker": f"s{i % speakers}"} if speakers else {}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def index_of(path: str) -> Index:
    return open_index(open_source(path))


def rows_of(index: Index, share: float = 0.1) -> set[int]:
    return set(held_out(index, np.arange(len(index), dtype=np.int32), share).tolist())


@pytest.mark.usefixtures("cache")
def test_a_share_is_held_out_by_the_hash_of_each_recording(tmp_path: Path) -> None:
    index = index_of(manifest(tmp_path, 1000))
    found = rows_of(index)
    assert 70 < len(found) < 130
    assert rows_of(index, 0.2) > found
    assert rows_of(index_of(manifest(tmp_path, 1500))) >= found  # recordings that are added change nothing


@pytest.mark.parametrize(("count", "held"), [(1, 1), (2, 1), (10, 1)])
@pytest.mark.usefixtures("cache")
def test_of_a_few_one_is_held_out(tmp_path: Path, count: int, held: int) -> None:
    assert len(rows_of(index_of(manifest(tmp_path, count)), 0.01)) == held
    assert len(rows_of(index_of(manifest(tmp_path, count)), 0.99)) == max(1, count - 1)


@pytest.mark.usefixtures("cache")
def test_whole_speakers_are_held_out_where_there_are_enough(tmp_path: Path) -> None:
    found = rows_of(index_of(manifest(tmp_path, 600, speakers=30)))
    assert {row % 30 for row in found} == {row % 30 for row in found if row < 30}
    assert len(found) == 60
    few = rows_of(index_of(manifest(tmp_path, 600, speakers=3)))
    assert {row % 3 for row in few} == {0, 1, 2}


def data_of(train: str, **options: Any) -> SpeechData:
    options = {"valid": {}, "hold_out": 0.2, "batch": BatchLimits(count=2), "workers": 0, **options}
    return SpeechData(train, tokenizer=Characters(), **options)


def test_what_is_held_out_is_not_trained_on(cache: Path, recordings: Any) -> None:
    data = data_of(recordings.corpus("m", 20))
    data.check()
    (name, batches), *more = data.valid().items()
    held = {i for batch in batches for i in batch.ids}
    training = data.train()
    trained = {i for _ in range(data.micro_batches_per_epoch) for i in next(training).ids}
    assert (name, more) == ("held_out", [])
    assert len(held) + len(trained) == 20
    assert not held & trained
    assert data.report()["held out"].startswith(f"{len(held)} recordings, 0.00 h")
    assert data_of(recordings.corpus("n", 3), valid={"dev": recordings.corpus("d", 2)}).hold_out == 0


def test_one_recording_validates_itself(cache: Path, recordings: Any) -> None:
    data = data_of(recordings.corpus("m", 1))
    data.check()
    (batch,) = data.valid()["held_out"]
    assert batch.ids == next(data.train()).ids
    assert "only recording" in data.report()["held out"]


def test_recordings_without_a_transcript_are_in_neither_part(
    cache: Path, recordings: Any, tmp_path: Path
) -> None:
    lines = Path(recordings.corpus("m", 30)).read_text().splitlines()
    texts = ["" if i % 3 == 0 else "one two" for i in range(30)]
    records = [{**json.loads(line), "text": text} for line, text in zip(lines, texts, strict=True)]
    path = recordings.nemo("third.jsonl", records)
    with pytest.raises(DataError, match="have no transcript"):
        data_of(path, max_bad=2).check()
    data = data_of(path, skip_empty=True, run_dir=str(tmp_path))
    data.check()
    assert data.report()["untranscribed"] == 10
    assert len(list(data.recordings(str))) == 20
    next(data.train())
    reasons = [json.loads(line)["reason"] for line in (tmp_path / "filtered.jsonl").read_text().splitlines()]
    assert reasons == ["untranscribed"] * 10
    with pytest.raises(DataError, match="no recording has a transcript"):
        data_of(recordings.corpus("e", 4, text=""), skip_empty=True).check()


def test_a_damaged_recording_that_is_held_out_does_not_end_the_run(cache: Path, recordings: Any) -> None:
    data = data_of(recordings.corpus("m", 20))
    held = {i for batch in data.valid()["held_out"] for i in batch.ids}
    damaged = sorted(held)[0]
    (recordings.folder / f"m-audio/{damaged.rpartition(':')[2]}.wav").write_bytes(b"no audio")
    again = data_of(str(recordings.folder / "m.jsonl"))
    assert {i for batch in again.valid()["held_out"] for i in batch.ids} == held - {damaged} | {""}
    assert again.skips.reasons[damaged] == "unreadable"


def test_a_share_is_a_share() -> None:
    with pytest.raises(ValueError, match="hold_out=1"):
        data_of("m.jsonl", hold_out=1.0)

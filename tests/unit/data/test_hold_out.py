"""What is held out where no evaluation set is given: a share by hashes, or whole speakers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from speechtrain.commands import prepare
from speechtrain.counter_rng import key_of
from speechtrain.data.equal_content import equal_files
from speechtrain.data.hold_out import (
    NO_SIDES,
    Sides,
    held_out,
    held_out_recordings,
    held_out_speakers,
)
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
    held, _ = held_out(index.groups(np.arange(len(index))), index.seconds, share)
    return set(np.flatnonzero(held).tolist())


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


def parts(folder: Path, recordings: int, each: int, name: str = "p", speakers: int = 0) -> str:
    """NeMo lines of parts of recordings. The parts name the speakers in turn."""
    path = folder / f"{name}.jsonl"
    lines: list[dict[str, Any]] = [
        {"audio_filepath": f"{i}.wav", "offset": float(part), "duration": 1.0, "text": "one"}
        for part in range(each)
        for i in range(recordings)
    ]
    for number, line in enumerate(lines):
        line |= {"speaker": f"s{number % speakers}"} if speakers else {}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


@pytest.mark.usefixtures("cache")
def test_parts_of_a_recording_are_on_one_side(tmp_path: Path) -> None:
    found = rows_of(index_of(parts(tmp_path, 200, 5)))
    assert 100 / 2 < len(found) < 100 * 2
    assert {row % 200 for row in found} == {row for row in found if row < 200}
    few = rows_of(index_of(parts(tmp_path, 3, 40)))
    assert len(few) == 40 == 40 * len({row % 3 for row in few})
    assert 6 < len(rows_of(index_of(parts(tmp_path, 1, 100)))) < 20  # parts of the only one


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("speakers", [1, 2, 5])
def test_parts_of_the_only_recording_are_held_out_if_it_has_few_speakers(
    tmp_path: Path, speakers: int
) -> None:
    training_set = data_of(parts(tmp_path, 1, 60, speakers=speakers)).training_set
    assert 6 <= len(training_set.held_out) <= 24  # half and double of the share
    assert len(training_set.held_out) + len(training_set.rows) == 60
    assert not set(training_set.held_out) & set(training_set.rows)
    assert training_set.describe_held_out().startswith(f"{len(training_set.held_out)} parts of the only")


@pytest.mark.usefixtures("cache")
def test_whole_speakers_of_the_only_recording_are_held_out_if_there_are_ten(tmp_path: Path) -> None:
    path = parts(tmp_path, 1, 60, speakers=20)
    training_set = data_of(path).training_set
    speakers = {row % 20 for row in training_set.held_out.tolist()}
    assert len(speakers) == 4
    assert len(training_set.held_out) == 3 * 4
    command = ["split", path, "--out", str(tmp_path / "d"), "--share", "0.2", "--by", "speaker"]
    assert prepare.run(command) == 0
    ids = {json.loads(line)["id"] for line in (tmp_path / "d/valid.jsonl").read_text().splitlines()}
    assert ids == {training_set.index.cut(row)["id"] for row in training_set.held_out.tolist()}


@pytest.mark.usefixtures("cache")
def test_one_long_recording_is_not_what_is_held_out(tmp_path: Path) -> None:
    for long in range(6):
        path = Path(manifest(tmp_path, 6, name=f"long{long}"))
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines[long]["duration"] = 1000.0
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert long not in rows_of(index_of(str(path)))


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("speakers", [0, 40])
def test_prepare_split_and_a_run_choose_alike(tmp_path: Path, speakers: int) -> None:
    path = manifest(tmp_path, 400, speakers=speakers)
    index = index_of(path)
    assert prepare.run(["split", path, "--out", str(tmp_path / "d"), "--share", "0.1"]) == 0
    held = {json.loads(line)["id"] for line in (tmp_path / "d/valid.jsonl").read_text().splitlines()}
    assert held == {index.cut(row)["id"] for row in rows_of(index)}


def test_a_run_that_held_out_others_does_not_go_on(cache: Path, recordings: Any) -> None:
    data = data_of(recordings.corpus("m", 20))
    state = data.state_dict()
    data.load_state_dict(state)
    state["held_out"] = "0"
    with pytest.raises(DataError, match="other recordings would be held out"):
        data.load_state_dict(state)
    data_of(recordings.corpus("m", 20), hold_out=0.0).load_state_dict(state)


def data_of(train: Any, **options: Any) -> SpeechData:
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
    data = data_of(recordings.corpus("n", 3), valid={"dev": recordings.corpus("d", 2)})
    assert data.training_set.hold_out == 0


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
    with pytest.raises(DataError, match="10 empty_transcript"):
        data_of(path, max_bad=2).check()
    data = data_of(path, skip_empty=True, run_dir=str(tmp_path))
    data.check()
    assert data.report()["untranscribed"] == 10
    assert [line for line in data.warnings() if line.startswith("data.train: 10 of 30 recordings (")]
    assert len(list(data.recordings(str))) == 20
    next(data.train())
    reasons = [json.loads(line)["reason"] for line in (tmp_path / "filtered.jsonl").read_text().splitlines()]
    assert reasons == ["untranscribed"] * 10
    with pytest.raises(DataError, match="no recording has a transcript"):
        data_of(recordings.corpus("e", 4, text=""), skip_empty=True).check()


def sides_of(
    speakers: list[str], recordings: list[str], share: float, seconds: np.ndarray[Any, Any]
) -> tuple[np.ndarray[Any, Any], str]:
    """Draw from cuts of ``seconds``."""
    keys = {"speaker": speakers, "recording": recordings, "cut": [str(i) for i in range(len(speakers))]}
    groups = {}
    for by, names in keys.items():
        groups[by] = np.array([key_of(name) for name in names])
    return held_out(groups, seconds.astype(np.float32), share)


def longer(is_long: np.ndarray[Any, Any], share: float) -> np.ndarray[Any, Any]:
    """Seconds of which some cuts have a ``share``, in equal parts. The others have one second each."""
    count = np.count_nonzero(is_long)
    long_seconds = share / (1 - share) * (len(is_long) - count)
    return np.where(is_long, long_seconds / count, 1.0)


@pytest.mark.parametrize(
    ("ratio", "expected"), [(0.6, "recording"), (0.75, "speaker"), (1.4, "speaker"), (1.6, "recording")]
)
def test_held_out_takes_speakers_if_their_seconds_are_about_the_share(ratio: float, expected: str) -> None:
    speakers = [f"speaker-{i}" for i in range(80)]
    is_sampled, by = sides_of(speakers, speakers, 0.1, np.ones(80))
    assert by == "speaker"
    _, by = sides_of(speakers, speakers, 0.1, longer(is_sampled, ratio * 0.1))
    assert by == expected


@pytest.mark.parametrize(("ratio", "expected"), [(1.4, True), (1.6, False)])
def test_held_out_passes_over_a_recording_far_longer_than_the_share(ratio: float, expected: bool) -> None:
    recordings, keys = [f"recording-{i}" for i in range(10)], dict[str, np.ndarray[Any, Any]]()
    for by in ("speaker", "recording", "cut"):
        keys[by] = np.array([key_of(name) for name in recordings])
    is_first, _ = held_out_recordings(keys, np.ones(10, np.float32), 0.1)
    assert np.count_nonzero(is_first) == 1
    seconds = longer(is_first, ratio * 0.1).astype(np.float32)
    is_held_out, _ = held_out_recordings(keys, seconds, 0.1)
    assert is_held_out.any()
    assert bool(is_held_out[is_first].all()) is expected


def test_held_out_keeps_a_recording_of_two_speakers_on_one_side() -> None:
    calls = [(f"call-{i}", f"agent-{i}", f"caller-{i}") for i in range(20)]
    speakers, recordings = [], []
    for call, *voices in calls:
        for voice in voices * 3:
            speakers.append(voice)
            recordings.append(call)
    is_held_out, by = sides_of(speakers, recordings, 0.2, np.ones(len(speakers)))
    assert by == "speaker"
    assert is_held_out.any()
    for names in (speakers, recordings):
        sides: dict[str, set[bool]] = {}
        for name, side in zip(names, is_held_out.tolist(), strict=True):
            sides.setdefault(name, set()).add(side)
        assert all(len(values) == 1 for values in sides.values())


def test_held_out_draws_recordings_if_a_speaker_connects_too_many(caplog: pytest.LogCaptureFixture) -> None:
    speakers, recordings = [], []
    for i in range(40):
        speakers += ["agent", f"caller-{i}"]
        recordings += [f"call-{i}"] * 2
    is_held_out, by = sides_of(speakers, recordings, 0.2, np.ones(len(speakers)))
    assert by == "recording"
    assert "too many of them share recordings" in caplog.text
    assert bool((is_held_out[::2] == is_held_out[1::2]).all())


def test_equal_files_groups_copies(tmp_path: Path) -> None:
    content = bytes(range(256)) * 300
    for name, data in {"a": content, "b": content, "c": content[:-1] + b"x", "d": content[:-1]}.items():
        (tmp_path / name).write_bytes(data)
    paths = [str(tmp_path / name) for name in ("d", "b", "a", "c", "missing")]
    assert equal_files([*paths, paths[1]]) == [[str(tmp_path / "a"), str(tmp_path / "b")]]


@pytest.mark.usefixtures("cache")
def test_copies_are_a_warning_if_recordings_are_held_out(tmp_path: Path) -> None:
    for i in range(20):
        samples = np.random.default_rng(i // 2).normal(0, 0.1, 16_000).astype(np.float32)
        soundfile.write(tmp_path / f"{i}.wav", samples, 16_000)
    path = manifest(tmp_path, 20)
    options = {"tokenizer": Characters(), "batch": BatchLimits(count=2), "workers": 0, "cache": str(tmp_path)}
    (message,) = SpeechData(open_source(path), valid={}, hold_out=0.2, **options).warnings()
    assert message.startswith("data.train: 10 recordings are copies of others, such as ")


# --- recordings that are added ------------------------------------------------------------------


def mask_of(names: list[str], seconds: list[float], share: float, former: Sides, speakers: int) -> list[bool]:
    voices = [f"speaker-{key_of(name) % speakers}" if speakers else "" for name in names]
    keys = {
        "speaker": np.array([key_of(voice) if voice else -1 for voice in voices]),
        "recording": np.array([key_of(name) for name in names]),
        "cut": np.arange(len(names)),
    }
    mask, _ = held_out(keys, np.array(seconds, np.float32), share, former_sides=former)
    result: list[bool] = mask.tolist()
    return result


@pytest.mark.parametrize("speakers", [0, 30])
@pytest.mark.parametrize("share", [0.05, 0.1])
def test_added_recordings_move_no_other_one(share: float, speakers: int) -> None:
    """Each step takes over the sides of the step before it, as ``init_from`` and a second split do."""
    for order in range(8):
        rng = np.random.default_rng(order)
        names = [f"{i}.wav" for i in rng.permutation(120)]
        seconds = rng.uniform(0.5, 1.5, 120).tolist()
        sides, previous = NO_SIDES, list[bool]()
        for count in range(3, 121):
            mask = mask_of(names[:count], seconds[:count], share, sides, speakers)
            assert mask[: len(previous)] == previous
            assert any(mask)
            fraction = np.dot(mask, seconds[:count]) / sum(seconds[:count])
            assert speakers or count < 20 or share / 2 <= fraction <= 2 * share
            keys = np.array([key_of(name) for name in names[:count]])
            sides, previous = sides.with_more(keys[~np.array(mask)], keys[mask]), mask


def test_the_longest_recording_stays_held_out_if_the_share_would_take_all() -> None:
    former = Sides(held_out=np.array([key_of("long.wav")]))
    assert mask_of(["long.wav", "new.wav"], [6.0, 1.0], 0.99, former, speakers=0) == [True, False]


def test_recordings_are_sampled_anew_if_an_earlier_run_held_out_all() -> None:
    names, seconds = [f"{i}.wav" for i in range(100)], [1.0] * 100
    former = Sides(held_out=np.array([key_of(name) for name in names]))
    assert mask_of(names, seconds, 0.1, former, 0) == mask_of(names, seconds, 0.1, NO_SIDES, 0)


@pytest.mark.parametrize("speaker_of_new", ["a", "b"])
def test_a_new_recording_is_held_out_if_each_speaker_was_trained_on(speaker_of_new: str) -> None:
    speakers, recordings = ["a", "b", speaker_of_new], ["a.wav", "b.wav", "new.wav"]
    keys = {
        "speaker": np.array([key_of(name) for name in speakers]),
        "recording": np.array([key_of(name) for name in recordings]),
    }
    former = Sides(trained=keys["recording"][:2])
    mask, _ = held_out_speakers(keys, np.ones(3, np.float32), 0.3, former)
    assert mask.tolist() == [False, False, True]


@pytest.mark.parametrize("added", [1, 2, 30])
def test_what_a_run_held_out_stays_held_out(cache: Path, recordings: Any, tmp_path: Path, added: int) -> None:
    first = data_of(recordings.corpus("m", 10), run_dir=str(tmp_path / "first"))
    next(first.train())
    others = recordings.corpus("a", added)
    second = data_of(
        f"{others},{recordings.folder / 'm.jsonl'}",
        run_dir=str(tmp_path / "second"),
        initial_run=str(tmp_path / "first"),
    )
    held = files_in(second, second.training_set.held_out)
    assert {name for name in held if name.startswith("m-")} == files_in(first, first.training_set.held_out)
    assert not any("init_from was trained" in line for line in second.warnings())
    next(second.train())
    resumed = data_of(second.training_set.spec, run_dir=str(tmp_path / "second"))
    resumed.load_state_dict(second.state_dict())
    # Recordings on which an earlier run was trained stay trained on, also if this run's set lacks them.
    third = data_of(str(recordings.folder / "m.jsonl"), initial_run=str(tmp_path / "second"))
    assert files_in(third, third.training_set.held_out) == files_in(first, first.training_set.held_out)


def test_of_a_set_with_hold_out_false_nothing_is_held_out(cache: Path, recordings: Any) -> None:
    own, other = recordings.corpus("own", 10), recordings.corpus("other", 10)
    alone = data_of(own).training_set
    both = data_of({"own": own, "other": {"path": other, "hold_out": False}}).training_set
    assert [both.index.cut(row)["id"] for row in both.held_out] == [
        alone.index.cut(row)["id"] for row in alone.held_out
    ]
    assert len(both.rows) == len(alone.rows) + 10
    neither = data_of({"other": {"path": other, "hold_out": False}}).training_set
    with pytest.raises(DataError, match=r"no set is left of which a part can be held out. Set data\.valid"):
        _ = neither.rows


def files_in(data: SpeechData, rows: Any) -> set[str]:
    """The names of the recordings of those rows, with their folders."""
    cuts = [data.training_set.index.cut(row) for row in rows.tolist()]
    return {"/".join(cut["recording"]["sources"][0]["source"].split("/")[-2:]) for cut in cuts}


def test_validation_on_recordings_of_the_initial_run_is_a_warning(
    cache: Path, recordings: Any, tmp_path: Path
) -> None:
    path = recordings.corpus("m", 10)
    next(data_of(path, hold_out=0.0, run_dir=str(tmp_path / "first")).train())
    options = {"initial_run": str(tmp_path / "first")}
    (line,) = data_of(path, **options).warnings()
    assert line.startswith(
        "held_out: the weights of init_from were trained on 3 of 3 recordings, such as 'm:"
    )
    new = recordings.corpus("n", 3)
    (line,) = data_of(new, valid={"dev": path}, **options).warnings()
    assert line.startswith("dev: the weights of init_from were trained on 10 of 10 recordings")
    assert not list(data_of(path, valid={"dev": new}, **options).warnings())
    (tmp_path / "first/recordings.bin").write_bytes(b"damaged")
    assert not list(data_of(path, **options).warnings())


@pytest.mark.usefixtures("cache")
def test_a_second_split_into_the_same_folder_moves_nothing(tmp_path: Path) -> None:
    def split(count: int) -> list[set[str]]:
        path, out = manifest(tmp_path, count), tmp_path / "d"
        assert prepare.run(["split", path, "--out", str(out), "--share", "0.05"]) == 0
        texts = [(out / f"{name}.jsonl").read_text() for name in ("train", "valid")]
        return [{json.loads(line)["id"] for line in text.splitlines()} for text in texts]

    sides = split(4)
    for count in (6, 8, 9, 10, 11, 12, 40, 200):
        former, sides = sides, split(count)
        assert sides[0] >= former[0]
        assert sides[1] >= former[1]
    assert 5 <= len(sides[1]) <= 20

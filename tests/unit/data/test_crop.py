"""Audio without transcripts: cropping, normalising, whole multiples, and fixed shapes over epochs."""

from __future__ import annotations

import copy
import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from speechtrain.batch import Batch
from speechtrain.counter_rng import key_of
from speechtrain.data.audio import standardise
from speechtrain.data.index import open_index
from speechtrain.data.loader import audio_row
from speechtrain.data.module import SpeechData
from speechtrain.data.sampler import BatchLimits
from speechtrain.data.sources import open_source
from speechtrain.errors import DataError
from speechtrain.text.vocabulary import Characters, NoText
from tests.support.audio_files import read_file
from tests.support.samplers import new_sampler

RATE = 16_000


def lengths_of(count: int, longest: float = 24.0) -> dict[str, Any]:
    seconds = np.random.default_rng(count).uniform(2.0, longest, count).astype(np.float32)
    return {"seconds": seconds, "keys": np.array([key_of(f"cut-{i}") for i in range(count)])}


def pretraining(train: Any, **options: Any) -> SpeechData:
    options = {"batch": BatchLimits(count=3), "workers": 0, "valid": {}, **options}
    return SpeechData(train=train, tokenizer=NoText(), **options)


@pytest.fixture
def manifest(cache: Path, recordings: Any) -> str:
    """Fourteen recordings of 0.4 to 0.53 s, each of a tone of its own."""
    return str(recordings.corpus("m", 14, text="Ünspellable 7"))


# --- no text ------------------------------------------------------------------------------------


def test_without_text_nothing_is_misspelt_missing_or_labelled(manifest: str, tmp_path: Path) -> None:
    data = pretraining(manifest, valid={"dev": manifest}, run_dir=str(tmp_path / "run"))
    data.check()
    batches = [*islice(data.train(), data.micro_batches_per_epoch), *data.valid()["dev"]]
    assert sum(batch.utterances for batch in batches) == 28
    for batch in batches:
        assert batch.labels.shape == (len(batch.ids), 0)
        assert not batch.label_lengths.any()
        assert (batch.weight == 1).all()
        assert set(batch.texts) == {""}
        assert batch.skipped == ()
    with pytest.raises(DataError, match=r"14 unknown_symbol; .*unknown symbols '7'.*Set tokenizer=auto"):
        SpeechData(manifest, {}, Characters(), workers=0).check()


def test_without_text_no_transcript_is_counted(manifest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speechtrain.data.index.Index.labels", None)  # a million take 20 s
    data = pretraining(manifest, valid={"dev": manifest}, shapes=2)
    assert all(labels == 0 for _, _, labels in [*data.shapes(), *data.evaluation_shapes()])
    assert next(data.train()).labels.shape[1] == 0
    data.check()


# --- cropping -----------------------------------------------------------------------------------


def where(row: torch.Tensor, whole: np.ndarray) -> int:
    """Offset of a row in its recording, -1 where it is no part of it."""
    part = row.numpy()
    starts = np.flatnonzero(whole[: len(whole) - len(part) + 1] == part[0])
    return next((int(s) for s in starts if np.array_equal(whole[s : s + len(part)], part)), -1)


def recording_of(manifest: str, name: str) -> np.ndarray:
    line = int(name.split(":")[1])
    found: np.ndarray = read_file(
        json.loads(Path(manifest).read_text().splitlines()[line - 1])["audio_filepath"], RATE
    )
    return found


def test_rows_are_cut_to_the_shortest_of_their_batch_at_random(manifest: str) -> None:
    offsets: dict[str, list[int]] = {}
    data = pretraining(manifest, crop_seconds=0.45, batch=BatchLimits(count=4, window=1))
    for batch in islice(data.train(), 3 * data.micro_batches_per_epoch):
        wholes = [recording_of(manifest, name) for name in batch.ids]
        length = min(7200, *(len(whole) for whole in wholes))
        assert batch.audio.shape == (len(wholes), length)
        assert (batch.audio_lengths == length).all()
        assert batch.seconds == pytest.approx(len(wholes) * length / RATE)
        for name, row, whole in zip(batch.ids, batch.audio, wholes, strict=True):
            offsets.setdefault(name, []).append(where(row, whole))
    assert min(min(found) for found in offsets.values()) >= 0
    assert len(offsets) == 14
    longest = [offsets[f"m:{line}:{line - 1:03d}"] for line in range(8, 15)]
    assert all(len(set(found)) == 3 for found in longest)  # other parts in other epochs
    assert max(map(max, longest)) > 400


def test_crops_follow_the_cut_and_not_the_batch_the_worker_or_the_rank(manifest: str) -> None:
    def crops(**options: Any) -> dict[tuple[int, str], torch.Tensor]:
        data = pretraining(manifest, crop_seconds=0.3, **options)
        batches = islice(data.train(), 2 * data.micro_batches_per_epoch)
        return {(b.epoch, name): row for b in batches for name, row in zip(b.ids, b.audio, strict=True)}

    expected = crops(seed=5)
    for found in (crops(seed=5, batch=BatchLimits(count=5)), crops(seed=5, valid={"dev": manifest})):
        assert expected.keys() == found.keys()
        assert all(torch.equal(row, found[key]) for key, row in expected.items())
    other = crops(seed=6)
    assert sum(torch.equal(row, other[key]) for key, row in expected.items()) < 3


def assert_same(ours: Batch, theirs: Batch) -> None:
    assert (ours.ids, ours.epoch, ours.index, ours.seconds) == (
        theirs.ids,
        theirs.epoch,
        theirs.index,
        theirs.seconds,
    )
    assert torch.equal(ours.audio, theirs.audio)


@pytest.mark.parametrize("shapes", [0, 2])
def test_a_resumed_run_goes_on_with_the_same_crops(manifest: str, shapes: int) -> None:
    options = {
        "crop_seconds": 0.42,
        "speed": [0.9, 1.1],
        "batch": BatchLimits(count=None, seconds=2.0, multiple=2),
        "shapes": shapes,
    }
    whole = list(islice(pretraining(manifest, **options).train(), 24))
    for stop in (1, 5, 9, 13):
        first = pretraining(manifest, **options)
        for _ in islice(first.train(), stop):
            pass
        resumed = pretraining(manifest, **options)
        resumed.load_state_dict(copy.deepcopy(first.state_dict()))
        for ours, theirs in zip(whole[stop:], resumed.train(), strict=False):
            assert_same(ours, theirs)


def test_a_lost_recording_leaves_the_length_of_its_batch(manifest: str, recordings: Any) -> None:
    options = {"crop_seconds": 0.5, "batch": BatchLimits(count=14)}
    before = next(pretraining(manifest, **options).train())
    (recordings.folder / "m-audio/000.wav").unlink()  # the shortest
    after = next(pretraining(manifest, **options).train())
    assert [skip.reason for skip in after.skipped] == ["missing"]
    assert after.audio.shape == before.audio.shape == (14, 6400)
    lost = before.ids.index("m:1:000")
    kept = [i for i in range(14) if i != lost]
    assert torch.equal(after.audio[kept], before.audio[kept])
    assert (after.ids[lost], float(after.weight[lost])) == ("", 0.0)
    assert not after.audio[lost].any()


def test_evaluation_hears_whole_recordings(manifest: str) -> None:
    data = pretraining(manifest, valid={"dev": manifest}, crop_seconds=0.3)
    for batch in data.valid()["dev"]:
        for name, row, length in zip(batch.ids, batch.audio, batch.audio_lengths.tolist(), strict=True):
            assert np.array_equal(row[:length].numpy(), recording_of(manifest, name))


def fairseq_batches(samples: list[int], most: int, multiple: int) -> list[list[int]]:
    """fairseq's rule row by row: longest first, a full batch keeps a multiple and hands on the rest."""
    made, batch = [], []
    for length in sorted((min(n, 250_000) for n in samples), reverse=True):
        if batch and (len(batch) + 1) * max(*batch, length) > most:
            kept = max(multiple * (len(batch) // multiple), len(batch) % multiple)
            made.append(batch[:kept])
            batch = batch[kept:]
        batch.append(length)
    return [*made, batch]


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize("count", [40, 1000, 3001])
def test_batches_are_fairseqs(count: int, multiple: int) -> None:
    data = lengths_of(count)
    limits = BatchLimits(count=None, seconds=87.5, multiple=multiple, window=10**6)
    plan = new_sampler(**data, seed=1, limits=limits, crop_seconds=15.625).epoch_batches(0)
    whole = np.rint(data["seconds"].astype(np.float64) * RATE).astype(np.int64)
    found = [
        sorted(np.minimum(whole[plan[i].rows], 250_000).tolist(), reverse=True) for i in range(len(plan))
    ]
    found.sort(key=lambda lengths: (-lengths[0], -lengths[-1]))
    expected = fairseq_batches(whole.tolist(), 1_400_000, multiple)
    assert len(expected) <= len(found) <= len(expected) + 1  # what is left at the end is cut in two
    assert found[: len(expected) - 1] == expected[:-1]
    assert [n for lengths in found[len(expected) - 1 :] for n in lengths] == expected[-1]


def test_cropping_wastes_what_it_says() -> None:
    data = lengths_of(500)
    limits = BatchLimits(count=None, seconds=87.5)
    padded, lost = new_sampler(**data, seed=1, limits=limits, crop_seconds=15.625).waste(0)
    assert padded == 0
    kept = np.minimum(data["seconds"], 15.625).sum() / data["seconds"].sum()
    assert 1 - kept < lost < 1 - kept + 0.05  # the rest: rows cut to the shortest beside them
    padded, lost = new_sampler(**data, seed=1, limits=limits, crop_seconds=15.625, shapes=7).waste(0)
    assert lost == pytest.approx(1 - kept, abs=1e-5)
    assert 0 < padded < 0.12
    assert new_sampler(**data, seed=1, limits=BatchLimits(count=1)).waste(0) == (0, 0)


# --- fixed shapes -------------------------------------------------------------------------------


@pytest.mark.parametrize("speed", [[1.0, 1.0], [0.9, 1.1]])
def test_over_three_epochs_no_shape_is_new_and_none_unannounced(manifest: str, speed: list[float]) -> None:
    options = {
        "shapes": 4,
        "crop_seconds": 0.45,
        "batch": BatchLimits(count=None, seconds=1.9),
        "speed": speed,
    }
    data = pretraining(manifest, **options)
    printed = data.shapes()
    assert len(printed) <= 4
    assert printed[-1] == (4, 7200, 0)
    met: list[set[tuple[int, int, int]]] = []
    padding: list[float] = []
    stream = data.train()
    for epoch in range(3):
        batches = list(islice(stream, data.sampler.length(epoch)))
        assert {batch.epoch for batch in batches} == {epoch}
        met.append({(*batch.audio.shape, batch.labels.shape[1]) for batch in batches})
        heard = sum(batch.seconds for batch in batches) * RATE
        padding.append(1 - heard / sum(batch.audio.numel() for batch in batches))
        names = [name for batch in batches for name in batch.ids if name]
        assert len(names) == len(set(names)) == 14
    assert set.union(*met) <= set(printed)
    if speed == [1.0, 1.0]:
        assert met[0] == met[1] == met[2]  # a cut has one length, so one shape, for good
    report = data.report()
    assert report["padding_share"] == pytest.approx(padding[0], abs=1e-3)
    assert set(report) == {"padding_share", "cropped_share"}


def test_rows_of_a_fixed_shape_are_cut_to_the_crop_and_padded_to_the_bucket(manifest: str) -> None:
    data = pretraining(manifest, shapes=2, crop_seconds=0.45)
    for batch in islice(data.train(), data.micro_batches_per_epoch):
        for name, row, length in zip(batch.ids, batch.audio, batch.audio_lengths.tolist(), strict=True):
            if name:
                whole = recording_of(manifest, name)
                assert length == min(7200, len(whole))
                assert where(row[:length], whole) >= 0
                assert not row[length:].any()


# --- normalising --------------------------------------------------------------------------------


def test_normalising_is_layer_norm_over_the_whole_recording(manifest: str) -> None:
    index = open_index(open_source(manifest))
    data = pretraining(manifest, normalise=True, valid={"dev": manifest}, batch=BatchLimits(count=14))
    for batch in [next(data.train()), next(iter(data.valid()["dev"]))]:
        for name, row, length in zip(batch.ids, batch.audio, batch.audio_lengths.tolist(), strict=True):
            whole = torch.from_numpy(recording_of(manifest, name))
            expected = torch.nn.functional.layer_norm(whole, whole.shape)
            torch.testing.assert_close(row[:length], expected, atol=1e-6, rtol=1e-5)
            assert not row[length:].any()
    assert len(index) == 14


def test_a_crop_is_cut_from_the_normalised_whole(manifest: str) -> None:
    data = pretraining(manifest, normalise=True, crop_seconds=0.2)
    batch = next(data.train())
    for name, row in zip(batch.ids, batch.audio, strict=True):
        assert where(row, standardise(recording_of(manifest, name))) >= 0


def test_silence_and_filler_stay_silent(manifest: str, recordings: Any) -> None:
    assert not standardise(np.zeros(100, np.float32)).any()
    (recordings.folder / "m-audio/003.wav").unlink()
    batch = next(pretraining(manifest, normalise=True, batch=BatchLimits(count=14)).train())
    assert [skip.reason for skip in batch.skipped] == ["missing"]
    assert not batch.audio[batch.ids.index("")].any()


def test_files_are_normalised_as_in_training(recordings: Any) -> None:
    path = str(recordings.tone("a.wav"))
    rows = [audio_row(path, read_file(path, RATE), RATE, normalise=flag) for flag in (False, True)]
    plain, normal = (torch.from_numpy(row.samples) for row in rows)
    torch.testing.assert_close(
        normal, torch.nn.functional.layer_norm(plain, plain.shape), atol=1e-6, rtol=1e-5
    )

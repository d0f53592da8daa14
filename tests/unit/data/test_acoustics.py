"""Recorded noise and rooms: levels, timing, draws that have an address, and bad recordings."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from speechtrain.batch import Batch
from speechtrain.data.acoustics import Acoustics, add_noise, reverberate, shorten
from speechtrain.data.module import SpeechData
from speechtrain.data.sampler import BatchLimits
from speechtrain.errors import DataError
from speechtrain.text.vocabulary import Characters
from tests.support.audio_files import read_file

RATE = 16_000
_CHANGED = r"augment\.noise or augment\.rooms have changed since the checkpoint"
ALL = {"probability": 1.0, "noise_db": (10.0, 10.0)}


def write(path: Path, samples: Any, rate: int = RATE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, np.asarray(samples, np.float32), rate, subtype="FLOAT")
    return path


def white(count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(0.0, 0.1, count).astype(np.float32)


def opened(tmp_path: Path, **options: Any) -> Acoustics:
    acoustics = Acoustics(**{**ALL, **options})
    acoustics.open(str(tmp_path / "cache"))
    return acoustics


def module(train: str, tmp_path: Path, **options: Any) -> SpeechData:
    options = {"batch": BatchLimits(count=3), "workers": 0, **options}
    return SpeechData(train, {}, Characters(), cache=str(tmp_path / "cache"), **options)


def epochs(data: SpeechData, count: int = 2) -> list[Batch]:
    return list(islice(data.train(), count * data.micro_batches_per_epoch))


@pytest.fixture
def noise(tmp_path: Path) -> Path:
    """A folder of five noises of 0.3 s."""
    for number in range(5):
        write(tmp_path / f"noise/{number}.wav", white(4800, seed=number))
    return tmp_path / "noise"


@pytest.fixture
def rooms(tmp_path: Path) -> Path:
    """A folder of one room, whose direct path comes after 5 ms, and an echo of half its size after 45 ms."""
    response = np.zeros(1600)
    response[80], response[800] = 0.8, 0.4
    write(tmp_path / "rooms/hall.wav", response)
    return tmp_path / "rooms"


def decibels(signal: Any, background: Any) -> float:
    """Return the signal-to-noise ratio."""
    signal_power = np.square(signal, dtype=float).mean()
    ratio = signal_power / np.square(background, dtype=float).mean()
    return float(10 * np.log10(ratio))


# --- the mixtures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("noise_length", [100, 16_000, 50_000])
def test_add_noise_has_the_signal_to_noise_ratio(noise_length: int) -> None:
    speech = white(16_000)
    mixed = add_noise(speech, white(noise_length, seed=1), 12.0)
    assert mixed.dtype == np.float32
    assert mixed.shape == speech.shape
    assert decibels(speech, mixed - speech) == pytest.approx(12.0, abs=0.01)


def test_reverberate_keeps_length_timing_and_energy(rooms: Path) -> None:
    response = read_file(str(rooms / "hall.wav"), RATE)
    click = np.zeros(4000, np.float32)
    click[1000] = 0.5
    reverberated = reverberate(click, response)
    assert reverberated.shape == click.shape
    assert reverberated.argmax() == 1000
    assert reverberated[1720] == pytest.approx(reverberated[1000] / 2, rel=1e-4)  # the echo
    assert np.square(reverberated).sum() == pytest.approx(0.25, rel=1e-4)
    late = np.zeros(4000, np.float32)
    late[3900] = 0.5
    assert reverberate(late, response).shape == (4000,)  # The echo would come after the end.


def test_reverberate_ignores_a_silent_response() -> None:
    speech = white(800)
    assert np.array_equal(reverberate(speech, np.zeros(50, np.float32)), speech)


def test_shorten_begins_everywhere_and_ends_within() -> None:
    for position, start in ((0.0, 0.5), (0.5, 2.0), (1.0, 3.5)):
        cut = {"start": 0.5, "duration": 4.0}
        shorten(cut, 1.0, position)
        assert cut == {"start": start, "duration": 1.0}
    cut = {"start": 0.5, "duration": 4.0}
    shorten(cut, 9.0, 0.7)
    assert cut == {"start": 0.5, "duration": 4.0}


# --- draws ----------------------------------------------------------------------------------------


def test_apply_draws_the_level_and_the_share(tmp_path: Path, noise: Path) -> None:
    speech = white(4000)
    acoustics = opened(tmp_path, noise=str(noise), noise_db=(5.0, 15.0), probability=0.4)
    ratios = []
    for seed in range(400):
        mixed, _ = acoustics.apply(speech, RATE, seed)
        if not np.array_equal(mixed, speech):
            ratios.append(decibels(speech, mixed - speech))
    assert len(ratios) / 400 == pytest.approx(0.4, abs=0.08)
    assert min(ratios) == pytest.approx(5.0, abs=0.5)
    assert max(ratios) == pytest.approx(15.0, abs=0.5)
    assert np.mean(ratios) == pytest.approx(10.0, abs=0.8)


def test_apply_resamples_and_cuts_a_long_noise(tmp_path: Path) -> None:
    """The noise is 0 in its first half and 0.1 in its second, at half of the rate."""
    write(tmp_path / "noise/long.wav", np.repeat([0.0, 0.1], 40_000), rate=8_000)
    acoustics = opened(tmp_path, noise=str(tmp_path / "noise"))
    speech = white(RATE)
    shares = []
    for seed in range(60):
        background = acoustics.apply(speech, RATE, seed)[0] - speech
        is_loud = np.abs(background) > 1e-3
        shares.append(is_loud.mean())
    assert min(shares) == 0.0
    assert max(shares) == 1.0


def test_apply_reads_a_mixed_cut_as_a_whole(tmp_path: Path, recordings: Any) -> None:
    from lhotse import CutSet, Recording

    cut = Recording.from_file(recordings.tone("a.wav", 0.5)).to_cut()
    path = tmp_path / "noise.jsonl"
    CutSet.from_cuts([cut.append(cut)]).to_file(path)
    speech = white(4000)
    mixed, _ = opened(tmp_path, noise=str(path)).apply(speech, RATE, 1)
    assert decibels(speech, mixed - speech) == pytest.approx(10.0, abs=0.01)


# --- training -------------------------------------------------------------------------------------


def test_training_audio_has_the_lengths_that_it_has_without(
    tmp_path: Path, cache: Path, recordings: Any, noise: Path, rooms: Path
) -> None:
    train = recordings.corpus("m", 9)
    options: dict[str, Any] = {"speed": [0.9, 1.1], "shapes": 2}
    clean_batches = epochs(module(train, tmp_path, **options))
    acoustics = Acoustics(noise=str(noise), rooms=str(rooms), **ALL)
    noisy_batches = epochs(module(train, tmp_path, acoustics=acoustics, **options))
    assert len(clean_batches) == len(noisy_batches)
    for clean, noisy in zip(clean_batches, noisy_batches, strict=True):
        assert clean.ids == noisy.ids
        assert torch.equal(clean.labels, noisy.labels)
        assert torch.equal(clean.audio_lengths, noisy.audio_lengths)
        assert clean.audio.shape == noisy.audio.shape
        is_padding = torch.arange(clean.audio.shape[1]) >= clean.audio_lengths[:, None]
        assert not noisy.audio[is_padding].any()
        for row in range(clean.utterances):
            assert not torch.equal(clean.audio[row], noisy.audio[row])


def test_training_differs_between_epochs_and_evaluation_is_clean(
    tmp_path: Path, cache: Path, recordings: Any, noise: Path
) -> None:
    train = recordings.corpus("m", 4)
    acoustics = Acoustics(noise=str(noise), **ALL)
    data = SpeechData(train, {"dev": train}, Characters(), workers=0, acoustics=acoustics)
    clean = SpeechData(train, {"dev": train}, Characters(), workers=0)
    first, second = epochs(data)
    assert sorted(first.ids) == sorted(second.ids)
    row = second.ids.index(first.ids[0])
    assert not torch.equal(first.audio[0], second.audio[row])
    for noisy_batch, clean_batch in zip(data.valid()["dev"], clean.valid()["dev"], strict=True):
        assert torch.equal(noisy_batch.audio, clean_batch.audio)


def test_training_resumes_with_equal_audio_on_two_ranks(
    tmp_path: Path, cache: Path, recordings: Any, noise: Path, rooms: Path
) -> None:
    train = recordings.corpus("m", 12)

    def new(**options: Any) -> SpeechData:
        acoustics = Acoustics(noise=str(noise), rooms=str(rooms))
        return module(train, tmp_path, acoustics=acoustics, **options)

    data = new()
    batches = list(islice(data.train(), 3))
    state = data.state_dict()
    assert set(state["acoustics"]) == {"noise", "rooms"}
    batches += islice(data.train(), 4)
    for rank in range(2):
        part = new()
        part.load_state_dict(state)
        for batch, repetition in zip(batches[3 + rank :: 2], part.train(rank, 2), strict=False):
            assert batch.ids == repetition.ids
            assert torch.equal(batch.audio, repetition.audio)


def test_training_continues_only_with_the_same_noise(
    tmp_path: Path, cache: Path, recordings: Any, noise: Path
) -> None:
    train = recordings.corpus("m", 4)
    state = module(train, tmp_path, acoustics=Acoustics(noise=str(noise))).state_dict()
    (noise / "4.wav").unlink()
    with pytest.raises(DataError, match=_CHANGED):
        module(train, tmp_path, acoustics=Acoustics(noise=str(noise))).load_state_dict(state)


def test_content_names_noise_and_rooms(
    tmp_path: Path, cache: Path, recordings: Any, noise: Path, rooms: Path
) -> None:
    train = recordings.corpus("m", 4)
    content = module(train, tmp_path).content()
    acoustics = Acoustics(noise=str(noise), rooms=str(rooms))
    augmented = module(train, tmp_path, acoustics=acoustics).content()
    assert content.items() <= augmented.items()
    assert augmented.keys() - content.keys() == {"noise", "rooms"}
    assert augmented["noise"] != augmented["rooms"]


def test_a_noise_that_cannot_be_read_is_left_out(
    tmp_path: Path, cache: Path, recordings: Any, noise: Path, rooms: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two of five noises are damaged after the checks of the start. No training recording may be bad."""
    train = recordings.corpus("m", 12)
    acoustics = Acoustics(noise=str(noise), rooms=str(rooms), **ALL)
    options = {"max_bad": 0, "max_bad_share": 0.0, "run_dir": str(tmp_path)}
    data = module(train, tmp_path, acoustics=acoustics, **options)
    data.check()
    (noise / "1.wav").write_text("no audio")
    (noise / "3.wav").unlink()
    batches = epochs(data)
    skips = [skip for batch in batches for skip in batch.skipped]
    assert {skip.id for skip in skips} == {"augment.noise: noise/1", "augment.noise: noise/3"}
    assert {skip.reason for skip in skips} == {"bad_noise"}
    assert {skip.detail.partition(":")[0] for skip in skips} == {"unreadable", "missing"}
    assert all(batch.utterances == len(batch.ids) for batch in batches)
    assert data.report()["bad_noise"] == 2
    assert len(caplog.messages) == 1, "the first one of a reason is a warning"

    # A row without its noise has its room, as if there were no noise.
    only_rooms = epochs(module(train, tmp_path, acoustics=Acoustics(rooms=str(rooms), **ALL)))
    equal_rows = 0
    for batch, clean in zip(batches, only_rooms, strict=True):
        assert batch.ids == clean.ids
        equal_rows += sum(map(torch.equal, batch.audio, clean.audio))
    assert equal_rows == len(skips)


@pytest.mark.parametrize(("name", "reason"), [("noise", "bad_noise"), ("rooms", "bad_room")])
def test_training_ends_if_most_noises_disappear(
    tmp_path: Path, cache: Path, recordings: Any, noise: Path, name: str, reason: str
) -> None:
    acoustics = Acoustics(**{name: str(noise)}, **ALL)
    data = module(recordings.corpus("m", 12), tmp_path, acoustics=acoustics, max_bad=99)
    data.check()
    for path in noise.iterdir():
        path.unlink()
    with pytest.raises(DataError, match=rf"3 of 5 recordings of augment\.{name} are unusable.*{reason}"):
        epochs(data)


def test_a_small_training_set_with_a_damaged_noise_is_not_refused(
    tmp_path: Path, cache: Path, recordings: Any, noise: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check before training loads all recordings of a small set, with noises that it has not read."""
    data = module(recordings.corpus("m", 4), tmp_path, acoustics=Acoustics(noise=str(noise), **ALL))
    monkeypatch.setattr("speechtrain.data.preflight._SAMPLED_ACOUSTICS", 0)
    for path in noise.iterdir():
        path.write_text("no audio")
    data.check()


# --- bad recordings -------------------------------------------------------------------------------


def refusal(train: str, tmp_path: Path, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        module(train, tmp_path, acoustics=Acoustics(**options)).check()
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_check_names_the_key_the_file_and_the_fix(
    tmp_path: Path, cache: Path, recordings: Any, noise: Path, rooms: Path
) -> None:
    train = recordings.corpus("m", 4)
    module(train, tmp_path, acoustics=Acoustics(noise=str(noise), rooms=str(rooms))).check()

    missing = refusal(train, tmp_path, noise=str(tmp_path / "nowhere"))
    assert missing.startswith(f"augment.noise: {tmp_path / 'nowhere'} does not exist. Give a manifest or")
    listed = recordings.nemo("gone.jsonl", [{"audio_filepath": "/gone.wav", "duration": 1.0, "text": ""}])
    assert refusal(train, tmp_path, noise=listed) == "augment.noise: missing: /gone.wav. Repair or remove it"


@pytest.mark.parametrize("key", ["noise", "rooms"])
def test_check_refuses_silence_and_files_that_are_not_audio(
    key: str, tmp_path: Path, cache: Path, recordings: Any, noise: Path
) -> None:
    train = recordings.corpus("m", 4)
    silent = write(noise / "silent.wav", np.zeros(4000))
    message = refusal(train, tmp_path, **{key: str(noise)})
    assert message == f"augment.{key}: silent: {silent}. Repair or remove it"
    silent.unlink()
    broken = noise / "broken.wav"
    broken.write_text("no audio")
    message = refusal(train, tmp_path, **{key: str(noise)})
    assert message.startswith(f"augment.{key}: unreadable: {broken}: ")
    assert message.endswith("Repair or remove it")
    broken.unlink()
    write(noise / "fast.wav", white(400), rate=800)
    assert "its sampling rate is 800 Hz" in refusal(train, tmp_path, **{key: str(noise)})


def test_silence_surrounds_half_of_the_recordings() -> None:
    samples = np.full(8_000, 0.5, np.float32)
    acoustics = Acoustics(silence=0.3)
    lengths, noisy = [], 0
    for seed in range(400):
        surrounded = acoustics.surround(samples, 16_000, seed)
        np.testing.assert_array_equal(surrounded, acoustics.surround(samples, 16_000, seed))
        (inside,) = np.nonzero(surrounded == 0.5)
        start, end = inside[0], inside[-1] + 1
        assert end - start == len(samples)
        assert max(start, len(surrounded) - end) <= 0.3 * 16_000
        outside = np.concatenate([surrounded[:start], surrounded[end:]])
        assert np.abs(outside).max(initial=0.0) < 0.2
        noisy += bool(outside.any())
        lengths.append(len(surrounded))
    share = np.mean(np.array(lengths) > len(samples))
    assert 0.4 < share < 0.6
    assert 0.3 < noisy / 400 < 0.5
    assert Acoustics().surround(samples, 16_000, 0) is samples

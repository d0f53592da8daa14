"""Recorded noise and room responses, with which training augments its recordings. lhotse mixes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from speechtrain.batch import Skip
from speechtrain.counter_rng import key_of, uniform_at
from speechtrain.data.audio import read_cut
from speechtrain.data.formats.lhotse_cuts import Samples
from speechtrain.data.formats.manifests import Record, seconds_of
from speechtrain.data.index import Index, open_index
from speechtrain.data.lhotse_import import import_lhotse
from speechtrain.data.recordings import Unusable
from speechtrain.data.skips import ACOUSTIC_REASONS
from speechtrain.data.sources import open_source
from speechtrain.errors import DataError

# Shares of the recordings in ``Acoustics.surround``
_WITHOUT_SILENCE = 0.5  # Models that hear silence around each recording make more errors without silence.
_WITH_ZEROS = 0.1
_LOWEST_NOISE_DB = -70.0
_HIGHEST_NOISE_DB = -30.0


@dataclass(eq=False)
class Acoustics:
    """Places training recordings in recorded rooms, and adds recorded noise to them.

    - ``noise`` and ``rooms`` are sources as ``data.train``, or null for none (see ``open_source``). Their
      transcripts are ignored.
    - ``noise_db`` are the lowest and the highest signal-to-noise ratio in dB, drawn uniformly. The signal is
      the recording in its room.
    - ``probability`` is the share of the recordings that get noise, and the share that get a room.
    - ``silence`` is the longest silence in seconds before a recording, and the longest one after it. Both
      are drawn uniformly. Half of the recordings get none, a tenth gets zeros, and the others get white
      noise from -70 to -30 dBFS.

    ``Augment`` checks the numbers.
    """

    noise: Any = None
    rooms: Any = None
    noise_db: tuple[float, ...] = (10.0, 20.0)
    probability: float = 0.5
    silence: float = 0.0

    def __post_init__(self) -> None:
        self.indices: dict[str, Index] = {}
        """The index of ``rooms`` and of ``noise`` by these names, after ``open``. A null source has none."""

    def open(self, cache: str) -> None:
        """Open the indices. ``cache`` is the cache folder (see ``open_index``).

        Raises DataError for a source that cannot be read or has no recordings.
        """
        for name, spec in {"rooms": self.rooms, "noise": self.noise}.items():
            if spec is not None:
                try:
                    self.indices[name] = open_index(open_source(spec), cache)
                except DataError as error:
                    raise DataError(f"augment.{name}: {error}") from None

    def content(self) -> dict[str, str]:
        """Return a digest of the ids and durations of ``rooms`` and of ``noise`` by these names."""
        return {name: index.content for name, index in self.indices.items()}

    def surround(self, samples: Samples, sample_rate: int, seed: int) -> Samples:
        """Return samples (S,) with silence before and after them. ``seed`` decides the random numbers."""
        if not self.silence:
            return samples
        before, after, kind, level = uniform_at(seed, key_of("silence"), np.arange(4)).tolist()
        if kind < _WITHOUT_SILENCE:
            return samples
        lengths = [int(number * self.silence * sample_rate) for number in (before, after)]
        surrounded = np.pad(samples, lengths)
        if kind < 1.0 - _WITH_ZEROS:
            decibels = _LOWEST_NOISE_DB + level * (_HIGHEST_NOISE_DB - _LOWEST_NOISE_DB)
            noise = np.random.default_rng(seed).standard_normal(len(surrounded), np.float32)
            noise *= np.float32(10.0 ** (decibels / 20.0))
            noise[lengths[0] : lengths[0] + len(samples)] = 0.0
            surrounded += noise
        return surrounded

    def apply(self, samples: Samples, sample_rate: int, seed: int) -> tuple[Samples, list[Skip]]:
        """Return samples (S,) in a random room and with random noise. Their number and their timing stay.

        ``seed`` decides the random numbers. A noise or a room that cannot be read is left out, and is
        returned as a ``Skip``.
        """
        skips = []
        for name, index in self.indices.items():
            share, choice, position, level = uniform_at(seed, key_of(name), np.arange(4)).tolist()
            if share >= self.probability:
                continue
            cut = index.cut(int(choice * len(index)))
            if name == "noise":
                shorten(cut, len(samples) / sample_rate, position)
            try:
                recording = read_cut(cut, sample_rate)
            except Unusable as problem:
                skips.append(Skip(f"augment.{name}: {cut['id']}", ACOUSTIC_REASONS[name], str(problem)))
                continue
            if name == "rooms":
                samples = reverberate(samples, recording)
            else:
                low, high = self.noise_db
                samples = add_noise(samples, recording, low + (high - low) * level)
        return samples, skips


def shorten(cut: Record, seconds: float, position: float) -> None:
    """Shorten a cut in place to at most ``seconds``. ``position`` in [0, 1) decides the start.

    A mixed cut of lhotse is read as a whole, because it has neither a start nor a duration.
    """
    surplus = max(0.0, seconds_of(cut) - seconds)
    cut["duration"] = seconds_of(cut) - surplus
    cut["start"] = float(cut.get("start", 0)) + position * surplus


def reverberate(samples: Samples, response: Samples) -> Samples:
    """Return samples (S,) in the room of an impulse response (R,), with the same energy.

    The largest sample of the response is the direct path. It gets no delay, so the timing stays. The
    reverberation after the last sample is cut, as in wav-reverberate of Kaldi with --shift-output. A silent
    response changes nothing.
    """
    import_lhotse()
    from lhotse.augmentation import ReverbWithImpulseResponse

    if response.any():
        room = ReverbWithImpulseResponse(rir_generator=lambda nsource: response[None])
        samples = room(samples[None], sampling_rate=0)[0]  # The rate is not used.
    return samples


def add_noise(samples: Samples, noise: Samples, decibels: float) -> Samples:
    """Return samples (S,) with repetitions of noise (N,) at a signal-to-noise ratio."""
    import_lhotse()
    from lhotse.audio.mixer import AudioMixer

    mixer = AudioMixer(samples[None], sampling_rate=1)  # The rate is for delays, and there are none.
    mixer.add_to_mix(np.resize(noise, (1, len(samples))), snr=decibels)
    mixed: Samples = mixer.mixed_mono_audio[0]
    return mixed

"""What tests of the data layer share: a cache of their own, recordings, manifests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile


class Recordings:
    """Makes audio files and NeMo manifests in a test's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def tone(
        self,
        name: str,
        seconds: float = 1.0,
        rate: int = 16_000,
        channels: int = 1,
        pitch: float = 440.0,
        **options: Any,
    ) -> Path:
        """A tone with a little noise; channel c is louder by c."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        times = np.arange(round(seconds * rate)) / rate
        noise = np.random.default_rng(len(times)).normal(size=len(times))
        wave = 0.2 * np.sin(2 * np.pi * pitch * times) + 0.01 * noise
        soundfile.write(path, np.stack([wave * (1 + c) for c in range(channels)], axis=1), rate, **options)
        return path

    def nemo(self, name: str, records: list[dict[str, Any]]) -> str:
        """A NeMo manifest of those lines."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return str(path)

    def corpus(self, name: str, count: int, text: str = "one two", seconds: float = 0.4) -> str:
        """A NeMo manifest of ``count`` recordings, each a little longer than the last."""
        records = []
        for i in range(count):
            path = self.tone(f"{name}-audio/{i:03d}.wav", seconds + 0.01 * i, pitch=200 + 5 * i)
            records.append({"audio_filepath": str(path), "duration": seconds + 0.01 * i, "text": text})
        return self.nemo(f"{name}.jsonl", records)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, used by everything in the test."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("SPEECHTRAIN_CACHE", str(folder))
    return folder


@pytest.fixture
def recordings(tmp_path: Path) -> Recordings:
    return Recordings(tmp_path)


@pytest.fixture
def lhotse_line() -> Callable[..., dict[str, Any]]:
    """A lhotse cut of one file in JSON form."""

    def make(
        name: str, path: str = "/nowhere.wav", duration: float = 1.0, text: str = "one"
    ) -> dict[str, Any]:
        from lhotse import MonoCut, Recording, SupervisionSegment
        from lhotse.audio import AudioSource

        recording = Recording(
            name, [AudioSource("file", [0], path)], 16_000, round(duration * 16_000), duration
        )
        supervision = SupervisionSegment(name, name, 0.0, duration, text=text)
        cut = MonoCut(name, 0.0, duration, 0, supervisions=[supervision], recording=recording)
        made: dict[str, Any] = cut.to_dict()
        return made

    return make

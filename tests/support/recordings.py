"""Recordings, and the manifests about them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import soundfile


def write_tone(path: Path, seconds: float = 0.5, rate: int = 16_000, channels: int = 1) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    wave = 0.1 * np.sin(2 * np.pi * 440 * np.arange(round(seconds * rate)) / rate)
    soundfile.write(path, np.stack([wave] * channels, axis=1), rate)
    return path


def json_lines(path: Path) -> list[dict]:
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    return [json.loads(line) for line in text.splitlines()]

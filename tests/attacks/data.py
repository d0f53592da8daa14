"""What the attacks on data share: a folder with a good recording, and the commands that read a source."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from .forks import Ended, Forks

RATE = 16_000
TONE = (0.1 * np.sin(np.arange(2 * RATE) * 0.1)).astype(np.float32)
Record = dict[str, Any]


@dataclass
class Place:
    """A folder that an attack fills. ``canary`` is the file that its code would make."""

    folder: Path

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.ok = self.folder / "ok.wav"
        self.canary = self.folder / "CANARY"
        soundfile.write(self.ok, TONE, RATE)

    @property
    def command(self) -> str:
        """A shell line that makes the canary and delivers a recording."""
        return f"touch {self.canary}; cat {self.ok}"

    def file(self, name: str, content: bytes | str | Callable[[Path], object]) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if callable(content):
            content(path)
        else:
            path.write_bytes(
                content if isinstance(content, bytes) else content.encode(errors="surrogatepass")
            )
        return path

    def lines(self, *records: object, name: str = "m.jsonl") -> Path:
        return self.file(name, "".join(json.dumps(record) + "\n" for record in records))

    def nemo(self, **more: object) -> Record:
        return {"audio_filepath": str(self.ok), "duration": 2.0, "text": "one two", **more}

    def recording(self, source: object = None, kind: str = "file", **more: object) -> Record:
        held = str(self.ok) if source is None else source
        sources = [{"type": kind, "channels": [0], "source": held}]
        known = {"id": "r", "sources": sources, "sampling_rate": RATE, "num_samples": 2 * RATE}
        return {**known, "duration": 2.0, "channel_ids": [0], **more}

    def cut(self, recording: object = None, **more: object) -> Record:
        spoken = {
            "id": "c",
            "recording_id": "r",
            "start": 0.0,
            "duration": 2.0,
            "channel": 0,
            "text": "one two",
        }
        known = {"id": "c", "start": 0.0, "duration": 2.0, "channel": 0, "supervisions": [spoken]}
        held = self.recording() if recording is None else recording
        return {**known, "recording": held, "type": "MonoCut", **more}

    def track(self, recording: object = None, **more: object) -> Record:
        inner = {key: value for key, value in self.cut(recording).items() if key != "type"}
        return {"type": "MonoCut", "offset": 0.0, "cut": inner, **more}

    def mixed(self, *tracks: object, **more: object) -> Record:
        return {"id": "m", "type": "MixedCut", "tracks": list(tracks), **more}


def prepare(forks: Forks, place: Place, *sources: object, check: bool = True, **how: Any) -> Ended:
    looks = ["--check", "--jobs", "1"] if check else []
    return forks.run(
        "prepare", "manifest", *sources, *looks, "--out", place.folder / "out" / "o.jsonl", **how
    )


def evaluate(forks: Forks, place: Place, good: Path, source: object, **how: Any) -> Ended:
    cache = place.folder / "cache"
    own = ["device.threads=1", "data.workers=0", f"data.cache={cache}"]
    return forks.run("evaluate", good, "--set", f"x={os.fspath(str(source))}", *own, **how)


def train(forks: Forks, place: Place, source: object, **how: Any) -> Ended:
    own = ["model=rnnt_small", "data=manifest", f"data.train={source}", f"data.valid.dev={source}"]
    own += ["trainer.max_steps=1", "device.threads=1", "device.autotune=false", "data.workers=0"]
    own += ["tracking=none", "encoder.hidden=16", f"data.cache={place.folder / 'cache'}"]
    return forks.run("train", *own, f"run_dir={place.folder / 'run'}", **how)


def convert(forks: Forks, place: Place, source: object, **how: Any) -> Ended:
    return forks.run("prepare", "convert", source, "--jobs", "1", "--out", place.folder / "converted", **how)

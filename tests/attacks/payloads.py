"""Files as a stranger makes them, for all doors."""

from __future__ import annotations

import hashlib
import io
import json
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch

CANARY = "CANARY"
"""The file that a stranger's code would make in the present folder."""
RUN = f"touch {CANARY}"
PRIVATE = "PRIVATE-KEY-OF-THE-USER"
ESCAPES = "a\x1b]0;title\x07\x1b[2J\u202e\u2028\x9bz"
DEEP = "[" * 100_000
LONG = "9" * 5_000
RATE = 16_000
TONE = (0.1 * np.sin(np.arange(2 * RATE) * 0.1)).astype(np.float32)
Record = dict[str, Any]
Payload = bytes | str | Callable[[Path], object]
"""The content of a file, or a function that makes a file."""


def place(path: Path, payload: Payload) -> None:
    """Put a payload where a file of the user was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_dir():
        path.unlink(missing_ok=True)
    if callable(payload):
        payload(path)
    else:
        path.write_bytes(payload if isinstance(payload, bytes) else payload.encode(errors="surrogateescape"))


# Files that are none


def pipe(path: Path) -> None:
    os.mkfifo(path)


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(10 * 2**30)


def home(folder: Path) -> Path:
    """Return a private file of the user, outside of all data."""
    own = folder.parent / f"{folder.name}-home" / "id_rsa"
    own.parent.mkdir(exist_ok=True)
    content = {"event": "warning", "message": PRIVATE, "status": PRIVATE, "argv": [PRIVATE], "id": PRIVATE}
    own.write_text(json.dumps(content) + "\n")
    return own


def link(path: Path) -> None:
    path.symlink_to(home(Path.cwd()))


# Recordings and cuts of lhotse


def recording(source: object = "ok.wav", kind: str = "file", **more: object) -> Record:
    sources = [{"type": kind, "channels": [0], "source": source}]
    known = {"id": "r", "sources": sources, "sampling_rate": RATE, "num_samples": 2 * RATE, "duration": 2.0}
    return {**known, "channel_ids": [0], **more}


def cut(held: Record | None = None, **more: object) -> Record:
    spoken = {"id": "s", "recording_id": "r", "start": 0.0, "duration": 2.0, "channel": 0, "text": "one two"}
    known = {"id": "c", "start": 0.0, "duration": 2.0, "channel": 0, "supervisions": [spoken]}
    return {**known, "recording": held or recording(), "type": "MonoCut", **more}


def track(held: Record | None = None, **more: object) -> Record:
    inner = {key: value for key, value in cut(held).items() if key != "type"}
    return {"type": "MonoCut", "offset": 0.0, "cut": inner, **more}


def mixed(*tracks: Record, **more: object) -> Record:
    return {"id": "m", "type": "MixedCut", "tracks": list(tracks), **more}


def reverb(response: Record) -> Record:
    return {"name": "ReverbWithImpulseResponse", "kwargs": {"rir": response, "rir_channels": [0]}}


def speed(factor: float) -> Record:
    return {"name": "Speed", "kwargs": {"factor": factor}}


def long_wav(frames: int) -> Callable[[Path], object]:
    """Return a function that makes a WAV of many samples of silence, which needs no space on the disk."""

    def make(path: Path) -> None:
        whole = io.BytesIO()
        soundfile.write(whole, TONE, RATE, format="WAV", subtype="PCM_U8")
        head = bytearray(whole.getvalue()[:44])
        head[4:8] = struct.pack("<I", 36 + frames)
        head[40:44] = struct.pack("<I", frames)
        path.write_bytes(head)
        os.truncate(path, 44 + frames)

    return make


# Pickles and weights


class Calls:
    """An object whose pickle calls a function."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.called = (function, arguments)

    def __reduce__(self) -> Any:
        return self.called


def saved(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, pickle_protocol=2)
    return buffer.getvalue()


def zipped(*entries: tuple[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """Return an archive as torch writes it. Each entry is below ``archive/``."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in entries:
            archive.writestr(f"archive/{name}", content)
    return buffer.getvalue()


def pickled(*operations: bytes) -> bytes:
    """Return an archive whose pickle has these operations."""
    content = b"\x80\x02" + b"".join(operations) + b"."
    return zipped(("data.pkl", content), ("version", b"3\n"), ("byteorder", b"little"), ("data/0", b""))


def tenfold(levels: int) -> list[Any]:
    nested: list[Any] = ["x"]
    for _ in range(levels):
        nested = [nested] * 10
    return nested


def fairseq(settings: Any, **weights: object) -> bytes:
    model = weights or {"mask_emb": torch.zeros(8)}
    return saved({"model": model, "cfg": {"model": settings, "task": {}, "criterion": {}}})


def header(content: object, data: bytes = b"") -> bytes:
    """Return a file of safetensors with this header."""
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(shape: list[int], begin: int, end: int, dtype: str = "F32") -> Record:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}}


def sign(folder: Path, **more: object) -> None:
    """Give a checkpoint's manifest the digests of its files and its own, as a stranger can."""
    held = {**json.loads((folder / "checkpoint.json").read_text()), **more}
    held.pop("sha256", None)
    for name in held["files"]:
        if (folder / name).is_file():
            held["files"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    own = hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()
    (folder / "checkpoint.json").write_text(json.dumps({**held, "sha256": own}))


def doubled(levels: int) -> bytes:
    """Return operations for a tuple of a tuple twice, and so on, as a key: its hash takes 2^levels steps."""
    level = b"".join(b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(levels))
    return b"K\x01\x85q\x00" + level + b"}h" + bytes([levels]) + b"K\x01s"

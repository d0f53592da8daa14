"""The index over a source's cuts: what the sampler must know of each, in memory-mapped arrays.

A folder of the cache holds flat binary arrays, one element for each cut (duration, transcript
length, byte offset of its JSON line, key), and the cuts themselves as JSON lines where the source
is no such file. Building streams, with bounded memory; loading maps the arrays and reads nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from speechtrain.counter_rng import key_of
from speechtrain.data.corpora.connected import cache_folder
from speechtrain.data.manifests import Entry, Manifest, Record, digest, parse, seconds_of, text_of
from speechtrain.data.source import Source
from speechtrain.data.sources import parts_of
from speechtrain.errors import DataError, MachineError
from speechtrain.text.vocabulary import Tokenizer

FORMAT = 1  # of the folder: an older one is built again
_ARRAYS = {"seconds": "<f4", "characters": "<i4", "offset": "<i8", "key": "<i8", "part": "<i2"}
_CHUNK = 65_536  # rows held in memory while building
_UNSPELLABLE = -1


class Index:
    """The cuts of one source, numbered from 0: arrays over all of them, and any single one at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        meta = json.loads((folder / "meta.json").read_text())
        self.content: str = meta["content"]
        """A hash of ids and durations: equal for equal cuts, wherever they lie."""
        self.files = [Path(name) if os.path.isabs(name) else folder / name for name in meta["files"]]
        self._size: int = meta["cuts"]
        self._open: dict[int, IO[bytes]] = {}

    def __len__(self) -> int:
        return self._size

    def __getstate__(self) -> Path:
        return self.folder  # arrays and open files stay in this process: a worker opens its own

    def __setstate__(self, folder: Path) -> None:
        Index.__init__(self, folder)

    @cached_property
    def seconds(self) -> NDArray[np.float32]:
        """Duration of each cut as its manifest tells it; 0 where that is no positive number."""
        return self._map("seconds", "<f4")

    @cached_property
    def characters(self) -> NDArray[np.int32]:
        """Length of each raw transcript."""
        return self._map("characters", "<i4")

    @cached_property
    def keys(self) -> NDArray[np.int64]:
        """``key_of`` each cut's id."""
        return self._map("key", "<i8")

    @cached_property
    def _offsets(self) -> NDArray[np.int64]:
        return self._map("offset", "<i8")

    @cached_property
    def _parts(self) -> NDArray[np.int16]:
        return self._map("part", "<i2")

    def _map(self, name: str, dtype: str) -> NDArray[Any]:
        if not self._size:  # an empty file cannot be mapped
            return np.zeros(0, dtype)
        return np.memmap(self.folder / f"{name}.bin", dtype, mode="r", shape=(self._size,))

    def cut(self, row: int) -> Record:
        """One cut in lhotse's JSON form. Raises DataError where its manifest has changed meanwhile."""
        part = int(self._parts[row])
        if part not in self._open:
            self._open[part] = self.files[part].open("rb")
        file = self._open[part]
        file.seek(int(self._offsets[row]))
        try:
            cut = parse(file.readline(), self.files[part], 1)
        except DataError:
            cut = {}
        if key_of(str(cut.get("id", ""))) != self.keys[row]:
            raise DataError(f"{self.files[part]} has changed since it was indexed; start again")
        return cut

    def labels(self, tokenizer: Tokenizer) -> NDArray[np.int32]:
        """Labels of each transcript, -1 where it cannot be spelled; counted once for each tokenizer.

        The first call reads every transcript (about 20 s for a million); others map the result.
        """
        path = self.folder / f"labels-{digest(tokenizer.state())}.bin"
        if not path.exists():
            temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
            with _writing(self.folder), temporary.open("wb") as file:
                for begin in range(0, self._size, _CHUNK):
                    rows = range(begin, min(begin + _CHUNK, self._size))
                    counts = [_count(text_of(self.cut(row)), tokenizer) for row in rows]
                    np.array(counts, "<i4").tofile(file)
            os.replace(temporary, path)
        if not self._size:
            return np.zeros(0, np.int32)
        return np.memmap(path, "<i4", mode="r", shape=(self._size,))


def _count(text: str, tokenizer: Tokenizer) -> int:
    try:
        return len(tokenizer.encode(tokenizer.normalise(text)))
    except (KeyError, ValueError):
        return _UNSPELLABLE


def open_index(source: Source, cache: str = "") -> Index:
    """The index of ``source``, built first where the cache has none for its fingerprint.

    ``cache`` is a folder; empty means ``$SPEECHTRAIN_CACHE``, else ``$XDG_CACHE_HOME/speechtrain``,
    else ``~/.cache/speechtrain``. Processes that build at once wait for the first one where the file
    system has locks, and else each build their own, of which one stays. Raises DataError for
    malformed or repeated cuts, MachineError where the cache cannot be written.
    """
    root = (Path(cache).expanduser().absolute() if cache else cache_folder()) / "index"
    folder = root / digest(FORMAT, source.fingerprint())
    with _writing(root):
        root.mkdir(parents=True, exist_ok=True)
    with _lock(folder) as alone:
        index = _load(folder)
        if index is not None and _is_current(index, source):
            return index
        temporary = root / f".{folder.name}.{secrets.token_hex(8)}"
        try:
            with _writing(root):
                temporary.mkdir()
                _build(source, temporary)
                _check_unique(Index(temporary), parts_of(source))
                _sync(temporary)
                _replace(temporary, folder, source)
        finally:
            leftovers = root.glob(f".{folder.name}.*") if alone else [temporary]
            for leftover in leftovers:
                shutil.rmtree(leftover, ignore_errors=True)
    return Index(folder)


def _replace(temporary: Path, folder: Path, source: Source) -> None:
    """Give a new index its name, unless another process has put one there meanwhile."""
    index = _load(folder)
    if index is not None and _is_current(index, source):
        return
    with contextlib.suppress(FileNotFoundError):  # stale or damaged
        folder.rename(folder.with_name(f".{folder.name}.{secrets.token_hex(8)}"))
    with contextlib.suppress(FileExistsError):
        temporary.rename(folder)


def _sync(folder: Path) -> None:
    """A name must never outlive a crash that its bytes did not."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _load(folder: Path) -> Index | None:
    """The index in ``folder`` if it is whole."""
    try:
        index = Index(folder)
        sizes = {name: np.dtype(dtype).itemsize * len(index) for name, dtype in _ARRAYS.items()}
        if any((folder / f"{name}.bin").stat().st_size != size for name, size in sizes.items()):
            return None
    except (OSError, ValueError, KeyError):
        return None
    return index


def _is_current(index: Index, source: Source) -> bool:
    """Whether the files that the index points to still hold what it says.

    A corpus that writes its audio into a cache makes it again when its first cut is asked for, and
    that cut tells whether it lies where it lay before.
    """
    if not all(file.is_file() for file in index.files):
        return False
    row = 0
    for number, part in enumerate(parts_of(source)):
        if not isinstance(part, Manifest):
            row = int(np.searchsorted(index._parts, number))
            first = next(iter(part.cuts()), None)
            try:
                if first is not None and json.loads(_line(first.to_dict())) != index.cut(row):
                    return False
            except (DataError, IndexError):
                return False
    return True


def _build(source: Source, folder: Path) -> None:
    """Write the arrays, the converted cuts and ``meta.json`` into ``folder``."""
    files, cuts, content = [], 0, hashlib.blake2b(digest_size=8)
    with contextlib.ExitStack() as stack:
        arrays = {name: stack.enter_context((folder / f"{name}.bin").open("wb")) for name in _ARRAYS}
        for number, part in enumerate(parts_of(source)):
            in_place = isinstance(part, Manifest) and part.in_place
            files.append(
                str(part.path) if isinstance(part, Manifest) and in_place else f"cuts-{number}.jsonl"
            )
            rows = _rows_in_place(part) if in_place else _rows_converted(part, folder / files[-1])
            for chunk in _chunks(rows, number):
                for name, values in chunk.items():
                    values.tofile(arrays[name])
                content.update(chunk["key"].tobytes() + chunk["seconds"].tobytes())
                cuts += len(chunk["key"])
    meta = {"format": FORMAT, "cuts": cuts, "content": content.hexdigest(), "files": files}
    (folder / "meta.json").write_text(json.dumps(meta))


@dataclass(frozen=True, slots=True)
class _Row:
    seconds: float
    characters: int
    offset: int
    key: int


def _row(cut: Record, offset: int) -> _Row:
    return _Row(seconds_of(cut), len(text_of(cut)), offset, key_of(cut["id"]))


def _rows_in_place(part: Source) -> Iterator[_Row]:
    assert isinstance(part, Manifest)
    for entry in part.entries():
        yield _row(entry.cut, entry.offset)


def _rows_converted(part: Source, path: Path) -> Iterator[_Row]:
    """Rows of a source whose cuts are written to ``path`` on the way."""
    entries = part.entries() if isinstance(part, Manifest) else _entries(part)
    offset = 0
    with path.open("wb") as file:
        for entry in entries:
            line = _line(entry.cut)
            file.write(line)
            yield _row(entry.cut, offset)
            offset += len(line)


def _entries(source: Source) -> Iterator[Entry]:
    for number, cut in enumerate(source.cuts(), 1):
        yield Entry(cut.to_dict(), number, -1)


def _line(cut: Record) -> bytes:
    try:
        return json.dumps(cut).encode() + b"\n"
    except TypeError as error:
        raise DataError(
            f"cut {cut.get('id')!r} holds audio in memory ({error}); save it as a file first"
        ) from None


def _chunks(rows: Iterator[_Row], part: int) -> Iterator[dict[str, NDArray[Any]]]:
    """The rows as arrays of at most ``_CHUNK`` elements."""
    held: list[_Row] = []
    for row in rows:
        held.append(row)
        if len(held) == _CHUNK:
            yield _columns(held, part)
            held = []
    if held:
        yield _columns(held, part)


def _columns(rows: list[_Row], part: int) -> dict[str, NDArray[Any]]:
    columns: dict[str, NDArray[Any]] = {
        name: np.array([getattr(row, name) for row in rows], _ARRAYS[name])
        for name in ("seconds", "characters", "offset", "key")
    }
    columns["part"] = np.full(len(rows), part, _ARRAYS["part"])
    return columns


def _check_unique(index: Index, parts: list[Source]) -> None:
    """Raise DataError naming the first id that is there twice, with its files and lines."""
    order = np.argsort(index.keys, kind="stable")
    ordered = index.keys[order]
    repeats = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(repeats):
        rows = order[repeats[0] : repeats[0] + 2].tolist()
        first, second = (_place(index, row, parts) for row in rows)
        name = index.cut(rows[0])["id"]
        raise DataError(
            f"{second}: cut id {name!r} is at {first} already; ids are unique ({len(repeats)} repeats)"
        )


def _place(index: Index, row: int, parts: list[Source]) -> str:
    """Where a cut stands: its manifest and line, or the corpus and its number there."""
    number = int(index._parts[row])
    part = parts[number]
    line, left = 1, int(index._offsets[row])
    with index.files[number].open("rb") as file:
        while left > 0:
            block = file.read(min(left, 1 << 20))
            line, left = line + block.count(b"\n"), left - len(block)
    return f"{part.path if isinstance(part, Manifest) else type(part).__name__}:{line}"


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turns what the file system refuses into a MachineError with the fix."""
    try:
        yield
    except OSError as error:
        raise MachineError(
            f"{folder}: cannot write the index ({error.strerror or error}); "
            "free some space, or set data.cache or SPEECHTRAIN_CACHE to another folder"
        ) from error


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[bool]:
    """Holds ``<folder>.lock`` where the file system can, and tells whether it does.

    Two builders are safe without it, only slower.
    """
    try:
        import fcntl

        file = folder.with_name(folder.name + ".lock").open("w")
    except (ImportError, OSError):
        yield False
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            held = False
        else:
            held = True
        yield held

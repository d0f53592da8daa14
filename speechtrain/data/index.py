"""The index of a source's cuts: memory-mapped arrays of the facts that the sampler needs of each cut.

An index is a folder of the cache. It contains a binary file with the numbers of each cut, such as its
duration and the byte offset of its JSON line, and a file of the cuts as JSON lines. It is built in chunks, so
the memory does not grow with the source. To open an index is fast, because mapping an array reads nothing.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from speechtrain.counter_rng import key_of
from speechtrain.data.cache import cache_folder
from speechtrain.data.formats import manifests
from speechtrain.data.formats.manifests import (
    Manifest,
    Record,
    digest,
    language_of,
    parse,
    seconds_of,
    text_of,
)
from speechtrain.data.hold_out import groups_of
from speechtrain.data.source import Facts, Source
from speechtrain.data.sources import located_cuts, sources_of
from speechtrain.errors import MALFORMED, DataError
from speechtrain.files import absolute_path, atomic, flush, writing
from speechtrain.text.normalise import Normaliser, normalise_in, normaliser
from speechtrain.text.vocabulary import Tokenizer

FORMAT = 8  # the format of the folder. An index of another format is built again.
_ROW = np.dtype(
    [
        ("key", "<i8"),
        ("offset", "<i8"),
        ("speaker", "<i8"),
        ("recording", "<i8"),
        ("text", "<i8"),
        ("seconds", "<f4"),
        ("characters", "<i4"),
        ("part", "<i2"),
    ],
    align=True,
)
"""The numbers of a cut. ``Index`` describes them."""

_CHUNK = 65_536  # rows that are in memory during a build
_DAY = 86_400  # seconds


class Index:
    """The cuts of one source: arrays with one element for each cut, and random access to each cut.

    A row is the number of a cut, from 0.
    """

    def __init__(self, folder: Path, facts: Sequence[Facts]) -> None:
        self.folder = folder
        self.facts = facts
        """The facts of each source of a union. They are not stored in the folder."""
        self._path = folder / "cuts.jsonl"
        rows = _mapped(folder / "rows.bin", _ROW)
        self.seconds = rows["seconds"]
        """Duration of each cut in its manifest (float32), or 0 if the manifest has no positive number."""
        self.keys = rows["key"]
        """``key_of`` of each cut's id (int64)."""
        self.speakers = rows["speaker"]
        """``key_of`` of each cut's speaker (int64), or -1 if its source names none."""
        self.recordings = rows["recording"]
        """``key_of`` of each cut's recording (int64), which is the name and the folder of its file."""
        self.characters = rows["characters"]
        """Characters of each transcript before it is normalised, without spaces at its ends (int32)."""
        self.text_keys = rows["text"]
        """``key_of`` of each transcript (int64)."""
        self.source_numbers = rows["part"]
        """The number of the source in its union to which each cut belongs (int16)."""
        self._offsets = rows["offset"]

    def __len__(self) -> int:
        return len(self.keys)

    def __reduce__(self) -> tuple[type[Index], tuple[Path, Sequence[Facts]]]:
        # A worker opens the arrays and the file itself, because they cannot be pickled.
        return Index, (self.folder, self.facts)

    def groups(self, rows: NDArray[Any]) -> dict[str, NDArray[np.int64]]:
        """Return the keys of the groups of ``rows``, by the kind of group (see ``hold_out.held_out``)."""
        return {
            "speaker": self.speakers[rows],
            "recording": self.recordings[rows],
            "cut": self.keys[rows],
        }

    @cached_property
    def content(self) -> str:
        """A hash of the ids and durations. Equal cuts in other files have the same hash."""
        return hash_of(self.identity[:, :2])

    @cached_property
    def identity(self) -> NDArray[np.int64]:
        """The id, the duration in microseconds and the transcript of each cut (N, 3), texts as ``key_of``.

        Equal arrays are the same data in the same order, wherever it is stored.
        """
        microseconds = np.round(self.seconds.astype(np.float64) * 1e6).astype(np.int64)
        return np.stack([self.keys, microseconds, self.text_keys], axis=1)

    def difference(self, identity: NDArray[np.int64]) -> str:
        """Return how these cuts differ from those of an ``identity``, with an example, or ""."""
        if np.array_equal(identity, self.identity):
            return ""
        _, former_rows, rows = np.intersect1d(identity[:, 0], self.keys, return_indices=True)
        is_changed = (identity[former_rows] != self.identity[rows]).any(axis=1)
        new_rows = np.setdiff1d(np.arange(len(self)), rows)
        counts = {
            "missing": len(identity) - len(rows),
            "new": len(new_rows),
            "changed": int(is_changed.sum()),
        }
        examples = [*rows[is_changed], *new_rows]
        if not examples:
            # The first cut that is in another place follows a missing one, or the order has changed.
            common = min(len(identity), len(self))
            is_displaced = identity[:common, 0] != self.keys[:common]
            examples = [*np.flatnonzero(is_displaced), len(self) - 1]
        example = self.cut(int(examples[0]))["id"]
        listed = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        if not listed:
            return f"the order of the recordings differs, first at {example!r}"
        where = "e.g." if is_changed.any() or len(new_rows) else "near"
        total = max(len(identity), len(self))
        return f"{sum(counts.values())} of {total} recordings differ ({listed}), {where} {example!r}"

    def cut(self, row: int) -> Record:
        """Return one cut in lhotse's JSON format. Raises DataError if its manifest has changed."""
        self._file.seek(int(self._offsets[row]))
        try:
            cut = parse(self._file.readline(manifests.LONGEST_LINE), self._path, 1)
        except DataError:
            cut = {}  # The line is damaged, so the id below differs.
        if key_of(str(cut.get("id", ""))) != self.keys[row]:
            raise DataError(f"{self._path} has changed since it was indexed. Start the command again")
        return cut

    @cached_property
    def _file(self) -> IO[bytes]:
        return self._path.open("rb")

    def is_complete(self) -> bool:
        """Return whether the file of the cuts ends with the last cut. Raises DataError or OSError if not."""
        if len(self):
            self.cut(len(self) - 1)
        return not self._file.read(1)

    def text(self, row: int, normalise: Normaliser, cut: Record | None = None) -> str:
        """Return the normalised transcript of a row. If its set has a normaliser, that one is applied.

        ``cut`` is the cut of this row. Without it, the cut is read. The language of the set, or else of the
        cut, has its own lower case.
        """
        facts = self.facts[self.source_numbers[row]]
        cut = cut or self.cut(row)
        if facts.normaliser:
            normalise = normaliser(facts.normaliser)
        return normalise_in(facts.language or language_of(cut), normalise, text_of(cut))

    def labels(self, tokenizer: Tokenizer) -> NDArray[np.int32]:
        """Return the number of labels (N,) of each transcript, or -1 if the transcript cannot be encoded.

        The first call for a tokenizer reads every transcript (20 s for a million) and stores the numbers in
        the folder. Later calls map the stored numbers.
        """
        # The numbers depend on the tokenizer, and on the normalisers and languages of the sets.
        rules = [(facts.normaliser, facts.language) for facts in self.facts]
        path = self.folder / f"labels-{digest(tokenizer.state(), rules)}.bin"
        if not path.exists():
            with _writing(self.folder), atomic(path) as temporary, temporary.open("wb") as file:
                for start in range(0, len(self), _CHUNK):
                    rows = range(start, min(start + _CHUNK, len(self)))
                    texts = (self.text(row, tokenizer.normalise) for row in rows)
                    counts = [label_count(text, tokenizer) for text in texts]
                    np.array(counts, "<i4").tofile(file)
        return _mapped(path, np.dtype("<i4"))


def _mapped(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Map a file into memory. Raises ValueError if it ends within an element."""
    if not path.stat().st_size:  # An empty file cannot be mapped.
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, mode="r")


def hash_of(numbers: NDArray[np.int64]) -> str:
    """Return a hash of an array."""
    return hashlib.blake2b(numbers.tobytes(), digest_size=8).hexdigest()


def label_count(text: str, tokenizer: Tokenizer) -> int:
    """Return the number of labels of a normalised text, or -1 if it cannot be encoded."""
    try:
        return len(tokenizer.encode(text))
    except (KeyError, ValueError):
        return -1


def open_index(source: Source, cache: str = "") -> Index:
    """Return the index of ``source``. It is built if the cache has none for the source's fingerprint.

    ``cache`` is the cache folder. An empty string stands for ``cache_folder()``. If several processes need an
    index at the same time, each of them builds it, and the first complete one is used. Raises DataError for
    malformed or repeated cuts, MachineError if the cache cannot be written.
    """
    cache_root = absolute_path(cache) if cache else cache_folder()
    root = cache_root / "index"
    former_paths = [str(member.former_path) for member in sources_of(source) if isinstance(member, Manifest)]
    folder = root / digest(FORMAT, source.fingerprint(), former_paths)
    with _writing(root):
        root.mkdir(parents=True, exist_ok=True)
    index = _load(folder, source)
    if index is not None:
        return index
    temporary = root / f".{folder.name}.{secrets.token_hex(8)}"
    try:
        with _writing(root):
            _remove_leftovers(root)
            temporary.mkdir()
            _build(source, temporary)
            _check_unique(Index(temporary, ()), sources_of(source))
            for path in temporary.iterdir():
                flush(path)
            _rename(temporary, folder, source)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Index(folder, _facts_of(source))


def _remove_leftovers(root: Path) -> None:
    """Remove the temporary folders of builds that were interrupted more than a day ago."""
    for leftover in root.glob(".*"):
        with contextlib.suppress(FileNotFoundError):  # Another process may have removed it.
            if leftover.stat().st_mtime < time.time() - _DAY:
                shutil.rmtree(leftover, ignore_errors=True)


def _facts_of(source: Source) -> list[Facts]:
    return [member.facts for member in sources_of(source)]


def _rename(temporary: Path, folder: Path, source: Source) -> None:
    """Rename the new index ``temporary`` to ``folder``, unless another process has built that index."""
    for _ in range(2):
        try:
            temporary.rename(folder)
            return
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        if _load(folder, source) is not None:
            return
        shutil.rmtree(folder, ignore_errors=True)  # It is damaged, and another process may remove it, too.


def _load(folder: Path, source: Source) -> Index | None:
    """Return the index in ``folder`` if it is complete and current, else None."""
    try:
        index = Index(folder, _facts_of(source))
        return index if index.is_complete() and _is_current(index, source) else None
    except (OSError, ValueError, DataError):
        return None


def _is_current(index: Index, source: Source) -> bool:
    """Return whether the first cut of each corpus is still the same. Raises DataError for a damaged cut.

    A manifest needs no such check, because its fingerprint depends on its content. Reading the first cut of a
    corpus has a second use: if the corpus writes its audio into the cache and the audio is missing, it is
    written again.
    """
    for number, member in enumerate(sources_of(source)):
        first_cut = None if isinstance(member, Manifest) else next(iter(member.cuts()), None)
        if first_cut is None:
            continue
        first_row = int(np.searchsorted(index.source_numbers, number))
        # JSON changes tuples to lists. So the cut is compared as it is read from JSON.
        if first_row == len(index) or json.loads(_json_line(first_cut)) != index.cut(first_row):
            return False
    return True


def _build(source: Source, folder: Path) -> None:
    """Write the rows and the cuts into ``folder``."""
    with (folder / "rows.bin").open("wb") as file, (folder / "cuts.jsonl").open("wb") as cuts_file:
        rows = _rows(source, cuts_file)
        while len(chunk := np.fromiter(islice(rows, _CHUNK), _ROW)):
            chunk.tofile(file)


def _rows(source: Source, cuts_file: IO[bytes]) -> Iterator[tuple[Any, ...]]:
    """Yield the _ROW of each cut of the source. The cuts are written to ``cuts_file`` as JSON lines."""
    for number, member in enumerate(sources_of(source)):
        former = member.former if isinstance(member, Manifest) else str
        for _, cut in located_cuts(member):
            offset, text = cuts_file.tell(), text_of(cut)
            cuts_file.write(_json_line(cut))
            speaker, recording, key = groups_of(cut, former)
            characters = len(text.strip())
            yield key, offset, speaker, recording, key_of(text), seconds_of(cut), characters, number


def _json_line(cut: Record) -> bytes:
    """Return a cut as a JSON line. Raises DataError if JSON cannot represent the cut."""
    try:
        return json.dumps(cut).encode() + b"\n"
    except (TypeError, *MALFORMED) as error:
        problem = f"cut {cut.get('id')!r} has audio in memory ({error})"
        raise DataError(f"{problem}. Save it as a file first") from None


def _check_unique(index: Index, sources: list[Source]) -> None:
    """Raise DataError if an id is repeated. It shows the files and lines of two cuts with the same id."""
    sorted_keys = np.sort(index.keys)
    repeated_keys = sorted_keys[1:][sorted_keys[1:] == sorted_keys[:-1]]
    if not len(repeated_keys):
        return
    cuts = []
    for source in sources:
        cuts += [cut for cut in located_cuts(source) if key_of(str(cut[1]["id"])) == repeated_keys[0]]
    (first_location, cut), (second_location, _), *_ = cuts
    raise DataError(
        f"{second_location}: cut id {cut['id']!r} is already at {first_location}. "
        f"Ids must be unique ({len(repeated_keys)} repeated)"
    )


def _writing(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Return a context that raises MachineError, with the fix, if the index cannot be written."""
    fix = "free some space, or set data.cache or SPEECHTRAIN_CACHE to another folder"
    return writing(f"{folder}: the index", fix)

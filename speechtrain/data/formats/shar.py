"""lhotse's Shar, read where it lies: cuts as JSON lines, and their audio as members of tars beside them.

The index holds the place of each recording in its tar, so that reading a cut is one seek.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from speechtrain.data.formats.folder import Folder
from speechtrain.data.formats.manifests import (
    LONGEST_LINE,
    Entry,
    LhotseCuts,
    Record,
    digest,
    parse,
    records,
    stamp,
)
from speechtrain.data.tar_members import members, place
from speechtrain.errors import DataError
from speechtrain.files import open_regular


def looks_like_shar(folder: Path) -> bool:
    """Whether a folder has cuts as lhotse's Shar names them."""
    return bool(_files(folder, "cuts", ".jsonl"))


def _files(folder: Path, field: str, kind: str) -> list[Path]:
    """The files of a field, in order: ``cuts.000000.jsonl.gz``; or one, ``recording.tar``."""
    found = sorted(folder.glob(f"{field}.*"))
    return [path for path in found if kind in path.name.removeprefix(field).removesuffix(".gz")]


class Shar(LhotseCuts):
    """A folder of ``cuts.*.jsonl[.gz]``, each with its ``recording.*.tar``, as ``CutSet.to_shar`` writes it.

    A tar has two members for each cut, in their order: ``ID.flac`` (or another format), and ``ID.json``
    with its recording. ``audio`` is the folder of the tars, relative to the first; empty if they are in it.
    Other fields and custom ones are not read. Raises DataError for a folder without recordings.
    """

    kind = "shar"
    in_place = False

    def __init__(self, path: Path, audio: str = "") -> None:
        super().__init__(path)
        self.name = self.path.name
        self._begins: list[tuple[int, Path]] = []  # how many cuts precede each shard, since entries() began
        self._audio = Folder(Path(os.path.join(self.path, os.path.expanduser(audio))))

    @cached_property
    def _shards(self) -> list[tuple[Path, Path]]:
        """Each file of cuts with its tar."""
        cuts, tars = _files(self.path, "cuts", ".jsonl"), _files(self._audio.path, "recording", ".tar")
        if packed := next((tar for tar in tars if tar.suffix != ".tar"), None):
            raise DataError(f"{packed} cannot be read at any place; unpack it (gunzip {packed.name})")
        if not tars and cuts[0].name in ("cuts.jsonl", "cuts.jsonl.gz"):  # as prepare convert writes it
            raise DataError(f"{self.path} has a manifest and no recording.*.tar. Give {cuts[0]}")
        if len(tars) != len(cuts):
            told = f"{len(cuts)} files of cuts, and {self._audio.path} has {len(tars)} recording.*.tar"
            fix = "to_shar writes them with fields={'recording': 'flac'}; {path: …, audio: FOLDER} names them"
            raise DataError(f"{self.path} is a Shar of {told}; {fix}")
        for path, holder in [*((path, self) for path in cuts), *((tar, self._audio) for tar in tars)]:
            holder.check_place(path)
        return list(zip(cuts, tars, strict=True))

    def fingerprint(self) -> str:
        return digest(self.kind, self.name, [stamp(path) for shard in self._shards for path in shard])

    def at(self, line: int) -> str:
        begin, path = self._begins[bisect_left(self._begins, line, key=lambda shard: shard[0]) - 1]
        return f"{path}:{line - begin}"

    def entries(self) -> Iterator[Entry]:
        line, self._begins = 0, [(0, self._shards[0][0])]
        for cuts, tar in self._shards:
            begin, found = line, _recordings(tar)
            self._begins.append((begin, cuts))
            for number, _, record in records(cuts):
                line = begin + number
                if (audio := next(found, None)) is None:
                    raise self.bad(line, f"{tar} has no recording of this cut; write both again")
                yield Entry(self._filled(record, *audio, line), line, -1)
            if extra := next(found, None):
                raise DataError(f"{tar} has recordings after those of {cuts}, such as {extra[0][:200]!r}")

    def _filled(self, cut: Record, name: str, audio: str, recording: Record | None, line: int) -> Record:
        """The known parts of a cut, with the place of its audio."""
        if name != cut.get("id"):
            raise self.bad(line, f"the cut is {str(cut.get('id'))[:200]!r}, its recording {name[:200]!r}")
        if recording is None or cut.get("type") not in ("MonoCut", "MultiCut"):
            raise self.bad(
                line, "has no audio: it needs one recording in its tar, as a MonoCut or MultiCut has"
            )
        held: Any = recording.get("sources")
        first = held[0] if isinstance(held, list) and held else None
        source = {**first, "type": "file", "source": audio} if isinstance(first, dict) else {}
        whole = self.cut_of(
            {**cut, "recording": {**recording, "sources": [source], "transforms": None}}, line
        )
        return self._check_known(whole, line) | {"supervisions": whole.get("supervisions") or []}


def _recordings(tar: Path) -> Iterator[tuple[str, str, Record | None]]:
    """Yield the id and the place of each recording, and what its tar says of it, if it has audio."""
    try:
        with open_regular(tar) as file:
            found = members(file, tar)
            for number, (name, offset, size) in enumerate(found, 1):
                about, start, length = next(found, ("", 0, 0))
                stem = os.path.splitext(name)[0]
                if stem != os.path.splitext(about)[0] or length > LONGEST_LINE:
                    raise DataError(f"{tar}:{number}: {name[:200]!r} is not followed by its .json")
                content = os.pread(file.fileno(), length, start)
                record = None if name.endswith(".nodata") else parse(content, tar, number)
                yield stem, place(tar, offset, size, name), record
    except OSError as error:
        raise DataError(f"{tar}: {error.strerror}") from None

"""Reader of lhotse's Shar: cuts as JSON lines, and their audio as members of tars next to them.

Nothing is unpacked. The index stores the position of each recording in its tar, so that reading a cut needs
one seek.
"""

from __future__ import annotations

import os
import shlex
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from speechtrain.data.formats.folder import Folder
from speechtrain.data.formats.manifests import (
    LONGEST_LINE,
    LhotseCuts,
    Record,
    digest,
    parse,
    records,
    stamp,
)
from speechtrain.data.tar_members import member_path, members
from speechtrain.errors import DataError
from speechtrain.files import open_regular


@dataclass(frozen=True)
class Shard:
    """A file of cuts, and the tar of their recordings."""

    cuts: Path
    tar: Path


@dataclass(frozen=True)
class TarRecording:
    """A recording in a tar."""

    id: str
    path: str  # the path of the audio as a member of the tar (see tar_members.member_path)
    record: Record | None  # the recording in lhotse's JSON format, or None without audio


def looks_like_shar(folder: Path) -> bool:
    """Return whether a folder has files of cuts that are named as in lhotse's Shar."""
    return bool(_files(folder, "cuts", ".jsonl"))


def _files(folder: Path, field: str, suffix: str) -> list[Path]:
    """Return the files of a field in order, such as ``cuts.000000.jsonl.gz`` or ``recording.tar``."""
    paths = sorted(folder.glob(f"{field}.*"))
    return [path for path in paths if suffix in path.name.removeprefix(field).removesuffix(".gz")]


class Shar(LhotseCuts):
    """A folder of ``cuts.*.jsonl[.gz]``, each with its ``recording.*.tar``, as ``CutSet.to_shar`` writes it.

    A tar has two members for each cut, in the order of the cuts: ``ID.flac`` (or another format), and
    ``ID.json`` with the recording in lhotse's JSON format. ``audio`` is the folder of the tars, absolute or
    relative to the folder of the cuts. It is empty if cuts and tars are in one folder. Other fields and
    custom fields are not read. Raises DataError for a folder without recordings.
    """

    kind = "shar"

    def __init__(self, path: Path, audio: str = "", **options: Any) -> None:
        super().__init__(path, **options)
        self._cuts_before: list[int] = []  # the number of cuts before each shard that entries() has read
        # A Folder checks that the tars are below it.
        self._audio = Folder(Path(os.path.join(self.path, os.path.expanduser(audio))))

    def name_at(self, path: Path) -> str:
        return path.name

    @cached_property
    def _shards(self) -> list[Shard]:
        cuts = _files(self.path, "cuts", ".jsonl")
        tars = _files(self._audio.path, "recording", ".tar")
        for tar in tars:
            if tar.suffix != ".tar":
                command = f"gunzip {shlex.quote(str(tar))}"
                raise DataError(f"{tar} is compressed, so no part of it can be read. Run {command}")
        if not tars and cuts[0].name in ("cuts.jsonl", "cuts.jsonl.gz"):  # as prepare convert writes it
            raise DataError(f"{self.path} has a manifest and no recording.*.tar. Give {cuts[0]}")
        if len(tars) != len(cuts):
            raise DataError(
                f"{self.path} is a Shar of {len(cuts)} files of cuts, and {self._audio.path} has {len(tars)} "
                "recording.*.tar. to_shar writes them with fields={'recording': 'flac'}, and "
                "{path: …, audio: FOLDER} names their folder"
            )
        for path in cuts:
            self.refuse_outside(path)
        for tar in tars:
            self._audio.refuse_outside(tar)
        return [Shard(cuts_path, tar) for cuts_path, tar in zip(cuts, tars, strict=True)]

    def fingerprint(self) -> str:
        stamps = []
        for shard in self._shards:
            stamps += [stamp(shard.cuts), stamp(shard.tar)]
        return digest(self.kind, self.name, stamps)

    def location_of(self, line: int) -> str:
        # ``line`` counts the cuts of all shards. The location has the shard, and the line in that shard.
        shard_number = bisect_left(self._cuts_before, line) - 1
        return f"{self._shards[shard_number].cuts}:{line - self._cuts_before[shard_number]}"

    def entries(self) -> Iterator[tuple[int, Record]]:
        line, self._cuts_before = 0, []
        for shard in self._shards:
            recordings = _recordings(shard.tar)
            cuts_before = line
            self._cuts_before.append(cuts_before)
            for number, cut in records(shard.cuts):
                line = cuts_before + number
                recording = next(recordings, None)
                if recording is None:
                    raise self.error_at(line, f"{shard.tar} has no recording of this cut. Write both again")
                yield line, self._with_audio(cut, recording, line)
            extra_recording = next(recordings, None)
            if extra_recording is not None:
                raise DataError(
                    f"{shard.tar} has more recordings than {shard.cuts} has cuts, such as "
                    f"{extra_recording.id[:200]!r}. Write both again"
                )

    def _with_audio(self, cut: Record, recording: TarRecording, line: int) -> Record:
        """Return the known parts of a cut (see ``known_cut``), with the recording in the tar as its audio."""
        if recording.id != cut.get("id"):
            names = f"{str(cut.get('id'))[:200]!r}, its recording {recording.id[:200]!r}"
            raise self.error_at(line, f"the cut is {names}. Write both again")
        if recording.record is None or cut.get("type") not in ("MonoCut", "MultiCut"):
            raise self.error_at(
                line, "has no audio: it needs one recording in its tar, as a MonoCut or MultiCut has"
            )
        sources, tar_source = recording.record.get("sources"), {}
        if isinstance(sources, list) and sources and isinstance(sources[0], dict):
            tar_source = {**sources[0], "type": "file", "source": recording.path}
        # to_shar has already applied the transforms to the audio in the tar.
        record = {**recording.record, "sources": [tar_source], "transforms": None}
        checked_cut = self.cut_of({**cut, "recording": record}, line)
        supervisions = checked_cut.get("supervisions") or []
        return self._known_parts(checked_cut, line) | {"supervisions": supervisions}


def _recordings(tar: Path) -> Iterator[TarRecording]:
    """Yield each recording of a tar. Raises DataError unless each audio file is followed by its JSON."""
    try:
        with open_regular(tar) as file:
            tar_members = members(file, tar)
            for number, (name, offset, size) in enumerate(tar_members, 1):
                json_name, json_offset, json_size = next(tar_members, ("", 0, 0))
                stem = os.path.splitext(name)[0]
                if stem != os.path.splitext(json_name)[0] or json_size > LONGEST_LINE:
                    raise DataError(
                        f"{tar}:{number}: {name[:200]!r} is not followed by its .json. Write it again"
                    )
                record = None
                if not name.endswith(".nodata"):  # lhotse's suffix for a cut without audio
                    content = os.pread(file.fileno(), json_size, json_offset)
                    record = parse(content, tar, number)
                yield TarRecording(stem, member_path(tar, offset, size, name), record)
    except OSError as error:
        raise DataError(f"{tar}: {error.strerror}") from None

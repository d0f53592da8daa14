"""Opening of data.train and data.valid: manifests of several formats, folders, and unions of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from speechtrain.data.fairseq import Fairseq, looks_like_fairseq
from speechtrain.data.folder import Folder
from speechtrain.data.manifests import (
    LhotseCuts,
    LhotsePair,
    LhotseRecordings,
    Manifest,
    Mlperf,
    Nemo,
    Record,
    digest,
    first_line,
    json_array,
    open_bytes,
    parse,
)
from speechtrain.data.source import Source
from speechtrain.errors import DataError
from speechtrain.files import whole_path

if TYPE_CHECKING:
    from lhotse.cut import Cut


class Union(Source):
    """Several sources, one after the other."""

    def __init__(self, parts: Sequence[Source]) -> None:
        self.parts = list(parts)

    def cuts(self) -> Iterator[Cut]:
        for part in self.parts:
            yield from part.cuts()

    def fingerprint(self) -> str:
        return digest(*(part.fingerprint() for part in self.parts))


def parts_of(source: Source) -> list[Source]:
    """Return the parts of a union, or the source itself."""
    return source.parts if isinstance(source, Union) else [source]


def open_source(spec: Source | str | Sequence[str]) -> Source:
    """Open the source called ``spec``; its format is detected by content.

    ``spec`` is a path (or several, also as one string with commas) of a lhotse cut manifest, a NeMo,
    MLPerf or fairseq manifest, plain or gzipped, or of a folder of recordings. A lhotse recording
    manifest may be followed by its supervision manifest. Several paths are a union in order; a ``Source`` is
    returned unchanged. Raises DataError for a path that is missing, empty, repeated or of unknown format.
    """
    if isinstance(spec, Source):
        return spec
    names = names_in(spec) if isinstance(spec, str) else list(spec)
    if not names:
        raise DataError("no manifest is given; set a file, a folder or a list of them")
    paths = [whole_path(name) for name in names]
    for number, path in enumerate(paths):
        if not os.path.exists(path):  # Path's own raises for a name that is too long
            raise DataError(f"{path} does not exist; give a manifest or a folder of recordings")
        if path in paths[:number]:
            raise DataError(f"{path} is given twice; remove one, since each cut would be repeated")
    parts: list[Manifest] = []
    rest = [(path, _sniff(path)) for path in paths]
    while rest:
        path, kind = rest.pop(0)
        if kind == "recordings" and rest and rest[0][1] == "supervisions":
            parts.append(LhotsePair(path, rest.pop(0)[0]))
        elif kind in _FORMATS:
            parts.append(_FORMATS[kind](path))
        else:
            raise DataError(
                f"{path}: a lhotse supervision manifest needs its recording manifest before it; "
                "give both in this order, or give a cut manifest"
            )
    _tell_apart(parts)
    return parts[0] if len(parts) == 1 else Union(parts)


_FORMATS: dict[str, type[Manifest]] = {
    f.kind: f for f in (Folder, LhotseCuts, LhotseRecordings, Nemo, Mlperf, Fairseq)
}


def names_in(spec: str) -> list[str]:
    """Split a string into its names: one, or several separated by commas if it is not itself a file."""
    if "," in spec and not os.path.exists(os.path.expanduser(spec)):
        return [part.strip() for part in spec.split(",") if part.strip()]
    return [spec] if spec.strip() else []


def _sniff(path: Path) -> str:
    """Detect a format from the first line that is not blank; fairseq's TSV also from the second."""
    if path.is_dir():
        if any(path.glob("cuts.0*.jsonl*")):
            raise DataError(
                f"{path} is a lhotse Shar folder; write its audio as files: CutSet.from_shar(in_dir=DIR)"
                ".save_audios(NEW).map(lambda c: c.drop_custom('shard_origin')).to_file('cuts.jsonl.gz')"
            )
        return "folder"
    if not path.is_file():
        raise DataError(f"{path} is neither a file nor a folder")
    line, start = first_line(path)
    if start.startswith(b"["):
        record = next((record for _, record in json_array(path)), None)
        if record is None:
            raise DataError(f"{path}:{line}: the array is empty")
        found = _format_of(record)
    elif start.startswith(b"{"):
        found = _format_of(parse(start, path, line))
    elif looks_like_fairseq(_head(path), path.parent):
        found = "fairseq"
    else:
        raise DataError(
            f"{path}:{line}: not a manifest (it starts with {start[:20].decode(errors='replace')!r}); "
            "use lhotse cuts (from YAML: lhotse copy FILE cuts.jsonl.gz), NeMo JSON lines, MLPerf JSON or "
            "fairseq TSV"
        )
    if not found:
        wanted = "a lhotse cut has 'type', a NeMo line 'audio_filepath', MLPerf's 'transcript' and 'files'"
        raise DataError(f"{path}:{line}: the format is unknown; {wanted}")
    return found


def _head(path: Path) -> list[bytes]:
    """Return the first two lines, each up to 64 KiB."""
    with open_bytes(path) as file:
        return [file.readline(1 << 16) for _ in range(2)]


def _format_of(record: Record) -> str:
    if "files" in record and ("transcript" in record or "original_duration" in record):
        return "mlperf"
    if any(key in record for key in Nemo.AUDIO):
        return "nemo"
    if str(record.get("type", "")).endswith("Cut"):
        return "lhotse"
    if "sources" in record and "sampling_rate" in record:
        return "recordings"
    if "recording_id" in record and "start" in record and "storage_path" not in record:  # that is features
        return "supervisions"
    return ""


def _tell_apart(parts: Sequence[Manifest]) -> None:
    """Prepend folders to names that several manifests share, because ids are made from the names."""
    for depth in range(2, 64):
        shared = [p for p in parts if sum(p.name == other.name for other in parts) > 1]
        if not shared:
            return
        for part in shared:
            part.name = "/".join(part.path.with_suffix("").parts[-depth:])

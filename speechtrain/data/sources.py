"""Opening what a user names: manifests of several formats, folders, and unions of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from speechtrain.data.fairseq import Fairseq, looks_like_fairseq
from speechtrain.data.folder import Folder
from speechtrain.data.manifests import (
    LhotseCuts,
    LhotsePair,
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

if TYPE_CHECKING:
    from lhotse.cut import Cut

__all__ = [
    *("Fairseq", "Folder", "LhotseCuts", "LhotsePair", "Mlperf", "Nemo", "Union"),
    *("names_in", "open_source", "parts_of"),
]


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
    """The sources that make up a union, or the source itself."""
    return source.parts if isinstance(source, Union) else [source]


def open_source(spec: Source | str | Sequence[str]) -> Source:
    """What ``spec`` names, its formats told by content.

    A path (or several, also as one string with commas) of a lhotse cut manifest, a NeMo, MLPerf or
    fairseq manifest, plain or gzipped, or of a folder of recordings; a lhotse recording manifest is
    followed by its supervision manifest. Several are their union in order. A ``Source`` is returned as it is.
    Raises DataError naming the file (and line) that is missing, empty, of no known format or twice there.
    """
    if isinstance(spec, Source):
        return spec
    names = names_in(spec) if isinstance(spec, str) else list(spec)
    if not names:
        raise DataError("no manifest is named; give a file, a folder or a list of them")
    paths = [Path(name).expanduser().absolute() for name in names]
    for number, path in enumerate(paths):
        if not path.exists():
            raise DataError(f"{path} does not exist; name a manifest or a folder of recordings")
        if path in paths[:number]:
            raise DataError(f"{path} is named twice; each cut would be there twice")
    parts: list[Manifest] = []
    rest = iter(paths)
    for path in rest:
        kind = _sniff(path)
        following = next(rest, None) if kind == "recordings" else None
        if kind in _FORMATS:
            parts.append(_FORMATS[kind](path))
        elif following is not None and _sniff(following) == "supervisions":
            parts.append(LhotsePair(path, following))
        elif kind == "recordings" and following is None:
            raise DataError(f"{path}: holds recordings only; name its supervision manifest after it")
        else:
            raise DataError(
                f"{path}: a lhotse recording manifest is followed by its supervision manifest; "
                "name both in this order, or a cut manifest"
            )
    _tell_apart(parts)
    return parts[0] if len(parts) == 1 else Union(parts)


_FORMATS: dict[str, type[Manifest]] = {
    "folder": Folder,
    "lhotse": LhotseCuts,
    "nemo": Nemo,
    "mlperf": Mlperf,
    "fairseq": Fairseq,
}


def names_in(spec: str) -> list[str]:
    """The names in a string: one, or several separated by commas where no file has that name."""
    if "," in spec and not Path(spec).expanduser().exists():
        return [part.strip() for part in spec.split(",") if part.strip()]
    return [spec] if spec.strip() else []


def _sniff(path: Path) -> str:
    """A format's name, from the first line that is not blank; fairseq's TSV shows in the second."""
    if path.is_dir():
        return "folder"
    if not path.is_file():
        raise DataError(f"{path} is neither a file nor a folder")
    line, start = first_line(path)
    if start.startswith(b"["):
        record = next((record for _, record in json_array(path)), None)
        if record is None:
            raise DataError(f"{path}:{line}: the array is empty")
        found = "mlperf" if _format_of(record) == "mlperf" else ""
        wanted = "an array must hold MLPerf's objects ('transcript' and 'files')"
    elif start.startswith(b"{"):
        found = _format_of(parse(start, path, line))
        wanted = "a lhotse cut has 'type', a NeMo line 'audio_filepath', MLPerf's 'transcript' and 'files'"
    elif looks_like_fairseq(_head(path), path.parent):
        found, wanted = "fairseq", ""
    else:
        raise DataError(
            f"{path}:{line}: is no manifest (it starts with {start[:20].decode(errors='replace')!r}); "
            "known are lhotse cuts, NeMo JSON lines, MLPerf JSON and fairseq TSV"
        )
    if not found:
        raise DataError(f"{path}:{line}: is of no known format; {wanted}")
    return found


def _head(path: Path) -> list[bytes]:
    """The first two lines, as far as they are those of a text."""
    with open_bytes(path) as file:
        return [file.readline(1 << 16) for _ in range(2)]


def _format_of(record: Record) -> str:
    if "transcript" in record and "files" in record:
        return "mlperf"
    if any(key in record for key in Nemo.AUDIO):
        return "nemo"
    if str(record.get("type", "")).endswith("Cut"):
        return "lhotse"
    if "sources" in record and "sampling_rate" in record:
        return "recordings"
    if "recording_id" in record and "start" in record:
        return "supervisions"
    return ""


def _tell_apart(parts: Sequence[Manifest]) -> None:
    """Lengthen the names of manifests that share one by their folders: ids are made from them."""
    for depth in range(2, 64):
        shared = [p for p in parts if sum(p.name == other.name for other in parts) > 1]
        if not shared:
            return
        for part in shared:
            part.name = "/".join(part.path.with_suffix("").parts[-depth:])

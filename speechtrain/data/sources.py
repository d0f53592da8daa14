"""Opening of data.train and data.valid: manifests of several formats, folders, and unions of them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from speechtrain.data.formats.fairseq import Fairseq, looks_like_fairseq
from speechtrain.data.formats.folder import Folder
from speechtrain.data.formats.kaldi import LIST, Kaldi
from speechtrain.data.formats.manifests import (
    LhotseCuts,
    LhotsePair,
    LhotseRecordings,
    Manifest,
    Mlperf,
    Nemo,
    Record,
    digest,
    first_line,
    open_bytes,
    records,
)
from speechtrain.data.formats.shar import Shar, looks_like_shar
from speechtrain.data.formats.tables import COLUMNS, Table
from speechtrain.data.source import Facts, Source
from speechtrain.errors import ConfigError, DataError, nearest
from speechtrain.files import small_yaml, whole_path
from speechtrain.text.normalise import normaliser

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

    def warnings(self) -> Iterator[str]:
        for part in self.parts:
            yield from part.warnings()

    def text_hint(self) -> str:
        return next(filter(None, (part.text_hint() for part in self.parts)), "")


def parts_of(source: Source) -> list[Source]:
    """Return the parts of a union, or the source itself."""
    return source.parts if isinstance(source, Union) else [source]


def open_source(spec: Source | Spec | Sequence[Spec]) -> Source:
    """Open the source called ``spec``; its format is detected by content.

    ``spec`` is a path (or several, also as one string with commas) of a lhotse cut manifest, a NeMo,
    MLPerf or fairseq manifest or a table, plain or gzipped, or of a folder of recordings; a mapping has the
    path, names of columns and facts: ``{path: FILE, text: COLUMN, normaliser: NAME}``, or is of sets with
    names: ``{a: FILE, b: {path: FILE, weight: 3}}``. A lhotse recording
    manifest may be followed by its supervision manifest. Several are a union in order; a ``Source`` is
    returned unchanged. Raises DataError for a path that is missing, empty, repeated or of unknown format.
    """
    if isinstance(spec, Source):
        return spec
    parts: list[Manifest] = []
    rest = [(path, _sniff(path, columns), columns, facts) for path, columns, facts in _existing_paths(spec)]
    while rest:
        path, kind, columns, facts = rest.pop(0)
        if kind == "recordings" and rest and rest[0][1] == "supervisions":
            parts.append(LhotsePair(path, rest.pop(0)[0]))
        elif kind == Table.kind:
            parts.append(Table(_table_in(path) or path, columns))
        elif kind == Shar.kind:
            parts.append(Shar(path, columns.get("audio", "")))
        elif kind in _FORMATS:
            parts.append(_FORMATS[kind](path))
        else:
            raise DataError(
                f"{path}: a lhotse supervision manifest needs its recording manifest before it; "
                "give both in this order, or give a cut manifest"
            )
        parts[-1].facts = facts
    _tell_apart(parts)
    return parts[0] if len(parts) == 1 else Union(parts)


def _existing_paths(spec: Spec | Sequence[Spec]) -> list[tuple[Path, dict[str, str], Facts]]:
    """Return each path of ``spec``, with the names of its columns and its facts. Raises DataError."""
    if problem := problem_of(spec):
        raise DataError(problem)
    paths = list(islice(_paths_in(spec, Facts()), _MOST_MANIFESTS + 1))
    if not paths:
        raise DataError("no manifest is given; set a file, a folder or a list of them")
    if len(paths) > _MOST_MANIFESTS:
        raise DataError(f"more than {_MOST_MANIFESTS} manifests are named. Join them to fewer files")
    seen = set[Path]()
    for path, *_ in paths:
        if not os.path.exists(path):  # Path's own raises for a name that is too long
            raise DataError(f"{path} does not exist; give a manifest or a folder of recordings")
        if path in seen:
            raise DataError(f"{path} is given twice; remove one, since each cut would be repeated")
        seen.add(path)
    return paths


Spec = str | Mapping[str, Any]
"""A source as it is typed: a path; ``{path: FILE}`` with columns of a table by the keys of COLUMNS, and
with facts; or ``{NAME: SOURCE, …}``."""

_FACTS = ("normaliser", "weight", "language")


def problem_of(spec: object, name: str = "", is_valid: bool = False) -> str:
    """What is wrong with the keys of a source, of several or of named sets; empty if nothing is.

    ``name`` is that of a set; ``is_valid``: it is for validation, where nothing is weighted.
    """
    if isinstance(spec, list | tuple):
        nested = next(
            (f"{str(one)[:40]} is a list in a list; write one list" for one in spec if isinstance(one, list)),
            "",
        )
        return nested or next(filter(None, (problem_of(one, name, is_valid=is_valid) for one in spec)), "")
    if not isinstance(spec, Mapping):
        return "" if isinstance(spec, str) else f"{str(spec)[:40]!r} is no source; give a path"
    known = ("path", *COLUMNS, *_FACTS)
    if not name and spec and not any(key in known for key in spec):
        sets = {str(key): problem_of(one, str(key), is_valid=is_valid) for key, one in spec.items()}
        return next((f"{key}: {problem}" for key, problem in sets.items() if problem), "")
    for key in spec:
        if key not in known:
            other = nearest(str(key), known) or f"; it has {', '.join(known)}"
            return f"{str(key)[:40]!r} is no key of a source{other}"
    for key in (*COLUMNS, "normaliser", "language"):
        if not isinstance(spec.get(key), str | None):
            return f"{key} is {str(spec[key])[:40]!r}, not a string"
    if not isinstance(spec.get("path"), str):
        return "a source needs its path, as in {path: FILE, text: COLUMN}"
    return _problem_of_facts(spec, may_weigh=bool(name) and not is_valid)


def _problem_of_facts(spec: Mapping[str, Any], may_weigh: bool) -> str:
    weight = spec.get("weight")
    if weight is not None and not may_weigh:
        return "only training sets with names have a weight: data.train={a: {path: FILE, weight: 3}, b: FILE}"
    if weight is not None and not (type(weight) in (int, float) and 0 < weight < math.inf):
        return f"weight is {str(weight)[:40]!r}; it must be a number above 0"
    try:
        normaliser(spec.get("normaliser") or "none")
    except ConfigError as error:
        return str(error)
    return ""


def _paths_in(spec: Spec | Sequence[Spec], facts: Facts) -> Iterator[tuple[Path, dict[str, str], Facts]]:
    """Yield each path of ``spec``, with the names of its columns and its facts."""
    if isinstance(spec, str):
        for one in names_in(spec):
            if problem := problem_of(one):
                raise DataError(problem)
            yield from [(whole_path(one), {}, facts)] if isinstance(one, str) else _paths_in(one, facts)
    elif not isinstance(spec, Mapping):
        for one in spec:
            yield from _paths_in(one, facts)
    elif "path" in spec:
        told = {key: spec[key] for key in _FACTS if spec.get(key) is not None}
        columns = {key: str(spec[key]) for key in COLUMNS if spec.get(key) is not None}
        for path, _, own in _paths_in(str(spec["path"]), replace(facts, **told)):
            yield path, columns, own
    else:
        for name, one in spec.items():
            yield from _paths_in(one, replace(facts, name=str(name)))


_FORMATS: dict[str, type[Manifest]] = {
    f.kind: f for f in (Folder, Kaldi, LhotseCuts, LhotseRecordings, Nemo, Mlperf, Fairseq)
}


def names_in(spec: str) -> Iterator[Spec]:
    """Yield the names in a string: one, or several separated by commas if it is not itself a file.

    A mapping is read as YAML, as on the command line of training.
    """
    is_file = os.path.exists(os.path.expanduser(spec))
    if spec.lstrip().startswith("{") and not is_file:
        try:
            if isinstance(found := yaml.safe_load(small_yaml(spec)), dict):
                yield found
                return
        except (ValueError, yaml.YAMLError):
            pass
        raise DataError(f"{spec[:200]} is no mapping; write it as {{path: FILE, text: COLUMN}}")
    names = [spec] if is_file else map(str.strip, spec.split(","))
    for name in names:
        yield from _shards(name)


def _shards(name: str) -> Iterator[Spec]:
    """The files of NeMo's ``train_OP_0..7_CL_.json``; else the name itself, or nothing of an empty one."""
    if (found := _SHARDS.search(name)) is None:
        if name.strip():
            yield name
        return
    width = len(found[1])
    for number in range(int(found[1]), int(found[2]) + 1):
        yield f"{name[: found.start()]}{number:0{width}}{name[found.end() :]}"


_MOST_MANIFESTS = 10_000  # NeMo's pattern names no more
_SHARDS = re.compile(r"_OP_(\d{1,4})\.\.(\d{1,4})_CL_")


def _table_in(folder: Path) -> Path | None:
    """The table of a folder: LJSpeech's or Hugging Face's. Raises DataError if it lies elsewhere."""
    found = next((file for name in _TABLES if (file := folder / name).is_file()), None)
    if found:
        Folder(folder).check_place(found)
    return found


_TABLES = ("metadata.csv", "metadata.jsonl")


def _sniff(path: Path, columns: Mapping[str, str]) -> str:
    """Detect a format from the first line that is not blank; fairseq's TSV also from the second."""
    if path.is_dir():
        if _table_in(path):
            return Table.kind
        if split := [folder for folder in sorted(path.glob("*/")) if _table_in(folder)]:
            raise DataError(
                f"{path} has a {_TABLES[0]} in several folders; give {', '.join(map(str, split))}"
            )
        is_shar = looks_like_shar(path)
        if columns.keys() - ({"audio"} if is_shar else set()):
            raise DataError(f"{path} has no table, so it has no column {next(iter(columns.values()))!r}")
        if is_shar:
            return Shar.kind
        return Kaldi.kind if (path / LIST).is_file() else Folder.kind
    if not path.is_file():
        raise DataError(f"{path} is neither a file nor a folder")
    line, start = first_line(path)
    if columns:
        return Table.kind
    if start.startswith((b"[", b"{", b"-")):
        record = next((record for _, _, record in records(path)), None)
        if record is None:
            raise DataError(f"{path}:{line}: the array is empty")
        found = _format_of(record)
    elif len(names := Table(path).form.columns) > 1 and any(n.lower() in COLUMNS["audio"] for n in names):
        found = Table.kind
    elif looks_like_fairseq(_head(path), path.parent):
        found = "fairseq"
    elif names:
        found = Table.kind
    else:
        raise DataError(
            f"{path}:{line}: not a manifest; use lhotse cuts, NeMo JSON lines, MLPerf JSON, "
            "fairseq TSV, or a CSV or TSV with a header"
        )
    if not found:
        wanted = "a lhotse cut has 'type', a NeMo line 'audio_filepath', MLPerf's 'transcript' and 'files'"
        raise DataError(
            f"{path}:{line}: the format is unknown; {wanted}; {{path: FILE, audio: KEY}} names it"
        )
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
    return Table.kind if any(str(key).lower() in COLUMNS["audio"] for key in record) else ""


def _tell_apart(parts: Sequence[Manifest]) -> None:
    """Prepend folders to names that several manifests share, because ids are made from the names."""
    for depth in range(2, 64):
        shared = [p for p in parts if sum(p.name == other.name for other in parts) > 1]
        if not shared:
            return
        for part in shared:
            part.name = "/".join(part.path.with_suffix("").parts[-depth:])

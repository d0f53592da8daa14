"""Opens data.train and data.valid: manifests of several formats, folders, and unions of them."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from speechtrain.files import absolute_path, small_yaml
from speechtrain.text.normalise import normaliser

if TYPE_CHECKING:
    from lhotse.cut import Cut


Spec = str | Mapping[str, Any]
"""A source as the user writes it: a path, ``{path: FILE}`` with columns of a table by the keys of COLUMNS and
with facts, or ``{NAME: SOURCE, …}``."""

_FORMATS: dict[str, type[Manifest]] = {
    reader.kind: reader for reader in (Folder, Kaldi, LhotseCuts, LhotseRecordings, Nemo, Mlperf, Fairseq)
}
_FACTS = ("normaliser", "weight", "language")  # the facts that a mapping with a path can have
_TABLES = ("metadata.csv", "metadata.jsonl")  # the tables of a folder: LJSpeech's and Hugging Face's
_MOST_MANIFESTS = 10_000  # the most files that NeMo's pattern can name
_SHARDS = re.compile(r"_OP_(\d{1,4})\.\.(\d{1,4})_CL_")


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


@dataclass(frozen=True)
class _SourcePath:
    """One path of a specification, with the names of its columns and its facts."""

    path: Path
    columns: Mapping[str, str]
    facts: Facts


def open_source(spec: Source | Spec | Sequence[Spec]) -> Source:
    """Open the source called ``spec``. The format is detected from the content.

    ``spec`` is one of

    - the path of a lhotse cut manifest, a NeMo, MLPerf or fairseq manifest or a table, each of them plain or
      gzipped, or of a folder of recordings. A lhotse supervision manifest may follow its recording manifest.
    - a mapping of the path, names of columns and facts: ``{path: FILE, text: COLUMN, normaliser: NAME}``
    - a mapping of named sets: ``{a: FILE, b: {path: FILE, weight: 3}}``
    - a list of these, or one string of paths with commas, which is the union of the sources in order
    - a ``Source``, which is returned unchanged.

    Raises DataError for a path that is missing, empty, repeated or of unknown format.
    """
    if isinstance(spec, Source):
        return spec
    parts: list[Manifest] = []
    paths = _existing_paths(spec)
    remaining = [(source_path, _detect_format(source_path)) for source_path in paths]
    while remaining:
        source_path, kind = remaining.pop(0)
        path, columns = source_path.path, source_path.columns
        part: Manifest
        if kind == "recordings" and remaining and remaining[0][1] == "supervisions":
            supervisions, _ = remaining.pop(0)
            part = LhotsePair(path, supervisions.path)
        elif kind == Table.kind:
            part = Table(_table_in(path) or path, columns)
        elif kind == Shar.kind:
            part = Shar(path, columns.get("audio", ""))
        elif kind in _FORMATS:
            part = _FORMATS[kind](path)
        else:
            raise DataError(
                f"{path}: a lhotse supervision manifest needs its recording manifest before it. "
                "Give both in this order, or give a cut manifest"
            )
        part.facts = source_path.facts
        parts.append(part)
    _make_names_unique(parts)
    return parts[0] if len(parts) == 1 else Union(parts)


def _existing_paths(spec: Spec | Sequence[Spec]) -> list[_SourcePath]:
    """Return the paths of ``spec``. Raises DataError for an invalid ``spec`` and for a missing path."""
    problem = problem_of(spec)
    if problem:
        raise DataError(problem)
    paths = list(islice(_paths_in(spec, Facts()), _MOST_MANIFESTS + 1))
    if not paths:
        raise DataError("no manifest is given. Set a file, a folder or a list of them")
    if len(paths) > _MOST_MANIFESTS:
        raise DataError(f"more than {_MOST_MANIFESTS} manifests are named. Join them to fewer files")
    seen = set[Path]()
    for path in (source_path.path for source_path in paths):
        if not os.path.exists(path):  # Path.exists raises for a name that is too long.
            raise DataError(f"{path} does not exist. Give a manifest or a folder of recordings")
        if path in seen:
            raise DataError(f"{path} is given twice. Remove one, since each cut would be repeated")
        seen.add(path)
    return paths


def problem_of(spec: object, name: str = "", is_valid: bool = False) -> str:
    """Return the first problem in a source, a list of sources or a mapping of named sets, or "".

    ``name`` is the name of the set that has the source. With ``is_valid``, the source is for validation and
    may not have a weight.
    """
    if isinstance(spec, list | tuple):
        return _problem_of_list(spec, name, is_valid=is_valid)
    if isinstance(spec, str):
        return ""
    if not isinstance(spec, Mapping):
        return f"{str(spec)[:40]!r} is not a source. Give a path"
    keys = ("path", *COLUMNS, *_FACTS)
    if not name and spec and spec.keys().isdisjoint(keys):
        for set_name, set_spec in spec.items():
            problem = problem_of(set_spec, str(set_name), is_valid=is_valid)
            if problem:
                return f"{set_name}: {problem}"
        return ""
    for key in spec:
        if key not in keys:
            advice = nearest(str(key), keys) or f". It has {', '.join(keys)}"
            return f"{str(key)[:40]!r} is not a key of a source{advice}"
    for key in (*COLUMNS, "normaliser", "language"):
        if not isinstance(spec.get(key), str | None):
            return f"{key} is {str(spec[key])[:40]!r}, not a string"
    if not isinstance(spec.get("path"), str):
        return "a source needs its path, as in {path: FILE, text: COLUMN}"
    return _problem_of_facts(spec, may_weigh=bool(name) and not is_valid)


def _problem_of_list(specs: Sequence[object], name: str, is_valid: bool) -> str:
    for spec in specs:
        if isinstance(spec, list):
            return f"{str(spec)[:40]} is a list in a list. Write one list"
    problems = (problem_of(spec, name, is_valid=is_valid) for spec in specs)
    return next(filter(None, problems), "")


def _problem_of_facts(spec: Mapping[str, Any], may_weigh: bool) -> str:
    weight = spec.get("weight")
    if weight is not None and not may_weigh:
        return "only training sets with names have a weight: data.train={a: {path: FILE, weight: 3}, b: FILE}"
    if weight is not None and not (type(weight) in (int, float) and 0 < weight < math.inf):
        return f"weight is {str(weight)[:40]!r}. It must be a number above 0"
    try:
        normaliser(spec.get("normaliser") or "none")
    except ConfigError as error:
        return str(error)
    return ""


def _paths_in(spec: Spec | Sequence[Spec], facts: Facts) -> Iterator[_SourcePath]:
    """Yield each path of ``spec``. Its sets inherit ``facts``."""
    if isinstance(spec, str):
        for part in _specs_in(spec):
            problem = problem_of(part)
            if problem:
                raise DataError(problem)
            if isinstance(part, str):
                yield _SourcePath(absolute_path(part), {}, facts)
            else:
                yield from _paths_in(part, facts)
    elif not isinstance(spec, Mapping):
        for part in spec:
            yield from _paths_in(part, facts)
    elif "path" in spec:
        set_facts = {key: spec[key] for key in _FACTS if spec.get(key) is not None}
        columns = {key: spec[key] for key in COLUMNS if spec.get(key) is not None}
        for source_path in _paths_in(spec["path"], replace(facts, **set_facts)):
            yield replace(source_path, columns=columns)
    else:
        for name, set_spec in spec.items():
            yield from _paths_in(set_spec, replace(facts, name=str(name)))


def _specs_in(text: str) -> Iterator[Spec]:
    """Yield the sources in a string: a file, several paths with commas, or a mapping.

    A mapping is read as YAML, as on the command line of training.
    """
    is_file = os.path.exists(os.path.expanduser(text))
    if text.lstrip().startswith("{") and not is_file:
        yield _mapping_in(text)
        return
    names = [text] if is_file else map(str.strip, text.split(","))
    for name in names:
        yield from _shards(name)


def _mapping_in(text: str) -> Mapping[str, Any]:
    mapping = None
    with contextlib.suppress(ValueError, yaml.YAMLError):
        mapping = yaml.safe_load(small_yaml(text))
    if not isinstance(mapping, dict):
        raise DataError(f"{text[:200]} is not a mapping. Write it as {{path: FILE, text: COLUMN}}")
    return mapping


def _shards(name: str) -> Iterator[str]:
    """Yield the files of NeMo's pattern ``train_OP_0..7_CL_.json``, or the name itself if it is not empty."""
    numbers = _SHARDS.search(name)
    if numbers is None:
        if name.strip():
            yield name
        return
    width = len(numbers[1])
    for number in range(int(numbers[1]), int(numbers[2]) + 1):
        yield f"{name[: numbers.start()]}{number:0{width}}{name[numbers.end() :]}"


def _table_in(folder: Path) -> Path | None:
    """Return the table of a folder, or None. Raises DataError if it is a link to a file elsewhere."""
    for name in _TABLES:
        file = folder / name
        if file.is_file():
            Folder(folder).refuse_outside(file)
            return file
    return None


def _detect_format(source_path: _SourcePath) -> str:
    """Return the kind of a manifest or folder.

    The first line that is not blank decides, and for fairseq's TSV also the second line. Raises DataError if
    the format is unknown.
    """
    path, columns = source_path.path, source_path.columns
    if path.is_dir():
        return _format_of_folder(path, columns)
    if not path.is_file():
        raise DataError(f"{path} is neither a file nor a folder")
    line, start = first_line(path)
    if columns:
        return Table.kind
    if start.startswith((b"[", b"{", b"-")):
        return _format_of_objects(path, line)
    names = Table(path).form.columns
    has_audio = any(name.lower() in COLUMNS["audio"] for name in names)
    if len(names) > 1 and has_audio:
        return Table.kind
    if looks_like_fairseq(_head(path), path.parent):
        return Fairseq.kind
    if names:
        return Table.kind
    raise DataError(
        f"{path}:{line}: not a manifest. Use lhotse cuts, NeMo JSON lines, MLPerf JSON, "
        "fairseq TSV, or a CSV or TSV with a header"
    )


def _format_of_folder(path: Path, columns: Mapping[str, str]) -> str:
    if _table_in(path):
        return Table.kind
    folders = [str(folder) for folder in sorted(path.glob("*/")) if _table_in(folder)]
    if folders:
        raise DataError(f"{path} has a {_TABLES[0]} in several folders. Give {', '.join(folders)}")
    is_shar = looks_like_shar(path)
    known_columns = {"audio"} if is_shar else set()
    if columns.keys() - known_columns:
        raise DataError(f"{path} has no table, so it has no column {next(iter(columns.values()))!r}")
    if is_shar:
        return Shar.kind
    return Kaldi.kind if (path / LIST).is_file() else Folder.kind


def _format_of_objects(path: Path, line: int) -> str:
    """Return the kind of a manifest of objects, which begins at ``line``."""
    _, _, record = next(records(path), (0, 0, None))
    if record is None:
        raise DataError(f"{path}:{line}: the array is empty")
    kind = _format_of(record)
    if not kind:
        keys = "a lhotse cut has 'type', a NeMo line 'audio_filepath', MLPerf's 'transcript' and 'files'"
        raise DataError(f"{path}:{line}: the format is unknown. {keys}. {{path: FILE, audio: KEY}} names it")
    return kind


def _head(path: Path) -> list[bytes]:
    """Return the first two lines, each up to 64 KiB."""
    with open_bytes(path) as file:
        return [file.readline(1 << 16) for _ in range(2)]


def _format_of(record: Record) -> str:
    """Return the kind of a manifest with this object, or "" if it is unknown."""
    if "files" in record and ("transcript" in record or "original_duration" in record):
        return Mlperf.kind
    if any(key in record for key in Nemo.AUDIO):
        return Nemo.kind
    if str(record.get("type", "")).endswith("Cut"):
        return LhotseCuts.kind
    if "sources" in record and "sampling_rate" in record:
        return LhotseRecordings.kind
    has_features = "storage_path" in record
    if "recording_id" in record and "start" in record and not has_features:
        return "supervisions"
    has_audio = any(str(key).lower() in COLUMNS["audio"] for key in record)
    return Table.kind if has_audio else ""


def _make_names_unique(parts: Sequence[Manifest]) -> None:
    """Prepend folders to names that several manifests share, because ids are made from the names."""
    for depth in range(2, 64):
        counts = Counter(part.name for part in parts)
        shared = [part for part in parts if counts[part.name] > 1]
        if not shared:
            return
        for part in shared:
            part.name = "/".join(part.path.with_suffix("").parts[-depth:])

"""Opens the sources of data.train and data.valid: manifests of several formats, folders, and unions of them.

``open_source`` checks the specification of a source, finds its paths and detects the format of each path.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from speechtrain.data.formats.fairseq import Fairseq, looks_like_fairseq
from speechtrain.data.formats.folder import ANNOTATIONS, AudioFolder, Folder
from speechtrain.data.formats.kaldi import LIST, Kaldi
from speechtrain.data.formats.manifests import (
    AS_TABLE,
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
    other_format_of,
    records,
)
from speechtrain.data.formats.shar import Shar, looks_like_shar
from speechtrain.data.formats.tables import COLUMNS, Table, candidate_columns
from speechtrain.data.recordings import stand_in_of
from speechtrain.data.source import Facts, Source
from speechtrain.errors import ConfigError, DataError, nearest
from speechtrain.files import absolute_path, small_yaml
from speechtrain.text.normalise import normaliser

Spec = str | Mapping[str, Any]
"""A source as the user writes it: a path, a mapping with a path, or a mapping of named sets.

A mapping with a path is ``{path: FILE, text: COLUMN, normaliser: NAME}``. Its other keys are the keys of
COLUMNS, for the columns of a table, the names in ``_FACTS``, and ``moved_from``: the path that the data had
when its run started (see ``with_former_paths``). A mapping of named sets is ``{NAME: SOURCE, …}``.
"""

_FORMATS: dict[str, type[Manifest]] = {
    reader.kind: reader
    for reader in (Folder, AudioFolder, Kaldi, LhotseCuts, LhotseRecordings, Nemo, Mlperf, Fairseq)
}
_FACTS = ("normaliser", "weight", "language", "hold_out")  # fields of Facts that a mapping can set
_KEYS = ("path", "moved_from", *COLUMNS, *_FACTS)  # the keys of a mapping with a path
_TABLES = ("metadata.csv", "metadata.jsonl")  # the table of a folder, as in LJSpeech and in Hugging Face
_MOST_MANIFESTS = 10_000  # the most files of one source. A shard pattern can name this number of files.
_SHARD_PATTERN = re.compile(r"_OP_(\d{1,4})\.\.(\d{1,4})_CL_")  # NeMo's range of the first and last shard


class NotManifest(DataError):
    """A file is no manifest. It may be a recording."""


class Union(Source):
    """Several sources, one after the other."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = list(sources)

    def cuts(self) -> Iterator[Record]:
        for source in self.sources:
            yield from source.cuts()

    def fingerprint(self) -> str:
        return digest(*(source.fingerprint() for source in self.sources))

    def warnings(self) -> Iterator[str]:
        for source in self.sources:
            yield from source.warnings()

    def text_hint(self) -> str:
        return next(filter(None, (source.text_hint() for source in self.sources)), "")


def sources_of(source: Source) -> list[Source]:
    """Return the sources of a union, or the source itself."""
    return source.sources if isinstance(source, Union) else [source]


def located_cuts(source: Source) -> Iterator[tuple[str, Record]]:
    """Yield ``FILE:LINE`` and the cut for each cut of a manifest, or ``CORPUS:NUMBER`` and the cut."""
    if isinstance(source, Manifest):
        for line, cut in source.entries():
            yield source.location_of(line), cut
        return
    for number, cut in enumerate(source.cuts(), 1):
        yield f"{type(source).__name__}:{number}", cut


@dataclass(frozen=True)
class _SourcePath:
    """A path of a specification, with the names of its columns and its facts."""

    path: str
    facts: Facts
    columns: Mapping[str, str] = field(default_factory=dict)
    former_path: str = ""  # the path when the run started, if it has moved


def open_source(spec: Source | Spec | Sequence[Spec]) -> Source:
    """Return the source that ``spec`` specifies. The format of a file is detected from its content.

    ``spec`` is one of

    - the path of a lhotse cut manifest, of a NeMo, MLPerf or fairseq manifest, of a table, or of a folder of
      recordings. A file may be gzipped. The path of a lhotse supervision manifest may follow the path of its
      recording manifest.
    - a mapping of the path, names of columns and facts: ``{path: FILE, text: COLUMN, normaliser: NAME}``
    - a mapping of named sets: ``{a: FILE, b: {path: FILE, weight: 3}}``
    - a list of these, or one string of paths with commas. The source is the union of these in order.
    - a ``Source``, which is returned unchanged.

    Raises DataError for a path that is missing, empty, repeated or of unknown format.
    """
    if isinstance(spec, Source):
        return spec
    source_paths = list(islice(_paths_in(spec, Facts()), _MOST_MANIFESTS + 1))
    if not source_paths:
        raise DataError("no manifest is given. Set a file, a folder or a list of them")
    if len(source_paths) > _MOST_MANIFESTS:
        raise DataError(f"more than {_MOST_MANIFESTS} manifests are named. Join them to fewer files")
    previous_paths = set[Path]()
    for source_path in source_paths:
        path = absolute_path(source_path.path)
        if not os.path.exists(path):  # Path.exists would raise for a name that is too long.
            raise DataError(
                f"{path} does not exist. Give a manifest or a folder of recordings. If the data of a run has "
                "moved, data.train=NEW_PLACE or data.valid.NAME=NEW_PLACE continues the run"
            )
        if path in previous_paths:
            raise DataError(f"{path} is given twice. Remove one, since each cut would be repeated")
        previous_paths.add(path)
    kinds = deque(_detect_format(source_path) for source_path in source_paths)
    sources: list[Manifest] = []
    remaining = deque(source_paths)
    while remaining:
        source_path, kind = remaining.popleft(), kinds.popleft()
        path, columns = absolute_path(source_path.path), source_path.columns
        file = path
        reader: Callable[..., Manifest]
        if kind == "recordings" and kinds and kinds[0] == "supervisions":
            kinds.popleft()
            file = absolute_path(remaining.popleft().path)
            reader = partial(LhotsePair, path)
        elif kind == Table.kind:
            file = _table_in(path) or path  # The table of a folder is a file in it.
            reader = partial(Table, columns=columns)
        elif kind == Shar.kind:
            reader = partial(Shar, audio=columns.get("audio", ""))
        elif kind in _FORMATS:
            reader = _FORMATS[kind]
        else:
            raise DataError(
                f"{path}: a lhotse supervision manifest needs its recording manifest before it. "
                "Give both in this order, or give a cut manifest"
            )
        former_path = None
        if source_path.former_path:
            former_file = os.path.join(source_path.former_path, os.path.relpath(file, path))
            former_path = absolute_path(former_file)
        sources.append(reader(file, facts=source_path.facts, former_path=former_path))
    _make_names_unique(sources)
    return sources[0] if len(sources) == 1 else Union(sources)


def check_source(key: str, spec: Any, is_valid: bool = False) -> None:
    """Raise ValueError for an invalid specification of a source. ``key`` is its config key, for the message.

    With ``is_valid``, the source is part of ``data.valid`` and cannot have a weight.
    """
    if isinstance(spec, Source):
        return
    try:
        list(_named_paths(spec, Facts(), is_valid))
    except DataError as error:
        raise ValueError(f"{key}: {error}") from None


def _named_paths(spec: Any, facts: Facts, is_valid: bool = False) -> Iterator[_SourcePath]:
    """Yield each path of ``spec`` as it is written: one path, several with commas, or a mapping in YAML.

    Raises DataError for an invalid specification. ``facts`` are the facts of the set to which ``spec``
    belongs.
    """
    if isinstance(spec, str):
        yield _SourcePath(spec, facts)
    elif isinstance(spec, list | tuple):
        for element in spec:
            if isinstance(element, list):
                raise DataError(f"{str(element)[:40]} is a list in a list. Write one list")
            yield from _named_paths(element, facts, is_valid)
    elif not isinstance(spec, Mapping):
        raise DataError(f"{str(spec)[:40]!r} is not a source. Give a path")
    elif not facts.name and spec and spec.keys().isdisjoint(_KEYS):
        # A mapping without any key of a source is a mapping of named sets. Sets cannot be nested.
        for name, set_spec in spec.items():
            try:
                yield from _named_paths(set_spec, replace(facts, name=str(name)), is_valid)
            except DataError as error:
                raise DataError(f"{name}: {error}") from None
    else:
        _check_mapping(spec, is_named_training_set=bool(facts.name) and not is_valid)
        values = {key: value for key, value in spec.items() if value is not None}
        set_facts = {key: values[key] for key in _FACTS if key in values}
        columns = {key: values[key] for key in COLUMNS if key in values}
        yield _SourcePath(spec["path"], replace(facts, **set_facts), columns, values.get("moved_from", ""))


def _check_mapping(spec: Mapping[str, Any], is_named_training_set: bool) -> None:
    """Raise DataError for an invalid mapping with a path."""
    for key in spec:
        if key not in _KEYS:
            advice = nearest(str(key), _KEYS) or f". It has {', '.join(_KEYS)}"
            raise DataError(f"{str(key)[:40]!r} is not a key of a source{advice}")
    for key in ("moved_from", *COLUMNS, "normaliser", "language"):
        if not isinstance(spec.get(key), str | None):
            raise DataError(f"{key} is {str(spec[key])[:40]!r}, not a string")
    if not isinstance(spec.get("path"), str):
        raise DataError("a source needs its path, as in {path: FILE, text: COLUMN}")
    for key, example in (("weight", 3), ("hold_out", "false")):
        if spec.get(key) is not None and not is_named_training_set:
            fix = f"data.train={{a: {{path: FILE, {key}: {example}}}, b: FILE}}"
            raise DataError(f"only training sets with names have the key {key}: {fix}")
    if not isinstance(spec.get("hold_out"), bool | None):
        raise DataError(f"hold_out is {str(spec['hold_out'])[:40]!r}. It must be true or false")
    weight = spec.get("weight")
    is_number = type(weight) in (int, float)  # isinstance would accept a boolean.
    if weight is not None and not (is_number and 0 < weight < math.inf):
        raise DataError(f"weight is {str(weight)[:40]!r}. It must be a number above 0")
    try:
        normaliser(spec.get("normaliser") or "none")
    except ConfigError as error:
        raise DataError(str(error)) from None


def with_former_paths(spec: Any, former: Any) -> Any:
    """Return ``spec``, to which the data of ``former`` has moved, with the former paths as ``moved_from``.

    A path alone keeps the columns and facts of ``former``. The result is None if the two specifications
    differ in more than paths.
    """
    if isinstance(spec, str) and isinstance(former, str) and "," in spec and not os.path.exists(spec):
        spec, former = spec.split(","), former.split(",")
    if isinstance(former, str):
        former = {"path": former}
    if isinstance(spec, str) and isinstance(former, Mapping) and "path" in former:
        spec = {**former, "path": spec}
    if isinstance(spec, list) and isinstance(former, list) and len(spec) == len(former):
        moved = [*map(with_former_paths, spec, former)]
        return None if None in moved else moved
    if not isinstance(spec, Mapping) or not isinstance(former, Mapping) or "_target_" in former:
        return None
    if "path" not in former:
        # The order of named sets is the order of their recordings.
        moved_sets = {name: with_former_paths(spec[name], former.get(name)) for name in spec}
        return None if [*spec] != [*former] or None in moved_sets.values() else moved_sets
    former_path = former.get("moved_from", former["path"])
    moved_source = {**spec, "moved_from": former_path}
    if {**moved_source, "path": ""} != {**former, "path": "", "moved_from": former_path}:
        return None
    if moved_source["path"] == former_path:
        del moved_source["moved_from"]
    return moved_source["path"] if [*moved_source] == ["path"] else moved_source


def _paths_in(spec: Any, facts: Facts) -> Iterator[_SourcePath]:
    """Yield each path of ``spec``. ``facts`` are the facts of the set to which ``spec`` belongs."""
    for named in _named_paths(spec, facts):
        former_paths = _shards(named.former_path)
        for element in _specs_in(named.path):
            if isinstance(element, str):
                yield replace(named, path=element, former_path=next(former_paths, ""))
            else:
                yield from _paths_in(element, named.facts)


def _specs_in(text: str) -> Iterator[Spec]:
    """Yield the sources in a string: one path, several paths with commas, or a mapping in YAML."""
    is_path = os.path.exists(os.path.expanduser(text))
    if text.lstrip().startswith("{") and not is_path:
        mapping = None
        with contextlib.suppress(ValueError, yaml.YAMLError):
            mapping = yaml.safe_load(small_yaml(text))
        if not isinstance(mapping, dict):
            raise DataError(f"{text[:200]} is not a mapping. Write it as {{path: FILE, text: COLUMN}}")
        yield mapping
        return
    if is_path:  # The path of an existing file may contain commas.
        yield from _shards(text)
        return
    for name in text.split(","):
        yield from _shards(name.strip())


def _shards(name: str) -> Iterator[str]:
    """Yield the files of NeMo's pattern, such as ``train_OP_0..7_CL_.json``.

    A name without a pattern is yielded unchanged, unless it is blank.
    """
    pattern = _SHARD_PATTERN.search(name)
    if pattern is None:
        if name.strip():
            yield name
        return
    start, end = pattern.groups()
    prefix, suffix = name[: pattern.start()], name[pattern.end() :]
    for number in range(int(start), int(end) + 1):
        yield f"{prefix}{number:0{len(start)}}{suffix}"


def _table_in(folder: Path) -> Path | None:
    """Return the table of a folder, or None. Raises DataError if it is a link to a file outside."""
    for name in _TABLES:
        file = folder / name
        if file.is_file():
            Folder(folder).refuse_outside(file)
            return file
    return None


def _detect_format(source_path: _SourcePath) -> str:
    """Return the ``kind`` of the reader for a manifest or folder. Raises DataError for an unknown format.

    The format of a file is detected from its first line that is not blank, and of fairseq's TSV also from the
    second line.
    """
    path, columns = absolute_path(source_path.path), source_path.columns
    if path.is_dir():
        return _format_of_folder(path, columns)
    if not path.is_file():
        raise DataError(f"{path} is neither a file nor a folder")
    line_number, line = first_line(path)
    stand_in = stand_in_of(line)
    if stand_in:
        raise NotManifest(f"{path}: {stand_in}")
    if columns:
        return Table.kind
    start = b"".join(_first_two_lines(path)).decode("utf-8-sig", "replace")
    annotation = ANNOTATIONS.get(path.suffix.lower()) or other_format_of(start)
    if annotation:
        raise DataError(f"{path}: annotations ({annotation}) are not read: {AS_TABLE}")
    if line.startswith((b"[", b"{", b"-")):  # JSON or YAML
        _, record = next(records(path), (0, None))
        if record is None:
            raise DataError(f"{path}:{line_number}: the array is empty. Add an object for each recording")
        kind = _format_of_record(record)
        if not kind:
            keys = "A lhotse cut has 'type', a NeMo line 'audio_filepath', MLPerf's 'transcript' and 'files'"
            fix = f"{keys}. {{path: FILE, audio: KEY}} names it"
            raise DataError(f"{path}:{line_number}: the format is unknown. {fix}")
        return kind
    column_names = Table(path).form.columns
    if len(column_names) > 1 and candidate_columns(column_names, "audio"):
        return Table.kind
    if looks_like_fairseq(_first_two_lines(path), path.parent):
        return Fairseq.kind
    if column_names:
        return Table.kind
    raise NotManifest(
        f"{path}:{line_number}: not a manifest. Use lhotse cuts, NeMo JSON lines, MLPerf JSON, "
        "fairseq TSV, or a CSV or TSV with a header. Of recordings, give the folder"
    )


def _format_of_folder(path: Path, columns: Mapping[str, str]) -> str:
    """Return the ``kind`` of the reader for a folder. ``columns`` are the columns that its user names."""
    if _table_in(path):
        return Table.kind
    table_folders = [str(folder) for folder in sorted(path.glob("*/")) if _table_in(folder)]
    if table_folders:
        raise DataError(f"{path} has a {_TABLES[0]} in several folders. Give {', '.join(table_folders)}")
    kind = Folder.kind
    if looks_like_shar(path):
        kind = Shar.kind
    elif (path / LIST).is_file():
        kind = Kaldi.kind
    elif columns == {"text": ""}:
        return AudioFolder.kind
    allowed_columns = {"audio"} if kind == Shar.kind else set()
    if columns.keys() - allowed_columns:
        raise DataError(f"{path} has no table, so it has no column {next(iter(columns.values()))!r}")
    return kind


def _first_two_lines(path: Path) -> list[bytes]:
    """Return the first two lines of a file, at most 64 KiB of each."""
    with open_bytes(path) as file:
        return [file.readline(1 << 16) for _ in range(2)]


def _format_of_record(record: Record) -> str:
    """Return the kind of the manifest whose first object is ``record``, or "" if it is unknown."""
    if "files" in record and ("transcript" in record or "original_duration" in record):
        return Mlperf.kind
    # NeMo has no other time than ``offset``, and reads each line without it as a whole recording.
    has_other_times = "offset" not in record and not record.keys().isdisjoint(COLUMNS["start"])
    if any(key in record for key in Nemo.AUDIO) and not has_other_times:
        return Nemo.kind
    if str(record.get("type", "")).endswith("Cut"):
        return LhotseCuts.kind
    if "sources" in record and "sampling_rate" in record:
        return LhotseRecordings.kind
    has_features = "storage_path" in record  # A manifest of lhotse's features has the other keys, too.
    if "recording_id" in record and "start" in record and not has_features:
        return "supervisions"
    return Table.kind if candidate_columns(record, "audio") else ""


def _make_names_unique(sources: Sequence[Manifest]) -> None:
    """Prepend folders to the names of manifests with equal names, because ids of cuts contain the names."""
    for depth in range(2, 64):  # the number of the path's components in a name
        counts = Counter(source.name for source in sources)
        sources_with_equal_names = [source for source in sources if counts[source.name] > 1]
        if not sources_with_equal_names:
            return
        for source in sources_with_equal_names:
            source.name = "/".join(source.former_path.with_suffix("").parts[-depth:])

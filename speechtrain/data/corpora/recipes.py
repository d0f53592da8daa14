"""Cuts of public corpora: by lhotse's recipes, and by readers of our own."""

from __future__ import annotations

import inspect
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speechtrain.data.formats.lhotse_cuts import UnknownPart, known_cut
from speechtrain.data.formats.manifests import Record, simple_cut
from speechtrain.data.formats.tables import Table
from speechtrain.data.prepare.cut_files import measured, parallel
from speechtrain.data.recordings import Unusable, read_header
from speechtrain.errors import DISK, MALFORMED, ConfigError, DataError, nearest, one_line
from speechtrain.files import json_of, read_bytes


@dataclass
class Set:
    """One part of a corpus: who reads it, with which arguments, and the place by which it is known.

    ``recipe`` is lhotse's ``prepare_RECIPE``, or one of OWN. In arguments and place, ``{root}``,
    ``{folder}``, ``{part}`` and ``{language}`` are replaced.
    """

    recipe: str
    arguments: dict[str, Any] = field(default_factory=dict)
    place: str = ""


def cuts_by_part(wanted: Mapping[str, Set], names: Mapping[str, str], jobs: int) -> Iterator[tuple[str, Any]]:
    """Yield (part, its cuts in lhotse's JSON format) of ``wanted``; names are those of ``Set``.

    A recipe without ``{part}`` in its arguments runs once for all its parts. A corpus without parts
    has ``{"": Set}``: its parts are those that the recipe returns. Raises DataError for a folder that is not
    as the recipe expects it, ConfigError for an argument that it does not take.
    """
    remaining = dict(wanted)
    while remaining:
        part, one = next(iter(remaining.items()))
        is_each = "{part}" in str(one.arguments)
        together = [part] if is_each else [name for name, other in remaining.items() if other == one]
        for name in together:
            del remaining[name]
        known = {**names, "part": part}
        arguments = {key: filled(value, known) for key, value in one.arguments.items()}
        found = dict(_read(one.recipe, arguments, known, jobs))
        if len(found) == len(together) == 1 and part:  # a recipe names its only part as it likes
            found = {part: next(iter(found.values()))}
        yield from ((name, cuts) for name, cuts in found.items() if not part or name in together)


def filled(value: Any, names: Mapping[str, str]) -> Any:
    """A text with ``{name}`` replaced; other values as they are."""
    if isinstance(value, list):
        return [filled(one, names) for one in value]
    if not isinstance(value, str):
        return value
    return re.sub(r"\{(\w+)\}", lambda found: names.get(found[1], found[0]), value)


def _read(recipe: str, arguments: dict[str, Any], names: Mapping[str, str], jobs: int) -> Iterator[Any]:
    """Yield (name, cuts) of what a recipe returns, its arguments checked against its signature."""
    if recipe not in OWN and recipe not in (known := recipe_names()):
        raise ConfigError(f"recipe: lhotse has no {recipe!r}{nearest(recipe, [*known, *OWN])}")
    function = OWN.get(recipe) or getattr(_recipes(), f"prepare_{recipe}")
    taken = dict(inspect.signature(function).parameters)
    output = taken.pop("output_dir", None)
    for key in arguments:
        if key not in taken:
            takes = nearest(key, taken) or f"; it takes {', '.join(taken)}"
            raise ConfigError(f"arguments.{key}: the recipe {recipe} takes no {key!r}{takes}")
    arguments |= {key: jobs for key in ("num_jobs", "jobs") if key in taken}
    arguments = {next(iter(taken)): names["folder"], **arguments}  # the first is a folder
    if lost := [key for key, one in taken.items() if key not in arguments and one.default is one.empty]:
        raise ConfigError(f"arguments: the recipe {recipe} needs {lost[0]!r}; set arguments.{lost[0]}")
    if recipe in OWN:
        paths = {key: Path(str(value)) for key, value in arguments.items() if key != "jobs"}
        if lost := [str(path) for path in paths.values() if not path.exists()]:
            raise DataError(f"{lost[0]} does not exist; set root=DIR")
        yield "", function(jobs=jobs, **paths)
        return
    with tempfile.TemporaryDirectory() as scratch:
        if output and output.default is output.empty:  # else left out: it would take what a killed run left
            arguments["output_dir"] = scratch
        _read_headers_by_libsndfile()
        try:
            found = function(**arguments)
        except DataError:
            raise
        except Exception as error:  # lhotse asserts, and raises what its parsing meets
            if isinstance(error, OSError) and error.errno in DISK:
                raise
            line = traceback.extract_tb(error.__traceback__)[-1].line  # most assertions have no message
            what = one_line(f"{type(error).__name__}: {str(error) or line}", 300)
            raise DataError(
                f"{names['folder']} is not as lhotse's recipe {recipe} expects it ({what}); "
                "compare its folders with the corpus's page"
            ) from error
    for name, leaf in _leaves(found):
        yield name, _trimmed(leaf)


def recipe_names() -> list[str]:
    """lhotse's recipes."""
    return [name.removeprefix("prepare_") for name in vars(_recipes()) if name.startswith("prepare_")]


def _recipes() -> Any:
    before = os.environ.get("TQDM_DISABLE")
    if before is None and not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is imported
    import lhotse.recipes

    if before is None:
        os.environ.pop("TQDM_DISABLE", None)
    return lhotse.recipes


def _read_headers_by_libsndfile() -> None:
    """Set lhotse's audio backend to ``read_header``. lhotse's own choice needs sph2pipe for SPHERE files."""
    from lhotse.audio import set_current_audio_backend
    from lhotse.audio.backend import LibsndfileBackend, LibsndfileCompatibleAudioInfo

    class HeaderReader(LibsndfileBackend):  # type: ignore[misc]
        def info(self, path_or_fd: Any, force_opus_sampling_rate: int | None = None) -> Any:
            if not isinstance(path_or_fd, str | Path):
                return super().info(path_or_fd, force_opus_sampling_rate)
            try:
                header = read_header(str(path_or_fd))
            except Unusable as problem:
                # DataError, because a process pool cannot unpickle Unusable.
                raise DataError(f"{problem.detail} ({problem.reason}); repair or remove it") from None
            values = (header.channels, header.frames, header.samplerate, header.duration)
            return LibsndfileCompatibleAudioInfo(*values)

    set_current_audio_backend(HeaderReader())


def _leaves(found: Any, name: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The mappings with recordings in what a recipe returns, by the keys that lead to them."""
    if isinstance(found, Mapping) and "recordings" in found:
        yield name or "all", found
    elif isinstance(found, Mapping):
        for key, inner in found.items():
            yield from _leaves(inner, re.sub(r"[^\w.-]", "_", f"{name}-{key}" if name else str(key)))


def _trimmed(leaf: Mapping[str, Any]) -> Iterator[Record]:
    """One cut for each supervision, or for each recording where there are no supervisions."""
    known = {recording.id: recording for recording in leaf["recordings"]}
    if leaf.get("supervisions") is None:
        yield from (recording.to_cut().to_dict() for recording in known.values())
        return
    for said in leaf["supervisions"]:
        told = {k: v for k, v in said.to_dict().items() if k not in ("alignment", "custom")}
        cut = {"id": said.id, "start": said.start, "duration": said.duration, "channel": said.channel}
        cut |= {"supervisions": [{**told, "start": 0.0}], "recording": known[said.recording_id].to_dict()}
        cut["type"] = "MultiCut" if isinstance(said.channel, list) else "MonoCut"
        try:
            known_cut(cut)
        except UnknownPart as error:
            raise DataError(f"{said.id}: {error}; convert the recordings to files first") from None
        yield cut


def _table(path: Path, jobs: int) -> Iterator[Record]:
    """The rows of Common Voice's TSV; lhotse's recipe needs a column that release 9 lacks."""
    for _, cut in parallel(measured, (entry.cut for entry in Table(path).entries()), jobs):
        yield cut  # type: ignore[misc]


def _stm(audio: Path, references: Path, jobs: int) -> Iterator[Record]:
    """The segments of NIST's STM files ``references``/*.stm of two-sided recordings below ``audio``."""
    found = {path.stem.lower(): path for path in sorted(audio.rglob("*")) if path.suffix.lower() == ".sph"}
    for file in sorted(references.glob("*.stm")):
        for number, line in enumerate(read_bytes(file).decode("utf-8", "replace").splitlines(), 1):
            if not line.strip() or line.startswith(";;") or _UNSPOKEN.search(line):
                continue
            try:
                name, side, speaker, start, end, *words = line.split()
                begin, stop, side = float(start), float(end), {"1": "A", "2": "B"}.get(side, side.upper())
                path, channel = found[name.lower()], "AB".index(side)
            except (ValueError, KeyError) as error:
                raise DataError(
                    f"{file}:{number}: no segment of a recording below {audio} ({error})"
                ) from None
            words = words[1:] if words and words[0].startswith("<") else words
            name = f"{name}-{side}-{round(begin * 100):06d}-{round(stop * 100):06d}"
            yield from _segments(path, [(name, begin, stop)], channel, text=" ".join(words), speaker=speaker)


_UNSPOKEN = re.compile("inter_segment_gap|ignore_time_segment_in_scoring", re.IGNORECASE)


def _voice_activity(path: Path, jobs: int) -> Iterator[Record]:
    """The stretches of speech of Libri-Light's part ``path``; lhotse's recipe holds those of all parts."""

    def read(audio: Path) -> list[Record]:
        told = audio.with_suffix(".json")
        try:
            found = json_of(read_bytes(told).decode())
            spans = [(float(begin), float(end)) for begin, end in found["voice_activity"]]
            name = str(audio.relative_to(path.parent).with_suffix(""))
            named = [(f"{name}_{number}", *span) for number, span in enumerate(spans)]
            return list(_segments(audio, named, 0, text="", speaker=found["speaker"]))
        except (OSError, KeyError, TypeError, *MALFORMED) as error:
            raise DataError(f"{told}: no 'speaker' and 'voice_activity' of a recording ({error})") from None

    for _, cuts in parallel(read, sorted(path.rglob("*.flac")), jobs):
        yield from cuts  # type: ignore[misc]


def _segments(
    path: Path, spans: Iterable[tuple[str, float, float]], channel: int, **said: Any
) -> Iterator[Record]:
    """A cut of one channel for each (id, start, end) of a recording, whose header bounds them."""
    try:
        header = read_header(str(path))
    except Unusable as problem:
        raise DataError(f"{problem.detail} ({problem.reason}); repair or remove it") from None
    channels, channel = list(range(header.channels)), min(channel, header.channels - 1)
    for name, begin, end in spans:
        if (seconds := min(end, header.duration) - begin) > 0:
            cut = simple_cut(name, str(path), begin, seconds, rate=header.samplerate, **said)
            recording = cut["recording"]
            recording |= {"num_samples": header.frames, "duration": header.duration, "channel_ids": channels}
            recording["sources"][0]["channels"] = channels
            cut["channel"] = cut["supervisions"][0]["channel"] = channel
            yield cut


OWN: Mapping[str, Any] = {"table": _table, "stm": _stm, "voice_activity": _voice_activity}
"""Readers of corpora that lhotse has no recipe for, or none that reads each release, each part."""

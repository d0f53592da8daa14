"""Cuts of public corpora, from lhotse's recipes or from the recipes in this module."""

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

from speechtrain.data.formats.folder import AUDIO_SUFFIXES
from speechtrain.data.formats.lhotse_cuts import UnknownField, known_cut
from speechtrain.data.formats.manifests import Record, cut_of_supervision, simple_cut
from speechtrain.data.formats.tables import Table
from speechtrain.data.lhotse_import import import_lhotse
from speechtrain.data.prepare.cut_files import map_in_threads, set_header, with_measured_length
from speechtrain.data.recordings import Unusable, read_header
from speechtrain.errors import DISK, MALFORMED, ConfigError, DataError, nearest, one_line
from speechtrain.files import parse_json, read_bytes


@dataclass
class Set:
    """An entry of ``sets`` in a corpus's YAML file: the recipe that reads one part of the corpus.

    ``recipe`` is the RECIPE in the name of lhotse's function ``prepare_RECIPE``, or a key of OWN. The part is
    on disk if the path ``place`` exists. ``{root}``, ``{folder}``, ``{part}`` and ``{language}`` in
    ``arguments`` and ``place`` are replaced by their values.
    """

    recipe: str
    arguments: dict[str, Any] = field(default_factory=dict)
    place: str = ""


@dataclass(frozen=True)
class Span:
    """A part of a recording, which becomes a cut with this id. Times are in seconds."""

    id: str
    start: float
    end: float


def cuts_by_part(sets: Mapping[str, Set], names: Mapping[str, str], jobs: int) -> Iterator[tuple[str, Any]]:
    """Yield the name of each part and an iterator of its cuts in lhotse's JSON format.

    ``sets`` has the Set of each part by name. ``names`` has the values of ``{root}``, ``{folder}`` and
    ``{language}``. A recipe with ``{part}`` in its arguments runs once for each part. Any other recipe runs
    once for all parts with the same Set. If ``sets`` is ``{"": Set}``, every part that the recipe returns is
    yielded. Raises DataError for a folder that is not as the recipe expects it, ConfigError for an argument
    that the recipe does not take.
    """
    results: dict[str, dict[str, Any]] = {}  # what each recipe has read, by the recipe and its arguments
    for part, part_set in sets.items():
        part_names = {**names, "part": part}
        arguments = {key: fill_names(argument, part_names) for key, argument in part_set.arguments.items()}
        key = f"{part_set.recipe} {arguments}"
        if key not in results:
            results[key] = dict(_read(part_set.recipe, arguments, names["folder"], jobs))
        cuts_by_name = results[key]
        if not part:
            yield from cuts_by_name.items()
        elif part in cuts_by_name:
            yield part, cuts_by_name[part]
        elif len(cuts_by_name) == 1 and (
            "{part}" in str(part_set.arguments) or list(sets.values()).count(part_set) == 1
        ):
            (cuts,) = cuts_by_name.values()  # A recipe may give its only part another name.
            yield part, cuts


def fill_names(value: Any, names: Mapping[str, str]) -> Any:
    """Return a text, or a list of texts, with ``{name}`` replaced. Other values do not change."""
    if isinstance(value, list):
        return [fill_names(element, names) for element in value]
    if not isinstance(value, str):
        return value
    return re.sub(r"\{(\w+)\}", lambda match: names.get(match[1], match[0]), value)


def _read(recipe: str, arguments: dict[str, Any], folder: str, jobs: int) -> Iterator[tuple[str, Any]]:
    """Yield the name and the cuts of each part that a recipe of lhotse or of this module (``OWN``) reads.

    A recipe of this module has one part, named "". Raises ConfigError for an unknown recipe.
    """
    if recipe in OWN:
        function = OWN[recipe]
    elif recipe in recipe_names():
        function = getattr(import_recipes(), f"prepare_{recipe}")
    else:
        advice = nearest(recipe, [*recipe_names(), *OWN])
        raise ConfigError(f"recipe: lhotse has no {recipe!r}{advice}")
    arguments = _complete_arguments(recipe, function, arguments, folder, jobs)
    if recipe in OWN:
        paths = {key: Path(str(path)) for key, path in arguments.items() if key != "jobs"}
        for path in paths.values():
            if not path.exists():
                raise DataError(f"{path} does not exist. Set root=DIR")
        yield "", function(jobs=jobs, **paths)
        return
    for name, manifests in _parts(_run(recipe, function, arguments, folder)):
        yield name, _cuts(manifests)


def _complete_arguments(
    recipe: str, function: Any, arguments: Mapping[str, Any], folder: str, jobs: int
) -> dict[str, Any]:
    """Return the arguments of a recipe with the folder and the number of jobs.

    Raises ConfigError for an argument that the recipe does not take, and for a missing argument.
    """
    parameters = dict(inspect.signature(function).parameters)
    parameters.pop("output_dir", None)
    for key in arguments:
        if key not in parameters:
            hint = nearest(key, parameters) or f"; it takes {', '.join(parameters)}"
            raise ConfigError(f"arguments.{key}: the recipe {recipe} takes no {key!r}{hint}")
    folder_key = next(iter(parameters))  # the first parameter of each recipe
    complete = {folder_key: folder, **arguments}
    for key, parameter in parameters.items():
        if key in ("num_jobs", "jobs"):
            complete[key] = jobs
        elif key not in complete and parameter.default is parameter.empty:
            raise ConfigError(f"arguments: the recipe {recipe} needs {key!r}. Set arguments.{key}")
    return complete


def _run(recipe: str, function: Any, arguments: dict[str, Any], folder: str) -> Any:
    """Run a recipe of lhotse. Raises DataError if the folder is not as the recipe expects it."""
    output = inspect.signature(function).parameters.get("output_dir")
    with tempfile.TemporaryDirectory() as scratch:
        # A recipe with an output_dir may reuse files of an interrupted run. So only a required one is set.
        if output and output.default is output.empty:
            arguments["output_dir"] = scratch
        _set_audio_backend()
        try:
            return function(**arguments)
        except DataError:
            raise
        except Exception as error:  # lhotse has assertions, and its parsers raise many types of errors
            if isinstance(error, OSError) and error.errno in DISK:
                raise
            line = traceback.extract_tb(error.__traceback__)[-1].line  # most assertions have no message
            problem = one_line(f"{type(error).__name__}: {str(error) or line}", 300)
            raise DataError(
                f"{folder} is not as lhotse's recipe {recipe} expects it ({problem}). "
                "Compare its folders with the corpus's page"
            ) from error


def recipe_names() -> list[str]:
    """Return the names of lhotse's recipes."""
    functions = vars(import_recipes())
    return [name.removeprefix("prepare_") for name in functions if name.startswith("prepare_")]


def import_recipes() -> Any:
    """Import the module of lhotse's recipes. Their progress bars are disabled if stderr is not a terminal."""
    is_set = "TQDM_DISABLE" in os.environ
    if not is_set and not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"  # tqdm reads it when it is imported
    import_lhotse()
    import lhotse.recipes

    if not is_set:
        os.environ.pop("TQDM_DISABLE", None)
    return lhotse.recipes


def _set_audio_backend() -> None:
    """Make lhotse read the headers of files by ``read_header``.

    The backend that lhotse chooses by itself needs sph2pipe for SPHERE files.
    """
    import_lhotse()
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
                raise DataError(f"{problem.detail} ({problem.reason}). Repair or remove it") from None
            values = (header.channels, header.frames, header.samplerate, header.duration)
            return LibsndfileCompatibleAudioInfo(*values)

    set_current_audio_backend(HeaderReader())


def _parts(manifests: Any, name: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the name and the manifests of each part in the nested mappings that a recipe returns.

    The manifests of a part are a mapping with the key ``recordings``. The name of a part joins the
    keys that lead to this mapping, such as ``train-clean``.
    """
    if not isinstance(manifests, Mapping):
        return
    if "recordings" in manifests:
        yield name or "all", manifests
        return
    for key, inner in manifests.items():
        inner_name = f"{name}-{key}" if name else str(key)
        yield from _parts(inner, re.sub(r"[^\w.-]", "_", inner_name))


def _cuts(manifests: Mapping[str, Any]) -> Iterator[Record]:
    """Yield one cut for each supervision, or for each recording if there are none."""
    recordings = {recording.id: recording for recording in manifests["recordings"]}
    if manifests.get("supervisions") is None:
        for recording in recordings.values():
            yield recording.to_cut().to_dict()
        return
    for supervision in manifests["supervisions"]:
        fields = supervision.to_dict()
        for key in ("alignment", "custom"):
            fields.pop(key, None)
        cut = cut_of_supervision(fields, recordings[supervision.recording_id].to_dict())
        try:
            known_cut(cut)
        except UnknownField as error:
            raise DataError(f"{supervision.id}: {error}. Convert the recordings to files first") from None
        yield cut


def _table(path: Path, jobs: int) -> Iterator[Record]:
    """Yield the rows of Common Voice's TSV. lhotse's recipe needs a column that release 9 lacks."""
    measured_cuts = map_in_threads(with_measured_length, Table(path).cuts(), jobs)
    for _, cut in measured_cuts:
        yield cut  # type: ignore[misc]


_UNSPOKEN = re.compile("inter_segment_gap|ignore_time_segment_in_scoring", re.IGNORECASE)


def _stm(audio: Path, references: Path, jobs: int) -> Iterator[Record]:
    """Yield the segments in NIST's STM files ``references``/*.stm. The recordings have two sides."""
    paths = {}
    for path in sorted(audio.rglob("*")):
        if path.suffix.lower() in AUDIO_SUFFIXES:
            paths[path.stem.lower()] = path
    for file in sorted(references.glob("*.stm")):
        lines = read_bytes(file).decode("utf-8", "replace").splitlines()
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.startswith(";;") or _UNSPOKEN.search(line):
                continue
            try:
                # RECORDING SIDE SPEAKER START END [<LABEL>] WORDS
                name, side, speaker, start, end, *words = line.split()
                side = {"1": "A", "2": "B"}.get(side, side.upper())
                # The id has the times in hundredths of a second.
                times = float(start), float(end)
                id_start, id_end = (round(seconds * 100) for seconds in times)
                span = Span(f"{name}-{side}-{id_start:06d}-{id_end:06d}", *times)
                text = " ".join(words[1:] if words and words[0].startswith("<") else words)
                recording, channel = paths[name.lower()], "AB".index(side)
            except (ValueError, KeyError) as error:
                problem = f"not a segment of a recording below {audio} ({error})"
                raise DataError(f"{file}:{number}: {problem}") from None
            yield from _segments(recording, [span], channel, text=text, speaker=speaker)


def _voice_activity(path: Path, jobs: int) -> Iterator[Record]:
    """Yield the segments of speech in Libri-Light's part ``path``. lhotse's recipe always reads all parts."""

    def read(audio: Path) -> list[Record]:
        labels_path = audio.with_suffix(".json")
        try:
            labels = parse_json(read_bytes(labels_path).decode())
            name = str(audio.relative_to(path.parent).with_suffix(""))
            spans = []
            for number, (start, end) in enumerate(labels["voice_activity"]):
                spans.append(Span(f"{name}_{number}", float(start), float(end)))
            return list(_segments(audio, spans, 0, text="", speaker=labels["speaker"]))
        except (OSError, KeyError, TypeError, *MALFORMED) as error:
            problem = f"no 'speaker' and 'voice_activity' of a recording ({error})"
            raise DataError(f"{labels_path}: {problem}") from None

    audio_paths = sorted(path.rglob("*.flac"))
    for _, cuts in map_in_threads(read, audio_paths, jobs):
        yield from cuts  # type: ignore[misc]


def _segments(
    path: Path, spans: Iterable[Span], channel: int, text: str, speaker: object
) -> Iterator[Record]:
    """Yield a cut of one channel for each span of a recording. A span beyond its end is shortened."""
    try:
        header = read_header(str(path))
    except Unusable as problem:
        raise DataError(f"{problem.detail} ({problem.reason}). Repair or remove it") from None
    cut_channel = min(channel, header.channels - 1)  # A mono file has all sides in one channel.
    for span in spans:
        seconds = min(span.end, header.duration) - span.start
        if seconds <= 0:
            continue
        cut = simple_cut(span.id, str(path), span.start, seconds, text, speaker=speaker)
        set_header(cut, header)
        cut["channel"] = cut["supervisions"][0]["channel"] = cut_channel
        yield cut


OWN: Mapping[str, Any] = {"table": _table, "stm": _stm, "voice_activity": _voice_activity}
"""Recipes for corpora and releases that lhotse's recipes do not read, or not part by part."""

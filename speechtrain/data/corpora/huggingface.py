"""Conversion of a Hugging Face data set to FLAC files and a manifest.

Training cannot read such a data set itself, because it must know the order of the recordings in advance.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import soundfile

from speechtrain.data.formats.lhotse_cuts import MOST_SAMPLES
from speechtrain.data.formats.manifests import Record, simple_cut
from speechtrain.data.formats.tables import candidate_columns
from speechtrain.data.prepare.cut_files import FIX, map_in_threads, write_cuts
from speechtrain.data.recordings import (
    RATES,
    Unusable,
    header_or_none,
    open_recording,
    or_unusable,
    read_header,
)
from speechtrain.errors import ConfigError, DataError, MachineError, one_line
from speechtrain.files import absolute_path, atomic, writing

_PACKAGE = "corpus=huggingface needs the package datasets, 4 or newer: pip install -e '.[huggingface]'"
# JSON is not among the formats, because pyarrow crashes if it is nested deeply.
_FORMATS = {".parquet": "parquet", ".arrow": "arrow"}


@dataclass(frozen=True)
class Split:
    """The rows of one split, and the names of their columns. The recordings are bytes or paths."""

    name: str
    rows: Any  # a datasets.Dataset
    labels: Any  # the same rows without recordings, so that reading a label reads no audio
    audio: str
    text: str
    speaker: str | None
    folder: Path  # the folder of the FLAC files

    def cut_id(self, row: int) -> str:
        return f"{self.name}-{row:08d}"

    def cut(self, row: int) -> Record:
        """Return the cut of a row. Its FLAC file is written if it is missing. Raises Unusable."""
        path = self.folder / f"{row // 1000:04d}" / f"{self.cut_id(row)}.flac"
        recording = header_or_none(str(path))
        if recording is None:
            with writing(path, FIX):
                _write(path, self.rows[row][self.audio], f"row {row}")
            recording = read_header(str(path))
        labels = self.labels[row]
        text, speaker = str(labels[self.text] or ""), labels.get(self.speaker)
        rate = recording.samplerate
        return simple_cut(path.stem, str(path), 0.0, recording.duration, text, rate=rate, speaker=speaker)


@dataclass
class HuggingFace:
    """One split of a data set of the Hub, or of a local folder or file: ``out``/SPLIT.jsonl.gz and its audio.

    ``text`` and ``audio`` name columns. If one is empty, its column is detected by type or by name.
    """

    corpus: str  # always huggingface
    name: str  # data set of the Hub, or a local folder or file
    out: str  # folder of the manifest and the recordings
    split: str = "train"  # split of the data set
    config: str = ""  # configuration of the data set. Empty: its default
    text: str = ""  # column of the transcripts. Empty: chosen by type or name
    audio: str = ""  # column of the recordings. Empty: chosen by type or name
    jobs: int = 2  # processes that read

    def write(self) -> int:
        """Write the manifest and the missing recordings. Returns 3 if a recording is bad, otherwise 0.

        Raises MachineError without the package, DataError if the split or a column does not exist.
        """
        if self.jobs < 1:
            raise ConfigError(f"jobs={self.jobs}: it must be at least 1")
        rows = self._load()
        audio = self._column(rows.features, "audio", self.audio)
        text = self._column(rows.features, "text", self.text)
        speaker = next(iter(candidate_columns(rows.features, "speaker")), None)
        try:
            import datasets

            # The recordings become bytes or paths.
            rows = rows.cast_column(audio, datasets.Audio(decode=False))
        except Exception as error:  # pyarrow raises many types of errors
            problem = one_line(str(error), 400)
            raise DataError(f"{self.name}: {audio!r} has no recordings ({problem})") from error
        label_columns = [text, speaker] if speaker else [text]
        name, out = re.sub(r"[^\w.-]", "_", self.split), absolute_path(self.out)
        folder = out / "audio" / name
        split = Split(name, rows, rows.select_columns(label_columns), audio, text, speaker, folder)
        manifest = out / f"{name}.jsonl.gz"
        cuts = map_in_threads(split.cut, range(len(rows)), self.jobs)
        bad = write_cuts(manifest, (({"id": split.cut_id(row)}, cut) for row, cut in cuts))
        print(f"train with: speechtrain train recipe=scratch data.train={manifest}")
        return DataError.exit_code if bad else 0

    def _load(self) -> Any:
        """Return the split. Raises MachineError without the package, DataError if it cannot be loaded."""
        try:
            import datasets
        except ImportError:
            raise MachineError(_PACKAGE) from None
        if int(datasets.__version__.split(".")[0]) < 4:  # older versions run a program of the data set
            raise MachineError(f"{_PACKAGE}. This is {datasets.__version__}")
        path = absolute_path(self.name)
        try:
            if path.is_file():
                _check_table(path)
                files = {self.split: str(path)}
                return datasets.load_dataset(_FORMATS[path.suffix], data_files=files, split=self.split)
            name = self.name
            if path.is_dir():
                name = str(path)
                builder = datasets.load_dataset_builder(name, self.config or None)
                _check_files(builder.config.data_files or {}, path)
            return datasets.load_dataset(name, self.config or None, split=self.split)
        except Exception as error:  # datasets raises many types for a wrong name, or without an answer
            problem = one_line(f"{type(error).__name__}: {error}", 400)
            raise DataError(f"name={self.name} split={self.split}: {problem}") from error

    def _column(self, features: Mapping[str, Any], key: str, explicit: str) -> str:
        """Return the column of a key of COLUMNS. Raises DataError with all columns if it is not clear.

        The column of audio is detected by its type, and otherwise by name as the others.
        """
        import datasets

        candidates = [column for column, kind in features.items() if isinstance(kind, datasets.Audio)]
        if explicit or key != "audio" or not candidates:
            candidates = candidate_columns(features, key, explicit)
        if len(candidates) != 1:
            problem = f"{len(candidates)} columns that may be its {key}"
            if explicit:
                problem = f"no column {explicit!r}"
            raise DataError(f"{self.name} has {problem}: {', '.join(features)}. Choose with {key}=COLUMN")
        return candidates[0]


def _check_files(names_by_split: Mapping[str, list[str]], folder: Path) -> None:
    """Raise DataError for a table outside of a local data set, because others may see its texts."""
    for names in names_by_split.values():
        for name in names:
            _check_table(Path(name))
            if folder.resolve() not in Path(name).resolve().parents:
                raise DataError(f"{name} lies outside of {folder}")


def _check_table(path: Path) -> None:
    """Raise DataError for a local file in a format that ``datasets`` does not write."""
    if path.suffix not in _FORMATS:
        raise DataError(f"{path} is not Parquet or Arrow. For another table, train with data.train={path}")


def _write(path: Path, cell: Any, where: str) -> None:
    """Write one recording as mono FLAC without resampling. Raises Unusable, OSError."""
    if not isinstance(cell, dict) or not (cell.get("bytes") or cell.get("path")):
        raise Unusable("missing", f"{where} has no audio")
    with or_unusable(where):
        if cell.get("bytes"):
            with soundfile.SoundFile(io.BytesIO(cell["bytes"])) as file:
                samples, rate = _samples(file, where)
        else:
            with open_recording(str(cell["path"])) as file:
                samples, rate = _samples(file, where)
        buffer = io.BytesIO()  # libsndfile does not report a full disk
        soundfile.write(buffer, samples, rate, format="FLAC", subtype="PCM_16")
    with atomic(path, durable=False) as temporary:
        temporary.write_bytes(buffer.getvalue())


def _samples(file: soundfile.SoundFile, where: str) -> tuple[Any, int]:
    """Return the mean of the channels, and the rate. Raises Unusable for a size or rate out of bounds."""
    if not RATES[0] <= file.samplerate <= RATES[1] or not 0 < file.frames * file.channels <= MOST_SAMPLES:
        raise Unusable(
            "unreadable", f"{where}: {file.frames} frames of {file.channels} channels, {file.samplerate} Hz"
        )
    return file.read(dtype="float32", always_2d=True).mean(axis=1), file.samplerate

"""A data set of Hugging Face as FLAC files and a manifest: training must know the order in advance."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import soundfile

from speechtrain.data.formats.lhotse_cuts import MOST_SAMPLES
from speechtrain.data.formats.manifests import Record, simple_cut
from speechtrain.data.formats.tables import COLUMNS
from speechtrain.data.prepare.cut_files import FIX, parallel, write_cuts
from speechtrain.data.recordings import RATES, Unusable, header, open_recording, or_unusable
from speechtrain.errors import ConfigError, DataError, MachineError, one_line
from speechtrain.files import atomic, whole_path, writing

_PACKAGE = "corpus=huggingface needs the package datasets, 4 or newer: pip install -e '.[huggingface]'"
_FORMATS = {".parquet": "parquet", ".arrow": "arrow"}  # pyarrow crashes on JSON that is nested deeply


@dataclass
class HuggingFace:
    """One split of a data set of the Hub, or of a local folder or file: ``out``/SPLIT.jsonl.gz and its audio.

    ``text`` and ``audio`` name columns; null finds them by type, or by the names of tables.
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
        """Write what is missing; returns 3 if a recording is bad. Raises MachineError without the package."""
        if self.jobs < 1:
            raise ConfigError(f"jobs={self.jobs}: it must be at least 1")
        rows = self._load()
        audio = self._column(rows.features, "audio", self.audio)
        text = self._column(rows.features, "text", self.text)
        speaker = next((c for c in rows.features if c.lower() in COLUMNS["speaker"]), None)
        rows = self._undecoded(rows, audio)
        told = rows.select_columns([text, *([speaker] if speaker else [])])
        name, out = re.sub(r"[^\w.-]", "_", self.split), whole_path(self.out)

        def made(row: int) -> Record:
            path = out / "audio" / name / f"{row // 1000:04d}" / f"{name}-{row:08d}.flac"
            if (found := header(str(path))) is None:
                with writing(path, FIX):
                    _write(path, rows[row][audio], f"row {row}")
                found = header(str(path))
                assert found
            said = told[row]
            more = {"rate": found.samplerate, "speaker": said.get(speaker)}
            return simple_cut(path.stem, str(path), 0.0, found.duration, str(said[text] or ""), **more)

        def cuts() -> Iterator[tuple[Record, Record | Unusable]]:
            for row, cut in parallel(made, range(len(rows)), self.jobs):
                yield {"id": f"{name}-{row:08d}"}, cut

        manifest = out / f"{name}.jsonl.gz"
        bad = write_cuts(manifest, cuts())
        print(f"train with: speechtrain train recipe=scratch data.train={manifest}")
        return DataError.exit_code if bad else 0

    def _load(self) -> Any:
        try:
            import datasets
        except ImportError:
            raise MachineError(_PACKAGE) from None
        if int(datasets.__version__.split(".")[0]) < 4:  # older ones run a program of the data set
            raise MachineError(f"{_PACKAGE}; this is {datasets.__version__}")
        path = whole_path(self.name)
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
        except Exception as error:  # many kinds, of a name that is wrong or a hub that does not answer
            told = one_line(f"{type(error).__name__}: {error}", 400)
            raise DataError(f"name={self.name} split={self.split}: {told}") from error

    def _undecoded(self, rows: Any, audio: str) -> Any:
        """Return rows whose recordings are bytes or paths. Raises DataError if the column has none."""
        import datasets

        try:
            return rows.cast_column(audio, datasets.Audio(decode=False))
        except Exception as error:  # pyarrow raises many kinds
            problem = one_line(str(error), 400)
            raise DataError(f"{self.name}: {audio!r} has no recordings ({problem})") from error

    def _column(self, features: Mapping[str, Any], key: str, wanted: str) -> str:
        """The column of a key of COLUMNS. Raises DataError with those that there are."""
        found = [c for c in features if c == wanted] if wanted else []
        if not wanted and key == "audio":
            import datasets

            found = [c for c, kind in features.items() if isinstance(kind, datasets.Audio)]
        found = found or [c for c in features if not wanted and c.lower() in COLUMNS[key]]
        if len(found) != 1:
            told = f"no column {wanted!r}" if wanted else f"{len(found)} columns that may be its {key}"
            raise DataError(f"{self.name} has {told}: {', '.join(features)}; choose with {key}=COLUMN")
        return found[0]


def _check_files(names_by_split: Mapping[str, list[str]], folder: Path) -> None:
    """Raise DataError for a table outside of a local data set, because its texts are shown to others."""
    for names in names_by_split.values():
        for name in names:
            _check_table(Path(name))
            if folder.resolve() not in Path(name).resolve().parents:
                raise DataError(f"{name} lies outside of {folder}")


def _check_table(path: Path) -> None:
    """Raise DataError for a local file in another format than ``datasets`` itself writes."""
    if path.suffix not in _FORMATS:
        raise DataError(f"{path} is not Parquet or Arrow. For another table, train with data.train={path}")


def _write(path: Path, cell: Any, where: str) -> None:
    """Write one recording as mono FLAC of its own rate. Raises Unusable, OSError."""
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
    if not RATES[0] <= file.samplerate <= RATES[1] or not 0 < file.frames * file.channels <= MOST_SAMPLES:
        raise Unusable(
            "unreadable", f"{where}: {file.frames} frames of {file.channels} channels, {file.samplerate} Hz"
        )
    return file.read(dtype="float32", always_2d=True).mean(axis=1), file.samplerate

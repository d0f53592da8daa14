"""A data source: recordings whose names begin with their transcript, such as ``seven_theo_3.wav``."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lhotse import Recording, SupervisionSegment

from speechtrain.data.formats.manifests import digest
from speechtrain.data.source import Source


class NamedFiles(Source):
    """The WAV files of ``folder``. The transcript of a file is its name up to the first underscore."""

    def __init__(self, folder: str) -> None:
        self.paths = sorted(Path(folder).expanduser().glob("*.wav"))

    def cuts(self) -> Iterator[dict[str, Any]]:
        for path in self.paths:
            cut = Recording.from_file(path, recording_id=path.stem).to_cut()
            text = path.stem.partition("_")[0]
            cut.supervisions = [SupervisionSegment(path.stem, path.stem, 0.0, cut.duration, text=text)]
            yield cut.to_dict()

    def fingerprint(self) -> str:
        return digest("named files", *(f"{path} {path.stat().st_size}" for path in self.paths))

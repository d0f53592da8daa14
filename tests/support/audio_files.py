"""Audio files as a model reads them."""

from __future__ import annotations

from speechtrain.data.audio import read_cut
from speechtrain.data.formats.lhotse_cuts import Samples
from speechtrain.data.formats.manifests import simple_cut
from speechtrain.data.recordings import read_header


def read_file(path: str, sample_rate: int, start: float = 0.0, seconds: float | None = None) -> Samples:
    """Return the samples (S,) of a file from ``start`` on, for ``seconds`` or to its end."""
    if seconds is None:
        seconds = read_header(path).duration - start
    return read_cut(simple_cut("a", path, start, seconds, "", segment=True), sample_rate)

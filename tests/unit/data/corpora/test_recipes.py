from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from speechtrain.data.corpora.recipes import OWN
from speechtrain.data.formats.manifests import text_of


@pytest.mark.parametrize("name", ["rec01.wav", "rec01.flac", "REC01.WAV"])
def test_stm_reads_each_format_of_audio(tmp_path: Path, recordings: Any, name: str) -> None:
    recordings.tone(name, 2.0)
    (tmp_path / "a.stm").write_text(";; two sides\nrec01 1 anna 0.5 1.25 <o,f0> ngá kyéma\n")
    (cut,) = OWN["stm"](tmp_path, tmp_path, 1)
    assert (cut["start"], cut["duration"], text_of(cut)) == (0.5, 0.75, "ngá kyéma")
    assert cut["recording"]["sources"][0]["source"] == str(tmp_path / name)

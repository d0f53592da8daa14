"""A recording is found if its manifest and the disk write its name in different Unicode forms."""

from __future__ import annotations

import json
import os
import unicodedata
from pathlib import Path

import pytest

from speechtrain.data.index import open_index
from speechtrain.data.recordings import path_on_disk
from speechtrain.data.sources import open_source
from tests.support.data_module import make_data
from tests.support.recordings import write_tone

FORMS = [("NFC", "NFD"), ("NFD", "NFC")]


@pytest.mark.parametrize(("manifest_form", "disk_form"), FORMS)
@pytest.mark.parametrize("kind", ["nemo", "kaldi", "table"])
def test_recordings_are_found_under_the_other_form_of_their_names(
    tmp_path: Path, manifest_form: str, disk_form: str, kind: str
) -> None:
    names = ["Élodie/café 1.wav", "Élodie/café 2.wav", "plain.wav"]
    corpus = tmp_path / "corpus"
    for name in names:
        path = corpus / unicodedata.normalize(disk_form, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tone(path, seconds=0.75)
    lines = [unicodedata.normalize(manifest_form, name) for name in names]
    manifest = corpus / "all.tsv"
    if kind == "nemo":
        objects = [{"audio_filepath": line, "text": "one"} for line in lines]
        manifest.write_text("\n".join(map(json.dumps, objects)))
    elif kind == "kaldi":
        manifest = corpus
        (corpus / "wav.scp").write_text("".join(f"u{n} {line}\n" for n, line in enumerate(lines)))
        (corpus / "text").write_text("".join(f"u{n} one\n" for n in range(3)))
    else:
        manifest.write_text("path\ttext\n" + "".join(f"{line}\tone\n" for line in lines))
    index = open_index(open_source(str(manifest)), str(tmp_path / "cache"))
    assert index.seconds.tolist() == [0.75] * 3
    data = make_data(tmp_path / "cache", train=str(manifest), valid={"dev": str(manifest)})
    data.check()
    batch = next(data.train())
    assert (len(batch.ids), batch.skipped) == (3, ())
    notes = [line for line in data.warnings() if "Unicode form" in line]
    assert sorted(line.partition(" have")[0] for line in notes) == [
        "data.train: 2 of 3 checked files",
        "data.valid.dev: 2 of 3 checked files",
    ]


def test_a_path_is_only_searched_for_if_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = [tmp_path / unicodedata.normalize(form, "é.wav") for form in ("NFC", "NFD")]
    for path in both:
        path.touch()
        assert path_on_disk(str(path)) == str(path)
    assert path_on_disk(str(tmp_path / "ü.wav")) == str(tmp_path / "ü.wav")
    monkeypatch.setattr(os.path, "lexists", lambda path: pytest.fail("an ASCII name needs no search"))
    assert path_on_disk("/missing/e.wav") == "/missing/e.wav"

"""Kaldi's data directories, as its own recipes and ESPnet's write them; the recordings are made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from speechtrain.data.formats.manifests import text_of
from speechtrain.data.index import open_index
from speechtrain.data.sources import open_source
from speechtrain.errors import DataError


def write(folder: Path, **files: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return str(folder)


def cuts_of(path: str) -> list[dict[str, Any]]:
    return [*open_source(path).cuts()]


def refusal(path: str) -> str:
    with pytest.raises(DataError) as caught:
        cuts_of(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_utterances_that_are_recordings(tmp_path: Path, recordings: Any, cache: Path) -> None:
    recordings.tone("a.flac", 0.5, rate=8_000)
    folder = write(
        tmp_path / "data/train",
        wav_scp=f"s1-a {tmp_path}/a.flac\ns2-b\t{tmp_path}/b c.wav \n",
        text="s1-a  ONE  TWO\ns2-b\n",
        utt2spk="s1-a s1\ns2-b s2-b\n",
    )
    first, second = cuts_of(folder)
    assert (first["id"], first["duration"], text_of(first)) == ("train/s1-a", 0.5, "ONE TWO")
    assert first["supervisions"][0]["speaker"] == "s1"
    assert second["recording"]["sources"][0]["source"] == f"{tmp_path}/b c.wav"
    assert (text_of(second), second["supervisions"][0].get("speaker")) == ("", None)
    before = open_source(folder).fingerprint()
    assert len(open_index(open_source(folder))) == 2
    write(tmp_path / "data/train", text="s1-a ONE\n")
    assert open_source(folder).fingerprint() != before


def test_segments_are_parts_of_recordings(tmp_path: Path, recordings: Any) -> None:
    recordings.tone("egs/downloads/r.wav", 3.0)
    folder = write(
        tmp_path / "egs/dump/raw/train",
        wav_scp="r downloads/r.wav\n",  # from the recipe's folder, as ESPnet writes it
        segments="u1 r 0.25 1.00\nu2 r 1.5 -1\n",
        text="u2 two\nu1 one\n",
        utt2spk="u1 s\nu2 s\n",
    )
    cuts = cuts_of(folder)
    assert [(cut["start"], cut["duration"], text_of(cut)) for cut in cuts] == [
        (0.25, 0.75, "one"),
        (1.5, 1.5, "two"),
    ]
    assert cuts[0]["recording"]["sources"][0]["source"] == f"{tmp_path}/egs/downloads/r.wav"
    assert cuts[0]["custom"]


def test_a_directory_without_transcripts_is_for_pretraining(tmp_path: Path) -> None:
    (cut,) = cuts_of(write(tmp_path / "unlab", wav_scp="a a.wav\n"))
    assert text_of(cut) == ""


PIPE = "flac -c -d -s /corpora/LibriSpeech/84/121123/84-121123-0000.flac |"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"wav_scp": f"a x.wav\nb {PIPE}\n"}, "wav.scp:2: is 'flac -c -d -s /corpora"),
        (
            {"wav_scp": "a | touch pwned\n"},
            "wav.scp:1: is '| touch pwned'. Commands and archives are not read: name",
        ),
        ({"wav_scp": "a -\n"}, "wav.scp:1: is '-'"),
        ({"wav_scp": "a raw.ark:17\n"}, "wav.scp:1: is 'raw.ark:17'"),
        ({"wav_scp": "a\n"}, "wav.scp:1: is ''"),
        ({"wav_scp": "a x\n", "segments": ""}, "segments is empty"),
        ({"wav_scp": "a x\n", "segments": "u a 0\n"}, "segments:1: is not 'UTTERANCE RECORDING START END'"),
        ({"wav_scp": "a x\n", "segments": "u a zero 1\n"}, "segments:1: 'start' is 'zero', not a number"),
        ({"wav_scp": "a x\n", "segments": "u a 2 1\n"}, "segments:1: 'duration' is -1.0, below 0"),
        ({"wav_scp": "a x\n", "segments": "u a nan 1\n"}, "segments:1: 'start' is nan, not a finite"),
        ({"wav_scp": "a x\n", "text": "a \udcff\n"}, "text:1: not UTF-8"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, files: dict[str, str], words: str) -> None:
    (tmp_path / "d").mkdir()
    for name, text in files.items():
        (tmp_path / "d" / name.replace("_", ".")).write_bytes(text.encode(errors="surrogateescape"))
    assert words in refusal(str(tmp_path / "d"))
    assert not (tmp_path / "pwned").exists()

"""fairseq's TSV at the door: told by content, rooted, labelled line by line, decoded like any other."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from speechtrain.data.formats.fairseq import Fairseq
from speechtrain.data.formats.manifests import Manifest
from speechtrain.data.module import SpeechData
from speechtrain.data.sampler import BatchLimits
from speechtrain.data.sources import open_source
from speechtrain.errors import DataError
from speechtrain.files import open_regular
from speechtrain.text.vocabulary import NoText
from tests.support.cuts import lhotse_cuts


def tsv(path: Path, root: str, *recordings: tuple[str, Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(root + "\n" + "".join(f"{name}\t{frames}\n" for name, frames in recordings))
    return str(path)


def cuts_of(spec: Any) -> list[dict[str, Any]]:
    source = open_source(spec)
    assert isinstance(source, Manifest)
    return [*source.cuts()]


def texts_of(spec: Any) -> list[str]:
    return [cut["supervisions"][0]["text"] for cut in cuts_of(spec)]


def refusal(spec: Any) -> str:
    with pytest.raises(DataError) as caught:
        cuts_of(spec)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_recordings_become_cuts(tmp_path: Path, recordings: Any) -> None:
    recordings.tone("wavs/a/x.flac", 1.5)
    recordings.tone("wavs/y z.wav", 0.5)
    path = tsv(tmp_path / "train.tsv", str(tmp_path / "wavs"), ("a/x.flac", 24000), ("y z.wav", 8000))
    first, second = lhotse_cuts(open_source(path))
    assert (first.id, first.duration, first.start) == ("train/a/x.flac", 1.5, 0.0)
    assert first.recording.sources[0].source == str(tmp_path / "wavs/a/x.flac")
    assert (second.id, second.duration, second.num_samples) == ("train/y z.wav", 0.5, 8000)
    assert [s.text for s in first.supervisions] == [""]


@pytest.mark.parametrize("root", ["{}/wavs", "wavs", "../{name}/wavs/", "./wavs", "{}/wavs \r"])
@pytest.mark.parametrize("form", ["plain", "gzip", "mark"])
def test_the_root_is_absolute_or_beside_the_manifest(
    tmp_path: Path, recordings: Any, monkeypatch: pytest.MonkeyPatch, root: str, form: str
) -> None:
    recordings.tone("wavs/x.wav", 1.0)
    path = tmp_path / "m.tsv"
    tsv(path, root.format(tmp_path, name=tmp_path.name), ("x.wav", "16000\r"))
    content = path.read_bytes()
    path.write_bytes(
        {"plain": content, "gzip": gzip.compress(content), "mark": b"\xef\xbb\xbf" + content}[form]
    )
    monkeypatch.chdir("/")  # where the command is started has no part in it
    (cut,) = cuts_of(str(path))
    assert cut["recording"]["sources"][0]["source"] == str(tmp_path / "wavs/x.wav")
    assert cut["duration"] == 1.0


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("x.wav\t16000\ny.wav\t16000\n", "m.tsv:1: is 'x.wav\\t16000', a recording. The first line must be"),
        ("\nx.wav\t16000\n", "m.tsv:1: is empty. The first line must be the root"),
        ("/nowhere/wavs\nx.wav\t16000\n", "m.tsv:1: the root folder /nowhere/wavs does not exist"),
        ("gone\nx.wav\t16000\n", "/gone does not exist. Correct it or mount it"),
        (".\nx.wav\t16000\ny.wav\n", "m.tsv:3: is 'y.wav', not a path, a tab and a number of frames"),
        (".\nx.wav\t16000\n\ty.wav\n", "m.tsv:3: is '\\ty.wav', not a path"),
        (".\nx.wav\t16000\ny\tz.wav\t16000\n", "m.tsv:3: is 'y\\tz.wav\\t16000', not a path"),
        (".\nx.wav\t16000\ny.wav\t0\n", "m.tsv:3: '0' is not a number of frames"),
        (".\nx.wav\t-5\n", "m.tsv:2: '-5' is not a number of frames"),
        (".\nx.wav\t16_000\n", "m.tsv:2: '16_000' is not a number of frames"),
        (".\nx.wav\t１６\n", "m.tsv:2: '１６' is not a number of frames"),
        (".\nx.wav\t1e4\n", "m.tsv:2: '1e4' is not a number of frames"),
        (".\n", "lists no recordings. Add a line"),
        (".\n\n \n", "lists no recordings. Add a line"),
        ("id\tsrc\nx\tone\n", "m.tsv:1: has no column that is known as its recordings"),
        ("plain\n", "m.tsv:1: not a manifest"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "m.tsv"
    path.write_text(content)
    assert words in refusal(str(path))


def test_other_encodings_and_damage_are_named_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "m.tsv"
    path.write_bytes(b".\nx.wav\t16000\nb\xe9.wav\t16000\n")
    assert "m.tsv:3: not UTF-8" in refusal(str(path))
    path.write_bytes(gzip.compress(b".\n" + b"x.wav\t16000\n" * 1000)[:-20])
    assert "the file is damaged" in refusal(str(path))


def test_transcripts_stand_beside_line_by_line(tmp_path: Path) -> None:
    path = tsv(tmp_path / "train.tsv", ".", ("x.wav", 16000), ("y.wav", 16000), ("z.wav", 16000))
    (tmp_path / "train.ltr").write_text("O N E | T W O |\n\nT H R E E |\n")
    assert texts_of(path) == ["ONE TWO", "", "THREE"]
    before = open_source(path).fingerprint()
    (tmp_path / "train.wrd").write_text("one two\nfour\n five\n")
    assert texts_of(path) == ["one two", "four", "five"]  # words before letters
    assert open_source(path).fingerprint() != before
    (tmp_path / "train.wrd").write_text("one two\nfour\n")
    assert "train.wrd has 2 lines, but" in refusal(path)
    assert "train.tsv has 3 recordings. Write one" in refusal(path)
    (tmp_path / "train.wrd").write_text("one\n" * 4)
    assert "train.wrd has 4 lines" in refusal(path)


def test_the_rate_is_that_of_the_first_header_and_no_other_file_is_opened(
    tmp_path: Path, recordings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(30):
        recordings.tone(f"{number:02d}.wav", 1.0, rate=8000)
    recordings.tone("00.wav", 1.0, rate=8000).write_bytes(b"damaged")
    (tmp_path / "01.wav").unlink()
    opened: list[str] = []

    def watched(path: str) -> Any:
        opened.append(Path(path).name)
        return open_regular(path)

    monkeypatch.setattr("speechtrain.data.recordings.open_regular", watched)
    path = tsv(tmp_path / "m.tsv", ".", *((f"{n:02d}.wav", 8000) for n in range(30)))
    source = open_source(path)
    assert isinstance(source, Fairseq)
    assert {cut["duration"] for cut in source.cuts()} == {1.0}
    assert source.sampling_rate == 8000
    source.fingerprint()
    assert opened == ["00.wav", "01.wav", "02.wav"]
    for number in range(30):
        (tmp_path / f"{number:02d}.wav").write_bytes(b"damaged")
    opened.clear()
    again = open_source(path)
    assert isinstance(again, Fairseq)
    assert again.sampling_rate == 16_000
    assert len(opened) == 10
    alone = tsv(tmp_path / "n.tsv", ".", ("gone.wav", 16000))
    assert cuts_of(alone)[0]["duration"] == 1.0  # 16 kHz where nothing tells


def test_other_rates_and_stereo_are_trained_on(tmp_path: Path, cache: Path, recordings: Any) -> None:
    """8 kHz in two channels comes out at 16 kHz, mixed down; of another rate than the first is bad."""
    names = [recordings.tone(f"{n}.flac", 1.0 + n / 4, rate=8000, channels=2).name for n in range(4)]
    frames = [8000 + 2000 * n for n in range(4)]
    recordings.tone("other.wav", 1.0, rate=44_100)
    path = tsv(tmp_path / "m.tsv", ".", *zip(names, frames, strict=True), ("other.wav", 44_100))
    data = SpeechData(path, {}, NoText(), batch=BatchLimits(count=5), workers=0)
    batch = next(data.train())
    assert sorted(zip(batch.ids, batch.audio_lengths.tolist(), strict=True))[1:] == [
        (f"m/{name}", 16_000 + 4000 * n) for n, name in enumerate(names)
    ]
    assert [(skip.id, skip.reason) for skip in batch.skipped] == [("m/other.wav", "wrong_length")]
    stereo, _ = soundfile.read(tmp_path / names[0])
    row = batch.audio[batch.ids.index("m/0.flac")].numpy()[:16_000]
    expected = np.interp(np.arange(16_000) / 2, np.arange(8000), stereo.mean(axis=1))
    assert np.corrcoef(row, expected)[0, 1] > 0.99
    assert np.abs(row).max() == pytest.approx(np.abs(stereo.mean(axis=1)).max(), rel=0.1)

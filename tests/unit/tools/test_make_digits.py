"""The synthesis script: its bytes depend on voice and word alone, not on order, jobs or the run."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import platform
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import soundfile

ROOT = Path(__file__).resolve().parents[3]
EMBEDDED = ROOT / "speechtrain/data/corpora/digits_audio"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_digits", ROOT / "tools/make_digits.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


script = load_script()


@pytest.fixture(scope="module")
def synthesiser() -> Any:
    pytest.importorskip("espeakng_loader", reason="espeakng_loader is missing (extra 'demo')")
    return script.Synthesiser()


def sums(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir() if p.suffix != ".md"}


def definition(path: Path) -> dict[str, list[list[float]]]:
    """The numbers after each attribute of an espeak-ng variant file."""
    found: dict[str, list[list[float]]] = {}
    for line in path.read_text(errors="replace").splitlines():
        name, *rest = line.split("//")[0].split() or [""]
        numbers = [float(word) for word in rest if word.lstrip("-").isdigit()]
        found.setdefault(name, []).append(numbers)
    return found


def test_the_variants_are_those_that_the_written_rule_leaves(synthesiser: Any) -> None:
    import espeakng_loader

    kept = set()
    for path in (Path(espeakng_loader.get_data_path()) / "voices" / "!v").iterdir():
        parts = definition(path)
        voicing = min((row[0] for row in parts.get("voicing", []) if row), default=100)
        breath = max((max(row) for row in parts.get("breath", []) if row), default=0)
        echo = max((row[1] for row in parts.get("echo", []) if len(row) > 1), default=0)
        if voicing >= 30 and breath < 20 and echo <= 100:
            kept.add(path.name)
    assert kept == set(script.VARIANTS)
    assert len(script.VARIANTS) == len(set(script.VARIANTS))


def test_no_variant_and_no_family_is_in_both_splits() -> None:
    chosen = script.split_variants()
    families = {split: {script.family(name) for name in names} for split, names in chosen.items()}
    assert not families["train"] & families["valid"]
    assert sorted(chosen["train"] + chosen["valid"]) == sorted(script.VARIANTS)
    for split, count in script.EMBEDDED_VOICES.items():
        assert len(chosen[split]) >= count


def test_more_voices_keep_the_earlier_ones_and_never_repeat() -> None:
    many = script.voices("train", 500)
    assert many[:57] == script.voices("train", 57)
    assert len({(v.accent, v.variant, v.rate, v.pitch, v.range) for v in many}) == 500
    assert {v.accent for v in many[:57]} == set(script.ACCENTS)
    other = {v.variant for v in script.voices("valid", 500)}
    assert not other & {v.variant for v in many}


def test_a_clip_does_not_depend_on_order_on_jobs_or_on_what_was_spoken_before(synthesiser: Any) -> None:
    voices = [v for v in script.voices("train", 57) if v.variant in ("klatt4", "f2", "edward", "Alicia")]
    requests = [(voice, word) for voice in voices for word in ("six", "zero")]
    first = list(synthesiser.speak(requests))
    backwards = list(synthesiser.speak(requests[::-1], jobs=3))[::-1]
    assert len(first) == len(requests) >= 4
    for a, b in zip(first, backwards, strict=True):
        assert np.array_equal(a, b)
    assert len({a.tobytes() for a in first}) == len(first)


def test_the_noise_of_breath_comes_from_the_seed(synthesiser: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    request = [(next(v for v in script.voices("train", 57) if v.variant == "Alicia"), "six")]
    (first,) = synthesiser.speak(request)
    monkeypatch.setattr(script, "SEED", script.SEED + 1)
    (other,) = synthesiser.speak(request)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(("accent", "variant"), [("en-us", "nonesuch"), ("en-xx", "m1")])
def test_an_unknown_voice_is_refused(synthesiser: Any, accent: str, variant: str) -> None:
    voice = script.Voice("x", accent, variant, 170, 50, 50)
    with pytest.raises(script.MachineError, match=f"{accent}.{variant}.*no such"):
        list(synthesiser.speak([(voice, "one")]))


def test_making_the_embedded_corpus_again_gives_the_same_bytes(synthesiser: Any, tmp_path: Path) -> None:
    made = json.loads((EMBEDDED / "index.json").read_text())["made_with"]
    here = {
        "espeak-ng": synthesiser.version,
        "machine": platform.machine(),
        "libsndfile": soundfile.__libsndfile_version__,
    }
    if {key: made[key] for key in here} != here:
        pytest.skip(f"the corpus was made with {made}, here is {here}")
    # all of validation and a tenth of training: each clip costs a fork
    index = script.write_corpus(tmp_path, script.DIGITS, {"train": 6, "valid": 15}, jobs=2, manifests=False)
    shipped = json.loads((EMBEDDED / "index.json").read_text())["splits"]
    assert index["splits"]["valid"] == shipped["valid"]
    assert sums(tmp_path)["valid.flac"] == sums(EMBEDDED)["valid.flac"]
    assert index["splits"]["train"]["voices"] == shipped["train"]["voices"][:6]
    again, _ = soundfile.read(tmp_path / "train.flac", dtype="int16")
    start, _ = soundfile.read(EMBEDDED / "train.flac", dtype="int16", frames=len(again))
    assert np.array_equal(again, start)


def test_a_corpus_of_ones_own_is_a_data_set_and_the_same_twice(
    synthesiser: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = tmp_path / "words.txt"
    words.write_text("Turn on\n\nstop\n")
    for name, jobs in (("a", "1"), ("b", "3")):
        given = ["--words", str(words), "--voices", "5", "--jobs", jobs, "--out", str(tmp_path / name)]
        assert script.main(given) == 0
    assert "train: 5 voices, 10 clips" in capsys.readouterr().out
    assert sums(tmp_path / "a") == sums(tmp_path / "b")
    rows = [json.loads(line) for line in (tmp_path / "a/train.jsonl").read_text().splitlines()]
    assert [row["text"] for row in rows] == ["turn on", "stop"] * 5
    audio, rate = soundfile.read(tmp_path / "a/train.flac")
    assert rows[-1]["offset"] + rows[-1]["duration"] == pytest.approx(len(audio) / rate)
    valid = (tmp_path / "a/valid.jsonl").read_text()
    assert not {row["speaker"] for row in rows} & {json.loads(x)["speaker"] for x in valid.splitlines()}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stop\nline 4\n", "line 2: 'line 4'"),
        ("go\nGo\n", "line 2: 'go' was given on line 1"),
        ("\n", "no words"),
    ],
)
def test_bad_words_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "words.txt"
    path.write_text(text)
    with pytest.raises(script.DataError, match=message):
        script.read_words(path)


@pytest.mark.parametrize(
    ("given", "code"), [(["--voices", "3"], 2), (["--words", "missing.txt", "--out", "x"], 3)]
)
def test_errors_of_the_command_are_one_line(
    given: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(given) == code
    out = capsys.readouterr()
    assert out.err.startswith("make_digits: error: ")
    assert out.err.count("\n") == 1


def test_resampling_keeps_a_tone_and_removes_what_lies_above_the_new_half_rate() -> None:
    time = np.arange(22050) / 22050
    tone = np.rint(8000 * np.sin(2 * np.pi * 1000 * time)).astype(np.int16)
    out = script.resample(tone, 22050)
    assert len(out) == 16000
    expected = 8000 * np.sin(2 * np.pi * 1000 * np.arange(16000) / 16000)
    assert np.abs(out[200:-200] - expected[200:-200]).max() < 10
    high = np.rint(8000 * np.sin(2 * np.pi * 9500 * time)).astype(np.int16)
    assert np.abs(script.resample(high, 22050)[200:-200].astype(int)).max() < 30


def test_trimming_keeps_the_margin_and_nothing_more() -> None:
    clip = np.zeros(16000, np.int16)
    clip[4000:8000] = 1000
    clip[2000] = 5  # below a hundredth of the peak
    assert np.array_equal(script.trim(clip), clip[4000 - 160 : 8000 + 160])
    assert np.array_equal(script.trim(clip[4000:8000]), clip[4000:8000])

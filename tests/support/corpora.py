"""Public corpora as they lie on the disk: a few joined digits in each one's folders, names and encodings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import soundfile

from speechtrain.data.corpora.digits import Digits

Expected = dict[str, dict[str, str]]
"""For each part, the text of each cut by its id."""

_DIGITS = Digits("train", 24, min_words=2, max_words=3)
_UTTERANCES = _DIGITS.all_utterances()


def said(number: int) -> tuple[np.ndarray, str]:
    """One utterance: samples of 16 kHz, and its words."""
    return _UTTERANCES[number].audio(_DIGITS.clips), _UTTERANCES[number].text


def write(path: Path, samples: np.ndarray, rate: int = 16_000, **how: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, samples, rate, **how)


def text(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def librispeech(root: Path, parts: tuple[str, ...] = ("train-clean-100", "dev-clean")) -> Expected:
    found: Expected = {}
    for place, part in enumerate(parts):
        lines = []
        for number in range(2):
            samples, words = said(2 * place + number)
            name = f"{103 + place}-1240-{number:04d}"
            folder = root / "LibriSpeech" / part / str(103 + place) / "1240"
            write(folder / f"{name}.flac", samples)
            lines.append(f"{name} {words.upper()}")
            found.setdefault(part, {})[name] = words.upper()
        text(folder / f"{103 + place}-1240.trans.txt", *lines)
    text(root / "LibriSpeech" / "SPEAKERS.TXT", ";ID  |SEX| SUBSET           |MINUTES| NAME")
    return found


def mini_librispeech(root: Path) -> Expected:
    return librispeech(root, ("train-clean-5", "dev-clean-2"))


def librilight(root: Path) -> Expected:
    samples, _ = said(0)
    folder = root / "small" / "100" / "sea_fairies_0812_librivox_64kb_mp3"
    write(folder / "01_baum_sea_fairies_64kb.flac", np.tile(samples, 2))
    half = len(samples) / 16_000
    told = {
        "speaker": "100",
        "book_meta": {"id": "2"},
        "snr": 10.2,
        "voice_activity": [[0.08, half], [half, 2 * half]],
    }
    text(folder / "01_baum_sea_fairies_64kb.json", json.dumps(told))
    write(root / "medium" / "1" / "book" / "a.flac", samples)
    text(root / "medium" / "1" / "book" / "a.json", "this is not read, as only small is asked for")
    name = "small/100/sea_fairies_0812_librivox_64kb_mp3/01_baum_sea_fairies_64kb"
    return {"small": {f"{name}_0": "", f"{name}_1": ""}}


def common_voice(root: Path) -> Expected:
    found: Expected = {}
    columns = "client_id path sentence up_votes down_votes age gender accents locale segment"  # release 9
    for place, part in enumerate(("train", "dev", "test")):
        samples, words = said(place)
        name = f"common_voice_en_{place + 18}"
        write(root / "en" / "clips" / f"{name}.mp3", samples, format="MP3")
        row = ["0" * 128, f"{name}.mp3", f'"{words}"', "2", "0", "", "", "", "en", ""]
        text(root / "en" / f"{part}.tsv", "\t".join(columns.split()), "\t".join(row))
        found[part] = {f"{part}:2:{name}": words}
    return found


def tedlium3(root: Path) -> Expected:
    found: Expected = {}
    for place, part in enumerate(("train", "dev", "test")):
        talk, lines = f"AaronHuey_2010{place}X", []
        first, second = said(2 * place), said(2 * place + 1)
        folder = root / "TEDLIUM_release-3" / "legacy" / part
        write(
            folder / "sph" / f"{talk}.sph",
            np.concatenate([first[0], second[0]]),
            format="NIST",
            subtype="PCM_16",
        )
        middle, end = len(first[0]) / 16_000, (len(first[0]) + len(second[0])) / 16_000
        lines.append(f"{talk} 1 {talk} 0.00 {middle:.2f} <o,f0,male> {first[1]} <unk>")
        lines.append(f"{talk} 1 inter_segment_gap 0 1.0 <o,,unknown> ignore_time_segment_in_scoring")
        lines.append(f"{talk} 1 {talk} {middle:.2f} {end:.2f} <o,f0,male> {second[1]}")
        text(folder / "stm" / f"{talk}.stm", *lines)
        found[part] = {f"{talk}-0": f"{first[1]} <unk>", f"{talk}-2": second[1]}
    return found


def two_sided(path: Path) -> tuple[float, list[str]]:
    """A telephone call: mu-law of 8 kHz, a side each; its length and the words of both."""
    sides = [said(number) for number in (6, 7)]
    length = min(len(samples) for samples, _ in sides) // 2 * 2
    call = np.stack([samples[:length:2] for samples, _ in sides], axis=1)
    write(path, call, 8_000, format="NIST", subtype="ULAW")
    return length / 16_000, [words for _, words in sides]


def switchboard(root: Path) -> Expected:
    found: Expected = {"train": {}, "eval2000": {}, "rt03": {}}
    end, words = two_sided(root / "LDC97S62" / "swb1_d1" / "data" / "sw02001.sph")
    for side, spoken in zip("AB", words, strict=True):
        name = f"sw2001{side}-ms98-a-"
        folder = root / "swb_ms98_transcriptions" / "20" / "2001"
        lines = (
            f"{name}0001 0.000000 0.100000 [silence]",
            f"{name}0002 0.100000 {end:.6f} {spoken} [laughter]",
        )
        text(folder / f"{name}trans.text", *lines)
        found["train"][f"{name}0002"] = f"{spoken} [laughter]"
    two_sided(root / "LDC2002S09" / "hub5e_00" / "english" / "en_4156.sph")
    header = ("#Language: eng", "#File id: 4156", "# 0 300 #BEGIN", "")
    lines = (f"0.10 {end:.2f} A: {words[0]} %uh", "", f"0.10 {end:.2f} B: {{breath}} {words[1]}")
    text(root / "LDC2002T43" / "reference" / "english" / "en_4156.txt", *header, *lines)
    found["eval2000"] = {"en_4156-0": f"{words[0]} %uh", "en_4156-1": f"{{breath}} {words[1]}"}
    below = root / "LDC2007S10" / "data"
    two_sided(below / "audio" / "eval03" / "english" / "cts" / "sw_45097.sph")
    lines = (
        ';; CATEGORY "0" "" ""',
        f"sw_45097 1 sw_45097_1 0.10 {end:.2f} <o,swbd,male> {words[0]}",
        "sw_45097 1 inter_segment_gap 0.00 0.10 <o,swbd,male>",
        f"sw_45097 2 sw_45097_2 0.10 {end + 0.004:.3f} <o,swbd,female> (%hesitation) {words[1]}",
        "sw_45097 2 sw_45097_2 0.10 0.20 <o,swbd,female> IGNORE_TIME_SEGMENT_IN_SCORING",
    )
    text(below / "references" / "eval03" / "english" / "cts" / "sw_45097.stm", *lines)
    last = f"{round(end * 100):06d}"
    found["rt03"] = {
        f"sw_45097-A-000010-{last}": words[0],
        f"sw_45097-B-000010-{last}": f"(%hesitation) {words[1]}",
    }
    return found


def aishell1(root: Path) -> Expected:
    found: Expected = {}
    lines = []
    spoken = ("而 对 楼市 成交 抑制", "广州 市 房地产", "一 二 三")
    for place, part in enumerate(("train", "dev", "test")):
        name = f"BAC009S000{place + 2}W0122"
        folder = root / "aishell" / "data_aishell" / "wav" / part / f"S000{place + 2}"
        write(folder / f"{name}.wav", said(place)[0], subtype="PCM_16")
        lines.append(f"{name} {spoken[place]} ")
        found[part] = {name: spoken[place].replace(" ", "")}
    text(root / "aishell" / "data_aishell" / "transcript" / "aishell_transcript_v0.8.txt", *lines)
    return found


CORPORA: dict[str, Callable[[Path], Expected]] = {
    made.__name__: made
    for made in (librispeech, mini_librispeech, librilight, common_voice, tedlium3, switchboard, aishell1)
}

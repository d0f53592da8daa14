"""An endless or damaged ``tokenizer.json`` of a stranger is one line of error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from speechtrain.errors import DataError

pytest.importorskip("tokenizers")

from speechtrain.text.huggingface import HuggingFace, _growth

VOCABULARY = {symbol: label for label, symbol in enumerate(" abcdefghijklmnopqrstuvwxyz'")}


def content(**parts: Any) -> dict[str, Any]:
    empty = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor"))
    model = {"type": "BPE", "vocab": VOCABULARY, "merges": []}
    return {
        "version": "1.0",
        "added_tokens": [],
        **empty,
        "decoder": {"type": "Fuse"},
        "model": model,
        **parts,
    }


def tokenizer(folder: Path, **parts: Any) -> HuggingFace:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(content(**parts)))
    return HuggingFace(str(path))


def replace(content: str, **pattern: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


DOUBLE = replace("oo", String="o")
STEPS = {
    "a normaliser that doubles": {"normalizer": {"type": "Sequence", "normalizers": [DOUBLE] * 34}},
    "sequences in a sequence": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Sequence", "normalizers": [DOUBLE] * 6}] * 6,
        }
    },
    "bytes of bytes": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}] * 34}},
    "a decoder that doubles": {"decoder": {"type": "Sequence", "decoders": [DOUBLE] * 34}},
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.timeout(30)
def test_steps_that_make_a_text_long_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"tokenizer\.json .*makes? a text more than 4000 times as long"):
        tokenizer(tmp_path, **STEPS[name])


def test_steps_of_published_tokenizers_are_accepted() -> None:
    llama = [{"type": "Prepend", "prepend": "▁"}, replace("▁", String=" ")]
    quotes = [replace('"', String="``"), replace('"', String="''")]
    albert = [
        *quotes,
        {"type": "NFKD"},
        {"type": "StripAccents"},
        {"type": "Lowercase"},
        {"type": "Precompiled"},
    ]
    for steps in (llama, [*albert, replace(" ", Regex=" {2,}")]):
        assert _growth({"type": "Sequence", "normalizers": steps}) < 2_000


@pytest.mark.parametrize(
    "padding",
    [
        {"strategy": {"Fixed": 1_000}, "pad_to_multiple_of": None},
        {"strategy": "BatchLongest", "pad_to_multiple_of": 1_000},
    ],
)
def test_padding_and_truncation_of_the_file_are_not_used(tmp_path: Path, padding: dict[str, Any]) -> None:
    padding = {**padding, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": " "}
    truncation = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    for parts in ({"padding": padding}, {"truncation": truncation}):
        vocabulary = tokenizer(tmp_path, **parts)
        assert vocabulary.decode(vocabulary.encode("no one")) == "no one"
        assert vocabulary.library().padding is None
        assert vocabulary.library().truncation is None


FAILURES = {
    "a regular expression without end": {
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "(o+o+)+x"},
            "behavior": "Isolated",
            "invert": False,
        }
    },
    "a damaged charsmap": {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////" * 200 + "w=="}
    },
    "a truncation by more than its length": {
        "truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": "5"}
    },
}


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.timeout(60)
def test_a_failure_of_the_library_is_one_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"tokenizer\.json is not a usable tokenizer\.json"):
        tokenizer(tmp_path, **FAILURES[name]).encode("o" * 40)


@pytest.mark.timeout(60)
def test_a_decoder_that_fails_is_one_line(tmp_path: Path) -> None:
    steps = [{"type": "Fuse"}, replace("", Regex="(o+o+)+x")]
    vocabulary = tokenizer(tmp_path, decoder={"type": "Sequence", "decoders": steps})
    with pytest.raises(DataError, match=r"tokenizer\.json is not a usable tokenizer\.json"):
        vocabulary.decode(vocabulary.encode("o" * 40))


@pytest.mark.parametrize("text", ["[]", "[" * 10**5, "\udcff"])
def test_a_file_of_anything_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(DataError, match=r"tokenizer\.json is not a usable tokenizer\.json"):
        HuggingFace(str(path))


def test_an_interrupt_is_not_a_failure_of_the_library(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenizer(tmp_path)._call(interrupt)

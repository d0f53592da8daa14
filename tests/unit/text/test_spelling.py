"""What each label adds to a text, for tokenizers that mark words in different ways."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from speechtrain.decoding.fusion import Fusion
from speechtrain.text.huggingface import HuggingFace
from speechtrain.text.vocabulary import Characters

TEXTS = ["the new york times", "a new house in york", "the house is new"] * 20


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(TEXTS, trainers.WordPieceTrainer(vocab_size=60, special_tokens=["[UNK]"]))
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=60))
    return tokenizer


@pytest.mark.parametrize("build", [byte_level, word_piece, metaspace])
def test_fusion_sees_the_words_of_each_kind_of_tokenizer(build: object, tmp_path: Path) -> None:
    build().save(str(tmp_path / "tokenizer.json"))  # type: ignore[operator]
    tokenizer = HuggingFace(str(tmp_path / "tokenizer.json"))
    spelling = tokenizer.spelling()
    for text in ("the new york times", "a house in york"):
        ids = tokenizer.encode(text)
        assert "".join(spelling[label] for label in ids).strip() == text
        fusion = Fusion(word_bonus=1.0, phrases=["new york"], phrase_bonus=10.0)
        fusion.start_search(tokenizer)
        expected = len(text.split()) + 10.0 * ("new york" in text)
        assert fusion.text_score(ids) == pytest.approx(expected, abs=1e-4)


def test_spelling_of_characters() -> None:
    assert Characters(" ab").spelling() == [" ", "a", "b"]

"""Texts of many scripts come back from their labels as the normaliser left them, by each tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from speechtrain.errors import DataError
from speechtrain.text.huggingface import HuggingFace
from speechtrain.text.normalise import unicode
from speechtrain.text.vocabulary import Characters, SentencePiece, Tokenizer, train_sentencepiece

SCRIPTS = {
    "latin": "Ça va, l’été ? Thuở nhỏ tôi yêu «Łódź».",
    "cyrillic": "Съешь ещё этих мягких булок — об'єднання!",
    "greek": "Ο ΚΌΣΜΟΣ είναι μικρός· γιατί;",
    "hebrew": "צה״ל ראה ג׳ירפה, וְגַם צַה״ל",
    "arabic": "السَّلامُ عليكم، كـيف الحال؟",
    "persian": "می\u200cروم به خانه\u200cها",
    "urdu": "میں گھر جا رہا ہوں۔",
    "devanagari": "क्या हाल है? र्\u200dय",
    "bengali": "আমি বাংলায় গান গাই। র\u200d্যাব",
    "tamil": "தமிழ் மொழி இனிது",
    "sinhala": "ශ්\u200dරී ලංකාව",
    "malayalam": "അവന്\u200d വന്നു",
    "thai": "ภาษาไทยง่ายนิดเดียว",
    "khmer": "ខ្ញុំ\u200bស្រឡាញ់\u200bភាសាខ្មែរ ១.៥",
    "burmese": "မြန်မာဘာသာစကား။",
    "georgian": "ვეფხისტყაოსანი, შოთა",
    "armenian": "Ինչո՞ւ և եւ ԱՅՈ՛",
    "cherokee": "ᎣᏏᏲ ᏣᎳᎩ dù:ni:ye:li:sv̌",
    "ethiopic": "ሰላም፡ለዓለም።",
    "hangul": "안녕하세요, 세계!",
    "han and kana": "東京タワーへ行く。スーパー・マン",
}


def trained(kind: str, texts: list[str], folder: Path) -> Tokenizer:
    """Return a tokenizer of ``kind`` whose labels are of ``texts``."""
    if kind == "characters":
        return Characters("".join(sorted(set("".join(texts)))), "unicode")
    if kind == "huggingface bytes":
        tokenizers = pytest.importorskip("tokenizers")
        library = tokenizers.ByteLevelBPETokenizer()
        library.train_from_iterator(texts, vocab_size=400, show_progress=False)
        library.save(str(folder / "tokenizer.json"))
        return HuggingFace(str(folder / "tokenizer.json"), "unicode")
    size = 2 * len(set("".join(texts)))
    try:
        train_sentencepiece(texts, folder / "m", kind, size)
    except DataError as error:  # It names the largest possible size.
        train_sentencepiece(texts, folder / "m", kind, int(str(error).split()[-1]))
    return SentencePiece(str(folder / "m"), "unicode")


@pytest.mark.parametrize("kind", ["characters", "unigram", "bpe", "huggingface bytes"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_text_comes_back_from_its_labels(script: str, kind: str, tmp_path: Path) -> None:
    text = unicode(SCRIPTS[script])
    tokenizer = trained(kind, [text] * 20, tmp_path)
    assert tokenizer.normalise(SCRIPTS[script]) == text
    assert tokenizer.unknown(text) == set()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert unicode(text) == text


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize(
    "text", ["№ 5 ½ ﬁx Ａ", " a", "a ", "a  b", "a\tb\r\nc", "a\x07b", "a\u200bb\ufeff", "a\u00a0b\u3000c"]
)
def test_subwords_change_no_character(kind: str, text: str, tmp_path: Path) -> None:
    tokenizer = trained(kind, ["ab cd", text] * 20, tmp_path)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize("symbol", ["\u2581", "\u2585", "\0"])
def test_subwords_refuse_the_signs_that_they_use_themselves(kind: str, symbol: str, tmp_path: Path) -> None:
    """SentencePiece writes U+2581 for a space, U+2585 for an unknown character, and ends a text with NUL."""
    text = f"a{symbol}b"
    tokenizer = trained(kind, ["ab cd", text] * 20, tmp_path)
    assert tokenizer.unknown(text) == {symbol}
    with pytest.raises(ValueError, match="unknown symbols"):
        tokenizer.encode(text)

"""n-gram models: what is written, what is read, and what is refused."""

from __future__ import annotations

import math
import sys
from collections import Counter
from pathlib import Path

import pytest

from speechtrain.errors import DataError, MissingPackage
from speechtrain.text.ngram import BEGIN, END, KenLM, NGram, read_ngram, write_ngram

TEXTS = ["the cat sat", "the cat ran", "a dog ran", "", "the dog sat on the cat"]
ARPA = "\\data\\\nngram 1=3\nngram 2=1\n\n\\1-grams:\n-1.0\t<s>\t-0.5\n-0.5\ta\t-0.2\n-0.7 </s>\n"
ARPA += "\n\\2-grams:\n-0.1\t<s> a\n\n\\end\\\n"


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_probabilities_of_what_follows_sum_to_one(tmp_path: Path, order: int) -> None:
    sentences, sizes = write_ngram(TEXTS, tmp_path / "lm.arpa", order)
    assert sentences == 4
    model = NGram(str(tmp_path / "lm.arpa"))
    assert model.order == len(sizes) == order
    words = {word for text in TEXTS for word in text.split()} | {"</s>", "<unk>"}
    for context in ((), ("the",), ("the", "cat"), ("a", "dog"), ("unseen", "cat"), ("<s>",)):
        known = context[1 - order :] if order > 1 else ()
        assert sum(math.exp(model.score(known, word)) for word in words) == pytest.approx(1, abs=1e-4)


def test_witten_bell_by_hand(tmp_path: Path) -> None:
    write_ngram(TEXTS, tmp_path / "lm.arpa", 2)
    model = NGram(str(tmp_path / "lm.arpa"))
    counts = Counter(word for text in TEXTS if text for word in [*text.split(), "</s>"])
    types, tokens = len(counts), counts.total()
    single = (counts["cat"] + types / (types + 1)) / (tokens + types)
    # "the" is followed by cat 3 times and by dog once
    assert math.exp(model.score(("the",), "cat")) == pytest.approx((3 + 2 * single) / 6, rel=1e-4)
    assert math.exp(model.score((), "zebra")) == pytest.approx(
        types / (types + 1) / (tokens + types), rel=1e-4
    )


def test_backoff_and_unknown_words(tmp_path: Path) -> None:
    (tmp_path / "lm.arpa").write_text(ARPA)
    model = NGram(str(tmp_path / "lm.arpa"))
    ten = math.log(10)
    assert model.score(("<s>",), "a") == pytest.approx(-0.1 * ten)
    assert model.score(("a",), "a") == pytest.approx(-0.7 * ten)
    assert model.score(("a",), "new") == pytest.approx(-0.9 * ten)  # as unlikely as the rarest
    assert model.next_context(("<s>",), "new") == ("<unk>",)


def test_ngram_gives_an_unknown_word_the_probability_of_the_rarest_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "lm.arpa").write_text(ARPA.replace("-1.0\t<s>", "-99\t<s>"))
    model = NGram(str(tmp_path / "lm.arpa"))
    assert model.score((), "new") == pytest.approx(-0.7 * math.log(10))
    (message,) = [record.getMessage() for record in caplog.records]
    assert "lm.arpa has no <unk>: its rarest word stands for" in message


def test_ngram_reads_unk_in_capitals(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model_text = ARPA.replace("\\1-grams:\n", "\\1-grams:\n-2.0\t<UNK>\n", 1)
    (tmp_path / "lm.arpa").write_text(model_text)
    model = NGram(str(tmp_path / "lm.arpa"))
    assert model.score((), "new") == pytest.approx(-2.0 * math.log(10))
    assert not caplog.records


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "it has no .end"),
        ("\\data\\\n\\end\\\n", ":2: the model is empty"),
        (ARPA.replace("-0.5\ta", "x\ta"), ":7: "),
        (ARPA.replace("-0.5\ta", "nan\ta"), ":7: "),
        (ARPA.replace("-0.5\ta", "2\ta"), ":7: "),
        (ARPA.replace("-0.1\t<s> a", "-0.1\ta"), ":11: it is not a 2-gram"),
        (ARPA.replace("\\2-grams", "\\3-grams"), ":10: orders"),
        (ARPA[:-8], "it has no .end"),
        ("\\1-grams:\n" + "a" * 10**6, ":2: it is not a 1-gram"),
    ],
)
def test_what_is_no_model_is_one_line(tmp_path: Path, content: str, told: str) -> None:
    path = tmp_path / "lm.arpa"
    path.write_text(content)
    with pytest.raises(DataError, match=f"decoder.lm: .*lm.arpa.*{told}") as caught:
        NGram(str(path))
    assert str(caught.value).isprintable()


def test_a_missing_file_and_bytes_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        NGram(str(tmp_path / "none.arpa"))
    (tmp_path / "bytes.arpa").write_bytes(b"\\1-grams:\n\xff\n")
    with pytest.raises(DataError, match=r"bytes\.arpa:2"):
        NGram(str(tmp_path / "bytes.arpa"))


def test_transcripts_without_a_word_make_no_model(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="every transcript is empty"):
        write_ngram(["", " "], tmp_path / "lm.arpa")


def test_kenlm_scores_as_we_do(tmp_path: Path) -> None:
    pytest.importorskip("kenlm", reason="kenlm is missing (extra 'kenlm')")
    write_ngram(["one two three", "two three one", "three three two one"], tmp_path / "lm.arpa", 3)
    ours, theirs = NGram(str(tmp_path / "lm.arpa")), KenLM(str(tmp_path / "lm.arpa"))
    assert ours.order == theirs.order == 3
    for context in ((BEGIN,), (BEGIN, "two"), ("three", "two"), ("two",), ("one", "one"), ()):
        for word in ("one", "two", "three", "four", END):
            assert theirs.score(context, word) == pytest.approx(ours.score(context, word), abs=1e-5)


def test_a_binary_file_names_the_library_that_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lm.bin"
    path.write_bytes(b"mmap lm http://kheafield.com/code format version 5\n\0" + bytes(64))
    monkeypatch.setitem(sys.modules, "kenlm", None)
    with pytest.raises(MissingPackage, match=r"lm\.bin is a binary file of kenlm.*pip install kenlm"):
        read_ngram(str(path))
    with pytest.raises(DataError, match="Correct the path"):
        read_ngram(str(tmp_path / "none"))

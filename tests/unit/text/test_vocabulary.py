"""Vocabularies: golden ids, round trips, training, and errors of one line."""

from __future__ import annotations

import pickle
import re
import string
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from speechtrain.errors import ConfigError, DataError, RunError
from speechtrain.text.numbers import cardinal, ordinal
from speechtrain.text.vocabulary import Characters, NoText, SentencePiece, Tokenizer, train_sentencepiece

CONF = Path(__file__).parents[3] / "conf" / "tokenizer"
WORDS = list(map(cardinal, [*range(21), 30, 40]))
TEXTS = [f"{a} {b} {c}" for a in WORDS for b in WORDS for c in WORDS[:4]]


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / f"{request.param}.model"
    train_sentencepiece(TEXTS, path, request.param, 32)
    return str(path)


def test_characters_of_the_reference() -> None:
    vocabulary = Characters()
    assert (vocabulary.size, vocabulary.blank) == (29, 28)
    assert "".join(vocabulary.labels) == " " + string.ascii_lowercase + "'"
    assert vocabulary.encode("a z'") == [1, 0, 26, 27]
    assert vocabulary.decode([1, 0, 26, 27]) == "a z'"
    assert vocabulary.encode("") == []
    assert vocabulary.decode([]) == ""


@given(st.text(alphabet=" " + string.ascii_lowercase + "'"))
def test_characters_round_trip(text: str) -> None:
    vocabulary = Characters()
    ids = vocabulary.encode(text)
    assert vocabulary.decode(ids) == text
    assert all(0 <= label < vocabulary.blank for label in ids)
    assert vocabulary.unknown(text) == set()


def test_unknown_symbols_are_listed() -> None:
    vocabulary = Characters()
    assert vocabulary.unknown("Ab3 é") == {"A", "3", "é"}
    with pytest.raises(ValueError, match="unknown symbols '3' 'A' 'é'"):
        vocabulary.encode("Ab3 é")
    assert vocabulary.encode(vocabulary.normalise(" A  b ")) == [1, 0, 2]


def test_an_alphabet_names_each_symbol_once() -> None:
    with pytest.raises(ConfigError, match="repeats 'ab'"):
        Characters("abcab")
    with pytest.raises(ConfigError, match="is empty"):
        Characters("")


@pytest.mark.parametrize("ids", [[28], [-1], [0, 29, 1]])
def test_the_blank_and_strangers_are_not_decoded(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="label ids must be 0 to 27"):
        Characters().decode(ids)


def test_subwords_round_trip(model: str) -> None:
    vocabulary = SentencePiece(model)
    assert (vocabulary.size, vocabulary.blank, len(vocabulary.labels)) == (33, 32, 32)
    assert vocabulary.labels[0] == "<unk>"
    for text in [*TEXTS[::17], "", "net", "x" if "x" in vocabulary.labels else "six"]:
        ids = vocabulary.encode(text)
        assert 0 not in ids
        assert vocabulary.decode(ids) == text
    assert max(len(vocabulary.labels[i]) for i in vocabulary.encode("seven eleven")) > 1
    with pytest.raises(ValueError, match="label ids must be 0 to 31"):
        vocabulary.decode([32])


def test_subwords_list_unknown_symbols(model: str) -> None:
    vocabulary = SentencePiece(model)
    assert vocabulary.unknown("one 3é two jj") == {"3", "é", "j"}
    with pytest.raises(ValueError, match="unknown symbols '3' 'j' 'é'"):
        vocabulary.encode("one 3é two jj")
    assert vocabulary.unknown("<unk>") == set("<k>")  # the unknown piece has no spelling


def test_a_model_whose_pieces_are_no_text_is_refused(tmp_path: Path) -> None:
    train_sentencepiece(iter(TEXTS), tmp_path / "m", "unigram", 32)
    mark = "\u2581".encode()  # of a space, which begins most pieces
    (tmp_path / "bad").write_bytes((tmp_path / "m").read_bytes().replace(mark, b"\xe2\x9e\xe2"))
    with pytest.raises(DataError, match="is not a SentencePiece model"):
        SentencePiece(str(tmp_path / "bad"))


def test_training_is_deterministic(tmp_path: Path) -> None:
    for kind in ("unigram", "bpe"):
        for name in "ab":
            train_sentencepiece(iter(TEXTS), tmp_path / name, kind, 32)
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]  # no temporary file is left


def test_the_size_of_the_reference_puts_the_blank_at_1023(tmp_path: Path) -> None:
    texts = [f"{cardinal(n)} {ordinal(7 * n)}" for n in range(1, 200_000, 97)]
    letters = string.ascii_lowercase
    texts += [f"{a}{b}{c} {a}{b}{c}{a}" for a in letters for b in letters[::2] for c in letters[::5]]
    train_sentencepiece(texts, tmp_path / "m.model")
    vocabulary = SentencePiece(str(tmp_path / "m.model"))
    assert (vocabulary.size, vocabulary.blank) == (1024, 1023)


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_a_size_out_of_range_names_the_limit_and_the_limit_works(kind: str, tmp_path: Path) -> None:
    texts = TEXTS[:20]
    for wanted, bound in ((5000, "largest"), (3, "smallest")):
        with pytest.raises(DataError) as error:
            train_sentencepiece(texts, tmp_path / "m", kind, wanted)
        assert "\n" not in str(error.value)
        found = re.search(rf"The {bound} possible size is (\d+)", str(error.value))
        assert found is not None
        limit = int(found[1])
        train_sentencepiece(texts, tmp_path / "m", kind, limit)
        assert SentencePiece(str(tmp_path / "m")).size == limit + 1
        with pytest.raises(DataError, match=bound):
            train_sentencepiece(texts, tmp_path / "m", kind, limit + (1 if bound == "largest" else -1))


def test_training_refuses_no_text_and_other_kinds(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="every transcript is empty"):
        train_sentencepiece(["", "  "], tmp_path / "m")
    with pytest.raises(ConfigError, match="unigram or bpe"):
        train_sentencepiece(TEXTS, tmp_path / "m", "word")


def test_long_transcripts_are_not_left_out(tmp_path: Path) -> None:
    train_sentencepiece([*TEXTS, "jq" * 4000], tmp_path / "m", "bpe", 40)
    assert SentencePiece(str(tmp_path / "m")).unknown("jq") == set()


def test_the_run_keeps_a_copy(model: str, tmp_path: Path) -> None:
    original = SentencePiece(model, "english")
    assert SentencePiece.saved_arguments(str(tmp_path)) == {}
    original.save(str(tmp_path))
    original.save(str(tmp_path))  # a resumed run saves again
    arguments = {"model": "/moved/away.model", "normaliser": "english"} | SentencePiece.saved_arguments(
        str(tmp_path)
    )
    restored = SentencePiece(**arguments)
    restored.save(str(tmp_path))
    assert restored.state() == original.state()
    assert restored.encode("one two") == original.encode("one two")
    assert [p.name for p in tmp_path.iterdir()] == ["tokenizer.model"]


def test_a_run_holds_one_tokenizer(model: str, tmp_path: Path) -> None:
    train_sentencepiece(TEXTS, tmp_path / "other", "unigram", 33)
    SentencePiece(str(tmp_path / "other")).save(str(tmp_path / "run"))
    with pytest.raises(RunError, match=r"tokenizer\.model differs from"):
        SentencePiece(model).save(str(tmp_path / "run"))


def test_state_tells_tokenizers_apart(model: str) -> None:
    states = [
        Characters().state(),
        Characters(normaliser="english").state(),
        Characters("abc").state(),
        SentencePiece(model).state(),
        SentencePiece(model, "none").state(),
    ]
    assert len({repr(state) for state in states}) == 5
    assert Characters().state() == Characters().state()


def test_data_workers_can_be_sent_one(model: str) -> None:
    for vocabulary in (Characters(normaliser="lower+english"), SentencePiece(model)):
        copy: Tokenizer = pickle.loads(pickle.dumps(vocabulary))
        assert copy.state() == vocabulary.state()
        assert copy.encode("one two") == vocabulary.encode("one two")


@pytest.mark.parametrize("content", [None, b"", b"no model" * 100])
def test_an_unusable_model_is_one_line(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "m.model"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=re.escape(str(path))) as error:
        SentencePiece(str(path))
    assert "\n" not in str(error.value)


def test_the_configured_choices_build(model: str) -> None:
    for built in (Characters(), SentencePiece(model)):
        cls = type(built)
        node = yaml.safe_load((CONF / f"{cls.__name__.lower()}.yaml").read_text())
        assert node.pop("_target_") == f"{cls.__module__}.{cls.__name__}"
        assert node.get("model", "???") == "???"
        assert cls(**(node | {key: model for key in node if key == "model"})).state() == built.state()


def test_without_text_every_transcript_is_empty() -> None:
    vocabulary = NoText()
    assert (vocabulary.size, vocabulary.blank, vocabulary.labels) == (1, 0, [])
    assert (NoText.reads_text, Characters.reads_text, SentencePiece.reads_text) == (False, True, True)
    for text in ("", "one two", "日本"):
        assert vocabulary.normalise(text) == ""
        assert vocabulary.encode(vocabulary.normalise(text)) == []
    assert vocabulary.decode([]) == ""
    assert vocabulary.unknown("ab") == {"a", "b"}
    with pytest.raises(ValueError, match="unknown symbols 'a' 'b'"):
        vocabulary.encode("ab")
    with pytest.raises(ValueError, match="tokenizer=none has no label ids"):
        vocabulary.decode([0])
    assert pickle.loads(pickle.dumps(vocabulary)).state() == vocabulary.state() == {"kind": "none"}

"""Normalisers: each rule of each corpus, and what holds for any text."""

from __future__ import annotations

import json
import pickle
import re
import string
import sys
import time
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

from speechtrain.errors import ConfigError, DataError, MachineError
from speechtrain.text.normalise import (
    NORMALISERS,
    REMARK,
    common_voice,
    english,
    invisible,
    lower,
    none,
    normalise_in,
    normaliser,
    scoring_normaliser,
    switchboard,
    tedlium,
    unicode,
)

ALPHABET = set(" '" + string.ascii_lowercase)


def test_none_changes_nothing() -> None:
    assert none("  A\tb ") == "  A\tb "


def test_lower_collapses_spaces() -> None:
    assert lower("  Hello\t\n WORLD ") == "hello world"


def test_lower_leaves_no_dot_of_its_own() -> None:
    assert lower("İstanbul, Ė") == "istanbul, ė"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("«E\u0301tait-ce», dit-il… l’été, aujourd’hui!", "était-ce dit-il l'été aujourd'hui"),
        ("Yaá  bísí la akíti", "yaá bísí la akíti"),
        ("- po' - 'n boek", "po' 'n boek"),
        ("क्या हाल है?", "क्या हाल है"),
        ("5 € (2.5 %)", "5 € 2.5"),
        ("", ""),
    ],
)
def test_unicode_keeps_the_letters_of_any_language(text: str, said: str) -> None:
    assert unicode(text) == said
    assert unicode(said) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Col·legi, il·lusió, coŀlegi.", "col·legi il·lusió col·legi"),
        ("EU:n, USA:ssa: joo", "eu:n usa:ssa joo"),
        ("Dù:ni:ye:li:sv̌, sà:gwű:", "dù:ni:ye:li:sv̌ sà:gwű"),  # 6 of 3,769 words of a corpus end in a colon
        ("Wa'ká:raton", "wa'ká:raton"),
        ("दु:ख", "दु:ख"),
        ("U.S.A. z.B. snake_case a..b", "u.s.a z.b snake_case a b"),
        ("Ինչո՞ւ, ո՞վ, այո՛։ իսկ՝ նա", "ինչո՞ւ ո՞վ այո՛ իսկ նա"),
        ("3:15, 1.5; 1,000 ١٫٥ or 1, 2 and a,b", "3:15 1.5 1,000 ١٫٥ or 1 2 and a b"),
        # Han, kana, Thai and Khmer have no signs within words.
        ("史蒂夫·乔布斯:他.我", "史蒂夫 乔布斯 他 我"),
        ("พ.ศ. ๑.๕ ១.៥", "พ ศ ๑.๕ ១.៥"),
    ],
)
def test_unicode_keeps_the_signs_that_join_letters(text: str, said: str) -> None:
    assert unicode(text) == said
    assert unicode(said) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("צה״ל, ג׳ירפה", "צה״ל ג׳ירפה"),
        ("צה\"ל, צה”ל, ג'ירפה", "צה״ל צה״ל ג׳ירפה"),
        ('צַהַ"ל', "צַהַ״ל"),
        ('הוא אמר "שלום" לה', "הוא אמר שלום לה"),
    ],
)
def test_unicode_has_one_spelling_of_geresh_and_gershayim(text: str, said: str) -> None:
    assert unicode(text) == said
    assert unicode(said) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("'Yan ƙasa, 'ya'ya", "'yan ƙasa 'ya'ya"),
        ("'n Boek van 's morgens", "'n boek van 's morgens"),
        ("'A'ole ‘a‘ole ʻaʻole", "'a'ole 'a'ole ʻaʻole"),
        ("don`t don´t dogs'", "don't don't dogs'"),
        # A pair around words is a quotation.
        ("He said 'yes', ‘no way.’ and 'it's'", "he said yes no way and it's"),
        ("`quoted' ``doubled'' ''twice'' rock 'n' roll", "quoted doubled twice rock n roll"),
        ("the 'big 'n' small' ones'", "the big n small ones'"),
        ("rock ' n ' roll '", "rock n roll"),
        ("('n boek)", "'n boek"),
    ],
)
def test_unicode_tells_apostrophes_from_quotation_marks(text: str, said: str) -> None:
    assert unicode(text) == said
    assert unicode(said) == said


INVISIBLE = "\u200f\u200e\u200b\ufeff\u00ad\u202a\u2066\u061c\u2060\0\a"


def test_unicode_drops_invisible_characters() -> None:
    for character in INVISIBLE:
        assert unicode(f"{character}wo{character}rd{character} two") == "word two"
        assert invisible(f"wo{character}rd") == [character]
    assert unicode("a\tb\r\nc\u00a0d\u3000e\u2028f\x85g\x1fh") == "a b c d e f g h"
    assert invisible("a\tb\r\nc\u00a0d\u3000e\u200cf\u200dg") == []
    assert unicode("ខ្ញុំ\u200bស្រឡាញ់") == "ខ្ញុំស្រឡាញ់"
    assert unicode("كـتـاب") == "كتاب"  # the tatweel is no letter
    assert unicode("\u200cمی\u200c\u200cروم \u200d'a") == "می\u200cروم 'a"  # joiners follow a letter


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("İstanbul I\u0307zmir", "istanbul izmir"),
        ("i̇̀ j̇ į̇̃ Ė", "ì j į̃ ė"),  # the dots of Lithuanian dictionaries
        ("ΟΔΥΣΣΕΥΣ, ΣΑΣ", "οδυσσευς σας"),
        ("Արև, արեւ ԵՎ", "արև արև եվ"),
    ],
)
def test_unicode_has_one_lower_case_of_each_letter(text: str, said: str) -> None:
    assert unicode(text) == said
    assert unicode(said) == said


def test_a_language_has_its_lower_case() -> None:
    turkish = normaliser("turkish+unicode")
    assert turkish("IŞIK, İstanbul I\u0307zmir KIZILIRMAK") == "ışık istanbul izmir kızılırmak"
    for language in ("tr", "TR", "tr-TR", "az_Latn_AZ", "tur", "aze"):
        assert normalise_in(language, unicode, "IŞIK İl") == "ışık il"
        assert normalise_in(language, lower, "IŞIK İl") == "ışık il"
        assert normalise_in(language, turkish, "IŞIK İl") == "ışık il"
        assert normalise_in(language, none, "IŞIK İl") == "IŞIK İl"  # keeps capital letters
    for language in ("", "en", "trv", "lt", "azərbaycan"):
        assert normalise_in(language, unicode, "IŞIK İl") == "işik il"


@pytest.mark.parametrize(
    ("text", "said", "examples"),
    [
        ("[laughter] Ngá (unclear).", "ngá", ["[laughter]", "(unclear)"]),
        ("<i>Kyéma</i>, <v Anna>ngá{cough}</v>", "kyéma ngá", ["<i>", "</i>", "<v Anna>", "{cough}", "</v>"]),
        ("xxx ngá +++, Xxxx. (xxx)", "ngá", ["xxx", "+++", "Xxxx", "xxx"]),
        (
            "ngá[door slams]kyéma (Coughs) (unclear, 0:15)",
            "ngá kyéma",
            ["[door slams]", "(Coughs)", "(unclear, 0:15)"],
        ),
        ("<NOISE> <unk> </a <b>> 3 < 5", "a 3 5", ["<NOISE>", "<unk>", "<", "<b>", ">", "<"]),
        # Other words in brackets may be spoken.
        (
            "(he said) xx C++ [s]he person(s) (unclear words)",
            "he said xx c++ s he person s unclear words",
            [],
        ),
    ],
)
def test_unicode_drops_tags_and_remarks(text: str, said: str, examples: list[str]) -> None:
    assert unicode(text) == said
    assert REMARK.findall(text) == examples


def test_remarks_are_dropped_in_linear_time() -> None:
    for part in ("<a", "</", "[a", "{a", "(noise", "(noise ", "x", "+", "<a ", "[" * 9, "(noise)"):
        begun = time.perf_counter()
        unicode(part * (400_000 // len(part)))
        assert time.perf_counter() - begun < 20  # Quadratic time would be minutes.


@given(st.text(alphabet="aΣéİն1  '\"`-:.,·_՞׳\u200c\u200d\u200b\u0307א語\tx+<>[]{}/", max_size=30))
def test_unicode_is_stable(text: str) -> None:
    assert unicode(unicode(text)) == unicode(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Hello, World!", "hello world"),
        ("Øre and naïve Café, Straße", "ore and naive cafe strasse"),
        ("it’s the ‘90s", "it's the nineties"),
        ("salt & pepper, 1+1", "salt and pepper one plus one"),
        (
            "Mr. and Mrs. Smith saw Dr. Jones of St. Ives",
            "mister and missus smith saw doctor jones of saint ives",
        ),
        ("the mr of it", "the mr of it"),  # an abbreviation ends in a full stop
        ("Alist. Best. first.", "alist best first"),  # and is a whole word
        ("well-known—or not…", "well known or not"),
        ("“quoted”, ``quoted''", "quoted quoted"),
        ("rock ' n ' roll", "rock n roll"),
        ("o'clock dogs'", "o'clock dogs'"),
        ("a_b/c\\d", "a b c d"),
        ("½ cup", "one two cup"),
        ("ﬁve x²", "five x two"),
        ("tea 茶 time", "tea time"),
        ("non\u00a0breaking\u2003spaces", "non breaking spaces"),
        ("£5 or € 6", "five pounds or six euros"),
        ("the £ sign", "the sign"),
        ("", ""),
    ],
)
def test_english(text: str, said: str) -> None:
    assert english(text) == said


@given(st.text())
def test_english_stays_in_28_symbols_and_is_stable(text: str) -> None:
    said = english(text)
    assert set(said) <= ALPHABET
    assert said == " ".join(said.split())
    assert english(said) == said


@given(st.text(alphabet=sorted(ALPHABET)))
def test_english_keeps_the_words_of_a_clean_transcript(text: str) -> None:
    words = [w for w in text.split() if "''" not in w and w != "'"]
    assert english(" ".join(words)).split() == words


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('"Hello there."', "Hello there."),
        ('"He said ""hi"" to me."', 'He said "hi" to me.'),
        ('"""Hi,"" he said."', '"Hi," he said.'),
        ('"Hello," she said, "bye"', '"Hello," she said, "bye"'),  # two pairs enclose nothing
        ('He said ""hi""', 'He said "hi"'),
        ("  plain   text ", "plain text"),
        ('"', '"'),
        ("", ""),
    ],
)
def test_common_voice(text: str, said: str) -> None:
    assert common_voice(text) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("it 's what they 've said", "it's what they've said"),
        ("don 't we 're he 'll i 'm he 'd", "don't we're he'll i'm he'd"),
        ("five o 'clock y 'all", "five o'clock y'all"),
        ("IT 'S", "IT'S"),
        ("the 'tall 'dog", "the 'tall 'dog"),  # words that begin like a contraction
        ("a <unk> word <UNK>", "a word"),
        ("the <unk> 's house", "the house"),  # not "the's house"
        ("'s end", "'s end"),  # nothing to join to
        ("ignore_time_segment_in_scoring", ""),
    ],
)
def test_tedlium(text: str, said: str) -> None:
    assert tedlium(text) == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("yes <b_aside> no <e_aside> <contraction e_form=x> so", "yes no so"),
        ("[noise] a [LAUGHTER] b [vocalized-noise] c [silence] (%hesitation) d (%HESITATION)", "a b c d"),
        ("[laughter-yes] [laughter-oh] well", "yes oh well"),
        ("about_1 them_1", "about them"),
        ("f_.b_.i_. agent u.s.", "f b i agent us"),
        ("[said/meant] it", "meant it"),
        ("i [two words/other form] it", "i other form it"),
        ("the [tha-/that] way", "the tha- way"),
        ("th[at]- was -[th]at sh[ould] go", "th- was -at sh- go"),
        ("[laughter-th[at]-] it", "th- it"),
        ("[foo bar] baz", "foo bar baz"),
        ("{brr} (( maybe )) so", "brr maybe so"),
        ("uh um yes hmm mm mhm mmm uhm no", "yes no"),
        ("uh-huh umbrella mm's", "uh-huh umbrella mm's"),
        ("Uh WELL", "WELL"),
        ("well - [at]- yes", "well yes"),
        ("[noise] [laughter]", ""),
    ],
)
def test_switchboard(text: str, said: str) -> None:
    assert switchboard(text) == said


def test_a_slash_outside_brackets_deletes_no_word() -> None:
    """The reference deletes the last word before each slash, an alternative or not."""
    assert switchboard("this and/or that, twenty four/seven") == "this and or that, twenty four seven"


@given(st.text(alphabet="ab []{}()/-<>_.1'\" ", max_size=40), st.sampled_from(sorted(NORMALISERS)))
def test_any_text_comes_out_squeezed(text: str, name: str) -> None:
    said = normaliser(name)(text)
    assert name == "none" or said == " ".join(said.split())


def test_switchboard_leaves_no_bracket() -> None:
    assert switchboard("a [b [c/d] e] f] [g ((h) i} [/] [-/") == "a b d e f g h i"


def test_normalisers_join_from_left_to_right() -> None:
    joined = normaliser("switchboard + english")
    assert joined("[noise] Uh, THE [laughter-F_.B_.I_.] 3rd") == "the f b i third"
    assert normaliser("english+switchboard")("[noise]") == "noise"
    assert pickle.loads(pickle.dumps(joined))("[noise] A") == "a"


def test_an_unknown_name_is_one_line_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"normaliser: 'englsh' is unknown; did you mean 'english'"):
        normaliser("lower+englsh")


SPELLINGS = {
    "Mr. O'Neill won't pay $3.50 for the colour, uh, twenty one times!": "$3.50 for the color 21 times",
    "[noise] it 's (sic) two and a half percent, naïve": "it is 2.5% naive",
    "um": "",
}


@pytest.mark.parametrize("text", SPELLINGS)
def test_whisper_english_gives_the_text_of_transformers(text: str) -> None:
    spellings = files("whisper_normalizer").joinpath("normalizers/english.json").read_text(encoding="utf-8")
    oracle = EnglishTextNormalizer(json.loads(spellings))
    spelling = scoring_normaliser("whisper_english")(text)
    assert spelling.endswith(SPELLINGS[text])
    assert spelling == " ".join(oracle(text).split())


def test_whisper_english_scores_only() -> None:
    with pytest.raises(ConfigError, match="'whisper_english' is unknown"):
        normaliser("whisper_english")
    with pytest.raises(ConfigError, match=r"'whisper' is unknown; .* Choose from none, .*, whisper_english"):
        scoring_normaliser("whisper")


@pytest.mark.parametrize("text", ["9" * 5_000, "(" * 10_001])
def test_whisper_english_refuses_what_its_library_cannot_read(text: str) -> None:
    with pytest.raises(DataError, match=r"whisper_english cannot read the text '[9(]+[.]{3}"):
        scoring_normaliser("whisper_english")(text)


def test_whisper_english_names_the_library_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "whisper_normalizer.english", None)
    with pytest.raises(MachineError, match=r"whisper_english needs .* pip install -e '\.\[scoring\]'"):
        scoring_normaliser("lower+whisper_english")


def test_pages_and_comments_name_each_normaliser() -> None:
    root = Path(__file__).resolve().parents[3]
    names = list(NORMALISERS)
    for choice in ("characters", "huggingface", "sentencepiece"):
        text = (root / "conf" / "tokenizer" / f"{choice}.yaml").read_text()
        line = text.partition("normaliser:")[2].partition("\n")[0]
        assert " | ".join(names) + ", joined by +" in line
    page = (root / "docs" / "text.md").read_text()
    table = page.partition("## Normalisers")[2]
    assert re.findall(r"^\| `(\w+)`", table, re.M) == names


@pytest.mark.parametrize(
    ("name", "mark"), [("unicode", "\u0301"), ("english", "\u0301"), ("switchboard+unicode", ".\u0301")]
)
def test_a_transcript_of_more_than_30_combining_marks_is_refused(name: str, mark: str) -> None:
    normalise = normaliser(name)
    marks = "\u0301\u0316" * 15
    assert normalise(f"one a{marks} b{marks}")
    with pytest.raises(DataError, match=r"'one a.*more than 30 combining marks"):
        normalise(f"one a{marks}{mark}")

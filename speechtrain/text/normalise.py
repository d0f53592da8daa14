"""Transcript normalisers: functions from text to text, selected by name.

``lower``, ``unicode`` and ``english`` unify the spelling of transcripts. ``turkish`` comes before one of
them. ``common_voice``, ``tedlium`` and
``switchboard`` remove the annotations of one corpus, in upper or lower case, and do not change the case and
the punctuation of other words. Several normalisers are joined by ``+``, as in ``switchboard+english``.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal

from speechtrain.errors import ConfigError, DataError, nearest, shorten
from speechtrain.text.numbers import expand_numbers
from speechtrain.text.whisper_english import WhisperEnglish

Normaliser = Callable[[str], str]

DAMAGED = "\ufffd"
"""The character that a program writes for bytes that it cannot read."""

_SOFT_DOT = re.compile("(?<=[ijį])\u0307+")  # İ in lower case is i and this dot, which i has already.

_MOST_MARKS = 30  # combining marks in a row, the limit of Unicode's stream-safe text format (UAX 15)


def _squeeze(text: str) -> str:
    """Return text with single spaces between words, and without spaces at its ends."""
    return " ".join(text.split())


def none(text: str) -> str:
    """Return the text unchanged."""
    return text


def lower(text: str) -> str:
    """Return text in lower case, with single spaces between words and without spaces at its ends."""
    return _squeeze(_SOFT_DOT.sub("", text.lower()))


_TURKIC_LANGUAGES = ("tr", "tur", "az", "aze", "azj")  # Turkish and Azerbaijani, of ISO 639


def turkish(text: str) -> str:
    """Return text with ``ı`` and ``i`` for ``I`` and ``İ``, their lower case in Turkish and Azerbaijani."""
    return _squeeze(text.replace("I\u0307", "i").replace("İ", "i").replace("I", "ı"))


def normalise_in(language: str, normalise: Normaliser, text: str) -> str:
    """Return the normalised text, with the lower case of its language, such as ``tr`` or ``az-AZ``.

    Python lowers letters as Unicode does for no language in particular. For Lithuanian this only differs in
    the accents of dictionaries. A normaliser that does not lower letters does not change.
    """
    is_turkic = re.split("[-_]", language.lower())[0] in _TURKIC_LANGUAGES
    if is_turkic and normalise("I") == "i":
        text = turkish(text)
    return normalise(text)


def _unicode_form(form: Literal["NFC", "NFKD"], text: str) -> str:
    """Return ``text`` in a normal form of Unicode.

    Raises DataError for more than 30 combining marks in a row, because Python's time is quadratic in their
    number.
    """
    if text.isascii():
        return text
    marks = 0  # combining marks in a row
    for character in text:
        if not unicodedata.combining(character):
            marks = 0
            continue
        marks += 1
        if marks > _MOST_MARKS:
            name = shorten(text, 100)
            raise DataError(f"the transcript {name!r} has more than {_MOST_MARKS} combining marks in a row")
    return unicodedata.normalize(form, text)


# The tatweel (U+0640) only makes an Arabic word longer on paper, so it is removed.
_SPELLINGS = str.maketrans(
    dict.fromkeys("‘’‛ʼ＇`´", "'") | dict.fromkeys("‐‑", "-") | {"ŀ": "l·", "Ŀ": "L·", "ـ": None}
)
_JOINERS = "\u200c\u200d"  # They choose the shapes of letters, and so the word, in Persian and Indic scripts.
_LETTERS = "LMN"  # the first letters of the categories of letters, their marks, and numbers

# Signs within words, by the table of Unicode's word rules (UAX 29, section 4.1). MidLetter, MidNumLet and
# ExtendNumLet join letters, MidNum joins digits, and marks that are ALetter follow a letter. The hyphen is
# added. Full-width forms are left out, because they are Chinese and Japanese punctuation.
_JOINTS = "-:·‧.․՟״_‿⁀⁔֊"
_DIGIT_JOINTS = ",;،؍٫٬"
_LETTER_MARKS = "՚՛՜՞׳"
# The rules join no letters of scripts without spaces between words: Thai, Lao, Burmese, Khmer, kana, Han.
_UNSPACED = "\u0e01-\u0e4e\u0e81-\u0ecd\u1000-\u103f\u1050-\u109f\u1780-\u17d3\u3040-\u30ff\u3400-\u9fff"
_UNSPACED_STOP = re.compile(f"(?<=[{_UNSPACED}])[:·.]")
_HEBREW_QUOTE = re.compile("(?<=[\u0591-\u05f2])['\"”](?=[\u05d0-\u05f2])")  # typed for geresh or gershayim
_TO_HEBREW = str.maketrans("'\"”", "׳״״")


def invisible(text: str) -> list[str]:
    """Return the control and format characters of a text, except white space and joiners after a letter.

    Khmer's zero-width space (U+200B) is one of them, because it shows no space and writers often omit it.
    """
    neighbours = zip(" " + text, text, strict=False)
    return [character for before, character in neighbours if _is_invisible(character, before)]


def _is_invisible(character: str, before: str) -> bool:
    if character in _JOINERS:
        return unicodedata.category(before)[0] not in "LM"
    return unicodedata.category(character) in ("Cc", "Cf") and not character.isspace()


# Other words in round brackets may be spoken, as may a single letter in square ones.
_BRACKETED_WORDS = (
    "unclear|unintelligible|inaudible|indistinct|crosstalk|noise|laugh[a-z]*|cough[a-z]*|sigh[a-z]*|breath[a-z]*"
    "|silence|pause|music|applause"
)
REMARK = re.compile(
    r"</?\w[^<>]*>|[<>]|\[[^\[\]]{2,}\]|\{[^{}]*\}"
    rf"|\((?:{_BRACKETED_WORDS})[\W\d]*?\)|\bx{{3,}}(?![\w{_JOINERS}])|\+{{3,}}",
    re.IGNORECASE,
)
"""A tag, a remark in brackets, or a sign for unintelligible speech. No speaker has said it."""


def unicode(text: str) -> str:
    """Return text of any language in NFC and lower case, with spaces instead of punctuation and REMARK.

    Signs within a word stay, as in ``col·legi``, ``dit-il`` and ``1.5``, and symbols such as € stay. An
    apostrophe beside a letter is a letter, but a pair around words is a quotation. Invisible characters are
    removed. Other signs for the apostrophe, geresh and gershayim get one spelling, and so does ``եւ``.
    """
    text = text.translate(_SPELLINGS)
    neighbours = zip(" " + text, text, strict=False)
    text = "".join(character for before, character in neighbours if not _is_invisible(character, before))
    text = REMARK.sub(" ", _unicode_form("NFC", lower(text))).replace("եւ", "և")
    text = _HEBREW_QUOTE.sub(lambda quote: quote[0].translate(_TO_HEBREW), text)
    text = text.replace("''", " ")  # as in ''quoted''
    text = _squeeze(_UNSPACED_STOP.sub(" ", text))
    # The first letters of Unicode's categories: letters, marks, numbers, punctuation and so on. A separator Z
    # is added at the end as the neighbour of the last character. It is also the neighbour of the first
    # character, because the index -1 means the last element.
    categories = [unicodedata.category(character)[0] for character in text] + ["Z"]
    characters = list(text)
    for position, character in enumerate(text):
        before, after = categories[position - 1], categories[position + 1]
        if categories[position] == "P" and not _is_in_word(character, before, after):
            characters[position] = " "
    for position in _quotation_marks(text, categories):
        characters[position] = " "
    return _squeeze("".join(characters))


def _is_in_word(sign: str, before: str, after: str) -> bool:
    """Return whether a punctuation sign belongs to a word. Its neighbours have these categories."""
    follows_letter, precedes_letter = before in _LETTERS, after in _LETTERS
    if sign == "'":
        return follows_letter or precedes_letter
    if sign in _LETTER_MARKS:
        return follows_letter
    if sign in _DIGIT_JOINTS:
        return before == after == "N"
    return sign in _JOINTS and follows_letter and precedes_letter


def _quotation_marks(text: str, categories: Sequence[str]) -> Iterator[int]:
    """Yield the positions of the apostrophes that are a pair around words."""
    openings: list[int] = []
    for position, character in enumerate(text):
        if character != "'":
            continue
        before, after = categories[position - 1], categories[position + 1]
        if after not in _LETTERS and before != "Z" and openings:
            yield openings.pop()
            yield position
        elif after in _LETTERS and before not in _LETTERS:
            openings.append(position)


# Letters and signs that NFKD does not decompose. Other Latin letters only lose their diacritics.
_FOLD = str.maketrans(
    {
        **dict.fromkeys("‘’‛′ʼʻ`´", "'"),
        **dict.fromkeys("“”„‟″«»", '"'),
        **dict.fromkeys("‐‑‒–—―−⁄", "-"),
        "Æ": "AE", "æ": "ae", "Œ": "OE", "œ": "oe", "ß": "ss", "ẞ": "SS",
        "Ø": "O", "ø": "o", "Đ": "D", "đ": "d", "Ð": "D", "ð": "d", "Þ": "Th", "þ": "th",
        "Ł": "L", "ł": "l", "Ħ": "H", "ħ": "h", "ı": "i", "ĸ": "k", "Ŋ": "N", "ŋ": "n", "ſ": "s",
    }
)  # fmt: skip

_ABBREVIATIONS = {
    "capt": "captain", "co": "company", "col": "colonel", "dr": "doctor", "drs": "doctors", "esq": "esquire",
    "ft": "fort", "gen": "general", "hon": "honorable", "jr": "junior", "lt": "lieutenant", "ltd": "limited",
    "maj": "major", "mr": "mister", "mrs": "missus", "rev": "reverend", "sgt": "sergeant", "st": "saint",
}  # fmt: skip
_ABBREVIATION = re.compile(rf"\b({'|'.join(_ABBREVIATIONS)})\.", re.ASCII)
_SPOKEN_SIGNS = str.maketrans({"&": " and ", "+": " plus "})
_PUNCTUATION = re.compile(r"[!-&(-/:-@\[-`{-~]")  # ASCII punctuation except the apostrophe
_FOREIGN = re.compile(r"[^ a-z']")
_QUOTES = re.compile(r"''+|(?<!\S)'(?!\S)")  # apostrophes outside words
_CURRENCY = "£€"  # Folding keeps these signs, because a later step spells them.


def english(text: str) -> str:
    """Return English text with 28 symbols: space, a to z and the apostrophe.

    The steps follow the English cleaners of MLPerf's RNN-T reference, in this order: fold to ASCII,
    lower case, numbers and amounts to words, abbreviations that end in a full stop, ``&`` to "and"
    and ``+`` to "plus", other punctuation to spaces. The last step removes other symbols and
    apostrophes outside words, and leaves single spaces. Unlike in the reference, decimals are read
    digit by digit, "%" is "percent" and "mrs." is "missus".
    """
    # Each letter becomes its ASCII base, such as "Oe" for "Øé". NFKD produces some of the signs in the table,
    # so the table is applied twice. Other characters that are not ASCII are removed.
    text = _unicode_form("NFKD", text.translate(_FOLD)).translate(_FOLD)
    text = "".join(c for c in text if c.isascii() or c in _CURRENCY or c.isspace())
    text = expand_numbers(_squeeze(text).lower())
    text = _ABBREVIATION.sub(lambda match: _ABBREVIATIONS[match[1]], text)
    text = _PUNCTUATION.sub(" ", text.translate(_SPOKEN_SIGNS))
    return _squeeze(_QUOTES.sub(" ", _FOREIGN.sub("", text)))


def common_voice(text: str) -> str:
    """Undo the CSV quoting of Common Voice's transcripts.

    Enclosing double quotes are removed if all quotes inside are doubled. Doubled quotes become single ones.
    """
    text = _squeeze(text)
    if len(text) > 1 and text[0] == text[-1] == '"' and '"' not in text[1:-1].replace('""', ""):
        text = text[1:-1]
    return _squeeze(text.replace('""', '"'))


_CONTRACTION = r"'(?:s|t|re|ve|m|ll|d|clock|all)\b"
_UNKNOWN_WORD = re.compile(rf"<unk>(?:\s*{_CONTRACTION})?", re.IGNORECASE)
_SPACED_CONTRACTION = re.compile(rf"(?<=\w)\s+(?={_CONTRACTION})", re.IGNORECASE)


def tedlium(text: str) -> str:
    """Remove TED-LIUM 3's ``<unk>`` and a contraction attached to it, and join "it 's" to "it's".

    A segment that the corpus excludes from scoring becomes empty.
    """
    if text.strip().lower() == "ignore_time_segment_in_scoring":
        return ""
    return _squeeze(_SPACED_CONTRACTION.sub("", _UNKNOWN_WORD.sub(" ", text)))


_TAG = re.compile(r"<[^<>]*>")
_NOISE = re.compile(
    r"\[(?:noise|laughter|silence|vocalized-noise|laugh|sigh|cough|mn|breath|lipsmack|sneeze|skip|pause)\]"
    r"|\(%hesitation\)",
    re.IGNORECASE,
)
_LAUGHED_WORD = re.compile(r"\[laughter-", re.IGNORECASE)
_VARIANT = re.compile(r"_1\b")
# The closing bracket is optional, although only a match with the bracket is replaced. Without the ``?``, each
# "-/" that no bracket closes would make ``re`` read the rest of the text in vain, in quadratic time.
_ABANDONED = re.compile(r"-/[^\[\]]*(\]?)")
_ANOMALOUS = re.compile(r"\[[^\[\]/]*/([^\[\]/]*)\]")
_WHOLE_BRACKET = re.compile(r"(?<!\S)\[([^\[\]]+)\](?!\S)")
_UNSPOKEN = re.compile(r"-?\[[^\[\]]*\]-?")
_BRACKETS = re.compile(r"[\[\](){}]")
_FILLER = re.compile(r"(?<![\w'-])(?:uh|uhm|um|hmm|mm|mhm|mmm)(?![\w'-])", re.IGNORECASE)
_LONE_HYPHEN = re.compile(r"(?<!\S)-+(?!\S)")


def switchboard(text: str) -> str:
    """Reduce Switchboard's transcripts to the spoken words, without annotations.

    Tags, noises and filler words (uh, um) are removed. ``[laughter-yes]`` becomes "yes", and ``f_.b_.i_.``
    becomes "f b i". An anomalous ``[said/meant]`` becomes the intended word, and an abandoned ``[wh-/what]``
    becomes the spoken part. The unspoken part of a word, as in ``th[at]-``, becomes a hyphen. A slash outside
    brackets separates two spoken words and becomes a space.
    """
    text = _NOISE.sub(" ", _TAG.sub(" ", text))
    text = _VARIANT.sub("", _LAUGHED_WORD.sub("", text))
    text = text.replace("_.", " ").replace(".", "")
    # An abandoned word without a closing bracket (group 1) does not change.
    text = _ABANDONED.sub(lambda match: "-" if match[1] else match[0], text)
    text = _ANOMALOUS.sub(r"\1", text)
    text = _UNSPOKEN.sub("-", _WHOLE_BRACKET.sub(r"\1", text))
    text = _FILLER.sub(" ", _BRACKETS.sub("", text).replace("/", " "))
    return _squeeze(_LONE_HYPHEN.sub(" ", text))


NORMALISERS: Mapping[str, Normaliser] = {
    function.__name__: function
    for function in (none, lower, unicode, english, turkish, common_voice, tedlium, switchboard)
}


def normaliser(name: str) -> Normaliser:
    """Return the normaliser called ``name``, or several joined by ``+``, applied from left to right.

    Raises ConfigError that suggests the nearest known name.
    """
    # Data workers need a function that can be pickled.
    return partial(_in_order, _steps(name, NORMALISERS))


def scoring_normaliser(name: str) -> Normaliser:
    """Return the normaliser called ``name`` for texts that are scored.

    Its name may also contain ``whisper_english``. Training does not use that normaliser, because its time is
    quadratic. Raises ConfigError for an unknown name, and MachineError without the library of
    ``whisper_english``.
    """
    whisper_english = WhisperEnglish()
    steps = _steps(name, {**NORMALISERS, "whisper_english": whisper_english})
    if whisper_english in steps:
        whisper_english.load()  # The error of a missing library comes before minutes of decoding.
    return partial(_in_order, steps)


def _steps(name: str, choices: Mapping[str, Normaliser]) -> list[Normaliser]:
    """Return the normalisers of ``choices`` that ``name`` joins by ``+``. Raises ConfigError."""
    steps = []
    for part in name.split("+"):
        part = part.strip()
        if part not in choices:
            raise ConfigError(
                f"normaliser: {part!r} is unknown{nearest(part, choices)}. "
                f"Choose from {', '.join(choices)}, or join several with '+'"
            )
        steps.append(choices[part])
    return steps


def _in_order(steps: Sequence[Normaliser], text: str) -> str:
    for step in steps:
        text = step(text)
    return text

"""Spells English numerals as they are read aloud, such as "1984", "3rd" and "$2.50"."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from num2words import num2words  # type: ignore[import-untyped]

_MOST_DIGITS = 18  # A number of more digits is spelt digit by digit.


@lru_cache(10_000)  # A call of num2words takes 45 µs.
def _words(number: int, form: str) -> str:
    words: str = num2words(number, to=form)  # "one thousand, two hundred and thirty-four"
    return words.replace(" and ", " ").replace(",", "").replace("-", " ")


def spell_digits(digits: str) -> str:
    """Return each digit as a word. For example, ``"007"`` becomes ``"zero zero seven"``."""
    return " ".join(_words(int(digit), "cardinal") for digit in digits)


def cardinal(number: int) -> str:
    """Return a cardinal in words, without "and". For example, 121 becomes ``"one hundred twenty one"``.

    From 10^18 on, each digit is spelt.
    """
    if number < 0:
        raise ValueError(f"{number} is negative")
    return spell_digits(str(number)) if number >= 10**_MOST_DIGITS else _words(number, "cardinal")


def ordinal(number: int) -> str:
    """Return an ordinal in words. For example, 21 becomes ``"twenty first"``."""
    return _words(number, "ordinal")


def year(number: int) -> str:
    """Return a year in words. For example, 1905 becomes ``"nineteen oh five"``.

    A number outside 1001 to 2999, or in the first decade of a millennium, becomes a cardinal.
    """
    # num2words itself spells a year such as 2005 as a cardinal.
    return _words(number, "year") if 1000 < number < 3000 else cardinal(number)


def _cardinal_of_digits(digits: str) -> str:
    # The length is compared first, because int() refuses more than 4300 digits.
    return cardinal(int(digits)) if len(digits) <= _MOST_DIGITS else spell_digits(digits)


def _code_year_or_cardinal(digits: str) -> str:
    """Return digits without separators in words.

    Digits with a leading zero are a code, which is spelt digit by digit. Other four digits are a year.
    """
    if len(digits) > 1 and digits[0] == "0":
        return spell_digits(digits)
    return year(int(digits)) if len(digits) == 4 else _cardinal_of_digits(digits)


def _decade(digits: str) -> str:
    """Return a decade in words. For example, 1980 becomes ``"nineteen eighties"``."""
    words = _code_year_or_cardinal(digits)
    return words[:-1] + "ies" if words.endswith("y") else words + "s"


def _ordinal_of_digits(digits: str) -> str:
    return ordinal(int(digits)) if len(digits) <= _MOST_DIGITS else spell_digits(digits)


class _Currency(NamedTuple):
    """The words for a currency and its coin, each in the singular and the plural."""

    unit: str
    units: str
    coin: str
    coins: str


_CURRENCIES = {
    "$": _Currency("dollar", "dollars", "cent", "cents"),
    "£": _Currency("pound", "pounds", "penny", "pence"),
    "€": _Currency("euro", "euros", "cent", "cents"),
}


def _money(match: re.Match[str]) -> str:
    """Return the words of a match of ``_MONEY``, between spaces."""
    sign, integer, fraction, scale = match.group("sign", "integer", "fraction", "scale")
    currency, integer = _CURRENCIES[sign], integer.replace(",", "")
    words = []
    has_coins = fraction is None or len(fraction) == 2
    if scale or not has_coins:  # "$2.5 million" or "$1.125"
        words.append(_cardinal_of_digits(integer))
        if fraction:
            words.append(f"point {spell_digits(fraction)}")
        words += filter(None, (scale, currency.units))
        return f" {' '.join(words)} "
    # "$0.50" becomes "fifty cents", and "$0" becomes "zero dollars".
    integer, coins = integer.lstrip("0") or "0", int(fraction or 0)
    if integer != "0" or not coins:
        noun = currency.unit if integer == "1" else currency.units
        words.append(f"{_cardinal_of_digits(integer)} {noun}")
    if coins:
        noun = currency.coin if coins == 1 else currency.coins
        words.append(f"{cardinal(coins)} {noun}")
    return f" {' '.join(words)} "


_MONEY = re.compile(
    r"(?P<sign>[$£€])\s?(?P<integer>\d{1,3}(?:,\d{3})+|\d+)(?:\.(?P<fraction>\d+))?"
    r"(?:\s(?P<scale>thousand|million|billion|trillion)\b)?",
    re.ASCII,
)
# Digits in groups of three, such as "12,345". "1234,567" and "12,3456" are not such numbers.
_GROUPED = re.compile(r"(?<![\d,])\d{1,3}(?:,\d{3})++(?!,*\d)", re.ASCII)
_PERCENT = re.compile(r"(?<=\d)\s?%", re.ASCII)
_DECIMAL = re.compile(r"(?<!\d)(\d+)\.(\d+)", re.ASCII)
_ORDINAL = re.compile(r"(?<!\d)(\d+)(?:st|nd|rd|th)\b", re.ASCII)
_DECADE = re.compile(r"(?<!\d)(\d*0)'?s\b", re.ASCII)  # "1980s" and "80's"
_DIGITS = re.compile(r"\d+", re.ASCII)


def expand_numbers(text: str) -> str:
    """Return lower-case ``text`` with words, between spaces, instead of numerals.

    Numerals are amounts of $, £ and €, grouped thousands, decimals (with each digit after the point spelt),
    ordinals, decades, per cent, years (four digits alone) and other ASCII digits. Digits of other scripts do
    not change.
    """
    text = _MONEY.sub(_money, text)
    text = _PERCENT.sub(" percent ", text)
    text = _GROUPED.sub(lambda m: f" {_cardinal_of_digits(m[0].replace(',', ''))} ", text)
    text = _DECIMAL.sub(lambda m: f" {_cardinal_of_digits(m[1])} point {spell_digits(m[2])} ", text)
    text = _ORDINAL.sub(lambda m: f" {_ordinal_of_digits(m[1])} ", text)
    text = _DECADE.sub(lambda m: f" {_decade(m[1])} ", text)
    return _DIGITS.sub(lambda m: f" {_code_year_or_cardinal(m[0])} ", text)

"""Spells English numerals as they are read aloud, such as "1984", "3rd" and "$2.50"."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from num2words import num2words  # type: ignore[import-untyped]

_LONGEST = 18  # A number of more digits is read digit by digit.


@lru_cache(10_000)  # num2words takes 45 µs a call.
def _words(number: int, form: str) -> str:
    words: str = num2words(number, to=form)  # "one thousand, two hundred and thirty-four"
    return words.replace(" and ", " ").replace(",", "").replace("-", " ")


def spell_digits(digits: str) -> str:
    """Spell each digit: ``"007"`` is ``"zero zero seven"``."""
    return " ".join(_words(int(digit), "cardinal") for digit in digits)


def cardinal(number: int) -> str:
    """Spell ``121`` as ``"one hundred twenty one"``, without "and". From 10^18 on, spell each digit."""
    if number < 0:
        raise ValueError(f"{number} is negative")
    return spell_digits(str(number)) if number >= 10**_LONGEST else _words(number, "cardinal")


def ordinal(number: int) -> str:
    """Spell an ordinal: ``21`` is ``"twenty first"``."""
    return _words(number, "ordinal")


def year(number: int) -> str:
    """Spell a number of four digits as a year: ``1905`` is ``"nineteen oh five"``.

    A number outside 1001 to 2999, or in the first decade of a millennium, is spelt as a cardinal.
    """
    # num2words itself spells a year such as 2005 as a cardinal.
    return _words(number, "year") if 1000 < number < 3000 else cardinal(number)


def _cardinal_of_digits(digits: str) -> str:
    # Python refuses int() of more than 4300 digits.
    return cardinal(int(digits)) if len(digits) <= _LONGEST else spell_digits(digits)


def _code_year_or_cardinal(digits: str) -> str:
    """Spell digits without separators. A leading zero means a code, and four digits mean a year."""
    if len(digits) > 1 and digits[0] == "0":
        return spell_digits(digits)
    return year(int(digits)) if len(digits) == 4 else _cardinal_of_digits(digits)


def _decade(digits: str) -> str:
    words = _code_year_or_cardinal(digits)
    return words[:-1] + "ies" if words.endswith("y") else words + "s"


def _ordinal_of_digits(digits: str) -> str:
    return ordinal(int(digits)) if len(digits) <= _LONGEST else spell_digits(digits)


class _Currency(NamedTuple):
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
    sign, integer, fraction, scale = match.group("sign", "integer", "fraction", "scale")
    currency, integer = _CURRENCIES[sign], integer.replace(",", "")
    words = []
    is_decimal = fraction is not None and len(fraction) != 2
    if scale or is_decimal:  # "$2.5 million" and "$1.125" have no coins.
        words.append(_cardinal_of_digits(integer))
        if fraction:
            words.append(f"point {spell_digits(fraction)}")
        words += filter(None, (scale, currency.units))
        return f" {' '.join(words)} "
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
# Digits in groups, such as "12,345". Another digit or group before or after them excludes a match.
_GROUPED = re.compile(r"(?<![\d,])\d{1,3}(?:,\d{3})++(?!,*\d)", re.ASCII)
_PERCENT = re.compile(r"(?<=\d)\s?%", re.ASCII)
_DECIMAL = re.compile(r"(?<!\d)(\d+)\.(\d+)", re.ASCII)
_ORDINAL = re.compile(r"(?<!\d)(\d+)(?:st|nd|rd|th)\b", re.ASCII)
_DECADE = re.compile(r"(?<!\d)(\d*0)'?s\b", re.ASCII)  # "1980s" and "80's"
_DIGITS = re.compile(r"\d+", re.ASCII)


def expand_numbers(text: str) -> str:
    """Replace every numeral in lower-case ``text`` by words, separated by spaces.

    Numerals are amounts of $, £ and €, grouped thousands, decimals (single digits after the point), ordinals,
    decades, per cent, years (four digits alone) and other ASCII digits. Digits of other scripts are kept.
    """
    text = _MONEY.sub(_money, text)
    text = _PERCENT.sub(" percent ", text)
    text = _GROUPED.sub(lambda m: f" {_cardinal_of_digits(m[0].replace(',', ''))} ", text)
    text = _DECIMAL.sub(lambda m: f" {_cardinal_of_digits(m[1])} point {spell_digits(m[2])} ", text)
    text = _ORDINAL.sub(lambda m: f" {_ordinal_of_digits(m[1])} ", text)
    text = _DECADE.sub(lambda m: f" {_decade(m[1])} ", text)
    return _DIGITS.sub(lambda m: f" {_code_year_or_cardinal(m[0])} ", text)

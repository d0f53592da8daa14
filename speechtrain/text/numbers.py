"""Spell English numerals as they are read aloud, such as "1984", "3rd" and "$2.50"."""

from __future__ import annotations

import re
from functools import lru_cache

from num2words import num2words  # type: ignore[import-untyped]

_LONGEST = 18  # digits of the largest number that is read as a whole; longer ones are read digit by digit


@lru_cache(10_000)  # num2words takes 45 µs a call
def _words(number: int, form: str) -> str:
    said: str = num2words(number, to=form)  # "one thousand, two hundred and thirty-four"
    return said.replace(" and ", " ").replace(",", "").replace("-", " ")


def spell_digits(digits: str) -> str:
    """Spell each digit: ``"007"`` is ``"zero zero seven"``."""
    return " ".join(_words(int(digit), "cardinal") for digit in digits)


def cardinal(number: int) -> str:
    """Spell ``121`` as ``"one hundred twenty one"``: no "and", no hyphens; from 10^18 digit by digit."""
    if number < 0:
        raise ValueError(f"{number} is negative")
    return spell_digits(str(number)) if number >= 10**_LONGEST else _words(number, "cardinal")


def ordinal(number: int) -> str:
    """Spell an ordinal: ``21`` is ``"twenty first"``."""
    return _words(number, "ordinal")


def year(number: int) -> str:
    """Spell a number of four digits as a year: ``1905`` is ``"nineteen oh five"``.

    Outside 1001 to 2999, and in the first decade of a millennium, the result is the cardinal.
    """
    return _words(number, "year") if 1000 < number < 3000 else cardinal(number)


def _amount(digits: str) -> str:
    # Python refuses int() of more than 4300 digits
    return cardinal(int(digits)) if len(digits) <= _LONGEST else spell_digits(digits)


def _plain(digits: str) -> str:
    """Spell digits without separators: a leading zero means a code, four digits mean a year."""
    if len(digits) > 1 and digits[0] == "0":
        return spell_digits(digits)
    return year(int(digits)) if len(digits) == 4 else _amount(digits)


def _decade(digits: str) -> str:
    words = _plain(digits)
    return words[:-1] + "ies" if words.endswith("y") else words + "s"


def _position(digits: str) -> str:
    return ordinal(int(digits)) if len(digits) <= _LONGEST else spell_digits(digits)


_MONEY = {"$": ("dollar", "cent"), "£": ("pound", "penny"), "€": ("euro", "cent")}


def _money(match: re.Match[str]) -> str:
    sign, whole, fraction, scale = match.group("sign", "whole", "fraction", "scale")
    unit, part = _MONEY[sign]
    whole = whole.replace(",", "")
    if scale or len(fraction or "00") != 2:  # "$2.5 million", "$1.125": an amount, not coins
        amount = _amount(whole) + (f" point {spell_digits(fraction)}" if fraction else "")
        return f" {amount} {scale + ' ' if scale else ''}{unit}s "
    units, parts = whole.lstrip("0"), int(fraction or 0)
    coins = "pence" if part == "penny" and parts != 1 else part + ("s" if parts != 1 else "")
    said = [f"{_amount(units or '0')} {unit}{'' if units == '1' else 's'}"] if units or not parts else []
    said += [f"{cardinal(parts)} {coins}"] if parts else []
    return f" {' '.join(said)} "


_AMOUNT = re.compile(
    r"(?P<sign>[$£€])\s?(?P<whole>\d{1,3}(?:,\d{3})+|\d+)(?:\.(?P<fraction>\d+))?"
    r"(?:\s(?P<scale>thousand|million|billion|trillion)\b)?",
    re.ASCII,
)
_GROUPED = re.compile(r"(?<![\d,])\d{1,3}(?:,\d{3})++(?!,*\d)", re.ASCII)
_PERCENT = re.compile(r"(?<=\d)\s?%", re.ASCII)
_DECIMAL = re.compile(r"(?<!\d)(\d+)\.(\d+)", re.ASCII)
_ORDINAL = re.compile(r"(?<!\d)(\d+)(?:st|nd|rd|th)\b", re.ASCII)
_DECADE = re.compile(r"(?<!\d)(\d*0)'?s\b", re.ASCII)
_DIGITS = re.compile(r"\d+", re.ASCII)


def expand_numbers(text: str) -> str:
    """Replace every numeral in lower-case ``text`` by words, separated by spaces.

    Numerals are amounts of $, £ and €, grouped thousands, decimals (single digits after the point), ordinals,
    decades, per cent, years (four digits alone) and other ASCII digits; digits of other scripts are kept.
    """
    text = _AMOUNT.sub(_money, text)
    text = _PERCENT.sub(" percent ", text)
    text = _GROUPED.sub(lambda m: f" {_amount(m[0].replace(',', ''))} ", text)
    text = _DECIMAL.sub(lambda m: f" {_amount(m[1])} point {spell_digits(m[2])} ", text)
    text = _ORDINAL.sub(lambda m: f" {_position(m[1])} ", text)
    text = _DECADE.sub(lambda m: f" {_decade(m[1])} ", text)
    return _DIGITS.sub(lambda m: f" {_plain(m[0])} ", text)

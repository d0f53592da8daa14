"""Numerals as words, against hand-written readings and an inverse."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speechtrain.text.numbers import cardinal, expand_numbers, ordinal, spell_digits, year


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (10, "ten"),
        (13, "thirteen"),
        (20, "twenty"),
        (21, "twenty one"),
        (100, "one hundred"),
        (115, "one hundred fifteen"),
        (1000, "one thousand"),
        (1001, "one thousand one"),
        (40_400, "forty thousand four hundred"),
        (1_000_000, "one million"),
        (1_000_001, "one million one"),
        (10**17, "one hundred quadrillion"),
        (10**18, "one" + " zero" * 18),
    ],
)
def test_cardinals(number: int, words: str) -> None:
    assert cardinal(number) == words


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(ValueError, match="-1 is negative"):
        cardinal(-1)


UNITS = {cardinal(n): n for n in [*range(20), *range(20, 100, 10)]}
SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "quadrillion": 10**15}


def value(words: str) -> int:
    """The number that the words say: an inverse that knows nothing of how they were formed."""
    total = group = 0
    for word in words.split():
        if word == "hundred":
            group *= 100
        elif word in SCALES:
            total, group = total + group * SCALES[word], 0
        else:
            group += UNITS[word]
    return total + group


@given(st.integers(0, 10**18 - 1))
def test_cardinals_can_be_read_back(number: int) -> None:
    assert value(cardinal(number)) == number


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (1, "first"),
        (2, "second"),
        (3, "third"),
        (4, "fourth"),
        (5, "fifth"),
        (8, "eighth"),
        (9, "ninth"),
        (11, "eleventh"),
        (12, "twelfth"),
        (13, "thirteenth"),
        (20, "twentieth"),
        (32, "thirty second"),
        (100, "one hundredth"),
        (1000, "one thousandth"),
    ],
)
def test_ordinals(number: int, words: str) -> None:
    assert ordinal(number) == words


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (1000, "one thousand"),
        (1001, "one thousand one"),
        (1066, "ten sixty six"),
        (1100, "eleven hundred"),
        (1905, "nineteen oh five"),
        (1984, "nineteen eighty four"),
        (2000, "two thousand"),
        (2009, "two thousand nine"),
        (2010, "twenty ten"),
        (2100, "twenty one hundred"),
        (3000, "three thousand"),
        (3001, "three thousand one"),
    ],
)
def test_years(number: int, words: str) -> None:
    assert year(number) == words


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("room 101", "room one hundred one"),
        ("agent 007", "agent zero zero seven"),
        ("in 1984", "in nineteen eighty four"),
        ("1,984 of them", "one thousand nine hundred eighty four of them"),
        ("12,345,678", "twelve million three hundred forty five thousand six hundred seventy eight"),
        ("3.14", "three point one four"),
        ("the 21st of may", "the twenty first of may"),
        ("the 1990s and the 20's", "the nineteen nineties and the twenties"),
        ("the 1900s", "the nineteen hundreds"),
        ("50% or 5 %", "fifty percent or five percent"),
        ("$1", "one dollar"),
        ("$2.50", "two dollars fifty cents"),
        ("$0.01", "one cent"),
        ("$0", "zero dollars"),
        ("$1,000.00", "one thousand dollars"),
        ("$2.5 million", "two point five million dollars"),
        ("£1.02", "one pound two pence"),
        ("£0.01", "one penny"),
        ("€3 thousand", "three thousand euros"),
        ("b2b", "b two b"),
        ("1,23", "one , twenty three"),
        ("no numbers", "no numbers"),
    ],
)
def test_numerals_in_text(text: str, said: str) -> None:
    assert " ".join(expand_numbers(text).split()) == said


@given(st.text(alphabet="0123456789.,$£€%'- stndrhx", max_size=30))
def test_no_digit_survives(text: str) -> None:
    assert not any(c in "0123456789" for c in expand_numbers(text))


def test_numbers_longer_than_python_parses_are_spelt() -> None:
    digits = "12" * 3000
    for text in (digits, f"${digits}", f"{digits}th", f"{digits}.5", f"{digits}0s"):
        assert spell_digits(digits) in expand_numbers(text)

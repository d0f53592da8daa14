"""Numerals as words, against hand-written readings and an inverse."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speechtrain.text.numbers import cardinal, expand_numbers, ordinal, spell_digits, year


def test_cardinals_have_no_and_and_no_hyphen() -> None:
    assert cardinal(1_234_121) == "one million two hundred thirty four thousand one hundred twenty one"
    assert cardinal(10**17) == "one hundred quadrillion"
    assert cardinal(10**18) == "one" + " zero" * 18
    with pytest.raises(ValueError, match="-1 is negative"):
        cardinal(-1)


def test_ordinals_have_no_and_and_no_hyphen() -> None:
    assert ordinal(32) == "thirty second"
    assert ordinal(1112) == "one thousand one hundred twelfth"


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (1000, "one thousand"),
        (1001, "one thousand one"),
        (1066, "ten sixty six"),
        (1905, "nineteen oh five"),
        (2009, "two thousand nine"),
        (2010, "twenty ten"),
        (3000, "three thousand"),
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

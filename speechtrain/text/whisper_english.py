"""The normaliser of English texts in Whisper's paper, which public leaderboards score with."""

from __future__ import annotations

import importlib
from typing import Any

from speechtrain.errors import DataError, MissingPackage, shorten

_MOST_CHARACTERS = 10_000  # The library's time is quadratic in them. It takes 2 s for this many brackets.


class WhisperEnglish:
    """Normalise by the library whisper-normalizer, which is the code of the paper.

    It removes words in brackets and filler words, spells numbers in digits, and British words the American
    way. Raises DataError for a text of more than 10,000 characters, and if the library fails.
    """

    def __init__(self) -> None:
        self._library: Any = None

    def load(self) -> None:
        """Load the library, before the first text. Raises MissingPackage without it."""
        try:
            self._library = importlib.import_module("whisper_normalizer.english").EnglishTextNormalizer()
        except ImportError:
            raise MissingPackage(
                "normaliser=whisper_english needs the library whisper-normalizer: pip install -e '.[scoring]'"
            ) from None

    def __call__(self, text: str) -> str:
        if len(text) > _MOST_CHARACTERS:
            raise _unreadable(text, f"it has more than {_MOST_CHARACTERS} characters")
        try:
            normalised_text = self._library(text)
        except (ArithmeticError, AssertionError, ValueError):  # as for a number of 5,000 digits
            raise _unreadable(text, "the library fails") from None
        return " ".join(normalised_text.split())


def _unreadable(text: str, reason: str) -> DataError:
    name = shorten(text, 100)
    return DataError(f"whisper_english cannot read the text {name!r}: {reason}. Remove it from the set")

"""n-gram language models: read from an ARPA file, and made of transcripts."""

from __future__ import annotations

import importlib
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from speechtrain.errors import DataError, one_line
from speechtrain.files import MOST_LOG_BYTES, open_regular, write_text

_MOST_ORDER, _MOST_LINE = 9, 2**16
_MOST_GRAMS = 10**7  # about 200 bytes of memory each
_LN_10 = math.log(10)
_BINARY = b"mmap lm http://kheafield.com/code"  # kenlm's first bytes
BEGIN, END, UNKNOWN = "<s>", "</s>", "<unk>"
_LOG = logging.getLogger(__name__)


def _word(text: str) -> str:
    """Return a word of an ARPA file by the name that it has here."""
    if text == "<UNK>":  # KenLM reads it as <unk>, too.
        return UNKNOWN
    return text


class NGram:
    """A backoff model over words, of an ARPA file. Raises DataError for a file that is none.

    ``<unk>``, also spelt ``<UNK>``, stands for a word that the model lacks. A model without ``<unk>`` gives
    such a word the probability of its rarest word, and a warning says so. ``<s>`` is not a word: files give
    it a probability of 10^-99, because nothing predicts it.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.order = 0
        self._scores: dict[str, tuple[float, float]] = {}  # natural logarithms: probability, backoff
        try:
            self._read()
        except OSError as error:
            raise DataError(f"decoder.lm: {path}: {error.strerror}; correct the path") from None
        if UNKNOWN not in self._scores:
            self._add_unknown()

    def _add_unknown(self) -> None:
        rarest = 0.0
        for words, (probability, _) in self._scores.items():
            if " " not in words and words != BEGIN:
                rarest = min(rarest, probability)
        self._scores[UNKNOWN] = (rarest, 0.0)
        _LOG.warning(
            f"decoder.lm: {self.path} has no {UNKNOWN}: its rarest word stands for words that it lacks"
        )

    def _read(self) -> None:
        with open_regular(self.path, MOST_LOG_BYTES) as file:
            lines = iter(lambda: file.readline(_MOST_LINE), b"")
            for number, line in enumerate(lines, 1):
                try:
                    if self._is_last(line.decode().strip()):
                        return
                except ValueError as error:
                    raise self._bad(f":{number}: {error}") from None
        raise self._bad(": it has no \\end\\")

    def _bad(self, what: str) -> DataError:
        return DataError(
            f"decoder.lm: {self.path}{what}; give an ARPA file, as speechtrain prepare lm writes it"
        )

    def _is_last(self, line: str) -> bool:
        """Take a line; returns whether it ends the model. Raises ValueError."""
        if line == "\\end\\":
            if not self._scores:
                raise ValueError("the model is empty")
            return True
        if line.startswith("\\") and line.endswith("-grams:"):
            if line != f"\\{self.order + 1}-grams:" or self.order == _MOST_ORDER:
                raise ValueError(f"orders must be 1 to at most {_MOST_ORDER}, one after the other")
            self.order += 1
        elif line and self.order:
            parts = [part for part in line.replace("\t", " ").split(" ") if part]
            if len(parts) not in (self.order + 1, self.order + 2):
                raise ValueError(
                    f"it is no {self.order}-gram: a number, {self.order} words, a number or none"
                )
            numbers = [float(number) * _LN_10 for number in (parts[0], *parts[self.order + 1 :], "0")][:2]
            if not all(map(math.isfinite, numbers)) or numbers[0] > 0:
                raise ValueError("a probability is no logarithm of one")
            if len(self._scores) >= _MOST_GRAMS:
                raise ValueError(f"it has more than {_MOST_GRAMS} n-grams; prune it")
            self._add(parts[1 : self.order + 1], numbers)
        return False

    def _add(self, words: list[str], numbers: list[float]) -> None:
        probability, backoff = numbers
        self._scores[" ".join(map(_word, words))] = (probability, backoff)

    def score(self, context: tuple[str, ...], word: str) -> float:
        """The logarithm of the probability of ``word`` after ``context``."""
        total, word = 0.0, word if word in self._scores else UNKNOWN
        for begin in range(len(context) + 1):
            before = " ".join(context[begin:])
            found = self._scores.get(f"{before} {word}" if before else word)
            if found:
                return total + found[0]
            total += self._scores.get(before, (0.0, 0.0))[1]
        raise AssertionError  # each word or <unk> is there

    def after(self, context: tuple[str, ...], word: str) -> tuple[str, ...]:
        """The context of the word that follows."""
        known = word if word in self._scores else UNKNOWN
        return (*context, known)[1 - self.order :] if self.order > 1 else ()


class KenLM:
    """``NGram`` by the kenlm library, from its binary file of any size. Raises DataError likewise."""

    def __init__(self, path: str) -> None:
        try:
            self._kenlm: Any = importlib.import_module("kenlm")
            self._model = self._kenlm.Model(path)
        except ImportError:
            fix = "pip install kenlm (extra 'kenlm'), or give an ARPA file"
            raise DataError(
                f"decoder.lm: {path} is a binary file of kenlm, which is not here; {fix}"
            ) from None
        except OSError as error:
            raise DataError(f"decoder.lm: {path}: {one_line(str(error), 200)}; give another file") from None
        self.order = int(self._model.order)

    def score(self, context: tuple[str, ...], word: str) -> float:
        """The logarithm of the probability of ``word`` after ``context``."""
        before, after = self._kenlm.State(), self._kenlm.State()
        if context[:1] == (BEGIN,):
            self._model.BeginSentenceWrite(before)
        else:
            self._model.NullContextWrite(before)
        for known in context[context[:1] == (BEGIN,) :]:
            self._model.BaseScore(before, known, after)
            before, after = after, before
        return float(self._model.BaseScore(before, word, after)) * _LN_10

    def after(self, context: tuple[str, ...], word: str) -> tuple[str, ...]:
        """The context of the word that follows."""
        return (*context, word)[1 - self.order :] if self.order > 1 else ()


def read_ngram(path: str) -> NGram | KenLM:
    """The model of an ARPA file, or of kenlm's binary file. Raises DataError for another file."""
    try:
        with open_regular(path) as file:
            is_binary = file.read(len(_BINARY)) == _BINARY
    except OSError as error:
        raise DataError(f"decoder.lm: {path}: {error.strerror}; correct the path") from None
    return KenLM(path) if is_binary else NGram(path)


def write_ngram(texts: Iterable[str], path: Path, order: int = 3) -> tuple[int, list[int]]:
    """Write an ARPA file of normalised texts; returns the number of texts and of n-grams of each order.

    Probabilities are interpolated as Witten and Bell (1991) do: a context that was followed by many
    different words leaves more to the shorter one. Raises DataError where there is no word, OSError.
    """
    followers: defaultdict[str, Counter[str]] = defaultdict(Counter)
    sentences = 0
    for text in texts:
        words = [BEGIN, *(word for word in text.split() if word not in (BEGIN, END, UNKNOWN)), END]
        sentences += len(words) > 2
        for at in range(1, len(words) if len(words) > 2 else 0):
            for begin in range(max(0, at - order + 1), at + 1):
                followers[" ".join(words[begin:at])][words[at]] += 1
    if not sentences:
        raise DataError("lm: every transcript is empty; use sources with transcripts")
    chances: dict[str, float] = {UNKNOWN: 0.0}
    floor = 1 / (len(followers[""]) + 1)  # each word and <unk> alike
    levels: list[list[str]] = [[] for _ in range(order)]
    for context in sorted(followers, key=lambda name: (len(name.split()), name)):
        counts = followers[context]
        shorter = context.partition(" ")[2]
        rest = len(counts) / (counts.total() + len(counts))
        for word in sorted([*counts, UNKNOWN] if not context else counts):
            below = chances[f"{shorter} {word}" if shorter else word] if context else floor
            name = f"{context} {word}" if context else word
            chances[name] = counts[word] / (counts.total() + len(counts)) + rest * below
            levels[len(context.split())].append(name)
    levels[0].append(BEGIN)
    lines = ["\\data\\", *(f"ngram {n}={len(names)}" for n, names in enumerate(levels, 1) if names)]
    for number, names in enumerate(filter(None, levels), 1):
        lines += ["", f"\\{number}-grams:"]
        for name in names:
            counts = followers.get(name, Counter())
            rest = len(counts) / (counts.total() + len(counts)) if counts else 1.0
            chance = math.log10(chances[name]) if name != BEGIN else -99.0
            lines.append(f"{chance:.6f}\t{name}" + (f"\t{math.log10(rest):.6f}" if counts else ""))
    write_text(path, "\n".join([*lines, "", "\\end\\", ""]))
    return sentences, [len(names) for names in levels if names]

"""Reads n-gram language models of words, and writes n-gram models of transcripts."""

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

_MOST_ORDER = 9
_MOST_LINE = 2**16  # bytes
_MOST_GRAMS = 10**7  # Each n-gram takes about 200 bytes of memory.
_LN_10 = math.log(10)
_BINARY = b"mmap lm http://kheafield.com/code"  # the first bytes of a binary file of kenlm
BEGIN, END, UNKNOWN = "<s>", "</s>", "<unk>"
_LOG = logging.getLogger(__name__)


def _word(text: str) -> str:
    """Return a word of an ARPA file by its name in this module."""
    if text == "<UNK>":  # KenLM also reads it as <unk>.
        return UNKNOWN
    return text


def _gram(context: str, word: str) -> str:
    return f"{context} {word}" if context else word


class NGram:
    """A backoff model over words, from an ARPA file. Raises DataError for another file.

    ``<unk>``, also spelt ``<UNK>``, stands for a word that the model lacks. A model without ``<unk>`` gives
    such a word the probability of its rarest word, and a warning says so. ``<s>`` is not a word. Files give
    it a probability of 10^-99, because nothing predicts it.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.order = 0
        # The keys are n-grams with spaces between the words. The values are natural logarithms.
        self._probabilities: dict[str, float] = {}
        self._backoffs: dict[str, float] = {}  # An n-gram that is absent has 0.
        try:
            self._read()
        except OSError as error:
            raise DataError(f"decoder.lm: {path}: {error.strerror}. Correct the path") from None
        if UNKNOWN not in self._probabilities:
            self._add_unknown()

    def _add_unknown(self) -> None:
        rarest = 0.0
        for words, probability in self._probabilities.items():
            if " " not in words and words != BEGIN:
                rarest = min(rarest, probability)
        self._probabilities[UNKNOWN] = rarest
        _LOG.warning(
            f"decoder.lm: {self.path} has no {UNKNOWN}: its rarest word stands for words that it lacks"
        )

    def _read(self) -> None:
        with open_regular(self.path, MOST_LOG_BYTES) as file:
            lines = iter(lambda: file.readline(_MOST_LINE), b"")
            for number, line in enumerate(lines, 1):
                try:
                    text = line.decode().strip()
                    if text != "\\end\\":
                        self._read_line(text)
                    elif self._probabilities:
                        return
                    else:
                        raise ValueError("the model is empty")
                except ValueError as error:
                    raise self._error(f":{number}: {error}") from None
        raise self._error(": it has no \\end\\")

    def _error(self, problem: str) -> DataError:
        advice = "Give an ARPA file, as speechtrain prepare lm writes it"
        return DataError(f"decoder.lm: {self.path}{problem}. {advice}")

    def _read_line(self, line: str) -> None:
        """Read a line, which may begin the n-grams of the next order. Raises ValueError."""
        if line.startswith("\\") and line.endswith("-grams:"):
            if line != f"\\{self.order + 1}-grams:" or self.order == _MOST_ORDER:
                raise ValueError(f"orders must be 1 to at most {_MOST_ORDER}, one after the other")
            self.order += 1
        elif line and self.order:
            self._read_gram(line)

    def _read_gram(self, line: str) -> None:
        """Read an n-gram: log probability, words and perhaps log backoff, both to base 10."""
        order = self.order
        fields = [field for field in line.replace("\t", " ").split(" ") if field]
        if len(fields) not in (order + 1, order + 2):
            raise ValueError(f"it is not a {order}-gram: a number, {order} words, a number or none")
        probability = float(fields[0]) * _LN_10
        backoff = float(fields[-1]) * _LN_10 if len(fields) > order + 1 else 0.0
        if not math.isfinite(probability + backoff) or probability > 0:
            raise ValueError("a number is not the logarithm of a probability")
        if len(self._probabilities) >= _MOST_GRAMS:
            raise ValueError(f"it has more than {_MOST_GRAMS} n-grams. Prune it")
        gram = " ".join(map(_word, fields[1 : order + 1]))
        self._probabilities[gram] = probability
        if backoff:
            self._backoffs[gram] = backoff

    def score(self, context: tuple[str, ...], word: str) -> float:
        """Return the natural logarithm of the probability of ``word`` after ``context``."""
        if word not in self._probabilities:
            word = UNKNOWN
        total = 0.0
        for start in range(len(context) + 1):
            shorter = " ".join(context[start:])
            gram = f"{shorter} {word}" if shorter else word
            probability = self._probabilities.get(gram)
            if probability is not None:
                return total + probability
            total += self._backoffs.get(shorter, 0.0)
        raise AssertionError  # Each word or <unk> is in the model.

    def next_context(self, context: tuple[str, ...], word: str) -> tuple[str, ...]:
        """Return the context of the word that follows ``word``."""
        if word not in self._probabilities:
            word = UNKNOWN
        return (*context, word)[1 - self.order :] if self.order > 1 else ()


class KenLM:
    """A backoff model that the kenlm library reads, from its binary file of any size.

    Raises DataError for another file, and without the library.
    """

    def __init__(self, path: str) -> None:
        try:
            self._kenlm: Any = importlib.import_module("kenlm")
            self._model = self._kenlm.Model(path)
        except ImportError:
            fix = "pip install kenlm (extra 'kenlm'), or give an ARPA file"
            raise DataError(
                f"decoder.lm: {path} is a binary file of kenlm, and kenlm is not installed: {fix}"
            ) from None
        except OSError as error:
            raise DataError(f"decoder.lm: {path}: {one_line(str(error), 200)}. Give another file") from None
        self.order = int(self._model.order)

    def score(self, context: tuple[str, ...], word: str) -> float:
        """Return the natural logarithm of the probability of ``word`` after ``context``."""
        state, next_state = self._kenlm.State(), self._kenlm.State()
        if context[:1] == (BEGIN,):
            self._model.BeginSentenceWrite(state)
            context = context[1:]
        else:
            self._model.NullContextWrite(state)
        for context_word in context:
            self._model.BaseScore(state, context_word, next_state)
            state, next_state = next_state, state
        return float(self._model.BaseScore(state, word, next_state)) * _LN_10

    def next_context(self, context: tuple[str, ...], word: str) -> tuple[str, ...]:
        """Return the context of the word that follows ``word``."""
        return (*context, word)[1 - self.order :] if self.order > 1 else ()


def read_ngram(path: str) -> NGram | KenLM:
    """Return the model in an ARPA file or in a binary file of kenlm. Raises DataError for another file."""
    try:
        with open_regular(path) as file:
            is_binary = file.read(len(_BINARY)) == _BINARY
    except OSError as error:
        raise DataError(f"decoder.lm: {path}: {error.strerror}. Correct the path") from None
    return KenLM(path) if is_binary else NGram(path)


def write_ngram(texts: Iterable[str], path: Path, order: int = 3) -> tuple[int, list[int]]:
    """Write an ARPA file of normalised texts. Returns the number of texts, and of n-grams of each order.

    Raises DataError if no text has a word, and OSError.
    """
    followers, sentences = _count_followers(texts, order)
    if not sentences:
        raise DataError("lm: every transcript is empty. Use sources with transcripts")
    orders = _interpolate(followers, order)
    lines = ["\\data\\"]
    for number, grams in enumerate(orders, 1):
        lines.append(f"ngram {number}={len(grams)}")
    for number, grams in enumerate(orders, 1):
        lines += ["", f"\\{number}-grams:"]
        for gram, probability in grams.items():
            logarithm = math.log10(probability) if probability else -99.0
            line = f"{logarithm:.6f}\t{gram}"
            if gram in followers:
                line += f"\t{math.log10(_backoff(followers[gram])):.6f}"
            lines.append(line)
    write_text(path, "\n".join([*lines, "", "\\end\\", ""]))
    return sentences, [len(grams) for grams in orders]


def _count_followers(texts: Iterable[str], order: int) -> tuple[dict[str, Counter[str]], int]:
    """Count the words that follow each context of up to ``order - 1`` words, and the texts with words."""
    followers: defaultdict[str, Counter[str]] = defaultdict(Counter)
    sentences = 0
    for text in texts:
        words = [word for word in text.split() if word not in (BEGIN, END, UNKNOWN)]
        if not words:
            continue
        sentences += 1
        words = [BEGIN, *words, END]
        for position in range(1, len(words)):
            for start in range(max(0, position - order + 1), position + 1):
                context = " ".join(words[start:position])
                followers[context][words[position]] += 1
    return followers, sentences


def _interpolate(followers: dict[str, Counter[str]], order: int) -> list[dict[str, float]]:
    """Return the probability of each n-gram, in one dictionary for each order that has n-grams.

    Probabilities are interpolated as in Witten and Bell (1991). A context that many different words follow
    gives more weight to the shorter context. Below the empty context, each word and <unk> are equally
    probable.
    """
    orders: list[dict[str, float]] = [{} for _ in range(order)]
    uniform = 1 / (len(followers[""]) + 1)
    for context in sorted(followers, key=lambda words: (len(words.split()), words)):
        counts = followers[context]
        total, backoff = counts.total() + len(counts), _backoff(counts)
        shorter = context.partition(" ")[2]
        length = len(context.split())
        words = counts if context else [*counts, UNKNOWN]
        for word in sorted(words):
            shorter_probability = orders[length - 1][_gram(shorter, word)] if context else uniform
            orders[length][_gram(context, word)] = counts[word] / total + backoff * shorter_probability
    orders[0][BEGIN] = 0.0
    return [grams for grams in orders if grams]


def _backoff(counts: Counter[str]) -> float:
    """Return the weight of the shorter context, from the counts of the words that follow a context."""
    return len(counts) / (counts.total() + len(counts))

"""Reads n-gram language models of words, and writes n-gram models of transcripts."""

from __future__ import annotations

import importlib
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from speechtrain.errors import DataError, MissingPackage, one_line
from speechtrain.files import MOST_LOG_BYTES, open_regular, write_text

BEGIN, END, UNKNOWN = "<s>", "</s>", "<unk>"
"""The words at the start and the end of a sentence, and the word for every word that a model lacks."""

_MOST_ORDER = 9
_MOST_LINE = 2**16  # bytes
_MOST_GRAMS = 10**7  # Each n-gram takes about 200 bytes of memory.
_LN_10 = math.log(10)
_KENLM_MAGIC = b"mmap lm http://kheafield.com/code"  # the first bytes of a binary file of kenlm
_LOG = logging.getLogger(__name__)


class NGram:
    """A backoff model over words, from an ARPA file. Raises DataError for another file.

    ``<unk>``, also spelt ``<UNK>``, stands for a word that the model lacks. If the model has no ``<unk>``,
    such a word gets the probability of the rarest word, and a warning is logged. ``<s>`` is only a context
    and not a word. ARPA files give it a probability of 10^-99, because it never follows a word.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.order = 0
        # The keys are n-grams with spaces between the words. The values are natural logarithms.
        self._log_probabilities: dict[str, float] = {}
        self._log_backoffs: dict[str, float] = {}  # without n-grams whose logarithm is 0
        try:
            self._read()
        except OSError as error:
            raise DataError(f"decoder.lm: {path}: {error.strerror}. Correct the path") from None
        if UNKNOWN not in self._log_probabilities:
            words = [gram for gram in self._log_probabilities if " " not in gram and gram != BEGIN]
            lowest = min([self._log_probabilities[word] for word in words], default=0.0)
            self._log_probabilities[UNKNOWN] = lowest
            _LOG.warning(
                f"decoder.lm: {path} has no {UNKNOWN}: its rarest word stands for words that it lacks"
            )

    def _read(self) -> None:
        """Read the file up to its line ``\\end\\``. Raises DataError with the line of an error."""
        with open_regular(self.path, MOST_LOG_BYTES) as file:
            lines = iter(lambda: file.readline(_MOST_LINE), b"")
            for number, line in enumerate(lines, 1):
                try:
                    text = line.decode().strip()
                    if text != "\\end\\":
                        self._read_line(text)
                    elif self._log_probabilities:
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
        """Read a line: a heading such as ``\\2-grams:``, or an n-gram below it. Raises ValueError.

        An n-gram is its log probability, its words and an optional log backoff. The logarithms are to base
        10.
        """
        if line.startswith("\\") and line.endswith("-grams:"):
            if line != f"\\{self.order + 1}-grams:" or self.order == _MOST_ORDER:
                raise ValueError(f"orders must be 1 to at most {_MOST_ORDER}, one after the other")
            self.order += 1
            return
        order = self.order
        if not line or not order:
            return
        # Other white space, such as a no-break space, can be a part of a word.
        fields = [field for field in line.replace("\t", " ").split(" ") if field]
        if len(fields) not in (order + 1, order + 2):
            raise ValueError(f"it is not a {order}-gram: a number, {order} words, a number or none")
        words = fields[1 : order + 1]
        log_probability = float(fields[0]) * _LN_10
        has_backoff = len(fields) == order + 2
        log_backoff = float(fields[-1]) * _LN_10 if has_backoff else 0.0
        if not math.isfinite(log_probability + log_backoff) or log_probability > 0:
            raise ValueError("a number is not the logarithm of a probability")
        if len(self._log_probabilities) >= _MOST_GRAMS:
            raise ValueError(f"it has more than {_MOST_GRAMS} n-grams. Prune it")
        # KenLM also reads <UNK> as <unk>.
        gram = " ".join(UNKNOWN if word == "<UNK>" else word for word in words)
        self._log_probabilities[gram] = log_probability
        if log_backoff:
            self._log_backoffs[gram] = log_backoff

    def __contains__(self, word: str) -> bool:
        return word in self._log_probabilities

    def likeliest_words(self, count: int) -> list[str]:
        """Return at most ``count`` words, the likeliest first."""
        words = [gram for gram in self._log_probabilities if " " not in gram]
        words = [word for word in words if word not in (BEGIN, END, UNKNOWN)]
        return sorted(words, key=self._log_probabilities.__getitem__, reverse=True)[:count]

    def score(self, context: tuple[str, ...], word: str) -> float:
        """Return the natural logarithm of the probability of ``word`` after ``context``."""
        if word not in self._log_probabilities:
            word = UNKNOWN
        log_backoffs = 0.0
        for start in range(len(context) + 1):
            shorter_context = " ".join(context[start:])
            log_probability = self._log_probabilities.get(_gram(shorter_context, word))
            if log_probability is not None:
                return log_backoffs + log_probability
            log_backoffs += self._log_backoffs.get(shorter_context, 0.0)
        raise AssertionError  # With an empty context, the model has each word or <unk>.

    def next_context(self, context: tuple[str, ...], word: str) -> tuple[str, ...]:
        """Return the context of the word that follows ``word``: at most the last ``order - 1`` words."""
        if word not in self._log_probabilities:
            word = UNKNOWN
        return _last_words((*context, word), self.order - 1)


def _gram(context: str, word: str) -> str:
    """Return the n-gram of a word after its context, both with spaces between words."""
    return f"{context} {word}" if context else word


def _last_words(words: tuple[str, ...], count: int) -> tuple[str, ...]:
    return words[-count:] if count else ()


class KenLM:
    """A backoff model in a binary file of any size, which the library kenlm reads.

    Raises DataError for another file, and MissingPackage without the library.
    """

    def __init__(self, path: str) -> None:
        try:
            self._kenlm: Any = importlib.import_module("kenlm")
            self._model = self._kenlm.Model(path)
        except ImportError:
            fix = "pip install kenlm (extra 'kenlm'), or give an ARPA file"
            raise MissingPackage(
                f"decoder.lm: {path} is a binary file of kenlm, and kenlm is not installed: {fix}"
            ) from None
        except OSError as error:
            raise DataError(f"decoder.lm: {path}: {one_line(str(error), 200)}. Give another file") from None
        self.path = path
        self.order = int(self._model.order)

    def __contains__(self, word: str) -> bool:
        return word in self._model

    def likeliest_words(self, count: int) -> list[str]:
        """Return no words, because the library does not list them."""
        return []

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
        """Return the context of the word that follows ``word``: at most the last ``order - 1`` words."""
        return _last_words((*context, word), self.order - 1)


def read_ngram(path: str) -> NGram | KenLM:
    """Return the model in an ARPA file or in a binary file of kenlm. Raises DataError for another file."""
    try:
        with open_regular(path) as file:
            is_binary = file.read(len(_KENLM_MAGIC)) == _KENLM_MAGIC
    except OSError as error:
        raise DataError(f"decoder.lm: {path}: {error.strerror}. Correct the path") from None
    return KenLM(path) if is_binary else NGram(path)


def write_ngram(texts: Iterable[str], path: Path, order: int = 3) -> tuple[int, list[int]]:
    """Write the n-gram model of normalised texts as an ARPA file.

    Returns the number of texts that have words, and the number of n-grams of each order. Raises DataError if
    no text has a word, and OSError.
    """
    followers, sentences = _count_followers(texts, order)
    if not sentences:
        raise DataError("lm: every transcript is empty. Use sources with transcripts")
    probabilities_by_order = _interpolate(followers, order)
    lines = ["\\data\\"]
    for number, probabilities in enumerate(probabilities_by_order, 1):
        lines.append(f"ngram {number}={len(probabilities)}")
    for number, probabilities in enumerate(probabilities_by_order, 1):
        lines += ["", f"\\{number}-grams:"]
        for gram, probability in probabilities.items():
            log_probability = math.log10(probability) if probability else -99.0
            line = f"{log_probability:.6f}\t{gram}"
            if gram in followers:
                log_backoff = math.log10(_backoff(followers[gram]))
                line += f"\t{log_backoff:.6f}"
            lines.append(line)
    write_text(path, "\n".join([*lines, "", "\\end\\", ""]))
    return sentences, [len(probabilities) for probabilities in probabilities_by_order]


def _count_followers(texts: Iterable[str], order: int) -> tuple[dict[str, Counter[str]], int]:
    """Return the counts of the words after each context, and the number of texts that have words.

    Contexts have 0 to ``order - 1`` words.
    """
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
    """Return the probabilities by n-gram, in one dictionary for each order that has n-grams.

    The probability of a word after a context is interpolated with its probability after the shorter context,
    as in Witten and Bell (1991). The more different words follow a context, the more the shorter context
    counts. The probability after the empty context is interpolated with a uniform one over all words and
    <unk>.
    """
    by_order: list[dict[str, float]] = [{} for _ in range(order)]
    uniform = 1 / (len(followers[""]) + 1)
    # A context comes after its shorter contexts, whose probabilities it needs.
    for context in sorted(followers, key=lambda words: (len(words.split()), words)):
        counts = followers[context]
        total, backoff = counts.total() + len(counts), _backoff(counts)
        _, _, shorter_context = context.partition(" ")
        length = len(context.split())
        words = counts if context else [*counts, UNKNOWN]
        for word in sorted(words):
            shorter_probability = uniform
            if context:
                shorter_probability = by_order[length - 1][_gram(shorter_context, word)]
            by_order[length][_gram(context, word)] = counts[word] / total + backoff * shorter_probability
    by_order[0][BEGIN] = 0.0
    return [probabilities for probabilities in by_order if probabilities]


def _backoff(counts: Counter[str]) -> float:
    """Return the weight of the shorter context, from the counts of the words that follow a context."""
    return len(counts) / (counts.total() + len(counts))

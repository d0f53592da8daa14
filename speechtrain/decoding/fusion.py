"""Scores that a beam search adds to the model's: a language model, a bonus for words and a bonus for phrases.

Legend: B rows, W hypotheses of a row, V classes with the blank last, so V − 1 labels.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from speechtrain.errors import ConfigError
from speechtrain.text.ngram import BEGIN, END, KenLM, NGram
from speechtrain.text.vocabulary import Tokenizer

_LOG = logging.getLogger(__name__)
_MOST_CHECKED_WORDS = 10_000  # A tokenizer of Hugging Face needs 0.3 s for them.
_MOST_SHOWN_PHRASES = 10
Prefixes = tuple[str, ...]
"""The beginnings of phrases with which a text ends. One is the empty string if a word begins there."""


class TextState(NamedTuple):
    """The part of a text that decides the scores of its next labels."""

    context: tuple[str, ...]  # the words before the last word, as many as the language model reads
    word: str  # the letters of the last word so far
    prefixes: Prefixes


@dataclass
class Fusion:
    """Scores of words and of phrases, which are added to a text label by label.

    - A word adds ``word_bonus`` and ``weight`` times its log-probability in ``model``. Only the label that
      begins the next word shows that a word is complete, so that label adds the score of the word before it.
    - A phrase adds ``phrase_bonus``, in equal parts for each of its letters. If the text leaves the phrase,
      the parts are subtracted again.

    Tensors cannot hold a ``TextState``, so they hold its index in ``_states``. Index 0 is the empty text.
    """

    model: NGram | KenLM | None = None
    weight: float = 0.0
    word_bonus: float = 0.0
    phrases: Sequence[str] = ()
    phrase_bonus: float = 0.0

    def __post_init__(self) -> None:
        self.is_active = bool(self.model or self.word_bonus or self.phrases)
        self._spelling = list[str]()  # the text that each label adds
        self._normalised_phrases = frozenset[str]()
        self._fractions = dict[str, float]()  # the part of the bonus for each prefix of a phrase
        self._phrase_gains = dict[Prefixes, Tensor]()  # (V − 1) the phrase score that each next label adds

    def start_search(self, tokenizer: Tokenizer) -> None:
        """Forget the states of earlier searches, and read the labels of ``tokenizer``.

        Raises ConfigError for a phrase that the tokenizer cannot write.
        """
        if not self.is_active:
            return
        spelling = tokenizer.spelling()
        if spelling != self._spelling:
            self._read_phrases(tokenizer)
            self._check_words(tokenizer)
            self._spelling = spelling
            begins_word = [text.startswith(" ") for text in spelling]
            self._begins_word = torch.tensor(begins_word, dtype=torch.float32)  # (V − 1) 1 or 0
        context = (BEGIN,) if self.model and self.model.order > 1 else ()
        empty_text = TextState(context, "", ("",))
        self._states, self._indices = [empty_text], {empty_text: 0}
        self._word_scores = [0.0]  # for each state: the score of its last word, if the word is complete

    def label_scores(self, text_scores: Tensor, states: Tensor) -> Tensor:
        """Return the scores of texts with one more label: (B, W, V − 1), or (B, W, 1) without fusion.

        ``text_scores`` (B, W) and ``states`` (B, W) belong to the texts without that label.
        """
        if not self.is_active:
            return text_scores[..., None]
        indices = states.flatten().tolist()
        word_scores = torch.tensor([self._word_scores[index] for index in indices])
        gains = word_scores[:, None] * self._begins_word
        if self.phrases:
            gains += torch.stack([self._label_phrase_gains(index) for index in indices])
        return text_scores[..., None] + gains.view(*states.shape, -1).to(text_scores.device)

    def advance(self, states: Tensor, labels: Tensor, is_alive: Tensor) -> Tensor:
        """Return the states (B, W) after ``labels`` (B, W), and state 0 for texts that are not alive."""
        if not self.is_active:
            return states
        next_indices = []
        columns = (states.flatten().tolist(), labels.flatten().tolist(), is_alive.flatten().tolist())
        for index, label, is_text_alive in zip(*columns, strict=True):
            next_index = 0
            if is_text_alive:
                next_index = self._next_index(index, label)
            next_indices.append(next_index)
        return torch.tensor(next_indices, device=states.device).view(states.shape)

    def text_score(self, labels: Sequence[int]) -> float:
        """Return the score of a whole text, with its last word and the end of the sentence."""
        if not self.is_active:
            return 0.0
        score, index = 0.0, 0
        for label in labels:
            score += self._word_scores[index] * float(self._begins_word[label])
            if self.phrases:
                score += float(self._label_phrase_gains(index)[label])
            index = self._next_index(index, label)
        if self.model:
            score += self.weight * self.model.score(self._next_context(index), END)
        prefixes = self._states[index].prefixes
        # The end completes phrases. The parts for the letters of incomplete phrases are subtracted.
        phrase_gain = (self._count_complete(prefixes) - self._fraction(prefixes)) * self.phrase_bonus
        return score + self._word_scores[index] + phrase_gain

    def _read_phrases(self, tokenizer: Tokenizer) -> None:
        self._fractions, self._phrase_gains = {}, {}
        phrases = set()
        refused = []
        for phrase in self.phrases:
            text = tokenizer.normalise(phrase).strip()
            unknown = _quoted(tokenizer.unknown(text))
            if not text or unknown:
                refused.append(f"{phrase!r} ({unknown or 'no symbol'})")
            phrases.add(text)
            for length in range(1, len(text) + 1):
                prefix = text[:length]
                # Phrases may share a prefix. It has the largest of their fractions.
                fraction = self._fractions.get(prefix, 0.0)
                self._fractions[prefix] = max(length / len(text), fraction)
        if refused:
            count = f"{len(refused)} of {len(self.phrases)} have symbols that the run's labels lack"
            shown = ", ".join(refused[:_MOST_SHOWN_PHRASES])
            raise ConfigError(f"decoder.hotwords: {count}: {shown}. Remove them")
        self._normalised_phrases = frozenset(phrases)

    def _check_words(self, tokenizer: Tokenizer) -> None:
        """Log a warning if the run cannot write half of the likeliest words of the language model."""
        words = self.model.likeliest_words(_MOST_CHECKED_WORDS) if self.model else []
        name = tokenizer.state().get("normaliser", "none")
        self._advice = (
            "Train it on texts of the run's language, as the run writes them: "
            f"speechtrain prepare lm --normaliser {name}"
        )
        problems = []
        for word in words:
            text = tokenizer.normalise(word).strip()
            unknown = tokenizer.unknown(text)
            if unknown:
                problems.append(f"its labels lack {_quoted(unknown)} of {word!r}")
            elif text != word:
                problems.append(f"it writes {word!r} as {text!r}")
        self._can_write_model = 2 * len(problems) <= len(words)
        if self.model and not self._can_write_model:
            count = f"{len(words) - len(problems)} of the {len(words)} likeliest words of {self.model.path}"
            _LOG.warning(f"decoder.lm: {count} can be written by this run: {problems[0]}. {self._advice}")

    def missing_words(self, texts: Sequence[str]) -> str:
        """Return a warning if the language model lacks more than half of the words of normalised ``texts``.

        The warning is empty if the model's words have had a warning of ``start_search``.
        """
        words = Counter(" ".join(texts).split())
        if not self.model or not self._can_write_model:
            return ""
        missing = Counter({word: count for word, count in words.items() if word not in self.model})
        if 2 * missing.total() <= words.total():
            return ""
        known = f"{words.total() - missing.total()} of {words.total()} words of the transcripts"
        (example, _), *_ = missing.most_common(1)
        return f"{known} are in the model of decoder.lm, which lacks {example!r}. {self._advice}"

    def _next_index(self, index: int, label: int) -> int:
        """Return the index of the state after one more label. A new state is added to the states."""
        context, word, prefixes = self._states[index]
        text = self._spelling[label]
        if text.startswith(" "):
            context, word = self._next_context(index), ""
        if self.phrases:
            prefixes, _ = self._match_phrases(prefixes, text)
        else:
            prefixes = ()
        state = TextState(context, word + text.strip(), prefixes)
        if state not in self._indices:
            self._indices[state] = len(self._states)
            self._states.append(state)
            self._word_scores.append(self._word_score(state))
        return self._indices[state]

    def _word_score(self, state: TextState) -> float:
        """Return the score of the state's last word, if the word is complete. No word has the score 0."""
        if not state.word:
            return 0.0
        if not self.model:
            return self.word_bonus
        return self.word_bonus + self.weight * self.model.score(state.context, state.word)

    def _next_context(self, index: int) -> tuple[str, ...]:
        """Return the context of the word that follows the last word of a state."""
        context, word, _ = self._states[index]
        if self.model and word:
            return self.model.next_context(context, word)
        return context

    def _label_phrase_gains(self, index: int) -> Tensor:
        """Return the phrase score (V − 1) that each next label adds to a text in a state."""
        prefixes = self._states[index].prefixes
        if prefixes not in self._phrase_gains:
            gains = []
            for text in self._spelling:
                _, gain = self._match_phrases(prefixes, text)
                gains.append(gain)
            self._phrase_gains[prefixes] = torch.tensor(gains)
        return self._phrase_gains[prefixes]

    def _match_phrases(self, prefixes: Prefixes, text: str) -> tuple[Prefixes, float]:
        """Return the prefixes with which a text ends after ``text`` is added, and the score that it adds.

        A phrase is complete at the space after it. That space may also continue a longer phrase, or a phrase
        that began within the complete phrase.
        """
        old_fraction, complete = self._fraction(prefixes), 0
        for letter in text:
            if letter == " ":
                complete += self._count_complete(prefixes)
            extended = [prefix + letter for prefix in prefixes]
            prefixes = tuple(prefix for prefix in extended if prefix in self._fractions)
            if letter == " ":
                prefixes += ("",)
        gain = complete + self._fraction(prefixes) - old_fraction
        return prefixes, gain * self.phrase_bonus

    def _fraction(self, prefixes: Prefixes) -> float:
        """Return the fraction of a bonus that a text with these prefixes has for an incomplete phrase."""
        return max((self._fractions.get(prefix, 0.0) for prefix in prefixes), default=0.0)

    def _count_complete(self, prefixes: Prefixes) -> int:
        """Return the number of prefixes that are whole phrases. They are complete if the word ends here."""
        return sum(prefix in self._normalised_phrases for prefix in prefixes)


def _quoted(symbols: set[str]) -> str:
    return " ".join(repr(symbol) for symbol in sorted(symbols))

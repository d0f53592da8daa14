"""The scores that a beam search adds to the model's: a language model, a bonus for words and for phrases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from speechtrain.errors import ConfigError
from speechtrain.text.ngram import BEGIN, END, KenLM, NGram
from speechtrain.text.vocabulary import Tokenizer

Prefixes = tuple[str, ...]
"""The beginnings of phrases that a text ends with. It includes "" if a word begins at the end."""


class TextState(NamedTuple):
    """The part of a text that decides which scores its next labels get."""

    context: tuple[str, ...]  # the words before, for the language model
    word: str  # the letters of the present word
    prefixes: Prefixes


@dataclass
class Fusion:
    """Scores of words and of phrases, by the labels of a text.

    A word is scored by the label that begins the next word. A phrase is scored letter by letter: each letter
    adds its part of the bonus, and the parts are subtracted again if the phrase is not completed.
    """

    model: NGram | KenLM | None = None
    weight: float = 0.0
    word_bonus: float = 0.0
    phrases: Sequence[str] = ()
    phrase_bonus: float = 0.0
    _spelling: list[str] = field(default_factory=list)  # the text that each label adds
    _fractions: dict[str, float] = field(default_factory=dict)  # of a bonus, for each prefix of a phrase
    _complete: frozenset[str] = frozenset()  # the phrases
    _phrase_scores: dict[Prefixes, Tensor] = field(default_factory=dict)  # (V − 1) of the next label

    def __post_init__(self) -> None:
        self.is_active = bool(self.model or self.word_bonus or self.phrases)

    def begin(self, tokenizer: Tokenizer) -> None:
        """Forget earlier searches. Raises ConfigError for a phrase that the tokenizer cannot write."""
        spelling = tokenizer.spelling() if self.is_active else []
        if spelling != self._spelling:
            self._set_phrases(tokenizer)
            self._spelling = spelling
            begins_word = [text.startswith(" ") for text in spelling]
            self._begins_word = torch.tensor(begins_word, dtype=torch.float32)
        context = (BEGIN,) if self.model and self.model.order > 1 else ()
        start = TextState(context, "", ("",))
        self._states, self._numbers = [start], {start: 0}
        self._word_scores = [0.0]  # the score of each state's word if it ends

    def _set_phrases(self, tokenizer: Tokenizer) -> None:
        self._fractions, self._phrase_scores = {}, {}
        phrases = set()
        for phrase in self.phrases:
            text = tokenizer.normalise(phrase).strip()
            if not text or tokenizer.unknown(text):
                raise ConfigError(f"decoder.hotwords: {phrase!r} has symbols that the tokenizer lacks")
            phrases.add(text)
            for end in range(1, len(text) + 1):
                fraction = self._fractions.get(text[:end], 0.0)
                self._fractions[text[:end]] = max(end / len(text), fraction)
        self._complete = frozenset(phrases)

    def label_scores(self, scores: Tensor, states: Tensor) -> Tensor:
        """Return the scores of texts with each next label: (B, W, V − 1), or (B, W, 1) if all are equal.

        ``scores`` (B, W) and ``states`` (B, W) belong to the texts without that label.
        """
        if not self.is_active:
            return scores[..., None]
        numbers = states.flatten().tolist()
        word_scores = torch.tensor([self._word_scores[number] for number in numbers])
        gains = word_scores[:, None] * self._begins_word
        if self.phrases:
            rows = [self._phrase_gains(self._states[number].prefixes) for number in numbers]
            gains += torch.stack(rows)
        return scores[..., None] + gains.view(*states.shape, -1).to(scores.device)

    def advance(self, states: Tensor, labels: Tensor, is_alive: Tensor) -> Tensor:
        """Return the states (B, W) after these labels, and state 0 for texts that are not alive."""
        if not self.is_active:
            return states
        numbers = []
        columns = (tensor.flatten().tolist() for tensor in (states, labels, is_alive))
        for number, label, is_used in zip(*columns, strict=True):
            next_number = 0
            if is_used:
                next_number = self._after(number, label)
            numbers.append(next_number)
        return torch.tensor(numbers, device=states.device).view(states.shape)

    def total(self, labels: Sequence[int]) -> float:
        """Return the score of a whole text."""
        if not self.is_active:
            return 0.0
        total, number = 0.0, 0
        for label in labels:
            total += self._word_scores[number] * float(self._begins_word[label])
            if self.phrases:
                total += float(self._phrase_gains(self._states[number].prefixes)[label])
            number = self._after(number, label)
        if self.model:
            total += self.weight * self.model.score(self._context_after(number), END)
        prefixes = self._states[number].prefixes
        phrase_end = (self._count_completed(prefixes) - self._fraction(prefixes)) * self.phrase_bonus
        return total + self._word_scores[number] + phrase_end

    def _after(self, number: int, label: int) -> int:
        """Return the number of the state after a label."""
        context, word, prefixes = self._states[number]
        text = self._spelling[label]
        if text.startswith(" "):
            context, word = self._context_after(number), ""
        prefixes = self._extend(prefixes, text)[0] if self.phrases else ()
        state = TextState(context, word + text.strip(), prefixes)
        if state not in self._numbers:
            self._numbers[state] = len(self._states)
            self._states.append(state)
            self._word_scores.append(self._word_score(state))
        return self._numbers[state]

    def _word_score(self, state: TextState) -> float:
        if not state.word:
            return 0.0
        if not self.model:
            return self.word_bonus
        return self.word_bonus + self.weight * self.model.score(state.context, state.word)

    def _context_after(self, number: int) -> tuple[str, ...]:
        """Return the context of the next word."""
        context, word, _ = self._states[number]
        return self.model.next_context(context, word) if self.model and word else context

    def _phrase_gains(self, prefixes: Prefixes) -> Tensor:
        """Return the score (V − 1) that each next label adds for the phrases."""
        if prefixes not in self._phrase_scores:
            gains = [self._extend(prefixes, text)[1] for text in self._spelling]
            self._phrase_scores[prefixes] = torch.tensor(gains)
        return self._phrase_scores[prefixes]

    def _fraction(self, prefixes: Prefixes) -> float:
        """Return the fraction of a bonus that a text has for the phrases that it may complete."""
        return max((self._fractions.get(prefix, 0.0) for prefix in prefixes), default=0.0)

    def _count_completed(self, prefixes: Prefixes) -> int:
        """Return the number of phrases that end with the text, if a word ends there."""
        return sum(prefix in self._complete for prefix in prefixes)

    def _extend(self, prefixes: Prefixes, text: str) -> tuple[Prefixes, float]:
        """Return the prefixes of phrases after ``text``, and the score that ``text`` adds.

        A phrase is complete at the space after it. Longer phrases that begin with it, and phrases that begin
        within it, continue over that space.
        """
        completed, fraction = 0, self._fraction(prefixes)
        for letter in text:
            if letter == " ":
                completed += self._count_completed(prefixes)
            extended = [prefix + letter for prefix in prefixes]
            prefixes = tuple(prefix for prefix in extended if prefix in self._fractions)
            if letter == " ":
                prefixes += ("",)
        return prefixes, (completed + self._fraction(prefixes) - fraction) * self.phrase_bonus

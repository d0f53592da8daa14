"""What a beam search adds to the model's scores: a language model, a bonus for words and for phrases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from speechtrain.errors import ConfigError
from speechtrain.text.ngram import BEGIN, END, KenLM, NGram
from speechtrain.text.vocabulary import Tokenizer

Begun = tuple[str, ...]
"""The beginnings of phrases that the text ends with; "" where a word begins."""
State = tuple[tuple[str, ...], str, Begun]
"""The words before, the letters of the present word, and the phrases that are begun."""


@dataclass
class Fusion:
    """Scores words at their ends, by the label that begins the next one, and phrases letter by letter.

    A phrase's bonus comes with its letters, and is taken back if the phrase is not completed.
    """

    model: NGram | KenLM | None = None
    weight: float = 0.0
    word_bonus: float = 0.0
    phrases: Sequence[str] = ()
    phrase_bonus: float = 0.0
    _spelling: list[str] = field(default_factory=list)
    _shares: dict[str, float] = field(default_factory=dict)  # of a bonus, that each beginning earns
    _phrase_rows: dict[Begun, Tensor] = field(default_factory=dict)
    _complete: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.is_active = bool(self.model or self.word_bonus or self.phrases)

    def begin(self, tokenizer: Tokenizer) -> None:
        """Forget earlier searches. Raises ConfigError for a phrase that the tokenizer cannot write."""
        spelling = tokenizer.spelling() if self.is_active else []
        if spelling != self._spelling:
            self._spelling, self._shares, self._phrase_rows = spelling, {}, {}
            for phrase in self.phrases:
                text = tokenizer.normalise(phrase).strip()
                if not text or tokenizer.unknown(text):
                    raise ConfigError(f"decoder.hotwords: {phrase!r} has symbols that the tokenizer lacks")
                for end in range(1, len(text) + 1):
                    share = max(end / len(text), self._shares.get(text[:end], 0.0))
                    self._shares[text[:end]] = share
            self._complete = frozenset(tokenizer.normalise(phrase).strip() for phrase in self.phrases)
            self._ends = torch.tensor([label.startswith(" ") for label in spelling], dtype=torch.float32)
        context = (BEGIN,) if self.model and self.model.order > 1 else ()
        first: State = (context, "", ("",))
        self._states, self._ids = [first], {first: 0}
        self._gains = [0.0]

    def next(self, extra: Tensor, states: Tensor) -> Tensor:
        """What each next label adds, (B, W, V − 1), on top of ``extra`` (B, W)."""
        if not self.is_active:
            return extra[..., None]
        numbers = states.flatten().tolist()
        gains = torch.tensor([self._gains[number] for number in numbers])[:, None] * self._ends
        if self.phrases:
            gains += torch.stack([self._phrase_row(self._states[number][2]) for number in numbers])
        return extra[..., None] + gains.view(*states.shape, -1).to(extra.device)

    def advance(self, states: Tensor, labels: Tensor, alive: Tensor) -> Tensor:
        """The states (B, W) after these labels, where ``alive``."""
        if not self.is_active:
            return states
        given = (tensor.flatten().tolist() for tensor in (states, labels, alive))
        made = [self._after(state, label) if lives else 0 for state, label, lives in zip(*given, strict=True)]
        return torch.tensor(made, device=states.device).view(states.shape)

    def total(self, labels: Sequence[int]) -> float:
        """What a whole text adds."""
        if not self.is_active:
            return 0.0
        total, number = 0.0, 0
        for label in labels:
            begun = self._states[number][2]
            total += self._gains[number] * float(self._ends[label])
            total += float(self._phrase_row(begun)[label]) if self.phrases else 0.0
            number = self._after(number, label)
        if self.model:
            total += self.weight * self.model.score(self._words_after(number), END)
        begun = self._states[number][2]
        bonus = (self._completed(begun) - self._share(begun)) * self.phrase_bonus
        return total + self._gains[number] + bonus

    def _after(self, number: int, label: int) -> int:
        context, word, begun = self._states[number]
        text = self._spelling[label]
        if text.startswith(" "):
            context, word = self._words_after(number), ""
        begun = self._phrase_gain(begun, text)[0] if self.phrases else ()
        state = (context, word + text.strip(), begun)
        if state not in self._ids:
            self._ids[state] = len(self._states)
            self._states.append(state)
            gain = self.word_bonus if state[1] else 0.0
            if self.model and state[1]:
                gain += self.weight * self.model.score(context, state[1])
            self._gains.append(gain)
        return self._ids[state]

    def _words_after(self, number: int) -> tuple[str, ...]:
        context, word, _ = self._states[number]
        return self.model.after(context, word) if self.model and word else context

    def _phrase_row(self, begun: Begun) -> Tensor:
        if begun not in self._phrase_rows:
            self._phrase_rows[begun] = torch.tensor([self._phrase_gain(begun, x)[1] for x in self._spelling])
        return self._phrase_rows[begun]

    def _share(self, begun: Begun) -> float:
        return max((self._shares.get(phrase, 0.0) for phrase in begun), default=0.0)

    def _completed(self, begun: Begun) -> int:
        """Return the number of phrases that end with the text, if a word ends there."""
        return sum(prefix in self._complete for prefix in begun)

    def _phrase_gain(self, begun: Begun, text: str) -> tuple[Begun, float]:
        """Return the beginnings of phrases after ``text``, and the gain of ``text``.

        A phrase is complete at the space after it. Longer phrases that begin with it, and phrases that begin
        within it, continue over that space.
        """
        completed, share = 0, self._share(begun)
        for letter in text:
            if letter == " ":
                completed += self._completed(begun)
            begun = tuple(prefix + letter for prefix in begun if prefix + letter in self._shares)
            if letter == " ":
                begun += ("",)
        return begun, (completed + self._share(begun) - share) * self.phrase_bonus

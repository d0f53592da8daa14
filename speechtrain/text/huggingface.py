"""Tokenizers of Hugging Face's format, ``tokenizer.json``, as published recognisers have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from speechtrain.errors import DataError, MachineError, one_line
from speechtrain.files import FilePath
from speechtrain.text.normalise import normaliser as normaliser_of
from speechtrain.text.vocabulary import FileTokenizer, cannot_spell, check_ids


class HuggingFace(FileTokenizer):
    """A tokenizer of the library ``tokenizers``, read from the file ``model``.

    Its ids keep their numbers. ``labels`` is the number of those that are labels, for models whose
    vocabulary continues with the blank and special symbols; null: all. Raises DataError if the file is
    missing or damaged, MachineError without the library.
    """

    saved_name = "tokenizer.json"

    def __init__(self, model: FilePath, normaliser: str = "none", labels: int | None = None) -> None:
        try:
            from tokenizers import Tokenizer as Library
        except ImportError:
            raise MachineError(
                "tokenizer=huggingface needs the library tokenizers; pip install -e '.[interop]'"
            ) from None
        super().__init__(model, "copy it from the published model")
        try:
            self._library = Library.from_str(self._content.decode())
        except Exception as error:  # the library raises Exception itself
            raise DataError(f"model: {model} is not a tokenizer.json ({one_line(str(error), 120)})") from None
        size = self._library.get_vocab_size(with_added_tokens=True)
        if labels is not None and not 0 < labels <= size + 1:
            raise ValueError(f"labels is {labels}; {model} has {size}")
        ids = range(size if labels is None else labels)
        self.labels = [str(self._library.id_to_token(label)) for label in ids]
        self._kept = labels
        unknown = getattr(self._library.model, "unk_token", None)
        unknown_id = getattr(self._library.model, "unk_id", None)
        self._unknown_id = self._library.token_to_id(unknown) if unknown else unknown_id
        self._normaliser = normaliser
        self._normalise = normaliser_of(normaliser)

    def normalise(self, text: str) -> str:
        return self._normalise(text)

    def encode(self, text: str) -> list[int]:
        if unknown := self.unknown(text):
            raise cannot_spell(unknown)
        return list(self._encoded(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        check_ids(ids, self.blank)
        return str(self._library.decode([int(label) for label in ids], skip_special_tokens=True)).strip()

    def spelling(self) -> list[str]:
        """Return the text that each label adds, as the library decodes the label after another one.

        The labels themselves differ: byte-level BPE begins a word with ``Ġ`` and WordPiece continues one with
        ``##``. A label that is a part of a character becomes the replacement character.
        """
        anchor = len(self.labels) - 1
        prefix = str(self._library.decode([anchor], skip_special_tokens=False))
        texts = []
        for label in range(len(self.labels)):
            text = str(self._library.decode([anchor, label], skip_special_tokens=False))
            texts.append(text.removeprefix(prefix))
        return texts

    def unknown(self, text: str) -> set[str]:
        found = self._encoded(text)
        spans = zip(found.ids, found.offsets, strict=True)
        unknown = {text[a:b] for label, (a, b) in spans if label == self._unknown_id or label >= self.blank}
        covered = {place for a, b in found.offsets for place in range(a, b)}  # without an unknown symbol,
        missed = {symbol for place, symbol in enumerate(text) if place not in covered}  # some are left out
        return unknown | {symbol for symbol in missed if not symbol.isspace()}

    def library(self) -> Any:
        """A copy of the library's tokenizer."""
        return type(self._library).from_str(self._content.decode())

    def _encoded(self, text: str) -> Any:
        return self._library.encode(text, add_special_tokens=False)

    def state(self) -> dict[str, Any]:
        return {"kind": "huggingface", "labels": self._kept, **self._identity(self._normaliser)}

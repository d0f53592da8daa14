"""Tokenizers in Hugging Face's format, ``tokenizer.json``, which published recognisers have."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from speechtrain.errors import DataError, MissingPackage, one_line
from speechtrain.files import FilePath, parse_json
from speechtrain.text.vocabulary import FileTokenizer, cannot_spell, check_ids

_MOST_GROWTH = 4_000  # All steps together may turn one character into at most this many.
_GROWTH = {"ByteLevel": 4.0, "NFKC": 18.0, "NFKD": 18.0, "Precompiled": 18.0}
"""A step of this type turns one character into at most this many. ``Precompiled`` usually is NFKC's table."""
_DEFAULT_GROWTH = 1.1  # for steps of other types. It is above 1, which limits the number of steps.


class HuggingFace(FileTokenizer):
    """A tokenizer of the library ``tokenizers``, read from the file ``model``.

    The ids of the file stay the same. The ids below ``labels`` are the model's labels, and the ids above are
    the blank and special symbols. If ``labels`` is null, every id is a label. The file's padding and
    truncation are not used. Raises DataError if the file is missing or damaged, or if its steps make a text
    more than 4,000 times as long, and MissingPackage without the library. ``encode`` and ``decode`` raise
    DataError if the library fails.
    """

    saved_name = "tokenizer.json"

    def __init__(self, model: FilePath, normaliser: str = "none", labels: int | None = None) -> None:
        try:
            from tokenizers import Tokenizer as LibraryTokenizer
        except ImportError:
            raise MissingPackage(
                "tokenizer=huggingface needs the library tokenizers: pip install -e '.[interop]'"
            ) from None
        super().__init__(model, normaliser, "copy it from the published model")
        self._path = model
        self._tokenizer = self._call(_read_tokenizer, LibraryTokenizer, self._content)
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        # A model may have one label more than its tokenizer's file.
        if labels is not None and not 0 < labels <= size + 1:
            raise ValueError(f"labels is {labels}, and {model} has {size}")
        self._label_count = labels
        ids = range(size) if labels is None else range(labels)
        self.labels = [str(self._tokenizer.id_to_token(label)) for label in ids]
        unknown = getattr(self._tokenizer.model, "unk_token", None)
        unknown_id = getattr(self._tokenizer.model, "unk_id", None)
        self._unknown_id = self._tokenizer.token_to_id(unknown) if unknown else unknown_id

    def encode(self, text: str) -> list[int]:
        unknown_symbols = self.unknown(text)
        if unknown_symbols:
            raise cannot_spell(unknown_symbols)
        return list(self._encoding(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        check_ids(ids, self.blank)
        labels = [int(label) for label in ids]
        return str(self._call(self._tokenizer.decode, labels, skip_special_tokens=True)).strip()

    def spelling(self) -> list[str]:
        """Return the text that each label adds to the text before it.

        The library decodes each label after the last label, because a label at the start of a text may lose
        its space. The text of a label differs from its name: byte-level BPE begins a word with ``Ġ``, and
        WordPiece continues a word with ``##``. A part of a character becomes the replacement character.
        """
        anchor = len(self.labels) - 1
        prefix = str(self._call(self._tokenizer.decode, [anchor], skip_special_tokens=False))
        texts = []
        for label in range(len(self.labels)):
            text = str(self._call(self._tokenizer.decode, [anchor, label], skip_special_tokens=False))
            texts.append(text.removeprefix(prefix))
        return texts

    def unknown(self, text: str) -> set[str]:
        encoding = self._encoding(text)
        symbols, covered = set[str](), set[int]()
        for label, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            covered.update(range(start, end))
            if label == self._unknown_id or label >= self.blank:
                symbols.add(text[start:end])
        # A tokenizer without an unknown symbol omits symbols.
        for position, symbol in enumerate(text):
            if position not in covered and not symbol.isspace():
                symbols.add(symbol)
        return symbols

    def library(self) -> Any:
        """Return a copy of the library's tokenizer."""
        return _read_tokenizer(type(self._tokenizer), self._content)

    def _encoding(self, text: str) -> Any:
        return self._call(self._tokenizer.encode, text, add_special_tokens=False)

    def _call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call the library and convert each of its errors to a DataError.

        The library raises ``Exception``. A panic of its Rust code is a BaseException.
        """
        try:
            return function(*arguments, **options)
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            cause = one_line(str(error), 120)
            raise DataError(f"model: {self._path} is not a usable tokenizer.json ({cause})") from None

    def state(self) -> dict[str, Any]:
        return {"kind": "huggingface", "labels": self._label_count, **self._identity()}


def _read_tokenizer(tokenizer_class: Any, content: bytes) -> Any:
    """Return the library's tokenizer for the content of a file.

    Raises ValueError if the steps of the file may make a text too long.
    """
    text = content.decode()
    parts = parse_json(text)
    steps = [parts.get(part) for part in ("normalizer", "pre_tokenizer", "decoder")]
    if _growth(steps) > _MOST_GROWTH:
        raise ValueError(f"its steps make a text more than {_MOST_GROWTH} times as long")
    tokenizer = tokenizer_class.from_str(text)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _growth(step: Any) -> float:
    """Return into how many characters a step, or a list of steps, turns one character at most."""
    if isinstance(step, list):
        return math.prod(map(_growth, step))
    if not isinstance(step, dict):
        return 1.0
    nested_growth = _growth([setting for setting in step.values() if isinstance(setting, list)])
    # A Replace step puts ``content`` in place of a character. A Prepend step puts ``prepend`` before a text.
    replacement_length = len(step.get("content", "")) + len(step.get("prepend", ""))
    pattern = step.get("pattern") or {}
    if not pattern.get("String"):
        # Without a pattern, or with a regex that matches between two characters, the character stays, too.
        replacement_length += 1
    usual_growth = _GROWTH.get(str(step.get("type")), _DEFAULT_GROWTH)
    return nested_growth * max(replacement_length, usual_growth)

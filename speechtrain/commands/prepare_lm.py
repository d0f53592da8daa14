"""speechtrain prepare lm: an n-gram model of transcripts, for decoder.lm."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from speechtrain.commands._cli import add_command
from speechtrain.errors import ConfigError
from speechtrain.files import writing
from speechtrain.text.ngram import write_ngram
from speechtrain.text.normalise import normaliser

_LARGEST_ORDER = 6


def add_lm(
    commands: Any,
    add_sources: Callable[[argparse.ArgumentParser], None],
    texts_of: Callable[[argparse.Namespace], Iterable[str]],
) -> None:
    """Add the command to a parser. ``texts_of`` reads the transcripts of its sources."""
    build = add_command(
        commands,
        "lm",
        "make a language model of transcripts, for decoder.lm",
        "FOLDER_OR_MANIFEST --out lm.arpa",
    )
    add_sources(build)
    build.add_argument("--out", type=Path, required=True, metavar="FILE.arpa")
    build.add_argument("--order", type=int, default=3, metavar="N", help="words of an n-gram, 1 to 6 (3)")
    build.add_argument("--normaliser", default="lower", help="equal to tokenizer.normaliser (lower)")
    build.set_defaults(function=lambda arguments: _write_model(arguments, texts_of(arguments)))


def _write_model(arguments: argparse.Namespace, texts: Iterable[str]) -> int:
    out, order = arguments.out, arguments.order
    if not 1 <= order <= _LARGEST_ORDER:
        raise ConfigError(f"--order {order}: it must be 1 to {_LARGEST_ORDER}")
    with writing(out, "use another --out"):
        count, sizes = write_ngram(map(normaliser(arguments.normaliser), texts), out, order)
    print(f"{out}: {count} transcripts, n-grams of 1 to {len(sizes)} words: {', '.join(map(str, sizes))}")
    print(f"use it with: decoder=beam (ctc_beam for CTC) decoder.lm={out.absolute()}")
    return 0

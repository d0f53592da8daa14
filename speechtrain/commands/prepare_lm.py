"""speechtrain prepare lm: train an n-gram language model on transcripts, for ``decoder.lm``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from speechtrain.commands._cli import add_command
from speechtrain.errors import ConfigError
from speechtrain.files import writing
from speechtrain.text.ngram import write_ngram

_MAX_ORDER = 6  # words of an n-gram


def add_lm(
    commands: Any,
    add_sources: Callable[[argparse.ArgumentParser], None],
    texts_of: Callable[[argparse.Namespace], Iterable[str]],
) -> None:
    """Add the subcommand ``lm`` to ``commands``, the result of ``add_subparsers``.

    ``add_sources`` adds the arguments for sources to a parser, and ``texts_of`` returns the normalised
    transcripts of the sources in parsed arguments.
    """
    parser = add_command(
        commands,
        "lm",
        "make a language model of transcripts, for decoder.lm",
        "FOLDER_OR_MANIFEST --out lm.arpa",
    )
    add_sources(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.arpa")
    parser.add_argument("--order", type=int, default=3, metavar="N", help="words of an n-gram, 1 to 6 (3)")
    parser.add_argument("--normaliser", default="lower", help="equal to tokenizer.normaliser (lower)")
    parser.set_defaults(function=lambda arguments: _write_model(arguments, texts_of(arguments)))


def _write_model(arguments: argparse.Namespace, texts: Iterable[str]) -> int:
    """Train the model, write it to ``arguments.out`` and return the exit code."""
    out, order = arguments.out, arguments.order
    if not 1 <= order <= _MAX_ORDER:
        raise ConfigError(f"--order {order}: it must be 1 to {_MAX_ORDER}")
    with writing(out, "use another --out"):
        count, sizes = write_ngram(texts, out, order)
    print(f"{out}: {count} transcripts, n-grams of 1 to {len(sizes)} words: {', '.join(map(str, sizes))}")
    print(f"use it with: decoder=beam (ctc_beam for CTC) decoder.lm={out.absolute()}")
    return 0

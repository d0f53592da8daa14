"""The options of ``speechtrain export`` for the model card and the hub."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from speechtrain.commands._cli import Parser
from speechtrain.errors import ConfigError
from speechtrain.files import write_text, writing

if TYPE_CHECKING:
    from speechtrain.report.card import CardOptions

_WITHOUT_CARD = ("speechtrain", "fairseq")  # formats whose folder or file has no card


def add_card_options(build: Parser) -> None:
    """Add the options of the card and the hub."""
    group = build.add_argument_group("model card", "README.md of an exported run, in the form of the hub")
    group.add_argument(
        "--licence", "--license", metavar="NAME", help="the hub's name of the licence, such as cc-by-4.0"
    )
    group.add_argument(
        "--language",
        metavar="CODE",
        help="ISO 639 codes, such as en or en,mi. Default: the languages of data.train",
    )
    group.add_argument(
        "--evaluation",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="output of evaluate --json, for its error rates and intervals. It may be repeated",
    )
    group.add_argument(
        "--push",
        default="",
        metavar="NAME",
        help="upload the folder to OWNER/MODEL of the hub. A new model is private",
    )
    group.add_argument(
        "--dry-run", action="store_true", help="print the files and the card, and upload nothing"
    )


def card_options(arguments: argparse.Namespace) -> CardOptions | None:
    """Return the options of the card, or None if the export has no card.

    Raises ConfigError for options that do not fit, DataError for a file that is not an evaluation of the
    checkpoint, and MachineError if --push lacks a token.
    """
    options = (arguments.licence, arguments.language, arguments.evaluation, arguments.push, arguments.dry_run)
    if arguments.source_form != "speechtrain" or arguments.form in _WITHOUT_CARD:
        if any(options):
            names = "--licence, --language, --evaluation, --push and --dry-run"
            raise ConfigError(f"{names} need a run as SOURCE and --to huggingface, onnx or sherpa")
        return None
    from speechtrain.checkpoint.checkpointer import Checkpointer
    from speechtrain.interop.hub import check_upload
    from speechtrain.report.card import UNKNOWN_LICENCE, CardOptions, read_evaluation

    if arguments.push:
        check_upload(arguments.push, needs_token=not arguments.dry_run)
    rates = []
    for path in arguments.evaluation:
        checkpoint = Checkpointer(arguments.source).find(arguments.checkpoint)
        rates += read_evaluation(path, checkpoint)
    return CardOptions(
        form=arguments.form,
        name=arguments.push,
        licence=(arguments.licence or UNKNOWN_LICENCE).lower(),
        languages=tuple(filter(None, (arguments.language or "").split(","))),
        evaluated_rates=tuple(rates),
    )


def write_card(arguments: argparse.Namespace, options: CardOptions) -> None:
    """Write the card of the exported folder. Upload the folder, or print it for --dry-run."""
    from speechtrain.interop.hub import upload
    from speechtrain.report.card import CARD, UNKNOWN_LICENCE, card
    from speechtrain.report.run import read_run

    folder: Path = arguments.out
    checkpoint = arguments.source / "checkpoints" / arguments.checkpoint
    text = card(read_run(arguments.source), checkpoint, folder, options)
    with writing(f"--out {folder}", "name another path"):
        write_text(folder / CARD, text)
    print(f"{folder / CARD}: the model card")
    if options.licence == UNKNOWN_LICENCE:
        print("the card states no licence. --licence NAME states it")
    if not arguments.push and not arguments.dry_run:
        return
    names = []
    for path in sorted(folder.rglob("[!.]*")):
        name = path.relative_to(folder).as_posix()
        is_in_hidden_folder = name.startswith(".") or "/." in name
        if path.is_file() and not path.is_symlink() and not is_in_hidden_folder:
            names.append(name)
    print("files: " + ", ".join(names))
    if arguments.dry_run:
        print(text)
        return
    print(f"uploaded to {upload(folder, names, arguments.push)}")

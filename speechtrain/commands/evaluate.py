"""speechtrain-evaluate: score a run's checkpoint on evaluation sets."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from speechtrain.commands._cli import Parser, console, json_text
from speechtrain.errors import ConfigError, MachineError, printable
from speechtrain.files import atomic, finite, writing
from speechtrain.run_directory import is_error_rate, metric, shown

if TYPE_CHECKING:
    from speechtrain.text.vocabulary import Tokenizer
    from speechtrain.training.evaluation import Outcome

_FIX = "name a file in a writable folder"  # for --out


def parser() -> argparse.ArgumentParser:
    build = Parser(
        prog="speechtrain-evaluate",
        description="Score a run's checkpoint, with the same code and the same figures as in training. "
        "The run may be in progress, and may have been moved.",
        epilog="KEY=VALUE sets a key of the run's config, such as device.threads=1 or "
        "data.valid_batch.count=4, or precision=, device= or decoder=CHOICE. Exit codes: 0 done, 2 usage, "
        "3 data, 4 machine, 5 no run or no usable checkpoint.",
    )
    build.add_argument("run", type=Path, help="run directory")
    build.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="changes to the run's config")
    build.add_argument("--config-dir", metavar="DIR", help="a folder of your own choices for KEY=CHOICE")
    build.add_argument("--checkpoint", default="best", help="best (default), last or a folder's name")
    build.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="score this manifest or folder instead of the run's own sets; may be repeated",
    )
    build.add_argument(
        "--out", type=Path, metavar="FILE", help="write references and hypotheses, one JSON object per line"
    )
    build.add_argument(
        "--worst",
        type=int,
        default=5,
        metavar="N",
        help="show the N worst utterances (default 5; 0 for none)",
    )
    build.add_argument(
        "--json", action="store_true", help="print one JSON object; a value that is not finite is null"
    )
    return build


def run(argv: list[str]) -> int:
    """Evaluate and print; returns the exit code. Raises a SpeechtrainError."""
    arguments = parser().parse_intermixed_args(argv)
    named = _named_sets(arguments.set)
    if arguments.out:
        _check_writable(arguments.out)
    if arguments.worst < 0:
        raise ConfigError(f"--worst {arguments.worst}: it must be at least 0")
    from speechtrain.commands._loaded_run import load
    from speechtrain.commands._mistakes import lines_of, mistakes

    loaded = load(
        arguments.run,
        *arguments.overrides,
        checkpoint=arguments.checkpoint,
        config_dir=arguments.config_dir,
    )
    outcomes = loaded.evaluate(named)
    if arguments.out:
        named_rows = ((name, one) for name, outcome in outcomes.items() for one in outcome.examples)
        text = "".join(json_text({"set": name, **one.row()}) + "\n" for name, one in named_rows)
        with writing(f"--out {arguments.out}", _FIX), atomic(arguments.out) as temporary:
            temporary.write_text(text, encoding="utf-8")
    metrics = {name: outcome.metrics for name, outcome in outcomes.items()}
    wrong = {name: mistakes(o.examples, arguments.worst) for name, o in outcomes.items() if o.examples}
    for name, outcome in outcomes.items():
        _warn(name, outcome, loaded.opened.tokenizer)
    if arguments.json:
        found = {"checkpoint": str(loaded.checkpoint), "metrics": finite(metrics), "mistakes": finite(wrong)}
        print(json_text(found))
        return 0
    print(printable(f"checkpoint {loaded.checkpoint}"))
    for name, outcome in outcomes.items():
        totals = {k: f" ({e:.0f} of {n:.0f})" for k, (e, n) in outcome.totals.items() if is_error_rate(k)}
        figures = ", ".join(metric(k, v) + totals.get(k, "") for k, v in shown(outcome.metrics).items())
        print(printable(f"{name}: {figures}"))
        for line in lines_of(wrong[name]) if name in wrong else ():
            print(line)
    return 0


def _warn(name: str, outcome: Outcome, tokenizer: Tokenizer) -> None:
    """Warn of a contradiction, and of transcripts with symbols that have no label: these have no loss."""
    unknown = [tokenizer.unknown(example.reference) for example in outcome.examples]
    unspelt = [symbols for symbols in unknown if symbols]
    facts = [outcome.contradiction] if outcome.contradiction else []
    if unspelt:
        symbols = sorted(set("").union(*unspelt))
        share = f"{len(unspelt)} of {len(unknown)} transcripts cannot be spelled by the run's labels"
        facts.append(f"{share} ({' '.join(symbols[:10])}). They count as errors, and have no loss")
    for fact in facts:
        print(printable(f"speechtrain: warning: {name}: {fact}"), file=sys.stderr)


def _named_sets(pairs: list[str]) -> dict[str, str]:
    named: dict[str, str] = {}
    for pair in pairs:
        name, equals, file = pair.partition("=")
        if not (equals and name and file):
            raise ConfigError(f"--set {pair}: write it as NAME=FILE")
        if name in named:
            raise ConfigError(
                f"--set {pair}: {name!r} is given twice; join several files of one set by commas"
            )
        named[name] = file
    return named


def _check_writable(path: Path) -> None:
    """Raise MachineError, before minutes of evaluation, if ``path`` cannot be written."""
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or path.is_dir():
        raise MachineError(f"--out {path} cannot be written; {_FIX}")


main = console(run)

if __name__ == "__main__":
    main()

"""speechtrain evaluate: score a run's checkpoint on evaluation sets."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from speechtrain.commands._cli import Parser, console
from speechtrain.errors import SPELLING, ConfigError, MachineError, printable
from speechtrain.files import atomic, finite, json_text, writing
from speechtrain.run_directory import is_error_rate, metric

if TYPE_CHECKING:
    from speechtrain.inference.loaded_run import LoadedRun
    from speechtrain.training.evaluation import Outcome

_FIX = "name a file in a writable folder"  # for --out


def parser() -> Parser:
    build = Parser(
        prog="speechtrain evaluate",
        description="Score a run's checkpoint, with the same code and the same figures as in training. "
        "The run may be in progress, and may have been moved.",
        examples=[
            "speechtrain evaluate RUN",
            "speechtrain evaluate RUN --set mine=FOLDER --out texts.jsonl",
            "speechtrain evaluate run_dir=RUN decoder=beam decoder.lm=lm.arpa device.threads=1",
        ],
        exit_codes="0 done, 2 usage, 3 data, 4 machine, 5 no run or no usable checkpoint",
    )
    build.add_run()
    build.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="a key of the run's config, or precision=, device= or decoder=CHOICE",
    )
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
    arguments = parser().parse_with_run(argv)
    named = _named_sets(arguments.set)
    if arguments.out:
        _check_writable(arguments.out)
    if arguments.worst < 0:
        raise ConfigError(f"--worst {arguments.worst}: it must be at least 0")
    from speechtrain.inference.loaded_run import load
    from speechtrain.report.mistakes import lines_of, mistakes

    loaded = load(
        arguments.run,
        *arguments.overrides,
        checkpoint=arguments.checkpoint,
        config_dir=arguments.config_dir,
    )
    outcomes = loaded.evaluate(named)
    if arguments.out:
        text = _rows(outcomes)
        with writing(f"--out {arguments.out}", _FIX), atomic(arguments.out) as temporary:
            temporary.write_text(text, encoding="utf-8")
    metrics = {name: outcome.metrics for name, outcome in outcomes.items()}
    wrong = {name: mistakes(o.examples, arguments.worst) for name, o in outcomes.items() if o.examples}
    for warning in _warnings(outcomes, loaded, arguments):
        print(printable(f"speechtrain: warning: {warning}", SPELLING), file=sys.stderr)
    if arguments.json:
        found = {"checkpoint": str(loaded.checkpoint), "metrics": finite(metrics), "mistakes": finite(wrong)}
        print(json_text(found))
        return 0
    print(printable(f"checkpoint {loaded.checkpoint}"))
    for name, outcome in outcomes.items():
        totals = {k: f" ({e:.0f} of {n:.0f})" for k, (e, n) in outcome.totals.items() if is_error_rate(k)}
        figures = ", ".join(metric(k, v) + totals.get(k, "") for k, v in outcome.metrics.items())
        print(printable(f"{name}: {figures}"))
        for line in lines_of(wrong[name]) if name in wrong else ():
            print(line)
    return 0


def _rows(outcomes: Mapping[str, Outcome]) -> str:
    """Return a line of JSON for each utterance of each set."""
    text = ""
    for name, outcome in outcomes.items():
        for example in outcome.examples:
            text += json_text({"set": name, **example.row()}) + "\n"
    return text


def _warnings(
    outcomes: Mapping[str, Outcome], loaded: LoadedRun, arguments: argparse.Namespace
) -> Iterator[str]:
    """Yield the warnings of all sets, and of a search that is worse than the one of training."""
    for name, outcome in outcomes.items():
        if outcome.contradiction:
            yield f"{name}: {outcome.contradiction}"
        symbols: set[str] = set()
        count = 0
        for example in outcome.examples:
            unknown = loaded.opened.tokenizer.unknown(example.reference)
            symbols |= unknown
            count += bool(unknown)
        if count:
            share = f"{count} of {len(outcome.examples)} transcripts cannot be spelled by the run's labels"
            shown_symbols = " ".join(repr(symbol) for symbol in sorted(symbols)[:10])
            yield f"{name}: {share} ({shown_symbols}). They count as errors, and have no loss"
    if not arguments.set and any(text.startswith("decoder") for text in arguments.overrides):
        from speechtrain.checkpoint.whole import validated
        from speechtrain.report.advice import worse_searches

        rates = {f"{name}/wer": outcome.metrics.get("wer") for name, outcome in outcomes.items()}
        yield from worse_searches(validated(loaded.checkpoint), rates)


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

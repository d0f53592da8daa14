"""speechtrain evaluate: score a run's checkpoint on evaluation sets."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from speechtrain.commands._cli import Parser, console
from speechtrain.errors import FORMAT_CHARACTERS, ConfigError, MachineError, escape_controls
from speechtrain.files import atomic, json_text, with_finite_numbers, writing
from speechtrain.run_directory import is_error_rate, metric_text, stream_lines, without_streams

if TYPE_CHECKING:
    from speechtrain.inference.loaded_run import LoadedRun
    from speechtrain.training.evaluation import Outcome

_OUT_FIX = "name a file in a writable folder"


def parser() -> Parser:
    parser = Parser(
        prog="speechtrain evaluate",
        description="Score a run's checkpoint, with the same code and the same metrics as in training. "
        "The run may be in progress, and may have been moved.",
        examples=[
            "speechtrain evaluate RUN",
            "speechtrain evaluate RUN --set mine=FOLDER --out texts.jsonl",
            "speechtrain evaluate run_dir=RUN decoder=beam decoder.lm=lm.arpa device.threads=1",
            "speechtrain evaluate RUN normaliser=whisper_english",
        ],
        exit_codes="0 done, 2 usage, 3 data, 4 machine, 5 no run or no usable checkpoint",
    )
    parser.add_run()
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="a key of the run's config, or precision=, device= or decoder=CHOICE. normaliser=NAME "
        "normalises references and hypotheses before they are compared, as whisper_english does for "
        "leaderboards",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="score this manifest or folder instead of the sets of the run. It may be repeated",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write references and hypotheses, one JSON object per line"
    )
    parser.add_argument(
        "--worst",
        type=int,
        default=5,
        metavar="N",
        help="show the N worst utterances (default 5, 0 for none)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object, with null for values that are not finite",
    )
    return parser


def run(argv: list[str]) -> int:
    """Evaluate a run, print the metrics and return the exit code. Raises a SpeechtrainError."""
    arguments = parser().parse_with_run(argv)
    overrides, normaliser_name = split_overrides(arguments.overrides)
    normalise = None
    if normaliser_name is not None:
        from speechtrain.text.normalise import scoring_normaliser

        normalise = scoring_normaliser(normaliser_name)
    sets = _files_by_set(arguments.set)
    # These errors come before the evaluation, which may take minutes.
    out = arguments.out
    if out is not None:
        folder = out.absolute().parent
        if not folder.is_dir() or not os.access(folder, os.W_OK) or out.is_dir():
            raise MachineError(f"--out {out} cannot be written; {_OUT_FIX}")
    if arguments.worst < 0:
        raise ConfigError(f"--worst {arguments.worst}: it must be at least 0")
    from speechtrain.inference.loaded_run import load
    from speechtrain.report.mistakes import lines_of, mistakes

    loaded = load(
        arguments.run,
        *overrides,
        checkpoint=arguments.checkpoint,
        config_dir=arguments.config_dir,
    )
    if normalise and not loaded.opened.task.writes_text:
        raise ConfigError(f"normaliser={normaliser_name}: the model writes no text. Remove the normaliser")
    outcomes = loaded.evaluate(sets)
    for warning in _warnings(outcomes, loaded, arguments):
        print(escape_controls(f"speechtrain: warning: {warning}", FORMAT_CHARACTERS), file=sys.stderr)
    if normalise:
        outcomes = {name: outcome.with_normaliser(normalise) for name, outcome in outcomes.items()}
    if out:
        rows = ""
        for name, outcome in outcomes.items():
            for example in outcome.examples:
                rows += json_text({"set": name, **example.row()}) + "\n"
        with writing(f"--out {out}", _OUT_FIX), atomic(out) as temporary:
            temporary.write_text(rows, encoding="utf-8")
    mistakes_by_set = {}
    for name, outcome in outcomes.items():
        if outcome.examples:
            mistakes_by_set[name] = mistakes(outcome.examples, arguments.worst)
    checkpoint = str(loaded.checkpoint)
    if arguments.json:
        summary = {
            "checkpoint": checkpoint,
            "decoder": type(loaded.opened.task.decoder).__name__,
            "overrides": arguments.overrides,
            "normaliser": normaliser_name,
            "metrics": {name: outcome.metrics for name, outcome in outcomes.items()},
            "real_time_factor": {name: outcome.real_time_factor for name, outcome in outcomes.items()},
            "mistakes": mistakes_by_set,
            "warnings": {name: list(outcome.warnings.values()) for name, outcome in outcomes.items()},
        }
        print(json_text(with_finite_numbers(summary)))
        return 0
    print(escape_controls(f"checkpoint {checkpoint}"))
    if normaliser_name:
        print(f"normaliser {normaliser_name}")
    for name, outcome in outcomes.items():
        texts = []
        for metric_name, value in without_streams(outcome.metrics).items():
            text = metric_text(metric_name, value)
            if metric_name in outcome.totals and is_error_rate(metric_name):
                errors, units = outcome.totals[metric_name]
                text += f" ({errors:.0f} of {units:.0f})"
            texts.append(text)
        texts.append(f"real-time factor {outcome.real_time_factor:.3g}")
        print(escape_controls(f"{name}: {', '.join(texts)}"))
        for line in stream_lines(outcome.metrics):
            print(f"  {line}")
        if name in mistakes_by_set:
            print("\n".join(lines_of(mistakes_by_set[name])))
    return 0


def split_overrides(overrides: list[str]) -> tuple[list[str], str | None]:
    """Return the overrides of the run's config, and the value of the last ``normaliser=``, or None."""
    config_overrides = []
    name = None
    for override in overrides:
        if override.startswith("normaliser="):
            name = override.removeprefix("normaliser=")
        else:
            config_overrides.append(override)
    return config_overrides, name


def _warnings(
    outcomes: Mapping[str, Outcome], loaded: LoadedRun, arguments: argparse.Namespace
) -> Iterator[str]:
    """Yield warnings about each set, and about a decoder with more errors than the decoder of training."""
    fusion = getattr(loaded.opened.task.decoder, "fusion", None)  # Only a beam search has it.
    for name, outcome in outcomes.items():
        references = [example.reference for example in outcome.examples]
        missing_words = fusion.missing_words(references) if fusion else ""
        if missing_words:
            yield f"{name}: {missing_words}"
        for warning in outcome.warnings.values():
            yield f"{name}: {warning}"
        all_unknown = set[str]()  # symbols that the tokenizer has no label for
        unspellable = 0  # transcripts with such a symbol
        for example in outcome.examples:
            unknown_symbols = loaded.opened.tokenizer.unknown(example.reference)
            all_unknown |= unknown_symbols
            if unknown_symbols:
                unspellable += 1
        if unspellable:
            counts = f"{unspellable} of {len(outcome.examples)} transcripts"
            shown_symbols = " ".join(repr(symbol) for symbol in sorted(all_unknown)[:10])
            problem = f"{counts} cannot be spelled by the run's labels ({shown_symbols})"
            yield f"{name}: {problem}. They count as errors, and have no loss"
    if not arguments.set and any(text.startswith("decoder") for text in arguments.overrides):
        from speechtrain.checkpoint.checkpointer import validation_metrics
        from speechtrain.report.advice import worse_searches

        rates = {f"{name}/wer": outcome.metrics.get("wer") for name, outcome in outcomes.items()}
        yield from worse_searches(validation_metrics(loaded.checkpoint), rates)


def _files_by_set(pairs: list[str]) -> dict[str, str]:
    """Return the file of each set by the set's name. ``pairs`` are the values NAME=FILE of --set."""
    files: dict[str, str] = {}
    for pair in pairs:
        name, equals, file = pair.partition("=")
        if not (equals and name and file):
            raise ConfigError(f"--set {pair}: write it as NAME=FILE")
        if name in files:
            raise ConfigError(f"--set {pair}: {name!r} is given twice. Join the files of a set by commas")
        files[name] = file
    return files


main = console(run)

if __name__ == "__main__":
    main()

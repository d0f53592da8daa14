"""speechtrain-evaluate: score a run's checkpoint on evaluation sets."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from speechtrain.commands._cli import Parser, console, json_text
from speechtrain.errors import ConfigError, MachineError, RunError, printable
from speechtrain.files import atomic, finite, writing
from speechtrain.run_directory import is_error_rate, metric, shown

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from speechtrain.data.module import SpeechData

_FIX = "name a file in a writable folder"  # for --out
_OTHER_SIDES = (
    "speechtrain: warning: held_out is not what the run held out, so it may have trained on some of it: "
    "data.train has changed, or the run is of another release; --set NAME=FILE names a set"
)


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
        "--json", action="store_true", help="print one JSON object; a value that is not finite is null"
    )
    return build


def run(argv: list[str]) -> int:
    """Evaluate and print; returns the exit code. Raises a SpeechtrainError."""
    arguments = parser().parse_intermixed_args(argv)
    named = _named_sets(arguments.set)
    if arguments.out:
        _check_writable(arguments.out)
    from speechtrain.commands._load_run import open_run
    from speechtrain.config.build import build_data
    from speechtrain.config.check import part_class
    from speechtrain.data.module import SpeechData
    from speechtrain.distributed.group import SingleProcess
    from speechtrain.training.evaluation import evaluate

    opened = open_run(arguments.run, arguments.checkpoint, arguments.overrides, arguments.config_dir)
    part_class("data", opened.config.data)
    _choose_sets(opened.config, named, arguments.run)
    data = build_data(opened.config, opened.tokenizer, opened.task)
    try:
        if isinstance(data, SpeechData) and data.hold_out:
            _warn_of_other_sides(opened.checkpoint, data)
        task, device, policy = opened.task, opened.device, opened.policy
        outcomes = evaluate(task, data.valid(), device, policy=policy, group=SingleProcess(), examples=None)
    finally:
        data.close()
    if arguments.out:
        named_rows = ((name, one) for name, outcome in outcomes.items() for one in outcome.examples)
        text = "".join(json_text({"set": name, **one.row()}) + "\n" for name, one in named_rows)
        with writing(f"--out {arguments.out}", _FIX), atomic(arguments.out) as temporary:
            temporary.write_text(text, encoding="utf-8")
    metrics = {name: outcome.metrics for name, outcome in outcomes.items()}
    if arguments.json:
        found = {"checkpoint": str(opened.checkpoint), "metrics": finite(metrics)}
        print(json_text(found))
        return 0
    print(printable(f"checkpoint {opened.checkpoint}"))
    for name, outcome in outcomes.items():
        totals = {k: f" ({e:.0f} of {n:.0f})" for k, (e, n) in outcome.totals.items() if is_error_rate(k)}
        figures = ", ".join(metric(k, v) + totals.get(k, "") for k, v in shown(outcome.metrics).items())
        print(printable(f"{name}: {figures}"))
    return 0


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


def _choose_sets(config: DictConfig, named: dict[str, str], run_dir: Path) -> None:
    """Replace the run's evaluation sets by ``named``, if any; its training data is not opened."""
    if named:
        if "valid" not in config.data:
            raise ConfigError(f"--set: {config.data._target_} takes no evaluation set; remove --set")
        config.data.valid = named
    if "valid" in config.data and not (config.data.valid or config.data.get("hold_out")):
        raise ConfigError(f"{run_dir} has no evaluation set; give one with --set NAME=FILE")
    if config.data._target_ == "speechtrain.data.module.SpeechData" and config.data.valid:
        config.data.train = ""  # opened at first use, and never used here


def _warn_of_other_sides(checkpoint: Path, data: SpeechData) -> None:
    """Warn where the set ``held_out`` is not the one that the run held out."""
    from speechtrain.checkpoint.whole import read_state

    with contextlib.suppress(RunError):  # the weights are whole, and a damaged state tells nothing
        trained = read_state(checkpoint).get("data")
        if isinstance(trained, dict) and trained.get("held_out") != data.sides:
            print(_OTHER_SIDES, file=sys.stderr)


def _check_writable(path: Path) -> None:
    """Raise MachineError, before minutes of evaluation, if ``path`` cannot be written."""
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or path.is_dir():
        raise MachineError(f"--out {path} cannot be written; {_FIX}")


main = console(run)

if __name__ == "__main__":
    main()

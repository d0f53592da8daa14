"""speechtrain-evaluate: score a run's checkpoint on evaluation sets."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from speechtrain.commands.common import guarded


def parser() -> argparse.ArgumentParser:
    """The command line."""
    build = argparse.ArgumentParser(
        prog="speechtrain-evaluate",
        description="Score a run's checkpoint: the same code, and so the same figures, as in training.",
    )
    build.add_argument("run", type=Path, help="run directory")
    build.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="changes to the run's config")
    build.add_argument("--checkpoint", default="best", help="best, last or a folder's name (default: best)")
    build.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="score this manifest instead of the run's own sets; may be repeated",
    )
    build.add_argument("--out", type=Path, help="write references and hypotheses here, one JSON object a line")
    build.add_argument("--json", action="store_true", help="print one JSON object")
    return build


def main() -> None:
    """Console entry point."""
    sys.exit(guarded(lambda: run(parser().parse_args())))


def run(arguments: argparse.Namespace) -> int:
    """Evaluate and print; returns the exit code."""
    from speechtrain.commands.opening import open_run
    from speechtrain.config import build
    from speechtrain.distributed import Solo
    from speechtrain.errors import ConfigError
    from speechtrain.evaluation import evaluate

    opened = open_run(arguments.run, arguments.checkpoint, arguments.overrides)
    named = {}
    for pair in arguments.set:
        name, equals, file = pair.partition("=")
        if not equals:
            raise ConfigError(f"--set {pair}: write it as NAME=FILE")
        named[name] = file
    if named:
        opened.config.data.valid = named
    data = build(opened.config, "data", tokenizer=opened.tokenizer, footprint=opened.task.footprint())
    try:
        outcomes = evaluate(opened.task, data.valid(), opened.device, opened.precision, Solo(), examples=None)
    finally:
        data.close()
    if arguments.out:
        with arguments.out.open("w") as file:
            for name, outcome in outcomes.items():
                for example in outcome.examples:
                    file.write(json.dumps({"set": name, **vars(example)}, ensure_ascii=False) + "\n")
    metrics = {name: outcome.metrics for name, outcome in outcomes.items()}
    if arguments.json:
        print(json.dumps({"checkpoint": str(opened.checkpoint), "metrics": metrics}))
        return 0
    print(f"checkpoint {opened.checkpoint}")
    for name, values in metrics.items():
        print(f"{name}: " + ", ".join(f"{key} {value:.6g}" for key, value in values.items()))
    return 0


if __name__ == "__main__":
    main()

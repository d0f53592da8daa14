"""speechtrain-report: one HTML page of a run, or of several for comparison. Imports no torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from speechtrain.commands._cli import entry_point
from speechtrain.errors import RunError


def run(argv: list[str]) -> int:
    """Write the page and print its path. Raises RunError; returns the exit code."""
    arguments = _parser().parse_args(argv)
    from speechtrain.report.page import page
    from speechtrain.report.run import read_run

    runs = [read_run(folder) for folder in arguments.runs]
    name = "report.html" if len(runs) == 1 else "comparison.html"
    path = Path(arguments.out) if arguments.out else runs[0].folder / name
    try:
        path.write_text(page(runs), encoding="utf-8", errors="replace")
    except OSError as error:
        raise RunError(f"{path}: {error.strerror or error}; name another file with --out FILE") from error
    print(path)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="speechtrain-report",
        description="Write one self-contained HTML page: outcome, curves, transcripts with their errors "
        "marked, skipped recordings, config. The run may be in progress, and may have failed.",
        epilog="exit codes: 0 done, 2 usage, 5 no run in the directory, or the page cannot be written",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory; several runs share the charts")
    parser.add_argument(
        "--out", metavar="FILE", help="default: RUN/report.html; for several comparison.html in the first"
    )
    return parser


main = entry_point(run)

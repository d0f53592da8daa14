"""speechtrain report: one HTML page of a run, or of several for comparison. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from speechtrain.commands._cli import Parser, console
from speechtrain.errors import RunError, printable
from speechtrain.files import write_text


def run(argv: Sequence[str]) -> int:
    """Write the page and print its path. Raises RunError; returns the exit code."""
    arguments = _parser().parse_with_run(argv)
    from speechtrain.report.page import page
    from speechtrain.report.run import hold_secrets, read_run, runs_in

    runs = [read_run(folder) for given in arguments.runs for folder in runs_in(given)]
    name = "report.html" if len(runs) == 1 else "comparison.html"
    first = Path(arguments.runs[0]) if len(runs) > 1 else runs[0].folder
    path = Path(arguments.out) if arguments.out else first / name
    try:
        if arguments.out:  # the user's own choice, such as /dev/stdout or a link
            path.write_text(page(runs), encoding="utf-8", errors="backslashreplace")
        else:
            write_text(path, page(runs), private=hold_secrets(runs))
    except OSError as error:
        raise RunError(f"{path}: {error.strerror or error}; name another file with --out FILE") from error
    print(printable(str(path)))
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="speechtrain report",
        description="Write one self-contained HTML page: outcome, curves, transcripts with their errors "
        "marked, skipped recordings, config. The run may be in progress, and may have failed.",
        examples=["speechtrain report RUN", "speechtrain report runs --out comparison.html"],
        exit_codes="0 done, 2 usage, 5 no run in the directory, or the page cannot be written",
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="run directory (also run_dir=RUN), or a folder of them"
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="default: report.html in RUN; for several runs comparison.html in the first RUN",
    )
    return parser


main = console(run)

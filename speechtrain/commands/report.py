"""speechtrain report: one HTML page of a run, or of several for comparison. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from speechtrain.commands._cli import Parser, console
from speechtrain.errors import ConfigError, RunError, escape_controls
from speechtrain.files import write_text


def run(argv: Sequence[str]) -> int:
    """Write the page, print its path and return the exit code. Raises RunError if it cannot be written."""
    arguments = parser().parse_with_run(argv)
    from speechtrain.report.page import page
    from speechtrain.report.run import hold_secrets, read_run, runs_in

    runs = []
    for path in arguments.runs:
        runs += [read_run(run_dir) for run_dir in runs_in(path)]
    if arguments.out:
        out = Path(arguments.out)
        if out.suffix not in ("", ".html", ".htm"):
            raise ConfigError(f"--out {out}: the report is an HTML page. Name it {out.stem}.html")
    elif len(runs) == 1:
        out = runs[0].folder / "report.html"
    else:
        out = Path(arguments.runs[0]) / "comparison.html"
    try:
        if arguments.out:  # ``write_text`` would replace a device or a link, such as /dev/stdout.
            out.write_text(page(runs), encoding="utf-8", errors="backslashreplace")
        else:
            write_text(out, page(runs), private=hold_secrets(runs))
    except OSError as error:
        raise RunError(f"{out}: {error.strerror or error}. Name another file with --out FILE") from error
    print(escape_controls(str(out)))
    return 0


def parser() -> Parser:
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
        help="default: report.html in RUN, or for several runs comparison.html in the first RUN",
    )
    return parser


main = console(run)
